//! `godwit completions`: completion scripts for shells.

use std::{
    io::{self, Write as _},
    process::ExitCode,
};

use clap::CommandFactory as _;
use clap_complete::Shell;

use crate::cli::Cli;

/// Print the completion script of a shell
///
/// For bash: godwit completions bash > /etc/bash_completion.d/godwit
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// The shell
    shell: Shell,
}

pub(crate) fn run(args: &Args) -> anyhow::Result<ExitCode> {
    // By way of a buffer: the generator panics when whoever reads the output has gone.
    let mut script = Vec::new();
    clap_complete::generate(args.shell, &mut Cli::command(), "godwit", &mut script);
    io::stdout().write_all(&script)?;
    Ok(ExitCode::SUCCESS)
}
