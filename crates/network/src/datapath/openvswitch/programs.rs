//! Calling `ovs-vsctl`, and what it says when something is wrong.

use std::os::unix::process::ExitStatusExt;
use std::path::PathBuf;
use std::process::Stdio;
use std::time::Duration;

use tokio::process::Command;

use super::control::{self, Control, VERSION};
use crate::NetworkError;

/// How long it may take. It takes some milliseconds, and some more where ovs-vswitchd sets up an interface.
const LIMIT: Duration = Duration::from_secs(10);
const PROGRAM: &str = "ovs-vsctl";

/// Open vSwitch's program for its database, for the daemons whose sockets are in one directory.
#[derive(Debug)]
pub(super) struct Programs {
    run: Option<PathBuf>,
}

impl Programs {
    pub(super) fn new(run: Option<PathBuf>) -> Self {
        Self { run }
    }

    /// Looks whether both daemons answer.
    pub(super) async fn check(&self) -> Result<(), NetworkError> {
        // Does not wait for ovs-vswitchd: tells of the database only.
        self.read("use the database", &["init"]).await?;
        let asked = Control::new(control::directory(self.run.as_deref())).ask(VERSION).await;
        asked.map_err(|error| NetworkError::OpenVswitchStopped {
            server: "ovs-vswitchd",
            message: error.to_string(),
        })
    }

    /// Changes the database, and waits until ovs-vswitchd has done so. `action` completes "Open vSwitch
    /// could not …".
    pub(super) async fn change(&self, action: &str, arguments: &[&str]) -> Result<(), NetworkError> {
        self.call(action, arguments).await.map(|_| ())
    }

    /// Reads the database.
    pub(super) async fn read(&self, action: &str, arguments: &[&str]) -> Result<String, NetworkError> {
        self.call(action, &[&["--no-wait"], arguments].concat()).await
    }

    /// Which datapath a bridge has; `None` when there is no such bridge.
    pub(super) async fn datapath(&self, bridge: &str) -> Result<Option<String>, NetworkError> {
        let query = ["--if-exists", "get", "Bridge", bridge, "datapath_type"];
        let text = self.read("tell its datapath", &query).await?;
        Ok(Some(text.trim().trim_matches('"').to_owned()).filter(|kind| !kind.is_empty()))
    }

    /// The names of a bridge's ports, also of those that could not be set up.
    pub(super) async fn ports(&self, bridge: &str) -> Result<Vec<String>, NetworkError> {
        let text = self.read("list its ports", &["list-ports", bridge]).await?;
        Ok(text.lines().map(str::to_owned).collect())
    }

    /// Which Open vSwitch it is, as it says itself.
    pub(super) async fn version(&self) -> Result<String, NetworkError> {
        let text = self.call("tell its version", &["--version"]).await?;
        Ok(text.lines().next().unwrap_or_default().to_owned())
    }

    async fn call(&self, action: &str, arguments: &[&str]) -> Result<String, NetworkError> {
        let mut command = Command::new(PROGRAM);
        // Its own limit holds when this process is gone.
        command.arg(format!("--timeout={}", LIMIT.as_secs())).args(arguments);
        command.envs(self.run.iter().map(|run| ("OVS_RUNDIR", run)));
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).kill_on_drop(true);
        let started = command.spawn();
        let child = started.map_err(|source| NetworkError::NoOpenVswitch { program: PROGRAM, source })?;
        let late = || NetworkError::OpenVswitchLate {
            program: PROGRAM,
            action: action.to_owned(),
            seconds: LIMIT.as_secs(),
        };
        let output = tokio::time::timeout(LIMIT, child.wait_with_output()).await.map_err(|_| late())?;
        let output = output.map_err(NetworkError::system(format!("read from {PROGRAM}")))?;
        if output.status.signal() == Some(libc::SIGALRM) {
            return Err(late());
        }
        if !output.status.success() {
            return Err(refused(action, &String::from_utf8_lossy(&output.stderr)));
        }
        Ok(String::from_utf8_lossy(&output.stdout).into_owned())
    }
}

fn refused(action: &str, said: &str) -> NetworkError {
    let last = said.lines().rev().map(str::trim).find(|line| !line.is_empty()).unwrap_or("it gave no reason");
    let message = last.strip_prefix("ovs-vsctl: ").unwrap_or(last).to_owned();
    if said.contains("database connection failed") {
        return NetworkError::OpenVswitchStopped { server: "ovsdb-server", message };
    }
    if let Some(bridge) = message.strip_prefix("no bridge named ") {
        return NetworkError::SwitchGone { bridge: bridge.to_owned() };
    }
    NetworkError::OpenVswitch { action: action.to_owned(), message }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_wrong_is_told_by_the_programs_words() {
        let no_database =
            "ovs-vsctl: unix:/x/db.sock: database connection failed (No such file or directory)\n";
        let message = refused("make the bridge gw0", no_database).to_string();
        assert!(message.contains("ovsdb-server") && message.contains("/x/db.sock"), "{message}");
        let message = refused("plug in gws1", "ovs-vsctl: no bridge named gw0\n").to_string();
        assert!(message.contains("the bridge gw0"), "{message}");
        let said = "2026-01-01T00:00:00Z|00001|x|WARN|y\novs-vsctl: constraint violation\n";
        let message = refused("make gwt1 a port", said).to_string();
        assert!(message.ends_with("could not make gwt1 a port: constraint violation"), "{message}");
    }
}
