/* The plain runtime on arm64: start, system call, thread, jump. */
#define FUNCTION(name) .globl name; .type name, %function; name
#define WATCHED 32 /* set.h */

    .section .note.GNU-stack, "", %progbits
    .text

FUNCTION(_start):
    mov x29, #0
    mov x30, #0
    mov x0, sp
    and sp, x0, #-16
    bl gw_plain_start
    brk #0

/* long __gw_native(number, a, b, c, d, e, f) */
FUNCTION(__gw_native):
    mov x8, x0
    mov x0, x1
    mov x1, x2
    mov x2, x3
    mov x3, x4
    mov x4, x5
    mov x5, x6
    .globl gw_window_begin
    .globl gw_window_end
    .globl gw_window_cancelled
gw_window_begin:
    mrs x9, tpidr_el0
    ldr x9, [x9, #WATCHED]
    cbz x9, 1f
    ldr w9, [x9]
    cbnz w9, gw_window_cancelled
1:  svc #0
gw_window_end:
    ret
gw_window_cancelled:
    mov x0, #-4097
    ret

FUNCTION(gw_set_thread_pointer):
    msr tpidr_el0, x0
    ret

/* long gw_clone(start, stack, flags, argument, ptid, tls, ctid) */
FUNCTION(gw_clone):
    and x1, x1, #-16
    stp x0, x3, [x1, #-16]!
    uxtw x0, w2
    mov x2, x4
    mov x3, x5
    mov x4, x6
    mov x8, #220
    svc #0
    cbz x0, 1f
    ret
1:  ldp x1, x0, [sp], #16
    blr x1
    mov x8, #93
    svc #0

/* _Noreturn void gw_unmap_and_exit(memory, size) */
FUNCTION(gw_unmap_and_exit):
    mov x8, #215
    svc #0
    mov x0, #0
    mov x8, #93
    svc #0

FUNCTION(sigsetjmp):
FUNCTION(__sigsetjmp):
    stp x0, x30, [sp, #-16]!
    bl gw_save_mask
    ldp x0, x30, [sp], #16
FUNCTION(setjmp):
FUNCTION(_setjmp):
    stp x19, x20, [x0, #0]
    stp x21, x22, [x0, #16]
    stp x23, x24, [x0, #32]
    stp x25, x26, [x0, #48]
    stp x27, x28, [x0, #64]
    stp x29, x30, [x0, #80]
    mov x2, sp
    str x2, [x0, #104]
    stp d8, d9, [x0, #112]
    stp d10, d11, [x0, #128]
    stp d12, d13, [x0, #144]
    stp d14, d15, [x0, #160]
    mov x0, #0
    ret

FUNCTION(longjmp):
FUNCTION(_longjmp):
    ldp x19, x20, [x0, #0]
    ldp x21, x22, [x0, #16]
    ldp x23, x24, [x0, #32]
    ldp x25, x26, [x0, #48]
    ldp x27, x28, [x0, #64]
    ldp x29, x30, [x0, #80]
    ldr x2, [x0, #104]
    mov sp, x2
    ldp d8, d9, [x0, #112]
    ldp d10, d11, [x0, #128]
    ldp d12, d13, [x0, #144]
    ldp d14, d15, [x0, #160]
    cmp w1, #0
    csinc w0, w1, wzr, ne
    br x30

FUNCTION(memcpy):
FUNCTION(memmove):
    sub x3, x0, x1
    cmp x3, x2
    b.lo 3f
    mov x3, x0
    subs x2, x2, #8
    b.lo 2f
1:  ldr x4, [x1], #8
    str x4, [x3], #8
    subs x2, x2, #8
    b.hs 1b
2:  adds x2, x2, #8
    b.eq 5f
4:  ldrb w4, [x1], #1
    strb w4, [x3], #1
    subs x2, x2, #1
    b.ne 4b
5:  ret
3:  cbz x2, 5b
6:  sub x2, x2, #1
    ldrb w4, [x1, x2]
    strb w4, [x0, x2]
    cbnz x2, 6b
    ret

FUNCTION(memset):
    mov x3, x0
    cbz x2, 2f
1:  strb w1, [x3], #1
    subs x2, x2, #1
    b.ne 1b
2:  ret
