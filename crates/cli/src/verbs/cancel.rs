//! `godwit cancel`: take a migration back before it commits.

use std::process::ExitCode;

use godwit_api::v1::ServiceRequest;

use crate::{client::Connection, global::Global, output};

/// Cancel the migration of a service that has not committed yet
///
/// Returns when the service runs at its source again.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// The service
    name: String,
}

pub(crate) async fn run(args: Args, global: &Global) -> anyhow::Result<ExitCode> {
    let mut connection = Connection::open(global).await?;
    let answer = connection.node.cancel(ServiceRequest { name: args.name.clone() }).await;
    let answer = answer.map_err(|status| connection.explain(&status))?.into_inner();
    if global.json {
        output::json(&answer)?;
    } else if answer.cancelled {
        output::line(&format!(
            "the migration of {} was cancelled; the service runs where it was",
            args.name
        ))?;
    } else {
        anyhow::bail!("nothing was cancelled for {}: {}", args.name, answer.reason);
    }
    Ok(if answer.cancelled { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}
