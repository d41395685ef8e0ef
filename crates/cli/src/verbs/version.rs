//! `godwit version`: the command's version and, if it answers, the daemon's.

use std::process::ExitCode;

use godwit_api::v1::NodesRequest;

use crate::{client::Connection, global::Global, output};

/// Show the version of godwit and of the daemon, if one answers
#[derive(Debug, clap::Args)]
pub(crate) struct Args {}

pub(crate) async fn run(Args {}: Args, global: &Global) -> anyhow::Result<ExitCode> {
    let daemon = daemon_version(global).await;
    if global.json {
        output::json(&serde_json::json!({
            "godwit": env!("CARGO_PKG_VERSION"),
            "protocol": godwit_api::PROTOCOL_VERSION,
            "godwitd": daemon,
        }))?;
    } else {
        output::line(&format!(
            "godwit {} (protocol {})",
            env!("CARGO_PKG_VERSION"),
            godwit_api::PROTOCOL_VERSION
        ))?;
        output::line(&format!("godwitd {}", daemon.as_deref().unwrap_or("does not answer")))?;
    }
    Ok(ExitCode::SUCCESS)
}

/// None when no daemon answers, which is no failure here.
async fn daemon_version(global: &Global) -> Option<String> {
    let mut connection = Connection::open(global).await.ok()?;
    let nodes = connection.node.nodes(NodesRequest {}).await.ok()?.into_inner().nodes;
    nodes.into_iter().find(|node| node.is_self).map(|node| node.version)
}
