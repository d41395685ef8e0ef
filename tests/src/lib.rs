//! The bed of the end-to-end tests: a lab with real daemons, driven by the built programs as a user
//! would.
//!
//! ```text
//!   test process                     lab t-<test>-<pid>
//!   Bed::up ───────────────────────▶ nodes a, b (godwitd), host client
//!   Bed::godwit("a", ["ps"]) ──────▶ target/debug/godwit --node a ps
//!   Bed::migrate("redis", "a", "b")  the report as godwit prints it
//!   drop ──────────────────────────▶ everything is gone, or the test fails
//! ```
//!
//! What goes wrong in here ends the test: these helpers panic with a sentence.
#![allow(clippy::unwrap_used)]

pub mod again;
pub mod comparison;
pub mod crossing;
pub mod disks;
pub mod docker;
pub mod echo;
pub mod engine;
pub mod hold;
pub mod hooks;
pub mod ledger;
pub mod leftovers;
pub mod machines;
pub mod matrix;
pub mod mqtt;
pub mod pattern;
pub mod pcapng;
pub mod podman;
pub mod psql;
pub mod random_faults;
pub mod release;
pub mod sockets;
pub mod tier;
pub mod torture;
pub mod victim;
pub mod writer;

use std::{
    collections::BTreeMap,
    ffi::OsStr,
    fmt,
    net::{Ipv4Addr, SocketAddrV4, TcpStream},
    path::{Path, PathBuf},
    process::{Command, Stdio},
    sync::{Mutex, PoisonError},
    thread,
    time::{Duration, Instant},
};

use godwit_lab::{
    Lab, LabConfig, LabError,
    workload::{Preset, Workload},
};
use serde::{Deserialize, de::DeserializeOwned};

/// The host outside the nodes.
pub const CLIENT: &str = "client";
/// How long anything that should happen at once may take on a busy machine.
pub const PATIENCE: Duration = Duration::from_secs(30);
/// Seconds after which a command of godwit is ended: longer than its own time limits.
const COMMAND_SECONDS: u32 = 90;
/// The same for a move of a service: gigabytes that are written meanwhile take minutes on a busy machine.
const MOVE_SECONDS: u32 = 300;
/// The same on nodes that are machines, which may be emulated.
const MACHINE_SECONDS: u32 = 600;
/// The environment variable that says with which network backend the tests run: `kernel`, which is also
/// the default, or `openvswitch`.
pub const BACKEND_VARIABLE: &str = "GODWIT_TEST_BACKEND";
/// How often a move is tried that is aborted for what is said in [`BUSY`].
pub const TRIES: u32 = 5;
/// What is said of a node of which nothing was heard in the time for heartbeats.
const SILENT: &str = "was silent for";
/// Of what a check may warn for any service: PostgreSQL has shared memory, a copied directory stays where it is, a kernel
/// may not tell what is written, and a machine can be busy.
const DUE_WARNINGS: [&str; 6] = [
    "MiB are shared memory",
    "and is the service's no longer",
    "no time is predicted",
    "cannot be noticed",
    "it would be frozen for",
    "cannot be measured",
];
/// Reasons of aborted moves that overload alone can cause: a daemon that gets no processor for seconds is given up,
/// and a service that gets none does not accept its clients' connections.
pub const BUSY: [&str; 3] = [SILENT, "has closed the connection", "wait for the service to accept"];
/// Lines of a daemon's log that a failed test shows.
const LOG_TAIL: usize = 40;

/// A lab with nodes `a` and `b`, taken down at the end of the test, also after a panic.
#[derive(Debug)]
pub struct Bed {
    lab: Lab,
    scratch: tempfile::TempDir,
    /// The one that has the containers, if that is not godwit.
    engine: Option<engine::Engine>,
}

/// What a command of godwit said.
#[derive(Clone, Debug)]
pub struct Said {
    /// Its exit code.
    pub code: i32,
    /// Its standard output.
    pub stdout: String,
    /// Its standard error.
    pub stderr: String,
}

impl Said {
    /// The report of a `godwit --json migrate`, which comes after its steps.
    pub fn report(&self) -> Report {
        let last = self.stdout.lines().last().unwrap_or_default();
        serde_json::from_str(last)
            .unwrap_or_else(|error| panic!("the report of a migration: {error}: {self:?}"))
    }
}

/// Whether a move was aborted for no other reason than a busy machine.
pub fn is_busy(report: &Report) -> bool {
    report.outcome == "aborted" && victim::is_excused(&report.reason)
}

/// How long a move may be begun again that ends before it comes where a test waits for it.
pub const AGAIN: Duration = Duration::from_secs(120);

/// Whether a move was refused or aborted for a reason that passes: its machine is busy, or the destination is still putting away
/// what the move before has left.
pub fn is_passing(said: &str) -> bool {
    said.contains(PASSES) || victim::is_excused(said)
}

/// Of a destination that is still putting away what the move before has left.
const PASSES: &str = "try again in a moment";

/// The report of a migration; the fields that tests look at.
#[derive(Clone, Debug, Deserialize)]
pub struct Report {
    /// The service.
    pub name: String,
    /// `moved`, `aborted` or `lost`.
    pub outcome: String,
    /// Why it was aborted or lost.
    pub reason: String,
    /// The CRIU that dumped it, with those of our patches that it used.
    pub criu: String,
    /// The CRIU that restored, if it is another; 0.2.0 does not tell.
    #[serde(default)]
    pub criu_there: String,
    /// The instruction set of the executables under which it goes on, where these are the destination's own.
    #[serde(default)]
    pub set: String,
    /// What its processes took to come to rest for that.
    #[serde(default)]
    pub park_ms: f64,
    /// And the destination to rewrite the images.
    #[serde(default)]
    pub rewrite_ms: f64,
    /// Node it was on.
    pub source: String,
    /// Node it was to go to.
    pub destination: String,
    /// How its memory moved.
    pub mode: String,
    /// Why so, where godwit chose.
    pub why: String,
    /// Passes over the memory while it ran.
    pub rounds: u32,
    /// From the freeze at the source to the first instruction at the destination, in milliseconds.
    pub frozen_ms: f64,
    /// Of it, what images, files and pages took on the link.
    pub dump_transfer_ms: f64,
    /// The whole migration, in milliseconds.
    pub total_ms: f64,
    /// Bytes of all data connections.
    pub wire_bytes: u64,
    /// Of these, what the connections for pages carried.
    pub memory_wire_bytes: u64,
    /// Layers, changed files and logs.
    pub file_bytes: u64,
    /// Files that were there by a preparation; 0.2.0 does not tell.
    #[serde(default)]
    pub retained_file_bytes: u64,
    /// Why a preparation sent none; 0.2.0 does not tell.
    #[serde(default)]
    pub files_stay: String,
    /// Pages that had to cross, as bytes.
    pub page_bytes: u64,
    /// Of these, pages of shared memory before the freeze; 0.2.0 does not tell.
    #[serde(default)]
    pub shared_bytes: u64,
    /// And while it was frozen; 0.2.0 does not tell.
    #[serde(default)]
    pub shared_dump_bytes: u64,
    /// And what of it followed after the commit; 0.2.0 does not tell.
    #[serde(default)]
    pub shared_left_bytes: u64,
    /// Blobs of layers that the destination had from their registry; 0.2.0 does not tell.
    #[serde(default)]
    pub layers_from_registry_bytes: u64,
    /// Those that it had from the source; 0.2.0 does not tell.
    #[serde(default)]
    pub layers_from_source_bytes: u64,
    /// Bytes of CRIU's images.
    pub dump_bytes: u64,
    /// Bytes of pages that followed after it ran at the destination.
    pub faulted_bytes: u64,
    /// Pages that were waited for there.
    pub faults: u64,
    /// How writes were noticed at the source.
    pub tracker: String,
    /// What both nodes did in the frozen time; 0.2.0 does not tell.
    #[serde(default)]
    pub timeline: Vec<Span>,
}

impl Report {
    /// Whether this machine tells what is written to shared memory, as long as no process begins or ends.
    pub fn knows_shared_writes(&self) -> bool {
        self.tracker == "uffd" && Path::new("/sys/kernel/tracing/events/task").exists()
    }

    /// Whether this machine can have shared memory follow after the commit (from Linux 5.19 on, here).
    pub fn fills_shared() -> bool {
        let huge = std::fs::read_to_string("/sys/kernel/mm/transparent_hugepage/shmem_enabled");
        huge.is_ok_and(|setting| setting.contains("[never]") || setting.contains("[deny]"))
    }

    /// Whether CRIU was told the mappings of the processes, where this machine tells their flags.
    pub fn told_mappings(&self) -> bool {
        self.criu.contains("+external-smaps") || !Path::new("/sys/kernel/btf/vmlinux").exists()
    }
}

/// Something that a node did in the frozen time.
#[derive(Clone, Debug, Deserialize)]
pub struct Span {
    /// What.
    pub what: String,
    /// For how long, in milliseconds.
    pub ms: f64,
}

/// Reports of moves in a row; shown as a line of figures.
#[derive(Clone, Debug)]
pub struct Moves(pub Vec<Report>);

impl fmt::Display for Moves {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut frozen: Vec<_> = self.0.iter().map(|report| report.frozen_ms).collect();
        frozen.sort_by(f64::total_cmp);
        let (middle, last) = (frozen.len() / 2, frozen.len() - 1);
        let total: f64 = self.0.iter().map(|report| report.total_ms).sum();
        write!(
            f,
            "{} moves of {}: frozen {:.0} ms (median), {:.0} to {:.0} ms; {:.0} ms in all each",
            frozen.len(),
            self.0[0].name,
            frozen[middle],
            frozen[0],
            frozen[last],
            total / f64::from(u32::try_from(frozen.len()).unwrap()),
        )
    }
}

/// The directory of the built programs, beside which cargo puts the tests.
pub fn programs() -> PathBuf {
    let mut directory = std::env::current_exe().unwrap();
    directory.pop();
    if directory.ends_with("deps") {
        directory.pop();
    }
    for program in ["godwit", "godwitd", "godwit-shim", "godwit-runtime", "godwit-lab", "godwit-lab-link"] {
        let path = directory.join(program);
        assert!(
            path.is_file(),
            "{} is not built: run `cargo build --workspace --bins` first",
            path.display()
        );
    }
    directory
}

impl Bed {
    /// Brings up a lab of nodes `a` and `b` for the test of that name (at most 12 letters).
    pub fn up(test: &str) -> Self {
        Self::up_with(test, |_| {})
    }

    /// The same with changes to what the lab is made from.
    pub fn up_with(test: &str, change: impl FnOnce(&mut LabConfig)) -> Self {
        assert!(
            rustix::process::geteuid().is_root(),
            "the end-to-end tests make network namespaces and containers: run them as root"
        );
        is_its_own(test);
        sweep(test);
        // Whatever PID this has: a lab's name has 24 characters at most, and a PID is below 2^22.
        assert!(test.len() <= 15, "{test} is longer than 15 characters");
        let mut config = LabConfig::new(format!("t-{test}-{:x}", std::process::id()), ["a", "b"]);
        config.programs.directory = Some(programs());
        if let Ok(backend) = std::env::var(BACKEND_VARIABLE) {
            config.network_backend = backend.parse().unwrap_or_else(|error| panic!("{error}"));
        }
        change(&mut config);
        machines::wanted(&mut config);
        let engine = engine::Engine::wanted(&mut config);
        let lab = Lab::up(&config).unwrap_or_else(|error| panic!("{error}"));
        let mut bed = Self { lab, scratch: tempfile::tempdir().unwrap(), engine: None };
        bed.engine = engine.map(|mut engine| {
            engine.start(&bed);
            engine
        });
        if std::env::var_os(machines::VARIABLE).is_some() {
            machines::all_ready(&bed, &bed.lab.config().nodes[0]);
        }
        bed
    }

    /// Whether its containers are godwit's own, whose logs it has.
    pub fn has_logs(&self) -> bool {
        self.engine.is_none()
    }

    /// The lab.
    pub fn lab(&self) -> &Lab {
        &self.lab
    }

    /// Gives a node the programs of a directory, or those that are tested, see [`Lab::install`].
    pub fn install(&mut self, node: &str, programs: Option<&Path>) {
        self.lab.install(node, programs).unwrap_or_else(|error| panic!("{error}"));
    }

    /// A directory that goes away with the bed.
    pub fn scratch(&self) -> &Path {
        self.scratch.path()
    }

    /// A command of godwit for the daemon of a node.
    pub fn command(&self, node: &str, arguments: &[impl AsRef<OsStr>]) -> Command {
        self.command_within(self.seconds(COMMAND_SECONDS), node, arguments)
    }

    /// So many seconds, or as many as a machine may take.
    fn seconds(&self, usual: u32) -> u32 {
        if self.lab.config().machines.is_empty() { usual } else { MACHINE_SECONDS }
    }

    /// The same, ended after other than the usual time.
    pub fn command_within(&self, seconds: u32, node: &str, arguments: &[impl AsRef<OsStr>]) -> Command {
        let installed = self.lab.config().programs.of_nodes.get(node).cloned().unwrap_or_else(programs);
        let mut command = Command::new("timeout");
        command.args(["--kill-after=5", &seconds.to_string()]).arg(installed.join("godwit"));
        command.args(arguments);
        if crossing::is_wanted() && arguments.iter().any(|word| word.as_ref() == "migrate") {
            command.args(crossing::FLAGS);
        }
        command.env("GODWIT_LAB", self.lab.name()).env("GODWIT_NODE", node);
        command.stdin(Stdio::null());
        command
    }

    /// Runs a command of godwit, whatever comes of it. A move that is aborted because a busy machine has let a node be silent
    /// is tried again.
    pub fn godwit(&self, node: &str, arguments: &[impl AsRef<OsStr>]) -> Said {
        let moves =
            arguments.iter().any(|word| ["migrate", "place"].iter().any(|verb| word.as_ref() == *verb));
        let mut tries = 1..TRIES;
        loop {
            let said = Self::said(self.command(node, arguments));
            let is_silent = moves && said.code == 1 && said.stderr.contains(SILENT);
            if !is_silent || tries.next().is_none() {
                return said;
            }
            println!("tried again: {}", said.stderr);
        }
    }

    fn said(mut command: Command) -> Said {
        let output = command.output().unwrap();
        Said {
            code: output.status.code().unwrap_or(-1),
            stdout: String::from_utf8_lossy(&output.stdout).into_owned(),
            stderr: String::from_utf8_lossy(&output.stderr).into_owned(),
        }
    }

    /// Runs a command of godwit that must succeed, once no node is putting away what was there before; what it printed.
    pub fn done(&self, node: &str, arguments: &[&str]) -> String {
        let (begun, mut said) = (Instant::now(), self.godwit(node, arguments));
        while said.code != 0 && said.stderr.contains(PASSES) && begun.elapsed() < AGAIN {
            // No event tells when that node is done.
            thread::sleep(Duration::from_millis(200));
            said = self.godwit(node, arguments);
        }
        assert_eq!(said.code, 0, "godwit {arguments:?} on {node}: {}{}", said.stdout, said.stderr);
        said.stdout
    }

    /// Runs a command of godwit with `--json` that must succeed; the document it printed.
    pub fn json<T: DeserializeOwned>(&self, node: &str, arguments: &[&str]) -> T {
        let arguments: Vec<_> = ["--json"].iter().chain(arguments).copied().collect();
        let text = self.done(node, &arguments);
        serde_json::from_str(&text).unwrap_or_else(|error| panic!("godwit {arguments:?}: {error}: {text}"))
    }

    /// The main process of a service that runs on this node.
    pub fn pid(&self, node: &str, service: &str) -> u64 {
        self.json::<serde_json::Value>(node, &["inspect", service])["pid"].as_u64().unwrap()
    }

    /// Builds a workload's root filesystem in the scratch directory.
    pub fn build(&self, workload: Workload) -> Preset {
        let directory = self.scratch().join(format!("{workload:?}").to_lowercase());
        let preset = workload.build(directory).unwrap_or_else(|error| panic!("{error}"));
        if workload == Workload::Redis && crossing::is_wanted() {
            crossing::replace_redis(&preset);
        }
        // Of labs with machines all nodes are of one kind, but where a test does more by itself.
        match self.lab.config().nodes.iter().all(|node| machines::is_arm64(self, node)) {
            true => machines::for_arm64(self, workload, preset),
            false => preset,
        }
    }

    /// Runs a preset as a service; `more` are further flags of `godwit run`.
    pub fn run(&self, node: &str, name: &str, address: Ipv4Addr, preset: &Preset, more: &[&str]) {
        if let Some(engine) = &self.engine {
            return engine.run(self, node, name, address, preset, more);
        }
        if std::env::var_os(machines::VARIABLE).is_some() {
            let sent = self.lab.send(node, &preset.rootfs, &preset.rootfs);
            sent.unwrap_or_else(|error| panic!("{error}"));
        }
        let address = address.to_string();
        let mut arguments = vec!["run", "--name", name, "--ip", &address];
        arguments.extend(["--rootfs", preset.rootfs.to_str().unwrap()]);
        arguments.extend(preset.env.iter().flat_map(|entry| ["--env", entry]));
        arguments.extend(preset.user.iter().flat_map(|user| ["--user", user]));
        arguments.extend(more);
        arguments.push("--");
        arguments.extend(preset.command.iter().map(String::as_str));
        assert_eq!(self.done(node, &arguments), format!("{name}\n"));
    }

    /// Moves a service and checks that it moved; the report as godwit printed it.
    pub fn migrate(&self, name: &str, from: &str, to: &str) -> Report {
        self.migrate_so(name, from, to, &[])
    }

    /// The same, with further flags of `godwit migrate`.
    pub fn migrate_so(&self, name: &str, from: &str, to: &str, how: &[&str]) -> Report {
        let (begun, mut tries) = (Instant::now(), 1..TRIES);
        loop {
            let words = [&["--json", "migrate", name, "--to", to], how].concat();
            let said = Self::said(self.command_within(self.seconds(MOVE_SECONDS), from, &words));
            if said.code == 1 && is_busy(&said.report()) {
                let reason = said.report().reason;
                // A busy engine takes its time to put away what the move before has left.
                let passes = reason.contains(PASSES) && begun.elapsed() < AGAIN;
                assert!(
                    passes || tries.next().is_some(),
                    "the migration of {name} is aborted again and again: {reason}"
                );
                println!("the migration of {name} was aborted, and is tried again: {reason}");
                // No event tells when the destination knows that.
                thread::sleep(Duration::from_secs(1));
                continue;
            }
            assert_eq!(said.code, 0, "moving {name} from {from} to {to}: {}{}", said.stdout, said.stderr);
            let report = said.report();
            let seen =
                [&report.name, &report.outcome, &report.source, &report.destination].map(String::as_str);
            assert_eq!(seen, [name, "moved", from, to], "{report:?}");
            return report;
        }
    }

    /// Waits until a node has heard of a service, which may have been started on another.
    pub fn knows(&self, node: &str, service: &str) {
        wait_for(&format!("node {node} to hear of the service {service}"), || {
            let said = self.godwit(node, &["--json", "inspect", service]);
            (said.code == 0).then_some(())
        });
    }

    /// Moves a service [`tier::moves`] times in a row between `a` and `b`, from `a` to `b` first, in each mode.
    /// The service ends on `a`. `check` is called after each move with its number, from 1, and the node that has
    /// the service now.
    pub fn move_to_and_fro(&self, name: &str, mut check: impl FnMut(usize, &str)) -> Moves {
        self.is_fit(name, "b");
        let mut reports = Vec::new();
        for number in 1..=tier::moves() {
            let (from, to) = if number % 2 == 1 { ("a", "b") } else { ("b", "a") };
            let mode = MODES[(number - 1) % MODES.len()];
            reports.push(self.migrate_so(name, from, to, &["--mode", mode]));
            check(number, to);
        }
        let moves = Moves(reports);
        println!("{moves}");
        moves
    }

    /// `godwit --json check`. Asked again where the machine was too busy for the two nodes to hear each other.
    pub fn check(&self, node: &str, arguments: &[&str]) -> Said {
        let words = ["--json", "check"].iter().chain(arguments).copied().collect::<Vec<_>>();
        let mut said = self.godwit(node, &words);
        for _ in 0..3 {
            let all = format!("{}{}", said.stdout, said.stderr);
            let busy = ["cannot be measured", "was silent for", "did not answer", "the time of day jumps"];
            if busy.iter().all(|busy| !all.contains(busy)) {
                break;
            }
            said = self.godwit(node, &words);
        }
        said
    }

    /// There is nothing in the way of a service that can move.
    fn is_fit(&self, name: &str, to: &str) {
        let mut said = self.check("a", &[name, "--to", to]);
        if said.code == 1 {
            // A connection that waits is accepted in the end.
            said = self.check("a", &[name, "--to", to]);
        }
        let told: serde_json::Value =
            serde_json::from_str(&said.stdout).unwrap_or_else(|error| panic!("{error}: {said:?}"));
        let of = |list: &str| told[list].as_array().map(Vec::len);
        assert_eq!((of("obstacles"), of("objections")), (Some(0), Some(0)), "a false alarm: {said:?}");
        let warnings = told["warnings"].as_array().unwrap();
        let is_due = |warning: &serde_json::Value| {
            DUE_WARNINGS.iter().any(|due| warning.as_str().is_some_and(|warning| warning.contains(due)))
        };
        assert!(warnings.iter().all(is_due), "a false alarm: {warnings:?}");
    }

    /// A program on the client host, without standard input; it ends with the lab at the latest.
    pub fn on_client(&self, program: &str) -> Command {
        let mut command = self.lab.command(CLIENT, program).unwrap_or_else(|error| panic!("{error}"));
        command.stdin(Stdio::null());
        command
    }
}

impl Bed {
    /// Connects from the client host to a server that may be starting; reads give up after
    /// [`PATIENCE`].
    pub fn connect(&self, address: SocketAddrV4) -> TcpStream {
        let once = || TcpStream::connect_timeout(&address.into(), Duration::from_secs(1)).ok();
        let stream =
            wait_for(&format!("a connection to {address}"), || self.lab.inside(CLIENT, once).unwrap());
        stream.set_nodelay(true).unwrap();
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        stream.set_write_timeout(Some(PATIENCE)).unwrap();
        stream
    }
}

impl Bed {
    /// The log of a daemon in a machine.
    fn journal(&self, node: &str) -> std::io::Result<String> {
        let mut command = self.lab.command(node, "journalctl").map_err(std::io::Error::other)?;
        let output = command.args(["--unit", "godwitd", "--no-pager"]).stdin(Stdio::null()).output()?;
        Ok(String::from_utf8_lossy(&output.stdout).into_owned())
    }

    /// Shows what services there are and what they wrote, for the reader of a failed test.
    fn show_services(&self) {
        for node in &self.lab.config().nodes {
            let services = self.godwit(node, &["ps", "--all", "--json"]).stdout;
            let services: serde_json::Value = serde_json::from_str(&services).unwrap_or_default();
            for service in services.as_array().into_iter().flatten().filter(|s| s["node"] == node.as_str()) {
                let name = service["name"].as_str().unwrap_or_default();
                let log = self.godwit(node, &["logs", "--tail", "20", name]);
                eprintln!("--- {service}\n{}{}", log.stdout, log.stderr);
            }
        }
    }
}

impl Drop for Bed {
    fn drop(&mut self) {
        let failing = thread::panicking();
        if failing {
            for node in &self.lab.config().nodes {
                let log = match self.lab.machine(node) {
                    Some(_) => self.journal(node),
                    None => std::fs::read_to_string(self.lab.log(node).unwrap()),
                };
                let lines: Vec<_> = log.as_deref().unwrap_or("").lines().rev().take(LOG_TAIL).collect();
                let tail: Vec<_> = lines.into_iter().rev().collect();
                eprintln!("--- end of the log of godwitd on {node}\n{}", tail.join("\n"));
            }
            self.show_services();
        }
        if let Some(engine) = self.engine.take()
            && !failing
        {
            engine.clear(self);
        }
        let name = self.lab.name();
        let taken_down = match Lab::down(name) {
            Ok(()) | Err(LabError::Unknown(_)) => Ok(()),
            Err(error) => Err(error.to_string()),
        };
        let left = leftovers::of(name);
        if failing {
            eprintln!("taking the lab down: {taken_down:?}, left: {left:?}");
        } else {
            taken_down.unwrap_or_else(|error| panic!("{error}"));
            assert!(left.is_empty(), "lab {name} left behind: {left:#?}");
        }
    }
}

/// Fails where another test of this process has a lab of this name: whether they meet depends on the moment.
fn is_its_own(lab: &str) {
    static OWNERS: Mutex<BTreeMap<String, String>> = Mutex::new(BTreeMap::new());
    let test = thread::current().name().unwrap_or_default().to_owned();
    let mut owners = OWNERS.lock().unwrap_or_else(PoisonError::into_inner);
    let owner = owners.entry(lab.to_owned()).or_insert_with(|| test.clone());
    assert_eq!(*owner, test, "both have a lab called {lab}: choose another word for one of them");
}

/// Takes down labs of earlier runs of this test that were killed.
fn sweep(test: &str) {
    for name in Lab::list() {
        let pid = name.strip_prefix(&format!("t-{test}-")).and_then(|pid| u32::from_str_radix(pid, 16).ok());
        if pid.is_some_and(|pid| !Path::new("/proc").join(pid.to_string()).exists()) {
            // If it cannot be taken down, that is not about this test.
            let _ = Lab::down(&name);
        }
    }
}

/// Compiles one of `programs/` without libraries to come along.
pub fn compile(source: &str, target: &Path) {
    compile_by("cc", source, target);
}

/// The same for the architecture of this compiler.
pub fn compile_by(compiler: &str, source: &str, target: &Path) {
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("programs").join(source);
    let options = [
        "-O2",
        "-Wall",
        "-Wextra",
        "-Wno-missing-field-initializers",
        "-Werror",
        "-static",
        "-pthread",
        "-o",
    ];
    let compiled = Command::new(compiler).args(options).arg(target).arg(&source).output().unwrap();
    assert!(compiled.status.success(), "{}", String::from_utf8_lossy(&compiled.stderr));
}

/// All modes, in an order in which each follows another kind. They are five, so that ten moves to and fro take
/// each mode in both directions. The first four are those that godwit has; `auto` chooses one of them.
pub const MODES: [&str; 5] = ["precopy", "postcopy", "cold", "hybrid", "auto"];

/// Waits until `found` finds something; for what no event tells. It looks every 10 ms, and the less often the longer
/// it has waited: most looks start a program.
pub fn wait_for<T>(what: &str, found: impl FnMut() -> Option<T>) -> T {
    wait_for_within(PATIENCE, what, found)
}

/// The same, for something that may take other than the usual time.
pub fn wait_for_within<T>(patience: Duration, what: &str, mut found: impl FnMut() -> Option<T>) -> T {
    let begun = Instant::now();
    loop {
        if let Some(found) = found() {
            return found;
        }
        assert!(begun.elapsed() < patience, "{what} did not happen within {patience:?}");
        thread::sleep((begun.elapsed() / 10).clamp(Duration::from_millis(10), Duration::from_millis(100)));
    }
}
