/* The runtime's _start calls __gw_main (src/env/godwit/__libc_start_main.c); crt1 is not used. */
