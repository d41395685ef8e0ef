//! `godwit-state`: runs a program, captures it into a state file, and goes on from there on any instruction set.
//!
//! ```text
//!   cli.rs      what can be typed
//!   verbs/      one file per verb
//!   journey.rs  one process through many sets, and its plan
//!   leg.rs      one process of a program, from its start to its end or its capture
//!   messages.rs why a program could not go on, although its standard error is its own
//!   machine.rs  how an executable of a set is started on this machine
//!   when.rs     when a program is to be captured
//!   values.rs   times, signals, sets: text from the user to types
//!   output.rs   what is said, as sentences, tables and JSON
//! ```

mod cli;
mod journey;
mod leg;
mod machine;
mod messages;
mod output;
mod values;
mod verbs;
mod when;

use std::io;
use std::process::ExitCode;

use clap::{CommandFactory as _, Parser as _};
use godwit_isa_state::EXIT_FAILED;

use crate::cli::{Cli, Verb};

fn main() -> ExitCode {
    let cli = Cli::parse();
    // This one is the program's process, in which nothing may be left open.
    if let Verb::Next(args) = &cli.verb {
        let Err(error) = verbs::next::run(args);
        messages::add(&messages::beside(&args.file), &format!("Error: {error:#}"));
        return exit_code(EXIT_FAILED);
    }
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    let outcome = match (runtime, &cli.verb) {
        (Err(error), _) => Err(error.into()),
        (Ok(runtime), Verb::Run(args)) => runtime.block_on(verbs::run::run(args, Cli::command(), cli.json)),
        (Ok(runtime), Verb::Resume(args)) => runtime.block_on(verbs::resume::run(args, cli.json)),
        (Ok(runtime), Verb::Hop(args)) => runtime.block_on(verbs::hop::run(args, cli.json)),
        (Ok(_), Verb::Inspect(args)) => verbs::inspect::run(args, cli.json),
        (Ok(_), Verb::Man(args)) => verbs::man::run(args, Cli::command()),
        (Ok(_), Verb::Next(args)) => verbs::next::run(args).map(|never| match never {}),
    };
    match outcome {
        Ok(status) => ExitCode::from(status),
        // Whoever read our output has gone, and has all it wants.
        Err(error) if is_broken_pipe(&error) => ExitCode::SUCCESS,
        Err(error) => {
            output::note(&format!("Error: {error:#}"));
            exit_code(EXIT_FAILED)
        }
    }
}

fn is_broken_pipe(error: &anyhow::Error) -> bool {
    let kinds = error.chain().filter_map(|cause| cause.downcast_ref::<io::Error>()).map(io::Error::kind);
    kinds.into_iter().any(|kind| kind == io::ErrorKind::BrokenPipe)
}

/// An exit status has eight bits.
fn exit_code(status: i32) -> ExitCode {
    ExitCode::from(u8::try_from(status).unwrap_or(u8::MAX))
}
