//! Commands inside services: bytes between the user's stream and the engine's pipes.

use std::os::fd::OwnedFd;
use std::pin::Pin;
use std::sync::Arc;

use bytes::BytesMut;
use futures::{Stream, StreamExt};
use godwit_api::v1::{ExecInput, ExecOutput, exec_input, exec_output};
use godwit_engine::{EngineError, ExecRequest, rootfs};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::unix::pipe;
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Status, Streaming};

use crate::convert;
use crate::node::Node;
use crate::services::{DEFAULT_PATH, owned};
use crate::status::status;

/// What is read from a pipe at once.
const CHUNK: usize = 64 * 1024;

/// Pieces of output that wait for a slow user; then the command waits.
const QUEUE: usize = 16;

type Output = Pin<Box<dyn Stream<Item = Result<ExecOutput, Status>> + Send>>;

/// Starts the command that the first message describes.
pub(crate) async fn start(node: &Arc<Node>, mut input: Streaming<ExecInput>) -> Result<Output, Status> {
    let Some(ExecInput { kind: Some(exec_input::Kind::Start(start)) }) = input.message().await? else {
        return Err(Status::invalid_argument("the first message of an exec must say what to start"));
    };
    if start.command.is_empty() {
        return Err(Status::invalid_argument(
            "there is no command to run; give one after the service's name",
        ));
    }
    let name = convert::service_name(&start.name)?;
    node.settle(&name).await;
    let service = owned(node, &name)?;
    if service.exit_code.is_some() {
        return Err(Status::failed_precondition(format!("service {name} is not running")));
    }
    // A migration that began already must not meet a new process in the service.
    let occupied = node.reserve(&name).await.ok_or_else(|| {
        Status::aborted(format!(
            "service {name} is being created, removed or migrated; try again when that has ended"
        ))
    })?;
    let request = ExecRequest {
        command: start.command,
        env: start.env,
        user: Some(start.user).filter(|user| !user.is_empty()),
        workdir: Some(start.workdir).filter(|workdir| !workdir.is_empty()),
    };
    let config = node.local().config(&service.service);
    let path = service.service.env.iter().find_map(|pair| pair.strip_prefix("PATH=")).unwrap_or(DEFAULT_PATH);
    // What another engine keeps, that has mounted.
    if config.kept.is_none() {
        rootfs::find_command(&config.rootfs, path, &request.command[0])
            .map_err(|error| status(Status::invalid_argument, &error))?;
    }
    let io = node.local().engine.exec(&config, &request).await.map_err(|error| match &error {
        EngineError::Command { .. } => status(Status::invalid_argument, &error),
        _ => status(Status::internal, &error),
    })?;
    drop(occupied);
    let broken = |e: std::io::Error| Status::internal(format!("the command's streams cannot be used: {e}"));
    let stdin = if start.stdin { Some(pipe::Sender::from_owned_fd(io.stdin).map_err(broken)?) } else { None };
    let (out, outgoing) = mpsc::channel(QUEUE);
    let stdout = tokio::spawn(pump(receiver(io.stdout).map_err(broken)?, out.clone(), |data| {
        exec_output::Kind::Stdout(data)
    }));
    let stderr = tokio::spawn(pump(receiver(io.stderr).map_err(broken)?, out.clone(), |data| {
        exec_output::Kind::Stderr(data)
    }));
    let mut child = io.child;
    tokio::spawn(async move {
        let feeding = tokio::spawn(feed(input, stdin));
        let ended = child.wait().await;
        feeding.abort();
        // Both end when the command's last process has closed its streams.
        let _ = tokio::join!(stdout, stderr);
        let last = match ended {
            Ok(status) => Ok(ExecOutput { kind: Some(exec_output::Kind::ExitCode(exit_code(status))) }),
            Err(error) => Err(Status::internal(format!("cannot tell how the command ended: {error}"))),
        };
        // The user may have gone.
        let _ = out.send(last).await;
    });
    Ok(ReceiverStream::new(outgoing).boxed())
}

fn receiver(fd: OwnedFd) -> std::io::Result<pipe::Receiver> {
    pipe::Receiver::from_owned_fd(fd)
}

async fn feed(mut input: Streaming<ExecInput>, stdin: Option<pipe::Sender>) {
    let Some(mut stdin) = stdin else { return };
    while let Ok(Some(ExecInput { kind: Some(exec_input::Kind::Stdin(data)) })) = input.message().await {
        // Empty is the end of input; an error means that the command does not read any more.
        if data.is_empty() || stdin.write_all(&data).await.is_err() {
            return;
        }
    }
}

async fn pump(
    mut from: pipe::Receiver,
    to: mpsc::Sender<Result<ExecOutput, Status>>,
    kind: fn(bytes::Bytes) -> exec_output::Kind,
) {
    loop {
        let mut buffer = BytesMut::with_capacity(CHUNK);
        match from.read_buf(&mut buffer).await {
            Ok(0) => return,
            Ok(_) => {
                if to.send(Ok(ExecOutput { kind: Some(kind(buffer.freeze())) })).await.is_err() {
                    return;
                }
            }
            Err(error) => {
                tracing::debug!(%error, "a command's output cannot be read");
                return;
            }
        }
    }
}

fn exit_code(status: std::process::ExitStatus) -> i32 {
    use std::os::unix::process::ExitStatusExt;
    status.code().unwrap_or_else(|| 128 + status.signal().unwrap_or(0))
}
