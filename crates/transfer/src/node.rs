//! The name of a node, and the DNS name that stands for it in its certificate.

use std::fmt;
use std::str::FromStr;

/// What follows a node's name in its certificate: `<node>.node.godwit`. The names are never looked
/// up anywhere; a suffix of our own keeps certificates of other systems from passing for a node's.
pub const NODE_DOMAIN: &str = ".node.godwit";

/// Longest node name, in bytes: a DNS label (RFC 1035, section 2.3.4).
pub const MAX_NODE_NAME: usize = 63;

/// Why a text is not a node's name.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum NodeNameError {
    /// The text is empty.
    #[error("a node's name is empty; give it 1 to {MAX_NODE_NAME} letters, digits and hyphens")]
    Empty,
    /// The text is longer than a DNS label.
    #[error("a node's name is {length} bytes long; use at most {MAX_NODE_NAME}")]
    TooLong {
        /// Its length in bytes.
        length: usize,
    },
    /// The text has a character that a name cannot have.
    #[error(
        "`{name}` cannot be a node's name; use lower-case letters, digits and hyphens, \
         with no hyphen at either end"
    )]
    Character {
        /// The refused text, with its control characters escaped.
        name: String,
    },
}

/// A node's name: 1 to 63 lower-case letters, digits and inner hyphens.
#[derive(Clone, PartialEq, Eq, Hash, PartialOrd, Ord, serde::Serialize, serde::Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct NodeName(String);

impl NodeName {
    /// Checks `name` and keeps it.
    pub fn new(name: &str) -> Result<Self, NodeNameError> {
        if name.is_empty() {
            return Err(NodeNameError::Empty);
        }
        if name.len() > MAX_NODE_NAME {
            return Err(NodeNameError::TooLong { length: name.len() });
        }
        let allowed = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'-';
        if !name.bytes().all(allowed) || name.starts_with('-') || name.ends_with('-') {
            return Err(NodeNameError::Character { name: name.escape_debug().to_string() });
        }
        Ok(Self(name.to_owned()))
    }

    /// The name.
    pub fn as_str(&self) -> &str {
        &self.0
    }

    /// The DNS name in this node's certificate.
    pub fn dns_name(&self) -> String {
        format!("{}{NODE_DOMAIN}", self.0)
    }

    /// The node that a certificate's DNS name stands for, if it stands for one.
    pub fn from_dns_name(name: &str) -> Option<Self> {
        Self::new(name.strip_suffix(NODE_DOMAIN)?).ok()
    }
}

impl fmt::Display for NodeName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl fmt::Debug for NodeName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}", self.0)
    }
}

impl FromStr for NodeName {
    type Err = NodeNameError;
    fn from_str(name: &str) -> Result<Self, NodeNameError> {
        Self::new(name)
    }
}

impl TryFrom<String> for NodeName {
    type Error = NodeNameError;
    fn try_from(name: String) -> Result<Self, NodeNameError> {
        Self::new(&name)
    }
}

impl From<NodeName> for String {
    fn from(name: NodeName) -> Self {
        name.0
    }
}

impl AsRef<str> for NodeName {
    fn as_ref(&self) -> &str {
        &self.0
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn a_name_is_a_dns_label_in_lower_case() {
        for good in ["a", "node-1", "0", "x".repeat(63).as_str()] {
            assert_eq!(NodeName::new(good).unwrap().as_str(), good);
        }
        for bad in ["", "A", "a.b", "-a", "a-", "a b", "ä", "a\n", "*", "x".repeat(64).as_str()] {
            assert!(NodeName::new(bad).is_err(), "{bad:?} passed");
        }
    }

    #[test]
    fn only_our_own_domain_stands_for_a_node() {
        let node = NodeName::new("a").unwrap();
        assert_eq!(NodeName::from_dns_name(&node.dns_name()), Some(node));
        for other in ["a", "a.godwit", "a.b.node.godwit", ".node.godwit", "*.node.godwit"] {
            assert_eq!(NodeName::from_dns_name(other), None, "{other}");
        }
    }
}
