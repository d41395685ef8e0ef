//! `godwit rm`: remove services and their files.

use std::process::ExitCode;

use godwit_api::v1::RemoveRequest;

use super::each;
use crate::global::Global;

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
    let force = args.force;
    each::removed(args.name, global, async |node, name| node.remove(RemoveRequest { name, force }).await)
        .await
}
