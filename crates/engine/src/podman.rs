//! [`Podman`]: containers that Podman keeps, and godwit moves. Nothing of Podman is changed.
//!
//! ```text
//!  source                                             destination
//!  Podman ── describes the container ([`definition`]) ──────────────▶ Podman imports it as a checkpoint ([`arrival`])
//!  cgroup, freezer, CRIU: by godwit, as for its own   ──────────────▶ its runtime restores what godwit has
//!  podman rm, after the commit                                       podman ps, logs, exec, stop, … as if started there
//! ```
//! [`adoption`] finds a container, [`removal`] removes one, [`files`] has its files, [`image`] its image and [`output`] what
//! it writes.
//!
//! Podman is called by its command, since it needs no service to run for that. What godwit knows of a container is in its
//! [`record`]; a container without one is none of godwit's business, whatever its name or ID.

mod adoption;
mod arrival;
mod command;
mod definition;
mod files;
mod image;
mod output;
mod record;
mod removal;
mod settings;

pub use adoption::Found;

use std::ffi::{OsStr, OsString};
use std::fs;
use std::io::{self, ErrorKind};
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use bytes::Bytes;
use tokio::sync::{OnceCell, mpsc};

use crate::container::{
    BegunRestore, ContainerConfig, ContainerState, ContainerStatus, DumpTarget, Engine, EngineError, ExecIo,
    ExecRequest, Keeper, Kept, OutputPipes, RestoreRequest, Tmpfs, io_error,
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

/// How long Podman may take to end a container.
const REMOVAL: Duration = Duration::from_secs(30);

/// The label of a volume that was made for a container on its way here, with the container's ID.
const VOLUME_LABEL: &str = "godwit.arrival";

/// How long Podman may take to see that a container has ended, and how often to look.
const END_SEEN: Duration = Duration::from_secs(10);
const END_LOOK: Duration = Duration::from_millis(100);

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

impl Podman {
    /// Containers by these programs.
    #[must_use]
    pub fn new(config: PodmanConfig) -> Self {
        let path_variable = path_variable(&config.criu, config.programs.as_deref());
        let processes = Processes { criu: config.criu.clone() };
        Self { config, path_variable, processes, storage: Arc::default() }
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
        let pipes = output::pipes(pid, conmon).map_err(io("the output"))?;
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
        let read = output::is_read(life.conmon, life.pipes).await;
        read.map_err(|source| io_error(&config.name, "have its last output read".into(), source))
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
        self.remove(config).await
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
