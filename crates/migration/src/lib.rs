//! Moving a service from one node to another.
//!
//! ```text
//!  source                                                     destination
//!  reserve ── Open ──────────────────────────────────────────▶ admit, accept
//!  root ───── layers, files, log ────────────────────────────▶ receive
//!  precopy ── pages, in rounds ─────(streams)────────────────▶ page_receiver ──▶ godwit-pager
//!  freeze, dump ── last pages, images ───────────────────────▶ receive, restore
//!  journal: committed                                          journal: restored
//!  commit ─── Commit ────────────────────────────────────────▶ own: the service runs
//!  serve ──── pages that stayed, answers to page faults ─────▶ page_receiver ──▶ godwit-pager
//! ```
//!
//! - [`source`], [`destination`]: the two state machines. The source checks first that the service is eligible; then its
//!   `reserve` asks the destination, whose `admit` answers. `precopy` sends pages to the destination's `page_receiver` while the
//!   service runs. `freeze` has the engine freeze it, `dump` runs CRIU on it ([`checkpoint`]), and the destination's `receive`
//!   has the engine restore it. `serve` sends the pages that stayed. The cut-over is done on the way: `freeze` has the overlay
//!   steer frames to the destination, and the destination's `own` has it open the port there. The destination imports nothing
//!   of the source.
//! - [`message`]: the messages; [`link`]: the connection that carries them. [`step`]: how far a destination is whose source
//!   waits for it; [`terms`]: what the overlays of both nodes must have in common.
//! - [`journal`]: what a node has promised, on disk before it acts on it. The commit is one line in it.
//! - [`recovery`]: finishes or undoes the moves in the journal; the daemon calls it at its start. [`doubt`]: services in
//!   doubt. Their node asks the source for its journal until it answers, or an operator decides, and runs or removes the
//!   service according to that.
//! - [`resources`]: the node as both ends see it: engine, network, CRIU, pagers, store, journal, and the cluster.
//!   [`incarnation`]: id and epoch, which it compares before it removes anything of a service.
//! - [`converge`]: when to stop copying and freeze. [`outlook`]: what a move would be like. [`report`]: what a move came to.
//! - [`databases`]: what SQLite remembers of files, which are others after a move.
//! - [`retained`]: pages of a service that has left, for when it comes back.
//! - [`failpoint`]: where a test can make a node die or wait. The module `loopback` (of tests) runs both ends in one
//!   process, without root, CRIU or a network, and lets each step and connection fail.
//!
//! `docs/migration.md` describes the order of the steps, `docs/commit.md` the commit. The crate does not know the API, the
//! command line, or how nodes find each other: its caller provides the latter as [`resources::Cluster`].

pub mod ahead;
pub mod arrivals;
pub mod attach;
pub mod backoff;
pub mod binds;
mod bound;
pub mod bulk;
pub mod checkpoint;
pub mod cpu;
pub mod crossing;
pub mod databases;
pub mod destination;
pub mod doubt;
pub mod error;
pub mod failpoint;
pub mod follows;
pub mod half_made;
pub mod hooks;
pub mod images;
pub mod incarnation;
pub mod journal;
pub mod link;
pub(crate) mod listeners;
#[cfg(test)]
mod loopback;
pub mod machine;
pub mod message;
pub mod mounts;
pub mod needs;
pub mod options;
pub(crate) mod page_hash;
pub(crate) mod page_map;
pub mod pagers;
pub mod past_moves;
pub mod promised;
pub mod recovery;
pub mod report;
pub mod resources;
pub mod restart;
pub mod retained;
pub mod service;
pub mod source;
pub mod standstill;
pub mod step;
pub mod storage;
pub mod task;
pub mod terms;
pub mod timeline;
pub mod volumes;
pub mod waits;

pub use backoff::Backoff;
pub use doubt::{Doubt, Doubts, Verdict};
pub use follows::Follows;
pub use options::{Compress, Options};
pub use report::{Outcome, Report};
pub use resources::{Cluster, ClusterError, Decision, Known, LocalError, NodeResources};
pub use restart::Restart;
pub use service::{Attachment, Layout, Port, Service};
pub use source::{LackingLayers, Progress, Source};
pub use volumes::Volume;
pub use waits::{Wait, Waits};

pub use godwit_memory::causes::error_chain;
pub use godwit_policy::Mode;
