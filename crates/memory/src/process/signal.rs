//! Signals to a process that is held by its handle: none can reach another one that has its PID by now.

use std::io;
use std::os::fd::AsRawFd;
use std::ptr;

use super::{Process, ProcessError};

/// `siginfo_t` (sigaction(2)) on machines of 64 bits, as far as a queued signal has it.
#[derive(Default)]
#[repr(C, align(8))]
struct Queued {
    signal: i32,
    error: i32,
    code: i32,
    _pad: i32,
    sender_pid: i32,
    sender_uid: u32,
    value: u64,
    /// The kernel reads 128 bytes.
    _rest: [u64; 12],
}

const _: () = assert!(size_of::<Queued>() == 128);

impl Process {
    /// Queues a signal with a code and a value (pidfd_send_signal(2)).
    ///
    /// # Errors
    /// [`ProcessError::Gone`] when it has ended; else what the kernel says, as where its user has too many signals queued.
    pub fn queue(&self, signal: i32, code: i32, value: u32) -> Result<(), ProcessError> {
        self.send(signal, &Queued { signal, code, value: value.into(), ..Queued::default() })
    }

    /// Sends a signal as kill(2) does: the kernel has room for it in any case.
    ///
    /// # Errors
    /// [`ProcessError::Gone`] when it has ended; else what the kernel says.
    pub fn signal(&self, signal: i32) -> Result<(), ProcessError> {
        self.send(signal, ptr::null())
    }

    /// Whether a signal waits for the process as a whole: no thread has taken it yet.
    ///
    /// # Errors
    /// [`ProcessError::Gone`] when it has ended; else what the kernel says.
    pub fn is_pending(&self, signal: i32) -> Result<bool, ProcessError> {
        let pending = self.status()?.pending.unwrap_or_default();
        Ok(pending >> (signal - 1) & 1 != 0)
    }

    fn send(&self, signal: i32, information: *const Queued) -> Result<(), ProcessError> {
        let (handle, flags) = (self.pidfd.as_raw_fd(), 0);
        // SAFETY: the kernel reads 128 bytes, which are there, or none, and writes nothing.
        let result =
            unsafe { libc::syscall(libc::SYS_pidfd_send_signal, handle, signal, information, flags) };
        match result {
            0 => Ok(()),
            _ => Err(self.failed(&format!("send signal {signal}"), io::Error::last_os_error())),
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::process::Command;

    use super::*;

    #[test]
    fn one_that_has_ended_is_gone_and_nobody_else_is_signalled() {
        let mut child = Command::new("sleep").arg("1000").spawn().unwrap();
        let process = Process::open(i32::try_from(child.id()).unwrap()).unwrap();
        process.signal(libc::SIGSTOP).unwrap();
        process.signal(libc::SIGCONT).unwrap();
        // SIGTERM ends it.
        process.queue(libc::SIGTERM, -58, 7).unwrap();
        child.wait().unwrap();
        assert!(matches!(process.queue(libc::SIGTERM, -58, 7), Err(ProcessError::Gone { .. })));
        assert!(matches!(process.signal(libc::SIGCONT), Err(ProcessError::Gone { .. })));
    }
}
