//! `godwit man`: the man pages of all verbs.

use std::{fs, path::PathBuf, process::ExitCode};

use anyhow::Context as _;
use clap::CommandFactory as _;

use crate::{cli::Cli, values};

/// Write the man pages of all verbs into a directory
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// The directory, made if it is missing
    #[arg(value_parser = values::absolute)]
    dir: PathBuf,
}

pub(crate) fn run(args: &Args) -> anyhow::Result<ExitCode> {
    let unwritable = || format!("the man pages cannot be written to {}", args.dir.display());
    fs::create_dir_all(&args.dir).with_context(unwritable)?;
    clap_mangen::generate_to(Cli::command(), &args.dir).with_context(unwritable)?;
    Ok(ExitCode::SUCCESS)
}
