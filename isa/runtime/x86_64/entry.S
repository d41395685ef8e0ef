// Where a process starts or goes on, how a thread changes to its native stack, and the kernel call that a request can end.

    .section .note.GNU-stack, "", @progbits

// At the beginning of private text, at the same addresses on every set (isa/ABI.md, section 3): whoever restores a
// process of another set sends its threads to the first one, and the kernel finds the others in its signal actions.
    .section .gw.entries, "ax", @progbits
    .balign 16
    .globl gw_entry_resume, gw_entry_request, gw_entry_signal, gw_entry_return
    .type gw_entry_resume, @function
gw_entry_resume: // on the slot's native stack; the thread pointer is set, nothing else
    xorl %ebp, %ebp
    call gw_restored
    .balign 16, 0xcc
    .type gw_entry_request, @function
gw_entry_request:
    jmp gw_on_request
    .balign 16, 0xcc
    .type gw_entry_signal, @function
gw_entry_signal:
    jmp gw_on_signal
    .balign 16, 0xcc
    .type gw_entry_return, @function
gw_entry_return:
    movq $15, %rax // rt_sigreturn
    syscall
    .balign 16, 0xcc

    .text

// The kernel enters here; its stack holds argc, argv, envp and auxv.
    .globl _start
    .type _start, @function
_start:
    xorl %ebp, %ebp
    movq %rsp, %rdi
    andq $-16, %rsp
    call gw_start
    hlt
    .size _start, . - _start

// long gw_on_stack(void *top, long (*function)(void *), void *argument)
    .globl gw_on_stack
    .type gw_on_stack, @function
gw_on_stack:
    pushq %rbp
    movq %rsp, %rbp
    movq %rdi, %rsp
    movq %rdx, %rdi
    call *%rsi
    movq %rbp, %rsp
    popq %rbp
    ret
    .size gw_on_stack, . - gw_on_stack

// long gw_clone(long flags, void *stack, uint32_t *word, void *block): the kernel keeps the thread's number in `word` as
// long as the thread is there. The thread begins with gw_thread_main(block).
    .globl gw_clone
    .type gw_clone, @function
gw_clone:
    movq %rcx, %r8
    movq %rcx, %r9
    movq %rdx, %r10
    movl $56, %eax
    syscall
    testq %rax, %rax
    jz 1f
    ret
1:  xorl %ebp, %ebp
    movq %r9, %rdi
    call gw_thread_main
    hlt
    .size gw_clone, . - gw_clone

// int __gw_anchor(struct gw_anchor *anchor, void *frame): keeps what a function has from its caller, and where this returns
// to; it is the thread's innermost anchor then.
    .globl __gw_anchor
    .type __gw_anchor, @function
__gw_anchor:
    movq %fs:112, %rax // gw_thread.anchors
    movq %rax, (%rdi)
    movq %rsi, 8(%rdi)
    movl %fs:96, %eax // gw_thread.uninterrupted
    movl %eax, 16(%rdi)
    movq (%rsp), %rax
    movq %rax, 24(%rdi)
    leaq 8(%rsp), %rax
    movq %rax, 32(%rdi)
    movq %rbx, 40(%rdi)
    movq %rbp, 48(%rdi)
    movq %r12, 56(%rdi)
    movq %r13, 64(%rdi)
    movq %r14, 72(%rdi)
    movq %r15, 80(%rdi)
    movq %rdi, %fs:112
    xorl %eax, %eax
    ret
    .size __gw_anchor, . - __gw_anchor

// void gw_return_to(const struct gw_anchor *anchor): returns 1 from the call of __gw_anchor.
    .globl gw_return_to
    .type gw_return_to, @function
gw_return_to:
    movq 40(%rdi), %rbx
    movq 48(%rdi), %rbp
    movq 56(%rdi), %r12
    movq 64(%rdi), %r13
    movq 72(%rdi), %r14
    movq 80(%rdi), %r15
    movq 32(%rdi), %rsp
    movl $1, %eax
    jmpq *24(%rdi)
    .size gw_return_to, . - gw_return_to

// uint64_t __gw_landed(void): gw_land with the stack pointer of the function that is landed in.
    .globl __gw_landed
    .type __gw_landed, @function
__gw_landed:
    leaq 8(%rsp), %rdi
    jmp gw_land
    .size __gw_landed, . - __gw_landed

// long __gw_native(long number, long a, …, long f). Between begin and end the call has not taken effect, also when the
// kernel is about to restart it: a request that arrives there (GW_REQUEST_CAPTURE or _SIGNAL) makes it GW_ABANDONED.
    .globl __gw_native
    .type __gw_native, @function
__gw_native:
    movq %rdi, %rax
    movq %rsi, %rdi
    movq %rdx, %rsi
    movq %rcx, %rdx
    movq %r8, %r10
    movq %r9, %r8
    movq 8(%rsp), %r9
    .globl gw_window_begin, gw_window_call, gw_window_end, gw_window_abandon
gw_window_begin:
    testl $5, %fs:8
    jnz 1f
gw_window_call:
    syscall
gw_window_end:
    ret
1:  cmpl $0, %fs:96 // gw_thread.uninterrupted
    jne gw_window_call
gw_window_abandon:
    movq $-4096, %rax
    ret
    .size __gw_native, . - __gw_native
