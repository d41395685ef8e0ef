//! An Open vSwitch of a node's own: database and ovs-vswitchd in its network namespace, with their
//! sockets in a directory. They end with it, also when a test panics.
#![allow(dead_code, clippy::unwrap_used, missing_docs, unreachable_pub)]

use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use super::sh;

const SCHEMA: &str = "/usr/share/openvswitch/vswitch.ovsschema";

#[derive(Debug)]
pub struct OpenVswitch {
    pub run: PathBuf,
    namespace: String,
    server: Child,
    switch: Option<Child>,
}

impl OpenVswitch {
    pub fn start(namespace: &str, run: PathBuf) -> Self {
        let installed = Command::new("ovs-vsctl").arg("--version").output().is_ok();
        assert!(
            installed && Path::new(SCHEMA).exists(),
            "these tests need Open vSwitch: install the package openvswitch-switch (scripts/setup does)"
        );
        std::fs::create_dir_all(&run).unwrap();
        let place = run.display();
        sh(&format!("ovsdb-tool create {place}/conf.db {SCHEMA}"));
        let server = spawn(
            namespace,
            &run,
            &format!(
                "ovsdb-server {place}/conf.db --remote=punix:{place}/db.sock --pidfile={place}/ovsdb-server.pid"
            ),
        );
        let mut started = Self { run, namespace: namespace.to_owned(), server, switch: None };
        started.sh("ovs-vsctl --timeout=20 --retry --no-wait init");
        started.start_switch();
        started
    }

    /// Runs one of Open vSwitch's programs, which must succeed, and returns what it printed.
    pub fn sh(&self, line: &str) -> String {
        sh(&format!("OVS_RUNDIR={} {line}", self.run.display()))
    }

    pub fn start_switch(&mut self) {
        let place = self.run.display();
        let line = format!("ovs-vswitchd unix:{place}/db.sock --pidfile={place}/ovs-vswitchd.pid");
        self.switch = Some(spawn(&self.namespace, &self.run, &line));
        // As in a lab: few flows need few threads. The command ends when ovs-vswitchd has changed that.
        self.sh("ovs-vsctl --timeout=20 clear Open_vSwitch . other_config");
        self.sh("ovs-vsctl --timeout=20 set Open_vSwitch . \
             other_config:n-handler-threads=1 other_config:n-revalidator-threads=1");
    }

    /// Ends ovs-vswitchd, and its flows with it.
    pub fn end_switch(&mut self) {
        end(&mut self.switch.take().unwrap());
    }

    /// Ends the database's server.
    pub fn end_server(&mut self) {
        end(&mut self.server);
    }
}

impl Drop for OpenVswitch {
    fn drop(&mut self) {
        for child in self.switch.iter_mut().chain([&mut self.server]) {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

fn end(child: &mut Child) {
    child.kill().unwrap();
    child.wait().unwrap();
}

fn spawn(namespace: &str, run: &Path, line: &str) -> Child {
    let log = std::fs::File::options().create(true).append(true).open(run.join("log")).unwrap();
    let mut command = Command::new("ip");
    command.args(["netns", "exec", namespace]).args(line.split(' ')).arg("--no-chdir");
    command.env("OVS_RUNDIR", run).stdin(Stdio::null()).stdout(Stdio::null()).stderr(log);
    command.spawn().unwrap()
}
