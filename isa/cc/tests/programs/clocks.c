/* Is moved while it sleeps, to where the clocks show something else: the sleep ends in time, the clocks go on, and a
 * timer that was set to a point of time keeps it. */
#define _GNU_SOURCE
#include "check.h"
#include <signal.h>
#include <time.h>

int main(void)
{
    struct timespec before, after, booted, later, sleep = {1, 0}, until;
    struct itimerspec setting = {{0, 0}, {0, 0}}, left;
    timer_t timer;

    CHECK(!clock_gettime(CLOCK_MONOTONIC, &before) && !clock_gettime(CLOCK_BOOTTIME, &booted));
    CHECK(signal(SIGALRM, SIG_IGN) != SIG_ERR);
    CHECK(!timer_create(CLOCK_MONOTONIC, 0, &timer));
    setting.it_value = before;
    setting.it_value.tv_sec += 1000;
    CHECK(!timer_settime(timer, TIMER_ABSTIME, &setting, 0));
    CHECK(!nanosleep(&sleep, 0));
    CHECK(!clock_gettime(CLOCK_MONOTONIC, &after) && !clock_gettime(CLOCK_BOOTTIME, &later));
    CHECK(after.tv_sec >= before.tv_sec && after.tv_sec - before.tv_sec < 900);
    CHECK(later.tv_sec >= booted.tv_sec && later.tv_sec - booted.tv_sec < 900);
    CHECK(!timer_gettime(timer, &left) && left.it_value.tv_sec > 50 && left.it_value.tv_sec < 1000);
    CHECK(!timer_settime(timer, TIMER_ABSTIME, &setting, 0) && !timer_gettime(timer, &left));
    CHECK(left.it_value.tv_sec > 50 && left.it_value.tv_sec < 1000);
    until = after;
    until.tv_sec++;
    CHECK(!clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &until, 0));
    return finish();
}
