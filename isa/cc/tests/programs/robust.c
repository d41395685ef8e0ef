/* Robust mutexes: who locks one next learns that its owner has ended. With an argument it is captured (SIGUSR2) while
 * one thread holds such a mutex and another has ended with one. */
#define _GNU_SOURCE
#include "check.h"
#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <sys/syscall.h>
#include <unistd.h>

static pthread_mutex_t left, held, lost;
static atomic_int holds, may_end;

static void *ends(void *mutex)
{
    CHECK(!pthread_mutex_lock(mutex));
    return 0;
}

static void *ends_later(void *mutex)
{
    CHECK(!pthread_mutex_lock(mutex));
    holds = 1;
    while (!may_end)
        ;
    return 0;
}

static void leave(pthread_mutex_t *mutex)
{
    pthread_t thread;

    CHECK(!pthread_create(&thread, 0, ends, mutex) && !pthread_join(thread, 0));
}

int main(int count, char **arguments)
{
    static const int types[] = {PTHREAD_MUTEX_NORMAL, PTHREAD_MUTEX_RECURSIVE, PTHREAD_MUTEX_ERRORCHECK};
    pthread_mutexattr_t attributes;
    pthread_t thread;
    void *list;
    size_t size;

    (void)arguments;
    CHECK(!syscall(SYS_get_robust_list, 0, &list, &size) && size == 3 * sizeof(long));
    CHECK(!pthread_mutexattr_init(&attributes));
    CHECK(!pthread_mutexattr_setrobust(&attributes, PTHREAD_MUTEX_ROBUST));
    for (unsigned i = 0; i < sizeof types / sizeof *types; i++) {
        CHECK(!pthread_mutexattr_settype(&attributes, types[i]));
        CHECK(!pthread_mutex_init(&left, &attributes) && !pthread_mutex_init(&held, &attributes));
        CHECK(!pthread_mutex_init(&lost, &attributes));
        leave(&left);
        leave(&lost);
        holds = may_end = 0;
        CHECK(!pthread_create(&thread, 0, ends_later, &held));
        while (!holds)
            ;
        if (count > 1 && i == 0)
            CHECK(!raise(SIGUSR2));
        CHECK(pthread_mutex_trylock(&held) == EBUSY);
        may_end = 1;
        CHECK(pthread_mutex_lock(&held) == EOWNERDEAD && !pthread_join(thread, 0));
        CHECK(!pthread_mutex_consistent(&held) && !pthread_mutex_unlock(&held));
        CHECK(!pthread_mutex_lock(&held) && !pthread_mutex_unlock(&held));
        CHECK(pthread_mutex_lock(&left) == EOWNERDEAD && !pthread_mutex_consistent(&left));
        CHECK(!pthread_mutex_unlock(&left));
        /* Given back without being made consistent, it is of no use any more. */
        CHECK(pthread_mutex_trylock(&lost) == EOWNERDEAD && !pthread_mutex_unlock(&lost));
        CHECK(pthread_mutex_lock(&lost) == ENOTRECOVERABLE);
    }
    return finish();
}
