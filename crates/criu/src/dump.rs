//! A dump of a process tree through CRIU's RPC.
//!
//! ```text
//! caller: ready() ─▶ CRIU: prepare while the tasks run, wait
//!         freezer FROZEN ─▶ dump() ─▶ CRIU: seize all tasks, thaw the freezer, read the tasks,
//!                                     write images, let go, freezer back to FROZEN ─▶ result
//! ```
//!
//! The tree is left as it was found in both cases: with success (it runs on, or stays frozen when
//! its freezer was frozen) and with failure. That only holds when CRIU comes to its end, so a dump
//! that is no longer wanted is waited for, never killed: see [`Criu::dump`].

use std::fs::File;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use tokio::sync::{Notify, watch};

use crate::images::{self, DumpStats};
use crate::linked::Linked;
use crate::places::Places;
use crate::{Criu, CriuError, lazy, limits, log, open_files, rpc, watches};

/// Largest deleted-but-open file that a dump carries along, in bytes: 256 MiB. CRIU's own limit of
/// 1 MiB fails for databases that unlink their temporary files; beyond this the copy would take
/// longer than anybody wants to be frozen.
pub const GHOST_LIMIT_BYTES: u32 = 256 << 20;

/// CRIU's log level for errors and warnings. Levels 3 and 4 cost tens of milliseconds of frozen
/// time.
pub const LOG_LEVEL_WARNINGS: i32 = 2;

/// The option of our patch tcp-inline, as `criu --help` names it.
pub(crate) const TCP_INLINE_OPTION: &str = "--tcp-inline";

/// Seconds that CRIU may take to seize the tasks before it gives up; its own default is 10.
const SEIZE_TIMEOUT_SECONDS: u32 = 10;

/// The first series of our patches with `prepared-dump`: before it, CRIU asked nothing that [`Prepared::ready`] could
/// wait for.
const PREPARED_SINCE: u32 = 6;

/// The script at which CRIU asks, by that patch, when it can do no more before it seizes the tasks.
const BEFORE_THE_TASKS: &str = "pre-dump";

/// The script at which CRIU asks when it holds the tasks: what is known only then may still be told.
const WITH_THE_TASKS: &str = "query-ext-files";

/// Name of CRIU's log in the work directory.
pub(crate) const LOG_FILE: &str = "dump.log";

/// What becomes of the memory that a restore can fill in later: private anonymous memory that is
/// not locked, but for the pages that threads have their stack pointers in ("lazy" pages).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Memory {
    /// It is written into the images like all other memory.
    #[default]
    Images,
    /// It is left where it is: the images have everything else. Whoever restores reads it from the
    /// dumped processes, which must stay frozen until then.
    Lazy,
}

/// What to dump, and how.
#[derive(Debug, Clone, PartialEq)]
pub struct DumpOptions {
    /// Root of the process tree, in the PID namespace of the caller.
    pub pid: u32,
    /// The tree's root directory as it is mounted on the node.
    pub root: PathBuf,
    /// Volumes that move with it: where each is mounted inside, and its directory on the node.
    pub volumes: Vec<(PathBuf, PathBuf)>,
    /// Mount points that whoever restores will bring: `(path inside, key)`.
    pub external_mounts: Vec<(String, String)>,
    /// Key of the network namespace that whoever restores will bring; none when the tree has the
    /// namespace of the caller.
    pub external_network: Option<String>,
    /// Further `external` entries in CRIU's syntax.
    pub external: Vec<String>,
    /// cgroup directory of the freezer (v1) or of the cgroup (v2) that holds exactly this tree.
    pub freezer: Option<PathBuf>,
    /// Existing directory for the images.
    pub images: PathBuf,
    /// Existing directory for CRIU's log and statistics.
    pub work: PathBuf,
    /// What becomes of the memory that a restore can fill in later.
    pub memory: Memory,
    /// Whether established TCP connections are dumped; without, they make the dump fail.
    pub tcp_established: bool,
    /// Whether connections with little in their queues are put into the image of the files, rather than
    /// each into an image of its own: with thousands of them that is the faster. It takes our patch where
    /// they are dumped (without, this says nothing) and where they are restored: see [`Criu::tcp_inline`].
    pub tcp_inline: bool,
    /// Whether file locks are dumped; without, they make the dump fail.
    pub file_locks: bool,
    /// Whether the tree lives on after the dump; else CRIU kills it.
    pub leave_running: bool,
    /// Whether a file that is open under a deleted name and has others is given a temporary name, which must
    /// then exist where it is restored. With a freezer, that is done for those whose other name can be noted
    /// beside the images, for [`repair::links`](crate::repair::links).
    pub link_remap: bool,
    /// Largest deleted-but-open file taken along, in bytes.
    pub ghost_limit: u32,
    /// CRIU's log level, 0 (nothing) to 4 (all).
    pub log_level: i32,
}

impl DumpOptions {
    /// Options of a migration: connections and locks go along, the tree lives on, CRIU leaves the
    /// network and the cgroups alone.
    pub fn new(
        pid: u32,
        root: impl Into<PathBuf>,
        images: impl Into<PathBuf>,
        work: impl Into<PathBuf>,
    ) -> Self {
        Self {
            pid,
            root: root.into(),
            volumes: Vec::new(),
            external_mounts: Vec::new(),
            external_network: None,
            external: Vec::new(),
            freezer: None,
            images: images.into(),
            work: work.into(),
            memory: Memory::Images,
            tcp_established: true,
            tcp_inline: false,
            file_locks: true,
            leave_running: true,
            link_remap: false,
            ghost_limit: GHOST_LIMIT_BYTES,
            log_level: LOG_LEVEL_WARNINGS,
        }
    }

    /// Where CRIU writes its log.
    pub fn log(&self) -> PathBuf {
        self.work.join(LOG_FILE)
    }
}

/// What CRIU did with the memory that a restore can fill in later.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MemoryWay {
    /// It wrote it into the images.
    Written,
    /// It took hold of each page, to nobody's use: that is how a CRIU without our patch makes a lazy
    /// dump. It takes about 0.1 s for each GiB.
    Held,
    /// It did not look at it (option `lazy-pages-external`, by our patch).
    Untouched,
}

/// What CRIU measured in a dump.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DumpResult {
    /// What became of the memory that a restore can fill in later. With [`MemoryWay::Held`] CRIU
    /// loses what it measured, and all the following is 0.
    pub way: MemoryWay,
    /// Time to seize all tasks.
    pub freezing: Duration,
    /// Time the tasks were held by CRIU.
    pub frozen: Duration,
    /// Time to take the memory.
    pub memory: Duration,
    /// Time to write the memory.
    pub memory_write: Duration,
    /// Pages written into the images, private and shared.
    pub pages_written: u64,
    /// Pages looked at.
    pub pages_scanned: u64,
}

impl DumpResult {
    fn new(way: MemoryWay, stats: DumpStats) -> Self {
        // CRIU's page server begins to count anew.
        let stats = if way == MemoryWay::Held { DumpStats::default() } else { stats };
        let time = |microseconds: u32| Duration::from_micros(microseconds.into());
        Self {
            way,
            freezing: time(stats.freezing_time),
            frozen: time(stats.frozen_time),
            memory: time(stats.memdump_time),
            memory_write: time(stats.memwrite_time),
            pages_written: stats.pages_written.saturating_add(stats.shpages_written.unwrap_or(0)),
            pages_scanned: stats.pages_scanned.saturating_add(stats.shpages_scanned.unwrap_or(0)),
        }
    }
}

/// Dumps of this process that have not come to their end: the tree's root, a channel that closes
/// with the end, and how to bring it about.
static UNDER_WAY: Mutex<Vec<Entry>> = Mutex::new(Vec::new());

type Entry = (u32, watch::Receiver<()>, Arc<Notify>);

/// An entry in [`UNDER_WAY`] for as long as it lives.
struct UnderWay {
    pid: u32,
    sender: watch::Sender<()>,
}

impl UnderWay {
    fn begin(pid: u32) -> (Self, Arc<Notify>) {
        let (sender, receiver) = watch::channel(());
        let kill = Arc::new(Notify::new());
        under_way().push((pid, receiver, Arc::clone(&kill)));
        (Self { pid, sender }, kill)
    }
}

impl Drop for UnderWay {
    fn drop(&mut self) {
        under_way().retain(|(pid, receiver, _)| {
            *pid != self.pid || !receiver.same_channel(&self.sender.subscribe())
        });
    }
}

fn under_way() -> std::sync::MutexGuard<'static, Vec<Entry>> {
    // Nothing can panic while the list is changed.
    UNDER_WAY.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Resolves when no dump of the tree with this root, begun by this process, is under way any more.
pub async fn settled(pid: u32) {
    loop {
        let receiver =
            under_way().iter().find(|(root, ..)| *root == pid).map(|(_, receiver, _)| receiver.clone());
        match receiver {
            // Nothing is ever sent: this is the end of the sender.
            Some(mut receiver) => drop(receiver.changed().await),
            None => return,
        }
    }
}

/// Kills the CRIU that dumps the tree with this root, begun by this process, if there is one: for one
/// that hangs. What that means for the tree is told at [`CriuError::Died`].
pub fn kill(pid: u32) {
    for (_, _, kill) in under_way().iter().filter(|(root, ..)| *root == pid) {
        kill.notify_one();
    }
}

/// A CRIU that has started and waits for its task. Dropped unused, it is killed.
#[derive(Debug)]
pub struct Prepared {
    criu: Criu,
    service: rpc::Service,
    client: lazy::Client,
    ready: Option<Ready>,
}

/// What a CRIU that needs nothing more but the tasks has been told.
#[derive(Debug)]
struct Ready {
    options: DumpOptions,
    directories: Directories,
}

/// The directories of a dump. CRIU opens them as descriptors of this process: they stay open until it ends.
#[derive(Debug)]
struct Directories {
    images: File,
    work: File,
}

/// What only the tasks tell, once they stand still.
struct Late {
    external: Vec<String>,
    watched: Vec<String>,
    link_remap: bool,
}

impl Criu {
    /// Starts CRIU for a dump that is to come: before the processes are frozen, as the start takes
    /// 2 ms, and more the more memory this process has.
    ///
    /// # Errors
    /// The binary does not start.
    pub fn prepare(&self) -> Result<Prepared, CriuError> {
        let failed = |source| CriuError::Start { path: self.path.clone(), source };
        let client = lazy::Client::new().map_err(failed)?;
        let service = rpc::Service::start(&self.path, Some(client.page_server()), self.programs.as_deref())?;
        Ok(Prepared { criu: self.clone(), service, client, ready: None })
    }

    /// Starts CRIU and dumps a process tree: see [`Prepared::dump`].
    ///
    /// # Errors
    /// With [`CriuError::Dump`] the tree is as it was; the images are not usable.
    pub async fn dump(&self, options: DumpOptions) -> Result<DumpResult, CriuError> {
        self.prepare()?.dump(options).await
    }
}

impl Prepared {
    /// Has CRIU do the part of a dump for which the processes need not stand still. Without our patch `prepared-dump`
    /// this does nothing.
    ///
    /// # Errors
    /// CRIU cannot dump with these options. The tree was not touched.
    pub async fn ready(&mut self, options: &DumpOptions) -> Result<(), CriuError> {
        if self.criu.version().await?.series < PREPARED_SINCE {
            return Ok(());
        }
        let directories = Directories::open(options)?;
        let mut begin = rpc_options(options, self.criu.as_stock, &directories)?;
        begin.notify_scripts = Some(true);
        self.service.set_log(options.log());
        self.service.send(&of_dump(begin)).await?;
        let answer = self.service.receive().await?;
        if answer.asks() != Some(BEFORE_THE_TASKS) {
            return Err(failed(&answer, options));
        }
        self.ready = Some(Ready { options: options.clone(), directories });
        Ok(())
    }

    /// Dumps a process tree and returns when CRIU has let go of it. After [`Prepared::ready`] these options may have
    /// more `external`; with others that differ, CRIU begins anew.
    ///
    /// Dropping the future does not stop the dump: CRIU works on in the background until the tree
    /// is back in the state in which it found it. A CRIU that is killed instead would leave tasks
    /// that run although their freezer was frozen. Whoever thaws
    /// the tree after giving up must first wait: see [`settled`].
    ///
    /// # Errors
    /// With [`CriuError::Dump`] the tree is as it was; the images are not usable.
    pub async fn dump(self, options: DumpOptions) -> Result<DumpResult, CriuError> {
        let path = self.criu.path.clone();
        let (under_way, kill) = UnderWay::begin(options.pid);
        let task = tokio::spawn(async move {
            let result = self.dump_to_the_end(options, &kill).await;
            drop(under_way);
            result
        });
        match task.await {
            Ok(result) => result,
            Err(error) => Err(CriuError::Talk {
                path,
                action: "waiting for the dump",
                log: None,
                source: std::io::Error::other(error),
            }),
        }
    }

    async fn dump_to_the_end(self, options: DumpOptions, kill: &Notify) -> Result<DumpResult, CriuError> {
        let more = self.ready.as_ref().map(|ready| more_external(&ready.options, &options));
        let prepared = match more {
            Some(None) => {
                let criu = self.criu.clone();
                drop(self);
                criu.prepare()?
            }
            _ => self,
        };
        let Self { criu, mut service, client, ready } = prepared;
        let (watched, linked) = match options.freezer.clone() {
            Some(cgroup) => {
                let places = Places::new(&options.root, &options.volumes);
                let looking = move || {
                    let open = open_files::of(&limits::members(&cgroup));
                    (watches::names(&open, &places), Linked::find(&open, &places))
                };
                tokio::task::spawn_blocking(looking).await.unwrap_or_default()
            }
            None => Default::default(),
        };
        linked.note(&options.images).map_err(|source| CriuError::File {
            action: "write what files are linked into",
            path: options.images.clone(),
            source,
        })?;
        let late = Late {
            external: more.flatten().unwrap_or_default(),
            watched,
            link_remap: options.link_remap || linked.can_be_dumped,
        };
        // Put back when CRIU has let go of the processes.
        let raised = options.freezer.as_ref().map(|cgroup| limits::raise(cgroup, &options.images));

        let directories;
        let first = match ready {
            Some(ready) => {
                directories = ready.directories;
                rpc::CriuReq::go_on()
            }
            None => {
                directories = Directories::open(&options)?;
                let begin = rpc_options(&options, criu.as_stock, &directories)?;
                of_dump(rpc::CriuOpts {
                    irmap_scan_paths: late.watched.clone(),
                    link_remap: Some(late.link_remap),
                    ..begin
                })
            }
        };
        service.set_log(options.log());
        service.goes_to_work();
        let answer = tokio::select! {
            answer = answered(&service, first, late) => Some(answer),
            () = kill.notified() => None,
        };
        let answer = match answer {
            Some(answer) => answer,
            None => Err(service.kill().await),
        };
        let ended = service.end().await;
        drop((directories, raised));
        linked.clean();

        let answer = match answer {
            Ok(answer) => answer,
            Err(CriuError::Talk { source, .. }) if source.kind() == std::io::ErrorKind::UnexpectedEof => {
                let status = ended.map_or_else(|error| error.to_string(), |status| status.to_string());
                return Err(CriuError::Died { pid: options.pid, status, log: options.log() });
            }
            Err(error) => return Err(error),
        };
        if !answer.success {
            return Err(failed(&answer, &options));
        }
        let stats = images::dump_stats(&options.work).map_err(|error| CriuError::Answer {
            path: criu.path,
            reason: format!("its statistics cannot be read: {error}"),
        })?;
        let way = match options.memory {
            Memory::Images => MemoryWay::Written,
            Memory::Lazy if client.was_served() => MemoryWay::Held,
            Memory::Lazy => MemoryWay::Untouched,
        };
        Ok(DumpResult::new(way, stats))
    }
}

/// Sends this and answers CRIU's questions until its last word.
async fn answered(
    service: &rpc::Service,
    first: rpc::CriuReq,
    late: Late,
) -> Result<rpc::CriuResp, CriuError> {
    service.send(&first).await?;
    let mut late = Some(late);
    loop {
        let answer = service.receive().await?;
        let Some(script) = answer.asks() else { return Ok(answer) };
        let mut go_on = rpc::CriuReq::go_on();
        if script == WITH_THE_TASKS {
            go_on.opts = late.take().map(|late| rpc::CriuOpts {
                images_dir_fd: -1,
                external: late.external,
                irmap_scan_paths: late.watched,
                link_remap: Some(late.link_remap),
                ..rpc::CriuOpts::default()
            });
        }
        service.send(&go_on).await?;
    }
}

/// What there is in the second's `external` and not in the first's, if they differ in nothing else.
fn more_external(before: &DumpOptions, now: &DumpOptions) -> Option<Vec<String>> {
    let (known, more): (Vec<_>, Vec<_>) =
        now.external.iter().cloned().partition(|key| before.external.contains(key));
    (DumpOptions { external: known, ..now.clone() } == *before).then_some(more)
}

/// Why CRIU refused or failed.
fn failed(answer: &rpc::CriuResp, options: &DumpOptions) -> CriuError {
    let text = log::read_lossy(&options.log());
    let reason = log::first_error(&text)
        .or_else(|| answer.cr_errmsg.clone())
        .or_else(|| answer.cr_errno.map(|n| std::io::Error::from_raw_os_error(n).to_string()))
        .unwrap_or_else(|| "it gave no reason".into());
    CriuError::Dump { pid: options.pid, hint: log::hint(&text), reason, log: options.log() }
}

fn of_dump(options: rpc::CriuOpts) -> rpc::CriuReq {
    rpc::CriuReq { opts: Some(options), ..rpc::CriuReq::of_type(rpc::CriuReqType::Dump) }
}

impl Directories {
    fn open(options: &DumpOptions) -> Result<Self, CriuError> {
        Ok(Self { images: open_directory(&options.images)?, work: open_directory(&options.work)? })
    }
}

fn rpc_options(
    options: &DumpOptions,
    as_stock: bool,
    directories: &Directories,
) -> Result<rpc::CriuOpts, CriuError> {
    let mut external = options.external.clone();
    for (inside, key) in &options.external_mounts {
        external.push(format!("mnt[{inside}]:{key}"));
    }
    if let Some(key) = &options.external_network {
        let path = PathBuf::from(format!("/proc/{}/ns/net", options.pid));
        let namespace = std::fs::metadata(&path).map_err(|source| CriuError::File {
            action: "examine the network namespace",
            path,
            source,
        })?;
        external.push(format!("net[{}]:{key}", namespace.ino()));
    }
    Ok(rpc::CriuOpts {
        images_dir_fd: directories.images.as_raw_fd(),
        pid: i32::try_from(options.pid).ok(),
        leave_running: Some(options.leave_running),
        tcp_established: Some(options.tcp_established),
        file_locks: Some(options.file_locks),
        log_level: Some(options.log_level),
        log_file: Some(LOG_FILE.into()),
        notify_scripts: None,
        root: Some(options.root.to_string_lossy().into_owned()),
        work_dir_fd: Some(directories.work.as_raw_fd()),
        link_remap: Some(options.link_remap),
        manage_cgroups: Some(false),
        manage_cgroups_mode: Some(rpc::CriuCgMode::Ignore.into()),
        ghost_limit: Some(options.ghost_limit),
        irmap_scan_paths: Vec::new(),
        external,
        freeze_cgroup: options.freezer.as_ref().map(|path| path.to_string_lossy().into_owned()),
        timeout: Some(SEIZE_TIMEOUT_SECONDS),
        lazy_pages: Some(options.memory == Memory::Lazy),
        lazy_pages_external: Some(options.memory == Memory::Lazy && !as_stock),
        tcp_inline: Some(options.tcp_inline && !as_stock),
        orphan_pts_master: Some(true),
        network_lock: Some(rpc::CriuNetworkLockMethod::Skip.into()),
    })
}

fn open_directory(path: &Path) -> Result<File, CriuError> {
    File::options().read(true).custom_flags(libc::O_DIRECTORY).open(path).map_err(|source| CriuError::File {
        action: "open directory",
        path: path.to_owned(),
        source,
    })
}
