//! `godwit completions`: completion scripts for shells.

use std::process::ExitCode;

use clap::ValueEnum as _;
use clap_complete::Shell;

use crate::{companion, generate};

/// Print the completion script of a shell
///
/// For bash: godwit completions bash > /etc/bash_completion.d/godwit
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// The shell
    shell: Shell,
}

pub(crate) fn run(args: &Args, definition: clap::Command) -> anyhow::Result<ExitCode> {
    // It knows the flags of both programs; without it, nothing is completed after lab and bench.
    let shell = args.shell.to_possible_value().map(|value| value.get_name().to_owned()).unwrap_or_default();
    let words = ["completions".into(), shell.into()];
    if let Some(ended) = companion::become_lab_if_installed("completions", &words) {
        return ended;
    }
    generate::completions(definition, args.shell)?;
    Ok(ExitCode::SUCCESS)
}
