//! One system call inside another process: `userfaultfd(2)`, whose descriptor is bound to the
//! address space of the caller, is made by a thread of the process under ptrace, taken over with
//! `pidfd_getfd(2)`, and closed inside in the same stop.
//!
//! ```text
//! seize ─ interrupt ─▶ stop ─ put aside ─▶ userfaultfd ─ take it ─▶ close ─ interrupt ─▶ stop
//!  all threads          │                                                                 │
//!                       └── registers, signal mask, dispatch ───────── and put back ──────┴─▶ detach
//! ```
//!
//! The last stop is where the kernel handles signals, as the first was: there it decides from the
//! registers whether a system call that was interrupted begins again. So a thread that slept goes on
//! sleeping, and a process that was stopped by a signal stays so.
//!
//! What the process could notice, and why it does not:
//!
//! - Another thread would get another number for its next descriptor, and a fork would inherit ours: no
//!   thread runs while there is one.
//! - A critical section of rseq(2): see [`rseq`].
//! - Signals: those that come meanwhile wait, for they are blocked. SIGSTOP cannot be, and takes effect
//!   when the thread goes on.
//! - Filters and dispatch of system calls are suspended ([`Tracee::suspend_filters`], [`Dispatch`]).
//! - Memory is neither read nor written by what runs inside: no page is touched, and no lock, robust list
//!   or shadow stack. A shadow stack (x86 CET) notes calls and returns, of which there is none here.
//! - Vectors and the like are kept by the kernel over a system call. Where they are not, they are put
//!   aside ([`arch::Extended`]).
//! - Keys of pointer authentication (arm64) belong to the process and stay; no pointer is signed here. That
//!   a branch has to end at a mark (BTI) is for branches: [`arch::call`] says that there was none.
//!
//! Everything happens in a thread of its own. When it ends, the kernel detaches all that it traces, even a thread that
//! never stopped.

mod arch;
mod dispatch;
mod rseq;
mod stopped;
#[cfg(all(test, target_arch = "x86_64"))]
mod tests;
mod tracee;

use std::os::fd::OwnedFd;

use libc::user_regs_struct;
use nix::errno::Errno;
use rustix::process::{PidfdGetfdFlags, pidfd_getfd};

use self::dispatch::Dispatch;
use self::stopped::{Stopped, Tracing, in_tracer};
use self::tracee::Tracee;
use crate::process::{Process, ProcessError};

pub(super) const UFFD_USER_MODE_ONLY: i32 = 1;

/// Why there is no descriptor.
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
    in_tracer(process, |tracing| in_this_thread(tracing, || ()))
}

/// Runs this while no thread of the process runs: some microseconds for each of them.
pub(super) fn while_stopped<T: Send>(
    process: &Process,
    run: impl FnOnce() -> T + Send,
) -> Result<T, InjectError> {
    in_tracer(process, |tracing| {
        let stopped = Stopped::all(tracing)?;
        let result = run();
        stopped.release()?;
        Ok(result)
    })
}

/// `before_stop` is called when all is known that is looked up while the process runs.
fn in_this_thread(tracing: &Tracing<'_>, before_stop: impl FnOnce()) -> Result<OwnedFd, InjectError> {
    let process = tracing.process;
    let task = choose_task(process)?;
    // Before the stop, which that would make longer.
    let instruction = find_instruction(process)?;
    before_stop();
    let stopped = Stopped::all(tracing)?;
    let result = match stopped.find(task) {
        Some(tracee) => inject(process, tracee, instruction),
        None => Err(refused("the thread that was to call the kernel has ended")),
    };
    stopped.release()?;
    result
}

/// All threads are stopped, and this one makes the call.
fn inject(process: &Process, tracee: &Tracee, instruction: u64) -> Result<OwnedFd, InjectError> {
    // It may have executed another program since then, in which that is an address as any other.
    let mut there = [0; arch::INSTRUCTION.len()];
    let instruction = match process.read(instruction, &mut there)? {
        read if read == there.len() && there[..] == *arch::INSTRUCTION => instruction,
        _ => find_instruction(process)?,
    };
    let mut registers = tracee.registers().map_err(|errno| match errno {
        Errno::ENOTSUP => refused_for_good("it runs 32-bit code"),
        errno => step("read its registers")(errno),
    })?;
    if process.status_of(tracee.task)?.seccomp != 0 {
        tracee.suspend_filters()?;
    }
    if let Some(handler) = rseq::abort_handler(process, tracee, arch::pc(&registers))? {
        registers = arch::at(&registers, handler);
    }
    let mut at_pc = [0; 4];
    let known = process.read(arch::pc(&registers), &mut at_pc).unwrap_or(0);
    let reenter = arch::must_reenter(&at_pc[..known], &registers);
    let dispatch = Dispatch::of(tracee);
    if reenter && dispatch.is_some() {
        return Err(refused("it dispatches its system calls by itself, and is about to make one"));
    }
    let extended = arch::Extended::of(tracee.task).map_err(step("read its vector registers"))?;
    let mask = tracee.signal_mask().map_err(step("read its signal mask"))?;
    tracee.set_signal_mask(u64::MAX).map_err(step("block its signals"))?;

    // From here on the thread is not as it was: whatever fails, all is restored, and waiting has no limit.
    let mut injection = Injection { tracee, instruction, registers, reenter, extended, dispatch };
    let result = injection.begin().map_err(step("enter its system call again")).and_then(|()| {
        let fd = injection.make()?;
        let taken = take(process, fd);
        injection.call(libc::SYS_close, fd.unsigned_abs().into()).map_err(step("close it inside"))?;
        taken
    });
    match injection.finish(mask) {
        Ok(()) => result,
        Err(Errno::ESRCH) => Err(InjectError::Gone),
        Err(errno) => Err(refused(format!("cannot let it continue as it was: {}", errno.desc()))),
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
    /// Registers that a system call does not keep.
    extended: arch::Extended,
    /// How the thread dispatches its system calls, if it does.
    dispatch: Option<Dispatch>,
}

impl Injection<'_> {
    /// Brings the thread to where another system call can be made.
    fn begin(&mut self) -> Result<(), Errno> {
        if self.dispatch.is_some() {
            Dispatch::OFF.set(self.tracee)?;
        }
        if !self.reenter {
            return Ok(());
        }
        self.tracee.set_registers(&self.registers)?;
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

    /// Gives the thread its own registers, signal mask and dispatch again.
    fn finish(&self, mask: u64) -> Result<(), Errno> {
        if self.reenter {
            self.tracee.set_registers(&self.registers)?;
            self.tracee.run_to_syscall_stop()?;
        } else {
            self.tracee.interrupt()?;
            self.tracee.run_to_signal_handling()?;
            self.extended.put_back(self.tracee.task)?;
            self.tracee.set_registers(&self.registers)?;
        }
        if let Some(dispatch) = self.dispatch {
            dispatch.set(self.tracee)?;
        }
        self.tracee.set_signal_mask(mask)
    }
}

/// Takes over the descriptor that a thread has just got.
fn take(process: &Process, fd: i32) -> Result<OwnedFd, InjectError> {
    pidfd_getfd(process.pidfd(), fd, PidfdGetfdFlags::empty())
        .map_err(|errno| step("take over the descriptor")(Errno::from_raw(errno.raw_os_error())))
}

/// The thread that a stop disturbs least: the first one unless another is disturbed less.
fn choose_task(process: &Process) -> Result<i32, InjectError> {
    let first = process.pid();
    // The handle of a process reaches the descriptors of its first thread.
    if process.state_of(first).is_none() {
        process.check_alive()?;
        return Err(refused("its first thread has ended, and others run"));
    }
    let mut best = None;
    for task in process.tasks()? {
        let number = || {
            let text = process.text(&format!("task/{task}/syscall")).unwrap_or_default();
            text.split_whitespace().next().and_then(|word| word.parse().ok()).unwrap_or(-1)
        };
        let cost = match process.state_of(task) {
            Some('R' | 'T') => 0,
            Some('S') if arch::ends_when_stopped(number()) => 1,
            Some('S') => 0,
            Some('D') => 2,
            _ => continue,
        };
        if best.is_none_or(|(least, _)| cost < least) && (task == first || super::same::files(first, task)) {
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
