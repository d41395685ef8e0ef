//! `godwit`, the user's command: reads the command line, asks the node's daemon, prints. What it shares with
//! `godwit-lab` (`crates/lab-cli`), which performs `godwit lab` and `godwit bench`, is public. Of the workspace it depends on
//! `godwit-api` and `godwit-pack` alone.
//!
//! ```text
//!   cli.rs          what can be typed: flags and verbs
//!   verbs/          one file per verb
//!   companion.rs    the programs that a verb executes: godwitd, godwit-lab
//!   habits.rs       what users of Podman and Docker type, and what to type instead
//!   registry.rs     images from registries
//!   terminal.rs     the user's terminal, for `exec --tty`
//!
//!   shared with godwit-lab:
//!   program.rs      runs a verb: reads the command line, starts the runtime, prints the error
//!   global.rs       the flags that every verb takes
//!   client.rs       which daemon, and the connection to it
//!   migration.rs    a migration: its flags, its request, its events, its outcome
//!   progress.rs     how its progress is shown
//!   interrupts.rs   Ctrl-C
//!   values.rs       sizes, mounts, ports, times: text from the user to the API's types
//!   output.rs       tables, JSON, sizes and times: the API's types to text for the user
//!   generate.rs     completions and man pages from a clap definition
//!   documented.rs   tests that the documents list every flag
//! ```

mod cli;
pub mod client;
mod companion;
pub mod documented;
pub mod generate;
pub mod global;
mod habits;
pub mod interrupts;
pub mod migration;
pub mod output;
pub mod program;
pub mod progress;
mod registry;
mod terminal;
pub mod values;
mod verbs;

use std::{env, ffi::OsString, path::Path, process::ExitCode};

use clap::CommandFactory as _;

/// The program `godwit`, from its command line to its exit code.
#[must_use]
pub fn godwit() -> ExitCode {
    let words: Vec<OsString> = env::args_os().skip(1).collect();
    // `godwit help lab` is a question about another program's verb: that program answers.
    if let [help, verb, ..] = &words[..]
        && help == "help"
        && let Some(verb) = companion::VERBS_OF_LAB.into_iter().find(|name| verb == name)
    {
        return program::run(async { companion::become_lab(verb, &words) }, 1);
    }
    match program::parse::<cli::Cli>(habits::instead) {
        Ok(cli) => {
            let code_of_failure = cli.verb.code_of_failure();
            program::run(cli.verb.run(&cli.global), code_of_failure)
        }
        Err(code) => code,
    }
}

/// Writes what an archive has to a path, as `godwit cp` does: for its fuzz target.
///
/// # Errors
/// The archive, or what is there.
pub fn unpack(archive: &[u8], to: &Path, contents: bool, keep_owners: bool) -> anyhow::Result<()> {
    verbs::cp::unpack::unpack(archive, to, contents, keep_owners)
}

/// The clap definition of `godwit`, in which the verbs of `godwit-lab` have no flags of their own.
#[must_use]
pub fn definition() -> clap::Command {
    cli::Cli::command()
}
