//! What is mounted where, and taking it off again.

use std::{
    ffi::OsString,
    fs,
    os::unix::ffi::OsStringExt,
    path::{Path, PathBuf},
};

use nix::{
    errno::Errno,
    mount::{MntFlags, umount2},
};

use crate::error::{Context, LabError};

/// The mount points of this mount namespace, in the order in which they were mounted.
pub(crate) fn list() -> Result<Vec<PathBuf>, LabError> {
    let table = fs::read("/proc/self/mountinfo").context("reading", "/proc/self/mountinfo")?;
    Ok(parse(&table))
}

/// The mount points at `path` and below.
pub(crate) fn below(path: &Path) -> Result<Vec<PathBuf>, LabError> {
    Ok(list()?.into_iter().filter(|mount| mount.starts_with(path)).collect())
}

/// Unmounts everything at `path` and below, the newest first; what is busy is detached, so that it
/// disappears with its last user.
///
/// Call it when the processes that could mount anew have ended.
pub(crate) fn unmount_below(path: &Path) -> Result<(), LabError> {
    // A mount may hide another at the same place, or one below a hidden one: look again until none is left.
    for _ in 0..64 {
        let mounts = below(path)?;
        if mounts.is_empty() {
            return Ok(());
        }
        for mount in mounts.iter().rev() {
            match umount2(mount, MntFlags::UMOUNT_NOFOLLOW) {
                // Gone already, with a shared peer or because the list is old.
                Ok(()) | Err(Errno::EINVAL | Errno::ENOENT) => {}
                Err(_) => umount2(mount, MntFlags::UMOUNT_NOFOLLOW | MntFlags::MNT_DETACH)
                    .context("unmounting", mount.display())?,
            }
        }
    }
    Err(Errno::EBUSY).context("unmounting everything below", path.display())
}

/// Field 5 of each line of proc_pid_mountinfo(5), with its octal escapes undone.
fn parse(table: &[u8]) -> Vec<PathBuf> {
    table
        .split(|byte| *byte == b'\n')
        .filter_map(|line| line.split(|byte| *byte == b' ').nth(4))
        .map(|field| PathBuf::from(OsString::from_vec(unescape(field))))
        .collect()
}

fn unescape(field: &[u8]) -> Vec<u8> {
    let mut out = Vec::with_capacity(field.len());
    let mut rest = field;
    while let Some((&first, tail)) = rest.split_first() {
        let octal = tail
            .get(..3)
            .filter(|_| first == b'\\')
            .and_then(|digits| u8::from_str_radix(std::str::from_utf8(digits).ok()?, 8).ok());
        match octal {
            Some(byte) => {
                out.push(byte);
                rest = tail.get(3..).unwrap_or_default();
            }
            None => {
                out.push(first);
                rest = tail;
            }
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mount_points_with_blanks_are_read() {
        let table = b"22 27 0:21 / /proc rw - proc proc rw\n23 27 0:22 /x /mnt/a\\040b\\134c rw shared:1 - ext4 x rw\n";
        assert_eq!(parse(table), [PathBuf::from("/proc"), PathBuf::from("/mnt/a b\\c")]);
    }
}
