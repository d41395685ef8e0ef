//! What a processor holds for a thread is as it was: vectors, modes, steps. And what cannot be kept is
//! refused.
#![cfg(target_arch = "x86_64")]

use std::arch::asm;
use std::os::fd::AsRawFd;

use godwit_memory::tracker::{Backend, Tracker};

use crate::child::{Child, Shared, eventually, pipe, poke, read_byte, state};
use crate::undisturbed::{handle, noted, track};

/// Whether nothing has come yet.
fn nothing_in(fd: i32) -> bool {
    let mut entry = libc::pollfd { fd, events: libc::POLLIN, revents: 0 };
    // SAFETY: one entry, a variable of ours.
    unsafe { libc::poll(&raw mut entry, 1, 0) == 0 }
}

/// Tracks a child that calls this again and again, which tells whether all was right.
fn right_all_the_time(mut right: impl FnMut() -> bool) {
    let (read, write) = pipe();
    let (ready, begun) = pipe();
    let mut child = Child::fork(|| {
        if !right() {
            return 2;
        }
        poke(&begun);
        while nothing_in(read.as_raw_fd()) {
            if !right() {
                return 1;
            }
        }
        0
    });
    assert!(read_byte(&ready));
    for _ in 0..60 {
        let _tracker = track(&child);
    }
    poke(&write);
    child.succeeds();
}

#[test]
fn vectors_and_rounding_are_as_they_were() {
    if !std::arch::is_x86_feature_detected!("avx") {
        println!("not tried: this processor has no AVX");
        return;
    }
    let values: [u64; 16] = std::array::from_fn(|at| 0x0123_4567_89ab_cdef_u64.rotate_left(4 * at as u32));
    let mut got = [[0_u64; 4]; 16];
    right_all_the_time(|| {
        // Rounds down, and all exceptions masked.
        let (mode, mut after) = (0x3f80_u32, 0_u32);
        let normal = 0x1f80_u32;
        // SAFETY: loads from and stores to variables of ours; the mode is put back.
        unsafe {
            asm!(
                "ldmxcsr [{mode}]",
                "vbroadcastsd ymm0, [{from}]", "vbroadcastsd ymm1, [{from} + 8]",
                "vbroadcastsd ymm2, [{from} + 16]", "vbroadcastsd ymm3, [{from} + 24]",
                "vbroadcastsd ymm4, [{from} + 32]", "vbroadcastsd ymm5, [{from} + 40]",
                "vbroadcastsd ymm6, [{from} + 48]", "vbroadcastsd ymm7, [{from} + 56]",
                "vbroadcastsd ymm8, [{from} + 64]", "vbroadcastsd ymm9, [{from} + 72]",
                "vbroadcastsd ymm10, [{from} + 80]", "vbroadcastsd ymm11, [{from} + 88]",
                "vbroadcastsd ymm12, [{from} + 96]", "vbroadcastsd ymm13, [{from} + 104]",
                "vbroadcastsd ymm14, [{from} + 112]", "vbroadcastsd ymm15, [{from} + 120]",
                "2: dec {left}",
                "jnz 2b",
                "vmovupd [{to}], ymm0", "vmovupd [{to} + 32], ymm1",
                "vmovupd [{to} + 64], ymm2", "vmovupd [{to} + 96], ymm3",
                "vmovupd [{to} + 128], ymm4", "vmovupd [{to} + 160], ymm5",
                "vmovupd [{to} + 192], ymm6", "vmovupd [{to} + 224], ymm7",
                "vmovupd [{to} + 256], ymm8", "vmovupd [{to} + 288], ymm9",
                "vmovupd [{to} + 320], ymm10", "vmovupd [{to} + 352], ymm11",
                "vmovupd [{to} + 384], ymm12", "vmovupd [{to} + 416], ymm13",
                "vmovupd [{to} + 448], ymm14", "vmovupd [{to} + 480], ymm15",
                "stmxcsr [{after}]",
                "ldmxcsr [{normal}]",
                mode = in(reg) &raw const mode,
                normal = in(reg) &raw const normal,
                after = in(reg) &raw mut after,
                from = in(reg) values.as_ptr(),
                to = in(reg) got.as_mut_ptr(),
                left = inout(reg) 300_000_u64 => _,
                out("ymm0") _, out("ymm1") _, out("ymm2") _, out("ymm3") _,
                out("ymm4") _, out("ymm5") _, out("ymm6") _, out("ymm7") _,
                out("ymm8") _, out("ymm9") _, out("ymm10") _, out("ymm11") _,
                out("ymm12") _, out("ymm13") _, out("ymm14") _, out("ymm15") _,
            );
        }
        after & 0x7f80 == mode && got.iter().zip(&values).all(|(got, &value)| *got == [value; 4])
    });
}

/// A program that steps through itself: each instruction is followed by SIGTRAP.
#[test]
fn steps_that_a_program_makes_by_itself_are_as_many_as_they_were() {
    let mut expected = 0;
    right_all_the_time(|| {
        if expected == 0 {
            handle(libc::SIGTRAP, 0);
        }
        let before = noted();
        // SAFETY: the trap flag is set and cleared; each instruction in between calls the handler.
        unsafe {
            asm!(
                "pushfq",
                "or qword ptr [rsp], 0x100",
                "popfq",
                "2: dec {left}",
                "jnz 2b",
                "pushfq",
                "and qword ptr [rsp], -0x101",
                "popfq",
                left = inout(reg) 500_u64 => _,
            );
        }
        let steps = noted() - before;
        if expected == 0 {
            expected = steps;
        }
        steps > 1000 && steps == expected
    });
}

/// It has entered 32-bit code by itself, as programs for other systems do that run in Wine.
#[test]
fn a_process_in_32_bit_code_is_refused_and_goes_on() {
    let page = Shared::new();
    let (there, flag) = (2047, 2048);
    let base = u32::try_from(page.address().addr()).expect("within 4 GiB");
    // mov byte ptr [there], 1: no file of /proc tells the width of the code that runs.
    let mut code = vec![0xc6, 0x05];
    code.extend((base + there).to_le_bytes());
    code.extend([1, 0x80, 0x3d]);
    code.extend((base + flag).to_le_bytes());
    // cmp byte ptr [flag], 0; je back; jmp 0x33:next; next: mov eax, SYS_exit_group; xor edi, edi; syscall
    code.extend([0, 0x74, 0xf7, 0xea]);
    code.extend((base + 23).to_le_bytes());
    code.extend([0x33, 0]);
    assert_eq!(code.len(), 23);
    code.extend([0xb8, 231, 0, 0, 0, 0x31, 0xff, 0x0f, 0x05]);
    code.iter().enumerate().for_each(|(at, &byte)| page.set(at, byte));
    let mut child = Child::fork(|| {
        // SAFETY: the code above does not come back; it needs a data segment.
        unsafe {
            asm!(
                "mov ds, {segment:x}",
                "push 0x23",
                "push {code}",
                "retfq",
                segment = in(reg) 0x2b_u64,
                code = in(reg) u64::from(base),
                options(noreturn),
            )
        }
    });
    eventually("32-bit code runs", || page.get(there as usize) == 1);
    let mut tracker = Tracker::new(Backend::Uffd);
    for _ in 0..3 {
        let round = tracker.round(&[child.pid], false).expect("a scan");
        let reason = round.spaces[0].unwatched.as_ref().expect("not watched");
        assert!(reason.contains("32-bit"), "{reason}");
        assert_eq!(state(child.pid), Some('R'));
    }
    page.set(flag as usize, 1);
    child.succeeds();
}

/// Between its own calls and those of a program that it runs inside itself it tells by where they come
/// from, or by a byte (prctl(2), PR_SET_SYSCALL_USER_DISPATCH).
#[test]
fn one_that_dispatches_its_calls_by_itself_sees_no_other_call() {
    const PR_SET_SYSCALL_USER_DISPATCH: i32 = 59;
    const ON: libc::c_ulong = 1;
    const ALLOW: u8 = 0;
    const BLOCK: u8 = 1;
    static mut SELECTOR: u8 = ALLOW;
    static mut CAUGHT: u32 = 0;
    extern "C" fn caught(_: i32) {
        // SAFETY: the handler of a child with one thread.
        unsafe {
            SELECTOR = ALLOW;
            CAUGHT += 1;
        }
    }
    let page = Shared::new();
    let mut child = Child::fork(|| {
        // SAFETY: variables of a child with one thread; nothing between the two values calls the kernel.
        unsafe {
            let mut action: libc::sigaction = std::mem::zeroed();
            action.sa_sigaction = caught as *const () as usize;
            libc::sigaction(libc::SIGSYS, &raw const action, std::ptr::null_mut());
            let selector = &raw mut SELECTOR;
            if libc::prctl(PR_SET_SYSCALL_USER_DISPATCH, ON, 0_usize, 0_usize, selector) != 0 {
                return 3;
            }
            selector.write_volatile(BLOCK);
            page.set(0, 1);
            while page.get(1) == 0 {
                std::hint::spin_loop();
            }
            if (&raw const CAUGHT).read_volatile() != 0 {
                return 1;
            }
            // It still does.
            libc::getpid();
            if (&raw const CAUGHT).read_volatile() == 1 { 0 } else { 2 }
        }
    });
    crate::child::eventually("it blocks its calls", || page.get(0) == 1);
    for _ in 0..20 {
        let _tracker = track(&child);
    }
    page.set(1, 1);
    child.succeeds();
}
