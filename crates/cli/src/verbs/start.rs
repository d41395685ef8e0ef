//! `godwit start`: start services that have ended.

use std::process::ExitCode;

use godwit_api::v1::ServiceRequest;

use crate::{client::Connection, global::Global, output};

/// Start services that have ended, with the files, address and ports that they had
///
/// Their memory and connections are gone. One that runs is left alone.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// The services
    #[arg(required = true)]
    name: Vec<String>,
}

pub(crate) async fn run(args: Args, global: &Global) -> anyhow::Result<ExitCode> {
    let mut connection = Connection::open(global).await?;
    let mut code = ExitCode::SUCCESS;
    for name in args.name {
        match connection.node.start(ServiceRequest { name }).await {
            Ok(service) if global.json => output::json(&output::service_json(service.get_ref()))?,
            Ok(service) => output::line(&service.get_ref().name)?,
            Err(status) => {
                output::note(&format!("Error: {}", connection.explain(&status)));
                code = ExitCode::FAILURE;
            }
        }
    }
    Ok(code)
}
