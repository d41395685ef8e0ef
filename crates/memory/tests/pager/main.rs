//! The pager with real processes and real userfaultfds: needs root, or a kernel that gives everybody
//! userfaultfd. The test plays the daemon and CRIU.
#![allow(clippy::unwrap_used)]

mod child;
mod service;

use child::{Child, Op, P};
use godwit_memory::pager::Event;
use service::{Criu, Pager, tags};

/// Where the tests map: far from everything that the kernel chooses.
const BASE: u64 = 0x1000_0000_0000;

/// Not a test: what [`Child`] runs.
#[test]
#[ignore = "run by the other tests"]
fn child_process() {
    child::main();
}

/// A child with one registered area that is restored as process 7.
fn restored(pager: &Pager, pages: u64) -> Child {
    let child = Child::new();
    let uffd = child.ask_fd(Op::Uffd);
    let mut criu = Criu::connect(pager);
    criu.process(7, &uffd);
    drop(uffd);
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
    // One page by a fault before the push.
    assert_eq!(child.ask(Op::Read, BASE + 5 * P, 1, 0), wanted[5..6]);
    pager.client.push().unwrap();
    pager.wait_for(&Event::Done);
    assert_eq!(child.ask(Op::Read, BASE, 2000, 0), wanted);
    assert_eq!(child.ask(Op::Read, BASE + 2000 * P, 1000, 0), vec![0; 1000]);
    let state = pager.client.state().unwrap();
    assert!(state.done && state.restore_finished);
    assert_eq!((state.installed, state.stored, state.spaces), (2000, 0, 0));
    pager.client.finish().unwrap();
    pager.wait_for_end();
}
