//! Whether a service is admitted: every reason against it at once, before anything comes.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use godwit_criu::{Version, obstacles};
use godwit_database::blocking::off_worker;
use godwit_engine::image::{Digest, Hold, Pinned};
use godwit_engine::tree;
use godwit_engine::{Keeper, OnMove, OutputPipes, VolumePlace, is_file_name};
use godwit_memory::pager::fills_shared;
use godwit_names::{VolumeName, is_name};

use super::cross::Crossing;
use super::room::{lacks_room, make_room};
use super::{DestinationError, announced};
use crate::ahead::{Held, Taken};
use crate::arrivals::Arrival;
use crate::binds::Checked;
use crate::cpu::{cpu_flags, is_usable, remedy};
use crate::failpoint;
use crate::follows::Follows;
use crate::hooks;
use crate::journal::{Beginning, JournalError, Role, now_ms};
use crate::link::{Link, LinkError};
use crate::machine::machine;
use crate::message::{Accepted, Layer, Message, Open, Versions};
use crate::promised::Reservation;
use crate::resources::{NodeResources, Place};
use crate::retained::Retained;
use crate::service::Service;
use crate::storage;
use crate::timeline::Timeline;

/// How long CRIU may take to tell its version and what it can do. It does so in milliseconds, and on an emulated or very
/// busy processor in seconds: it is started three times.
const CRIU_ANSWER: Duration = Duration::from_secs(20);

/// Room for the restore beside the service's own memory, bytes.
const RESTORE_OVERHEAD: u64 = 32 << 20;

/// Highest epoch of a service that is taken: more moves than there are milliseconds in thirty years.
const MAX_EPOCH: u64 = 1 << 40;

/// What the CRIU here can do.
#[derive(Debug, Clone, Copy, Default)]
struct Abilities {
    criu: Option<Version>,
    tcp_inline: bool,
    keeps_rights: bool,
    /// Whether it restores shared memory that comes over the streams.
    segments: bool,
    /// Whether it restores segments of System V that do.
    system_v: bool,
}

/// An offer that there is no reason against, and what is held for it.
pub(super) struct Examined {
    service: Service,
    protocol: u32,
    abilities: Abilities,
    missing: Vec<Layer>,
    /// The image whose registry is asked for them first.
    registry: Option<Pinned>,
    /// Layers that the engine of its container has here, where that lacks the image.
    engine_layers: Vec<String>,
    /// None where there is a reason against it.
    place: Option<Place>,
    /// Volumes to try when their engine has mounted them.
    to_try: Vec<ToTry>,
    /// What it is to have of this node, as it was looked at.
    checked: Vec<Checked>,
    /// Volumes of its engine's here that it may have as they are.
    may_have: Vec<String>,
    /// Where it goes on under executables of this node's.
    crossing: Option<Crossing>,
    /// No layer is removed meanwhile.
    hold: Hold,
}

/// A volume of this node's engine that is to show the storage which the one of the source shows.
pub(super) struct ToTry {
    title: &'static str,
    name: String,
    path: PathBuf,
    from: String,
}

impl ToTry {
    /// Why it does not.
    pub(super) fn objection(&self, migration: &str, here: &str) -> Option<String> {
        let Self { title, name, path, from } = self;
        let why = storage::objection(path, migration, (here, from))?;
        Some(format!("{title}'s volume {name}: {why}"))
    }
}

/// What an accepted offer holds until it is committed or dropped.
pub(super) struct Admitted {
    pub(super) service: Service,
    pub(super) id: String,
    /// The identity of the source's journal; empty where it did not tell.
    pub(super) source_journal: String,
    pub(super) images_bytes: u64,
    pub(super) tree: tree::Limits,
    pub(super) memory_bytes: u64,
    pub(super) missing: Vec<Layer>,
    /// The image whose registry is asked for them first.
    pub(super) registry: Option<Pinned>,
    engine_layers: Vec<String>,
    pub(super) userfaultfd: bool,
    abilities: Abilities,
    /// The version of the conversation.
    protocol: u32,
    /// Volumes to try when their engine has mounted them.
    pub(super) to_try: Vec<ToTry>,
    /// What it is to have of this node, as it was looked at.
    pub(super) checked: Vec<Checked>,
    /// Volumes of its engine's here that it may have as they are.
    pub(super) may_have: Vec<String>,
    /// Where it goes on under executables of this node's.
    pub(super) crossing: Option<Crossing>,
    /// The service's output at its source; none where the source does not tell.
    pub(super) output_pipes: Option<OutputPipes>,
    /// Whether the source is told of each step while its service is frozen.
    pub(super) steps: bool,
    pub(super) memory: Reservation,
    /// What this node does in the frozen time.
    pub(super) timeline: Timeline,
    /// Reserves the name on this node.
    pub(super) _place: Place,
}

/// What an accepted service's pages come into, and what is here of them already.
pub(super) struct Coming {
    pub(super) arrival: Arrival,
    pub(super) retained: Option<Arc<Retained>>,
    /// Files that were sent ahead; none where nobody knows.
    pub(super) files: Option<Held>,
}

/// Looks for every reason against it but a lack of memory. What is needed for it is held as long as the result is.
async fn examine(
    local: &NodeResources,
    from: &str,
    open: &Open,
) -> Result<(Examined, Vec<String>), DestinationError> {
    let theirs = Versions::offered(open.protocol, open.newest_protocol);
    let Some(protocol) = Versions::OWN.common(theirs) else {
        return Err(DestinationError::Refused(vec![Versions::OWN.objection(&local.node, theirs, from)]));
    };
    let mut service: Service = serde_json::from_str(&open.service).map_err(DestinationError::Service)?;
    check_ids(&service, open)?;
    let crossing = Crossing::of(open)?;
    // From here on it has what its image has for this machine.
    let is_other = crossing.is_some() && open.machine != machine();
    let has_platform = is_other && service.change_platform(&open.machine, &machine())?;
    if open.now_ms != 0 {
        service.tell_by_clock_ahead(now_ms().saturating_sub(open.now_ms));
    }
    let (place, mut reasons) = match local.cluster.admit(&service, from).await {
        Ok(place) => (Some(place), Vec::new()),
        Err(objections) => (None, objections),
    };
    match &crossing {
        Some(crossing) if open.machine == machine() || has_platform => {
            reasons.extend(crossing.objections_at_once(&service));
        }
        // Executables of godwit-cc are for the base of their instruction set.
        _ => reasons.extend(machine_objections(local, &service, open)),
    }
    if let Some(needs) = &open.needs {
        // An engine that has made no container yet has not loaded its own. Nothing is done for what is refused in any case.
        if reasons.is_empty()
            && service.kept.is_some()
            && let Some(profile) = needs.lacks_profile(Path::new("/"))
            && let Err(error) = local.engine.load_profile(&local.config(&service), profile).await
        {
            tracing::warn!(service = %service.name, error = &error as &dyn std::error::Error, "its AppArmor profile cannot be loaded");
        }
        reasons.extend(needs.objections(Path::new("/"), &local.node));
    }
    if let Some(needs) = &open.needs {
        let own = local.config(&service).cgroup;
        // An engine chooses the cgroup when it makes a container, below one of these unless it is told otherwise.
        let cgroups = match service.kept.as_ref().map(|kept| kept.keeper) {
            None => vec![own.as_str()],
            Some(Keeper::Docker) => vec!["system.slice/its", "docker/its"],
            Some(Keeper::Podman) => vec!["machine.slice/its", "libpod_parent/its"],
        };
        let lacking = |cgroup: &&str| needs.lacks_tasks(Path::new("/"), cgroup, &local.node);
        reasons.extend(cgroups.iter().find_map(lacking));
    }
    if let Some(theirs) = open.overlay.as_ref().filter(|_| service.network.namespace().is_none()) {
        let ours = local.network.terms();
        reasons.extend(ours.objections(&local.node, theirs, from));
    }
    let mut abilities = Abilities::default();
    let asking = async {
        tokio::try_join!(
            local.criu.version(),
            local.criu.tcp_inline(),
            local.criu.keeps_rights(),
            local.criu.shared_external(),
            local.criu.system_v_external()
        )
    };
    match tokio::time::timeout(CRIU_ANSWER, asking).await {
        Ok(Ok((version, inline, rights, shared, of_system_v))) => {
            abilities = Abilities {
                criu: Some(version),
                tcp_inline: inline,
                keeps_rights: rights,
                segments: shared,
                system_v: of_system_v,
            };
            reasons.extend(open.criu.and_then(|theirs| theirs.objection(from, version, &local.node)));
        }
        Ok(Err(error)) => reasons.push(crate::error_chain(&error)),
        Err(_) => reasons.push(format!(
            "CRIU at {} does not answer; run `godwit doctor` on node {}",
            local.criu.path().display(),
            local.node
        )),
    }
    if let Err(error) = service.confinement.check() {
        reasons.push(crate::error_chain(&error));
    }
    if service.kept.is_some() && service.volumes().next().is_some() {
        // Its engine has its volumes.
        return Err(DestinationError::Protocol("volumes of a container that another engine keeps"));
    }
    if service.files_of_volumes().any(|(_, file)| !is_file_name(file)) {
        return Err(DestinationError::Protocol("a name of a file that cannot be one"));
    }
    if let Some(objection) = service.mounts_objection() {
        return Err(DestinationError::Refused(vec![objection]));
    }
    if !service.aliases_are_sound() {
        return Err(DestinationError::Protocol("a name by which others find it that cannot be one"));
    }
    if service.follows.as_ref().is_some_and(Follows::is_too_long) {
        return Err(DestinationError::Protocol("more moves than a node remembers"));
    }
    // Through the volume it could put a link in the place of the file.
    let mounts_of = |name: &VolumeName| service.volumes().filter(|other| *other == name).count();
    if service.files_of_volumes().any(|(name, _)| mounts_of(name) > 1) {
        return Err(DestinationError::Protocol("a file of a volume that is mounted a second time"));
    }
    if service.kept.is_none() && service.mounts.iter().any(|mount| mount.engine_volume().is_some()) {
        return Err(DestinationError::Protocol("a volume of an engine that does not keep its container"));
    }
    let OfEngine { reasons: of_volumes, to_try, mut checked, may_have } =
        engine_volumes(local, &service, (from, &open.migration)).await;
    reasons.extend(of_volumes);
    for mount in &service.mounts {
        let Some((source, on_move)) = mount.bind() else { continue };
        let opened = off_worker(|| local.binds.open_foreign(source, &local.node));
        let opened = opened.and_then(|opened| Checked::new(source, &mount.target, opened));
        let not_shared = || match on_move {
            OnMove::Shared => off_worker(|| storage::objection(source, &open.migration, (&local.node, from))),
            OnMove::Unsaid | OnMove::Skip | OnMove::Copy => None,
        };
        match opened {
            Ok(opened) => {
                checked.push(opened);
                reasons.extend(not_shared());
            }
            Err(refused) => reasons.push(refused),
        }
    }
    if let Some(path) = service.network.namespace()
        && let Err(error) = local.network.check_namespace(path)
    {
        reasons.push(crate::error_chain(&error));
    }
    for hook in service.hooks.named() {
        if let Err(error) = hooks::check(&local.hooks, hook) {
            reasons.push(error.to_string());
        }
    }
    if service.kept.is_some() {
        reasons.extend(local.engine.objections(&local.config(&service)).await);
    }
    // Until the journal names the layers that are here.
    let hold = local.store.hold();
    let (missing, engine_layers) = match &service.kept {
        None => (missing_layers(local, &service, open, &mut reasons)?, Vec::new()),
        Some(_) => match local.engine.lacks_image(&local.config(&service)).await {
            Ok(None) => (Vec::new(), Vec::new()),
            Ok(Some(layers)) => (open.layers.clone(), layers),
            Err(error) => {
                reasons.push(crate::error_chain(&error));
                (Vec::new(), Vec::new())
            }
        },
    };
    // Else it is looked at when they are here.
    if let Some(crossing) = crossing.as_ref().filter(|_| missing.is_empty() && reasons.is_empty()) {
        reasons.extend(crossing.objections(local, &service, None)?);
    }
    reasons.extend(announced::objections(open));
    reasons.extend(lacks_room(local, &service, open, (&missing, &engine_layers)).await?);
    let registry = asked_first(local, &service, open, &missing);
    Ok((
        Examined {
            service,
            protocol,
            abilities,
            missing,
            registry,
            engine_layers,
            place,
            to_try,
            checked,
            may_have,
            crossing,
            hold,
        },
        reasons,
    ))
}

/// What comes of a look at the volumes of this node's engine that a service is to have as they are.
#[derive(Default)]
struct OfEngine {
    reasons: Vec<String>,
    to_try: Vec<ToTry>,
    checked: Vec<Checked>,
    may_have: Vec<String>,
}

/// What speaks against giving a service volumes of this node's engine as they are here: another service may have them.
/// Those whose storage the engine mounts for the container are tried [once it has](ToTry).
async fn engine_volumes(
    local: &NodeResources,
    service: &Service,
    (from, migration): (&str, &str),
) -> OfEngine {
    let config = local.config(service);
    let OfEngine { mut reasons, mut to_try, mut checked, mut may_have } = OfEngine::default();
    for mount in &service.mounts {
        let Some((name, on_move)) = mount.engine_volume() else { continue };
        let place = match local.engine.volume_place(&config, name).await {
            Ok(place) => place,
            Err(error) => {
                reasons.push(crate::error_chain(&error));
                continue;
            }
        };
        let title = service.kept.as_ref().map_or("its engine", |kept| kept.keeper.title());
        reasons.extend(match (on_move, place) {
            (OnMove::Unsaid | OnMove::Copy, _) => {
                Some(format!("what becomes of its volume {name} is not said"))
            }
            // It is made.
            (OnMove::Skip, None) => None,
            (OnMove::Shared, None) => Some(format!(
                "{title} has no volume {name} there, which is to show the storage that the volume on node {from} shows: make one that does, or say skip or copy of it"
            )),
            (OnMove::Skip | OnMove::Shared, Some(VolumePlace { path, mounted_in_use })) => {
                let opened = local.binds.open_volume((title, name), &path, &local.node);
                let opened = opened.and_then(|opened| Checked::new(&path, &mount.target, opened));
                let of = ToTry { title, name: name.to_owned(), path, from: from.to_owned() };
                may_have.extend(opened.is_ok().then(|| name.to_owned()));
                match (opened, on_move) {
                    // Of what is mounted there later nothing is known yet.
                    (Ok(_), OnMove::Shared) if mounted_in_use => {
                        to_try.push(of);
                        None
                    }
                    (Ok(_), _) if mounted_in_use => None,
                    (Ok(opened), on_move) => {
                        checked.push(opened);
                        (on_move == OnMove::Shared).then(|| of.objection(migration, &local.node)).flatten()
                    }
                    (Err(refused), _) => Some(refused),
                }
            }
        });
    }
    OfEngine { reasons, to_try, checked, may_have }
}

/// The memory that it needs here, bytes.
fn memory_needed(open: &Open) -> u64 {
    open.memory_bytes.saturating_add(RESTORE_OVERHEAD)
}

/// What a source is told that only asks. Nothing is kept of it.
pub(super) async fn answer_to_question(
    local: &NodeResources,
    from: &str,
    open: Open,
) -> Result<Asked, DestinationError> {
    let (examined, mut reasons) = examine(local, from, &open).await?;
    let memory_bytes = memory_needed(&open);
    reasons.extend(local.lacks(memory_bytes));
    if !reasons.is_empty() {
        return Err(DestinationError::Refused(reasons));
    }
    let Examined { service, protocol, abilities, missing, registry, engine_layers, crossing, hold, .. } =
        examined;
    let charges = OutputPipes::try_from(open.output_pipes).is_ok();
    let answer = answer(protocol, local.userfaultfd, abilities, (&missing, charges));
    let files = local.kept_files.hold(&service, from).await.map(|held| held.token()).unwrap_or_default();
    let accepted = Accepted {
        engine_layers,
        asks_registry: registry.is_some(),
        files: files.into(),
        crosses: crosses(crossing.as_ref()),
        ..answer
    };
    let tree = Tree {
        announced: Taken { bytes: open.tree_bytes, names: open.tree_names },
        limits: announced::tree_limits(open.tree_bytes, service.makes_devices()),
    };
    Ok(Asked { service, id: open.migration, memory_bytes, missing, registry, accepted, tree, _hold: hold })
}

/// What a source has asked for that may come.
pub(super) struct Asked {
    pub(super) service: Service,
    pub(super) id: String,
    /// That it needs here.
    pub(super) memory_bytes: u64,
    pub(super) missing: Vec<Layer>,
    /// The image whose registry is asked for them first.
    pub(super) registry: Option<Pinned>,
    pub(super) accepted: Accepted,
    pub(super) tree: Tree,
    /// No layer is removed meanwhile.
    _hold: Hold,
}

/// Changed files.
pub(super) struct Tree {
    /// How much there is, as the source says.
    pub(super) announced: Taken,
    /// What a move takes of them.
    pub(super) limits: tree::Limits,
}

/// Tells the source which pages are here.
pub(super) async fn tell_retained(link: &mut Link, retained: Option<&Retained>) -> Result<(), LinkError> {
    let Some(retained) = retained else { return Ok(()) };
    for pages in retained.messages() {
        link.send(Message::RetainedPages(pages)).await?;
    }
    link.send(Message::RetainedEnd).await
}

/// Admits it, if there is no reason against it.
pub(super) async fn admit(
    local: &Arc<NodeResources>,
    link: &mut Link,
    open: Open,
) -> Result<(Admitted, Coming), DestinationError> {
    let (examined, mut reasons) = examine(local, link.node(), &open).await?;
    let Examined {
        service,
        protocol,
        abilities,
        missing,
        registry,
        engine_layers,
        place,
        to_try,
        checked,
        may_have,
        crossing,
        hold,
    } = examined;
    let memory = match local.reserve(memory_needed(&open)) {
        Ok(memory) => Some(memory),
        Err(reason) => {
            reasons.push(reason);
            None
        }
    };
    let (Some(memory), Some(place), []) = (memory, place, reasons.as_slice()) else {
        return Err(DestinationError::Refused(reasons));
    };
    let files = local.kept_files.hold(&service, link.node()).await;
    let of_it = files.as_ref().map_or(0, Held::bytes);
    make_room(local, &service, &open, (&missing, &engine_layers), of_it).await?;
    let new = Beginning {
        id: &open.migration,
        role: Role::Destination,
        peer: link.node(),
        peer_journal: &open.journal,
        service: &service,
        serving: None,
    };
    match local.journal.begin(&new) {
        Err(error @ JournalError::Unsettled { .. }) => {
            return Err(DestinationError::Refused(vec![crate::error_chain(&error)]));
        }
        begun => begun?,
    }
    drop(hold);
    let (userfaultfd, retained) = (local.userfaultfd, local.retention.of(&service.id));
    let arrival = local.arrivals.expect(&open.migration, link.node(), &service.name);
    let tree = announced::tree_limits(open.tree_bytes, service.makes_devices());
    let admitted = Admitted {
        service,
        id: open.migration,
        source_journal: open.journal,
        memory_bytes: open.memory_bytes,
        userfaultfd,
        abilities,
        protocol,
        output_pipes: open.output_pipes.try_into().ok(),
        steps: open.steps,
        images_bytes: open.images_bytes,
        tree,
        missing,
        registry,
        engine_layers,
        to_try,
        checked,
        may_have,
        crossing,
        memory,
        timeline: Timeline::default(),
        _place: place,
    };
    Ok((admitted, Coming { arrival, retained, files }))
}

/// Tells the source that it is, and what is here already.
pub(super) async fn accept(
    link: &mut Link,
    admitted: &Admitted,
    retained: Option<&Retained>,
    files: Option<&Held>,
) -> Result<(), DestinationError> {
    failpoint::point("destination.reserved").await;
    let key = retained.map(|retained| retained.key().bytes().to_vec().into()).unwrap_or_default();
    let charges = admitted.output_pipes.is_some();
    let Admitted { protocol, userfaultfd, abilities, ref missing, .. } = *admitted;
    let answer = answer(protocol, userfaultfd, abilities, (missing, charges));
    let engine_layers = admitted.engine_layers.clone();
    let files = files.map(Held::token).unwrap_or_default().into();
    let asks_registry = admitted.registry.is_some();
    let retained_here = retained.is_some();
    let crosses = crosses(admitted.crossing.as_ref());
    let accepted =
        Accepted { retained: retained_here, key, engine_layers, asks_registry, files, crosses, ..answer };
    link.send(Message::Accepted(accepted)).await?;
    Ok(tell_retained(link, retained).await?)
}

/// What a source is told of a node that accepts, and has nothing of the service.
fn answer(
    protocol: u32,
    userfaultfd: bool,
    abilities: Abilities,
    (missing, charges): (&[Layer], bool),
) -> Accepted {
    Accepted {
        missing_layers: missing.iter().map(|layer| layer.digest.clone()).collect(),
        userfaultfd,
        retained: false,
        tcp_inline: abilities.tcp_inline,
        criu: abilities.criu.map(Into::into),
        key: Bytes::new(),
        ahead: true,
        most_at_once: obstacles::most_at_once(Path::new("/proc")).unwrap_or(0),
        // With all pages in images, a CRIU without patches needs less for some services.
        keeps_rights: abilities.keeps_rights || !userfaultfd,
        protocol,
        segments: abilities.segments,
        charges,
        tmpfs: true,
        copied: true,
        system_v: abilities.system_v,
        parts: true,
        keepers: true,
        tries_storage: true,
        retains: true,
        layers_at_once: super::layers::AT_ONCE.into(),
        asks_registry: false,
        takes_files: true,
        no_files: String::new(),
        files: Bytes::new(),
        tells_files: true,
        parts_of_mounts: true,
        fills_shared: userfaultfd && fills_shared().is_ok(),
        engine_layers: Vec::new(),
        sessions: true,
        follows: true,
        aliases: true,
        crosses: String::new(),
        corrects: true,
    }
}

/// The set of the executables under which it goes on, where these are this node's.
fn crosses(crossing: Option<&Crossing>) -> String {
    crossing.map_or_else(String::new, |crossing| crossing.set().to_owned())
}

/// Longest identity of a journal that is taken, in bytes.
const MAX_JOURNAL: usize = 64;

/// Ids become paths here, as the name does: only plain ones are let in.
fn check_ids(service: &Service, open: &Open) -> Result<(), DestinationError> {
    // The next owner's epoch is one more.
    if service.epoch >= MAX_EPOCH {
        return Err(DestinationError::Protocol("an epoch that is too large for another move"));
    }
    if !is_name(&open.migration) || !is_name(&service.id) {
        return Err(DestinationError::Protocol("an id that cannot be a file name"));
    }
    if open.journal.len() > MAX_JOURNAL {
        return Err(DestinationError::Protocol("an identity of a journal that is too long"));
    }
    Ok(())
}

fn machine_objections(local: &NodeResources, service: &Service, open: &Open) -> Vec<String> {
    if let Some(objection) = platform_objection(service, &open.machine, &local.node, &machine()) {
        return vec![objection];
    }
    let flags = cpu_flags();
    // Of what an older node tells, too, only what a program can use.
    let usable = open.cpu_flags.iter().filter(|flag| is_usable(flag));
    let lacking: Vec<_> = usable.filter(|flag| !flags.contains(flag)).cloned().collect();
    if lacking.is_empty() {
        return Vec::new();
    }
    vec![format!(
        "the CPU of node {} lacks {} that the service may use; {}",
        local.node,
        lacking.join(", "),
        remedy(&lacking)
    )]
}

/// Why processes of an instruction set cannot run on this node, if they cannot. That their image has this one, too, is no
/// help to those that run.
fn platform_objection(service: &Service, theirs: &str, node: &str, here: &str) -> Option<String> {
    // As images name it.
    let platform = |machine: &str| match machine {
        "x86_64" => "linux/amd64".to_owned(),
        "aarch64" => "linux/arm64".to_owned(),
        other => format!("linux/{other}"),
    };
    (theirs != here).then(|| {
        let image = match service.image.as_str() {
            "" => "of its image".to_owned(),
            image => format!("of image {image}"),
        };
        format!(
            "service {} runs what is {image} for {}, and node {node} is {}; only programs built for both, in an image for both, can move (docs/crossing.md): name a node that is {}",
            service.name,
            platform(theirs),
            platform(here),
            platform(theirs),
        )
    })
}

/// The image whose registry is asked for what is missing, where the operator allows that and the source knows of it.
fn asked_first(local: &NodeResources, service: &Service, open: &Open, missing: &[Layer]) -> Option<Pinned> {
    // A registry is asked for layers of one platform.
    if missing.is_empty() || !open.waits_for_registry || !service.platforms.is_empty() {
        return None;
    }
    let digest = service.image_digest.as_ref()?.parse::<Digest>().ok()?;
    local.registries.allowed(&service.image, &digest)
}

/// What this node lacks of a service's image: layers that are not unpacked, and blobs of those that it only sends on.
fn missing_layers(
    local: &NodeResources,
    service: &Service,
    open: &Open,
    reasons: &mut Vec<String>,
) -> Result<Vec<Layer>, DestinationError> {
    let own: Vec<Digest> = service.layers.iter().map(|layer| layer.parse()).collect::<Result<_, _>>()?;
    let others = service.platforms.iter().flat_map(|platform| &platform.layers);
    let (mut missing, mut seen) = (Vec::new(), BTreeSet::new());
    for (digest, is_own) in own.iter().map(|digest| (digest, true)).chain(others.map(|other| (other, false)))
    {
        if !seen.insert(digest) {
            continue;
        }
        let is_here = if is_own { local.store.has_layer(digest) } else { local.store.has_blob(digest) };
        if is_here {
            continue;
        }
        let name = digest.to_string();
        match open.all_layers().find(|layer| layer.digest == name && layer.bytes > 0) {
            Some(layer) => missing.push(layer.clone()),
            None if is_own => {
                reasons.push(format!("layer {name} is missing there and the source cannot send it"));
            }
            // The service runs here without, and cannot go on to a node of that platform from here.
            None => {}
        }
    }
    Ok(missing)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::service::tests::service;

    #[test]
    fn a_node_of_another_platform_refuses_with_image_platform_and_node() {
        let service = Service { image: "docker.io/library/redis:7".into(), ..service() };
        assert_eq!(platform_objection(&service, "x86_64", "b", "x86_64"), None);
        let said = platform_objection(&service, "x86_64", "b", "aarch64").unwrap();
        for words in ["image docker.io/library/redis:7 for linux/amd64", "node b is linux/arm64"] {
            assert!(said.contains(words), "{said}");
        }
        let said = platform_objection(&service, "riscv64", "b", "x86_64").unwrap();
        assert!(said.contains("for linux/riscv64") && said.contains("node b is linux/amd64"), "{said}");
    }

    #[test]
    fn an_epoch_that_leaves_no_room_for_another_move_is_refused() {
        let open = Open { migration: "01A".into(), ..Open::default() };
        let checked = |epoch| check_ids(&Service { epoch, ..service() }, &open);
        checked(MAX_EPOCH - 1).unwrap();
        for epoch in [MAX_EPOCH, MAX_EPOCH + 1, u64::MAX] {
            let refused = checked(epoch).unwrap_err().to_string();
            assert!(refused.contains("too large for another move"), "{epoch}: {refused}");
        }
    }
}
