//! Services of this node: created, shown, ended, removed, and found again after a restart.

use std::collections::HashSet;
use std::net::Ipv4Addr;
use std::path::{Path, PathBuf};
use std::sync::{Arc, PoisonError};
use std::time::Duration;

use godwit_api::v1::{self as api, CheckRequest, RunRequest, ServiceState, run_request::Source};
use godwit_database::blocking::off_worker;
use godwit_engine::image::Image;
use godwit_engine::{ContainerStatus, EngineError, rootfs};
use godwit_migration::{Attachment, Port, Restart, Service, Verdict, error_chain, failpoint, hooks};
use godwit_names::ServiceName;
use godwit_network::NetworkError;
use tonic::Status;

use crate::network::{attachment, forward, joined, names};
use crate::node::{Claim, Conflict, Node, Occupied};
use crate::state::{Owned, StateError, now_ms};
use crate::status::{internal, invalid};
use crate::{cluster, convert, cordon, removals, staging};

/// What `PATH` is when neither the user nor the image sets it; as Docker and Podman have it.
pub(crate) const DEFAULT_PATH: &str = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";

/// The service this node owns, or the sentence that says where it is.
pub(crate) fn owned(node: &Node, name: &ServiceName) -> Result<Owned, Status> {
    if let Some(owned) = node.state.service(name).map_err(internal)? {
        return Ok(owned);
    }
    match node.placement(name).map_err(internal)? {
        Some(placement) if placement.node == node.name && !node.is_arriving(name) => {
            Err(Status::not_found(format!(
                "the cluster lists service {name} on node {}, which does not have it: it is gone; `godwit rm --force {name}` there frees its name and addresses",
                node.name
            )))
        }
        Some(placement) if placement.node != node.name => Err(Status::failed_precondition(format!(
            "service {name} is on node {}, not on {}; ask there",
            placement.node, node.name
        ))),
        _ => Err(Status::not_found(format!("there is no service {name}; `godwit ps -a` lists all services"))),
    }
}

pub(crate) fn occupied(name: &ServiceName) -> Status {
    Status::aborted(format!(
        "service {name} is being created, started, stopped, removed, checked, copied, written into a file or migrated; try again when that has ended"
    ))
}

/// Creates and starts a service.
pub(crate) async fn run(node: &Arc<Node>, request: RunRequest) -> Result<api::Service, Status> {
    let name = convert::service_name(&request.name)?;
    // Said before an image is unpacked.
    if request.health.is_some() {
        return Err(Status::invalid_argument(
            "godwit has no health checks of its own; give --engine podman or --engine docker, which make the container with one",
        ));
    }
    convert::confinement(&request)?;
    let restart = convert::restart(&request.restart)?;
    if request.remove && restart != Restart::No {
        return Err(convert::removed_or_restarted());
    }
    let ports = convert::ports(&request.publish)?;
    let (network, addresses, _occupied) = reserve(node, &name, &request, ports).await?;

    // Its layers are in no table before the service is.
    let _hold = node.local().store.hold();
    let (image, origin) = import(node, &request).await?;
    let mut service = describe(node, name, &request, (network, addresses), &image, origin)?;
    let user = if request.user.is_empty() { image.config.user } else { request.user };
    let mut made = start(node, &mut service, &user).await;
    if made.is_ok() {
        failpoint::point("service.started").await;
        made = node.state.put_service(&service).map_err(internal);
    }
    if let Err(error) = made {
        if let Err(left) = node.local().clear(&service).await {
            tracing::error!(service = %service.name, error = %error_chain(&left), "cannot remove a service that was half made");
        }
        return Err(error);
    }
    begun(node, &service, "started", &service.address.to_string());
    show(node, owned(node, &service.name)?).await
}

/// A new service runs and is recorded: it is watched, and the cluster is told. Whoever asked for it has it, whatever fails here:
/// the next life of godwitd does the rest.
pub(crate) fn begun(node: &Arc<Node>, service: &Service, happened: &str, detail: &str) {
    if let Err(error) = node.local().made(service) {
        // The state is read before the mark is believed.
        tracing::warn!(service = %service.name, error = %error_chain(&error), "cannot remove the mark of a service that is being created");
    }
    if let Err(error) = node.place(service, &node.name, service.epoch, false) {
        tracing::error!(service = %service.name, error = %error_chain(&error), "other nodes are not told where a service is");
    }
    node.watch(service);
    node.events.tell("service", happened, &service.name, detail);
}

/// How often another address is chosen when the one that is free here is taken elsewhere.
const TRIES: usize = 8;

/// Reserves a name, addresses, published ports and volumes for a new service, until what is returned last is dropped.
pub(crate) async fn reserve(
    node: &Arc<Node>,
    name: &ServiceName,
    request: &RunRequest,
    ports: Vec<Port>,
) -> Result<(Attachment, Vec<Ipv4Addr>, Occupied), Status> {
    let listed = node.placement(name).map_err(internal)?;
    let is_listed_here = listed.is_some_and(|listed| !listed.removed && listed.node == node.name);
    if is_listed_here && node.state.service(name).map_err(internal)?.is_none() {
        // One that no list shows any more, and that is about to be off the cluster's.
        drop(node.reserve_soon(name).await);
    }
    let mut refused = HashSet::new();
    let mut tries = 0;
    loop {
        tries += 1;
        let reserved = match claim(node, name, request, &ports, &refused)? {
            Ok(reserved) => reserved,
            // It may just have been removed there.
            Err(Conflict { node: Some(other), .. })
                if cluster::hear(node, &other).await.map_err(internal)? =>
            {
                claim(node, name, request, &ports, &refused)?
                    .map_err(|conflict| Status::already_exists(conflict.sentence))?
            }
            Err(conflict) => return Err(Status::already_exists(conflict.sentence)),
        };
        let question = CheckRequest {
            name: request.name.clone(),
            addresses: reserved.1.iter().map(ToString::to_string).collect(),
            publish: request.publish.clone(),
            volumes: convert::volumes(&request.mounts)?.iter().map(ToString::to_string).collect(),
        };
        let answers = ask_peers(node, question).await?;
        let Some((sentence, address)) = answers.conflict else {
            check_volumes(node, request, &answers.silent)?;
            return Ok(reserved);
        };
        let given = |address: &Ipv4Addr| {
            let text = address.to_string();
            request.address == text
                || request.networks.iter().any(|network| network.ends_with(&format!(":ip={text}")))
        };
        match address.filter(|address| tries < TRIES && !given(address)) {
            Some(address) => refused.insert(address),
            None => return Err(Status::already_exists(sentence)),
        };
    }
}

/// Reserves what is free, under the lock.
#[allow(clippy::type_complexity)]
fn claim(
    node: &Arc<Node>,
    name: &ServiceName,
    request: &RunRequest,
    ports: &[Port],
    refused: &HashSet<Ipv4Addr>,
) -> Result<Result<(Attachment, Vec<Ipv4Addr>, Occupied), Conflict>, Status> {
    let _alone = node.claiming.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(objection) = cordon::objection(node).map_err(internal)? {
        return Err(Status::failed_precondition(objection));
    }
    let (network, addresses) = attachment::attach(node, request, refused)?;
    let volumes = convert::volumes(&request.mounts)?;
    if let Some(port) = ports.iter().find(|port| Some(port.host) == node.names.port) {
        return Err(Status::invalid_argument(format!(
            "port {} of this node is where godwitd serves names to services; publish another one",
            port.host
        )));
    }
    let claim = Claim { addresses: addresses.clone(), ports: ports.to_vec(), volumes, is_look: false };
    if let Some(conflict) = node.conflict(name, &claim, "", &node.name).map_err(internal)? {
        return Ok(Err(conflict));
    }
    let occupied = node.claim(name, claim).ok_or_else(|| occupied(name))?;
    Ok(Ok((network, addresses, occupied)))
}

/// What the other nodes say.
#[derive(Default)]
pub(crate) struct Answers {
    /// A conflict in a sentence, and the address that it is about, if it is about one.
    pub(crate) conflict: Option<(String, Option<Ipv4Addr>)>,
    /// Nodes that do not answer, as far as all were asked, and why.
    silent: Vec<String>,
}

/// Other nodes may know of a name, an address, a port or a volume that this one does not know yet.
pub(crate) async fn ask_peers(node: &Arc<Node>, request: CheckRequest) -> Result<Answers, Status> {
    let mut answers = Answers::default();
    for member in node.state.members().map_err(internal)? {
        if member.name == node.name {
            continue;
        }
        match node.peers.get(&member.name, &member.address).check(request.clone()).await {
            Ok(answer) if answer.get_ref().conflict.is_empty() => {}
            Ok(answer) => {
                let answer = answer.into_inner();
                answers.conflict = Some((answer.conflict, answer.address.parse().ok()));
                return Ok(answers);
            }
            Err(error) => {
                tracing::warn!(peer = %member.name, %error, "cannot ask the node whether the name is free");
                answers.silent.push(format!("{} ({})", member.name, error.message()));
            }
        }
    }
    Ok(answers)
}

/// A node that does not answer may have a volume that is not here: a new one in its place would be empty.
fn check_volumes(node: &Node, request: &RunRequest, silent: &[String]) -> Result<(), Status> {
    let Some(silent) = silent.first() else { return Ok(()) };
    for volume in convert::volumes(&request.mounts)? {
        if off_worker(|| node.local().volume(&volume)).map_err(internal)?.is_none() {
            return Err(Status::unavailable(format!(
                "node {silent} cannot be asked, and may have volume {volume}: start its godwitd, remove the node from the cluster, or create the volume here (`godwit volume create {volume}`)"
            )));
        }
    }
    Ok(())
}

/// Where an image came from.
struct Origin {
    /// In the user's words.
    image: String,
    /// What that stood for in its registry.
    digest: Option<String>,
}

async fn import(node: &Arc<Node>, request: &RunRequest) -> Result<(Image, Origin), Status> {
    let store = Arc::clone(&node.local().store);
    let source = request.source.clone().ok_or_else(|| {
        Status::invalid_argument("a service needs a root filesystem: give an image or --rootfs DIR")
    })?;
    let (path, is_rootfs) = match source {
        Source::Rootfs(path) => (path, true),
        Source::Image(path) => (path, false),
        Source::Reference(reference) => {
            return match off_worker(|| store.named(&reference)).map_err(internal)? {
                Some(named) => {
                    let digest = Some(named.digest.to_string());
                    Ok((named.image, Origin { image: reference, digest }))
                }
                None => Err(Status::not_found(format!(
                    "node {} has no image {reference}; `godwit pull {reference}` there brings it from its registry",
                    node.name
                ))),
            };
        }
    };
    if !Path::new(&path).is_absolute() {
        return Err(Status::invalid_argument(format!("{path} is not an absolute path")));
    }
    let origin = path.clone();
    let image = tokio::task::spawn_blocking(move || {
        if is_rootfs { store.import_rootfs(Path::new(&path)) } else { store.import_oci(Path::new(&path)) }
    })
    .await
    .map_err(internal)?
    .map_err(invalid)?;
    Ok((image, Origin { image: origin, digest: None }))
}

fn describe(
    node: &Node,
    name: ServiceName,
    request: &RunRequest,
    (network, addresses): (Attachment, Vec<Ipv4Addr>),
    image: &Image,
    Origin { image: origin, digest: image_digest }: Origin,
) -> Result<Service, Status> {
    let entrypoint = request.entrypoint.as_ref().map_or(&image.config.entrypoint, |own| &own.words);
    let arguments = match (request.command.as_slice(), &request.entrypoint) {
        // The image's arguments are for the image's entrypoint.
        ([], None) => &image.config.cmd,
        _ => &request.command,
    };
    let command: Vec<String> = entrypoint.iter().chain(arguments).cloned().collect();
    if command.is_empty() {
        return Err(Status::invalid_argument(format!(
            "{origin} has no command of its own; give one after `--`"
        )));
    }
    let mut env = vec![format!("PATH={DEFAULT_PATH}"), format!("HOSTNAME={}", convert::hostname(request))];
    for pair in image.config.env.iter().chain(&request.env) {
        let Some((name, _)) = pair.split_once('=') else {
            return Err(Status::invalid_argument(format!("{pair:?} is not NAME=VALUE")));
        };
        env.retain(|known| known.split_once('=').is_none_or(|(other, _)| other != name));
        env.push(pair.clone());
    }
    let workdir = [&request.workdir, &image.config.working_dir].into_iter().find(|w| !w.is_empty());
    let now = now_ms();
    let service = Service {
        id: ulid::Ulid::new().to_string(),
        epoch: node.state.next_epoch(&name).map_err(internal)?,
        name,
        address: addresses.first().copied().unwrap_or(Ipv4Addr::UNSPECIFIED),
        more: addresses.get(1..).unwrap_or_default().to_vec(),
        network,
        hooks: convert::hooks(&request.hooks)?,
        image: origin,
        image_digest,
        image_id: image.id.as_ref().map(ToString::to_string),
        layers: image.layers.iter().map(ToString::to_string).collect(),
        platforms: image.platforms.clone(),
        command,
        env,
        mounts: convert::mounts(&request.mounts)?,
        memory_bytes: request.memory_bytes,
        cpu_millis: request.cpu_millis,
        publish: convert::ports(&request.publish)?,
        hostname: convert::hostname(request),
        user: godwit_engine::User::default(),
        workdir: workdir.map_or_else(|| PathBuf::from("/"), PathBuf::from),
        confinement: convert::confinement(request)?,
        restart: convert::restart(&request.restart)?,
        remove: request.remove,
        aliases: convert::aliases(&request.aliases)?,
        follows: None,
        kept: None,
        labels: request.labels.clone(),
        created_ms: now,
        started_ms: now,
    };
    convert::check_limits(&service)?;
    if let Some(path) = service.network.namespace() {
        node.local().network.check_namespace(path).map_err(invalid)?;
    }
    if let Some(taken) = node.namespace_taken(&service).map_err(internal)? {
        return Err(Status::already_exists(taken));
    }
    for mount in &service.mounts {
        if let Some((source, _)) = mount.bind()
            && let Some(objection) = node.local().binds.objection(source)
        {
            return Err(Status::invalid_argument(objection));
        }
    }
    for hook in service.hooks.named() {
        hooks::check(&node.local().hooks, hook).map_err(invalid)?;
    }
    Ok(service)
}

async fn start(node: &Arc<Node>, service: &mut Service, user: &str) -> Result<(), Status> {
    let local = node.local();
    // What an earlier service has left under the name must not mix with it.
    local.make_room(service).await.map_err(internal)?;
    local.begin_making(service).map_err(internal)?;
    local.make_directories(service, None).await.map_err(internal)?;
    local.take_volumes(service, true).map_err(internal)?;
    local.mount_root(service).map_err(internal)?;
    local.fill_volumes(service).await.map_err(internal)?;
    let root = local.config(service).rootfs;
    let path = service.env.iter().find_map(|pair| pair.strip_prefix("PATH=")).unwrap_or(DEFAULT_PATH);
    // The user knows the image, not where its copy is put together.
    let origin = |error: rootfs::RootfsError| {
        Status::invalid_argument(error_chain(&error).replace(&root.display().to_string(), &service.image))
    };
    rootfs::find_command(&root, path, &service.command[0]).map_err(origin)?;
    service.user = rootfs::resolve_user(&root, user).map_err(origin)?;
    local.network.plug(service).await.map_err(internal)?;
    // Open before the first instruction, so that a program that connects at once gets through.
    local.network.open(service).await.map_err(internal)?;
    names::try_out(node, service).await;
    let (config, _checked) = off_worker(|| local.config_to_start(service)).map_err(internal)?;
    local.engine.run(&config).await.map_err(|error| match &error {
        EngineError::Command { .. } => invalid(error),
        _ => internal(error),
    })?;
    Ok(())
}

fn described(node: &Node, service: &Service) -> Result<api::Service, StateError> {
    let networks = attachment::shown(node, &service.addresses())?;
    let first = networks.first().cloned().unwrap_or_default();
    Ok(api::Service {
        address: first.address,
        address6: first.address6,
        mac: first.mac,
        networks,
        ..convert::service(service, &node.name)
    })
}

/// A service of this node as the API shows it: state and processes of one life, though it may be started again
/// while they are read.
pub(crate) async fn show(node: &Node, mut owned: Owned) -> Result<api::Service, Status> {
    let life = |owned: &Owned| (owned.service.started_ms, owned.exit_code, owned.restarts);
    loop {
        let shown = show_life(node, &owned).await?;
        match node.state.service(&owned.service.name).map_err(internal)? {
            Some(now) if now.service.id == owned.service.id && life(&now) != life(&owned) => owned = now,
            _ => return Ok(shown),
        }
    }
}

/// What a service of this node does, which has a migration under way or not.
pub(crate) fn state(node: &Node, owned: &Owned, is_migrating: bool) -> ServiceState {
    match owned.exit_code {
        Some(_) if node.due(&owned.service.id).is_some() => ServiceState::Restarting,
        Some(_) => ServiceState::Stopped,
        None if is_migrating => ServiceState::Migrating,
        None if node.is_starting(&owned.service.id) => ServiceState::Restarting,
        None => ServiceState::Running,
    }
}

async fn show_life(node: &Node, owned: &Owned) -> Result<api::Service, Status> {
    let config = node.local().config(&owned.service);
    let mut shown = described(node, &owned.service).map_err(internal)?;
    shown.restarts = owned.restarts;
    let migrating = node.migration(&owned.service.name);
    let state = state(node, owned, migrating.is_some());
    shown.set_state(state);
    if let Some(code) = owned.exit_code {
        shown.exit_code = code;
        shown.reason.clone_from(&owned.reason);
        return Ok(shown);
    }
    if let Some(migrating) = migrating {
        shown.reason = format!("on its way to node {}", migrating.to);
    } else if state == ServiceState::Running {
        shown.reason = forward::shared_by(node, &owned.service).map_err(internal)?.unwrap_or_default();
        if let Some(wait) = node.local().waits.of(&owned.service.name).await {
            shown.reason = wait.sentence(&owned.service.name);
            shown.awaits = Some(convert::awaits(&wait));
        }
    }
    if let Some(kept) = &owned.service.kept
        && let Some(id) = node.keeper(kept).id_here(&config).map_err(internal)?
    {
        shown.container_id = id;
    }
    if let Ok(state) = node.local().engine.state(&config).await {
        shown.pid = state.pid;
        shown.memory_current_bytes = node.local().engine.memory_current(&config).await.unwrap_or(0);
    }
    Ok(shown)
}

/// All services this node knows of.
pub(crate) async fn list(node: &Node, all: bool) -> Result<Vec<api::Service>, Status> {
    let mut shown = Vec::new();
    let mut names = HashSet::new();
    for owned in node.state.services().map_err(internal)? {
        names.insert(owned.service.name.to_string());
        if all || owned.exit_code.is_none() || node.due(&owned.service.id).is_some() {
            shown.push(show(node, owned).await?);
        }
    }
    for doubt in node.local().doubts.all() {
        let service = &doubt.service;
        if !names.insert(service.name.to_string()) {
            // It has just become this node's.
            continue;
        }
        let mut doubtful = described(node, service).map_err(internal)?;
        doubtful.set_state(ServiceState::InDoubt);
        doubtful.reason = doubt.sentence();
        shown.push(doubtful);
    }
    for placement in node.state.placements().map_err(internal)? {
        if !placement.removed && placement.node != node.name && names.insert(placement.service.clone()) {
            let addresses = convert::addresses_of(&placement);
            shown.push(api::Service {
                networks: attachment::shown(node, &addresses).map_err(internal)?,
                reason: removals::gone(node, &placement.node).map_err(internal)?.unwrap_or_default(),
                name: placement.service,
                address: placement.address,
                node: placement.node,
                epoch: placement.epoch,
                state: ServiceState::Remote.into(),
                ..api::Service::default()
            });
        }
    }
    shown.sort_by(|a, b| a.name.cmp(&b.name));
    Ok(shown)
}

/// One service, wherever it is.
pub(crate) async fn inspect(node: &Node, name: &ServiceName) -> Result<api::Service, Status> {
    list(node, true).await?.into_iter().find(|service| service.name == name.as_str()).ok_or_else(|| {
        Status::not_found(format!("there is no service {name}; `godwit ps -a` lists all services"))
    })
}

/// Ends a service: SIGTERM, then after the time-out SIGKILL. Its policy does not start it again.
pub(crate) async fn stop(
    node: &Arc<Node>,
    name: &ServiceName,
    timeout: Duration,
) -> Result<api::Service, Status> {
    node.settle(name).await;
    owned(node, name)?;
    let _occupied = node.reserve_soon(name).await.ok_or_else(|| occupied(name))?;
    let service = owned(node, name)?;
    // Before it ends: it stays stopped, whatever happens to this daemon.
    node.state.set_stopped(&service.service).map_err(internal)?;
    node.end_plan(&service.service.id);
    if service.exit_code.is_none() {
        end(node, &service.service, timeout).await?;
    }
    show(node, owned(node, name)?).await
}

/// Ends a service that runs, and returns when that is noted.
pub(crate) async fn end(node: &Arc<Node>, service: &Service, timeout: Duration) -> Result<(), Status> {
    let engine = &node.local().engine;
    let config = node.local().config(service);
    // Its watcher records the end, even where it has just ended by itself.
    let _ending = node.ending(&service.name);
    let noted = node.noted(&service.name);
    engine.stop(&config, timeout).await.map_err(internal)?;
    let code = engine.wait(&config).await;
    match noted {
        // An error means that the sender is gone, which is what is waited for.
        Some(mut noted) => drop(noted.changed().await),
        None => {
            let code = code.map_err(internal)?;
            node.ended(service, code, "", Duration::ZERO).await;
        }
    }
    Ok(())
}

/// Kills a frozen service before it can do anything more, and returns when its end is noted.
pub(crate) async fn kill_frozen(node: &Arc<Node>, service: &Service) -> Result<(), Status> {
    let engine = &node.local().engine;
    let config = node.local().config(service);
    let _ending = node.ending_because(&service.name, "stopped by `godwit checkpoint`");
    let noted = node.noted(&service.name);
    // The first that it does once it is thawed is to end.
    engine.signal(&config, libc::SIGKILL).await.map_err(internal)?;
    engine.thaw(&config).await.map_err(internal)?;
    let code = engine.wait(&config).await;
    match noted {
        // An error means that the sender is gone, which is what is waited for.
        Some(mut noted) => drop(noted.changed().await),
        None => {
            let code = code.map_err(internal)?;
            node.ended(service, code, "", Duration::ZERO).await;
        }
    }
    Ok(())
}

/// Sends a signal to the main process of a service that runs.
pub(crate) async fn kill(node: &Arc<Node>, name: &ServiceName, signal: u32) -> Result<api::Service, Status> {
    let signal = i32::try_from(signal).ok().filter(|signal| (1..=libc::SIGRTMAX()).contains(signal));
    let signal = signal.ok_or_else(|| Status::invalid_argument("that is not the number of a signal"))?;
    owned(node, name)?;
    let _occupied = node.reserve_soon(name).await.ok_or_else(|| occupied(name))?;
    let service = owned(node, name)?;
    if service.exit_code.is_some() {
        return Err(Status::failed_precondition(format!("service {name} is not running")));
    }
    node.local().engine.signal(&node.local().config(&service.service), signal).await.map_err(internal)?;
    show(node, service).await
}

/// Removes a stopped service and all of its files; its volumes stay.
pub(crate) async fn remove(node: &Arc<Node>, name: &ServiceName, force: bool) -> Result<(), Status> {
    node.settle(name).await;
    if removals::forget_service(node, name).await.map_err(internal)? {
        return Ok(());
    }
    if force && node.state.service(name).map_err(internal)?.is_none() {
        return forget(node, name).await;
    }
    owned(node, name)?;
    let _occupied = node.reserve_soon(name).await.ok_or_else(|| occupied(name))?;
    let service = owned(node, name)?;
    if service.exit_code.is_none() && !force {
        return Err(Status::failed_precondition(format!(
            "service {name} runs; stop it first, or remove it with --force"
        )));
    }
    remove_reserved(node, &service).await
}

/// The same for who has its name.
pub(crate) async fn remove_reserved(node: &Arc<Node>, service: &Owned) -> Result<(), Status> {
    let name = &service.service.name;
    if let Some(kept) = &service.service.kept {
        node.keeper(kept).settle(&node.local().config(&service.service)).map_err(internal)?;
    }
    node.unwatch(name);
    node.local().clear(&service.service).await.map_err(internal)?;
    node.state.remove_service(&service.service).map_err(internal)?;
    node.forget_lives(&service.service.id);
    unlist(node, &service.service).await
}

/// Takes a service that was removed from this node off the cluster's list.
pub(crate) async fn unlist(node: &Arc<Node>, service: &Service) -> Result<(), Status> {
    // Should another one have its address, it is that one's. Until the next line nobody else takes it.
    forward::lead(node, &service.addresses()).await.map_err(internal)?;
    node.place(service, &node.name, service.epoch, true).map_err(internal)?;
    node.events.tell("service", "removed", &service.name, "");
    Ok(())
}

/// Removes a service from the cluster's list that the list has on this node, and that this node does not have.
async fn forget(node: &Arc<Node>, name: &ServiceName) -> Result<(), Status> {
    let placement = node.placement(name).map_err(internal)?;
    let Some(placement) = placement.filter(|placement| placement.node == node.name) else {
        return owned(node, name).map(drop);
    };
    let _occupied = node.reserve_soon(name).await.ok_or_else(|| occupied(name))?;
    let local = node.local();
    let open = local.journal.unfinished_of(&placement.id).map_err(internal)?;
    if node.state.service(name).map_err(internal)?.is_some() || !open.is_empty() || local.doubts.has(name) {
        return Err(Status::aborted(format!(
            "service {name} is about to become this node's, or a migration of it has not ended here; try again when it has"
        )));
    }
    local.clear_left(name, &placement.id).await.map_err(internal)?;
    let addresses = convert::addresses_of(&placement);
    node.state.put_placement(&api::Placement { removed: true, ..placement }).map_err(internal)?;
    forward::lead(node, &addresses).await.map_err(internal)?;
    node.news.notify_one();
    node.events.tell("service", "forgotten", name, "it was on the cluster's list, and on no node");
    Ok(())
}

/// Decides a doubt by hand.
pub(crate) fn resolve(node: &Node, name: &ServiceName, own: bool) -> Result<(), Status> {
    let verdict = if own { Verdict::Own } else { Verdict::Drop };
    node.local().doubts.decide(name, verdict).map_err(Status::failed_precondition)?;
    let decided = if own { "it is this node's" } else { "it is not this node's" };
    node.events.tell("migration", "resolved", name, &format!("an operator decided that {decided}"));
    Ok(())
}

/// Writes incarnations into the directories of this node's services, where an older version did not, before anything is
/// removed that an earlier run of this daemon has left.
pub(crate) fn record_all(node: &Node) -> anyhow::Result<()> {
    for owned in node.state.services()? {
        node.local().record(&owned.service)?;
    }
    Ok(())
}

/// After a restart of the daemon: services whose checkpoints were cut off go on. CRIU may have been left at work in them, and
/// says nothing of the freezer that can be relied on.
pub(crate) async fn go_on_after_checkpoints(node: &Arc<Node>) -> anyhow::Result<()> {
    let local = node.local();
    let cut_off = staging::cut_off(&local.layout)?;
    for owned in node.state.services()? {
        let service = owned.service;
        // A migration that goes on has it in its journal.
        if !cut_off.contains(&service.id) || !local.journal.unfinished_of(&service.id)?.is_empty() {
            continue;
        }
        let config = local.config(&service);
        let going = async {
            if owned.stopped {
                // Its archive is kept: the first that it does is to end.
                local.engine.signal(&config, libc::SIGKILL).await?;
            }
            // With what CRIU has left in it.
            local.engine.thaw(&config).await
        };
        match going.await {
            Ok(()) | Err(EngineError::NotFound(_)) => {}
            // One service is no reason for the others to be without a daemon.
            Err(error) => {
                tracing::error!(service = %service.name, error = %error_chain(&error), "it may be frozen after a checkpoint that was cut off");
            }
        }
    }
    Ok(())
}

/// After a restart of the daemon: services that still run are watched, the others are said to be gone.
pub(crate) async fn find_again(node: &Arc<Node>) -> anyhow::Result<()> {
    let mut asking = Vec::new();
    for owned in node.state.services()? {
        let service = owned.service;
        let config = node.local().config(&service);
        if let Some(kept) = &service.kept
            && let Err(error) = node.keeper(kept).own(&config)
        {
            tracing::error!(service = %service.name, error = %error_chain(&error), "its record cannot be read or written");
        }
        if owned.exit_code.is_some() {
            // Its next start may have been due.
            node.by_policy(&service, Duration::ZERO);
            continue;
        }
        match node.local().engine.state(&config).await {
            Ok(state) if state.status != ContainerStatus::Stopped => {
                match joined::join_silently(node, &service, state.pid).await {
                    Ok(()) => asking.push(service.clone()),
                    Err(error) => {
                        tracing::error!(service = %service.name, error = %error_chain(&error), "it is not in the network that its engine has made");
                    }
                }
                let plugged = match node.local().network.plug(&service).await {
                    Ok(()) => node.local().network.open(&service).await.map(drop),
                    failed => failed,
                };
                match plugged {
                    // A network that is not up is no reason for the others to be without a daemon.
                    Err(error @ NetworkError::NoNetwork { .. }) => {
                        tracing::error!(service = %service.name, error = %error_chain(&error), "it cannot be reached on all of its networks");
                    }
                    other => other?,
                }
                // An update may have been cut off between the limits and their record.
                if service.kept.is_none()
                    && let Err(error) = node.local().engine.limit(&config).await
                {
                    tracing::error!(service = %service.name, error = %error_chain(&error), "it may have other limits than are recorded");
                }
                node.watch(&service);
            }
            Ok(state) => {
                let code = state.exit_code.unwrap_or(-1);
                let reason = "ended while godwitd was not running";
                node.state.set_exit(&service, code, reason)?;
                node.note_end(&service, code, reason);
                node.events.tell("service", "died", &service.name, "while godwitd was not running");
                node.by_policy(&service, Duration::ZERO);
            }
            Err(EngineError::NotFound(_)) => {
                let reason =
                    "its processes are gone: the machine was restarted, or they were killed with their shim";
                node.state.set_exit(&service, -1, reason)?;
                node.note_end(&service, -1, reason);
                node.state.forget_restarts(&service)?;
                node.events.tell("service", "died", &service.name, reason);
                node.by_policy(&service, Duration::ZERO);
            }
            // An engine of others that does not answer is no reason for the services to be without a daemon.
            Err(error) if service.kept.is_some() => {
                tracing::error!(service = %service.name, error = %error_chain(&error), "its engine does not tell its state");
                node.watch(&service);
            }
            Err(error) => return Err(error.into()),
        }
    }
    joined::tell_names_of(node, asking);
    forward::forward_all(node).await?;
    Ok(())
}
