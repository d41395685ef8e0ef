//! Processes that change their address space while they are being filled.

use godwit_memory::pager::Event;

use crate::child::{Child, Op, P};
use crate::service::{Pager, tags};
use crate::{BASE, ELSEWHERE, restored};

#[test]
fn forked_processes_have_every_page() {
    let pager = Pager::new();
    let wanted = tags(7, BASE, 20_000, 0);
    pager.put(7, BASE, &wanted);
    let child = restored(&pager, 20_100);
    // A family from before the push, and one that is made while it goes on.
    let mut family: Vec<Child> = vec![child.another(Op::Fork)];
    family.push(family[0].another(Op::Fork));
    assert_eq!(pager.client.state().unwrap().spaces, 3);
    pager.client.push().unwrap();
    for _ in 0..3 {
        let son = child.another(Op::Fork);
        family.push(son.another(Op::Fork));
        family.push(son);
    }
    family.push(child);
    for (seed, process) in (0..).zip(&family) {
        process.tell(Op::Write, BASE + seed * P, 1, 1000 + seed);
    }
    for process in &family {
        process.answer();
        process.tell(Op::Read, BASE, 20_100, 0);
    }
    for (seed, process) in (0..).zip(&family) {
        let mut wanted = wanted.clone();
        wanted.extend([0; 100]);
        wanted[seed] = 1000 + seed as u64;
        assert!(process.answer().0 == wanted, "process {seed}");
    }
    pager.wait_for(&Event::Done);
    pager.wait_for_empty_store();
}

#[test]
fn a_forked_process_has_empty_what_its_parent_has_said_and_the_parent_has_not() {
    let pager = Pager::new();
    let wanted = tags(7, BASE, 8, 0);
    pager.put(7, BASE, &wanted);
    pager.wiped_on_fork(7, BASE + 2 * P, 3);
    let child = restored(&pager, 8);
    child.ask(Op::WipeOnFork, BASE + 2 * P, 3, 0);
    // Nothing has come yet: the kernel has nothing to leave out.
    let son = child.another(Op::Fork);
    let of_son = son.ask(Op::Read, BASE, 8, 0);
    pager.client.push().unwrap();
    let mut empty = wanted.clone();
    empty[2..5].fill(0);
    assert_eq!(of_son, empty);
    assert_eq!(child.ask(Op::Read, BASE, 8, 0), wanted);
    pager.wait_for(&Event::Done);
    assert_eq!(son.ask(Op::Read, BASE, 8, 0), empty);
}

#[test]
fn a_forked_process_that_lacks_nothing_keeps_nobody_waiting() {
    let pager = Pager::new();
    pager.pending(7, BASE, 4);
    pager.wiped_on_fork(7, BASE, 4);
    let child = restored(&pager, 4);
    child.ask(Op::WipeOnFork, BASE, 4, 0);
    let _son = child.another(Op::Fork);
    pager.client.push().unwrap();
    pager.put(7, BASE, &tags(7, BASE, 4, 0));
    pager.wait_for(&Event::Done);
}

#[test]
fn what_follows_at_once_to_where_something_has_moved_away_from_keeps_its_pages() {
    const PAGES: u64 = 4;
    const ROUNDS: u64 = 200;
    let pager = Pager::new();
    let wanted = tags(7, BASE, 2 * PAGES * ROUNDS, 0);
    pager.put(7, BASE, &wanted);
    let child = restored(&pager, 2 * PAGES * ROUNDS);
    let follower = child.another(Op::Thread);
    for round in 0..ROUNDS {
        // The kernel tells of the first move, and that its old place is unmapped once its thread has run again.
        let (first, second) = (BASE + 2 * round * PAGES * P, BASE + (2 * round + 1) * PAGES * P);
        follower.tell(Op::Follow, second, PAGES, first);
        child.ask(Op::Remap, first, PAGES, ELSEWHERE + round * PAGES * P);
        follower.answer();
    }
    for round in 0..ROUNDS {
        let at = usize::try_from(2 * round * PAGES).unwrap();
        let (first, second) = wanted[at..].split_at(usize::try_from(PAGES).unwrap());
        let place = BASE + 2 * round * PAGES * P;
        assert_eq!(child.ask(Op::Read, place, PAGES, 0), second[..first.len()], "round {round}");
        assert_eq!(child.ask(Op::Read, ELSEWHERE + round * PAGES * P, PAGES, 0), first, "round {round}");
    }
    pager.client.push().unwrap();
    pager.wait_for(&Event::Done);
}

#[test]
fn a_fork_in_the_middle_of_waiting_faults_leaves_both_with_their_pages() {
    let pager = Pager::new();
    pager.pending(7, BASE, 4);
    let child = restored(&pager, 4);
    let thread = child.another(Op::Thread);
    thread.tell(Op::Read, BASE, 1, 0);
    assert_eq!(pager.event(), Event::Fault { space: 7, addr: BASE });
    let son = child.another(Op::Fork);
    son.tell(Op::Read, BASE, 4, 0);
    pager.client.push().unwrap();
    pager.put(7, BASE, &[1]);
    assert_eq!(thread.answer().0, [1]);
    assert_eq!(pager.event(), Event::Fault { space: 7, addr: BASE + P });
    pager.put(7, BASE + P, &[2, 3, 4]);
    assert_eq!(son.answer().0, [1, 2, 3, 4]);
    pager.wait_for(&Event::Done);
    assert_eq!(child.ask(Op::Read, BASE, 4, 0), [1, 2, 3, 4]);
}

#[test]
fn pages_that_move_during_the_push_arrive_where_they_moved() {
    let pager = Pager::new();
    let wanted = tags(7, BASE, 16_384, 0);
    pager.put(7, BASE, &wanted);
    let child = restored(&pager, 16_384);
    let reader = child.another(Op::Thread);
    // The last put is pushed first, so there is a race from the start.
    pager.client.push().unwrap();
    for i in 0..64 {
        let from = BASE + i * 256 * P;
        let to = ELSEWHERE + (63 - i) * 300 * P;
        assert_eq!(child.ask(Op::Remap, from, 256, to), [1; 256]);
        // And some there and back.
        if i % 4 == 0 {
            assert_eq!(child.ask(Op::Remap, to, 256, from), [1; 256]);
            assert_eq!(child.ask(Op::Remap, from, 256, to), [1; 256]);
        }
        reader.tell(Op::Read, to, 256, 0);
        let page = usize::try_from(i * 256).unwrap();
        assert!(reader.answer().0 == wanted[page..page + 256], "move {i}");
    }
    pager.wait_for(&Event::Done);
}

#[test]
fn pages_that_are_thrown_away_read_as_zero() {
    let pager = Pager::new();
    pager.put(7, BASE, &tags(7, BASE, 16_384, 0));
    let child = restored(&pager, 16_384);
    pager.client.push().unwrap();
    let mut wanted = tags(7, BASE, 16_384, 0);
    for i in 0..200_u64 {
        let page = (i * 7919) % 16_000;
        child.ask(Op::DontNeed, BASE + page * P, 50, 0);
        let page = usize::try_from(page).unwrap();
        wanted[page..page + 50].fill(0);
        if i % 3 == 0 {
            child.ask(Op::Write, BASE + page as u64 * P, 1, 5);
            wanted[page] = 5;
        }
    }
    assert!(child.ask(Op::Read, BASE, 16_384, 0) == wanted);
    pager.wait_for(&Event::Done);
    assert!(child.ask(Op::Read, BASE, 16_384, 0) == wanted);
    pager.wait_for_empty_store();
}

#[test]
fn a_mapping_in_the_place_of_another_is_new() {
    let pager = Pager::new();
    pager.put(7, BASE, &tags(7, BASE, 16_384, 0));
    let child = restored(&pager, 16_384);
    pager.client.push().unwrap();
    let mut wanted = tags(7, BASE, 16_384, 0);
    for i in 0..100_u64 {
        let page = i * 160;
        child.ask(Op::Unmap, BASE + page * P, 33, 0);
        child.ask(Op::Map, BASE + page * P, 33, 0);
        let page = usize::try_from(page).unwrap();
        wanted[page..page + 33].fill(0);
    }
    assert!(child.ask(Op::Read, BASE, 16_384, 0) == wanted);
    pager.wait_for(&Event::Done);
    assert!(child.ask(Op::Read, BASE, 16_384, 0) == wanted);
}

#[test]
fn who_waits_for_a_page_that_is_thrown_away_goes_on() {
    let pager = Pager::new();
    pager.pending(7, BASE, 8);
    let child = restored(&pager, 8);
    let thread = child.another(Op::Thread);
    thread.tell(Op::Read, BASE + 2 * P, 1, 0);
    assert_eq!(pager.event(), Event::Fault { space: 7, addr: BASE + 2 * P });
    child.ask(Op::DontNeed, BASE, 8, 0);
    assert_eq!(thread.answer().0, [0]);
    pager.client.push().unwrap();
    // Nothing is wanted any more, although it never came.
    pager.wait_for(&Event::Done);
    assert_eq!(pager.client.state().unwrap().pending, 0);
}

#[test]
fn a_page_that_moved_while_it_was_asked_for_arrives_at_its_new_place() {
    let pager = Pager::new();
    pager.pending(7, BASE, 8);
    let child = restored(&pager, 8);
    let thread = child.another(Op::Thread);
    thread.tell(Op::Read, BASE + 2 * P, 1, 0);
    assert_eq!(pager.event(), Event::Fault { space: 7, addr: BASE + 2 * P });
    // The thread would die of a page that is not mapped.
    child.ask(Op::RemapAndKeep, BASE, 8, ELSEWHERE);
    assert_eq!(thread.answer().0, [0]);
    pager.put(7, BASE, &tags(7, BASE, 8, 0));
    pager.client.push().unwrap();
    assert_eq!(child.ask(Op::Read, ELSEWHERE, 8, 0), tags(7, BASE, 8, 0));
    pager.wait_for(&Event::Done);
}

#[test]
fn processes_that_end_do_not_keep_the_others_waiting() {
    let pager = Pager::new();
    pager.put(7, BASE, &tags(7, BASE, 10_000, 0));
    pager.pending(7, BASE + 10_000 * P, 10);
    let child = restored(&pager, 11_000);
    let son = child.another(Op::Fork);
    let grandson = son.another(Op::Fork);
    pager.client.push().unwrap();
    child.exit();
    son.exit();
    assert_eq!(grandson.ask(Op::Read, BASE, 10_000, 0), tags(7, BASE, 10_000, 0));
    grandson.exit();
    // That nobody is left is seen when the pages come.
    pager.put(7, BASE + 10_000 * P, &tags(7, BASE, 10, 0));
    pager.wait_for(&Event::Done);
    pager.wait_for_empty_store();
}

#[test]
fn more_processes_than_descriptors_by_default_are_watched() {
    let pager = Pager::new();
    pager.pending(7, BASE, 2);
    let child = restored(&pager, 2);
    // The usual soft limit is 1024.
    let _live: Vec<_> = (0..1100).map(|_| child.another(Op::Fork)).collect();
    let state = pager.client.state().unwrap();
    assert_eq!((state.failed.as_str(), state.spaces), ("", 1101));
    pager.client.push().unwrap();
    pager.put(7, BASE, &[1, 2]);
    pager.wait_for(&Event::Done);
    assert_eq!(child.ask(Op::Read, BASE, 2, 0), [1, 2]);
}

#[test]
fn what_has_ended_is_let_go_although_nothing_is_put_into_it() {
    let pager = Pager::new();
    pager.pending(7, BASE, 2);
    let child = restored(&pager, 2);
    for _ in 0..1000 {
        child.another(Op::Fork).exit();
    }
    assert!(pager.client.state().unwrap().spaces < 900);
    pager.client.push().unwrap();
    pager.put(7, BASE, &[1, 2]);
    pager.wait_for(&Event::Done);
}

#[test]
fn faults_are_answered_while_the_address_space_changes() {
    let pager = Pager::new();
    pager.put(7, BASE, &tags(7, BASE, 10_000, 0));
    let child = restored(&pager, 30_000);
    // The kernel answers EAGAIN to whoever fills pages while a change is under way.
    let readers: Vec<_> = (0..2).map(|_| child.another(Op::Thread)).collect();
    for (seed, reader) in (0..).zip(&readers) {
        reader.tell(Op::Shuffled, BASE, 20_000, seed);
    }
    for round in 0..400 {
        child.ask(Op::DontNeed, BASE + 20_000 * P, 10_000, 0);
        if round % 20 == 0 {
            child.another(Op::Fork).exit();
        }
    }
    let mut wanted = tags(7, BASE, 10_000, 0);
    wanted.extend(vec![0; 10_000]);
    for (seed, reader) in (0..).zip(&readers) {
        assert!(reader.answer().0 == crate::child::shuffled(&wanted, seed), "reader {seed}");
    }
    pager.client.push().unwrap();
    pager.wait_for(&Event::Done);
}
