//! Containers: one trait, [`Engine`], with runc behind it, and what containers stand on:
//! images and layers ([`image`]), root filesystems ([`rootfs`]), and trees of changed files
//! that can be sent elsewhere ([`tree`]).
//!
//! Nothing here knows of migrations or networks: a container is given a network namespace by
//! path, and can be frozen, described for a dump, and restored from a directory of images.

mod beneath;
pub mod confinement;
pub mod container;
pub mod image;
pub mod rootfs;
pub mod runc;
pub mod seccomp;
pub mod tree;

pub use confinement::{Confinement, Ulimit};
pub use container::{
    ContainerConfig, ContainerState, ContainerStatus, DumpTarget, Engine, EngineError, ExecIo, ExecRequest,
    Mount, MountKind, RestoreRequest, User,
};
