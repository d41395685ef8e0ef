//! A service that has filled every kind of mapping and checks all of it all the time
//! ([`programs/pattern.c`]), and its moves.
//!
//! [`programs/pattern.c`]: ../programs/pattern.c

use std::{
    env, fs,
    io::{Read, Write},
    net::{Ipv4Addr, SocketAddrV4},
    path::{Path, PathBuf},
    process::Command,
    time::Duration,
};

use godwit_lab::{
    Architecture,
    workload::{Preset, Rootfs},
};

use crate::{Bed, Report, comparison::processes, compile_by};

const PORT: u16 = 7000;
/// How long an answer may take on a busy machine: two looks at all of the memory.
const PATIENCE: Duration = Duration::from_secs(120);
/// What `scripts/with-huge-pages` sets for what it runs.
const VARIABLE: &str = "GODWIT_HUGE_PAGES";

/// A service, with huge pages or (PR_SET_THP_DISABLE) without.
#[derive(Debug)]
pub struct Pattern {
    name: &'static str,
    address: Ipv4Addr,
    with_huge_pages: bool,
    on: &'static str,
    rewritten: u64,
}

impl Pattern {
    /// Runs one on node `a`.
    pub fn start(bed: &Bed, name: &'static str, number: u8, with_huge_pages: bool) -> Self {
        let address = Ipv4Addr::new(10, 88, 0, number);
        let root = bed.scratch().join(name);
        Rootfs::new(&root).unwrap();
        let machine = bed.lab().machine("a");
        let is_arm64 = machine.is_some_and(|machine| machine.architecture == Architecture::Arm64);
        let compiler = if is_arm64 { "aarch64-linux-gnu-gcc" } else { "cc" };
        compile_by(compiler, "pattern.c", &root.join("pattern"));
        if machine.is_some() {
            bed.lab().send("a", &root, &root).unwrap();
        }
        let mut command = vec!["/pattern".to_owned()];
        command.extend((!with_huge_pages).then(|| "without-huge-pages".to_owned()));
        let preset = Preset { rootfs: root, command, env: Vec::new(), user: None, port: PORT };
        bed.run("a", name, address, &preset, &[]);
        let mut pattern = Self { name, address, with_huge_pages, on: "a", rewritten: 0 };
        pattern.check(bed, "at the start");
        pattern
    }

    /// Moves it to the other node, and checks it there.
    pub fn move_and_check(&mut self, bed: &Bed, mode: &str) -> Report {
        let to = if self.on == "a" { "b" } else { "a" };
        let report = bed.migrate_so(self.name, self.on, to, &["--mode", mode]);
        self.on = to;
        self.check(bed, &format!("after {mode} to {to}"));
        report
    }

    /// Every page is as it should be, a part of them has been written since, and huge pages are as they
    /// were: those that came, and those that are to be had.
    pub fn check(&mut self, bed: &Bed, when: &str) {
        let [pages, passes, rewritten] = self.ask(bed, when, "check").try_into().unwrap();
        assert!(pages > 10_000 && passes >= 2, "{when}: {} has seen {pages} pages", self.name);
        assert!(rewritten > self.rewritten, "{when}: {} has written nothing since the last check", self.name);
        self.rewritten = rewritten;
        let in_machine = bed.lab().machine(self.on).is_some();
        if !in_machine {
            let enabled = self.status(bed, "THP_enabled");
            let should = u8::from(self.with_huge_pages).to_string();
            assert_eq!(enabled, should, "{when}: THP_enabled of {}", self.name);
        }
        let [kilobytes] = self.ask(bed, when, "huge").try_into().unwrap();
        let has = self.with_huge_pages && (in_machine || are_to_be_had());
        assert_eq!(kilobytes > 0, has, "{when}: {} gets {kilobytes} kB of huge pages", self.name);
    }

    /// Numbers that it answers.
    fn ask(&self, bed: &Bed, when: &str, word: &str) -> Vec<u64> {
        let mut answer = String::new();
        let mut connection = bed.connect(SocketAddrV4::new(self.address, PORT));
        connection.set_read_timeout(Some(PATIENCE)).unwrap();
        let asked =
            connection.write_all(word.as_bytes()).and_then(|()| connection.read_to_string(&mut answer));
        let Some(numbers) = answer.strip_prefix("ok ") else {
            let said = bed.godwit(self.on, &["logs", self.name]);
            panic!(
                "{when}: {} says {asked:?} {answer:?} to {word}, and said before: {}{}",
                self.name, said.stdout, said.stderr
            )
        };
        numbers.split_whitespace().map(|number| number.parse().unwrap()).collect()
    }

    /// A line of the main process's status.
    fn status(&self, bed: &Bed, line: &str) -> String {
        let pid = processes(bed.lab().name(), self.on, self.name)[&1];
        let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
        let value = status.lines().find_map(|text| text.strip_prefix(line)?.strip_prefix(':'));
        value.unwrap_or_else(|| panic!("no {line} in {status}")).trim().to_owned()
    }
}

/// Whether memory that asks for huge pages gets them on this machine.
fn are_to_be_had() -> bool {
    let setting = fs::read_to_string("/sys/kernel/mm/transparent_hugepage/enabled").unwrap_or_default();
    setting.contains("[always]") || setting.contains("[madvise]")
}

/// Whether this process runs where huge pages are handed out wherever it can be done. If not, the test of
/// this name in this program is run there, and must succeed: then there is nothing left to do.
pub fn has_run_with_huge_pages(test: &str) -> bool {
    if env::var(VARIABLE).is_ok_and(|value| value == "eager") {
        return false;
    }
    if !Path::new("/sys/kernel/mm/transparent_hugepage/enabled").exists() {
        println!("this kernel has no transparent huge pages");
        return true;
    }
    let script = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../scripts/with-huge-pages");
    let mut command = Command::new(script);
    command.arg(env::current_exe().unwrap()).args(["--exact", test, "--nocapture", "--include-ignored"]);
    let output = command.output().unwrap();
    let text = String::from_utf8_lossy(&[output.stdout, output.stderr].concat()).into_owned();
    println!("{text}");
    assert!(output.status.success() && text.contains("1 passed"), "{test} fails where huge pages are always");
    true
}
