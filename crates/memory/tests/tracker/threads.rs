//! Processes with threads: what one of them does while another is made to call the kernel.

use std::os::fd::AsRawFd;
use std::sync::atomic::{AtomicBool, AtomicI32, Ordering};
use std::sync::mpsc;
use std::time::Duration;

use godwit_memory::tracker::{Backend, Tracker};

use crate::child::{Child, Shared, eventually, pipe, poke, read_byte, sleeps_in, start_thread, state};
use crate::undisturbed::track;

/// Stacks of threads, made before the fork: the child does not allocate.
fn stacks(count: usize) -> Vec<Vec<u128>> {
    vec![vec![0; 1024]; count]
}

extern "C" fn sleep_for_ever(_: *mut ()) -> i32 {
    loop {
        // SAFETY: no arguments.
        unsafe { libc::syscall(libc::SYS_ppoll, 0, 0, 0, 0, 0) };
    }
}

/// Ends this thread alone, the first one too.
fn end_thread() -> ! {
    loop {
        // SAFETY: plain numbers.
        unsafe { libc::syscall(libc::SYS_exit, 0) };
    }
}

#[test]
fn a_filter_of_one_thread_alone_kills_nobody() {
    struct With {
        read: i32,
        ready: i32,
        done: AtomicBool,
    }
    extern "C" fn run(with: *mut With) -> i32 {
        let number = |number: i64| {
            let k = u32::try_from(number).unwrap_or(0);
            libc::sock_filter { code: 0x15, jt: 0, jf: 1, k }
        };
        let give = |k| libc::sock_filter { code: 0x06, jt: 0, jf: 0, k };
        let mut program = [
            libc::sock_filter { code: 0x20, jt: 0, jf: 0, k: 0 },
            number(libc::SYS_read),
            give(libc::SECCOMP_RET_ALLOW),
            number(libc::SYS_exit),
            give(libc::SECCOMP_RET_ALLOW),
            number(libc::SYS_write),
            give(libc::SECCOMP_RET_ALLOW),
            give(libc::SECCOMP_RET_KILL_PROCESS),
        ];
        let program = libc::sock_fprog { len: 8, filter: program.as_mut_ptr() };
        // SAFETY: the first thread waits until this one is done, and what it gave lives on its stack.
        unsafe {
            let with = &*with;
            libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0);
            libc::prctl(libc::PR_SET_SECCOMP, libc::SECCOMP_MODE_FILTER, &raw const program);
            let mut byte = 0_u8;
            libc::write(with.ready, (&raw const byte).cast(), 1);
            libc::read(with.read, (&raw mut byte).cast(), 1);
            with.done.store(true, Ordering::Release);
        }
        end_thread()
    }
    let (read, write) = pipe();
    let (wake, waker) = pipe();
    let (ready, begun) = pipe();
    let mut stacks = stacks(1);
    let mut child = Child::fork(|| {
        let mut with =
            With { read: read.as_raw_fd(), ready: begun.as_raw_fd(), done: AtomicBool::new(false) };
        start_thread(&mut stacks[0], run, &raw mut with);
        let mut event = libc::epoll_event { events: libc::EPOLLIN.cast_unsigned(), u64: 0 };
        // In this call a thread is disturbed more by a stop, so the other one is chosen.
        // SAFETY: one event, a variable of ours.
        unsafe {
            let epoll = libc::epoll_create1(0);
            libc::epoll_ctl(epoll, libc::EPOLL_CTL_ADD, wake.as_raw_fd(), &raw mut event);
            if libc::epoll_pwait(epoll, &raw mut event, 1, -1, std::ptr::null()) != 1 {
                return 1;
            }
        }
        i32::from(!with.done.load(Ordering::Acquire)) * 2
    });
    assert!(read_byte(&ready));
    child.sleeps_in(libc::SYS_epoll_pwait);
    let other = other_thread(child.pid);
    sleeps_in(other, libc::SYS_read);
    let _tracker = track(&child);
    poke(&write);
    eventually("the other thread ends", || threads(child.pid) == [child.pid]);
    poke(&waker);
    child.succeeds();
}

fn threads(pid: i32) -> Vec<i32> {
    let entries = std::fs::read_dir(format!("/proc/{pid}/task")).expect("its threads");
    entries
        .flatten()
        .map(|entry| entry.file_name().to_str().expect("a number").parse().expect("a number"))
        .collect()
}

fn other_thread(pid: i32) -> i32 {
    threads(pid).into_iter().find(|&thread| thread != pid).expect("another thread")
}

/// The lowest number that is free is what a new descriptor gets, and a fork has all of them: a descriptor
/// that is there for a moment must not be there for another thread.
#[test]
fn another_thread_never_meets_the_descriptor() {
    struct With {
        over: AtomicBool,
        met: AtomicI32,
    }
    extern "C" fn run(with: *mut With) -> i32 {
        // SAFETY: the first thread waits until this one is done, and what it gave lives on its stack.
        let with = unsafe { &*with };
        let duplicate = || {
            // SAFETY: plain numbers.
            unsafe {
                let fd = libc::syscall(libc::SYS_dup, 0);
                libc::syscall(libc::SYS_close, fd);
                fd
            }
        };
        let expected = duplicate();
        while !with.over.load(Ordering::Relaxed) {
            if duplicate() != expected {
                with.met.fetch_add(1, Ordering::Relaxed);
            }
        }
        with.over.store(false, Ordering::Relaxed);
        end_thread()
    }
    let (read, write) = pipe();
    let mut stacks = stacks(1);
    let mut child = Child::fork(|| {
        let mut with = With { over: AtomicBool::new(false), met: AtomicI32::new(0) };
        start_thread(&mut stacks[0], run, &raw mut with);
        let got = read_byte(&read);
        with.over.store(true, Ordering::Relaxed);
        while with.over.load(Ordering::Relaxed) {
            std::hint::spin_loop();
        }
        i32::from(!got) * 2 + i32::from(with.met.load(Ordering::Relaxed) != 0)
    });
    child.sleeps_in(libc::SYS_read);
    for _ in 0..100 {
        let _tracker = track(&child);
    }
    poke(&write);
    child.succeeds();
}

/// A thread that executes a program waits for the end of the others, which a tracer has to take note of; and
/// whoever begins to trace it waits for the program.
#[test]
fn a_program_that_is_executed_by_one_of_many_threads_is_not_held_up() {
    struct With {
        read: i32,
    }
    extern "C" fn run(with: *mut With) -> i32 {
        // SAFETY: what is given lives on the stack of the first thread, which sleeps; the path and the
        // arguments are constants.
        unsafe {
            let mut byte = 0_u8;
            libc::read((*with).read, (&raw mut byte).cast(), 1);
            let path = c"/bin/true".as_ptr();
            let (arguments, environment) = ([path, std::ptr::null()], [std::ptr::null::<i8>()]);
            libc::syscall(libc::SYS_execve, path, arguments.as_ptr(), environment.as_ptr());
        }
        end_thread()
    }
    const THREADS: usize = 40;
    let mut stacks = stacks(THREADS);
    let mut held = 0;
    for _ in 0..40 {
        let (read, write) = pipe();
        let (mut parent, pid) = Child::with_child(|| {
            let mut with = With { read: read.as_raw_fd() };
            let (last, others) = stacks.split_last_mut().expect("some");
            for stack in others {
                start_thread(stack, sleep_for_ever, std::ptr::null_mut());
            }
            start_thread(last, run, &raw mut with);
            sleep_for_ever(std::ptr::null_mut())
        });
        eventually("its threads wait", || {
            let threads = threads(pid);
            threads.len() == THREADS + 1 && threads.iter().all(|&thread| state(thread) == Some('S'))
        });
        let (scanned, scans) = mpsc::channel();
        // It may hang, and then must not hold up the test as well.
        let tracking = std::thread::spawn(move || {
            loop {
                let round = Tracker::new(Backend::Uffd).round(&[pid], false);
                if round.map_or(true, |round| round.spaces.is_empty()) || scanned.send(()).is_err() {
                    break;
                }
            }
        });
        scans.recv().expect("a scan");
        poke(&write);
        eventually("the program has ended", || parent.try_wait().inspect(|code| held += code).is_some());
        eventually("the last scan has ended", || tracking.is_finished());
    }
    assert_eq!(held, 0, "all ended with 0");
}

/// Whatever moment it ends in, its parent is told how.
#[test]
fn one_that_ends_as_it_is_tracked_ends_with_its_own_code() {
    extern "C" fn run(_: *mut ()) -> i32 {
        // SAFETY: plain numbers.
        unsafe {
            let time = libc::timespec { tv_sec: 0, tv_nsec: 3_000_000 };
            libc::syscall(libc::SYS_clock_nanosleep, 0, 0, &raw const time, 0);
            libc::syscall(libc::SYS_exit_group, 42);
        }
        end_thread()
    }
    let mut stacks = stacks(3);
    for _ in 0..100 {
        let (mut parent, pid) = Child::with_child(|| {
            let (last, others) = stacks.split_last_mut().expect("some");
            for stack in others {
                start_thread(stack, sleep_for_ever, std::ptr::null_mut());
            }
            start_thread(last, run, std::ptr::null_mut());
            sleep_for_ever(std::ptr::null_mut())
        });
        while !Tracker::new(Backend::Uffd).round(&[pid], false).expect("a scan").spaces.is_empty() {}
        assert_eq!(
            parent.wait(),
            nix::sys::wait::WaitStatus::Exited(nix::unistd::Pid::from_raw(parent.pid), 42)
        );
    }
}

#[test]
fn one_whose_first_thread_has_ended_is_refused_and_goes_on() {
    struct With {
        read: i32,
    }
    extern "C" fn run(with: *mut With) -> i32 {
        // SAFETY: what is given lives on the stack of the first thread, which is not used again.
        unsafe {
            let mut byte = 0_u8;
            let got = libc::read((*with).read, (&raw mut byte).cast(), 1);
            libc::syscall(libc::SYS_exit_group, if got == 1 { 0 } else { 1 });
        }
        end_thread()
    }
    let (read, write) = pipe();
    let mut stacks = stacks(1);
    let mut child = Child::fork(|| {
        let mut with = With { read: read.as_raw_fd() };
        start_thread(&mut stacks[0], run, &raw mut with);
        end_thread()
    });
    eventually("its first thread ends", || state(child.pid) == Some('Z'));
    sleeps_in(other_thread(child.pid), libc::SYS_read);
    let mut tracker = Tracker::new(Backend::Uffd);
    for _ in 0..3 {
        let round = tracker.round(&[child.pid], false).expect("a scan");
        let reason = round.spaces[0].unwatched.as_ref().expect("not watched");
        assert!(reason.contains("first thread has ended"), "{reason}");
    }
    poke(&write);
    child.succeeds();
}

/// A thread that waits in vfork(2) cannot be stopped. The others are not made to wait for that.
#[test]
fn a_thread_that_waits_for_a_child_of_vfork_holds_up_no_other() {
    struct With<'a> {
        read: i32,
        stack: &'a mut [u128],
    }
    extern "C" fn wait(read: *mut libc::c_void) -> i32 {
        let mut byte = 0_u8;
        // SAFETY: the buffer has one byte, and the number lives on the stack of the parent, which waits.
        unsafe {
            libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL);
            i32::from(libc::read(*read.cast::<i32>(), (&raw mut byte).cast(), 1) != 1)
        }
    }
    extern "C" fn run(with: *mut With<'_>) -> i32 {
        let flags = libc::CLONE_VM | libc::CLONE_VFORK | libc::SIGCHLD;
        // SAFETY: what is given lives on the stack of the first thread, which waits for this one; the stack
        // is the child's, and this thread waits for it.
        unsafe {
            let with = &mut *with;
            let top = with.stack.as_mut_ptr_range().end.cast();
            libc::clone(wait, top, flags, (&raw mut with.read).cast());
        }
        end_thread()
    }
    let page = Shared::new();
    let (read, write) = pipe();
    let mut stacks = stacks(2);
    let mut child = Child::fork(|| {
        let (first, second) = stacks.split_at_mut(1);
        let mut with = With { read: read.as_raw_fd(), stack: &mut second[0] };
        start_thread(&mut first[0], run, &raw mut with);
        while page.get(0) == 0 {
            std::hint::spin_loop();
        }
        0
    });
    eventually("it has another thread", || threads(child.pid).len() == 2);
    let other = other_thread(child.pid);
    eventually("it waits in vfork", || state(other) == Some('D'));
    let mut tracker = Tracker::new(Backend::Uffd);
    let scanned = AtomicBool::new(false);
    let (round, states) = std::thread::scope(|scope| {
        let states = scope.spawn(|| {
            let mut states = std::collections::BTreeMap::new();
            while !scanned.load(Ordering::Relaxed) {
                *states.entry(state(child.pid)).or_insert(0) += 1;
                std::thread::sleep(Duration::from_micros(200));
            }
            states
        });
        let round = tracker.round(&[child.pid], false);
        scanned.store(true, Ordering::Relaxed);
        (round.expect("a scan"), states.join().expect("no panic"))
    });
    let reason = round.spaces[0].unwatched.as_ref().expect("not watched");
    assert!(reason.contains("does not stop"), "{reason}");
    // The scan waits for that thread: this one runs, or waits for a processor, meanwhile.
    assert_eq!(states.into_keys().collect::<Vec<_>>(), [Some('R')]);
    poke(&write);
    eventually("the other thread ends", || threads(child.pid).len() == 1);
    assert_eq!(tracker.round(&[child.pid], false).expect("a scan").spaces[0].unwatched, None);
    page.set(0, 1);
    child.succeeds();
}

/// No scan begins to trace a process of which another one traces any thread.
#[test]
fn one_of_which_a_single_thread_is_traced_is_refused_with_its_tracer() {
    let (read, write) = pipe();
    let (ready, begun) = pipe();
    let mut stacks = stacks(1);
    let mut child = Child::fork(|| {
        start_thread(&mut stacks[0], sleep_for_ever, std::ptr::null_mut());
        i32::from(!read_byte(&read))
    });
    child.sleeps_in(libc::SYS_read);
    let traced = other_thread(child.pid);
    let (over, end) = pipe();
    let tracer = Child::fork(|| {
        // SAFETY: plain numbers.
        if unsafe { libc::ptrace(libc::PTRACE_SEIZE, traced, 0, 0) } != 0 {
            return 1;
        }
        poke(&begun);
        i32::from(!read_byte(&over))
    });
    assert!(read_byte(&ready));
    let mut tracker = Tracker::new(Backend::Uffd);
    for _ in 0..3 {
        let round = tracker.round(&[child.pid], false).expect("a scan");
        let reason = round.spaces[0].unwatched.as_ref().expect("not watched");
        assert!(reason.contains(&format!("process {} traces it", tracer.pid)), "{reason}");
    }
    poke(&end);
    let mut tracer = tracer;
    tracer.succeeds();
    assert_eq!(tracker.round(&[child.pid], false).expect("a scan").spaces[0].unwatched, None);
    poke(&write);
    child.succeeds();
}
