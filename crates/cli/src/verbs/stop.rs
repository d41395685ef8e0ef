//! `godwit stop`: end services.

use std::process::ExitCode;

use godwit_api::v1::StopRequest;

use super::each;
use crate::global::Global;

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
    let timeout_ms = each::patience(args.time);
    each::service(args.name, global, async |node, name| node.stop(StopRequest { name, timeout_ms }).await)
        .await
}
