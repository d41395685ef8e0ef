//! Random C programs, each from a number, the seed, so that a failure can be repeated; and the comparison of what
//! builds of them by several compilers print.
//!
//! The programs are well defined and print the same on every instruction set: no unspecified order, no conversion out
//! of range, no bits of a NaN.

mod floats;
pub mod kind;
mod random;
pub mod series;
mod threads;
mod varargs;
