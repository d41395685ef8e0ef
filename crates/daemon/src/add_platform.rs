//! `godwit image add-platform`: executables of an image for a further platform, from the neutral modules of its programs.
//!
//! ```text
//! each module ──> godwit-cc, contained (`engine::image::Builder`) ──> executable, of the module's identity or refused
//! executables ──> a layer ──> configuration, manifest, index: the image under a new digest (`pack::add_platform`)
//! services of this node that run the image get the platform, too
//! ```

use std::collections::BTreeMap;
use std::io::{self, Write as _};
use std::sync::Arc;

use godwit_api::v1 as api;
use godwit_crossing::{Program, Set};
use godwit_engine::image::{
    Builder, Digest, ImageError, Module, NamedImage, Neutral, PlatformLayers, Store, architecture_of,
    machine_of,
};
use godwit_migration::{Service, error_chain};
use godwit_pack::{Blob, Documents, Grown};
use tonic::Status;

use crate::images::shown_one;
use crate::modules::hex;
use crate::node::Node;
use crate::status::{internal, invalid, status};

/// Permissions of an executable of an image.
const MODE: u32 = 0o100_755;

/// Makes the executables of an image for a platform, and notes the image with them.
pub(crate) async fn add_platform(
    node: &Arc<Node>,
    request: api::ImageAddPlatformRequest,
) -> Result<api::Image, Status> {
    let api::ImageAddPlatformRequest { reference, architecture } = request;
    let machine = machine_of(architecture_of(&architecture))
        .and_then(|machine| Set::ALL.into_iter().find(|set| set.name() == machine));
    let set = machine.ok_or_else(|| {
        Status::invalid_argument(format!(
            "{architecture:?} is no platform that godwit-cc builds for; write amd64 or arm64"
        ))
    })?;
    let store = Arc::clone(&node.local().store);
    // What it is made from stays, and what is made until it is noted.
    let _hold = store.hold();
    let image = wanted(node, &store, &reference, set).await?;
    let neutral = image.image.neutral.clone().ok_or_else(|| {
        Status::failed_precondition(format!(
            "image {reference} has no neutral modules: pack it with `godwit image pack --modules`, of programs that were built with `godwit-cc --save-module`, and pull or import it"
        ))
    })?;
    let builder = Builder::find().map_err(|error| status(Status::failed_precondition, &error))?;
    let mut executables = BTreeMap::new();
    for module in &neutral.modules {
        executables.insert(module.path.clone(), built(node, &store, &builder, module, set).await?);
    }
    let named = tokio::task::spawn_blocking({
        let (store, image) = (Arc::clone(&store), image.clone());
        move || grown(&store, &image, &neutral, set, &executables)
    });
    let named = named.await.map_err(internal)??;
    tell_services(node, &named, set).await?;
    shown_one(node, named).await
}

/// The image of a reference, which is not for the set.
async fn wanted(
    node: &Arc<Node>,
    store: &Arc<Store>,
    reference: &str,
    set: Set,
) -> Result<NamedImage, Status> {
    let (store, reference) = (Arc::clone(store), reference.to_owned());
    let name = reference.clone();
    let named = tokio::task::spawn_blocking(move || store.named(&name)).await.map_err(internal)?;
    let named = named.map_err(internal)?.ok_or_else(|| {
        Status::not_found(format!(
            "node {} has no image {reference}; `godwit pull` or `godwit image import` brings it",
            node.name
        ))
    })?;
    let own = machine_of(&named.image.architecture);
    let is_there =
        own == Some(set.name()) || named.image.platforms.iter().any(|one| one.machine == set.name());
    if is_there {
        let architecture = architecture_of(set.name());
        return Err(Status::already_exists(format!("image {reference} is for linux/{architecture} already")));
    }
    Ok(named)
}

/// The executable of a module for a set.
async fn built(
    node: &Arc<Node>,
    store: &Arc<Store>,
    builder: &Builder,
    module: &Module,
    set: Set,
) -> Result<Vec<u8>, Status> {
    let path = &module.path;
    let (file, _) = store.open_blob(&module.digest).map_err(internal)?;
    let made = builder.build(file, set.name()).await;
    let bytes = made.map_err(|error| {
        Status::failed_precondition(format!(
            "no executable for {} is made of the neutral module of {path}: {}",
            architecture_of(set.name()),
            error_chain(&error)
        ))
    })?;
    let program = Program::decode(&bytes, MODE).map_err(|error| {
        Status::failed_precondition(format!(
            "what godwit-cc has made of the neutral module of {path} is refused: {error}"
        ))
    })?;
    let (found, wanted) = (program.executable.identity, module.identity());
    if program.executable.set != set {
        return Err(Status::internal(format!(
            "godwit-cc has made {path} for {}",
            program.executable.set.name()
        )));
    }
    if found != wanted {
        return Err(Status::failed_precondition(format!(
            "no executable for {} is made of the neutral module of {path}: its identity would be {}, and the image's is {}. The tool chain of node {} is not the one that the image was built by: add the platform on a node that has that one, or build the image anew",
            architecture_of(set.name()),
            hex(&found),
            hex(&wanted),
            node.name
        )));
    }
    Ok(bytes)
}

/// The image with these executables, under its new digest.
fn grown(
    store: &Store,
    named: &NamedImage,
    neutral: &Neutral,
    set: Set,
    executables: &BTreeMap<String, Vec<u8>>,
) -> Result<NamedImage, Status> {
    let mut image = named.image.clone();
    let paths: Vec<&str> = neutral.modules.iter().map(|module| module.path.as_str()).collect();
    let stay = image.layers.iter().map(|layer| store.has_only(layer, &paths).map(|only| !only));
    let stay = stay.collect::<Result<Vec<_>, ImageError>>().map_err(internal)?;
    let read = |digest: &Digest| store.document(digest).map_err(internal);
    let documents = &neutral.documents;
    let (index, manifest, configuration) =
        (read(&documents.index)?, read(&documents.manifest)?, read(&documents.configuration)?);
    let digest = documents.manifest.to_string();
    let documents =
        Documents { index: &index, manifest: &manifest, configuration: &configuration, digest: &digest };
    let scratch = store.directory().join("tmp");
    let grown = godwit_pack::add_platform(documents, set, executables, &stay, &scratch).map_err(invalid)?;
    let Grown { layer, layers, configuration, manifest, index } = grown;
    for blob in [&layer, &configuration, &manifest, &index] {
        keep(store, blob)?;
    }
    let digest = |blob: &Blob| blob.digest().parse::<Digest>().map_err(internal);
    let layers = layers.iter().map(|layer| layer.parse()).collect::<Result<_, _>>().map_err(invalid)?;
    image.platforms.push(PlatformLayers {
        machine: set.name().to_owned(),
        layers,
        id: Some(digest(&configuration)?),
    });
    if let Some(neutral) = &mut image.neutral {
        neutral.documents.index = digest(&index)?;
        neutral.documents.further.extend([digest(&manifest)?, digest(&configuration)?]);
    }
    store.name(digest(&index)?, image).map_err(internal)
}

fn keep(store: &Store, blob: &Blob) -> Result<(), Status> {
    let digest: Digest = blob.digest().parse().map_err(internal)?;
    if store.has_blob(&digest) {
        return Ok(());
    }
    let mut writer = store.blob_writer(&digest, blob.bytes()).map_err(internal)?;
    let mut content = blob.open().map_err(internal)?;
    io::copy(&mut content, &mut writer).and_then(|_| writer.flush()).map_err(internal)?;
    writer.finish().map_err(internal)?;
    Ok(())
}

/// Services of this node that run the image can cross, too.
async fn tell_services(node: &Arc<Node>, named: &NamedImage, set: Set) -> Result<(), Status> {
    let layers: Vec<_> = named.image.layers.iter().map(ToString::to_string).collect();
    let Some(platform) = named.image.platforms.iter().find(|one| one.machine == set.name()) else {
        return Ok(());
    };
    let lacks = |service: &Service| {
        service.kept.is_none() && service.layers == layers && service.platform(set.name()).is_none()
    };
    for owned in node.state.services().map_err(internal)? {
        if !lacks(&owned.service) {
            continue;
        }
        let name = owned.service.name.clone();
        let added = async {
            // One that moves just now has not the platform at its destination either.
            let _occupied = node.reserve_soon(&name).await?;
            let mut service = node.state.service(&name).ok()??.service;
            if !lacks(&service) {
                return Some(());
            }
            service.platforms.push(platform.clone());
            node.state.change_service(&service).ok().filter(|changed| *changed).map(drop)
        };
        match added.await {
            Some(()) => node.events.tell("service", "updated", &name, ""),
            None => {
                tracing::warn!(service = %name, "it is occupied, and does not get the platform of its image")
            }
        }
    }
    Ok(())
}
