//! A lazy dump: all but the pages that can come later.
//!
//! ```text
//! godwit                                  criu --ps-socket 4 swrk 3
//!   │ ── request: dump, lazy pages ────────▶ │  writes all images, without the lazy pages
//!   │                                        │  without our patch: "serves" them to the client on
//!   │ ── PS_IOV_CLOSE (sent beforehand) ───▶ │  descriptor 4, which says that it wants none
//!   │ ◀── int32 0 ────────────────────────── │
//!   │ ◀── answer: success ────────────────── │  the tasks are let go, as after any dump
//! ```
//!
//! With our patch (packaging/criu/lazy-pages-external.patch) CRIU leaves lazy pages alone. Without,
//! it maps all of them into pipes and then waits for a client: left alone, on a TCP port of all
//! addresses, where any user of the node could read the service's memory. A connection that is
//! handed over (`--ps-socket`, on the command line, as the RPC has it for other page servers only) is
//! used instead of a port. Both kinds of CRIU are asked in the same way, and the answer tells which
//! one it was.

use std::io::{self, Read, Write};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixStream;

/// The option of our patch, as `criu --help` names it.
pub(crate) const EXTERNAL_OPTION: &str = "--lazy-pages-external";

/// `PS_IOV_CLOSE` of CRIU's page-xfer.c: no more requests will come.
const CLOSE: u32 = 0x1023;

/// `struct page_server_iov`: command (u32), 4 bytes of padding, pages, address, id (u64 each). Before
/// CRIU 4.2 the pages were a u32 in the padding's place; the 8 bytes too many are not read then.
const RECORD_BYTES: usize = 32;

/// The client of a page server that wants no pages.
#[derive(Debug)]
pub(crate) struct Client {
    /// Open until CRIU has ended: it fails when it cannot answer.
    ours: UnixStream,
    theirs: UnixStream,
}

impl Client {
    pub(crate) fn new() -> io::Result<Self> {
        let (mut ours, theirs) = UnixStream::pair()?;
        let mut record = [0; RECORD_BYTES];
        if let Some(command) = record.first_chunk_mut() {
            *command = CLOSE.to_ne_bytes();
        }
        ours.write_all(&record)?;
        ours.set_nonblocking(true)?;
        Ok(Self { ours, theirs })
    }

    /// The end for CRIU.
    pub(crate) fn page_server(&self) -> BorrowedFd<'_> {
        self.theirs.as_fd()
    }

    /// Whether a page server, which has ended, has answered.
    pub(crate) fn was_served(&self) -> bool {
        let mut answer = [0; size_of::<i32>()];
        matches!((&self.ours).read(&mut answer), Ok(length) if length == answer.len())
    }
}
