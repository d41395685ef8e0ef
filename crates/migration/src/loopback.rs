//! A source against a destination in one process: whole conversations, with every fault that there can be, in
//! milliseconds each. Needs neither root nor CRIU nor a network but the loopback interface.
//!
//! ```text
//!  daemon "a" ── Source::run ── TLS ──▶ wire ──▶ destination::serve ── daemon "b"
//!    │ journal, recovery                │ cut after each record         │ journal, recovery, real pager
//!  machine "a": fakes                                                 machine "b": fakes
//!  of what needs privileges                                           └ a process with the same memory
//!    └ a process with a known memory
//! ```
//! Real are: the state machines, recovery, journals, messages, TLS, streams, the tracker, the pager, CRIU's images as far
//! as memory goes. Fakes are: the engine, CRIU, network, mounts, and what the daemon does above a migration.
//!
//! - [`process`]: services' processes. - [`machine`]: a node without its daemon; [`engine`], [`means`], [`cluster`]: the
//!   fakes on it. - [`daemon`]: its daemon, which is killed and started again. - [`wire`]: the way between the nodes.
//! - [`script`]: faults at steps. - [`world`]: all of it, and what has to be so when it has come to rest.
//! - [`faults`]: all faults, one after the other.

#![allow(clippy::unwrap_used)]

mod cluster;
mod daemon;
mod engine;
mod faults;
mod machine;
mod means;
mod process;
mod script;
mod wire;
mod world;
