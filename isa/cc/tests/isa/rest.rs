//! Programs come to rest while they wait in every way there is, and go on: in place, and from the resume entry as after a
//! restore. What they print is that of an undisturbed run.

mod requests;

use std::fs::OpenOptions;
use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::os::unix::fs::FileExt as _;
use std::os::unix::process::ExitStatusExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};

use godwit_crossing::Request;
use godwit_isa_plan::{Quarter, Slot};
use godwit_isa_tests::rest::{Tree, ask, record, restart};

use crate::common::{SETS, cc, executable, isa, scratch, succeed};

const NATIVE: &str = "x86_64";
/// The other set, and how it is run here.
const EMULATED: (&str, &[&str]) = SETS[1];

/// Builds a program of `programs/` that can move.
fn build(name: &str) -> (tempfile::TempDir, PathBuf) {
    build_with(name, &[])
}

fn build_with(name: &str, options: &[&str]) -> (tempfile::TempDir, PathBuf) {
    let directory = scratch();
    let source = isa().join("cc/tests/programs").join(name).with_extension("c");
    let mut command = cc(directory.path());
    succeed(command.args(options).args(["-O2", "-Wall", "-Werror", "-o", "program"]).arg(source));
    let program = directory.path().join("program");
    (directory, program)
}

/// A program that does a step for each line that it reads.
struct Stepping {
    child: Child,
    /// Nothing once it was told that this is all.
    input: Option<ChildStdin>,
    output: BufReader<ChildStdout>,
    signal: i32,
}

impl Stepping {
    fn start(program: &Path, arguments: &[&str]) -> Self {
        let mut command = executable(program, NATIVE, &[]);
        Self::start_by(command.args(arguments), Request::SIGNAL)
    }

    fn start_by(command: &mut Command, signal: i32) -> Self {
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = command.spawn().expect("it starts");
        let input = child.stdin.take();
        let output = BufReader::new(child.stdout.take().expect("a pipe"));
        let mut started = Self { child, input, output, signal };
        started.expect("ready\n");
        started
    }

    fn tree(&self) -> Tree {
        Tree { root: i32::try_from(self.child.id()).expect("a process's number"), signal: self.signal }
    }

    fn expect(&mut self, line: &str) {
        let mut found = String::new();
        self.output.read_line(&mut found).expect("it prints");
        assert_eq!(found, line);
    }

    fn write(&mut self, bytes: &[u8]) {
        self.input.as_mut().expect("a pipe").write_all(bytes).expect("it reads");
    }

    fn step(&mut self, number: u32) {
        self.write(b"\n");
        self.expect(&format!("step {number}\n"));
    }

    fn finish(mut self) {
        self.input = None;
        let mut rest = String::new();
        self.output.read_to_string(&mut rest).expect("it prints");
        assert_eq!(rest, "all checks hold\n");
        assert!(self.child.wait().expect("it ends").success());
    }
}

/// After a failure nothing of it stays, least of all at rest.
impl Drop for Stepping {
    fn drop(&mut self) {
        if matches!(self.child.try_wait(), Ok(None)) {
            self.tree().kill();
            let _ = self.child.wait();
        }
    }
}

/// How a tree at rest goes on.
#[derive(Clone, Copy, PartialEq)]
enum Way {
    InPlace,
    Restored,
}

impl Way {
    fn go_on(self, tree: &Tree) {
        match self {
            Self::InPlace => tree.go_on(),
            Self::Restored => tree.restart(),
        }
        .expect("all go on");
    }
}

/// Rests between steps, and while one is under way.
fn steps(ways: &[Way], steps: u32) {
    let (_directory, program) = build("rest");
    take_steps(Stepping::start(&program, &[]), ways, steps);
}

fn take_steps(mut running: Stepping, ways: &[Way], steps: u32) {
    let tree = running.tree();
    let mut rests = 0;
    for (number, way) in (1..=steps).zip(ways.iter().cycle()) {
        let resting = tree.rest().expect("all come to rest");
        rests += 1;
        let said: Vec<_> = resting.iter().map(|(_, rest)| (rest.threads, rest.number)).collect();
        assert_eq!(said, [(9, rests), (1, rests)], "the process and its child");
        if *way == Way::Restored {
            // What counts them is private, and new.
            rests = 0;
        }
        // What comes meanwhile waits.
        if number % 2 == 0 {
            running.write(b"\n");
            way.go_on(&tree);
            running.expect(&format!("step {number}\n"));
        } else {
            way.go_on(&tree);
            running.step(number);
        }
    }
    running.finish();
}

#[test]
fn a_process_that_rests_again_and_again_goes_on_in_place() {
    steps(&[Way::InPlace], 30);
}

#[test]
fn a_process_goes_on_from_the_resume_entry_again_and_again() {
    steps(&[Way::Restored], 30);
}

#[test]
fn both_ways_to_go_on_follow_one_another() {
    steps(&[Way::InPlace, Way::Restored, Way::Restored, Way::InPlace, Way::InPlace], 10);
}

#[test]
fn a_process_of_the_other_set_rests_in_place() {
    let (set, runner) = EMULATED;
    let (_directory, asker) = build_with("ended_by_58", &["--plain"]);
    let status = executable(&asker, set, runner).status().expect("it runs");
    let signal = status.signal().expect("it ends by the signal");
    let (_directory, program) = build("rest");
    take_steps(Stepping::start_by(&mut executable(&program, set, runner), signal), &[Way::InPlace], 6);
}

#[test]
fn a_parent_rests_while_the_child_of_its_vfork_has_executed_nothing() {
    let (_directory, program) = build("processes");
    let mut running = Stepping::start(&program, &["held"]);
    let tree = running.tree();
    for way in [Way::InPlace, Way::Restored, Way::InPlace] {
        let resting = tree.rest().expect("both come to rest");
        assert_eq!(resting.len(), 2, "the parent and its child");
        way.go_on(&tree);
    }
    running.write(b"x");
    running.finish();
}

/// Of a thread's four quarters a few pages are used each: a huge page would make 2 MB of them that move.
#[test]
fn stacks_of_threads_get_no_huge_pages() {
    let (_directory, program) = build("rest");
    let running = Stepping::start(&program, &[]);
    let maps = std::fs::read_to_string(format!("/proc/{}/smaps", running.child.id())).expect("its maps");
    for slot in [Slot::MAIN, Slot::new(1).expect("of the plan")] {
        for quarter in [Quarter::NativeStack, Quarter::Continuation, Quarter::DataStack, Quarter::Control] {
            let begin = format!("{:08x}-", slot.quarter(quarter).start);
            let (_, area) =
                maps.split_once(&begin).unwrap_or_else(|| panic!("no area begins at {begin} of {maps}"));
            let flags = area.lines().find_map(|line| line.strip_prefix("VmFlags:")).expect("its flags");
            assert!(
                flags.split(' ').any(|flag| flag == "nh"),
                "{quarter:?} of slot {}: {flags}",
                slot.number()
            );
        }
    }
    running.finish();
}

#[test]
fn a_process_that_locks_its_memory_rests() {
    let (_directory, program) = build("locked");
    let stack = Slot::MAIN.quarter(Quarter::NativeStack).start.to_string();
    let running = Stepping::start(&program, &[&stack]);
    let tree = running.tree();
    for way in [Way::InPlace, Way::Restored] {
        assert_eq!(tree.rest().expect("it comes to rest").len(), 1);
        way.go_on(&tree);
    }
    running.finish();
}

#[test]
fn a_request_that_is_taken_back_is_forgotten() {
    let (_directory, program) = build("fault_waits");
    // In either order: two threads may handle them at once.
    for requests in [[Request::Rest(1), Request::GoOn(1)], [Request::GoOn(1), Request::Rest(1)]] {
        let mut running = Stepping::start(&program, &[]);
        let process = running.tree().root;
        for request in requests {
            ask(process, Request::SIGNAL, request).expect("it is there");
        }
        running.write(b"x");
        while running.child.try_wait().expect("it is ours").is_none() {
            let record = record(process).expect("it is godwit-cc's");
            assert_eq!(record.and_then(|record| record.rest), None, "it came to rest");
        }
        running.finish();
    }
}

#[test]
fn a_process_rests_once_the_handler_of_a_fault_is_over() {
    let (_directory, program) = build("fault_waits");
    let mut running = Stepping::start(&program, &[]);
    let process = running.tree().root;
    ask(process, Request::SIGNAL, Request::Rest(1)).expect("it is there");
    running.write(b"x");
    let tree = running.tree();
    let resting = tree.rest().expect("it comes to rest");
    assert_eq!(resting.len(), 1);
    tree.restart().expect("it goes on");
    running.finish();
}

#[test]
fn a_request_that_meets_an_exec_ends_no_program() {
    const TIMES: &str = "300";
    let (_directory, program) = build("processes");
    let mut command = executable(&program, NATIVE, &[]);
    let mut child = command.args(["executes", TIMES]).stdout(Stdio::piped()).spawn().expect("it starts");
    let tree = Tree::of(i32::try_from(child.id()).expect("a process's number"));
    let mut rests = 0;
    while child.try_wait().expect("it is ours").is_none() {
        rests += u32::from(!tree.rest().expect("it comes to rest, or ends").is_empty());
        tree.go_on().expect("it goes on");
    }
    let output = child.wait_with_output().expect("it has ended");
    assert!(output.status.success(), "after {rests} rests: {}", output.status);
    assert_eq!(String::from_utf8_lossy(&output.stdout), "all checks hold\n");
    assert!(rests > 0, "it has ended before it was asked");
}

/// Bytes at an offset of a control block.
type Change<'a> = (u64, &'a [u8]);

// Offsets in a control block.
const REQUEST: u64 = 8;
const STATE: u64 = 12;
const CONTINUATION: u64 = 24;
const NUMBER: u64 = 80;

const DAMAGED_THREAD: &str = "the state's thread is damaged";
const DAMAGED_SIGNALS: &str = "the state's signals are damaged";

/// Changes the memory of a process at rest, has it go on from the resume entry, and expects that it refuses to.
fn refuses(program: &Path, arguments: &[&str], changes: impl FnOnce(i32) -> Vec<(u64, Vec<u8>)>, why: &str) {
    let mut running = Stepping::start(program, arguments);
    let tree = running.tree();
    let processes: Vec<i32> = tree.rest().expect("all come to rest").iter().map(|one| one.0).collect();
    let path = format!("/proc/{}/mem", tree.root);
    let memory = OpenOptions::new().write(true).open(path).expect("it is ours");
    for (address, bytes) in changes(tree.root) {
        memory.write_all_at(&bytes, address).expect("it is there");
    }
    restart(tree.root).expect("its threads run");
    // A child has the pipes as well.
    for child in &processes[1..] {
        ask(*child, Request::SIGNAL, Request::GoOn(1)).expect("it is at rest");
    }
    running.input = None;
    let mut said = String::new();
    let mut errors = running.child.stderr.take().expect("a pipe");
    errors.read_to_string(&mut said).expect("it says why");
    assert_eq!(running.child.wait().expect("it ends").code(), Some(125), "{said}");
    assert!(said.contains(why), "{said}");
}

/// The address behind the last byte of a variable.
fn end_of(program: &Path, name: &str) -> u64 {
    let mut file = program.as_os_str().to_owned();
    file.push(".");
    file.push(NATIVE);
    let symbols = succeed(Command::new("llvm-nm-19").arg("--print-size").arg(file));
    let line = symbols.lines().find(|line| line.ends_with(&format!(" {name}"))).expect("a symbol");
    let mut words = line.split(' ').map(|word| u64::from_str_radix(word, 16));
    let mut word = || words.next().expect("a word").expect("a number");
    word() + word()
}

#[test]
fn threads_that_do_not_fit_the_memory_do_not_go_on() {
    let (_directory, program) = build("steps");
    let of_slot = |number| Slot::new(number).expect("of the plan");
    let first = of_slot(1);
    // As if the thread that has ended had not.
    let frames = (first.quarter(Quarter::Continuation).start + 16).to_le_bytes().to_vec();
    let lives = move |_| {
        vec![(first.control_block() + STATE, vec![0; 4]), (first.control_block() + CONTINUATION, frames)]
    };
    refuses(&program, &["ended"], lives, "a thread that the program has was not restored");
    let second_main =
        |process: i32| vec![(of_slot(1).control_block() + NUMBER, process.to_le_bytes().to_vec())];
    refuses(&program, &["threads"], second_main, DAMAGED_THREAD);
}

#[test]
fn memory_that_cannot_be_accessed_is_not_gone_on_with() {
    let (_directory, program) = build("steps");
    refuses(&program, &["closed"], |_| Vec::new(), DAMAGED_THREAD);
}

#[test]
fn a_timer_of_the_programs_is_not_taken_for_that_of_a_rest() {
    let (_directory, program) = build("rest");
    // The first timer of a process has the kernel's number 0; here 1 more.
    let timer = end_of(&program, "__gw_signal_table") - 8;
    refuses(&program, &[], |_| vec![(timer, 1_u64.to_le_bytes().to_vec())], DAMAGED_SIGNALS);
    refuses(&program, &[], |_| vec![(timer, u64::MAX.to_le_bytes().to_vec())], DAMAGED_SIGNALS);
}

#[test]
fn memory_that_is_damaged_is_not_gone_on_with() {
    let empty = Slot::MAIN.quarter(Quarter::Continuation).start.to_le_bytes();
    let (_directory, program) = build("processes");
    let refused: [(&[Change<'_>], &str); 3] = [
        (&[(REQUEST, &[1])], DAMAGED_THREAD),
        (&[(CONTINUATION, &[0x70, 0, 0, 0, 0, 0, 0, 0])], DAMAGED_THREAD),
        // As a slot is whose thread has ended.
        (&[(CONTINUATION, &empty), (STATE, &[3])], "the state has no thread to go on with"),
    ];
    for (changes, why) in refused {
        let of_main = |change: &Change<'_>| (Slot::MAIN.control_block() + change.0, change.1.to_vec());
        refuses(&program, &["held"], |_| changes.iter().map(of_main).collect(), why);
    }
}
