//! Starting and removing containers: the parts of [`Runc`] with more than one step.

use std::ffi::{OsStr, OsString};
use std::io::{self, ErrorKind};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::time::{Duration, Instant};

use nix::mount::{MntFlags, umount2};

use super::shim::{self, Files, Started, Starting};
use super::{Runc, last_error, message, program_error, provided, restore, spec};
use crate::container::{
    ContainerConfig, ContainerState, ContainerStatus, EngineError, OutputPipes, io_error,
};

/// How long the shim may take to end after its container; then it is killed. It ends in
/// milliseconds unless its disk hangs.
const SHIM_LIMIT: Duration = Duration::from_secs(5);

/// How long a start or restore that nobody waits for may take to come to its end.
const START_LIMIT: Duration = Duration::from_secs(3);

/// How often to look whether it has.
const START_LOOK: Duration = Duration::from_millis(5);

/// How long to wait for the shim before its container is looked at again.
const SHIM_LOOK: Duration = Duration::from_millis(100);

impl Runc {
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
        command.push(config.name.as_str().into());
        let started = match self.spawn_shim(config, &files, false, &command) {
            Ok(mut starting) => self.started(&mut starting).await,
            Err(reason) => Err(reason),
        };
        match started {
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

    /// The pipes that the container was started with as standard output and standard error. The numbers that they
    /// have in the main process now say nothing: a shell that redirects has others there for a moment.
    pub(super) fn pipes(&self, config: &ContainerConfig) -> Result<OutputPipes, EngineError> {
        let noted = Files::new(&config.directory).output_pipes();
        noted.map_err(|source| io_error(&config.name, "read the names of its output pipes".into(), source))
    }

    /// Kills and removes all there is of the container but its directory.
    pub(super) async fn remove(&self, config: &ContainerConfig) -> Result<(), EngineError> {
        let name = &config.name;
        let files = Files::new(&config.directory);
        let cgroup = self.processes.cgroup(config)?;
        let io = |action: &str| {
            let action = action.to_owned();
            move |source| io_error(name, action, source)
        };
        // A start or restore that nobody waits for any more may still be under way: then runc is the
        // shim's child, and members may come as long as it lives. It is given time to come to its
        // end: a killed CRIU leaves mounts behind.
        let begin = Instant::now();
        while !files.pid().exists() && begin.elapsed() < START_LIMIT {
            let Some(shim) = files.shim().await.map_err(io("find its shim"))? else { break };
            files.end_waiting().map_err(io("end a CRIU that waits for images"))?;
            if let Ok(ended) = tokio::time::timeout(START_LOOK, shim.ended()).await {
                ended.map_err(io("wait for its shim"))?;
            }
        }
        let begin = Instant::now();
        loop {
            self.processes.kill(config).await?;
            let Some(shim) = files.shim().await.map_err(io("find its shim"))? else { break };
            if begin.elapsed() > SHIM_LIMIT {
                tracing::warn!(container = %name, "the shim does not end with its container and is killed");
                shim.kill_group().map_err(io("kill its shim"))?;
            }
            if let Ok(ended) = tokio::time::timeout(SHIM_LOOK, shim.ended()).await {
                ended.map_err(io("wait for its shim"))?;
            }
        }
        restore::detach_empty_root(&config.rootfs).map_err(io("unmount its empty root"))?;
        detach_criu_mounts(&files).map_err(io("unmount what CRIU left"))?;
        let state = self.state_directory(name);
        // A failed restore leaves the root file system bound here, and runc would delete it.
        detach_all(&self.criu_root(name)).map_err(io("unmount runc's criu-root"))?;
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

    pub(super) async fn clean_after_failure(&self, config: &ContainerConfig) {
        if let Err(error) = self.remove(config).await {
            tracing::error!(container = %config.name, %error, "a container that failed to start was not removed");
        }
    }

    /// Removes an earlier life and writes the bundle.
    pub(super) async fn prepare(
        &self,
        config: &ContainerConfig,
        criu: Option<&Path>,
    ) -> Result<Files, EngineError> {
        self.remove(config).await?;
        let files = Files::new(&config.directory);
        let bundle = files.bundle();
        let shim = &self.config.shim;
        let hooks = match criu {
            None => vec![provided::cover(config, shim), provided::same(config, shim)],
            Some(_) => Vec::new(),
        };
        let json = spec::config_json(config, &provided::mounts(config, criu.is_some()), &hooks, criu)
            .map_err(|source| EngineError::Confinement { name: config.name.clone(), source })?
            .to_string();
        std::fs::create_dir_all(&self.config.root)
            .and_then(|()| std::fs::create_dir_all(&bundle))
            .and_then(|()| files.clear())
            .and_then(|()| provided::write(config))
            .and_then(|()| std::fs::write(bundle.join("config.json"), json))
            .map_err(|source| io_error(&config.name, format!("write {}", bundle.display()), source))?;
        Ok(files)
    }

    /// A runc command that makes a container, up to its last options and the name.
    pub(super) fn shim_command(&self, files: &Files, words: &[&str]) -> Vec<OsString> {
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

    pub(super) fn spawn_shim(
        &self,
        config: &ContainerConfig,
        files: &Files,
        without_huge_pages: bool,
        command: &[OsString],
    ) -> Result<Starting, String> {
        let log = Self::log_path(config);
        shim::spawn(&self.config.shim, files, &log, &self.path_variable, without_huge_pages, command)
            .map_err(|error| self.shim_failed(&error))
    }

    /// What a shim's command has made; if nothing, the reason.
    pub(super) async fn started(&self, starting: &mut Starting) -> Result<ContainerState, String> {
        match starting.word().await {
            Ok(Started::Pid(pid)) => {
                Ok(ContainerState { status: ContainerStatus::Running, pid, exit_code: None })
            }
            Ok(Started::Error(reason)) => Err(reason),
            Err(error) => Err(self.shim_failed(&error)),
        }
    }

    fn shim_failed(&self, error: &io::Error) -> String {
        format!("the shim {} failed: {error}", self.config.shim.display())
    }
}

/// Unmounts the cgroup trees that a killed CRIU leaves in its work directory.
fn detach_criu_mounts(files: &Files) -> io::Result<()> {
    let Some(work) = files.restore_work()? else { return Ok(()) };
    let prefix = work.join(".criu.").into_os_string();
    let mounts = std::fs::read("/proc/self/mountinfo")?;
    // The fifth field is the mount point. Paths with spaces, which are written as \\040, do not occur
    // below the prefix, and a prefix that has them finds nothing.
    let points = mounts.split(|&byte| byte == b'\n').filter_map(|line| line.split(|&b| b == b' ').nth(4));
    let below: Vec<_> = points.filter(|point| point.starts_with(prefix.as_bytes())).collect();
    // The last mounted is the first to go.
    below.iter().rev().try_for_each(|point| detach_all(Path::new(OsStr::from_bytes(point))))
}

/// Unmounts everything at a place.
pub(crate) fn detach_all(place: &Path) -> io::Result<()> {
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
