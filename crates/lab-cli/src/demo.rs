//! `godwit lab demo`: the whole of godwit in a minute, in a lab of its own that is gone afterwards.
//!
//! ```text
//!   lab up ─▶ Redis on a, filled ─▶ client busy ─▶ migrate to b ─▶ client goes on ─▶ lab down
//!                                   │◀──── one connection, a request each millisecond ────▶│
//! ```

use std::process::ExitCode;

use anyhow::bail;
use godwit_cli::{
    global::Global,
    interrupts::{INTERRUPTED, Interrupts},
    migration::{How, Mode},
    output::{self, Table},
    values,
};
use godwit_lab::{LabConfig, Link};

use crate::{
    crossing, follow,
    stage::in_lab,
    trial::{self, DESTINATION, Job, SOURCE, Seen},
};

#[derive(Debug, clap::Args)]
#[command(args_conflicts_with_subcommands = true)]
pub(crate) struct Args {
    #[command(subcommand)]
    other: Option<Other>,
    /// Name of the demo's lab; one that a demo left behind under it is taken down first
    #[arg(long, value_name = "NAME", default_value = "demo")]
    name: String,
    /// How much data Redis holds
    #[arg(long, value_name = "SIZE", default_value = "200MiB", value_parser = values::size)]
    memory: u64,
    /// Rate and one-way delay of each host's link: 1gbit,1ms [default: unshaped]
    #[arg(long, value_name = "RATE[,DELAY]")]
    link: Option<Link>,
    /// Leave the lab up afterwards
    #[arg(long)]
    keep: bool,
}

#[derive(Debug, clap::Subcommand)]
enum Other {
    /// Have a Redis follow its client, beside one that stays and one that moves by a threshold
    Follow(follow::Args),
    /// Have a Redis change its instruction set, and change it back, under its client
    Crossing(crossing::Args),
}

/// The client's requests a second.
const RATE: u32 = 1000;

pub(crate) async fn run(args: Args, global: &Global) -> anyhow::Result<ExitCode> {
    let Args { name, memory, link, keep, other } = args;
    match other {
        Some(Other::Follow(args)) => return follow::run(args, global).await,
        Some(Other::Crossing(args)) => return crossing::run(args, global).await,
        None => {}
    }
    let mut interrupts = Interrupts::new()?;
    let say = |text: &str| if global.json { Ok(()) } else { output::line(&format!("==> {text}")) };

    say("bringing up a lab: nodes a and b, and a client host")?;
    let mut config = LabConfig::new(name, [SOURCE, DESTINATION]);
    config.link = link;
    let job =
        Job { memory, rate: RATE, mode: Mode::default(), how: How::default(), back: false, busy: false };
    let outcome = in_lab(config, keep, async |lab| {
        let outcome = tokio::select! {
            outcome = trial::with_godwit(lab, &job, global, say) => outcome.map(|seen| seen.into_iter().next()),
            () = interrupts.next() => Ok(None),
        };
        if let Ok(Some(seen)) = &outcome {
            if global.json {
                output::json(&seen.json("godwit")?)?;
            } else {
                table(seen).print()?;
            }
        }
        match keep {
            true => say(&format!("the lab stays up: godwit lab down {}", lab.name()))?,
            false => say("taking the lab down")?,
        }
        outcome
    });
    let Some(seen) = outcome.await? else {
        output::note("Error: ended by Ctrl-C before the demo was over");
        return Ok(ExitCode::from(INTERRUPTED));
    };
    match seen.verdict() {
        Ok(()) => Ok(ExitCode::SUCCESS),
        Err(reason) => bail!(reason),
    }
}

fn table(Seen { report, client, .. }: &Seen) -> Table {
    let mut table = Table::plain();
    let mut row = |name: &str, value: String| table.row([format!("    {name}"), value]);
    row("outcome", format!("{} from {} to {}", report.outcome, report.source, report.destination));
    row("mode, chosen by auto", report.mode.clone());
    row("rounds while it ran", report.rounds.to_string());
    row("frozen time", output::millis(report.frozen_ms));
    row("downtime as the client saw it", output::millis(client.downtime_ms));
    row("total time", output::millis(report.total_ms));
    row("memory of the service", output::bytes(report.memory_bytes));
    row("bytes on the wire", output::bytes(report.wire_bytes));
    row("requests sent", client.sent.to_string());
    row("lost answers", client.lost_ops.to_string());
    row("wrong answers", client.wrong.to_string());
    row("reconnects", client.reconnects.to_string());
    table
}
