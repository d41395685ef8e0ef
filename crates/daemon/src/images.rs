//! Images of this node by name: those that `godwit pull` and `godwit run REFERENCE` have brought from registries, and
//! `godwit image import` from archives.
//!
//! The client pulls, with its user's credentials, and hands over a layout; here it is verified and unpacked.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::sync::Arc;

use godwit_api::v1 as api;
use godwit_engine::image::{
    ArchiveFault, Digest, Image, ImageConfig, ImageError, Imported, NamedImage, machine_of, whole_reference,
};
use godwit_migration::error_chain;
use tonic::Status;

use crate::convert::shown_platform;
use crate::modules;
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
    let digest = Some(digest).filter(|digest| !digest.is_empty());
    let digest: Option<Digest> = digest.map(|digest| digest.parse()).transpose().map_err(invalid)?;
    let store = Arc::clone(&node.local().store);
    let named = tokio::task::spawn_blocking(move || {
        // Its layers are in use by nobody before the name is noted.
        let _hold = store.hold();
        let imported = store.import_known(Path::new(&path)).map_err(not_taken)?;
        let reference = name_for(reference, &path, &imported)?;
        let Imported { mut image, digest: found, .. } = imported;
        modules::check(&store, &image)
            .map_err(|why| Status::failed_precondition(format!("the image in {path} is not taken: {why}")))?;
        image.reference = reference;
        // Of an image for one platform its manifest alone may be there, where the digest is that of an index.
        if let Some(digest) = digest
            .as_ref()
            .filter(|digest| **digest != found && (!image.platforms.is_empty() || image.neutral.is_some()))
        {
            return Err(Status::invalid_argument(format!(
                "{path} has the image {found}, and {digest} was asked for; take it again"
            )));
        }
        store.name(digest.unwrap_or(found), image).map_err(internal)
    });
    let named = named.await.map_err(internal)??;
    shown_one(node, named).await
}

/// The name that an image gets: the one that was asked for, or the whole one that it has in its archive.
fn name_for(asked: String, path: &str, imported: &Imported) -> Result<String, Status> {
    let name = match (asked, &imported.name) {
        (asked, None) if asked.is_empty() => {
            return Err(Status::invalid_argument(format!(
                "the image in {path} has no whole name there, such as shop/web:7; give it one"
            )));
        }
        (asked, Some(name)) if asked.is_empty() => {
            let said = |error| {
                format!(
                    "the image in {path} is called {name:?} there, which cannot be its name here ({error}); give it another"
                )
            };
            whole_reference(name).map_err(|error| Status::invalid_argument(said(error)))?
        }
        (asked, _) => asked,
    };
    if name.len() > MAX_REFERENCE || name.contains(char::is_control) {
        return Err(Status::invalid_argument(
            "an image needs a reference of at most 1024 printable characters",
        ));
    }
    Ok(name)
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

/// One of them.
pub(crate) async fn shown_one(node: &Arc<Node>, named: NamedImage) -> Result<api::Image, Status> {
    let shown = shown(node, vec![named]).await?.pop();
    shown.ok_or_else(|| Status::internal("an image has gone while it was shown"))
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
        let bytes = |blobs: BTreeSet<&Digest>| {
            blobs.into_iter().filter_map(|blob| sizes.get(blob)).copied().fold(0, u64::saturating_add)
        };
        let mut platforms = platforms(&image);
        for (shown, layers) in platforms.iter_mut().zip(
            std::iter::once(&image.layers).chain(image.platforms.iter().map(|platform| &platform.layers)),
        ) {
            shown.bytes = bytes(layers.iter().collect());
        }
        api::Image {
            services: runs.map(|service| service.name.to_string()).collect(),
            digest: named.digest.to_string(),
            bytes: bytes(image.blobs().collect()),
            pulled_ms: named.pulled_ms,
            layers,
            platforms,
            run: Some(run(&image.config)),
            modules: image.neutral.iter().flat_map(|neutral| &neutral.modules).map(modules::shown).collect(),
            architecture: image.architecture,
            reference: image.reference,
        }
    };
    Ok(images.into_iter().map(entry).collect())
}

/// The platforms of an image, this node's first, without bytes.
fn platforms(image: &Image) -> Vec<api::ImagePlatform> {
    let own = api::ImagePlatform {
        machine: machine_of(&image.architecture).unwrap_or(&image.architecture).to_owned(),
        architecture: image.architecture.clone(),
        id: image.id.as_ref().map(ToString::to_string).unwrap_or_default(),
        layers: image.layers.iter().map(ToString::to_string).collect(),
        bytes: 0,
    };
    std::iter::once(own).chain(image.platforms.iter().map(shown_platform)).collect()
}

fn run(config: &ImageConfig) -> api::ImageRun {
    let config = config.clone();
    api::ImageRun {
        env: config.env,
        entrypoint: config.entrypoint,
        cmd: config.cmd,
        user: config.user,
        workdir: config.working_dir,
        exposed_ports: config.exposed_ports,
        labels: config.labels.into_iter().collect(),
        stop_signal: config.stop_signal,
    }
}
