//! `godwit-state next`: what a process of a journey is between two legs. It reads the plan beside the state and becomes
//! the next executable; it is the program's process, with the program's descriptors, so it leaves all of them alone.

use std::convert::Infallible;
use std::ffi::CString;
use std::os::unix::ffi::OsStrExt as _;
use std::path::PathBuf;

use anyhow::{Context as _, Result};
use godwit_isa_state::StateFile;
use nix::sys::signal::{SigHandler, Signal, signal};

use crate::journey::Journey;
use crate::leg::capture_variables;
use crate::machine::Startable;
use crate::messages;

/// Become the next leg of a journey (the runtime executes this)
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// The state that was just written
    #[arg(value_name = "FILE")]
    pub(crate) file: PathBuf,
}

pub(crate) fn run(args: &Args) -> Result<Infallible> {
    let file = args.file.display();
    go_on(args).with_context(|| {
        format!(
            "the program cannot continue; its state is kept, and godwit-state resume continues from it: {file}"
        )
    })
}

fn go_on(args: &Args) -> Result<Infallible> {
    let mut journey = Journey::read(&args.file)?;
    journey.changes += 1;
    let executable = Startable::find(&journey.program, journey.set()?)?;
    let unsound = "the program left a state that is not sound, which is a defect of godwit";
    let state = StateFile::open(&args.file).context(unsound)?;
    executable.program.is_of(&state).context("the program was exchanged for another build while it ran")?;
    executable.program.accepts(&state).context(unsound)?;
    journey.write(&args.file)?;
    let Err(error) = become_leg(args, &journey, &executable);
    // It did not go anywhere.
    journey.changes -= 1;
    journey.write(&args.file)?;
    Err(error)
}

fn become_leg(args: &Args, journey: &Journey, executable: &Startable) -> Result<Infallible> {
    let own = std::env::current_exe().context("cannot tell where godwit-state is")?;
    let mut environment: Vec<CString> = Vec::new();
    for (name, value) in std::env::vars_os().filter(|(name, _)| !Startable::is_ours(name)) {
        environment.push(variable(name.as_bytes(), value.as_bytes())?);
    }
    let file = args.file.as_os_str();
    let mut settings = vec![
        ("GODWIT_STATE_RESUME", file.to_owned()),
        ("GODWIT_STATE_KEPT", "1".into()),
        ("GODWIT_STATE_NEXT", own.into_os_string()),
        (messages::VARIABLE, messages::beside(&args.file).into_os_string()),
    ];
    settings.extend(capture_variables(journey.request(), &args.file));
    for (name, value) in settings {
        environment.push(variable(name.as_bytes(), value.as_bytes())?);
    }

    let words = executable.words()?;
    let path = CString::new(words.path.as_os_str().as_bytes())?;
    let arguments =
        words.arguments.iter().map(|word| CString::new(word.as_bytes())).collect::<Result<Vec<_>, _>>()?;
    // The standard library ignores this one in its own programs, and an exec would hand that on. What the program asked
    // for is in the state.
    // SAFETY: no handler is installed, and nothing else here looks at the signal.
    unsafe { signal(Signal::SIGPIPE, SigHandler::SigDfl) }.context("cannot set SIGPIPE back")?;
    // Not by std::process::Command, which unblocks signals: those that come now wait for the program.
    nix::unistd::execve(&path, &arguments, &environment)
        .with_context(|| format!("cannot execute {}", words.path.display()))
}

fn variable(name: &[u8], value: &[u8]) -> Result<CString> {
    Ok(CString::new([name, b"=", value].concat())?)
}
