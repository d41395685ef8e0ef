//! A pager that is killed, and the guard that stays.

use godwit_memory::pager::{end, running};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use crate::child::Op;
use crate::service::{Pager, start, tags};
use crate::{BASE, restored};

/// How long a page that must not be given is waited for, in milliseconds.
const MOMENT: u16 = 300;

#[test]
fn a_process_whose_pager_was_killed_stands_still_rather_than_read_zeros() {
    let pager = Pager::new();
    pager.put(7, BASE, &tags(7, BASE, 10, 0));
    pager.pending(7, BASE + 10 * crate::P, 10);
    let child = restored(&pager, 20);
    let pid = Pid::from_raw(i32::try_from(pager.pid().unwrap()).unwrap());
    kill(pid, Signal::SIGKILL).unwrap();
    // Everybody learns it: the connection ends and the lock is free.
    pager.wait_for_end();
    child.tell(Op::Read, BASE, 20, 0);
    assert!(!child.answers_within(MOMENT));
    // Only now, and only because the test takes the place of one that kills the process first.
    end(pager.path()).unwrap();
    assert_eq!(child.answer().0.len(), 20);
}

#[test]
fn a_pager_and_its_guard_are_ended_together_and_another_can_start() {
    let pager = Pager::new();
    end(pager.path()).unwrap();
    assert_eq!(running(pager.path()).unwrap(), None);
    start(pager.path(), 1 << 20).unwrap();
    assert!(pager.pid().is_some());
}
