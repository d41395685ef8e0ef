//! Every kind of mapping, filled with a pattern and checked all the time, moves in every mode: with this
//! machine's setting of transparent huge pages, and where the kernel hands them out wherever it can. Needs
//! root. The settings belong to the whole machine; `scripts/with-huge-pages` puts them back.
//!
//! `GODWIT_PATTERN_MINUTES` makes it as many moves as there is time for, in place of one of each service in each mode,
//! and `GODWIT_TORTURE_CRIU` takes another CRIU.

use std::{
    env,
    path::PathBuf,
    time::{Duration, Instant},
};

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

/// A service with huge pages and one without (PR_SET_THP_DISABLE), moved to and fro in turns.
fn move_both(test: &str) {
    let minutes = env::var("GODWIT_PATTERN_MINUTES").ok().map(|text| text.parse::<u64>().unwrap());
    let time = minutes.map(|minutes| Duration::from_secs(60 * minutes));
    let bed = Bed::up_with(test, |config| {
        config.programs.criu = env::var_os("GODWIT_TORTURE_CRIU").map(PathBuf::from);
    });
    let mut services =
        [Pattern::start(&bed, "pattern", 71, true), Pattern::start(&bed, "without", 72, false)];
    let begun = Instant::now();
    let mut reports: [Vec<_>; 2] = Default::default();
    for number in 0.. {
        if time.map_or(number == MODES.len(), |time| begun.elapsed() >= time) {
            break;
        }
        for (service, reports) in services.iter_mut().zip(&mut reports) {
            reports.push(service.move_and_check(&bed, MODES[number % MODES.len()]));
        }
    }
    reports.into_iter().for_each(|reports| println!("{}", Moves(reports)));
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
    move_both("eager");
}
