/* Where a thread's pthread structure is: at a fixed offset in its control block, which the runtime
 * owns (isa/ABI.md, section 4). musl's thread pointer is the address of the structure. */
#define GW_PTHREAD_OFFSET 256
#define GW_PTHREAD_ROOM 1792

static inline uintptr_t __get_tp(void)
{
	return (uintptr_t)__builtin_thread_pointer() + GW_PTHREAD_OFFSET;
}
