// A kernel call in which the program's numbers of threads and of the process have been translated. Results as
// __gw_kernel's.
#ifndef GW_NEUTRAL_IDENTITY_H
#define GW_NEUTRAL_IDENTITY_H

long gw_own_call(long nr, long a, long b, long c, long d, long e, long f);

#endif
