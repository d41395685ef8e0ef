//! Completions and man pages, from a clap definition.

use std::{
    fs,
    io::{self, Write as _},
    path::Path,
};

use anyhow::Context as _;
use clap::Command;
use clap_complete::Shell;

/// Prints the completion script of `godwit`.
///
/// # Errors
/// If standard output cannot be written to.
pub fn completions(mut definition: Command, shell: Shell) -> io::Result<()> {
    // By way of a buffer: the generator panics when whoever reads the output has gone.
    let mut script = Vec::new();
    clap_complete::generate(shell, &mut definition, "godwit", &mut script);
    io::stdout().write_all(&script)
}

/// Writes a man page for each verb into a directory, which is made if it is missing.
///
/// # Errors
/// If the directory or a page cannot be written.
pub fn man(definition: Command, directory: &Path) -> anyhow::Result<()> {
    let unwritable = || format!("the man pages cannot be written to {}", directory.display());
    fs::create_dir_all(directory).with_context(unwritable)?;
    clap_mangen::generate_to(definition, directory).with_context(unwritable)?;
    Ok(())
}
