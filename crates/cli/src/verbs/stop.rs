//! `godwit stop`: end services.

use std::process::ExitCode;

use godwit_api::v1::StopRequest;

use crate::{client::Connection, global::Global, output};

/// Stop services: SIGTERM, then SIGKILL after the time-out
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// Seconds to wait before SIGKILL
    #[arg(short, long, value_name = "SECONDS", default_value_t = 10, value_parser = clap::value_parser!(u32).range(..=86_400))]
    time: u32,
    /// The services
    #[arg(required = true)]
    name: Vec<String>,
}

pub(crate) async fn run(args: Args, global: &Global) -> anyhow::Result<ExitCode> {
    let mut connection = Connection::open(global).await?;
    let mut code = ExitCode::SUCCESS;
    for name in args.name {
        match connection.node.stop(StopRequest { name, timeout_ms: args.time * 1000 }).await {
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
