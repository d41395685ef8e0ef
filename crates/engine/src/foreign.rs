//! Containers that engines of others keep, and godwit moves: what is alike whatever the engine. Nothing of an engine is
//! changed.
//!
//! ```text
//!  source                                              destination
//!  the engine describes the container  ──────────────▶ the engine makes it, and has its runtime start it ([`landing`])
//!  cgroup, freezer, CRIU: by godwit, as for its own ──▶ the runtime restores what godwit has
//!  the engine removes it, after the commit             ps, logs, exec, stop, … as if it had been started there
//! ```
//! An engine can also make a container for godwit, which is then like one that was adopted: [`making`].
//!
//! What each engine does in its own way is behind [`Keeps`]; whoever does that is an [`Engine`], here, and [`Adopts`]. What
//! godwit knows of a container is in its [`record`]; a container without one is none of godwit's business, whatever its name
//! or ID.

mod adopts;
pub mod archive;
pub(crate) mod bound;
mod commands;
pub(crate) mod environment;
pub(crate) mod file;
pub(crate) mod files;
pub(crate) mod fitness;
pub(crate) mod instructions;
mod keeps;
pub(crate) mod landing;
pub mod limits;
pub(crate) mod log;
pub mod making;
pub(crate) mod output;
pub(crate) mod record;
mod removal;
pub(crate) mod renewed;

use std::fs;
use std::io::{self, ErrorKind};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use async_trait::async_trait;
use bytes::Bytes;
use tokio::sync::mpsc;

use crate::container::{
    BegunRestore, ContainerConfig, ContainerState, ContainerStatus, DumpTarget, Engine, EngineError,
    LogFiles, OutputPipes, RestoreRequest, Tmpfs, Usage, VolumePlace, io_error,
};
use crate::exec::{ExecIo, ExecRequest};
use crate::files::place_of;
use crate::image::Pinned;
use crate::processes::mounts::MountNamespace;
use crate::processes::{process, stop};
use crate::runc::{NETWORK_KEY, restore};
use crate::view;
use making::WantedImage;
use record::{Life, Record};
use removal::remove;

pub use adopts::{Adopts, Found, Port, on_networks};
pub use fitness::Fitness;
pub(crate) use keeps::{Beside, Care, Inside, Keeps, Look};
pub use renewed::Renewed;

/// How long a call of an engine may take that only asks, or changes a record.
pub(crate) const SHORT: Duration = Duration::from_secs(20);

/// How long an engine may take to start a container, or to end one.
pub(crate) const LONG: Duration = Duration::from_secs(30);

/// The label of what was made here for a container, with the [token](Record::token) of that.
pub(crate) const ARRIVAL_LABEL: &str = "godwit.arrival";

/// How long an engine may take to see that a container has ended, and how often to look.
const END_SEEN: Duration = Duration::from_secs(10);
const END_LOOK: Duration = Duration::from_millis(100);

/// How long commands in a container are waited for that its engine may have begun, as for health checks, and how often to
/// look.
const SESSIONS_LIMIT: Duration = Duration::from_secs(3);
const SESSIONS_LOOK: Duration = Duration::from_millis(20);

/// A number that nobody can guess, another at each look.
const UUID: &str = "/proc/sys/kernel/random/uuid";

/// Where a container sees cgroups.
pub(crate) const CGROUPS: &str = "/sys/fs/cgroup";

/// What engines bind into containers.
const BOUND: &[&str] = &["/etc/hostname", "/etc/hosts", "/etc/resolv.conf", "/run/.containerenv"];

/// Paths that no container sees, whatever the engine.
pub(crate) const MASKED: &[&str] = &["/proc/kcore", "/proc/keys", "/proc/timer_list", "/sys/firmware"];

/// Paths that no container writes to.
pub(crate) const READ_ONLY: &[&str] =
    &["/proc/bus", "/proc/fs", "/proc/irq", "/proc/sys", "/proc/sysrq-trigger"];

/// Whether this can be an ID of a container; it becomes a part of paths.
pub(crate) fn is_id(id: &str) -> bool {
    id.len() == 64 && id.bytes().all(|byte| byte.is_ascii_digit() || (b'a'..=b'f').contains(&byte))
}

/// Whether a name is the beginning of a container's ID, as long as engines tell it.
pub(crate) fn is_short_id(name: &str, id: &str) -> bool {
    name.len() >= 12 && id.starts_with(name)
}

/// Whether this can be a volume's name; it becomes a part of paths.
pub(crate) fn is_volume(name: &str) -> bool {
    let allowed = |byte: u8| byte.is_ascii_alphanumeric() || b"_.-".contains(&byte);
    name.len() <= 255
        && name.bytes().all(allowed)
        && name.bytes().next().is_some_and(|b| b.is_ascii_alphanumeric())
}

/// Whether something can be mounted there in a container.
pub(crate) fn is_target(path: &str) -> bool {
    path.starts_with('/') && path.split('/').skip(1).all(|part| !matches!(part, "" | "." | ".."))
}

/// How many commands from outside run in a container. Those that its engine has begun end soon, unless they are frozen.
async fn sessions(care: &Care, placed: &ContainerConfig, main: u32) -> Result<usize, EngineError> {
    let begin = Instant::now();
    loop {
        let commands = care.processes.sessions(placed, main)?;
        if commands == 0 || begin.elapsed() > SESSIONS_LIMIT || care.processes.cgroup(placed)?.is_frozen() {
            return Ok(commands);
        }
        tokio::time::sleep(SESSIONS_LOOK).await;
    }
}

/// The configuration of a container whose main process must live.
async fn living(
    keeps: &(impl Keeps + ?Sized),
    config: &ContainerConfig,
) -> Result<(ContainerConfig, Life), EngineError> {
    if state(keeps, config).await?.status == ContainerStatus::Stopped {
        return Err(keeps.care().failed(&config.name, "reach", "its main process has ended"));
    }
    keeps.care().placed(config)
}

async fn state(
    keeps: &(impl Keeps + ?Sized),
    config: &ContainerConfig,
) -> Result<ContainerState, EngineError> {
    let record = Record::of(config)?;
    let Some(life) = record.life else { return Err(EngineError::NotFound(config.name.clone())) };
    if process::lives(life.pid, life.start) {
        let (config, _) = keeps.care().placed(config)?;
        let status = match keeps.care().processes.cgroup(&config)?.is_frozen() {
            true => ContainerStatus::Paused,
            false => ContainerStatus::Running,
        };
        return Ok(ContainerState { status, pid: life.pid, exit_code: None });
    }
    let look = keeps.look(&config.name, &record.id).await?;
    let look = look.ok_or_else(|| EngineError::NotFound(config.name.clone()))?;
    let exit_code = (!look.running && !look.restarting).then_some(look.exit_code);
    Ok(ContainerState { status: ContainerStatus::Stopped, pid: 0, exit_code })
}

#[async_trait]
impl<K: Keeps + Clone + 'static> Engine for K {
    async fn objections(&self, config: &ContainerConfig) -> Vec<String> {
        let asking = async { self.speaks_against(config, Record::read(config)?.is_none()).await };
        asking.await.unwrap_or_else(|error: EngineError| vec![error.to_string()])
    }

    async fn volume_place(
        &self,
        config: &ContainerConfig,
        volume: &str,
    ) -> Result<Option<VolumePlace>, EngineError> {
        match is_volume(volume) {
            true => self.place_of_volume(&config.name, volume).await,
            false => Ok(None),
        }
    }

    async fn against_taking(
        &self,
        config: &ContainerConfig,
        volume: &str,
    ) -> Result<Vec<String>, EngineError> {
        self.against_volumes(&config.name, &[volume.to_owned()], 1).await
    }

    async fn image_bytes(&self, config: &ContainerConfig) -> Result<u64, EngineError> {
        // What an engine counts may be 0, which means that there is nothing to send.
        Ok(self.size_of_image(config).await?.max(1))
    }

    async fn against_files_in(
        &self,
        config: &ContainerConfig,
        directory: &Path,
    ) -> Result<Option<String>, EngineError> {
        let storage = self.storage_of(&config.name).await?;
        let action = format!("compare the filesystems of {} and {}", storage.display(), directory.display());
        let joined =
            view::are_joined(&storage, directory).map_err(|source| io_error(&config.name, action, source))?;
        let (engine, storage, waiting) = (self.care().keeper.title(), storage.display(), directory.display());
        let apart = || {
            format!(
                "{engine}'s storage {storage} is on another filesystem than {waiting}, where they would wait"
            )
        };
        Ok((!joined).then(apart))
    }

    async fn storage(&self, config: &ContainerConfig) -> Result<Option<PathBuf>, EngineError> {
        Ok(Some(self.storage_of(&config.name).await?))
    }

    async fn log_files(&self, config: &ContainerConfig) -> Result<Option<LogFiles>, EngineError> {
        let Some(record) = Record::read(config)? else { return Ok(None) };
        let storage = self.storage_of(&config.name).await?;
        // What has come just now is in it by then.
        self.care().logs_are_put(&config.name).await;
        Ok(log::of(self.care().keeper, &record.id, &storage))
    }

    async fn load_profile(&self, config: &ContainerConfig, profile: &str) -> Result<(), EngineError> {
        self.load_own_profile(&config.name, profile).await
    }

    async fn lacks_image(&self, config: &ContainerConfig) -> Result<Option<Vec<String>>, EngineError> {
        self.lacking(config).await
    }

    async fn fetch_image(&self, config: &ContainerConfig, reference: &Pinned) -> Result<(), EngineError> {
        let wanted = WantedImage::Named(reference.to_string());
        self.have_image(&config.name, &wanted).await?;
        match self.lacking(config).await? {
            None => Ok(()),
            Some(_) => Err(self.care().failed(
                &config.name,
                "fetch the image of",
                format!("what {reference} is, is another image than that of the container"),
            )),
        }
    }

    async fn send_image(
        &self,
        config: &ContainerConfig,
        without: Vec<String>,
        to: mpsc::Sender<Bytes>,
    ) -> Result<(), EngineError> {
        self.save(config, without, to).await
    }

    async fn take_image(
        &self,
        config: &ContainerConfig,
        from: mpsc::Receiver<Bytes>,
    ) -> Result<(), EngineError> {
        self.load(config, from).await
    }

    async fn expect(&self, config: &ContainerConfig) -> Result<(), EngineError> {
        let kept = self.care().kept(config)?;
        let token = fs::read_to_string(UUID).map(|text| text.trim().to_owned());
        let token = token.map_err(|source| io_error(&config.name, format!("read {UUID}"), source))?;
        let waiting = landing::waiting_in(&self.storage_of(&config.name).await?, &token);
        let id = if self.keeps_ids() { kept.id.clone() } else { String::new() };
        let of = kept.id.clone();
        let record =
            Record { of, id, token, ours: true, waiting: Some(waiting.clone()), ..Record::default() };
        // First, so that what is made is removed.
        record.begin(config)?;
        fs::create_dir_all(&waiting)
            .map_err(|source| io_error(&config.name, format!("create {}", waiting.display()), source))?;
        // The engine would take a volume of that name for it that somebody makes until it does.
        self.make_volumes(config, &record.token).await
    }

    fn changed_files(&self, config: &ContainerConfig) -> Result<PathBuf, EngineError> {
        let record = Record::of(config)?;
        let tree = self.care().tree(config);
        if let Some(waiting) = record.waiting {
            return Ok(waiting);
        }
        let failed =
            |source| io_error(&config.name, format!("bind its files into {}", tree.display()), source);
        files::bind(&record, &tree, &|volume| config.stays(volume).is_some()).map_err(failed)?;
        Ok(tree)
    }

    async fn run(&self, config: &ContainerConfig) -> Result<ContainerState, EngineError> {
        self.start_it(config, &Record::of(config)?.id).await?;
        self.take(config).await
    }

    async fn state(&self, config: &ContainerConfig) -> Result<ContainerState, EngineError> {
        state(self, config).await
    }

    async fn wait(&self, config: &ContainerConfig) -> Result<i32, EngineError> {
        let io = |source| io_error(&config.name, "wait for its end".into(), source);
        let record = Record::of(config)?;
        let life = record.life.ok_or_else(|| EngineError::NotFound(config.name.clone()))?;
        if let Some(main) =
            process::Handle::open(life.pid).map_err(io)?.filter(|_| process::lives(life.pid, life.start))
        {
            let looking_after = async {
                if record.came == Some((life.pid, life.start))
                    && let Err(error) = self.look_after(config, &record.id).await
                {
                    tracing::warn!(container = %config.name, %error, "its health is checked again at its next start");
                }
                std::future::pending::<()>().await;
            };
            tokio::select! {
                ended = main.ended() => ended.map_err(io)?,
                () = looking_after => {}
            }
        }
        // Its engine is told a moment later.
        let begin = Instant::now();
        loop {
            let look = self.look(&config.name, &Record::of(config)?.id).await?;
            let look = look.ok_or_else(|| EngineError::NotFound(config.name.clone()))?;
            // One that has been started again has had an end, whose code the engine keeps until the next.
            if !look.running || look.pid != life.pid || begin.elapsed() > END_SEEN {
                return Ok(look.exit_code);
            }
            tokio::time::sleep(END_LOOK).await;
        }
    }

    async fn started_again(&self, config: &ContainerConfig) -> Result<(), EngineError> {
        self.until_it_runs(config, &Record::of(config)?.id).await
    }

    async fn signal(&self, config: &ContainerConfig, signal: i32) -> Result<(), EngineError> {
        self.signal_it(config, &Record::of(config)?.id, signal).await
    }

    async fn stop(&self, config: &ContainerConfig, limit: Duration) -> Result<(), EngineError> {
        self.stop_it(config, &Record::of(config)?.id, limit).await
    }

    async fn freeze(&self, config: &ContainerConfig) -> Result<(), EngineError> {
        self.care().processes.freeze(&self.care().placed(config)?.0).await
    }

    async fn recover(&self, config: &ContainerConfig) -> Result<(), EngineError> {
        self.care().processes.recover(&self.care().placed(config)?.0).await
    }

    async fn thaw(&self, config: &ContainerConfig) -> Result<(), EngineError> {
        self.care().processes.thaw(&self.care().placed(config)?.0).await
    }

    async fn settle_log(&self, config: &ContainerConfig) -> Result<(), EngineError> {
        let ((_, life), record) = (self.care().placed(config)?, Record::of(config)?);
        // The engine is not asked: that takes longer than the container is to be frozen.
        let storage = record.storage.as_ref().or(self.care().storage.get());
        // Where no log moves, there is nothing to wait for.
        let log = storage.and_then(|storage| log::of(self.care().keeper, &record.id, storage));
        let Some(LogFiles { paths: [_, log], .. }) = log else { return Ok(()) };
        let logged = output::is_logged(life.reader, life.pipes, &log).await;
        logged.map_err(|source| io_error(&config.name, "have its last output logged".into(), source))
    }

    async fn dump_target(&self, config: &ContainerConfig) -> Result<DumpTarget, EngineError> {
        let (placed, life) = living(self, config).await?;
        let processes = &self.care().processes;
        let commands = sessions(self.care(), &placed, life.pid).await?;
        if commands > 0 {
            return Err(EngineError::Occupied { name: config.name.clone(), commands });
        }
        let io = |path: &Path| {
            let action = format!("read {}", path.display());
            move |source| io_error(&config.name, action, source)
        };
        let mounts = MountNamespace::of(life.pid)
            .map_err(|source| io_error(&config.name, "look at its mounts".into(), source))?;
        let inside = self.inside(config)?.for_this_move(config);
        let failed = |source| io_error(&config.name, "find the places of its volumes".into(), source);
        let places = places(&life.root, &inside.volumes).map_err(failed)?;
        let bound: Vec<_> = inside
            .bound
            .iter()
            .map(|target| (String::new(), target.to_string_lossy().into_owned()))
            .collect();
        let bound = self::places(&life.root, &bound)
            .map_err(|source| io_error(&config.name, "find the places of its bind mounts".into(), source))?;
        let brought: Vec<_> = places.iter().chain(&bound).cloned().collect();
        let external = external_mounts(mounts.mountinfo(), &brought).into_iter();
        let mut external_mounts: Vec<_> = external.map(|place| (place.clone(), place)).collect();
        let volumes = Record::of(config)?.volumes.into_iter().filter_map(|volume| {
            let named = |(name, _): &&(String, String)| *name == volume.name;
            let at = inside.volumes.iter().position(|known| named(&known))?;
            // Nothing is in a file.
            if inside.files.iter().any(|file| file.volume == volume.name) {
                return None;
            }
            Some((places.get(at)?.into(), volume.files))
        });
        let volumes = volumes.collect();
        for path in inside.masked.into_iter().filter(|path| mounts.has_file(path)) {
            external_mounts.push((path, "/dev/null".to_owned()));
        }
        let mut extra_files = vec![(restore::DESCRIPTORS.to_owned(), restore::descriptors(life.pipes))];
        let signals = config.directory.join(stop::FILE);
        match fs::read(&signals) {
            Ok(text) => extra_files.push((stop::FILE.to_owned(), text)),
            Err(error) if error.kind() == ErrorKind::NotFound => {}
            Err(error) => return Err(io(&signals)(error)),
        }
        Ok(DumpTarget {
            volumes,
            pid: life.pid,
            root: life.root,
            external_mounts,
            network_namespace: (config.network_namespace.clone(), NETWORK_KEY.to_owned()),
            freezer: processes.cgroup(&placed)?.freezer(),
            extra_files,
        })
    }

    async fn tmpfs(&self, config: &ContainerConfig) -> Result<Vec<Tmpfs>, EngineError> {
        let (placed, life) = living(self, config).await?;
        self.care().processes.tmpfs(&placed, life.pid).await
    }

    async fn restore_stopped(&self, request: &RestoreRequest) -> Result<ContainerState, EngineError> {
        // A source that knows of other engines' containers tells of their output in advance.
        Err(request.refused("its source has not told of its standard streams"))
    }

    async fn output_pipes(&self, config: &ContainerConfig) -> Result<OutputPipes, EngineError> {
        Ok(self.care().placed(config)?.1.pipes)
    }

    async fn begin_restore(
        &self,
        request: RestoreRequest,
        pipes: OutputPipes,
    ) -> Result<Box<dyn BegunRestore>, EngineError> {
        self.begin_arrival(request, pipes).await
    }

    async fn cont(&self, config: &ContainerConfig, keep_stopped: &[u32]) -> Result<(), EngineError> {
        self.care().processes.cont(&self.care().placed(config)?.0, keep_stopped).await?;
        // It runs, whatever comes of this, which the next life of godwitd does otherwise.
        if let Err(error) = self.own(config) {
            tracing::warn!(container = %config.name, %error, "it is not noted that it has come");
        }
        Ok(())
    }

    async fn stopped_processes(&self, config: &ContainerConfig) -> Result<Vec<u32>, EngineError> {
        self.care().processes.stopped(&self.care().placed(config)?.0)
    }

    async fn departed(&self, config: &ContainerConfig) -> Result<(), EngineError> {
        if Record::read(config)?.is_some_and(|record| !record.departed) {
            Record::change(config, |record| {
                record.departed = true;
                record.volumes.retain(|volume| config.stays(&volume.name).is_none());
            })?;
        }
        Ok(())
    }

    async fn delete(&self, config: &ContainerConfig) -> Result<(), EngineError> {
        remove(self, config).await
    }

    async fn exec(&self, config: &ContainerConfig, request: &ExecRequest) -> Result<ExecIo, EngineError> {
        commands::start(self, config, request)
    }

    async fn exec_sessions(&self, config: &ContainerConfig) -> Result<usize, EngineError> {
        let (placed, life) = living(self, config).await?;
        sessions(self.care(), &placed, life.pid).await
    }

    async fn processes(&self, config: &ContainerConfig) -> Result<Vec<u32>, EngineError> {
        match self.care().placed(config) {
            Ok((placed, _)) => self.care().processes.members(&placed),
            Err(EngineError::NotFound(_)) => Ok(Vec::new()),
            Err(error) => Err(error),
        }
    }

    async fn limit_cpu(&self, config: &ContainerConfig, millis: u32) -> Result<(), EngineError> {
        match self.care().placed(config) {
            Ok((placed, _)) => self.care().processes.limit_cpu(&placed, millis),
            Err(EngineError::NotFound(_)) => Ok(()),
            Err(error) => Err(error),
        }
    }

    async fn usage(&self, config: &ContainerConfig) -> Result<Usage, EngineError> {
        let (placed, life) = living(self, config).await?;
        self.care().processes.usage(&placed, life.pid)
    }

    async fn memory_current(&self, config: &ContainerConfig) -> Result<u64, EngineError> {
        self.care().processes.memory(&self.care().placed(config)?.0)
    }

    async fn memory_unshared(&self, config: &ContainerConfig) -> Result<u64, EngineError> {
        self.care().processes.memory_unshared(&self.care().placed(config)?.0).await
    }
}

/// Where volumes are in a root filesystem that is mounted. Those are their keys, too: runc follows links in targets, where it
/// finds the root filesystem mounted.
fn places(root: &Path, volumes: &[(String, String)]) -> io::Result<Vec<String>> {
    let place = |(_, target): &(String, String)| place_of(root, Path::new(target));
    volumes.iter().map(|volume| Ok(place(volume)?.to_string_lossy().into_owned())).collect()
}

/// Mounts of a container that its restore brings: its volumes, what its engine binds into it, and cgroups: each hierarchy of
/// version 1, as runc has it, and that of version 2. `/dev/shm` may be bound, too, but is a tmpfs of the container alone: it
/// moves as one.
fn external_mounts(mountinfo: &str, volumes: &[String]) -> Vec<String> {
    let mut found = Vec::new();
    for line in mountinfo.lines() {
        let Some((mounted, filesystem)) = line.split_once(" - ") else { continue };
        let target = mounted.split(' ').nth(4).unwrap_or_default();
        let is_cgroup = filesystem.starts_with("cgroup ") && target.starts_with("/sys/fs/cgroup/")
            || filesystem.starts_with("cgroup2 ") && target == CGROUPS;
        if is_cgroup || BOUND.contains(&target) || volumes.iter().any(|volume| volume == target) {
            found.push(target.to_owned());
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_becomes_a_path_is_an_id() {
        assert!(is_id(&"0a".repeat(32)));
        for id in ["", "../x", &"0A".repeat(32), &"0".repeat(63), &"/".repeat(64)] {
            assert!(!is_id(id), "{id}");
        }
    }

    #[test]
    fn what_is_bound_is_brought_and_what_moves_is_not() {
        let text = "1 0 0:1 / / rw - overlay overlay rw\n\
                    2 1 0:2 /x /etc/hosts rw - tmpfs tmpfs rw\n\
                    3 1 0:3 / /dev/shm rw - tmpfs shm rw\n\
                    4 1 0:4 /c /sys/fs/cgroup/pids ro - cgroup cgroup rw,pids\n\
                    5 1 0:5 / /sys/fs/cgroup ro - cgroup2 cgroup rw\n\
                    6 1 0:6 /v /data rw - ext4 /dev/x rw\n";
        assert_eq!(
            external_mounts(text, &["/data".to_owned()]),
            ["/etc/hosts", "/sys/fs/cgroup/pids", "/sys/fs/cgroup", "/data"]
        );
    }
}
