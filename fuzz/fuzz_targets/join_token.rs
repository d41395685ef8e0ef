//! Join tokens: any text, and any content under a right checksum. What is read as a token is
//! written as the same text.
#![no_main]

use base64::Engine as _;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use godwit_transfer::JoinToken;
use godwit_transfer::token::TOKEN_PREFIX;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    if let Ok(text) = std::str::from_utf8(bytes) {
        let _ = JoinToken::decode(text);
    }
    let sum = crc32c::crc32c(bytes).to_be_bytes();
    let text = format!("{TOKEN_PREFIX}{}", URL_SAFE_NO_PAD.encode([bytes, &sum].concat()));
    if let Ok(token) = JoinToken::decode(&text) {
        assert_eq!(token.encode().expect("a token that was read"), text);
    }
});
