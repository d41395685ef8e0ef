//! What can be done with a lab: make it, take it down, see how it is, change its links, run commands on its hosts,
//! start and end its daemons, and cut the power of machines.

use std::{
    io::{self, IsTerminal as _},
    net::Ipv4Addr,
    path::{Path, PathBuf},
    process::{Command, ExitStatus},
};

use serde::Serialize;

use crate::{
    conditions::Step,
    config::{CLIENT, LabConfig, Link, Paths, check_lab_name},
    daemon, down,
    error::{Context, LabError},
    handle::{Lab, need_root},
    host,
    machine::{self, shell},
    netns,
    registry::{self, Lock, Record},
    spec::Machine,
    switch::{
        PortFigures, Request, WayStatus,
        control::{Answer, ask},
    },
    up,
};

/// So many steps of a trace fit into a request.
const STEPS: usize = 200;

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
    /// What machine it is; none for a network namespace.
    pub machine: Option<String>,
    /// Pid of the machine's emulator; none where it has no power.
    pub emulator: Option<i32>,
    /// Pid of its daemon; none for the client, for a machine, and where none runs.
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
                machine: record.config.machines.get(&name).map(ToString::to_string),
                emulator: registry::process(&paths, &machine::node::role(&name)).map(|found| found.pid),
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

    /// Gives a node the programs of a directory, or those of the lab again. What runs on the node goes on with those that
    /// it was started from: a daemon until [`Lab::restart_node`], a shim and a pager to their end.
    ///
    /// # Errors
    /// There is no such node, it is a machine, there is no daemon in the directory, or the lab is just being taken down.
    pub fn install(&mut self, node: &str, programs: Option<&Path>) -> Result<(), LabError> {
        self.node(node)?;
        if self.machine(node).is_some() {
            let reason = "the programs of a machine come from packages; install others by `godwit lab exec`";
            return Err(machine::node::failed(self, node, "changing the programs of", reason));
        }
        let unknown = || LabError::Unknown(self.name().to_owned());
        let _lock = Lock::take(&self.paths, self.name())?.ok_or_else(unknown)?;
        let mut record = Record::read(&self.paths).ok_or_else(unknown)?;
        let of_nodes = &mut record.config.programs.of_nodes;
        match programs {
            Some(directory) => of_nodes.insert(node.to_owned(), directory.to_owned()),
            None => of_nodes.remove(node),
        };
        daemon::is_installed(&record.config, node)?;
        record.write(&self.paths)?;
        self.config = record.config;
        Ok(())
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

    /// A command that will run on a host. In a network namespace it has `GODWIT_LAB` set, and on a node
    /// `GODWIT_NODE` too (and `OVS_RUNDIR`, where it has an Open vSwitch), and everything else is as in [`Command`].
    /// In a machine it runs by ssh, of root, in its home; what is set of the environment and the directory stays here.
    ///
    /// # Errors
    /// There is no such host, or its namespace is gone.
    pub fn command(&self, host: &str, program: impl AsRef<std::ffi::OsStr>) -> Result<Command, LabError> {
        match self.machine(host) {
            Some(_) => shell::command(self, host, program.as_ref(), false),
            None => self.command_beside(host, program),
        }
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
        let mut command = match self.machine(host) {
            Some(_) => shell::command(self, host, program.as_ref(), io::stdin().is_terminal())?,
            None => self.command_beside(host, program)?,
        };
        command.args(arguments).status().context("running", program)
    }

    /// Copies a directory of this host into a machine, with owners and permissions.
    ///
    /// # Errors
    /// There is no such node, it is not a machine, or does not answer; or a file cannot be read or written.
    pub fn send(&self, node: &str, from: &Path, to: &Path) -> Result<(), LabError> {
        self.machine_of(node)?;
        shell::send(self, node, from, to)
    }

    /// Takes a machine's power away: it loses its memory, and what its kernel had not yet written to the disk. The disk
    /// keeps what was written, flushed or not, unless it is volatile: then it keeps what was flushed.
    ///
    /// # Errors
    /// There is no such node, it is not a machine, or it has no power.
    pub fn cut_power(&self, node: &str) -> Result<(), LabError> {
        self.machine_of(node)?;
        machine::node::cut_power(self, node)
    }

    /// Gives a machine power again: it boots from its disk, and answers when this returns. Its daemon may not yet.
    ///
    /// # Errors
    /// There is no such node, it is not a machine, it has power, or it does not come up.
    pub fn power_on(&self, node: &str) -> Result<(), LabError> {
        machine::node::power_on(self, node, self.machine_of(node)?)
    }

    /// Sets a machine's clock ahead by so many seconds, or back; it stays so when it boots again.
    ///
    /// # Errors
    /// There is no such node, it is not a machine, or does not answer; or the lab is just being taken down.
    pub fn shift_clock(&self, node: &str, seconds: i64) -> Result<(), LabError> {
        self.machine_of(node)?;
        let unknown = || LabError::Unknown(self.name().to_owned());
        let _lock = Lock::take(&self.paths, self.name())?.ok_or_else(unknown)?;
        machine::node::shift_clock(self, node, seconds)?;
        let mut record = Record::read(&self.paths).ok_or_else(unknown)?;
        if let Some(machine) = record.config.machines.get_mut(node) {
            machine.clock_ahead = machine.clock_ahead.saturating_add(seconds);
        }
        record.write(&self.paths)
    }

    fn machine_of(&self, node: &str) -> Result<&Machine, LabError> {
        self.node(node)?;
        self.machine(node)
            .ok_or_else(|| LabError::NotMachine { lab: self.name().to_owned(), node: node.to_owned() })
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
