//! Whether there is room on the disk for a service's layers and files: on that of its engine, if another one keeps it.

use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use super::DestinationError;
use crate::message::{Layer, Open};
use crate::resources::NodeResources;
use crate::service::Service;

/// Room for a layer: its blob, what is in it, and as much again while it is unpacked.
const LAYER_COPIES: u64 = 3;

/// The disk that a service's layers and files come to.
struct Disk {
    /// As messages call it.
    name: String,
    /// Free bytes.
    free: u64,
    /// What was sent ahead lies there, too.
    has_kept: bool,
}

impl Disk {
    /// The disk, or why it does not tell.
    async fn of(local: &NodeResources, service: &Service) -> Result<Result<Self, String>, DestinationError> {
        let Some(of) = &service.kept else {
            let free = local.store.available_bytes()?;
            return Ok(Ok(Self { name: "its disk".to_owned(), free, has_kept: true }));
        };
        let storage = match local.engine.storage(&local.config(service)).await {
            Ok(storage) => storage.unwrap_or_else(|| local.layout.state.clone()),
            Err(error) => return Ok(Err(crate::error_chain(&error))),
        };
        let name = format!("the disk of {} there ({})", of.keeper.title(), storage.display());
        let told = free_bytes(&storage).and_then(|free| {
            let has_kept = is_one_disk(&storage, &local.layout.state)?;
            Ok(Self { name: name.clone(), free, has_kept })
        });
        Ok(told.map_err(|error| format!("{name} does not tell its free space: {error}")))
    }
}

impl Disk {
    /// Whether it helps to give up what was sent ahead, where so many bytes come.
    fn is_made_room_on(&self, bytes: u64) -> bool {
        self.has_kept && bytes > self.free
    }
}

/// What speaks against it, where `missing` has to come, and its engine has these layers.
pub(super) async fn lacks_room(
    local: &NodeResources,
    service: &Service,
    open: &Open,
    layers: (&[Layer], &[String]),
) -> Result<Option<String>, DestinationError> {
    let needed = needed(service, open, layers);
    let disk = match Disk::of(local, service).await? {
        Ok(disk) => disk,
        Err(reason) => return Ok(Some(reason)),
    };
    // What was sent ahead gives way, or is a part of what comes: so it counts as free.
    let free = disk.free.saturating_add(if disk.has_kept { local.kept_files.bytes() } else { 0 });
    let lacks = || {
        format!("{} has {} MiB free and {} MiB are needed", disk.name, free >> 20, needed.div_ceil(1 << 20))
    };
    Ok((needed > free).then(lacks))
}

/// Gives up what was sent ahead for others where this service needs the room; `of_it` bytes of what it needs are there.
pub(super) async fn make_room(
    local: &NodeResources,
    service: &Service,
    open: &Open,
    layers: (&[Layer], &[String]),
    of_it: u64,
) -> Result<(), DestinationError> {
    let more = needed(service, open, layers).saturating_sub(of_it);
    // One that does not tell has been named, and refused.
    if let Ok(disk) = Disk::of(local, service).await?
        && disk.is_made_room_on(more)
    {
        local.kept_files.give_up_but(&service.id).await;
    }
    Ok(())
}

/// Bytes of disk that it needs.
fn needed(service: &Service, open: &Open, (missing, engine_layers): (&[Layer], &[String])) -> u64 {
    match service.kept {
        None => disk_bytes(missing, open.tree_bytes),
        Some(_) => engine_bytes(missing, engine_layers, open.tree_bytes),
    }
}

fn is_one_disk(one: &Path, other: &Path) -> io::Result<bool> {
    Ok(one.metadata()?.dev() == other.metadata()?.dev())
}

/// What an offer needs where godwit itself has the layers.
fn disk_bytes(missing: &[Layer], tree_bytes: u64) -> u64 {
    let layers = missing.iter().map(|layer| layer.bytes.saturating_mul(LAYER_COPIES));
    layers.fold(tree_bytes, u64::saturating_add)
}

/// The same where an engine has them. An engine that has some may have those of this image: it says itself when there is no
/// room for the others, and the service is not frozen by then.
fn engine_bytes(missing: &[Layer], engine_layers: &[String], tree_bytes: u64) -> u64 {
    let image = if engine_layers.is_empty() { missing } else { &[] };
    image.iter().map(|layer| layer.bytes).fold(tree_bytes, u64::saturating_add)
}

fn free_bytes(directory: &Path) -> io::Result<u64> {
    let stat = rustix::fs::statvfs(directory)?;
    Ok(stat.f_bavail.saturating_mul(stat.f_frsize))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_sent_ahead_gives_way_only_on_the_disk_that_is_short() {
        let disk = |free, has_kept| Disk { name: String::new(), free, has_kept };
        assert!(disk(9, true).is_made_room_on(10));
        assert!(!disk(10, true).is_made_room_on(10), "there is room");
        assert!(!disk(9, false).is_made_room_on(10), "it lies elsewhere");
    }

    #[test]
    fn no_sum_of_announced_bytes_wraps() {
        let layer = |bytes| Layer { digest: String::new(), bytes };
        assert_eq!(disk_bytes(&[layer(1), layer(2)], 4), 13);
        assert_eq!(disk_bytes(&[layer(u64::MAX / 3), layer(u64::MAX / 3)], 7), u64::MAX);
        assert_eq!(engine_bytes(&[layer(u64::MAX)], &[], 7), u64::MAX);
    }

    #[test]
    fn the_image_of_an_engine_that_may_have_its_layers_is_not_counted() {
        let image = [Layer { digest: String::new(), bytes: 5 }];
        assert_eq!(engine_bytes(&image, &[], 4), 9);
        assert_eq!(engine_bytes(&image, &["sha256:01".into()], 4), 4);
    }
}
