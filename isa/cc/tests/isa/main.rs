//! The drivers, the C library, the kernel interface and the plain runtime, from outside.

mod cmake;
mod common;
mod driver;
mod packages;
mod programs;
mod signals;
