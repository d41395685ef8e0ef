//! One process's address space from outside.
