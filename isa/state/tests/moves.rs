//! Programs that `godwit-state` runs, captures, looks into and takes to the other set.

#[path = "support/programs.rs"]
mod programs;

use std::io::{BufRead as _, BufReader, Read as _};
use std::process::{Output, Stdio};

use godwit_isa_state::Set;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::Value;

use programs::{capture, godwit_state, program, report, run, stderr};

const ARGUMENTS: [&str; 3] = ["40", "two words", ""];

/// A run in one piece.
fn whole(name: &str, arguments: &[&str]) -> Output {
    let output = run(godwit_state().arg("run").arg(&program(name).prog).arg("--").args(arguments));
    assert!(output.stderr.is_empty(), "{}", stderr(&output));
    output
}

fn inspect(state: &std::path::Path, more: &[&str]) -> Value {
    let output = run(godwit_state().arg("inspect").arg(state).arg("--json").args(more));
    assert!(output.status.success(), "{}", stderr(&output));
    serde_json::from_slice(&output.stdout).expect("JSON")
}

/// The functions of a thread's frames, the innermost first, with how often each follows itself.
fn functions(thread: &Value) -> Vec<(String, u64)> {
    let mut functions: Vec<(String, u64)> = Vec::new();
    for frame in thread["frames"].as_array().expect("frames") {
        let name = frame["function"].as_str().expect("a name").to_owned();
        let times = frame["times"].as_u64().expect("a number");
        match functions.last_mut() {
            Some((last, sum)) if *last == name => *sum += times,
            _ => functions.push((name, times)),
        }
    }
    functions
}

#[test]
fn a_program_that_is_captured_goes_on_on_the_other_set() {
    let travels = program("travels");
    let expected = whole("travels", &ARGUMENTS);
    assert_eq!(expected.status.code(), Some(7));
    let directory = tempfile::tempdir().expect("a directory");
    let state = directory.path().join("state");
    for (from, to) in [(Set::X86_64, Set::Aarch64), (Set::Aarch64, Set::X86_64)] {
        let mut said = capture(travels, from, 1500, &state, &ARGUMENTS);
        let output = run(godwit_state()
            .args(["--json", "resume"])
            .arg(&state)
            .arg("--program")
            .arg(&travels.prog)
            .args(["--set", to.name()]));
        assert_eq!(output.status.code(), Some(7), "{}", stderr(&output));
        assert_eq!(report(&output), serde_json::json!({"outcome": "ended", "set": to.name(), "status": 7}));
        said.extend(output.stdout);
        assert_eq!(String::from_utf8_lossy(&said), String::from_utf8_lossy(&expected.stdout));
    }
}

#[test]
fn a_state_is_used_as_often_as_one_likes_and_hops_on() {
    let travels = program("travels");
    let expected = whole("travels", &ARGUMENTS);
    let directory = tempfile::tempdir().expect("a directory");
    let (first, second) = (directory.path().join("first"), directory.path().join("second"));
    let begin = capture(travels, Set::X86_64, 700, &first, &ARGUMENTS);
    let kept = std::fs::read(&first).expect("it was written");
    for set in [Set::X86_64, Set::Aarch64, Set::X86_64] {
        let on = run(godwit_state()
            .args(["resume", "--set", set.name(), "--after-polls", "600", "--program"])
            .arg(&travels.prog)
            .arg("--state")
            .arg(&second)
            .arg(&first));
        assert_eq!(on.status.code(), Some(86), "{}", stderr(&on));
        assert!(stderr(&on).contains("resume it with: godwit-state resume"), "{}", stderr(&on));
        let end = run(godwit_state().arg("resume").arg(&second).arg("--program").arg(&travels.prog));
        assert_eq!(end.status.code(), Some(7), "{}", stderr(&end));
        assert_eq!(
            [begin.clone(), on.stdout, end.stdout].concat(),
            expected.stdout,
            "by way of {}",
            set.name()
        );
    }
    assert_eq!(std::fs::read(&first).expect("still there"), kept);
}

#[test]
fn inspect_tells_the_frames_by_name() {
    let directory = tempfile::tempdir().expect("a directory");
    let state = directory.path().join("state");
    let travels = program("travels");
    // By then it works at the bottom of 41 calls.
    capture(travels, Set::X86_64, 1500, &state, &ARGUMENTS);

    // The program is found by the name it was started with.
    let seen = inspect(&state, &[]);
    let thread = &seen["threads"][0];
    let expected: Vec<(String, u64)> =
        [("bottom", 1), ("descend", 41), ("outer", 1), ("main", 1), ("__gw_main", 1)]
            .into_iter()
            .map(|(name, times)| (name.to_owned(), times))
            .collect();
    assert_eq!(functions(thread), expected);
    assert_eq!(thread["depth"], 45);
    let build = travels.build.to_string();
    assert_eq!(seen["build"], build);
    let name = travels.prog.display().to_string();
    assert_eq!(seen["arguments"], serde_json::json!([name, "40", "two words", ""]));
    assert_eq!(seen["executables"][0]["fits"], true);
    assert_eq!(seen["executables"][1]["fits"], true);
    // Each call of descend has an array of 24 bytes on the data stack.
    assert!(thread["data_stack_bytes"].as_u64().expect("bytes") >= 41 * 24);
    assert_eq!(seen["memory"]["continuations"], thread["continuation_bytes"]);
    assert_eq!(seen["bytes"], std::fs::metadata(&state).expect("it is there").len());

    // Captured on the other set, the same place has the same frames.
    let other = directory.path().join("other");
    capture(travels, Set::Aarch64, 1500, &other, &ARGUMENTS);
    assert_eq!(inspect(&other, &["--program", &name])["threads"][0]["frames"], thread["frames"]);

    let text = run(godwit_state().arg("inspect").arg(&state));
    let text = String::from_utf8_lossy(&text.stdout).into_owned();
    for part in [&build[..12], "bottom", "descend", " times", "45 frames", "fits", "two words"] {
        assert!(text.contains(part), "{part} in: {text}");
    }
}

#[test]
fn inspect_tells_every_thread_and_the_slots_without_one() {
    let directory = tempfile::tempdir().expect("a directory");
    let state = directory.path().join("state");
    let threads = program("threads");
    let output = run(godwit_state()
        .args(["--json", "run"])
        .arg(&threads.prog)
        .args(["--after-polls", "700", "--state"])
        .arg(&state));
    assert_eq!(output.status.code(), Some(86), "{}", stderr(&output));

    let seen = inspect(&state, &[]);
    let slots = seen["threads"].as_array().expect("threads");
    assert_eq!(report(&output)["threads"].as_u64(), Some(slots.len() as u64));
    // The program's first slot beside the main thread's was taken and not started.
    assert_eq!((&slots[0]["slot"], &slots[0]["parked"]), (&0.into(), &true.into()));
    assert_eq!((&slots[1]["slot"], &slots[1]["parked"]), (&1.into(), &false.into()));
    assert_eq!(slots[1]["continuation_bytes"], 0);
    let working = |thread: &&Value| {
        thread["parked"] == true && functions(thread).last().is_some_and(|(name, _)| name == "work")
    };
    assert_eq!(slots.iter().filter(working).count(), 4, "{seen}");

    let text = run(godwit_state().arg("inspect").arg(&state));
    let text = String::from_utf8_lossy(&text.stdout).into_owned();
    assert!(text.contains("Thread 1: ended or not started"), "{text}");

    let ended = run(godwit_state()
        .arg("resume")
        .arg(&state)
        .args(["--set", "aarch64", "--program"])
        .arg(&threads.prog));
    let whole = whole("threads", &[]);
    assert_eq!(
        (ended.status.code(), &ended.stdout),
        (whole.status.code(), &whole.stdout),
        "{}",
        stderr(&ended)
    );
}

#[test]
fn a_state_whose_program_is_elsewhere_is_told_without_names() {
    // Beside the program, since there are no links from one filesystem to another.
    let built = program("travels").executable(Set::X86_64);
    let beside = built.parent().expect("it is in a directory");
    let directory = tempfile::tempdir_in(beside).expect("a directory");
    let state = directory.path().join("state");
    let copy = directory.path().join("travels");
    for set in Set::ALL {
        let name = format!("travels.{}", set.name());
        // Not a copy: what another test starts at this moment would have it open for writing, and it could not be run.
        std::fs::hard_link(program("travels").executable(set), directory.path().join(name))
            .expect("it can be linked there");
    }
    let output =
        run(godwit_state().arg("run").arg(&copy).args(["--after-polls", "9", "--state"]).arg(&state));
    assert_eq!(output.status.code(), Some(86), "{}", stderr(&output));
    for set in Set::ALL {
        std::fs::remove_file(directory.path().join(format!("travels.{}", set.name()))).expect("it was there");
    }
    let seen = inspect(&state, &[]);
    assert_eq!(seen["program"], Value::Null);
    assert_eq!(seen["threads"][0]["depth"], Value::Null);
    assert_eq!(seen["executables"][0]["fits"], false);
    assert!(
        seen["executables"][0]["reason"].as_str().expect("a reason").contains("cannot read the executable")
    );
}

#[test]
fn programs_that_hop_write_what_they_write_in_one_piece() {
    for (name, polls, least) in [("travels", 200, 10), ("basics", 500, 8), ("shapes", 100, 2)] {
        let expected = whole(name, &["12"]);
        let output = run(godwit_state().args(["--json", "hop"]).arg(&program(name).prog).args([
            "--every-polls",
            &polls.to_string(),
            "--",
            "12",
        ]));
        assert_eq!(output.stdout, expected.stdout, "{name}: {}", stderr(&output));
        assert_eq!(output.status.code(), expected.status.code());
        let report = report(&output);
        assert_eq!(report["outcome"], "ended");
        assert!(report["changes"].as_u64().expect("a number") >= least, "{name}: {report}");
    }
}

#[test]
fn heap_and_mappings_travel_with_their_contents_and_protection() {
    let mappings = program("mappings");
    let expected = whole("mappings", &[]);
    assert_eq!(expected.status.code(), Some(5));
    let directory = tempfile::tempdir().expect("a directory");
    let state = directory.path().join("state");
    for (from, to) in [(Set::X86_64, Set::Aarch64), (Set::Aarch64, Set::X86_64)] {
        // It has filled its memory within the first 10,000 polls, and works on it for far more.
        let mut said = capture(mappings, from, 45_000, &state, &[]);
        let seen = inspect(&state, &[]);
        let innermost = functions(&seen["threads"][0]);
        assert!(innermost.iter().any(|(name, _)| name == "work"), "{innermost:?}");
        let memory = &seen["memory"];
        assert_eq!(memory["heap_mapped"], 6 * 4096);
        assert_eq!(memory["heap"], 6 * 4096, "from its first page to the last byte in use");
        assert_eq!(memory["mapped"], (8 - 1 + 4 + 2) * 4096);
        let output = run(godwit_state()
            .args(["resume", "--set", to.name(), "--program"])
            .arg(&mappings.prog)
            .arg(&state));
        assert_eq!(output.status.code(), Some(5), "{}", stderr(&output));
        said.extend(output.stdout);
        assert_eq!(String::from_utf8_lossy(&said), String::from_utf8_lossy(&expected.stdout));
    }
}

#[test]
fn a_timer_captures_what_would_never_end() {
    let directory = tempfile::tempdir().expect("a directory");
    let state = directory.path().join("state");
    let travels = program("travels");
    let mut command = godwit_state();
    command.args(["--json", "run"]).arg(&travels.prog).args(["--after", "1s", "--state"]).arg(&state);
    let output = run(command.args(["--", "wait"]));
    assert_eq!(output.status.code(), Some(86), "{}", stderr(&output));
    assert_eq!(output.stdout, b"ready\n");
    // And again on the other set.
    let mut command = godwit_state();
    command.args(["resume", "--set", "aarch64", "--after", "1s", "--program"]).arg(&travels.prog).arg(&state);
    let output = run(&mut command);
    assert_eq!(output.status.code(), Some(86), "{}", stderr(&output));
    assert!(output.stdout.is_empty());
    assert_eq!(functions(&inspect(&state, &[])["threads"][0]).last().expect("frames").0, "__gw_main");
}

/// Starts a program that waits, and sends a signal to godwit-state when it works.
fn signalled(arguments: &[&str], signal: Signal) -> (Option<i32>, String) {
    let mut command = godwit_state();
    command.args(["--json", "run"]).arg(&program("travels").prog).args(arguments).args(["--", "wait"]);
    let mut child = command
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("it starts");
    let mut line = String::new();
    let mut out = BufReader::new(child.stdout.take().expect("a pipe"));
    out.read_line(&mut line).expect("a line");
    assert_eq!(line, "ready\n");
    let id = i32::try_from(child.id()).expect("a process");
    kill(Pid::from_raw(id), signal).expect("it runs");
    let status = child.wait().expect("it ends");
    let mut said = String::new();
    child.stderr.take().expect("a pipe").read_to_string(&mut said).expect("text");
    (status.code(), said)
}

#[test]
fn a_signal_captures_on_either_set() {
    let directory = tempfile::tempdir().expect("a directory");
    for set in Set::ALL {
        let state = directory.path().join(set.name());
        let path = state.display().to_string();
        let arguments = ["--set", set.name(), "--on-signal", "USR2", "--state", &path];
        let (status, said) = signalled(&arguments, Signal::SIGUSR2);
        assert_eq!(status, Some(86), "{said}");
        assert!(functions(&inspect(&state, &[])["threads"][0]).contains(&("main".to_owned(), 1)));
    }
}

#[test]
fn another_signal_ends_the_program_and_is_told() {
    let (status, said) = signalled(&[], Signal::SIGTERM);
    assert_eq!(status, Some(128 + 15));
    assert_eq!(said, "{\"outcome\":\"killed\",\"set\":\"x86_64\",\"signal\":15}\n");
}

#[test]
fn how_a_program_ends_by_itself_is_told_apart_from_a_capture() {
    let directory = tempfile::tempdir().expect("a directory");
    let state = directory.path().join("state");
    // An older state stands there, which this run has not written.
    capture(program("travels"), Set::X86_64, 1500, &state, &ARGUMENTS);
    let before = std::fs::read(&state).expect("it was written");
    for (what, outcome, status) in [
        ("captured", serde_json::json!({"outcome": "ended", "set": "x86_64", "status": 86}), 86),
        ("kill", serde_json::json!({"outcome": "killed", "set": "x86_64", "signal": 6}), 134),
        ("0", serde_json::json!({"outcome": "ended", "set": "x86_64", "status": 7}), 7),
    ] {
        let mut command = godwit_state();
        command.args(["--json", "run"]).arg(&program("travels").prog).args([
            "--after-polls",
            "1000000000",
            "--state",
        ]);
        let output = run(command.arg(&state).args(["--", what]));
        assert_eq!(output.status.code(), Some(status), "{what}: {}", stderr(&output));
        assert_eq!(report(&output), outcome);
        assert_eq!(std::fs::read(&state).expect("still there"), before);
    }
}

#[test]
fn variables_of_the_runtime_that_are_set_outside_do_not_reach_the_program() {
    let mut command = godwit_state();
    command
        .env("GODWIT_STATE_RESUME", "/nowhere")
        .env("GODWIT_STATE_POLLS", "3")
        .env("GODWIT_ARGV0", "other");
    let output = run(command.arg("run").arg(&program("travels").prog).args(["--", "5"]));
    assert_eq!(output.status.code(), Some(7), "{}", stderr(&output));
    assert_eq!(output.stdout, whole("travels", &["5"]).stdout);
}

#[test]
fn the_children_that_a_program_forks_stay_out_of_its_journey() {
    let forks = program("forks");
    let expected = whole("forks", &[]);
    assert_eq!(expected.status.code(), Some(7));
    // Children count their polls, too, and come to as many.
    for polls in ["3000", "20000"] {
        let output = run(godwit_state().args(["--json", "hop", "--every-polls", polls]).arg(&forks.prog));
        assert_eq!(output.status.code(), Some(7), "{polls}: {}", stderr(&output));
        assert_eq!(output.stdout, expected.stdout, "{polls}: {}", stderr(&output));
        assert!(
            report(&output)["changes"].as_u64().is_some_and(|changes| changes > 3),
            "{}",
            stderr(&output)
        );
    }
}
