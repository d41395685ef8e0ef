//! What can be typed: the global flags and the verbs.

use std::{path::PathBuf, process::ExitCode};

use clap::{Args, Parser, Subcommand};

use crate::verbs;

/// Runs containers on edge nodes, and moves them with their memory and open connections.
#[derive(Debug, Parser)]
#[command(
    name = "godwit",
    version,
    max_term_width = 100,
    subcommand_required = true,
    arg_required_else_help = true,
    after_long_help = "\
Exit codes:
  0    done
  1    not done; standard error says why in one sentence (also: a migration that was aborted)
  2    the command line was not understood
  3    migrate: the service was lost, pages that had stayed at its source being gone
  125  run and exec: godwit could not start the command
  130  ended by Ctrl-C
  exec ends with the exit code of the command it ran.

Examples:
  godwit run --name redis --ip 10.88.0.10 --image redis.tar -- redis-server --bind 0.0.0.0
  godwit migrate redis --to b
  godwit ps -a --json"
)]
pub(crate) struct Cli {
    #[command(flatten)]
    pub(crate) global: Global,
    #[command(subcommand)]
    pub(crate) verb: Verb,
}

/// Flags that every verb takes.
#[derive(Debug, Args)]
#[command(next_help_heading = "Global options")]
pub(crate) struct Global {
    /// Print JSON: one document a line
    #[arg(long, global = true)]
    pub(crate) json: bool,
    /// Unix socket of the daemon to ask, whatever --node says
    #[arg(long, global = true, value_name = "PATH")]
    pub(crate) socket: Option<PathBuf>,
    /// Ask the daemon of this node of the lab
    #[arg(long, global = true, value_name = "NODE", env = "GODWIT_NODE")]
    pub(crate) node: Option<String>,
    /// The lab that --node and the lab's verbs mean
    #[arg(long, global = true, value_name = "NAME", env = "GODWIT_LAB", default_value = "default")]
    pub(crate) lab: String,
}

/// The verbs, in the order in which the help shows them.
#[derive(Debug, Subcommand)]
pub(crate) enum Verb {
    Run(Box<verbs::run::Args>),
    Ps(verbs::ps::Args),
    Inspect(verbs::inspect::Args),
    Logs(verbs::logs::Args),
    Exec(verbs::exec::Args),
    Stop(verbs::stop::Args),
    Start(verbs::start::Args),
    Restart(verbs::restart::Args),
    Rm(verbs::rm::Args),
    Migrate(verbs::migrate::Args),
    Cancel(verbs::cancel::Args),
    Resolve(verbs::resolve::Args),
    Nodes(verbs::nodes::Args),
    Network(verbs::network::Args),
    Image(verbs::image::Args),
    Events(verbs::events::Args),
    Doctor(verbs::doctor::Args),
    Capture(verbs::capture::Args),
    Cluster(verbs::cluster::Args),
    Lab(verbs::lab::Args),
    Bench(verbs::bench::Args),
    Version(verbs::version::Args),
    Completions(verbs::completions::Args),
    Man(verbs::man::Args),
}

impl Verb {
    /// Exit code when godwit itself fails; Podman's for the verbs that pass a command's on.
    pub(crate) fn code_of_failure(&self) -> u8 {
        match self {
            Self::Run(_) | Self::Exec(_) => 125,
            _ => 1,
        }
    }

    pub(crate) async fn run(self, global: &Global) -> anyhow::Result<ExitCode> {
        match self {
            Self::Run(args) => verbs::run::run(*args, global).await,
            Self::Ps(args) => verbs::ps::run(args, global).await,
            Self::Inspect(args) => verbs::inspect::run(args, global).await,
            Self::Logs(args) => verbs::logs::run(args, global).await,
            Self::Exec(args) => verbs::exec::run(args, global).await,
            Self::Stop(args) => verbs::stop::run(args, global).await,
            Self::Start(args) => verbs::start::run(args, global).await,
            Self::Restart(args) => verbs::restart::run(args, global).await,
            Self::Rm(args) => verbs::rm::run(args, global).await,
            Self::Migrate(args) => verbs::migrate::run(args, global).await,
            Self::Cancel(args) => verbs::cancel::run(args, global).await,
            Self::Resolve(args) => verbs::resolve::run(args, global).await,
            Self::Nodes(args) => verbs::nodes::run(args, global).await,
            Self::Network(args) => verbs::network::run(args, global).await,
            Self::Image(args) => verbs::image::run(args, global).await,
            Self::Events(args) => verbs::events::run(args, global).await,
            Self::Doctor(args) => verbs::doctor::run(args, global).await,
            Self::Capture(args) => verbs::capture::run(args, global).await,
            Self::Cluster(args) => verbs::cluster::run(args, global).await,
            Self::Lab(args) => verbs::lab::run(args, global).await,
            Self::Bench(args) => verbs::bench::run(args, global).await,
            Self::Version(args) => verbs::version::run(args, global).await,
            Self::Completions(args) => verbs::completions::run(&args),
            Self::Man(args) => verbs::man::run(&args),
        }
    }
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory as _;

    use super::Cli;

    #[test]
    fn the_command_line_is_consistent() {
        Cli::command().debug_assert();
    }

    /// What is missing of a command, and of those below it, in the pages about it.
    fn undocumented(command: &clap::Command, name: &str, pages: &str) -> Vec<String> {
        let mut missing = Vec::new();
        if !pages.contains(name) {
            missing.push(name.to_owned());
        }
        for flag in command.get_arguments().filter(|flag| !flag.is_hide_set()) {
            let Some(long) = flag.get_long().filter(|long| !matches!(*long, "help" | "version")) else {
                continue;
            };
            let word = format!("--{long}");
            let named = |at: usize| {
                let next = pages[at + word.len()..].chars().next();
                next.is_none_or(|next| !next.is_ascii_alphanumeric() && next != '-')
            };
            if !pages.match_indices(&word).any(|(at, _)| named(at)) {
                missing.push(format!("{name} {word}"));
            }
        }
        for below in
            command.get_subcommands().filter(|below| below.get_name() != "help" && !below.is_hide_set())
        {
            missing.extend(undocumented(below, &format!("{name} {}", below.get_name()), pages));
        }
        missing
    }

    #[test]
    fn every_verb_and_flag_is_in_the_documentation() {
        let docs = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs");
        let page = |file: &str| std::fs::read_to_string(docs.join(file)).unwrap_or_default();
        let [commands, lab] = ["commands.md", "lab.md"].map(page);
        let mut missing = Vec::new();
        for verb in Cli::command().get_subcommands() {
            match verb.get_name() {
                // Measurements are for those who work on godwit; docs/measuring.md tells what they show.
                "help" | "bench" => {}
                name @ "lab" => missing.extend(undocumented(verb, name, &format!("{commands}{lab}"))),
                name => missing.extend(undocumented(verb, name, &commands)),
            }
        }
        assert!(missing.is_empty(), "not in docs/: {missing:#?}");
    }
}
