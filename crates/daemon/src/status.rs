//! Errors as the answers of gRPC: sentences with their causes.

use godwit_migration::error_chain;
use tonic::Status;

/// Turns an error with its causes into a status of the given kind.
pub(crate) fn status(kind: fn(String) -> Status, error: &(dyn std::error::Error + 'static)) -> Status {
    kind(error_chain(error))
}

/// An error that is this node's, not the caller's.
pub(crate) fn internal(error: impl std::error::Error + 'static) -> Status {
    status(Status::internal, &error)
}

/// An error in what the caller asked for.
pub(crate) fn invalid(error: impl std::error::Error + 'static) -> Status {
    status(Status::invalid_argument, &error)
}
