//! Restartable sequences (rseq(2)): a thread that is stopped in a critical section goes on at the
//! section's abort handler, or with the section still announced, never in it and without.

use std::arch::asm;
use std::os::fd::AsRawFd;
use std::ptr::null_mut;

use crate::child::{Child, pipe, poke, read_byte};
use crate::undisturbed::track;

/// What is before an abort handler, and what a thread registers with.
#[cfg(target_arch = "x86_64")]
const SIGNATURE: u32 = 0x5305_3053;
#[cfg(target_arch = "aarch64")]
const SIGNATURE: u32 = 0xd428_bc00;

/// As much of `struct rseq` as Linux has always known.
#[repr(C, align(32))]
struct Rseq {
    cpu_id_start: u32,
    cpu_id: u32,
    rseq_cs: u64,
    flags: u32,
    padding: [u32; 3],
}

/// What became of critical sections.
#[derive(Default)]
struct Outcome {
    /// How often the abort handler ran.
    aborted: u64,
    /// How often the end was reached while the section was no longer announced.
    unprotected: u64,
}

/// The thread's structure: glibc has registered one since 2.35; this registers its own otherwise.
fn registered(own: &mut Rseq) -> *mut Rseq {
    let own = std::ptr::from_mut(own);
    // SAFETY: the structure lives as long as the child that calls this; the symbol is a number if it is there.
    unsafe {
        if libc::syscall(libc::SYS_rseq, own, size_of::<Rseq>(), 0, SIGNATURE) == 0 {
            return own;
        }
        let offset = libc::dlsym(null_mut(), c"__rseq_offset".as_ptr()).cast::<isize>();
        if offset.is_null() {
            return null_mut();
        }
        let thread: *mut u8;
        #[cfg(target_arch = "x86_64")]
        asm!("mov {}, fs:0", out(reg) thread);
        #[cfg(target_arch = "aarch64")]
        asm!("mrs {}, tpidr_el0", out(reg) thread);
        thread.offset(*offset).cast()
    }
}

/// Goes through a section that counts so far down, again and again until it is not aborted.
#[cfg(target_arch = "x86_64")]
unsafe fn section(rseq: *mut Rseq, length: u64, outcome: &mut Outcome) {
    let (announced, seen): (u64, u64);
    // SAFETY: the code writes to the structure that the kernel reads, and to registers.
    unsafe {
        asm!(
            ".pushsection .data.rel.ro.rseq, \"aw\"",
            ".balign 32",
            "3: .long 0, 0",
            ".quad 4f, 5f - 4f, 6f",
            ".popsection",
            "2: lea {announced}, [rip + 3b]",
            "mov [{rseq} + 8], {announced}",
            "4: mov {left}, {length}",
            "7: dec {left}",
            "jnz 7b",
            "mov {seen}, [{rseq} + 8]",
            "5: jmp 8f",
            ".byte 0x0f, 0xb9, 0x3d",
            ".long {signature}",
            "6: inc {aborted}",
            "jmp 2b",
            "8:",
            rseq = in(reg) rseq,
            length = in(reg) length,
            left = out(reg) _,
            announced = out(reg) announced,
            seen = out(reg) seen,
            aborted = inout(reg) outcome.aborted,
            signature = const SIGNATURE,
        );
    }
    outcome.unprotected += u64::from(seen != announced);
}

#[cfg(target_arch = "aarch64")]
unsafe fn section(rseq: *mut Rseq, length: u64, outcome: &mut Outcome) {
    let (announced, seen): (u64, u64);
    // SAFETY: the code writes to the structure that the kernel reads, and to registers.
    unsafe {
        asm!(
            ".pushsection .data.rel.ro.rseq, \"aw\"",
            ".balign 32",
            "3: .long 0, 0",
            ".quad 4f, 5f - 4f, 6f",
            ".popsection",
            "2: adrp {announced}, 3b",
            "add {announced}, {announced}, :lo12:3b",
            "str {announced}, [{rseq}, #8]",
            "4: mov {left}, {length}",
            "7: subs {left}, {left}, #1",
            "b.ne 7b",
            "ldr {seen}, [{rseq}, #8]",
            "5: b 8f",
            ".inst {signature}",
            "6: add {aborted}, {aborted}, #1",
            "b 2b",
            "8:",
            rseq = in(reg) rseq,
            length = in(reg) length,
            left = out(reg) _,
            announced = out(reg) announced,
            seen = out(reg) seen,
            aborted = inout(reg) outcome.aborted,
            signature = const SIGNATURE,
        );
    }
    outcome.unprotected += u64::from(seen != announced);
}

/// After CRIU's transition/rseq01. The child is in a section nearly all of the time.
#[test]
fn a_critical_section_is_never_left_unprotected() {
    let (read, write) = pipe();
    let (ready, begun) = pipe();
    let mut child = Child::fork(|| {
        let mut own = Rseq { cpu_id_start: 0, cpu_id: u32::MAX, rseq_cs: 0, flags: 0, padding: [0; 3] };
        let rseq = registered(&mut own);
        if rseq.is_null() {
            return 3;
        }
        poke(&begun);
        let mut entry = libc::pollfd { fd: read.as_raw_fd(), events: libc::POLLIN, revents: 0 };
        let mut outcome = Outcome::default();
        // SAFETY: one entry, a variable of ours; the structure is this thread's.
        unsafe {
            while libc::poll(&raw mut entry, 1, 0) == 0 {
                section(rseq, 300_000, &mut outcome);
            }
        }
        match outcome {
            Outcome { unprotected: 1.., .. } => 1,
            Outcome { aborted: 0, .. } => 2,
            _ => 0,
        }
    });
    assert!(read_byte(&ready));
    for _ in 0..100 {
        let _tracker = track(&child);
    }
    poke(&write);
    child.succeeds();
}
