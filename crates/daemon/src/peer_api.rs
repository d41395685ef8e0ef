//! The node's API for the other nodes of the cluster. A caller is known by its certificate.

use std::pin::Pin;
use std::sync::Arc;

use futures::{Stream, StreamExt};
use godwit_api::v1 as api;
use godwit_api::v1::peer_server::Peer;
use godwit_migration::{Decision, recovery};
use godwit_names::ServiceName;
use godwit_transfer::{Membership, NodeName};
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Request, Response, Status, Streaming};

use crate::convert::service_name;
use crate::follow::policy;
use crate::network::cluster_networks;
use crate::node::{Claim, Node};
use crate::protection::keys;
use crate::status::internal;
use crate::{
    capture, check, cluster, connections, cordon, drain, migrate, place, prepare, renew, sessions, wait,
};

/// Serves the peer API.
pub(crate) struct PeerService(pub Arc<Node>, pub VerbsFrom);

/// Whose users may act on this node's services.
#[derive(Debug, Clone)]
pub(crate) struct VerbsFrom(pub Vec<String>);

impl VerbsFrom {
    /// Whether node `from` may pass on a verb for a service that is placed on node `owner`. A node may always act on its
    /// own services.
    fn allows(&self, from: &str, owner: Option<&str>) -> bool {
        owner == Some(from) || self.0.iter().any(|name| name == "all" || name == from)
    }
}

impl PeerService {
    /// Lets a verb of another node's user pass, and logs the node.
    fn pass(&self, from: &str, verb: &str, service: &ServiceName) -> Result<(), Status> {
        let placement = self.0.placement(service).map_err(internal)?;
        if !self.1.allows(from, placement.map(|placement| placement.node).as_deref()) {
            return Err(self.refusal(from, verb));
        }
        tracing::info!(from, verb, %service, "a verb was passed on");
        Ok(())
    }

    /// Whether an address is that of services of node `from` alone: a node that may see the packets of its own service
    /// must not name another one's address.
    fn shows(&self, from: &str, address: &str) -> Result<(), Status> {
        if self.1.allows(from, None) {
            return Ok(());
        }
        let address = address
            .parse()
            .map_err(|_| Status::invalid_argument("the IPv4 address is missing or invalid"))?;
        let holders = self.0.state.placements_at(address).map_err(internal)?;
        if holders.is_empty() || holders.iter().any(|placement| placement.node != from) {
            return Err(self.refusal(from, "capture"));
        }
        Ok(())
    }

    /// Lets a verb about this node itself pass, and logs the node whose user it is.
    fn pass_of_node(&self, from: &str, verb: &str) -> Result<(), Status> {
        if !self.1.allows(from, None) {
            return Err(self.refusal(from, verb));
        }
        tracing::info!(from, verb, "a verb was passed on");
        Ok(())
    }

    fn refusal(&self, from: &str, verb: &str) -> Status {
        let name = &self.0.name;
        Status::permission_denied(format!(
            "node {name} does not accept `{verb}` from node {from}; run it on node {name}, or start its godwitd with --verbs-from {from}"
        ))
    }
}

/// Most volumes of which another node may ask at once.
const MOST_VOLUMES: usize = 1024;

/// The node that calls, as its certificate says.
#[derive(Debug, Clone)]
pub(crate) struct Caller {
    pub node: NodeName,
    /// Whether it still is a member.
    pub membership: Option<Membership>,
}

/// Its name.
fn caller<T>(request: &Request<T>) -> Result<String, Status> {
    accepted(request).map(|caller| caller.node.to_string())
}

fn accepted<T>(request: &Request<T>) -> Result<&Caller, Status> {
    let caller = request.extensions().get::<Caller>();
    caller.ok_or_else(|| Status::unauthenticated("the caller has no certificate of this cluster"))
}

#[tonic::async_trait]
impl Peer for PeerService {
    type AttachStream = sessions::Outputs;
    type CaptureStream = capture::Batches;
    type MigrateStream = Pin<Box<dyn Stream<Item = Result<api::MigrationEvent, Status>> + Send>>;
    type PrepareStream = Self::MigrateStream;
    type DrainStream = Pin<Box<dyn Stream<Item = Result<api::DrainEvent, Status>> + Send>>;

    async fn sync(&self, request: Request<api::SyncMessage>) -> Result<Response<api::SyncMessage>, Status> {
        let (from, membership) = (caller(&request)?, accepted(&request)?.membership.clone());
        let message = request.into_inner();
        if message.info.as_ref().is_some_and(|info| info.name != from) {
            return Err(Status::permission_denied(format!("node {from} may speak only for itself")));
        }
        let is_refused = move |_: &Node| membership.as_ref().is_some_and(Membership::is_refused);
        cluster::take_in_whole(&self.0, &from, is_refused, message).await.map_err(internal)?;
        Ok(Response::new(cluster::what_we_know(&self.0).map_err(internal)?))
    }

    async fn renew(
        &self,
        request: Request<api::RenewRequest>,
    ) -> Result<Response<api::RenewResponse>, Status> {
        let from = caller(&request)?;
        let certificate = renew::grant(&self.0, &from, &request.into_inner().request)?;
        tracing::info!(node = from, "was given another certificate");
        Ok(Response::new(api::RenewResponse { certificate }))
    }

    async fn decision(
        &self,
        request: Request<api::DecisionRequest>,
    ) -> Result<Response<api::DecisionResponse>, Status> {
        let from = caller(&request)?;
        let api::DecisionRequest { migration_id: id, journal: asked, acknowledged } = request.into_inner();
        let local = self.0.local();
        if acknowledged {
            local.journal.acknowledge(&id, &from).map_err(internal)?;
        }
        let decision = recovery::decision(local, &id, &from, &asked).map_err(internal)?;
        let (decision, reason) = match decision {
            Decision::Pending => (api::Decision::Pending, String::new()),
            Decision::Committed => (api::Decision::Committed, String::new()),
            Decision::Aborted(reason) => (api::Decision::Aborted, reason),
            Decision::Unknown(reason) => (api::Decision::Unknown, reason),
        };
        let journal = local.journal.identity().to_owned();
        Ok(Response::new(api::DecisionResponse { decision: decision.into(), reason, journal }))
    }

    async fn check(
        &self,
        request: Request<api::CheckRequest>,
    ) -> Result<Response<api::CheckResponse>, Status> {
        let from = caller(&request)?;
        let request = request.into_inner();
        let address = |text: &String| {
            text.parse()
                .map_err(|_| Status::invalid_argument(format!("{text:?} is not a valid IPv4 address")))
        };
        let addresses = request.addresses.iter().map(address).collect::<Result<Vec<_>, _>>()?;
        let ports = crate::convert::ports(&request.publish)?;
        if request.volumes.len() > MOST_VOLUMES {
            return Err(Status::invalid_argument(format!("more than {MOST_VOLUMES} volumes")));
        }
        let volumes = request.volumes.iter().map(|name| crate::convert::volume_name(name));
        let volumes = volumes.collect::<Result<_, _>>()?;
        let claim = Claim { addresses, ports, volumes, is_look: false };
        let name = service_name(&request.name)?;
        let conflict =
            cluster::settled_conflict(&self.0, &name, &claim, "", &from).await.map_err(internal)?;
        let address = conflict.as_ref().and_then(|conflict| conflict.address);
        Ok(Response::new(api::CheckResponse {
            conflict: conflict.map(|conflict| conflict.sentence).unwrap_or_default(),
            address: address.map(|address| address.to_string()).unwrap_or_default(),
        }))
    }

    async fn check_network(
        &self,
        request: Request<api::Network>,
    ) -> Result<Response<api::CheckResponse>, Status> {
        let from = caller(&request)?;
        let conflict = cluster_networks::conflict(&self.0, &request.into_inner(), &from).await?;
        Ok(Response::new(api::CheckResponse {
            conflict: conflict.unwrap_or_default(),
            address: String::new(),
        }))
    }

    async fn keys(&self, request: Request<api::KeysRequest>) -> Result<Response<api::KeysResponse>, Status> {
        let from = caller(&request)?;
        let (node, request) = (&self.0, request.into_inner());
        let members = node.state.members().map_err(|e| Status::internal(e.to_string()))?;
        Ok(Response::new(keys::answer(node.network.keys(), &node.name, &members, &from, &request).await?))
    }

    async fn migrate(
        &self,
        request: Request<api::MigrateRequest>,
    ) -> Result<Response<Self::MigrateStream>, Status> {
        let from = caller(&request)?;
        let request = request.into_inner();
        let name = service_name(&request.name)?;
        self.pass(&from, "migrate", &name)?;
        // Not passed on again: two nodes that know different things must not send it in circles.
        let events = migrate::start(&self.0, name, &request).await?;
        Ok(Response::new(ReceiverStream::new(events).boxed()))
    }

    async fn prepare(
        &self,
        request: Request<api::MigrateRequest>,
    ) -> Result<Response<Self::PrepareStream>, Status> {
        let from = caller(&request)?;
        let request = request.into_inner();
        let name = service_name(&request.name)?;
        self.pass(&from, "prepare", &name)?;
        let events = prepare::start(&self.0, name, &request).await?;
        Ok(Response::new(ReceiverStream::new(events).boxed()))
    }

    async fn check_move(
        &self,
        request: Request<api::CheckMoveRequest>,
    ) -> Result<Response<api::CheckMoveResponse>, Status> {
        let from = caller(&request)?;
        let request = request.into_inner();
        let name = request.r#move.as_ref().map(|asked| asked.name.as_str()).unwrap_or_default();
        self.pass(&from, "check", &service_name(name)?)?;
        Ok(Response::new(check::here(&self.0, &request).await?))
    }

    async fn place(
        &self,
        request: Request<api::PlaceRequest>,
    ) -> Result<Response<api::PlaceResponse>, Status> {
        let from = caller(&request)?;
        let request = request.into_inner();
        let name = request.r#move.as_ref().map(|asked| asked.name.as_str()).unwrap_or_default();
        self.pass(&from, "place", &service_name(name)?)?;
        Ok(Response::new(place::here(&self.0, &request).await?))
    }

    async fn policy(
        &self,
        request: Request<api::PolicyRequest>,
    ) -> Result<Response<api::PolicyResponse>, Status> {
        let from = caller(&request)?;
        let request = request.into_inner();
        self.pass(&from, "policy", &service_name(&request.name)?)?;
        Ok(Response::new(policy::here(&self.0, request).await?))
    }

    async fn cordon(
        &self,
        request: Request<api::CordonRequest>,
    ) -> Result<Response<api::CordonResponse>, Status> {
        let from = caller(&request)?;
        let request = request.into_inner();
        self.pass_of_node(&from, if request.lift { "node uncordon" } else { "node cordon" })?;
        Ok(Response::new(cordon::here(&self.0, request.lift, Some(&from))?))
    }

    async fn drain(
        &self,
        request: Request<api::DrainRequest>,
    ) -> Result<Response<Self::DrainStream>, Status> {
        let from = caller(&request)?;
        self.pass_of_node(&from, "node drain")?;
        let events = drain::here(&self.0, request.into_inner(), Some(&from)).await?;
        Ok(Response::new(ReceiverStream::new(events).boxed()))
    }

    async fn distances(
        &self,
        request: Request<api::DistancesRequest>,
    ) -> Result<Response<api::DistancesResponse>, Status> {
        let from = caller(&request)?;
        Ok(Response::new(place::clients::of_this_node(&from, request.into_inner()).await?))
    }

    async fn cancel(
        &self,
        request: Request<api::ServiceRequest>,
    ) -> Result<Response<api::CancelResponse>, Status> {
        let from = caller(&request)?;
        let name = service_name(&request.into_inner().name)?;
        self.pass(&from, "cancel", &name)?;
        Ok(Response::new(migrate::cancel(&self.0, &name).await?))
    }

    async fn wait(&self, request: Request<api::WaitRequest>) -> Result<Response<api::WaitResponse>, Status> {
        let api::WaitRequest { name, id } = request.into_inner();
        let name = service_name(&name)?;
        let ended = wait::here(&self.0, &name, &id).await?;
        let left = || Status::failed_precondition(format!("service {name} has left node {}", self.0.name));
        Ok(Response::new(ended.ok_or_else(left)?))
    }

    async fn attach(
        &self,
        request: Request<Streaming<api::AttachInput>>,
    ) -> Result<Response<Self::AttachStream>, Status> {
        let from = caller(&request)?;
        Ok(Response::new(sessions::attach(&self.0, &from, request.into_inner()).await?))
    }

    async fn connections(
        &self,
        request: Request<api::ServiceRequest>,
    ) -> Result<Response<api::ConnectionsResponse>, Status> {
        let from = caller(&request)?;
        let name = service_name(&request.into_inner().name)?;
        self.pass(&from, "inspect", &name)?;
        Ok(Response::new(connections::here(&self.0, &name).await?))
    }

    async fn capture(
        &self,
        request: Request<api::CaptureRequest>,
    ) -> Result<Response<Self::CaptureStream>, Status> {
        let from = caller(&request)?;
        let request = request.into_inner();
        self.pass(&from, "capture", &service_name(&request.name)?)?;
        self.shows(&from, &request.address)?;
        Ok(Response::new(capture::here(&self.0, &request).await?))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_node_may_act_on_its_own_services_and_on_others_where_the_operator_lets_it() {
        let of = |words: &[&str]| VerbsFrom(words.iter().map(ToString::to_string).collect());
        assert!(of(&["all"]).allows("c", Some("b")));
        assert!(of(&["a", "c"]).allows("c", Some("b")));
        assert!(!of(&["a"]).allows("c", Some("b")));
        assert!(!of(&["none"]).allows("c", Some("b")));
        assert!(!of(&["none"]).allows("c", None));
        assert!(of(&["none"]).allows("c", Some("c")), "what it has itself");
    }
}
