//! Whether there is room on the disk for a service's layers and files: on that of its engine, if another one keeps it.

use std::io;
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
    (missing, engine_layers): (&[Layer], &[String]),
) -> Result<Option<String>, DestinationError> {
    let config = local.config(service);
    let storage = match &service.kept {
        None => None,
        Some(kept) => match local.engine.storage(&config).await {
            Ok(storage) => storage.map(|storage| (kept.keeper.title(), storage)),
            Err(error) => return Ok(Some(crate::error_chain(&error))),
        },
    };
    let (free, needed, disk) = match storage {
        None => {
            let free = local.store.available_bytes()?;
            (free, disk_bytes(missing, open.tree_bytes), "its disk".to_owned())
        }
        Some((engine, storage)) => {
            let needed = engine_bytes(missing, engine_layers, open.tree_bytes);
            let disk = format!("the disk of {engine} there ({})", storage.display());
            match free_bytes(&storage) {
                Ok(free) => (free, needed, disk),
                Err(error) => return Ok(Some(format!("{disk} does not tell its free space: {error}"))),
            }
        }
    };
    // What was sent ahead gives way, or is a part of what comes.
    let free = free.saturating_add(local.kept_files.bytes());
    let lacks =
        || format!("{disk} has {} MiB free and {} MiB are needed", free >> 20, needed.div_ceil(1 << 20));
    Ok((needed > free).then(lacks))
}

/// What an offer needs where godwit itself has the layers.
pub(super) fn disk_bytes(missing: &[Layer], tree_bytes: u64) -> u64 {
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
