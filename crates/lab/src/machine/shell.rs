//! What runs in a machine, by ssh: one connection for each machine, which also carries the socket of its daemon.
//!
//! The connection begins at 127.0.0.1 in the machine's network namespace, so the lab's links neither shape nor cut it.

use std::{
    ffi::OsString,
    fs::{self, File},
    io::Write as _,
    path::Path,
    process::{Command, Output, Stdio},
    thread,
    time::{Duration, Instant},
};

use super::store;
use crate::{
    error::{Context, LabError},
    handle::Lab,
};

/// How long a machine may take to boot, emulated on a busy host.
const BOOT: Duration = Duration::from_secs(900);
/// What it writes on its console then: `image` has put that into a unit.
const ANSWERS: &str = "machine: ssh answers";
/// Pause between two attempts to reach one that boots.
const PAUSE: Duration = Duration::from_millis(100);
/// Where its daemon listens in it.
const SOCKET: &str = "/run/godwit/godwitd.sock";

/// ssh to a machine, whoever has the connection; words of the command line follow.
fn ssh(lab: &Lab, node: &str) -> Result<Command, LabError> {
    let mut command = lab.command_beside(node, "ssh")?;
    command.args(options(lab, node));
    Ok(command)
}

fn options(lab: &Lab, node: &str) -> Vec<OsString> {
    let with = |name: &str, path: &Path| {
        let mut text = OsString::from(name);
        text.push(path);
        text
    };
    let mut words: Vec<OsString> =
        ["-F", "none", "-l", "root", "-p", "22", "-T"].map(OsString::from).to_vec();
    let mut settings: Vec<OsString> = [
        "BatchMode=yes",
        "IdentitiesOnly=yes",
        "StrictHostKeyChecking=yes",
        "HostKeyAlias=machine",
        "GlobalKnownHostsFile=none",
        "LogLevel=ERROR",
        // Until the server's first words, for which an emulated processor on a busy host takes more than ten seconds.
        "ConnectTimeout=30",
        "ServerAliveInterval=30",
        // The usual one takes an emulated processor a second.
        "KexAlgorithms=curve25519-sha256",
    ]
    .map(OsString::from)
    .to_vec();
    settings.push(with("IdentityFile=", &store::private_key()));
    settings.push(with("UserKnownHostsFile=", &lab.paths.machine_known_hosts(node)));
    settings.push(with("ControlPath=", &lab.paths.machine_connection(node)));
    for setting in settings {
        words.extend([OsString::from("-o"), setting]);
    }
    words
}

/// Waits until a machine that boots answers, and connects to it.
///
/// ssh does not try before: of a machine without a network the emulator takes connections, too, and then waits ever
/// longer between its own attempts to pass them on.
pub(crate) fn boot(lab: &Lab, node: &str, ended: impl Fn() -> bool) -> Result<(), LabError> {
    let begun = Instant::now();
    let console = lab.paths.machine_console(node);
    loop {
        // What a console says need not be text.
        let said = fs::read(&console).unwrap_or_default();
        if said.windows(ANSWERS.len()).any(|word| word == ANSWERS.as_bytes()) {
            return connect(lab, node, BOOT.saturating_sub(begun.elapsed()), ended);
        }
        if ended() || begun.elapsed() >= BOOT {
            return Err(super::node::failed(lab, node, "booting", "its server of ssh has not started"));
        }
        thread::sleep(PAUSE);
    }
}

/// Connects to a machine as soon as it answers; its daemon's socket is here from then on.
pub(crate) fn connect(
    lab: &Lab,
    node: &str,
    patience: Duration,
    ended: impl Fn() -> bool,
) -> Result<(), LabError> {
    let deadline = Instant::now() + patience;
    let (connection, socket) = (lab.paths.machine_connection(node), lab.paths.socket(node));
    loop {
        for left in [&connection, &socket] {
            // Of a connection to the machine as it was before it lost power.
            let _ = fs::remove_file(left);
        }
        let log = lab.paths.machine_log(node);
        let errors = File::create(&log).context("creating", log.display())?;
        let mut command = ssh(lab, node)?;
        // It goes to the background when it is connected and the socket is there.
        command.args(["-M", "-N", "-f", "-o", "ExitOnForwardFailure=yes", "-L"]);
        let mut forward = socket.clone().into_os_string();
        forward.push(":");
        forward.push(SOCKET);
        command.arg(forward).arg("127.0.0.1");
        let status = command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(errors).status();
        if status.context("running", "ssh")?.success() {
            return Ok(());
        }
        let said = fs::read_to_string(&log).unwrap_or_default();
        if ended() || Instant::now() >= deadline {
            return Err(super::node::failed(lab, node, "reaching", said.trim()));
        }
        thread::sleep(PAUSE);
    }
}

/// A command in a machine; arguments can be added to it as to any other.
///
/// ssh hands the words to a shell as one line, so they are quoted on the way.
pub(crate) fn command(
    lab: &Lab,
    node: &str,
    program: &std::ffi::OsStr,
    terminal: bool,
) -> Result<Command, LabError> {
    const QUOTE: &str = r#"words=(); while [ "$1" != -- ]; do words+=("$1"); shift; done; shift
        exec "${words[@]}" "$(printf '%q ' "$@")""#;
    let mut command = lab.command_beside(node, "bash")?;
    command.args(["-c", QUOTE, "bash", "ssh"]).args(options(lab, node));
    if terminal {
        command.arg("-tt");
    }
    command.args(["127.0.0.1", "--"]).arg(program);
    Ok(command)
}

/// Runs a script of bash in a machine, to its end; what it printed.
pub(crate) fn run(lab: &Lab, node: &str, action: &'static str, script: &str) -> Result<String, LabError> {
    let output = feed(lab, node, "bash -s", script.as_bytes())?;
    if output.status.success() {
        return Ok(String::from_utf8_lossy(&output.stdout).into_owned());
    }
    let said = [output.stdout, output.stderr].concat();
    Err(super::node::failed(lab, node, action, &crate::programs::last_lines(&String::from_utf8_lossy(&said))))
}

/// Copies a directory into a machine.
pub(crate) fn send(lab: &Lab, node: &str, from: &Path, to: &Path) -> Result<(), LabError> {
    let mut pack = Command::new("tar");
    pack.arg("-C").arg(from).args(["--sparse", "-cf", "-", "."]).stdin(Stdio::null()).stdout(Stdio::piped());
    let mut packing = pack.stderr(Stdio::piped()).spawn().context("starting", "tar")?;
    let mut unpack = command(lab, node, "sh".as_ref(), false)?;
    unpack.args(["-c", r#"mkdir -p "$1" && exec tar -C "$1" -xpf -"#, "sh"]).arg(to);
    if let Some(stream) = packing.stdout.take() {
        unpack.stdin(stream);
    }
    let unpacked = unpack.output().context("running", "ssh")?;
    let packed = packing.wait_with_output().context("running", "tar")?;
    for ended in [packed, unpacked] {
        if !ended.status.success() {
            let said = String::from_utf8_lossy(&ended.stderr).into_owned();
            return Err(super::node::failed(lab, node, "copying files to", said.trim()));
        }
    }
    Ok(())
}

/// Runs a line of the machine's shell with this as its standard input.
pub(crate) fn feed(lab: &Lab, node: &str, line: &str, input: &[u8]) -> Result<Output, LabError> {
    let mut command = ssh(lab, node)?;
    command.args(["127.0.0.1", line]);
    command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = command.spawn().context("starting", "ssh")?;
    let mut to = child.stdin.take();
    thread::scope(|scope| {
        // It may end without reading all: its exit status says what that means.
        scope.spawn(move || to.take().map(|mut to| to.write_all(input)));
        child.wait_with_output().context("running", "ssh")
    })
}
