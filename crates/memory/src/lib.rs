//! The memory of a service on its way: which pages exist and which were written, reading them at
//! the source, keeping them at the destination, and serving the faults of a process that runs
//! before all of its pages are there. Nothing here knows of networks, CRIU or containers.
//!
//! ```text
//! source                                             destination
//! Tracker ──which pages──▶ Reader ──▶ Batch ══wire══▶ Batch ──▶ pager::Client ══▶ godwit-pager
//!    ▲                        ▲                                                    │ page store
//!    └── the service's processes (running, then frozen)          restored processes ◀─ userfaultfd
//! ```
//!
//! - [`process`]: one process's address space from outside: its areas, reading its pages.
//! - [`tracker`]: which pages were written since the last scan, without stopping a process.
//! - [`shared`]: shared memory as files, at the source and at the destination.
//! - [`mappings`]: the flags of mappings, without a look at their pages.
//! - [`batch`]: pages as bytes for the wire: zero runs, data, checksum, compression.
//! - [`causes`]: errors as sentences.
//! - [`pager`]: the small process that holds the page store and the userfaultfds at the
//!   destination, and outlives the daemon; its protocol and its client.
//!
//! A *space* is the address space of one process of the service, named by the process's number
//! inside the service's PID namespace ([`Space`]): that number is the same at both ends.

/// Bytes of a page. Kernels with larger pages are refused by [`tracker::detect`].
pub const PAGE_SIZE: u64 = 4096;

/// The address space of one process of the service: its PID inside the service's namespace.
pub type Space = u32;

/// Addresses `start..end`, whole pages.
pub type Range = std::ops::Range<u64>;

pub mod batch;
pub mod causes;
pub mod mappings;
pub mod pager;
pub mod process;
pub mod shared;
pub mod tracker;
