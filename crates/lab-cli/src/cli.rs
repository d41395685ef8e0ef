//! What can be typed. Help and errors name `godwit`, by which users start this program.

use std::{path::PathBuf, process::ExitCode};

use clap::{CommandFactory as _, Parser, Subcommand};
use clap_complete::Shell;
use godwit_cli::{generate, global::Global, values};

use crate::{bench, lab};

/// Performs `godwit lab` and `godwit bench`: labs, the demo and the benchmarks.
#[derive(Debug, Parser)]
#[command(
    name = "godwit-lab",
    bin_name = "godwit",
    version,
    max_term_width = 100,
    subcommand_required = true,
    arg_required_else_help = true,
    override_usage = "godwit lab [OPTIONS] <COMMAND>\n       godwit bench [OPTIONS] <COMMAND>"
)]
pub(crate) struct Cli {
    #[command(flatten)]
    pub(crate) global: Global,
    #[command(subcommand)]
    pub(crate) verb: Verb,
}

#[derive(Debug, Subcommand)]
pub(crate) enum Verb {
    Lab(lab::Args),
    Bench(bench::Args),
    /// Print the completion script of a shell, for the verbs of godwit and of this program
    #[command(hide = true)]
    Completions {
        /// The shell
        shell: Shell,
    },
    /// Write the man pages of the verbs of godwit and of this program into a directory
    #[command(hide = true)]
    Man {
        /// The directory, made if it is missing
        #[arg(value_parser = values::absolute)]
        dir: PathBuf,
    },
}

impl Verb {
    pub(crate) async fn run(self, global: &Global) -> anyhow::Result<ExitCode> {
        match self {
            Self::Lab(args) => return lab::run(args, global).await,
            Self::Bench(args) => return bench::run(args, global).await,
            Self::Completions { shell } => generate::completions(whole(), shell)?,
            Self::Man { dir } => generate::man(whole(), &dir)?,
        }
        Ok(ExitCode::SUCCESS)
    }
}

/// The clap definition of `godwit` with the flags of the verbs that this program performs.
fn whole() -> clap::Command {
    let own = Cli::command();
    // Each verb has brought its place among those of its own program.
    let mut place = 0;
    godwit_cli::definition().mut_subcommands(|verb| {
        let performed = own.find_subcommand(verb.get_name()).filter(|performed| !performed.is_hide_set());
        place += 1;
        performed.cloned().unwrap_or(verb).display_order(place)
    })
}

#[cfg(test)]
mod tests {
    use godwit_cli::documented;

    use super::{Cli, whole};
    use clap::CommandFactory as _;

    #[test]
    fn the_command_line_is_consistent() {
        Cli::command().debug_assert();
        whole().debug_assert();
    }

    #[test]
    fn godwit_lists_each_verb_with_the_same_line() {
        let (godwit, own) = (godwit_cli::definition(), Cli::command());
        for verb in own.get_subcommands().filter(|verb| !verb.is_hide_set()) {
            let line = godwit.find_subcommand(verb.get_name()).and_then(clap::Command::get_about);
            assert_eq!(line.map(ToString::to_string), verb.get_about().map(ToString::to_string));
        }
    }

    /// Measurements are for those who work on godwit; docs/measuring.md tells what they show.
    #[test]
    fn every_verb_and_flag_of_labs_is_in_the_documentation() {
        let pages = ["commands.md", "lab.md"].map(documented::page).concat();
        let own = Cli::command();
        let lab = own.find_subcommand("lab").expect("a verb");
        let missing = documented::missing(lab, "lab", &pages);
        assert!(missing.is_empty(), "not in docs/: {missing:#?}");
    }
}
