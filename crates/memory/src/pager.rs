//! The process that holds a service's pages and serves its faults at the destination.
//!
//! ```text
//! godwitd                                   godwit-pager (one per arriving service)
//!   Client ──DIR/pager.sock──▶ Index: which page is where      ┌─ userfaultfds ◀─ CRIU's restorer
//!     │                          │                             │    DIRECTORY/lazy-pages.socket
//!     └─ writes pages ─▶ page store (memfd) ──UFFDIO_COPY──────┴─▶ restored processes
//! ```
//!
//! It outlives the daemon: a daemon that was restarted connects again ([`Client::connect`]), asks
//! which pages are [missing](Client::missing), and goes on. The pager never sees the network, and
//! what comes over its socket is checked.
//!
//! In order: [`spawn()`], [`Client::connect`]; [`store`](Client::store) and [`put`](Client::put) while
//! the service runs at the source, [`zero`](Client::zero) for what vanished; after the freeze
//! [`pending`](Client::pending) for what is still at the source, **before**
//! [`listen`](Client::listen), because a page that is not known when the restore finishes is taken to
//! be zero, and what comes of it later is thrown away; [`in_images`](Client::in_images) for what CRIU
//! puts in place itself; CRIU restores; [`Event::RestoreFinished`]; [`verify`](Client::verify);
//! [`push`](Client::push); [`Event::Fault`]s are answered with a `put` of
//! the page (or a `zero`) before others; [`Event::Done`]; [`finish`](Client::finish).
//!
//! A process that has a page already where the pager is to put one has not been restored as it was:
//! the pager fails ([`Event::Failed`]), and the service must be killed.
//!
//! If the pager dies before it is done, a [`Guard`] keeps the kernel from giving the processes zeros in place of the
//! pages that they lack: they wait. The service must be killed then, and the guard be ended after that ([`end()`]).

mod client;
mod connection;
mod error;
mod guard;
mod index;
mod layout;
mod protocol;
mod restorer;
mod segment;
mod server;
mod spawn;
mod state;
mod store;
mod tables;
mod uffd;

use std::os::fd::{AsRawFd, OwnedFd};
use std::path::PathBuf;

pub use client::{Client, Event, Events};
pub use error::PagerError;
pub use guard::Guard;
pub use protocol::{Extent, Restored, State, Stored, VERSIONS};
pub use segment::fills_shared;
pub use server::Server;
pub use spawn::{end, running, spawn};

/// Name of the socket in the pager's directory.
const SOCKET: &str = "pager.sock";

/// Name of the lock file in the pager's directory. It is never removed.
const LOCK: &str = "pager.lock";

/// Name of the guard's lock file.
const GUARD: &str = "guard.lock";

/// The socket's path by way of an open directory: a socket's address is 108 bytes at most, which the
/// directory's own path may exceed.
fn short(directory: &OwnedFd) -> PathBuf {
    PathBuf::from(format!("/proc/self/fd/{}", directory.as_raw_fd())).join(SOCKET)
}
