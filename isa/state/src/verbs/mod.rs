//! One file per verb, and what those that run programs share.

pub(crate) mod hop;
pub(crate) mod inspect;
pub(crate) mod man;
pub(crate) mod next;
pub(crate) mod resume;
pub(crate) mod run;

use std::path::Path;

use anyhow::Result;
use godwit_isa_state::EXIT_CAPTURED;

use crate::leg::Ending;
use crate::machine::Startable;
use crate::output::{self, Outcome};

/// What shells add to a signal's number.
const KILLED: i32 = 128;

/// How a leg ended, for the user.
fn outcome(ending: &Ending, executable: &Startable, state: Option<&Path>) -> Result<Outcome> {
    let set = executable.set.name();
    Ok(match (ending, state) {
        (Ending::Captured(captured), Some(path)) => Outcome::Captured {
            set,
            state: path.display().to_string(),
            build: output::build(captured.build()),
            bytes: std::fs::metadata(path)?.len(),
            threads: captured.threads().len(),
        },
        (Ending::Captured(_), None) => anyhow::bail!("the program left a state that was not asked for"),
        (Ending::Exited(status), _) => Outcome::Ended { set, status: *status },
        (Ending::Killed(signal), _) => Outcome::Killed { set, signal: *signal },
    })
}

/// The exit status that goes with it.
fn status(outcome: &Outcome) -> u8 {
    let status = match outcome {
        Outcome::Captured { .. } => EXIT_CAPTURED,
        Outcome::Ended { status, .. } => *status,
        Outcome::Killed { signal, .. } => KILLED + signal,
    };
    u8::try_from(status).unwrap_or(u8::MAX)
}

/// Tells how a run ended. A program that ended by itself has said what it has to say.
fn tell(outcome: &Outcome, program: &Path, json: bool) -> Result<u8> {
    if json {
        output::report(outcome)?;
    } else {
        match outcome {
            Outcome::Captured { set, state, .. } => output::note(&format!(
                "{} was captured on {set}; resume it with: godwit-state resume {state} --program {}",
                program.display(),
                program.display()
            )),
            Outcome::Killed { set, signal } => {
                output::note(&format!("{} was killed on {set} by signal {signal}", program.display()));
            }
            Outcome::Ended { .. } => {}
        }
    }
    Ok(status(outcome))
}
