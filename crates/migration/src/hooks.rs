//! Programs of the operator's that are run at three points of a move, with the container's state on
//! their standard input (the OCI runtime specification's "state of a container").
//!
//! ```text
//!   source: pre-freeze ─▶ frozen ─▶ … ─▶ committed ─▶ destination: runs ─▶ post-resume
//!                             └────────▶ source: runs again ─▶ aborted
//! ```
//!
//! A service names its hooks; what runs is the file of that name in a directory of the operator's, on the node where
//! the point is reached. A peer can name hooks too, but can run nothing that is not in that directory.

use std::path::Path;
use std::process::Stdio;
use std::time::Duration;

use godwit_engine::ContainerStatus;
use serde_json::json;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::process::Command;

use crate::resources::NodeResources;
use crate::service::Service;
pub use crate::service::{HookPoint, Hooks};

/// How long a hook may take: the service may be waiting for it.
const LIMIT: Duration = Duration::from_secs(30);

/// How much of what it says of a failure is kept, bytes.
const MOST_WORDS: u64 = 4 << 10;

/// Why a hook did not do its work.
#[derive(Debug, thiserror::Error)]
pub enum HookError {
    /// The name is not valid, or nothing of that name may be run.
    #[error(
        "the hook {name:?} cannot be run: {reason}; hooks are programs in {directory} that belong to root and that only root can write to"
    )]
    Missing {
        /// The hook.
        name: String,
        /// What is wrong with it.
        reason: String,
        /// Where it should be.
        directory: String,
    },
    /// It could not be started, or its output not be read.
    #[error("the hook {name:?} could not be run")]
    Io {
        /// The hook.
        name: String,
        /// The system's answer.
        #[source]
        source: std::io::Error,
    },
    /// It took too long, and was killed.
    #[error("the hook {0:?} was killed after {limit} s", limit = LIMIT.as_secs())]
    Slow(String),
    /// Its exit code was not 0.
    #[error("the hook {name:?} failed ({status}): {words}")]
    Failed {
        /// The hook.
        name: String,
        /// How it ended.
        status: String,
        /// What it wrote to standard error.
        words: String,
    },
}

/// Whether a program of this name may be run as a hook.
pub fn check(directory: &Path, name: &str) -> Result<(), HookError> {
    use std::os::unix::fs::MetadataExt;
    let refused = |reason: &str| HookError::Missing {
        name: name.to_owned(),
        reason: reason.to_owned(),
        directory: directory.display().to_string(),
    };
    let plain = |b: u8| b.is_ascii_alphanumeric() || matches!(b, b'_' | b'.' | b'-');
    if name.is_empty() || name.len() > 255 || name.starts_with('.') || !name.bytes().all(plain) {
        return Err(refused("it is not a plain file name"));
    }
    for path in [directory, directory.join(name).as_path()] {
        let metadata =
            path.symlink_metadata().map_err(|error| refused(&format!("{}: {error}", path.display())))?;
        if metadata.uid() != 0 || metadata.mode() & 0o022 != 0 {
            return Err(refused(&format!("users other than root can write to {}", path.display())));
        }
    }
    let metadata = directory.join(name).metadata().map_err(|error| refused(&error.to_string()))?;
    if !metadata.is_file() || metadata.mode() & 0o111 == 0 {
        return Err(refused("it is not an executable file"));
    }
    Ok(())
}

/// Runs the service's hook for this point, if it has one.
pub(crate) async fn run(
    local: &NodeResources,
    service: &Service,
    moment: HookPoint,
    (migration, source, destination): (&str, &str, &str),
) -> Result<(), HookError> {
    let name = service.hooks.of(moment);
    if name.is_empty() {
        return Ok(());
    }
    check(&local.hooks, name)?;
    let config = local.config(service);
    let state = local.engine.state(&config).await;
    let (status, pid) = match state {
        Ok(state) if state.status != ContainerStatus::Stopped => ("running", state.pid),
        _ => ("stopped", 0),
    };
    let mut state = json!({
        "ociVersion": "1.0.2",
        "id": service.name,
        "status": status,
        "bundle": config.directory,
        "annotations": {
            "godwit.hook": moment.name(),
            "godwit.migration": migration,
            "godwit.source": source,
            "godwit.destination": destination,
            "godwit.network-namespace": config.network_namespace,
        },
    });
    if pid != 0 {
        state["pid"] = pid.into();
    }
    tracing::info!(migration, service = %service.name, hook = name, moment = moment.name(), "runs a hook");
    start(&local.hooks.join(name), name, &state.to_string()).await
}

async fn start(program: &Path, name: &str, state: &str) -> Result<(), HookError> {
    let io = |source| HookError::Io { name: name.to_owned(), source };
    let mut command = Command::new(program);
    command.env_clear().env("PATH", "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin");
    command.current_dir("/").stdin(Stdio::piped()).stdout(Stdio::null()).stderr(Stdio::piped());
    let mut child = command.kill_on_drop(true).spawn().map_err(io)?;
    let (stdin, stderr) = (child.stdin.take(), child.stderr.take());
    let talking = async {
        if let Some(mut stdin) = stdin {
            match stdin.write_all(state.as_bytes()).await {
                // It may not care.
                Err(error) if error.kind() == std::io::ErrorKind::BrokenPipe => {}
                other => other?,
            }
        }
        let mut words = Vec::new();
        if let Some(mut stderr) = stderr {
            (&mut stderr).take(MOST_WORDS).read_to_end(&mut words).await?;
            // It must not stand for what nobody reads.
            tokio::io::copy(&mut stderr, &mut tokio::io::sink()).await?;
        }
        Ok((child.wait().await?, words))
    };
    let ended = tokio::time::timeout(LIMIT, talking).await;
    let (status, words) = ended.map_err(|_| HookError::Slow(name.to_owned()))?.map_err(io)?;
    if status.success() {
        return Ok(());
    }
    let words = String::from_utf8_lossy(&words).trim().to_owned();
    Err(HookError::Failed { name: name.to_owned(), status: status.to_string(), words })
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    fn script(directory: &Path, name: &str, text: &str) {
        let path = directory.join(name);
        std::fs::write(&path, format!("#!/bin/sh\n{text}\n")).unwrap();
        std::fs::set_permissions(&path, PermissionsExt::from_mode(0o755)).unwrap();
    }

    /// Starts it as soon as no child of another test has a copy of the descriptor by which it was written.
    async fn started(path: &Path, name: &str, state: &str) -> Result<(), HookError> {
        loop {
            match start(path, name, state).await {
                Err(HookError::Io { source, .. })
                    if source.kind() == std::io::ErrorKind::ExecutableFileBusy =>
                {
                    tokio::task::yield_now().await;
                }
                other => return other,
            }
        }
    }

    #[tokio::test]
    async fn a_hook_gets_the_state_and_a_failing_ones_words_are_told() {
        let directory = tempfile::tempdir().unwrap();
        let at = directory.path();
        script(at, "keeps", &format!("cat > {}/seen", at.display()));
        script(at, "fails", "echo no such interface >&2; exit 3");
        started(&at.join("keeps"), "keeps", "{\"id\":\"web\"}").await.unwrap();
        assert_eq!(std::fs::read_to_string(at.join("seen")).unwrap(), "{\"id\":\"web\"}");
        let error = started(&at.join("fails"), "fails", "{}").await.unwrap_err().to_string();
        assert!(error.contains("\"fails\" failed (exit status: 3): no such interface"), "{error}");
    }

    #[test]
    fn hooks_of_a_service_of_an_older_version_are_read() {
        let text = r#"{"pre_freeze":"before","post_resume":"","kept":"stays"}"#;
        let hooks: Hooks = serde_json::from_str(text).unwrap();
        assert_eq!((hooks.of(HookPoint::PreFreeze), hooks.of(HookPoint::Aborted)), ("before", "stays"));
    }

    #[test]
    fn only_what_root_has_put_into_the_directory_is_run() {
        let directory = tempfile::tempdir().unwrap();
        let at = directory.path();
        script(at, "good", "");
        script(at, "writable", "");
        std::fs::set_permissions(at.join("writable"), PermissionsExt::from_mode(0o757)).unwrap();
        std::fs::write(at.join("data"), "").unwrap();
        check(at, "good").unwrap();
        for bad in ["", "..", "../good", "a/b", "missing", "writable", "data", ".hidden"] {
            let error = check(at, bad).unwrap_err().to_string();
            assert!(error.contains(&format!("{bad:?}")) && error.contains(at.to_str().unwrap()), "{error}");
        }
    }
}
