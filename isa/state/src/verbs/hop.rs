//! `godwit-state hop`: runs a program that changes its set again and again until it ends, in one process.

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context as _, Result};
use godwit_isa_state::{EXIT_FAILED, Set};

use crate::journey::{self, Length};
use crate::leg::{Ending, Leg};
use crate::machine::Startable;
use crate::output::{self, Journey, Outcome};
use crate::{messages, values, verbs};

/// Run a program to its end, changing the instruction set again and again
///
/// It stays one process, with all that it has open.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// The program: PROG.x86_64 and PROG.aarch64 are started
    #[arg(value_name = "PROG")]
    program: PathBuf,
    #[command(flatten)]
    every: Every,
    /// Draw the time between two changes at random up to that, from this seed
    #[arg(long, value_name = "N")]
    seed: Option<u64>,
    /// The sets, in turn
    #[arg(long, value_name = "SET,…", value_delimiter = ',', value_parser = values::set,
          default_values = ["x86_64", "aarch64"])]
    sets: Vec<Set>,
    /// Say nothing when it has ended
    #[arg(long, conflicts_with = "json")]
    quiet: bool,
    /// The program's arguments
    #[arg(last = true, value_name = "ARGS")]
    arguments: Vec<OsString>,
}

#[derive(Debug, clap::Args)]
#[group(multiple = false, required = true)]
struct Every {
    /// Polls between two changes
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    every_polls: Option<u64>,
    /// Time between two changes: 250us, 10ms, 2s, 5m
    #[arg(long, value_name = "TIME", value_parser = crate::values::time)]
    every: Option<Duration>,
}

pub(crate) async fn run(args: &Args, json: bool) -> Result<u8> {
    of_one_build(&args.program, &args.sets)?;
    let length = match (args.every.every_polls, args.every.every) {
        (Some(polls), _) => Length::Polls(polls),
        (None, Some(time)) => Length::Microseconds(u64::try_from(time.as_micros())?),
        (None, None) => anyhow::bail!("say with --every-polls or --every how often to change the set"),
    };
    let program = std::path::absolute(&args.program).context("cannot tell the current directory")?;
    let directory = tempfile::tempdir().context("cannot make a directory for the states")?;
    let mut state = directory.path().join("state");
    let plan = journey::Journey::new(program, &args.sets, length, args.seed);
    plan.write(&state)?;

    let own = std::env::current_exe().context("cannot tell where godwit-state is")?;
    let executable = Startable::find(&args.program, plan.set()?)?;
    let messages = messages::beside(&state);
    std::fs::write(&messages, "").with_context(|| format!("cannot write {}", messages.display()))?;
    let leg = Leg {
        executable: &executable,
        arguments: &args.arguments,
        resume: None,
        capture: Some((plan.request(), &state)),
        next: Some(&own),
        messages: Some(&messages),
    };
    let ending = leg.run().await?;
    if matches!(ending, Ending::Exited(EXIT_FAILED)) && state.exists() {
        // It could not go on, or ended with that status by itself; this is all that is left of it.
        let kept = directory.keep().join("state");
        output::note(&format!(
            "the last state of {} is kept in {}; if it is not needed, remove its directory",
            args.program.display(),
            kept.display()
        ));
        state = kept;
    }
    // It has ended as another one than it began.
    let plan = journey::Journey::read(&state)?;
    let last = Startable::find(&args.program, plan.set()?)?;
    tell(Journey { outcome: verbs::outcome(&ending, &last, None)?, changes: plan.changes }, args, json)
}

/// A state of one would be refused by the other when the program is on its way.
fn of_one_build(program: &Path, sets: &[Set]) -> Result<()> {
    let found: Vec<Startable> =
        sets.iter().map(|set| Startable::find(program, *set)).collect::<Result<_, _>>()?;
    for pair in found.windows(2) {
        let (a, b) = (&pair[0].program, &pair[1].program);
        anyhow::ensure!(
            a.build() == b.build(),
            "{} is of build {} and {} of build {}, so that no state goes from one to the other; link the program again",
            a.path().display(),
            a.build().short(),
            b.path().display(),
            b.build().short()
        );
    }
    Ok(())
}

fn tell(journey: Journey, args: &Args, json: bool) -> Result<u8> {
    let program = args.program.display();
    if json {
        output::report(&journey)?;
        return Ok(verbs::status(&journey.outcome));
    }
    if args.quiet {
        return Ok(verbs::status(&journey.outcome));
    }
    let (changes, sets) = (journey.changes, output::sets(&args.sets));
    match &journey.outcome {
        Outcome::Killed { set, signal } => {
            output::note(&format!(
                "{program} was killed on {set} by signal {signal} after {changes} changes"
            ));
        }
        Outcome::Ended { set, status } => {
            output::note(&format!(
                "{program} ended on {set} with status {status} after {changes} changes of {sets}"
            ));
        }
        Outcome::Captured { .. } => {}
    }
    Ok(verbs::status(&journey.outcome))
}
