//! A move that is prepared: layers and pages come, and are here when the service does. It is in no journal, and reserves
//! nothing but memory while it lasts.

use std::sync::Arc;

use godwit_memory::PAGE_SIZE;

use super::admit::{Asked, tell_retained};
use super::layers::receive_layers;
use super::page_receiver::{PageReceiver, PageReceiverError};
use super::receive::given_up;
use super::{DestinationError, answer_to_failed};
use crate::link::Link;
use crate::message::{Accepted, Message, RetainEnd};
use crate::resources::{LocalError, NodeResources};

/// Takes one in, to its end.
pub(super) async fn take_in(
    local: &Arc<NodeResources>,
    link: &mut Link,
    asked: Asked,
) -> Result<(), DestinationError> {
    let ended = match retained(local, link, &asked).await {
        Ok(retained) => link.send(Message::RetainEnd(retained)).await.map_err(Into::into),
        Err(error) => {
            // The source may have gone.
            let _ = link.send(answer_to_failed(&error)).await;
            Err(error)
        }
    };
    drop(asked);
    ended
}

/// Takes layers and pages, and retains the pages.
async fn retained(
    local: &Arc<NodeResources>,
    link: &mut Link,
    asked: &Asked,
) -> Result<RetainEnd, DestinationError> {
    let Asked { service, id, memory_bytes, accepted, .. } = asked;
    let _memory =
        local.reserve_spare(*memory_bytes).map_err(|reason| DestinationError::Refused(vec![reason]))?;
    let here = local.retention.of(&service.id);
    let arrival = local.arrivals.expect(id, link.node(), &service.name);
    let key = here.as_ref().map(|here| here.key().bytes().to_vec().into()).unwrap_or_default();
    let accepted = Accepted { retained: here.is_some(), key, ..accepted.clone() };
    link.send(Message::Accepted(accepted)).await?;
    tell_retained(link, here.as_deref()).await?;
    let receiver = PageReceiver::start(local, id, *memory_bytes, here, arrival).await?;
    let failure = receiver.failure();
    let retained = tokio::select! {
        retained = receive(local, link, asked, &receiver) => retained,
        reason = failure => Err(DestinationError::Pages(reason)),
    };
    receiver.abandon(local, id).await?;
    retained
}

async fn receive(
    local: &Arc<NodeResources>,
    link: &mut Link,
    asked: &Asked,
    receiver: &PageReceiver,
) -> Result<RetainEnd, DestinationError> {
    let Asked { service, id, missing, registry, .. } = asked;
    receive_layers(local, link, service, missing, registry.as_ref()).await?;
    match link.receive().await? {
        Message::Retain => {}
        other => return Err(link.unexpected(&other, "Retain").into()),
    }
    tokio::select! {
        retained = retain(local, &service.id, receiver) => {
            let retained = retained?;
            let RetainEnd { bytes, left } = retained;
            tracing::info!(migration = %id, service = %service.name, bytes, left, "pages of a service are retained for its move");
            Ok(retained)
        }
        error = given_up(link) => Err(error),
    }
}

/// Retains what has come of a service's private memory, in place of what was retained of it before.
async fn retain(
    local: &Arc<NodeResources>,
    service: &str,
    receiver: &PageReceiver,
) -> Result<RetainEnd, DestinationError> {
    let (index, store) = receiver.index().await?;
    let (service, retaining) = (service.to_owned(), Arc::clone(local));
    let came = index.iter().map(|stored| stored.pages.saturating_mul(PAGE_SIZE)).fold(0, u64::saturating_add);
    let bytes = tokio::task::spawn_blocking(move || retaining.retention.copy_store(&service, &index, &store));
    let bytes = bytes.await?.map_err(PageReceiverError::from).map_err(LocalError::from)?;
    Ok(RetainEnd { bytes, left: came.saturating_sub(bytes) })
}
