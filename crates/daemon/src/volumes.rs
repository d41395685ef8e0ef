//! Volumes of this node: made, listed, removed. Services take them, and they move with services.

use std::sync::{Arc, PoisonError};

use godwit_api::v1 as api;
use godwit_database::blocking::off_worker;
use godwit_engine::tree::Snapshot;
use godwit_migration::{LocalError, Volume};
use tonic::Status;

use crate::node::{Claim, Node};
use crate::status::{internal, status};
use crate::{convert, services};

/// What a name begins with that nobody has chosen.
const MADE_UP: &str = "volume-";

/// Makes an empty volume; no other node of the cluster that answers may have one of its name.
pub(crate) async fn create(node: &Arc<Node>, name: &str) -> Result<api::Volume, Status> {
    let made_up = || format!("{MADE_UP}{}", ulid::Ulid::new().to_string().to_lowercase());
    let name = convert::volume_name(&if name.is_empty() { made_up() } else { name.to_owned() })?;
    // For a service of which no node knows.
    let user = ulid::Ulid::new().to_string();
    let question =
        api::CheckRequest { name: user.clone(), volumes: vec![name.to_string()], ..Default::default() };
    if let Some((sentence, _)) = services::ask_peers(node, question).await?.conflict {
        return Err(Status::already_exists(sentence));
    }
    let user = convert::service_name(&user)?;
    off_worker(|| {
        let _alone = node.claiming.lock().unwrap_or_else(PoisonError::into_inner);
        let claim = Claim { volumes: vec![name.clone()], ..Claim::default() };
        let conflict = node.conflict(&user, &claim, "", &node.name);
        if let Some(conflict) = conflict.map_err(internal)? {
            return Err(Status::already_exists(conflict.sentence));
        }
        let made = node.local().make_volume(&name).map_err(refused)?;
        Ok(shown(&made, 0))
    })
}

/// The volumes of this node.
pub(crate) async fn list(node: &Arc<Node>) -> Result<Vec<api::Volume>, Status> {
    let node = Arc::clone(node);
    let listing = tokio::task::spawn_blocking(move || {
        let volumes = node.local().volumes().map_err(internal)?;
        // One that has just changed its place, or its files, is shown without their size.
        let bytes = |volume: &Volume| Snapshot::scan(&volume.path).map_or(0, |found| found.bytes());
        Ok(volumes.iter().map(|volume| shown(volume, bytes(volume))).collect())
    });
    listing.await.map_err(internal)?
}

/// Removes a volume that no service has.
pub(crate) async fn remove(node: &Arc<Node>, name: &str) -> Result<(), Status> {
    let name = convert::volume_name(name)?;
    let node = Arc::clone(node);
    let removed = tokio::task::spawn_blocking(move || node.local().remove_volume(&name));
    removed.await.map_err(internal)?.map_err(refused)
}

fn shown(volume: &Volume, bytes: u64) -> api::Volume {
    api::Volume {
        name: volume.name.to_string(),
        service: volume.service.as_ref().map(ToString::to_string).unwrap_or_default(),
        path: volume.path.display().to_string(),
        bytes,
    }
}

fn refused(error: LocalError) -> Status {
    let kind = match &error {
        LocalError::VolumeExists { .. } => Status::already_exists,
        LocalError::NoVolume { .. } => Status::not_found,
        LocalError::VolumeTaken { .. } => Status::failed_precondition,
        _ => Status::internal,
    };
    status(kind, &error)
}
