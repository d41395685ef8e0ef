//! The C library, the kernel interface and the runtimes, by programs that judge themselves: each is
//! built once and run on both sets, and must say the same on both.

use crate::common::{SETS, cc, executable, isa, scratch, succeed};

/// Builds a program of `programs/` with the options, and runs it.
fn holds(name: &str, options: &[&str]) {
    holds_when(name, options, None);
}

/// The same, captured in place every so many polls.
fn holds_when(name: &str, options: &[&str], turn: Option<&str>) {
    let directory = scratch();
    let source = isa().join("cc/tests/programs").join(name).with_extension("c");
    succeed(
        cc(directory.path())
            .args(options)
            .args(["-O2", "-Wall", "-Werror", "-o", "program"])
            .arg(source)
            .arg("-lm"),
    );
    let program = directory.path().join("program");
    let outputs = SETS.map(|(set, runner)| {
        let mut command = executable(&program, set, runner);
        command.args(["one", "two words"]).env("GODWIT_TEST", "value");
        command.envs(turn.map(|polls| ("GODWIT_STATE_TURN", polls)));
        let output = succeed(&mut command);
        assert!(output.contains("all checks hold"), "{name} on {set}:\n{output}");
        output
    });
    assert_eq!(outputs[0], outputs[1], "{name} says something else on the other set");
}

#[test]
fn numbers_are_the_same_to_the_last_bit() {
    holds("numbers", &["--plain"]);
}

#[test]
fn the_library_does_what_its_manual_says() {
    holds("library", &["--plain"]);
}

#[test]
fn the_kernel_interface_means_the_same() {
    holds("kernel", &["--plain"]);
}

#[test]
fn threads_meet_and_end_and_are_cancelled() {
    holds("threads", &["--plain"]);
}

#[test]
fn signals_reach_handlers_and_waiters_and_jumps_leave_them() {
    holds("signals", &["--plain"]);
}

#[test]
fn numbers_are_the_same_in_programs_that_can_move() {
    holds("numbers", &[]);
}

#[test]
fn signals_reach_handlers_in_programs_that_can_move() {
    holds("signals", &[]);
}

#[test]
fn a_program_leaves_in_the_middle_of_the_library_and_ends_on_the_other_set() {
    // Exit code of a program that has left its state behind (isa/ABI.md, section 6).
    const LEFT: Option<i32> = Some(86);
    let directory = scratch();
    let source = isa().join("cc/tests/programs/travel.c");
    let figures = succeed(cc(directory.path()).args(["--report", "-O2", "-o", "program"]).arg(source));
    assert!(figures.contains("capture.sites"), "{figures}");
    let program = directory.path().join("program");
    let expected = succeed(&mut executable(&program, SETS[0].0, SETS[0].1));
    assert!(expected.contains("found\n") && expected.contains("5.59"), "{expected}");
    assert_eq!(succeed(&mut executable(&program, SETS[1].0, SETS[1].1)), expected);

    let state = directory.path().join("state");
    let mut left = 0;
    for polls in [1, 10, 100, 700, 1500, 3000, 6000, 12000] {
        for ((from, run_from), (to, run_to)) in [(SETS[0], SETS[1]), (SETS[1], SETS[0])] {
            let mut command = executable(&program, from, run_from);
            command.env("GODWIT_STATE_SAVE", &state).env("GODWIT_STATE_POLLS", polls.to_string());
            let first = command.output().unwrap_or_else(|error| panic!("{command:?}: {error}"));
            let mut output = String::from_utf8_lossy(&first.stdout).into_owned();
            if first.status.code() == LEFT {
                left += 1;
                output += &succeed(executable(&program, to, run_to).env("GODWIT_STATE_RESUME", &state));
            } else {
                assert!(first.status.success(), "{polls} polls on {from}: {first:?}");
            }
            assert_eq!(output, expected, "from {from} to {to} after {polls} polls");
        }
    }
    assert!(left >= 8, "the program left {left} times only");
}

#[test]
fn pointers_to_nothing_give_an_error_and_not_a_crash_of_the_runtime() {
    holds("pointers", &["--plain"]);
    holds("pointers", &[]);
    // Captures are asked for at any moment of a call.
    holds_when("pointers", &[], Some("100"));
}

#[test]
fn programs_that_can_move_have_children() {
    holds("processes", &[]);
    // Captures are asked for at any moment of a vfork.
    holds_when("processes", &[], Some("5"));
}

#[test]
fn the_first_function_on_a_stack_may_call_one_that_reads_more_arguments_than_were_passed() {
    holds("tops", &["--plain"]);
    holds("tops", &[]);
}
