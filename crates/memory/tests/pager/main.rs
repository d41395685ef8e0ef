//! The pager with real processes and real userfaultfds: needs root, or a kernel that gives everybody
//! userfaultfd. The test plays the daemon and CRIU.
#![allow(clippy::unwrap_used)]

mod child;
mod connections;
mod guards;
mod mappings;
mod measure;
mod presence;
mod random;
mod restores;
mod service;
mod shared;

use child::{Child, Op, P};
use godwit_memory::pager::Event;
use service::{Criu, Pager, tags};

/// Where the tests map: far from everything that the kernel chooses.
const BASE: u64 = 0x1000_0000_0000;

/// Another place.
const ELSEWHERE: u64 = 0x2000_0000_0000;

/// Not a test: what [`Child`] runs.
#[test]
#[ignore = "run by the other tests"]
fn child_process() {
    child::main();
}

/// A child with one registered area of so many pages at [`BASE`], restored as process 7.
fn restored(pager: &Pager, pages: u64) -> Child {
    let child = Child::new();
    let mut criu = Criu::connect(pager);
    criu.process(7, &child.ask_fd(Op::Uffd));
    child.ask(Op::Register, BASE, pages, 0);
    child.ask(Op::Close, 0, 0, 0);
    criu.finished();
    assert_eq!(pager.event(), Event::RestoreFinished);
    child
}

#[test]
fn every_page_arrives_and_the_store_empties() {
    let pager = Pager::new();
    let wanted = tags(7, BASE, 2000, 0);
    pager.put(7, BASE, &wanted);
    let child = restored(&pager, 3000);
    assert_eq!(pager.client.state().unwrap().stored, 2000);
    assert!(pager.store_bytes() >= 2000 * P);
    // One page by a fault before the push.
    assert_eq!(child.ask(Op::Read, BASE + 5 * P, 1, 0), wanted[5..6]);
    assert_eq!(pager.client.state().unwrap().faults, 1);
    pager.client.push().unwrap();
    pager.wait_for(&Event::Done);
    assert_eq!(child.ask(Op::Read, BASE, 2000, 0), wanted);
    assert_eq!(child.ask(Op::Read, BASE + 2000 * P, 1000, 0), vec![0; 1000]);
    let state = pager.client.state().unwrap();
    assert!(state.done && state.restore_finished);
    assert_eq!((state.installed, state.stored, state.spaces), (2000, 0, 0));
    pager.wait_for_empty_store();
    pager.client.abandon().unwrap();
    pager.wait_for_end();
}

#[test]
fn without_a_push_faults_alone_bring_every_page() {
    let pager = Pager::new();
    let wanted = tags(7, BASE, 300, 0);
    pager.put(7, BASE, &wanted);
    let child = restored(&pager, 400);
    let mut zeroed = wanted.clone();
    zeroed.extend([0; 100]);
    assert_eq!(child.ask(Op::Shuffled, BASE, 400, 1), child::shuffled(&zeroed, 1));
    assert!(!pager.client.state().unwrap().done);
    pager.client.push().unwrap();
    assert_eq!(pager.event(), Event::Done);
}

#[test]
fn a_page_at_the_source_is_asked_for_once_and_installed_where_it_is_waited_for() {
    let pager = Pager::new();
    pager.pending(7, BASE, 10);
    let child = restored(&pager, 10);
    let thread = child.another(Op::Thread);
    child.tell(Op::Read, BASE + 3 * P, 1, 0);
    assert_eq!(pager.event(), Event::Fault { space: 7, addr: BASE + 3 * P });
    thread.tell(Op::Read, BASE + 3 * P, 1, 0);
    pager.client.push().unwrap();
    assert_eq!(pager.client.state().unwrap().waiting, 1);
    assert!(!child.answers_within(50));
    pager.put(7, BASE + 3 * P, &[42]);
    assert_eq!(child.answer().0, [42]);
    assert_eq!(thread.answer().0, [42]);
    assert!(pager.events().try_next().is_none());
    let state = pager.client.state().unwrap();
    assert_eq!((state.waiting, state.pending, state.stored), (0, 9, 0));
    pager.put(7, BASE, &tags(7, BASE, 10, 1));
    assert_eq!(pager.event(), Event::Done);
    let mut wanted = tags(7, BASE, 10, 1);
    // What was installed is the process's own.
    wanted[3] = 42;
    assert_eq!(child.ask(Op::Read, BASE, 10, 0), wanted);
}

#[test]
fn threads_that_wait_for_different_pages_wait_at_the_same_time() {
    let pager = Pager::new();
    pager.pending(7, BASE, 4);
    let child = restored(&pager, 4);
    let threads: Vec<_> = (0..4).map(|_| child.another(Op::Thread)).collect();
    for (page, thread) in (0..).zip(&threads) {
        thread.tell(Op::Read, BASE + page * P, 1, 0);
    }
    // All are asked for before any has come, and each is answered by its own page.
    let mut asked: Vec<_> = (0..4).map(|_| pager.event()).collect();
    asked.sort_by_key(|event| match event {
        Event::Fault { addr, .. } => *addr,
        other => panic!("{other:?}"),
    });
    let wanted: Vec<_> = (0..4).map(|page| Event::Fault { space: 7, addr: BASE + page * P }).collect();
    assert_eq!(asked, wanted);
    let all: Vec<(u64, &child::Child)> = (0..).zip(&threads).collect();
    for (page, thread) in all.into_iter().rev() {
        pager.put(7, BASE + page * P, &[page + 40]);
        assert_eq!(thread.answer().0, [page + 40]);
    }
}

#[test]
fn a_pending_page_that_turns_out_to_be_zero_reads_as_zero() {
    let pager = Pager::new();
    pager.pending(7, BASE, 2);
    let child = restored(&pager, 2);
    child.tell(Op::Read, BASE, 1, 0);
    assert_eq!(pager.event(), Event::Fault { space: 7, addr: BASE });
    pager.zero(7, BASE, 2);
    assert_eq!(child.answer().0, [0]);
    pager.client.push().unwrap();
    assert_eq!(pager.event(), Event::Done);
    assert_eq!(child.ask(Op::Read, BASE, 2, 0), [0, 0]);
}

#[test]
fn pages_that_are_left_out_read_as_zero_whether_they_have_come_or_come_later() {
    let pager = Pager::new();
    pager.put(7, BASE, &tags(7, BASE, 10, 0));
    pager.pending(7, BASE + 10 * P, 4);
    // A process's address space, but for two pages that it keeps.
    let all = [(0, BASE / P + 2), (BASE + 4 * P, 1 << 30)];
    let all = all.map(|(addr, pages)| godwit_memory::pager::Extent { space: 7, addr, pages });
    pager.client.leave_out(&all).unwrap();
    assert_eq!(pager.client.missing().unwrap(), []);
    pager.put(7, BASE + P, &tags(7, BASE + P, 4, 1));
    pager.pending(7, BASE, 3);
    let missing = pager.client.missing().unwrap();
    assert_eq!(missing, [godwit_memory::pager::Extent { space: 7, addr: BASE + 2 * P, pages: 1 }]);
    let child = restored(&pager, 14);
    pager.client.push().unwrap();
    pager.put(7, BASE + 10 * P, &[7]);
    pager.put(7, BASE + 2 * P, &[8]);
    pager.wait_for(&Event::Done);
    let mut wanted = vec![0; 14];
    wanted[2] = 8;
    wanted[3] = tags(7, BASE + P, 4, 1)[2];
    assert_eq!(child.ask(Op::Read, BASE, 14, 0), wanted);
}

#[test]
fn of_several_puts_of_a_page_the_last_counts() {
    let pager = Pager::new();
    pager.put(7, BASE, &tags(7, BASE, 100, 0));
    pager.put(7, BASE + 20 * P, &tags(7, BASE + 20 * P, 30, 1));
    pager.put(7, BASE + 25 * P, &tags(7, BASE + 25 * P, 1, 2));
    pager.zero(7, BASE + 90 * P, 5);
    pager.pending(7, BASE + 40 * P, 2);
    pager.put(7, BASE + 41 * P, &[77]);
    let mut wanted = tags(7, BASE, 100, 0);
    wanted[20..50].copy_from_slice(&tags(7, BASE + 20 * P, 30, 1));
    wanted[25] = tags(7, BASE + 25 * P, 1, 2)[0];
    wanted[90..95].fill(0);
    wanted[41] = 77;
    assert_eq!(pager.client.missing().unwrap().len(), 1);
    let child = restored(&pager, 100);
    pager.client.push().unwrap();
    wanted[40] = 78;
    pager.put(7, BASE + 40 * P, &[78]);
    pager.wait_for(&Event::Done);
    assert_eq!(child.ask(Op::Read, BASE, 100, 0), wanted);
    pager.wait_for_empty_store();
}

#[test]
fn a_process_reads_right_while_it_is_filled() {
    let pager = Pager::new();
    let wanted = tags(7, BASE, 30_000, 0);
    pager.put(7, BASE, &wanted);
    let child = restored(&pager, 30_000);
    let readers: Vec<_> = (0..3).map(|_| child.another(Op::Thread)).collect();
    for (seed, reader) in (1..).zip(&readers) {
        reader.tell(Op::Shuffled, BASE, 30_000, seed);
    }
    pager.client.push().unwrap();
    pager.wait_for(&Event::Done);
    for (seed, reader) in (1..).zip(&readers) {
        let read = reader.answer().0;
        assert!(read == child::shuffled(&wanted, seed), "reader {seed}");
    }
}

#[test]
fn a_fault_brings_the_pages_that_lie_beside_it() {
    let pager = Pager::new();
    let all = tags(7, BASE, 64, 0);
    // In the store the second part is not beside the first, of which a page is still to come.
    pager.put(7, BASE + 36 * P, &all[36..64]);
    pager.put(7, BASE, &all[..20]);
    pager.put(7, BASE + 21 * P, &all[21..36]);
    pager.pending(7, BASE + 20 * P, 1);
    let child = restored(&pager, 64);
    let installed_after = |page: u64| {
        let read = child.ask(Op::Read, BASE + page * P, 1, 0);
        assert_eq!(read, all[usize::try_from(page).unwrap()..][..1]);
        let state = pager.client.state().unwrap();
        (state.faults, state.installed)
    };
    assert_eq!(installed_after(5), (1, 16));
    assert_eq!(installed_after(15), (1, 16));
    // Up to the page that is not there.
    assert_eq!(installed_after(17), (2, 20));
    // Between that page and the other part of the store.
    assert_eq!(installed_after(30), (3, 31));
    assert_eq!(installed_after(35), (4, 35));
    assert_eq!(installed_after(40), (5, 47));
    pager.put(7, BASE + 20 * P, &all[20..21]);
    pager.client.push().unwrap();
    pager.wait_for(&Event::Done);
    assert_eq!(child.ask(Op::Read, BASE, 64, 0), all);
}

#[test]
fn the_push_goes_on_when_late_pages_come() {
    let pager = Pager::new();
    pager.pending(7, BASE, 1000);
    let child = restored(&pager, 1000);
    pager.client.push().unwrap();
    for part in 0..10 {
        assert!(!pager.client.state().unwrap().done);
        let addr = BASE + part * 100 * P;
        pager.put(7, addr, &tags(7, addr, 100, 0));
    }
    pager.wait_for(&Event::Done);
    assert_eq!(pager.client.state().unwrap().faults, 0);
    assert_eq!(child.ask(Op::Read, BASE, 1000, 0), tags(7, BASE, 1000, 0));
}
