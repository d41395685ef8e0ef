//! Images of this node by name: those that `godwit pull` and `godwit run REFERENCE` have brought from registries.
//!
//! The client pulls, with its user's credentials, and hands over a layout; here it is verified and unpacked.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::sync::Arc;

use godwit_api::v1 as api;
use godwit_engine::image::{ArchiveFault, Digest, ImageError, NamedImage};
use godwit_migration::error_chain;
use tonic::Status;

use crate::node::Node;
use crate::status::{internal, invalid};

/// More than any registry has in a reference, bytes.
const MAX_REFERENCE: usize = 1024;

/// Takes an image from a layout and notes its name.
pub(crate) async fn add(node: &Arc<Node>, request: api::ImageAddRequest) -> Result<api::Image, Status> {
    let api::ImageAddRequest { path, reference, digest } = request;
    if !Path::new(&path).is_absolute() {
        return Err(Status::invalid_argument(format!("{path} is not an absolute path")));
    }
    if reference.is_empty() || reference.len() > MAX_REFERENCE || reference.contains(char::is_control) {
        return Err(Status::invalid_argument(
            "an image needs a reference of at most 1024 printable characters",
        ));
    }
    let digest: Digest = digest.parse().map_err(invalid)?;
    let store = Arc::clone(&node.local().store);
    let named = tokio::task::spawn_blocking(move || {
        // Its layers are in use by nobody before the name is noted.
        let _hold = store.hold();
        let mut image = store.import_oci(Path::new(&path)).map_err(not_taken)?;
        image.reference = reference;
        store.name(digest, image).map_err(internal)
    });
    let named = named.await.map_err(internal)??;
    shown(node, vec![named])
        .await?
        .pop()
        .ok_or_else(|| Status::internal("an image has gone while it was added"))
}

/// Why an image was not taken. A blob that is another than its digest says may stand for a layer that the client took to be
/// here: it tries again.
fn not_taken(error: ImageError) -> Status {
    match error {
        ImageError::Archive { fault: ArchiveFault::BlobDigest { .. }, .. } => {
            Status::aborted(error_chain(&error))
        }
        ImageError::Store { .. } => internal(error),
        error => invalid(error),
    }
}

/// The images of this node that have names.
pub(crate) async fn list(node: &Arc<Node>) -> Result<Vec<api::Image>, Status> {
    let store = Arc::clone(&node.local().store);
    let named =
        tokio::task::spawn_blocking(move || store.all_named()).await.map_err(internal)?.map_err(internal)?;
    shown(node, named).await
}

async fn shown(node: &Arc<Node>, images: Vec<NamedImage>) -> Result<Vec<api::Image>, Status> {
    let store = Arc::clone(&node.local().store);
    let layers =
        tokio::task::spawn_blocking(move || store.layers()).await.map_err(internal)?.map_err(internal)?;
    let sizes: BTreeMap<_, _> = layers.into_iter().map(|layer| (layer.digest, layer.bytes)).collect();
    let services = node.state.services().map_err(internal)?;
    let entry = |named: NamedImage| {
        let image = named.image;
        let layers: Vec<_> = image.layers.iter().map(ToString::to_string).collect();
        let runs = services.iter().map(|owned| &owned.service).filter(|service| service.layers == layers);
        let blobs: BTreeSet<_> = image.blobs().collect();
        let bytes =
            blobs.into_iter().filter_map(|blob| sizes.get(blob)).copied().fold(0, u64::saturating_add);
        api::Image {
            services: runs.map(|service| service.name.to_string()).collect(),
            reference: image.reference,
            digest: named.digest.to_string(),
            architecture: image.architecture,
            bytes,
            pulled_ms: named.pulled_ms,
            layers,
        }
    };
    Ok(images.into_iter().map(entry).collect())
}
