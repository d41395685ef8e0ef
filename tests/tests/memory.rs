//! The memory of programs that change it in every way there is, compared byte by byte after each
//! move, in every mode. Needs root.
#![allow(clippy::unwrap_used)]

use godwit_tests::torture::{MODES, Torture};

/// Moves programs of one case with every mode, and then once more at full speed.
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
    files_written_through_mappings: "filewrite",
    mappings_larger_than_the_machine: "sparse",
    locked_memory: "lock",
    guard_pages: "guard",
    processes_that_come_and_go: "churn",
}
