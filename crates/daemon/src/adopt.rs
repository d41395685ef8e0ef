//! Containers that another engine has started come into godwit's care, while they run.
//!
//! The engine keeps the container and its files. godwit notes what it has to know of it, and gives it an address that moves
//! with it: an interface in the network namespace that the engine has made.

use std::collections::{BTreeSet, HashMap};
use std::net::Ipv4Addr;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use godwit_api::v1::{self as api, AdoptRequest, RunRequest};
use godwit_engine::foreign::{Found, Port};
use godwit_engine::{EngineError, Engines, Keeper, OnMove};
use godwit_migration::{Attachment, LocalError, Restart, Service, error_chain, failpoint, hooks};
use godwit_names::{MAX_ALIASES, ServiceName, is_alias};
use tonic::Status;

use crate::convert;
use crate::network::joined;
use crate::node::Node;
use crate::services::{owned, reserve, show};
use crate::state::now_ms;
use crate::status::{internal, invalid};

/// Takes a container into godwit's care.
pub(crate) async fn adopt(node: &Arc<Node>, mut request: AdoptRequest) -> Result<api::Service, Status> {
    let asked_for = request.container.clone();
    let Some((keeper, container)) = of_engine(&asked_for) else {
        return Err(Status::invalid_argument(format!(
            "{asked_for:?} is not a container of another engine; give podman: or docker:, and its name or ID"
        )));
    };
    let engine = node.engines().adopts(keeper);
    // Its name in the engine is known when it is found.
    let asked = match request.name.as_str() {
        "" => "new".to_owned(),
        name => name.to_owned(),
    };
    let asked = convert::service_name(&asked)?;
    let stay = staying(&request.mounts);
    let found = engine.find(&asked, container, request.leave_networks, &stay).await.map_err(refused)?;
    if request.publish.is_empty() && request.leave_networks {
        request.publish = published(&found)?;
    }
    let ports = convert::ports(&request.publish)?;
    let name = match request.name.as_str() {
        "" => convert::service_name(&found.name)?,
        name => convert::service_name(name)?,
    };
    // Two must not find the same container free.
    let _alone = node.adopting.lock().await;
    if let Some(other) = in_care(node, keeper, &found.kept.id)? {
        return Err(Status::already_exists(format!(
            "container {container} is in godwit's care already, as service {}",
            other.name
        )));
    }
    let (network, addresses, _occupied) = reserve(node, &name, &like(&name, &request), ports).await?;
    if network != Attachment::Overlay {
        return Err(Status::invalid_argument(
            "a container that is adopted stays in the network namespace that its engine has made; leave out ns:",
        ));
    }
    let mut service = as_found(describe(node, name, &request, &addresses)?, found.clone());
    if request.leave_networks {
        keep_names(&mut service, &found);
    }
    say_of_mounts(&mut service, &request)?;
    if let Err(error) = take(node, &service, &found).await {
        if let Err(left) = give_back(node, &service).await {
            tracing::error!(service = %service.name, error = %error_chain(&left), "cannot undo a half-made adoption");
        }
        return Err(error);
    }
    engine.own(&node.local().config(&service)).map_err(internal)?;
    if let Err(error) = node.local().made(&service) {
        // The state is read before the mark is believed.
        tracing::warn!(service = %service.name, error = %error_chain(&error), "cannot remove the mark of a service that is being created");
    }
    node.place(&service, &node.name, service.epoch, false).map_err(internal)?;
    node.watch(&service);
    let detail = format!("{} of {}", service.address, request.container);
    node.events.tell("service", "adopted", &service.name, &detail);
    show(node, owned(node, &service.name)?).await
}

/// An engine of others and a container of its, as users name them.
pub(crate) fn of_engine(text: &str) -> Option<(Keeper, &str)> {
    let (engine, container) = text.split_once(':')?;
    Keeper::named(engine).map(|keeper| (keeper, container)).filter(|(_, container)| !container.is_empty())
}

/// The places of what does not go with a container.
pub(crate) fn staying(mounts: &HashMap<String, String>) -> BTreeSet<PathBuf> {
    let stays = |said: &str| matches!(OnMove::named(said), Some(OnMove::Skip | OnMove::Shared));
    let stay = mounts.iter().filter(|(_, said)| stays(said));
    stay.map(|(target, _)| PathBuf::from(target)).collect()
}

/// The service of this node that is the container with this ID, if there is one.
pub(crate) fn in_care(node: &Node, keeper: Keeper, id: &str) -> Result<Option<Service>, Status> {
    let engine = node.engines().adopts(keeper);
    let same = |other: &Service| {
        let Some(kept) = other.kept.as_ref().filter(|kept| kept.keeper == keeper) else { return false };
        let here = engine.id_here(&node.local().config(other)).ok().flatten();
        here.unwrap_or_else(|| kept.id.clone()) == id
    };
    let others = node.state.services().map_err(internal)?;
    Ok(others.into_iter().map(|other| other.service).find(same))
}

/// What is to be reserved for it, as for a service that godwit makes.
pub(crate) fn like(name: &ServiceName, request: &AdoptRequest) -> RunRequest {
    RunRequest {
        name: name.to_string(),
        address: request.address.clone(),
        networks: request.networks.clone(),
        publish: request.publish.clone(),
        ..RunRequest::default()
    }
}

/// What the engine says is for the user; what fails besides is not.
pub(crate) fn refused(error: EngineError) -> Status {
    match error {
        EngineError::Keeper { .. } | EngineError::Unfit { .. } => {
            Status::failed_precondition(error_chain(&error))
        }
        other => internal(other),
    }
}

/// A service of a container that an engine of others has, or is to have.
pub(crate) fn describe(
    node: &Node,
    name: ServiceName,
    request: &AdoptRequest,
    addresses: &[Ipv4Addr],
) -> Result<Service, Status> {
    let now = now_ms();
    let service = Service {
        id: ulid::Ulid::new().to_string(),
        epoch: node.state.next_epoch(&name).map_err(internal)?,
        name,
        address: addresses.first().copied().unwrap_or(Ipv4Addr::UNSPECIFIED),
        more: addresses.get(1..).unwrap_or_default().to_vec(),
        network: Attachment::Overlay,
        hooks: convert::hooks(&request.hooks)?,
        image: String::new(),
        image_digest: None,
        image_id: None,
        layers: Vec::new(),
        platforms: Vec::new(),
        command: Vec::new(),
        env: Vec::new(),
        mounts: Vec::new(),
        memory_bytes: 0,
        cpu_millis: 0,
        publish: convert::ports(&request.publish)?,
        hostname: String::new(),
        user: godwit_engine::User::default(),
        workdir: PathBuf::from("/"),
        confinement: godwit_engine::Confinement::default(),
        restart: Restart::default(),
        remove: false,
        aliases: convert::aliases(&request.aliases)?,
        follows: None,
        kept: None,
        labels: request.labels.clone(),
        created_ms: now,
        started_ms: now,
    };
    for hook in service.hooks.named() {
        hooks::check(&node.local().hooks, hook).map_err(invalid)?;
    }
    Ok(service)
}

/// The service with what its engine says of its container.
pub(crate) fn as_found(service: Service, found: Found) -> Service {
    Service {
        image: found.image,
        image_digest: found.image_digest,
        layers: vec![found.image_id],
        command: found.command,
        env: found.env,
        memory_bytes: found.memory_bytes,
        cpu_millis: found.cpu_millis,
        hostname: found.hostname,
        user: found.user,
        mounts: found.mounts,
        workdir: match found.workdir {
            none if none.as_os_str().is_empty() => PathBuf::from("/"),
            workdir => workdir,
        },
        kept: Some(found.kept),
        ..service
    }
}

/// Has it keep the names that it has on its engine's networks, also that of the container, if the service has another one.
fn keep_names(service: &mut Service, found: &Found) {
    let own = service.name.as_str().to_ascii_lowercase();
    let names = std::iter::once(&found.name).chain(&found.aliases).map(|name| name.to_ascii_lowercase());
    for name in names.filter(|name| *name != own) {
        if !is_alias(&name) || service.aliases.len() >= MAX_ALIASES {
            tracing::warn!(service = %service.name, name, "it is not found by this name any more: there are too many, or it cannot be one");
        } else if !service.aliases.contains(&name) {
            service.aliases.push(name);
        }
    }
}

/// What the user says becomes of what the container has of the node.
pub(crate) fn say_of_mounts(service: &mut Service, request: &AdoptRequest) -> Result<(), Status> {
    let volumes =
        service.kept.as_ref().map(Engines::volumes).transpose().map_err(internal)?.unwrap_or_default();
    for (target, said) in &request.mounts {
        let said = convert::on_move(said).map_err(Status::invalid_argument)?;
        if let Some(mut mount) = volumes.iter().find(|mount| mount.target == Path::new(target)).cloned() {
            // One that goes with it is its engine's affair alone.
            if matches!(said, OnMove::Skip | OnMove::Shared)
                && let Some(on_move) = mount.on_move()
            {
                *on_move = said;
                service.mounts.push(mount);
            }
            continue;
        }
        let mut binds = service.mounts.iter_mut().filter(|mount| mount.target == Path::new(target));
        match binds.find_map(|mount| mount.on_move()) {
            Some(on_move) => *on_move = said,
            None => {
                return Err(Status::invalid_argument(format!(
                    "{} has neither something of the node nor a volume mounted at {target}",
                    request.container
                )));
            }
        }
    }
    match service.mounts_objection() {
        Some(objection) => Err(Status::invalid_argument(format!("{}: {objection}", request.container))),
        None => Ok(()),
    }
}

async fn take(node: &Arc<Node>, service: &Service, found: &Found) -> Result<(), Status> {
    let (local, engine) = (node.local(), node.keeper(&found.kept));
    note(node, service, found).await?;
    let leaves = !found.networks.is_empty();
    if leaves {
        // While the other sides can still be told.
        joined::end_connections(service, found.pid, true).await;
    }
    engine.leave_networks(&local.config(service), &found.networks).await.map_err(refused)?;
    let network = &local.network;
    network.join(service, found.pid).await.map_err(internal)?;
    if leaves {
        joined::end_connections(service, found.pid, false).await;
    }
    network.plug(service).await.map_err(internal)?;
    network.open(service).await.map_err(internal)?;
    failpoint::point("service.adopted").await;
    node.state.put_service(service).map_err(internal)?;
    // From here on: one that is given back asks whom it has asked before.
    joined::tell_names(node, service, &found.kept).await;
    Ok(())
}

/// Notes what is to be known of a container that is no service yet. Until it is one, clearing the service removes the note and
/// nothing else; so does the next life of godwitd.
pub(crate) async fn note(node: &Node, service: &Service, found: &Found) -> Result<(), Status> {
    let (local, engine) = (node.local(), node.keeper(&found.kept));
    engine.disown(&local.config(service)).map_err(internal)?;
    // What an earlier service has left under the name must not mix with it.
    local.make_room(service).await.map_err(internal)?;
    local.begin_making(service).map_err(internal)?;
    local.make_directories(service, None).await.map_err(internal)?;
    let state = engine.take(&local.config(service)).await.map_err(refused)?;
    if state.pid != found.pid {
        return Err(Status::aborted(format!(
            "the container of service {} was started again meanwhile; try again",
            service.name
        )));
    }
    Ok(())
}

/// The container stays what it was.
async fn give_back(node: &Node, service: &Service) -> Result<(), LocalError> {
    // Interfaces of its engine's networks have the names that godwit's have now.
    node.local().network.unplug(service).await?;
    node.local().clear(service).await
}

/// A container's ports as godwit publishes them.
pub(crate) fn published(found: &Found) -> Result<Vec<api::PublishedPort>, Status> {
    found.ports.iter().map(published_port).collect()
}

/// A port as godwit publishes it: on all addresses of a node, and no wider than the engine did.
fn published_port(port: &Port) -> Result<api::PublishedPort, Status> {
    let Port { address, node, container, protocol } = port;
    if !address.is_empty() {
        return Err(Status::failed_precondition(format!(
            "the container's port {node} is published on {address} alone, and godwit publishes on all addresses of a node; say with --publish which ports are wanted"
        )));
    }
    Ok(api::PublishedPort {
        host_port: (*node).into(),
        container_port: (*container).into(),
        protocol: protocol.clone(),
    })
}
