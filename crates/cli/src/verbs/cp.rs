//! `godwit cp`: files to and from services.

mod pack;
mod pieces;
pub(crate) mod unpack;

use std::{io, path::PathBuf, process::ExitCode};

use anyhow::bail;
use bytes::Bytes;
use godwit_api::v1::{CopyInStart, CopyInput, CopyOutRequest, copy_input};
use serde_json::json;
use tokio::{sync::mpsc, task};
use tokio_stream::wrappers::ReceiverStream;

use self::pieces::{Incoming, Pieces};
use crate::{client::Connection, global::Global, output};

/// Pieces of an archive under way before whoever makes them waits.
const AHEAD: usize = 4;

/// Copy files between this machine and a service, or between two services
///
/// As cp -r: into DESTINATION if that is a directory, else under its name. SOURCE/. copies what is in a directory. `-` is a tar
/// archive, on standard input or standard output. Devices, FIFOs and sockets are passed over.
#[derive(Debug, clap::Args)]
#[command(after_long_help = "\
Examples:
  godwit cp redis:/data/dump.rdb .
  godwit cp ./site/. web:/usr/share/nginx/html
  godwit cp web:/etc/nginx - | tar -t")]
pub(crate) struct Args {
    /// Files keep their owners and all bits of their mode; else they are root's in a service, and yours here
    #[arg(short, long)]
    archive: bool,
    /// SERVICE:/PATH, a path on this machine, or - for a tar archive
    source: String,
    /// The same
    destination: String,
}

/// One end of a copy.
#[derive(Debug, PartialEq, Eq)]
enum End {
    Service { name: String, path: String },
    Local(PathBuf),
    Archive,
}

impl From<&str> for End {
    /// A path with a slash before the first colon is this machine's, as Podman has it.
    fn from(text: &str) -> Self {
        match text.split_once(':') {
            _ if text == "-" => Self::Archive,
            Some((name, path)) if !name.is_empty() && !name.contains('/') && !name.starts_with('.') => {
                // As it is typed by who thinks of the root directory.
                let path = if path.starts_with('/') { path.to_owned() } else { format!("/{path}") };
                Self::Service { name: name.to_owned(), path }
            }
            _ => Self::Local(text.into()),
        }
    }
}

pub(crate) async fn run(args: Args, global: &Global) -> anyhow::Result<ExitCode> {
    match (End::from(args.source.as_str()), End::from(args.destination.as_str())) {
        (End::Service { name, .. }, End::Service { name: to, .. }) if name == to => {
            bail!(
                "both ends are in service {name}: `godwit exec {name} cp -r SOURCE DESTINATION` copies within it"
            )
        }
        (End::Service { name, path }, End::Service { name: to, path: destination }) => {
            let contents = is_contents(&path);
            let (pieces, incoming) = mpsc::channel(AHEAD);
            let source = copy_out(global, name, path, pieces);
            let into = copy_in(global, args.archive, to, destination, contents, incoming);
            let (source, into) = tokio::join!(source, into);
            // Where the source fails, the other end knows only that it was cut off.
            source?;
            into?;
        }
        (End::Service { name, path }, to) => {
            let contents = is_contents(&path);
            let (pieces, incoming) = mpsc::channel(AHEAD);
            let taking = task::spawn_blocking(move || match to {
                End::Local(path) => unpack::unpack(Incoming::new(incoming), &path, contents, args.archive),
                _ => unpack::write_out(Incoming::new(incoming)),
            });
            let source = copy_out(global, name, path, pieces).await;
            let taken = taking.await?;
            source?;
            taken?;
        }
        (from @ (End::Local(_) | End::Archive), End::Service { name, path }) => {
            let contents = matches!(&from, End::Local(path) if is_contents(&path.to_string_lossy()));
            let is_stream = from == End::Archive;
            let (pieces, incoming) = mpsc::channel(AHEAD);
            let making = task::spawn_blocking(move || match from {
                End::Local(path) => pack::pack(&path, contents, pieces),
                _ => pack::read_in(&pieces),
            });
            let into = copy_in(global, args.archive, name, path, contents, incoming).await;
            if into.is_err() && is_stream {
                // Standard input may have no end.
                return into.map(|()| ExitCode::FAILURE);
            }
            // Where the daemon has failed, this end has been cut off, and says nothing.
            making.await??;
            into?;
        }
        _ => bail!(
            "neither {} nor {} is in a service: write SERVICE:/PATH for one of them",
            args.source,
            args.destination
        ),
    }
    if global.json {
        output::json(&json!({ "source": args.source, "destination": args.destination }))?;
    }
    Ok(ExitCode::SUCCESS)
}

/// Whether a path means what is in a directory.
fn is_contents(path: &str) -> bool {
    path.ends_with("/.") || path.ends_with("/..") || matches!(path, "." | ".." | "/")
}

/// Takes an archive of what is at a path of a service. Where that fails, what has come is said not to be all.
async fn copy_out(global: &Global, name: String, path: String, pieces: Pieces) -> anyhow::Result<()> {
    let copied = async {
        let mut connection = Connection::open(global).await?;
        let answer = connection.node.copy_out(CopyOutRequest { name, path }).await;
        let mut answer = answer.map_err(|status| connection.explain(&status))?.into_inner();
        while let Some(piece) = answer.message().await.map_err(|status| connection.explain(&status))? {
            if pieces.send(Ok(piece.data)).await.is_err() {
                // Whoever takes it has failed, and says why.
                break;
            }
        }
        anyhow::Ok(())
    };
    let copied = copied.await;
    if copied.is_err() {
        let _ = pieces.send(Err(io::Error::other("it is cut off"))).await;
    }
    copied
}

async fn copy_in(
    global: &Global,
    keep_owners: bool,
    name: String,
    path: String,
    contents: bool,
    mut archive: mpsc::Receiver<io::Result<Bytes>>,
) -> anyhow::Result<()> {
    let mut connection = Connection::open(global).await?;
    let (messages, requests) = mpsc::channel(AHEAD);
    let start = CopyInStart { name, path, contents, keep_owners };
    messages.send(CopyInput { kind: Some(copy_input::Kind::Start(start)) }).await?;
    let sending = tokio::spawn(async move {
        while let Some(piece) = archive.recv().await {
            // A message without data says that the archive is not whole.
            let kind = piece.ok().map(copy_input::Kind::Data);
            let is_last = kind.is_none();
            if messages.send(CopyInput { kind }).await.is_err() || is_last {
                return;
            }
        }
    });
    let answer = connection.node.copy_in(ReceiverStream::new(requests)).await;
    // Where the daemon has failed, nobody takes the rest.
    sending.abort();
    answer.map_err(|status| connection.explain(&status))?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_service_is_told_from_a_path() {
        let service = |name: &str, path: &str| End::Service { name: name.into(), path: path.into() };
        for (text, end) in [
            ("web:/etc/hosts", service("web", "/etc/hosts")),
            ("web:data/.", service("web", "/data/.")),
            ("web:", service("web", "/")),
            ("./web:x", End::Local("./web:x".into())),
            ("/tmp/a:b", End::Local("/tmp/a:b".into())),
            ("dir/a:b", End::Local("dir/a:b".into())),
            (".", End::Local(".".into())),
            (":x", End::Local(":x".into())),
            ("-", End::Archive),
        ] {
            assert_eq!(End::from(text), end, "{text}");
        }
    }
}
