//! First: the destination's reservation, and what the two nodes agree on.

use std::collections::{BTreeMap, BTreeSet};
use std::net::Ipv4Addr;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use godwit_criu::Version;
use godwit_criu::images::page_size;
use godwit_crossing::Set;
use godwit_engine::image::Digest;
use godwit_engine::tree;
use godwit_engine::{ContainerConfig, Engines, Mount, MountKind, OnMove};
use godwit_memory::shared;
use godwit_policy::Mode;

use super::files::next_round;
use super::layers::Lacking;
use super::pages::{Kinds, PagesError};
use super::plan::Plan;
use super::recorder::Recorder;
use super::{Source, SourceError};
use crate::ahead::Lent;
use crate::bound;
use crate::cpu::{cpu_flags, needed};
use crate::crossing::{CrossingOffer, processes};
use crate::images::KERNEL_STATE_BYTES;
use crate::journal::now_ms;
use crate::link::{Link, LinkError};
use crate::machine::machine;
use crate::message::{Accepted, Layer, Message, OLDEST_PROTOCOL_VERSION, Open, PROTOCOL_VERSION, Versions};
use crate::needs::KernelNeeds;
use crate::page_hash::{EarlierVisit, PageKey, no_hashes};
use crate::report::ms_since;
use crate::resources::LocalError;
use crate::retained;
use crate::service::{Attachment, Service};
use crate::storage::{self, Marks};

/// How often processes are looked at that may go on under other executables, while some seem to be of another kind, and how long
/// after each look.
const CROSSING_LOOKS: u32 = 4;
const CROSSING_PAUSE: Duration = Duration::from_millis(5);

/// What the two nodes agree on for one migration.
#[derive(Debug, Clone, Copy)]
pub(super) struct Agreed {
    /// Whether the destination takes the log, and changed files again, while the service runs.
    pub(super) ahead: bool,
    /// Whether the destination restores nothing before all pages are there.
    pub(super) waits: bool,
    /// Whether connections go into the image of the files: CRIU on both nodes can do that.
    pub(super) tcp_inline: bool,
    /// Which segments go over the streams: the destination takes them, and CRIU, where it has a part in them, can leave them
    /// to others.
    pub(super) kinds: Kinds,
    /// Whether pages of shared anonymous memory stay here for after the commit.
    pub(super) shared_stays: bool,
    /// Whether files of a tmpfs go over the streams, and their names beside the dump: the destination takes them.
    pub(super) tmpfs: bool,
    /// Where the destination takes frames for the service.
    pub(super) vtep: Ipv4Addr,
    /// Most bytes of images.
    pub(super) images: u64,
    /// The instruction set of the executables under which it goes on, where these are the destination's own.
    pub(super) crosses: Option<Set>,
    /// Whether the destination corrects what processes remember of files of databases.
    pub(super) corrects: bool,
}

impl Agreed {
    /// Whether segments of any kind go over the streams.
    pub(super) fn sends_shared(self) -> bool {
        self.kinds.memory || self.kinds.system_v || self.kinds.copied || self.tmpfs
    }
}

/// A service that may come.
pub(super) struct Reserved {
    pub(super) agreed: Agreed,
    pub(super) plan: Plan,
    /// What the destination has retained of an earlier visit.
    pub(super) visit: EarlierVisit,
    /// The layers that it does not have.
    pub(super) layers: Lacking,
    /// The changed files, and what the first round found of them.
    pub(super) tree: tree::TreeSender,
    pub(super) first: tree::Round,
    /// What the destination has of them that was sent ahead, in place of nothing.
    pub(super) ahead: Option<Lent>,
    pub(super) accepted: Accepted,
    /// The destination may look for them until it has the files: some engines mount storage only for a container.
    pub(super) marks: Marks,
}

impl Source {
    /// Asks the destination whether the service may come.
    pub(super) async fn reserve(
        &self,
        link: &mut Link,
        recorder: &mut Recorder,
    ) -> Result<Reserved, SourceError> {
        let report = &mut recorder.report;
        let config = self.local.config(&self.service);
        let memory = self.memory(&config).await?;
        let plan = self.plan(memory)?;
        let started = Instant::now();
        self.check_volumes().await?;
        let tree = self.tree().await?;
        let (tree, first) = next_round(tree, false).await?;
        report.pre_dump_ms = ms_since(started);

        let marks = self.put_marks().await?;
        let open = self.offer(&config, memory, (first.changes.bytes(), first.changes.entries())).await?;
        if let Some(path) = self.service_there()?.network.namespace() {
            report.network_namespace = path.to_string_lossy().into_owned();
        }
        let layers: Vec<_> = open.all_layers().cloned().collect();
        link.send(Message::Open(open)).await?;
        let accepted = self.accepted(link, &config).await?;
        let plan = plan.with(accepted.userfaultfd, &self.destination)?;
        plan.tell(report);
        report.criu_there = self.criu_there(&accepted).await?;
        report.memory_bytes = memory;
        let crosses = self.crosses(&accepted)?;
        if crosses.is_some() {
            self.check_not_stopped(&config).await?;
        }
        let kinds = self.kinds(&accepted, plan.mode).await?;
        let agreed = Agreed {
            ahead: accepted.ahead,
            waits: !accepted.userfaultfd,
            tcp_inline: accepted.tcp_inline && self.local.criu.tcp_inline().await?,
            kinds,
            shared_stays: kinds.memory && self.shared_stays(&accepted, plan.mode).await?,
            tmpfs: self.streams(&accepted, plan.mode) && accepted.tmpfs,
            vtep: self.local.cluster.vtep(&self.destination)?,
            images: memory + KERNEL_STATE_BYTES,
            crosses,
            corrects: accepted.corrects,
        };
        report.set = agreed.crosses.map(|set| set.name().to_owned()).unwrap_or_default();
        let visit = match accepted.retained {
            true => self.learn_retained(link, &accepted.key).await?,
            false => EarlierVisit::none(),
        };
        let layers = Lacking::of(&self.destination, &accepted, &layers)?;
        self.tell_lacking(&layers);
        let ahead = self.lent(&accepted.files, &tree);
        let tree = match accepted.parts {
            true => {
                let key = PageKey::random();
                tree.by_blocks(tree::BlockHash::new(move |block| key.hash_block(block)))
            }
            false => tree,
        };
        Ok(Reserved { agreed, plan, visit, layers, tree, first, ahead, accepted, marks })
    }

    /// The set under whose executables the destination has it go on.
    pub(super) fn crosses(&self, accepted: &Accepted) -> Result<Option<Set>, LinkError> {
        if accepted.crosses.is_empty() {
            return Ok(None);
        }
        let set = Set::ALL.into_iter().find(|set| set.name() == accepted.crosses);
        // Only for another set, unless it was asked for in any case.
        let set = set.filter(|set| self.options.cross || Some(*set) != Set::native());
        set.map(Some).ok_or_else(|| LinkError::Unexpected {
            node: self.destination.clone(),
            got: "an instruction set that the service is not to go on by",
            wanted: "another one",
        })
    }

    /// Whether what others than CRIU bring goes over the streams. A limit must count it, too.
    fn streams(&self, accepted: &Accepted, mode: Mode) -> bool {
        mode != Mode::Cold && (self.service.memory_bytes == 0 || accepted.charges)
    }

    /// Which segments go over the streams.
    pub(super) async fn kinds(&self, accepted: &Accepted, mode: Mode) -> Result<Kinds, SourceError> {
        let (criu, streams) = (&self.local.criu, self.streams(accepted, mode));
        Ok(Kinds {
            memory: streams && accepted.segments && criu.shared_external().await?,
            system_v: streams && accepted.system_v && criu.system_v_external().await?,
            copied: mode != Mode::Cold && accepted.copied && criu.file_pages_external().await?,
        })
    }

    /// Whether pages of shared anonymous memory can stay here for after the commit. A limit would not count what this
    /// program makes for them there.
    async fn shared_stays(&self, accepted: &Accepted, mode: Mode) -> Result<bool, SourceError> {
        if mode != Mode::Postcopy || !accepted.fills_shared || self.service.memory_bytes != 0 {
            return Ok(false);
        }
        let pids = self.pids().await?;
        let in_place = self.jobs.run(move |_| shared::needs_in_place(&pids)).await?;
        Ok(!in_place.map_err(PagesError::Read)?)
    }

    /// What the destination is to know of the service, before it answers.
    pub(super) async fn offer(
        &self,
        config: &ContainerConfig,
        memory: u64,
        (tree_bytes, tree_names): (u64, u64),
    ) -> Result<Open, SourceError> {
        let mut layers = Vec::new();
        for digest in &self.service.layers {
            let bytes = match self.service.kept {
                None => self.local.store.open_blob(&digest.parse::<Digest>()?).map_or(0, |(_, bytes)| bytes),
                Some(_) => self.local.engine.image_bytes(config).await?,
            };
            layers.push(Layer { digest: digest.clone(), bytes });
        }
        let service = serde_json::to_string(&self.service_there()?)
            .map_err(|e| SourceError::NotEligible(vec![format!("the service cannot be described: {e}")]))?;
        Ok(Open {
            protocol: OLDEST_PROTOCOL_VERSION,
            migration: self.id.clone(),
            service,
            memory_bytes: memory,
            images_bytes: memory + KERNEL_STATE_BYTES,
            tree_bytes,
            tree_names,
            layers,
            machine: machine(),
            cpu_flags: needed(cpu_flags(), &self.service.env),
            streams: u32::try_from(self.options.streams).unwrap_or(1),
            overlay: Some(self.local.network.terms()),
            journal: self.local.journal.identity().to_owned(),
            criu: Some(self.local.criu.version().await?.into()),
            now_ms: now_ms(),
            steps: true,
            newest_protocol: PROTOCOL_VERSION,
            output_pipes: self.local.engine.output_pipes(config).await?.into(),
            needs: Some(self.kernel_needs(config).await?),
            waits_for_registry: true,
            crossing: self.crossing_offer(config).await?,
            further_layers: self.further_layers(),
        })
    }

    /// The layers of its image for other platforms, as far as this node has them.
    fn further_layers(&self) -> Vec<Layer> {
        let digests: BTreeSet<_> =
            self.service.platforms.iter().flat_map(|platform| &platform.layers).collect();
        let here = digests.into_iter().filter_map(|digest| {
            let (_, bytes) = self.local.store.open_blob(digest).ok()?;
            Some(Layer { digest: digest.to_string(), bytes })
        });
        here.collect()
    }

    /// What the destination is told of processes that may go on under other executables; nothing where none can.
    async fn crossing_offer(&self, config: &ContainerConfig) -> Result<Option<CrossingOffer>, SourceError> {
        let always = self.options.cross;
        let mut looks = 1..CROSSING_LOOKS;
        loop {
            let pids = self.local.engine.processes(config).await?;
            let seen = tokio::task::spawn_blocking(move || processes::see_all(&pids)).await?;
            let seen = seen.map_err(LocalError::from)?;
            let built = seen.iter().filter(|(process, _)| process.record.is_ok()).count();
            if built == 0 && !always {
                return Ok(None);
            }
            // One that is about to begin another program has no memory for a moment.
            if built == seen.len() || looks.next().is_none() {
                let offer = CrossingOffer::of(seen, page_size(), always);
                return match offer {
                    None if always => Err(SourceError::NotEligible(vec![format!(
                        "service {} has more processes than can go on under other executables",
                        self.service.name
                    )])),
                    offer => Ok(offer),
                };
            }
            tokio::time::sleep(CROSSING_PAUSE).await;
        }
    }

    async fn kernel_needs(&self, config: &ContainerConfig) -> Result<KernelNeeds, SourceError> {
        let (pids, main) =
            (self.local.engine.processes(config).await?, self.local.engine.state(config).await?.pid);
        Ok(tokio::task::spawn_blocking(move || KernelNeeds::of(Path::new("/"), &pids, main)).await?)
    }

    /// What it needs at the destination, bytes.
    pub(super) async fn memory(&self, config: &ContainerConfig) -> Result<u64, SourceError> {
        Ok(self.local.engine.memory_unshared(config).await?.max(self.memory_needed().await?))
    }

    /// What its processes and each tmpfs have, whoever was charged for it.
    async fn memory_needed(&self) -> Result<u64, SourceError> {
        let pids = self.pids().await?;
        let tmpfs = self.local.engine.tmpfs(&self.local.config(&self.service)).await?;
        let asking = self.jobs.run(move |_| {
            let needed = shared::needed(&pids).map_err(PagesError::from)?;
            // What cannot be asked has just gone.
            let used = tmpfs.iter().filter_map(|tmpfs| tmpfs.used().ok());
            Ok::<_, PagesError>(used.fold(needed, u64::saturating_add))
        });
        Ok(asking.await??)
    }

    /// The destination's CRIU, if it is another.
    async fn criu_there(&self, accepted: &Accepted) -> Result<String, SourceError> {
        let (here, there) = (self.local.criu.version().await?, accepted.criu.map(Version::from));
        Ok(there.filter(|there| *there != here).map(|there| there.to_string()).unwrap_or_default())
    }

    /// Puts files into what is said to be storage of both nodes, until what is returned is dropped.
    pub(super) async fn put_marks(&self) -> Result<Marks, SourceError> {
        let (run, shared, id) =
            (self.local.layout.run.clone(), self.shared_storage().await?, self.id.clone());
        let has = self.local.mount_namespace(&self.service).await?;
        let putting = tokio::task::spawn_blocking(move || Marks::put(&run, &shared, has, &id));
        putting.await?.map_err(|why| SourceError::NotEligible(vec![why]))
    }

    /// Whether its mounts are of kinds that came later than others.
    fn has_parts_of_mounts(&self) -> Result<bool, SourceError> {
        let there = self.service_there()?;
        let of_engine = there.mounts.iter().any(|mount| mount.engine_volume().is_some());
        let engine_files = there.kept.as_ref().map(Engines::files).transpose().map_err(not_understood)?;
        let has_files = engine_files.is_some_and(|files| !files.is_empty());
        Ok(of_engine || has_files || there.files_of_volumes().next().is_some())
    }

    /// Writes out what the frozen service has written into storage of both nodes: the destination reads it there.
    pub(super) async fn sync_storage(&self) -> Result<(), SourceError> {
        let shared = self.shared_storage().await?;
        if shared.is_empty() {
            return Ok(());
        }
        let syncing = tokio::task::spawn_blocking(move || {
            shared.iter().try_for_each(|shared: &storage::Shared| tree::sync(&shared.source))
        });
        Ok(syncing.await??)
    }

    /// What is said to be storage of both nodes, as this one has it.
    async fn shared_storage(&self) -> Result<Vec<storage::Shared>, SourceError> {
        // Its engine is asked before the freeze alone.
        if let Some(found) = self.shared_storage.get() {
            return Ok(found.clone());
        }
        let (said, config) = (self.service_said()?, self.local.config(&self.service));
        let mut all: Vec<_> = storage::bound(&said).collect();
        for (name, target) in storage::volumes(&said) {
            let source = self.local.engine.volume_place(&config, name).await?.ok_or_else(|| {
                SourceError::NotEligible(vec![format!("its engine has no volume {name} any more")])
            })?;
            all.push(storage::Shared { source: source.path, target: target.to_owned() });
        }
        Ok(self.shared_storage.get_or_init(|| all).clone())
    }

    /// Refuses to have volumes go along that were not looked at, since it was said of them that they stay.
    pub(super) async fn check_volumes(&self) -> Result<(), SourceError> {
        let (config, mut reasons) = (self.local.config(&self.service), Vec::new());
        for (at, _) in self.options.binds.iter().filter(|(_, said)| **said == OnMove::Copy) {
            let all = engine_volumes(&self.service)?;
            for (name, _) in all.iter().filter(|mount| mount.target == *at).filter_map(Mount::engine_volume) {
                reasons.extend(self.local.engine.against_taking(&config, name).await?);
            }
        }
        if reasons.is_empty() { Ok(()) } else { Err(SourceError::NotEligible(reasons)) }
    }

    /// The service as it is to be at the destination: what goes of this node's directories is volumes there.
    pub(super) fn service_there(&self) -> Result<Service, SourceError> {
        bound::with_volumes(self.service_said()?).map_err(|why| SourceError::NotEligible(vec![why]))
    }

    /// The service with what was said of its move.
    pub(super) fn service_said(&self) -> Result<Service, SourceError> {
        let network = match (&self.options.network, &self.service.network) {
            (Some(path), Attachment::Namespace(_)) => Attachment::Namespace(path.clone()),
            (Some(_), Attachment::Overlay) => {
                return Err(SourceError::NotEligible(vec![format!(
                    "service {} is in the overlay, and moves with its address; --network is for one in a namespace of yours",
                    self.service.name
                )]));
            }
            (None, network) => network.clone(),
        };
        let volumes = engine_volumes(&self.service)?;
        let files = self.service.kept.as_ref().map(Engines::files).transpose().map_err(not_understood)?;
        let files = files.unwrap_or_default();
        let mut there = Service { epoch: self.service.epoch + 1, network, ..self.service.clone() };
        for (at, said) in &self.options.binds {
            let of_engine = volumes.iter().any(|mount| mount.target == *at);
            let mut binds = there.mounts.iter_mut().filter(|mount| mount.target == *at);
            match binds.find_map(|mount| mount.on_move()) {
                Some(on_move) => *on_move = *said,
                // The service has it already, if it stays.
                None if (of_engine || files.contains(at)) && *said == OnMove::Copy => {}
                // It has come as a volume with an earlier move.
                None if *said == OnMove::Copy
                    && self
                        .service
                        .mounts
                        .iter()
                        .any(|mount| mount.target == *at && mount.volume().is_some()) => {}
                None => {
                    let is_file = files.contains(at);
                    let has = self.service.mounts.iter().find(|mount| mount.target == *at);
                    let (name, at) = (&self.service.name, at.display());
                    let why = match has.and_then(Mount::volume) {
                        None if is_file => format!(
                            "the file at {at} has come with service {name} from another node, and goes with it"
                        ),
                        Some(volume) => format!(
                            "volume {volume} at {at} is godwit's own: its name is the cluster's, and it goes with its service; to have what the nodes have, bind a directory of theirs (`-v /PATH:{at}:move={}`)",
                            said.name()
                        ),
                        None => format!(
                            "service {name} has no bind mount and no volume at {at}; `godwit inspect {name}` shows its mounts"
                        ),
                    };
                    return Err(SourceError::NotEligible(vec![why]));
                }
            }
        }
        Ok(there)
    }

    /// The destination's acceptance; an error where it refuses.
    pub(super) async fn accepted(
        &self,
        link: &mut Link,
        config: &ContainerConfig,
    ) -> Result<Accepted, SourceError> {
        let answer = link.receive().await.map_err(|error| match &error {
            LinkError::Aborted { reason, .. } => match not_read(reason) {
                Some(unknown) => self.too_old(unknown),
                None => error.into(),
            },
            _ => error.into(),
        });
        match answer? {
            Message::Accepted(accepted) => {
                chosen(&self.destination, Versions::OWN, accepted.protocol)?;
                self.check_reservations(config, &accepted).await?;
                self.check_version(&accepted).await?;
                Ok(accepted)
            }
            Message::Refused(refused) => {
                Err(SourceError::Refused { node: self.destination.clone(), reasons: refused.reasons })
            }
            other => Err(link.unexpected(&other, "Accepted or Refused").into()),
        }
    }

    /// Refuses a destination that does not know of something that this service has, and would have it without.
    pub(super) async fn check_version(&self, accepted: &Accepted) -> Result<(), SourceError> {
        let unknown = if self.service.kept.is_some() && !accepted.keepers {
            "containers of other engines"
        } else if storage::bound(&self.service_there()?).next().is_some() && !accepted.tries_storage {
            "storage that nodes share"
        } else if self.service.follows.is_some() && !accepted.follows {
            "services that follow their clients"
        } else if !self.service.aliases.is_empty() && !accepted.aliases {
            "services with a --network-alias"
        } else if !accepted.parts_of_mounts && self.has_parts_of_mounts()? {
            "single files that go along, and volumes of an engine that stay"
        } else if self.options.cross && accepted.crosses.is_empty() {
            "processes that go on under other executables"
        } else if self.options.prepares && !accepted.retains {
            "migrations that are only prepared"
        } else if !self.options.prepares
            && !accepted.sessions
            && self.local.engine.sessions(&self.local.config(&self.service)).await? > 0
        {
            let name = &self.service.name;
            let reason = format!(
                "its {} is too old for commands of `godwit exec` on a terminal, and one runs in service {name}; upgrade it, or end the command first",
                self.godwit_there()
            );
            return Err(SourceError::Refused { node: self.destination.clone(), reasons: vec![reason] });
        } else {
            return Ok(());
        };
        Err(self.too_old(unknown))
    }

    /// The destination's godwit, with its release where that is known.
    pub(super) fn godwit_there(&self) -> String {
        let release = self.local.cluster.release_of(&self.destination);
        release.map_or_else(|| "godwit".to_owned(), |release| format!("godwit {release}"))
    }

    fn too_old(&self, unknown: &str) -> SourceError {
        let reasons = vec![format!("its {} is too old for {unknown}; upgrade it", self.godwit_there())];
        SourceError::Refused { node: self.destination.clone(), reasons }
    }

    /// Which pages the destination has retained of an earlier visit.
    pub(super) async fn learn_retained(
        &self,
        link: &mut Link,
        key: &[u8],
    ) -> Result<EarlierVisit, SourceError> {
        let key = PageKey::told(key).ok_or_else(|| LinkError::Unexpected {
            node: self.destination.clone(),
            got: "something else",
            wanted: "the key of the retained pages' hashes",
        })?;
        let mut hashes = no_hashes();
        loop {
            match link.receive().await? {
                Message::RetainedPages(pages) if retained::learn(&mut hashes, &pages).is_some() => {}
                Message::RetainedEnd => return Ok(EarlierVisit { hashes, key }),
                other => return Err(link.unexpected(&other, "RetainedPages").into()),
            }
        }
    }
}

/// The volumes that its engine has for a service, as mounts of which nothing has been said.
fn engine_volumes(service: &Service) -> Result<Vec<Mount>, SourceError> {
    let volumes = service.kept.as_ref().map(Engines::volumes).transpose();
    Ok(volumes.map_err(not_understood)?.unwrap_or_default())
}

fn not_understood(error: std::io::Error) -> SourceError {
    SourceError::NotEligible(vec![format!("the definition of its container is not understood: {error}")])
}

/// The service with what is said of the volumes that its engine has: one that does not go along is a mount of the service's.
pub(super) fn with_engine_volumes(service: Service, said: &BTreeMap<PathBuf, OnMove>) -> Service {
    // Where that is not understood, the move is refused.
    let Ok(volumes) = engine_volumes(&service) else { return service };
    let (mut mounts, said_of) = (service.mounts.clone(), |mount: &Mount| said.get(&mount.target).copied());
    for mount in volumes {
        let Some((MountKind::EngineVolume { name, .. }, on_move)) =
            Some(mount.kind.clone()).zip(said_of(&mount))
        else {
            continue;
        };
        mounts.retain(|other| other.engine_volume().is_none_or(|_| other.target != mount.target));
        if matches!(on_move, OnMove::Skip | OnMove::Shared) {
            mounts.push(Mount { kind: MountKind::EngineVolume { name, on_move }, ..mount });
        }
    }
    Service { mounts, ..service }
}

/// What a destination does not know that gave up with these words. Release 0.2.0 does so at a kind of mount that came later.
fn not_read(reason: &str) -> Option<&'static str> {
    let kinds = [("volume", "volumes"), ("engine_volume", "volumes of an engine that stay")];
    let unknown = kinds.into_iter().find(|(kind, _)| reason.contains(&format!("unknown variant `{kind}`")));
    unknown.map(|(_, title)| title)
}

/// The version of the conversation that a destination has chosen, which can only be one of those `offered`.
pub(super) fn chosen(destination: &str, offered: Versions, version: u32) -> Result<u32, LinkError> {
    offered.chosen(version).ok_or_else(|| LinkError::Unexpected {
        node: destination.to_owned(),
        got: "a version of the protocol that was not offered",
        wanted: "an offered one",
    })
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn what_release_0_2_0_cannot_read_is_named() {
        let words = "the source sent a service that cannot be read: unknown variant `volume`, expected `bind` or `tmpfs`";
        assert_eq!(not_read(words), Some("volumes"));
        assert_eq!(
            not_read(&words.replace("`volume`", "`engine_volume`")),
            Some("volumes of an engine that stay")
        );
        assert_eq!(not_read("the disk is full"), None);
    }

    #[test]
    fn a_destination_chooses_none_but_the_versions_that_it_was_offered() {
        let offered = Versions::offered(3, 4);
        for (version, used) in [(0, 3), (3, 3), (4, 4)] {
            assert_eq!(chosen("b", offered, version).unwrap(), used, "{version}");
        }
        let refused = chosen("b", offered, 5).unwrap_err().to_string();
        assert!(refused.contains("node b") && refused.contains("was not offered"), "{refused}");
    }
}
