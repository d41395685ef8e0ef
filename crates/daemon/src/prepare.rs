//! Preparations of moves, which end when the service is moved or checked, and when nobody reads how they go.

use std::sync::Arc;

use godwit_api::v1::{MigrateRequest, MigrationEvent, migration_event::Kind};
use godwit_migration::{Mode, Options, Progress, Source};
use godwit_names::ServiceName;
use tokio::sync::{mpsc, oneshot, watch};
use tonic::Status;

use crate::convert;
use crate::directory::{elsewhere, too_old};
use crate::engine_changes;
use crate::migrate::{Moving, QUEUE, Stream, leaving, stream};
use crate::node::Node;
use crate::verbs;

/// Starts a preparation of a service of this node.
pub(crate) async fn start(
    node: &Arc<Node>,
    name: ServiceName,
    request: &MigrateRequest,
) -> Result<Stream, Status> {
    let options = convert::options(request).map_err(Status::invalid_argument)?;
    let options = Options { prepares: true, mode: Mode::Precopy, ..options };
    node.settle(&name).await;
    let service = engine_changes::taken_over(node, leaving(node, &name, Some(&request.to))?).await?;
    let cancel = node.local().ending.child_token();
    let preparing = node
        .begin_preparation(&name, cancel.clone())
        .await
        .map_err(|doing| Status::aborted(format!("service {name} {doing}")))?;
    let id = ulid::Ulid::new().to_string();
    let (progress, watching) = watch::channel(Progress::default());
    let (to, local) = (request.to.clone(), Arc::clone(node.local()));
    let moving = Moving { id: id.clone(), to: to.clone(), image: service.image.clone() };
    let source = Source::new(local, service, id, to, options, progress, cancel.clone());
    let (finish, finished) = oneshot::channel();
    // In a task of its own, to its end: the tracker must not be left in the service.
    let counting = Arc::clone(node);
    node.checks.spawn(async move {
        let report = source.prepare().await;
        counting.counters.prepared(&report);
        drop(preparing);
        // The one who asked may have gone.
        let _ = finish.send(Ok(convert::report(report)));
    });
    Ok(stream(moving, watching, finished, cancel))
}

/// Starts a preparation here or at the node that has the service.
pub(crate) async fn start_anywhere(node: &Arc<Node>, request: MigrateRequest) -> Result<Stream, Status> {
    let name = convert::service_name(&request.name)?;
    let Some((owner, address)) = elsewhere(node, &name)? else { return start(node, name, &request).await };
    if owner == request.to {
        return Err(Status::invalid_argument(format!(
            "service {name} is on node {owner} already; name another node (`godwit nodes` lists them)"
        )));
    }
    let asked = node.peers.get_patient(&owner, &address).prepare(request).await;
    let mut incoming = asked.map_err(|status| not_asked(node, &name, &owner, status))?.into_inner();
    let node = Arc::clone(node);
    let (events, stream) = mpsc::channel::<Result<MigrationEvent, Status>>(QUEUE);
    tokio::spawn(async move {
        loop {
            let event = tokio::select! {
                // Dropped with this, the other node's stream has no reader either.
                () = events.closed() => return,
                event = incoming.message() => match event {
                    Ok(Some(event)) => Ok(event),
                    Ok(None) => return,
                    Err(status) => Err(not_asked(&node, &name, &owner, status)),
                },
            };
            let last = matches!(event, Err(_) | Ok(MigrationEvent { kind: Some(Kind::Report(_)) }));
            if events.send(event).await.is_err() || last {
                return;
            }
        }
    });
    Ok(stream)
}

/// A node of an older version does not know what it is asked.
fn not_asked(node: &Node, name: &ServiceName, owner: &str, status: Status) -> Status {
    if verbs::is_unknown(&status) { too_old(node, name, owner, "prepares no moves") } else { status }
}
