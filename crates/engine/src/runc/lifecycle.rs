//! Starting, restoring and removing containers: the parts of [`Runc`] with more than one step.

use std::ffi::OsString;
use std::io::{self, ErrorKind};
use std::path::Path;
use std::time::Duration;

use nix::mount::{MntFlags, umount2};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use super::cgroup::Cgroup;
use super::process::{self, Handle};
use super::shim::{self, Files, Started};
use super::{Runc, io_error, last_error, message, program_error, provided, spec};
use crate::container::{ContainerConfig, ContainerState, ContainerStatus, EngineError, RestoreRequest};

/// Options for CRIU at a restore that runc cannot give. They overrule what runc asks for.
///
/// - `leave-stopped`: nothing runs before [`Engine::cont`](crate::Engine::cont).
/// - `manage-cgroups ignore`: tasks stay in the cgroups that runc put CRIU into. Otherwise CRIU
///   moves them to the paths of the source, which on one kernel is the source's own frozen cgroup.
const CRIU_CONFIG: &str = "leave-stopped\nmanage-cgroups=ignore\nverbosity=2\n";

/// How often a CRIU that is waited for is looked at: whether it can only go on after a thaw.
const CRIU_LOOK: Duration = Duration::from_millis(500);

/// How long the shim may take to end after its container; then it is killed. It ends in
/// milliseconds unless its disk hangs.
const SHIM_LIMIT: Duration = Duration::from_secs(5);

/// How long killed processes may take to end. Only uninterruptible sleep takes longer than a moment.
const KILL_LIMIT: Duration = Duration::from_secs(20);

impl Runc {
    pub(super) fn cgroup(&self, config: &ContainerConfig) -> Result<Cgroup, EngineError> {
        Cgroup::new(&config.cgroup).map_err(|source| io_error(&config.name, "use its cgroup".into(), source))
    }

    /// Makes the container anew and starts it; on failure nothing is left.
    pub(super) async fn start_new(&self, config: &ContainerConfig) -> Result<ContainerState, EngineError> {
        let Some(first_word) = config.command.first() else {
            return Err(EngineError::Command {
                name: config.name.clone(),
                command: String::new(),
                reason: "no command was given".into(),
            });
        };
        let files = self.prepare(config, None).await?;
        let mut command = self.shim_command(&files, &["run"]);
        command.push(config.name.clone().into());
        match self.start_shim(config, &files, &command).await {
            Ok(state) => Ok(state),
            Err(reason) => {
                let reason = last_error(&files.runc_log()).unwrap_or(reason);
                self.clean_after_failure(config).await;
                Err(match command_fault(&reason, first_word) {
                    Some(fault) => EngineError::Command {
                        name: config.name.clone(),
                        command: first_word.clone(),
                        reason: fault,
                    },
                    None => program_error(&config.name, "run", reason),
                })
            }
        }
    }

    /// Restores the container with all processes stopped; on failure nothing is left.
    pub(super) async fn restore_new(&self, request: &RestoreRequest) -> Result<ContainerState, EngineError> {
        let config = &request.config;
        godwit_criu::repair::repair(&request.images).map_err(|error| EngineError::Restore {
            name: config.name.clone(),
            reason: error.to_string(),
            log: request.work.join("restore.log"),
        })?;
        let files = Files::new(&config.directory);
        let criu_config = files.criu_config();
        let files = self.prepare(config, Some(&criu_config)).await?;
        let log = request.work.join("restore.log");
        let io = |path: &Path, source| io_error(&config.name, format!("write {}", path.display()), source);
        std::fs::create_dir_all(&request.work).map_err(|source| io(&request.work, source))?;
        std::fs::write(&criu_config, CRIU_CONFIG).map_err(|source| io(&criu_config, source))?;
        let words = ["restore", "--tcp-established", "--file-locks", "--auto-dedup"];
        let mut command = self.shim_command(&files, &words);
        command.extend(["--image-path".into(), request.images.clone().into()]);
        command.extend(["--work-path".into(), request.work.clone().into(), config.name.clone().into()]);
        match self.start_shim(config, &files, &command).await {
            Ok(state) => Ok(state),
            Err(reason) => {
                let criu_log = godwit_criu::log::read_lossy(&log);
                let reason = godwit_criu::log::first_error(&criu_log)
                    .or_else(|| last_error(&files.runc_log()))
                    .unwrap_or(reason);
                self.clean_after_failure(config).await;
                Err(EngineError::Restore { name: config.name.clone(), reason, log })
            }
        }
    }

    /// The names of the main process's first three descriptors, which runc's restore wants beside
    /// the images: pipes are handed over by name.
    pub(super) fn descriptors(&self, config: &ContainerConfig, pid: u32) -> Result<Vec<u8>, EngineError> {
        let name = |fd: i32| {
            let path = format!("/proc/{pid}/fd/{fd}");
            match std::fs::read_link(&path) {
                Ok(target) => Ok(target.to_string_lossy().into_owned()),
                // The service closed it.
                Err(error) if error.kind() == ErrorKind::NotFound => Ok("/dev/null".to_owned()),
                Err(source) => Err(io_error(&config.name, format!("read {path}"), source)),
            }
        };
        let names = [name(0)?, name(1)?, name(2)?];
        Ok(serde_json::json!(names).to_string().into_bytes())
    }

    /// Sends SIGCONT to all members but those that were stopped before the dump.
    pub(super) fn continue_members(
        &self,
        config: &ContainerConfig,
        keep_stopped: &[u32],
    ) -> Result<(), EngineError> {
        let members = self.cgroup(config)?.members();
        if members.is_empty() {
            return Err(EngineError::NotFound(config.name.clone()));
        }
        let statuses: Vec<_> = members.into_iter().filter_map(process::status).collect();
        let parent = |pid: u32| statuses.iter().find(|s| s.pid == pid).map(|s| s.parent);
        let depth =
            |pid: u32| std::iter::successors(Some(pid), |&pid| parent(pid)).take(statuses.len()).count();
        let mut order: Vec<_> = statuses.iter().filter(|s| !keep_stopped.contains(&s.inner_pid)).collect();
        // Children first: a parent that waits for stopped children must not see them so.
        order.sort_by_key(|status| std::cmp::Reverse(depth(status.pid)));
        for status in order {
            let pid = i32::try_from(status.pid).map_or(Pid::from_raw(0), Pid::from_raw);
            match kill(pid, Signal::SIGCONT) {
                Ok(()) | Err(nix::Error::ESRCH) => {}
                Err(errno) => {
                    return Err(io_error(&config.name, format!("continue process {pid}"), errno.into()));
                }
            }
        }
        Ok(())
    }

    /// Freezes, in a way that CRIU can dump.
    ///
    /// A process that is stopped by a signal sleeps in another place than the v1 freezer's, and
    /// attaching to it there blocks until the freezer is thawed: CRIU would wait for ever, as it
    /// thaws after it has attached. Such a process is told to continue and to stop again while it
    /// is frozen. It does not run between the two, CRIU can attach, and finds the stop pending.
    pub(super) async fn freeze_members(&self, config: &ContainerConfig) -> Result<(), EngineError> {
        let cgroup = self.cgroup(config)?;
        let io = |source| io_error(&config.name, "freeze its processes".into(), source);
        cgroup.freeze().await.map_err(|error| match error.kind() {
            ErrorKind::NotFound => EngineError::NotFound(config.name.clone()),
            _ => io(error),
        })?;
        for pid in cgroup.members().into_iter().filter(|&pid| process::is_stopped_and_frozen(pid)) {
            let pid = Pid::from_raw(i32::try_from(pid).map_err(|error| io(io::Error::other(error)))?);
            for signal in [Signal::SIGCONT, Signal::SIGSTOP] {
                kill(pid, signal).map_err(|errno| io(errno.into()))?;
            }
        }
        Ok(())
    }

    /// Thaws, but not before a CRIU that still works on the container has ended: it would put the
    /// freezer back to frozen afterwards.
    pub(super) async fn thaw_after_criu(&self, config: &ContainerConfig) -> Result<(), EngineError> {
        let name = &config.name;
        let cgroup = self.cgroup(config)?;
        let criu_name: Option<String> =
            self.config.criu.file_name().map(|name| name.to_string_lossy().chars().take(15).collect());
        let tracer = || {
            let statuses = cgroup.members().into_iter().filter_map(process::status);
            statuses.map(|s| s.tracer).find(|&pid| pid != 0 && process::command_name(pid) == criu_name)
        };
        let io = |source| io_error(name, "thaw its processes".into(), source);
        // This daemon's own CRIU, which may not have begun to trace yet, and an earlier daemon's.
        let criu_ended = async {
            for pid in cgroup.members() {
                godwit_criu::settled(pid).await;
            }
            while let Some(pid) = tracer() {
                if let Some(criu) = Handle::open(pid)? {
                    tracing::info!(container = %name, criu = pid, "waiting for CRIU to end before thawing");
                    criu.ended().await?;
                }
            }
            Ok(())
        };
        tokio::pin!(criu_ended);
        loop {
            match tokio::time::timeout(CRIU_LOOK, &mut criu_ended).await {
                Ok(ended) => break ended.map_err(io)?,
                // When it ends it puts the freezer back to frozen; the last thaw comes then.
                Err(_) if tracer().is_some_and(process::waits_to_attach) => cgroup.thaw().map_err(io)?,
                Err(_) => {}
            }
        }
        match cgroup.thaw() {
            Err(error) if error.kind() == ErrorKind::NotFound => Err(EngineError::NotFound(name.clone())),
            result => result.map_err(io),
        }
    }

    /// Kills and removes all there is of the container but its directory.
    pub(super) async fn remove(&self, config: &ContainerConfig) -> Result<(), EngineError> {
        let name = &config.name;
        if !super::is_name(name) {
            return Err(EngineError::NotFound(name.clone()));
        }
        let files = Files::new(&config.directory);
        let cgroup = self.cgroup(config)?;
        let io = |action: &str| {
            let action = action.to_owned();
            move |source| io_error(name, action, source)
        };
        tokio::time::timeout(KILL_LIMIT, kill_members(&cgroup))
            .await
            .unwrap_or_else(|_| Err(io::Error::new(ErrorKind::TimedOut, "a killed process does not end")))
            .map_err(io("kill its processes"))?;
        if let Some(shim) = files.shim().map_err(io("find its shim"))? {
            if tokio::time::timeout(SHIM_LIMIT, shim.ended()).await.is_err() {
                tracing::warn!(container = %name, "the shim did not end with its container and is killed");
                shim.kill().map_err(io("kill its shim"))?;
            }
            shim.ended().await.map_err(io("wait for its shim"))?;
        }
        let state = self.state_directory(name);
        // A failed restore leaves the root file system bound here, and runc would delete it.
        detach_all(&state.join("criu-root")).map_err(io("unmount runc's criu-root"))?;
        if state.exists() {
            let output = self.run_runc(name, &["delete", "--force", name]).await?;
            if !output.status.success() {
                return Err(program_error(name, "delete", message(&output.stderr)));
            }
            // runc leaves what an interrupted start made: an empty fifo, a directory.
            remove_leftovers(&state).map_err(io("remove runc's state"))?;
        }
        cgroup.remove().map_err(io("remove its cgroups"))
    }

    async fn clean_after_failure(&self, config: &ContainerConfig) {
        if let Err(error) = self.remove(config).await {
            tracing::error!(container = %config.name, %error, "a container that failed to start was not removed");
        }
    }

    /// Removes an earlier life and writes the bundle.
    async fn prepare(&self, config: &ContainerConfig, criu: Option<&Path>) -> Result<Files, EngineError> {
        self.remove(config).await?;
        let files = Files::new(&config.directory);
        let bundle = files.bundle();
        let json = spec::config_json(config, &provided::mounts(config, criu.is_some()), criu).to_string();
        std::fs::create_dir_all(&self.config.root)
            .and_then(|()| std::fs::create_dir_all(&bundle))
            .and_then(|()| files.clear())
            .and_then(|()| provided::write(config))
            .and_then(|()| std::fs::write(bundle.join("config.json"), json))
            .map_err(|source| io_error(&config.name, format!("write {}", bundle.display()), source))?;
        Ok(files)
    }

    /// A runc command that makes a container, up to its last options and the name.
    fn shim_command(&self, files: &Files, words: &[&str]) -> Vec<OsString> {
        let mut command: Vec<OsString> = vec![
            self.config.runc.clone().into(),
            "--root".into(),
            self.config.root.clone().into(),
            "--log".into(),
            files.runc_log().into(),
            "--log-format".into(),
            "json".into(),
        ];
        command.extend(words.iter().map(OsString::from));
        command.extend(["--detach".into(), "--bundle".into(), files.bundle().into()]);
        command.extend(["--pid-file".into(), files.pid().into()]);
        command
    }

    async fn start_shim(
        &self,
        config: &ContainerConfig,
        files: &Files,
        command: &[OsString],
    ) -> Result<ContainerState, String> {
        let log = Self::log_path(config);
        match shim::start(&self.config.shim, files, &log, &self.path_variable, command).await {
            Ok(Started::Pid(pid)) => {
                Ok(ContainerState { status: ContainerStatus::Running, pid, exit_code: None })
            }
            Ok(Started::Error(reason)) => Err(reason),
            Err(error) => Err(format!("the shim {} failed: {error}", self.config.shim.display())),
        }
    }
}

/// Kills all members, frozen or not, and waits until there are none.
async fn kill_members(cgroup: &Cgroup) -> io::Result<()> {
    loop {
        let members = cgroup.members();
        if members.is_empty() {
            return Ok(());
        }
        let mut handles = Vec::new();
        for pid in members {
            handles.extend(Handle::open(pid)?);
        }
        for handle in &handles {
            handle.kill()?;
        }
        // Frozen processes die of a pending SIGKILL when they are thawed, before they run.
        match cgroup.thaw() {
            Err(error) if error.kind() != ErrorKind::NotFound => return Err(error),
            _ => {}
        }
        for handle in &handles {
            handle.ended().await?;
        }
        // An ended process stays a member until its parent, the shim, has reaped it.
        tokio::task::yield_now().await;
    }
}

/// Unmounts everything at a place.
fn detach_all(place: &Path) -> io::Result<()> {
    loop {
        match umount2(place, MntFlags::MNT_DETACH) {
            Ok(()) => {}
            // Not a mount point, or not there.
            Err(nix::Error::EINVAL | nix::Error::ENOENT) => return Ok(()),
            Err(errno) => return Err(errno.into()),
        }
    }
}

/// Removes files and empty directories in a directory, and itself; never what is below another.
fn remove_leftovers(directory: &Path) -> io::Result<()> {
    let entries = match std::fs::read_dir(directory) {
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(()),
        entries => entries?,
    };
    for entry in entries {
        let entry = entry?;
        if entry.file_type()?.is_dir() {
            std::fs::remove_dir(entry.path())?;
        } else {
            std::fs::remove_file(entry.path())?;
        }
    }
    std::fs::remove_dir(directory)
}

/// What runc says against the command itself, when that is what failed.
fn command_fault(reason: &str, command: &str) -> Option<String> {
    let (_, fault) = reason.split_once(&format!("exec: {command:?}: "))?;
    Some(fault.to_owned())
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn a_missing_command_is_told_from_other_failures() {
        let reason = "runc run failed: unable to start container process: \
                      exec: \"nope\": executable file not found in $PATH";
        assert_eq!(command_fault(reason, "nope").unwrap(), "executable file not found in $PATH");
        assert_eq!(command_fault("runc run failed: cgroup", "nope"), None);
    }

    #[test]
    fn leftovers_in_deeper_directories_are_not_touched() {
        let directory = tempfile::tempdir().unwrap();
        let state = directory.path().join("state");
        std::fs::create_dir_all(state.join("criu-root/etc")).unwrap();
        assert!(remove_leftovers(&state).is_err());
        assert!(state.join("criu-root/etc").exists());
    }
}
