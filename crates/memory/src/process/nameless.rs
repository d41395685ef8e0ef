//! Mappings of shared memory that has no path, in the text of `/proc/PID/maps`: shared anonymous memory, memory files, and
//! segments of System V.

use std::fs::File;
use std::os::unix::fs::MetadataExt;
use std::sync::OnceLock;

use nix::sys::memfd::{MFdFlags, memfd_create};

use crate::Range;

/// What the kernel calls memory that was mapped with `MAP_SHARED | MAP_ANONYMOUS`, and CRIU the memory file that it makes of
/// that in a restore from images.
pub(crate) const ANONYMOUS: &str = "/dev/zero";

/// What it puts before the key that a segment of System V was made with.
const SYSTEM_V: &str = "/SYSV";

/// What it puts before the name of a memory file.
pub(crate) const MEMFD: &str = "/memfd:";

/// What it puts behind it, as it does with all files that have no name any more.
pub(crate) const DELETED: &str = " (deleted)";

/// The longest name of a memory file: `NAME_MAX` without what the kernel puts before it.
pub(crate) const LONGEST_NAME: usize = 249;

/// A mapping of memory that may be a segment.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Mapping {
    pub(crate) range: Range,
    /// Where in the memory it begins, bytes.
    pub(crate) offset: u64,
    /// Of a segment of System V its identifier, which another memory may have as its inode.
    pub(crate) inode: u64,
    pub(crate) memory: Memory,
    /// Whether all who map it share what they write, and nobody executes it.
    pub(crate) plain: bool,
}

/// How mapped memory was made.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Memory {
    /// By mmap(2).
    Anonymous,
    /// By memfd_create(2), with this name.
    File(String),
    /// By shmget(2).
    SystemV,
}

/// The device of all shared memory without a name; none where the kernel does not tell.
pub(crate) fn device() -> Option<u64> {
    static DEVICE: OnceLock<Option<u64>> = OnceLock::new();
    *DEVICE.get_or_init(|| {
        let file = memfd_create("godwit", MFdFlags::MFD_CLOEXEC).map(File::from).ok()?;
        Some(file.metadata().ok()?.dev())
    })
}

/// Whether a memory file's name can be told to the destination. In `maps` the kernel writes some characters as numbers, and
/// what is no UTF-8 was replaced when the text was read.
pub(crate) fn can_be_told(name: &str) -> bool {
    !name.contains(['\\', '\u{fffd}']) && name.len() <= LONGEST_NAME
}

/// The mappings of memory that may be a segment, from the text of `maps`.
pub(crate) fn mappings(text: &str) -> Vec<Mapping> {
    let Some(device) = device() else { return Vec::new() };
    let device = title(device);
    text.lines().filter_map(|line| mapping(line, &device)).collect()
}

/// The mappings of a file with this device and inode, whatever its name is, with where in the file they begin, bytes.
pub(crate) fn mappings_of(text: &str, (device, inode): (u64, u64)) -> Vec<(Range, u64)> {
    let device = title(device);
    let of_file = text.lines().filter_map(line).filter(|line| line.device == device && line.inode == inode);
    // Of a segment of System V the number is none of an inode.
    let of_file = of_file.filter(|line| !line.path.starts_with(SYSTEM_V));
    of_file.map(|line| (line.range, line.offset)).collect()
}

/// A device as it is written there.
fn title(device: u64) -> String {
    format!("{:02x}:{:02x}", libc::major(device), libc::minor(device))
}

/// What a line of `maps` says.
struct Line<'a> {
    range: Range,
    permissions: &'a [u8],
    offset: u64,
    device: &'a str,
    inode: u64,
    path: &'a str,
}

/// One line, as `7f0c000-7f0d000 rw-s 00000000 00:01 4711    /dev/zero (deleted)`.
fn line(line: &str) -> Option<Line<'_>> {
    let mut words = line.splitn(6, ' ');
    let (start, end) = words.next()?.split_once('-')?;
    Some(Line {
        range: u64::from_str_radix(start, 16).ok()?..u64::from_str_radix(end, 16).ok()?,
        permissions: words.next()?.as_bytes(),
        offset: u64::from_str_radix(words.next()?, 16).ok()?,
        device: words.next()?,
        inode: words.next()?.parse().ok()?,
        path: words.next().unwrap_or_default().trim_start(),
    })
}

fn mapping(text: &str, shared: &str) -> Option<Mapping> {
    let Line { range, permissions, offset, device, inode, path } = line(text)?;
    let &[_, _, execute, sharing] = permissions else { return None };
    let path = path.strip_suffix(DELETED)?;
    // CRIU knows it by 32 bits.
    if device != shared || u32::try_from(inode).is_err() {
        return None;
    }
    let memory = if path == ANONYMOUS {
        Memory::Anonymous
    } else if path.starts_with(SYSTEM_V) {
        Memory::SystemV
    } else {
        Memory::File(path.strip_prefix(MEMFD)?.to_owned())
    };
    let told = !matches!(&memory, Memory::File(name) if !can_be_told(name));
    Some(Mapping { range, offset, inode, memory, plain: sharing == b's' && execute != b'x' && told })
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn memory_that_only_criu_can_move_is_no_segment() {
        let text = "\
7f2000000000-7f2000001000 rw-s 00000000 00:01 5                          /dev/zero (deleted)
7f2000001000-7f2000002000 r--s 00001000 00:01 6                          /memfd:two words (deleted)
7f2000002000-7f2000003000 rw-p 00000000 00:01 7                          /memfd:x (deleted)
7f2000003000-7f2000004000 rwxs 00000000 00:01 8                          /dev/zero (deleted)
7f2000004000-7f2000005000 rw-s 00000000 00:01 9                          /SYSV4711beef (deleted)
7f2000005000-7f2000006000 rw-s 00000000 00:1b 10                         /dev/zero (deleted)
7f2000006000-7f2000007000 rw-s 00000000 00:01 11                         /memfd:a\\012b (deleted)
7f2000007000-7f2000008000 rw-s 00000000 00:01 4294967296                 /dev/zero (deleted)
7f2000008000-7f2000009000 rw-p 00000000 00:00 0                          [heap]
7f2000009000-7f200000a000 rw-p 00000000 00:00 0 
";
        let found: Vec<_> = text.lines().filter_map(|line| mapping(line, "00:01")).collect();
        let plain: Vec<_> = found.iter().map(|mapping| (mapping.inode, mapping.plain)).collect();
        assert_eq!(plain, [(5, true), (6, true), (7, false), (8, false), (9, true), (11, false)]);
        let two_words = Memory::File("two words".into());
        assert_eq!((&found[0].memory, &found[1].memory), (&Memory::Anonymous, &two_words));
        assert_eq!(found[4].memory, Memory::SystemV);
        assert_eq!((&found[1].range, found[1].offset), (&(0x7f20_0000_1000..0x7f20_0000_2000), 0x1000));
        // By its file each is found, but for a segment of System V.
        for (inode, start) in [(5, 0), (8, 3), (11, 6), (1 << 32, 7)] {
            let range = 0x7f20_0000_0000 + start * 0x1000..0x7f20_0000_1000 + start * 0x1000;
            assert_eq!(mappings_of(text, (libc::makedev(0, 1), inode)), [(range, 0)]);
        }
        for nothing in [(libc::makedev(0, 1), 9), (libc::makedev(0, 2), 5)] {
            assert_eq!(mappings_of(text, nothing), []);
        }
    }
}
