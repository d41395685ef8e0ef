//! SHA-256 digests as OCI writes them.

use std::fmt;
use std::io::{self, Read, Write};
use std::str::FromStr;

use serde::{Deserialize, Serialize};
use sha2::{Digest as _, Sha256};

/// `sha256:` and 64 lower-case hexadecimal digits.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct Digest {
    hex: String,
}

/// A text that is no digest.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{text:?} is not a digest; write sha256: and 64 lower-case hexadecimal digits")]
pub struct DigestError {
    /// The text.
    pub text: String,
}

impl Digest {
    /// The digest of bytes in memory.
    #[must_use]
    pub fn of(bytes: &[u8]) -> Self {
        Self::from_hasher(Sha256::new_with_prefix(bytes))
    }

    /// The 64 hexadecimal digits, good as a file name.
    #[must_use]
    pub fn hex(&self) -> &str {
        &self.hex
    }

    /// From 64 hexadecimal digits alone.
    pub fn from_hex(hex: &str) -> Result<Self, DigestError> {
        format!("sha256:{hex}").parse()
    }

    /// The 32 bytes.
    #[must_use]
    pub fn bytes(&self) -> [u8; 32] {
        let value = |digit: u8| if digit.is_ascii_digit() { digit - b'0' } else { digit - b'a' + 10 };
        let mut bytes = [0; 32];
        for (byte, [high, low]) in bytes.iter_mut().zip(self.hex.as_bytes().as_chunks::<2>().0) {
            *byte = value(*high) << 4 | value(*low);
        }
        bytes
    }

    pub(super) fn from_hasher(hasher: Sha256) -> Self {
        let mut hex = String::with_capacity(64);
        for byte in hasher.finalize() {
            for digit in [byte >> 4, byte & 15] {
                hex.push(char::from_digit(digit.into(), 16).unwrap_or('0'));
            }
        }
        Self { hex }
    }
}

impl FromStr for Digest {
    type Err = DigestError;

    fn from_str(text: &str) -> Result<Self, DigestError> {
        let is_digit = |byte: u8| byte.is_ascii_digit() || (b'a'..=b'f').contains(&byte);
        match text.strip_prefix("sha256:") {
            Some(hex) if hex.len() == 64 && hex.bytes().all(is_digit) => Ok(Self { hex: hex.into() }),
            _ => Err(DigestError { text: text.chars().take(100).collect() }),
        }
    }
}

impl TryFrom<String> for Digest {
    type Error = DigestError;

    fn try_from(text: String) -> Result<Self, DigestError> {
        text.parse()
    }
}

impl From<Digest> for String {
    fn from(digest: Digest) -> Self {
        digest.to_string()
    }
}

impl fmt::Display for Digest {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "sha256:{}", self.hex)
    }
}

impl fmt::Debug for Digest {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, formatter)
    }
}

/// Hashes and counts what is read or written through it.
pub(crate) struct Hashing<T> {
    inner: T,
    hasher: Sha256,
    count: u64,
}

impl<T> Hashing<T> {
    pub(crate) fn new(inner: T) -> Self {
        Self { inner, hasher: Sha256::new(), count: 0 }
    }

    pub(super) fn count(&self) -> u64 {
        self.count
    }

    pub(crate) fn into_parts(self) -> (T, Digest, u64) {
        (self.inner, Digest::from_hasher(self.hasher), self.count)
    }
}

impl<R: Read> Read for Hashing<R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let read = self.inner.read(buffer)?;
        self.hasher.update(&buffer[..read]);
        self.count += read as u64;
        Ok(read)
    }
}

impl<W: Write> Write for Hashing<W> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let written = self.inner.write(bytes)?;
        self.hasher.update(&bytes[..written]);
        self.count += written as u64;
        Ok(written)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.inner.flush()
    }
}
