//! The names of services and of volumes, which become file names on every node; a service's also a cgroup and the label of an
//! interface. And those of nodes, which the cluster's store has in its keys.
//!
//! A name comes from a user, another node or a file. There it is parsed, once: functions that make a path of a name or
//! look something up by it take a [`ServiceName`] or a [`VolumeName`], so that no other text reaches them.

use std::borrow::Borrow;
use std::fmt;
use std::ops::Deref;
use std::path::Path;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

/// Longest name, in bytes, as of a DNS label (RFC 1035, section 2.3.4). Linux has room for 64 in a host name and 255 in an
/// interface's label, nft for 128 in a comment.
pub const MAX_NAME: usize = 63;

/// Whether a text can be a file name, the label of an interface and a host name at once: 1 to [`MAX_NAME`] ASCII
/// letters, digits, `-`, `_` and `.`, of which the first is a letter or digit.
#[must_use]
pub fn is_name(text: &str) -> bool {
    let allowed = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'_' | b'.' | b'-');
    text.len() <= MAX_NAME
        && text.bytes().all(allowed)
        && text.bytes().next().is_some_and(|first| first.is_ascii_alphanumeric())
}

/// Most further names of a service.
pub const MAX_ALIASES: usize = 32;

/// Whether a text can be a further name of a service, by which others look it up: labels as in a host name (RFC 1123, section
/// 2.1), in lower case, or with `_`, 253 bytes at most.
#[must_use]
pub fn is_alias(text: &str) -> bool {
    let allowed =
        |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || matches!(byte, b'-' | b'_');
    text.len() <= 253
        && text.split('.').all(|label| (1..=63).contains(&label.len()) && label.bytes().all(allowed))
}

/// Makes the type of a name and that of the error, for texts that [`is_name`].
macro_rules! names {
    ($($(#[$doc:meta])* $name:ident, $error:ident, $of:literal;)*) => {$(
        /// The text cannot be such a name. Of one that is too long it shows the beginning: it may be another node's.
        #[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
        #[error(
            "{0:?} cannot be a {of}'s name: use 1 to {MAX_NAME} letters, digits, '-', '_' or '.', and begin with a letter or digit",
            of = $of
        )]
        pub struct $error(String);

        $(#[$doc])*
        #[derive(Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
        #[serde(try_from = "String", into = "String")]
        pub struct $name(String);

        impl $name {
            /// The name as text.
            #[must_use]
            pub fn as_str(&self) -> &str {
                &self.0
            }
        }

        impl FromStr for $name {
            type Err = $error;
            fn from_str(text: &str) -> Result<Self, $error> {
                text.to_owned().try_into()
            }
        }

        impl TryFrom<String> for $name {
            type Error = $error;
            fn try_from(text: String) -> Result<Self, $error> {
                if is_name(&text) {
                    Ok(Self(text))
                } else {
                    Err($error(text.chars().take(MAX_NAME + 1).collect()))
                }
            }
        }

        impl From<$name> for String {
            fn from(name: $name) -> Self {
                name.0
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(&self.0)
            }
        }

        impl fmt::Debug for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, "{:?}", self.0)
            }
        }

        impl Deref for $name {
            type Target = str;
            fn deref(&self) -> &str {
                &self.0
            }
        }

        /// A file name: one component of a path, never `.` or `..`.
        impl AsRef<Path> for $name {
            fn as_ref(&self) -> &Path {
                Path::new(&self.0)
            }
        }

        /// Maps by name are asked with a text, too.
        impl Borrow<str> for $name {
            fn borrow(&self) -> &str {
                &self.0
            }
        }

        impl PartialEq<str> for $name {
            fn eq(&self, other: &str) -> bool {
                self.0 == other
            }
        }
    )*};
}

names! {
    /// A service's name, unique in the cluster: a text that [`is_name`]. As JSON it is a string.
    ServiceName, ServiceNameError, "service";
    /// A volume's name, unique in the cluster: a text that [`is_name`]. As JSON it is a string.
    VolumeName, VolumeNameError, "volume";
    /// A node's name, unique in the cluster: a text that [`is_name`]. As JSON it is a string.
    NodeName, NodeNameError, "node";
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::path::Component;

    use super::*;

    #[test]
    fn a_name_is_one_component_of_a_path_and_fits_where_names_are_short() {
        for good in ["a", "0", "redis", "web-1.a_b", "A.", &"x".repeat(MAX_NAME)] {
            let name: ServiceName = good.parse().unwrap();
            assert_eq!(&name, good);
            let components: Vec<_> = AsRef::<Path>::as_ref(&name).components().collect();
            assert!(matches!(components[..], [Component::Normal(_)]), "{good}");
        }
        let long = "x".repeat(MAX_NAME + 1);
        for bad in
            ["", ".", "..", "../x", "a/b", "/a", "-a", ".a", "_a", "a b", "a\"b", "a\nb", "a\0", "ä", &long]
        {
            let error = bad.parse::<ServiceName>().unwrap_err().to_string();
            assert!(error.contains(&format!("{bad:?} cannot be")), "{error}");
        }
        assert!("a/b".parse::<VolumeName>().unwrap_err().to_string().contains("a volume's name"));
        assert!("a/b".parse::<NodeName>().unwrap_err().to_string().contains("a node's name"));
        let error = "x".repeat(1 << 20).parse::<ServiceName>().unwrap_err().to_string();
        assert!(error.contains(&format!("{long:?} cannot be")), "{error}");
    }

    #[test]
    fn a_file_or_message_holds_a_name_as_a_string_and_no_other_string_is_read_as_one() {
        let name: ServiceName = "redis".parse().unwrap();
        assert_eq!(serde_json::to_string(&name).unwrap(), r#""redis""#);
        assert_eq!(serde_json::from_str::<ServiceName>(r#""redis""#).unwrap(), name);
        let error = serde_json::from_str::<ServiceName>(r#""../redis""#).unwrap_err();
        assert!(error.to_string().contains(r#""../redis" cannot be a service's name"#), "{error}");
    }
}
