//! This node as a migration sees it: its engine, network, images and journal, and the host above.

use std::net::Ipv4Addr;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use async_trait::async_trait;
use godwit_criu::Criu;
use godwit_engine::image::{Digest, Store};
use godwit_engine::runc::Runc;
use godwit_engine::{ContainerConfig, Engine, EngineError};
use godwit_memory::tracker::Detected;
use godwit_network::{NetworkError, Networks};
use godwit_transfer::Connection;
use tokio_util::sync::CancellationToken;

use crate::arrivals::Arrivals;
use crate::destination::intake::IntakeError;
use crate::images;
use crate::journal::{Journal, JournalError};
use crate::kept::Keeper;
use crate::service::{Layout, Service};

/// What the source of a migration says became of it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Decision {
    /// Not decided: ask again.
    Pending,
    /// The destination owns the service.
    Committed,
    /// The source does, for this reason.
    Kept(String),
}

/// A name that is kept for a service on its way here; free again when this is dropped.
pub type Place = Box<dyn Send + Sync>;

/// What the daemon does for migrations: it knows the cluster.
#[async_trait]
pub trait Host: Send + Sync {
    /// Keeps the service's name for it on this node, or every reason why this node cannot take it
    /// beside its resources: name or address taken, address outside the subnet, already migrating.
    async fn admit(&self, service: &Service) -> Result<Place, Vec<String>>;
    /// This node owns the service from now on and it runs here. Called again after a crash.
    async fn adopt(&self, service: &Service) -> Result<(), HostError>;
    /// This node does not own the service any more; `to` does. Called again after a crash.
    async fn release(&self, service: &Service, to: &str) -> Result<(), HostError>;
    /// This node still serves pages of a service that has left: its place is not free until this is
    /// dropped.
    fn serves(&self, service: &Service, migration: &str, to: &str) -> Result<Place, HostError>;
    /// Asks the source of a migration what became of it.
    async fn decision(&self, source: &str, migration: &str) -> Result<Decision, HostError>;
    /// Where another node of the cluster takes frames for its services.
    fn vtep(&self, node: &str) -> Result<Ipv4Addr, HostError>;
    /// Connects to another node of the cluster.
    async fn connect(&self, node: &str) -> Result<Connection, HostError>;
    /// This node's service is about to be killed for this reason, which is all that is left of it.
    async fn lost(&self, service: &Service, reason: &str);
    /// Something about a service that its user should know.
    async fn told(&self, service: &Service, what: &str);
    /// Says that a migration that arrived here is (not) waiting for the source's decision.
    async fn in_doubt(&self, service: &Service, source: &str, doubt: bool);
}

/// The daemon's sentence about what it could not do.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub struct HostError(pub String);

/// Why this node could not prepare or clear the place of a service.
#[derive(Debug, thiserror::Error)]
pub enum LocalError {
    /// The container engine.
    #[error(transparent)]
    Engine(#[from] EngineError),
    /// The network.
    #[error(transparent)]
    Network(#[from] NetworkError),
    /// Root filesystem or layers.
    #[error(transparent)]
    Root(#[from] godwit_engine::rootfs::RootfsError),
    /// Image store.
    #[error(transparent)]
    Image(#[from] godwit_engine::image::ImageError),
    /// A layer's name.
    #[error(transparent)]
    Digest(#[from] godwit_engine::image::DigestError),
    /// Memory for images.
    #[error(transparent)]
    Images(#[from] images::ImagesError),
    /// The journal.
    #[error(transparent)]
    Journal(#[from] JournalError),
    /// The daemon.
    #[error(transparent)]
    Host(#[from] HostError),
    /// The pages of a service on its way here.
    #[error(transparent)]
    Intake(Box<IntakeError>),
    /// A file operation.
    #[error("cannot {action} {path}")]
    Io {
        /// What was tried.
        action: &'static str,
        /// On what.
        path: PathBuf,
        /// The system's answer.
        #[source]
        source: std::io::Error,
    },
    /// A task of ours ended by a panic.
    #[error("an internal task failed; godwitd's log tells more")]
    Task(#[from] tokio::task::JoinError),
}

/// Lets `?` turn what a [`LocalError`] is made of into an error that has it as its variant `Local`.
macro_rules! from_local_causes {
    ($target:ty: $($cause:ty),* $(,)?) => {$(
        impl From<$cause> for $target {
            fn from(cause: $cause) -> Self {
                Self::Local(cause.into())
            }
        }
    )*};
}
pub(crate) use from_local_causes;

/// This node's means.
pub struct Local {
    /// Its name.
    pub node: String,
    /// Where files are.
    pub layout: Layout,
    /// Containers.
    pub engine: Arc<dyn Engine>,
    /// Networks.
    pub networks: Networks,
    /// Where network namespaces of others are mounted that services may be plugged into.
    pub namespaces: PathBuf,
    /// Where the operator's hooks are.
    pub hooks: PathBuf,
    /// Layers.
    pub store: Arc<Store>,
    /// The checkpointer.
    pub criu: Criu,
    /// Promises.
    pub journal: Journal,
    /// The daemon.
    pub host: Arc<dyn Host>,
    /// Memory promised to services on their way here, bytes.
    pub reserved: Arc<AtomicU64>,
    /// The operator's limit on that, bytes; 0 for what the machine has.
    pub incoming_limit: u64,
    /// Services on their way here.
    pub arrivals: Arrivals,
    /// Pages of services that left.
    pub keeper: Keeper,
    /// The `godwit-pager` binary.
    pub pager: PathBuf,
    /// Whether processes can be restored here before their pages are in place.
    pub userfaultfd: bool,
    /// Bytes of pages that a migration from here may remember for their differences.
    pub remembered: usize,
    /// How written pages are found here.
    pub tracker: Detected,
    /// Whether frames for a service are held during the pause; what drops them is for comparison only.
    pub holds: bool,
    /// Cancelled when this daemon ends: what can go on in its next life stops.
    pub ending: CancellationToken,
}

impl Local {
    /// What the engine is told of the service on this node.
    #[must_use]
    pub fn config(&self, service: &Service) -> ContainerConfig {
        let namespace = match service.network.namespace() {
            None => self.networks.first().config().netns_dir.join(&service.name),
            Some(path) => path.to_path_buf(),
        };
        self.layout.container_config(service, &namespace)
    }

    /// The service's log: the older file, then the one being written.
    #[must_use]
    pub fn log_files(&self, service: &Service) -> [PathBuf; 2] {
        let log = Runc::log_path(&self.config(service));
        let mut older = log.clone().into_os_string();
        older.push(".1");
        [older.into(), log]
    }

    /// Makes the directories a service needs here. The upper directory only for one that arrives:
    /// the first mount makes it for a new one, with the owner and mode of the image's root.
    pub fn make_directories(&self, service: &Service, arriving: bool) -> Result<(), LocalError> {
        let upper = arriving.then(|| self.layout.upper(&service.name));
        for path in upper.into_iter().chain([self.layout.container(&service.name)]) {
            std::fs::create_dir_all(&path).map_err(|source| LocalError::Io {
                action: "create",
                path,
                source,
            })?;
        }
        Ok(())
    }

    /// Mounts the root filesystem of a service whose layers are all here.
    pub fn mount_root(&self, service: &Service) -> Result<(), LocalError> {
        let mut lower = Vec::new();
        for digest in &service.layers {
            lower.push(self.store.layer_path(&digest.parse::<Digest>()?));
        }
        self.layout.root(&service.name, lower).mount()?;
        Ok(())
    }

    /// Removes all that this node holds of a service. May be called at any time, also when only
    /// some of it is there; with `forget_files` also what it wrote.
    pub async fn clear(&self, service: &Service) -> Result<(), LocalError> {
        self.forget_connections(service).await?;
        self.engine.delete(&self.config(service)).await?;
        self.layout.root(&service.name, Vec::new()).unmount()?;
        self.unplug(service).await?;
        let path = self.layout.service(&service.name);
        let gone = path.clone();
        let removed = tokio::task::spawn_blocking(move || std::fs::remove_dir_all(gone)).await?;
        match removed {
            Err(source) if source.kind() != std::io::ErrorKind::NotFound => {
                Err(LocalError::Io { action: "remove", path, source })
            }
            _ => Ok(()),
        }
    }

    /// The most that one service on its way here may need, bytes.
    pub fn incoming_limit(&self) -> u64 {
        match self.incoming_limit {
            0 => u64::MAX,
            limit => limit,
        }
    }

    /// Promises memory to a service on its way here; the reason when there is not enough.
    pub fn reserve(&self, bytes: u64) -> Result<Reservation, String> {
        if bytes > available_memory() {
            // What comes is worth more than what left.
            self.keeper.give_up();
        }
        let free = available_memory();
        let limit = if self.incoming_limit == 0 { free } else { self.incoming_limit.min(free) };
        let before = self.reserved.fetch_add(bytes, Ordering::SeqCst);
        let reservation = Reservation { total: Arc::clone(&self.reserved), bytes };
        let left = limit.saturating_sub(before);
        if bytes > left {
            return Err(format!(
                "node {} has {} MiB of memory for services on their way to it and {} MiB are needed",
                self.node,
                left >> 20,
                bytes.div_ceil(1 << 20)
            ));
        }
        Ok(reservation)
    }
}

/// Memory promised to one migration; given back on drop.
#[derive(Debug)]
pub struct Reservation {
    total: Arc<AtomicU64>,
    bytes: u64,
}

impl Drop for Reservation {
    fn drop(&mut self) {
        self.total.fetch_sub(self.bytes, Ordering::SeqCst);
    }
}

/// `MemAvailable` of this machine, bytes; 0 when the kernel does not tell.
#[must_use]
pub fn available_memory() -> u64 {
    let text = std::fs::read_to_string("/proc/meminfo").unwrap_or_default();
    text.lines()
        .find_map(|line| line.strip_prefix("MemAvailable:"))
        .and_then(|rest| rest.trim().trim_end_matches("kB").trim().parse::<u64>().ok())
        .map_or(0, |kib| kib << 10)
}

/// This machine's instruction set as `uname -m` names it.
#[must_use]
pub fn machine() -> String {
    nix::sys::utsname::uname().map(|u| u.machine().to_string_lossy().into_owned()).unwrap_or_default()
}
