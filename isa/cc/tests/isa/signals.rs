//! Signals and clocks of programs that can move, where `isa/programs` has no place for a test: what is refused, and a
//! move to where clocks show something else.

use std::path::PathBuf;
use std::process::Command;

use crate::common::{SETS, cc, executable, isa, refuse, scratch, succeed};

/// Exit code of a program that has left its state behind (isa/ABI.md, section 6).
const LEFT: Option<i32> = Some(86);
/// The number of the signal by that name.
const SIGUSR2: &str = "12";

/// Builds a program of `programs/` that can move.
fn build(name: &str) -> (tempfile::TempDir, PathBuf) {
    let directory = scratch();
    let source = isa().join("cc/tests/programs").join(name).with_extension("c");
    succeed(cc(directory.path()).args(["-O2", "-Wall", "-Werror", "-o", "program"]).arg(source));
    let program = directory.path().join("program");
    (directory, program)
}

#[test]
fn the_reserved_signal_is_refused() {
    let (_directory, program) = build("reserved_signal");
    for (set, runner) in SETS {
        let output = succeed(&mut executable(&program, set, runner));
        assert!(output.contains("all checks hold"), "on {set}: {output}");
    }
}

#[test]
fn a_jump_out_of_the_handler_of_a_fault_ends_the_program_with_a_sentence() {
    let (_directory, program) = build("jump_out_of_fault");
    for (set, runner) in SETS {
        let said = refuse(&mut executable(&program, set, runner));
        assert!(said.contains("longjmp out of the handler of a fault"), "on {set}: {said}");
    }
}

#[test]
fn a_fault_meets_an_action_whole_while_another_thread_changes_it() {
    let (_directory, program) = build("actions");
    for (set, runner) in SETS {
        let output = succeed(&mut executable(&program, set, runner));
        assert!(output.contains("all checks hold"), "on {set}: {output}");
    }
}

#[test]
fn a_thread_that_waits_for_the_actions_lets_their_holder_run() {
    let (_directory, program) = build("actions");
    let program = executable(&program, SETS[0].0, SETS[0].1);
    // Two threads of real time on one processor: where one of them spins, the other does not go on.
    let output = succeed(Command::new("timeout").arg("60").arg(program.get_program()).arg("real-time"));
    assert!(output.contains("all checks hold"), "{output}");
}

#[test]
fn a_sleep_a_timer_and_the_clocks_go_on_where_clocks_show_something_else() {
    // Where the machine has been up for months more.
    const ELSEWHERE: [&str; 7] =
        ["unshare", "--time", "--monotonic", "9000000", "--boottime", "9000000", "--fork"];
    let (directory, program) = build("clocks");
    let state = directory.path().join("state");
    for ((from, run_from), (to, run_to)) in [(SETS[0], SETS[1]), (SETS[1], SETS[0])] {
        let mut command = executable(&program, from, run_from);
        command.env("GODWIT_STATE_SAVE", &state).env("GODWIT_STATE_TIMER", "400000");
        let first = command.output().unwrap_or_else(|error| panic!("{command:?}: {error}"));
        assert_eq!(first.status.code(), LEFT, "on {from}: {first:?}");
        let second = executable(&program, to, run_to);
        let mut command = Command::new(ELSEWHERE[0]);
        command.args(&ELSEWHERE[1..]).arg(second.get_program()).args(second.get_args());
        // Time namespaces need the rights of root, as much else that the tests do.
        let output = succeed(command.env("GODWIT_STATE_RESUME", &state));
        assert!(output.contains("all checks hold"), "from {from} to {to}: {output}");
    }
}

#[test]
fn timers_that_expire_during_a_capture_are_neither_lost_nor_doubled() {
    let (directory, program) = build("expired");
    let state = directory.path().join("state");
    for ((from, run_from), (to, run_to)) in [(SETS[0], SETS[1]), (SETS[1], SETS[0])] {
        let mut command = executable(&program, from, run_from);
        command.env("GODWIT_STATE_SAVE", &state).env("GODWIT_STATE_SIGNAL", SIGUSR2);
        let first = command.output().unwrap_or_else(|error| panic!("{command:?}: {error}"));
        assert_eq!(first.status.code(), LEFT, "on {from}: {first:?}");
        let output = succeed(executable(&program, to, run_to).env("GODWIT_STATE_RESUME", &state));
        assert!(output.contains("all checks hold"), "from {from} to {to}: {output}");
    }
}

#[test]
fn the_next_owner_of_a_robust_mutex_learns_that_its_owner_has_ended() {
    let (directory, program) = build("robust");
    let state = directory.path().join("state");
    for (set, runner) in SETS {
        let output = succeed(executable(&program, set, runner).env("GODWIT_STATE_TURN", "50"));
        assert!(output.contains("all checks hold"), "on {set}: {output}");
    }
    for ((from, run_from), (to, run_to)) in [(SETS[0], SETS[1]), (SETS[1], SETS[0])] {
        let mut command = executable(&program, from, run_from);
        command.arg("moves").env("GODWIT_STATE_SAVE", &state).env("GODWIT_STATE_SIGNAL", SIGUSR2);
        let first = command.output().unwrap_or_else(|error| panic!("{command:?}: {error}"));
        assert_eq!(first.status.code(), LEFT, "on {from}: {first:?}");
        let output = succeed(executable(&program, to, run_to).env("GODWIT_STATE_RESUME", &state));
        assert!(output.contains("all checks hold"), "from {from} to {to}: {output}");
    }
}
