//! The kinds of random programs, and how one is made from a seed.

use std::process::Command;

use anyhow::{Context as _, Result, ensure};
use godwit_isa_programs::compile::Compiler;

use crate::{floats, threads, varargs};

/// What a random program exercises.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum Kind {
    /// Integers, pointers, structs, bit fields, arrays, loops, calls: csmith, which must be installed.
    Csmith,
    /// Variable arguments.
    Varargs,
    /// Floating point.
    Floats,
    /// Threads.
    Threads,
}

impl Kind {
    /// All of them.
    pub const ALL: [Self; 4] = [Self::Csmith, Self::Varargs, Self::Floats, Self::Threads];

    /// The source of the program of a seed.
    ///
    /// # Errors
    /// When csmith cannot be run or complains.
    pub fn program(self, seed: u64) -> Result<String> {
        match self {
            Self::Csmith => csmith(seed),
            Self::Varargs => Ok(varargs::program(seed)),
            Self::Floats => Ok(floats::program(seed)),
            Self::Threads => Ok(threads::program(seed)),
        }
    }

    /// The plain compiler for x86-64 whose builds of such programs are right.
    #[must_use]
    pub fn reference(self) -> Compiler {
        match self {
            Self::Varargs => Compiler::plain_gcc(),
            // Some of csmith's never end. A compiler that optimises may take it that they do, and then anything may happen.
            Self::Csmith => Compiler::plain_x86_64().unoptimised(),
            _ => Compiler::plain_x86_64(),
        }
    }

    /// What its programs need to be built, beyond what all need.
    #[must_use]
    pub fn arguments(self) -> &'static [&'static str] {
        match self {
            // csmith's programs compare what is always true, and more of that kind.
            Self::Csmith => &["-w", "-I/usr/include/csmith"],
            // Which helpers and parameters are used is a matter of chance.
            _ => &[
                "-Wall",
                "-Wextra",
                "-Werror",
                "-Wno-unused",
                "-Wno-unused-parameter",
                "-Wno-unused-but-set-parameter",
                "-Wno-unneeded-internal-declaration",
            ],
        }
    }
}

fn csmith(seed: u64) -> Result<String> {
    // It leaves a file about the platform in its working directory.
    let directory = tempfile::tempdir().context("cannot make a directory for csmith")?;
    // Packed structs with bit fields across their borders are laid out by each platform's own rules.
    let output = Command::new("csmith")
        .args(["--seed", &seed.to_string(), "--no-packed-struct"])
        .current_dir(directory.path())
        .output()
        .context("cannot run csmith: install the package csmith")?;
    ensure!(
        output.status.success(),
        "csmith makes no program of the seed {seed}: {}",
        String::from_utf8_lossy(&output.stderr)
    );
    String::from_utf8(output.stdout)
        .with_context(|| format!("csmith's program of the seed {seed} is not text"))
}

#[cfg(test)]
mod tests {
    use super::*;

    const OWN: [Kind; 3] = [Kind::Varargs, Kind::Floats, Kind::Threads];

    #[test]
    fn a_seed_makes_the_same_program_each_time_and_another_seed_another() {
        for kind in OWN {
            let first = kind.program(5).expect("own generators cannot fail");
            assert_eq!(first, kind.program(5).expect("own generators cannot fail"), "{kind:?}");
            assert_ne!(first, kind.program(6).expect("own generators cannot fail"), "{kind:?}");
        }
    }

    #[test]
    fn brackets_of_a_thousand_programs_are_balanced() {
        for kind in OWN {
            for seed in 0..1000 {
                let text = kind.program(seed).expect("own generators cannot fail");
                for (open, close) in [('{', '}'), ('(', ')'), ('[', ']')] {
                    assert_eq!(text.matches(open).count(), text.matches(close).count(), "{kind:?} {seed}");
                }
            }
        }
    }

    #[test]
    fn no_placeholder_is_left_in_a_program_with_threads() {
        for seed in 0..1000 {
            let text = Kind::Threads.program(seed).expect("own generators cannot fail");
            let words = text.split(|c: char| !c.is_ascii_alphanumeric() && c != '_');
            assert!(words.into_iter().all(|word| word != "N" && word != "W"), "seed {seed}");
        }
    }
}
