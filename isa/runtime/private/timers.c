// Timers and clocks over a state: what the kernel knows of the program's timers is taken down before a state is written
// and made again from it; and clocks that count from a machine's start go on from what they showed.
#include "private.h"

enum { CLOCK_MONOTONIC = 1, CLOCK_BOOTTIME = 7 };
enum { ITIMER_REAL = 0, INTERVAL_TIMERS = 3 };
enum { SIGEV_THREAD_ID = 4, EVENT_NOTIFY = 12, EVENT_THREAD = 16 };

static const int clocks[2] = {CLOCK_MONOTONIC, CLOCK_BOOTTIME};

static int64_t shows(int clock) {
    int64_t time[2];
    long error = gw_call(GW_NR_clock_gettime, clock, (long)time, 0, 0, 0, 0);
    if (error != 0)
        gw_fail("cannot read the clock", 0, error);
    return time[0] * 1000000000L + time[1];
}

// What the program's clocks show now.
static void note_clocks(void) {
    struct gw_signal_table *table = &__gw_signal_table;
    for (int i = 0; i < 2; i++)
        table->clock_shown[i] = (int64_t)((uint64_t)shows(clocks[i]) + (uint64_t)table->clock_ahead[i]);
}

// They go on from what they showed.
static void read_clocks(void) {
    struct gw_signal_table *table = &__gw_signal_table;
    for (int i = 0; i < 2; i++)
        table->clock_ahead[i] = (int64_t)((uint64_t)table->clock_shown[i] - (uint64_t)shows(clocks[i]));
}

// Takes the timers down, before any signal is taken from the kernel: then each timer that expires has either its signal
// among those that are taken, or time left in the state.
void gw_save_timers(void) {
    struct gw_signal_table *table = &__gw_signal_table;
    // Read and stopped in one call, so that none expires in between. The kernel forgets the signal of a POSIX timer
    // that is stopped: these run on until their signal is taken (gw_timer_has_sent).
    static const uint64_t stopped[4];
    for (int which = 0; which < INTERVAL_TIMERS; which++) {
        uint64_t *setting = table->interval_timers[which];
        long error = gw_call(GW_NR_setitimer, which, (long)stopped, (long)setting, 0, 0, 0);
        if (error != 0)
            gw_fail("cannot read an interval timer for the state", 0, error);
        // A periodic timer that has expired stands still until its signal is taken: the kernel shows no time left. (One
        // that the program has stopped has no interval either; ITIMER_VIRTUAL and ITIMER_PROF never stand still.)
        if (which == ITIMER_REAL && setting[2] == 0 && setting[3] == 0) {
            setting[2] = setting[0];
            setting[3] = setting[1];
        }
    }
    for (unsigned i = 0; i < GW_TIMERS; i++) {
        struct gw_timer *timer = &table->timers[i];
        if (timer->used != 2)
            continue;
        long error = gw_call(GW_NR_timer_gettime, timer->kernel_number, (long)timer->setting, 0, 0, 0, 0);
        if (error != 0)
            gw_fail("cannot read a timer for the state", 0, error);
        // The kernel's timer of the next leg does not know it.
        if (timer->overrun == GW_OVERRUN_OF_KERNEL)
            timer->overrun = (int32_t)gw_call(GW_NR_timer_getoverrun, timer->kernel_number, 0, 0, 0, 0, 0);
    }
    // Behind the timers, and before them when they are made again: or one that ends at a point of time would end before
    // the program's clock shows it.
    note_clocks();
}

// Its signal has been taken down, so its time is over, whatever was read before. It would expire again: it is stopped,
// or a timer of a short interval would send signals as fast as they are taken.
void gw_timer_has_sent(int number) {
    if (!gw_is_timer(number))
        return;
    struct gw_timer *timer = &__gw_signal_table.timers[number - GW_TIMER_BASE];
    if (timer->used != 2)
        return;
    static const uint64_t stopped[4];
    long error = gw_call(GW_NR_timer_settime, timer->kernel_number, 0, (long)stopped, 0, 0, 0);
    if (error != 0)
        gw_fail("cannot stop a timer for the state", 0, error);
    timer->setting[2] = timer->setting[0];
    timer->setting[3] = timer->setting[1];
}

// Does the timer of this number send its signal to one thread?
int gw_timer_is_of_thread(int number) {
    if (!gw_is_timer(number))
        return 0;
    int notify;
    __builtin_memcpy(&notify, (const char *)__gw_signal_table.timers[number - GW_TIMER_BASE].event + EVENT_NOTIFY,
                     sizeof notify);
    return (notify & SIGEV_THREAD_ID) != 0;
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

// At rest the kernel's timers run on, and whoever restores the process sets them to the time that each had left. One
// more of them tells how far they have come, and so do the program's clocks. Else a timer could end at a point of time
// that they do not show yet.
enum { REST_SECONDS = 1 << 30, SIGEV_NONE = 1 };

void gw_begin_rest_time(void) {
    struct {
        uint64_t value;
        int signal, notify;
        char rest[48];
    } event = {.notify = SIGEV_NONE};
    static const uint64_t time[4] = {0, 0, REST_SECONDS, 0};
    int number;
    __gw_signal_table.rest_timer = 0;
    long error = gw_call(GW_NR_timer_create, CLOCK_MONOTONIC, (long)&event, (long)&number, 0, 0, 0);
    // Where the user has as many as may be, the time at rest is not seen, like that of a state on its way.
    if (error == 0) {
        __gw_signal_table.rest_timer = (uint64_t)number + 1;
        error = gw_call(GW_NR_timer_settime, number, 0, (long)time, 0, 0, 0);
        if (error != 0)
            gw_fail("cannot set the timer of a rest", 0, error);
    }
    // Behind it, and when they go on before it: rather too far than not far enough.
    note_clocks();
}

void gw_end_rest_time(void) {
    uint64_t number = __gw_signal_table.rest_timer;
    __gw_signal_table.rest_timer = 0;
    long error = number == 0 ? 0 : gw_call(GW_NR_timer_delete, (long)number - 1, 0, 0, 0, 0, 0);
    if (error != 0)
        gw_fail("cannot end the timer of a rest", 0, error);
}

void gw_add_rest_time(void) {
    uint64_t left[4] = {0, 0, REST_SECONDS, 0};
    uint64_t number = __gw_signal_table.rest_timer;
    read_clocks();
    long error = number == 0 ? 0 : gw_call(GW_NR_timer_gettime, (long)number - 1, (long)left, 0, 0, 0, 0);
    if (error != 0)
        gw_fail("cannot read the timer of a rest", 0, error);
    if ((left[0] | left[1]) != 0 || left[2] > REST_SECONDS || (left[2] == REST_SECONDS && left[3] != 0))
        gw_fail("the timer of a rest is not as the rest has set it", 0, 0);
    uint64_t elapsed = REST_SECONDS * 1000000000UL - (left[2] * 1000000000UL + left[3]);
    for (int i = 0; i < 2; i++)
        __gw_signal_table.clock_ahead[i] += (int64_t)elapsed;
    gw_end_rest_time();
}

void gw_load_timers(void) {
    struct gw_signal_table *table = &__gw_signal_table;
    read_clocks();
    for (unsigned i = 0; i < GW_TIMERS; i++)
        if (table->timers[i].used == 2)
            make_again(&table->timers[i]);
    for (int which = 0; which < INTERVAL_TIMERS; which++) {
        const uint64_t *setting = table->interval_timers[which];
        if ((setting[0] | setting[1] | setting[2] | setting[3]) == 0)
            continue;
        long error = gw_call(GW_NR_setitimer, which, (long)setting, 0, 0, 0, 0);
        if (error != 0)
            gw_fail("cannot set an interval timer of the state again", 0, error);
    }
}
