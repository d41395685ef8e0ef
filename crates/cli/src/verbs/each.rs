//! Verbs that ask the daemon the same of each thing that they name: they differ in the call alone.

use std::process::ExitCode;

use godwit_api::v1::{Service, node_client::NodeClient};
use serde_json::{Value, json};
use tonic::{Response, Status, transport::Channel};

use crate::{client::Connection, global::Global, output};

/// Calls the daemon for each service, and prints the service that it answers with.
pub(super) async fn service(
    names: Vec<String>,
    global: &Global,
    call: impl AsyncFn(&mut NodeClient<Channel>, String) -> Result<Response<Service>, Status>,
) -> anyhow::Result<ExitCode> {
    each(names, global, async |node: &mut NodeClient<Channel>, name: String| {
        let service = call(node, name).await?.into_inner();
        Ok(Done { json: output::service_json(&service), line: service.name })
    })
    .await
}

/// Calls the daemon to remove each, and prints its name.
pub(super) async fn removed<T>(
    names: Vec<String>,
    global: &Global,
    call: impl AsyncFn(&mut NodeClient<Channel>, String) -> Result<Response<T>, Status>,
) -> anyhow::Result<ExitCode> {
    each(names, global, async |node: &mut NodeClient<Channel>, name: String| {
        call(node, name.clone()).await?;
        Ok(Done { json: json!({ "removed": name }), line: name })
    })
    .await
}

/// Seconds until SIGKILL, in milliseconds as the daemon is told them: 0 would be its own time.
pub(super) fn patience(seconds: u32) -> u32 {
    (seconds * 1000).max(1)
}

/// What is printed of one that succeeded.
pub(super) struct Done {
    pub(super) line: String,
    pub(super) json: Value,
}

/// Goes on with the others after one that failed; the exit code tells that one did.
pub(super) async fn each(
    names: Vec<String>,
    global: &Global,
    call: impl AsyncFn(&mut NodeClient<Channel>, String) -> Result<Done, Status>,
) -> anyhow::Result<ExitCode> {
    let mut connection = Connection::open(global).await?;
    let mut code = ExitCode::SUCCESS;
    for name in names {
        match call(&mut connection.node, name).await {
            Ok(done) if global.json => output::json(&done.json)?,
            Ok(done) => output::line(&done.line)?,
            Err(status) => {
                output::note(&format!("Error: {}", connection.explain(&status)));
                code = ExitCode::FAILURE;
            }
        }
    }
    Ok(code)
}
