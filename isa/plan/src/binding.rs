//! What a program is known by: the digests of its neutral module, of its layout and of what the tool chain links to it on each
//! set. Their digest is the identity that every executable of the program has in its memory.
//!
//! So an identity names the one module that its executables were made from, and an executable that another node makes of the
//! module has it exactly where layout and runtime are the same: only then a process may go on under it.

use sha2::{Digest as _, Sha256};

/// What the digest of an identity begins with; another way to make one needs another.
const DOMAIN: &[u8] = b"godwit program 1\n";

/// The parts of an identity, SHA-256 each; all zero of a probe.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Binding {
    /// Of the neutral module.
    pub module: [u8; 32],
    /// Of the linker script, without an identity in it.
    pub layout: [u8; 32],
    /// Of the private objects of all sets.
    pub toolchain: [u8; 32],
}

impl Binding {
    /// The identity of executables that were made of these parts; zero of a probe.
    #[must_use]
    pub fn identity(&self) -> [u8; 32] {
        if *self == Self::default() {
            return [0; 32];
        }
        let mut hash = Sha256::new_with_prefix(DOMAIN);
        for part in [&self.module, &self.layout, &self.toolchain] {
            hash.update(part);
        }
        hash.finalize().into()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_part_counts_and_none_for_another() {
        let parts = |module: u8, layout: u8, toolchain: u8| {
            Binding { module: [module; 32], layout: [layout; 32], toolchain: [toolchain; 32] }.identity()
        };
        let all =
            [parts(1, 2, 3), parts(2, 1, 3), parts(1, 3, 2), parts(0, 2, 3), parts(1, 0, 3), parts(1, 2, 0)];
        for (nth, one) in all.iter().enumerate() {
            assert!(!all[..nth].contains(one), "{nth}");
        }
        assert_eq!(Binding::default().identity(), [0; 32]);
    }
}
