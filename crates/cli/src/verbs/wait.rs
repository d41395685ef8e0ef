//! `godwit wait`: wait until services have ended.

use std::process::ExitCode;

use godwit_api::v1::WaitRequest;
use serde_json::json;

use super::each;
use crate::global::Global;

/// Wait until services have ended, and print their exit codes
///
/// A service may move meanwhile. One that is started again has ended, too; one that has ended already is not waited
/// for.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// The services
    #[arg(required = true)]
    name: Vec<String>,
}

pub(crate) async fn run(args: Args, global: &Global) -> anyhow::Result<ExitCode> {
    each::each(args.name, global, async |node, name| {
        let ended = node.wait(WaitRequest { name: name.clone(), id: String::new() }).await?.into_inner();
        Ok(each::Done {
            line: ended.exit_code.to_string(),
            json: json!({ "name": name, "exit_code": ended.exit_code, "reason": ended.reason }),
        })
    })
    .await
}
