//! `godwit place`: the node on which a service is best for its clients, why, and the move to it; `words.rs` says it.

pub(super) mod words;

use std::process::ExitCode;
use std::time::Duration;

use clap::ValueEnum;
use godwit_api::v1::{MigrateRequest, PlaceRequest};

use super::migrate::carry_out;
use crate::client::Connection;
use crate::global::Global;
use crate::migration::{How, Mode};
use crate::output;
use crate::values;

/// Other nodes that are tried, should the best one refuse.
const OTHERS: usize = 2;

/// Move a service to the node on which it is best for its clients, if that pays
///
/// The clients are those that have a connection to the service and have sent something in the last 10 s. Their latency is
/// what the service's TCP connections show; what it would be on another node is told by ICMP echoes from both nodes. A
/// client loses when its latency is above the limit: all at twice of it. The service moves when its clients lose less
/// elsewhere, by at least twice of what the move costs them. The service runs on meanwhile; what it writes is measured for a
/// second, and the link to each node for a part of one. The exit code is 1 when it cannot move.
#[derive(Debug, clap::Args)]
#[command(after_long_help = "\
Examples:
  godwit place web --explain --dry-run
  godwit place web --latency 10ms --stay 10m --allow postcopy")]
pub(crate) struct Args {
    /// The service
    name: String,
    /// Say what the decision rests on
    #[arg(long)]
    explain: bool,
    /// Do not move it
    #[arg(long)]
    dry_run: bool,
    /// Consider this node alone
    #[arg(long, value_name = "NODE")]
    to: Option<String>,
    /// The longest round trip with which a client is content, such as 20ms or 500us
    #[arg(long, value_name = "TIME", default_value = "20ms", value_parser = values::latency)]
    latency: Duration,
    /// How long the clients are expected to stay where they are, such as 60s or 15m
    #[arg(long, value_name = "TIME", default_value = "60s", value_parser = values::some_time)]
    stay: Duration,
    #[command(flatten)]
    how: How,
}

pub(crate) async fn run(args: Args, global: &Global) -> anyhow::Result<ExitCode> {
    let mut connection = Connection::open(global).await?;
    let request = args.how.request(Mode::Auto, &args.name, args.to.as_deref().unwrap_or_default());
    let whole = |number: u128| u64::try_from(number).unwrap_or(u64::MAX);
    let asking = connection.node.place(PlaceRequest {
        r#move: Some(request.clone()),
        latency_us: whole(args.latency.as_micros()),
        stay_ms: whole(args.stay.as_millis()),
    });
    let answer = asking.await;
    let answer = answer.map_err(|status| connection.explain(&status))?.into_inner();
    if global.json {
        output::json(&answer)?;
    } else {
        words::print(&answer, args.explain)?;
    }
    if !(answer.objections.is_empty() && answer.obstacles.is_empty()) {
        return Ok(ExitCode::FAILURE);
    }
    if answer.to.is_empty() || args.dry_run {
        return Ok(ExitCode::SUCCESS);
    }
    let mode = Mode::from_str(&answer.mode, false).unwrap_or_default();
    let mut ended = None;
    for to in [&answer.to].into_iter().chain(answer.then.iter().take(OTHERS)) {
        let request = MigrateRequest { to: to.clone(), mode: mode.as_str().to_owned(), ..request.clone() };
        let last = carry_out(&connection, request, global).await?;
        let is_refused = last.is_refused;
        ended = Some(last.code);
        if !is_refused {
            break;
        }
    }
    Ok(ended.unwrap_or(ExitCode::FAILURE))
}
