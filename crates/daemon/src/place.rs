//! On which node a service is best for its clients, asked of this node or of the one that has it. Nothing moves.
//!
//! ```text
//!   the service      clients ┬─ echoes of all nodes ──▶ the nearest ──▶ each asked, its link measured ──▶ decide
//!                    looks at its memory and files ──────────────────▶
//! ```
//! What is measured of the service is measured as `godwit check` does, once; what is measured of a node, too.

pub(crate) mod clients;
pub(crate) mod decision;
pub(crate) mod facts;
pub(crate) mod survey;
pub(crate) mod told;

use std::sync::Arc;
use std::time::Duration;

use godwit_api::v1 as api;
use godwit_migration::{Options, Service};
use godwit_names::ServiceName;
use godwit_policy::assess::Cause;
use godwit_policy::loss::Target;
use godwit_policy::quantity::Moment;
use godwit_policy::state::{NodeId, State};
use tokio_util::sync::CancellationToken;
use tonic::Status;

use self::decision::Matter;
use self::survey::{Place, Surveyor, ended};
use crate::convert;
use crate::directory::{elsewhere, nodes, too_old};
use crate::engine_changes;
use crate::migrate::leaving;
use crate::node::{Migrating, Node};
use crate::services::occupied;
use crate::status::internal;
use crate::verbs;

/// The longest latency with which a client is content, unless the user says so.
pub(crate) const LATENCY: Duration = Duration::from_millis(20);

/// How long clients stay where they are, unless the user says so.
const STAY: Duration = Duration::from_secs(60);

/// What is asked for.
struct Asked {
    name: ServiceName,
    options: Options,
    /// The only node that is considered; else empty.
    to: String,
    target: Target,
    stay: Duration,
    cause: Cause,
}

/// The best node, wherever the service is.
pub(crate) async fn anywhere(
    node: &Arc<Node>,
    request: api::PlaceRequest,
) -> Result<api::PlaceResponse, Status> {
    let name = asked(&request, Cause::Asked)?.name;
    let Some((owner, address)) = elsewhere(node, &name)? else { return here(node, &request).await };
    let answer = node.peers.get_patient(&owner, &address).place(request).await;
    let answer = answer.map_err(|status| match verbs::is_unknown(&status) {
        true => too_old(node, &name, &owner, "places no services"),
        false => status,
    });
    let answer = answer?.into_inner();
    if told::is_plain(&answer) && answer.name == name.as_str() {
        return Ok(answer);
    }
    Err(Status::internal(format!("node {owner} returned an invalid answer about service {name}")))
}

fn asked(request: &api::PlaceRequest, cause: Cause) -> Result<Asked, Status> {
    let missing = || Status::invalid_argument("the request names no service");
    let of_move = request.r#move.as_ref().ok_or_else(missing)?;
    let auto = api::MigrateRequest { mode: String::new(), ..of_move.clone() };
    let latency = match request.latency_us {
        0 => LATENCY,
        us => Duration::from_micros(us),
    };
    let target = Target::new(latency)
        .ok_or_else(|| Status::invalid_argument("no client has a latency of more than a day"))?;
    let stay = match request.stay_ms {
        0 => STAY,
        ms => Duration::from_millis(ms),
    };
    Ok(Asked {
        name: convert::service_name(&of_move.name)?,
        options: convert::options(&auto).map_err(Status::invalid_argument)?,
        to: of_move.to.clone(),
        target,
        stay,
        cause,
    })
}

/// The best node for a service of this node.
pub(crate) async fn here(
    node: &Arc<Node>,
    request: &api::PlaceRequest,
) -> Result<api::PlaceResponse, Status> {
    here_for(node, request, Cause::Asked).await
}

/// The same, for what has the service move.
pub(crate) async fn here_for(
    node: &Arc<Node>,
    request: &api::PlaceRequest,
    cause: Cause,
) -> Result<api::PlaceResponse, Status> {
    let asked = asked(request, cause)?;
    let name = asked.name.clone();
    node.settle(&name).await;
    let to = Some(asked.to.as_str()).filter(|to| !to.is_empty());
    let service = engine_changes::taken_over(node, leaving(node, &name, to)?).await?;
    let sends = |migrating: &Migrating| match cause {
        // Pages of a service that has left may follow for as long as its destination is away.
        Cause::Draining => migrating.sends(),
        Cause::Asked | Cause::Watched => true,
    };
    let sending = node.migrations().iter().filter(|migrating| sends(migrating)).count();
    let sending = u32::try_from(sending).unwrap_or(u32::MAX);
    // It must not move, stop or be asked about twice meanwhile.
    let occupied = node.reserve_alone(&name).await.ok_or_else(|| occupied(&name))?;
    let cancel = node.local().ending.child_token();
    // Whoever asked may leave: then it ends, and with it what holds the service.
    let _leaving = cancel.clone().drop_guard();
    let looking = Placing { node: Arc::clone(node), service, asked, cancel };
    // In a task of its own, to its end: the tracker must not be left in the service.
    let placing = node.checks.spawn(async move {
        let answer = looking.place(sending).await;
        drop(occupied);
        answer
    });
    placing.await.map_err(internal)?
}

struct Placing {
    node: Arc<Node>,
    service: Service,
    asked: Asked,
    cancel: CancellationToken,
}

impl Placing {
    async fn place(&self, sending: u32) -> Result<api::PlaceResponse, Status> {
        let Self { node, service, asked, cancel } = self;
        let surveyor = Surveyor { node, service, options: &asked.options, target: asked.target, cancel };
        let config = node.local().config(service);
        let mut seen = None;
        let finding = cancel.run_until_cancelled(clients::find(&config.network_namespace));
        let (examined, clients) = tokio::join!(surveyor.examine(&mut seen), finding);
        let ((found, usage), mut clients) = (examined?, clients.ok_or_else(ended)??);
        let mut answer = told::answer(&service.name, &node.name);
        if told::keeps(&mut answer, &found) {
            return Ok(answer);
        }
        let infos = nodes(node).map_err(internal)?;
        let host = facts::own(&infos, &node.name);
        let others = infos.iter().filter(|info| info.name != node.name);
        let others = others.filter(|info| asked.to.is_empty() || info.name == asked.to);
        let mut places: Vec<_> = others
            .zip(0..)
            .map(|(info, id)| Place::new(NodeId(id), info, &usage, &host, asked.cause))
            .collect();
        let from_here = surveyor.listen_for_echoes(&mut places, &clients).await?;
        let listened = tokio::time::Instant::now();
        clients::compare(&mut clients, &from_here);
        surveyor.ask(&mut places, (&clients, &from_here), |_| true, &mut seen).await?;
        let matter = Matter {
            cause: asked.cause,
            options: &asked.options,
            target: asked.target,
            dwell: asked.stay,
            usage,
            host,
            sending,
            clients: &clients,
            from_here: &from_here,
            echoed: listened.elapsed(),
            places: &places,
        };
        let verdict = matter.decide(&mut State::default(), Moment::default());
        told::tell(&mut answer, &verdict, &matter);
        Ok(answer)
    }
}
