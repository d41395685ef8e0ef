//! The cryptography behind every connection: ring's ciphers, and random bytes.

use std::io;
use std::sync::{Arc, LazyLock};

use rustls::crypto::CryptoProvider;

/// ring, with the cipher that this processor is fast at in front. Edge boards without AES
/// instructions are several times faster with ChaCha20.
static PROVIDER: LazyLock<Arc<CryptoProvider>> = LazyLock::new(|| {
    use rustls::crypto::ring::cipher_suite::{
        TLS13_AES_128_GCM_SHA256, TLS13_AES_256_GCM_SHA384, TLS13_CHACHA20_POLY1305_SHA256,
    };
    let cipher_suites = if has_aes_instructions() {
        vec![TLS13_AES_128_GCM_SHA256, TLS13_AES_256_GCM_SHA384, TLS13_CHACHA20_POLY1305_SHA256]
    } else {
        vec![TLS13_CHACHA20_POLY1305_SHA256, TLS13_AES_128_GCM_SHA256, TLS13_AES_256_GCM_SHA384]
    };
    Arc::new(CryptoProvider { cipher_suites, ..rustls::crypto::ring::default_provider() })
});

#[cfg(target_arch = "x86_64")]
fn has_aes_instructions() -> bool {
    std::arch::is_x86_feature_detected!("aes") && std::arch::is_x86_feature_detected!("pclmulqdq")
}

#[cfg(target_arch = "aarch64")]
fn has_aes_instructions() -> bool {
    std::arch::is_aarch64_feature_detected!("aes") && std::arch::is_aarch64_feature_detected!("pmull")
}

#[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
fn has_aes_instructions() -> bool {
    false
}

/// The cryptography behind every connection.
pub(crate) fn provider() -> &'static Arc<CryptoProvider> {
    &PROVIDER
}

/// Fills `bytes` from the operating system's generator.
pub(crate) fn fill_random(bytes: &mut [u8]) -> io::Result<()> {
    provider()
        .secure_random
        .fill(bytes)
        .map_err(|_| io::Error::other("the operating system gave no random bytes"))
}
