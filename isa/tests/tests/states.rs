//! State files: what goes wrong with one is said, and nothing is resumed; and what a capture costs.

use std::fs;
use std::path::PathBuf;
use std::process::{Command, Output};
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use godwit_isa_link::Set;
use godwit_isa_tests::{build, run};

const CAPTURED: Option<i32> = Some(86);
const FAILED: Option<i32> = Some(125);

fn program(name: &str) -> Result<build::Program> {
    build::program(&build::isa().join("tests/programs").join(name))
}

/// A program and a state of it.
fn captured(name: &str) -> Result<(build::Program, PathBuf)> {
    let program = program(name)?;
    let state = program.directory.path().join("state");
    let output = run::command(&program, Set::X86_64)
        .env("GODWIT_STATE_SAVE", &state)
        .env("GODWIT_STATE_POLLS", "500")
        .output()?;
    ensure!(output.status.code() == CAPTURED, "no capture: {}", String::from_utf8_lossy(&output.stderr));
    Ok((program, state))
}

fn resume(program: &build::Program, set: Set, state: &std::path::Path) -> Result<Output> {
    run::command(program, set).env("GODWIT_STATE_RESUME", state).output().context("cannot run the program")
}

/// Asserts that the program refuses a state on both sets and says why.
fn refuses(program: &build::Program, state: &std::path::Path, why: &str) -> Result<()> {
    for set in Set::ALL {
        let output = resume(program, set, state)?;
        let said = String::from_utf8_lossy(&output.stderr);
        ensure!(output.status.code() == FAILED, "{why}: {} on {}: {said}", output.status, set.name());
        ensure!(output.stdout.is_empty(), "{why}: the program went on");
        ensure!(said.contains(why), "\"{why}\" is missing in: {said}");
    }
    Ok(())
}

#[test]
fn a_truncated_state_is_refused() -> Result<()> {
    let (program, state) = captured("basics.c")?;
    let bytes = fs::read(&state)?;
    for length in [0, 10, bytes.len() / 2, bytes.len() - 1] {
        fs::write(&state, &bytes[..length])?;
        refuses(&program, &state, if length < 72 { "too short" } else { "truncated" })?;
    }
    Ok(())
}

#[test]
fn an_altered_state_is_refused_wherever_it_is_altered() -> Result<()> {
    let (program, state) = captured("basics.c")?;
    let bytes = fs::read(&state)?;
    let seed = fastrand::u64(..);
    println!("seed {seed}");
    let mut random = fastrand::Rng::with_seed(seed);
    for _ in 0..20 {
        let mut altered = bytes.clone();
        let at = random.usize(8..altered.len());
        altered[at] ^= 1 << random.u32(..8);
        fs::write(&state, &altered)?;
        refuses(&program, &state, "state file")?;
    }
    Ok(())
}

#[test]
fn a_state_of_another_program_is_refused() -> Result<()> {
    let (_basics, state) = captured("basics.c")?;
    refuses(&program("shapes.c")?, &state, "another program")
}

#[test]
fn something_that_is_no_state_is_refused() -> Result<()> {
    let program = program("basics.c")?;
    let path = program.directory.path().join("text");
    fs::write(
        &path,
        "a text that is long enough to be taken for a header if only its length was looked at, as it were",
    )?;
    refuses(&program, &path, "not a state file")?;
    refuses(&program, &program.directory.path().join("nowhere"), "cannot open the state file")
}

#[test]
fn an_unknown_setting_is_refused() -> Result<()> {
    let program = program("basics.c")?;
    let output = run::command(&program, Set::X86_64).env("GODWIT_STATE_POLL", "3").output()?;
    ensure!(output.status.code() == FAILED);
    ensure!(String::from_utf8_lossy(&output.stderr).contains("GODWIT_STATE_POLL=3"));
    Ok(())
}

#[test]
fn a_program_does_not_see_the_settings() -> Result<()> {
    let program = program("environment.c")?;
    let plain = run::command(&program, Set::X86_64).env_clear().env("A", "1").env("Z", "26").output()?;
    ensure!(String::from_utf8_lossy(&plain.stdout) == "A=1\nZ=26\n", "{plain:?}");
    let set = run::command(&program, Set::X86_64)
        .env_clear()
        .envs([("A", "1"), ("GODWIT_STATE_TURN", "3"), ("Z", "26")])
        .output()?;
    ensure!(set.stdout == plain.stdout, "{set:?}");
    Ok(())
}

/// The programs that look for holes between polls; each runs for seconds if nobody stops it.
#[test]
fn a_timer_finds_a_poll_soon_wherever_the_program_is() -> Result<()> {
    let program = program("busy.c")?;
    let kinds = ["recursion", "loop", "nested", "irreducible", "indirect", "string", "sleep", "threads"];
    // A hole costs tens of milliseconds each time. Others use this machine as well, and a thread that waits for a core
    // is late too, but not each time: one that was soon is enough.
    const SOON: Duration = Duration::from_millis(5);
    for kind in kinds {
        let state = program.directory.path().join(format!("{kind}.state"));
        let mut waits = Vec::new();
        while waits.last().is_none_or(|&wait| wait >= SOON) {
            ensure!(
                waits.len() < 50,
                "{kind}: never parked within {SOON:?} of the request, but after {waits:?}"
            );
            let command = run::command(&program, Set::X86_64);
            // Before whatever else runs on this machine: it is the program that is measured.
            let output = Command::new("nice")
                .args(["-n", "-20"])
                .arg(command.get_program())
                .args(command.get_args())
                .arg(kind)
                .env("GODWIT_STATE_SAVE", &state)
                .env("GODWIT_STATE_TIMER", "20000")
                .env("GODWIT_STATE_REPORT", "1")
                .output()?;
            ensure!(output.status.code() == CAPTURED, "{kind}: {output:?}");
            waits.push(parked_after(&String::from_utf8_lossy(&output.stderr))?);
        }
        println!("{kind}: request to parked {waits:?}");
    }
    Ok(())
}

#[test]
fn fifty_thousand_frames_are_captured_and_resumed_on_the_other_set() -> Result<()> {
    let program = program("deep.c")?;
    let expected = run::whole(&program, Set::X86_64)?;
    let state = program.directory.path().join("deep.state");
    for (from, to) in [(Set::X86_64, Set::Aarch64), (Set::Aarch64, Set::X86_64)] {
        let output = run::command(&program, from)
            .env("GODWIT_STATE_SAVE", &state)
            .env("GODWIT_STATE_POLLS", "49990")
            .env("GODWIT_STATE_REPORT", "1")
            .output()?;
        ensure!(output.status.code() == CAPTURED, "{output:?}");
        println!("{}: {}", from.name(), String::from_utf8_lossy(&output.stderr));
        // Four values and a trailer for each frame at the least: the state is as deep as it should be.
        ensure!(fs::metadata(&state)?.len() > 49_000 * 40, "the state is too small for so many frames");
        let resumed = resume(&program, to, &state)?;
        ensure!(
            resumed.status.code() == Some(expected.status) && resumed.stdout == expected.output,
            "{resumed:?}"
        );
    }
    Ok(())
}

/// The sets' native frames differ, so what fits one stack may be too deep for the other's: said, never a crash.
#[test]
fn a_thread_that_is_too_deep_for_a_set_is_told() -> Result<()> {
    let program = program("deep_thread.c")?;
    let state = program.directory.path().join("deep_thread.state");
    let (mut resumed, mut too_deep) = (0, 0);
    for depth in (1..).map(|step| step * 40_000_u64) {
        let with_depth = |set| {
            let mut command = run::command(&program, set);
            command.arg(depth.to_string());
            command
        };
        let expected = with_depth(Set::X86_64).output()?;
        // The stack is full without any capture, as it is elsewhere.
        if !expected.status.success() {
            break;
        }
        let captured = with_depth(Set::X86_64)
            .env("GODWIT_STATE_SAVE", &state)
            .env("GODWIT_STATE_POLLS", (depth - 10).to_string())
            .output()?;
        ensure!(captured.status.code() == CAPTURED, "{depth}: {captured:?}");
        for set in Set::ALL {
            let output = resume(&program, set, &state)?;
            if output.status.code() == FAILED {
                let said = String::from_utf8_lossy(&output.stderr);
                ensure!(said.contains("too deep to go on with"), "{depth} on {}: {said}", set.name());
                too_deep += 1;
            } else {
                ensure!(output.status.success() && output.stdout == expected.stdout, "{depth}: {output:?}");
                resumed += 1;
            }
        }
    }
    println!("{resumed} were resumed, {too_deep} were too deep");
    ensure!(resumed > 4, "only {resumed} were resumed");
    Ok(())
}

/// Reads `godwit: parked NANOSECONDS ns after the request, …`.
fn parked_after(said: &str) -> Result<Duration> {
    let number = said
        .split_once("parked ")
        .and_then(|(_, rest)| rest.split_once(" ns"))
        .and_then(|(number, _)| number.parse().ok())
        .with_context(|| format!("no report in: {said}"))?;
    Ok(Duration::from_nanos(number))
}
