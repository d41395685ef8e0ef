//! `godwit-state run`: starts a program, which may be captured on the way.

use std::ffi::OsString;
use std::path::PathBuf;

use anyhow::Result;
use clap::Command;
use clap::error::ErrorKind;
use godwit_isa_state::Set;

use crate::leg::Leg;
use crate::machine::{self, Startable};
use crate::when::When;
use crate::{values, verbs};

/// Start a program, and capture it into a state file when asked to
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// The program: PROG.x86_64 or PROG.aarch64 is started
    #[arg(value_name = "PROG")]
    program: PathBuf,
    #[command(flatten)]
    when: When,
    /// Where to write the state
    #[arg(long, value_name = "FILE", requires = "When")]
    state: Option<PathBuf>,
    /// The instruction set to run on [default: this machine's]
    #[arg(long, value_name = "SET", value_parser = values::set)]
    set: Option<Set>,
    /// The program's arguments
    #[arg(last = true, value_name = "ARGS")]
    arguments: Vec<OsString>,
}

/// `definition` is of the whole command line.
pub(crate) async fn run(args: &Args, definition: Command, json: bool) -> Result<u8> {
    let capture = match (args.when.request(), &args.state) {
        (Some(request), Some(state)) => Some((request, state.as_path())),
        (Some(_), None) => missing_state(definition),
        (None, _) => None,
    };
    let set = args.set.map_or_else(machine::native, Ok)?;
    let executable = Startable::find(&args.program, set)?;
    let messages = tempfile::NamedTempFile::new().ok();
    let leg = Leg {
        executable: &executable,
        arguments: &args.arguments,
        resume: None,
        capture,
        next: None,
        messages: messages.as_ref().map(tempfile::NamedTempFile::path),
    };
    let ending = leg.run().await?;
    verbs::tell(&verbs::outcome(&ending, &executable, args.state.as_deref())?, &args.program, json)
}

/// Which of two arguments needs the other depends on a group of arguments, which clap cannot be told.
fn missing_state(mut definition: Command) -> ! {
    let text = "name the file for the state with --state FILE";
    definition.error(ErrorKind::MissingRequiredArgument, text).exit()
}
