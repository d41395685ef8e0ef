//! Every fault, one conversation each: what two nodes do about it, until both have come to rest.
//!
//! | | `cargo test` | with `GODWIT_TEST_FULL=1` |
//! |---|---|---|
//! | cold, restored from images | every fault; a daemon is killed before each step | and after each step |
//! | pre-copy after a preparation | cuts, and a kill at each record | of both daemons, and cancellations |
//! | post-copy | cuts, and kills at each record | every fault |
//! | pre-copy, hybrid | none | every fault |

use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use godwit_memory::tracker::Backend;
use godwit_policy::Mode;

use super::process::Process;
use super::script::Deed;
use super::wire::{Cut, Slow, Way as Along};
use super::world::{Ended, Fault, Side, Way, play};
use crate::resources::ArrivalEnd;

const COLD: Way =
    Way { mode: Mode::Cold, lazy: false, reads: true, tracker: Backend::None, begins: 0, ahead: false };
const PRECOPY: Way =
    Way { mode: Mode::Precopy, lazy: false, reads: true, tracker: Backend::Uffd, begins: 0, ahead: false };
const POSTCOPY: Way =
    Way { mode: Mode::Postcopy, lazy: true, reads: true, tracker: Backend::None, begins: 0, ahead: false };
const HYBRID: Way =
    Way { mode: Mode::Hybrid, lazy: true, reads: true, tracker: Backend::Uffd, begins: 0, ahead: false };
/// Its files are sent ahead first.
const AHEAD: Way = Way { ahead: true, ..PRECOPY };
/// Nobody asks for a page: all are pushed.
const UNREAD: Way = Way { reads: false, ..POSTCOPY };

/// The connections of a migration with one stream, in the order in which they are made; and how many there are.
const CONVERSATION: usize = 0;
const PAGES: usize = 1;
const ONE_STREAM: usize = 3;

/// Conversations at the same time: what one does after a fault is mostly to wait.
const AT_ONCE: usize = 8;

/// How often what happens at the same time is given a chance to meet in another order.
const OFTEN: usize = 64;

/// Most that is told of what went wrong.
const TOLD: usize = 5;

/// Plays conversations, numbered from 0, as long as their faults come to pass; how many moved, and how many stayed.
fn all(way: Way, fault: impl Fn(usize) -> Fault + Sync) -> (usize, usize) {
    let (next, end, wrong) = (AtomicUsize::new(0), AtomicUsize::new(usize::MAX), Mutex::new(Vec::new()));
    let (moved, kept, begun) = (AtomicUsize::new(0), AtomicUsize::new(0), Instant::now());
    let work = || {
        loop {
            let number = next.fetch_add(1, Ordering::SeqCst);
            if number >= end.load(Ordering::SeqCst) {
                return;
            }
            match play(way, fault(number)) {
                Ok(ended) => {
                    let count = if ended.moved { &moved } else { &kept };
                    count.fetch_add(1, Ordering::SeqCst);
                    if !ended.happened {
                        end.fetch_min(number, Ordering::SeqCst);
                    }
                }
                Err(what) => wrong.lock().unwrap().push(what),
            }
        }
    };
    std::thread::scope(|scope| (0..AT_ONCE).for_each(|_| drop(scope.spawn(work))));
    let (wrong, took) = (wrong.into_inner().unwrap(), begun.elapsed());
    let (moved, kept) = (moved.into_inner(), kept.into_inner());
    println!(
        "{:?}, {:?} and on: {moved} moved, {kept} stayed, {} wrong, in {took:?}",
        way.mode,
        fault(0),
        wrong.len()
    );
    let told: Vec<_> = wrong.iter().take(TOLD).map(String::as_str).collect();
    assert!(wrong.is_empty(), "{} conversations end wrong:\n{}", wrong.len(), told.join("\n"));
    (moved, kept)
}

/// The same, where faults come to pass before and after the commit.
fn both(way: Way, fault: impl Fn(usize) -> Fault + Sync) {
    let (moved, kept) = all(way, fault);
    assert!(moved > 0 && kept > 0, "there are faults on both sides of the commit");
}

fn cuts(way: Way) {
    for connection in 0..3 {
        for along in [Along::There, Along::Back] {
            both(way, |records| Fault::Cut(Cut::After { connection, way: along, records }));
        }
    }
}

fn failures(way: Way) {
    for side in [Side::Source, Side::Destination] {
        both(way, |step| Fault::Step(side, step, Deed::Fail));
    }
}

fn cancellations(way: Way) {
    both(way, |step| Fault::Step(Side::Source, step, Deed::Cancel));
    both(way, Fault::Cancel);
}

fn kills_at_records(way: Way) {
    for side in [Side::Source, Side::Destination] {
        both(way, |record| Fault::Crash(side, record));
    }
    both(way, Fault::CrashBoth);
}

fn kills_at_steps(way: Way) {
    for side in [Side::Source, Side::Destination] {
        both(way, |step| Fault::Step(side, step, Deed::CrashBefore));
        if is_full() {
            both(way, |step| Fault::Step(side, step, Deed::CrashAfter));
        }
    }
}

/// Plays an untouched conversation, in which the service moves.
fn untouched(way: Way) -> Ended {
    let ended = moved(way, Fault::Nothing);
    assert_eq!(ended.arrivals, [ArrivalEnd::Moved], "{ended:?}");
    ended
}

/// The same over a connection that is slow.
fn slow(way: Way, connection: usize, along: Along, each: Duration) -> Ended {
    moved(way, Fault::Slow(Slow { connection, way: along, each }))
}

fn moved(way: Way, fault: Fault) -> Ended {
    let ended = play(way, fault).unwrap_or_else(|wrong| panic!("{wrong}"));
    assert!(ended.moved && ended.reason.is_empty(), "{ended:?}");
    ended
}

/// Whether processes can be restored here before their pages are there: they have numbers of their own, and the kernel
/// asks for their pages.
fn is_lazy() -> bool {
    let process = Process::new();
    let can = process.space() == 1 && process.lack().is_some();
    if !can {
        eprintln!(
            "no PID namespaces or no userfaultfd for this user: nothing is restored before its pages are there"
        );
    }
    can
}

fn is_full() -> bool {
    std::env::var_os("GODWIT_TEST_FULL").is_some_and(|value| value == "1")
}

#[test]
fn a_service_moves_with_its_memory_however_often() {
    let moves = || (0..OFTEN / AT_ONCE).for_each(|_| drop(untouched(COLD)));
    std::thread::scope(|scope| (0..AT_ONCE).for_each(|_| drop(scope.spawn(moves))));
}

#[test]
fn a_service_moves_with_its_memory_in_each_mode() {
    untouched(PRECOPY);
    if is_lazy() {
        untouched(POSTCOPY);
        untouched(HYBRID);
    }
}

#[test]
fn a_service_in_which_its_engine_begins_a_command_is_frozen_when_that_has_ended() {
    let Ended { phases, frozen_ms, .. } = untouched(Way { begins: 3, ..PRECOPY });
    // Clients have waited for all tries.
    assert!(phases[0].phase == "tries" && phases[0].ms > 0.0, "{phases:?}");
    let sum: f64 = phases.iter().map(|phase| phase.ms).sum();
    assert!((sum - frozen_ms).abs() < 0.001, "{frozen_ms} of {phases:?}");
    let always =
        play(Way { begins: u32::MAX, ..PRECOPY }, Fault::Nothing).unwrap_or_else(|wrong| panic!("{wrong}"));
    assert!(!always.moved && always.reason.contains("further commands running in it"), "{always:?}");
}

#[test]
fn a_move_that_leaves_nothing_behind_is_over_when_the_service_runs() {
    if is_lazy() {
        let Ended { took, .. } = untouched(HYBRID);
        // A stream that cannot be closed is given up after as long as a silent link.
        assert!(took < Duration::from_secs(3), "{took:?}");
    }
}

#[test]
fn pages_that_come_late_are_not_counted_as_the_restore() {
    let eager = Way { lazy: true, ..PRECOPY };
    for way in [Some(COLD), is_lazy().then_some(eager)].into_iter().flatten() {
        let Ended { phases, .. } = slow(way, PAGES, Along::There, Duration::from_millis(500));
        let of = |name: &str| phases.iter().find(|phase| phase.phase == name).map_or(0.0, |phase| phase.ms);
        // Some of it passes beside the transfer, and beside the restore where that does not wait: far less, however busy
        // the machine is.
        assert!(of("pages") > 50.0, "{way:?}: {phases:?}");
    }
}

#[test]
fn a_destination_that_says_late_that_it_has_all_is_not_connected_to_again() {
    if is_lazy() {
        let Ended { connections, .. } = slow(POSTCOPY, CONVERSATION, Along::Back, Duration::from_millis(50));
        assert_eq!(connections, ONE_STREAM, "the conversation, a stream for pages, one for faults");
    }
}

#[test]
fn cold_each_connection_may_be_cut_after_each_record() {
    cuts(COLD);
}

#[test]
fn cold_each_step_may_fail() {
    failures(COLD);
}

#[test]
fn cold_a_user_may_cancel_at_each_step_and_record() {
    cancellations(COLD);
}

#[test]
fn cold_a_daemon_may_be_killed_at_each_step() {
    kills_at_steps(COLD);
}

#[test]
fn cold_one_daemon_or_both_may_be_killed_at_each_record() {
    kills_at_records(COLD);
}

#[test]
fn a_move_begins_with_files_that_were_sent_ahead() {
    let Ended { ahead, connections, .. } = untouched(AHEAD);
    assert!(ahead > 0);
    assert_eq!(connections, 2 * ONE_STREAM);
    assert_eq!(untouched(COLD).ahead, 0);
}

#[test]
fn a_preparation_outlasts_every_fault_and_so_does_the_move_after_it() {
    // The conversation of the preparation, and that of the move.
    for connection in [CONVERSATION, ONE_STREAM] {
        for along in [Along::There, Along::Back] {
            all(AHEAD, |records| Fault::Cut(Cut::After { connection, way: along, records }));
        }
    }
    for side in [Side::Source, Side::Destination] {
        both(AHEAD, |record| Fault::Crash(side, record));
    }
    if is_full() {
        both(AHEAD, Fault::CrashBoth);
        both(AHEAD, Fault::Cancel);
    }
}

#[test]
fn postcopy_each_connection_may_be_cut_after_each_record() {
    if is_lazy() {
        cuts(POSTCOPY);
    }
}

#[test]
fn postcopy_one_daemon_or_both_may_be_killed_at_each_record() {
    if is_lazy() {
        kills_at_records(POSTCOPY);
    }
}

#[test]
fn each_step_of_a_destination_may_fail_where_no_page_is_asked_for() {
    if is_lazy() {
        both(UNREAD, |step| Fault::Step(Side::Destination, step, Deed::Fail));
    }
}

#[test]
fn all_modes_outlast_every_fault() {
    let further = |way| {
        failures(way);
        cancellations(way);
        kills_at_steps(way);
    };
    if !is_full() {
        return;
    }
    cuts(PRECOPY);
    kills_at_records(PRECOPY);
    further(PRECOPY);
    if is_lazy() {
        further(POSTCOPY);
        cuts(HYBRID);
        kills_at_records(HYBRID);
        further(HYBRID);
    }
}
