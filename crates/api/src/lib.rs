//! The gRPC definitions of godwit, versioned, and their generated types.
//!
//! `proto/` is the source; [`v1`] is what `tonic` makes of it.

/// Version 1 of the API.
#[allow(missing_docs, clippy::all, clippy::pedantic)]
pub mod v1 {
    tonic::include_proto!("godwit.v1");
}

/// The version both nodes of a migration must speak; raised when their conversation changes.
pub const PROTOCOL_VERSION: u32 = 2;
