//! `godwit bench`: measure a migration, beside the same job done with stock programs.
//!
//! - [`moves`]: moves of a service under load, by godwit and by the baselines, in turn.
//! - [`stock`] and [`stock_lazy`]: the baselines.
//! - [`parts`]: what the link carries, how long a fault takes, what a look at the memory costs.
//! - [`returns`]: what crosses when a service comes back.
//! - [`streams`]: what the mover's own work costs, without TLS and with it.
//! - [`touch`]: the service that those move.
//! - [`cutover`]: what clients of one connection and of many notice when frames are held, or dropped.
//! - [`crossing`]: what it adds to a move that the service changes its executables.
//! - [`ports`]: what the way through a published port costs.
//! - [`probes`]: what those of [`cutover`] try once in the pause.
//! - [`echo`]: the service of these two, and [`service`] which runs it.
//! - [`plot`]: pictures and a table of what the others measured.

mod crossing;
mod cutover;
mod deafness;
mod echo;
mod hold;
mod moves;
mod parts;
mod plot;
mod ports;
mod probes;
mod results;
mod returns;
mod ring;
mod service;
mod stock;
mod stock_lazy;
mod streams;
mod touch;

use std::process::ExitCode;

use clap::Subcommand;
use godwit_cli::{
    global::Global,
    interrupts::{INTERRUPTED, Interrupts},
    output,
};
use godwit_lab::{Lab, LabConfig, Link, NetworkBackend};

use crate::{
    stage::{in_lab, remove_lab},
    trial::{DESTINATION, SOURCE, blocking},
};

/// Measure migrations in a lab, and the same with unpatched runc and CRIU
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// Name of the benchmark's lab; one that a benchmark left behind under it is taken down first
    #[arg(long, value_name = "NAME", default_value = "bench", global = true)]
    name: String,
    #[command(subcommand)]
    verb: BenchVerb,
}

/// The lab that each run has for itself.
#[derive(Debug, Clone, Default)]
pub(crate) struct Bed {
    pub(crate) name: String,
    pub(crate) link: Option<Link>,
    pub(crate) network_backend: NetworkBackend,
    /// More arguments of its daemons.
    pub(crate) daemon_arguments: Vec<String>,
    /// More of their environment.
    pub(crate) daemon_environment: Vec<(String, String)>,
}

#[derive(Debug, Subcommand)]
enum BenchVerb {
    /// Move a service under load, and report what it and its client noticed
    ///
    /// With --json each move is a line: the report's fields, and series, run, memory, rate,
    /// downtime_ms, lost_ops and reconnects. Modes and baselines take turns, run by run. What fails
    /// is a line with its reason. Ends with 1 if a move of godwit failed or lost an answer.
    Migrate(moves::Args),
    /// Measure how much of a link a move uses, and how much iperf3 uses
    Wire(parts::LinkArgs),
    /// Measure the cost of sending and storing pages, without TLS and with it
    Streams(streams::Args),
    /// Measure how long faults on residual pages take, and how fast the other pages cross
    Faults(parts::FaultArgs),
    /// Measure what crosses when a service comes back that has written a hundredth of its memory
    Return(parts::LinkArgs),
    /// Measure the CPU time of finding what a process wrote
    Scan(parts::ScanArgs),
    /// Measure what clients notice of a pause whose frames are held, beside one whose frames are dropped
    ///
    /// With --json each move is a line: the report's fields, and series (idle, busy, small, doubt or many), cutover,
    /// pause_ms, connections, run, downtime_ms, beyond_ms (what of it was after the service went on), timeouts, retransmissions, loss_probes and lost_ops; and what was tried
    /// once in the pause: new_ms (a connection that did not exist), outgoing_ms (one that the service had
    /// opened) and datagram_ms, each until the answer. Ends with 1 if a move with held frames failed or lost
    /// an answer.
    Cutover(cutover::Args),
    /// Measure what it adds to a move that the service goes on under the executables of the destination's image
    ///
    /// godwit-cc builds the service. With --json each move is a line: the report's fields, and series (plain or crossing), threads,
    /// memory, run and longest_wait_ms, the longest that its client waited for an answer. Fails where an answer was lost or wrong.
    Crossing(crossing::Args),
    /// Measure what the way through a published port costs, here and at another node
    ///
    /// With --json each is a line: series (ports-address, ports-here or ports-detour), run, round_trip_ms
    /// (median of 500) and stream_mb_s, the rate of one stream that is given back.
    Ports(ports::Args),
    /// Hold memory and touch it: the service of wire, faults, return and scan
    #[command(hide = true)]
    Touch(touch::Args),
    /// Give back what comes over many connections: the service of cutover and ports
    #[command(hide = true)]
    Echo(echo::Args),
    /// Draw what was measured: SVG pictures and a table in Markdown
    Plot(plot::Args),
}

pub(crate) async fn run(args: Args, global: &Global) -> anyhow::Result<ExitCode> {
    // No lab, and no signals but the usual: they run inside a container.
    match &args.verb {
        BenchVerb::Touch(args) => return touch::run(args),
        BenchVerb::Echo(args) => return echo::run(args),
        _ => {}
    }
    let mut interrupts = Interrupts::new()?;
    let name = args.name;
    let work = async {
        match &args.verb {
            BenchVerb::Migrate(args) => moves::measure(args, &name, global).await,
            BenchVerb::Wire(args) => parts::wire(args, &name, global).await,
            BenchVerb::Streams(args) => streams::measure(args, &name, global).await,
            BenchVerb::Faults(args) => parts::faults(args, &name, global).await,
            BenchVerb::Return(args) => returns::measure(args, &name, global).await,
            BenchVerb::Scan(args) => parts::scan(args, global),
            BenchVerb::Cutover(args) => cutover::measure(args, &name, global).await,
            BenchVerb::Crossing(args) => crossing::measure(args, &name, global).await,
            BenchVerb::Ports(args) => ports::measure(args, &name, global).await,
            BenchVerb::Touch(_) | BenchVerb::Echo(_) => unreachable!("they ran above"),
            BenchVerb::Plot(args) => plot::run(args),
        }
    };
    let outcome = tokio::select! {
        outcome = work => outcome.map(Some),
        () = interrupts.next() => Ok(None),
    };
    // What a run that was interrupted left.
    blocking(move || remove_lab(&name)).await?;
    Ok(outcome?.unwrap_or_else(|| {
        output::note("Error: ended by Ctrl-C before all runs were done");
        ExitCode::from(INTERRUPTED)
    }))
}

impl Bed {
    /// A lab of its own for each run: no run sees what another left behind.
    pub(crate) async fn lab<T>(
        &self,
        daemons: bool,
        work: impl AsyncFnOnce(&Lab) -> anyhow::Result<T>,
    ) -> anyhow::Result<T> {
        let mut config = LabConfig::new(self.name.clone(), [SOURCE, DESTINATION]);
        (config.link, config.daemons) = (self.link, daemons);
        config.network_backend = self.network_backend;
        config.programs.serve_arguments = self.daemon_arguments.clone();
        config.programs.serve_environment.extend(self.daemon_environment.clone());
        in_lab(config, false, work).await
    }
}
