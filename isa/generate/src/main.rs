//! `godwit-isa-generate`: shows the program of a seed, or compares the outputs of builds of many.

use std::process::ExitCode;
use std::time::Duration;

use anyhow::Result;
use clap::{Parser, Subcommand};
use godwit_isa_generate::kind::Kind;
use godwit_isa_generate::series::{Series, Verdict};
use godwit_isa_programs::compile::Compiler;

#[derive(Parser)]
#[command(about = "Random C programs, and the comparison of what several builds of them print")]
struct Arguments {
    #[command(subcommand)]
    verb: Verb,
}

#[derive(Subcommand)]
enum Verb {
    /// Prints the program of a seed.
    Show {
        /// The kind of program.
        kind: Kind,
        /// The seed.
        seed: u64,
    },
    /// Builds and runs programs and compares their outputs; the exit status is 1 when some differ.
    Run {
        /// The kind of program.
        kind: Kind,
        /// The first seed; the following numbers are the next ones.
        #[arg(long, default_value_t = 1)]
        seed: u64,
        /// How many programs.
        #[arg(long, default_value_t = 20)]
        count: usize,
        /// Seconds for a run of the reference, after which the next seed takes its place.
        #[arg(long, default_value_t = 5.0)]
        limit: f64,
        /// Further compilers, as NAME|COMMAND|SUFFIX|RUNNER: a build is COMMAND … -o NAME, a run is RUNNER NAMESUFFIX.
        #[arg(long = "with")]
        compilers: Vec<String>,
        /// Leaves out the plain build for arm64.
        #[arg(long)]
        no_aarch64: bool,
        /// Builds with godwit-cc of this build tree too, and changes the instruction set at random places.
        #[arg(long)]
        stress: bool,
    },
}

fn main() -> Result<ExitCode> {
    match Arguments::parse().verb {
        Verb::Show { kind, seed } => {
            print!("{}", kind.program(seed)?);
            Ok(ExitCode::SUCCESS)
        }
        Verb::Run { kind, seed, count, limit, compilers, no_aarch64, stress } => {
            let mut all = vec![kind.reference()];
            if !no_aarch64 {
                all.push(Compiler::plain_aarch64());
            }
            for text in &compilers {
                all.push(Compiler::parse(text)?);
            }
            let godwit = if stress { Some(Compiler::godwit()?) } else { None };
            let limit = Duration::try_from_secs_f64(limit)?;
            let series = Series { kind, compilers: &all, limit, travels: godwit.as_ref() };
            let summary = series.run(seed, count, |seed, verdict| match verdict {
                Verdict::Equal => println!("seed {seed}: equal"),
                Verdict::TimedOut => println!("seed {seed}: runs too long, the next takes its place"),
                Verdict::Differs(how) => {
                    println!("seed {seed}: DIFFERS");
                    for line in how {
                        println!("    {line}");
                    }
                }
            })?;
            println!(
                "{} equal, {} different, {} replaced",
                summary.equal,
                summary.differing.len(),
                summary.timed_out.len()
            );
            Ok(if summary.differing.is_empty() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
        }
    }
}
