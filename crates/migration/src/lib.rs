//! Moving a service: the state machines of [`source`] and [`destination`], the conversation
//! between them ([`message`], [`link`]), the [`journal`] that makes the commit a single instant,
//! what is done after a crash ([`recovery`]), and the [`report`] every migration ends in.

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
