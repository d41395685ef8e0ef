//! A process that is tracked notices nothing: what it waits for comes when it comes, its signals,
//! its stops and its descriptors are as they were, and no filter of system calls kills it.

use std::os::fd::{AsRawFd, OwnedFd};
use std::ptr::{null, null_mut};
use std::time::{Duration, Instant};

use godwit_memory::tracker::{Backend, Tracker};
use nix::sys::signal::Signal;

use crate::child::{Child, eventually, pipe, poke, read_byte, state};

/// How long the children wait that wait for a time.
const WAIT: Duration = Duration::from_millis(300);

/// Scans a mapping that changes all the time.
const SCANS: u32 = 500;

/// Scans the child some times, each time as if it were new, and keeps the last tracker.
pub(crate) fn track(child: &Child) -> Tracker {
    let mut tracker = Tracker::new(Backend::Uffd);
    for _ in 0..5 {
        tracker = Tracker::new(Backend::Uffd);
        let round = tracker.round(&[child.pid], false).expect("a scan");
        assert_eq!(round.spaces.len(), 1);
        assert_eq!(round.spaces[0].unwatched, None);
    }
    tracker
}

/// Tracks a child that waits in this call, and asserts that it waits on and gets what it waits for: `wake` brings
/// that about.
fn undisturbed(number: i64, run: impl FnOnce() -> bool, wake: impl FnOnce(&Child)) {
    let mut child = Child::fork(|| i32::from(!run()));
    child.sleeps_in(number);
    let _tracker = track(&child);
    child.sleeps_again_in(number);
    wake(&child);
    child.succeeds();
}

/// Tracks a child that waits for [`WAIT`] in a call, as if it were new each time, until it has ended. A wait that
/// begins anew with each scan has no end, or one that is as long after the last scan. A slow machine may scan
/// too seldom to tell, and then it is tried again.
fn ends_at_its_time(run: impl Fn() -> bool) {
    let all = Instant::now();
    let is_told = || {
        let begun = Instant::now();
        let (mut parent, pid) = Child::with_child(|| not_before_its_time(&run));
        // The last one may have come after the wait.
        let mut last_two = [None, None];
        let code = loop {
            let scan = Instant::now();
            let round = Tracker::new(Backend::Uffd).round(&[pid], false).expect("a scan");
            if let Some(code) = parent.try_wait() {
                break code;
            }
            if round.spaces.iter().any(|space| space.unwatched.is_none()) {
                last_two = [last_two[1], Some(scan)];
            }
            assert!(begun.elapsed() < Duration::from_secs(20), "it begins to wait anew with each scan");
        };
        assert_eq!(code, 0, "1: not as it should end, 2: too early");
        last_two[0].is_some_and(|scan| scan.elapsed() < WAIT)
    };
    while !is_told() {
        assert!(all.elapsed() < Duration::from_secs(300), "this machine is too slow to tell");
    }
}

/// The exit code of a child that waits so.
fn not_before_its_time(run: impl Fn() -> bool) -> i32 {
    let begun = Instant::now();
    if !run() {
        return 1;
    }
    i32::from(begun.elapsed() < WAIT - Duration::from_millis(5)) * 2
}

fn sleep() -> bool {
    // SAFETY: the time is a variable of ours.
    unsafe { libc::nanosleep(std::ptr::from_ref(&limit()), null_mut()) == 0 }
}

fn limit() -> libc::timespec {
    libc::timespec { tv_sec: 0, tv_nsec: WAIT.subsec_nanos().into() }
}

fn errno() -> i32 {
    // SAFETY: the location is this thread's.
    unsafe { *libc::__errno_location() }
}

#[test]
fn a_sleeper_wakes_at_its_time() {
    ends_at_its_time(sleep);
}

#[test]
#[cfg(target_arch = "x86_64")]
fn poll_ends_at_its_time_and_with_its_event() {
    let (read, write) = pipe();
    let fd = read.as_raw_fd();
    let poll = move |timeout| {
        let mut entry = libc::pollfd { fd, events: libc::POLLIN, revents: 0 };
        // SAFETY: one entry, a variable of ours.
        unsafe { libc::poll(&raw mut entry, 1, timeout) }
    };
    ends_at_its_time(|| poll(300) == 0);
    undisturbed(libc::SYS_poll, || poll(-1) == 1, |_| poke(&write));
}

#[test]
fn read_gets_what_comes() {
    let (read, write) = pipe();
    undisturbed(libc::SYS_read, || read_byte(&read), |_| poke(&write));
}

#[test]
fn futex_ends_at_its_time() {
    let word = 5_u32;
    let wait = |timeout: *const libc::timespec| {
        // SAFETY: the word and the time are variables of ours.
        unsafe { libc::syscall(libc::SYS_futex, &raw const word, libc::FUTEX_WAIT, 5, timeout, 0, 0) }
    };
    let run = || wait(std::ptr::from_ref(&limit())) == -1 && errno() == libc::ETIMEDOUT;
    ends_at_its_time(run);
}

#[test]
#[cfg(target_arch = "x86_64")]
fn epoll_ends_with_its_event_and_not_before_its_time() {
    let (read, write) = pipe();
    let wait = |timeout: i32| {
        let mut event = libc::epoll_event { events: libc::EPOLLIN.cast_unsigned(), u64: 0 };
        // SAFETY: one event, a variable of ours.
        unsafe {
            let epoll = libc::epoll_create1(0);
            libc::epoll_ctl(epoll, libc::EPOLL_CTL_ADD, read.as_raw_fd(), &raw mut event);
            libc::epoll_wait(epoll, &raw mut event, 1, timeout)
        }
    };
    // This one does begin anew, since it keeps no time over a stop.
    let mut child = Child::fork(|| not_before_its_time(|| wait(300) == 0));
    child.sleeps_in(libc::SYS_epoll_wait);
    let _tracker = track(&child);
    child.succeeds();
    undisturbed(libc::SYS_epoll_wait, || wait(-1) == 1, |_| poke(&write));
}

/// A socket with a time limit of its own: a call that is stopped ends with EINTR there (signal(7)).
#[test]
fn a_socket_with_a_time_limit_gets_what_comes_and_no_interruption() {
    let (one, other) = std::os::unix::net::UnixStream::pair().expect("a pair of sockets");
    one.set_read_timeout(Some(Duration::from_secs(600))).expect("a time limit");
    let receive = || {
        let mut byte = 0_u8;
        // SAFETY: the buffer has one byte.
        unsafe { libc::recv(one.as_raw_fd(), (&raw mut byte).cast(), 1, 0) }
    };
    let other = OwnedFd::from(other);
    undisturbed(libc::SYS_recvfrom, || receive() == 1, |_| poke(&other));
}

extern "C" fn note(_: i32) {
    // SAFETY: the signal handler of a child with one thread.
    unsafe { NOTED += 1 };
}

static mut NOTED: u32 = 0;

pub(crate) fn handle(signal: i32, flags: i32) {
    // SAFETY: the action is a variable of ours, of plain numbers.
    unsafe {
        let mut action: libc::sigaction = std::mem::zeroed();
        action.sa_sigaction = note as *const () as usize;
        action.sa_flags = flags;
        libc::sigaction(signal, &raw const action, null_mut());
    }
}

pub(crate) fn noted() -> u32 {
    // SAFETY: only read in children with one thread.
    unsafe { NOTED }
}

pub(crate) fn set(signals: &[i32]) -> libc::sigset_t {
    // SAFETY: the set is a variable of ours, of plain numbers.
    unsafe {
        let mut set: libc::sigset_t = std::mem::zeroed();
        signals.iter().for_each(|&signal| {
            libc::sigaddset(&raw mut set, signal);
        });
        set
    }
}

#[test]
fn a_signal_still_ends_a_wait_for_signals() {
    let run = || {
        handle(libc::SIGUSR1, 0);
        // SAFETY: the sets are variables of ours.
        unsafe {
            libc::sigprocmask(libc::SIG_BLOCK, std::ptr::from_ref(&set(&[libc::SIGUSR1])), null_mut());
            let ended = libc::sigsuspend(std::ptr::from_ref(&set(&[])));
            let mut now = set(&[]);
            libc::sigprocmask(libc::SIG_BLOCK, null(), &raw mut now);
            ended == -1
                && errno() == libc::EINTR
                && noted() == 1
                && libc::sigismember(&raw const now, libc::SIGUSR1) == 1
        }
    };
    undisturbed(libc::SYS_rt_sigsuspend, run, |child| child.signal(Signal::SIGUSR1));
    let run = || {
        // SAFETY: as above.
        unsafe {
            libc::sigprocmask(libc::SIG_BLOCK, std::ptr::from_ref(&set(&[libc::SIGUSR1])), null_mut());
            libc::sigwaitinfo(std::ptr::from_ref(&set(&[libc::SIGUSR1])), null_mut()) == libc::SIGUSR1
        }
    };
    undisturbed(libc::SYS_rt_sigtimedwait, run, |child| child.signal(Signal::SIGUSR1));
}

#[test]
fn a_call_that_restarts_after_signals_still_does() {
    let (read, write) = pipe();
    let run = || {
        handle(libc::SIGUSR1, libc::SA_RESTART);
        read_byte(&read) && noted() == 1
    };
    undisturbed(libc::SYS_read, run, |child| {
        child.signal(Signal::SIGUSR1);
        let _tracker = track(child);
        poke(&write);
    });
}

#[test]
fn pending_signals_stay_pending() {
    let (read, write) = pipe();
    let run = || {
        // SAFETY: the sets are variables of ours.
        unsafe {
            libc::sigprocmask(libc::SIG_BLOCK, std::ptr::from_ref(&set(&[libc::SIGUSR2])), null_mut());
            libc::raise(libc::SIGUSR2);
            let got = read_byte(&read);
            let mut pending = set(&[]);
            libc::sigpending(&raw mut pending);
            got && libc::sigismember(&raw const pending, libc::SIGUSR2) == 1
        }
    };
    undisturbed(libc::SYS_read, run, |_| poke(&write));
}

#[test]
fn a_stopped_process_stays_stopped() {
    let (read, write) = pipe();
    let mut child = Child::fork(|| i32::from(!read_byte(&read)));
    child.sleeps_in(libc::SYS_read);
    child.stop();
    let _tracker = track(&child);
    eventually("it is stopped again", || state(child.pid) == Some('T'));
    poke(&write);
    assert!(unchanged(|| state(child.pid)), "it runs");
    child.signal(Signal::SIGCONT);
    child.succeeds();
}

/// Whether something stays as it is for a moment.
fn unchanged<T: PartialEq>(value: impl Fn() -> T) -> bool {
    let before = value();
    (0..50).all(|_| {
        std::thread::sleep(Duration::from_millis(1));
        value() == before
    })
}

fn byte_then_exit(read: &OwnedFd) -> i32 {
    let code = i64::from(!read_byte(read));
    // SAFETY: strict filters let this call through, and not the one that _exit(2) makes.
    unsafe { libc::syscall(libc::SYS_exit, code) };
    9
}

#[test]
fn a_strict_filter_does_not_kill_it() {
    let (read, write) = pipe();
    let mut child = Child::fork(|| {
        // SAFETY: plain numbers.
        unsafe { libc::prctl(libc::PR_SET_SECCOMP, libc::SECCOMP_MODE_STRICT) };
        byte_then_exit(&read)
    });
    child.sleeps_in(libc::SYS_read);
    let _tracker = track(&child);
    poke(&write);
    child.succeeds();
}

#[test]
fn a_filter_that_kills_does_not_kill_it() {
    let (read, write) = pipe();
    let mut child = Child::fork(|| {
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
            give(libc::SECCOMP_RET_KILL_PROCESS),
        ];
        let program = libc::sock_fprog { len: 6, filter: program.as_mut_ptr() };
        // SAFETY: the program is a variable of ours.
        unsafe {
            libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0);
            libc::prctl(libc::PR_SET_SECCOMP, libc::SECCOMP_MODE_FILTER, &raw const program);
        }
        byte_then_exit(&read)
    });
    child.sleeps_in(libc::SYS_read);
    let _tracker = track(&child);
    poke(&write);
    child.succeeds();
}

fn descriptors(pid: i32) -> Vec<String> {
    let entries = std::fs::read_dir(format!("/proc/{pid}/fd")).expect("its descriptors");
    let mut names: Vec<String> = entries
        .flatten()
        .map(|entry| format!("{:?} {:?}", entry.file_name(), std::fs::read_link(entry.path()).ok()))
        .collect();
    names.sort();
    names
}

#[test]
fn its_descriptors_are_as_they_were() {
    let (read, write) = pipe();
    let mut child = Child::fork(|| {
        // What other tests have open changes its name when it is deleted.
        let read_end = u32::try_from(read.as_raw_fd()).unwrap_or(0);
        // SAFETY: of its descriptors this process uses the one that stays.
        unsafe {
            libc::close_range(3, read_end - 1, 0);
            libc::close_range(read_end + 1, u32::MAX, 0);
        }
        i32::from(!read_byte(&read))
    });
    child.sleeps_in(libc::SYS_read);
    let before = descriptors(child.pid);
    let _tracker = track(&child);
    assert_eq!(descriptors(child.pid), before);
    poke(&write);
    child.succeeds();
}

/// A program that only calculates, and one that does nothing but system calls, are tracked anew
/// again and again, and always go on where they were.
#[test]
fn a_busy_program_is_right_in_the_end() {
    let (read, write) = pipe();
    let mut child = Child::fork(|| {
        let fd = read.as_raw_fd();
        let mut entry = libc::pollfd { fd, events: libc::POLLIN, revents: 0 };
        let (mut sum, mut right) = (0_u64, true);
        let thousand = |from: u64| {
            (0..1000).fold(from, |sum, step| std::hint::black_box(sum).wrapping_mul(3).wrapping_add(step))
        };
        // SAFETY: one entry, a variable of ours.
        while unsafe { libc::poll(&raw mut entry, 1, 0) } == 0 {
            let next = thousand(sum);
            right &= next == thousand(sum);
            sum = next;
        }
        i32::from(entry.revents != libc::POLLIN || !right)
    });
    for _ in 0..40 {
        let _tracker = track(&child);
    }
    poke(&write);
    child.succeeds();
}

/// What the tracker follows and what it does not are two areas for the kernel, and mremap(2) fails
/// over both: it must never begin to follow a part of a mapping. Nor beside memory that the kernel may
/// drop, which it cannot follow at all.
#[test]
fn a_mapping_that_grows_as_it_is_looked_at_can_be_moved() {
    const MAP_DROPPABLE: i32 = 8;
    const STEP: usize = 4 << 12;
    let (orders, order) = pipe();
    let (answers, answer) = pipe();
    let mut child = Child::fork(|| {
        let mut entry = libc::pollfd { fd: orders.as_raw_fd(), events: libc::POLLIN, revents: 0 };
        let protection = libc::PROT_READ | libc::PROT_WRITE;
        // SAFETY: mappings that only this function knows, and one entry, a variable of ours.
        unsafe {
            // Linux before 6.11 does not know it, and then it is not there.
            libc::mmap(null_mut(), STEP, protection, MAP_DROPPABLE | libc::MAP_ANONYMOUS, -1, 0);
            poke(&answer);
            while libc::poll(&raw mut entry, 1, 0) == 0 {
                let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
                let mut at = libc::mmap(null_mut(), STEP, protection, flags, -1, 0);
                for pages in 1..8 {
                    at = libc::mremap(at, pages * STEP, (pages + 1) * STEP, libc::MREMAP_MAYMOVE);
                    if at == libc::MAP_FAILED {
                        return errno();
                    }
                    at.cast::<u8>().add(pages * STEP).write(1);
                }
                libc::munmap(at, 8 * STEP);
            }
        }
        0
    });
    assert!(read_byte(&answers));
    let mut tracker = Tracker::new(Backend::Uffd);
    for _ in 0..SCANS {
        let round = tracker.round(&[child.pid], false).expect("a scan");
        assert!(round.spaces.iter().all(|space| space.unwatched.is_none()), "{round:?}");
    }
    poke(&order);
    child.succeeds();
}

#[test]
fn one_that_is_traced_by_another_counts_as_written() {
    let (read, write) = pipe();
    let mut child = Child::fork(|| {
        // SAFETY: no arguments that matter.
        unsafe { libc::ptrace(libc::PTRACE_TRACEME, 0, 0, 0) };
        i32::from(!read_byte(&read))
    });
    child.sleeps_in(libc::SYS_read);
    let mut tracker = Tracker::new(Backend::Uffd);
    for _ in 0..2 {
        let round = tracker.round(&[child.pid], false).expect("a scan");
        let space = &round.spaces[0];
        assert!(space.unwatched.as_ref().is_some_and(|reason| reason.contains("traces it")), "{space:?}");
        let written: u64 = space.written.iter().map(|range| (range.end - range.start) / 4096).sum();
        assert_eq!(written, space.populated_pages);
    }
    poke(&write);
    child.succeeds();
}

#[test]
fn a_child_of_vfork_is_passed_over_until_it_has_its_own_memory() {
    let (read, write) = pipe();
    let mut parent = Child::fork(|| {
        extern "C" fn run(read: *mut libc::c_void) -> i32 {
            // SAFETY: the parent gives its descriptor and waits.
            i32::from(!read_byte(unsafe { &*read.cast::<OwnedFd>() }))
        }
        let mut stack = [0_u128; 4096];
        // SAFETY: the child has a stack of its own, and only reads and ends while the parent waits.
        unsafe {
            let top = stack.as_mut_ptr_range().end.cast();
            let flags = libc::CLONE_VM | libc::SIGCHLD;
            let pid = libc::clone(run, top, flags, (&raw const read).cast_mut().cast());
            let mut status = 0;
            libc::waitpid(pid, &raw mut status, 0);
            status
        }
    });
    parent.sleeps_in(libc::SYS_wait4);
    let text = std::fs::read_to_string(format!("/proc/{0}/task/{0}/children", parent.pid)).expect("children");
    let child: i32 = text.trim().parse().expect("one child");
    let mut tracker = Tracker::new(Backend::Uffd);
    for _ in 0..2 {
        let round = tracker.round(&[parent.pid, child], false).expect("a scan");
        assert_eq!(round.spaces.iter().map(|space| space.process.pid()).collect::<Vec<_>>(), [parent.pid]);
        assert!(round.ended.is_empty());
    }
    let round = tracker.round(&[parent.pid, child], true).expect("a scan");
    assert_eq!(round.spaces.len(), 2, "frozen, it has to be carried");
    let round = tracker.round(&[parent.pid, child], false).expect("a scan");
    assert_eq!(round.spaces.len(), 1, "passed over again");
    assert_eq!(round.ended.len(), 1);
    poke(&write);
    parent.succeeds();
}

#[test]
fn stopping_it_for_soft_dirty_bits_does_not_disturb_it() {
    let (read, write) = pipe();
    let mut child = Child::fork(|| i32::from(!read_byte(&read)));
    child.sleeps_in(libc::SYS_read);
    let mut tracker = Tracker::new(Backend::SoftDirty);
    for _ in 0..20 {
        let round = tracker.round(&[child.pid], false).expect("a scan");
        assert_eq!(round.spaces[0].unwatched, None);
    }
    poke(&write);
    child.succeeds();
}
