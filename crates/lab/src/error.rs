//! What can go wrong with a lab, as sentences for the person who reads them.

use std::{io, path::PathBuf, process::ExitStatus};

/// Why a lab operation failed.
#[derive(Debug, thiserror::Error)]
pub enum LabError {
    /// The caller is not root.
    #[error("labs need root (network namespaces, mounts, cgroups); run this as root or with sudo")]
    NotRoot,
    /// A lab of that name is there, whole or in part.
    #[error("lab {0} exists already; take it down with `godwit lab down {0}` or choose another name")]
    Exists(String),
    /// No lab of that name.
    #[error("there is no lab {0}; `godwit lab up --name {0} --nodes a,b` makes one")]
    Unknown(String),
    /// Another process is bringing the lab up or taking it down.
    #[error("lab {0} is being brought up or taken down by another process; try again when that has ended")]
    Busy(String),
    /// The name cannot be a lab's.
    #[error("{0:?} cannot name a lab: use 1 to 24 lower-case letters, digits and hyphens, first a letter")]
    BadLabName(String),
    /// The name cannot be a node's.
    #[error(
        "{0:?} cannot name a lab node: use 1 to 12 lower-case letters and digits, first a letter; \
         `client`, `sw` and `link` are taken"
    )]
    BadNodeName(String),
    /// A node was named twice.
    #[error("node {0} is named twice; every node of a lab needs a name of its own")]
    DuplicateNode(String),
    /// Too few or too many nodes.
    #[error("a lab has 1 to 80 nodes, not {0}")]
    NodeCount(usize),
    /// The host is not in the lab.
    #[error("lab {lab} has no host {host}; its hosts are {hosts}")]
    UnknownHost {
        /// The lab.
        lab: String,
        /// The host that was asked for.
        host: String,
        /// The hosts there are, comma separated.
        hosts: String,
    },
    /// The machine description does not parse.
    #[error(
        "{given:?} is not a machine: {reason}; write debian12, debian13, ubuntu24.04 or arm64, where needed with an \
         architecture and options, such as debian12/amd64:cpu=Haswell:memory=2GiB:processors=1:disk=volatile"
    )]
    BadMachine {
        /// What was given.
        given: String,
        /// What is wrong with it.
        reason: String,
    },
    /// Machines need packages.
    #[error(
        "nodes that are machines install godwit from its packages: name their directory by --packages (make packages builds them)"
    )]
    NoPackages,
    /// The directory of packages does not have what a machine needs.
    #[error("the packages in {directory}: {reason}", directory = .directory.display())]
    MachinePackages {
        /// The directory.
        directory: PathBuf,
        /// What is wrong with it.
        reason: String,
    },
    /// A program that machines need is missing.
    #[error("machines need the program {name}; install the package {package} (scripts/setup --vm does)")]
    NoMachineProgram {
        /// The program.
        name: String,
        /// The package that has it.
        package: &'static str,
    },
    /// An image could not be made.
    #[error("the image of {system} machines could not be made: {output}\nIts log is {log}", log = .log.display())]
    MachineImage {
        /// Distribution and architecture.
        system: String,
        /// What was said last.
        output: String,
        /// All that was said.
        log: PathBuf,
    },
    /// The node is a network namespace.
    #[error(
        "node {node} of lab {lab} is not a machine: it has no power switch and no clock of its own; `godwit lab up --nodes {node}=debian13` makes one"
    )]
    NotMachine {
        /// The lab.
        lab: String,
        /// The node.
        node: String,
    },
    /// Something failed in a machine, or with it.
    #[error("{action} machine {node} of lab {lab} failed: {reason}; its console is {console}", console = .console.display())]
    Machine {
        /// The lab.
        lab: String,
        /// The node.
        node: String,
        /// What was tried, such as "booting".
        action: &'static str,
        /// What was said.
        reason: String,
        /// Where its console is.
        console: PathBuf,
    },
    /// The link description does not parse.
    #[error(
        "{given:?} is not a link: {reason}; write a rate and a one-way delay such as 1gbit,1ms or 20mbit,25ms"
    )]
    BadLink {
        /// What was given.
        given: String,
        /// What is wrong with it.
        reason: &'static str,
    },
    /// One of our own programs is missing.
    #[error("the program {name} is not beside {beside}; build it with `cargo build`", beside = .beside.display())]
    NoProgram {
        /// Name of the program.
        name: &'static str,
        /// Directory that was searched.
        beside: PathBuf,
    },
    /// A program of Open vSwitch is missing.
    #[error(
        "the lab needs the program {0} for Open vSwitch; install the package openvswitch-switch \
         (scripts/setup does), or use --network-backend kernel"
    )]
    NoOpenVswitch(String),
    /// A network backend that there is not.
    #[error("there is no network backend {0:?}; choose kernel or openvswitch")]
    BadBackend(String),
    /// One of our own programs ended early or failed.
    #[error("{program} of lab {lab} ended with {status}: {output}")]
    Program {
        /// The program and the node it worked for.
        program: String,
        /// The lab.
        lab: String,
        /// How it ended.
        status: ExitStatus,
        /// The last lines it wrote.
        output: String,
    },
    /// A node did not become ready in time.
    #[error("node {node} of lab {lab} was not ready after {seconds} s ({reason}); its log is {log}", log = .log.display())]
    NotReady {
        /// The node.
        node: String,
        /// The lab.
        lab: String,
        /// How long was waited.
        seconds: u64,
        /// What was seen last.
        reason: String,
        /// The daemon's log.
        log: PathBuf,
    },
    /// The daemon of a node refused a request.
    #[error("the daemon of node {node} refused {request}: {message}")]
    Refused {
        /// The node.
        node: String,
        /// What was asked.
        request: &'static str,
        /// Its answer.
        message: String,
    },
    /// What the way between two hosts shall be like cannot be read.
    #[error("'{given}' is not valid: {reason}")]
    BadConditions {
        /// What was given.
        given: String,
        /// What is wrong with it.
        reason: String,
    },
    /// The link program refused a request or does not answer.
    #[error("the links of lab {lab} could not be changed: {reason}")]
    LinkControl {
        /// The lab.
        lab: String,
        /// What happened.
        reason: String,
    },
    /// Netlink refused to configure a host.
    #[error("{action} in {host} failed: {reason}")]
    Netlink {
        /// What was tried.
        action: String,
        /// The host's namespace.
        host: String,
        /// The kernel's answer.
        reason: String,
    },
    /// A process of the lab survived SIGKILL.
    #[error(
        "process {pid} ({command}) of lab {lab} did not end {seconds} s after SIGKILL; see /proc/{pid}/stack, then run `godwit lab down {lab}` again"
    )]
    Unkillable {
        /// The lab.
        lab: String,
        /// Its pid.
        pid: i32,
        /// Its command name.
        command: String,
        /// How long was waited.
        seconds: u64,
    },
    /// A system call on a named thing failed.
    #[error("{action} {object} failed: {source}")]
    System {
        /// What was tried, such as "mounting".
        action: &'static str,
        /// On what.
        object: String,
        /// The kernel's answer.
        source: io::Error,
    },
    /// A rootfs cannot be built.
    #[error("the root filesystem needs {object}, which {problem}; {advice}")]
    Rootfs {
        /// The file or package.
        object: String,
        /// What is wrong.
        problem: String,
        /// What to do.
        advice: String,
    },
    /// The Redis that a workload talks to could not be reached or answered wrongly.
    #[error("the workload client at {address}: {problem}")]
    Workload {
        /// Address of the service.
        address: String,
        /// What happened.
        problem: String,
    },
}

/// Attaches what was tried, and on what, to an I/O error.
pub(crate) trait Context<T> {
    /// The error becomes [`LabError::System`].
    fn context(self, action: &'static str, object: impl ToString) -> Result<T, LabError>;
}

impl<T, E: Into<io::Error>> Context<T> for Result<T, E> {
    fn context(self, action: &'static str, object: impl ToString) -> Result<T, LabError> {
        self.map_err(|error| LabError::System { action, object: object.to_string(), source: error.into() })
    }
}
