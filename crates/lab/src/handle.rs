//! The handle of a lab: its hosts, where they are, and how a command runs on one.

use std::{
    collections::BTreeSet,
    fs,
    net::Ipv4Addr,
    os::{fd::AsFd, unix::process::CommandExt},
    path::PathBuf,
    process::Command,
};

use nix::sched::{CloneFlags, setns};

use crate::{
    config::{
        CLIENT, LabConfig, NetworkBackend, Paths, RUN_ROOT, STATE_ROOT, check_lab_name, parse_netns_name,
    },
    error::{Context, LabError},
    netns,
    registry::Record,
    spec::Machine,
};

/// The variable by which Open vSwitch's programs find their daemons' sockets.
const OPENVSWITCH_RUN: &str = "OVS_RUNDIR";

/// A lab that is up.
#[derive(Clone, Debug)]
pub struct Lab {
    pub(crate) config: LabConfig,
    pub(crate) paths: Paths,
}

/// Refuses callers that are not root.
pub(crate) fn need_root() -> Result<(), LabError> {
    if nix::unistd::geteuid().is_root() { Ok(()) } else { Err(LabError::NotRoot) }
}

impl Lab {
    /// The lab of that name.
    ///
    /// # Errors
    /// There is none, or only remains of one.
    pub fn open(name: &str) -> Result<Self, LabError> {
        check_lab_name(name)?;
        let paths = Paths::new(name);
        let record = Record::read(&paths).ok_or_else(|| LabError::Unknown(name.to_owned()))?;
        Ok(Self { config: record.config, paths })
    }

    /// Names of all labs, with those of which only remains are left.
    pub fn list() -> Vec<String> {
        let mut names = BTreeSet::new();
        for root in [STATE_ROOT, RUN_ROOT] {
            let entries = fs::read_dir(root).into_iter().flatten().flatten();
            names.extend(entries.filter_map(|entry| entry.file_name().into_string().ok()));
        }
        let spaces = netns::names();
        names.extend(spaces.iter().filter_map(|name| parse_netns_name(name)).map(|(lab, _)| lab.to_owned()));
        names.retain(|name| check_lab_name(name).is_ok());
        names.into_iter().collect()
    }

    /// The lab's name.
    pub fn name(&self) -> &str {
        &self.config.name
    }

    /// What it was made from.
    pub fn config(&self) -> &LabConfig {
        &self.config
    }

    /// Underlay address of a host.
    ///
    /// # Errors
    /// There is no such host.
    pub fn address(&self, host: &str) -> Result<Ipv4Addr, LabError> {
        self.config.address(host).ok_or_else(|| self.unknown(host))
    }

    /// Network namespace of a host.
    ///
    /// # Errors
    /// There is no such host.
    pub fn namespace(&self, host: &str) -> Result<PathBuf, LabError> {
        self.address(host).map(|_| self.paths.netns(host))
    }

    /// Unix socket of a node's daemon.
    ///
    /// # Errors
    /// There is no such node.
    pub fn socket(&self, node: &str) -> Result<PathBuf, LabError> {
        self.node(node).map(|_| self.paths.socket(node))
    }

    /// Log of a node's daemon.
    ///
    /// # Errors
    /// There is no such node.
    pub fn log(&self, node: &str) -> Result<PathBuf, LabError> {
        self.node(node).map(|_| self.paths.log(node))
    }

    /// Directory of a node's state.
    ///
    /// # Errors
    /// There is no such node.
    pub fn state(&self, node: &str) -> Result<PathBuf, LabError> {
        self.node(node).map(|_| self.paths.node_state(node))
    }

    /// The machine that a node is; none where it is a network namespace.
    pub fn machine(&self, host: &str) -> Option<&Machine> {
        self.config.machines.get(host)
    }

    /// A command in a host's network namespace, which a machine's emulator is in, too.
    pub(crate) fn command_beside(
        &self,
        host: &str,
        program: impl AsRef<std::ffi::OsStr>,
    ) -> Result<Command, LabError> {
        let path = self.namespace(host)?;
        let namespace = fs::File::open(&path).context("opening network namespace", path.display())?;
        let mut command = Command::new(program);
        command.env("GODWIT_LAB", self.name());
        if host == CLIENT {
            command.env_remove("GODWIT_NODE");
        } else {
            command.env("GODWIT_NODE", host);
            if self.config.network_backend == NetworkBackend::OpenVswitch {
                command.env(OPENVSWITCH_RUN, self.paths.openvswitch(host));
            }
        }
        // SAFETY: setns is a bare system call, safe between fork and exec.
        unsafe {
            command.pre_exec(move || Ok(setns(namespace.as_fd(), CloneFlags::CLONE_NEWNET)?));
        }
        Ok(command)
    }

    /// Runs `work` on a thread inside a host's network namespace: sockets made there stay there.
    ///
    /// # Errors
    /// There is no such host, or its namespace is gone.
    pub fn inside<T: Send>(&self, host: &str, work: impl FnOnce() -> T + Send) -> Result<T, LabError> {
        netns::inside(&self.namespace(host)?, work)
    }

    /// Underlay address of a node; the client is none.
    pub(crate) fn node(&self, node: &str) -> Result<Ipv4Addr, LabError> {
        if node == CLIENT { Err(self.unknown(node)) } else { self.address(node) }
    }

    fn unknown(&self, host: &str) -> LabError {
        let hosts: Vec<_> = self.config.hosts().into_iter().map(|(name, _)| name).collect();
        LabError::UnknownHost { lab: self.name().to_owned(), host: host.to_owned(), hosts: hosts.join(", ") }
    }
}
