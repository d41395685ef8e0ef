//! The memory of programs that change it in every way there is, compared byte by byte after each
//! move, in every mode. Needs root.
#![allow(clippy::unwrap_used)]

use std::env;

use godwit_tests::torture::{MODES, Torture};

/// Moves programs of one case with every mode, and then once more at full speed, because comparing
/// brings all pages to the destination before the programs run there.
fn compare(case: &str) {
    let mut torture = Torture::start(case, &[(case, 1), (case, 2)]);
    for mode in MODES {
        torture.move_compared(mode);
    }
    for mode in ["postcopy", "hybrid"] {
        torture.move_freely(mode);
    }
}

macro_rules! cases {
    ($($name:ident: $case:literal),* $(,)?) => { $( #[test] fn $name() { compare($case); } )* };
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
/// docs/migration.md), so that only modes without that can be asked this.
#[test]
fn guard_pages_that_nobody_tells_of() {
    let mut torture = Torture::start("guard", &[("guard", 1), ("guard", 2)]);
    for mode in ["precopy", "cold", "precopy"] {
        torture.move_compared(mode);
    }
}

/// Programs at once in one service, and how often there are as many.
const AT_ONCE: u64 = 10;
const TIMES: u64 = 20;

/// 200 programs: what they do follows from their seeds. `GODWIT_TORTURE_SEED` (the first seed) makes it
/// others, `GODWIT_TORTURE_TIMES` more or fewer, and `GODWIT_TORTURE_CRIU` takes another CRIU.
#[test]
fn random_programs() {
    let number = |name: &str| env::var(name).ok().map(|number| number.parse::<u64>().unwrap());
    let seed = number("GODWIT_TORTURE_SEED").unwrap_or(1);
    let times = number("GODWIT_TORTURE_TIMES").unwrap_or(TIMES);
    println!("to repeat: GODWIT_TORTURE_SEED={seed} GODWIT_TORTURE_TIMES={times}");
    let mut torture: Option<Torture> = None;
    for time in 0..times {
        let first = seed + time * AT_ONCE;
        let programs: Vec<_> = (first..first + AT_ONCE).map(|seed| ("random", seed)).collect();
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
