//! `godwit man`: the man pages of all verbs.

use std::{path::PathBuf, process::ExitCode};

use crate::{companion, generate, values};

/// Write the man pages of all verbs into a directory
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// The directory, made if it is missing
    #[arg(value_parser = values::absolute)]
    dir: PathBuf,
}

pub(crate) fn run(args: &Args, definition: clap::Command) -> anyhow::Result<ExitCode> {
    // It knows the flags of both programs; without it, lab and bench have a page each that names no flags.
    if let Some(ended) = companion::become_lab_if_installed("man", &["man".into(), args.dir.clone().into()]) {
        return ended;
    }
    generate::man(definition, &args.dir)?;
    Ok(ExitCode::SUCCESS)
}
