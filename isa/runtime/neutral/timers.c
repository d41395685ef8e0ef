// Timers and clocks of the program. A timer's number is the program's own, since the kernel gives others after a move;
// and clocks that count from the start of a machine go on from what they showed on the last one.
#include "identity.h"
#include "signals.h"

enum {
    CLOCK_MONOTONIC = 1,
    CLOCK_MONOTONIC_RAW = 4,
    CLOCK_MONOTONIC_COARSE = 6,
    CLOCK_BOOTTIME = 7,
    CLOCK_BOOTTIME_ALARM = 9,
    TIMER_ABSTIME = 1
};
enum { SIGALRM = 14, SIGEV_SIGNAL = 0 };
enum { BILLION = 1000000000 };

struct event {
    uint64_t value;
    int signal, notify, thread;
    char rest[44];
};
_Static_assert(sizeof(struct event) == sizeof((struct gw_timer *)0)->event, "struct sigevent");

// How many nanoseconds a clock of the program is ahead of the kernel's.
NOSUSPEND long gw_clock_ahead(int clock) {
    switch (clock) {
    case CLOCK_MONOTONIC:
    case CLOCK_MONOTONIC_RAW:
    case CLOCK_MONOTONIC_COARSE:
        return __gw_signal_table.clock_ahead[0];
    case CLOCK_BOOTTIME:
    case CLOCK_BOOTTIME_ALARM:
        return __gw_signal_table.clock_ahead[1];
    default:
        return 0;
    }
}

NOSUSPEND static void add(struct gw_time *time, long nanoseconds) {
    // Floored, so that the remainder is not negative.
    long seconds = nanoseconds / BILLION - (nanoseconds % BILLION < 0);
    time->seconds += seconds;
    time->nanoseconds += nanoseconds - seconds * BILLION;
    if (time->nanoseconds >= BILLION) {
        time->seconds++;
        time->nanoseconds -= BILLION;
    }
}

NOSUSPEND long gw_clock_gettime(int clock, struct gw_time *time) {
    long result = gw_own_call(NR_clock_gettime, clock, (long)time, 0, 0, 0, 0);
    long ahead = gw_clock_ahead(clock);
    if (result == 0 && ahead != 0)
        add(time, ahead);
    return result;
}

NOSUSPEND static struct gw_timer *timer_of(int number) {
    if (!gw_is_timer(number))
        return 0;
    struct gw_timer *timer = &__gw_signal_table.timers[number - GW_TIMER_BASE];
    return timer->used == 2 ? timer : 0;
}

// `used` is 1 while it is being made, so that two threads do not get the same.
NOSUSPEND long gw_timer_create(int clock, const void *event, int *number) {
    if (event && !gw_is_readable(event, sizeof(struct event)))
        return -EFAULT;
    struct gw_timer *timer = 0;
    int place = 0;
    for (; place < GW_TIMERS && !timer; place++) {
        uint32_t unused = 0;
        if (__atomic_compare_exchange_n(&__gw_signal_table.timers[place].used, &unused, 1, 0, __ATOMIC_ACQUIRE,
                                        __ATOMIC_RELAXED))
            timer = &__gw_signal_table.timers[place];
    }
    if (!timer)
        return -EAGAIN;
    int own_number = GW_TIMER_BASE + place - 1;
    struct event wanted = {.value = (uint64_t)own_number, .signal = SIGALRM, .notify = SIGEV_SIGNAL};
    if (event)
        __builtin_memcpy(&wanted, event, sizeof wanted);
    __builtin_memcpy(timer->event, &wanted, sizeof wanted);
    timer->clock = clock;
    timer->overrun = GW_OVERRUN_OF_KERNEL;
    long result = wanted.signal == GW_RESERVED_SIGNAL
                      ? -EINVAL
                      : gw_own_call(NR_timer_create, clock, (long)&wanted, (long)number, 0, 0, 0);
    // The kernel has said by then whether its number could be written there.
    if (result == 0) {
        timer->kernel_number = *number;
        *number = own_number;
    }
    __atomic_store_n(&timer->used, result == 0 ? 2 : 0, __ATOMIC_RELEASE);
    return result;
}

NOSUSPEND long gw_timer_call(long nr, int number, long b, long c, long d) {
    struct gw_timer *timer = timer_of(number);
    if (!timer)
        return -EINVAL;
    struct gw_time setting[2]; // interval, time
    if (nr == NR_timer_settime && (b & TIMER_ABSTIME) && c && gw_clock_ahead(timer->clock) != 0 &&
        gw_is_readable((const void *)c, sizeof setting)) {
        __builtin_memcpy(setting, (const void *)c, sizeof setting);
        // Zero disarms; and what has passed already must not become that.
        if (setting[1].seconds != 0 || setting[1].nanoseconds != 0) {
            add(&setting[1], -gw_clock_ahead(timer->clock));
            if (setting[1].seconds < 0)
                setting[1] = (struct gw_time){0, 1};
        }
        c = (long)setting;
    }
    if (nr == NR_timer_getoverrun && timer->overrun != GW_OVERRUN_OF_KERNEL)
        return timer->overrun;
    long result = __gw_kernel(nr, timer->kernel_number, b, c, d, 0, 0);
    if (nr == NR_timer_settime && result == 0)
        timer->overrun = GW_OVERRUN_OF_KERNEL;
    if (nr == NR_timer_delete && result == 0)
        __atomic_store_n(&timer->used, 0, __ATOMIC_RELEASE);
    return result;
}

// A signal is delivered, or taken by a call that waits for it: its numbers become those that the program knows. A
// timer's signal that comes from a state was sent by the runtime, so the kernel's timer does not know its overruns.
NOSUSPEND void gw_name_delivered(struct gw_signal_info *information) {
    int is_of_state = gw_is_timer(information->origin);
    __gw_name_origin(information);
    struct gw_timer *timer = information->code == GW_SI_TIMER ? timer_of(information->origin) : 0;
    if (timer)
        timer->overrun = is_of_state ? information->overrun : GW_OVERRUN_OF_KERNEL;
}

// A child has no timers of its parent's.
NOSUSPEND void gw_timers_forked(void) {
    for (int i = 0; i < GW_TIMERS; i++)
        __gw_signal_table.timers[i].used = 0;
}
