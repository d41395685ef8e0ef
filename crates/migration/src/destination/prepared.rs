//! A migration that was only prepared: the pages that have come are retained as those of a service that left this node.

use godwit_memory::PAGE_SIZE;

use super::DestinationError;
use super::page_receiver::{PageReceiver, PageReceiverError};
use crate::resources::{LocalError, NodeResources};
use crate::retained::Retained;

/// Retains what has come of a service's private memory, in place of what was retained of it before. Returns how many bytes
/// these are.
pub(super) async fn retain(
    local: &NodeResources,
    service: &str,
    receiver: &PageReceiver,
) -> Result<u64, DestinationError> {
    let (index, store) = receiver.index().await?;
    let bytes =
        index.iter().map(|stored| stored.pages.saturating_mul(PAGE_SIZE)).fold(0, u64::saturating_add);
    let room = local.retention.make_room(service, bytes);
    let copying = tokio::task::spawn_blocking(move || Retained::of_store(&index, &store, room));
    let retained = copying.await?.map_err(PageReceiverError::from).map_err(LocalError::from)?;
    let bytes = retained.bytes();
    local.retention.retain(service, retained);
    Ok(bytes)
}
