//! Which daemon a command means, and the connection to it over its unix socket.

use std::{
    fs, io,
    path::{Path, PathBuf},
};

use godwit_api::{innermost, v1::node_client::NodeClient};
use hyper_util::rt::TokioIo;
use tokio::net::UnixStream;
use tonic::{
    Code, Status,
    transport::{Channel, Endpoint},
};

use crate::global::Global;

/// Socket of the machine's own daemon.
const DEFAULT_SOCKET: &str = "/run/godwit/godwitd.sock";
/// Below it: `<lab>/<node>/godwitd.sock`.
const LABS: &str = "/run/godwit/labs";
/// What is in a lab's directory beside its nodes; no node can have this name.
const PIDS: &str = "pids";
/// The longest answer taken: a cluster's services with all their settings stay far below it.
const MAX_ANSWER: usize = 64 << 20;
/// What may be on its way of a stream, bytes: packets of a capture come faster than a busy machine wakes
/// both sides for every 64 KiB.
const WINDOW: u32 = 4 << 20;

/// Why the daemon could not be asked, or what it answered instead.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs)] // of the fields: the message says what each is
pub enum ClientError {
    /// The machine's daemon is not there.
    #[error(
        "godwitd does not answer on {}: {}; start it with `systemctl start godwitd` or name a lab node with --node",
        socket.display(), reason(cause)
    )]
    NoDaemon { socket: PathBuf, cause: io::Error },
    /// It runs, but does not listen yet.
    #[error(
        "godwitd is starting and does not listen on {} yet: it first finishes or undoes earlier migrations; try again in a moment, or see `journalctl -u godwitd`",
        socket.display()
    )]
    Starting { socket: PathBuf },
    /// The daemon of a lab's node is not there.
    #[error(
        "godwitd of node {node} in lab {lab} does not answer on {}: {}; `godwit lab status {lab}` shows what runs there",
        socket.display(), reason(cause)
    )]
    NoLabDaemon { lab: String, node: String, socket: PathBuf, cause: io::Error },
    /// No such lab.
    #[error(
        "there is no lab named {lab}: make it with `godwit lab up --name {lab} --nodes a,b`, or name another with --lab"
    )]
    NoLab { lab: String },
    /// The lab is there, the node is not.
    #[error("lab {lab} has no node named {node}; its nodes are {nodes}")]
    NoLabNode { lab: String, node: String, nodes: String },
    /// The user may not open the socket.
    #[error("you may not use the socket {}: godwit needs root, so run it as root or with sudo", socket.display())]
    NotAllowed { socket: PathBuf },
    /// The daemon said no; its message is a sentence for the user.
    #[error("{message}")]
    Refused { code: Code, message: String },
    /// The connection ended before the answer.
    #[error(
        "the connection to godwitd on {} broke before it answered ({cause}); once godwitd runs again, `godwit ps -a` shows what became of the request",
        socket.display()
    )]
    Lost { socket: PathBuf, cause: String },
    /// Client and daemon are of different versions.
    #[error("godwitd on {} does not know this request, as its version is not that of this godwit ({version}); install the same version of both", socket.display())]
    OtherVersion { socket: PathBuf, version: &'static str },
}

/// A connection error without the operating system's number.
fn reason(cause: &io::Error) -> String {
    match cause.kind() {
        io::ErrorKind::NotFound => "there is no such socket".to_owned(),
        io::ErrorKind::ConnectionRefused => "nothing listens there".to_owned(),
        _ => cause.to_string(),
    }
}

/// A connected daemon.
#[derive(Clone)]
pub struct Connection {
    /// Calls on the daemon; explain their errors with [`Connection::explain`].
    pub node: NodeClient<Channel>,
    socket: PathBuf,
}

impl Connection {
    /// Connects to the daemon that the global flags mean.
    ///
    /// # Errors
    /// If there is no such daemon, or it does not answer.
    pub async fn open(global: &Global) -> Result<Self, ClientError> {
        let socket = match (&global.socket, &global.node) {
            (Some(socket), _) => socket.clone(),
            (None, Some(node)) => lab_socket(Path::new(LABS), &global.lab, node)?,
            (None, None) => PathBuf::from(DEFAULT_SOCKET),
        };
        // Connected by hand, since the transport hides why it could not.
        let stream =
            UnixStream::connect(&socket).await.map_err(|cause| unreachable(global, &socket, cause))?;
        let mut first = Some(stream);
        let again = socket.clone();
        let connector = tower::service_fn(move |_| {
            let stream = first.take();
            let socket = again.clone();
            async move {
                let stream = match stream {
                    Some(stream) => stream,
                    None => UnixStream::connect(socket).await?,
                };
                Ok::<_, io::Error>(TokioIo::new(stream))
            }
        });
        let channel = Endpoint::from_static("http://godwitd")
            .initial_stream_window_size(WINDOW)
            .initial_connection_window_size(WINDOW)
            .connect_with_connector(connector)
            .await
            .map_err(|error| {
                let cause = innermost(&error).unwrap_or_else(|| error.to_string());
                ClientError::Lost { socket: socket.clone(), cause }
            })?;
        Ok(Self { node: NodeClient::new(channel).max_decoding_message_size(MAX_ANSWER), socket })
    }

    /// Makes a sentence of a failed call.
    #[must_use]
    pub fn explain(&self, status: &Status) -> ClientError {
        if let Some(cause) = innermost(status) {
            return ClientError::Lost { socket: self.socket.clone(), cause };
        }
        let message = status.message().trim();
        match status.code() {
            // The transport's own, for a method that the daemon has never heard of.
            Code::Unimplemented if message.is_empty() => {
                ClientError::OtherVersion { socket: self.socket.clone(), version: env!("CARGO_PKG_VERSION") }
            }
            code if message.is_empty() => {
                ClientError::Refused { code, message: code.description().to_owned() }
            }
            code => ClientError::Refused { code, message: message.to_owned() },
        }
    }

    /// The socket of the daemon.
    pub(crate) fn socket(&self) -> &Path {
        &self.socket
    }
}

fn unreachable(global: &Global, socket: &Path, cause: io::Error) -> ClientError {
    let socket = socket.to_owned();
    if matches!(cause.kind(), io::ErrorKind::NotFound | io::ErrorKind::ConnectionRefused)
        && is_starting(&socket)
    {
        return ClientError::Starting { socket };
    }
    match (cause.kind(), &global.socket, &global.node) {
        (io::ErrorKind::PermissionDenied, ..) => ClientError::NotAllowed { socket },
        (_, None, Some(node)) => {
            ClientError::NoLabDaemon { lab: global.lab.clone(), node: node.clone(), socket, cause }
        }
        _ => ClientError::NoDaemon { socket, cause },
    }
}

/// Whether a daemon has the directory of the socket: it takes the lock first and listens last.
fn is_starting(socket: &Path) -> bool {
    let Ok(lock) = fs::File::open(socket.with_file_name("godwitd.lock")) else { return false };
    matches!(lock.try_lock_shared(), Err(fs::TryLockError::WouldBlock))
}

/// The socket of a lab's node, or what the lab has instead.
fn lab_socket(labs: &Path, lab: &str, node: &str) -> Result<PathBuf, ClientError> {
    let directory = labs.join(lab);
    let socket = directory.join(node).join("godwitd.sock");
    if directory.join(node).is_dir() {
        return Ok(socket);
    }
    match fs::read_dir(&directory) {
        Ok(entries) => {
            let mut nodes: Vec<_> = entries
                .filter_map(Result::ok)
                .filter(|entry| entry.path().is_dir())
                .map(|entry| entry.file_name().to_string_lossy().into_owned())
                .filter(|name| name != PIDS)
                .collect();
            nodes.sort();
            let nodes = if nodes.is_empty() { "none".to_owned() } else { nodes.join(", ") };
            Err(ClientError::NoLabNode { lab: lab.to_owned(), node: node.to_owned(), nodes })
        }
        Err(error) if error.kind() == io::ErrorKind::PermissionDenied => {
            Err(ClientError::NotAllowed { socket })
        }
        Err(_) => Err(ClientError::NoLab { lab: lab.to_owned() }),
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::{is_starting, lab_socket};

    #[test]
    fn a_daemon_that_has_its_lock_and_no_socket_is_starting() {
        let run = tempfile::tempdir().unwrap();
        let socket = run.path().join("godwitd.sock");
        assert!(!is_starting(&socket), "there has never been one");
        let lock = std::fs::File::create(run.path().join("godwitd.lock")).unwrap();
        assert!(!is_starting(&socket), "the file stays when it ends");
        lock.lock().unwrap();
        assert!(is_starting(&socket));
    }

    #[test]
    fn an_unknown_lab_or_node_is_named_with_what_there_is() {
        let labs = tempfile::tempdir().unwrap();
        let error = lab_socket(labs.path(), "x", "a").unwrap_err().to_string();
        assert!(error.starts_with("there is no lab named x"), "{error}");
        for node in ["b", "pids", "a"] {
            std::fs::create_dir_all(labs.path().join("x").join(node)).unwrap();
        }
        let error = lab_socket(labs.path(), "x", "c").unwrap_err().to_string();
        assert_eq!(error, "lab x has no node named c; its nodes are a, b");
        assert_eq!(lab_socket(labs.path(), "x", "a").unwrap(), labs.path().join("x/a/godwitd.sock"));
    }
}
