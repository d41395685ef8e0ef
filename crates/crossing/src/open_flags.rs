//! The flags of open(2): four of them have other bits on each set (`arch/x86/include/uapi/asm/fcntl.h` has none of its
//! own, `arch/arm64/include/uapi/asm/fcntl.h` has these four), all others the same.

use godwit_isa_plan::Set;

/// `O_DIRECTORY`, `O_NOFOLLOW`, `O_DIRECT`, `O_LARGEFILE`.
fn special(set: Set) -> [u32; 4] {
    match set {
        Set::X86_64 => [0o200_000, 0o400_000, 0o40_000, 0o100_000],
        Set::Aarch64 => [0o40_000, 0o100_000, 0o200_000, 0o400_000],
    }
}

/// All bits of the four.
const SPECIAL: u32 = 0o740_000;

/// Those that are the same: access, `O_CREAT`, `O_EXCL`, `O_NOCTTY`, `O_TRUNC`, `O_APPEND`, `O_NONBLOCK`, `O_DSYNC`, `FASYNC`,
/// `O_NOATIME`, `O_CLOEXEC`, the second bit of `O_SYNC`, `O_PATH`, that of `O_TMPFILE`.
const SAME: u32 = 0o3
    | 0o100
    | 0o200
    | 0o400
    | 0o1000
    | 0o2000
    | 0o4000
    | 0o10_000
    | 0o20_000
    | 0o1_000_000
    | 0o2_000_000
    | 0o4_000_000
    | 0o10_000_000
    | 0o20_000_000;

/// The flags of one set as those of another; none where one of them is not known.
pub(crate) fn translated(flags: u32, from: Set, to: Set) -> Option<u32> {
    if flags & !(SAME | SPECIAL) != 0 {
        return None;
    }
    let pairs = special(from).into_iter().zip(special(to));
    Some(pairs.filter(|(bit, _)| flags & bit != 0).fold(flags & SAME, |done, (_, bit)| done | bit))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_four_flags_change_and_all_come_back() {
        let there = |flags| translated(flags, Set::X86_64, Set::Aarch64);
        // A file for reading and writing, and a directory.
        assert_eq!(there(0o100_002), Some(0o400_002));
        assert_eq!(there(0o2_300_000), Some(0o2_440_000));
        assert_eq!(there(0o40_000), Some(0o200_000));
        assert_eq!(there(0o400_000), Some(0o100_000));
        for bit in 0..32 {
            let flag = 1 << bit;
            let is_known = flag & (SAME | SPECIAL) != 0;
            let back = there(flag).and_then(|other| translated(other, Set::Aarch64, Set::X86_64));
            assert_eq!(back, is_known.then_some(flag));
            assert_eq!(translated(flag, Set::X86_64, Set::X86_64), is_known.then_some(flag));
        }
    }
}
