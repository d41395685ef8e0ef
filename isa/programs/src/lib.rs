//! The C programs that the tool chain for two instruction sets is tested and measured with, and how they are built and
//! run with any compiler.
//!
//! What a program must print is not written down: it is what plain builds of the same source print, one for x86-64 and
//! one for arm64, which must agree ([`compile::Compiler::plain`]).

pub mod catalogue;
pub mod compile;
pub mod run;
pub mod stress;
