//! `godwit doctor`: what works on a node, what is missing, what to do about it.

use std::process::ExitCode;

use godwit_api::v1::DoctorRequest;

use crate::{
    client::Connection,
    global::Global,
    output::{self, Table},
};

/// Show what works on this node, what is missing, and what to do about it
///
/// `degraded` means that godwit works, but less well. The exit code is 1 when something needed is missing.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {}

pub(crate) async fn run(Args {}: Args, global: &Global) -> anyhow::Result<ExitCode> {
    let mut connection = Connection::open(global).await?;
    let answer = connection.node.doctor(DoctorRequest {}).await;
    let answer = answer.map_err(|status| connection.explain(&status))?.into_inner();
    let missing: Vec<_> = answer
        .checks
        .iter()
        .filter(|check| check.status == "missing")
        .map(|check| check.name.as_str())
        .collect();
    if global.json {
        output::json(&answer)?;
    } else {
        let mut table = Table::new(["CHECK", "STATUS", "FOUND", "ADVICE"]);
        for check in &answer.checks {
            table.row([check.name.clone(), check.status.clone(), check.found.clone(), check.advice.clone()]);
        }
        table.print()?;
        let verdict = match missing.as_slice() {
            [] => format!("node {} has everything it needs", answer.node),
            missing => format!("node {} lacks {}", answer.node, missing.join(", ")),
        };
        output::line(&verdict)?;
    }
    Ok(if missing.is_empty() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}
