//! Journeys that cannot go on: a command that cannot be executed, executables that are missing, may not be executed or
//! are of another build. Each is refused with what, which, why and what to do; the state that was written stays and
//! goes on.

#[path = "support/programs.rs"]
mod programs;

use std::fs::{self, Permissions};
use std::io::{BufRead as _, BufReader};
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::process::{Output, Stdio};

use godwit_isa_state::{Program, Set, StateFile};

use programs::{copy, godwit_state, program, run, stderr};

/// What it is, how it is done, and what is said of it then.
type Damage = (&'static str, Box<dyn Fn()>, String);

/// A program of one's own, whose executables a test may change.
struct Own {
    directory: tempfile::TempDir,
    program: PathBuf,
}

impl Own {
    fn new() -> Self {
        let directory = tempfile::tempdir().expect("a directory");
        let own = Self { program: directory.path().join("travels"), directory };
        own.mend();
        own
    }

    fn executable(&self, set: Set) -> PathBuf {
        Program::executable(&self.program, set)
    }

    /// Both executables as they were linked.
    fn mend(&self) {
        for set in Set::ALL {
            let path = self.executable(set);
            // One that runs cannot be written to.
            if path.exists() {
                fs::remove_file(&path).expect("it is ours");
            }
            copy(&program("travels").executable(set), &path);
        }
    }

    /// What can be done to an executable.
    fn damages(&self, set: Set) -> [Damage; 3] {
        let path = self.executable(set);
        let shown = path.display().to_string();
        let (missing, forbidden, foreign) = (path.clone(), path.clone(), path);
        [
            (
                "missing",
                Box::new(move || fs::remove_file(&missing).expect("it is there")),
                format!("has no executable for {}: there is no {shown}", set.name()),
            ),
            (
                "not executable",
                Box::new(move || {
                    fs::set_permissions(&forbidden, Permissions::from_mode(0o644)).expect("it is ours");
                }),
                format!("{shown} has no permission to be executed; give it with chmod +x"),
            ),
            (
                "foreign",
                Box::new(move || {
                    fs::remove_file(&foreign).expect("it is there");
                    copy(&program("basics").executable(set), &foreign);
                }),
                format!("of build {}", program("basics").build.short()),
            ),
        ]
    }
}

fn refused(output: &Output, what: &str, words: &[&str]) {
    let said = stderr(output);
    assert_eq!(output.status.code(), Some(125), "{what}: {said}");
    for word in words {
        assert!(said.contains(word), "{what}: \"{word}\" is missing in: {said}");
    }
}

/// The state is whole, nothing half-made lies beside it, and it goes on.
fn goes_on(state: &Path, beside: &[&str], what: &str) {
    StateFile::open(state).unwrap_or_else(|error| panic!("{what}: {error}"));
    let directory = state.parent().expect("it has one");
    let names =
        fs::read_dir(directory).expect("it is there").map(|entry| entry.expect("readable").file_name());
    let mut names: Vec<String> = names.map(|name| name.into_string().expect("text")).collect();
    names.sort();
    assert_eq!(names, beside, "{what}");
    let output = run(godwit_state().arg("resume").arg(state).arg("--program").arg(&program("travels").prog));
    assert_eq!(output.status.code(), Some(7), "{what}: {}", stderr(&output));
    let whole = run(godwit_state().arg("run").arg(&program("travels").prog).args(["--", "12"]));
    let whole = String::from_utf8(whole.stdout).expect("text");
    assert!(whole.ends_with(&String::from_utf8(output.stdout).expect("text")), "{what}: {whole}");
}

/// Runs `travels` by itself until it is captured and is to become `command`.
fn becomes(set: Set, command: &Path, state: &Path) -> Output {
    program("travels")
        .command(set)
        .arg("12")
        .env("GODWIT_STATE_SAVE", state)
        .env("GODWIT_STATE_POLLS", "1500")
        .env("GODWIT_STATE_NEXT", command)
        .output()
        .expect("it starts")
}

#[test]
fn a_command_that_cannot_be_executed_is_named_and_the_state_stays() {
    let directory = tempfile::tempdir().expect("a directory");
    let text = directory.path().join("text");
    fs::write(&text, "no program\n").expect("it is ours");
    let odd = directory.path().join("odd");
    fs::write(&odd, "neither\n").expect("it is ours");
    fs::set_permissions(&odd, Permissions::from_mode(0o755)).expect("it is ours");
    let commands = [
        ("missing", directory.path().join("nowhere"), "(error 2)"),
        ("not executable", text, "(error 13)"),
        ("a directory", directory.path().to_owned(), "(error 13)"),
        ("of no format", odd, "(error 8)"),
    ];
    for set in Set::ALL {
        for (what, command, error) in &commands {
            let states = tempfile::tempdir().expect("a directory");
            let state = states.path().join("state");
            // An older one gives way to the one that was written last.
            fs::write(&state, "old").expect("it is ours");
            let output = becomes(set, command, &state);
            let (command, path) = (command.display().to_string(), state.display().to_string());
            let what = format!("{what} on {}", set.name());
            let advice = "cannot be executed; the state is kept, and godwit-state resume continues from it: ";
            refused(&output, &what, &[&format!("{command} {advice}{path}"), error]);
            goes_on(&state, &["state"], &what);
        }
    }
}

#[test]
fn a_leg_that_cannot_be_begun_is_refused_and_the_plan_and_the_state_stay() {
    let own = Own::new();
    let states = tempfile::tempdir().expect("a directory");
    let state = states.path().join("state");
    let plan = serde_json::json!({
        "program": own.program, "sets": ["x86_64", "aarch64"], "length": { "polls": 1_000_000_000 }, "seed": null,
        "changes": 0,
    });
    let next = PathBuf::from(env!("CARGO_BIN_EXE_godwit-state"));
    let kept = "the program cannot continue; its state is kept, and godwit-state resume continues from it: ";
    let refused_here = |what: &str, words: &[&str]| {
        let output = becomes(Set::X86_64, &next, &state);
        refused(&output, what, words);
        refused(&output, what, &[&format!("{kept}{}", state.display())]);
    };
    refused_here("without a plan", &["cannot read the journey's plan"]);
    goes_on(&state, &["state"], "without a plan");

    fs::write(states.path().join("journey"), plan.to_string()).expect("it is ours");
    for (what, damage, words) in own.damages(Set::Aarch64) {
        damage();
        refused_here(what, &[&words]);
        let after: serde_json::Value =
            serde_json::from_slice(&fs::read(states.path().join("journey")).expect("it is there"))
                .expect("it is whole");
        assert_eq!(after, plan, "{what}");
        goes_on(&state, &["journey", "state"], what);
        own.mend();
    }
    // And with all of it there, it goes.
    let output = becomes(Set::X86_64, &next, &state);
    assert_eq!(output.status.code(), Some(7), "{}", stderr(&output));
}

#[test]
fn a_hop_does_not_begin_where_it_could_not_go_on() {
    let own = Own::new();
    for set in Set::ALL {
        for (what, damage, words) in own.damages(set) {
            damage();
            let output = run(godwit_state()
                .args(["hop", "--every-polls", "500"])
                .arg(&own.program)
                .args(["--", "12"]));
            refused(&output, what, &[&words]);
            assert!(output.stdout.is_empty(), "{what}: it was started");
            own.mend();
        }
    }
}

/// A journey of `travels` with this argument loses an executable; what the journey said, and where its state is.
fn taken_away(own: &Own, argument: &str) -> (Output, PathBuf) {
    let states = own.directory.path().join("states");
    fs::create_dir(&states).expect("it is ours");
    let mut child = godwit_state()
        .args(["hop", "--every", "2s"])
        .arg(&own.program)
        .args(["--", argument])
        // Where it makes its directory.
        .env("TMPDIR", &states)
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("it starts");
    let mut line = String::new();
    let said = child.stdout.as_mut().expect("it is a pipe");
    BufReader::new(said).read_line(&mut line).expect("it speaks");
    assert_eq!(line, "ready\n");
    // Whichever leg it is in, it comes to this executable by itself; legs are long, so that it is not just beginning one.
    fs::remove_file(own.executable(Set::Aarch64)).expect("it is there");
    let output = child.wait_with_output().expect("it ends");
    let kept =
        fs::read_dir(&states).expect("it is there").next().expect("a directory is left").expect("readable");
    (output, kept.path().join("state"))
}

#[test]
fn a_hop_whose_program_is_taken_away_keeps_the_last_state() {
    let own = Own::new();
    let (output, state) = taken_away(&own, "wait");
    refused(
        &output,
        "taken away",
        &[
            "has no executable for aarch64",
            &format!("the last state of {} is kept in {}", own.program.display(), state.display()),
        ],
    );
    // It goes on, and can be captured again.
    let output = run(godwit_state()
        .args(["resume", "--after", "50ms", "--program"])
        .arg(&program("travels").prog)
        .arg(&state));
    assert_eq!(output.status.code(), Some(86), "{}", stderr(&output));
}

#[test]
fn a_hop_says_why_it_cannot_go_on_when_the_program_has_closed_its_standard_error() {
    let (output, _) = taken_away(&Own::new(), "silent");
    refused(&output, "closed", &["has no executable for aarch64"]);
    assert_eq!(stderr(&output).matches("has no executable for aarch64").count(), 1, "{}", stderr(&output));
}

#[test]
fn a_run_says_why_it_cannot_go_on_when_the_program_has_closed_its_standard_error() {
    let directory = tempfile::tempdir().expect("a directory");
    for set in Set::ALL {
        let output = run(godwit_state()
            .args(["run", "--after", "300ms", "--set", set.name(), "--state"])
            .arg(directory.path().join("nowhere/state"))
            .arg(&program("travels").prog)
            .args(["--", "silent"]));
        refused(
            &output,
            set.name(),
            &["godwit: cannot create the state file", "nowhere/state.part (error 2)"],
        );
    }
}

#[test]
fn a_full_standard_error_is_waited_for() {
    let directory = tempfile::tempdir().expect("a directory");
    for set in Set::ALL {
        let mut child = program("travels")
            .command(set)
            .arg("full")
            .env("GODWIT_STATE_SAVE", directory.path().join("nowhere/state"))
            .env("GODWIT_STATE_TIMER", "300000")
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .expect("it starts");
        let mut line = String::new();
        let said = child.stdout.as_mut().expect("it is a pipe");
        BufReader::new(said).read_line(&mut line).expect("it speaks");
        // The program computes until it is captured: when it does not any more, the pipe was full for the runtime.
        while fs::read_to_string(format!("/proc/{}/stat", child.id())).is_ok_and(|stat| stat.contains(") R "))
        {
            std::thread::yield_now();
        }
        let output = child.wait_with_output().expect("it ends");
        refused(&output, set.name(), &["godwit: cannot create the state file"]);
    }
}
