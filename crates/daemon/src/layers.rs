//! The layers of images on this node: listed, removed on request, and collected by themselves.
//!
//! A layer is in use while a service of this node or an unfinished migration names it, also as one of another platform. An unused one stays for some time,
//! so that a service that comes back brings no layers along; for less time when the disk runs short. The layers of an
//! image that was pulled stay for as long as there is room: a node may have lost its registry when it needs them again.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use godwit_api::v1 as api;
use godwit_engine::image::{Collector, Digest, ImageError, NamedImage, Store, StoredLayer};
use tonic::Status;

use crate::node::Node;
use crate::status::internal;

/// How often unused layers are looked for.
const PERIOD: Duration = Duration::from_secs(600);
/// Below this part of the disk unused layers go, whatever their age, until [`ENOUGH_FREE`] is free: the thresholds
/// at which the kubelet collects images (its documentation, "Garbage collection of images").
const LITTLE_FREE: f64 = 0.15;
const ENOUGH_FREE: f64 = 0.20;
/// How long a request to remove waits for services that are being created or arrive.
const PATIENCE: Duration = Duration::from_secs(5);

/// The layers that services and unfinished migrations of this node name, with the names of the services; and all else of the
/// images that have these layers.
fn used<'a>(
    node: &Node,
    images: impl IntoIterator<Item = &'a NamedImage>,
) -> Result<BTreeMap<Digest, BTreeSet<String>>, Status> {
    let images: Vec<_> = images
        .into_iter()
        .map(|named| (named.image.layers.iter().map(ToString::to_string).collect::<Vec<_>>(), named))
        .collect();
    let services = node.state.services().map_err(internal)?.into_iter().map(|owned| owned.service);
    let migrating =
        node.local().journal.unfinished().map_err(internal)?.into_iter().map(|entry| entry.service);
    let mut used: BTreeMap<_, BTreeSet<_>> = BTreeMap::new();
    for service in services.chain(migrating) {
        let of_image = images.iter().filter(|(layers, _)| !layers.is_empty() && *layers == service.layers);
        let of_image = of_image.flat_map(|(_, named)| named.image.blobs()).cloned();
        for digest in service.blobs().map_err(internal)?.into_iter().chain(of_image) {
            used.entry(digest).or_default().insert(service.name.to_string());
        }
    }
    Ok(used)
}

/// The layers of this node, those used last first.
pub(crate) async fn list(node: &Arc<Node>) -> Result<Vec<api::ImageLayer>, Status> {
    let store = Arc::clone(&node.local().store);
    let read = move || Ok::<_, ImageError>((store.layers()?, store.all_named()?));
    let (layers, images) = tokio::task::spawn_blocking(read).await.map_err(internal)?.map_err(internal)?;
    let used = used(node, &images)?;
    let entry = |layer: StoredLayer| api::ImageLayer {
        services: used.get(&layer.digest).into_iter().flatten().cloned().collect(),
        digest: layer.digest.to_string(),
        bytes: layer.bytes,
        last_used_ms: milliseconds(layer.last_used),
    };
    Ok(layers.into_iter().rev().map(entry).collect())
}

fn milliseconds(time: SystemTime) -> i64 {
    let since = time.duration_since(UNIX_EPOCH).unwrap_or_default();
    i64::try_from(since.as_millis()).unwrap_or(i64::MAX)
}

/// Removes these layers and names of images, or all layers that are not in use when none is named. Either all of them go
/// or, with the reason, none.
pub(crate) async fn remove(node: &Arc<Node>, wanted: &[String]) -> Result<api::ImageRemoveResponse, Status> {
    let begun = tokio::time::Instant::now();
    loop {
        let (this, wanted) = (Arc::clone(node), wanted.to_vec());
        let removed =
            tokio::task::spawn_blocking(move || remove_now(&this, &wanted)).await.map_err(internal)??;
        if let Some(removed) = removed {
            return Ok(removed);
        }
        if begun.elapsed() > PATIENCE {
            return Err(Status::unavailable(
                "a service is being created or is arriving, or an image is being pulled, and needs its layers; try again when that has ended",
            ));
        }
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

/// `None`: another task holds the layers now.
fn remove_now(node: &Node, wanted: &[String]) -> Result<Option<api::ImageRemoveResponse>, Status> {
    let store = &node.local().store;
    let Some(mut collector) = store.collector() else { return Ok(None) };
    let layers = store.layers().map_err(internal)?;
    let images = store.all_named().map_err(internal)?;
    // What goes keeps nothing.
    let stays = |named: &&NamedImage| !wanted.iter().any(|text| means(text, named));
    let used = used(node, images.iter().filter(stays))?;
    let Chosen { names, layers: chosen } = choose_all(wanted, layers, &images, &used)?;
    for name in &names {
        collector.unname(name).map_err(internal)?;
    }
    take_out(&mut collector, &chosen)?;
    // A layer that goes by its digest takes the names of its images along.
    let torn = collector.unname_torn().map_err(internal)?;
    collector.delete().map_err(internal)?;
    let entry = |layer: StoredLayer| api::ImageLayer {
        services: Vec::new(),
        digest: layer.digest.to_string(),
        bytes: layer.bytes,
        last_used_ms: milliseconds(layer.last_used),
    };
    let removed = chosen.into_iter().map(entry).collect();
    Ok(Some(api::ImageRemoveResponse { removed, names: names.into_iter().chain(torn).collect() }))
}

fn take_out(collector: &mut Collector<'_>, layers: &[StoredLayer]) -> Result<(), Status> {
    layers.iter().try_for_each(|layer| collector.remove(&layer.digest)).map_err(internal)
}

/// What is removed.
#[derive(Debug, Default)]
struct Chosen {
    names: Vec<String>,
    layers: Vec<StoredLayer>,
}

/// What a user means by whole references of images and by digests of layers or their beginnings; by none, all layers that
/// no service uses. With an image go the layers that nothing else needs.
fn choose_all(
    wanted: &[String],
    layers: Vec<StoredLayer>,
    images: &[NamedImage],
    used: &BTreeMap<Digest, BTreeSet<String>>,
) -> Result<Chosen, Status> {
    if wanted.is_empty() {
        let unused = layers.into_iter().filter(|layer| !used.contains_key(&layer.digest));
        return Ok(Chosen { layers: unused.collect(), ..Chosen::default() });
    }
    let is_meant = |named: &&NamedImage| wanted.iter().any(|text| means(text, named));
    let (going, staying): (Vec<_>, Vec<_>) = images.iter().partition(is_meant);
    let needed: BTreeSet<_> = staying.iter().flat_map(|named| named.image.blobs()).collect();
    let freed = going.iter().flat_map(|named| named.image.blobs());
    let mut digests: BTreeSet<_> =
        freed.filter(|layer| !needed.contains(layer) && !used.contains_key(layer)).cloned().collect();
    let names: Vec<_> = going.iter().map(|named| named.image.reference.clone()).collect();
    for wanted in wanted.iter().filter(|text| !going.iter().any(|named| means(text, named))) {
        digests.insert(choose(wanted, &layers, used)?.digest);
    }
    let layers = layers.into_iter().filter(|layer| digests.contains(&layer.digest));
    Ok(Chosen { names, layers: layers.collect() })
}

/// Whether a user means an image by this: its reference, with its digest in place of the tag or not, or its digest.
fn means(text: &str, named: &NamedImage) -> bool {
    let (reference, digest) = (&named.image.reference, named.digest.to_string());
    let path = reference.rfind('/').map_or(0, |slash| slash + 1);
    let end = reference[path..].find([':', '@']).map_or(reference.len(), |end| path + end);
    *text == *reference
        || *text == digest
        || text.strip_prefix(&reference[..end]) == Some(&format!("@{digest}"))
}

/// The layer that a user means by a digest or its beginning.
fn choose(
    wanted: &str,
    layers: &[StoredLayer],
    used: &BTreeMap<Digest, BTreeSet<String>>,
) -> Result<StoredLayer, Status> {
    let hex = wanted.strip_prefix("sha256:").unwrap_or(wanted);
    let mut matching = layers.iter().filter(|layer| !hex.is_empty() && layer.digest.hex().starts_with(hex));
    let (Some(layer), None) = (matching.next(), matching.next()) else {
        return Err(Status::not_found(format!(
            "{wanted:?} is neither an image of this node nor the beginning of exactly one layer's digest; `godwit image ls` lists images, `godwit image ls --layers` layers"
        )));
    };
    if let Some(services) = used.get(&layer.digest) {
        let services: Vec<_> = services.iter().map(String::as_str).collect();
        return Err(Status::failed_precondition(format!(
            "layer {} is used by {}; remove or migrate that first",
            layer.digest,
            services.join(", ")
        )));
    }
    Ok(layer.clone())
}

/// Removes unused layers, as long as the daemon runs.
pub(crate) async fn tend(node: &Arc<Node>, keep: Duration) {
    let mut clock = tokio::time::interval(PERIOD);
    loop {
        clock.tick().await;
        let this = Arc::clone(node);
        match tokio::task::spawn_blocking(move || collect(&this, keep)).await {
            Ok(Ok(())) => {}
            Ok(Err(error)) => tracing::error!(error = error.message(), "unused layers cannot be removed"),
            Err(error) => tracing::error!(%error, "unused layers cannot be removed"),
        }
    }
}

/// One run; when another task holds the layers, the next run does the work.
fn collect(node: &Node, keep: Duration) -> Result<(), Status> {
    let store = &node.local().store;
    let Some(mut collector) = store.collector() else { return Ok(()) };
    let images = store.all_named().map_err(internal)?;
    let used = used(node, &images)?;
    // In this way their last use is known to within a period.
    used.keys().try_for_each(|digest| store.touch(digest)).map_err(internal)?;
    let named: BTreeSet<_> = images.iter().flat_map(|named| named.image.blobs()).collect();
    let unused = store.layers().map_err(internal)?.into_iter();
    let (pulled, unused): (Vec<_>, Vec<_>) = unused
        .filter(|layer| !used.contains_key(&layer.digest))
        .partition(|layer| named.contains(&layer.digest));
    let shortage = shortage(store)?;
    let mut going = going(&unused, SystemTime::now(), keep, shortage).to_vec();
    let freed = going.iter().map(|layer| layer.bytes).fold(0, u64::saturating_add);
    going.extend_from_slice(until_freed(&pulled, shortage.saturating_sub(freed)));
    if going.is_empty() {
        return Ok(());
    }
    let bytes: u64 = going.iter().map(|layer| layer.bytes).fold(0, u64::saturating_add);
    take_out(&mut collector, &going)?;
    collector.unname_torn().map_err(internal)?;
    tracing::info!(layers = going.len(), bytes, "layers that no service used lately are removed");
    collector.delete().map_err(internal)
}

/// Of layers, in the order of their last use, as many as free these bytes.
fn until_freed(layers: &[StoredLayer], bytes: u64) -> &[StoredLayer] {
    let mut freed: u64 = 0;
    let stays = layers.iter().position(|layer| {
        let is_enough = freed >= bytes;
        freed = freed.saturating_add(layer.bytes);
        is_enough
    });
    &layers[..stays.unwrap_or(layers.len())]
}

/// Of unused layers, in the order of their last use, those that go: the ones that are older than `keep`, and further
/// ones until `shortage` bytes are free.
fn going(unused: &[StoredLayer], now: SystemTime, keep: Duration, shortage: u64) -> &[StoredLayer] {
    // A time in the future is that of a clock that was put back.
    let is_old = |layer: &StoredLayer| now.duration_since(layer.last_used).is_ok_and(|age| age >= keep);
    let old = unused.iter().take_while(|layer| is_old(layer)).count();
    let more = until_freed(unused, shortage).len();
    &unused[..old.max(more)]
}

/// Bytes that have to become free on the store's disk; 0 while enough are.
fn shortage(store: &Store) -> Result<u64, Status> {
    let (free, all) = store.space().map_err(internal)?;
    #[allow(clippy::cast_precision_loss, clippy::cast_possible_truncation, clippy::cast_sign_loss)]
    let part = |part: f64| (all as f64 * part) as u64;
    Ok(if free < part(LITTLE_FREE) { part(ENOUGH_FREE).saturating_sub(free) } else { 0 })
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use godwit_engine::image::PlatformLayers;

    use super::*;

    const DAY: Duration = Duration::from_secs(24 * 3600);

    fn layers(ages: &[u32]) -> (Vec<StoredLayer>, SystemTime) {
        let now = UNIX_EPOCH + 1000 * DAY;
        let layer = |&days: &u32| StoredLayer {
            digest: format!("sha256:{:064x}", days).parse().unwrap(),
            bytes: 10,
            last_used: now - days * DAY,
        };
        (ages.iter().map(layer).collect(), now)
    }

    #[test]
    fn what_was_not_used_for_long_goes_and_the_rest_stays_while_there_is_room() {
        let (unused, now) = layers(&[9, 7, 3, 0]);
        assert_eq!(going(&unused, now, 7 * DAY, 0).len(), 2);
        assert!(going(&unused, now, 10 * DAY, 0).is_empty());
        assert_eq!(going(&unused, now, Duration::ZERO, 0).len(), 4);
    }

    #[test]
    fn when_the_disk_is_short_as_many_go_as_are_needed_the_oldest_first() {
        let (unused, now) = layers(&[9, 7, 3, 0]);
        for (shortage, count) in [(1, 2), (20, 2), (21, 3), (30, 3), (1000, 4)] {
            assert_eq!(going(&unused, now, 7 * DAY, shortage).len(), count, "{shortage}");
        }
    }

    #[test]
    fn with_an_image_go_the_layers_that_nothing_else_needs() {
        let (all, _) = layers(&[1, 2, 3, 4]);
        let digests: Vec<_> = all.iter().map(|layer| layer.digest.clone()).collect();
        let image = |reference: &str, layers: &[Digest]| NamedImage {
            digest: digests[0].clone(),
            image: godwit_engine::image::Image {
                layers: layers.to_vec(),
                config: godwit_engine::image::ImageConfig::default(),
                architecture: "amd64".into(),
                reference: reference.into(),
                id: None,
                platforms: Vec::new(),
                neutral: None,
            },
            pulled_ms: 0,
        };
        let images = [image("one", &digests[..3]), image("two", &digests[..1])];
        // The first layer is the other image's, too, the second is a service's.
        let used = BTreeMap::from([(digests[1].clone(), BTreeSet::from(["web".to_owned()]))]);
        let chosen = |wanted: &[&str]| {
            let wanted: Vec<_> = wanted.iter().map(|text| (*text).to_owned()).collect();
            choose_all(&wanted, all.clone(), &images, &used)
        };
        let one = chosen(&["one"]).unwrap();
        assert_eq!((one.names, one.layers), (vec!["one".to_owned()], vec![all[2].clone()]));
        let both = chosen(&["one", "two", &digests[3].to_string()]).unwrap();
        assert_eq!(
            (both.names.len(), both.layers),
            (2, vec![all[0].clone(), all[2].clone(), all[3].clone()])
        );
        assert!(chosen(&["one", "three"]).is_err() && chosen(&["one", &digests[1].to_string()]).is_err());
        let pruned = chosen(&[]).unwrap();
        assert_eq!((pruned.names.len(), pruned.layers.len()), (0, 3));
    }

    #[test]
    fn layers_of_other_platforms_go_with_their_image_and_stay_with_it() {
        let (all, _) = layers(&[1, 2, 3]);
        let digests: Vec<_> = all.iter().map(|layer| layer.digest.clone()).collect();
        // The first layer is common to both platforms.
        let arm64 = PlatformLayers {
            machine: "aarch64".into(),
            layers: vec![digests[0].clone(), digests[2].clone()],
            id: None,
        };
        let image = |reference: &str, own: &[Digest], platforms| NamedImage {
            digest: digests[0].clone(),
            image: godwit_engine::image::Image {
                layers: own.to_vec(),
                config: godwit_engine::image::ImageConfig::default(),
                architecture: "amd64".into(),
                reference: reference.into(),
                id: None,
                platforms,
                neutral: None,
            },
            pulled_ms: 0,
        };
        let images =
            [image("both", &digests[..2], vec![arm64.clone()]), image("one", &digests[..1], Vec::new())];
        let chosen = |images: &[NamedImage], wanted: &str, used: &BTreeMap<_, _>| {
            choose_all(&[wanted.to_owned()], all.clone(), images, used).unwrap().layers
        };
        let unused = BTreeMap::new();
        assert_eq!(chosen(&images, "both", &unused), all[1..]);
        assert_eq!(chosen(&images[..1], "both", &unused), all);
        let used = BTreeMap::from([(digests[2].clone(), BTreeSet::from(["web".to_owned()]))]);
        assert_eq!(chosen(&images, "both", &used), all[1..2]);
        let other = image("other", &digests[1..2], vec![arm64]);
        assert_eq!(chosen(&[images[0].clone(), other], "both", &unused), []);
    }

    #[test]
    fn an_image_is_meant_by_its_reference_and_by_its_digest() {
        let digest: Digest = format!("sha256:{}", "ab".repeat(32)).parse().unwrap();
        let named = |reference: &str| NamedImage {
            digest: digest.clone(),
            image: godwit_engine::image::Image {
                layers: Vec::new(),
                config: godwit_engine::image::ImageConfig::default(),
                architecture: "amd64".into(),
                reference: reference.into(),
                id: None,
                platforms: Vec::new(),
                neutral: None,
            },
            pulled_ms: 0,
        };
        for reference in ["h:5/a:1", "h:5/a"] {
            for text in [reference.to_owned(), digest.to_string(), format!("h:5/a@{digest}")] {
                assert!(means(&text, &named(reference)), "{text}");
            }
            for text in
                ["h:5/a@".to_owned(), "h:5/b".into(), "a".into(), format!("h@{digest}"), String::new()]
            {
                assert!(!means(&text, &named(reference)), "{text}");
            }
        }
    }

    #[test]
    fn what_was_pulled_goes_for_room_alone() {
        let (pulled, _) = layers(&[9, 7]);
        for (bytes, count) in [(0, 0), (1, 1), (10, 1), (11, 2), (1000, 2)] {
            assert_eq!(until_freed(&pulled, bytes).len(), count, "{bytes}");
        }
    }

    #[test]
    fn a_layer_from_the_future_stays() {
        let (mut unused, now) = layers(&[0]);
        unused[0].last_used = now + DAY;
        assert!(going(&unused, now, Duration::ZERO, 0).is_empty());
        assert_eq!(going(&unused, now, Duration::ZERO, 1).len(), 1);
    }

    #[test]
    fn a_layer_is_chosen_by_the_beginning_of_its_digest_if_nobody_uses_it() {
        let (all, _) = layers(&[1, 0x11]);
        let mut used = BTreeMap::new();
        let whole = all[1].digest.to_string();
        assert_eq!(choose(&whole, &all, &used).unwrap(), all[1]);
        assert_eq!(choose(&whole["sha256:".len()..], &all, &used).unwrap(), all[1]);
        for wrong in ["", "0", "f", "sha256:"] {
            let refused = choose(wrong, &all, &used).unwrap_err();
            assert!(refused.message().contains("exactly one"), "{wrong}: {refused}");
        }
        used.insert(all[1].digest.clone(), BTreeSet::from(["db".to_owned(), "web".to_owned()]));
        assert!(choose(&whole, &all, &used).unwrap_err().message().contains("used by db, web"));
    }
}
