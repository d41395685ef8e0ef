//! Registers: how a system call is made and what one looks like that was interrupted, for each
//! architecture godwit runs on.

use libc::user_regs_struct;

#[cfg(target_arch = "aarch64")]
use aarch64 as native;
#[cfg(target_arch = "x86_64")]
use x86_64 as native;

#[cfg(all(test, target_arch = "x86_64"))]
pub(super) use native::REENTER;
pub(super) use native::{
    ALIGNMENT, Extended, INSTRUCTION, at, call, has_known_width, leave, must_reenter, pc, result, rewound,
    skip,
};

/// System calls that may end with EINTR when a thread is stopped and goes on, although no signal came
/// (signal(7), "Interruption of system calls and library functions by stop signals").
pub(super) fn ends_when_stopped(number: i64) -> bool {
    #[cfg(target_arch = "x86_64")]
    if number == libc::SYS_epoll_wait {
        return true;
    }
    [
        libc::SYS_epoll_pwait,
        libc::SYS_epoll_pwait2,
        libc::SYS_semop,
        libc::SYS_semtimedop,
        libc::SYS_rt_sigtimedwait,
        libc::SYS_io_uring_enter,
    ]
    .contains(&number)
        || waits_at_socket(number)
}

/// System calls that end with EINTR where the socket has a time limit (`SO_RCVTIMEO`, `SO_SNDTIMEO`).
fn waits_at_socket(number: i64) -> bool {
    [
        libc::SYS_accept,
        libc::SYS_accept4,
        libc::SYS_connect,
        libc::SYS_recvfrom,
        libc::SYS_recvmmsg,
        libc::SYS_recvmsg,
        libc::SYS_sendmmsg,
        libc::SYS_sendmsg,
        libc::SYS_sendto,
    ]
    .contains(&number)
}

#[cfg(target_arch = "x86_64")]
mod x86_64 {
    use nix::errno::Errno;

    use super::{ends_when_stopped, user_regs_struct, waits_at_socket};

    /// `syscall`.
    pub(in super::super) const INSTRUCTION: &[u8] = &[0x0f, 0x05];
    /// Instructions begin anywhere.
    pub(in super::super) const ALIGNMENT: usize = 1;
    /// Code segment of 64-bit programs.
    const USER_CS: u64 = 0x33;
    /// The kernel's: restart unless a handler runs (include/linux/errno.h).
    const ERESTARTNOHAND: u64 = 514_u64.wrapping_neg();
    const EINTR: u64 = 4_u64.wrapping_neg();

    /// Whether the thread runs 64-bit code.
    pub(in super::super) fn has_known_width(registers: &user_regs_struct) -> bool {
        registers.cs == USER_CS
    }

    /// Registers that make this system call at this instruction.
    pub(in super::super) fn call(
        registers: &user_regs_struct,
        instruction: u64,
        number: i64,
        argument: u64,
    ) -> user_regs_struct {
        let mut registers = *registers;
        registers.rip = instruction;
        registers.rax = number.cast_unsigned();
        // No system call that could be restarted.
        registers.orig_rax = u64::MAX;
        registers.rdi = argument;
        registers
    }

    /// Registers to go on with elsewhere, in no system call.
    pub(in super::super) fn at(registers: &user_regs_struct, pc: u64) -> user_regs_struct {
        user_regs_struct { rip: pc, orig_rax: u64::MAX, ..*registers }
    }

    /// Registers beside the general ones that a system call does not keep: none here, the kernel leaves
    /// all of the extended state alone (x87, SSE, AVX, AMX).
    pub(in super::super) struct Extended;

    impl Extended {
        pub(in super::super) fn of(_task: i32) -> Result<Self, Errno> {
            Ok(Self)
        }

        pub(in super::super) fn put_back(&self, _task: i32) -> Result<(), Errno> {
            Ok(())
        }
    }

    /// What a system call returned.
    pub(in super::super) fn result(registers: &user_regs_struct) -> i64 {
        registers.rax.cast_signed()
    }

    /// Where the thread is.
    pub(in super::super) fn pc(registers: &user_regs_struct) -> u64 {
        registers.rip
    }

    /// Whether the thread has to enter its system call again before another one can be made. Not
    /// here: the kernel decides on that after the last stop, from the registers. Tests try the other
    /// architecture's way, which works here too.
    pub(in super::super) fn must_reenter(_at_pc: &[u8], registers: &user_regs_struct) -> bool {
        #[cfg(test)]
        if REENTER.load(std::sync::atomic::Ordering::Relaxed) {
            // ERESTARTSYS to ERESTART_RESTARTBLOCK.
            return (-516..=-512).contains(&registers.rax.cast_signed());
        }
        let _ = registers;
        false
    }

    #[cfg(test)]
    pub(in super::super) static REENTER: std::sync::atomic::AtomicBool =
        std::sync::atomic::AtomicBool::new(false);

    /// Lets a thread that is about to make a system call pass over it.
    pub(in super::super) fn skip(task: i32, entered: &user_regs_struct) -> Result<(), Errno> {
        let mut registers = user_regs_struct { orig_rax: u64::MAX, ..*entered };
        let iov_len = size_of::<user_regs_struct>();
        let mut vector = libc::iovec { iov_base: (&raw mut registers).cast(), iov_len };
        let kind = i64::from(libc::NT_PRSTATUS);
        // SAFETY: the vector covers a variable of ours.
        let done = unsafe { libc::ptrace(libc::PTRACE_SETREGSET, task, kind, &raw mut vector) };
        Errno::result(done).map(drop)
    }

    /// Registers that make the system call again that the thread is about to make. It may have
    /// become restart_syscall(2): its number is in the registers.
    pub(in super::super) fn rewound(entered: &user_regs_struct) -> user_regs_struct {
        let mut registers = *entered;
        registers.rip -= INSTRUCTION.len() as u64;
        registers.rax = entered.orig_rax;
        registers.orig_rax = u64::MAX;
        registers
    }

    /// Registers to go on with: a system call that our stop alone has ended begins again.
    pub(in super::super) fn leave(registers: &user_regs_struct) -> user_regs_struct {
        let mut registers = *registers;
        let number = registers.orig_rax.cast_signed();
        if number < 0 || registers.rax != EINTR {
            return registers;
        }
        // Of a socket with a time limit. The limit begins anew as well: programs take its end for the loss of
        // the other side, and EINTR, which they get from no signal of theirs, for a fault.
        let reads_or_writes =
            [libc::SYS_read, libc::SYS_readv, libc::SYS_write, libc::SYS_writev].contains(&number);
        if reads_or_writes || waits_at_socket(number) {
            registers.rax = ERESTARTNOHAND;
            return registers;
        }
        if !ends_when_stopped(number) {
            return registers;
        }
        // Its fourth argument is the time limit: a null pointer or a negative number is for ever.
        // What may not last for ever would last up to twice as long, so it ends now instead; a program
        // that gives a time limit also copes with EINTR, which the freezer causes too.
        let forever = match number {
            libc::SYS_semop => true,
            libc::SYS_epoll_wait | libc::SYS_epoll_pwait => registers.r10 & (1 << 31) != 0,
            libc::SYS_rt_sigtimedwait => registers.rdx == 0,
            libc::SYS_io_uring_enter => false,
            _ => registers.r10 == 0,
        };
        let short = matches!(number, libc::SYS_epoll_wait | libc::SYS_epoll_pwait)
            && (registers.r10 & 0xffff_ffff) <= 1000;
        if forever || short {
            // When a signal has come as well, its handler runs and the call ends with EINTR.
            registers.rax = ERESTARTNOHAND;
        } else if matches!(number, libc::SYS_epoll_wait | libc::SYS_epoll_pwait | libc::SYS_epoll_pwait2) {
            // No events: event loops take that as a timer and look at the clock.
            registers.rax = 0;
        }
        registers
    }
}

#[cfg(target_arch = "aarch64")]
mod aarch64 {
    use nix::errno::Errno;

    use super::user_regs_struct;

    /// `svc #0`.
    pub(in super::super) const INSTRUCTION: &[u8] = &[0x01, 0x00, 0x00, 0xd4];
    /// Instructions are whole words.
    pub(in super::super) const ALIGNMENT: usize = 4;
    /// The register set that is the number of the system call (include/uapi/linux/elf.h).
    const NT_ARM_SYSTEM_CALL: i64 = 0x404;
    /// PSTATE.nRW: 32-bit code.
    const PSR_MODE32_BIT: u64 = 0x10;
    /// PSTATE.BTYPE: the last instruction was an indirect branch, and the next one has to be a mark for such.
    const PSR_BTYPE_MASK: u64 = 0xc00;
    /// Register sets of vectors, in streaming mode and not (include/uapi/linux/elf.h).
    const NT_ARM_SSVE: i64 = 0x40b;
    const NT_ARM_SVE: i64 = 0x405;
    /// Where `struct user_sve_header` has its flags, and the one that says that vectors follow
    /// (arch/arm64/include/uapi/asm/ptrace.h).
    const SVE_FLAGS: usize = 12;
    const SVE_PT_REGS_SVE: u8 = 1;
    /// More than a register set of vectors of 2048 bits, the longest that there are.
    const SVE_SIZE: usize = 16 * 1024;

    pub(in super::super) fn has_known_width(registers: &user_regs_struct) -> bool {
        registers.pstate & PSR_MODE32_BIT == 0
    }

    pub(in super::super) fn call(
        registers: &user_regs_struct,
        instruction: u64,
        number: i64,
        argument: u64,
    ) -> user_regs_struct {
        let mut registers = at(registers, instruction);
        registers.regs[8] = number.cast_unsigned();
        registers.regs[0] = argument;
        registers
    }

    /// That is not where a branch led.
    pub(in super::super) fn at(registers: &user_regs_struct, pc: u64) -> user_regs_struct {
        user_regs_struct { pc, pstate: registers.pstate & !PSR_BTYPE_MASK, ..*registers }
    }

    /// Registers beside the general ones that a system call does not keep: vectors beyond their first 128
    /// bits, and streaming mode (Documentation/arch/arm64/sve.rst, sme.rst).
    pub(in super::super) struct Extended(Option<(i64, Vec<u8>)>);

    impl Extended {
        pub(in super::super) fn of(task: i32) -> Result<Self, Errno> {
            // Only of the mode in which the thread is there are vectors.
            for kind in [NT_ARM_SSVE, NT_ARM_SVE] {
                let mut bytes = vec![0; SVE_SIZE];
                match transfer(libc::PTRACE_GETREGSET, task, kind, &mut bytes) {
                    Ok(length) => bytes.truncate(length),
                    Err(Errno::ESRCH) => return Err(Errno::ESRCH),
                    // This processor has no such registers.
                    Err(_) => continue,
                }
                if bytes.get(SVE_FLAGS).is_some_and(|flags| flags & SVE_PT_REGS_SVE != 0) {
                    return Ok(Self(Some((kind, bytes))));
                }
            }
            Ok(Self(None))
        }

        pub(in super::super) fn put_back(&self, task: i32) -> Result<(), Errno> {
            match &self.0 {
                Some((kind, bytes)) => {
                    transfer(libc::PTRACE_SETREGSET, task, *kind, &mut bytes.clone()).map(drop)
                }
                None => Ok(()),
            }
        }
    }

    /// Reads or writes a register set, and gives its length.
    fn transfer(request: libc::c_uint, task: i32, kind: i64, bytes: &mut [u8]) -> Result<usize, Errno> {
        let mut vector = libc::iovec { iov_base: bytes.as_mut_ptr().cast(), iov_len: bytes.len() };
        // SAFETY: the vector covers the bytes, which are borrowed exclusively for the call.
        Errno::result(unsafe { libc::ptrace(request, task, kind, &raw mut vector) })?;
        Ok(vector.iov_len)
    }

    pub(in super::super) fn result(registers: &user_regs_struct) -> i64 {
        registers.regs[0].cast_signed()
    }

    /// This kernel winds an interrupted call back before it stops, and forgets how it was to go on
    /// if other code runs in between. So such a thread first enters its call again.
    /// A thread that is just before a call of its own loses nothing by it.
    pub(in super::super) fn must_reenter(at_pc: &[u8], _registers: &user_regs_struct) -> bool {
        at_pc == INSTRUCTION
    }

    pub(in super::super) fn pc(registers: &user_regs_struct) -> u64 {
        registers.pc
    }

    pub(in super::super) fn skip(task: i32, _entered: &user_regs_struct) -> Result<(), Errno> {
        let mut none = -1_i32;
        let mut vector = libc::iovec { iov_base: (&raw mut none).cast(), iov_len: size_of::<i32>() };
        // SAFETY: the vector covers a variable of ours.
        let done = unsafe { libc::ptrace(libc::PTRACE_SETREGSET, task, NT_ARM_SYSTEM_CALL, &raw mut vector) };
        Errno::result(done).map(drop)
    }

    /// The call may have become restart_syscall(2): its number is in the registers.
    pub(in super::super) fn rewound(entered: &user_regs_struct) -> user_regs_struct {
        let mut registers = *entered;
        registers.pc -= INSTRUCTION.len() as u64;
        registers
    }

    pub(in super::super) fn leave(registers: &user_regs_struct) -> user_regs_struct {
        *registers
    }
}
