//! One system call inside another process: `userfaultfd(2)`, whose descriptor is bound to the
//! address space of the caller, is made by a thread of the process under ptrace, taken over with
//! `pidfd_getfd(2)`, and closed inside in the same stop.
//!
//! ```text
//! seize ─ interrupt ─▶ stop ─ block signals ─▶ userfaultfd ─ take it ─▶ close ─ interrupt ─▶ stop
//!                       │                                                                   │
//!                       └── registers and signal mask are kept ──────────── and put back ───┴─▶ detach
//! ```
//!
//! The last stop is where the kernel handles signals, as the first was: there it decides from the
//! registers whether a system call that was interrupted begins again. So a thread that slept goes on
//! sleeping, and a process that was stopped by a signal stays so.
//!
//! Everything happens in a thread of its own. When it ends, the kernel lets go of what it traces,
//! also of a thread that never stopped.

mod arch;

use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::time::{Duration, Instant};

use libc::user_regs_struct;
use nix::errno::Errno;

use crate::process::{Process, ProcessError};

/// How long a thread may take to stop. It stops as soon as it has a processor, unless it waits for a
/// disk or a vfork child; the next round tries again.
const STOP_LIMIT: Duration = Duration::from_millis(250);

/// How often to look whether a thread has stopped. The event for it is SIGCHLD, which belongs to the
/// whole agent, and waitpid(2) has no time limit.
const STOP_LOOK: Duration = Duration::from_micros(50);

/// `PTRACE_EVENT_STOP`, which libc lacks for some targets.
const EVENT_STOP: i32 = 128;

pub(super) const UFFD_USER_MODE_ONLY: i32 = 1;

/// Why no descriptor was got.
#[derive(Debug)]
pub(super) enum InjectError {
    /// The process has ended.
    Gone,
    /// Not this time, or never.
    Refused {
        /// Why.
        reason: String,
        /// Whether trying again is of no use.
        lasting: bool,
    },
}

impl From<ProcessError> for InjectError {
    fn from(error: ProcessError) -> Self {
        match error {
            ProcessError::Gone { .. } => Self::Gone,
            error => Self::Refused { reason: error.to_string(), lasting: false },
        }
    }
}

fn refused(reason: impl Into<String>) -> InjectError {
    InjectError::Refused { reason: reason.into(), lasting: false }
}

fn refused_for_good(reason: impl Into<String>) -> InjectError {
    InjectError::Refused { reason: reason.into(), lasting: true }
}

fn step(action: &str) -> impl FnOnce(Errno) -> InjectError {
    move |errno| match errno {
        Errno::ESRCH => InjectError::Gone,
        errno => refused(format!("cannot {action}: {}", errno.desc())),
    }
}

/// A userfaultfd of the process.
pub(super) fn userfaultfd(process: &Process) -> Result<OwnedFd, InjectError> {
    std::thread::scope(|scope| {
        let tracer = scope.spawn(|| in_this_thread(process, || ()));
        tracer.join().unwrap_or_else(|_| Err(refused("the tracer panicked")))
    })
}

/// Runs this while no thread of the process runs: some microseconds for each of them.
pub(super) fn while_stopped<T: Send>(
    process: &Process,
    run: impl FnOnce() -> T + Send,
) -> Result<T, InjectError> {
    let in_this_thread = || {
        // Whatever fails, the end of this thread lets go of those that are stopped.
        let mut stopped: Vec<Tracee> = Vec::new();
        loop {
            let mut tasks = process.tasks()?;
            tasks.retain(|&task| stopped.iter().all(|tracee| tracee.task != task));
            tasks.retain(|task| {
                let stat = process.text(&format!("task/{task}/stat"));
                stat.is_ok_and(|stat| {
                    crate::process::state(&stat).is_some_and(|state| !"ZXx".contains(state))
                })
            });
            if tasks.is_empty() {
                break;
            }
            for task in tasks {
                let stop = Tracee::seize(process, task).and_then(|tracee| tracee.stop().map(|()| tracee));
                match stop {
                    Ok(tracee) => stopped.push(tracee),
                    // It ended, which the next look at the list shows.
                    Err(InjectError::Gone) => process.check_alive()?,
                    Err(error) => return Err(error),
                }
            }
        }
        let result = run();
        for tracee in &stopped {
            tracee
                .go_on()
                .or_else(|errno| if errno == Errno::ESRCH { Ok(()) } else { Err(errno) })
                .map_err(step("let it go on"))?;
        }
        Ok(result)
    };
    std::thread::scope(|scope| {
        scope.spawn(in_this_thread).join().unwrap_or_else(|_| Err(refused("the tracer panicked")))
    })
}

/// `before_stop` is called when all is known that is looked up while the process runs.
fn in_this_thread(process: &Process, before_stop: impl FnOnce()) -> Result<OwnedFd, InjectError> {
    let task = choose_task(process)?;
    // Before the stop, which that would make longer.
    let mut instruction = find_instruction(process)?;
    before_stop();
    let tracee = Tracee::seize(process, task)?;
    tracee.stop()?;
    // It may have executed another program since then, in which that is an address as any other.
    let mut there = [0; arch::INSTRUCTION.len()];
    if process.read(instruction, &mut there)? < there.len() || there[..] != *arch::INSTRUCTION {
        instruction = find_instruction(process).inspect_err(|_| {
            let _ = tracee.go_on();
        })?;
    }
    let registers = tracee.registers().map_err(step("read its registers"))?;
    if !arch::has_known_width(&registers) {
        let _ = tracee.detach();
        return Err(refused_for_good("it runs 32-bit code"));
    }
    let mut at_pc = [0; 4];
    let pc = arch::pc(&registers);
    let known = process.read(pc, &mut at_pc).unwrap_or(0);
    let reenter = arch::must_reenter(&at_pc[..known], &registers);
    let mask = tracee.signal_mask().map_err(step("read its signal mask"))?;
    tracee.set_signal_mask(u64::MAX).map_err(step("block its signals"))?;

    // From here on the registers are not the thread's own: whatever fails, they are put back, and
    // waiting has no limit.
    let mut injection = Injection { tracee: &tracee, instruction, registers, reenter };
    let result = injection.begin().map_err(step("enter its system call again")).and_then(|()| {
        let fd = injection.make()?;
        let taken = take(process, task, fd);
        injection.call(libc::SYS_close, fd.unsigned_abs().into()).map_err(step("close it inside"))?;
        taken
    });
    match injection.finish(mask) {
        Ok(()) => result,
        Err(Errno::ESRCH) => Err(InjectError::Gone),
        Err(errno) => Err(refused(format!("cannot let it go on as it was: {}", errno.desc()))),
    }
}

/// A thread that is traced and stopped, and runs system calls of ours.
struct Injection<'a> {
    tracee: &'a Tracee,
    /// Where a system call instruction is.
    instruction: u64,
    /// What the thread goes on with.
    registers: user_regs_struct,
    /// The thread leaves as it enters its own system call again, see [`arch::must_reenter`].
    reenter: bool,
}

impl Injection<'_> {
    /// Brings a thread that enters its system call again to where another one can be made.
    fn begin(&mut self) -> Result<(), Errno> {
        if !self.reenter {
            return Ok(());
        }
        self.tracee.run_to_syscall_stop()?;
        let entered = self.tracee.registers()?;
        arch::skip(self.tracee.task, &entered)?;
        self.tracee.run_to_syscall_stop()?;
        self.registers = arch::rewound(&entered);
        self.instruction = arch::pc(&self.registers);
        Ok(())
    }

    fn make(&self) -> Result<i32, InjectError> {
        let flags = libc::O_CLOEXEC | libc::O_NONBLOCK | UFFD_USER_MODE_ONLY;
        let result = self
            .call(libc::SYS_userfaultfd, flags.unsigned_abs().into())
            .map_err(step("run a system call in it"))?;
        match i32::try_from(result) {
            Ok(fd @ 0..) => Ok(fd),
            Ok(error) => {
                let errno = Errno::from_raw(-error);
                let lasting = matches!(errno, Errno::ENOSYS | Errno::EPERM);
                let reason = format!("userfaultfd(2) in it fails: {}", errno.desc());
                Err(InjectError::Refused { reason, lasting })
            }
            Err(_) => Err(refused("userfaultfd(2) in it returned no descriptor")),
        }
    }

    fn call(&self, number: i64, argument: u64) -> Result<i64, Errno> {
        self.tracee.set_registers(&arch::call(&self.registers, self.instruction, number, argument))?;
        self.tracee.run_to_syscall_stop()?;
        self.tracee.run_to_syscall_stop()?;
        Ok(arch::result(&self.tracee.registers()?))
    }

    /// Lets the thread go on with its own registers and signal mask.
    fn finish(&self, mask: u64) -> Result<(), Errno> {
        if self.reenter {
            self.tracee.set_registers(&self.registers)?;
            self.tracee.run_to_syscall_stop()?;
        } else {
            self.tracee.interrupt()?;
            self.tracee.run_to_signal_handling()?;
            self.tracee.set_registers(&arch::leave(&self.registers))?;
        }
        self.tracee.set_signal_mask(mask)?;
        self.tracee.detach()
    }
}

/// Takes over the descriptor that the thread has just got.
fn take(process: &Process, task: i32, fd: i32) -> Result<OwnedFd, InjectError> {
    // The handle of the process is its first thread, whose descriptors may be others.
    if task != process.pid() && !super::same::files(process.pid(), task) {
        return Err(refused_for_good("its threads do not share their descriptors"));
    }
    // SAFETY: pidfd_getfd takes three integers and touches no memory of ours.
    let taken = unsafe { libc::syscall(libc::SYS_pidfd_getfd, process.pidfd().as_raw_fd(), fd, 0) };
    let taken = Errno::result(taken).map_err(step("take over the descriptor"))?;
    let taken = i32::try_from(taken).map_err(|_| refused("pidfd_getfd(2) returned no descriptor"))?;
    // SAFETY: the kernel has just returned this descriptor; nobody else owns it.
    Ok(unsafe { OwnedFd::from_raw_fd(taken) })
}

/// The thread that is least disturbed by a stop: the first one unless it is worse off than another.
fn choose_task(process: &Process) -> Result<i32, InjectError> {
    let status = process.status()?;
    if status.tracer != 0 {
        return Err(refused(format!("process {} traces it already", status.tracer)));
    }
    let mut best = None;
    for task in process.tasks()? {
        let Ok(stat) = process.text(&format!("task/{task}/stat")) else { continue };
        let number = || {
            let text = process.text(&format!("task/{task}/syscall")).unwrap_or_default();
            text.split_whitespace().next().and_then(|word| word.parse().ok()).unwrap_or(-1)
        };
        let cost = match crate::process::state(&stat) {
            Some('R' | 'T') => 0,
            Some('S') if arch::ends_when_stopped(number()) => 1,
            Some('S') => 0,
            Some('D') => 2,
            _ => continue,
        };
        if best.is_none_or(|(least, _)| cost < least) {
            best = Some((cost, task));
        }
        if cost == 0 {
            break;
        }
    }
    best.map(|(_, task)| task).ok_or(InjectError::Gone)
}

/// A system call instruction in the process. The vDSO has some on every kernel; a process without
/// one runs its own.
fn find_instruction(process: &Process) -> Result<u64, InjectError> {
    let mut code = vec![0; 64 * 1024];
    let areas = process.areas()?;
    let executable = || areas.iter().filter(|area| area.executable && area.readable);
    let (vdso, others): (Vec<_>, Vec<_>) = executable().partition(|area| area.is_vdso);
    for area in vdso.into_iter().chain(others) {
        let mut start = area.range.start;
        while start < area.range.end {
            let left = usize::try_from(area.range.end - start).unwrap_or(usize::MAX);
            let wanted = left.min(code.len());
            let read = process.read(start, &mut code[..wanted])?;
            let found = code[..read]
                .windows(arch::INSTRUCTION.len())
                .enumerate()
                .find(|(at, bytes)| at.is_multiple_of(arch::ALIGNMENT) && *bytes == arch::INSTRUCTION);
            if let Some((at, _)) = found {
                return Ok(start + at as u64);
            }
            if read == 0 {
                break;
            }
            start += read as u64;
        }
    }
    // One that executes a program just now has hardly anything mapped.
    Err(refused("no system call instruction was found in it"))
}

/// How a traced thread stopped.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Stop {
    /// Where signals are handled: by PTRACE_INTERRUPT or by a stop signal.
    SignalHandling,
    /// A signal is about to be delivered.
    Signal(i32),
    /// At the beginning or end of a system call.
    Syscall,
}

/// A thread that this thread traces.
struct Tracee {
    task: i32,
}

impl Tracee {
    fn seize(process: &Process, task: i32) -> Result<Self, InjectError> {
        let tracee = Self { task };
        let seize = |options: i32| tracee.by_value(libc::PTRACE_SEIZE, options);
        let failed = |errno| match errno {
            Errno::ESRCH => InjectError::Gone,
            errno => refused(format!("it cannot be traced: {}", Errno::desc(errno))),
        };
        // Filters would refuse userfaultfd(2), or kill the process for it.
        if process.status()?.seccomp == 0 {
            seize(libc::PTRACE_O_TRACESYSGOOD).map_err(failed)?;
        } else {
            seize(libc::PTRACE_O_TRACESYSGOOD | libc::PTRACE_O_SUSPEND_SECCOMP).map_err(
                |errno| match errno {
                    Errno::ESRCH => InjectError::Gone,
                    errno => refused_for_good(format!(
                        "its seccomp filter cannot be suspended: {}",
                        Errno::desc(errno)
                    )),
                },
            )?;
        }
        // The PID of a thread may have gone to another between choosing and seizing it.
        if process.text(&format!("task/{task}/stat")).is_err() {
            return Err(InjectError::Gone);
        }
        Ok(tracee)
    }

    /// Stops the thread where signals are handled, within [`STOP_LIMIT`].
    fn stop(&self) -> Result<(), InjectError> {
        self.interrupt().map_err(step("interrupt it"))?;
        let begun = Instant::now();
        loop {
            match self.look(libc::WNOHANG).map_err(step("wait for its stop"))? {
                Some(Stop::SignalHandling) => return Ok(()),
                Some(stop) => self.resume(libc::PTRACE_CONT, stop).map_err(step("let it run on"))?,
                None if begun.elapsed() > STOP_LIMIT => return Err(refused("it does not stop")),
                None if begun.elapsed() < STOP_LOOK => std::thread::yield_now(),
                None => std::thread::sleep(STOP_LOOK),
            }
        }
    }

    fn interrupt(&self) -> Result<(), Errno> {
        self.by_value(libc::PTRACE_INTERRUPT, 0)
    }

    fn run_to_syscall_stop(&self) -> Result<(), Errno> {
        let mut stop = Stop::Syscall;
        loop {
            self.resume(libc::PTRACE_SYSCALL, stop)?;
            stop = self.wait()?;
            if stop == Stop::Syscall {
                return Ok(());
            }
        }
    }

    fn run_to_signal_handling(&self) -> Result<(), Errno> {
        let mut stop = Stop::Syscall;
        loop {
            self.resume(libc::PTRACE_CONT, stop)?;
            stop = self.wait()?;
            if stop == Stop::SignalHandling {
                return Ok(());
            }
        }
    }

    /// Resumes; a signal that was about to be delivered is. With all signals blocked that is at most
    /// SIGSTOP, which touches no registers.
    fn resume(&self, request: libc::c_uint, stop: Stop) -> Result<(), Errno> {
        let signal = if let Stop::Signal(signal) = stop { signal } else { 0 };
        self.by_value(request, signal)
    }

    fn wait(&self) -> Result<Stop, Errno> {
        loop {
            if let Some(stop) = self.look(0)? {
                return Ok(stop);
            }
        }
    }

    /// Its stop, if it has stopped; ESRCH when it has ended.
    fn look(&self, flags: i32) -> Result<Option<Stop>, Errno> {
        let mut status = 0;
        // SAFETY: the status is written to a variable of ours.
        let task = unsafe { libc::waitpid(self.task, &raw mut status, libc::__WALL | flags) };
        match Errno::result(task) {
            Ok(0) | Err(Errno::EINTR) => return Ok(None),
            Ok(_) => {}
            Err(Errno::ECHILD) => return Err(Errno::ESRCH),
            Err(errno) => return Err(errno),
        }
        if !libc::WIFSTOPPED(status) {
            return Err(Errno::ESRCH);
        }
        Ok(Some(match (status >> 16, libc::WSTOPSIG(status)) {
            (EVENT_STOP, _) => Stop::SignalHandling,
            (_, signal) if signal == libc::SIGTRAP | 0x80 => Stop::Syscall,
            (_, signal) => Stop::Signal(signal),
        }))
    }

    fn registers(&self) -> Result<user_regs_struct, Errno> {
        // SAFETY: the structure is plain numbers, for which zero is a value.
        let mut registers: user_regs_struct = unsafe { std::mem::zeroed() };
        self.register_set(libc::PTRACE_GETREGSET, &mut registers)?;
        Ok(registers)
    }

    fn set_registers(&self, registers: &user_regs_struct) -> Result<(), Errno> {
        self.register_set(libc::PTRACE_SETREGSET, &mut { *registers })
    }

    fn register_set(&self, request: libc::c_uint, registers: &mut user_regs_struct) -> Result<(), Errno> {
        let iov_len = size_of::<user_regs_struct>();
        let mut vector = libc::iovec { iov_base: std::ptr::from_mut(registers).cast(), iov_len };
        let kind = i64::from(libc::NT_PRSTATUS);
        // SAFETY: the vector covers the registers, which are borrowed exclusively for the call.
        Errno::result(unsafe { libc::ptrace(request, self.task, kind, &raw mut vector) })?;
        if vector.iov_len == iov_len { Ok(()) } else { Err(Errno::EIO) }
    }

    fn signal_mask(&self) -> Result<u64, Errno> {
        let mut mask = 0_u64;
        // SAFETY: the kernel writes as many bytes as the third argument says.
        let done =
            unsafe { libc::ptrace(libc::PTRACE_GETSIGMASK, self.task, size_of::<u64>(), &raw mut mask) };
        Errno::result(done).map(|_| mask)
    }

    fn set_signal_mask(&self, mask: u64) -> Result<(), Errno> {
        // SAFETY: the kernel reads as many bytes as the third argument says.
        let done =
            unsafe { libc::ptrace(libc::PTRACE_SETSIGMASK, self.task, size_of::<u64>(), &raw const mask) };
        Errno::result(done).map(drop)
    }

    /// Lets a thread go on of which nothing was changed.
    fn go_on(&self) -> Result<(), Errno> {
        let registers = self.registers()?;
        self.set_registers(&arch::leave(&registers))?;
        self.detach()
    }

    fn detach(&self) -> Result<(), Errno> {
        self.by_value(libc::PTRACE_DETACH, 0)
    }

    /// A request that takes at most a number.
    fn by_value(&self, request: libc::c_uint, data: i32) -> Result<(), Errno> {
        let data = libc::c_ulong::from(data.unsigned_abs());
        // SAFETY: the requests given take their argument by value and touch no memory of ours.
        Errno::result(unsafe { libc::ptrace(request, self.task, 0_usize, data) }).map(drop)
    }
}

#[cfg(all(test, target_arch = "x86_64"))]
mod tests {
    use std::sync::atomic::Ordering;

    use super::*;

    /// What aarch64 has to do, tried on this machine: the thread leaves by entering its call again.
    #[test]
    fn a_thread_that_enters_its_call_again_loses_nothing() {
        arch::REENTER.store(true, Ordering::Relaxed);
        for number in [libc::SYS_clock_nanosleep, libc::SYS_poll, libc::SYS_rt_sigsuspend] {
            // SAFETY: the child makes nothing but system calls.
            let pid = unsafe { libc::fork() };
            if pid == 0 {
                // SAFETY: variables of the child's.
                unsafe { libc::_exit(wait_in(number)) };
            }
            let process = Process::open(pid).expect("it lives");
            // Other tests of this process may have some at the moment, and a fork has them too.
            let inherited = userfaultfds(pid);
            let in_call = || {
                let text = process.text(&format!("task/{pid}/syscall")).unwrap_or_default();
                text.split_whitespace().next() == Some(&number.to_string())
            };
            while !in_call() {
                std::thread::yield_now();
            }
            std::thread::sleep(Duration::from_millis(500));
            for _ in 0..10 {
                userfaultfd(&process).expect("a descriptor");
            }
            assert_eq!(userfaultfds(pid), inherited);
            let mut status = 0;
            // SAFETY: the child is ours.
            unsafe {
                if number == libc::SYS_rt_sigsuspend {
                    libc::kill(pid, libc::SIGUSR1);
                }
                libc::waitpid(pid, &raw mut status, 0);
            }
            assert_eq!(status, 0, "system call {number}");
        }
        arch::REENTER.store(false, Ordering::Relaxed);
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
            scope.spawn(|| in_this_thread(&process, execute)).join().expect("no panic")
        });
        let after = find_instruction(&process).expect("an instruction");
        let random = std::fs::read_to_string("/proc/sys/kernel/randomize_va_space").unwrap_or_default();
        assert!(before != after || random.trim() == "0", "both programs have it at {before:#x}");
        super::super::kernel::Userfault::new(got.expect("a descriptor")).expect("it is of use");
        assert_eq!(userfaultfds(pid), 0);
        while crate::process::state(&process.text("stat").expect("it lives")) != Some('S') {
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
        let mut child = std::process::Command::new("/bin/sh")
            .args(["-c", script, script, "300"])
            .spawn()
            .expect("a shell");
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

    /// Waits 1.5 s, or for a signal; 0 when it was as it should be.
    unsafe fn wait_in(number: i64) -> i32 {
        let begun = Instant::now();
        // SAFETY: the arguments are variables of ours.
        let right = unsafe {
            match number {
                libc::SYS_clock_nanosleep => {
                    let time = libc::timespec { tv_sec: 1, tv_nsec: 500_000_000 };
                    libc::nanosleep(&raw const time, std::ptr::null_mut()) == 0
                }
                libc::SYS_poll => libc::poll(std::ptr::null_mut(), 0, 1500) == 0,
                _ => {
                    libc::signal(libc::SIGUSR1, handler as *const () as usize);
                    let set: libc::sigset_t = std::mem::zeroed();
                    return i32::from(
                        libc::sigsuspend(&raw const set) != -1 || *libc::__errno_location() != libc::EINTR,
                    );
                }
            }
        };
        let took = begun.elapsed();
        // Begun anew, it would take two seconds at least.
        i32::from(!right)
            + 2 * i32::from(took < Duration::from_millis(1495) || took > Duration::from_millis(1950))
    }
}
