//! The cluster as migrations see it from this node, and what they change in the node's state.

use std::net::Ipv4Addr;
use std::sync::{Arc, PoisonError};
use std::time::Duration;

use async_trait::async_trait;
use godwit_api::v1::{DecisionRequest, DecisionResponse};
use godwit_migration::link;
use godwit_migration::resources::{ArrivalEnd, Place};
use godwit_migration::{Cluster, ClusterError, Decision, Known, Progress, Service, error_chain};
use godwit_names::ServiceName;
use godwit_transfer::{Connection, NodeName};
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use crate::cluster;
use crate::cordon;
use crate::directory;
use crate::network::{forward, overlay};
use crate::node::{Claim, Migrating, Node};
use crate::state::StateError;

/// A service that left before this daemon was started, and whose pages are still served.
struct Leaving {
    node: Arc<Node>,
    name: ServiceName,
    /// Its end is what others wait for.
    _end: watch::Sender<()>,
}

impl Drop for Leaving {
    fn drop(&mut self) {
        self.node.end_migration(&self.name);
    }
}

/// The cluster as migrations see it from this node.
pub(crate) struct ClusterView(pub std::sync::Weak<Node>);

impl ClusterView {
    fn node(&self) -> Result<Arc<Node>, ClusterError> {
        self.0.upgrade().ok_or_else(|| ClusterError("godwitd is shutting down".into()))
    }
}

impl ClusterView {
    /// Asks the source of a migration for its decision; with `acknowledged` it only acknowledges the commit.
    async fn ask(
        &self,
        source: &str,
        migration: &str,
        journal: &str,
        acknowledged: bool,
    ) -> Result<DecisionResponse, ClusterError> {
        let node = self.node()?;
        let address = node
            .member_address(source)
            .map_err(|e| cluster_error(&e))?
            .ok_or_else(|| ClusterError(format!("node {source} is not a member of the cluster")))?;
        let (migration_id, journal) = (migration.to_owned(), journal.to_owned());
        let request = DecisionRequest { migration_id, journal, acknowledged };
        let answer = node.peers.get(source, &address).decision(request).await;
        Ok(answer.map_err(|status| ClusterError(status.message().to_string()))?.into_inner())
    }
}

fn cluster_error(error: &(dyn std::error::Error + 'static)) -> ClusterError {
    ClusterError(error_chain(error))
}

/// Most nodes that are asked where a service has gone.
const MOST_ASKED: usize = 8;

/// Why node `from` may not move a service here, if it may not: it is known to be another member's, which does not say
/// that it has given the service away.
async fn not_its_own(node: &Arc<Node>, service: &Service, from: &str) -> Result<Option<String>, StateError> {
    let mut asked = Vec::new();
    loop {
        let placements = node.state.placements()?;
        let Some(placement) = placements.into_iter().find(|placement| placement.id == service.id) else {
            return Ok(None);
        };
        let owner = placement.node;
        let is_member = node.state.members()?.iter().any(|member| member.name == owner);
        // A member that was removed says nothing any more.
        if placement.removed || owner == from || (owner != node.name && !is_member) {
            return Ok(None);
        }
        if owner == node.name {
            let is_here = node.state.services()?.iter().any(|owned| owned.service.id == service.id);
            return Ok(is_here.then(|| {
                format!("node {} has service {} (id {}) itself", node.name, placement.service, service.id)
            }));
        }
        let is_new = !asked.contains(&owner) && asked.len() < MOST_ASKED;
        if !is_new || !cluster::hear(node, &owner).await? {
            return Ok(Some(format!(
                "node {} knows service {} (id {}) as node {owner}'s, and has no news that it moved to node {from}; make sure that the nodes reach each other, or remove node {owner} if it is lost",
                node.name, placement.service, service.id
            )));
        }
        asked.push(owner);
    }
}

#[async_trait]
impl Cluster for ClusterView {
    async fn admit(&self, service: &Service, from: &str) -> Result<Place, Vec<String>> {
        let node = self.node().map_err(|error| vec![error.to_string()])?;
        // First of all: the rest acts on what node `from` says of the service.
        let owned = not_its_own(&node, service, from).await.map_err(|error| vec![error_chain(&error)])?;
        if let Some(objection) = owned {
            return Err(vec![objection]);
        }
        node.let_leave(&service.name).await;
        node.settle(&service.name).await;
        let claim = Claim {
            addresses: service.addresses(),
            ports: service.publish.clone(),
            volumes: service.volumes().cloned().collect(),
            is_look: false,
        };
        let mut objections =
            match cluster::settled_conflict(&node, &service.name, &claim, &service.id, &node.name).await {
                Ok(conflict) => conflict.into_iter().map(|conflict| conflict.sentence).collect::<Vec<_>>(),
                Err(error) => vec![error_chain(&error)],
            };
        if node.state.service(&service.name).ok().flatten().is_some() {
            objections.push(format!("node {} still holds a service {}", node.name, service.name));
        }
        match node.namespace_taken(service) {
            Ok(taken) => objections.extend(taken),
            Err(error) => objections.push(error_chain(&error)),
        }
        if node.local().doubts.has(&service.name) {
            objections.push(format!(
                "node {} still waits for the end of an earlier migration of it, which is in doubt there",
                node.name
            ));
        }
        objections.extend(overlay::objections(&node, service).await);
        match cordon::objection(&node) {
            Ok(objection) => objections.extend(objection),
            Err(error) => objections.push(error_chain(&error)),
        }
        if !objections.is_empty() {
            return Err(objections);
        }
        // What was free may have been taken since.
        let _alone = node.claiming.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(objection) = cordon::objection(&node).map_err(|error| vec![error_chain(&error)])? {
            return Err(vec![objection]);
        }
        let conflict = node.conflict(&service.name, &claim, &service.id, &node.name);
        if let Some(conflict) = conflict.map_err(|error| vec![error_chain(&error)])? {
            return Err(vec![conflict.sentence]);
        }
        match node.claim(&service.name, claim) {
            Some(occupied) => Ok(Box::new(occupied)),
            None => Err(vec![format!(
                "a service {} is being created or removed on node {}, or an earlier migration of it has not ended there; try again in a moment",
                service.name, node.name
            )]),
        }
    }

    fn known(&self, service: &Service) -> Result<Known, ClusterError> {
        let node = self.node()?;
        let owned = node.state.service(&service.name).map_err(|e| cluster_error(&e))?;
        let placements = node.state.placements().map_err(|e| cluster_error(&e))?;
        let placement = placements.into_iter().find(|placement| placement.id == service.id);
        Ok(Known {
            here: owned.filter(|owned| owned.service.id == service.id).map(|owned| owned.service.epoch),
            elsewhere: placement.filter(|p| p.removed || p.node != node.name).map(|p| p.epoch),
        })
    }

    fn occupy(&self, name: &ServiceName) -> Option<Place> {
        self.node().ok()?.occupy(name).map(|occupied| Box::new(occupied) as Place)
    }

    async fn adopt(&self, service: &Service) -> Result<(), ClusterError> {
        let node = self.node()?;
        node.state.put_service(service).map_err(|e| cluster_error(&e))?;
        node.place(service, &node.name, service.epoch, false).map_err(|e| cluster_error(&e))?;
        node.watch(service);
        node.events.tell("migration", "arrived", &service.name, "");
        Ok(())
    }

    async fn lost(&self, service: &Service, reason: &str) {
        if let Ok(node) = self.node() {
            // Its watcher would know less.
            node.unwatch(&service.name);
            node.events.tell("migration", "lost", &service.name, reason);
            // Before its processes are killed: it is started again when this migration is over.
            node.ended(service, 128 + nix::libc::SIGKILL, reason, Duration::ZERO).await;
        }
    }

    async fn release(&self, service: &Service, to: &str) -> Result<(), ClusterError> {
        let node = self.node()?;
        if node.state.remove_service(service).map_err(|e| cluster_error(&e))? {
            node.unwatch(&service.name);
            node.forget_lives(&service.id);
        }
        node.place(service, to, service.epoch + 1, false).map_err(|e| cluster_error(&e))?;
        if let Some(placement) = node.placement(&service.name).map_err(|e| cluster_error(&e))?
            && placement.node != node.name
        {
            forward::forward(&node, &placement).await.map_err(|e| cluster_error(&e))?;
        }
        Ok(())
    }

    fn serves(&self, service: &Service, migration: &str, to: &str) -> Result<Place, ClusterError> {
        let node = self.node()?;
        let (end, ended) = watch::channel(());
        let (_, progress) = watch::channel(Progress { phase: "serve", ..Progress::default() });
        let (id, to, cancel) = (migration.into(), to.into(), CancellationToken::new());
        node.resume_migration(&service.name, &Migrating { id, to, cancel, progress, ended })
            .map_err(|doing| ClusterError(format!("service {} {doing}", service.name)))?;
        Ok(Box::new(Leaving { node, name: service.name.clone(), _end: end }))
    }

    async fn decision(&self, source: &str, migration: &str, journal: &str) -> Result<Decision, ClusterError> {
        let answer = self.ask(source, migration, journal, false).await?;
        Ok(match answer.decision() {
            godwit_api::v1::Decision::Committed => Decision::Committed,
            // An older version, without identities of journals, takes a migration that it does not know for aborted.
            godwit_api::v1::Decision::Aborted if !journal.is_empty() && answer.journal != journal => {
                Decision::Unknown("its godwitd is of an older version, which cannot say whether its journal has the migration".into())
            }
            godwit_api::v1::Decision::Aborted => Decision::Aborted(answer.reason),
            godwit_api::v1::Decision::Unknown => Decision::Unknown(answer.reason),
            godwit_api::v1::Decision::Pending | godwit_api::v1::Decision::Unspecified => Decision::Pending,
        })
    }

    async fn acknowledge(&self, source: &str, migration: &str) -> Result<(), ClusterError> {
        self.ask(source, migration, "", true).await.map(drop)
    }

    fn vtep(&self, node: &str) -> Result<Ipv4Addr, ClusterError> {
        let members = self.node()?.state.members().map_err(|e| cluster_error(&e))?;
        let member = members.into_iter().find(|member| member.name == node);
        let vtep = member.and_then(|member| member.vtep.parse().ok());
        vtep.ok_or_else(|| ClusterError(format!("the overlay address of node {node} is not known")))
    }

    fn release_of(&self, of: &str) -> Option<String> {
        directory::release_of(self.node().ok()?.as_ref(), of)
    }

    async fn connect(&self, to: &str) -> Result<Connection, ClusterError> {
        let node = self.node()?;
        let address = node
            .member_address(to)
            .map_err(|e| cluster_error(&e))?
            .ok_or_else(|| ClusterError(format!("node {to} is not a member of the cluster")))?;
        let peer = NodeName::new(to).map_err(|e| cluster_error(&e))?;
        let opened = Connection::open(&node.peers.identity(), &address, &peer, &link::options()).await;
        opened.map_err(|e| cluster_error(&e))
    }

    async fn told(&self, service: &Service, what: &str) {
        if let Ok(node) = self.node() {
            node.events.tell("service", "told", &service.name, what);
        }
    }

    async fn in_doubt(&self, service: &Service, source: &str) {
        if let Ok(node) = self.node() {
            let detail = format!("restored here, and stopped until node {source} says whether it committed");
            node.events.tell("migration", "in doubt", &service.name, &detail);
        }
    }

    fn arrival_ended(&self, end: ArrivalEnd) {
        if let Ok(node) = self.node() {
            node.counters.arrived(end);
        }
    }
}
