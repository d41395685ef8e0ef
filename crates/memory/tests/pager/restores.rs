//! What CRIU's restorer may say.

use std::io::Write;

use godwit_memory::pager::{Event, Extent};

use crate::child::{Child, Op, P};
use crate::service::{Criu, Pager, tags};
use crate::{BASE, restored};

#[test]
fn several_processes_and_zombies_are_restored_over_one_connection() {
    let pager = Pager::new();
    for space in [1, 2, 3, 900] {
        pager.put(space, BASE, &tags(space, BASE, 500, 0));
    }
    pager.client.zero(&[Extent { space: 3, addr: BASE, pages: 500 }]).unwrap();
    let children: Vec<_> = [1, 2, 3, 900].map(|space| (space, Child::new())).into();
    let mut criu = Criu::connect(&pager);
    criu.zombie(4);
    for (space, child) in &children {
        criu.process(*space, &child.ask_fd(Op::Uffd));
        child.ask(Op::Register, BASE, 500, 0);
        child.ask(Op::Close, 0, 0, 0);
    }
    criu.zombie(5);
    criu.finished();
    pager.client.push().unwrap();
    assert_eq!(pager.event(), Event::RestoreFinished);
    assert_eq!(pager.event(), Event::Done);
    for (space, child) in &children {
        let wanted =
            if *space == 3 { vec![0; 500] } else { tags(u32::try_from(*space).unwrap(), BASE, 500, 0) };
        assert_eq!(child.ask(Op::Read, BASE, 500, 0), wanted, "space {space}");
    }
}

#[test]
fn a_space_whose_process_never_came_is_forgotten() {
    let pager = Pager::new();
    pager.put(7, BASE, &tags(7, BASE, 5, 0));
    pager.put(8, BASE, &tags(8, BASE, 5, 0));
    pager.pending(9, BASE, 5);
    let child = restored(&pager, 5);
    let state = pager.client.state().unwrap();
    assert_eq!((state.stored, state.pending), (5, 0));
    pager.client.push().unwrap();
    assert_eq!(pager.event(), Event::Done);
    assert_eq!(child.ask(Op::Read, BASE, 5, 0), tags(7, BASE, 5, 0));
    pager.wait_for_empty_store();
}

#[test]
fn a_restore_that_failed_can_be_tried_again_with_every_page() {
    let pager = Pager::new();
    let wanted = tags(7, BASE, 50, 0);
    pager.put(7, BASE, &wanted);
    let first = Child::new();
    let mut criu = Criu::connect(&pager);
    criu.process(7, &first.ask_fd(Op::Uffd));
    first.ask(Op::Register, BASE, 50, 0);
    // The restorer itself touches pages.
    assert_eq!(first.ask(Op::Read, BASE + 10 * P, 5, 0), wanted[10..15]);
    drop(criu);
    assert!(matches!(pager.event(), Event::RestoreFailed { .. }));
    drop(first);
    let state = pager.client.state().unwrap();
    assert!(state.restore_failed.contains("went away"), "{state:?}");
    assert_eq!((state.spaces, state.stored), (0, 50));
    let child = restored(&pager, 50);
    pager.client.push().unwrap();
    assert_eq!(pager.event(), Event::Done);
    assert_eq!(child.ask(Op::Read, BASE, 50, 0), wanted);
}

#[test]
fn what_criu_never_says_fails_the_restore() {
    let pager = Pager::new();
    pager.client.listen(pager.path()).unwrap();
    let socket = pager.path().join("lazy-pages.socket");
    for (bytes, why) in [
        (&[0_u8, 0, 0, 0][..], "number 0"),
        (&[7, 0, 0, 0, 0], "without its userfaultfd"),
        (&[7, 0], "before the restore was finished"),
    ] {
        let mut criu = std::os::unix::net::UnixStream::connect(&socket).unwrap();
        criu.write_all(bytes).unwrap();
        drop(criu);
        match pager.event() {
            Event::RestoreFailed { reason } => assert!(reason.contains(why), "{reason}"),
            other => panic!("{other:?}"),
        }
    }
    // And after all that it still works.
    pager.put(7, BASE, &tags(7, BASE, 5, 0));
    restored(&pager, 5);
}

#[test]
fn pages_that_come_while_criu_is_at_work_are_not_lost() {
    let pager = Pager::new();
    pager.put(7, BASE, &tags(7, BASE, 5, 0));
    let child = Child::new();
    let mut criu = Criu::connect(&pager);
    criu.process(7, &child.ask_fd(Op::Uffd));
    child.ask(Op::Register, BASE, 20, 0);
    assert_eq!(child.ask(Op::Read, BASE, 2, 0), tags(7, BASE, 2, 0));
    pager.put(7, BASE + 5 * P, &tags(7, BASE + 5 * P, 5, 0));
    pager.pending(7, BASE + 10 * P, 5);
    // CRIU's word comes over another socket: this says that the pager has taken all that was sent.
    pager.client.state().unwrap();
    child.ask(Op::Close, 0, 0, 0);
    criu.finished();
    pager.put(7, BASE + 10 * P, &tags(7, BASE + 10 * P, 5, 0));
    pager.client.push().unwrap();
    pager.wait_for(&Event::RestoreFinished);
    pager.wait_for(&Event::Done);
    let mut wanted = tags(7, BASE, 15, 0);
    wanted.extend([0; 5]);
    assert_eq!(child.ask(Op::Read, BASE, 20, 0), wanted);
}

#[test]
fn pages_outside_of_registered_areas_are_passed_over() {
    let pager = Pager::new();
    // CRIU restores some areas itself; the pages of one run lie in both kinds, and in none.
    pager.put(7, BASE, &tags(7, BASE, 300, 0));
    pager.in_images(7, BASE, 10);
    pager.in_images(7, BASE + 110 * P, 3);
    let child = Child::new();
    let mut criu = Criu::connect(&pager);
    criu.process(7, &child.ask_fd(Op::Uffd));
    child.ask(Op::Map, BASE, 10, 0);
    child.ask(Op::Register, BASE + 10 * P, 100, 0);
    child.ask(Op::Map, BASE + 110 * P, 3, 0);
    child.ask(Op::Register, BASE + 113 * P, 100, 0);
    child.ask(Op::Close, 0, 0, 0);
    criu.finished();
    pager.client.push().unwrap();
    pager.wait_for(&Event::RestoreFinished);
    pager.wait_for(&Event::Done);
    let mut wanted = tags(7, BASE, 213, 0);
    wanted[..10].fill(0);
    wanted[110..113].fill(0);
    assert_eq!(child.ask(Op::Read, BASE, 213, 0), wanted);
}
