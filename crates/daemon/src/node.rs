//! One running node: what its parts share, and what it knows of the cluster.

use std::collections::{HashMap, HashSet};
use std::net::Ipv4Addr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use async_trait::async_trait;
use godwit_api::v1::{DecisionRequest, NodeInfo, Placement, PublishedPort};
use godwit_migration::link;
use godwit_migration::local::{Local, Place};
use godwit_migration::{Decision, Host, HostError, Port, Progress, Service, error_chain};
use godwit_network::Mac;
use godwit_transfer::{ClusterAuthority, Connection, NodeName};
use tokio::sync::{Notify, watch};
use tokio::task::AbortHandle;
use tokio_util::sync::CancellationToken;

use crate::events::Events;
use crate::introduced::Introduced;
use crate::network::{self, Network};
use crate::peers::Peers;
use crate::state::{State, StateError};
use crate::{convert, forward, networks};

/// How long an operation on a service may wait for the end of another one on it that is about to end.
const LEAVE: Duration = Duration::from_secs(5);

/// A migration under way from this node.
#[derive(Clone)]
pub(crate) struct Migrating {
    /// Its id.
    pub id: String,
    /// Where it goes.
    pub to: String,
    /// Cancels it until it has committed.
    pub cancel: CancellationToken,
    /// How far it is.
    pub progress: watch::Receiver<Progress>,
    /// Closed when it has ended.
    pub ended: watch::Receiver<()>,
}

/// What changes while the node runs and is not worth a disk.
#[derive(Default)]
struct Moment {
    /// Names that are being created or removed.
    busy: HashSet<String>,
    /// Migrations from here, by service.
    migrating: HashMap<String, Migrating>,
    /// Services restored here whose source has not told its decision: the source, and since when.
    in_doubt: HashMap<String, (Service, String)>,
    /// Tasks that wait for a service's end.
    watchers: HashMap<String, AbortHandle>,
    /// What peers last told of themselves.
    heard: HashMap<String, NodeInfo>,
}

/// One node.
pub(crate) struct Node {
    /// Its name.
    pub name: String,
    /// What it keeps on disk.
    pub state: Arc<State>,
    /// What happened.
    pub events: Events,
    /// The other nodes.
    pub peers: Peers,
    /// What is around its overlay.
    pub network: Network,
    /// Members that have not spoken to it.
    pub introduced: Introduced,
    /// How long certificates last that this node issues, where that is not the usual time.
    pub certificate_validity: Option<Duration>,
    /// Held by who makes or removes a network.
    pub changing_networks: tokio::sync::Mutex<()>,
    /// Raised when others should hear news at once.
    pub news: Notify,
    /// Raised when a name is no longer occupied.
    freed: Notify,
    local: std::sync::OnceLock<Arc<Local>>,
    moment: Mutex<Moment>,
}

impl Node {
    /// A node whose means are given later by [`Node::equip`].
    pub(crate) fn new(name: &str, state: Arc<State>, peers: Peers, network: Network) -> Self {
        let events = Events::new(name, Arc::clone(&state));
        Self {
            name: name.to_string(),
            state,
            events,
            peers,
            network,
            introduced: Introduced::default(),
            certificate_validity: None,
            changing_networks: tokio::sync::Mutex::default(),
            news: Notify::new(),
            freed: Notify::new(),
            local: std::sync::OnceLock::new(),
            moment: Mutex::default(),
        }
    }

    /// Gives the node its engine, network and journal, which in turn know the node.
    pub(crate) fn equip(&self, local: Arc<Local>) {
        assert!(self.local.set(local).is_ok(), "a node is equipped once");
    }

    /// The node's means.
    pub(crate) fn local(&self) -> &Arc<Local> {
        #[allow(clippy::expect_used, reason = "serve() equips the node before anything can reach it")]
        self.local.get().expect("the node is equipped")
    }

    fn moment(&self) -> MutexGuard<'_, Moment> {
        // Every change under this lock is a single insertion or removal: nothing is half done.
        self.moment.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes a name for an operation that must not meet another one on it.
    pub(crate) fn occupy(self: &Arc<Self>, name: &str) -> Option<Occupied> {
        let mut moment = self.moment();
        if moment.migrating.contains_key(name) || !moment.busy.insert(name.to_string()) {
            return None;
        }
        Some(Occupied { node: Arc::clone(self), name: name.to_string() })
    }

    /// Names being created or removed now.
    pub(crate) fn is_busy(&self, name: &str) -> bool {
        self.moment().busy.contains(name)
    }

    /// Whether a service is on its way here, perhaps waiting for its source's decision.
    pub(crate) fn is_arriving(&self, name: &str) -> bool {
        let moment = self.moment();
        moment.busy.contains(name) || moment.in_doubt.contains_key(name)
    }

    /// Enters a migration; what the service is doing, if it cannot begin one.
    pub(crate) fn begin_migration(&self, name: &str, migrating: Migrating) -> Result<(), String> {
        let mut moment = self.moment();
        if let Some(other) = moment.migrating.get(name) {
            return Err(format!("is on its way to node {} already", other.to));
        }
        if moment.busy.contains(name) {
            return Err("is being stopped, removed or plugged in; try again in a moment".into());
        }
        moment.migrating.insert(name.to_string(), migrating);
        Ok(())
    }

    /// Forgets a migration that has ended.
    pub(crate) fn end_migration(&self, name: &str) {
        self.moment().migrating.remove(name);
    }

    /// The migration of a service that is under way.
    pub(crate) fn migration(&self, name: &str) -> Option<Migrating> {
        self.moment().migrating.get(name).cloned()
    }

    /// Waits a while for what is ending on a name: who was told that an operation is over may start
    /// the next one before this node has put the last of it away.
    pub(crate) async fn settle(&self, name: &str) {
        let free = async {
            loop {
                let freed = self.freed.notified();
                tokio::pin!(freed);
                // From here on no notification is missed.
                freed.as_mut().enable();
                if !self.is_busy(name) {
                    return;
                }
                freed.await;
            }
        };
        // Whether it is free is for the caller to find, and to say.
        let _ = tokio::time::timeout(LEAVE, free).await;
    }

    /// Waits a while for the end of a migration from here that has committed: a service that comes
    /// straight back finds the last of it being let go.
    async fn let_leave(&self, name: &str) {
        if let Some(mut leaving) = self.migration(name)
            && leaving.progress.borrow().is_committed()
        {
            // An error means that the sender is gone, which is what is waited for.
            let _ = tokio::time::timeout(LEAVE, leaving.ended.changed()).await;
        }
    }

    /// All migrations under way.
    pub(crate) fn migrations(&self) -> Vec<Migrating> {
        self.moment().migrating.values().cloned().collect()
    }

    /// Services restored here that wait for their source's decision.
    pub(crate) fn doubts(&self) -> Vec<(Service, String)> {
        self.moment().in_doubt.values().cloned().collect()
    }

    /// Remembers what a peer told of itself.
    pub(crate) fn hear(&self, info: NodeInfo) {
        self.moment().heard.insert(info.name.clone(), info);
    }

    /// Forgets a node that was removed.
    pub(crate) fn forget(&self, name: &str) {
        self.moment().heard.remove(name);
        self.peers.forget(name);
    }

    /// The CA with this node's time for certificates.
    pub(crate) fn lasting(&self, authority: ClusterAuthority) -> ClusterAuthority {
        match self.certificate_validity {
            Some(validity) => authority.with_node_validity(validity),
            None => authority,
        }
    }

    /// What a peer last told of itself.
    pub(crate) fn heard(&self, name: &str) -> Option<NodeInfo> {
        self.moment().heard.get(name).cloned()
    }

    /// The link-layer addresses with which nodes answer for their services.
    pub(crate) fn known_macs(&self) -> Vec<Mac> {
        let moment = self.moment();
        let told = moment.heard.values().filter_map(|info| info.network.as_ref());
        told.filter_map(|network| network::parse_mac(&network.uplink_mac)).collect()
    }

    /// Watches for the end of a service that runs here.
    pub(crate) fn watch(self: &Arc<Self>, service: &Service) {
        let node = Arc::clone(self);
        let watched = service.clone();
        let task = tokio::spawn(async move {
            let config = node.local().config(&watched);
            let (code, reason) = match node.local().engine.wait(&config).await {
                Ok(code) => (code, String::new()),
                Err(error) => (-1, error_chain(&error)),
            };
            let known = node.state.service(&watched.name).ok().flatten();
            if known.is_some_and(|owned| owned.exit_code.is_some()) {
                // Whoever ended it has told why.
                return;
            }
            node.ended(&watched, code, &reason).await;
        });
        if let Some(before) = self.moment().watchers.insert(service.name.clone(), task.abort_handle()) {
            before.abort();
        }
    }

    /// Stops watching: the service leaves, or is being removed.
    pub(crate) fn unwatch(&self, name: &str) {
        if let Some(watcher) = self.moment().watchers.remove(name) {
            watcher.abort();
        }
    }

    async fn ended(&self, service: &Service, code: i32, reason: &str) {
        if let Err(error) = self.state.set_exit(&service.name, code, reason) {
            tracing::error!(service = %service.name, error = %error_chain(&error), "its end cannot be kept");
        }
        if let Err(error) = self.local().close_network(service).await {
            tracing::warn!(service = %service.name, error = %error_chain(&error), "its port cannot be closed");
        }
        let detail = if reason.is_empty() { format!("exit code {code}") } else { reason.to_string() };
        self.events.tell("service", "died", &service.name, &detail);
    }

    /// The address of a member's peer API.
    pub(crate) fn member_address(&self, name: &str) -> Result<Option<String>, StateError> {
        Ok(self.state.members()?.into_iter().find(|m| m.name == name).map(|m| m.address))
    }

    /// Where a service is, if any node has it.
    pub(crate) fn placement(&self, name: &str) -> Result<Option<Placement>, StateError> {
        Ok(self.state.placements()?.into_iter().find(|p| p.service == name && !p.removed))
    }

    /// Says where a service of this node is now, to the state, the network and the others.
    pub(crate) fn place(
        &self,
        service: &Service,
        node: &str,
        epoch: u64,
        removed: bool,
    ) -> Result<(), StateError> {
        self.state.put_placement(&Placement {
            service: service.name.clone(),
            address: service.address.to_string(),
            more: service.more.iter().map(ToString::to_string).collect(),
            node: node.to_string(),
            epoch,
            removed,
            id: service.id.clone(),
            publish: convert::shown_ports(&service.publish),
        })?;
        self.news.notify_one();
        Ok(())
    }

    /// Why there cannot be a service of this name, addresses and published ports, as far as this node knows;
    /// nothing if there can. Of what node `asker` has, that knows more.
    pub(crate) fn conflict(
        &self,
        name: &str,
        addresses: &[Ipv4Addr],
        ports: &[Port],
        id: &str,
        asker: &str,
    ) -> Result<Option<String>, StateError> {
        for address in addresses {
            let network = self.local().networks.of(*address);
            if let Err(error) = network.and_then(|network| network.config().subnet.check(*address)) {
                return Ok(Some(format!("node {}: {error}", self.name)));
            }
        }
        for placement in self.state.placements()? {
            if placement.removed || placement.id == id || (placement.node == asker && asker != self.name) {
                continue;
            }
            if placement.service == name {
                return Ok(Some(format!("the name {name} is taken by a service on node {}", placement.node)));
            }
            let theirs = networks::addresses_of(&placement);
            if let Some(address) = addresses.iter().find(|address| theirs.contains(*address)) {
                return Ok(Some(format!(
                    "the address {address} is taken by service {} on node {}",
                    placement.service, placement.node
                )));
            }
            let taken = convert::shown_ports(ports).into_iter().find(|port| {
                let same = |other: &&PublishedPort| {
                    other.host_port == port.host_port && other.protocol == port.protocol
                };
                placement.publish.iter().find(same).is_some()
            });
            if let Some(port) = taken {
                return Ok(Some(format!(
                    "port {}/{} is already published by service {} on node {}, and a published port leads to the same service on every node; choose another port",
                    port.host_port, port.protocol, placement.service, placement.node
                )));
            }
        }
        if self.is_busy(name) {
            return Ok(Some(format!(
                "a service {name} is being created or removed on node {}, or an earlier migration of it ends there; try again in a moment",
                self.name
            )));
        }
        Ok(None)
    }
}

impl Node {
    /// Which other service has the service's network namespace, if that is somebody else's, in a sentence:
    /// each would be silenced with the other.
    pub(crate) fn namespace_taken(&self, service: &Service) -> Result<Option<String>, StateError> {
        let Some(path) = service.network.namespace() else { return Ok(None) };
        let services = self.state.services()?.into_iter().map(|owned| owned.service);
        let other = services.into_iter().find(|s| s.id != service.id && s.network == service.network);
        Ok(other.map(|other| {
            format!(
                "service {} on node {} is in the network namespace {}",
                other.name,
                self.name,
                path.display()
            )
        }))
    }
}

/// A name that is taken for an operation; free again when this is dropped.
pub(crate) struct Occupied {
    node: Arc<Node>,
    name: String,
}

impl Drop for Occupied {
    fn drop(&mut self) {
        self.node.moment().busy.remove(&self.name);
        self.node.freed.notify_waiters();
    }
}

/// A service whose pages are served by this life of the daemon, though an earlier one gave it away.
struct Leaving {
    node: Arc<Node>,
    name: String,
    /// Its end is what others wait for.
    _end: watch::Sender<()>,
}

impl Drop for Leaving {
    fn drop(&mut self) {
        self.node.end_migration(&self.name);
    }
}

/// The node as migrations know it.
pub(crate) struct NodeHost(pub std::sync::Weak<Node>);

impl NodeHost {
    fn node(&self) -> Result<Arc<Node>, HostError> {
        self.0.upgrade().ok_or_else(|| HostError("godwitd is shutting down".into()))
    }
}

fn host_error(error: &(dyn std::error::Error + 'static)) -> HostError {
    HostError(error_chain(error))
}

#[async_trait]
impl Host for NodeHost {
    async fn admit(&self, service: &Service) -> Result<Place, Vec<String>> {
        let node = self.node().map_err(|error| vec![error.to_string()])?;
        node.let_leave(&service.name).await;
        node.settle(&service.name).await;
        let mut objections = match node.conflict(
            &service.name,
            &service.addresses(),
            &service.publish,
            &service.id,
            &node.name,
        ) {
            Ok(conflict) => conflict.into_iter().collect::<Vec<_>>(),
            Err(error) => vec![error_chain(&error)],
        };
        if node.state.service(&service.name).ok().flatten().is_some() {
            objections.push(format!("node {} still holds a service {}", node.name, service.name));
        }
        match node.namespace_taken(service) {
            Ok(taken) => objections.extend(taken),
            Err(error) => objections.push(error_chain(&error)),
        }
        if node.moment().in_doubt.contains_key(&service.name) {
            objections
                .push(format!("node {} still waits for the end of an earlier migration of it", node.name));
        }
        objections.extend(network::objections(&node, service).await);
        if !objections.is_empty() {
            return Err(objections);
        }
        match node.occupy(&service.name) {
            Some(occupied) => Ok(Box::new(occupied)),
            None => Err(vec![format!(
                "a service {} is being created or removed on node {}, or an earlier migration of it ends there; try again in a moment",
                service.name, node.name
            )]),
        }
    }

    async fn adopt(&self, service: &Service) -> Result<(), HostError> {
        let node = self.node()?;
        node.state.put_service(service).map_err(|e| host_error(&e))?;
        node.place(service, &node.name, service.epoch, false).map_err(|e| host_error(&e))?;
        node.watch(service);
        node.events.tell("migration", "arrived", &service.name, "");
        Ok(())
    }

    async fn lost(&self, service: &Service, reason: &str) {
        if let Ok(node) = self.node() {
            // Its watcher would tell less.
            node.unwatch(&service.name);
            node.events.tell("migration", "lost", &service.name, reason);
            node.ended(service, 128 + nix::libc::SIGKILL, reason).await;
        }
    }

    async fn release(&self, service: &Service, to: &str) -> Result<(), HostError> {
        let node = self.node()?;
        node.unwatch(&service.name);
        node.state.remove_service(&service.name).map_err(|e| host_error(&e))?;
        node.place(service, to, service.epoch + 1, false).map_err(|e| host_error(&e))?;
        if let Some(placement) = node.placement(&service.name).map_err(|e| host_error(&e))?
            && placement.node != node.name
        {
            forward::forward(&node, &placement).await.map_err(|e| host_error(&e))?;
        }
        Ok(())
    }

    fn serves(&self, service: &Service, migration: &str, to: &str) -> Result<Place, HostError> {
        let node = self.node()?;
        let (end, ended) = watch::channel(());
        let (_, progress) = watch::channel(Progress { phase: "serve", ..Progress::default() });
        let (id, to, cancel) = (migration.into(), to.into(), CancellationToken::new());
        node.begin_migration(&service.name, Migrating { id, to, cancel, progress, ended })
            .map_err(|doing| HostError(format!("service {} {doing}", service.name)))?;
        Ok(Box::new(Leaving { node, name: service.name.clone(), _end: end }))
    }

    async fn decision(&self, source: &str, migration: &str) -> Result<Decision, HostError> {
        let node = self.node()?;
        let address = node
            .member_address(source)
            .map_err(|e| host_error(&e))?
            .ok_or_else(|| HostError(format!("node {source} is no member of the cluster")))?;
        let answer = node
            .peers
            .get(source, &address)
            .decision(DecisionRequest { migration_id: migration.to_string() })
            .await
            .map_err(|status| HostError(status.message().to_string()))?
            .into_inner();
        Ok(match answer.decision() {
            godwit_api::v1::Decision::Committed => Decision::Committed,
            godwit_api::v1::Decision::Kept => Decision::Kept(answer.reason),
            godwit_api::v1::Decision::Pending | godwit_api::v1::Decision::Unspecified => Decision::Pending,
        })
    }

    fn vtep(&self, node: &str) -> Result<Ipv4Addr, HostError> {
        let members = self.node()?.state.members().map_err(|e| host_error(&e))?;
        let member = members.into_iter().find(|member| member.name == node);
        let vtep = member.and_then(|member| member.vtep.parse().ok());
        vtep.ok_or_else(|| HostError(format!("it is not known where node {node} takes frames for services")))
    }

    async fn connect(&self, to: &str) -> Result<Connection, HostError> {
        let node = self.node()?;
        let address = node
            .member_address(to)
            .map_err(|e| host_error(&e))?
            .ok_or_else(|| HostError(format!("node {to} is no member of the cluster")))?;
        let peer = NodeName::new(to).map_err(|e| host_error(&e))?;
        let opened = Connection::open(&node.peers.identity(), &address, &peer, &link::options()).await;
        opened.map_err(|e| host_error(&e))
    }

    async fn told(&self, service: &Service, what: &str) {
        if let Ok(node) = self.node() {
            node.events.tell("service", "told", &service.name, what);
        }
    }

    async fn in_doubt(&self, service: &Service, source: &str, doubt: bool) {
        let Ok(node) = self.node() else { return };
        if doubt {
            let entry = (service.clone(), source.to_string());
            node.moment().in_doubt.insert(service.name.clone(), entry);
            let detail = format!("restored here, stopped, until node {source} tells whether it committed");
            node.events.tell("migration", "in doubt", &service.name, &detail);
        } else {
            node.moment().in_doubt.remove(&service.name);
        }
    }
}
