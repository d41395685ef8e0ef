//! Injections into processes that wait, execute programs, and end.

use std::sync::atomic::{AtomicI32, Ordering};

use std::time::{Duration, Instant};

use super::*;

/// What aarch64 has to do, tried on this machine: the thread leaves by entering its call again.
#[test]
fn a_thread_that_enters_its_call_again_loses_nothing() {
    const NONE: i32 = -1;
    arch::REENTER.store(true, Ordering::Relaxed);
    let flags = libc::MAP_SHARED | libc::MAP_ANONYMOUS;
    // SAFETY: a new mapping, which stays.
    let outcome = unsafe {
        let start = libc::mmap(std::ptr::null_mut(), 4096, libc::PROT_READ | libc::PROT_WRITE, flags, -1, 0);
        assert_ne!(start, libc::MAP_FAILED);
        &*start.cast::<AtomicI32>()
    };
    for number in [libc::SYS_clock_nanosleep, libc::SYS_poll, libc::SYS_rt_sigsuspend] {
        outcome.store(NONE, Ordering::Relaxed);
        // SAFETY: the child makes nothing but system calls.
        let pid = unsafe { libc::fork() };
        if pid == 0 {
            // SAFETY: variables of the child's.
            outcome.store(unsafe { wait_in(number) }, Ordering::Relaxed);
            // SAFETY: a plain number.
            unsafe { libc::_exit(0) };
        }
        let process = Process::open(pid).expect("it lives");
        // Other tests of this process may have some at the moment, and a fork has them too.
        let inherited = userfaultfds(pid);
        let in_call = || {
            let text = process.text(&format!("task/{pid}/syscall")).unwrap_or_default();
            text.split_whitespace().next() == Some(&number.to_string())
        };
        let is_over = || outcome.load(Ordering::Relaxed) != NONE;
        while !in_call() && !is_over() {
            std::thread::yield_now();
        }
        let begun = Instant::now();
        for looks in 1.. {
            match userfaultfd(&process) {
                Err(_) if is_over() => break,
                got => drop(got.expect("a descriptor")),
            }
            if number == libc::SYS_rt_sigsuspend && looks == 10 {
                break;
            }
            assert!(begun.elapsed() < Duration::from_secs(20), "its wait begins anew each time");
        }
        // SAFETY: the child is ours.
        unsafe {
            if number == libc::SYS_rt_sigsuspend {
                assert_eq!(userfaultfds(pid), inherited);
                libc::kill(pid, libc::SIGUSR1);
            }
            // Its tracer, which is its parent too, may have taken its status.
            libc::waitpid(pid, std::ptr::null_mut(), 0);
        }
        assert_eq!(outcome.load(Ordering::Relaxed), 0, "system call {number}");
    }
    arch::REENTER.store(false, Ordering::Relaxed);
}

/// Whoever looks for threads that have ended must not take the news of a stop from the tracer.
#[test]
fn a_stop_is_not_lost_to_a_look_for_what_has_ended() {
    // SAFETY: the child makes nothing but system calls.
    let pid = unsafe { libc::fork() };
    if pid == 0 {
        // SAFETY: plain numbers.
        unsafe {
            libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL);
            libc::pause();
            libc::_exit(1);
        }
    }
    let process = Process::open(pid).expect("it lives");
    in_tracer(&process, |tracing| {
        let tracee = tracing.seize(pid)?;
        while !process.text("stat")?.contains(") t ") {
            std::thread::yield_now();
        }
        tracing.take_note_of_end(pid);
        assert!(tracee.has_stopped()?, "nobody is told of its stop");
        tracee.go_on().map_err(step("let it go on"))
    })
    .expect("it is stopped");
    // SAFETY: the child is ours.
    unsafe {
        libc::kill(pid, libc::SIGKILL);
        libc::waitpid(pid, std::ptr::null_mut(), 0);
    }
}

/// The descriptors of a process that are userfaultfds.
fn userfaultfds(pid: i32) -> usize {
    let fds = std::fs::read_dir(format!("/proc/{pid}/fd")).expect("its descriptors");
    let paths = fds.flatten().filter_map(|entry| std::fs::read_link(entry.path()).ok());
    paths.filter(|path| path.to_string_lossy().contains("userfaultfd")).count()
}

/// Where the system call was found there is something else afterwards, or nothing.
#[test]
fn a_process_that_executes_a_program_before_it_stops_is_not_harmed() {
    let mut child = std::process::Command::new("/bin/sh")
        .args(["-c", "read line; exec sleep 1000"])
        .stdin(std::process::Stdio::piped())
        .spawn()
        .expect("a shell");
    let pid = i32::try_from(child.id()).expect("a PID");
    let process = Process::open(pid).expect("it lives");
    let reads = |file: &str, what: &str| {
        let text = process.text(file).unwrap_or_default();
        text.split_whitespace().next() == Some(what)
    };
    while !reads("syscall", &libc::SYS_read.to_string()) {
        std::thread::yield_now();
    }
    let before = find_instruction(&process).expect("an instruction");
    let mut input = child.stdin.take().expect("its input");
    let execute = || {
        std::io::Write::write_all(&mut input, b"\n").expect("it listens");
        while !(reads("comm", "sleep") && reads("syscall", &libc::SYS_clock_nanosleep.to_string())) {
            std::thread::yield_now();
        }
    };
    let got = std::thread::scope(|scope| {
        scope
            .spawn(|| in_tracer(&process, |tracing| in_this_thread(tracing, execute)))
            .join()
            .expect("no panic")
    });
    let after = find_instruction(&process).expect("an instruction");
    let random = std::fs::read_to_string("/proc/sys/kernel/randomize_va_space").unwrap_or_default();
    assert!(before != after || random.trim() == "0", "both programs have it at {before:#x}");
    super::super::kernel::Userfault::new(got.expect("a descriptor")).expect("it is of use");
    assert_eq!(userfaultfds(pid), 0);
    while process.state_of(pid) != Some('S') {
        std::thread::yield_now();
    }
    assert_eq!(child.try_wait().expect("our child"), None);
    child.kill().expect("it lives");
    child.wait().expect("our child");
}

/// The same left to chance: a shell that does nothing but become a shell, three hundred times.
#[test]
fn a_process_that_executes_programs_all_the_time_ends_as_it_should() {
    let script = "[ $1 = 0 ] && exit 42; exec /bin/sh -c \"$0\" \"$0\" $(($1 - 1))";
    let mut child =
        std::process::Command::new("/bin/sh").args(["-c", script, script, "300"]).spawn().expect("a shell");
    let process = Process::open(i32::try_from(child.id()).expect("a PID")).expect("it lives");
    let mut got = 0;
    let status = loop {
        match userfaultfd(&process) {
            Ok(_) => got += 1,
            Err(InjectError::Refused { reason, lasting }) => assert!(!lasting, "{reason}"),
            Err(InjectError::Gone) => {}
        }
        match child.try_wait() {
            Ok(Some(status)) => break status.code(),
            Ok(None) => {}
            // It ended under the eyes of its tracer, which here is its parent too, and takes its status.
            Err(error) if error.raw_os_error() == Some(libc::ECHILD) => break None,
            Err(error) => panic!("{error}"),
        }
    };
    assert!(status.is_none_or(|code| code == 42), "{status:?}");
    assert!(got > 0, "it was never stopped in time");
}

extern "C" fn handler(_: i32) {}

/// Waits 300 ms, or for a signal; 0 when it was as it should be.
unsafe fn wait_in(number: i64) -> i32 {
    let begun = Instant::now();
    // SAFETY: the arguments are variables of ours.
    let right = unsafe {
        match number {
            libc::SYS_clock_nanosleep => {
                let time = libc::timespec { tv_sec: 0, tv_nsec: 300_000_000 };
                libc::nanosleep(&raw const time, std::ptr::null_mut()) == 0
            }
            libc::SYS_poll => libc::poll(std::ptr::null_mut(), 0, 300) == 0,
            _ => {
                libc::signal(libc::SIGUSR1, handler as *const () as usize);
                let set: libc::sigset_t = std::mem::zeroed();
                return i32::from(
                    libc::sigsuspend(&raw const set) != -1 || *libc::__errno_location() != libc::EINTR,
                );
            }
        }
    };
    i32::from(!right) + 2 * i32::from(begun.elapsed() < Duration::from_millis(295))
}
