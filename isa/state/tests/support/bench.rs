//! A sound state that tests damage, and the assertion that what comes of it is refused.

#![allow(dead_code, reason = "each test binary uses some of it")]

use std::path::PathBuf;
use std::process::Output;

use godwit_isa_state::Set;

use crate::programs::{capture, godwit_state, program, run, stderr};

/// A sound state of a program in a directory of its own.
pub(crate) struct Bench {
    _directory: tempfile::TempDir,
    program: &'static str,
    pub(crate) state: PathBuf,
    pub(crate) sound: Vec<u8>,
}

impl Bench {
    /// The state of a program after some polls.
    pub(crate) fn new(name: &'static str, polls: u64, arguments: &[&str]) -> Self {
        let directory = tempfile::tempdir().expect("a directory");
        let state = directory.path().join("state");
        capture(program(name), Set::X86_64, polls, &state, arguments);
        let sound = std::fs::read(&state).expect("it was written");
        Self { _directory: directory, program: name, state, sound }
    }

    /// Writes what is looked at next.
    pub(crate) fn put(&self, file: &[u8]) {
        std::fs::write(&self.state, file).expect("it is ours");
    }

    /// The state with some change, sealed or not.
    pub(crate) fn with(&self, change: impl FnOnce(&mut Vec<u8>)) -> Vec<u8> {
        let mut file = self.sound.clone();
        change(&mut file);
        file
    }

    /// Asserts that godwit-state refuses to go on from a file, and to tell what is in it when it is no state at all.
    pub(crate) fn refused_by_godwit_state(&self, file: &[u8], what: &str, why: &str) {
        self.put(file);
        refused(&self.godwit_state("resume"), what, why);
        refused(&self.godwit_state("inspect"), what, why);
    }

    /// Asserts that the runtime of a set does.
    pub(crate) fn refused_by_runtime(&self, set: Set, file: &[u8], what: &str, why: &str) {
        self.put(file);
        refused(&self.runtime(set), &format!("{what} on {}", set.name()), why);
    }

    /// What a verb of godwit-state makes of it.
    pub(crate) fn godwit_state(&self, verb: &str) -> Output {
        run(godwit_state().arg(verb).arg(&self.state).arg("--program").arg(&program(self.program).prog))
    }

    /// What the runtime of a set makes of it.
    pub(crate) fn runtime(&self, set: Set) -> Output {
        let mut command = program(self.program).command(set);
        command.env("GODWIT_STATE_RESUME", &self.state).output().expect("the program can be started")
    }
}

/// Asserts that a state was refused with a sentence, and that nothing went on from it.
pub(crate) fn refused(output: &Output, what: &str, why: &str) {
    let said = stderr(output);
    assert_eq!(output.status.code(), Some(125), "{what}: {}: {said}", output.status);
    assert!(output.stdout.is_empty(), "{what}: the program went on");
    assert!(said.contains(why), "{what}: \"{why}\" is missing in: {said}");
}
