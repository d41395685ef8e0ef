/* Lowered by the plugin, like setjmp: isa/libc/README.md. */
