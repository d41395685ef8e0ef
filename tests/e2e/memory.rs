//! The memory of programs that change it in every way there is, compared byte by byte after each
//! move, in every mode. Needs root.

use std::env;

use godwit_tests::{
    tier,
    torture::{MODES, Torture},
};

/// Moves the programs of the case with that number with every mode, and then once more at full speed, because
/// comparing brings all pages to the destination before the programs run there. In `make test` each case takes
/// one mode compared and one at full speed, and its neighbours take the others.
fn compare(case: &str, number: usize) {
    let mut torture = Torture::start(case, &[(case, 1), (case, 2)]);
    let (compared, freely) = (MODES, ["postcopy", "hybrid"]);
    if tier::is_full() {
        compared.into_iter().for_each(|mode| drop(torture.move_compared(mode)));
        freely.into_iter().for_each(|mode| drop(torture.move_freely(mode)));
        return;
    }
    torture.move_compared(compared[number % compared.len()]);
    torture.move_freely(freely[number / 2 % freely.len()]);
}

macro_rules! cases {
    ($($name:ident: $case:literal),* $(,)?) => {
        /// The names of all cases, by their numbers.
        const CASES: &[&str] = &[$($case),*];
        $( #[test] fn $name() { compare($case, CASES.iter().position(|case| *case == $case).unwrap()); } )*
    };
}

cases! {
    mappings_that_come_move_and_go: "map",
    trees_of_processes: "fork",
    processes_that_execute_programs: "exec",
    threads_in_one_address_space: "threads",
    huge_pages_that_are_split_and_joined: "huge",
    pages_that_are_given_back: "discard",
    shared_anonymous_memory: "shared",
    memory_files: "memfd",
    private_mappings_of_files: "file",
    private_mappings_of_files_in_trees_of_processes: "filefork",
    rights_and_locks_that_change_after_a_fork: "rights",
    files_written_through_mappings: "filewrite",
    mappings_larger_than_the_machine: "sparse",
    locked_memory: "lock",
    guard_pages: "toldguard",
    processes_that_come_and_go: "churn",
}

/// While pages follow, the kernel does not tell of new guard pages (see "Limits" in
/// docs/limits.md), so that only modes without that can be asked this.
#[test]
fn guard_pages_that_nobody_tells_of() {
    let mut torture = Torture::start("guard", &[("guard", 1), ("guard", 2)]);
    for mode in ["precopy", "cold", "precopy"] {
        torture.move_compared(mode);
    }
}

/// The source sends pages beside the restore, and the load of either node decides which ends first.
#[test]
fn pages_that_come_after_the_restore() {
    let late =
        |torture: &mut Torture| MODES.into_iter().for_each(|mode| drop(torture.move_compared_late(mode)));
    let mut torture = Torture::start("late", &[("huge", 1), ("discard", 1)]);
    late(&mut torture);
    let others = [[("shared", 1), ("memfd", 1)], [("churn", 1), ("map", 1)]];
    for programs in others.into_iter().take(if tier::is_full() { 2 } else { 1 }) {
        torture.replace(&programs);
        late(&mut torture);
    }
}

/// Programs at once in one service, and how often there are as many. Each of them keeps a processor busy.
const AT_ONCE: u64 = 10;
const TIMES: u64 = 20;
const AT_ONCE_IN_SHORT: u64 = 2;
const TIMES_IN_SHORT: u64 = 2;

/// 200 programs, 4 in `make test`: what they do follows from their seeds. `GODWIT_TORTURE_SEED` (the first seed) makes it
/// others, `GODWIT_TORTURE_TIMES` more or fewer, and `GODWIT_TORTURE_CRIU` takes another CRIU.
#[test]
fn random_programs() {
    let number = |name: &str| env::var(name).ok().map(|number| number.parse::<u64>().unwrap());
    let seed = number("GODWIT_TORTURE_SEED").unwrap_or(1);
    let (at_once, times) =
        if tier::is_full() { (AT_ONCE, TIMES) } else { (AT_ONCE_IN_SHORT, TIMES_IN_SHORT) };
    let times = number("GODWIT_TORTURE_TIMES").unwrap_or(times);
    println!("to repeat: GODWIT_TORTURE_SEED={seed} GODWIT_TORTURE_TIMES={times}");
    let mut torture: Option<Torture> = None;
    for time in 0..times {
        let first = seed + time * at_once;
        let programs: Vec<_> = (first..first + at_once).map(|seed| ("random", seed)).collect();
        let torture = match &mut torture {
            Some(torture) => {
                torture.replace(&programs);
                torture
            }
            none => none.insert(Torture::start("random", &programs)),
        };
        // Each mode follows each other one, once with everything compared and once at full speed.
        let mode = |n: u64| MODES[usize::try_from((time + n * (1 + time / 4)) % 4).unwrap()];
        torture.move_compared(mode(0));
        torture.move_freely(mode(1));
    }
}
