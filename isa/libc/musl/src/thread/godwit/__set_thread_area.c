/* The thread pointer is the runtime's. */
