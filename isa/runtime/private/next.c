// Exec mode: when its state is written, the process becomes the command of GODWIT_STATE_NEXT, which starts the
// executable of the next leg. Process number, pending signals and all open descriptors stay, as with a checkpoint of
// the kernel's objects.
#include "private.h"

enum { F_SETFD = 2, SIG_SETMASK = 2, SIGNAL_SET_BYTES = 8 };

// All of them, also those that the program cannot block: what comes until the program goes on has to wait, since nobody
// handles it. The state has the mask.
void gw_block_signals(void) {
    uint64_t all = ~0UL;
    long error = gw_call(GW_NR_rt_sigprocmask, SIG_SETMASK, (long)&all, 0, SIGNAL_SET_BYTES, 0, 0);
    if (error != 0)
        gw_fail("cannot block the signals", 0, error);
}

// The state knows which are to be closed by an exec of the program's own.
static void keep(uint32_t number) {
    long error = gw_call(GW_NR_fcntl, number, F_SETFD, 0, 0, 0, 0);
    if (error != 0)
        gw_fail("cannot keep an open file for the next leg", 0, error);
}

// The state is whole, so that who reads this can go on from it by other means.
_Noreturn static void fail(const char *command, long error) {
    static char sentence[2 * GW_PATH_MAX + 128];
    static const char advice[] = " cannot be executed; the state is kept, and godwit-state resume continues from it: ";
    const char *parts[] = {command, advice, gw_settings.save};
    uint64_t used = 0;
    for (int i = 0; i < 3; i++)
        for (const char *at = parts[i]; *at && used + 1 < sizeof sentence; at++)
            sentence[used++] = *at;
    gw_fail("the program cannot change its instruction set by GODWIT_STATE_NEXT:", sentence, error);
}

_Noreturn void gw_become_next(void) {
    const char *variable = gw_settings.next;
    const char *command = variable + sizeof "GODWIT_STATE_NEXT";
    const char *arguments[] = {command, "next", gw_settings.save, 0};
    uint64_t last = 0;
    while (gw_settings.environment[last])
        last++;
    // The variable itself stood in this array, so there is room for it and the null.
    gw_settings.environment[last] = (char *)variable;
    gw_settings.environment[last + 1] = 0;
    gw_each_descriptor(keep);
    long error = gw_call(GW_NR_execve, (long)command, (long)arguments, (long)gw_settings.environment, 0, 0, 0);
    fail(command, error);
}
