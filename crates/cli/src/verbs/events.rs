//! `godwit events`: what happened on a node.

use std::process::ExitCode;

use godwit_api::v1::{Event, EventsRequest};

use crate::{client::Connection, global::Global, output, values};

/// Show what happened on this node, oldest first
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// Continue with new events
    #[arg(short, long)]
    follow: bool,
    /// Only events since this time: 10m, 2h (ago), seconds since 1970, or 2026-01-31T12:00:00Z
    #[arg(long, value_name = "TIME", value_parser = values::moment)]
    since: Option<i64>,
}

pub(crate) async fn run(args: Args, global: &Global) -> anyhow::Result<ExitCode> {
    let mut connection = Connection::open(global).await?;
    let request = EventsRequest { follow: args.follow, since_ms: args.since.unwrap_or_default() };
    let answer = connection.node.events(request).await;
    let mut events = answer.map_err(|status| connection.explain(&status))?.into_inner();
    while let Some(event) = events.message().await.map_err(|status| connection.explain(&status))? {
        if global.json {
            output::json(&event)?;
        } else {
            output::line(&sentence(&event))?;
        }
    }
    Ok(ExitCode::SUCCESS)
}

/// `2026-01-31T12:00:00.000Z a service redis started: detail`.
fn sentence(event: &Event) -> String {
    let time = output::rfc3339(event.time_ms.saturating_mul(1_000_000), 3);
    let detail = if event.detail.is_empty() { String::new() } else { format!(": {}", event.detail) };
    format!("{time} {} {} {} {}{detail}", event.node, event.subject, event.name, event.action)
}
