//! Every kind of mapping, filled with a pattern and checked all the time, moves in every mode: with this
//! machine's setting of transparent huge pages, and where the kernel hands them out wherever it can. Needs
//! root. The settings belong to the whole machine; `scripts/with-huge-pages` puts them back.
//!
//! `GODWIT_PATTERN_MOVES` makes it more or fewer moves of each service than one in each mode, and
//! `GODWIT_TORTURE_CRIU` takes another CRIU.
#![allow(clippy::unwrap_used)]

use std::{env, path::PathBuf};

use godwit_tests::{
    Bed, Moves,
    pattern::{Pattern, has_run_with_huge_pages},
    torture::MODES,
};

/// The name of a test as the program that has it knows it.
macro_rules! named {
    ($name:ident) => {
        concat!(module_path!(), "::", stringify!($name)).split_once("::").unwrap().1
    };
}

/// A service with huge pages and one without (PR_SET_THP_DISABLE), each moved to and fro.
fn move_both(test: &str) {
    let moves = env::var("GODWIT_PATTERN_MOVES").map_or(MODES.len(), |number| number.parse().unwrap());
    let bed = Bed::up_with(test, |config| {
        config.programs.criu = env::var_os("GODWIT_TORTURE_CRIU").map(PathBuf::from);
    });
    let services = [Pattern::start(&bed, "pattern", 71, true), Pattern::start(&bed, "without", 72, false)];
    for mut service in services {
        let reports = (0..moves).map(|n| service.move_and_check(&bed, MODES[n % MODES.len()]));
        println!("{}", Moves(reports.collect()));
    }
}

#[test]
fn every_kind_of_mapping_moves_in_every_mode() {
    move_both("pattern");
}

#[test]
fn every_kind_of_mapping_moves_in_every_mode_where_huge_pages_are_always() {
    if has_run_with_huge_pages(named!(every_kind_of_mapping_moves_in_every_mode_where_huge_pages_are_always))
    {
        return;
    }
    move_both("huge");
}
