//! The test bed: nodes as network namespaces on one machine, the links between them, and workloads.
//!
//! ```text
//!   gwl-<lab>-a        gwl-<lab>-b        gwl-<lab>-client       network namespaces under /run/netns
//!   godwitd, shims     godwitd, shims     workload clients
//!   uplink0 .11        uplink0 .12        uplink0 .100           TAP devices, 10.99.0.0/24
//!      │                  │                   │
//!      └──────────────────┼───────────────────┘
//!              godwit-lab-link: a learning switch in one process (in gwl-<lab>-sw)
//!              with a rate and a delay per access link; conditions of their own, and cuts,
//!              between pairs of hosts
//! ```
//!
//! Everything a lab makes is found again from its name alone, so [`Lab::down`] also clears what a
//! crash left: namespaces by their names, processes by namespace, cgroup and pid record, mounts and
//! files by the lab's directories, cgroups by their path.
//!
//! The functions block; call them from a thread that may wait. They need root.

pub mod conditions;
pub mod config;
mod counters;
mod daemon;
mod down;
pub mod error;
mod files;
mod handle;
mod host;
mod lab;
mod machine;
mod mounts;
mod netns;
mod openvswitch;
mod process;
mod programs;
mod registry;
pub mod selftest;
pub mod spec;
pub mod switch;
mod units;
mod up;
pub mod workload;

pub use conditions::{Conditions, Step};
pub use config::{LabConfig, Link, NetworkBackend, Programs};
pub use counters::TcpCounters;
pub use error::LabError;
pub use handle::Lab;
pub use lab::{HostStatus, LabStatus};
pub use netns::inside;
pub use spec::{Architecture, Machine};
