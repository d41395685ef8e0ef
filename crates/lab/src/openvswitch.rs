//! Open vSwitch for a node of a lab: a database and an ovs-vswitchd of its own, in the node's network
//! namespace, with their sockets in the node's run directory. They end with the lab.

use std::{
    fs,
    path::Path,
    process::{Command, Stdio},
};

use crate::{
    error::{Context, LabError},
    handle::Lab,
    programs,
};

/// The layout of the database, as the packages of Debian and Ubuntu bring it.
const SCHEMA: &str = "/usr/share/openvswitch/vswitch.ovsschema";
/// Seconds until a daemon that starts must answer.
const PATIENCE: &str = "--timeout=20";

/// Starts a node's Open vSwitch, and waits until it answers.
pub(crate) fn start(lab: &Lab, node: &str) -> Result<(), LabError> {
    let run = lab.paths.openvswitch(node);
    fs::create_dir_all(&run).context("creating", run.display())?;
    let database = run.join("conf.db");
    let socket = run.join("db.sock");
    let mut tool = program(lab, node, "ovsdb-tool")?;
    finish(lab, node, "ovsdb-tool", tool.arg("create").arg(&database).arg(SCHEMA))?;

    let mut server = program(lab, node, "ovsdb-server")?;
    server.arg(&database).arg(prefixed("--remote=punix:", &socket));
    server.arg(prefixed("--pidfile=", &run.join("ovsdb-server.pid"))).arg("--no-chdir");
    serve(lab, node, "ovsdb", server)?;
    // Tries again until there is a socket.
    let mut control = program(lab, node, "ovs-vsctl")?;
    finish(lab, node, "ovs-vsctl", control.args([PATIENCE, "--retry", "--no-wait", "init"]))?;

    let mut switch = program(lab, node, "ovs-vswitchd")?;
    switch.arg(prefixed("unix:", &socket));
    switch.arg(prefixed("--pidfile=", &run.join("ovs-vswitchd.pid"))).arg("--no-chdir");
    serve(lab, node, "vswitchd", switch)?;
    // A lab's machine has better things to do than to look after a few flows with all its cores. The
    // command ends when ovs-vswitchd has done so.
    let threads = ["other_config:n-handler-threads=1", "other_config:n-revalidator-threads=1"];
    let mut control = program(lab, node, "ovs-vsctl")?;
    control.args([PATIENCE, "set", "Open_vSwitch", "."]).args(threads);
    finish(lab, node, "ovs-vsctl", &mut control)
}

fn program(lab: &Lab, node: &str, name: &'static str) -> Result<Command, LabError> {
    let mut command = lab.command(node, name)?;
    command.stdin(Stdio::null());
    Ok(command)
}

fn prefixed(prefix: &str, path: &Path) -> std::ffi::OsString {
    let mut text = std::ffi::OsString::from(prefix);
    text.push(path);
    text
}

fn serve(lab: &Lab, node: &str, role: &str, mut command: Command) -> Result<(), LabError> {
    command.stdout(Stdio::null());
    let log = lab.paths.openvswitch_log(node);
    programs::start(lab, &format!("{role}-{node}"), command, &log).map(|_| ()).map_err(missing)
}

fn finish(lab: &Lab, node: &str, name: &str, command: &mut Command) -> Result<(), LabError> {
    let output = command.output().context("starting", name).map_err(missing)?;
    if output.status.success() {
        return Ok(());
    }
    Err(LabError::Program {
        program: format!("{name} on node {node}"),
        lab: lab.name().to_owned(),
        status: output.status,
        output: String::from_utf8_lossy(&output.stderr).trim().to_owned(),
    })
}

/// Says which package brings a program that is not there.
fn missing(error: LabError) -> LabError {
    match error {
        LabError::System { object, source, .. } if source.kind() == std::io::ErrorKind::NotFound => {
            LabError::NoOpenVswitch(object)
        }
        other => other,
    }
}
