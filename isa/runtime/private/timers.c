// Timers and clocks over a state: what the kernel knows of the program's timers is taken down before a state is written
// and made again from it; and clocks that count from a machine's start go on from what they showed.
#include "private.h"

enum { CLOCK_MONOTONIC = 1, CLOCK_BOOTTIME = 7 };
enum { INTERVAL_TIMERS = 3 };
enum { SIGEV_THREAD_ID = 4, EVENT_NOTIFY = 12, EVENT_THREAD = 16 };

static const int clocks[2] = {CLOCK_MONOTONIC, CLOCK_BOOTTIME};

static int64_t shows(int clock) {
    int64_t time[2];
    long error = gw_call(GW_NR_clock_gettime, clock, (long)time, 0, 0, 0, 0);
    if (error != 0)
        gw_fail("cannot read the clock", 0, error);
    return time[0] * 1000000000L + time[1];
}

void gw_save_timers(void) {
    struct gw_signal_table *table = &__gw_signal_table;
    // Stopped in the same moment, or one could end behind its reading and its signal be lost. Other timers go on, since
    // the kernel forgets the signal of one that is stopped; gw_timer_has_sent looks after them.
    static const uint64_t stopped[4];
    for (int which = 0; which < INTERVAL_TIMERS; which++) {
        long error = gw_call(GW_NR_setitimer, which, (long)stopped, (long)table->interval_timers[which], 0, 0, 0);
        if (error != 0)
            gw_fail("cannot read an interval timer for the state", 0, error);
    }
    for (unsigned i = 0; i < GW_TIMERS; i++) {
        struct gw_timer *timer = &table->timers[i];
        if (timer->used != 2)
            continue;
        long error = gw_call(GW_NR_timer_gettime, timer->kernel_number, (long)timer->setting, 0, 0, 0, 0);
        if (error != 0)
            gw_fail("cannot read a timer for the state", 0, error);
    }
    // Behind the timers, and before them when they are made again: or one that ends at a point of time would end before
    // the program's clock shows it.
    for (int i = 0; i < 2; i++)
        table->clock_shown[i] = (int64_t)((uint64_t)shows(clocks[i]) + (uint64_t)table->clock_ahead[i]);
}

// Its signal has been taken down, so its time is over, whatever was read before.
void gw_timer_has_sent(int number) {
    if (number < GW_TIMER_BASE || number >= GW_TIMER_BASE + GW_TIMERS)
        return;
    struct gw_timer *timer = &__gw_signal_table.timers[number - GW_TIMER_BASE];
    timer->setting[2] = timer->setting[0];
    timer->setting[3] = timer->setting[1];
}

static void make_again(struct gw_timer *timer) {
    char event[sizeof timer->event];
    int number;
    __builtin_memcpy(event, timer->event, sizeof event);
    int notify;
    __builtin_memcpy(&notify, event + EVENT_NOTIFY, sizeof notify);
    if (notify & SIGEV_THREAD_ID) {
        int thread;
        __builtin_memcpy(&thread, event + EVENT_THREAD, sizeof thread);
        thread = (int)__gw_real_id(thread);
        __builtin_memcpy(event + EVENT_THREAD, &thread, sizeof thread);
    }
    long error = gw_call(GW_NR_timer_create, timer->clock, (long)event, (long)&number, 0, 0, 0);
    if (error != 0)
        gw_fail("cannot make a timer of the state again", 0, error);
    timer->kernel_number = number;
    error = gw_call(GW_NR_timer_settime, number, 0, (long)timer->setting, 0, 0, 0);
    if (error != 0)
        gw_fail("cannot set a timer of the state again", 0, error);
}

void gw_load_timers(void) {
    struct gw_signal_table *table = &__gw_signal_table;
    for (int i = 0; i < 2; i++)
        table->clock_ahead[i] = (int64_t)((uint64_t)table->clock_shown[i] - (uint64_t)shows(clocks[i]));
    for (unsigned i = 0; i < GW_TIMERS; i++)
        if (table->timers[i].used == 2)
            make_again(&table->timers[i]);
    for (int which = 0; which < INTERVAL_TIMERS; which++) {
        const uint64_t *setting = table->interval_timers[which];
        if (setting[2] == 0 && setting[3] == 0)
            continue;
        long error = gw_call(GW_NR_setitimer, which, (long)setting, 0, 0, 0, 0);
        if (error != 0)
            gw_fail("cannot set an interval timer of the state again", 0, error);
    }
}
