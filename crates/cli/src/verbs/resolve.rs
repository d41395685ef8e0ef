//! `godwit resolve`: decide by hand whether a service that is in doubt on a node is that node's.

use std::process::ExitCode;

use godwit_api::v1::ResolveRequest;

use crate::{client::Connection, global::Global, output};

/// Decide by hand whether this node owns a service that is in doubt here
///
/// Only where the source can no longer say: it is gone for good, or has lost its disk. Make sure first that the
/// service does not run there.
#[derive(Debug, clap::Args)]
#[command(group(clap::ArgGroup::new("verdict").required(true)))]
pub(crate) struct Args {
    /// This node owns it: let it run here
    #[arg(long, group = "verdict")]
    own: bool,
    /// This node does not own it: remove the copy here
    #[arg(long, group = "verdict")]
    drop: bool,
    /// The service
    name: String,
}

pub(crate) async fn run(args: Args, global: &Global) -> anyhow::Result<ExitCode> {
    let mut connection = Connection::open(global).await?;
    let request = ResolveRequest { name: args.name.clone(), own: args.own };
    connection.node.resolve(request).await.map_err(|status| connection.explain(&status))?;
    if global.json {
        output::json(&serde_json::json!({ "resolved": args.name, "own": args.own }))?;
    } else {
        output::line(&args.name)?;
    }
    Ok(ExitCode::SUCCESS)
}
