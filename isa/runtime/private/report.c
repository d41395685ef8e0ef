// How the private runtime ends a process that cannot go on.
#include "private.h"

#define GW_EXIT_FAILED 125

uint64_t gw_string_length(const char *string) {
    uint64_t length = 0;
    while (string[length] != 0)
        length++;
    return length;
}

_Noreturn void gw_exit(int status) {
    for (;;)
        gw_call(GW_NR_exit_group, status, 0, 0, 0, 0, 0);
}

// A message that cannot be written has nowhere else to go, so the result is not looked at.
int gw_messages = 2;

static void say(const char *text) {
    (void)gw_call(GW_NR_write, gw_messages, (long)text, (long)gw_string_length(text), 0, 0, 0);
}

static void say_number(unsigned long number) {
    char text[24];
    char *digit = text + sizeof text - 1;
    *digit = 0;
    do {
        *--digit = (char)('0' + number % 10);
        number /= 10;
    } while (number != 0);
    say(digit);
}

_Noreturn void gw_fail(const char *what, const char *object, long error) {
    say("godwit: ");
    say(what);
    if (object) {
        say(" ");
        say(object);
    }
    if (error != 0) {
        say(" (error ");
        say_number((unsigned long)(error < 0 ? -error : error));
        say(")");
    }
    say("\n");
    gw_exit(GW_EXIT_FAILED);
}

uint64_t gw_nanoseconds(void) {
    enum { CLOCK_MONOTONIC = 1 };
    uint64_t time[2] = {0, 0};
    long error = gw_call(GW_NR_clock_gettime, CLOCK_MONOTONIC, (long)time, 0, 0, 0, 0);
    if (error != 0)
        gw_fail("cannot read the clock", 0, error);
    return time[0] * 1000000000UL + time[1];
}

void gw_report_capture(uint64_t requested, uint64_t parked, uint64_t saved) {
    say("godwit: parked ");
    say_number(parked - requested);
    say(" ns after the request, saved in ");
    say_number(saved - parked);
    say(" ns\n");
}
