//! `godwit kill`: send a signal.

use std::process::ExitCode;

use godwit_api::v1::KillRequest;

use super::each;
use crate::{global::Global, values};

/// Send a signal to the main process of services
///
/// A service that ends by it has ended by itself: its restart policy applies. `godwit stop` ends one for good.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// The signal: a name, with or without SIG, or a number
    #[arg(short, long, default_value = "KILL", value_parser = values::signal)]
    signal: u32,
    /// The services
    #[arg(required = true)]
    name: Vec<String>,
}

pub(crate) async fn run(args: Args, global: &Global) -> anyhow::Result<ExitCode> {
    let signal = args.signal;
    each::service(args.name, global, async |node, name| node.kill(KillRequest { name, signal }).await).await
}
