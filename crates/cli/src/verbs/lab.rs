//! `godwit lab` and `godwit bench`: `godwit-lab` performs them, so this program needs nothing of labs.

use std::{ffi::OsString, process::ExitCode};

use crate::{companion, global::Global};

/// What follows the verb, which `godwit-lab` reads: also `--help`.
#[derive(Debug, clap::Args)]
#[command(disable_help_flag = true)]
pub(crate) struct Args {
    /// What godwit-lab takes; --help shows it
    #[arg(trailing_var_arg = true, allow_hyphen_values = true, value_name = "ARGUMENTS")]
    arguments: Vec<OsString>,
}

pub(crate) fn run(verb: &str, args: Args, global: &Global) -> anyhow::Result<ExitCode> {
    let mut arguments = global.arguments();
    arguments.push(verb.into());
    arguments.extend(args.arguments);
    companion::become_lab(verb, &arguments)
}
