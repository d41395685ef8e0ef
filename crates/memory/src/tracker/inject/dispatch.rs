//! Programs that run others inside themselves get the system calls of those as SIGSYS
//! (Documentation/admin-guide/syscall-user-dispatch.rst). Ours would be one of them, and the signal, being
//! blocked, would end the process.

use nix::errno::Errno;

use super::tracee::Tracee;

const PTRACE_SET_SYSCALL_USER_DISPATCH_CONFIG: libc::c_uint = 0x4210;
const PTRACE_GET_SYSCALL_USER_DISPATCH_CONFIG: libc::c_uint = 0x4211;

/// How a thread dispatches its system calls: `struct ptrace_sud_config`.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub(super) struct Dispatch {
    mode: u64,
    selector: u64,
    offset: u64,
    len: u64,
}

impl Dispatch {
    pub(super) const OFF: Self = Self { mode: 0, selector: 0, offset: 0, len: 0 };

    /// How this thread does; none when it does not. Kernels that cannot tell (before 6.4, and those for
    /// arm64 that have no such thing) also have no userfaultfd that notes writes.
    pub(super) fn of(tracee: &Tracee) -> Option<Self> {
        let mut config = Self::OFF;
        tracee.about(PTRACE_GET_SYSCALL_USER_DISPATCH_CONFIG, &mut config).ok()?;
        (config.mode != Self::OFF.mode).then_some(config)
    }

    pub(super) fn set(mut self, tracee: &Tracee) -> Result<(), Errno> {
        tracee.about(PTRACE_SET_SYSCALL_USER_DISPATCH_CONFIG, &mut self)
    }
}
