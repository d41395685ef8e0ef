/* What the plain runtime has once for each instruction set: SET.S, and the few lines here. */
#ifndef GW_PLAIN_SET_H
#define GW_PLAIN_SET_H

void gw_set_thread_pointer(void *block);
long gw_clone(int (*start)(void *), void *stack, int flags, void *argument, int *ptid, void *tls, int *ctid);
_Noreturn void gw_unmap_and_exit(void *memory, unsigned long size);
void *memcpy(void *restrict to, const void *restrict from, unsigned long size);

/* Between these a cancellable call has not begun, or waits in the kernel; the third answers that it was ended. */
extern const char gw_window_begin[], gw_window_end[], gw_window_cancelled[];

/* Where a thread's control block has the flag that the window looks at (also in SET.S). */
enum { GW_WATCHED = 32 };

static inline volatile int **gw_watched(void) {
    return (volatile int **)((char *)__builtin_thread_pointer() + GW_WATCHED);
}

/* Where the signal frame has the program counter. */
#ifdef __x86_64__
enum { GW_CONTEXT_COUNTER = 168 };
#else
enum { GW_CONTEXT_COUNTER = 440 };
#endif

/* A thread that is inside the window, and whose flag is set, comes back with GW_CANCELLED. */
static inline void gw_leave_window(void *context) {
    const char **counter = (const char **)((char *)context + GW_CONTEXT_COUNTER);
    volatile int *watched = *gw_watched();

    if (watched && *watched && *counter >= gw_window_begin && *counter < gw_window_end)
        *counter = gw_window_cancelled;
}

#endif
