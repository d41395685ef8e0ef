//! A move that is prepared: layers, files and pages come, and are here when the service does. It is in no journal, and reserves
//! nothing but memory and disk while it lasts.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use godwit_database::blocking::off_worker;
use godwit_engine::tree;
use godwit_memory::PAGE_SIZE;

use super::admit::{Asked, tell_retained};
use super::layers::receive_layers;
use super::page_receiver::{PageReceiver, PageReceiverError};
use super::receive::{first_of_tree, given_up, receive_tree_items};
use super::{DestinationError, answer_to_failed};
use crate::ahead::{Begun, Held, MOST_NAMES, OLDEST, Room};
use crate::link::Link;
use crate::message::{Accepted, FilesKept, Message, RetainEnd};
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

/// How long a preparation may take whatever it brings, and with how much of it each second longer. Memory and disk are promised
/// to it meanwhile.
const AT_LEAST: Duration = Duration::from_secs(600);
const SLOWEST: u64 = 64 << 10;

/// How long one may take that has announced so many bytes: no longer than what it brings stays.
fn longest(announced: u64) -> Duration {
    AT_LEAST.saturating_add(Duration::from_secs(announced / SLOWEST)).min(OLDEST)
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
    let (mut files, no_files) = match place_for_files(local, link.node(), asked).await {
        Ok((held, most)) => (Some((held, most)), String::new()),
        Err(why) => (None, why),
    };
    let accepted = Accepted {
        retained: here.is_some(),
        key,
        takes_files: files.is_some(),
        no_files,
        files: files.as_ref().map(|(held, _)| held.token()).unwrap_or_default().into(),
        ..accepted.clone()
    };
    link.send(Message::Accepted(accepted)).await?;
    tell_retained(link, here.as_deref()).await?;
    let receiver = PageReceiver::start(local, id, *memory_bytes, here, arrival).await?;
    let failure = receiver.failure();
    let layers = asked.missing.iter().map(|layer| layer.bytes);
    let announced = layers.fold(memory_bytes.saturating_add(asked.tree.announced.bytes), u64::saturating_add);
    let longest = longest(announced);
    let retained = tokio::select! {
        retained = receive(local, link, asked, &receiver, &mut files) => retained,
        reason = failure => Err(DestinationError::Pages(reason)),
        () = tokio::time::sleep(longest) => Err(DestinationError::Trickles(longest)),
    };
    receiver.abandon(local, id).await?;
    retained
}

async fn receive(
    local: &Arc<NodeResources>,
    link: &mut Link,
    asked: &Asked,
    receiver: &PageReceiver,
    files: &mut Option<(Held, Room)>,
) -> Result<RetainEnd, DestinationError> {
    let Asked { service, id, missing, registry, .. } = asked;
    receive_layers(local, link, service, missing, registry.as_ref()).await?;
    // An older source sends none.
    let first = first_of_tree(link, files.as_mut().map(|(held, _)| held)).await?;
    let next = match (first, files.take()) {
        (begin @ (Message::TreeBegin | Message::TreeOnto), Some((held, most))) => {
            let (held, bytes) = receive_files(link, asked, begin, (held, most)).await?;
            let token = held.token().into();
            tracing::info!(migration = %id, service = %service.name, bytes, "files of a service are kept for its move");
            drop(held);
            link.send(Message::FilesKept(FilesKept { token, bytes })).await?;
            link.receive().await?
        }
        (next, _) => next,
    };
    match next {
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

/// Where files may come, and how many bytes; why they may not, as a sentence.
async fn place_for_files(
    local: &NodeResources,
    source: &str,
    Asked { service, tree, .. }: &Asked,
) -> Result<(Held, Room), String> {
    let node = &local.node;
    if local.kept_files.keeps_none() {
        return Err(format!("node {node} keeps no files (godwitd serve --retained-files 0)"));
    }
    let told =
        |error: &(dyn std::error::Error + 'static)| format!("node {node}: {}", crate::error_chain(error));
    let directory = local.kept_files.made_directory().map_err(|error| told(&error))?;
    let against = local.engine.against_files_in(&local.config(service), &directory).await;
    if let Some(why) = against.map_err(|error| told(&error))? {
        return Err(format!("node {node}: {why}"));
    }
    let held = local.kept_files.hold(service, source).await;
    let mut held =
        held.ok_or_else(|| format!("node {node} still takes files of another preparation of it"))?;
    let most = held.make_room(tree.announced).map_err(|why| format!("node {node}: {why}"))?;
    Ok((held, most))
}

/// Takes a round of files. What broke off stays where there was something before: the source knows what it touched.
async fn receive_files(
    link: &mut Link,
    asked: &Asked,
    begin: Message,
    (mut held, most): (Held, Room),
) -> Result<(Held, u64), DestinationError> {
    // What is here can have another name, and go.
    let entries = held.names().saturating_mul(2).saturating_add(most.names).min(2 * MOST_NAMES);
    let begun: Option<Begun> = match begin {
        Message::TreeOnto => None,
        _ => Some(off_worker(|| held.begin())?),
    };
    let path = begun.as_ref().map(Begun::path).or(held.path()).map(Path::to_owned);
    let path = path.ok_or(DestinationError::Protocol("files onto others that are not here"))?;
    held.changes();
    let limits = tree::Limits { entries, bytes: most.bytes, ..asked.tree.limits };
    let received = match receive_tree_items(link, &path, limits).await {
        Ok(written) => {
            let synced = tokio::task::spawn_blocking(move || written.sync()).await?;
            synced.map_err(DestinationError::from)
        }
        Err(error) => Err(error),
    };
    let measured = match received {
        // What the next one puts in order, if it is not too much.
        Err(error @ DestinationError::Link(_)) if begun.is_none() => {
            if let Err(why) = off_worker(|| held.measure(most.bytes)) {
                tracing::warn!(service = %asked.service.name, why, "files that were sent ahead are given up");
                held.drop_it();
            }
            return Err(error);
        }
        Err(error) => Err(error),
        Ok(()) => {
            if let Some(begun) = begun {
                held.keep(begun);
            }
            off_worker(|| held.measure(most.bytes)).map_err(|why| DestinationError::Refused(vec![why]))
        }
    };
    match measured {
        Ok(bytes) => Ok((held, bytes)),
        // A full disk must not stay full for it.
        Err(error) => {
            held.drop_it();
            Err(error)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_preparation_may_take_as_long_as_a_slow_link_needs_and_no_longer_than_it_is_of_use() {
        assert_eq!(longest(0), Duration::from_secs(600));
        assert_eq!(longest(64 << 20), Duration::from_secs(600 + 1024));
        assert_eq!(longest(u64::MAX), OLDEST);
        let said = DestinationError::Trickles(longest(64 << 20)).to_string();
        assert!(said.contains("27 minutes") && said.contains("64 KiB"), "{said}");
    }
}
