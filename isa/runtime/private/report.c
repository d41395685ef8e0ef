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

int gw_messages = 2;

// The program may have told its standard error not to wait for room. Is there some within ten seconds?
static int has_room(void) {
    enum { POLLOUT = 4, SECONDS = 10 };
    struct {
        int descriptor;
        int16_t wanted, found;
    } of = {gw_messages, POLLOUT, 0};
    int64_t time[2] = {SECONDS, 0};
    return gw_call(GW_NR_ppoll, (long)&of, 1, (long)time, 0, 0, 0) > 0;
}

// A message that cannot be written has nowhere else to go.
static void say(const char *text) {
    enum { EINTR = 4, EAGAIN = 11 };
    uint64_t length = gw_string_length(text);
    while (length > 0) {
        long done = gw_call(GW_NR_write, gw_messages, (long)text, (long)length, 0, 0, 0);
        if (done == -EINTR || (done == -EAGAIN && has_room()))
            continue;
        if (done <= 0)
            return;
        text += done;
        length -= (uint64_t)done;
    }
}

// Standard error is the program's, which may have closed it or made another file of it.
static void open_messages(void) {
    enum { AT_FDCWD = -100, O_WRONLY_APPEND_CLOEXEC = 02002001 };
    long file = gw_settings.messages
                    ? gw_call(GW_NR_openat, AT_FDCWD, (long)gw_settings.messages, O_WRONLY_APPEND_CLOEXEC, 0, 0, 0)
                    : -1;
    if (file >= 0)
        gw_messages = (int)file;
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
    open_messages();
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
