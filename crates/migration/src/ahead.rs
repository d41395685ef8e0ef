//! Files that are sent ahead of a move: they come into a directory that the destination keeps, and the move begins with that
//! in place of an empty one.
//!
//! ```text
//!  source: [`SentFiles`]                             destination: [`KeptFiles`]
//!  what the files were when they were sent:   ═══>   prepared/TOKEN in its state, of a service
//!  names, times, hashes of blocks                    at a node in one incarnation
//! ```
//! Both have the same token, which the destination draws at random for each directory. Rounds follow as in a move: the source
//! compares the files as they are with what it has sent, by the rules of [`godwit_engine::tree`], and no content is taken for
//! equal but by a keyed hash. So what is sent onto a directory depends on nothing but what this source has sent into this
//! directory.
//!
//! Of a directory of which it does not know a source asks what is there ([`godwit_engine::tree::list`]): one that has forgotten
//! what it sent, as a daemon has that starts, and one that has not sent it. A destination keeps what has come of a move that was
//! aborted, and a source the files of a service that has left it, as if its new node had sent them. What a destination has
//! forgotten is gone: a daemon that starts removes it.
//!
//! A round that breaks off leaves the directory with a part of it. The source then counts nothing that it touched as sent
//! ([`godwit_engine::tree::TreeSender::doubted`]).

mod kept;
mod sent;

pub(crate) use kept::{Begun, Held, Room, Taken};
pub use kept::{Kept, KeptFiles};
pub(crate) use sent::Lent;
pub use sent::SentFiles;

use std::time::Duration;

/// What is older differs much from what the service has by now, or the service is no more.
pub(crate) const OLDEST: Duration = Duration::from_secs(24 * 3600);

/// Most names of a service whose files are sent ahead: both nodes go through all of them each time.
pub(crate) const MOST_NAMES: u64 = 1 << 19;

/// Longest token that is taken, bytes.
pub(crate) const MOST_TOKEN: usize = 64;

/// Most bytes of their paths in all.
pub(crate) const MOST_PATH_BYTES: u64 = 128 << 20;
