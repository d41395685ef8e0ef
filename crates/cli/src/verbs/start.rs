//! `godwit start`: start services that have ended.

use std::process::ExitCode;

use godwit_api::v1::ServiceRequest;

use super::each;
use crate::global::Global;

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
    each::service(args.name, global, async |node, name| node.start(ServiceRequest { name }).await).await
}
