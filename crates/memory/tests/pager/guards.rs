//! A pager that is killed, and the guard that stays.

use std::os::fd::{AsFd, FromRawFd, OwnedFd, RawFd};

use godwit_memory::pager::{end, running};
use nix::poll::{PollFd, PollFlags, poll};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use crate::child::Op;
use crate::service::{Pager, start, tags};
use crate::{BASE, restored};

/// How long a page that must not be given is waited for, in milliseconds.
const MOMENT: u16 = 300;

/// How long an end may take. It is reached only when something is broken.
const PATIENCE: u16 = 20_000;

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
fn a_guard_that_nobody_ends_ends_when_the_process_behind_it_is_gone() {
    let pager = Pager::new();
    pager.pending(7, BASE, 10);
    let child = restored(&pager, 10);
    let text = std::fs::read_to_string(pager.path().join("guard.lock")).unwrap();
    // SAFETY: pidfd_open takes two integers.
    let guard = unsafe { libc::syscall(libc::SYS_pidfd_open, text.trim().parse::<i32>().unwrap(), 0) };
    assert!(guard >= 0);
    // SAFETY: the call has just returned it.
    let guard = unsafe { OwnedFd::from_raw_fd(RawFd::try_from(guard).unwrap()) };
    kill(Pid::from_raw(i32::try_from(pager.pid().unwrap()).unwrap()), Signal::SIGKILL).unwrap();
    pager.wait_for_end();
    child.tell(Op::Read, BASE, 10, 0);
    // It has looked by then, and has seen that there is a process.
    assert!(!child.answers_within(MOMENT));
    assert!(!ends_within(&guard, 0));
    drop(child);
    assert!(ends_within(&guard, PATIENCE));
}

/// Whether a process ends within so many milliseconds.
fn ends_within(process: &OwnedFd, milliseconds: u16) -> bool {
    let mut ended = [PollFd::new(process.as_fd(), PollFlags::POLLIN)];
    poll(&mut ended, milliseconds).unwrap() == 1
}

#[test]
fn a_pager_and_its_guard_are_ended_together_and_another_can_start() {
    let pager = Pager::new();
    end(pager.path()).unwrap();
    assert_eq!(running(pager.path()).unwrap(), None);
    start(pager.path(), 1 << 20).unwrap();
    assert!(pager.pid().is_some());
}
