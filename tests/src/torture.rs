//! A service of programs that change their memory all the time and check it ([`programs/torture.c`]),
//! and moves of it that are held to compare its memory on both nodes.
//!
//! [`programs/torture.c`]: ../programs/torture.c

use std::{
    env,
    fs::File,
    io::{Read, Seek},
    net::{Ipv4Addr, SocketAddrV4},
    path::PathBuf,
    process::{Child, Command},
    thread,
    time::{Duration, Instant},
};

use godwit_lab::workload::{Preset, Rootfs};

use crate::{
    BUSY, Bed, Report, Said, TRIES,
    comparison::{Snapshot, processes, told},
    compile,
    hold::Points,
    is_busy,
};

const NAME: &str = "torture";
const ADDRESS: Ipv4Addr = Ipv4Addr::new(10, 88, 0, 70);
const PORT: u16 = 7000;
/// Frozen at the source, and not dumped yet.
const FROZEN: &str = "source.frozen";
/// All processes are at the destination with all that comes before the commit, and none of them runs. At
/// `destination.restored` the last pages of shared memory may still be on their way.
const RESTORED: &str = "source.restored";
/// Frozen at the source, and only what a restore needs from its beginning has gone.
const NEEDED: &str = "source.needed";
/// Restored at the destination, which the source has not heard yet.
const RESTORED_THERE: &str = "destination.restored";
/// Seconds that a move or an answer may take, on a slow machine that is busy with much else.
const MOVE_SECONDS: u32 = 300;
/// Every mode.
pub const MODES: [&str; 4] = ["precopy", "hybrid", "postcopy", "cold"];

/// The service, on one of two nodes.
#[derive(Debug)]
pub struct Torture {
    bed: Bed,
    root: PathBuf,
    programs: Vec<(String, u64)>,
    on: &'static str,
    operations: u64,
    points: Points,
}

impl Torture {
    /// Runs a process for each pair of case and seed on node `a`.
    pub fn start(test: &str, programs: &[(&str, u64)]) -> Self {
        const MEMORY: u64 = 16 << 30;
        let mut points = None;
        let bed = Bed::up_with(test, |config| {
            points = Some(Points::among(config, &[FROZEN, NEEDED, RESTORED_THERE, RESTORED]));
            // Under eager huge pages the programs have gigabytes, and other labs have most of the machine's memory.
            config.programs.serve_arguments.extend(["--incoming-memory".to_owned(), MEMORY.to_string()]);
            config.programs.criu = env::var_os("GODWIT_TORTURE_CRIU").map(PathBuf::from);
        });
        let root = bed.scratch().join("root");
        Rootfs::new(&root).unwrap();
        compile("torture.c", &root.join("torture"));
        let mut torture =
            Self { bed, root, programs: Vec::new(), on: "a", operations: 0, points: points.unwrap() };
        torture.run(programs);
        torture
    }

    /// Ends the programs and runs others in their place.
    pub fn replace(&mut self, programs: &[(&str, u64)]) {
        self.bed.done(self.on, &["rm", "--force", NAME]);
        self.run(programs);
    }

    fn run(&mut self, programs: &[(&str, u64)]) {
        let command = programs.iter().flat_map(|(case, seed)| [(*case).to_owned(), seed.to_string()]);
        let preset = Preset {
            rootfs: self.root.clone(),
            command: ["/torture".to_owned()].into_iter().chain(command).collect(),
            // The kernel writes the number of the CPU there whenever it likes.
            env: vec!["GLIBC_TUNABLES=glibc.pthread.rseq=0".to_owned()],
            user: None,
            port: PORT,
        };
        println!("programs (case, seed): {programs:?}");
        self.bed.run(self.on, NAME, ADDRESS, &preset, &[]);
        self.programs = programs.iter().map(|(case, seed)| ((*case).to_owned(), *seed)).collect();
        self.operations = 0;
        self.check("at the start");
    }

    /// Waits until every program has looked at all of its memory since now, and has found nothing.
    pub fn check(&mut self, when: &str) {
        let mut answer = String::new();
        let mut connection = self.bed.connect(SocketAddrV4::new(ADDRESS, PORT));
        connection.set_read_timeout(Some(Duration::from_secs(MOVE_SECONDS.into()))).unwrap();
        let read = connection.read_to_string(&mut answer);
        let operations = answer.strip_prefix("ok ").and_then(|number| number.trim().parse::<u64>().ok());
        let Some(operations) = operations else {
            let (programs, logs) = (&self.programs, self.logs());
            panic!("{when}: {programs:?}: the programs say {read:?} {answer:?}, and said before:\n{logs}")
        };
        assert!(operations > self.operations, "{when}: nothing has been done since the last check");
        self.operations = operations;
    }

    /// Moves the service to the other node and compares the memory there, before it runs, with what
    /// it was when it was frozen. Then it must go on and find everything as it should be.
    pub fn move_compared(&mut self, mode: &str) -> Report {
        self.moved(mode, Some(&[FROZEN, RESTORED]))
    }

    /// The same, and all that can go beside the restore goes after it.
    pub fn move_compared_late(&mut self, mode: &str) -> Report {
        self.moved(mode, Some(&[FROZEN, NEEDED, RESTORED_THERE, RESTORED]))
    }

    /// Moves the service to the other node at full speed. Then it must go on and find everything as
    /// it should be.
    pub fn move_freely(&mut self, mode: &str) -> Report {
        self.moved(mode, None)
    }

    fn moved(&mut self, mode: &str, held: Option<&[&str]>) -> Report {
        let to = if self.on == "a" { "b" } else { "a" };
        let what = format!("{mode} from {} to {to} of {:?}", self.on, self.programs);
        for _ in 0..TRIES {
            let arguments = ["--json", "migrate", NAME, "--to", to, "--mode", mode];
            let command = self.bed.command_within(MOVE_SECONDS, self.on, &arguments);
            let (compared, moving) = if let Some(held) = held {
                held.iter().for_each(|point| self.points.hold(point));
                let mut moving = Moving::begin(command);
                let compared = self.compare(&mut moving, held, mode);
                held.iter().for_each(|point| self.points.let_go(point));
                (compared, moving)
            } else {
                let nothing = Compared { said: "not compared".to_owned(), differences: Vec::new() };
                (Some(nothing), Moving::begin(command))
            };
            let said = moving.end();
            // The report comes after the steps.
            let last = said.stdout.lines().last().unwrap_or_default();
            let report: Report =
                serde_json::from_str(last).unwrap_or_else(|error| panic!("{what}: {error}: {said:?}"));
            if is_busy(&report) {
                println!("{mode}: given up and tried again: {}", report.reason);
                self.check(&format!("after {what} was given up"));
                continue;
            }
            // The other node may have been silent after the commit, too.
            let reason = &report.reason;
            assert!(reason.is_empty() || BUSY.iter().any(|busy| reason.contains(busy)), "{what}: {report:?}");
            assert_eq!(
                (said.code, report.outcome.as_str()),
                (0, "moved"),
                "{what}: {report:?}; the programs said:\n{}",
                self.logs()
            );
            let compared =
                compared.unwrap_or_else(|| panic!("{what} ended before it was compared: {said:?}"));
            assert!(compared.differences.is_empty(), "{what}: {}", told(&compared.differences));
            self.on = to;
            self.check(&format!("after {what}"));
            println!("{mode}: {}; frozen {:.0} ms in all", compared.said, report.frozen_ms);
            return report;
        }
        panic!("{what}: given up {TRIES} times, because a node was silent")
    }

    /// What the programs wrote, where the service is.
    fn logs(&self) -> String {
        let said = self.bed.command_within(60, self.on, &["logs", NAME]).output().unwrap();
        String::from_utf8_lossy(&[said.stdout, said.stderr].concat()).into_owned()
    }

    /// Compares the memory where a move is held; nothing when it ends before.
    fn compare(&self, moving: &mut Moving, held: &[&str], mode: &str) -> Option<Compared> {
        let (lab, to) = (self.bed.lab().name(), if self.on == "a" { "b" } else { "a" });
        moving.reaches(&self.points, FROZEN)?;
        let reading = Instant::now();
        let snapshot = Snapshot::take(&processes(lab, self.on, NAME));
        let took = reading.elapsed();
        self.points.let_go(FROZEN);
        if held.contains(&NEEDED) {
            moving.reaches(&self.points, RESTORED_THERE)?;
            [NEEDED, RESTORED_THERE].into_iter().for_each(|point| self.points.let_go(point));
        }
        moving.reaches(&self.points, RESTORED)?;
        let comparing = Instant::now();
        let complete = matches!(mode, "precopy" | "cold");
        let differences = snapshot.differences(&processes(lab, to, NAME), complete);
        let (processes, areas, bytes) = snapshot.size();
        let said = format!(
            "{processes} processes, {areas} areas, {} MiB; read in {} ms, compared in {} ms",
            bytes >> 20,
            took.as_millis(),
            comparing.elapsed().as_millis()
        );
        Some(Compared { said, differences })
    }
}

/// What came of a comparison.
struct Compared {
    /// How much it was, in words.
    said: String,
    differences: Vec<String>,
}

/// A command that moves the service, under way.
struct Moving {
    child: Child,
    stdout: File,
    stderr: File,
}

impl Moving {
    fn begin(mut command: Command) -> Self {
        // Files take all that it says while nobody reads it.
        let (stdout, stderr) = (tempfile::tempfile().unwrap(), tempfile::tempfile().unwrap());
        command.stdout(stdout.try_clone().unwrap()).stderr(stderr.try_clone().unwrap());
        Self { child: command.spawn().unwrap(), stdout, stderr }
    }

    /// Waits until it is held at this point; nothing when the command ends before, which it does in any
    /// case.
    fn reaches(&mut self, points: &Points, point: &str) -> Option<()> {
        loop {
            if points.has_reached(point) {
                return Some(());
            }
            if self.child.try_wait().unwrap().is_some() {
                return None;
            }
            // Nothing tells of files and of processes at once.
            thread::sleep(Duration::from_millis(10));
        }
    }

    fn end(mut self) -> Said {
        let status = self.child.wait().unwrap();
        Said {
            code: status.code().unwrap_or(-1),
            stdout: all_of(&mut self.stdout),
            stderr: all_of(&mut self.stderr),
        }
    }
}

/// What has been written to a file by whoever has it too.
fn all_of(file: &mut File) -> String {
    let mut bytes = Vec::new();
    file.rewind().and_then(|()| file.read_to_end(&mut bytes)).unwrap();
    String::from_utf8_lossy(&bytes).into_owned()
}
