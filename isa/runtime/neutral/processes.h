// The kernel calls of the program that make processes; called by neutral/syscall.c only.
#ifndef GW_NEUTRAL_PROCESSES_H
#define GW_NEUTRAL_PROCESSES_H

// Do these arguments of clone ask for a vfork?
int gw_is_vfork(long flags, long stack);
long gw_vfork(long flags);

#endif
