//! A thread that is traced by ptrace(2).

use libc::user_regs_struct;
use nix::errno::Errno;

use super::{InjectError, arch, refused, refused_for_good, step};
use crate::process::Process;

/// `PTRACE_EVENT_STOP`, which libc lacks for some targets.
const EVENT_STOP: i32 = 128;

const OPTIONS: i32 = libc::PTRACE_O_TRACESYSGOOD;

/// Who traces a thread.
fn tracer_of(process: &Process, task: i32) -> Option<u64> {
    process.status_of(task).ok().map(|status| status.tracer).filter(|&tracer| tracer != 0)
}

/// How a traced thread stopped.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Stop {
    /// Where signals are handled: by PTRACE_INTERRUPT or by a stop signal.
    SignalHandling,
    /// A signal is about to be delivered.
    Signal(i32),
    /// At the beginning or end of a system call.
    Syscall,
}

/// A thread that this thread traces.
pub(super) struct Tracee {
    pub(super) task: i32,
}

impl Tracee {
    /// Begins to trace a thread.
    pub(super) fn seize(process: &Process, task: i32) -> Result<Self, InjectError> {
        let tracee = Self { task };
        tracee.by_value(libc::PTRACE_SEIZE, OPTIONS).map_err(|errno| match errno {
            Errno::ESRCH => InjectError::Gone,
            errno => match tracer_of(process, task) {
                Some(tracer) => refused(format!("process {tracer} traces it already")),
                None => refused(format!("it cannot be traced: {}", errno.desc())),
            },
        })?;
        Ok(tracee)
    }

    /// Whether the thread has come to its stop. Lets it come past signals on the way there.
    pub(super) fn has_stopped(&self) -> Result<bool, InjectError> {
        match self.look(libc::WNOHANG).map_err(step("wait for its stop"))? {
            Some(Stop::SignalHandling) => Ok(true),
            Some(stop) => self.resume(libc::PTRACE_CONT, stop).map_err(step("let it run on")).map(|()| false),
            None => Ok(false),
        }
    }

    /// Takes filters of system calls off the thread for as long as it is traced. They would refuse
    /// userfaultfd(2), or kill the process for it.
    pub(super) fn suspend_filters(&self) -> Result<(), InjectError> {
        self.by_value(libc::PTRACE_SETOPTIONS, OPTIONS | libc::PTRACE_O_SUSPEND_SECCOMP).map_err(|errno| {
            match errno {
                Errno::ESRCH => InjectError::Gone,
                errno => {
                    refused_for_good(format!("its seccomp filter cannot be suspended: {}", errno.desc()))
                }
            }
        })
    }

    /// Tells the thread to stop where signals are handled. It may come past signals before that, see
    /// [`Tracee::has_stopped`].
    pub(super) fn interrupt(&self) -> Result<(), Errno> {
        self.by_value(libc::PTRACE_INTERRUPT, 0)
    }

    pub(super) fn run_to_syscall_stop(&self) -> Result<(), Errno> {
        let mut stop = Stop::Syscall;
        loop {
            self.resume(libc::PTRACE_SYSCALL, stop)?;
            stop = self.wait()?;
            if stop == Stop::Syscall {
                return Ok(());
            }
        }
    }

    pub(super) fn run_to_signal_handling(&self) -> Result<(), Errno> {
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

    /// Its registers; ENOTSUP when it runs 32-bit code, which has others.
    pub(super) fn registers(&self) -> Result<user_regs_struct, Errno> {
        // SAFETY: the structure is plain numbers, for which zero is a value.
        let mut registers: user_regs_struct = unsafe { std::mem::zeroed() };
        self.register_set(libc::PTRACE_GETREGSET, &mut registers)?;
        if arch::has_known_width(&registers) { Ok(registers) } else { Err(Errno::ENOTSUP) }
    }

    pub(super) fn set_registers(&self, registers: &user_regs_struct) -> Result<(), Errno> {
        self.register_set(libc::PTRACE_SETREGSET, &mut { *registers })
    }

    fn register_set(&self, request: libc::c_uint, registers: &mut user_regs_struct) -> Result<(), Errno> {
        let iov_len = size_of::<user_regs_struct>();
        let mut vector = libc::iovec { iov_base: std::ptr::from_mut(registers).cast(), iov_len };
        let kind = i64::from(libc::NT_PRSTATUS);
        // SAFETY: the vector covers the registers, which are borrowed exclusively for the call.
        Errno::result(unsafe { libc::ptrace(request, self.task, kind, &raw mut vector) })?;
        if vector.iov_len == iov_len { Ok(()) } else { Err(Errno::ENOTSUP) }
    }

    pub(super) fn signal_mask(&self) -> Result<u64, Errno> {
        let mut mask = 0;
        self.about(libc::PTRACE_GETSIGMASK, &mut mask).map(|()| mask)
    }

    pub(super) fn set_signal_mask(&self, mut mask: u64) -> Result<(), Errno> {
        self.about(libc::PTRACE_SETSIGMASK, &mut mask)
    }

    /// Lets a thread go on of which nothing is changed. One that stands in a critical section of
    /// rseq(2) is sent to its abort handler by the kernel, as after any other loss of the processor.
    pub(super) fn go_on(&self) -> Result<(), Errno> {
        match self.registers() {
            Ok(registers) => self.set_registers(&arch::leave(&registers))?,
            Err(Errno::ENOTSUP) => {}
            Err(errno) => return Err(errno),
        }
        self.detach()
    }

    fn detach(&self) -> Result<(), Errno> {
        self.by_value(libc::PTRACE_DETACH, 0)
    }

    /// A request about a structure of which the kernel is told the size.
    pub(super) fn about<T>(&self, request: libc::c_uint, value: &mut T) -> Result<(), Errno> {
        // SAFETY: the kernel reads or writes at most as many bytes as the third argument says.
        let done = unsafe { libc::ptrace(request, self.task, size_of::<T>(), std::ptr::from_mut(value)) };
        Errno::result(done).map(drop)
    }

    /// A request that takes at most a number.
    fn by_value(&self, request: libc::c_uint, data: i32) -> Result<(), Errno> {
        let data = libc::c_ulong::from(data.unsigned_abs());
        // SAFETY: the requests given take their argument by value and touch no memory of ours.
        Errno::result(unsafe { libc::ptrace(request, self.task, 0_usize, data) }).map(drop)
    }
}
