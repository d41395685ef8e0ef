// Where a process starts or goes on, how a thread changes to its native stack, and the kernel call that a request can end.

    .section .note.GNU-stack, "", %progbits

// At the beginning of private text, at the same addresses on every set (isa/ABI.md, section 3): whoever restores a
// process of another set sends its threads to the first one, and the kernel finds the others in its signal actions.
    .section .gw.entries, "ax", %progbits
    .balign 16
    .globl gw_entry_resume, gw_entry_request, gw_entry_signal, gw_entry_return
    .type gw_entry_resume, %function
gw_entry_resume: // on the slot's native stack; the thread pointer is set, nothing else
    mov x29, #0
    mov x30, #0
    bl gw_restored
    .balign 16
    .type gw_entry_request, %function
gw_entry_request:
    b gw_on_request
    .balign 16
    .type gw_entry_signal, %function
gw_entry_signal:
    b gw_on_signal
    .balign 16
    .type gw_entry_return, %function
gw_entry_return:
    mov x8, #139 // rt_sigreturn
    svc #0
    .balign 16

    .text

// The kernel enters here; its stack holds argc, argv, envp and auxv.
    .globl _start
    .type _start, %function
_start:
    mov x29, #0
    mov x30, #0
    mov x0, sp
    bl gw_start
    brk #1
    .size _start, . - _start

// long gw_on_stack(void *top, long (*function)(void *), void *argument)
    .globl gw_on_stack
    .type gw_on_stack, %function
gw_on_stack:
    stp x29, x30, [sp, #-16]!
    mov x29, sp
    mov sp, x0
    mov x0, x2
    blr x1
    mov sp, x29
    ldp x29, x30, [sp], #16
    ret
    .size gw_on_stack, . - gw_on_stack

// long gw_clone(long flags, void *stack, uint32_t *word, void *block): the kernel keeps the thread's number in `word` as
// long as the thread is there. The thread begins with gw_thread_main(block).
    .globl gw_clone
    .type gw_clone, %function
gw_clone:
    mov x4, x2
    mov x8, #220
    svc #0
    cbz x0, 1f
    ret
1:  mov x29, #0
    mov x30, #0
    mrs x0, tpidr_el0
    bl gw_thread_main
    brk #1
    .size gw_clone, . - gw_clone

// int __gw_anchor(struct gw_anchor *anchor, void *frame): keeps what a function has from its caller, and where this returns
// to; it is the thread's innermost anchor then.
    .globl __gw_anchor
    .type __gw_anchor, %function
__gw_anchor:
    mrs x9, tpidr_el0
    ldr x10, [x9, #112] // gw_thread.anchors
    str x10, [x0]
    str x1, [x0, #8]
    ldr w10, [x9, #96] // gw_thread.uninterrupted
    str w10, [x0, #16]
    mov x10, sp
    stp x30, x10, [x0, #24]
    stp x19, x20, [x0, #40]
    stp x21, x22, [x0, #56]
    stp x23, x24, [x0, #72]
    stp x25, x26, [x0, #88]
    stp x27, x28, [x0, #104]
    str x29, [x0, #120]
    stp d8, d9, [x0, #128]
    stp d10, d11, [x0, #144]
    stp d12, d13, [x0, #160]
    stp d14, d15, [x0, #176]
    str x0, [x9, #112]
    mov w0, #0
    ret
    .size __gw_anchor, . - __gw_anchor

// void gw_return_to(const struct gw_anchor *anchor): returns 1 from the call of __gw_anchor.
    .globl gw_return_to
    .type gw_return_to, %function
gw_return_to:
    ldp x30, x10, [x0, #24]
    ldp x19, x20, [x0, #40]
    ldp x21, x22, [x0, #56]
    ldp x23, x24, [x0, #72]
    ldp x25, x26, [x0, #88]
    ldp x27, x28, [x0, #104]
    ldr x29, [x0, #120]
    ldp d8, d9, [x0, #128]
    ldp d10, d11, [x0, #144]
    ldp d12, d13, [x0, #160]
    ldp d14, d15, [x0, #176]
    mov sp, x10
    mov w0, #1
    ret
    .size gw_return_to, . - gw_return_to

// uint64_t __gw_landed(void): gw_land with the stack pointer of the function that is landed in.
    .globl __gw_landed
    .type __gw_landed, %function
__gw_landed:
    mov x0, sp
    b gw_land
    .size __gw_landed, . - __gw_landed

// long __gw_native(long number, long a, …, long f). Between begin and end the call has not taken effect, also when the
// kernel is about to restart it: a request that arrives there (GW_REQUEST_CAPTURE or _SIGNAL) makes it GW_ABANDONED.
    .globl __gw_native
    .type __gw_native, %function
__gw_native:
    mov x8, x0
    mov x0, x1
    mov x1, x2
    mov x2, x3
    mov x3, x4
    mov x4, x5
    mov x5, x6
    .globl gw_window_begin, gw_window_call, gw_window_end, gw_window_abandon
gw_window_begin:
    mrs x9, tpidr_el0
    ldr w10, [x9, #8]
    tbnz w10, #0, 1f
    tbnz w10, #2, 1f
gw_window_call:
    svc #0
gw_window_end:
    ret
1:  ldr w10, [x9, #96] // gw_thread.uninterrupted
    cbnz w10, gw_window_call
gw_window_abandon:
    mov x0, #-4096
    ret
    .size __gw_native, . - __gw_native
