//! What can be typed.

use clap::{Parser, Subcommand};

use crate::verbs::{hop, inspect, man, next, resume, run};

/// Run a program of godwit-cc, capture it into a state file, and resume it on any instruction set
#[derive(Debug, Parser)]
#[command(
    name = "godwit-state",
    version,
    after_help = "\
A program PROG is the executables PROG.x86_64 and PROG.aarch64. The one of another set than this machine's runs under \
qemu-user.

Exit status: the program's own when it ends, 128 and the signal's number when it is killed, 86 when it was captured, \
125 when godwit failed. With --json a line on standard error says which.

Examples:
  godwit-state run ./prog --after 2s --state prog.state -- input.txt
  godwit-state inspect prog.state
  godwit-state resume prog.state --program ./prog --set aarch64
  godwit-state hop ./prog --every-polls 1000 -- input.txt"
)]
pub(crate) struct Cli {
    /// Say it as JSON: `inspect` on standard output, the others in one line on standard error
    #[arg(long, global = true)]
    pub(crate) json: bool,
    #[command(subcommand)]
    pub(crate) verb: Verb,
}

#[derive(Debug, Subcommand)]
pub(crate) enum Verb {
    Run(run::Args),
    Resume(resume::Args),
    Hop(hop::Args),
    Inspect(inspect::Args),
    #[command(hide = true)]
    Man(man::Args),
    #[command(hide = true)]
    Next(next::Args),
}
