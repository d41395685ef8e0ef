//! The handle of a lab, and what can be seen of it.

use std::{
    collections::BTreeSet,
    fs, io,
    net::Ipv4Addr,
    os::{fd::AsFd, unix::process::CommandExt},
    path::PathBuf,
    process::{Command, ExitStatus},
};

use nix::sched::{CloneFlags, setns};
use serde::Serialize;

use crate::{
    conditions::Step,
    config::{
        CLIENT, LabConfig, Link, NetworkBackend, Paths, RUN_ROOT, STATE_ROOT, check_lab_name,
        parse_netns_name,
    },
    daemon, down,
    error::{Context, LabError},
    host, netns, openvswitch,
    registry::{self, Lock, Record},
    switch::{
        PortFigures, Request, WayStatus,
        control::{Answer, ask},
    },
    up,
};

/// So many steps of a trace fit into a request.
const STEPS: usize = 200;

/// A lab that is up.
#[derive(Clone, Debug)]
pub struct Lab {
    pub(crate) config: LabConfig,
    pub(crate) paths: Paths,
}

/// One host of a lab, as it is now.
#[derive(Clone, Debug, Serialize)]
pub struct HostStatus {
    /// Its name.
    pub name: String,
    /// Its underlay address.
    pub address: Ipv4Addr,
    /// Its network namespace.
    pub namespace: PathBuf,
    /// Whether the namespace is there.
    pub present: bool,
    /// Pid of its daemon; none for the client and where none runs.
    pub daemon: Option<i32>,
    /// The daemon's socket; none for the client.
    pub socket: Option<PathBuf>,
}

/// A lab, as it is now.
#[derive(Clone, Debug, Serialize)]
pub struct LabStatus {
    /// Its name.
    pub name: String,
    /// Whether it came up whole; false for what a crash left.
    pub complete: bool,
    /// Shape of its links.
    pub link: Option<Link>,
    /// Pid of the link program; none when it does not run, and then no frame passes.
    pub link_program: Option<i32>,
    /// Pairs of hosts between which nothing passes, see [`Lab::cut`].
    pub cuts: Vec<(String, String)>,
    /// Ways between two hosts that are not like the other links, see [`Lab::set_way`].
    pub ways: Vec<WayStatus>,
    /// Whether its nodes are meant to run daemons.
    pub daemons: bool,
    /// Its hosts: the nodes in order, then the client.
    pub hosts: Vec<HostStatus>,
}

/// Refuses callers that are not root.
pub(crate) fn need_root() -> Result<(), LabError> {
    if nix::unistd::geteuid().is_root() { Ok(()) } else { Err(LabError::NotRoot) }
}

impl Lab {
    /// Makes a lab. What was made is taken away again if that fails.
    ///
    /// # Errors
    /// The configuration is bad, the name is taken, the caller is not root, or a step failed.
    pub fn up(config: &LabConfig) -> Result<Self, LabError> {
        up::up(config)
    }

    /// Takes a lab down with everything in it, also one that is half made or broken.
    ///
    /// # Errors
    /// There is nothing of that name, or something of it could not be removed.
    pub fn down(name: &str) -> Result<(), LabError> {
        need_root()?;
        check_lab_name(name)?;
        down::down(name)
    }

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

    /// How a lab is.
    ///
    /// # Errors
    /// There is nothing of that name.
    pub fn status(name: &str) -> Result<LabStatus, LabError> {
        check_lab_name(name)?;
        let paths = Paths::new(name);
        let Some(record) = Record::read(&paths) else {
            if !Self::list().iter().any(|lab| lab == name) {
                return Err(LabError::Unknown(name.to_owned()));
            }
            return Ok(LabStatus {
                name: name.to_owned(),
                complete: false,
                link: None,
                link_program: None,
                cuts: Vec::new(),
                ways: Vec::new(),
                daemons: false,
                hosts: Vec::new(),
            });
        };
        let host = |(name, address): (String, Ipv4Addr)| {
            let node = name != CLIENT;
            HostStatus {
                address,
                namespace: paths.netns(&name),
                present: netns::identity(&paths.netns(&name)).is_some(),
                daemon: registry::process(&paths, &daemon::role(&name))
                    .filter(|_| node)
                    .map(|found| found.pid),
                socket: node.then(|| paths.socket(&name)),
                name,
            }
        };
        Ok(LabStatus {
            name: name.to_owned(),
            complete: record.complete,
            link: record.config.link,
            link_program: registry::process(&paths, up::LINK_ROLE).map(|found| found.pid),
            // A link program that does not answer cuts everything off; `link_program` tells.
            cuts: match ask(&paths.link_socket(), &Request::Cuts) {
                Ok(Answer::Cuts(cuts)) => cuts,
                _ => Vec::new(),
            },
            ways: match ask(&paths.link_socket(), &Request::Ways) {
                Ok(Answer::Ways(ways)) => ways,
                _ => Vec::new(),
            },
            daemons: record.config.daemons,
            hosts: record.config.hosts().into_iter().map(host).collect(),
        })
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

    /// A command that will run in a host's network namespace, with `GODWIT_LAB` set, and on a node
    /// `GODWIT_NODE` too (and `OVS_RUNDIR`, where it has an Open vSwitch). Everything else is as in [`Command`].
    ///
    /// # Errors
    /// There is no such host, or its namespace is gone.
    pub fn command(&self, host: &str, program: impl AsRef<std::ffi::OsStr>) -> Result<Command, LabError> {
        let path = self.namespace(host)?;
        let namespace = fs::File::open(&path).context("opening network namespace", path.display())?;
        let mut command = Command::new(program);
        command.env("GODWIT_LAB", self.name());
        if host == CLIENT {
            command.env_remove("GODWIT_NODE");
        } else {
            command.env("GODWIT_NODE", host);
            if self.config.network_backend == NetworkBackend::OpenVswitch {
                command.env(openvswitch::RUN_VARIABLE, self.paths.openvswitch(host));
            }
        }
        // SAFETY: setns is a bare system call, safe between fork and exec.
        unsafe {
            command.pre_exec(move || Ok(setns(namespace.as_fd(), CloneFlags::CLONE_NEWNET)?));
        }
        Ok(command)
    }

    /// Runs a command on a host with this process's standard streams, and waits for it.
    ///
    /// # Errors
    /// There is no such host, no command is given, or it cannot be started.
    pub fn exec(&self, host: &str, command: &[String]) -> Result<ExitStatus, LabError> {
        let (program, arguments) = command.split_first().ok_or_else(|| LabError::System {
            action: "running on",
            object: host.to_owned(),
            source: io::Error::new(io::ErrorKind::InvalidInput, "no command is given"),
        })?;
        self.command(host, program)?.args(arguments).status().context("running", program)
    }

    /// Runs `work` on a thread inside a host's network namespace: sockets made there stay there.
    ///
    /// # Errors
    /// There is no such host, or its namespace is gone.
    pub fn inside<T: Send>(&self, host: &str, work: impl FnOnce() -> T + Send) -> Result<T, LabError> {
        netns::inside(&self.namespace(host)?, work)
    }

    /// Lets nothing pass between two hosts, in either direction; others are not affected.
    ///
    /// # Errors
    /// They are not two hosts of the lab, or the link program does not run.
    pub fn cut(&self, a: &str, b: &str) -> Result<(), LabError> {
        self.ask(&Request::Cut(a.to_owned(), b.to_owned())).map(|_| ())
    }

    /// Undoes [`Lab::cut`].
    ///
    /// # Errors
    /// As for [`Lab::cut`].
    pub fn heal(&self, a: &str, b: &str) -> Result<(), LabError> {
        self.ask(&Request::Heal(a.to_owned(), b.to_owned())).map(|_| ())
    }

    /// Gives all access links another rate and delay, at once.
    ///
    /// # Errors
    /// The link program does not run, or the lab is just being taken down.
    pub fn set_link(&self, link: Option<Link>) -> Result<(), LabError> {
        let unknown = || LabError::Unknown(self.name().to_owned());
        let _lock = Lock::take(&self.paths, self.name())?.ok_or_else(unknown)?;
        for (host, _) in self.config.hosts() {
            host::reshape(&self.paths, &host, link)?;
        }
        self.ask(&Request::Link(link))?;
        let mut record = Record::read(&self.paths).ok_or_else(unknown)?;
        record.config.link = link;
        record.write(&self.paths)
    }

    /// Gives the way between two hosts conditions of its own, in both directions, which change along the
    /// steps from now on; without any step it is like the hosts' own links again.
    ///
    /// # Errors
    /// As for [`Lab::cut`].
    pub fn set_way(&self, a: &str, b: &str, steps: &[Step]) -> Result<(), LabError> {
        let (first, rest) = steps.split_at(steps.len().min(STEPS));
        self.ask(&Request::Way(a.to_owned(), b.to_owned(), first.to_vec()))?;
        for more in rest.chunks(STEPS) {
            self.ask(&Request::WayOn(a.to_owned(), b.to_owned(), more.to_vec()))?;
        }
        Ok(())
    }

    /// The ways that have conditions of their own.
    ///
    /// # Errors
    /// The link program does not run.
    pub fn ways(&self) -> Result<Vec<WayStatus>, LabError> {
        match self.ask(&Request::Ways)? {
            Answer::Ways(ways) => Ok(ways),
            other => Err(self.control_failed(format!("it answered {other:?}"))),
        }
    }

    /// What passed each host's access link.
    ///
    /// # Errors
    /// The link program does not run.
    pub fn figures(&self) -> Result<Vec<PortFigures>, LabError> {
        match self.ask(&Request::Figures)? {
            Answer::Figures(figures) => Ok(figures),
            other => Err(self.control_failed(format!("it answered {other:?}"))),
        }
    }

    fn ask(&self, request: &Request) -> Result<Answer, LabError> {
        match ask(&self.paths.link_socket(), request) {
            Ok(Answer::Refused(reason)) => Err(self.control_failed(reason)),
            Ok(answer) => Ok(answer),
            Err(error) => Err(self.control_failed(format!("the link program does not answer: {error}"))),
        }
    }

    fn control_failed(&self, reason: String) -> LabError {
        LabError::LinkControl { lab: self.name().to_owned(), reason }
    }

    fn node(&self, node: &str) -> Result<Ipv4Addr, LabError> {
        if node == CLIENT { Err(self.unknown(node)) } else { self.address(node) }
    }

    fn unknown(&self, host: &str) -> LabError {
        let hosts: Vec<_> = self.config.hosts().into_iter().map(|(name, _)| name).collect();
        LabError::UnknownHost { lab: self.name().to_owned(), host: host.to_owned(), hosts: hosts.join(", ") }
    }

    /// Starts a node's daemon that does not run, and waits until it answers.
    ///
    /// # Errors
    /// It runs already, ends early, or is not ready in time.
    pub fn start_node(&self, node: &str) -> Result<(), LabError> {
        self.node(node)?;
        daemon::serve(self, node)?;
        daemon::wait_ready(self, node, 1)
    }

    /// Ends a node's daemon by SIGKILL; its containers stay.
    ///
    /// # Errors
    /// There is no such node, or the daemon survives.
    pub fn stop_node(&self, node: &str) -> Result<(), LabError> {
        self.node(node)?;
        daemon::kill(self, node)
    }

    /// [`Lab::stop_node`] and [`Lab::start_node`].
    ///
    /// # Errors
    /// As for these.
    pub fn restart_node(&self, node: &str) -> Result<(), LabError> {
        self.stop_node(node)?;
        self.start_node(node)
    }
}
