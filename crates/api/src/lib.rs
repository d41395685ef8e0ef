//! The gRPC definitions of godwit, versioned, and their generated types.
//!
//! ```text
//!  proto/godwit/v1/*.proto ── tonic ──▶ v1 ──▶ godwit, godwit-lab (clients), godwitd (server of users and of nodes)
//! ```
//!
//! `proto/` is the source; [`v1`] is what `tonic` makes of it. What nodes say to each other on data connections is not
//! here, but in `godwit_migration::message`. Nothing here depends on another crate of the workspace.

mod cause;

pub use cause::innermost;

/// Version 1 of the API.
#[allow(missing_docs, clippy::all, clippy::pedantic)]
pub mod v1 {
    tonic::include_proto!("godwit.v1");
}

/// The newest version of the conversation of a migration's nodes; raised when an older program would misunderstand it.
pub const PROTOCOL_VERSION: u32 = 3;
