//! Restores, in one piece or begun before there are images.
//!
//! ```text
//! begin   shim ──▶ runc restore ──▶ CRIU, which opens the inventory of the images: a FIFO
//!         (the service runs at its source, is frozen and dumped)
//! finish  the images are checked and repaired ──▶ their inventory goes into the FIFO ──▶ CRIU goes on
//! ```
//! The inventory is the first image that CRIU reads, before anything that depends on one. So runc, its cgroups, two
//! starts of CRIU and CRIU's look at the kernel are not in the frozen time, and a runc that fails does so before the
//! freeze. Stock CRIU does the same.
//!
//! The root filesystem comes later, too. runc wants one at once, and makes mount points in it: it is given an empty
//! one. CRIU looks for its root when it has read the inventory.
//!
//! CRIU is in the container's cgroup, and counts there. A container that has as many processes as it may have, or more since
//! its limit was lowered, gets its limit when CRIU has ended.

use std::ffi::OsString;
use std::fs::{self, File, OpenOptions};
use std::io::{self, ErrorKind, Write};
use std::os::unix::fs::{OpenOptionsExt, symlink};
use std::path::{Path, PathBuf};

use async_trait::async_trait;
use futures::StreamExt;
use godwit_criu::Places;
use godwit_criu::repair::{Here, fit_kernel};
use inotify::{Inotify, WatchMask};
use nix::errno::Errno;
use nix::mount::{MsFlags, mount};
use nix::sys::statfs::{TMPFS_MAGIC, statfs};
use rustix::fs::{CWD, FileType, Mode};

use super::lifecycle::detach_all;
use super::session::inner_pid;
use super::shim::{self, Files, Starting};
use super::{Runc, last_error, provided, rights, spec, volumes};
use crate::container::{BegunRestore, ContainerState, EngineError, OutputPipes, RestoreRequest, io_error};
use crate::processes::stop::{self, StopSignals};
use crate::processes::{process, tmpfs};
use crate::sessions;

/// Options for CRIU at a restore that runc cannot give. They overrule what runc asks for.
///
/// - `leave-stopped`: nothing runs before [`Engine::cont`](crate::Engine::cont).
/// - `manage-cgroups ignore`: tasks stay in the cgroups that runc put CRIU into. Otherwise CRIU
///   moves them to the paths of the source, which on one kernel is the source's own frozen cgroup.
const CRIU_CONFIG: &str = "leave-stopped\nmanage-cgroups=ignore\nverbosity=2\n";

/// The file beside the images in which runc's restore looks for the standard streams: pipes are handed over by name.
pub(crate) const DESCRIPTORS: &str = "descriptors.json";

/// The image that CRIU reads first.
pub(crate) const INVENTORY: &str = "inventory.img";

/// Largest inventory: what a FIFO takes at once. CRIU's have 200 bytes.
const INVENTORY_LIMIT: usize = 4096;

/// What is in [`DESCRIPTORS`].
pub(crate) fn descriptors(pipes: OutputPipes) -> Vec<u8> {
    let [stdout, stderr] = pipes.map(|number| format!("pipe:[{number}]"));
    serde_json::json!(["/dev/null", stdout, stderr]).to_string().into_bytes()
}

/// Options for CRIU at this restore.
pub(crate) fn criu_options(request: &RestoreRequest) -> String {
    let mut options = CRIU_CONFIG.to_owned();
    if request.lazy_pages {
        options.push_str("lazy-pages\n");
    }
    options.push_str(&format!("external {}\n", godwit_criu::external_shared_in(&request.shared())));
    options.push_str(&format!("external {}\n", godwit_criu::external_ipc(&request.ipc_namespace())));
    options.push_str(&tmpfs::criu_options(request));
    options
}

impl RestoreRequest {
    pub(crate) fn log(&self) -> PathBuf {
        self.work.join("restore.log")
    }

    pub(crate) fn refused(&self, reason: impl ToString) -> EngineError {
        EngineError::Restore { name: self.config.name.clone(), reason: reason.to_string(), log: self.log() }
    }

    pub(crate) fn io(&self, action: &str, path: &Path) -> impl FnOnce(io::Error) -> EngineError {
        let (name, action) = (self.config.name.clone(), format!("{action} {}", path.display()));
        move |source| io_error(&name, action, source)
    }
}

impl Runc {
    /// Restores the container with all processes stopped; on failure nothing is left.
    pub(super) async fn restore_new(&self, request: &RestoreRequest) -> Result<ContainerState, EngineError> {
        check(request)?;
        let files = self.lay_out(request).await?;
        let restored = async {
            let _links = complete(request, &request.config.rootfs, &volumes(&request.config)?)?;
            let mut starting = self.spawn_restore(request, &files)?;
            self.restored(request, &files, &mut starting).await
        };
        self.or_clean(request, restored.await).await
    }

    /// Starts a restore that waits for its images; on failure nothing is left.
    pub(super) async fn begin_new(
        &self,
        request: RestoreRequest,
        pipes: OutputPipes,
    ) -> Result<Begun, EngineError> {
        let files = self.lay_out(&request).await?;
        let descriptors = descriptors(pipes);
        let waiting = self.wait_for_images(&request, &files, &descriptors).await;
        let (gate, starting) = self.or_clean(&request, waiting).await?;
        Ok(Begun { runc: self.clone(), request, descriptors, files, gate, starting })
    }

    async fn wait_for_images(
        &self,
        request: &RestoreRequest,
        files: &Files,
        descriptors: &[u8],
    ) -> Result<(File, Starting), EngineError> {
        let root = &request.config.rootfs;
        mount_empty_root(root).map_err(request.io("mount an empty root on", root))?;
        let gate = Gate::new(&files.inventory()).map_err(request.io("make", &files.inventory()))?;
        let stand_in = StandIn::put(request, &files.inventory(), descriptors)?;
        let mut starting = self.spawn_restore(request, files)?;
        let gate = tokio::select! {
            opened = gate.opened() => opened.map_err(request.io("wait until CRIU opens", &files.inventory()))?,
            ended = self.restored(request, files, &mut starting) => {
                return Err(ended.err().unwrap_or_else(|| request.refused("CRIU did not wait for the images")));
            }
        };
        // What runc has seen makes room for what comes.
        let criu_root = self.criu_root(&request.config.name);
        detach_all(&criu_root).map_err(request.io("unmount", &criu_root))?;
        detach_empty_root(root).map_err(request.io("unmount", root))?;
        stand_in.remove(request)?;
        Ok((gate, starting))
    }

    /// Removes an earlier life, and prepares all that does not depend on images.
    async fn lay_out(&self, request: &RestoreRequest) -> Result<Files, EngineError> {
        let config = &request.config;
        let criu_config = Files::new(&config.directory).criu_config();
        let files = self.prepare(config, Some(&criu_config)).await?;
        fs::create_dir_all(&request.work).map_err(request.io("create", &request.work))?;
        let options = format!("{}{}", criu_options(request), provided::criu_option(config));
        fs::write(&criu_config, options).map_err(request.io("write", &criu_config))?;
        files.note_restore_work(&request.work).map_err(request.io("write into", &config.directory))?;
        Ok(files)
    }

    fn spawn_restore(&self, request: &RestoreRequest, files: &Files) -> Result<Starting, EngineError> {
        let words = ["restore", "--tcp-established", "--file-locks", "--auto-dedup"];
        let mut command: Vec<OsString> = self.shim_command(files, &words);
        command.extend(["--image-path".into(), request.images.clone().into()]);
        command.extend(["--work-path".into(), request.work.clone().into()]);
        command.push(request.config.name.as_str().into());
        // One page that CRIU puts in place must not bring others with it that come later.
        self.spawn_shim(&request.config, files, request.lazy_pages, &command)
            .map_err(|reason| request.refused(reason))
    }

    /// What has been restored; if nothing, the reason as well as it is known.
    async fn restored(
        &self,
        request: &RestoreRequest,
        files: &Files,
        starting: &mut Starting,
    ) -> Result<ContainerState, EngineError> {
        let config = &request.config;
        let state = self.started(starting).await.map_err(|reason| {
            let criu_log = godwit_criu::log::read_lossy(&request.log());
            let told = godwit_criu::log::first_error_explained(&criu_log);
            request.refused(told.or_else(|| last_error(&files.runc_log())).unwrap_or(reason))
        })?;
        // Only now that CRIU is gone: it was in the same cgroup.
        let limited = self.processes.cgroup(config)?.limit_processes(config.confinement.pids_limit);
        limited.map_err(|source| io_error(&config.name, "limit its processes".into(), source))?;
        self.take_sessions(request, state.pid).await?;
        Ok(state)
    }

    /// Takes the terminals of commands that came with it. What was typed is put back before anything reads it.
    async fn take_sessions(&self, request: &RestoreRequest, main: u32) -> Result<(), EngineError> {
        let name = &request.config.name;
        let failed = |source| io_error(name, "take the terminals of its commands".into(), source);
        if !request.images.join(sessions::FILE).exists() {
            return Ok(());
        }
        let statuses = process::statuses(self.processes.members(&request.config)?).map_err(failed)?;
        let members: Vec<_> = statuses.iter().map(|status| (status.pid, status.inner_pid)).collect();
        let cgroup = self.processes.cgroup(&request.config)?;
        let identify = move |pid| inner_pid(&cgroup, pid);
        self.sessions.arrive(name, &request.images, (main, members), identify).await.map_err(failed)
    }

    async fn or_clean<T>(
        &self,
        request: &RestoreRequest,
        result: Result<T, EngineError>,
    ) -> Result<T, EngineError> {
        if result.is_err() {
            self.clean_after_failure(&request.config).await;
        }
        result
    }
}

/// What runc and CRIU find in the directory of images before there are any.
#[must_use]
pub(crate) struct StandIn([PathBuf; 2]);

impl StandIn {
    /// Puts it there: the way to the FIFO in which the inventory comes, and the standard streams.
    pub(crate) fn put(
        request: &RestoreRequest,
        fifo: &Path,
        descriptors: &[u8],
    ) -> Result<Self, EngineError> {
        let (inventory, noted) = (request.images.join(INVENTORY), request.images.join(DESCRIPTORS));
        symlink(fifo, &inventory).map_err(request.io("make", &inventory))?;
        fs::write(&noted, descriptors).map_err(request.io("write", &noted))?;
        Ok(Self([inventory, noted]))
    }

    /// Makes room for the images.
    pub(crate) fn remove(self, request: &RestoreRequest) -> Result<(), EngineError> {
        self.0.iter().try_for_each(|path| shim::remove(path).map_err(request.io("remove", path)))
    }
}

/// Checks images and repairs them.
fn check(request: &RestoreRequest) -> Result<(), EngineError> {
    godwit_criu::repair::repair(&request.images).map_err(|error| request.refused(error))?;
    fit_kernel(&request.images, &provided::hidden(&request.config), Here::at)
        .map_err(|error| request.refused(error))?;
    // What is repaired next are keys and flags of mounts, which are checked as the source made them.
    rights::check(request)?;
    godwit_criu::repair::external_mounts(&request.images, spec::MASKED_FILES, provided::RESTORE_KEY)
        .map_err(|error| request.refused(error))
}

/// Notes what images say, and gives files names for the time of the restore.
pub(crate) fn complete(
    request: &RestoreRequest,
    root: &Path,
    volumes: &[(PathBuf, PathBuf)],
) -> Result<godwit_criu::repair::Links, EngineError> {
    let config = &request.config;
    let signals = StopSignals::beside(&request.images);
    let signals = signals.noted().map_err(request.io("read", &request.images.join(stop::FILE)))?;
    StopSignals::of(config).note(&signals).map_err(request.io("write into", &config.directory))?;
    godwit_criu::repair::links(&request.images, &Places::new(root, volumes))
        .map_err(|error| request.refused(error))
}

/// A restore whose CRIU waits for the inventory of the images.
pub(super) struct Begun {
    runc: Runc,
    request: RestoreRequest,
    /// What runc was told of the standard streams.
    descriptors: Vec<u8>,
    files: Files,
    /// Closed, it ends CRIU: also when this daemon ends.
    gate: File,
    starting: Starting,
}

#[async_trait]
impl BegunRestore for Begun {
    fn charge(&self, pid: u32) -> Result<(), EngineError> {
        let config = &self.request.config;
        let cgroup = self.runc.processes.cgroup(config)?;
        cgroup.charge(pid).map_err(|source| {
            io_error(&config.name, format!("put process {pid} into its memory cgroup"), source)
        })
    }

    async fn finish(self: Box<Self>) -> Result<ContainerState, EngineError> {
        let Self { runc, request, descriptors, files, gate, mut starting } = *self;
        let restored = async {
            let _links = release(&runc, &request, &descriptors, gate)?;
            runc.restored(&request, &files, &mut starting).await
        };
        runc.or_clean(&request, restored.await).await
    }
}

/// Lets CRIU go on with the images and the root filesystem that are there now.
fn release(
    runc: &Runc,
    request: &RestoreRequest,
    descriptors: &[u8],
    gate: File,
) -> Result<godwit_criu::repair::Links, EngineError> {
    check(request)?;
    same_descriptors(request, descriptors)?;
    let criu_root = runc.criu_root(&request.config.name);
    bind_root(&request.config.rootfs, &criu_root).map_err(request.io("mount the root on", &criu_root))?;
    let links = complete(request, &request.config.rootfs, &volumes(&request.config)?)?;
    hand_over(request, gate)?;
    Ok(links)
}

/// Whether the images name the standard streams that runc was told of.
pub(crate) fn same_descriptors(request: &RestoreRequest, descriptors: &[u8]) -> Result<(), EngineError> {
    let noted = request.images.join(DESCRIPTORS);
    if fs::read(&noted).map_err(request.io("read", &noted))? != descriptors {
        return Err(request.refused("its standard streams are not those that its source had told of"));
    }
    Ok(())
}

/// Shows CRIU a root filesystem.
pub(crate) fn bind_root(root: &Path, criu_root: &Path) -> io::Result<()> {
    let flags = MsFlags::MS_BIND | MsFlags::MS_REC;
    Ok(mount(Some(root), criu_root, None::<&str>, flags, None::<&str>)?)
}

/// Lets CRIU go on.
pub(crate) fn hand_over(request: &RestoreRequest, mut gate: File) -> Result<(), EngineError> {
    let path = request.images.join(INVENTORY);
    let inventory = fs::read(&path).map_err(request.io("read", &path))?;
    if inventory.len() > INVENTORY_LIMIT {
        return Err(request.refused(format!("its inventory has more than {INVENTORY_LIMIT} bytes")));
    }
    gate.write_all(&inventory).map_err(request.io("hand over", &path))
}

/// The FIFO for which CRIU waits.
pub(crate) struct Gate {
    path: PathBuf,
    /// Open for both, so that whoever opens it for reading does not wait for a writer: it would not be seen.
    both: File,
    opened: Inotify,
}

impl Gate {
    pub(crate) fn new(path: &Path) -> io::Result<Self> {
        rustix::fs::mknodat(CWD, path, FileType::Fifo, Mode::RUSR | Mode::WUSR, 0)?;
        let both = OpenOptions::new().read(true).write(true).open(path)?;
        let opened = Inotify::init()?;
        opened.watches().add(path, WatchMask::OPEN)?;
        Ok(Self { path: path.to_owned(), both, opened })
    }

    /// Its end for writing, once somebody reads it.
    pub(crate) async fn opened(self) -> io::Result<File> {
        let Self { path, both, opened } = self;
        let mut events = opened.into_event_stream([0; 1024])?;
        events.next().await.ok_or(ErrorKind::UnexpectedEof)??;
        let writing = OpenOptions::new().write(true).custom_flags(libc::O_NOFOLLOW).open(path)?;
        drop(both);
        Ok(writing)
    }
}

/// Mounts an empty filesystem in the place of a root filesystem. It goes when CRIU waits, or with the container: as long
/// as runc works it may make mount points there.
fn mount_empty_root(place: &Path) -> io::Result<()> {
    fs::create_dir_all(place)?;
    let flags = MsFlags::MS_NOSUID | MsFlags::MS_NODEV;
    Ok(mount(Some("tmpfs"), place, Some("tmpfs"), flags, Some("size=1m,mode=755"))?)
}

/// Unmounts such a one; a root filesystem itself is an overlay, and stays.
pub(super) fn detach_empty_root(place: &Path) -> io::Result<()> {
    match statfs(place) {
        Ok(found) if found.filesystem_type() == TMPFS_MAGIC => detach_all(place),
        Ok(_) | Err(Errno::ENOENT) => Ok(()),
        Err(errno) => Err(errno.into()),
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::io::Read;

    use super::*;

    #[tokio::test]
    async fn a_reader_of_the_inventory_waits_until_it_is_there() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("inventory");
        let gate = Gate::new(&path).unwrap();
        let reader = std::thread::spawn(move || {
            let mut text = String::new();
            File::open(path).unwrap().read_to_string(&mut text).unwrap();
            text
        });
        let mut opened = gate.opened().await.unwrap();
        assert!(!reader.is_finished());
        opened.write_all(b"inventory").unwrap();
        drop(opened);
        assert_eq!(reader.join().unwrap(), "inventory");
    }

    #[tokio::test]
    async fn one_who_waits_is_told_that_there_is_none() {
        let directory = tempfile::tempdir().unwrap();
        let files = Files::new(directory.path());
        // Neither without a FIFO nor without a reader is there anything to do.
        files.end_waiting().unwrap();
        drop(Gate::new(&files.inventory()).unwrap());
        files.end_waiting().unwrap();
        let path = files.inventory();
        let reader = tokio::task::spawn_blocking(move || {
            let mut read = Vec::new();
            File::open(path).unwrap().read_to_end(&mut read).unwrap();
            read
        });
        while !reader.is_finished() {
            files.end_waiting().unwrap();
            tokio::task::yield_now().await;
        }
        assert_eq!(reader.await.unwrap(), b"");
    }

    #[test]
    fn the_streams_are_named_as_in_images() {
        assert_eq!(descriptors([7, 8]), br#"["/dev/null","pipe:[7]","pipe:[8]"]"#);
    }
}
