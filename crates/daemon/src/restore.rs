//! A service from a file: the archive of a checkpoint, of godwit's or of Podman's, becomes a service of this node.
//!
//! ```text
//! user ─▶ staging: unpacked, its digests checked ─▶ described ─▶ name, address, ports, volumes reserved
//!      ─▶ layers, changed files, volumes, network ─▶ CRIU ─▶ runs
//! ```
//! Nothing is made before the whole archive is here and is what it says; what was made goes after a failure.

use std::net::Ipv4Addr;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use godwit_api::v1::{self as api, RestoreInput, RestoreStart, RunRequest, restore_input};
use godwit_criu::images;
use godwit_database::blocking::off_worker;
use godwit_engine::checkpoint::theirs::{self, Theirs};
use godwit_engine::checkpoint::unpack::{Unpacked, unpack};
use godwit_engine::checkpoint::{ArchiveError, OWN, changes, foreign, volume};
use godwit_engine::image::{Digest, Image};
use godwit_engine::{ContainerConfig, Mount, MountKind, RestoreRequest, files};
use godwit_migration::databases::{self, Remembered};
use godwit_migration::service::Hooks;
use godwit_migration::{Attachment, Port, Service, failpoint};
use godwit_names::{ServiceName, VolumeName};
use godwit_network::{NetworkError, Subnet};
use tokio::sync::mpsc;
use tonic::{Status, Streaming};

use crate::checkpoint::{Own, VERSION, scale_windows};
use crate::directory::known_networks;
use crate::node::Node;
use crate::pieces::{Incoming, PIECES, hand_on};
use crate::services::{self, owned, reserve};
use crate::staging::Staging;
use crate::state::now_ms;
use crate::status::{internal, invalid, status};
use crate::{convert, cordon};

/// Longest host name (`HOST_NAME_MAX`).
const LONGEST_HOSTNAME: usize = 64;

/// Where a container has what the kernel shows of itself, and is not to write to it.
const KERNELS: &[&str] = &["/proc", "/sys"];

fn failed(error: ArchiveError) -> Status {
    match error {
        ArchiveError::Io { .. } | ArchiveError::Read { .. } => internal(error),
        _ => invalid(error),
    }
}

/// Makes a service from what comes.
pub(crate) async fn restore(
    node: &Arc<Node>,
    mut input: Streaming<RestoreInput>,
) -> Result<api::Service, Status> {
    let Some(RestoreInput { kind: Some(restore_input::Kind::Start(start)) }) = input.message().await? else {
        return Err(Status::invalid_argument("the first message of a restore must say what to do"));
    };
    convert::ports(&start.publish)?;
    // Before the archive comes; what reserves the name asks again.
    if let Some(objection) = cordon::objection(node).map_err(internal)? {
        return Err(Status::failed_precondition(objection));
    }
    node.criu().version().await.map_err(|error| status(Status::failed_precondition, &error))?;
    let staging = Staging::new(&node.local().layout).map_err(internal)?;
    let unpacked = receive(&mut input, staging.path()).await?;
    let (mut service, Archived { addresses, remembered }) = described(&unpacked, &start)?;
    if !start.ignore_volumes {
        has_volumes(&unpacked, &service)?;
    }
    let connections = images::connections(&unpacked.images()).map_err(invalid)?;
    if connections > 0 && !start.tcp_established {
        return Err(Status::failed_precondition(format!(
            "the archive has {connections} established TCP connections; restore them with --tcp-established, if their peers still have them"
        )));
    }
    let stays = connections > 0 || start.name.is_empty();
    let request = asked(node, &service, &start, (&addresses, stays))?;
    let (network, addresses, _occupied) =
        reserve(node, &service.name, &request, service.publish.clone()).await?;
    (service.network, service.address) =
        (network, addresses.first().copied().unwrap_or(Ipv4Addr::UNSPECIFIED));
    service.more = addresses.get(1..).unwrap_or_default().to_vec();
    service.epoch = node.state.next_epoch(&service.name).map_err(internal)?;

    // Its layers are in no table before the service is.
    let _hold = node.local().store.hold();
    layers(node, &mut service, &start, unpacked.is_own()).await?;
    convert::check_limits(&service)?;
    let fresh = fresh_volumes(node, &service, start.ignore_volumes)?;
    let making = Making {
        node,
        service: &service,
        unpacked,
        staging: &staging,
        fresh,
        ignore_volumes: start.ignore_volumes,
        remembered,
    };
    if let Err(error) = making.make().await {
        making.undo().await;
        return Err(error);
    }
    staging.went_well();
    services::begun(node, &service, "restored", &service.address.to_string());
    services::show(node, owned(node, &service.name)?).await
}

/// Unpacks what comes.
async fn receive(input: &mut Streaming<RestoreInput>, staging: &Path) -> Result<Unpacked, Status> {
    let into = staging.join("archive");
    std::fs::create_dir(&into).map_err(internal)?;
    let (pieces, incoming) = mpsc::channel(PIECES);
    let unpacking = tokio::task::spawn_blocking(move || unpack(Incoming::new(incoming), &into));
    let data = |message: RestoreInput| match message.kind {
        Some(restore_input::Kind::Data(data)) => Some(data),
        _ => None,
    };
    hand_on(input, pieces, data).await;
    unpacking.await.map_err(internal)?.map_err(failed)
}

/// What an archive of godwit's says beside its service; one of Podman's says nothing.
#[derive(Default)]
struct Archived {
    /// The addresses that the service had.
    addresses: Vec<Ipv4Addr>,
    /// What its processes remember of files of databases.
    remembered: Vec<Remembered>,
}

/// The service that an archive describes, on no network yet.
fn described(unpacked: &Unpacked, start: &RestoreStart) -> Result<(Service, Archived), Status> {
    let refused = |reason: &str| Status::invalid_argument(format!("the archive is refused: {reason}"));
    let (mut service, archived) = if unpacked.is_own() {
        let own = unpacked.document(OWN).map_err(failed)?;
        let own: Own = serde_json::from_slice(&own).map_err(|error| {
            Status::invalid_argument(format!("{OWN} of the archive is not understood: {error}"))
        })?;
        if own.version != VERSION {
            return Err(Status::failed_precondition(format!(
                "the archive has version {} of godwit's part, and this godwit reads {VERSION}; install the one that made it",
                own.version
            )));
        }
        let service = own.service;
        if service.kept.is_some()
            || service.network.namespace().is_some()
            || service.hooks.named().next().is_some()
        {
            return Err(refused("its service is one that no archive has"));
        }
        if service.mounts.iter().any(|mount| mount.bind().is_some()) {
            return Err(refused("it wants a directory of this node"));
        }
        let archived = Archived { addresses: service.addresses(), remembered: own.remembered };
        (service, archived)
    } else {
        (of_podman(theirs::read(unpacked).map_err(failed)?, start)?, Archived::default())
    };
    check(&service)?;
    if !start.name.is_empty() {
        service.name = convert::service_name(&start.name)?;
    }
    if !start.publish.is_empty() {
        service.publish = convert::ports(&start.publish)?;
    }
    service.id = ulid::Ulid::new().to_string();
    (service.created_ms, service.started_ms) = (now_ms(), now_ms());
    Ok((service, archived))
}

/// Refuses what `godwit run` would refuse.
fn check(service: &Service) -> Result<(), Status> {
    let refused = |reason: &str| Err(Status::invalid_argument(format!("the archive is refused: {reason}")));
    if service.command.is_empty() || !service.workdir.is_absolute() {
        return refused("its service has no command, or no working directory");
    }
    let texts = service.command.iter().chain(&service.env).chain(&service.labels);
    if texts.chain([&service.hostname]).any(|text| text.contains('\0')) {
        return refused("a text of its service has a NUL byte");
    }
    if service.env.iter().chain(&service.labels).any(|pair| !pair.contains('=')) {
        return refused("its service has something else in its environment or labels than NAME=VALUE");
    }
    if !service.aliases_are_sound() {
        return refused("its service has too many further names, or one that cannot be one");
    }
    let known = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'.' | b'_');
    if service.hostname.len() > LONGEST_HOSTNAME || !service.hostname.bytes().all(known) {
        return refused("its service has a host name that is none");
    }
    convert::ports(&convert::shown_ports(&service.publish))?;
    convert::mounts(&service.mounts.iter().map(as_asked).collect::<Vec<_>>())?;
    if let Some(mount) =
        service.mounts.iter().find(|mount| KERNELS.iter().any(|path| mount.target == Path::new(path)))
    {
        return refused(&format!("its service has a mount on {}", mount.target.display()));
    }
    service.confinement.check().map_err(invalid)
}

/// A mount in the words of `godwit run`.
fn as_asked(mount: &Mount) -> api::Mount {
    let (kind, source, size_bytes) = match &mount.kind {
        MountKind::Volume { name, .. } => ("volume", name.to_string(), 0),
        MountKind::EngineVolume { name, .. } => ("volume", name.clone(), 0),
        MountKind::Tmpfs { size_bytes } => ("tmpfs", String::new(), *size_bytes),
        MountKind::Bind { source, .. } => ("bind", source.to_string_lossy().into_owned(), 0),
    };
    api::Mount {
        kind: kind.into(),
        source,
        target: mount.target.to_string_lossy().into_owned(),
        read_only: mount.read_only,
        size_bytes,
        ..api::Mount::default()
    }
}

/// A container of Podman's.
fn of_podman(theirs: Theirs, start: &RestoreStart) -> Result<Service, Status> {
    let port = |port: &godwit_engine::foreign::Port| match (port.address.as_str(), port.protocol.as_str()) {
        ("", "tcp" | "udp") => {
            Ok(Port { host: port.node, container: port.container, udp: port.protocol == "udp" })
        }
        _ => Err(Status::failed_precondition(format!(
            "the archive publishes port {} on one address alone, or for {}; name the ports to publish with -p",
            port.node, port.protocol
        ))),
    };
    let publish = match start.publish.is_empty() {
        true => theirs.ports.iter().map(port).collect::<Result<_, _>>()?,
        false => Vec::new(),
    };
    let wanted = if start.name.is_empty() { &theirs.name } else { &start.name };
    let name: ServiceName = convert::service_name(wanted).map_err(|status| {
        Status::invalid_argument(format!("{}; name the service with --name", status.message()))
    })?;
    Ok(Service {
        id: String::new(),
        epoch: 0,
        name,
        address: Ipv4Addr::UNSPECIFIED,
        more: Vec::new(),
        network: Attachment::Overlay,
        hooks: Hooks::default(),
        image: theirs.image,
        image_digest: None,
        image_id: Some(theirs.image_id),
        layers: Vec::new(),
        platforms: Vec::new(),
        command: theirs.command,
        env: theirs.env,
        mounts: theirs.mounts,
        memory_bytes: theirs.memory_bytes,
        cpu_millis: theirs.cpu_millis,
        publish,
        hostname: theirs.hostname,
        user: theirs.user,
        workdir: theirs.workdir,
        confinement: theirs.confinement,
        restart: convert::restart(&theirs.restart)?,
        remove: false,
        aliases: Vec::new(),
        follows: None,
        kept: None,
        labels: theirs.labels,
        created_ms: 0,
        started_ms: 0,
    })
}

/// What `godwit run` would be asked to reserve for the service, on the networks of the addresses that it had, which it has again
/// if it `stays` at them.
fn asked(
    node: &Node,
    service: &Service,
    start: &RestoreStart,
    (archived, stays): (&[Ipv4Addr], bool),
) -> Result<RunRequest, Status> {
    let of = |network: api::Network| Ok((network.subnet.parse().map_err(internal)?, network.name));
    let known = known_networks(node).map_err(internal)?.into_iter().map(of);
    let known = known.collect::<Result<Vec<_>, Status>>()?;
    let networks = networks(&known, archived, &start.address, stays)?;
    Ok(RunRequest {
        name: service.name.to_string(),
        // Where it is not the address on one of these.
        address: if networks.is_empty() { start.address.clone() } else { String::new() },
        networks,
        mounts: service.mounts.iter().filter(|mount| mount.volume().is_some()).map(as_asked).collect(),
        publish: convert::shown_ports(&service.publish),
        ..RunRequest::default()
    })
}

/// The networks of the addresses that a service had, in the words of `godwit run --network`: with the address that it is given
/// on one of them, and else with those that it had, if it `stays` at them. One that had a single address may be given one
/// that is of no such network.
fn networks(
    known: &[(Subnet, String)],
    archived: &[Ipv4Addr],
    given: &str,
    stays: bool,
) -> Result<Vec<String>, Status> {
    let given = match given {
        "" => None,
        text => Some(
            text.parse()
                .map_err(|_| Status::invalid_argument(format!("{text:?} is not a valid IPv4 address")))?,
        ),
    };
    let of = |address: Ipv4Addr| known.iter().find(|(subnet, _)| subnet.contains(address));
    let is_given = |subnet: &Subnet| given.filter(|given| subnet.contains(*given));
    if let Some(given) = given
        && !archived.iter().any(|address| of(*address).is_some_and(|(subnet, _)| subnet.contains(given)))
    {
        if archived.len() > 1 {
            return Err(Status::failed_precondition(format!(
                "{given} is of none of the {} networks that the service of the archive was on",
                archived.len()
            )));
        }
        return Ok(Vec::new());
    }
    let wanted = |address: &Ipv4Addr| {
        let Some((subnet, name)) = of(*address) else {
            return Err(Status::failed_precondition(format!(
                "the service of the archive had the address {address}, which no network of this cluster has; give it another with --ip"
            )));
        };
        Ok(match is_given(subnet).or(Some(*address).filter(|_| stays)) {
            Some(address) => format!("{name}:ip={address}"),
            None => name.clone(),
        })
    };
    archived.iter().map(wanted).collect()
}

/// Finds its layers here, or imports them from the file that the user names.
async fn layers(
    node: &Arc<Node>,
    service: &mut Service,
    start: &RestoreStart,
    is_own: bool,
) -> Result<(), Status> {
    let store = Arc::clone(&node.local().store);
    let from = [&start.image, &start.rootfs].into_iter().find(|path| !path.is_empty());
    let Some(from) = from.cloned() else {
        // Podman's archive says no more than a name.
        let name = if is_own || !start.reference.is_empty() { &start.reference } else { &service.image };
        let name = name.clone();
        if let Some(named) = off_worker(|| store.named(&name)).map_err(internal)? {
            return take_layers(service, name, &named.image, (is_own, false));
        }
        if !start.reference.is_empty() {
            return Err(Status::not_found(format!(
                "node {} has no image {}; `godwit pull` there brings it from its registry",
                node.name, start.reference
            )));
        }
        if !is_own {
            return Err(Status::failed_precondition(format!(
                "the container of the archive was made from the image {0}, which this node does not have; restore with --image {0} if a registry has it, or save it with `podman save --format oci-archive -o FILE {0}`, and restore with --image FILE",
                service.image
            )));
        }
        let digests: Result<Vec<Digest>, _> = service.layers.iter().map(|layer| layer.parse()).collect();
        let digests = digests.map_err(invalid)?;
        return match digests.iter().find(|digest| !store.has_layer(digest)) {
            None if digests.is_empty() => {
                Err(Status::invalid_argument("the archive is refused: it names no layer"))
            }
            None => {
                // What the node of the archive could have sent on, this one cannot.
                service.platforms.retain(|other| other.layers.iter().all(|layer| store.has_blob(layer)));
                Ok(())
            }
            Some(lacking) => Err(Status::failed_precondition(format!(
                "the service of the archive was made from {}, and this node does not have its layer {lacking}; give the image with --image, or the directory with --rootfs DIR",
                service.image
            ))),
        };
    };
    let (path, is_rootfs) = (PathBuf::from(&from), start.image.is_empty());
    if !path.is_absolute() {
        return Err(Status::invalid_argument(format!("{} is not an absolute path", path.display())));
    }
    let imported = tokio::task::spawn_blocking(move || {
        if is_rootfs { store.import_rootfs(&path) } else { store.import_oci(&path) }
    });
    let imported = imported.await.map_err(internal)?.map_err(invalid)?;
    take_layers(service, from, &imported, (is_own, true))
}

/// Takes the layers of an image, one of a file or one that this node knows by name, which must be those that an archive of
/// godwit's names.
fn take_layers(
    service: &mut Service,
    from: String,
    image: &Image,
    (is_own, is_file): (bool, bool),
) -> Result<(), Status> {
    let found: Vec<_> = image.layers.iter().map(ToString::to_string).collect();
    if is_own && found != service.layers {
        return Err(Status::failed_precondition(format!(
            "{from} is another image than {}, from which the service of the archive was made: it has other layers",
            service.image
        )));
    }
    service.layers = found;
    service.platforms.clone_from(&image.platforms);
    let id = image.id.as_ref().map(ToString::to_string);
    service.image_id = match is_file || is_own {
        // An archive that Podman has written of its image may have another configuration.
        true => service.image_id.take().or(id),
        false => id,
    };
    if is_own {
        service.image = from;
    }
    Ok(())
}

/// Refuses an archive that lacks a volume of its service: it was made without.
fn has_volumes(unpacked: &Unpacked, service: &Service) -> Result<(), Status> {
    match service.volumes().find(|name| !unpacked.has(&volume(name))) {
        None => Ok(()),
        Some(name) => Err(Status::failed_precondition(format!(
            "the archive does not have volume {name} of its service; restore it with --ignore-volumes, which uses the volume {name} of this node, or an empty one"
        ))),
    }
}

/// The volumes that are to be made: all of them, unless those of this node are to be used.
fn fresh_volumes(node: &Node, service: &Service, ignore_volumes: bool) -> Result<Vec<VolumeName>, Status> {
    let mut fresh = Vec::new();
    for name in service.volumes() {
        match off_worker(|| node.local().volume(name)).map_err(internal)? {
            None => fresh.push(name.clone()),
            Some(_) if ignore_volumes => {}
            Some(_) => {
                return Err(Status::already_exists(format!(
                    "volume {name} is on this node already; remove it (`godwit volume rm {name}`), or use it as it is with --ignore-volumes"
                )));
            }
        }
    }
    Ok(fresh)
}

/// A service that is being restored.
struct Making<'a> {
    node: &'a Arc<Node>,
    service: &'a Service,
    unpacked: Unpacked,
    staging: &'a Staging,
    /// Volumes that are not here yet.
    fresh: Vec<VolumeName>,
    ignore_volumes: bool,
    /// What its processes remember of files of databases.
    remembered: Vec<Remembered>,
}

impl Making<'_> {
    async fn make(&self) -> Result<(), Status> {
        let (local, service) = (self.node.local(), self.service);
        let config = local.config(service);
        // What an earlier service has left under the name must not mix with it.
        local.make_room(service).await.map_err(internal)?;
        local.begin_making(service).map_err(internal)?;
        local.make_directories(service, None).await.map_err(internal)?;
        if !self.ignore_volumes {
            // They go if this does not come to its end.
            off_worker(|| local.mark_volumes(service)).map_err(internal)?;
        }
        off_worker(|| local.take_volumes(service, true)).map_err(internal)?;
        local.mount_root(service).map_err(internal)?;
        if self.ignore_volumes {
            local.fill_volumes(service).await.map_err(internal)?;
        }
        self.put_files().await?;
        failpoint::point("restore.files").await;
        let images = self.unpacked.images();
        off_worker(|| foreign::make_own(&self.unpacked)).map_err(failed)?;
        scale_windows(&images).map_err(failed)?;
        let stopped = images::stopped_processes(&images).map_err(invalid)?;
        local.network.plug(service).await.map_err(internal)?;
        let request = RestoreRequest {
            config: config.clone(),
            images,
            work: self.staging.logs().to_owned(),
            lazy_pages: false,
        };
        local.engine.restore_stopped(&request).await.map_err(internal)?;
        self.correct(&config).await?;
        // Its first answers find the port open.
        local.network.open(service).await.map_err(internal)?;
        local.engine.cont(&config, &stopped).await.map_err(internal)?;
        failpoint::point("restore.resumed").await;
        self.node.state.put_service(service).map_err(internal)?;
        // Not before it is this node's: until then they go with it.
        off_worker(|| local.unmark_volumes(service)).map_err(internal)
    }

    /// Corrects what its processes remember of files of databases. What cannot be corrected is told to the user.
    async fn correct(&self, config: &ContainerConfig) -> Result<(), Status> {
        if self.remembered.is_empty() {
            return Ok(());
        }
        let processes = self.node.local().engine.processes(config).await.map_err(internal)?;
        let remembered = self.remembered.clone();
        let correcting = tokio::task::spawn_blocking(move || databases::correct(&processes, &remembered));
        if let Some(failed) = correcting.await.map_err(internal)? {
            self.node.events.tell("service", "told", &self.service.name, &failed);
        }
        Ok(())
    }

    /// Puts its changed files and volumes in their places.
    async fn put_files(&self) -> Result<(), Status> {
        let local = self.node.local();
        let root = local.config(self.service).rootfs;
        let unpacked = self.unpacked.directory().to_owned();
        let volumes = files::volumes(&local.layout.service(&self.service.name));
        let names: Vec<_> = match self.ignore_volumes {
            true => Vec::new(),
            false => self.service.volumes().map(ToString::to_string).collect(),
        };
        let put = tokio::task::spawn_blocking(move || {
            changes::apply(&unpacked, &root)?;
            names.iter().try_for_each(|name| changes::apply_volume(&unpacked, name, &volumes.join(name)))
        });
        put.await.map_err(internal)?.map_err(failed)
    }

    /// Removes what was made.
    async fn undo(&self) {
        let (local, service) = (self.node.local(), self.service);
        let told = |error: &dyn std::error::Error| {
            tracing::error!(service = %service.name, error = %error, "cannot remove a service that was half restored");
        };
        // Before anything else: what ends now must not tell its peers, who may have the connections elsewhere, or once more
        // after another restore.
        match local.network.close(service).await {
            // It failed before it was plugged in.
            Ok(()) | Err(NetworkError::NoEndpoint { .. }) => {}
            Err(error) => told(&error),
        }
        if let Err(error) = self.node.state.remove_service(service) {
            told(&error);
            return;
        }
        if let Err(error) = local.clear(service).await {
            told(&error);
            return;
        }
        for name in &self.fresh {
            match off_worker(|| local.volume(name)) {
                Ok(None) => {}
                Ok(Some(_)) => {
                    if let Err(error) = off_worker(|| local.remove_volume(name)) {
                        told(&error);
                    }
                }
                Err(error) => told(&error),
            }
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn it_is_on_the_networks_that_it_was_on() {
        let known: Vec<(Subnet, String)> = [("10.88.0.0/16", "default"), ("10.89.0.0/24", "back")]
            .map(|(subnet, name)| (subnet.parse().unwrap(), name.to_owned()))
            .into();
        let asked = |archived: &[&str], given: &str, stays: bool| {
            let archived: Vec<_> = archived.iter().map(|address| address.parse().unwrap()).collect();
            networks(&known, &archived, given, stays).map_err(|status| status.message().to_owned())
        };
        let both = ["10.88.0.5", "10.89.0.6"];
        assert_eq!(asked(&both, "", true).unwrap(), ["default:ip=10.88.0.5", "back:ip=10.89.0.6"]);
        assert_eq!(asked(&both, "", false).unwrap(), ["default", "back"]);
        assert_eq!(asked(&both, "10.89.0.7", false).unwrap(), ["default", "back:ip=10.89.0.7"]);
        assert_eq!(asked(&both, "10.89.0.7", true).unwrap(), ["default:ip=10.88.0.5", "back:ip=10.89.0.7"]);
        assert_eq!(asked(&["10.7.0.1"], "10.88.0.9", true).unwrap(), [""; 0]);
        assert_eq!(asked(&[], "10.88.0.9", true).unwrap(), [""; 0]);
        assert!(asked(&["10.7.0.1"], "", false).unwrap_err().contains("10.7.0.1"));
        assert!(asked(&both, "10.7.0.1", true).unwrap_err().contains("none of the 2 networks"));
        assert!(asked(&both, "x", true).unwrap_err().contains("not a valid IPv4 address"));
    }
}
