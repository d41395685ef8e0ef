//! Whether two processes share something: `kcmp(2)`.

/// `KCMP_VM` and `KCMP_FILES` of linux/kcmp.h.
const VM: i32 = 1;
const FILES: i32 = 2;

/// Whether two threads share one address space, as after vfork(2). False when the kernel does not
/// tell.
pub(super) fn memory(one: i32, other: i32) -> bool {
    compare(one, other, VM)
}

/// Whether two threads share their table of descriptors. False when the kernel does not tell.
pub(super) fn files(one: i32, other: i32) -> bool {
    compare(one, other, FILES)
}

fn compare(one: i32, other: i32, kind: i32) -> bool {
    // SAFETY: kcmp takes five integers and touches no memory of ours.
    unsafe { libc::syscall(libc::SYS_kcmp, one, other, kind, 0, 0) == 0 }
}
