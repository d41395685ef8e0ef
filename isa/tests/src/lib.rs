//! Builds C programs for both instruction sets and drives them from one to the other.

pub mod build;
#[cfg(target_arch = "x86_64")]
pub mod rest;
pub mod run;
