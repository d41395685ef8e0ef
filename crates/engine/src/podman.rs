//! [`Podman`]: containers that Podman keeps, and godwit moves. Nothing of Podman is changed.
//!
//! ```text
//!  source                                             destination
//!  Podman ── describes the container ([`definition`]) ──────────────▶ Podman imports it as a checkpoint ([`arrival`])
//!  cgroup, freezer, CRIU: by godwit, as for its own   ──────────────▶ its runtime restores what godwit has
//!  podman rm, after the commit                                       podman ps, logs, exec, stop, … as if started there
//! ```
//! Podman is called by its command, since it needs no service to run for that. What godwit knows of a container is in its
//! [`record`]; a container without one is none of godwit's business, whatever its name or ID.

mod arrival;
mod command;
mod definition;
mod files;
mod image;
mod record;
mod settings;

use std::ffi::{OsStr, OsString};
use std::fs::{self, OpenOptions};
use std::io::{self, ErrorKind};
use std::os::fd::AsRawFd;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use bytes::Bytes;
use godwit_names::ServiceName;
use serde_json::json;
use tokio::sync::{OnceCell, mpsc};

use crate::container::{
    BegunRestore, ContainerConfig, ContainerState, ContainerStatus, DumpTarget, Engine, EngineError, ExecIo,
    ExecRequest, Keeper, Kept, OutputPipes, RestoreRequest, Tmpfs, User, io_error,
};
use crate::processes::{Processes, cgroup, process, stop};
use crate::runc::provided::RESTORE_KEY as COVER_KEY;
use crate::runc::{NETWORK_KEY, path_variable, restore};
use command::{Call, Inspected, SHORT, Storage, failed};
use definition::Definition;
pub use definition::Port;
use record::{Life, Record, Volume};

/// The runtime under which containers come to a node, whatever they ran under before: crun cannot restore where it is not
/// built for that, as in Debian.
const RUNTIME: &str = "runc";

/// How long Podman may take to end and remove a container.
const REMOVAL: Duration = Duration::from_secs(30);

/// After so long it is helped: by then it has begun to end the container.
const HELP: Duration = Duration::from_secs(5);

/// The label of a volume that was made for a container on its way here, with the container's ID.
const VOLUME_LABEL: &str = "godwit.arrival";

/// How often to look whether an import has ended that is not waited for.
const IMPORT_LOOK: Duration = Duration::from_millis(20);

/// How long Podman may take to see that a container has ended, and how often to look.
const END_SEEN: Duration = Duration::from_secs(10);
const END_LOOK: Duration = Duration::from_millis(100);

/// How long conmon may take to read what a frozen container has written, and how often to look: nobody tells that.
const SETTLE_LIMIT: Duration = Duration::from_secs(2);
const SETTLE_LOOK: Duration = Duration::from_millis(1);

/// Which programs to use, and where.
#[derive(Debug, Clone)]
pub struct PodmanConfig {
    /// The podman binary, or what stands for it with options of its own.
    pub podman: PathBuf,
    /// The `godwit-runtime` binary.
    pub runtime: PathBuf,
    /// The runc binary.
    pub runc: PathBuf,
    /// The CRIU binary that runc shall restore with.
    pub criu: PathBuf,
    /// Where CRIU shall look first for the programs that it starts.
    pub programs: Option<PathBuf>,
    /// Directory for what calls of Podman are given; on a file system that a reboot empties.
    pub run: PathBuf,
    /// The cgroup below which containers are put that come here, where Podman makes cgroups itself; systemd's are in its slices.
    pub cgroup_parent: String,
}

/// Containers of Podman.
#[derive(Debug, Clone)]
pub struct Podman {
    config: PodmanConfig,
    path_variable: OsString,
    processes: Processes,
    storage: Arc<OnceCell<Storage>>,
}

/// A container of Podman that godwit is to move.
#[derive(Debug, Clone)]
pub struct Found {
    /// What makes it Podman's.
    pub kept: Kept,
    /// Its name in Podman.
    pub name: String,
    /// Name of its image.
    pub image: String,
    /// ID of its image, `sha256:…`.
    pub image_id: String,
    /// Its main process.
    pub pid: u32,
    /// Command with arguments.
    pub command: Vec<String>,
    /// `NAME=VALUE` pairs.
    pub env: Vec<String>,
    /// Host name inside.
    pub hostname: String,
    /// Who runs it.
    pub user: User,
    /// Working directory inside.
    pub workdir: PathBuf,
    /// Memory limit in bytes; 0 for none.
    pub memory_bytes: u64,
    /// CPU limit in thousandths; 0 for none.
    pub cpu_millis: u32,
    /// Podman's networks that it is on, and its address on each.
    pub networks: Vec<(String, String)>,
    /// Ports of the node that Podman has lead into it over them.
    pub ports: Vec<Port>,
}

impl Podman {
    /// Containers by these programs.
    #[must_use]
    pub fn new(config: PodmanConfig) -> Self {
        let path_variable = path_variable(&config.criu, config.programs.as_deref());
        let processes = Processes { criu: config.criu.clone() };
        Self { config, path_variable, processes, storage: Arc::default() }
    }

    /// Finds a container by name or ID that runs and that godwit can move. Where it is on networks of Podman's, it must be
    /// one that leaves them.
    ///
    /// # Errors
    /// Podman has no such container, it does not run, or something speaks against moving it: all that does.
    pub async fn find(
        &self,
        name: &ServiceName,
        container: &str,
        leaves_networks: bool,
    ) -> Result<Found, EngineError> {
        let refused = |reason: String| EngineError::Keeper {
            keeper: "Podman",
            action: "give godwit",
            name: name.clone(),
            reason,
        };
        let Some(inspected) = self.inspect(name, container).await? else {
            return Err(refused(format!("it has no container {container}; `podman ps` lists them")));
        };
        if !inspected.state.running || inspected.state.paused {
            return Err(refused(format!("{} does not run; start it first", inspected.name)));
        }
        let definition = self.describe(name, &inspected).await?;
        let mut objections = definition.objections(&inspected.id);
        if inspected.host_config.auto_remove {
            objections.push("it is removed when it ends (--rm), as it does for Podman when it moves".into());
        }
        if inspected.graph_driver.name != "overlay" {
            objections
                .push(format!("its storage driver is {}; godwit moves overlay", inspected.graph_driver.name));
        }
        objections.extend(self.volume_objections(name, &inspected).await?);
        let mounts = fs::read_to_string("/proc/self/mountinfo")
            .map_err(|source| io_error(name, "read /proc/self/mountinfo".into(), source))?;
        objections.extend(arrival::overlay_objection(&mounts, &inspected.graph_driver.data.merged_dir));
        let networks = inspected.network_settings.networks.clone().unwrap_or_default();
        let networks: Vec<_> = networks.into_iter().map(|(name, network)| (name, network.address)).collect();
        if !networks.is_empty() && !leaves_networks {
            let names: Vec<_> = networks.iter().map(|(name, _)| name.as_str()).collect();
            objections.push(format!(
                "it is on Podman's network {}, whose addresses do not move; with --leave-networks it gets an address of godwit's in their place, and connections that are open end",
                names.join(", ")
            ));
        }
        if !objections.is_empty() {
            return Err(refused(objections.join("; ")));
        }
        let ports = definition.ports();
        let definition = definition.of_no_node();
        let process = &definition.spec()["process"];
        let text = |value: &serde_json::Value| value.as_str().unwrap_or_default().to_owned();
        let texts = |value: &serde_json::Value| -> Vec<String> {
            value.as_array().into_iter().flatten().map(text).collect()
        };
        let number = |value: &serde_json::Value| u32::try_from(value.as_u64().unwrap_or(0)).unwrap_or(0);
        let resources = &definition.spec()["linux"]["resources"];
        let (quota, period) = (resources["cpu"]["quota"].as_u64(), resources["cpu"]["period"].as_u64());
        let millis = quota.unwrap_or(0).saturating_mul(1000) / period.unwrap_or(100_000).max(1);
        Ok(Found {
            name: definition.name().to_owned(),
            image: definition.image().0.to_owned(),
            image_id: format!("sha256:{}", definition.image().1),
            pid: inspected.state.pid,
            command: texts(&process["args"]),
            env: texts(&process["env"]),
            hostname: text(&definition.spec()["hostname"]),
            user: User {
                uid: number(&process["user"]["uid"]),
                gid: number(&process["user"]["gid"]),
                groups: process["user"]["additionalGids"]
                    .as_array()
                    .into_iter()
                    .flatten()
                    .map(number)
                    .collect(),
            },
            workdir: text(&process["cwd"]).into(),
            memory_bytes: resources["memory"]["limit"].as_u64().unwrap_or(0),
            cpu_millis: u32::try_from(millis).unwrap_or(0),
            networks,
            ports,
            kept: Kept { keeper: Keeper::Podman, id: inspected.id, definition: definition.value() },
        })
    }

    /// Notes what this node has to know of a container to move it. It stays what it is, whatever becomes of a service that is
    /// being made of it, until [`Podman::own`].
    pub async fn take(&self, config: &ContainerConfig) -> Result<ContainerState, EngineError> {
        let (kept, _) = self.kept(config)?;
        let inspected = self.inspect(&config.name, &kept.id).await?;
        let inspected = inspected.ok_or_else(|| EngineError::NotFound(config.name.clone()))?;
        self.note(config, &inspected).await?;
        self.state(config).await
    }

    /// Takes a container off Podman's networks: their interfaces go, and the ports that lead into it over them. It is put back
    /// on them when it is removed from godwit's care before [`Podman::own`].
    pub async fn leave_networks(
        &self,
        config: &ContainerConfig,
        networks: &[(String, String)],
    ) -> Result<(), EngineError> {
        Record { networks: networks.to_vec(), ..Record::of(config)? }.write(config)?;
        for (network, _) in networks {
            let words = ["network", "disconnect", "--", network];
            self.about(config, "take off its network", &words, SHORT).await?;
        }
        Ok(())
    }

    /// Puts a container back on them, with the addresses that it had.
    async fn join_networks(
        &self,
        config: &ContainerConfig,
        networks: &[(String, String)],
    ) -> Result<(), EngineError> {
        for (network, address) in networks {
            let mut words = vec!["network", "connect"];
            if !address.is_empty() {
                words.extend(["--ip", address]);
            }
            words.extend(["--", network]);
            self.about(config, "put back on its network", &words, SHORT).await?;
        }
        Ok(())
    }

    async fn remove_container(&self, config: &ContainerConfig) -> Result<(), EngineError> {
        let words = ["container", "rm", "--force", "--time", "0", "--ignore", "--"];
        match self.about(config, "remove", &words, REMOVAL).await {
            Err(EngineError::Keeper { reason, .. }) if reason.contains("no such container") => Ok(()),
            removed => removed.map(drop),
        }
    }

    /// Ends an import that is under way, and removes what it has made.
    async fn end_import(&self, config: &ContainerConfig, record: &Record) -> Result<(), EngineError> {
        let Some((pid, start)) = record.import else { return Ok(()) };
        let fifo = self.place(&record.id).join("inventory");
        let io = |source| io_error(&config.name, "end its import".into(), source);
        let begin = std::time::Instant::now();
        while process::lives(pid, start) {
            // A CRIU that waits finds that there is nothing to wait for.
            match OpenOptions::new().write(true).custom_flags(libc::O_NONBLOCK | libc::O_NOFOLLOW).open(&fifo)
            {
                Err(error)
                    if error.kind() != ErrorKind::NotFound && error.raw_os_error() != Some(libc::ENXIO) =>
                {
                    return Err(io(error));
                }
                _ => {}
            }
            if begin.elapsed() > REMOVAL {
                return Err(io(ErrorKind::TimedOut.into()));
            }
            tokio::time::sleep(IMPORT_LOOK).await;
        }
        self.remove_container(config).await
    }

    /// Removes the volumes of a container that is not here any more, as far as they go with it: all of one that runs on another
    /// node with them, of others those without a name of their user's choice. One that another container uses stays.
    async fn remove_volumes(&self, config: &ContainerConfig, record: &Record) -> Result<(), EngineError> {
        let of_container = record.volumes.iter().filter(|volume| record.departed || volume.anonymous);
        let mut names: Vec<_> = of_container.map(|volume| volume.name.clone()).collect();
        // Those that were made for an arrival which comes to nothing.
        if (record.waiting.is_some() || record.left.is_some())
            && let Ok((_, definition)) = self.kept(config)
        {
            for (volume, _) in definition.volumes().unwrap_or_default() {
                if self.has_volume(&config.name, volume).await? {
                    let found = self.volumes(&config.name, &[volume]).await?;
                    let made = found.iter().any(|found| found.labels.get(VOLUME_LABEL) == Some(&record.id));
                    names.extend(made.then(|| volume.to_owned()));
                }
            }
        }
        for name in names {
            let words = ["volume", "rm", "--", &name].map(OsStr::new).to_vec();
            let call = Call { name: &config.name, action: "remove a volume of", words, settings: None };
            match self.call(&call, SHORT).await {
                Ok(_) => {}
                Err(EngineError::Keeper { reason, .. }) if reason.contains("no such volume") => {}
                Err(EngineError::Keeper { reason, .. }) if reason.contains("being used") => {
                    tracing::warn!(container = %config.name, volume = name, reason, "a volume is left here");
                }
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    /// What speaks against moving the volumes of a container.
    async fn volume_objections(
        &self,
        name: &ServiceName,
        inspected: &Inspected,
    ) -> Result<Vec<String>, EngineError> {
        let names: Vec<_> = inspected.volumes().collect();
        let mut found = Vec::new();
        for volume in self.volumes(name, &names).await? {
            if volume.driver != "local" || !volume.options.is_empty() {
                found.push(format!(
                    "its volume {} is not one of Podman's own driver without options",
                    volume.name
                ));
            }
            let device = |path: &Path| {
                fs::metadata(path).map(|found| std::os::unix::fs::MetadataExt::dev(&found)).ok()
            };
            if device(&volume.mountpoint) != device(&inspected.graph_driver.data.upper_dir) {
                found.push(format!(
                    "its volume {} is on another filesystem than Podman's storage",
                    volume.name
                ));
            }
            if self.users_of_volume(name, &volume.name).await? > 1 {
                found.push(format!("another container uses its volume {}", volume.name));
            }
        }
        Ok(found)
    }

    /// What an earlier life of godwit has noted of a container, which it has forgotten, is no reason to remove it.
    pub fn disown(&self, config: &ContainerConfig) -> Result<(), EngineError> {
        match Record::read(config)? {
            Some(record) if record.waiting.is_none() => {
                Record { ours: false, networks: Vec::new(), ..record }.write(config)
            }
            _ => Ok(()),
        }
    }

    /// From here on a container is removed with its service.
    pub fn own(&self, config: &ContainerConfig) -> Result<(), EngineError> {
        match Record::read(config)? {
            Some(record) if !record.ours => {
                Record { ours: true, networks: Vec::new(), ..record }.write(config)
            }
            _ => Ok(()),
        }
    }

    /// What a configuration says of a container in Podman.
    fn kept<'a>(&self, config: &'a ContainerConfig) -> Result<(&'a Kept, Definition), EngineError> {
        let kept = config.kept.as_ref().filter(|kept| kept.keeper == Keeper::Podman && is_id(&kept.id));
        let kept = kept.ok_or_else(|| EngineError::NotFound(config.name.clone()))?;
        let definition = Definition::told(&kept.definition)
            .map_err(|source| io_error(&config.name, "understand its definition".into(), source))?;
        Ok((kept, definition.of_no_node()))
    }

    /// Where the files of a container that is here are bound into one tree.
    fn tree(&self, id: &str) -> PathBuf {
        self.config.run.join(format!("files-{id}"))
    }

    /// Where its restore finds the cgroup that a container is to see.
    fn own_cgroup(&self, id: &str) -> PathBuf {
        self.config.run.join(format!("cgroup-{id}"))
    }

    /// Where a call of Podman finds what it is given for a container.
    fn place(&self, id: &str) -> PathBuf {
        self.config.run.join(id)
    }

    /// Has Podman describe a container: in the archive of a checkpoint that dumps nothing and stops nothing.
    async fn describe(&self, name: &ServiceName, inspected: &Inspected) -> Result<Definition, EngineError> {
        let place = self.place(&format!("describe-{}", inspected.id));
        let io = |action: &'static str| {
            let (name, place) = (name.clone(), place.clone());
            move |source| io_error(&name, format!("{action} {}", place.display()), source)
        };
        self.step_in(&place, (&inspected.id, &inspected.runtime, false), &json!("describe"))
            .map_err(io("prepare Podman's call in"))?;
        let settings = place.join(arrival::SETTINGS);
        let words = ["container", "checkpoint", "--leave-running", "--ignore-rootfs", "--ignore-volumes"];
        // What follows the description in the archive, the log and all of /dev/shm, is not waited for.
        let more = ["--compress", "none", "--export", "/dev/stdout"];
        let mut words: Vec<&OsStr> = words.iter().chain(&more).map(OsStr::new).collect();
        words.push(inspected.id.as_ref());
        let call = Call { name, action: "describe", words, settings: Some(&settings) };
        let leftovers = Leftovers::before(&inspected.static_dir);
        let told = self.first_of(&call, Definition::in_archive).await;
        leftovers.remove();
        fs::remove_dir_all(&place).map_err(io("remove"))?;
        told
    }

    /// Notes the life that a container has now.
    async fn note(&self, config: &ContainerConfig, inspected: &Inspected) -> Result<Record, EngineError> {
        let data = &inspected.graph_driver.data;
        let life = match inspected.state.running {
            true => {
                let (pid, conmon) = (inspected.state.pid, inspected.state.conmon_pid);
                Some(self.life(config, pid, conmon, data.merged_dir.clone())?)
            }
            false => None,
        };
        let names: Vec<_> = inspected.volumes().collect();
        let volumes = self.volumes(&config.name, &names).await?.into_iter().map(|volume| Volume {
            name: volume.name,
            files: volume.mountpoint,
            anonymous: volume.anonymous,
        });
        let blank = Record { id: inspected.id.clone(), ..Record::default() };
        let before = Record::read(config)?.unwrap_or(blank);
        let (upper, volumes) = (data.upper_dir.clone(), volumes.collect());
        let record = Record { life, upper, volumes, import: None, waiting: None, ..before };
        record.write(config)?;
        Ok(record)
    }

    /// What there is to know of a main process.
    fn life(
        &self,
        config: &ContainerConfig,
        pid: u32,
        conmon: u32,
        root: PathBuf,
    ) -> Result<Life, EngineError> {
        let io = |what: &str| {
            let (name, action) = (config.name.clone(), format!("find {what} of process {pid}"));
            move |source| io_error(&name, action, source)
        };
        let gone = || EngineError::NotFound(config.name.clone());
        let start = process::start_time(pid).ok_or_else(gone)?;
        let cgroup = cgroup::of_process(pid).map_err(io("the cgroup"))?;
        let pipes = output_pipes(pid, conmon).map_err(io("the output"))?;
        let conmon_start = process::start_time(conmon).ok_or_else(gone)?;
        Ok(Life { pid, start, cgroup, pipes, conmon, conmon_start, root })
    }

    /// The configuration with the cgroup that the container is in now.
    fn placed(&self, config: &ContainerConfig) -> Result<(ContainerConfig, Life), EngineError> {
        let record = Record::of(config)?;
        let life = record.life.ok_or_else(|| EngineError::NotFound(config.name.clone()))?;
        Ok((ContainerConfig { cgroup: life.cgroup.clone(), ..config.clone() }, life))
    }

    /// The same for a container whose main process must live.
    async fn living(&self, config: &ContainerConfig) -> Result<(ContainerConfig, Life), EngineError> {
        let state = self.state(config).await?;
        if state.status == ContainerStatus::Stopped {
            return Err(EngineError::Keeper {
                keeper: "Podman",
                action: "reach",
                name: config.name.clone(),
                reason: "its main process has ended".into(),
            });
        }
        self.placed(config)
    }

    /// A call about the container, which is named last.
    async fn about(
        &self,
        config: &ContainerConfig,
        action: &'static str,
        words: &[&str],
        limit: Duration,
    ) -> Result<std::process::Output, EngineError> {
        let id = config.kept.as_ref().map_or("", |kept| kept.id.as_str());
        let words = words.iter().copied().chain([id]).map(OsStr::new).collect();
        self.call(&Call { name: &config.name, action, words, settings: None }, limit).await
    }
}

/// What Podman leaves of a checkpoint in its directory of a container.
struct Leftovers(Vec<PathBuf>);

impl Leftovers {
    /// Those that are not there yet.
    fn before(directory: &Path) -> Self {
        let names = ["checkpoint", "devshm-checkpoint.tar", "network.status", "stats-dump"];
        let paths = names.iter().map(|name| directory.join(name));
        Self(paths.filter(|path| path.is_absolute() && fs::symlink_metadata(path).is_err()).collect())
    }

    fn remove(self) {
        for path in self.0 {
            // A directory only when it is empty.
            if let Err(error) = fs::remove_file(&path).or_else(|_| fs::remove_dir(&path))
                && error.kind() != ErrorKind::NotFound
            {
                tracing::warn!(path = %path.display(), %error, "what Podman has left of a checkpoint is not removed");
            }
        }
    }
}

/// What is passed on to Podman of a definition that another node has told, of the container with this ID; nothing of one that
/// there is an objection to.
///
/// # Errors
/// It is not understood.
pub fn passed_on(definition: &serde_json::Value, id: &str) -> io::Result<Option<serde_json::Value>> {
    let told = Definition::told(definition)?;
    Ok(told.objections(id).is_empty().then(|| told.of_no_node().value()))
}

/// Whether this can be an ID of a container of Podman's; it becomes a part of paths.
fn is_id(id: &str) -> bool {
    id.len() == 64 && id.bytes().all(|byte| byte.is_ascii_digit() || (b'a'..=b'f').contains(&byte))
}

/// The pipes that a container was started with as standard output and standard error: those that conmon reads. The main
/// process may have others there by now.
fn output_pipes(pid: u32, conmon: u32) -> io::Result<OutputPipes> {
    let mut read = Vec::new();
    for (path, link) in descriptors(conmon)? {
        let Some(number) = pipe_number(&link) else { continue };
        let descriptor: u32 =
            path.file_name().and_then(|name| name.to_str()?.parse().ok()).unwrap_or(u32::MAX);
        let flags = fs::read_to_string(format!("/proc/{conmon}/fdinfo/{descriptor}")).unwrap_or_default();
        if is_read_only(&flags) {
            read.push((descriptor, number));
        }
    }
    read.sort_unstable();
    let own = |number: u32| {
        let link = fs::read_link(format!("/proc/{pid}/fd/{number}")).ok()?;
        pipe_number(&link).filter(|own| read.iter().any(|(_, pipe)| pipe == own))
    };
    match (own(1), own(2), read.as_slice()) {
        (Some(stdout), Some(stderr), _) => Ok([stdout, stderr]),
        // conmon makes that of the standard output first.
        (_, _, [(_, stdout), (_, stderr)]) => Ok([*stdout, *stderr]),
        _ => Err(io::Error::other(format!("conmon (process {conmon}) reads {} pipes, not two", read.len()))),
    }
}

/// Whether what `/proc/PID/fdinfo/N` says is of a descriptor that is only read.
fn is_read_only(fdinfo: &str) -> bool {
    let flags = fdinfo.lines().find_map(|line| line.strip_prefix("flags:"));
    let flags = flags.and_then(|flags| u32::from_str_radix(flags.trim(), 8).ok());
    flags.is_some_and(|flags| flags & 0o3 == 0)
}

fn pipe_number(link: &Path) -> Option<u64> {
    link.to_str()?.strip_prefix("pipe:[")?.strip_suffix(']')?.parse().ok()
}

/// The descriptors of a process, and what they are.
fn descriptors(pid: u32) -> io::Result<Vec<(PathBuf, PathBuf)>> {
    let entries = fs::read_dir(format!("/proc/{pid}/fd"))?;
    entries
        .map(|entry| {
            let path = entry?.path();
            match fs::read_link(&path) {
                Ok(link) => Ok(Some((path, link))),
                // It was closed.
                Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
                Err(error) => Err(error),
            }
        })
        .filter_map(Result::transpose)
        .collect()
}

/// Bytes that wait in pipes for their reader.
fn unread(conmon: u32, pipes: OutputPipes) -> io::Result<u64> {
    let mut bytes = 0;
    for (path, link) in descriptors(conmon)? {
        if pipe_number(&link).is_some_and(|number| pipes.contains(&number)) {
            let pipe = match OpenOptions::new().read(true).custom_flags(libc::O_NONBLOCK).open(path) {
                Err(error) if error.kind() == ErrorKind::NotFound => continue,
                opened => opened?,
            };
            let mut waiting: libc::c_int = 0;
            // SAFETY: writes one int, which outlives the call.
            if unsafe { libc::ioctl(pipe.as_raw_fd(), libc::FIONREAD, &mut waiting) } == -1 {
                return Err(io::Error::last_os_error());
            }
            bytes += u64::try_from(waiting).unwrap_or(0);
        }
    }
    Ok(bytes)
}

#[async_trait]
impl Engine for Podman {
    async fn objections(&self, config: &ContainerConfig) -> Vec<String> {
        let asking = async {
            let (kept, definition) = self.kept(config)?;
            let mut found = definition.objections(&kept.id);
            for container in [kept.id.as_str(), definition.name()] {
                if Record::read(config)?.is_none() && self.has_container(&config.name, container).await? {
                    found.push(format!(
                        "Podman has a container {container} there already; `podman rm` removes it"
                    ));
                }
            }
            if Record::read(config)?.is_none() {
                let storage = self.storage(&config.name).await?;
                for (volume, _) in definition.volumes().unwrap_or_default() {
                    if self.has_volume(&config.name, volume).await? {
                        found.push(format!(
                            "Podman has a volume {volume} there already; `podman volume rm` removes it"
                        ));
                    }
                    if !storage.volumes.starts_with(&storage.root) {
                        found.push(format!(
                            "Podman has its volumes outside of its storage there, in {}",
                            storage.volumes.display()
                        ));
                    }
                }
            }
            Ok::<_, EngineError>(found)
        };
        asking.await.unwrap_or_else(|error: EngineError| vec![error.to_string()])
    }

    async fn image_bytes(&self, config: &ContainerConfig) -> Result<u64, EngineError> {
        self.bytes_of_image(config).await
    }

    async fn lacks_image(&self, config: &ContainerConfig) -> Result<Option<Vec<String>>, EngineError> {
        self.lacking(config).await
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
        let (kept, definition) = self.kept(config)?;
        let storage = self.storage(&config.name).await?;
        let waiting = arrival::waiting_in(&storage.root, &kept.id);
        let record =
            Record { id: kept.id.clone(), ours: true, waiting: Some(waiting.clone()), ..Record::default() };
        // First, so that what is made is removed.
        record.write(config)?;
        let failed = |source| io_error(&config.name, format!("create {}", waiting.display()), source);
        // What an earlier arrival has left would be taken for a part of this one.
        match fs::remove_dir_all(&waiting) {
            Err(error) if error.kind() != ErrorKind::NotFound => return Err(failed(error)),
            _ => {}
        }
        fs::create_dir_all(&waiting).map_err(failed)?;
        // Podman would take a volume of that name for it that somebody makes until it does.
        for (volume, _) in definition.volumes().unwrap_or_default() {
            let label = format!("{VOLUME_LABEL}={}", kept.id);
            let words = ["volume", "create", "--label", &label, "--", volume].map(OsStr::new).to_vec();
            let call = Call { name: &config.name, action: "make a volume of", words, settings: None };
            self.call(&call, SHORT).await?;
        }
        Ok(())
    }

    fn changed_files(&self, config: &ContainerConfig) -> Result<PathBuf, EngineError> {
        let record = Record::of(config)?;
        if let Some(waiting) = record.waiting {
            return Ok(waiting);
        }
        let tree = self.tree(&record.id);
        let failed =
            |source| io_error(&config.name, format!("bind its files into {}", tree.display()), source);
        files::bind(&record, &tree).map_err(failed)?;
        Ok(tree)
    }

    async fn run(&self, config: &ContainerConfig) -> Result<ContainerState, EngineError> {
        Record::of(config)?;
        self.about(config, "start", &["container", "start", "--"], REMOVAL).await?;
        self.take(config).await
    }

    async fn state(&self, config: &ContainerConfig) -> Result<ContainerState, EngineError> {
        let record = Record::of(config)?;
        let Some(life) = record.life else { return Err(EngineError::NotFound(config.name.clone())) };
        if process::lives(life.pid, life.start) {
            let (config, _) = self.placed(config)?;
            let status = match self.processes.cgroup(&config)?.is_frozen() {
                true => ContainerStatus::Paused,
                false => ContainerStatus::Running,
            };
            return Ok(ContainerState { status, pid: life.pid, exit_code: None });
        }
        let inspected = self.inspect(&config.name, &record.id).await?;
        let state = inspected.ok_or_else(|| EngineError::NotFound(config.name.clone()))?.state;
        let exit_code = (!state.running && !state.restarting).then_some(state.exit_code);
        Ok(ContainerState { status: ContainerStatus::Stopped, pid: 0, exit_code })
    }

    async fn wait(&self, config: &ContainerConfig) -> Result<i32, EngineError> {
        let io = |source| io_error(&config.name, "wait for its end".into(), source);
        let life = Record::of(config)?.life.ok_or_else(|| EngineError::NotFound(config.name.clone()))?;
        if let Some(main) =
            process::Handle::open(life.pid).map_err(io)?.filter(|_| process::lives(life.pid, life.start))
        {
            main.ended().await.map_err(io)?;
        }
        // conmon tells Podman when it has seen it.
        let begin = std::time::Instant::now();
        loop {
            let inspected = self.inspect(&config.name, &Record::of(config)?.id).await?;
            let state = inspected.ok_or_else(|| EngineError::NotFound(config.name.clone()))?.state;
            // One that has been started again has had an end, whose code Podman keeps until the next.
            if !state.running || state.pid != life.pid || begin.elapsed() > END_SEEN {
                return Ok(state.exit_code);
            }
            tokio::time::sleep(END_LOOK).await;
        }
    }

    async fn started_again(&self, config: &ContainerConfig) -> Result<(), EngineError> {
        let id = Record::of(config)?.id;
        let words = ["wait", "--condition", "running", "--", &id].map(OsStr::new).to_vec();
        let call = Call { name: &config.name, action: "tell the next start of", words, settings: None };
        let mut command = self.command(&call);
        let output = command.kill_on_drop(true).output().await;
        let output = output.map_err(|error| self.not_started(&call, &error))?;
        if !output.status.success() {
            return match self.inspect(&config.name, &id).await? {
                None => Err(EngineError::NotFound(config.name.clone())),
                Some(_) => Err(failed(&call, command::said(&output.stderr))),
            };
        }
        Ok(())
    }

    async fn signal(&self, config: &ContainerConfig, signal: i32) -> Result<(), EngineError> {
        Record::of(config)?;
        let number = signal.to_string();
        self.about(config, "signal", &["container", "kill", "--signal", &number, "--"], SHORT).await.map(drop)
    }

    async fn stop(&self, config: &ContainerConfig, limit: Duration) -> Result<(), EngineError> {
        Record::of(config)?;
        let seconds = limit.as_secs().to_string();
        let words = ["container", "stop", "--time", &seconds, "--"];
        self.about(config, "stop", &words, limit + REMOVAL).await.map(drop)
    }

    async fn freeze(&self, config: &ContainerConfig) -> Result<(), EngineError> {
        self.processes.freeze(&self.placed(config)?.0).await
    }

    async fn recover(&self, config: &ContainerConfig) -> Result<(), EngineError> {
        self.processes.recover(&self.placed(config)?.0).await
    }

    async fn thaw(&self, config: &ContainerConfig) -> Result<(), EngineError> {
        self.processes.thaw(&self.placed(config)?.0).await
    }

    async fn settle_log(&self, config: &ContainerConfig) -> Result<(), EngineError> {
        let (_, life) = self.placed(config)?;
        let begin = std::time::Instant::now();
        let io = |source| io_error(&config.name, "have its last output read".into(), source);
        while unread(life.conmon, life.pipes).map_err(io)? > 0 && begin.elapsed() < SETTLE_LIMIT {
            tokio::time::sleep(SETTLE_LOOK).await;
        }
        Ok(())
    }

    async fn dump_target(&self, config: &ContainerConfig) -> Result<DumpTarget, EngineError> {
        let (placed, life) = self.living(config).await?;
        let commands = self.processes.sessions(&placed, life.pid)?;
        if commands > 0 {
            return Err(EngineError::Occupied { name: config.name.clone(), commands });
        }
        let io = |path: &Path| {
            let action = format!("read {}", path.display());
            move |source| io_error(&config.name, action, source)
        };
        let path = PathBuf::from(format!("/proc/{}/mountinfo", life.pid));
        let mounts = fs::read_to_string(&path).map_err(io(&path))?;
        let (_, definition) = self.kept(config)?;
        let targets: Vec<_> =
            definition.volumes().unwrap_or_default().into_iter().map(|(_, target)| target).collect();
        let mut external_mounts: Vec<_> =
            external_mounts(&mounts, &targets).into_iter().map(|target| (target.clone(), target)).collect();
        for path in definition.masked() {
            let inside = PathBuf::from(format!("/proc/{}/root{path}", life.pid));
            if fs::symlink_metadata(inside).is_ok_and(|metadata| !metadata.is_dir()) {
                external_mounts.push((path.to_owned(), "/dev/null".to_owned()));
            }
        }
        let mut extra_files = vec![(restore::DESCRIPTORS.to_owned(), restore::descriptors(life.pipes))];
        let signals = config.directory.join(stop::FILE);
        match fs::read(&signals) {
            Ok(text) => extra_files.push((stop::FILE.to_owned(), text)),
            Err(error) if error.kind() == ErrorKind::NotFound => {}
            Err(error) => return Err(io(&signals)(error)),
        }
        Ok(DumpTarget {
            pid: life.pid,
            root: life.root,
            external_mounts,
            network_namespace: (config.network_namespace.clone(), NETWORK_KEY.to_owned()),
            freezer: self.processes.cgroup(&placed)?.freezer(),
            extra_files,
        })
    }

    async fn tmpfs(&self, config: &ContainerConfig) -> Result<Vec<Tmpfs>, EngineError> {
        let (placed, life) = self.living(config).await?;
        self.processes.tmpfs(&placed, life.pid).await
    }

    async fn restore_stopped(&self, request: &RestoreRequest) -> Result<ContainerState, EngineError> {
        // A source that knows of Podman's containers tells of their output in advance.
        Err(request.refused("its source has not told of its standard streams"))
    }

    async fn output_pipes(&self, config: &ContainerConfig) -> Result<OutputPipes, EngineError> {
        Ok(self.placed(config)?.1.pipes)
    }

    async fn begin_restore(
        &self,
        request: RestoreRequest,
        pipes: OutputPipes,
    ) -> Result<Box<dyn BegunRestore>, EngineError> {
        Ok(Box::new(self.begin(request, pipes).await?))
    }

    async fn cont(&self, config: &ContainerConfig, keep_stopped: &[u32]) -> Result<(), EngineError> {
        self.processes.cont(&self.placed(config)?.0, keep_stopped).await?;
        let record = Record::of(config)?;
        if let Some(left) = record.left.clone() {
            // It runs: its volumes are its own from here on.
            Record { left: None, ..record }.write(config)?;
            // Nobody waits for it, and what is not removed goes before the next arrival.
            tokio::task::spawn_blocking(move || fs::remove_dir_all(left));
        }
        Ok(())
    }

    async fn stopped_processes(&self, config: &ContainerConfig) -> Result<Vec<u32>, EngineError> {
        self.processes.stopped(&self.placed(config)?.0)
    }

    async fn departed(&self, config: &ContainerConfig) -> Result<(), EngineError> {
        match Record::read(config)? {
            Some(record) if !record.departed => Record { departed: true, ..record }.write(config),
            _ => Ok(()),
        }
    }

    async fn delete(&self, config: &ContainerConfig) -> Result<(), EngineError> {
        let Some(record) = Record::read(config)? else { return Ok(()) };
        let (place, tree) = (self.place(&record.id), self.tree(&record.id));
        let io = |path: &Path| {
            let action = format!("remove {}", path.display());
            move |source| io_error(&config.name, action, source)
        };
        if !record.ours {
            if let Err(error) = self.join_networks(config, &record.networks).await {
                tracing::error!(container = %config.name, %error, "it is not put back on its networks");
            }
            files::unbind(&record, &tree).map_err(io(&tree))?;
            return Record::remove(config);
        }
        self.end_import(config, &record).await?;
        let own_cgroup = self.own_cgroup(&record.id);
        arrival::unbind_cgroup(&own_cgroup).map_err(io(&own_cgroup))?;
        // Podman notes that it ends the container before it does, and so starts it no more by its policy.
        let removing = self.remove_container(config);
        tokio::pin!(removing);
        match tokio::time::timeout(HELP, &mut removing).await {
            Ok(removed) => removed?,
            Err(_) => {
                // Not every runtime kills what is frozen.
                if record.life.is_some() {
                    self.processes.kill(&self.placed(config)?.0).await?;
                }
                removing.await?;
            }
        }
        if record.life.is_some() {
            self.processes.kill(&self.placed(config)?.0).await?;
        }
        files::unbind(&record, &tree).map_err(io(&tree))?;
        self.remove_volumes(config, &record).await?;
        for path in record.waiting.iter().chain(&record.left).chain([&place]) {
            let removed = path.clone();
            let removed = tokio::task::spawn_blocking(move || fs::remove_dir_all(removed)).await;
            match removed.map_err(io::Error::other).and_then(|removed| removed) {
                Err(error) if error.kind() != ErrorKind::NotFound => return Err(io(path)(error)),
                _ => {}
            }
        }
        Record::remove(config)
    }

    async fn exec(&self, config: &ContainerConfig, request: &ExecRequest) -> Result<ExecIo, EngineError> {
        let record = Record::of(config)?;
        let mut words: Vec<&str> = vec!["exec", "--interactive"];
        for pair in &request.env {
            words.extend(["--env", pair]);
        }
        if let Some(user) = &request.user {
            words.extend(["--user", user]);
        }
        if let Some(workdir) = &request.workdir {
            words.extend(["--workdir", workdir]);
        }
        words.push(&record.id);
        words.extend(request.command.iter().map(String::as_str));
        let words = words.into_iter().map(OsStr::new).collect();
        let call = Call { name: &config.name, action: "run a command in", words, settings: None };
        let pipe =
            || io::pipe().map_err(|source| io_error(&config.name, "make pipes for a command".into(), source));
        let ((stdin_read, stdin), (stdout, stdout_write), (stderr, stderr_write)) =
            (pipe()?, pipe()?, pipe()?);
        let mut command = self.command(&call);
        let command = command.stdin(Stdio::from(stdin_read)).stdout(stdout_write).stderr(stderr_write);
        let child = command.spawn().map_err(|error| self.not_started(&call, &error))?;
        Ok(ExecIo { stdin: stdin.into(), stdout: stdout.into(), stderr: stderr.into(), child })
    }

    async fn exec_sessions(&self, config: &ContainerConfig) -> Result<usize, EngineError> {
        let (placed, life) = self.living(config).await?;
        self.processes.sessions(&placed, life.pid)
    }

    async fn processes(&self, config: &ContainerConfig) -> Result<Vec<u32>, EngineError> {
        match self.placed(config) {
            Ok((placed, _)) => self.processes.members(&placed),
            Err(EngineError::NotFound(_)) => Ok(Vec::new()),
            Err(error) => Err(error),
        }
    }

    async fn limit_cpu(&self, config: &ContainerConfig, millis: u32) -> Result<(), EngineError> {
        match self.placed(config) {
            Ok((placed, _)) => self.processes.limit_cpu(&placed, millis),
            Err(EngineError::NotFound(_)) => Ok(()),
            Err(error) => Err(error),
        }
    }

    async fn memory_current(&self, config: &ContainerConfig) -> Result<u64, EngineError> {
        self.processes.memory(&self.placed(config)?.0)
    }

    async fn memory_unshared(&self, config: &ContainerConfig) -> Result<u64, EngineError> {
        self.processes.memory_unshared(&self.placed(config)?.0).await
    }
}

/// Mounts of a container that its restore brings: its volumes, what Podman binds into it, and cgroups: each hierarchy of version
/// 1, as runc has it, and that of version 2. `/dev/shm` is bound, too, but is a tmpfs of the container alone: it moves as one.
fn external_mounts(mountinfo: &str, volumes: &[&str]) -> Vec<String> {
    let mut found = Vec::new();
    for line in mountinfo.lines() {
        let Some((mounted, filesystem)) = line.split_once(" - ") else { continue };
        let target = mounted.split(' ').nth(4).unwrap_or_default();
        let is_cgroup = filesystem.starts_with("cgroup ") && target.starts_with("/sys/fs/cgroup/")
            || filesystem.starts_with("cgroup2 ") && target == CGROUPS;
        if is_cgroup || BOUND.contains(&target) || volumes.contains(&target) {
            found.push(target.to_owned());
        }
    }
    found
}

/// Where a container sees cgroups.
const CGROUPS: &str = "/sys/fs/cgroup";

/// What Podman binds into containers.
const BOUND: &[&str] = &["/etc/hostname", "/etc/hosts", "/etc/resolv.conf", "/run/.containerenv"];

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
            external_mounts(text, &["/data"]),
            ["/etc/hosts", "/sys/fs/cgroup/pids", "/sys/fs/cgroup", "/data"]
        );
    }
}
