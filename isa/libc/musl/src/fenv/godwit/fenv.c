/* Native, one for each set: isa/libc/README.md. */
