//! Containers: one trait, [`Engine`], with runc, Podman and Docker behind it, and what containers stand on.
//!
//! ```text
//!  OCI archive ──▶ image: layers in a store ──▶ rootfs: layers + changed files = overlayfs ──▶ runc ──▶ godwit-shim
//!                        │                                   │                                  │
//!                        └── blobs to another node           └── tree: changed files to         └── freezer, dump target,
//!                                                                another node, in rounds           restore from images
//! ```
//!
//! - [`Engine`] (`container.rs`): run, stop, freeze, describe for a dump, restore, recover. `runc.rs` makes
//!   containers itself; `foreign.rs` has what is alike in those that other engines keep, `podman.rs` and `docker.rs` what is
//!   not. [`Engines`] asks the one that a container is of.
//! - `processes`: what all of them do alike with processes, cgroups and the freezer.
//! - [`image`]: images and layers; [`rootfs`]: root filesystems; [`tree`]: trees of changed files that can be sent.
//! - [`checkpoint`]: archives of checkpoints, in Podman's format.
//! - [`copy`]: files copied into a container's filesystem and out of it.
//! - [`files`]: where the files are that move with a container.
//! - `confinement.rs`, `seccomp.rs`: what a container may do.
//!
//! A container is given a network namespace by path. Nothing here knows of migrations, networks or pages.

mod beneath;
pub mod checkpoint;
pub mod confinement;
pub mod container;
pub mod copy;
pub mod docker;
mod engines;
mod exec;
pub mod files;
pub mod foreign;
pub mod image;
pub mod podman;
mod processes;
mod resolver;
pub mod rootfs;
pub mod runc;
pub mod seccomp;
mod sessions;
pub mod small_tar;
pub mod tree;
pub mod view;
mod watch;

pub use confinement::{Confinement, Ulimit, User};
pub use container::{
    BegunRestore, COMING_TMPFS_BYTES, ContainerConfig, ContainerState, ContainerStatus, Copied, DefinedTmpfs,
    DumpTarget, Engine, EngineError, Identity, Keeper, Kept, LogEntries, LogFiles, Mount, MountKind, OnMove,
    OutputPipes, RestoreRequest, Tmpfs, Usage, VolumePlace, is_file_name,
};
pub use engines::Engines;
pub use exec::{ExecIo, ExecRequest, ExecStreams, Terminal, TerminalSize};
pub use processes::mounts::MountNamespace;
pub use sessions::{BEATS, News, Session};
