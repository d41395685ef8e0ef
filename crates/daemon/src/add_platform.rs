//! `godwit image add-platform`: executables of an image for a further platform, from the neutral modules of its programs.
//!
//! ```text
//! each module ──> godwit-cc, contained (`engine::image::Builder`) ──> executable, of the module's identity or refused
//! executables ──> a layer ──> configuration, manifest, index: the image under a new digest (`pack::add_platform`)
//! services of this node that run the image get the platform, too
//! ```

use std::collections::BTreeMap;
use std::io::{self, Write as _};
use std::mem;
use std::sync::Arc;

use godwit_api::v1 as api;
use godwit_crossing::{Program, Set};
use godwit_engine::image::{
    BuildError, Builder, Digest, ImageError, LONGEST_BUILD, Module, NamedImage, PlatformLayers, Store,
    architecture_of, machine_of,
};
use godwit_isa_plan::image::MOST_EXECUTABLES;
use godwit_migration::{Service, error_chain};
use godwit_pack::{Blob, Documents, Grown};
use tokio::sync::Mutex;
use tokio::task::spawn_blocking;
use tokio::time::{Instant, timeout};
use tonic::Status;

use crate::images::shown_one;
use crate::modules::hex;
use crate::node::Node;
use crate::status::{internal, invalid, status};

/// Permissions of an executable of an image.
const MODE: u32 = 0o100_755;

/// One image at a time: executables are made in gigabytes of memory.
static TURN: Mutex<()> = Mutex::const_new(());

/// Makes the executables of an image for a platform, and notes the image with them. Where it has them already, services that
/// run it get the platform.
pub(crate) async fn add_platform(
    node: &Arc<Node>,
    request: api::ImageAddPlatformRequest,
) -> Result<api::ImageAddPlatformResponse, Status> {
    let api::ImageAddPlatformRequest { reference, architecture } = request;
    let machine = machine_of(architecture_of(&architecture))
        .and_then(|machine| Set::ALL.into_iter().find(|set| set.name() == machine));
    let set = machine.ok_or_else(|| {
        Status::invalid_argument(format!(
            "{architecture:?} is no platform that godwit-cc builds for; write amd64 or arm64"
        ))
    })?;
    let found = image(node, &reference).await?;
    let (named, is_new) = match is_for(&found, set) {
        true => (found, false),
        false => with_platform(node, &reference, set).await?,
    };
    let Told { with, left_out } = tell_services(node, &named, set).await?;
    if !is_new && with == 0 && left_out.is_empty() {
        let architecture = architecture_of(set.name());
        return Err(Status::already_exists(format!("image {reference} is for linux/{architecture} already")));
    }
    Ok(api::ImageAddPlatformResponse { image: Some(shown_one(node, named).await?), left_out })
}

fn is_for(named: &NamedImage, set: Set) -> bool {
    machine_of(&named.image.architecture) == Some(set.name())
        || named.image.platforms.iter().any(|one| one.machine == set.name())
}

/// Makes the executables of an image for a set, and notes the image with them; whether it had none until then.
async fn with_platform(node: &Arc<Node>, reference: &str, set: Set) -> Result<(NamedImage, bool), Status> {
    let turn = timeout(LONGEST_BUILD, TURN.lock()).await.map_err(|_| {
        Status::resource_exhausted(format!(
            "node {} makes executables of other images, one image at a time; repeat the command later",
            node.name
        ))
    })?;
    // Another request may have made them.
    let image = image(node, reference).await?;
    if is_for(&image, set) {
        return Ok((image, false));
    }
    let executables = executables(node, &image, set, Instant::now() + LONGEST_BUILD).await?;
    // What has begun is done, also where the client has gone.
    let store = Arc::clone(&node.local().store);
    let growing = spawn_blocking(move || {
        let _turn = turn;
        // What it is made from stays, and what is made until it is noted.
        let _hold = store.hold();
        grown(&store, &image, set, &executables)
    });
    Ok((growing.await.map_err(internal)??, true))
}

/// The image that a reference stands for.
async fn image(node: &Arc<Node>, reference: &str) -> Result<NamedImage, Status> {
    let (store, name) = (Arc::clone(&node.local().store), reference.to_owned());
    let named = spawn_blocking(move || store.named(&name)).await.map_err(internal)?;
    named.map_err(internal)?.ok_or_else(|| {
        Status::not_found(format!(
            "node {} has no image {reference}; `godwit pull` or `godwit image import` brings it",
            node.name
        ))
    })
}

/// The executables of all programs of an image for a set, by their paths.
async fn executables(
    node: &Arc<Node>,
    image: &NamedImage,
    set: Set,
    until: Instant,
) -> Result<BTreeMap<String, Vec<u8>>, Status> {
    let reference = &image.image.reference;
    let neutral = image.image.neutral.as_ref().ok_or_else(|| {
        Status::failed_precondition(format!(
            "image {reference} has no neutral modules: pack it with `godwit image pack --modules`, of programs that were built with `godwit-cc --save-module`, and pull or import it"
        ))
    })?;
    let builder = Builder::find().map_err(|error| status(Status::failed_precondition, &error))?;
    let mut executables = BTreeMap::new();
    let mut bytes = 0;
    for module in &neutral.modules {
        let executable = built(node, (&builder, reference), module, set, until).await?;
        bytes += executable.len() as u64;
        if bytes > MOST_EXECUTABLES {
            return Err(Status::failed_precondition(format!(
                "the executables of image {reference} have more than {} MiB together, the most that an image may have",
                MOST_EXECUTABLES >> 20
            )));
        }
        executables.insert(module.path.clone(), executable);
    }
    Ok(executables)
}

/// The executable of a module for a set.
async fn built(
    node: &Arc<Node>,
    (builder, reference): (&Builder, &str),
    module: &Module,
    set: Set,
    until: Instant,
) -> Result<Vec<u8>, Status> {
    let opened = spawn_blocking({
        let (store, digest) = (Arc::clone(&node.local().store), module.digest.clone());
        move || store.open_blob(&digest)
    });
    let opened = opened.await.map_err(internal)?;
    let (file, _) = opened.map_err(|error| match error {
        ImageError::NoBlob { .. } => is_another(reference),
        error => internal(error),
    })?;
    let made = builder.build(file, set.name(), until).await;
    let bytes = made.map_err(|error| {
        let said = format!(
            "no executable for {} is made of the neutral module of {}: {}",
            architecture_of(set.name()),
            module.path,
            error_chain(&error)
        );
        match error {
            BuildError::Slow => Status::deadline_exceeded(said),
            _ => Status::failed_precondition(said),
        }
    })?;
    let (name, module) = (node.name.clone(), module.clone());
    let checked = spawn_blocking(move || checked(&name.to_string(), &module, set, &bytes).map(|()| bytes));
    checked.await.map_err(internal)?
}

/// Looks whether an executable is what the image's module says.
fn checked(node: &str, module: &Module, set: Set, bytes: &[u8]) -> Result<(), Status> {
    let path = &module.path;
    let program = Program::decode(bytes, MODE).map_err(|error| {
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
            "no executable for {} is made of the neutral module of {path}: its identity would be {}, and the image's is {}. The tool chain of node {node} is not the one that the image was built by: add the platform on a node that has that one, or build the image anew",
            architecture_of(set.name()),
            hex(&found),
            hex(&wanted),
        )));
    }
    Ok(())
}

/// Whether a reference still stands for the image.
fn stands(store: &Store, named: &NamedImage) -> Result<bool, ImageError> {
    Ok(store.named(&named.image.reference)?.is_some_and(|now| now.is_same(named)))
}

fn is_another(reference: &str) -> Status {
    Status::aborted(format!(
        "{reference} stands for another image by now, or for none: it was pulled, imported or removed meanwhile; repeat the command"
    ))
}

/// The image with these executables, under its new digest.
fn grown(
    store: &Store,
    named: &NamedImage,
    set: Set,
    executables: &BTreeMap<String, Vec<u8>>,
) -> Result<NamedImage, Status> {
    let mut image = named.image.clone();
    let reference = image.reference.clone();
    // Held by now, all of it stays if it is still there.
    if !stands(store, named).map_err(internal)? {
        return Err(is_another(&reference));
    }
    let Some(neutral) = &mut image.neutral else { return Err(is_another(&reference)) };
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
    let documents = &mut neutral.documents;
    // The former index goes with the image.
    let former = mem::replace(&mut documents.index, digest(&index)?);
    documents.further.extend([former, digest(&manifest)?, digest(&configuration)?]);
    let renamed = store.rename(named, digest(&index)?, image).map_err(internal)?;
    renamed.ok_or_else(|| is_another(&reference))
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

/// Which services got the platform of their image.
#[derive(Default)]
struct Told {
    /// How many.
    with: usize,
    /// Those that something else is done to.
    left_out: Vec<String>,
}

/// Services of this node that run the image can cross, too.
async fn tell_services(node: &Arc<Node>, named: &NamedImage, set: Set) -> Result<Told, Status> {
    let layers: Vec<_> = named.image.layers.iter().map(ToString::to_string).collect();
    let mut told = Told::default();
    let Some(platform) = named.image.platforms.iter().find(|one| one.machine == set.name()) else {
        return Ok(told);
    };
    let lacks = |service: &Service| {
        service.kept.is_none() && service.layers == layers && service.platform(set.name()).is_none()
    };
    for owned in node.state.services().map_err(internal)? {
        let name = owned.service.name.clone();
        if !lacks(&owned.service) {
            continue;
        }
        // One that moves just now has not the platform at its destination either.
        let Some(_occupied) = node.reserve_soon(&name).await else {
            told.left_out.push(name.to_string());
            continue;
        };
        let Some(owned) = node.state.service(&name).map_err(internal)? else { continue };
        let mut service = owned.service;
        if !lacks(&service) {
            continue;
        }
        service.platforms.push(platform.clone());
        let change = spawn_blocking({
            let (node, named) = (Arc::clone(node), named.clone());
            move || {
                // No service gets layers that were removed meanwhile; from here on it keeps them itself.
                let store = &node.local().store;
                let _hold = store.hold();
                match stands(store, &named).map_err(internal)? {
                    true => node.state.change_service(&service).map_err(internal),
                    false => Err(is_another(&named.image.reference)),
                }
            }
        });
        if change.await.map_err(internal)?? {
            told.with += 1;
            node.events.tell("service", "updated", &name, "");
        }
    }
    Ok(told)
}
