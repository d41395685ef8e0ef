//! The lab's links: a learning switch in one process, with a rate and a delay on each access link.
//!
//! ```text
//!   host a ── TAP ──▶ up wire ──▶ ┌────────┐ ──▶ down wire ──▶ delay ──▶ TAP ── host b
//!             read    rate        │ lookup │     rate                    write
//!                                 └────────┘
//! ```
//!
//! - `frame`: how long a frame, or a large one that a network card would cut up, is on the wire.
//! - `wire`: one direction of an access link, in virtual time.
//! - `way`: what lies between two hosts beside their links: rate, delay, jitter, loss, along a trace.
//! - `fabric`: ports, learned addresses, ways, cuts; no input or output.
//! - `tap`: the TAP devices, with checksum and segmentation left to be done "by hardware".
//! - `control`: requests to the running program: cut, heal, change the link, figures.
//! - `run`: the event loop of `godwit-lab-link`.
//!
//! How late frames are is counted (`late_*` of [`Counters`]). Measured on two cores in a virtual machine:
//! 0.02 ms on average and 0.4 ms at most at rest; 0.03 ms and 1.9 ms with both cores overcommitted and
//! a gigabit passing; a gigabit takes a fifth of a core, an unshaped link carries 8 to 19 Gbit/s.
//!
//! The kernel's netem would do, but not every kernel has it; this way numbers are the same everywhere.

pub(crate) mod control;
pub(crate) mod fabric;
pub(crate) mod frame;
mod run;
pub(crate) mod tap;
pub(crate) mod way;
pub(crate) mod wire;

pub use control::{PortFigures, Request, WayStatus};
pub use fabric::Counters;
pub(crate) use frame::frame_on_wire;
pub use run::{Arguments, run};
