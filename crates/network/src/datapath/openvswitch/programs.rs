//! Calling Open vSwitch's programs, and what they say when something is wrong.

use std::collections::HashMap;
use std::io::{self, ErrorKind};
use std::os::unix::process::ExitStatusExt;
use std::path::PathBuf;
use std::process::Stdio;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use serde_json::{Value, json};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::UnixStream;
use tokio::process::{Child, Command};

use crate::NetworkError;

/// How long a program may take. They take some milliseconds, and some more where ovs-vswitchd sets up an
/// interface.
const LIMIT: Duration = Duration::from_secs(10);
/// The oldest OpenFlow that changes several flows at once (`--bundle`).
const OPENFLOW: &str = "OpenFlow14";

/// Where the daemons of Debian's and Ubuntu's packages have their sockets.
const DEFAULT_RUN: &str = "/var/run/openvswitch";
/// Has the datapath forget all flows that it was given, which it asks for again with the next frame.
const PURGE: &str = "revalidator/purge";

/// Open vSwitch's programs, for the daemons whose sockets are in one directory.
#[derive(Debug)]
pub(super) struct Programs {
    run: Option<PathBuf>,
    /// An `ovs-ofctl` that waits for the next change of flows: to start it takes longer than the change, and
    /// a service that moves waits for that.
    waiting: Mutex<Option<Child>>,
}

impl Programs {
    pub(super) fn new(run: Option<PathBuf>) -> Self {
        Self { run, waiting: Mutex::default() }
    }

    /// Looks whether both daemons answer.
    pub(super) async fn check(&self) -> Result<(), NetworkError> {
        // Does not wait for ovs-vswitchd: tells of the database only.
        self.read("use the database", &["init"]).await?;
        let version = ["--target=ovs-vswitchd", "version"];
        match self.call("ovs-appctl", "ask ovs-vswitchd", &version, "").await {
            Err(NetworkError::OpenVswitch { message, .. }) => {
                Err(NetworkError::OpenVswitchStopped { server: "ovs-vswitchd", message })
            }
            other => other.map(|_| ()),
        }
    }

    /// Changes the database, and waits until ovs-vswitchd has done so. `action` completes "Open vSwitch
    /// could not …".
    pub(super) async fn change(&self, action: &str, arguments: &[&str]) -> Result<(), NetworkError> {
        self.call("ovs-vsctl", action, arguments, "").await.map(|_| ())
    }

    /// Reads the database.
    pub(super) async fn read(&self, action: &str, arguments: &[&str]) -> Result<String, NetworkError> {
        self.call("ovs-vsctl", action, &[&["--no-wait"], arguments].concat(), "").await
    }

    /// Which datapath a bridge has; `None` when there is no such bridge.
    pub(super) async fn datapath(&self, bridge: &str) -> Result<Option<String>, NetworkError> {
        let query = ["--if-exists", "get", "Bridge", bridge, "datapath_type"];
        let text = self.read("tell its datapath", &query).await?;
        Ok(Some(text.trim().trim_matches('"').to_owned()).filter(|kind| !kind.is_empty()))
    }

    /// The ports' OpenFlow numbers by the names of their interfaces; zero for one that could not be
    /// set up.
    pub(super) async fn numbers(&self) -> Result<HashMap<String, u32>, NetworkError> {
        let action = "list its ports";
        let query = ["--format=json", "--columns=name,ofport", "list", "Interface"];
        let text = self.read(action, &query).await?;
        parse_numbers(&text)
            .map_err(|error| NetworkError::OpenVswitch { action: action.into(), message: error.to_string() })
    }

    /// Changes flows of a bridge, all of them or, with an error, none; what holds when this returns. It must be
    /// the same bridge each time.
    pub(super) async fn set_flows(
        &self,
        action: &str,
        bridge: &str,
        flows: &str,
    ) -> Result<(), NetworkError> {
        let program = "ovs-ofctl";
        // Without names, which it would first ask the switch for.
        let arguments = ["--no-names", "--protocols", OPENFLOW, "--bundle", "add-flows", bridge, "-"];
        let waiting = self.waiting.lock().unwrap_or_else(PoisonError::into_inner).take();
        // One that was ended meanwhile is of no use.
        let waiting = waiting.and_then(|mut child| matches!(child.try_wait(), Ok(None)).then_some(child));
        let child = waiting.map_or_else(|| self.start(program, &arguments), Ok)?;
        finish(child, program, action, flows).await?;
        // The datapath goes on with what it remembers of the old flows until it is looked through, some
        // milliseconds later: it would carry frames where they must not go any more, or drop them. It is
        // asked directly, as ovs-appctl does it, since a service that moves waits for this.
        let asked = tokio::time::timeout(LIMIT, self.ask_switch(PURGE)).await;
        if !matches!(asked, Ok(Ok(()))) {
            // Its sockets may be elsewhere than is known here. The program knows, or says what is wrong.
            self.call("ovs-appctl", action, &["--target=ovs-vswitchd", PURGE], "").await?;
        }
        // It reads all of its input before it connects, and ends without it when this process does.
        let next = self.start(program, &arguments)?;
        *self.waiting.lock().unwrap_or_else(PoisonError::into_inner) = Some(next);
        Ok(())
    }

    /// One request to ovs-vswitchd in its own language, JSON-RPC over a unix socket whose name has its pid
    /// (ovs-appctl(8)).
    async fn ask_switch(&self, method: &str) -> io::Result<()> {
        let from_environment = || std::env::var_os("OVS_RUNDIR").map(PathBuf::from);
        let run = self.run.clone().or_else(from_environment).unwrap_or_else(|| DEFAULT_RUN.into());
        let pid = std::fs::read_to_string(run.join("ovs-vswitchd.pid"))?;
        let socket = run.join(format!("ovs-vswitchd.{}.ctl", pid.trim()));
        let mut stream = UnixStream::connect(socket).await?;
        let request = json!({"id": 0, "method": method, "params": []});
        stream.write_all(request.to_string().as_bytes()).await?;
        let mut answer = Vec::new();
        // It ends with the object, not with the connection.
        while stream.read_buf(&mut answer).await? > 0 {
            if let Ok(answer) = serde_json::from_slice::<Value>(&answer) {
                return if answer["error"].is_null() { Ok(()) } else { Err(io::Error::other("refused")) };
            }
        }
        Err(io::ErrorKind::UnexpectedEof.into())
    }

    /// The flows of one table of a bridge, without their counters.
    pub(super) async fn flows(&self, bridge: &str, table: &str) -> Result<String, NetworkError> {
        let arguments = ["--protocols", OPENFLOW, "--no-names", "--no-stats", "dump-flows", bridge, table];
        self.call("ovs-ofctl", "list the flows", &arguments, "").await
    }

    /// Which Open vSwitch it is, as it says itself.
    pub(super) async fn version(&self) -> Result<String, NetworkError> {
        let text = self.call("ovs-vsctl", "tell its version", &["--version"], "").await?;
        Ok(text.lines().next().unwrap_or_default().to_owned())
    }

    async fn call(
        &self,
        program: &'static str,
        action: &str,
        arguments: &[&str],
        input: &str,
    ) -> Result<String, NetworkError> {
        // Its own limit holds when this process is gone.
        let limit = format!("--timeout={}", LIMIT.as_secs());
        let child = self.start(program, &[&[limit.as_str()], arguments].concat())?;
        finish(child, program, action, input).await
    }

    fn start(&self, program: &'static str, arguments: &[&str]) -> Result<Child, NetworkError> {
        let mut command = Command::new(program);
        command.args(arguments).envs(self.run.iter().map(|run| ("OVS_RUNDIR", run)));
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).kill_on_drop(true);
        command.spawn().map_err(|source| NetworkError::NoOpenVswitch { program, source })
    }
}

/// Gives a program its input; what it answers.
async fn finish(
    mut child: Child,
    program: &'static str,
    action: &str,
    input: &str,
) -> Result<String, NetworkError> {
    let late =
        || NetworkError::OpenVswitchLate { program, action: action.to_owned(), seconds: LIMIT.as_secs() };
    let talk = async {
        if let Some(mut stdin) = child.stdin.take() {
            match stdin.write_all(input.as_bytes()).await {
                // It ended without reading; its own words say why.
                Err(error) if error.kind() == ErrorKind::BrokenPipe => {}
                other => other.map_err(NetworkError::system(format!("write to {program}")))?,
            }
        }
        child.wait_with_output().await.map_err(NetworkError::system(format!("read from {program}")))
    };
    let output = tokio::time::timeout(LIMIT, talk).await.map_err(|_| late())??;
    if output.status.signal() == Some(libc::SIGALRM) {
        return Err(late());
    }
    if !output.status.success() {
        return Err(refused(action, &String::from_utf8_lossy(&output.stderr)));
    }
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

fn refused(action: &str, said: &str) -> NetworkError {
    let last = said.lines().rev().map(str::trim).find(|line| !line.is_empty()).unwrap_or("it gave no reason");
    let message = ["ovs-vsctl: ", "ovs-ofctl: ", "ovs-appctl: "]
        .iter()
        .find_map(|prefix| last.strip_prefix(prefix))
        .unwrap_or(last)
        .to_owned();
    if said.contains("database connection failed") {
        return NetworkError::OpenVswitchStopped { server: "ovsdb-server", message };
    }
    if message.ends_with(" (Connection refused)") && message.contains(".mgmt: ") {
        return NetworkError::OpenVswitchStopped { server: "ovs-vswitchd", message };
    }
    let (unknown, missing) = (" is not a bridge or a socket", "no bridge named ");
    if let Some(bridge) = message.strip_suffix(unknown).or_else(|| message.strip_prefix(missing)) {
        return NetworkError::SwitchGone { bridge: bridge.to_owned() };
    }
    NetworkError::OpenVswitch { action: action.to_owned(), message }
}

/// Reads `{"data": [["gw0", 65534], ["gws…", ["set", []]]], "headings": ["name", "ofport"]}`.
fn parse_numbers(text: &str) -> Result<HashMap<String, u32>, serde_json::Error> {
    let table: Value = serde_json::from_str(text)?;
    let row = |row: &Value| {
        let number = row[1].as_i64().and_then(|number| u32::try_from(number).ok()).unwrap_or(0);
        Some((row[0].as_str()?.to_owned(), number))
    };
    Ok(table["data"].as_array().into_iter().flatten().filter_map(row).collect())
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn numbers_are_read_from_ovs_vsctls_own_output() {
        // As ovs-vsctl 3.1.0 printed it: a port, one that could not be opened, and one not yet set up.
        let text = r#"{"data":[["gw0",65534],["gws1",7],["gws2",-1],["gws3",["set",[]]]],"headings":["name","ofport"]}"#;
        let numbers = parse_numbers(text).unwrap();
        let expected = [("gw0", 65534), ("gws1", 7), ("gws2", 0), ("gws3", 0)];
        assert_eq!(numbers, HashMap::from(expected.map(|(name, number)| (name.to_owned(), number))));
    }

    #[test]
    fn what_is_wrong_is_told_by_the_programs_words() {
        let no_database =
            "ovs-vsctl: unix:/x/db.sock: database connection failed (No such file or directory)\n";
        let message = refused("make the bridge gw0", no_database).to_string();
        assert!(message.contains("ovsdb-server") && message.contains("/x/db.sock"), "{message}");
        let message = refused("open a port", "ovs-ofctl: gw0 is not a bridge or a socket\n").to_string();
        assert!(message.contains("the bridge gw0"), "{message}");
        let message = refused("plug in gws1", "ovs-vsctl: no bridge named gw0\n").to_string();
        assert!(message.contains("the bridge gw0"), "{message}");
        let said = "2026-01-01T00:00:00Z|00001|x|WARN|y\novs-ofctl: -:1: unknown keyword\n";
        let message = refused("open gws1", said).to_string();
        assert!(message.ends_with("could not open gws1: -:1: unknown keyword"), "{message}");
    }
}
