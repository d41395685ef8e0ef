//! Every fault in every phase of every mode: before the commit the service stays where it was, after
//! it the destination has it, and nothing is lost either way. Needs root.

use godwit_tests::matrix::{Fault, run};

#[test]
fn the_link_is_cut() {
    run(Fault::Cut);
}

#[test]
fn the_sources_daemon_is_killed() {
    run(Fault::Source);
}

#[test]
fn the_destinations_daemon_is_killed() {
    run(Fault::Destination);
}

#[test]
fn the_pager_is_killed() {
    run(Fault::Pager);
}

#[test]
fn the_pager_is_killed_while_nobody_looks() {
    run(Fault::PagerUnseen);
}

#[test]
fn the_destination_runs_out_of_memory() {
    run(Fault::Memory);
}
