//! `godwit exec`: run a command inside a service.

use std::{
    io::{self, Write as _},
    path::PathBuf,
    process::ExitCode,
};

use godwit_api::v1::{ExecInput, ExecStart, exec_input, exec_output};
use tokio::{
    io::AsyncReadExt as _,
    signal::unix::{Signal, SignalKind, signal},
    sync::mpsc,
};
use tokio_stream::wrappers::ReceiverStream;

use crate::{
    client::Connection,
    global::Global,
    output,
    terminal::{self, Raw},
    values,
};

/// How much of standard input goes into one message: a pipe's capacity.
const CHUNK: usize = 64 << 10;
/// Messages under way before reading standard input waits for the daemon.
const AHEAD: usize = 4;

/// Run a command inside a running service
///
/// The exit code is the command's, or 125 when it could not be started. With --json the output
/// is lines with stream and data, and the last one has the exit_code.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// Pass standard input on to the command
    #[arg(short, long)]
    interactive: bool,
    /// Give the command a terminal; Ctrl-C and its like go to the command
    #[arg(short, long)]
    tty: bool,
    /// Environment of the command: NAME=VALUE, or NAME to pass on your own
    #[arg(short, long, value_name = "NAME[=VALUE]", value_parser = values::env)]
    env: Vec<String>,
    /// Environment of the command from a file, a line each as for --env
    #[arg(long, value_name = "FILE")]
    env_file: Vec<PathBuf>,
    /// User that runs the command: UID, UID:GID, or a name that the image knows
    #[arg(short, long)]
    user: Option<String>,
    /// Directory inside the container that the command starts in
    #[arg(short, long, value_name = "DIR")]
    workdir: Option<String>,
    /// The service
    name: String,
    /// Command and its arguments
    #[arg(required = true, trailing_var_arg = true, allow_hyphen_values = true, value_name = "COMMAND")]
    command: Vec<String>,
}

pub(crate) async fn run(args: Args, global: &Global) -> anyhow::Result<ExitCode> {
    let mut env = Vec::new();
    for file in &args.env_file {
        env.extend(values::env_file(file)?);
    }
    // What --env says comes later, and holds.
    env.extend(args.env.into_iter().filter(|entry| !entry.is_empty()));
    if args.tty
        && !env.iter().any(|entry| entry.starts_with("TERM="))
        && let Ok(kind) = std::env::var("TERM")
    {
        env.push(format!("TERM={kind}"));
    }
    // Before the size is read that the command's terminal gets first.
    let changes = if args.tty { Some(signal(SignalKind::window_change())?) } else { None };
    let start = ExecStart {
        name: args.name.clone(),
        command: args.command,
        env,
        user: args.user.unwrap_or_default(),
        workdir: args.workdir.unwrap_or_default(),
        stdin: args.interactive,
        terminal: args.tty.then(terminal::size),
    };
    let mut connection = Connection::open(global).await?;
    let (input, requests) = mpsc::channel(AHEAD);
    let first = ExecInput { kind: Some(exec_input::Kind::Start(start)) };
    input.send(first).await?;
    if args.interactive {
        tokio::spawn(pass_on_stdin(input.clone()));
    }
    let answer = connection.node.exec(ReceiverStream::new(requests)).await;
    let mut outputs = answer.map_err(|status| connection.explain(&status))?.into_inner();
    // Dropped before an error is printed.
    let raw = if args.tty && args.interactive { Raw::begin()? } else { None };
    if let Some(changes) = changes {
        tokio::spawn(pass_on_sizes(changes, input.clone()));
    }
    let mut signals = Signals::new(raw.is_some())?;
    loop {
        let output = tokio::select! {
            output = outputs.message() => output.map_err(|status| connection.explain(&status))?,
            // The terminal gets back the mode that it had.
            Some(code) = signals.next() => return Ok(ExitCode::from(code)),
        };
        let Some(output) = output else { break };
        match output.kind {
            Some(exec_output::Kind::Stdout(data)) => print(global, "stdout", &data)?,
            Some(exec_output::Kind::Stderr(data)) => print(global, "stderr", &data)?,
            Some(exec_output::Kind::ExitCode(code)) => {
                if global.json {
                    output::json(&serde_json::json!({ "exit_code": code }))?;
                }
                // The request stream stayed open until here: its end would be the end of input.
                drop(input);
                return Ok(ExitCode::from(u8::try_from(code).unwrap_or(u8::MAX)));
            }
            None => {}
        }
    }
    anyhow::bail!("godwitd did not say how the command in {} ended; see its log", args.name)
}

fn print(global: &Global, stream: &str, data: &[u8]) -> io::Result<()> {
    if global.json {
        output::json(&serde_json::json!({ "stream": stream, "data": String::from_utf8_lossy(data) }))
    } else if stream == "stderr" {
        io::stderr().write_all(data)
    } else {
        let mut out = io::stdout().lock();
        out.write_all(data)?;
        out.flush()
    }
}

/// SIGTERM and SIGHUP, where somebody has to end in order: otherwise they end this program as they always do.
struct Signals(Option<[Signal; 2]>);

impl Signals {
    fn new(are_caught: bool) -> io::Result<Self> {
        let both = || Ok([signal(SignalKind::terminate())?, signal(SignalKind::hangup())?]);
        are_caught.then(both).transpose().map(Self)
    }

    /// The exit code after the next one.
    async fn next(&mut self) -> Option<u8> {
        match &mut self.0 {
            None => std::future::pending().await,
            Some([terminate, hang_up]) => tokio::select! {
                _ = terminate.recv() => Some(128 + 15),
                _ = hang_up.recv() => Some(128 + 1),
            },
        }
    }
}

/// Tells the daemon of each new size of the user's terminal.
async fn pass_on_sizes(mut changes: Signal, input: mpsc::Sender<ExecInput>) {
    while changes.recv().await.is_some() {
        let message = ExecInput { kind: Some(exec_input::Kind::Size(terminal::size())) };
        if input.send(message).await.is_err() {
            return;
        }
    }
}

/// Ends with an empty message, which means the end of input.
async fn pass_on_stdin(input: mpsc::Sender<ExecInput>) {
    let mut stdin = tokio::io::stdin();
    let mut buffer = vec![0; CHUNK];
    loop {
        // A standard input that cannot be read is at its end as far as the command is concerned.
        let length = stdin.read(&mut buffer).await.unwrap_or(0);
        let data = buffer[..length].to_vec().into();
        let message = ExecInput { kind: Some(exec_input::Kind::Stdin(data)) };
        if input.send(message).await.is_err() || length == 0 {
            return;
        }
    }
}
