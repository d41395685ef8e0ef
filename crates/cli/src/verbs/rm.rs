//! `godwit rm`: remove services and their files.

use std::process::ExitCode;

use godwit_api::v1::RemoveRequest;

use crate::{client::Connection, global::Global, output};

/// Remove stopped services and their files
///
/// With --force, a service that its node has lost is removed from the cluster's list.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// Stop them first if they run
    #[arg(short, long)]
    force: bool,
    /// The services
    #[arg(required = true)]
    name: Vec<String>,
}

pub(crate) async fn run(args: Args, global: &Global) -> anyhow::Result<ExitCode> {
    let mut connection = Connection::open(global).await?;
    let mut code = ExitCode::SUCCESS;
    for name in args.name {
        match connection.node.remove(RemoveRequest { name: name.clone(), force: args.force }).await {
            Ok(_) if global.json => output::json(&serde_json::json!({ "removed": name }))?,
            Ok(_) => output::line(&name)?,
            Err(status) => {
                output::note(&format!("Error: {}", connection.explain(&status)));
                code = ExitCode::FAILURE;
            }
        }
    }
    Ok(code)
}
