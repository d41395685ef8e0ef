//! `godwit restore`: a service from the file of a checkpoint.

use std::fs::File;
use std::io::Read as _;
use std::net::Ipv4Addr;
use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::Context as _;
use bytes::Bytes;
use godwit_api::v1::{PublishedPort, RestoreInput, RestoreStart, restore_input::Kind};
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;

use crate::{
    client::Connection,
    global::Global,
    interrupts::{INTERRUPTED, Interrupts},
    output,
    registry::{self, Policy, Reach, Registry},
    values,
};

/// Bytes of a piece.
const PIECE: usize = 256 << 10;
/// Pieces under way before the file is read on.
const AHEAD: usize = 4;

/// Make a service from the file of a checkpoint, with its memory; print its name
///
/// The file is one of `godwit checkpoint` or of `podman container checkpoint --export`. It runs here with all rights that it
/// says: restore files that you trust alone.
#[derive(Debug, clap::Args)]
#[command(after_long_help = "\
Examples:
  godwit restore redis.tar.zst
  godwit restore redis.tar.zst --image redis:7
  godwit restore redis.tar.zst --name redis-copy -p 6380:6379
  podman container checkpoint -e web.tar.zst web && podman save --format oci-archive -o web.tar web:1
  godwit restore web.tar.zst --image web.tar")]
pub(crate) struct Args {
    /// The file
    file: PathBuf,
    /// Name of the service, unique in the cluster [default: the one in the file]
    #[arg(short, long)]
    name: Option<String>,
    /// Address of the service [default: the one in the file; with --name, or of Podman's file, the next free one]
    #[arg(long, value_name = "ADDRESS")]
    ip: Option<Ipv4Addr>,
    /// Forward a port of the node to the service, in place of those in the file: HOST:CONTAINER[/udp]
    #[arg(short, long, value_name = "PORTS", value_parser = values::publish)]
    publish: Vec<PublishedPort>,
    /// Image that the service was made from: an OCI archive, an image layout, or a reference, which is pulled if need be
    /// [default: the image is on this node]
    #[arg(long, value_name = "IMAGE", value_parser = values::image_or_file)]
    image: Option<values::Image>,
    #[command(flatten)]
    registry: Reach,
    /// Directory that its root filesystem was taken from (`godwit run --rootfs`), unchanged
    #[arg(long, value_name = "DIR", value_parser = values::absolute_text, conflicts_with = "image")]
    rootfs: Option<String>,
    /// Restore established TCP connections, whose peers must still have them
    #[arg(long)]
    tcp_established: bool,
    /// Pass over volumes in the file: use those of this node, or empty ones
    #[arg(long)]
    ignore_volumes: bool,
}

pub(crate) async fn run(args: Args, global: &Global) -> anyhow::Result<ExitCode> {
    let mut file = File::open(&args.file).with_context(|| format!("cannot open {}", args.file.display()))?;
    let mut connection = Connection::open(global).await?;
    let (image, reference) = match args.image {
        None => (String::new(), String::new()),
        Some(values::Image::Path(path)) => (path, String::new()),
        Some(values::Image::Reference(text)) => {
            let mut registry = Registry {
                connection: &mut connection,
                interrupts: &mut Interrupts::new()?,
                reach: &args.registry,
                quiet: global.json,
            };
            match registry.image(&registry::reference(&text)?, Policy::Missing).await? {
                Some(image) => (String::new(), image.reference),
                None => return Ok(ExitCode::from(INTERRUPTED)),
            }
        }
    };
    let (messages, requests) = mpsc::channel(AHEAD);
    let start = RestoreStart {
        name: args.name.unwrap_or_default(),
        address: args.ip.map(|address| address.to_string()).unwrap_or_default(),
        publish: args.publish,
        tcp_established: args.tcp_established,
        image,
        reference,
        ignore_volumes: args.ignore_volumes,
        rootfs: args.rootfs.unwrap_or_default(),
    };
    messages.send(RestoreInput { kind: Some(Kind::Start(start)) }).await?;
    let reading = tokio::task::spawn_blocking(move || {
        loop {
            let mut piece = Vec::with_capacity(PIECE);
            let read = (&mut file).take(PIECE as u64).read_to_end(&mut piece);
            let kind = match read {
                Ok(0) => return Ok(()),
                Ok(_) => Some(Kind::Data(Bytes::from(piece))),
                // A message without data says that the file is not whole.
                Err(_) => None,
            };
            if messages.blocking_send(RestoreInput { kind }).is_err() {
                // Where the daemon has failed, nobody takes the rest.
                return Ok(());
            }
            read.map(drop)?;
        }
    });
    let answer = connection.node.restore(ReceiverStream::new(requests)).await;
    let read: std::io::Result<()> = reading.await?;
    read.with_context(|| format!("cannot read {}", args.file.display()))?;
    let service = answer.map_err(|status| connection.explain(&status))?.into_inner();
    if global.json {
        output::json(&output::service_json(&service))?;
    } else {
        output::line(&service.name)?;
    }
    Ok(ExitCode::SUCCESS)
}
