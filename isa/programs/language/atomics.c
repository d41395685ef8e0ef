// Atomic operations of all widths, in the forms of C11 and of GCC, in one thread.
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>

static atomic_uchar byte;
static atomic_ushort half;
static atomic_int word;
static _Atomic(uint64_t) wide;
static _Atomic(void *) pointer;
static _Atomic double real;
static atomic_flag flag = ATOMIC_FLAG_INIT;

int main(void) {
    int target = 5;
    unsigned swaps = 0;
    for (int i = 0; i < 300; i++) {
        atomic_fetch_add(&byte, (unsigned char)(i * 3));
        atomic_fetch_sub_explicit(&half, (unsigned short)(i * 5), memory_order_relaxed);
        atomic_fetch_xor_explicit(&word, i * 65537, memory_order_acq_rel);
        atomic_fetch_or(&wide, UINT64_C(1) << (i * 7 % 64));
        if (i % 5 == 0)
            atomic_fetch_and(&wide, ~(UINT64_C(3) << (i % 63)));
        uint64_t old = atomic_load(&wide);
        while (!atomic_compare_exchange_weak(&wide, &old, old * 3 + 1))
            ;
        int expected = i;
        swaps +=
            atomic_compare_exchange_strong_explicit(&word, &expected, -1, memory_order_release, memory_order_relaxed);
        real += 0.5;
        real = real * 1.25 > 1000 ? 1 : real * 1.25;
    }
    printf("%u %u %d %016llx %u %.12f\n", byte, half, word, (unsigned long long)wide, swaps, real);
    atomic_store(&pointer, &target);
    *(int *)atomic_exchange(&pointer, NULL) += 2;
    printf("pointer %d %d\n", target, atomic_load(&pointer) == NULL);
    printf("flag %d %d\n", atomic_flag_test_and_set(&flag), atomic_flag_test_and_set(&flag));
    atomic_flag_clear(&flag);
    printf("flag %d\n", atomic_flag_test_and_set(&flag));

    int plain = 10;
    int a = __atomic_fetch_add(&plain, 4, __ATOMIC_SEQ_CST), b = __sync_fetch_and_sub(&plain, 3);
    int c = __sync_val_compare_and_swap(&plain, 11, 50), d = __atomic_exchange_n(&plain, 70, __ATOMIC_ACQUIRE);
    int e = __sync_bool_compare_and_swap(&plain, 71, 0), f = __atomic_nand_fetch(&plain, 6, __ATOMIC_RELAXED);
    __sync_synchronize();
    atomic_thread_fence(memory_order_seq_cst);
    atomic_signal_fence(memory_order_seq_cst);
    int least = __atomic_fetch_add(&plain, 0, __ATOMIC_RELAXED);
    printf("gcc %d %d %d %d %d %d %d\n", a, b, c, d, e, f, least);
    printf("free of locks %d %d\n", atomic_is_lock_free(&word), atomic_is_lock_free(&wide));
    return 0;
}
