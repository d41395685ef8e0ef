//! This node as a migration sees it: its engine, network, images and journal, and the cluster.

use std::fs::File;
use std::net::Ipv4Addr;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use godwit_database::blocking::off_worker;
use godwit_engine::image::{Digest, Registries, Store};
use godwit_engine::runc::Runc;
use godwit_engine::{ContainerConfig, Engine, EngineError, Mount, MountKind, MountNamespace, OnMove, files};
use godwit_memory::tracker::Detected;
use godwit_names::ServiceName;
use godwit_transfer::Connection;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use crate::ahead::{KeptFiles, SentFiles};
use crate::arrivals::Arrivals;
use crate::attach::Attach;
use crate::backoff::Backoff;
use crate::binds::{Binds, Checked, identities, open_file};
use crate::checkpoint::Checkpoint;
use crate::doubt::Doubts;
pub(crate) use crate::error::from_local_causes;
pub use crate::error::{ClusterError, LocalError};
use crate::incarnation::{CAME, COPY, Incarnation};
use crate::journal::Journal;
use crate::machine::available_memory;
use crate::mounts::Mounts;
use crate::pagers::Pagers;
use crate::past_moves::PastMoves;
use crate::promised::{Promised, Reservation};
use crate::retained::Retention;
use crate::service::{Layout, Service};
use crate::standstill::Stand;
use crate::waits::Waits;

/// What the source of a migration says became of it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Decision {
    /// Not decided: ask again.
    Pending,
    /// The destination owns the service.
    Committed,
    /// The source does, for this reason.
    Aborted(String),
    /// The source cannot tell, for this reason, and perhaps never will.
    Unknown(String),
}

/// What this node's state says of a service, by its id.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Hash)]
pub struct Known {
    /// The epoch that it has here, if it is this node's.
    pub here: Option<u64>,
    /// The highest epoch under which it is known to be another node's, or removed.
    pub elsewhere: Option<u64>,
}

/// A name that is reserved for a service on its way here; free again when this is dropped.
pub type Place = Box<dyn Send + Sync>;

/// How a migration to this node has ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ArrivalEnd {
    /// The service is this node's, with all of its memory.
    Moved,
    /// This node did not take it.
    Refused,
    /// The service has stayed at its source, and the copy here is dropped.
    Aborted,
    /// It was this node's, and was ended: pages that it still needed are gone.
    Lost,
}

impl ArrivalEnd {
    /// All of them.
    pub const ALL: [Self; 4] = [Self::Moved, Self::Refused, Self::Aborted, Self::Lost];

    /// Its name in metrics, where it is also an outcome of a report that of [`crate::Outcome`].
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Moved => "moved",
            Self::Refused => "refused",
            Self::Aborted => "aborted",
            Self::Lost => "lost",
        }
    }
}

/// What the daemon does for migrations: it knows the cluster.
#[async_trait]
pub trait Cluster: Send + Sync {
    /// Reserves the service's name on this node, or gives every reason, beside its resources, why this node cannot take
    /// it from node `from`: it is another node's service, its name or address is taken, its address is outside the
    /// subnet, or it is migrating already.
    async fn admit(&self, service: &Service, from: &str) -> Result<Place, Vec<String>>;
    /// What the state says of a service.
    fn known(&self, service: &Service) -> Result<Known, ClusterError>;
    /// Reserves a name on this node until what is returned is dropped; nothing if it is in use already.
    fn occupy(&self, name: &ServiceName) -> Option<Place>;
    /// Records that this node owns the service from now on, and that it runs here. Called again after a crash.
    async fn adopt(&self, service: &Service) -> Result<(), ClusterError>;
    /// Records that `to` owns the service, and this node no longer does. Called again after a crash.
    async fn release(&self, service: &Service, to: &str) -> Result<(), ClusterError>;
    /// Records that this node still serves pages of a service that has left: its name is not free until what is
    /// returned is dropped.
    fn serves(&self, service: &Service, migration: &str, to: &str) -> Result<Place, ClusterError>;
    /// Asks the source of a migration, which began in this journal of its, what became of it.
    async fn decision(&self, source: &str, migration: &str, journal: &str) -> Result<Decision, ClusterError>;
    /// Tells the source of a migration that this node has recorded on its disk that it owns the service.
    async fn acknowledge(&self, source: &str, migration: &str) -> Result<(), ClusterError>;
    /// Where another node of the cluster takes frames for its services.
    fn vtep(&self, node: &str) -> Result<Ipv4Addr, ClusterError>;
    /// The release of another node's godwit, where that has told it.
    fn release_of(&self, node: &str) -> Option<String>;
    /// Connects to another node of the cluster.
    async fn connect(&self, node: &str) -> Result<Connection, ClusterError>;
    /// Records that this node's service is about to be killed, for this reason.
    async fn lost(&self, service: &Service, reason: &str);
    /// Tells the user something about a service.
    async fn told(&self, service: &Service, what: &str);
    /// Says that a service that arrived here waits for its source's decision ([`NodeResources::doubts`]).
    async fn in_doubt(&self, service: &Service, source: &str);
    /// Counts a migration to this node that has ended here, perhaps one that began in an earlier life of the daemon.
    fn arrival_ended(&self, end: ArrivalEnd);
}

/// What this node has for migrations.
pub struct NodeResources {
    /// Its name.
    pub node: String,
    /// Where files are.
    pub layout: Layout,
    /// Containers.
    pub engine: Arc<dyn Engine>,
    /// What services are plugged into.
    pub network: Arc<dyn Attach>,
    /// Services that stand still.
    pub standstills: Arc<dyn Stand>,
    /// Root filesystems, and memory for images.
    pub mounts: Arc<dyn Mounts>,
    /// Which of its directories may be mounted into services.
    pub binds: Binds,
    /// Where the operator's hooks are.
    pub hooks: PathBuf,
    /// Layers.
    pub store: Arc<Store>,
    /// Where it may have layers from, beside the source of a service.
    pub registries: Registries,
    /// The checkpointer.
    pub criu: Arc<dyn Checkpoint>,
    /// What this node has promised.
    pub journal: Journal,
    /// What the daemon does for migrations.
    pub cluster: Arc<dyn Cluster>,
    /// Memory promised to services on their way here.
    pub promised: Promised,
    /// How long a destination may make no progress with a frozen service of this node before its move is rolled back.
    pub patience: Duration,
    /// Services on their way here.
    pub arrivals: Arrivals,
    /// Pages of services that left.
    pub retention: Retention,
    /// Files of services that may come.
    pub kept_files: Arc<KeptFiles>,
    /// What was sent of files of services that may leave.
    pub sent_files: Arc<SentFiles>,
    /// What past moves from here took.
    pub past_moves: PastMoves,
    /// Starts and ends the pagers of services on their way here.
    pub pagers: Arc<dyn Pagers>,
    /// Whether processes can be restored here before their pages are in place.
    pub userfaultfd: bool,
    /// Bytes of the delta cache of a migration from here.
    pub delta_cache: usize,
    /// How written pages are found here.
    pub tracker: Detected,
    /// Cancelled when this daemon ends: what can go on after its next start stops.
    pub ending: CancellationToken,
    /// Services in doubt.
    pub doubts: Doubts,
    /// Services that run here while pages of them are still at their source.
    pub waits: Waits,
    /// Why this daemon has to end at once, in a sentence, where only its next start can go on.
    pub fatal: watch::Sender<Option<String>>,
}

/// The pauses between attempts at what has to be done in the end.
const AGAIN: Backoff = Backoff::new(Duration::from_millis(100), Duration::from_secs(5));

impl NodeResources {
    /// What the engine is told of the service on this node.
    #[must_use]
    pub fn config(&self, service: &Service) -> ContainerConfig {
        ContainerConfig {
            name_server: self.network.name_server(service),
            ..self.layout.container_config(service)
        }
    }

    /// The mounts of a service that runs here, and its root directory.
    pub(crate) async fn mount_namespace(&self, service: &Service) -> Result<MountNamespace, LocalError> {
        let main = self.engine.state(&self.config(service)).await?.pid;
        off_worker(|| MountNamespace::of(main)).map_err(|source| LocalError::Io {
            action: "look at the mounts of process",
            path: main.to_string().into(),
            source,
        })
    }

    /// What the engine is told of a service that it is to start, which may have what is there now of this node. That is open until
    /// the result is dropped.
    pub fn config_to_start(&self, service: &Service) -> Result<(ContainerConfig, Vec<Checked>), LocalError> {
        let has_come = self.layout.service(&service.name).join(CAME).exists();
        let not_allowed = |why: String| LocalError::NotAllowed { why };
        let checked = off_worker(|| self.binds.checked(&service.mounts, has_come, &self.node));
        let mut checked = checked.map_err(|reasons| not_allowed(reasons.join("; ")))?;
        let volumes = files::volumes(&self.layout.service(&service.name));
        for mount in &service.mounts {
            let MountKind::Volume { name, file: Some(file) } = &mount.kind else { continue };
            let volume = volumes.join(name);
            let opened = open_file(&volume, file);
            let opened = opened.and_then(|opened| Checked::new(&volume.join(file), &mount.target, opened));
            checked.push(opened.map_err(not_allowed)?);
        }
        Ok((ContainerConfig { bound: identities(&checked), ..self.config(service) }, checked))
    }

    /// The service's log: the older file, then the one being written.
    #[must_use]
    pub fn log_files(&self, service: &Service) -> [PathBuf; 2] {
        Runc::log_paths(&self.config(service))
    }

    /// For work that must succeed in the end: the pauses between attempts.
    pub(crate) fn again<'a>(&'a self, id: &'a str, failed: &'a str) -> Again<'a> {
        Again { local: self, id, failed, pauses: AGAIN }
    }

    /// Makes the directories a service needs here. That for changed files only for one that arrives:
    /// the first mount makes it for a new one, with the owner and mode of the image's root.
    pub async fn make_directories(
        &self,
        service: &Service,
        arriving: Option<&[String]>,
    ) -> Result<(), LocalError> {
        let create = |path: PathBuf| {
            let made = std::fs::create_dir_all(&path);
            made.map_err(|source| LocalError::Io { action: "create", path, source })
        };
        let directory = self.layout.service(&service.name);
        create(directory.clone())?;
        Incarnation::of(service).write(&directory)?;
        create(self.layout.container(&service.name))?;
        if let Some(may_have) = arriving {
            off_worker(|| self.mark_volumes(service))?;
            let path = directory.join(CAME);
            let mark = || {
                File::create(&path)?.sync_all()?;
                File::open(&directory)?.sync_all()
            };
            off_worker(mark).map_err(|source| LocalError::Io { action: "create", path, source })?;
            let config = ContainerConfig { may_have: may_have.to_vec(), ..self.config(service) };
            self.engine.expect(&config).await?;
        }
        Ok(())
    }

    /// Writes the incarnation into the directory of a service of this node, where an older version did not.
    pub fn record(&self, service: &Service) -> Result<(), LocalError> {
        let directory = self.layout.service(&service.name);
        if directory.exists() && Incarnation::read(&directory)?.is_none() {
            Incarnation::of(service).write(&directory)?;
        }
        Ok(())
    }

    /// Clears what is left in the place of a service that comes here, or is made. The caller has its name, and
    /// this node owns no service of that name.
    pub async fn make_room(&self, service: &Service) -> Result<(), LocalError> {
        let path = self.layout.service(&service.name);
        match Incarnation::read(&path)? {
            Some(left) if !left.is_up_to(service) => {
                if !self.journal.unfinished_of(&left.id)?.is_empty() {
                    return Err(LocalError::InTheWay { path, id: left.id, epoch: left.epoch });
                }
                tracing::warn!(service = %service.name, id = left.id, epoch = left.epoch, "removing what was left of another service of its name");
                self.clear(&left.as_service(&service.name)).await
            }
            _ => self.clear(service).await,
        }
    }

    /// Removes what is left under a name of the service with this id, which no node has any more. The caller has
    /// the name, and this node owns no service of that name.
    pub async fn clear_left(&self, name: &ServiceName, id: &str) -> Result<(), LocalError> {
        match Incarnation::read(&self.layout.service(name))? {
            Some(left) if left.id == id => self.clear(&left.as_service(name)).await,
            _ => Ok(()),
        }
    }

    /// Whether what this node has under the service's name is this life of it. What an older version made says
    /// nothing of that.
    pub(crate) fn holds(&self, service: &Service) -> Result<bool, LocalError> {
        let here = Incarnation::read(&self.layout.service(&service.name))?;
        Ok(here.is_none_or(|here| here == Incarnation::of(service)))
    }

    /// The directory with the files that move with a service.
    pub fn changed_files(&self, service: &Service) -> Result<PathBuf, LocalError> {
        Ok(self.engine.changed_files(&self.config(service))?)
    }

    /// The directories of a service's layers, lowest first.
    pub(crate) fn layer_paths(&self, service: &Service) -> Result<Vec<PathBuf>, LocalError> {
        service.layers.iter().map(|digest| Ok(self.store.layer_path(&digest.parse::<Digest>()?))).collect()
    }

    /// Mounts the root filesystem of a service whose layers are all here. That of a container which another engine keeps is
    /// mounted by that.
    pub fn mount_root(&self, service: &Service) -> Result<(), LocalError> {
        if service.kept.is_some() {
            return Ok(());
        }
        Ok(self.mounts.mount_root(&self.layout.root(service, self.layer_paths(service)?))?)
    }

    /// Prepares a service of this node that has ended for its next start: with its files, log and addresses, and with
    /// nothing else of its last life.
    pub async fn lay_out_again(&self, service: &Service) -> Result<(), LocalError> {
        let path = self.layout.service(&service.name);
        if let Some(here) = Incarnation::read(&path)?
            && here != Incarnation::of(service)
        {
            return Err(LocalError::InTheWay { path, id: here.id, epoch: here.epoch });
        }
        let upper = match service.kept {
            None => self.layout.upper(service),
            Some(_) => self.changed_files(service)?,
        };
        if let Err(source) = std::fs::symlink_metadata(&upper) {
            // Without its changes it would be another service.
            return Err(LocalError::Io { action: "find the service's files in", path: upper, source });
        }
        self.forget_connections(service).await?;
        if service.kept.is_none() {
            self.engine.delete(&self.config(service)).await?;
        }
        self.standstills.stand_nowhere(service).await?;
        // With the namespace go the sockets of its last life that are still closing, and hold its ports.
        self.network.unplug(service).await?;
        self.make_directories(service, None).await?;
        off_worker(|| self.take_volumes(service, false))?;
        self.mount_root(service)?;
        Ok(self.network.plug(service).await?)
    }

    /// Removes all that this node holds of a service, of this incarnation or an earlier one. May be called at any
    /// time, even when only some of it is there. Another service's, or a later incarnation's, stays; so do its volumes, unless
    /// they are a copy.
    pub async fn clear(&self, service: &Service) -> Result<(), LocalError> {
        self.clear_but_files(service, None).await
    }

    /// The same of a copy of a service that is another node's, or of what has come of one. Its files are kept for when it
    /// comes from that node, under that epoch, as far as there is room for them.
    pub(crate) async fn clear_copy(
        &self,
        service: &Service,
        may_come: (&str, u64),
    ) -> Result<(), LocalError> {
        self.clear_but_files(service, Some(may_come)).await
    }

    async fn clear_but_files(
        &self,
        service: &Service,
        may_come: Option<(&str, u64)>,
    ) -> Result<(), LocalError> {
        self.sent_files.forget(&service.id);
        let path = self.layout.service(&service.name);
        if !path.exists() {
            // It is made before all else, and removed after it.
            return Ok(());
        }
        if let Some(here) = Incarnation::read(&path)?
            && !here.is_up_to(service)
        {
            tracing::warn!(
                service = %service.name, id = service.id, epoch = service.epoch, here = here.id, its_epoch = here.epoch,
                "only another service of its name, or a later life of it, is here: that stays"
            );
            return Ok(());
        }
        self.forget_connections(service).await?;
        self.engine.delete(&self.config(service)).await?;
        self.standstills.stand_nowhere(service).await?;
        self.mounts.unmount_root(&self.layout.root(service, Vec::new()))?;
        self.network.unplug(service).await?;
        if let Some(may_come) = may_come {
            self.keep_files(service, may_come).await;
        }
        off_worker(|| self.give_volumes_back(&path))?;
        let gone = path.clone();
        let removed = tokio::task::spawn_blocking(move || Incarnation::remove(&gone)).await?;
        removed.map_err(|source| LocalError::Io { action: "remove", path, source })
    }

    /// Takes the files of a copy from its directory. Nothing uses them any more; what fails costs only that they cross again.
    async fn keep_files(&self, service: &Service, (from, epoch): (&str, u64)) {
        let directory = self.layout.service(&service.name);
        let has_volumes = service.volumes().next().is_some();
        // An engine has the files of its containers; and volumes that are no copy are nobody's but their users'.
        if service.kept.is_some() || has_volumes && !directory.join(COPY).exists() {
            return;
        }
        // It comes back with a volume in the place of such a mount, and so with another tree of files.
        let is_copied = |(_, on_move): (_, OnMove)| on_move == OnMove::Copy;
        if service.mounts.iter().filter_map(Mount::bind).any(is_copied) {
            return;
        }
        let files = files::moving(&directory, has_volumes);
        if !files.exists() {
            return;
        }
        let (kept_files, coming) = (Arc::clone(&self.kept_files), Service { epoch, ..service.clone() });
        let from = from.to_owned();
        let taking = tokio::task::spawn_blocking(move || kept_files.take(&coming, &from, &files));
        match taking.await.unwrap_or_else(|ended| Err(ended.to_string())) {
            Ok(Some(bytes)) => {
                tracing::info!(service = %service.name, bytes, "files of a service are kept for when it comes")
            }
            Ok(None) => {}
            Err(why) => {
                tracing::info!(service = %service.name, %why, "files of a service are not kept for when it comes")
            }
        }
    }

    /// The service's processes, if there are any here, are about to be killed, since the service is elsewhere.
    async fn forget_connections(&self, service: &Service) -> Result<(), LocalError> {
        if service.network.namespace().is_none() {
            // They go with their namespace.
            return Ok(());
        }
        match self.engine.processes(&self.config(service)).await {
            Ok(pids) => Ok(self.network.forget_connections(&pids)?),
            Err(EngineError::NotFound(_)) => Ok(()),
            Err(error) => Err(error.into()),
        }
    }

    /// Promises memory to a service on its way here; the reason when there is not enough.
    pub(crate) fn reserve(&self, bytes: u64) -> Result<Reservation, String> {
        self.reserve_of_free(bytes).or_else(|reason| {
            // What comes is worth more than what left.
            if self.retention.give_up() { self.reserve_of_free(bytes) } else { Err(reason) }
        })
    }

    /// The same for what only may come: nothing is given up for it.
    pub(crate) fn reserve_spare(&self, bytes: u64) -> Result<Reservation, String> {
        self.reserve_of_free(bytes)
    }

    /// Why there would not be enough memory; none where there may be, once what departed services left is given up.
    pub(crate) fn lacks(&self, bytes: u64) -> Option<String> {
        self.reserve_of_free(bytes).err().filter(|_| !self.retention.has_any())
    }

    fn reserve_of_free(&self, bytes: u64) -> Result<Reservation, String> {
        self.promised.reserve(bytes, available_memory()).map_err(|left| {
            format!(
                "node {} has {} MiB of memory for services on their way to it and {} MiB are needed",
                self.node,
                left >> 20,
                bytes.div_ceil(1 << 20)
            )
        })
    }

    /// Holds so much memory at least for a service on its way here; the reason when there is not enough.
    pub(crate) fn hold(&self, reservation: &Reservation, bytes: u64) -> Result<(), String> {
        reservation.hold(bytes, available_memory).map_err(|most| {
            format!(
                "the service and its images have grown to {} MiB, and node {} has {} MiB of memory for them; let the \
                 service settle, or allow services on their way more memory (--incoming-memory)",
                bytes.div_ceil(1 << 20),
                self.node,
                most >> 20
            )
        })
    }
}

/// The pauses between attempts at what has to be done in the end, which become longer.
pub(crate) struct Again<'a> {
    local: &'a NodeResources,
    id: &'a str,
    failed: &'a str,
    pauses: Backoff,
}

impl Again<'_> {
    /// Says why an attempt has failed, and waits for the time of the next one. No when this daemon ends: its next
    /// life goes on then.
    pub(crate) async fn after(&mut self, error: &LocalError) -> bool {
        let error = crate::error_chain(error);
        tracing::error!(migration = %self.id, %error, "{}; trying again", self.failed);
        tokio::select! {
            () = self.pauses.wait() => true,
            () = self.local.ending.cancelled() => false,
        }
    }
}
