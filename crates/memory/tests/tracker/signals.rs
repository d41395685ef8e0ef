//! Signals that come while a process is tracked: each comes once, in order, and a stop stays what it was.

use std::os::fd::AsRawFd;
use std::ptr::null_mut;
use std::sync::atomic::{AtomicBool, Ordering};

use godwit_memory::tracker::{Backend, Tracker};

use crate::child::{Child, eventually, pipe, poke, read_byte, sleeps_in, state};
use crate::undisturbed::set;

/// How many signals are sent.
const SIGNALS: usize = 30_000;

/// Tracks a process anew all the time, until the other function has returned.
fn while_tracked<T>(pid: i32, run: impl FnOnce() -> T) -> T {
    /// Also when that panics, or the scope would wait for ever.
    struct End<'a>(&'a AtomicBool);
    impl Drop for End<'_> {
        fn drop(&mut self) {
            self.0.store(true, Ordering::Relaxed);
        }
    }
    let over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !over.load(Ordering::Relaxed) {
                Tracker::new(Backend::Uffd).round(&[pid], false).expect("a scan");
            }
        });
        let _end = End(&over);
        run()
    })
}

static mut NEXT: usize = 0;
static mut WRONG: bool = false;

extern "C" fn in_order(_: i32, info: *const libc::siginfo_t, _: *mut libc::c_void) {
    // SAFETY: the handler of a child with one thread; the kernel gives the value that was sent.
    unsafe {
        let value = (*info).si_value().sival_ptr.addr();
        if value != NEXT {
            WRONG = true;
        }
        NEXT += 1;
    }
}

fn next() -> usize {
    // SAFETY: only read in children with one thread.
    unsafe { (&raw const NEXT).read_volatile() }
}

/// Sends numbered signals to a child that waits for them in this way, and tracks it meanwhile.
fn all_come_in_order(wait: impl Fn(&libc::sigset_t)) {
    let signal = libc::SIGRTMIN() + 3;
    let (ready, begun) = pipe();
    // It ends when it is tracked no more: the tracker, which is in its parent, would take its exit code.
    let (over, end) = pipe();
    let mut child = Child::fork(|| {
        // SAFETY: the action and the sets are variables of ours.
        unsafe {
            let mut action: libc::sigaction = std::mem::zeroed();
            action.sa_sigaction = in_order as *const () as usize;
            action.sa_flags = libc::SA_SIGINFO;
            libc::sigaction(signal, &raw const action, null_mut());
            let mut outside = set(&[]);
            libc::sigprocmask(libc::SIG_SETMASK, std::ptr::null(), &raw mut outside);
            poke(&begun);
            while next() < SIGNALS {
                wait(&outside);
            }
            read_byte(&over);
            i32::from(WRONG)
        }
    });
    assert!(read_byte(&ready));
    while_tracked(child.pid, || {
        for value in 0..SIGNALS {
            let value = libc::sigval { sival_ptr: std::ptr::without_provenance_mut(value) };
            // The queue may be full.
            // SAFETY: the child is ours and not reaped.
            eventually("the signal is sent", || unsafe { libc::sigqueue(child.pid, signal, value) == 0 });
        }
    });
    poke(&end);
    child.succeeds();
}

#[test]
fn each_signal_comes_once_and_in_order_to_one_that_calculates() {
    all_come_in_order(|_| std::hint::spin_loop());
}

#[test]
fn each_signal_comes_once_and_in_order_to_one_that_waits_for_signals() {
    all_come_in_order(|outside| {
        let blocked = set(&[libc::SIGRTMIN() + 3]);
        // SAFETY: the sets are variables of ours.
        unsafe {
            libc::sigprocmask(libc::SIG_BLOCK, &raw const blocked, null_mut());
            if next() < SIGNALS {
                libc::sigsuspend(outside);
            }
            libc::sigprocmask(libc::SIG_UNBLOCK, &raw const blocked, null_mut());
        }
    });
}

/// A parent is told of each stop and each continuation once, and of the signal that was sent.
#[test]
fn a_parent_sees_each_stop_once_and_which_signal_it_was() {
    const CONTINUED: u8 = 0xff;
    let (read, write) = pipe();
    let (changes, change) = pipe();
    let tell = |status: i32| {
        let byte = if libc::WIFSTOPPED(status) {
            u8::try_from(libc::WSTOPSIG(status)).unwrap_or(0)
        } else if libc::WIFCONTINUED(status) {
            CONTINUED
        } else {
            0
        };
        // SAFETY: the buffer has one byte.
        unsafe { libc::write(change.as_raw_fd(), (&raw const byte).cast(), 1) };
    };
    let (mut parent, pid) = Child::watching(|| i32::from(!read_byte(&read)), tell);
    sleeps_in(pid, libc::SYS_read);
    let next_change = || {
        let mut byte = [0];
        assert_eq!(nix::unistd::read(&changes, &mut byte).expect("a pipe"), 1);
        byte[0]
    };
    let send = |signal| {
        // SAFETY: the process lives until it is told to end below.
        assert_eq!(unsafe { libc::kill(pid, signal) }, 0);
    };
    // Each change is waited for before the next one is made, so none can hide another.
    while_tracked(pid, || {
        for round in 0..300 {
            let signal = [libc::SIGTSTP, libc::SIGSTOP, libc::SIGTTIN][round % 3];
            send(signal);
            assert_eq!(i32::from(next_change()), signal);
            send(libc::SIGCONT);
            assert_eq!(next_change(), CONTINUED);
        }
    });
    // And one that is stopped for longer is stopped by nothing else afterwards.
    send(libc::SIGTSTP);
    assert_eq!(i32::from(next_change()), libc::SIGTSTP);
    for _ in 0..20 {
        Tracker::new(Backend::Uffd).round(&[pid], false).expect("a scan");
    }
    eventually("it is stopped again", || state(pid) == Some('T'));
    send(libc::SIGCONT);
    assert_eq!(next_change(), CONTINUED);
    poke(&write);
    assert_eq!(next_change(), 0);
    parent.succeeds();
}
