//! Files into services and out of them: tar archives between the user's stream and a service's filesystem.
//!
//! A service that is copied from or to does not move meanwhile: what is written after the freeze would stay behind.

use std::io;
use std::path::Path;
use std::pin::Pin;
use std::sync::Arc;

use futures::{Stream, StreamExt};
use godwit_api::v1::{CopyInResponse, CopyInStart, CopyInput, CopyOutRequest, CopyOutput, copy_input};
use godwit_database::blocking::off_worker;
use godwit_engine::Mount;
use godwit_engine::copy::{CopyError, CopyIn, Filesystem};
use godwit_migration::error_chain;
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Status, Streaming};

use crate::convert;
use crate::node::{Node, Occupied};
use crate::pieces::{Incoming, Outgoing, PIECE, PIECES, hand_on};
use crate::services::{occupied, owned};
use crate::state::Owned;
use crate::status::{internal, invalid};

type Output = Pin<Box<dyn Stream<Item = Result<CopyOutput, Status>> + Send>>;

/// The filesystem of a service of this node, which is nobody else's until what is returned last is dropped.
async fn open(node: &Arc<Node>, name: &str, path: &str) -> Result<(Filesystem, Occupied), Status> {
    if !path.starts_with('/') {
        return Err(Status::invalid_argument(format!(
            "{path:?} is not an absolute path; write {name}:/PATH"
        )));
    }
    let name = convert::service_name(name)?;
    owned(node, &name)?;
    let taken = node.reserve_soon(&name).await.ok_or_else(|| occupied(&name))?;
    let Owned { service, exit_code, .. } = owned(node, &name)?;
    let (local, config) = (node.local(), node.local().config(&service));
    if exit_code.is_none() {
        let state = local.engine.state(&config).await.map_err(internal)?;
        let ended = |_| Status::aborted(format!("service {name} has just ended; try again"));
        return Ok((Filesystem::of_process(state.pid).map_err(ended)?, taken));
    }
    if let Some(kept) = &service.kept {
        return Err(Status::failed_precondition(format!(
            "service {name} does not run; `{} cp` copies from and to its container",
            kept.keeper.name()
        )));
    }
    // What it mounts is not there.
    let mounts = service.mounts.iter().map(|mount| mount.target.clone());
    let filesystem = off_worker(|| {
        local.mount_root(&service).map_err(internal)?;
        Filesystem::of_ended(&config.rootfs, mounts).map_err(internal)
    })?;
    let within = |mount: &&Mount| Path::new(path).starts_with(&mount.target);
    if let Some(mount) = service.mounts.iter().find(within) {
        return Err(Status::failed_precondition(format!(
            "service {name} does not run, and {} is a mount of it: {}",
            mount.target.display(),
            match (mount.volume(), mount.bind()) {
                (Some(volume), _) => format!("`godwit volume inspect {volume}` shows where its files are"),
                (None, Some((source, _))) => format!("its files are in {}", source.display()),
                (None, None) => "a tmpfs has no files then".to_owned(),
            }
        )));
    }
    Ok((filesystem, taken))
}

fn failed(error: CopyError) -> Status {
    match &error {
        CopyError::Io { source, .. } if source.kind() == io::ErrorKind::NotFound => {
            Status::not_found(error_chain(&error))
        }
        CopyError::Unfit { .. } | CopyError::Archive(_) => invalid(error),
        CopyError::Ended => Status::aborted(error.to_string()),
        CopyError::Io { .. } | CopyError::Gone(_) => internal(error),
    }
}

/// Sends what is at a path.
pub(crate) async fn out(node: &Arc<Node>, request: CopyOutRequest) -> Result<Output, Status> {
    let (filesystem, taken) = open(node, &request.name, &request.path).await?;
    let (pieces, outgoing) = mpsc::channel(PIECES);
    tokio::task::spawn_blocking(move || {
        let to = Outgoing::new(pieces.clone(), |data| CopyOutput { data });
        let to = io::BufWriter::with_capacity(PIECE, to);
        let copied = filesystem.copy_out(request.path.as_bytes(), to);
        if let Err(error) = copied {
            // The user may have gone, or take nothing.
            let _ = pieces.try_send(Err(failed(error)));
        }
        drop(taken);
    });
    Ok(ReceiverStream::new(outgoing).boxed())
}

/// Takes what the stream has, to the path that its first message says.
pub(crate) async fn into(
    node: &Arc<Node>,
    mut input: Streaming<CopyInput>,
) -> Result<CopyInResponse, Status> {
    let Some(CopyInput { kind: Some(copy_input::Kind::Start(start)) }) = input.message().await? else {
        return Err(Status::invalid_argument("the first message of a copy must say where to"));
    };
    let CopyInStart { name, path, contents, keep_owners } = start;
    let (filesystem, taken) = open(node, &name, &path).await?;
    let (pieces, incoming) = mpsc::channel(PIECES);
    let how = CopyIn { path: path.into_bytes(), contents, keep_owners };
    let copying = tokio::task::spawn_blocking(move || {
        let copied = filesystem.copy_in(&how, Incoming::new(incoming));
        drop(taken);
        copied
    });
    let data = |message: CopyInput| match message.kind {
        Some(copy_input::Kind::Data(data)) => Some(data),
        _ => None,
    };
    hand_on(&mut input, pieces, data).await;
    let copied = copying.await.map_err(internal)?.map_err(failed)?;
    Ok(CopyInResponse { files: copied.files, bytes: copied.bytes })
}
