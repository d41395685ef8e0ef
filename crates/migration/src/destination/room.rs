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

/// What speaks against it, where `missing` has to come, and its engine has these layers.
pub(super) async fn lacks_room(
    local: &NodeResources,
    service: &Service,
    open: &Open,
    layers: (&[Layer], &[String]),
) -> Result<Option<String>, DestinationError> {
    let config = local.config(service);
    let needed = needed(service, open, layers);
    let kept = local.kept_files.bytes();
    let (free, disk) = match &service.kept {
        None => (local.store.available_bytes()?.saturating_add(kept), "its disk".to_owned()),
        Some(of) => {
            let storage = match local.engine.storage(&config).await {
                Ok(storage) => storage.unwrap_or_else(|| local.layout.state.clone()),
                Err(error) => return Ok(Some(crate::error_chain(&error))),
            };
            let disk = format!("the disk of {} there ({})", of.keeper.title(), storage.display());
            let asked =
                || Ok::<_, io::Error>((free_bytes(&storage)?, is_one_disk(&storage, &local.layout.state)?));
            match asked() {
                Ok((free, is_one)) => (free.saturating_add(if is_one { kept } else { 0 }), disk),
                Err(error) => return Ok(Some(format!("{disk} does not tell its free space: {error}"))),
            }
        }
    };
    let lacks =
        || format!("{disk} has {} MiB free and {} MiB are needed", free >> 20, needed.div_ceil(1 << 20));
    // What was sent ahead gives way, or is a part of what comes: so it counts as free.
    Ok((needed > free).then(lacks))
}

/// Bytes of disk that it needs.
pub(super) fn needed(service: &Service, open: &Open, (missing, engine_layers): (&[Layer], &[String])) -> u64 {
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
