//! `godwit-state man`: the man pages.

use std::fs;
use std::path::PathBuf;

use anyhow::{Context as _, Result};
use clap::Command;

/// Write the man pages into a directory
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// The directory, made if it is missing
    dir: PathBuf,
}

pub(crate) fn run(args: &Args, definition: Command) -> Result<u8> {
    let unwritable = || format!("cannot write the man pages to {}", args.dir.display());
    fs::create_dir_all(&args.dir).with_context(unwritable)?;
    clap_mangen::generate_to(definition, &args.dir).with_context(unwritable)?;
    Ok(0)
}
