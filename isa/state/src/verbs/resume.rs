//! `godwit-state resume`: goes on from a state file, on any set, and may be captured again.

use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result};
use godwit_isa_state::{Set, StateFile};

use crate::leg::Leg;
use crate::machine::{self, Startable};
use crate::when::When;
use crate::{values, verbs};

/// Resume from a state file, on any instruction set
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// The state
    #[arg(value_name = "FILE")]
    file: PathBuf,
    /// The program that was captured
    #[arg(long, value_name = "PROG")]
    program: PathBuf,
    /// The instruction set to resume on [default: this machine's]
    #[arg(long, value_name = "SET", value_parser = values::set)]
    set: Option<Set>,
    #[command(flatten)]
    when: When,
    /// Where to write the next state [default: over FILE]
    #[arg(long, value_name = "FILE", requires = "When")]
    state: Option<PathBuf>,
}

pub(crate) async fn run(args: &Args, json: bool) -> Result<u8> {
    let set = args.set.map_or_else(machine::native, Ok)?;
    let executable = Startable::find(&args.program, set)?;
    accepted(&executable, &args.file)?;
    let next = args.state.as_deref().unwrap_or(&args.file);
    let capture = args.when.request().map(|request| (request, next));
    let messages = tempfile::NamedTempFile::new().ok();
    let leg = Leg {
        executable: &executable,
        arguments: &[],
        resume: Some(&args.file),
        capture,
        next: None,
        messages: messages.as_ref().map(tempfile::NamedTempFile::path),
    };
    let ending = leg.run().await?;
    verbs::tell(&verbs::outcome(&ending, &executable, Some(next))?, &args.program, json)
}

/// Looks at a state as closely as can be before a process is made of it.
fn accepted(executable: &Startable, path: &Path) -> Result<()> {
    let state = StateFile::open(path)?;
    executable
        .program
        .accepts(&state)
        .with_context(|| format!("the state file {} is refused", path.display()))
}
