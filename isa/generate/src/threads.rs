//! Programs with threads: a number of threads go through the same random phases, with a barrier between two phases. In
//! a phase they work on shared memory in one of several ways, whose result does not depend on the order of the threads.

use std::fmt::Write as _;

use crate::random::Random;

const PROLOGUE: &str = r#"
#include <pthread.h>
#include <semaphore.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

static pthread_barrier_t barrier;
static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t condition = PTHREAD_COND_INITIALIZER;
static pthread_rwlock_t rwlock = PTHREAD_RWLOCK_INITIALIZER;
static pthread_once_t once = PTHREAD_ONCE_INIT;
static pthread_key_t key;
static sem_t semaphore;
static _Atomic uint64_t atomic_sum;
static uint64_t sum, turn, once_runs;
static int pipes[THREADS][2];
static _Thread_local uint64_t mine;

static void check(int result, const char *what) {
    if (result != 0) {
        printf("%s gives %d\n", what, result);
        exit(1);
    }
}
static uint64_t work(uint64_t seed, int rounds) {
    for (int i = 0; i < rounds; i++)
        seed = (seed ^ seed >> 29) * 0xbf58476d1ce4e5b9U + (uint64_t)i;
    return seed;
}
static void run_once(void) { once_runs++; }
static uint64_t recurse(uint64_t seed, int depth) {
    uint64_t room[4] = {seed, seed * 3, seed * 5, seed * 7};
    if (depth == 0)
        return work(seed, 5);
    return recurse(room[seed & 3], depth - 1) ^ room[(seed >> 7) & 3];
}
static void meet(uint64_t id) {
    int result = pthread_barrier_wait(&barrier);
    check(result == PTHREAD_BARRIER_SERIAL_THREAD ? 0 : result, "pthread_barrier_wait");
    // The first thread prints between two meetings, while the others wait at the second.
    if (id == 0)
        printf("sum %016llx atomic %016llx once %llu\n", (unsigned long long)sum, (unsigned long long)atomic_sum,
               (unsigned long long)once_runs);
    result = pthread_barrier_wait(&barrier);
    check(result == PTHREAD_BARRIER_SERIAL_THREAD ? 0 : result, "pthread_barrier_wait");
}
"#;

/// What the threads do in a phase; `N` and `W` are numbers of the phase. Each adds to `sum` or `atomic_sum`.
const PHASES: [&str; 9] = [
    // A mutex around a sum.
    "    for (int i = 0; i < N; i++) {
        mine = work(mine + id, W);
        check(pthread_mutex_lock(&mutex), \"pthread_mutex_lock\");
        sum += mine;
        check(pthread_mutex_unlock(&mutex), \"pthread_mutex_unlock\");
    }",
    // Atomic operations.
    "    for (int i = 0; i < N * 10; i++)
        atomic_fetch_add(&atomic_sum, mine = work(mine ^ id, W));",
    // Turns: each waits for its predecessor.
    "    check(pthread_mutex_lock(&mutex), \"pthread_mutex_lock\");
    for (int i = 0; i < N; i++) {
        while (turn % THREADS != id)
            check(pthread_cond_wait(&condition, &mutex), \"pthread_cond_wait\");
        turn++;
        sum = work(sum + id, W);
        check(pthread_cond_broadcast(&condition), \"pthread_cond_broadcast\");
    }
    check(pthread_mutex_unlock(&mutex), \"pthread_mutex_unlock\");",
    // A ring of pipes: a number goes around.
    "    for (int i = 0; i < N; i++) {
        uint64_t message = work(mine + (uint64_t)i, W), got = 0;
        if (write(pipes[(id + 1) % THREADS][1], &message, sizeof message) != sizeof message)
            check(1, \"write\");
        if (read(pipes[id][0], &got, sizeof got) != sizeof got)
            check(1, \"read\");
        mine ^= got;
    }
    atomic_fetch_add(&atomic_sum, mine);",
    // A lock for readers and writers.
    "    for (int i = 0; i < N; i++) {
        if ((id + (uint64_t)i) % 3 == 0) {
            check(pthread_rwlock_wrlock(&rwlock), \"pthread_rwlock_wrlock\");
            sum += work(id, W);
        } else {
            check(pthread_rwlock_rdlock(&rwlock), \"pthread_rwlock_rdlock\");
            mine = work(mine, W);
        }
        check(pthread_rwlock_unlock(&rwlock), \"pthread_rwlock_unlock\");
    }",
    // Threads within threads.
    "    for (int i = 0; i < N % 4 + 1; i++) {
        pthread_t inner;
        void *result;
        check(pthread_create(&inner, NULL, grandchild, (void *)(uintptr_t)(mine % 65536 + W)), \"pthread_create\");
        check(pthread_join(inner, &result), \"pthread_join\");
        mine += (uintptr_t)result;
    }
    atomic_fetch_add(&atomic_sum, mine);",
    // Once, and a key.
    "    check(pthread_once(&once, run_once), \"pthread_once\");
    check(pthread_setspecific(key, &mine), \"pthread_setspecific\");
    mine = recurse(mine + id, N * 3);
    atomic_fetch_add(&atomic_sum, *(uint64_t *)pthread_getspecific(key));",
    // A semaphore that lets two in.
    "    for (int i = 0; i < N; i++) {
        check(sem_wait(&semaphore), \"sem_wait\");
        atomic_fetch_add(&atomic_sum, work(id + (uint64_t)i, W));
        check(sem_post(&semaphore), \"sem_post\");
    }",
    // Only computing.
    "    mine = recurse(work(mine + id, W * 100), N);
    atomic_fetch_xor(&atomic_sum, mine);",
];

/// The program of a seed.
pub(crate) fn program(seed: u64) -> String {
    let mut random = Random::new(seed);
    let threads = random.between(2, 6);
    let mut program = format!("// Threads, seed {seed}.\n#define THREADS {threads}{PROLOGUE}");
    program.push_str(
        "static void *grandchild(void *argument) {\n    \
         mine = work((uintptr_t)argument, 50);\n    return (void *)(uintptr_t)(mine & 0xffff);\n}\n",
    );
    program.push_str(
        "static void *thread(void *argument) {\n    uint64_t id = (uintptr_t)argument;\n    mine = id;\n",
    );
    for _ in 0..random.between(2, 8) {
        let phase = random.below(PHASES.len());
        let (n, w) = (random.between(2, 20), random.between(1, 60));
        let text = PHASES[phase]
            .replace("N ", &format!("{n} "))
            .replace("N;", &format!("{n};"))
            .replace("N)", &format!("{n})"))
            .replace("W)", &format!("{w})"))
            .replace("W ", &format!("{w} "));
        let _ = writeln!(program, "{text}\n    meet(id);");
    }
    program.push_str("    return (void *)(uintptr_t)(mine & 0xffffff);\n}\n");
    program.push_str(
        r#"
int main(void) {
    pthread_t threads[THREADS];
    check(pthread_barrier_init(&barrier, NULL, THREADS), "pthread_barrier_init");
    check(pthread_key_create(&key, NULL), "pthread_key_create");
    check(sem_init(&semaphore, 0, 2), "sem_init");
    for (int i = 0; i < THREADS; i++)
        check(pipe(pipes[i]), "pipe");
    for (uintptr_t i = 0; i < THREADS; i++)
        check(pthread_create(&threads[i], NULL, thread, (void *)i), "pthread_create");
    for (int i = 0; i < THREADS; i++) {
        void *result;
        check(pthread_join(threads[i], &result), "pthread_join");
        printf("thread %d: %llx\n", i, (unsigned long long)(uintptr_t)result);
    }
    printf("end: sum %016llx atomic %016llx\n", (unsigned long long)sum, (unsigned long long)atomic_sum);
    (void)turn;
    return 0;
}
"#,
    );
    program
}
