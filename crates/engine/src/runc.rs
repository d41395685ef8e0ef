//! [`Runc`]: containers by runc, each with a `godwit-shim` of its own.
//!
//! ```text
//! Runc ──▶ godwit-shim ──▶ runc run | restore ──▶ container
//!   └────▶ runc state, exec, delete; the cgroup's freezer and members directly
//! ```
//!
//! All state is on disk: runc's under its root, the rest in the container's directory, beside the notes of
//! [`Processes`]:
//!
//! | file | what |
//! |---|---|
//! | `bundle/config.json` | the OCI description |
//! | `container.log`, `.1` | the output, see [`log`] |
//! | `provided/` | name resolution files, see [`provided`] |
//! | `runc.log` | runc's messages of the last start |
//! | `restore.work` | where CRIU worked at the last restore |
//! | `inventory` | a FIFO for which CRIU waits, see [`restore`] |
//! | `init.pid`, `shim.lock`, `exit.json` | see `godwit-shim` |

pub(crate) mod lifecycle;
pub mod log;
pub(crate) mod provided;
pub(crate) mod restore;
pub(crate) mod rights;
mod session;
mod shim;
pub(crate) mod spec;

use std::ffi::OsString;
use std::io;
use std::path::{Path, PathBuf};
use std::process::{Output, Stdio};
use std::sync::Arc;

use async_trait::async_trait;
use godwit_names::ServiceName;
use serde::Deserialize;
use tokio::process::Command;

use crate::container::{
    BegunRestore, ContainerConfig, ContainerState, ContainerStatus, DumpTarget, Engine, EngineError, Mount,
    MountKind, OutputPipes, RestoreRequest, Tmpfs, Usage, io_error,
};
use crate::exec::{self, ExecIo, ExecRequest};
use crate::files;
use crate::processes::mounts::MountNamespace;
use crate::processes::{Processes, cgroup, process, stop};
use crate::sessions::{Session, Sessions};
use shim::Files;

/// The key under which runc's restore brings the network namespace.
pub(crate) const NETWORK_KEY: &str = "extRootNetNS";

/// Whether this machine has a cgroup controller that can limit the number of a service's processes.
#[must_use]
pub fn limits_processes() -> bool {
    cgroup::is_available("pids")
}

/// Which programs to use, and where runc keeps its state.
#[derive(Debug, Clone)]
pub struct RuncConfig {
    /// The runc binary.
    pub runc: PathBuf,
    /// The CRIU binary that runc shall restore with.
    pub criu: PathBuf,
    /// runc's state directory, one per node; on a file system that a reboot empties.
    pub root: PathBuf,
    /// The `godwit-shim` binary.
    pub shim: PathBuf,
    /// Where CRIU shall look first for the programs that it starts.
    pub programs: Option<PathBuf>,
}

/// Containers by runc.
#[derive(Debug, Clone)]
pub struct Runc {
    config: RuncConfig,
    /// `PATH` for runc: CRIU's directory comes before others, as runc takes `criu` from there.
    path_variable: OsString,
    processes: Processes,
    sessions: Sessions,
}

/// What godwit reads of runc's `state.json`: fields that runc has had under these names since its
/// first release. `runc state` tells the same, but costs 5 ms, half of them in frozen time.
#[derive(Debug, Deserialize)]
struct RuncState {
    #[serde(rename = "init_process_pid")]
    pid: u32,
    #[serde(rename = "init_process_start")]
    start: u64,
}

/// `PATH` for what starts CRIU: where it finds `criu`, and where CRIU shall look first for the programs that it starts.
pub(crate) fn path_variable(criu: &Path, programs: Option<&Path>) -> OsString {
    let mut path_variable = OsString::new();
    for directory in programs.into_iter().chain(criu.parent()) {
        path_variable.push(directory);
        path_variable.push(":");
    }
    let own = std::env::var_os("PATH").filter(|path| !path.is_empty());
    path_variable.push(own.unwrap_or("/usr/sbin:/usr/bin:/sbin:/bin".into()));
    path_variable
}

impl Runc {
    /// Containers by these programs.
    pub fn new(config: RuncConfig) -> Self {
        let path_variable = path_variable(&config.criu, config.programs.as_deref());
        let processes = Processes { criu: config.criu.clone() };
        Self { config, path_variable, processes, sessions: Sessions::default() }
    }

    /// Where runc binds the root filesystem for CRIU while it restores.
    fn criu_root(&self, name: &ServiceName) -> PathBuf {
        self.state_directory(name).join("criu-root")
    }

    /// The container's log in its directory; see [`log::LogReader`].
    pub fn log_path(config: &ContainerConfig) -> PathBuf {
        config.directory.join("container.log")
    }

    /// The older file of that, which a full one replaces, and that.
    #[must_use]
    pub fn log_paths(config: &ContainerConfig) -> [PathBuf; 2] {
        let log = Self::log_path(config);
        let mut older = log.clone().into_os_string();
        older.push(".1");
        [older.into(), log]
    }

    /// A runc command on this engine's root.
    fn runc(&self, words: &[&str]) -> Command {
        self.runc_at(&self.config.root, words)
    }

    /// A runc command on another root.
    fn runc_at(&self, root: &Path, words: &[&str]) -> Command {
        let mut command = Command::new(&self.config.runc);
        command
            .arg("--root")
            .arg(root)
            .args(["--log-format", "json"])
            .args(words)
            .env("PATH", &self.path_variable)
            .stdin(Stdio::null())
            .kill_on_drop(false);
        command
    }

    /// Runs a runc command to its end.
    async fn run_runc(&self, name: &ServiceName, words: &[&str]) -> Result<Output, EngineError> {
        let action = || format!("run {}", self.config.runc.display());
        self.runc(words).output().await.map_err(|source| io_error(name, action(), source))
    }

    /// The directory in which runc keeps a container.
    fn state_directory(&self, name: &ServiceName) -> PathBuf {
        self.config.root.join(name)
    }

    /// The container's main process as runc recorded it.
    fn runc_state(&self, name: &ServiceName) -> Result<RuncState, EngineError> {
        let path = self.state_directory(name).join("state.json");
        let failed = |source| io_error(name, format!("read {}", path.display()), source);
        match std::fs::read(&path) {
            Ok(text) => serde_json::from_slice(&text).map_err(|error| failed(error.into())),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Err(EngineError::NotFound(name.clone())),
            Err(error) => Err(failed(error)),
        }
    }

    /// The container's main process, which must live.
    async fn main_pid(&self, config: &ContainerConfig) -> Result<u32, EngineError> {
        match self.state(config).await?.pid {
            0 => Err(program_error(&config.name, "state", "its main process has ended".into())),
            pid => Ok(pid),
        }
    }
}

#[async_trait]
impl Engine for Runc {
    async fn run(&self, config: &ContainerConfig) -> Result<ContainerState, EngineError> {
        match self.state(config).await {
            Ok(state) if state.status != ContainerStatus::Stopped => return Ok(state),
            Ok(_) | Err(EngineError::NotFound(_)) => {}
            Err(error) => return Err(error),
        }
        self.start_new(config).await
    }

    async fn state(&self, config: &ContainerConfig) -> Result<ContainerState, EngineError> {
        let recorded = self.runc_state(&config.name)?;
        let exit_code = Files::new(&config.directory)
            .exit_code()
            .map_err(|source| io_error(&config.name, "read its exit record".into(), source))?;
        let lives = exit_code.is_none() && process::lives(recorded.pid, recorded.start);
        let status = match lives {
            false => ContainerStatus::Stopped,
            true if self.processes.cgroup(config)?.is_frozen() => ContainerStatus::Paused,
            true => ContainerStatus::Running,
        };
        Ok(ContainerState { status, pid: if lives { recorded.pid } else { 0 }, exit_code })
    }

    async fn wait(&self, config: &ContainerConfig) -> Result<i32, EngineError> {
        let name = &config.name;
        let files = Files::new(&config.directory);
        let io = |source| io_error(name, "wait for its end".into(), source);
        loop {
            // Looked for before the record: a shim that is gone now has written all it will.
            let shim = files.shim().await.map_err(io)?;
            if let Some(code) = files.exit_code().map_err(io)? {
                return Ok(code);
            }
            match shim {
                Some(shim) => shim.ended().await.map_err(io)?,
                None => {
                    // The shim was killed. Nobody learns the exit code, but the end can be seen.
                    let state = self.state(config).await?;
                    if let Some(main) = process::Handle::open(state.pid).map_err(io)? {
                        main.ended().await.map_err(io)?;
                    }
                    let reason = "it was killed, so the container's exit code is not known".into();
                    return Err(EngineError::Program {
                        program: "godwit-shim".into(),
                        verb: "wait".into(),
                        name: name.clone(),
                        reason,
                    });
                }
            }
        }
    }

    async fn signal(&self, config: &ContainerConfig, signal: i32) -> Result<(), EngineError> {
        let number = signal.to_string();
        let output = self.run_runc(&config.name, &["kill", &config.name, &number]).await?;
        if output.status.success() {
            return Ok(());
        }
        // Tells a container that is not there from a signal that is none.
        self.state(config).await?;
        Err(program_error(&config.name, "kill", message(&output.stderr)))
    }

    async fn freeze(&self, config: &ContainerConfig) -> Result<(), EngineError> {
        self.processes.freeze(config).await
    }

    async fn recover(&self, config: &ContainerConfig) -> Result<(), EngineError> {
        self.processes.recover(config).await
    }

    async fn thaw(&self, config: &ContainerConfig) -> Result<(), EngineError> {
        self.processes.thaw(config).await
    }

    async fn settle_log(&self, config: &ContainerConfig) -> Result<(), EngineError> {
        let settled = Files::new(&config.directory).settle_log().await;
        settled.map_err(|source| io_error(&config.name, "have its last output logged".into(), source))
    }

    async fn dump_target(&self, config: &ContainerConfig) -> Result<DumpTarget, EngineError> {
        let pid = self.main_pid(config).await?;
        let commands = self.processes.sessions(config, pid)?;
        if commands > 0 {
            return Err(EngineError::Occupied { name: config.name.clone(), commands });
        }
        let cgroup = self.processes.cgroup(config)?;
        let mut external_mounts = Vec::new();
        for mount in config.mounts.iter().chain(&provided::mounts(config, false)) {
            if let MountKind::Bind { .. } | MountKind::Volume { .. } = mount.kind {
                let inside = place_of(config, mount)?.to_string_lossy().into_owned();
                external_mounts.push((inside, mount.target.to_string_lossy().into_owned()));
            }
        }
        // What covers a file is brought by the restore.
        let mounts = MountNamespace::of(pid)
            .map_err(|source| io_error(&config.name, "look at its mounts".into(), source))?;
        for path in spec::MASKED_FILES.iter().filter(|path| mounts.has_file(path)) {
            external_mounts.push(((*path).to_owned(), provided::COVER_KEY.to_owned()));
        }
        let mut extra_files =
            vec![(restore::DESCRIPTORS.to_owned(), restore::descriptors(self.pipes(config)?))];
        match std::fs::read(config.directory.join(stop::FILE)) {
            Ok(signals) => extra_files.push((stop::FILE.to_owned(), signals)),
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            Err(error) => return Err(io_error(&config.name, format!("read {}", stop::FILE), error)),
        }
        Ok(DumpTarget {
            pid,
            root: config.rootfs.clone(),
            volumes: volumes(config)?,
            external_mounts,
            network_namespace: (config.network_namespace.clone(), NETWORK_KEY.to_owned()),
            freezer: cgroup.freezer(),
            extra_files,
        })
    }

    async fn tmpfs(&self, config: &ContainerConfig) -> Result<Vec<Tmpfs>, EngineError> {
        self.processes.tmpfs(config, self.main_pid(config).await?).await
    }

    async fn restore_stopped(&self, request: &RestoreRequest) -> Result<ContainerState, EngineError> {
        self.restore_new(request).await
    }

    async fn output_pipes(&self, config: &ContainerConfig) -> Result<OutputPipes, EngineError> {
        self.pipes(config)
    }

    async fn begin_restore(
        &self,
        request: RestoreRequest,
        pipes: OutputPipes,
    ) -> Result<Box<dyn BegunRestore>, EngineError> {
        Ok(Box::new(self.begin_new(request, pipes).await?))
    }

    async fn cont(&self, config: &ContainerConfig, keep_stopped: &[u32]) -> Result<(), EngineError> {
        self.processes.cont(config, keep_stopped).await?;
        self.sessions.begin(&config.name);
        Ok(())
    }

    async fn stopped_processes(&self, config: &ContainerConfig) -> Result<Vec<u32>, EngineError> {
        self.processes.stopped(config)
    }

    async fn delete(&self, config: &ContainerConfig) -> Result<(), EngineError> {
        self.remove(config).await
    }

    async fn exec(&self, config: &ContainerConfig, request: &ExecRequest) -> Result<ExecIo, EngineError> {
        let name = &config.name;
        let state = self.state(config).await?;
        if state.status != ContainerStatus::Running {
            return Err(program_error(name, "exec", "it does not run".into()));
        }
        if request.command.is_empty() {
            return Err(program_error(name, "exec", "no command was given".into()));
        }
        let process = spec::command(config, request)
            .map_err(|source| EngineError::User { name: name.clone(), source })?;
        let failed = |source| io_error(name, format!("run {}", self.config.runc.display()), source);
        let mut command = self.runc(&["exec"]);
        let file = exec::hand_over(&mut command, process.to_string().as_bytes()).map_err(failed)?;
        command.args(["--process", &file, name.as_str()]);
        exec::start(command, request.terminal).map_err(failed)
    }

    async fn exec_sessions(&self, config: &ContainerConfig) -> Result<usize, EngineError> {
        self.processes.sessions(config, self.main_pid(config).await?)
    }

    async fn start_session(
        &self,
        config: &ContainerConfig,
        request: &ExecRequest,
    ) -> Result<Option<Arc<Session>>, EngineError> {
        Runc::start_session(self, config, request).await
    }

    async fn sessions(&self, config: &ContainerConfig) -> Result<usize, EngineError> {
        self.count_sessions(config).await
    }

    fn attach(&self, config: &ContainerConfig, token: &str) -> Option<Arc<Session>> {
        self.sessions.attach(&config.name, token)
    }

    fn detach(&self, config: &ContainerConfig, token: &str) {
        self.sessions.detach(&config.name, token);
    }

    async fn hold_sessions(
        &self,
        config: &ContainerConfig,
    ) -> Result<Option<(String, Vec<u8>)>, EngineError> {
        let held = self.sessions.hold(&config.name).await;
        held.map_err(|source| {
            io_error(&config.name, "take what the terminals of its commands hold".into(), source)
        })
    }

    async fn release_sessions(&self, config: &ContainerConfig) {
        self.sessions.release(&config.name).await;
    }

    fn sessions_left(&self, config: &ContainerConfig, node: &str) {
        self.sessions.leave(&config.name, node);
    }

    async fn processes(&self, config: &ContainerConfig) -> Result<Vec<u32>, EngineError> {
        self.processes.members(config)
    }

    async fn limit_cpu(&self, config: &ContainerConfig, millis: u32) -> Result<(), EngineError> {
        self.processes.limit_cpu(config, millis)
    }

    async fn limit(&self, config: &ContainerConfig) -> Result<(), EngineError> {
        self.processes.limit(config).await
    }

    async fn usage(&self, config: &ContainerConfig) -> Result<Usage, EngineError> {
        self.processes.usage(config, self.main_pid(config).await?)
    }

    async fn memory_current(&self, config: &ContainerConfig) -> Result<u64, EngineError> {
        if self.processes.members(config)?.is_empty() {
            self.main_pid(config).await?;
        }
        self.processes.memory(config)
    }

    async fn memory_unshared(&self, config: &ContainerConfig) -> Result<u64, EngineError> {
        self.processes.memory_unshared(config).await
    }
}

/// Where a mount is in a container whose root filesystem is mounted.
fn place_of(config: &ContainerConfig, mount: &Mount) -> Result<PathBuf, EngineError> {
    let action = || format!("find the place of its mount at {}", mount.target.display());
    files::place_of(&config.rootfs, &mount.target).map_err(|source| io_error(&config.name, action(), source))
}

/// The places of a container's volumes, and their directories. Nothing is in one that is a file.
fn volumes(config: &ContainerConfig) -> Result<Vec<(PathBuf, PathBuf)>, EngineError> {
    let volumes = config.mounts.iter().filter_map(|mount| match &mount.kind {
        MountKind::Volume { name, file: None } => Some((mount, config.volume(name))),
        _ => None,
    });
    volumes.map(|(mount, directory)| Ok((place_of(config, mount)?, directory))).collect()
}

fn program_error(name: &ServiceName, verb: &str, reason: String) -> EngineError {
    EngineError::Program { program: "runc".into(), verb: verb.into(), name: name.clone(), reason }
}

/// The last error in runc's messages, or all of them as one line.
fn message(output: &[u8]) -> String {
    let text = String::from_utf8_lossy(output);
    text.lines().rev().find_map(error_message).unwrap_or_else(|| {
        let line = one_line(&text);
        if line.is_empty() { "it gave no reason".into() } else { line }
    })
}

/// The message of a line of runc's log when it is an error; some of runc 1.1.15 have several lines.
fn error_message(line: &str) -> Option<String> {
    let value: serde_json::Value = serde_json::from_str(line).ok()?;
    (value["level"] == "error").then(|| value["msg"].as_str().map(one_line))?
}

fn one_line(text: &str) -> String {
    let lines: Vec<_> = text.lines().map(str::trim).filter(|line| !line.is_empty()).collect();
    lines.join("; ")
}

/// The last error in runc's log file.
fn last_error(path: &Path) -> Option<String> {
    let text = std::fs::read(path).ok()?;
    String::from_utf8_lossy(&text).lines().rev().find_map(error_message)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_reason_is_the_last_error_of_runc() {
        let log = br#"{"level":"error","msg":"first","time":"t"}
{"level":"error","msg":"runc run failed: x","time":"t"}
{"level":"warning","msg":"later","time":"t"}"#;
        assert_eq!(message(log), "runc run failed: x");
        assert_eq!(message(b"plain\nwords\n"), "plain; words");
        assert_eq!(
            message(br#"{"level":"error","msg":"reset by peer\ncriu failed"}"#),
            "reset by peer; criu failed"
        );
        assert_eq!(message(b""), "it gave no reason");
    }
}
