//! Commands inside services: bytes between the user's stream and the engine's pipes or terminal. Commands on a terminal
//! that moves with its service are in [`sessions`](crate::sessions).

use std::os::fd::OwnedFd;
use std::pin::Pin;
use std::sync::Arc;

use bytes::{Bytes, BytesMut};
use futures::{Stream, StreamExt};
use godwit_api::v1::{ExecInput, ExecOutput, exec_input, exec_output};
use godwit_engine::{EngineError, ExecIo, ExecRequest, ExecStreams, Terminal, rootfs};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::unix::pipe;
use tokio::process::Child;
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Status, Streaming};

use crate::convert;
use crate::node::Node;
use crate::services::{DEFAULT_PATH, occupied, owned};
use crate::sessions::{Outgoing, User, size};
use crate::status::status;

/// What is read from a stream at once.
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
    owned(node, &name)?;
    // A migration that began already must not meet a new process in the service.
    let taken = node.reserve_soon(&name).await.ok_or_else(|| occupied(&name))?;
    let service = owned(node, &name)?;
    if service.exit_code.is_some() {
        return Err(Status::failed_precondition(format!("service {name} is not running")));
    }
    let request = ExecRequest {
        command: start.command,
        env: start.env,
        user: Some(start.user).filter(|user| !user.is_empty()),
        workdir: Some(start.workdir).filter(|workdir| !workdir.is_empty()),
        terminal: start.terminal.map(size),
    };
    let config = node.local().config(&service.service);
    let path = service.service.env.iter().find_map(|pair| pair.strip_prefix("PATH=")).unwrap_or(DEFAULT_PATH);
    // What another engine keeps, that has mounted.
    if config.kept.is_none() {
        rootfs::find_command(&config.rootfs, path, &request.command[0])
            .map_err(|error| status(Status::invalid_argument, &error))?;
    }
    let refused = |error: EngineError| match &error {
        EngineError::Command { .. } | EngineError::User { .. } => status(Status::invalid_argument, &error),
        _ => status(Status::internal, &error),
    };
    let engine = &node.local().engine;
    let (out, outgoing) = mpsc::channel(QUEUE);
    if let Some(terminal) = start.terminal
        && let Some(session) = engine.start_session(&config, &request).await.map_err(refused)?
    {
        drop(taken);
        let user = User::new(node, (name, service.service.id), &session, (start.stdin, terminal), out);
        tokio::spawn(user.sit(session, input));
        return Ok(ReceiverStream::new(outgoing).boxed());
    }
    let ExecIo { streams, child } = engine.exec(&config, &request).await.map_err(refused)?;
    drop(taken);
    match streams {
        ExecStreams::Pipes { stdin, stdout, stderr } => {
            let broken =
                |e: std::io::Error| Status::internal(format!("the command's streams cannot be used: {e}"));
            let receiver = |fd: OwnedFd| pipe::Receiver::from_owned_fd(fd).map_err(broken);
            let stdin =
                if start.stdin { Some(pipe::Sender::from_owned_fd(stdin).map_err(broken)?) } else { None };
            let stdout = pump(receiver(stdout)?, out.clone(), exec_output::Kind::Stdout);
            let stderr = pump(receiver(stderr)?, out.clone(), exec_output::Kind::Stderr);
            let output = async {
                tokio::join!(stdout, stderr);
            };
            tokio::spawn(attend(child, feed(input, stdin), output, out));
        }
        ExecStreams::Terminal(terminal) => {
            let terminal = Arc::new(terminal);
            let typed = type_at(input, Arc::clone(&terminal), start.stdin, out.clone());
            let shown = show(terminal, out.clone());
            tokio::spawn(attend(child, typed, shown, out));
        }
    }
    Ok(ReceiverStream::new(outgoing).boxed())
}

/// Sees a command to its end, and says how it ended after all that it has written.
async fn attend(
    mut child: Child,
    input: impl Future<Output = ()> + Send + 'static,
    output: impl Future<Output = ()> + Send + 'static,
    out: Outgoing,
) {
    let (input, output) = (tokio::spawn(input), tokio::spawn(output));
    let ended = child.wait().await;
    // It has a handle of the terminal.
    input.abort();
    // It ends when the command's last process has closed its streams.
    let _ = tokio::join!(input, output);
    let last = match ended {
        Ok(status) => Ok(ExecOutput { kind: Some(exec_output::Kind::ExitCode(exit_code(status))) }),
        Err(error) => Err(Status::internal(format!("cannot tell how the command ended: {error}"))),
    };
    // The user may have gone.
    let _ = out.send(last).await;
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

async fn pump(mut from: pipe::Receiver, to: Outgoing, kind: fn(Bytes) -> exec_output::Kind) {
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

/// Types what the user types, until the user has gone.
async fn type_at(mut input: Streaming<ExecInput>, terminal: Arc<Terminal>, types: bool, user: Outgoing) {
    while let Ok(Some(ExecInput { kind: Some(kind) })) = input.message().await {
        let done = match kind {
            exec_input::Kind::Stdin(data) if types => {
                // The end of input, as a terminal knows it: of a line that has begun, and of all.
                let keys = if data.is_empty() { &b"\x04\x04"[..] } else { &data };
                tokio::select! {
                    typed = terminal.write_all(keys) => typed,
                    // The command may read nothing.
                    () = user.closed() => return,
                }
            }
            exec_input::Kind::Size(new) => terminal.resize(size(new)),
            exec_input::Kind::Stdin(_) | exec_input::Kind::Start(_) => Ok(()),
        };
        if let Err(error) = done {
            tracing::debug!(%error, "a command's terminal takes nothing");
            return;
        }
    }
}

/// Shows what is written on the terminal, until the user has gone. Then it is closed, which hangs the command up.
async fn show(terminal: Arc<Terminal>, to: Outgoing) {
    let mut buffer = vec![0; CHUNK];
    loop {
        let read = tokio::select! {
            read = terminal.read(&mut buffer) => read,
            () = to.closed() => return,
        };
        match read {
            Ok(0) => return,
            Ok(length) => {
                let data = Bytes::copy_from_slice(&buffer[..length]);
                if to.send(Ok(ExecOutput { kind: Some(exec_output::Kind::Stdout(data)) })).await.is_err() {
                    return;
                }
            }
            Err(error) => {
                tracing::debug!(%error, "a command's terminal cannot be read");
                return;
            }
        }
    }
}

fn exit_code(status: std::process::ExitStatus) -> i32 {
    use std::os::unix::process::ExitStatusExt;
    status.code().unwrap_or_else(|| 128 + status.signal().unwrap_or(0))
}
