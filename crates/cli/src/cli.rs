//! What can be typed: the global flags and the verbs.

use std::process::ExitCode;

use clap::{CommandFactory as _, Parser, Subcommand};

use crate::{global::Global, verbs};

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
  2    the command line was not understood; check: it can move, and there are warnings
  3    migrate: the service was lost, pages that had stayed at its source being gone
  125  run and exec: godwit could not start the command
  130  ended by Ctrl-C
  exec ends with the exit code of the command it ran.

Examples:
  godwit run --name redis --ip 10.88.0.10 redis:7
  godwit migrate redis --to b
  godwit ps -a --json"
)]
pub(crate) struct Cli {
    #[command(flatten)]
    pub(crate) global: Global,
    #[command(subcommand)]
    pub(crate) verb: Verb,
}

/// The verbs, in the order in which the help shows them.
#[derive(Debug, Subcommand)]
pub(crate) enum Verb {
    Run(Box<verbs::run::Args>),
    Adopt(verbs::adopt::Args),
    Ps(verbs::ps::Args),
    Inspect(verbs::inspect::Args),
    Logs(verbs::logs::Args),
    Exec(verbs::exec::Args),
    Cp(verbs::cp::Args),
    Checkpoint(verbs::checkpoint::Args),
    Restore(verbs::restore::Args),
    Stats(verbs::stats::Args),
    Wait(verbs::wait::Args),
    Kill(verbs::kill::Args),
    Update(verbs::update::Args),
    Stop(verbs::stop::Args),
    Start(verbs::start::Args),
    Restart(verbs::restart::Args),
    Rm(verbs::rm::Args),
    Check(verbs::check::Args),
    Place(verbs::place::Args),
    Policy(verbs::policy::Args),
    Prepare(verbs::prepare::Args),
    Migrate(verbs::migrate::Args),
    Cancel(verbs::cancel::Args),
    Resolve(verbs::resolve::Args),
    Nodes(verbs::nodes::Args),
    Node(verbs::node::Args),
    Network(verbs::network::Args),
    Pull(verbs::pull::Args),
    Image(verbs::image::Args),
    /// List the images of this node; the same as `image ls`
    Images(verbs::image::Images),
    Volume(verbs::volume::Args),
    Events(verbs::events::Args),
    Doctor(verbs::doctor::Args),
    Capture(verbs::capture::Args),
    Cluster(verbs::cluster::Args),
    /// Make nodes and a client host on this machine to try things with
    Lab(verbs::lab::Args),
    /// Measure migrations in a lab, and the same with unpatched runc and CRIU
    Bench(verbs::lab::Args),
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
            Self::Adopt(args) => verbs::adopt::run(args, global).await,
            Self::Run(args) => verbs::run::run(*args, global, &Cli::command()).await,
            Self::Ps(args) => verbs::ps::run(args, global).await,
            Self::Inspect(args) => verbs::inspect::run(args, global).await,
            Self::Logs(args) => verbs::logs::run(args, global).await,
            Self::Exec(args) => verbs::exec::run(args, global).await,
            Self::Cp(args) => verbs::cp::run(args, global).await,
            Self::Checkpoint(args) => verbs::checkpoint::run(args, global).await,
            Self::Restore(args) => verbs::restore::run(args, global).await,
            Self::Stats(args) => verbs::stats::run(args, global).await,
            Self::Wait(args) => verbs::wait::run(args, global).await,
            Self::Kill(args) => verbs::kill::run(args, global).await,
            Self::Update(args) => verbs::update::run(args, global).await,
            Self::Stop(args) => verbs::stop::run(args, global).await,
            Self::Start(args) => verbs::start::run(args, global).await,
            Self::Restart(args) => verbs::restart::run(args, global).await,
            Self::Rm(args) => verbs::rm::run(args, global).await,
            Self::Check(args) => verbs::check::run(args, global).await,
            Self::Place(args) => verbs::place::run(args, global).await,
            Self::Policy(args) => verbs::policy::run(args, global).await,
            Self::Prepare(args) => verbs::prepare::run(args, global).await,
            Self::Migrate(args) => verbs::migrate::run(args, global).await,
            Self::Cancel(args) => verbs::cancel::run(args, global).await,
            Self::Resolve(args) => verbs::resolve::run(args, global).await,
            Self::Nodes(args) => verbs::nodes::run(args, global).await,
            Self::Node(args) => verbs::node::run(args, global).await,
            Self::Network(args) => verbs::network::run(args, global).await,
            Self::Pull(args) => verbs::pull::run(args, global).await,
            Self::Image(args) => verbs::image::run(args, global).await,
            Self::Images(args) => verbs::image::images(args, global).await,
            Self::Volume(args) => verbs::volume::run(args, global).await,
            Self::Events(args) => verbs::events::run(args, global).await,
            Self::Doctor(args) => verbs::doctor::run(args, global).await,
            Self::Capture(args) => verbs::capture::run(args, global).await,
            Self::Cluster(args) => verbs::cluster::run(args, global).await,
            Self::Lab(args) => verbs::lab::run("lab", args, global),
            Self::Bench(args) => verbs::lab::run("bench", args, global),
            Self::Version(args) => verbs::version::run(args, global).await,
            Self::Completions(args) => verbs::completions::run(&args, Cli::command()),
            Self::Man(args) => verbs::man::run(&args, Cli::command()),
        }
    }
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory as _;

    use super::Cli;
    use crate::documented;

    #[test]
    fn the_command_line_is_consistent() {
        Cli::command().debug_assert();
    }

    /// What root runs on every node shall not link the lab, the benchmarks or the daemon's parts.
    #[test]
    fn of_the_workspace_it_needs_the_api_and_what_packs_images() {
        let manifest = include_str!("../Cargo.toml");
        let (_, needed) = manifest.split_once("[dependencies]\n").expect("there are some");
        let needed = needed.lines().take_while(|line| !line.starts_with('['));
        let ours: Vec<_> = needed.filter(|line| line.starts_with("godwit")).collect();
        assert_eq!(ours, ["godwit-api.workspace = true", "godwit-pack.workspace = true"]);
    }

    #[test]
    fn every_verb_and_flag_is_in_the_documentation() {
        let commands = documented::page("commands.md");
        let mut missing = Vec::new();
        for verb in Cli::command().get_subcommands().filter(|verb| verb.get_name() != "help") {
            missing.extend(documented::missing(verb, verb.get_name(), &commands));
        }
        assert!(missing.is_empty(), "not in docs/: {missing:#?}");
    }
}
