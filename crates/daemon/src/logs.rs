//! The log of a service as a stream.

use std::pin::Pin;

use futures::Stream;
use godwit_api::v1::{LogEntry, LogsRequest};
use tonic::Status;

use crate::node::Node;

/// Streams the log.
pub(crate) async fn stream(
    _node: &Node,
    _request: LogsRequest,
) -> Result<Pin<Box<dyn Stream<Item = Result<LogEntry, Status>> + Send>>, Status> {
    Err(Status::unimplemented("logs"))
}
