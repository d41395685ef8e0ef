//! `godwit inspect`: everything a node knows of one service.

use std::process::ExitCode;

use godwit_api::v1::ServiceRequest;

use crate::{cli::Global, client::Connection, output};

/// Show everything this node knows of a service, as JSON
///
/// Times are milliseconds since 1970, sizes are bytes. With --json it is all on one line.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// The service
    name: String,
}

pub(crate) async fn run(args: Args, global: &Global) -> anyhow::Result<ExitCode> {
    let mut connection = Connection::open(global).await?;
    let answer = connection.node.inspect(ServiceRequest { name: args.name }).await;
    let service = answer.map_err(|status| connection.explain(&status))?.into_inner();
    let value = output::service_json(&service);
    if global.json {
        output::json(&value)?;
    } else {
        output::line(&format!("{value:#}"))?;
    }
    Ok(ExitCode::SUCCESS)
}
