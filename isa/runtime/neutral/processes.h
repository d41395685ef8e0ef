// The kernel calls of the program that make processes; called by neutral/syscall.c only.
#ifndef GW_NEUTRAL_PROCESSES_H
#define GW_NEUTRAL_PROCESSES_H

// Do these arguments of clone ask for a vfork?
int gw_is_vfork(long flags, long stack);
long gw_vfork(long flags, long *told);
// In the child of a fork.
void gw_processes_forked(void);

// Descriptors that the program does not know of (processes.c): does this call meet one? Then this is its result.
enum { NR_dup3 = 24, NR_fcntl = 25, NR_close = 57, NR_close_range = 436 };
int gw_meets_held_end(long nr, long a, long b, long c);
long gw_beside_held_end(long nr, long a, long b, long c);

#endif
