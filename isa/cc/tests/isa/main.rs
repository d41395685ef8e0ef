//! The drivers, the C library, the kernel interface and the plain runtime, from outside.

mod cmake;
mod common;
mod cxx;
mod driver;
mod module;
mod packages;
mod programs;
#[cfg(target_arch = "x86_64")]
mod rest;
mod signals;
