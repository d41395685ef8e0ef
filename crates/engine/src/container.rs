//! What godwit asks of a container engine: the trait [`Engine`] and its types.
//!
//! The engine owns processes, cgroups and standard streams. Root filesystems are mounted, and
//! network namespaces made, by the caller before, and torn down after.

use std::net::Ipv4Addr;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use bytes::Bytes;
use godwit_names::{ServiceName, VolumeName};
use serde::{Deserialize, Serialize};
use tokio::sync::mpsc;

use crate::confinement::{Confinement, ConfinementError, User};
use crate::exec::{ExecIo, ExecRequest};
use crate::files;
use crate::image::Pinned;
use crate::rootfs::RootfsError;
use crate::sessions::Session;

/// Where the bytes under a mount point come from.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", tag = "kind")]
pub enum MountKind {
    /// A file or directory of the node.
    Bind {
        /// Absolute path on the node.
        source: PathBuf,
        /// What becomes of it in a move.
        #[serde(default)]
        on_move: OnMove,
    },
    /// Memory; moves with the container.
    Tmpfs {
        /// Limit in bytes; 0 for the kernel's default.
        size_bytes: u64,
    },
    /// A volume; moves with the container.
    Volume {
        /// Its name.
        name: VolumeName,
        /// The file in it that is mounted; nothing where that is the volume itself.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        file: Option<String>,
    },
    /// A volume of the engine of others that keeps the container, if it does not go with that. One that does is in the
    /// definition of that engine alone.
    EngineVolume {
        /// Its name in the engine.
        name: String,
        /// What becomes of it in a move.
        on_move: OnMove,
    },
}

/// What becomes of a file or directory of the node when its container moves. It stays there itself.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum OnMove {
    /// Nobody has said it.
    #[default]
    Unsaid,
    /// The container has what the destination has under the same path.
    Skip,
    /// Both nodes have the same storage there.
    Shared,
    /// Its files go with the container, which has them in a volume then.
    Copy,
}

impl OnMove {
    /// Its name, as users write it; empty where nobody has said it.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Unsaid => "",
            Self::Skip => "skip",
            Self::Shared => "shared",
            Self::Copy => "copy",
        }
    }

    /// The one of this name.
    #[must_use]
    pub fn named(name: &str) -> Option<Self> {
        let all = [Self::Unsaid, Self::Skip, Self::Shared, Self::Copy];
        all.into_iter().find(|on_move| on_move.name() == name)
    }
}

/// One mount inside the container beside its root.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Mount {
    /// Where it comes from.
    #[serde(flatten)]
    pub kind: MountKind,
    /// Absolute path inside the container.
    pub target: PathBuf,
    /// Whether writes are refused.
    pub read_only: bool,
}

impl Mount {
    /// The path on the node, and what becomes of it, if it is bound.
    #[must_use]
    pub fn bind(&self) -> Option<(&Path, OnMove)> {
        match &self.kind {
            MountKind::Bind { source, on_move } => Some((source, *on_move)),
            MountKind::Tmpfs { .. } | MountKind::Volume { .. } | MountKind::EngineVolume { .. } => None,
        }
    }

    /// The name of the engine's volume that it is, and what becomes of it, if it is one that does not go along.
    #[must_use]
    pub fn engine_volume(&self) -> Option<(&str, OnMove)> {
        match &self.kind {
            MountKind::EngineVolume { name, on_move } => Some((name, *on_move)),
            MountKind::Bind { .. } | MountKind::Tmpfs { .. } | MountKind::Volume { .. } => None,
        }
    }

    /// What becomes of it in a move, if that is said of it.
    pub fn on_move(&mut self) -> Option<&mut OnMove> {
        match &mut self.kind {
            MountKind::Bind { on_move, .. } | MountKind::EngineVolume { on_move, .. } => Some(on_move),
            MountKind::Tmpfs { .. } | MountKind::Volume { .. } => None,
        }
    }

    /// The volume that it is, if it is one.
    #[must_use]
    pub fn volume(&self) -> Option<&VolumeName> {
        match &self.kind {
            MountKind::Volume { name, .. } => Some(name),
            MountKind::Bind { .. } | MountKind::Tmpfs { .. } | MountKind::EngineVolume { .. } => None,
        }
    }
}

/// What is bound of a node, and goes with its container as a volume.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Copied {
    /// The volume that it is.
    pub name: VolumeName,
    /// Where the container has it.
    pub target: PathBuf,
    /// The file in the volume that it is, if it is a file.
    pub file: Option<String>,
}

/// Whether this can be the name of a file in a volume; it becomes a part of paths.
#[must_use]
pub fn is_file_name(name: &str) -> bool {
    (1..=255).contains(&name.len())
        && !matches!(name, "." | "..")
        && name.bytes().all(|byte| byte.is_ascii_graphic() && byte != b'/')
}

/// An engine of others, whose own commands manage the containers that it keeps.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Keeper {
    /// Podman.
    Podman,
    /// Docker.
    Docker,
}

impl Keeper {
    /// Its name, as users write it.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Podman => "podman",
            Self::Docker => "docker",
        }
    }

    /// The one of this name.
    #[must_use]
    pub fn named(name: &str) -> Option<Self> {
        [Self::Podman, Self::Docker].into_iter().find(|keeper| keeper.name() == name)
    }

    /// Its name in a sentence.
    #[must_use]
    pub fn title(self) -> &'static str {
        match self {
            Self::Podman => "Podman",
            Self::Docker => "Docker",
        }
    }
}

/// A container that an engine of others keeps, and godwit moves.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Kept {
    /// The engine.
    pub keeper: Keeper,
    /// Its ID there when it was adopted; an engine may give it another one on another node.
    pub id: String,
    /// What the engine makes it from on another node, in the engine's own words.
    pub definition: serde_json::Value,
}

/// Which file or directory of the node a container is to have at a place.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Identity {
    /// Where the container has it.
    pub target: PathBuf,
    /// The number of its device.
    pub device: u64,
    /// That of its inode.
    pub inode: u64,
}

/// All that is needed to make a container; says nothing of images (see [`crate::image`]).
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ContainerConfig {
    /// Name within the engine: the service's.
    pub name: ServiceName,
    /// Directory of this container that the engine may write: bundle, log, exit record, sockets.
    pub directory: PathBuf,
    /// The mounted root filesystem.
    pub rootfs: PathBuf,
    /// Path of the network namespace to run in.
    pub network_namespace: PathBuf,
    /// cgroup path below each hierarchy's root, unique per container and node.
    pub cgroup: String,
    /// Command with its arguments; the first is searched in the container's `PATH`.
    pub command: Vec<String>,
    /// `NAME=VALUE` pairs.
    pub env: Vec<String>,
    /// Mounts beside the root and the standard `/proc`, `/dev`, `/sys`, `/dev/shm`.
    pub mounts: Vec<Mount>,
    /// What it must have where it has something of the node, before its program runs. A runtime follows paths, which may lead
    /// elsewhere by then.
    #[serde(default)]
    pub bound: Vec<Identity>,
    /// Volumes of its engine's that were there when it was admitted, and that it may have as they are.
    #[serde(default)]
    pub may_have: Vec<String>,
    /// Memory limit in bytes; 0 for none.
    pub memory_bytes: u64,
    /// CPU limit in thousandths of a CPU; 0 for none.
    pub cpu_millis: u32,
    /// Host name inside.
    pub hostname: String,
    /// The user that runs it.
    pub user: User,
    /// Absolute working directory inside.
    pub workdir: PathBuf,
    /// How its processes are held.
    pub confinement: Confinement,
    /// Whether its processes may go on under executables of another instruction set.
    #[serde(default)]
    pub crosses: bool,
    /// The engine of others that keeps it, if one does: what is said here of its definition is what godwit knows of it then.
    pub kept: Option<Kept>,
    /// The DNS server of its network on this node, if that has one: it knows the names of services there.
    #[serde(default)]
    pub name_server: Option<Ipv4Addr>,
}

/// What a container is doing.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ContainerStatus {
    /// Its main process runs.
    Running,
    /// Its cgroup is frozen.
    Paused,
    /// Its main process has ended.
    Stopped,
}

/// A look at a container.
#[derive(Debug, Clone)]
pub struct ContainerState {
    /// What it does.
    pub status: ContainerStatus,
    /// Main process in the node's PID namespace; 0 when stopped.
    pub pid: u32,
    /// Exit code (128 + signal when killed) once stopped and known.
    pub exit_code: Option<i32>,
}

/// What a container uses. A figure that the node cannot tell, for want of a cgroup controller, is missing.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Usage {
    /// CPU time of all its processes since its cgroup was made.
    pub cpu: Option<Duration>,
    /// What its memory limit counts, less the page cache that the kernel would drop first, in bytes.
    pub memory: Option<u64>,
    /// Less all that the kernel can drop, in bytes: what a lower limit has to hold.
    pub needed_memory: Option<u64>,
    /// Processes and threads.
    pub pids: Option<u64>,
    /// Bytes received and sent by all interfaces but `lo` since its network namespace was made.
    pub network: Option<(u64, u64)>,
    /// Bytes read from and written to block devices.
    pub disk: Option<(u64, u64)>,
}

/// What a checkpointer has to know to dump a container.
#[derive(Debug, Clone)]
pub struct DumpTarget {
    /// Root of the process tree, in the node's PID namespace.
    pub pid: u32,
    /// The root directory of the container as mounted on the node.
    pub root: PathBuf,
    /// Its volumes: where each is mounted inside, and its directory on the node.
    pub volumes: Vec<(PathBuf, PathBuf)>,
    /// Mount points inside the container that the restorer will bring: `(inside, key)`.
    pub external_mounts: Vec<(String, String)>,
    /// The network namespace, which the restorer will bring, and the key it is known by.
    pub network_namespace: (PathBuf, String),
    /// Freezer cgroup directory.
    pub freezer: PathBuf,
    /// Files the engine's restore wants beside the images (name, content).
    pub extra_files: Vec<(String, Vec<u8>)>,
}

/// A tmpfs of a container that runs, which a restorer can bring as it brings what is bound: its contents need not be in
/// the images then.
#[derive(Debug, Clone)]
pub struct Tmpfs {
    /// Its number among those of the container's definition ([`ContainerConfig::tmpfs`]).
    pub number: u32,
    /// Where it is mounted, and its key: for [`DumpTarget::external_mounts`].
    pub external: (String, String),
    /// Its root directory.
    pub root: Arc<OwnedFd>,
}

impl Tmpfs {
    /// Bytes of memory that its files take.
    ///
    /// # Errors
    /// The kernel does not tell.
    pub fn used(&self) -> std::io::Result<u64> {
        let now = rustix::fs::fstatfs(&self.root)?;
        let block = u64::try_from(now.f_bsize).unwrap_or(0);
        Ok(now.f_blocks.saturating_sub(now.f_bfree).saturating_mul(block))
    }
}

/// How to bring a dumped container back.
#[derive(Debug, Clone)]
pub struct RestoreRequest {
    /// The container as it shall be on this node.
    pub config: ContainerConfig,
    /// Directory of the images; consumed (pages are dropped from it as they are restored).
    pub images: PathBuf,
    /// Directory for CRIU's log.
    pub work: PathBuf,
    /// Whether pages come later, by userfaultfd: CRIU connects to the socket `lazy-pages.socket` in
    /// the directory for its log, which must be listened on, and hands over the descriptors.
    pub lazy_pages: bool,
}

impl RestoreRequest {
    /// Where CRIU finds shared memory that is not in the images, under its inode at the dump: a directory beside them, if
    /// there is one when they are all there.
    #[must_use]
    pub fn shared(&self) -> PathBuf {
        self.images.with_file_name("shared")
    }

    /// Where CRIU finds the IPC namespace in which System V segments are that are not in the images, if there is one: beside
    /// that shared memory.
    #[must_use]
    pub fn ipc_namespace(&self) -> PathBuf {
        self.shared().join("ipc")
    }

    /// Where the restorer finds the tmpfs of the container's definition that are not in the images, each mounted on a
    /// directory beside them, in the order of their numbers.
    #[must_use]
    pub fn tmpfs(&self) -> Vec<PathBuf> {
        let parent = self.images.with_file_name("tmpfs");
        (0..self.config.tmpfs().len()).map(|number| parent.join(number.to_string())).collect()
    }
}

/// A tmpfs as a container's definition has it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DefinedTmpfs {
    /// What it is mounted as: the source that the container sees.
    pub source: &'static str,
    /// Absolute path inside the container.
    pub target: PathBuf,
    /// Limit in bytes; 0 for the kernel's default.
    pub size_bytes: u64,
    /// The mode of its root directory that it is mounted with; nothing for the kernel's default.
    pub mode: Option<&'static str>,
}

/// Size of `/dev` and of `/dev/shm` in bytes, as Docker and Podman have it: 64 MiB.
pub(crate) const DEV_BYTES: u64 = 64 << 20;

/// The mode of `/dev`.
pub(crate) const DEV_MODE: &str = "mode=755";

/// The limit of a tmpfs that a restorer brings and that has a limit of its own, bytes, until [`Engine::cont`] gives it that:
/// its contents may come in an order that takes more room than they need in the end.
pub const COMING_TMPFS_BYTES: u64 = 1 << 40;

impl ContainerConfig {
    /// Where its files are: what moves with it ([`files::moving`]).
    fn files(&self) -> PathBuf {
        let has_volumes = self.mounts.iter().any(|mount| mount.volume().is_some());
        files::moving(&self.directory_of_root(), has_volumes)
    }

    /// What becomes of a volume of its engine's that does not go with it; nothing of one that does.
    pub(crate) fn stays(&self, volume: &str) -> Option<OnMove> {
        let of_engine = self.mounts.iter().filter_map(Mount::engine_volume);
        of_engine.filter(|(name, _)| *name == volume).map(|(_, on_move)| on_move).next()
    }

    /// What of a volume of it is mounted there.
    pub(crate) fn volume_or_file(&self, name: &VolumeName, file: Option<&str>) -> PathBuf {
        let volume = self.volume(name);
        file.map_or_else(|| volume.clone(), |file| volume.join(file))
    }

    /// Where a volume of it is.
    pub(crate) fn volume(&self, name: &VolumeName) -> PathBuf {
        files::volumes(&self.directory_of_root()).join(name)
    }

    fn directory_of_root(&self) -> PathBuf {
        self.rootfs.parent().map(Path::to_path_buf).unwrap_or_default()
    }

    /// Each tmpfs that the container may write to and that is made for it: its number is the place here.
    #[must_use]
    pub fn tmpfs(&self) -> Vec<DefinedTmpfs> {
        let own = self.mounts.iter().filter(|mount| !mount.read_only).filter_map(|mount| match mount.kind {
            MountKind::Tmpfs { size_bytes } => {
                Some(DefinedTmpfs { source: "tmpfs", target: mount.target.clone(), size_bytes, mode: None })
            }
            MountKind::Bind { .. } | MountKind::Volume { .. } | MountKind::EngineVolume { .. } => None,
        });
        let of = |source, target: &str, mode| DefinedTmpfs {
            source,
            target: target.into(),
            size_bytes: DEV_BYTES,
            mode,
        };
        let standard = [of("shm", "/dev/shm", None), of("tmpfs", "/dev", Some(DEV_MODE))];
        let is_there = |of: &DefinedTmpfs| self.mounts.iter().all(|mount| mount.target != of.target);
        own.chain(standard.into_iter().filter(is_there)).collect()
    }
}

/// Where a volume of an engine of others is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct VolumePlace {
    /// The directory with its files.
    pub path: PathBuf,
    /// Whether the engine mounts something there while a container has it.
    pub mounted_in_use: bool,
}

/// The log of a container in files of its engine's.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LogFiles {
    /// The older file, which a full log replaces, and the one that is written.
    pub paths: [PathBuf; 2],
    /// How its entries are told apart.
    pub entries: LogEntries,
}

/// How the entries of a log are told apart.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LogEntries {
    /// Each is a line.
    Lines,
    /// Each has its length before it and after it: four bytes, the most significant first.
    Framed,
}

/// The numbers of the pipes that are a container's standard output and standard error: those in its images.
pub type OutputPipes = [u64; 2];

/// A restore that has begun without images. Dropped, it comes to nothing, and [`Engine::delete`] removes what there is
/// of it.
#[async_trait]
pub trait BegunRestore: Send + Sync {
    /// Puts a process that is none of the container's into its memory cgroup, which is charged from then on for what the
    /// process touches. It must have ended before anybody asks for the container's processes.
    fn charge(&self, pid: u32) -> Result<(), EngineError>;
    /// How long it can wait for its images after it has begun; nothing for as long as it takes. After that it is dropped and
    /// begun again.
    fn patience(&self) -> Option<Duration> {
        None
    }
    /// Restores from the images, which are in the directory now, into the root filesystem, which is in its place now:
    /// as [`Engine::restore_stopped`].
    async fn finish(self: Box<Self>) -> Result<ContainerState, EngineError>;
}

/// Why the engine could not do what it was asked.
#[derive(Debug, thiserror::Error)]
pub enum EngineError {
    /// The named container is not there.
    #[error("container {0} does not exist in the engine")]
    NotFound(ServiceName),
    /// The container has no such command.
    #[error(
        "container {name}: {command} cannot be started: {reason}; give a command that exists in its root filesystem"
    )]
    Command {
        /// Container.
        name: ServiceName,
        /// First word of the command.
        command: String,
        /// What the engine said.
        reason: String,
    },
    /// Its root filesystem has no such user.
    #[error("container {name} cannot run the command")]
    User {
        /// Container.
        name: ServiceName,
        /// What is wrong.
        #[source]
        source: RootfsError,
    },
    /// It asks to be held in a way that there is not.
    #[error("container {name} cannot be confined as its options ask for")]
    Confinement {
        /// Container.
        name: ServiceName,
        /// What is wrong.
        #[source]
        source: ConfinementError,
    },
    /// A program the engine needs did not do its work.
    #[error("{program} {verb} of container {name} failed: {reason}")]
    Program {
        /// The program, e.g. `runc`.
        program: String,
        /// What it was asked to do.
        verb: String,
        /// Container.
        name: ServiceName,
        /// The last lines it printed, as one line.
        reason: String,
    },
    /// The engine that is to keep it, or keeps it, cannot do with it what is asked.
    #[error("{keeper} cannot {action} container {name}: {reason}")]
    Keeper {
        /// The engine's name.
        keeper: &'static str,
        /// What it was asked to do.
        action: &'static str,
        /// Container.
        name: ServiceName,
        /// What it said, or what speaks against it.
        reason: String,
    },
    /// Its engine has it, and it cannot come into godwit's care as it is.
    #[error("{keeper} cannot give godwit container {name}: {}", reasons.join("; "))]
    Unfit {
        /// The engine's name.
        keeper: &'static str,
        /// Container.
        name: ServiceName,
        /// All that speaks against it, as sentences.
        reasons: Vec<String>,
    },
    /// Commands from outside run in the container, and would be lost by a dump.
    #[error("container {name} has {commands} further commands running in it; wait until they have ended")]
    Occupied {
        /// Container.
        name: ServiceName,
        /// How many.
        commands: usize,
    },
    /// A process waits in vfork(2), where CRIU cannot dump it.
    #[error(
        "container {name} cannot be frozen for a dump: its process {pid} waits for a child made by vfork that does not start its program; try again when it has"
    )]
    Vfork {
        /// Container.
        name: ServiceName,
        /// The process, as the node sees it.
        pid: u32,
    },
    /// CRIU could not restore.
    #[error("CRIU cannot restore container {name}: {reason}; its log is {log}")]
    Restore {
        /// Container.
        name: ServiceName,
        /// The first error in CRIU's log, or what the engine printed.
        reason: String,
        /// Path of CRIU's log.
        log: PathBuf,
    },
    /// A file or process operation failed.
    #[error("container {name}: cannot {action}")]
    Io {
        /// Container.
        name: ServiceName,
        /// What was tried, on which path.
        action: String,
        /// The system's answer.
        #[source]
        source: std::io::Error,
    },
}

/// One container engine. All methods may be called again after a crash of the caller: they find
/// the container by name and do what is left to do.
#[async_trait]
pub trait Engine: Send + Sync {
    /// Every reason why this node's engine cannot take a container that is on its way here.
    async fn objections(&self, _config: &ContainerConfig) -> Vec<String> {
        Vec::new()
    }
    /// Where a volume of this node's engine, which is that of this container, has its files; nothing where there is none of
    /// that name.
    async fn volume_place(
        &self,
        _config: &ContainerConfig,
        _volume: &str,
    ) -> Result<Option<VolumePlace>, EngineError> {
        Ok(None)
    }
    /// What speaks against having a volume of a container's engine go with it.
    async fn against_taking(
        &self,
        _config: &ContainerConfig,
        _volume: &str,
    ) -> Result<Vec<String>, EngineError> {
        Ok(Vec::new())
    }
    /// Where the engine that keeps a container has images, root filesystems and volumes; nothing where no engine keeps it.
    async fn storage(&self, _config: &ContainerConfig) -> Result<Option<PathBuf>, EngineError> {
        Ok(None)
    }
    /// Where the engine that keeps a container has its log. Nothing where it is in no files.
    async fn log_files(&self, _config: &ContainerConfig) -> Result<Option<LogFiles>, EngineError> {
        Ok(None)
    }
    /// Has the engine of a container load this AppArmor profile, if it is one that the engine makes when it needs it.
    async fn load_profile(&self, _config: &ContainerConfig, _profile: &str) -> Result<(), EngineError> {
        Ok(())
    }
    /// Bytes of the image of a container which its engine keeps, as the engine counts them.
    async fn image_bytes(&self, config: &ContainerConfig) -> Result<u64, EngineError> {
        Err(no_image(config))
    }
    /// The layers that this node's engine has, where it lacks the image of a container that is on its way here; nothing where
    /// it has that.
    async fn lacks_image(&self, config: &ContainerConfig) -> Result<Option<Vec<String>>, EngineError> {
        Err(no_image(config))
    }
    /// Has the engine of a container that is on its way here fetch its image from the registry, by this reference.
    ///
    /// # Errors
    /// The engine cannot, or what it has got is not the image of the container.
    async fn fetch_image(&self, config: &ContainerConfig, _reference: &Pinned) -> Result<(), EngineError> {
        Err(no_image(config))
    }
    /// Sends the image of a container which its engine keeps, in pieces, without these layers.
    async fn send_image(
        &self,
        config: &ContainerConfig,
        _without: Vec<String>,
        _to: mpsc::Sender<Bytes>,
    ) -> Result<(), EngineError> {
        Err(no_image(config))
    }
    /// Takes the image of a container that is on its way here, as [`Engine::send_image`] sends it where it comes from. Returns
    /// when the engine has it, under its ID.
    async fn take_image(
        &self,
        config: &ContainerConfig,
        _from: mpsc::Receiver<Bytes>,
    ) -> Result<(), EngineError> {
        Err(no_image(config))
    }
    /// What speaks against files of a container that may come here waiting in this directory until it does, as a sentence.
    async fn against_files_in(
        &self,
        _config: &ContainerConfig,
        _directory: &Path,
    ) -> Result<Option<String>, EngineError> {
        Ok(None)
    }
    /// Makes the directory for the files of a container that is on its way here.
    async fn expect(&self, config: &ContainerConfig) -> Result<(), EngineError> {
        let path = self.changed_files(config)?;
        let failed = |source| io_error(&config.name, format!("create {}", path.display()), source);
        std::fs::create_dir_all(&path).map_err(failed)
    }
    /// The directory with the files that move with the container: what it has changed of its root filesystem, and its volumes.
    fn changed_files(&self, config: &ContainerConfig) -> Result<PathBuf, EngineError> {
        Ok(config.files())
    }
    /// Creates the container and starts its main process; on error nothing is left behind. One that another engine keeps is
    /// there, and is only started.
    async fn run(&self, config: &ContainerConfig) -> Result<ContainerState, EngineError>;
    /// What the container is doing; `NotFound` when the engine does not have it.
    async fn state(&self, config: &ContainerConfig) -> Result<ContainerState, EngineError>;
    /// Resolves when the main process has ended, with its exit code. Survives a restart of the caller.
    async fn wait(&self, config: &ContainerConfig) -> Result<i32, EngineError>;
    /// Resolves when the engine, by its own policy or because its user wants it, has started a container again that had
    /// ended.
    async fn started_again(&self, _config: &ContainerConfig) -> Result<(), EngineError> {
        std::future::pending().await
    }
    /// Sends a signal to the main process.
    async fn signal(&self, config: &ContainerConfig, signal: i32) -> Result<(), EngineError>;
    /// Asks the main process to end by SIGTERM, or the signal that the container has for it, and kills it where it does not
    /// in that time. No error where it has ended.
    async fn stop(&self, config: &ContainerConfig, limit: Duration) -> Result<(), EngineError> {
        if !self.signal_running(config, libc::SIGTERM).await? {
            return Ok(());
        }
        if tokio::time::timeout(limit, self.wait(config)).await.is_err() {
            self.signal_running(config, libc::SIGKILL).await?;
        }
        Ok(())
    }
    /// Sends a signal to the main process; false where that has ended.
    async fn signal_running(&self, config: &ContainerConfig, signal: i32) -> Result<bool, EngineError> {
        let Err(error) = self.signal(config, signal).await else { return Ok(true) };
        match self.state(config).await {
            Ok(state) if state.status == ContainerStatus::Stopped => Ok(false),
            Err(EngineError::NotFound(_)) => Ok(false),
            _ => Err(error),
        }
    }
    /// Freezes all processes; returns when they are frozen.
    async fn freeze(&self, config: &ContainerConfig) -> Result<(), EngineError>;
    /// Puts right what a CRIU that was killed in a dump has left in the processes; they are frozen when this returns.
    /// Does nothing while CRIU works, nor where it has come to an end.
    async fn recover(&self, config: &ContainerConfig) -> Result<(), EngineError>;
    /// Lets frozen processes run again; no error when they run already.
    async fn thaw(&self, config: &ContainerConfig) -> Result<(), EngineError>;
    /// Returns when all that a frozen container has written to its standard output and standard error is in
    /// its log, the beginning of a line too.
    async fn settle_log(&self, config: &ContainerConfig) -> Result<(), EngineError>;
    /// What to tell CRIU of a (frozen) container. Refused while commands started by
    /// [`Engine::exec`] run: CRIU would pass over them without a word.
    async fn dump_target(&self, config: &ContainerConfig) -> Result<DumpTarget, EngineError>;
    /// The tmpfs of a container that a restorer can bring now; none where the engine's restorer cannot bring any.
    async fn tmpfs(&self, _config: &ContainerConfig) -> Result<Vec<Tmpfs>, EngineError> {
        Ok(Vec::new())
    }
    /// Brings a container back from images, all of its processes stopped (SIGSTOP) so that none
    /// has run an instruction; [`Engine::cont`] lets them go. On error nothing is left behind.
    async fn restore_stopped(&self, request: &RestoreRequest) -> Result<ContainerState, EngineError>;
    /// The pipes of a container that is here.
    async fn output_pipes(&self, config: &ContainerConfig) -> Result<OutputPipes, EngineError>;
    /// Does of [`Engine::restore_stopped`] all that can be done before there are images. The directory for them is there
    /// and empty, and is empty again when this returns; nothing is in the place of the root filesystem, then either.
    /// `pipes` are the container's where it is dumped. On error nothing is left behind.
    async fn begin_restore(
        &self,
        request: RestoreRequest,
        pipes: OutputPipes,
    ) -> Result<Box<dyn BegunRestore>, EngineError>;
    /// Lets the processes of a container restored by [`Engine::restore_stopped`] run, except those
    /// (PIDs inside the container's own PID namespace) that were stopped before the dump.
    async fn cont(&self, config: &ContainerConfig, keep_stopped: &[u32]) -> Result<(), EngineError>;
    /// PIDs, inside the container's PID namespace, of processes that are stopped by a signal now.
    async fn stopped_processes(&self, config: &ContainerConfig) -> Result<Vec<u32>, EngineError>;
    /// Notes that the container runs on another node now, with all that belongs to it: the next removal is of what has left.
    async fn departed(&self, _config: &ContainerConfig) -> Result<(), EngineError> {
        Ok(())
    }
    /// Kills every process (frozen or not) and removes the container from the engine, its shim and
    /// its cgroups; the directory and the log stay. No error when it is gone already.
    async fn delete(&self, config: &ContainerConfig) -> Result<(), EngineError>;
    /// Starts a further command in the container.
    async fn exec(&self, config: &ContainerConfig, request: &ExecRequest) -> Result<ExecIo, EngineError>;
    /// How many commands started by [`Engine::exec`] run now (a dump is refused while there are any).
    async fn exec_sessions(&self, config: &ContainerConfig) -> Result<usize, EngineError>;
    /// Starts a further command on a terminal that moves with the container; none where the engine has no such thing, or
    /// the container cannot have it.
    async fn start_session(
        &self,
        _config: &ContainerConfig,
        _request: &ExecRequest,
    ) -> Result<Option<Arc<Session>>, EngineError> {
        Ok(None)
    }
    /// How many such commands run now, with those that an earlier life of the caller has started.
    async fn sessions(&self, _config: &ContainerConfig) -> Result<usize, EngineError> {
        Ok(0)
    }
    /// The one with this token, for its only user.
    fn attach(&self, _config: &ContainerConfig, _token: &str) -> Option<Arc<Session>> {
        None
    }
    /// Closes this node's ends of one whose user has gone.
    fn detach(&self, _config: &ContainerConfig, _token: &str) {}
    /// Holds the terminals of a frozen container: the file that goes along with its dump, if there are any.
    async fn hold_sessions(
        &self,
        _config: &ContainerConfig,
    ) -> Result<Option<(String, Vec<u8>)>, EngineError> {
        Ok(None)
    }
    /// Has the terminals of a frozen container go on here, or of one that has ended: that it has is said then. It takes
    /// little time, whatever the container does.
    async fn release_sessions(&self, _config: &ContainerConfig) {}
    /// Tells the users of a container's terminals that it is on another node now.
    fn sessions_left(&self, _config: &ContainerConfig, _node: &str) {}
    /// The container's processes, in the node's PID namespace; those of [`Engine::exec`] included. None where the
    /// engine does not have it.
    async fn processes(&self, config: &ContainerConfig) -> Result<Vec<u32>, EngineError>;
    /// Gives the container this much CPU, in thousandths of a CPU; 0 for no limit. Nothing happens
    /// where that is the limit already, or where the node has no CPU controller.
    async fn limit_cpu(&self, config: &ContainerConfig, millis: u32) -> Result<(), EngineError>;
    /// Gives it the limits of memory, CPU and processes that its definition has now.
    async fn limit(&self, config: &ContainerConfig) -> Result<(), EngineError> {
        let unsupported = std::io::Error::other("its engine does not change limits for godwit");
        Err(io_error(&config.name, "change its limits".into(), unsupported))
    }
    /// What it uses now.
    async fn usage(&self, _config: &ContainerConfig) -> Result<Usage, EngineError> {
        Ok(Usage::default())
    }
    /// Resident memory of the container in bytes, as its cgroup counts it.
    async fn memory_current(&self, config: &ContainerConfig) -> Result<u64, EngineError>;
    /// Bytes that its processes need after a move: what they share since a fork is each one's own there.
    async fn memory_unshared(&self, config: &ContainerConfig) -> Result<u64, EngineError>;
}

fn no_image(config: &ContainerConfig) -> EngineError {
    let unsupported = std::io::Error::other("its engine has no images");
    io_error(&config.name, "find its image".into(), unsupported)
}

pub(crate) fn io_error(name: &ServiceName, action: String, source: std::io::Error) -> EngineError {
    EngineError::Io { name: name.clone(), action, source }
}
