//! Programs built once for a test binary, and `godwit-state` driven as a user drives it.

#![allow(dead_code, reason = "each test binary uses some of it")]

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::sync::{Mutex, OnceLock, PoisonError};

use godwit_isa_state::{BuildIdentity, Set};
use godwit_isa_tests::build;

/// A program of which all executables are there.
pub(crate) struct Program {
    /// What godwit-state takes as PROG.
    pub(crate) prog: PathBuf,
    /// What the link said.
    pub(crate) build: BuildIdentity,
}

impl Program {
    pub(crate) fn executable(&self, set: Set) -> PathBuf {
        godwit_isa_state::Program::executable(&self.prog, set)
    }

    /// The executable of a set on this machine, by itself.
    pub(crate) fn command(&self, set: Set) -> Command {
        if Set::native() == Some(set) {
            return Command::new(self.executable(set));
        }
        let mut command = Command::new(format!("qemu-{}-static", set.name()));
        command.arg(self.executable(set));
        command
    }
}

/// A program of these tests, or one of isa/tests.
pub(crate) fn program(name: &str) -> &'static Program {
    static BUILT: OnceLock<Mutex<HashMap<String, &'static Program>>> = OnceLock::new();
    let mut built = BUILT.get_or_init(Mutex::default).lock().unwrap_or_else(PoisonError::into_inner);
    built.entry(name.to_owned()).or_insert_with(|| Box::leak(Box::new(built_anew(name))))
}

fn built_anew(name: &str) -> Program {
    let file = format!("{name}.c");
    let own = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/programs").join(&file);
    let source = if own.exists() { own } else { build::isa().join("tests/programs").join(file) };
    let built = build::program(&source).unwrap_or_else(|error| panic!("{name}: {error:#}"));
    // All tests of a binary share it, so no test can be the one that removes it.
    let directory = Path::new(env!("CARGO_TARGET_TMPDIR")).join(env!("CARGO_CRATE_NAME"));
    std::fs::create_dir_all(&directory).expect("it is cargo's");
    let program =
        Program { prog: directory.join(name), build: BuildIdentity(built.report.binding.identity()) };
    for set in Set::ALL {
        copy(built.executable(set), &program.executable(set));
    }
    program
}

/// Copies an executable, by another process: the child of another test that is not its program yet would
/// have the copy open for writing, and nobody could execute it.
pub(crate) fn copy(from: &Path, to: &Path) {
    let copied = Command::new("cp").arg(from).arg(to).status().expect("cp can be started");
    assert!(copied.success(), "{} cannot be copied to {}", from.display(), to.display());
}

/// `godwit-state ARGS…`.
pub(crate) fn godwit_state() -> Command {
    Command::new(env!("CARGO_BIN_EXE_godwit-state"))
}

pub(crate) fn run(command: &mut Command) -> Output {
    command.output().expect("godwit-state can be started")
}

pub(crate) fn stderr(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

/// The last line of standard error, where godwit-state says with --json what happened.
pub(crate) fn report(output: &Output) -> serde_json::Value {
    let said = stderr(output);
    let line = said.lines().last().unwrap_or_default();
    serde_json::from_str(line).unwrap_or_else(|error| panic!("{error} in: {said}"))
}

/// Captures a program at a poll and returns what it had written by then.
pub(crate) fn capture(program: &Program, set: Set, polls: u64, state: &Path, arguments: &[&str]) -> Vec<u8> {
    let output = run(godwit_state()
        .args(["--json", "run"])
        .arg(&program.prog)
        .args(["--after-polls", &polls.to_string(), "--set", set.name(), "--state"])
        .arg(state)
        .arg("--")
        .args(arguments));
    assert_eq!(output.status.code(), Some(86), "{}", stderr(&output));
    let report = report(&output);
    assert_eq!(report["outcome"], "captured");
    assert_eq!(report["set"], set.name());
    assert_eq!(report["threads"], 1);
    output.stdout
}
