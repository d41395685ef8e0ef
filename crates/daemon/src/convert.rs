//! Between the API's messages and the types inside; all checks of what users give are here.

use std::collections::HashMap;
use std::net::Ipv4Addr;
use std::path::{Path, PathBuf};
use std::time::Duration;

use godwit_api::v1::{self as api, Network, Placement};
use godwit_engine::confinement::ConfinementError;
use godwit_engine::image::{PlatformLayers, architecture_of, machine_architecture, machine_of};
use godwit_engine::seccomp::Seccomp;
use godwit_engine::{Confinement, Mount, MountKind, OnMove, Ulimit};
use godwit_migration::hooks::{HookPoint, Hooks};
use godwit_migration::restart::UnknownRestart;
use godwit_migration::{
    Attachment, Compress, Follows, LackingLayers, Mode, Options, Port, Report, Restart, Service, Wait,
    error_chain,
};
use godwit_names::{MAX_ALIASES, ServiceName, ServiceNameError, VolumeName, is_alias, is_name};
use godwit_network::{Mac, NetworkError, OverlayConfig, Prefix6};
use tonic::Status;

use crate::plain::plain_report;

/// The smallest memory limit with which a container starts at all.
const MIN_MEMORY_BYTES: u64 = 4 << 20;

/// A service's name.
pub(crate) fn service_name(text: &str) -> Result<ServiceName, Status> {
    text.parse().map_err(|error: ServiceNameError| Status::invalid_argument(error.to_string()))
}

/// Refuses what cannot be a network's name, which is followed by a colon in `--network NAME:ip=ADDRESS`.
pub(crate) fn check_network_name(name: &str) -> Result<(), Status> {
    if is_name(name) && name != "ns" {
        return Ok(());
    }
    Err(Status::invalid_argument(format!(
        "{name:?} cannot be a network's name: use 1 to 63 letters, digits, '-', '_' or '.', begin with a letter or digit, and not \"ns\""
    )))
}

/// The host name a service gets.
pub(crate) fn hostname(request: &api::RunRequest) -> String {
    if request.hostname.is_empty() { request.name.clone() } else { request.hostname.clone() }
}

/// The name of a volume.
pub(crate) fn volume_name(name: &str) -> Result<VolumeName, Status> {
    name.parse().map_err(crate::status::invalid)
}

/// The volumes among mounts.
pub(crate) fn volumes(mounts: &[api::Mount]) -> Result<Vec<VolumeName>, Status> {
    let volumes = mounts.iter().filter(|mount| mount.kind == "volume");
    volumes.map(|mount| volume_name(&mount.source)).collect()
}

/// Mounts as the user gave them.
pub(crate) fn mounts(mounts: &[api::Mount]) -> Result<Vec<Mount>, Status> {
    mounts.iter().map(mount).collect()
}

pub(crate) fn mount(mount: &api::Mount) -> Result<Mount, Status> {
    let absolute = |path: &str, what: &str| {
        let plain = Path::new(path).components().all(|c| !matches!(c, std::path::Component::ParentDir));
        if Path::new(path).is_absolute() && plain && path != "/" {
            return Ok(PathBuf::from(path));
        }
        Err(Status::invalid_argument(format!(
            "the {what} {path:?} of a mount must be an absolute path without '..'"
        )))
    };
    let target = absolute(&mount.target, "target")?;
    let kind = match mount.kind.as_str() {
        "bind" => {
            let source = absolute(&mount.source, "source")?;
            if !source.exists() {
                return Err(Status::invalid_argument(format!(
                    "{}, which is to be mounted at {}, does not exist on this node",
                    mount.source, mount.target
                )));
            }
            MountKind::Bind { source, on_move: on_move(&mount.on_move).map_err(Status::invalid_argument)? }
        }
        "tmpfs" => MountKind::Tmpfs { size_bytes: mount.size_bytes },
        "volume" => MountKind::Volume { name: volume_name(&mount.source)?, file: None },
        other => {
            return Err(Status::invalid_argument(format!(
                "mounts of type {other:?} are not known; use bind, tmpfs or volume"
            )));
        }
    };
    Ok(Mount { kind, target, read_only: mount.read_only })
}

/// What a service is to be plugged into, as the user gave it: nothing, or `ns:PATH`.
pub(crate) fn network(text: &str) -> Result<Attachment, Status> {
    if text.is_empty() {
        return Ok(Attachment::Overlay);
    }
    match text.strip_prefix("ns:").map(PathBuf::from) {
        Some(path) if path.is_absolute() => Ok(Attachment::Namespace(path)),
        _ => Err(Status::invalid_argument(format!(
            "{text:?} is not a network; give ns: and the absolute path of a network namespace"
        ))),
    }
}

/// Hooks by the names of their points.
pub(crate) fn hooks(named: &HashMap<String, String>) -> Result<Hooks, Status> {
    let mut hooks = Hooks::default();
    for (moment, name) in named {
        let place = match moment.as_str() {
            "pre-freeze" => &mut hooks.pre_freeze,
            "post-resume" => &mut hooks.post_resume,
            // As version 0.1 calls it.
            "aborted" | "kept" => &mut hooks.aborted,
            other => {
                return Err(Status::invalid_argument(format!(
                    "{other:?} is not a hook point; hooks run at pre-freeze, post-resume and aborted"
                )));
            }
        };
        place.clone_from(name);
    }
    Ok(hooks)
}

fn shown_hooks(hooks: &Hooks) -> HashMap<String, String> {
    let moments = [HookPoint::PreFreeze, HookPoint::PostResume, HookPoint::Aborted];
    let named = moments.into_iter().filter(|moment| !hooks.of(*moment).is_empty());
    named.map(|moment| (moment.name().to_owned(), hooks.of(moment).to_owned())).collect()
}

/// Published ports as the user gave them.
pub(crate) fn ports(ports: &[api::PublishedPort]) -> Result<Vec<Port>, Status> {
    ports
        .iter()
        .map(|port| {
            let number = |n: u32| {
                u16::try_from(n).ok().filter(|n| *n > 0).ok_or_else(|| {
                    Status::invalid_argument(format!(
                        "{n} is not a valid port number; give one from 1 to 65535"
                    ))
                })
            };
            let udp = match port.protocol.as_str() {
                "" | "tcp" => false,
                "udp" => true,
                other => {
                    return Err(Status::invalid_argument(format!(
                        "ports of protocol {other:?} cannot be published; use tcp or udp"
                    )));
                }
            };
            Ok(Port { host: number(port.host_port)?, container: number(port.container_port)?, udp })
        })
        .collect()
}

/// How a service follows its clients, as the API shows it.
pub(crate) fn policy(follows: &Follows) -> api::Policy {
    api::Policy {
        latency_us: follows.latency_us,
        max_frozen_ms: follows.max_frozen_ms,
        allow_postcopy: follows.postcopy,
    }
}

/// Published ports as the API shows them.
pub(crate) fn shown_ports(ports: &[Port]) -> Vec<api::PublishedPort> {
    let shown = |port: &Port| api::PublishedPort {
        host_port: port.host.into(),
        container_port: port.container.into(),
        protocol: if port.udp { "udp".into() } else { "tcp".into() },
    };
    ports.iter().map(shown).collect()
}

/// Refuses limits under which nothing can run.
pub(crate) fn check_limits(service: &Service) -> Result<(), Status> {
    if service.memory_bytes != 0 && service.memory_bytes < MIN_MEMORY_BYTES {
        return Err(Status::invalid_argument(format!(
            "a memory limit of {} bytes is too small to start a container; give at least {} MiB",
            service.memory_bytes,
            MIN_MEMORY_BYTES >> 20
        )));
    }
    match service.mounts_objection() {
        Some(objection) => Err(Status::invalid_argument(format!("service {}: {objection}", service.name))),
        None => Ok(()),
    }
}

/// How the service's processes are to be confined.
pub(crate) fn confinement(request: &api::RunRequest) -> Result<Confinement, Status> {
    let invalid = |error: ConfinementError| Status::invalid_argument(error_chain(&error));
    let default = Confinement::default();
    let mut confinement = Confinement {
        seccomp: match request.seccomp.as_str() {
            "" => Seccomp::Default,
            "unconfined" => Seccomp::Unconfined,
            profile => Seccomp::Profile(profile.to_owned()),
        },
        no_new_privileges: request.no_new_privileges,
        pids_limit: request.pids_limit.unwrap_or(default.pids_limit),
        read_only: request.read_only,
        ulimits: request
            .ulimits
            .iter()
            .map(|limit| Ulimit { name: limit.name.clone(), soft: limit.soft, hard: limit.hard })
            .collect(),
        ..default
    };
    confinement.change_capabilities(&request.cap_add, &request.cap_drop).map_err(invalid)?;
    confinement.check().map_err(invalid)?;
    Ok(confinement)
}

/// Pages that a service waits for, as the API shows them.
pub(crate) fn awaits(wait: &Wait) -> api::AwaitedPages {
    let ms = |time: Duration| u64::try_from(time.as_millis()).unwrap_or(u64::MAX).max(1);
    api::AwaitedPages {
        node: wait.source.clone(),
        bytes: wait.lacking_bytes,
        total_bytes: wait.total_bytes,
        unreachable_ms: wait.unreachable.map_or(0, ms),
    }
}

/// When a service is started again.
pub(crate) fn restart(text: &str) -> Result<Restart, Status> {
    text.parse().map_err(|error: UnknownRestart| Status::invalid_argument(error.to_string()))
}

/// A service that is removed when it has ended cannot be started again.
pub(crate) fn removed_or_restarted() -> Status {
    Status::invalid_argument(
        "a service is either removed when it has ended (--rm) or started again (--restart)",
    )
}

/// A service as the API shows it; networks, state, process and memory are filled in by the caller.
pub(crate) fn service(service: &Service, node: &str) -> api::Service {
    api::Service {
        name: service.name.to_string(),
        network: service.network.namespace().map(|path| format!("ns:{}", path.display())).unwrap_or_default(),
        hooks: shown_hooks(&service.hooks),
        node: node.to_string(),
        created_ms: service.created_ms,
        started_ms: service.started_ms,
        epoch: service.epoch,
        command: service.command.clone(),
        env: service.env.clone(),
        mounts: service.mounts.iter().map(shown_mount).collect(),
        memory_bytes: service.memory_bytes,
        cpu_millis: service.cpu_millis,
        publish: shown_ports(&service.publish),
        hostname: service.hostname.clone(),
        user: format!("{}:{}", service.user.uid, service.user.gid),
        workdir: service.workdir.display().to_string(),
        labels: service.labels.clone(),
        layers: service.layers.clone(),
        platforms: shown_platforms(service),
        image: service.image.clone(),
        capabilities: service.confinement.capabilities.clone(),
        seccomp: match service.confinement.seccomp {
            Seccomp::Default => "default".into(),
            Seccomp::Unconfined => "unconfined".into(),
            Seccomp::Profile(_) => "profile".into(),
        },
        no_new_privileges: service.confinement.no_new_privileges,
        pids_limit: service.confinement.pids_limit,
        read_only: service.confinement.read_only,
        ulimits: service
            .confinement
            .ulimits
            .iter()
            .map(|limit| api::Ulimit { name: limit.name.clone(), soft: limit.soft, hard: limit.hard })
            .collect(),
        restart: service.restart.to_string(),
        remove: service.remove,
        policy: service.follows.as_ref().map(policy),
        aliases: service.aliases.clone(),
        engine: service.kept.as_ref().map(|kept| kept.keeper.name().to_owned()).unwrap_or_default(),
        container_id: service.kept.as_ref().map(|kept| kept.id.clone()).unwrap_or_default(),
        ..api::Service::default()
    }
}

/// The platforms of its image, this node's first.
fn shown_platforms(service: &Service) -> Vec<api::ImagePlatform> {
    if service.platforms.is_empty() {
        return Vec::new();
    }
    let machine = machine_of(machine_architecture()).unwrap_or(machine_architecture());
    let own = api::ImagePlatform {
        architecture: machine_architecture().to_owned(),
        machine: machine.to_owned(),
        id: service.image_id.clone().unwrap_or_default(),
        layers: service.layers.clone(),
        bytes: 0,
    };
    std::iter::once(own).chain(service.platforms.iter().map(shown_platform)).collect()
}

/// A platform that is not this node's, without bytes.
pub(crate) fn shown_platform(platform: &PlatformLayers) -> api::ImagePlatform {
    api::ImagePlatform {
        architecture: architecture_of(&platform.machine).to_owned(),
        machine: platform.machine.clone(),
        id: platform.id.as_ref().map(ToString::to_string).unwrap_or_default(),
        layers: platform.layers.iter().map(ToString::to_string).collect(),
        bytes: 0,
    }
}

fn shown_mount(mount: &Mount) -> api::Mount {
    let of_volume = mount.engine_volume().map(|(_, on_move)| on_move);
    let on_move = mount.bind().map(|(_, on_move)| on_move).or(of_volume);
    let (kind, source, size_bytes) = match &mount.kind {
        MountKind::Bind { source, .. } => ("bind", source.display().to_string(), 0),
        MountKind::Tmpfs { size_bytes } => ("tmpfs", String::new(), *size_bytes),
        MountKind::Volume { name, .. } => ("volume", name.to_string(), 0),
        MountKind::EngineVolume { name, .. } => ("volume", name.clone(), 0),
    };
    api::Mount {
        kind: kind.into(),
        source,
        target: mount.target.display().to_string(),
        read_only: mount.read_only,
        on_move: on_move.map(|on_move| on_move.name().to_owned()).unwrap_or_default(),
        size_bytes,
    }
}

/// Milliseconds without digits beyond the precision of the measurement.
pub(crate) fn to_microseconds(ms: f64) -> f64 {
    (ms * 1e3).round() / 1e3
}

/// A report as the API shows it.
pub(crate) fn report(report: Report) -> api::MigrationReport {
    let mut report = exactly(report);
    // The other node's words are in it.
    plain_report(&mut report);
    report
}

fn exactly(report: Report) -> api::MigrationReport {
    api::MigrationReport {
        name: report.name.into(),
        mode: report.mode,
        source: report.source,
        destination: report.destination,
        outcome: report.outcome.name().into(),
        reason: report.reason,
        refused: report.refused,
        rounds: report.rounds,
        total_ms: to_microseconds(report.total_ms),
        frozen_ms: to_microseconds(report.frozen_ms),
        predicted_frozen_ms: to_microseconds(report.predicted_frozen_ms),
        pre_dump_ms: to_microseconds(report.pre_dump_ms),
        pre_dump_transfer_ms: to_microseconds(report.pre_dump_transfer_ms),
        dump_ms: to_microseconds(report.dump_ms),
        dump_transfer_ms: to_microseconds(report.dump_transfer_ms),
        resume_ms: to_microseconds(report.resume_ms),
        faulted_transfer_ms: to_microseconds(report.faulted_transfer_ms),
        cutover_ms: to_microseconds(report.cutover_ms),
        held_frames: report.held_frames,
        held_dropped: report.held_dropped,
        pre_dump_bytes: report.pre_dump_bytes,
        dump_bytes: report.dump_bytes,
        faulted_bytes: report.faulted_bytes,
        wire_bytes: report.wire_bytes,
        memory_wire_bytes: report.memory_wire_bytes,
        file_bytes: report.file_bytes,
        page_bytes: report.page_bytes,
        memory_bytes: report.memory_bytes,
        shared_bytes: report.shared_bytes,
        shared_dump_bytes: report.shared_dump_bytes,
        shared_left_bytes: report.shared_left_bytes,
        retained_bytes: report.retained_bytes,
        not_retained_bytes: report.not_retained_bytes,
        layers_from_registry_bytes: report.layers_from_registry_bytes,
        layers_from_source_bytes: report.layers_from_source_bytes,
        retained_file_bytes: report.retained_file_bytes,
        files_stay: report.files_stay,
        set: report.set,
        park_ms: to_microseconds(report.park_ms),
        rewrite_ms: to_microseconds(report.rewrite_ms),
        phases: report
            .phases
            .into_iter()
            .map(|p| api::PhaseTime { phase: p.phase, ms: to_microseconds(p.ms) })
            .collect(),
        timeline: report
            .timeline
            .into_iter()
            .map(|span| api::TimelineSpan {
                node: span.node,
                what: span.what,
                start_ms: to_microseconds(span.start_ms),
                ms: to_microseconds(span.ms),
            })
            .collect(),
        id: report.id,
        criu: report.criu,
        criu_there: report.criu_there,
        network_namespace: report.network_namespace,
        why: report.why,
        tracker: report.tracker,
        faults: report.faults,
    }
}

/// What a destination lacks of the image that a service came from.
pub(crate) fn lacking(lacking: LackingLayers, node: &str, image: &str) -> api::LackingLayers {
    api::LackingLayers {
        node: node.to_owned(),
        image: image.to_owned(),
        layers: u32::try_from(lacking.layers).unwrap_or(u32::MAX),
        of: u32::try_from(lacking.of).unwrap_or(u32::MAX),
        bytes: lacking.bytes,
        asks_registry: lacking.asks_registry,
    }
}

/// What a user asks of a migration; an error is a sentence for the user.
pub(crate) fn options(request: &api::MigrateRequest) -> Result<Options, String> {
    let default = Options::default();
    let mode = match request.mode.as_str() {
        "" => Mode::Auto,
        name => Mode::parse(name).ok_or_else(|| {
            let known = Mode::ALL.map(Mode::name).join(", ");
            format!("mode {name:?} is not known; the modes are {known}")
        })?,
    };
    let compress = match request.compress.as_str() {
        "" => Compress::Auto,
        name => Compress::parse(name).ok_or_else(|| {
            let known = Compress::ALL.map(Compress::name).join(", ");
            format!("compression {name:?} is not known; there are {known}")
        })?,
    };
    if request.streams > MAX_STREAMS {
        return Err(format!("{} streams are too many; at most {MAX_STREAMS} are allowed", request.streams));
    }
    let some = |n: u32| (n != 0).then_some(n);
    Ok(Options {
        mode,
        max_frozen: some(request.max_frozen_ms).map(|ms| Duration::from_millis(ms.into())),
        max_rounds: some(request.max_rounds).unwrap_or(default.max_rounds),
        max_bandwidth: (request.max_bandwidth != 0).then_some(request.max_bandwidth),
        compress,
        throttle: request.allow_throttle,
        postcopy: request.allow_postcopy,
        streams: some(request.streams).map_or(default.streams, |n| n as usize),
        network: match network(&request.network) {
            Ok(network) => network.namespace().map(Path::to_path_buf),
            Err(status) => return Err(status.message().to_owned()),
        },
        prepares: false,
        cross: request.cross,
        max_park: some(request.max_park_ms).map_or(default.max_park, |ms| Duration::from_millis(ms.into())),
        binds: request
            .mounts
            .iter()
            .map(|(at, name)| Ok((at.into(), on_move(name)?)))
            .collect::<Result<_, String>>()?,
    })
}

/// Further names of a service, each once.
pub(crate) fn aliases(texts: &[String]) -> Result<Vec<String>, Status> {
    let mut aliases: Vec<String> = Vec::new();
    for text in texts {
        let alias = text.to_ascii_lowercase();
        if !is_alias(&alias) {
            return Err(Status::invalid_argument(format!(
                "{text:?} cannot be a name by which services find another: use letters, digits, '-' and '_' in parts of 1 to 63, with '.' between them"
            )));
        }
        if !aliases.contains(&alias) {
            aliases.push(alias);
        }
    }
    if aliases.len() > MAX_ALIASES {
        return Err(Status::invalid_argument(format!(
            "a service can have {MAX_ALIASES} further names at most"
        )));
    }
    Ok(aliases)
}

/// What becomes of a mount in a move.
pub(crate) fn on_move(name: &str) -> Result<OnMove, String> {
    OnMove::named(name)
        .ok_or_else(|| format!("{name:?} is not what can become of a mount; say skip, shared or copy"))
}

/// Most streams: more than any machine has cores to fill them.
const MAX_STREAMS: u32 = 8;

/// The addresses of a placement, in the order of its networks; none in a namespace that godwit did not create.
pub(crate) fn addresses_of(placement: &Placement) -> Vec<Ipv4Addr> {
    let texts = std::iter::once(&placement.address).chain(&placement.more);
    texts
        .filter_map(|text| text.parse().ok())
        .filter(|address: &Ipv4Addr| !address.is_unspecified())
        .collect()
}

/// VXLAN network identifiers have 24 bits (RFC 7348).
pub(crate) const MOST_VNI: u32 = (1 << 24) - 1;
/// A network as it is to be brought up beside the first.
pub(crate) fn overlay_config(
    first: &OverlayConfig,
    network: &Network,
) -> Result<OverlayConfig, NetworkError> {
    let prefix6 = Some(&network.subnet6).filter(|text| !text.is_empty());
    let prefix6 = prefix6.map(|text| text.parse::<Prefix6>()).transpose()?;
    if !(1..=MOST_VNI).contains(&network.vni) {
        return Err(NetworkError::BadVni { vni: network.vni, most: MOST_VNI });
    }
    Ok(first.beside(network.subnet.parse()?, prefix6, network.vni))
}

/// A link-layer address as [`mac_to_string`] writes it.
pub(crate) fn parse_mac(text: &str) -> Option<Mac> {
    let bytes: Vec<u8> =
        text.split(':').map(|byte| u8::from_str_radix(byte, 16)).collect::<Result<_, _>>().ok()?;
    bytes.try_into().ok()
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use godwit_network::mac_to_string;

    use super::*;

    #[test]
    fn times_are_told_to_the_microsecond() {
        assert_eq!(to_microseconds(140.461_258_000_000_02).to_string(), "140.461");
        assert_eq!(to_microseconds(0.0).to_string(), "0");
    }

    #[test]
    fn a_link_layer_address_is_read_as_it_is_written() {
        let mac = [0x02, 0x67, 0xff, 0, 0, 0x0a];
        assert_eq!(parse_mac(&mac_to_string(mac)), Some(mac));
        for bad in ["", "02:67", "02:67:ff:00:00:0a:01", "zz:67:ff:00:00:0a", "02-67-ff-00-00-0a"] {
            assert_eq!(parse_mac(bad), None, "{bad}");
        }
    }

    fn network(vni: u32) -> Network {
        Network { name: "back".into(), subnet: "10.89.0.0/24".into(), vni, ..Network::default() }
    }

    #[test]
    fn what_no_network_can_be_is_refused() {
        let first = OverlayConfig::new("10.88.0.0/16".parse().unwrap(), "eth0", [10, 99, 0, 1].into());
        let good = overlay_config(&first, &network(0x00ab_cdef)).unwrap();
        assert_eq!((good.bridge.as_str(), good.vxlan.as_str()), ("gwabcdef", "gwvxabcdef"));
        for bad in [
            network(0),
            network(MOST_VNI + 1),
            Network { subnet: "10.89.0.1/24".into(), ..network(1) },
            Network { subnet6: "fd00::/64".into(), ..network(1) },
        ] {
            assert!(overlay_config(&first, &bad).is_err(), "{bad:?}");
        }
    }

    #[test]
    fn a_placement_has_an_address_for_each_network() {
        let placement = |address: &str, more: &[&str]| Placement {
            address: address.into(),
            more: more.iter().map(ToString::to_string).collect(),
            ..Placement::default()
        };
        let addresses = addresses_of(&placement("10.88.0.2", &["10.89.0.2", "nonsense"]));
        assert_eq!(addresses, [Ipv4Addr::new(10, 88, 0, 2), Ipv4Addr::new(10, 89, 0, 2)]);
        assert!(addresses_of(&placement("0.0.0.0", &[])).is_empty());
    }
}
