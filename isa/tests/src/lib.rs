//! Builds C programs for both instruction sets and drives them from one to the other.

pub mod build;
pub mod run;
