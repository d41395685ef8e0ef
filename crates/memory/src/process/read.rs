//! Reading the memory of a process.
//!
//! `process_vm_readv` is the fast way (5 GB/s) but obeys the process's own rights. What it refuses is
//! read from `/proc/PID/mem`, which does not, and which in turn refuses what has no content: unmapped
//! addresses and guard pages.

use std::os::unix::fs::FileExt;

use nix::errno::Errno;

use super::{Process, ProcessError};
use crate::Range;

/// Bytes read at once. Larger pieces are not faster, and the buffer has to be kept.
pub const PIECE: usize = 1 << 20;

/// [`crate::PAGE_SIZE`] for lengths.
const PAGE: usize = 4096;

/// Reads ranges of a process in pieces through one buffer, which is kept because its first use costs
/// more than the reading.
#[derive(Debug)]
pub struct Reader {
    buffer: Vec<u8>,
}

impl Default for Reader {
    fn default() -> Self {
        Self::new()
    }
}

impl Reader {
    /// A reader with its buffer.
    pub fn new() -> Self {
        Self { buffer: vec![0; PIECE] }
    }

    /// The content of this range of whole pages, from front to back.
    pub fn pieces<'a>(&'a mut self, process: &'a Process, range: Range) -> Pieces<'a> {
        Pieces { buffer: &mut self.buffer, process, range }
    }
}

/// The pieces of a range: see [`Reader::pieces`].
#[derive(Debug)]
pub struct Pieces<'a> {
    buffer: &'a mut Vec<u8>,
    process: &'a Process,
    range: Range,
}

/// One part of a range that was to be read.
#[derive(Debug, PartialEq, Eq)]
pub enum Piece<'a> {
    /// Whole pages from this address on, at most [`PIECE`] bytes.
    Data {
        /// Where they are.
        start: u64,
        /// What they hold.
        bytes: &'a [u8],
    },
    /// There is nothing here any more; the next round says what came of it.
    Vanished(Range),
}

impl Pieces<'_> {
    /// The next piece; none at the end of the range.
    ///
    /// # Errors
    /// [`ProcessError::Gone`] when the process has ended.
    #[expect(
        clippy::should_implement_trait,
        reason = "a piece borrows the buffer, which Iterator cannot say"
    )]
    pub fn next(&mut self) -> Option<Result<Piece<'_>, ProcessError>> {
        let start = self.range.start;
        if start >= self.range.end {
            return None;
        }
        let mut end = start;
        while end < self.range.end {
            let wanted = usize::try_from(self.range.end - end).map_or(PIECE, |left| left.min(PIECE));
            match read(self.process, end, &mut self.buffer[..wanted]) {
                // A page that is read in part is not read.
                Ok(bytes) if bytes >= PAGE => {
                    if end > start {
                        break;
                    }
                    let whole = bytes & !(PAGE - 1);
                    self.range.start = start + whole as u64;
                    return Some(Ok(Piece::Data { start, bytes: &self.buffer[..whole] }));
                }
                Ok(_) => end += PAGE as u64,
                Err(error) => return Some(Err(error)),
            }
        }
        self.range.start = end;
        Some(Ok(Piece::Vanished(start..end)))
    }
}

/// A page's place in `/proc/PID/pagemap` (Documentation/admin-guide/mm/pagemap.rst): it is in memory, or swapped
/// out; it is a guard page, which has no content.
const PRESENT: u64 = 1 << 63;
const SWAPPED: u64 = 1 << 62;
const GUARD: u64 = 1 << 58;

/// The first page of a range that has content, read or not.
pub(super) fn first_with_content(process: &Process, range: &Range) -> Result<Option<u64>, ProcessError> {
    let table = process.open_file("pagemap")?;
    for page in (range.start..range.end).step_by(PAGE) {
        let mut entry = [0; 8];
        let read = table.read_at(&mut entry, page / crate::PAGE_SIZE * 8);
        let read = read.map_err(|error| process.failed("read its page tables", error))?;
        let entry = u64::from_ne_bytes(entry);
        if read == 8 && entry & (PRESENT | SWAPPED) != 0 && entry & GUARD == 0 {
            return Ok(Some(page));
        }
    }
    process.check_alive()?;
    Ok(None)
}

/// Reads as far as possible from this address on.
pub(super) fn read(process: &Process, address: u64, buffer: &mut [u8]) -> Result<usize, ProcessError> {
    let done = match read_fast(process, address, buffer) {
        // The thread that was looked at has ended, and others live.
        Err(ProcessError::Gone { .. }) if !process.has_ended() => {
            process.find_task()?;
            read_fast(process, address, buffer)?
        }
        done => done?,
    };
    if done > 0 || buffer.is_empty() {
        return Ok(done);
    }
    // One page at a time: behind it the fast way may work again.
    let length = buffer.len().min(PAGE);
    let memory = process.open_file("mem")?;
    match memory.read_at(&mut buffer[..length], address) {
        Ok(done) => Ok(done),
        Err(error) if matches!(error.raw_os_error(), Some(libc::EIO | libc::EFAULT)) => {
            process.check_alive()?;
            Ok(0)
        }
        Err(error) => Err(process.failed("read its memory", error)),
    }
}

fn read_fast(process: &Process, address: u64, buffer: &mut [u8]) -> Result<usize, ProcessError> {
    let Ok(remote) = usize::try_from(address) else { return Ok(0) };
    let local = libc::iovec { iov_base: buffer.as_mut_ptr().cast(), iov_len: buffer.len() };
    let remote = libc::iovec { iov_base: std::ptr::without_provenance_mut(remote), iov_len: buffer.len() };
    // SAFETY: the local vector covers `buffer`, which is borrowed exclusively for the call; the
    // remote one is only interpreted in the other process.
    let done =
        unsafe { libc::process_vm_readv(process.task(), &raw const local, 1, &raw const remote, 1, 0) };
    let result = Errno::result(done);
    // The call goes by PID; it was this process if it still lives.
    process.check_alive()?;
    match result {
        Ok(done) => Ok(usize::try_from(done).unwrap_or(0)),
        Err(Errno::EFAULT) => Ok(0),
        Err(errno) => Err(process.failed("read its memory", errno.into())),
    }
}
