//! Descriptors whose events are waited for.

use std::io;
use std::os::fd::OwnedFd;

use tokio::io::Interest;
use tokio::io::unix::AsyncFd;

/// Registers a descriptor for events.
pub(crate) fn watch<T: Into<OwnedFd>>(fd: T, interest: Interest) -> io::Result<AsyncFd<OwnedFd>> {
    // SAFETY: an OwnedFd stays open, and the same descriptor, until the AsyncFd is dropped.
    let watched = unsafe { AsyncFd::register_with_interest(fd.into(), interest) };
    watched.map_err(|error| error.into_parts().1)
}
