//! Join tokens: what an operator carries from a node of the cluster to a new one.
//!
//! ```text
//!   gwt1.<base64url of:>
//!   +------------------+------------+------+-----------+------+-----------+----------+
//!   | CA's SHA-256, 32 | secret, 32 | u8 n | node, n   | u8 m | address, m| CRC32C, 4|
//!   +------------------+------------+------+-----------+------+-----------+----------+
//! ```
//!
//! The fingerprint tells the new node which server to believe, the secret tells the cluster that
//! the new node was invited. The checksum only catches a token that was not copied whole. When a
//! token expires, and that it is used once, is kept by the daemon that made it: under the SHA-256
//! of the secret, so that its database gives no token away.

use std::fmt;
use std::io;
use std::str::FromStr;

use base64::Engine as _;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use sha2::{Digest, Sha256};

use crate::certificate::Fingerprint;
use crate::cryptography::fill_random;
use crate::node::NodeName;

/// What every token starts with; the digit is the format's version.
pub const TOKEN_PREFIX: &str = "gwt1.";

/// Longest address in a token, in bytes: what its one-byte length can say. A real host name with its
/// port is shorter.
pub const MAX_ADDRESS: usize = 255;

/// Longest encoded token. The longest possible one has 388 bytes before base64 and 523
/// characters after it; anything longer is not decoded at all.
pub const MAX_TOKEN: usize = 600;

/// Why a text is not a join token.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum TokenError {
    /// The text does not start as a token does.
    #[error(
        "this is not a join token: it does not start with `{TOKEN_PREFIX}`; make one with `godwit cluster token`"
    )]
    Prefix,
    /// The text is too long to be a token.
    #[error("this is not a join token: it has {length} characters, a token has at most {MAX_TOKEN}")]
    TooLong {
        /// Its length in bytes.
        length: usize,
    },
    /// Characters are missing, added or changed.
    #[error("the join token is damaged; copy the whole of it, or make another with `godwit cluster token`")]
    Damaged,
    /// The address in the token, or to be put in it, is not `host:port`.
    #[error("`{address}` in the join token is not an address; it must be host:port")]
    Address {
        /// The refused address, with its control characters escaped.
        address: String,
    },
}

/// Whether two byte strings are equal, in a time that does not tell where they differ.
pub fn equal_in_constant_time(a: &[u8], b: &[u8]) -> bool {
    if a.len() != b.len() {
        return false;
    }
    let mut difference = 0_u8;
    for (x, y) in a.iter().zip(b) {
        difference |= std::hint::black_box(x ^ y);
    }
    std::hint::black_box(difference) == 0
}

/// A token's secret. It is compared in constant time, and not shown by `Debug`.
#[derive(Clone)]
pub struct Secret([u8; 32]);

impl Secret {
    /// A new secret from the operating system's generator.
    pub fn random() -> io::Result<Self> {
        let mut bytes = [0; 32];
        fill_random(&mut bytes)?;
        Ok(Self(bytes))
    }

    /// The secret itself, to be sent to the cluster over TLS.
    pub fn expose(&self) -> &[u8; 32] {
        &self.0
    }

    /// Under which a daemon keeps it.
    pub fn sha256(&self) -> [u8; 32] {
        Sha256::digest(self.0).into()
    }

    /// Whether `digest` is this secret's, in constant time.
    pub fn matches_sha256(&self, digest: &[u8]) -> bool {
        equal_in_constant_time(&self.sha256(), digest)
    }
}

impl From<[u8; 32]> for Secret {
    fn from(bytes: [u8; 32]) -> Self {
        Self(bytes)
    }
}

impl PartialEq for Secret {
    fn eq(&self, other: &Self) -> bool {
        equal_in_constant_time(&self.0, &other.0)
    }
}

impl Eq for Secret {}

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Secret(..)")
    }
}

/// An invitation into a cluster.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct JoinToken {
    /// Where the inviting daemon listens for new nodes, `host:port`.
    pub address: String,
    /// SHA-256 of the cluster's CA certificate (DER).
    pub ca_sha256: Fingerprint,
    /// The name the new node will have.
    pub node: NodeName,
    /// Proves the invitation; used once.
    pub secret: Secret,
}

impl JoinToken {
    /// A token with a new random secret.
    pub fn new(address: &str, ca_sha256: Fingerprint, node: NodeName) -> Result<Self, NewTokenError> {
        check_address(address)?;
        Ok(Self { address: address.to_owned(), ca_sha256, node, secret: Secret::random()? })
    }

    /// The token as text. This is the one place that gives the secret away: show it to the operator
    /// who asked for it, never log it.
    pub fn encode(&self) -> Result<String, TokenError> {
        check_address(&self.address)?;
        let mut bytes = Vec::with_capacity(128);
        bytes.extend_from_slice(self.ca_sha256.as_bytes());
        bytes.extend_from_slice(self.secret.expose());
        for text in [self.node.as_str(), &self.address] {
            let length = u8::try_from(text.len()).map_err(|_| TokenError::Damaged)?;
            bytes.push(length);
            bytes.extend_from_slice(text.as_bytes());
        }
        let checksum = crc32c::crc32c(&bytes);
        bytes.extend_from_slice(&checksum.to_be_bytes());
        Ok(format!("{TOKEN_PREFIX}{}", URL_SAFE_NO_PAD.encode(bytes)))
    }

    /// Reads a token; white space around it is ignored.
    pub fn decode(text: &str) -> Result<Self, TokenError> {
        let text = text.trim();
        let encoded = text.strip_prefix(TOKEN_PREFIX).ok_or(TokenError::Prefix)?;
        if text.len() > MAX_TOKEN {
            return Err(TokenError::TooLong { length: text.len() });
        }
        let bytes = URL_SAFE_NO_PAD.decode(encoded).map_err(|_| TokenError::Damaged)?;
        let (body, checksum) = bytes.split_last_chunk::<4>().ok_or(TokenError::Damaged)?;
        if crc32c::crc32c(body) != u32::from_be_bytes(*checksum) {
            return Err(TokenError::Damaged);
        }
        let (ca, rest) = body.split_first_chunk::<32>().ok_or(TokenError::Damaged)?;
        let (secret, rest) = rest.split_first_chunk::<32>().ok_or(TokenError::Damaged)?;
        let (node, rest) = counted(rest)?;
        let (address, rest) = counted(rest)?;
        if !rest.is_empty() {
            return Err(TokenError::Damaged);
        }
        check_address(address)?;
        Ok(Self {
            address: address.to_owned(),
            ca_sha256: Fingerprint::from(*ca),
            node: NodeName::new(node).map_err(|_| TokenError::Damaged)?,
            secret: Secret(*secret),
        })
    }
}

impl FromStr for JoinToken {
    type Err = TokenError;
    fn from_str(text: &str) -> Result<Self, TokenError> {
        Self::decode(text)
    }
}

/// Why no token could be made.
#[derive(Debug, thiserror::Error)]
pub enum NewTokenError {
    /// The parts do not make a token.
    #[error(transparent)]
    Token(#[from] TokenError),
    /// No secret could be made.
    #[error("no secret could be made for the join token")]
    Random(#[from] io::Error),
}

/// A text after its one-byte length, and what follows it.
fn counted(bytes: &[u8]) -> Result<(&str, &[u8]), TokenError> {
    let (&length, rest) = bytes.split_first().ok_or(TokenError::Damaged)?;
    let (text, rest) = rest.split_at_checked(usize::from(length)).ok_or(TokenError::Damaged)?;
    Ok((std::str::from_utf8(text).map_err(|_| TokenError::Damaged)?, rest))
}

fn check_address(address: &str) -> Result<(), TokenError> {
    let whole = address.len() <= MAX_ADDRESS
        && address.bytes().all(|byte| byte.is_ascii_graphic())
        && address
            .rsplit_once(':')
            .is_some_and(|(host, port)| !host.is_empty() && port.parse::<u16>().is_ok_and(|port| port > 0));
    if whole {
        Ok(())
    } else {
        Err(TokenError::Address {
            address: address.chars().take(64).collect::<String>().escape_debug().to_string(),
        })
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn token(address: &str) -> JoinToken {
        JoinToken::new(address, Fingerprint::from([7; 32]), NodeName::new("b").unwrap()).unwrap()
    }

    #[test]
    fn a_token_survives_its_encoding() {
        let longest = format!("{}:1", "h".repeat(MAX_ADDRESS - 2));
        for address in ["10.99.0.11:7118", "[fd00::1]:7118", "node.example:1", &longest] {
            let mut token = token(address);
            token.node = NodeName::new(&"n".repeat(63)).unwrap();
            let text = token.encode().unwrap();
            assert!(text.len() <= MAX_TOKEN);
            assert_eq!(JoinToken::decode(&format!(" {text}\n")).unwrap(), token);
        }
    }

    #[test]
    fn a_bad_address_makes_no_token() {
        for address in ["", "host", "host:", ":1", "host:0", "host:70000", "a b:1", "a\n:1"] {
            let made = JoinToken::new(address, Fingerprint::from([7; 32]), NodeName::new("b").unwrap());
            assert!(made.is_err(), "{address:?} passed");
        }
    }

    #[test]
    fn secrets_differ_and_are_not_shown() {
        let (one, two) = (token("h:1"), token("h:1"));
        assert_ne!(one.secret, two.secret);
        assert_ne!(one.secret.expose(), &[0; 32]);
        let shown = format!("{one:?} {:?}", one.secret);
        assert!(shown.contains("Secret(..)"));
        let bytes = one.secret.expose();
        assert!(!shown.contains(&format!("{}, {}, {}", bytes[0], bytes[1], bytes[2])), "{shown}");
    }

    #[test]
    fn a_secret_matches_only_its_own_digest() {
        let secret = Secret::from([3; 32]);
        assert!(secret.matches_sha256(&secret.sha256()));
        assert!(!secret.matches_sha256(&Secret::from([4; 32]).sha256()));
        assert!(!secret.matches_sha256(&[]));
    }

    #[test]
    fn every_single_changed_character_is_noticed() {
        let text = token("10.99.0.11:7118").encode().unwrap();
        for at in 0..text.len() {
            let mut changed = text.clone().into_bytes();
            changed[at] = if changed[at] == b'A' { b'B' } else { b'A' };
            let changed = String::from_utf8(changed).unwrap();
            assert!(JoinToken::decode(&changed).is_err(), "{changed}");
        }
        for length in 0..text.len() {
            assert!(JoinToken::decode(&text[..length]).is_err());
        }
        assert!(JoinToken::decode(&"gwt1.A".repeat(1000)).is_err());
    }

    proptest! {
        #[test]
        fn any_text_is_a_token_or_an_error(text in "\\PC{0,700}") {
            let _ = JoinToken::decode(&text);
            let _ = JoinToken::decode(&format!("{TOKEN_PREFIX}{text}"));
        }

        #[test]
        fn any_bytes_with_a_right_checksum_are_a_token_or_an_error(bytes in prop::collection::vec(any::<u8>(), 0..430)) {
            let mut bytes = bytes;
            bytes.extend_from_slice(&crc32c::crc32c(&bytes).to_be_bytes());
            let text = format!("{TOKEN_PREFIX}{}", URL_SAFE_NO_PAD.encode(bytes));
            if let Ok(token) = JoinToken::decode(&text) {
                prop_assert_eq!(token.encode().unwrap(), text);
            }
        }
    }
}
