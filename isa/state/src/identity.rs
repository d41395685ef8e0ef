//! Which build a state or an executable belongs to.

use std::fmt;

/// SHA-256 over the neutral program and its layout; equal in all executables of one link.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct BuildIdentity(pub [u8; 32]);

impl BuildIdentity {
    /// The first twelve digits, enough for a person to tell two builds apart.
    #[must_use]
    pub fn short(&self) -> String {
        let mut text = self.to_string();
        text.truncate(12);
        text
    }
}

impl fmt::Display for BuildIdentity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

impl fmt::Debug for BuildIdentity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "BuildIdentity({})", self.short())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_identity_is_shown_in_full_and_shortened() {
        let mut bytes = [0; 32];
        bytes[0] = 0x0a;
        bytes[31] = 0xff;
        let identity = BuildIdentity(bytes);
        assert_eq!(identity.to_string().len(), 64);
        assert!(identity.to_string().ends_with("00ff"));
        assert_eq!(identity.short(), "0a0000000000");
    }
}
