/* The plain runtime on x86-64: start, system call, thread, jump. */
#define FUNCTION(name) .globl name; .type name, @function; name
#define WATCHED 32 /* set.h */

    .section .note.GNU-stack, "", @progbits
    .text

FUNCTION(_start):
    xorl %ebp, %ebp
    movq %rsp, %rdi
    andq $-16, %rsp
    call gw_plain_start
    hlt

/* long __gw_native(number, a, b, c, d, e, f) */
FUNCTION(__gw_native):
    movq %rdi, %rax
    movq %rsi, %rdi
    movq %rdx, %rsi
    movq %rcx, %rdx
    movq %r8, %r10
    movq %r9, %r8
    movq 8(%rsp), %r9
    .globl gw_window_begin, gw_window_end, gw_window_cancelled
gw_window_begin:
    movq %fs:WATCHED, %r11
    testq %r11, %r11
    jz 1f
    cmpl $0, (%r11)
    jne gw_window_cancelled
1:  syscall
gw_window_end:
    ret
gw_window_cancelled:
    movq $-4097, %rax
    ret

/* void gw_set_thread_pointer(block): arch_prctl(ARCH_SET_FS, block) */
FUNCTION(gw_set_thread_pointer):
    movq %rdi, %rsi
    movl $0x1002, %edi
    movl $158, %eax
    syscall
    ret

/* long gw_clone(start, stack, flags, argument, ptid, tls, ctid) */
FUNCTION(gw_clone):
    movq %rdi, %r11
    movq %rdx, %rdi
    movq %r8, %rdx
    movq %r9, %r8
    movq 8(%rsp), %r10
    andq $-16, %rsi
    subq $16, %rsi
    movq %rcx, (%rsi)
    movq %r11, 8(%rsi)
    movl $56, %eax
    syscall
    testl %eax, %eax
    jnz 1f
    xorl %ebp, %ebp
    popq %rdi
    popq %rax
    call *%rax
    movl %eax, %edi
    movl $60, %eax
    syscall
1:  ret

/* _Noreturn void gw_unmap_and_exit(memory, size) */
FUNCTION(gw_unmap_and_exit):
    movl $11, %eax
    syscall
    xorl %edi, %edi
    movl $60, %eax
    syscall

FUNCTION(sigsetjmp):
FUNCTION(__sigsetjmp):
    pushq %rdi
    call gw_save_mask
    popq %rdi
FUNCTION(setjmp):
FUNCTION(_setjmp):
    movq %rbx, (%rdi)
    movq %rbp, 8(%rdi)
    movq %r12, 16(%rdi)
    movq %r13, 24(%rdi)
    movq %r14, 32(%rdi)
    movq %r15, 40(%rdi)
    leaq 8(%rsp), %rdx
    movq %rdx, 48(%rdi)
    movq (%rsp), %rdx
    movq %rdx, 56(%rdi)
    xorl %eax, %eax
    ret

FUNCTION(longjmp):
FUNCTION(_longjmp):
    movl %esi, %eax
    cmpl $1, %eax
    adcl $0, %eax
    movq (%rdi), %rbx
    movq 8(%rdi), %rbp
    movq 16(%rdi), %r12
    movq 24(%rdi), %r13
    movq 32(%rdi), %r14
    movq 40(%rdi), %r15
    movq 48(%rdi), %rsp
    jmpq *56(%rdi)

FUNCTION(memcpy):
    movq %rdi, %rax
    movq %rdx, %rcx
    rep movsb
    ret

FUNCTION(memmove):
    movq %rdi, %rax
    movq %rdi, %rcx
    subq %rsi, %rcx
    cmpq %rdx, %rcx
    jae memcpy
    movq %rdx, %rcx
    leaq -1(%rdi, %rdx), %rdi
    leaq -1(%rsi, %rdx), %rsi
    std
    rep movsb
    cld
    ret

FUNCTION(memset):
    movq %rdi, %r8
    movl %esi, %eax
    movq %rdx, %rcx
    rep stosb
    movq %r8, %rax
    ret
