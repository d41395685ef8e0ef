//! Workloads: root filesystems from the distribution's packages, and clients that measure.
//!
//! - [`rootfs`]: copies programs with the libraries they need into a directory.
//! - [`presets`]: the services that tests, the demo and benchmarks use.
//! - [`resp`]: the Redis protocol.
//! - [`redis`]: a client for single requests, for filling a Redis and for checking its content.
//! - [`load`]: the open-loop client that measures what a user of a Redis notices.
//! - [`closed_loop`]: the client that measures how much a Redis answers.
//! - [`repeated`]: the closed-loop client whose rate the round trip bounds.
//! - [`echo`]: the open-loop client of an echo service over many connections.
//! - [`stream`]: what goes over them.
//! - [`writer`]: what that client writes where all of the memory shall be written.

pub mod closed_loop;
pub mod echo;
pub mod load;
pub mod presets;
pub mod redis;
pub mod repeated;
pub mod resp;
pub mod rootfs;
pub mod stream;
pub mod writer;

pub use closed_loop::{Answers, ClosedLoop};
pub use echo::{EchoLoad, EchoReport};
pub use load::{LoadReport, RedisLoad, Timeline};
pub use presets::{Preset, Workload};
pub use redis::RedisClient;
pub use repeated::{Question, Repeated, RepeatedReport};
pub use rootfs::Rootfs;
pub use writer::Writes;
