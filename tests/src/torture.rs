//! A service of programs that change their memory all the time and check it ([`programs/torture.c`]),
//! and moves of it that are held to compare its memory on both nodes.
//!
//! [`programs/torture.c`]: ../programs/torture.c

use std::{
    env,
    fs::{self, File},
    io::{Read, Seek},
    net::{Ipv4Addr, SocketAddrV4},
    path::PathBuf,
    time::Instant,
};

use godwit_lab::workload::{Preset, Rootfs};

use crate::{
    Bed, Report, Said,
    comparison::{Snapshot, processes, told},
    compile, wait_for,
};

const NAME: &str = "torture";
const ADDRESS: Ipv4Addr = Ipv4Addr::new(10, 88, 0, 70);
const PORT: u16 = 7000;
/// Frozen at the source, and not dumped yet.
const FROZEN: &str = "source.frozen";
/// All processes are at the destination, and none of them runs.
const RESTORED: &str = "destination.restored";
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
    faults: tempfile::TempDir,
}

impl Torture {
    /// Runs a process for each pair of case and seed on node `a`.
    pub fn start(test: &str, programs: &[(&str, u64)]) -> Self {
        let faults = tempfile::tempdir().unwrap();
        let bed = Bed::up_with(test, |config| {
            let points = [FROZEN, RESTORED].map(|point| {
                fs::write(faults.path().join(format!("{point}.go")), b"").unwrap();
                format!("{point}=wait:{}", faults.path().display())
            });
            config.programs.serve_environment.push(("GODWIT_FAULT".to_owned(), points.join(",")));
            config.programs.criu = env::var_os("GODWIT_TORTURE_CRIU").map(PathBuf::from);
        });
        let root = bed.scratch().join("root");
        Rootfs::new(&root).unwrap();
        compile("torture.c", &root.join("torture"));
        let mut torture = Self { bed, root, programs: Vec::new(), on: "a", operations: 0, faults };
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
        let read = connection.read_to_string(&mut answer);
        let operations = answer.strip_prefix("ok ").and_then(|number| number.trim().parse::<u64>().ok());
        let Some(operations) = operations else {
            panic!("{when}: {:?}: the programs say {read:?} {answer:?}", self.programs)
        };
        assert!(operations > self.operations, "{when}: nothing has been done since the last check");
        self.operations = operations;
    }

    /// Moves the service to the other node and compares the memory there, before it runs, with what
    /// it was when it was frozen. Then it must go on and find everything as it should be.
    pub fn move_compared(&mut self, mode: &str) -> Report {
        let to = if self.on == "a" { "b" } else { "a" };
        let what = format!("{mode} from {} to {to} of {:?}", self.on, self.programs);
        self.hold(FROZEN);
        self.hold(RESTORED);
        let mut command = self.bed.command(self.on, &["--json", "migrate", NAME, "--to", to, "--mode", mode]);
        // Files take all that it says while nobody reads it.
        let (mut stdout, mut stderr) = (tempfile::tempfile().unwrap(), tempfile::tempfile().unwrap());
        command.stdout(stdout.try_clone().unwrap()).stderr(stderr.try_clone().unwrap());
        let mut child = command.spawn().unwrap();
        let mut ended = |point: &str| {
            let mark = self.faults.path().join(format!("{point}.reached"));
            wait_for(&format!("point {point} of {what}"), || {
                if mark.exists() {
                    return Some(false);
                }
                child.try_wait().unwrap().map(|_| true)
            })
        };
        let lab = self.bed.lab().name();
        let mut compared = String::new();
        let mut differences = Vec::new();
        let mut early = ended(FROZEN);
        if !early {
            let reading = Instant::now();
            let snapshot = Snapshot::take(&processes(lab, self.on, NAME));
            let took = reading.elapsed();
            self.let_go(FROZEN);
            early = ended(RESTORED);
            if !early {
                let comparing = Instant::now();
                differences =
                    snapshot.differences(&processes(lab, to, NAME), matches!(mode, "precopy" | "cold"));
                let (processes, areas, bytes) = snapshot.size();
                compared = format!(
                    "{processes} processes, {areas} areas, {} MiB; read in {} ms, compared in {} ms",
                    bytes >> 20,
                    took.as_millis(),
                    comparing.elapsed().as_millis()
                );
            }
        }
        self.let_go(FROZEN);
        self.let_go(RESTORED);
        let status = child.wait().unwrap();
        let said = Said {
            code: status.code().unwrap_or(-1),
            stdout: all_of(&mut stdout),
            stderr: all_of(&mut stderr),
        };
        assert!(differences.is_empty(), "{what}: {}", told(&differences));
        assert!(!early, "{what} ended before it was compared: {said:?}");
        let report = self.moved(&said, &what, to);
        println!("{mode}: {compared}; frozen {:.0} ms with that", report.frozen_ms);
        report
    }

    /// Moves the service to the other node at full speed. Then it must go on and find everything as
    /// it should be.
    pub fn move_freely(&mut self, mode: &str) -> Report {
        let to = if self.on == "a" { "b" } else { "a" };
        let what = format!("{mode} from {} to {to} of {:?}", self.on, self.programs);
        let said = self.bed.godwit(self.on, &["--json", "migrate", NAME, "--to", to, "--mode", mode]);
        let report = self.moved(&said, &what, to);
        println!("{mode}: not compared; frozen {:.0} ms", report.frozen_ms);
        report
    }

    fn moved(&mut self, said: &Said, what: &str, to: &'static str) -> Report {
        assert_eq!(said.code, 0, "{what}: {}{}", said.stdout, said.stderr);
        // The report comes after the steps.
        let last = said.stdout.lines().last().unwrap_or_default();
        let report: Report =
            serde_json::from_str(last).unwrap_or_else(|error| panic!("{what}: {error}: {said:?}"));
        assert_eq!((report.outcome.as_str(), report.reason.as_str()), ("moved", ""), "{what}: {report:?}");
        self.on = to;
        self.check(&format!("after {what}"));
        report
    }

    fn hold(&self, point: &str) {
        let _ = fs::remove_file(self.faults.path().join(format!("{point}.reached")));
        fs::remove_file(self.faults.path().join(format!("{point}.go"))).unwrap();
    }

    fn let_go(&self, point: &str) {
        fs::write(self.faults.path().join(format!("{point}.go")), b"").unwrap();
    }
}

/// What has been written to a file by whoever has it too.
fn all_of(file: &mut File) -> String {
    let mut bytes = Vec::new();
    file.rewind().and_then(|()| file.read_to_end(&mut bytes)).unwrap();
    String::from_utf8_lossy(&bytes).into_owned()
}
