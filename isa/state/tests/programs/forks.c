// Forks three children, round after round, that compute as it does itself, and end each with a status of its own. Its
// status is 7 when it has seen them all.
#include "library.h"

enum { NR_EXIT_GROUP = 94, NR_CLONE = 220, NR_WAIT4 = 260, SIGCHLD = 17 };
enum { ROUNDS = 12, CHILDREN = 3, WORK = 20000, FIRST_STATUS = 40 };

static __attribute__((noinline)) unsigned work(unsigned rounds) {
    static volatile unsigned sink = 1;
    unsigned sum = 0;
    for (unsigned i = 0; i < rounds; i++)
        sum = sum * 31 + i * sink;
    return sum;
}

static void be_child(unsigned number, unsigned expected) {
    __gw_syscall(NR_EXIT_GROUP, work(WORK + number) == expected ? FIRST_STATUS + number : 1, 0, 0, 0, 0, 0);
}

int main(void) {
    for (int round = 0; round < ROUNDS; round++) {
        long children[CHILDREN];
        for (unsigned i = 0; i < CHILDREN; i++) {
            unsigned expected = work(WORK + i);
            children[i] = __gw_syscall(NR_CLONE, SIGCHLD, 0, 0, 0, 0, 0);
            if (children[i] == 0)
                be_child(i, expected);
        }
        for (unsigned i = 0; i < CHILDREN; i++) {
            int status = 0;
            if (__gw_syscall(NR_WAIT4, children[i], (long)&status, 0, 0, 0, 0) != children[i] ||
                status != (int)(FIRST_STATUS + i) << 8)
                return 1;
        }
        print("round %d\n", round);
    }
    return 7;
}
