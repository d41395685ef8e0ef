//! Calls of Podman, each with a limit of time: an engine that hangs must not keep a service from going on.

use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::process::{Output, Stdio};
use std::time::Duration;

use godwit_names::ServiceName;
use serde::Deserialize;
use tokio::process::Command;

use super::Podman;
use crate::container::EngineError;

/// How long a call may take that only asks, or changes a record.
pub(super) const SHORT: Duration = Duration::from_secs(20);

/// A container as `podman container inspect` tells it.
#[derive(Debug, Clone, Deserialize)]
#[serde(rename_all = "PascalCase")]
pub(super) struct Inspected {
    pub(super) id: String,
    pub(super) name: String,
    pub(super) state: InspectedState,
    #[serde(rename = "OCIRuntime")]
    pub(super) runtime: String,
    pub(super) graph_driver: GraphDriver,
    pub(super) host_config: HostConfig,
    #[serde(default)]
    pub(super) network_settings: NetworkSettings,
}

#[derive(Debug, Clone, Deserialize)]
#[serde(rename_all = "PascalCase")]
pub(super) struct InspectedState {
    pub(super) running: bool,
    pub(super) paused: bool,
    #[serde(default)]
    pub(super) restarting: bool,
    pub(super) pid: u32,
    #[serde(default)]
    pub(super) conmon_pid: u32,
    pub(super) exit_code: i32,
}

#[derive(Debug, Clone, Default, Deserialize)]
#[serde(rename_all = "PascalCase", default)]
pub(super) struct NetworkSettings {
    pub(super) networks: Option<BTreeMap<String, InspectedNetwork>>,
}

#[derive(Debug, Clone, Default, Deserialize)]
#[serde(default)]
pub(super) struct InspectedNetwork {
    #[serde(rename = "IPAddress")]
    pub(super) address: String,
}

#[derive(Debug, Clone, Deserialize)]
#[serde(rename_all = "PascalCase")]
pub(super) struct GraphDriver {
    pub(super) name: String,
    #[serde(default)]
    pub(super) data: GraphData,
}

#[derive(Debug, Clone, Default, Deserialize)]
#[serde(rename_all = "PascalCase", default)]
pub(super) struct GraphData {
    pub(super) upper_dir: PathBuf,
    pub(super) merged_dir: PathBuf,
}

#[derive(Debug, Clone, Deserialize)]
#[serde(rename_all = "PascalCase")]
pub(super) struct HostConfig {
    pub(super) auto_remove: bool,
}

/// Where Podman keeps containers, and how it makes their cgroups.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Storage {
    pub(super) root: PathBuf,
    pub(super) by_systemd: bool,
}

impl Storage {
    fn parse(text: &str) -> Option<Self> {
        let (manager, root) = text.trim_end().split_once(' ')?;
        let root = PathBuf::from(root);
        root.is_absolute().then_some(Self { root, by_systemd: manager == "systemd" })
    }
}

/// A call of Podman.
pub(super) struct Call<'a> {
    pub(super) name: &'a ServiceName,
    /// What Podman is asked to do, for the reader of an error.
    pub(super) action: &'static str,
    pub(super) words: Vec<&'a OsStr>,
    /// Settings in place of the node's.
    pub(super) settings: Option<&'a Path>,
}

impl Podman {
    /// A call that is not under way yet.
    pub(super) fn command(&self, call: &Call<'_>) -> Command {
        let mut command = Command::new(&self.config.podman);
        command.args(&call.words).env("PATH", &self.path_variable).stdin(Stdio::null());
        if let Some(settings) = call.settings {
            command.env("CONTAINERS_CONF", settings);
        }
        command
    }

    /// Why a call could not be made.
    pub(super) fn not_started(&self, call: &Call<'_>, error: &std::io::Error) -> EngineError {
        let program = self.config.podman.display();
        failed(call, format!("cannot run {program}: {error}; install Podman on this node"))
    }

    /// Makes a call, and waits for its end.
    pub(super) async fn call(&self, call: &Call<'_>, limit: Duration) -> Result<Output, EngineError> {
        let mut command = self.command(call);
        let under_way = command.kill_on_drop(true).output();
        match tokio::time::timeout(limit, under_way).await {
            Ok(Ok(output)) if output.status.success() => Ok(output),
            Ok(Ok(output)) => Err(failed(call, said(&output.stderr))),
            Ok(Err(error)) => Err(self.not_started(call, &error)),
            Err(_) => Err(failed(call, format!("it has not answered for {} s", limit.as_secs()))),
        }
    }

    /// What Podman knows of a container, by its ID or a name of its; nothing where there is none.
    pub(super) async fn inspect(
        &self,
        name: &ServiceName,
        container: &str,
    ) -> Result<Option<Inspected>, EngineError> {
        let words = ["container", "inspect", "--", container].map(OsStr::new).to_vec();
        let call = Call { name, action: "inspect", words, settings: None };
        let output = match self.call(&call, SHORT).await {
            Ok(output) => output,
            Err(EngineError::Keeper { reason, .. }) if reason.contains("no such container") => {
                return Ok(None);
            }
            Err(error) => return Err(error),
        };
        let unclear =
            |error: serde_json::Error| failed(&call, format!("its answer is not understood: {error}"));
        let found: Vec<Inspected> = serde_json::from_slice(&output.stdout).map_err(unclear)?;
        Ok(found.into_iter().next())
    }

    /// Podman's storage.
    pub(super) async fn storage(&self, name: &ServiceName) -> Result<Storage, EngineError> {
        let words =
            ["info", "--format", "{{.Host.CgroupManager}} {{.Store.GraphRoot}}"].map(OsStr::new).to_vec();
        let call = Call { name, action: "tell its storage for", words, settings: None };
        let output = self.call(&call, SHORT).await?;
        let told = String::from_utf8_lossy(&output.stdout);
        Storage::parse(&told).ok_or_else(|| failed(&call, format!("its answer is not understood: {told:?}")))
    }

    /// Whether Podman has an image of this ID.
    pub(super) async fn has_image(&self, name: &ServiceName, id: &str) -> Result<bool, EngineError> {
        let words = ["image", "inspect", "--format", "{{.Id}}", "--", id].map(OsStr::new).to_vec();
        let call = Call { name, action: "find the image of", words, settings: None };
        match self.call(&call, SHORT).await {
            Ok(output) => Ok(String::from_utf8_lossy(&output.stdout).trim() == id),
            Err(EngineError::Keeper { reason, .. })
                if reason.contains("image not known") || reason.contains("no such image") =>
            {
                Ok(false)
            }
            Err(error) => Err(error),
        }
    }
}

/// The error of a call.
pub(super) fn failed(call: &Call<'_>, reason: String) -> EngineError {
    EngineError::Keeper { keeper: "Podman", action: call.action, name: call.name.clone(), reason }
}

/// The error in what Podman said: its last line that is one.
pub(super) fn said(output: &[u8]) -> String {
    let text = String::from_utf8_lossy(output);
    let lines = || text.lines().map(str::trim).filter(|line| !line.is_empty());
    let error = lines().rev().find_map(|line| line.strip_prefix("Error: ")).or_else(|| lines().next_back());
    error.unwrap_or("it gave no reason").to_owned()
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn a_storage_has_a_manager_and_a_directory() {
        let found = Storage::parse("systemd /var/lib/my containers/storage\n").unwrap();
        assert_eq!(found, Storage { root: "/var/lib/my containers/storage".into(), by_systemd: true });
        assert!(!Storage::parse("cgroupfs /s").unwrap().by_systemd);
        assert_eq!(Storage::parse("systemd"), None);
        assert_eq!(Storage::parse("systemd s"), None);
    }

    #[test]
    fn the_reason_is_the_error_among_warnings() {
        let text = b"time=\"x\" level=warning msg=\"a\"\nError: no such container web\n\n";
        assert_eq!(said(text), "no such container web");
        assert_eq!(said(b"\n"), "it gave no reason");
    }
}
