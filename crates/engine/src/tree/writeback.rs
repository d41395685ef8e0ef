//! One system call: sync_file_range(2).

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;

/// Writes a file's dirty pages to its filesystem and waits for them, without the journal commit
/// that fsync(2) would bring. Shared mappings of the file are write-protected by it, so that the
/// next write through one moves the file's change time. No error where it cannot be done.
pub(super) fn write_back(file: &File) -> io::Result<()> {
    let all =
        libc::SYNC_FILE_RANGE_WAIT_BEFORE | libc::SYNC_FILE_RANGE_WRITE | libc::SYNC_FILE_RANGE_WAIT_AFTER;
    sync_file_range(file, all)
}

/// Begins to write a file's dirty pages to its filesystem, and does not wait for them.
pub(super) fn start(file: &File) -> io::Result<()> {
    sync_file_range(file, libc::SYNC_FILE_RANGE_WRITE)
}

fn sync_file_range(file: &File, flags: libc::c_uint) -> io::Result<()> {
    // SAFETY: takes a descriptor that is open for as long as `file` is borrowed, and no pointers.
    if unsafe { libc::sync_file_range(file.as_raw_fd(), 0, 0, flags) } == 0 {
        return Ok(());
    }
    let error = io::Error::last_os_error();
    match error.raw_os_error() {
        Some(libc::EINVAL | libc::ENOSYS | libc::ESPIPE) => Ok(()),
        _ => Err(error),
    }
}
