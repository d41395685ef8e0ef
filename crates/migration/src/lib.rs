//! Moving a service from one node to another.
//!
//! ```text
//!  source                                                     destination
//!  reserve ── Open ──────────────────────────────────────────▶ admit, accept
//!  root ───── layers, files, log ────────────────────────────▶ receive
//!  precopy ── pages, in rounds ─────(streams)────────────────▶ intake ──▶ godwit-pager
//!  freeze, dump ── last pages, images ───────────────────────▶ receive, restore
//!  journal: committed                                          journal: restored
//!  commit ─── Commit ────────────────────────────────────────▶ own: the service runs
//!  serve ──── pages that stayed, answers to page faults ─────▶ intake ──▶ godwit-pager
//! ```
//!
//! - [`source`], [`destination`]: the two state machines. The destination imports nothing of the source.
//! - [`message`], [`link`]: what they say to each other, and the connection that carries it; [`step`] and [`terms`] are
//!   parts of it.
//! - [`journal`]: what a node has promised, on disk before it acts on it: the commit is one line in it. [`recovery`]
//!   does after a crash what it says; [`doubt`] keeps what waits for the other node's journal.
//! - [`local`]: the node as both ends see it: engine, network, CRIU ([`checkpoint`]), pagers, store, journal, and the host above.
//! - [`converge`]: when to stop copying and freeze. [`report`]: what a move came to.
//! - [`retained`]: pages of a service that has left, for when it comes back.
//! - [`failpoint`]: where a test can make a node die or wait. `loopback` runs both ends in one process against each fault.
//!
//! What happens here in which order is told in `docs/migration.md`, and the commit in `docs/commit.md`. The crate does not
//! know the API, the command line, or how nodes find each other: that is [`local::Host`]'s.

pub mod arrivals;
pub mod attach;
pub mod binds;
pub mod blocking;
pub mod bulk;
pub mod checkpoint;
pub mod converge;
pub mod cpu;
pub mod destination;
pub mod doubt;
pub mod error;
pub mod failpoint;
pub mod half_made;
pub mod hooks;
pub mod images;
pub mod incarnation;
pub mod journal;
pub mod link;
pub(crate) mod listeners;
pub mod local;
#[cfg(test)]
mod loopback;
pub mod machine;
pub mod message;
pub mod mounts;
pub mod options;
pub(crate) mod page_hash;
pub(crate) mod page_map;
pub mod pagers;
pub mod promised;
pub mod recovery;
pub mod report;
pub mod restart;
pub mod retained;
pub mod schema;
pub mod service;
pub mod source;
pub mod standstill;
pub mod step;
pub mod task;
pub mod terms;
pub mod waits;

pub use doubt::{Doubt, Doubts, Verdict};
pub use local::{Decision, Host, HostError, Known, Local, LocalError};
pub use options::{Compress, Mode, Options};
pub use report::{Outcome, Report};
pub use restart::Restart;
pub use service::{Attachment, Layout, Port, Service};
pub use source::{Progress, Source};
pub use waits::{Wait, Waits};

/// An error and all its causes as one sentence.
#[must_use]
pub fn error_chain(error: &(dyn std::error::Error + 'static)) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        let more = error.to_string();
        if !text.ends_with(&more) {
            text.push_str(": ");
            text.push_str(&more);
        }
        cause = error.source();
    }
    text
}
