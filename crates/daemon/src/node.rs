//! One running node: what its parts share, and what it knows of the cluster.

mod lives;

pub(crate) use lives::End;

use std::collections::{HashMap, HashSet, VecDeque};
use std::net::Ipv4Addr;
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use godwit_api::v1::{NodeInfo, PlaceResponse, Placement, PublishedPort};
use godwit_criu::Criu;
use godwit_engine::foreign::Adopts;
use godwit_engine::{Engines, Kept};
use godwit_migration::resources::NodeResources;
use godwit_migration::{Backoff, Port, Progress, Service, Volume, error_chain};
use godwit_names::{ServiceName, VolumeName};
use godwit_network::{Mac, Networks};
use godwit_transfer::ClusterAuthority;
use tokio::sync::futures::Notified;
use tokio::sync::{Notify, Semaphore, broadcast, watch};
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use crate::convert;
use crate::counters::Counters;
use crate::events::Events;
use crate::introduced::Introduced;
use crate::load::Load;
use crate::names::NameServers;
use crate::peers::Peers;
use crate::protection::Surroundings;
use crate::state::{State, StateError, now_ms};
use crate::tombstones::Tombstones;

/// How long an operation on a service may wait for the end of another one on it that is about to end.
const LEAVE: Duration = Duration::from_secs(15);

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

impl Migrating {
    /// Whether the service is being sent: it has not committed, and is not being put back or let go.
    pub(crate) fn sends(&self) -> bool {
        // The sender of the progress has gone by then.
        !self.progress.borrow().is_committed() && self.progress.has_changed().is_ok()
    }
}

/// What is reserved for a service that is being created, or on its way here.
#[derive(Debug, Clone, Default)]
pub(crate) struct Claim {
    /// Its addresses.
    pub addresses: Vec<Ipv4Addr>,
    /// Its published ports.
    pub ports: Vec<Port>,
    /// Its volumes.
    pub volumes: Vec<VolumeName>,
    /// Whether it is a look of this node's own at the service, which ends at once: whoever wants the name waits for that.
    pub is_look: bool,
}

/// Why there cannot be a service of a name, with addresses and ports.
#[derive(Debug)]
pub(crate) struct Conflict {
    /// In a sentence.
    pub sentence: String,
    /// The address that it is about, if it is about one.
    pub address: Option<Ipv4Addr>,
    /// The node that is said to have the other service, if it is another node.
    pub node: Option<String>,
}

/// A preparation of a move.
struct Prepares {
    /// Ends it.
    cancel: CancellationToken,
    /// Whether it is this node that looks whether a move pays: a user's preparation goes before.
    is_look: bool,
}

/// What changes while the node runs and is not stored on disk.
#[derive(Default)]
struct Transient {
    /// Names that are being created or removed, with what is reserved for them until it is in the state.
    busy: HashMap<ServiceName, Claim>,
    /// Migrations from here, by service.
    migrating: HashMap<ServiceName, Migrating>,
    /// Preparations of moves from here, by service.
    preparing: HashMap<ServiceName, Prepares>,
    /// What was decided last about services that follow their clients, and when, by id.
    decided: HashMap<String, (i64, PlaceResponse)>,
    /// Tasks that wait for a service's end.
    watchers: HashMap<ServiceName, lives::Watcher>,
    /// How many there have been.
    watched: u64,
    /// Names of services that are being ended for a user.
    ending: HashMap<ServiceName, &'static str>,
    /// Services that are being started again, by id: their state says already that they run.
    starting: HashSet<String>,
    /// Services of which a task follows what their engine does, by id.
    following: HashMap<String, Arc<tokio::sync::Mutex<()>>>,
    /// Services whose processes this daemon has seen run, by id.
    seen: HashSet<String>,
    /// Services that wait to be started again, by id.
    due: HashMap<String, Instant>,
    /// The pauses before starts of a service by its policy, by id.
    pauses: HashMap<String, Backoff>,
    /// How services have ended that were removed at their end, the latest last, for who asks late.
    removed_at_end: VecDeque<(ServiceName, End, Instant)>,
    /// What peers last told of themselves.
    last_seen: HashMap<String, NodeInfo>,
}

impl Transient {
    /// Reserves a name; whether it was free.
    fn claim(&mut self, name: &ServiceName, claim: Claim) -> bool {
        let free = !self.migrating.contains_key(name) && !self.busy.contains_key(name);
        if free {
            self.busy.insert(name.clone(), claim);
        }
        free
    }

    /// Enters a migration; what the service is doing, if it cannot begin one.
    fn begin(&mut self, name: &ServiceName, migrating: &Migrating) -> Result<(), String> {
        self.is_free(name)?;
        self.migrating.insert(name.clone(), migrating.clone());
        Ok(())
    }

    /// What the service is doing that a move of it cannot run beside.
    fn is_free(&self, name: &ServiceName) -> Result<(), String> {
        if let Some(other) = self.migrating.get(name) {
            return Err(format!("is on its way to node {} already", other.to));
        }
        if self.busy.contains_key(name) {
            return Err("is being started, stopped, removed or checked; try again in a moment".into());
        }
        Ok(())
    }
}

/// What a node works with.
pub(crate) struct Means {
    /// What migrations use: engine, network, images and journal.
    pub local: Arc<NodeResources>,
    /// The networks that are up.
    pub networks: Arc<Networks>,
    /// CRIU, for `godwit doctor`.
    pub criu: Criu,
    /// For containers that come into godwit's care.
    pub engines: Engines,
    /// Starts a service again that has ended after so long, if its policy wants that.
    pub by_policy: fn(&Arc<Node>, &Service, Duration),
}

/// One node.
pub(crate) struct Node {
    /// Its name.
    pub name: String,
    /// What it keeps on disk.
    pub state: Arc<State>,
    /// What happened.
    pub events: Events,
    /// What is counted of it.
    pub counters: Counters,
    /// The other nodes.
    pub peers: Peers,
    /// What is around its overlay.
    pub network: Surroundings,
    /// By which its services find others by name.
    pub names: NameServers,
    /// Held while a task checks whether a name, addresses and ports are free, and reserves them.
    pub claiming: Mutex<()>,
    /// Held while this node is drained.
    pub draining: Arc<tokio::sync::Mutex<()>>,
    /// Held while a container comes into godwit's care.
    pub adopting: tokio::sync::Mutex<()>,
    /// It has been told that this node knows more than fits into a message.
    pub told_too_much: AtomicBool,
    /// What members know of what was removed.
    pub tombstones: Tombstones,
    /// Members that have not spoken to it.
    pub introduced: Introduced,
    /// How long certificates last that this node issues, where that is not the usual time.
    pub certificate_validity: Option<Duration>,
    /// Held while a network is made or removed.
    pub changing_networks: tokio::sync::Mutex<()>,
    /// Held while this node's networks are brought in line with the cluster's.
    pub reconciling_networks: tokio::sync::Mutex<()>,
    /// Held while a member is removed, from the record to the packet filter.
    pub applying_removals: tokio::sync::Mutex<()>,
    /// Raised when others should hear news at once.
    pub news: Notify,
    /// Raised when a name is no longer occupied.
    freed: Notify,
    /// Ends of services of this node.
    ends: broadcast::Sender<End>,
    /// Checks of services, which end before this daemon does: a tracker must not be left in a service.
    pub checks: TaskTracker,
    /// How busy its processors are.
    pub load: Load,
    /// Held while a service of this node follows its clients: one after the other.
    pub follows: Semaphore,
    means: std::sync::OnceLock<Means>,
    transient: Mutex<Transient>,
}

impl Node {
    /// A node that gets its equipment later, by [`Node::equip`].
    pub(crate) fn new(name: &str, state: Arc<State>, peers: Peers, network: Surroundings) -> Self {
        let events = Events::new(name, Arc::clone(&state));
        Self {
            name: name.to_string(),
            state,
            events,
            counters: Counters::new(),
            peers,
            network,
            names: NameServers::default(),
            claiming: Mutex::default(),
            draining: Arc::default(),
            adopting: tokio::sync::Mutex::default(),
            told_too_much: AtomicBool::new(false),
            tombstones: Tombstones::default(),
            introduced: Introduced::default(),
            certificate_validity: None,
            changing_networks: tokio::sync::Mutex::default(),
            reconciling_networks: tokio::sync::Mutex::default(),
            applying_removals: tokio::sync::Mutex::default(),
            news: Notify::new(),
            freed: Notify::new(),
            ends: broadcast::channel(lives::ENDS).0,
            checks: TaskTracker::new(),
            load: Load::new(),
            follows: Semaphore::new(1),
            means: std::sync::OnceLock::new(),
            transient: Mutex::default(),
        }
    }

    /// Gives the node its equipment, which in turn knows the node.
    pub(crate) fn equip(&self, means: Means) {
        assert!(self.means.set(means).is_ok(), "a node is equipped once");
    }

    fn means(&self) -> &Means {
        #[allow(clippy::expect_used, reason = "serve() equips the node before anything can reach it")]
        self.means.get().expect("the node is equipped")
    }

    /// What it moves services with.
    pub(crate) fn local(&self) -> &Arc<NodeResources> {
        &self.means().local
    }

    /// The networks that are up.
    pub(crate) fn networks(&self) -> &Networks {
        &self.means().networks
    }

    /// Its CRIU.
    pub(crate) fn criu(&self) -> &Criu {
        &self.means().criu
    }

    /// The engine that keeps a container, as far as that comes into godwit's care.
    pub(crate) fn keeper(&self, kept: &Kept) -> &dyn Adopts {
        self.means().engines.adopts(kept.keeper)
    }

    /// What has engines by their names.
    pub(crate) fn engines(&self) -> &Engines {
        &self.means().engines
    }

    /// Starts a service again that has ended after so long, if its policy wants that.
    pub(crate) fn by_policy(self: &Arc<Self>, service: &Service, ran: Duration) {
        (self.means().by_policy)(self, service, ran);
    }

    fn transient(&self) -> MutexGuard<'_, Transient> {
        // Every change under this lock is a single insertion or removal: nothing is half done.
        self.transient.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Reserves a name for an operation; no other operation on it can begin meanwhile.
    pub(crate) fn occupy(self: &Arc<Self>, name: &ServiceName) -> Option<Occupied> {
        self.claim(name, Claim::default())
    }

    /// The same for a look of this node's own.
    pub(crate) fn occupy_for_a_look(self: &Arc<Self>, name: &ServiceName) -> Option<Occupied> {
        self.claim(name, Claim { is_look: true, ..Claim::default() })
    }

    /// The same for what somebody has asked for.
    async fn reserve(self: &Arc<Self>, name: &ServiceName) -> Option<Occupied> {
        let is_free = |transient: &mut Transient| transient.claim(name, Claim::default());
        let reserved = self.past_looks(name, is_free).await;
        reserved.then(|| Occupied { node: Arc::clone(self), name: name.clone() })
    }

    /// The same, as soon as another operation on it has ended that ends soon: two commands of users meet now and then.
    pub(crate) async fn reserve_soon(self: &Arc<Self>, name: &ServiceName) -> Option<Occupied> {
        let begun = Instant::now();
        loop {
            self.settle(name).await;
            if let Some(occupied) = self.reserve(name).await {
                return Some(occupied);
            }
            if self.migration(name).is_some() || begun.elapsed() > LEAVE {
                return None;
            }
        }
    }

    /// The same where nothing else may look at the service's memory.
    pub(crate) async fn reserve_alone(self: &Arc<Self>, name: &ServiceName) -> Option<Occupied> {
        let occupied = self.reserve_soon(name).await?;
        // None begins while the name is taken.
        self.past_preparation(name).await;
        Some(occupied)
    }

    /// Enters the preparation of a move, for as long as what is returned is there; what the service is doing, if it cannot
    /// begin. A move, or what else needs the service's memory for itself, cancels it and waits for its end.
    pub(crate) async fn begin_preparation(
        self: &Arc<Self>,
        name: &ServiceName,
        cancel: CancellationToken,
    ) -> Result<Preparing, String> {
        let is_look = |prepares: &Prepares| prepares.is_look;
        loop {
            self.past_those(name, is_look).await;
            let mut transient = self.transient();
            // Another one may have begun meanwhile.
            if !transient.preparing.get(name).is_some_and(is_look) {
                return self.enter(&mut transient, name, Prepares { cancel, is_look: false });
            }
        }
    }

    /// The same for this node's own look at whether a move pays.
    pub(crate) fn begin_look(
        self: &Arc<Self>,
        name: &ServiceName,
        cancel: CancellationToken,
    ) -> Result<Preparing, String> {
        self.enter(&mut self.transient(), name, Prepares { cancel, is_look: true })
    }

    fn enter(
        self: &Arc<Self>,
        transient: &mut Transient,
        name: &ServiceName,
        prepares: Prepares,
    ) -> Result<Preparing, String> {
        transient.is_free(name)?;
        if transient.preparing.contains_key(name) {
            return Err("is being prepared already".into());
        }
        transient.preparing.insert(name.clone(), prepares);
        Ok(Preparing { node: Arc::clone(self), name: name.clone() })
    }

    /// Whether a user has a move of it prepared.
    pub(crate) fn is_prepared(&self, name: &ServiceName) -> bool {
        self.transient().preparing.get(name).is_some_and(|prepares| !prepares.is_look)
    }

    /// How many preparations of moves are under way, but for this node's own looks.
    pub(crate) fn preparations(&self) -> usize {
        self.transient().preparing.values().filter(|prepares| !prepares.is_look).count()
    }

    /// Notes what was decided about a service that follows its clients.
    pub(crate) fn note_decision(&self, id: &str, decided: PlaceResponse) {
        self.counters.decided(&decided);
        self.transient().decided.insert(id.to_owned(), (now_ms(), decided));
    }

    /// What was decided last about a service, and when.
    pub(crate) fn decision(&self, id: &str) -> Option<(i64, PlaceResponse)> {
        self.transient().decided.get(id).cloned()
    }

    /// Forgets it: the service does not follow its clients any more, or not from here.
    pub(crate) fn forget_decision(&self, id: &str) {
        self.transient().decided.remove(id);
    }

    /// Cancels the preparation of a service's move, if there is one, and waits for its end.
    async fn past_preparation(&self, name: &ServiceName) {
        self.past_those(name, |_| true).await;
    }

    /// The same, if it is such a preparation.
    async fn past_those(&self, name: &ServiceName, is_one: impl Fn(&Prepares) -> bool) {
        loop {
            let freed = self.freed.notified();
            tokio::pin!(freed);
            // From here on no notification is missed.
            freed.as_mut().enable();
            match self.transient().preparing.get(name).filter(|prepares| is_one(prepares)) {
                Some(prepares) => prepares.cancel.cancel(),
                None => return,
            }
            freed.await;
        }
    }

    /// Does something once no look of this node's own has the name.
    async fn past_looks<T>(&self, name: &ServiceName, mut act: impl FnMut(&mut Transient) -> T) -> T {
        loop {
            let freed = self.freed.notified();
            tokio::pin!(freed);
            // From here on no notification is missed.
            freed.as_mut().enable();
            {
                let mut transient = self.transient();
                if !transient.busy.get(name).is_some_and(|claim| claim.is_look) {
                    return act(&mut transient);
                }
            }
            freed.await;
        }
    }

    /// The same with addresses and ports, which are reserved meanwhile; under [`Node::claiming`] from the check of what
    /// is free.
    pub(crate) fn claim(self: &Arc<Self>, name: &ServiceName, claim: Claim) -> Option<Occupied> {
        let claimed = self.transient().claim(name, claim);
        claimed.then(|| Occupied { node: Arc::clone(self), name: name.clone() })
    }

    /// Names being created or removed now.
    pub(crate) fn is_busy(&self, name: &str) -> bool {
        self.transient().busy.contains_key(name)
    }

    /// Names that are reserved, but for looks.
    pub(crate) fn reserved(&self) -> Vec<ServiceName> {
        let transient = self.transient();
        let reserved = transient.busy.iter().filter(|(_, claim)| !claim.is_look);
        reserved.map(|(name, _)| name.clone()).collect()
    }

    /// Addresses that are reserved for services that are not in the state yet.
    pub(crate) fn claimed_addresses(&self) -> Vec<Ipv4Addr> {
        self.transient().busy.values().flat_map(|claim| claim.addresses.clone()).collect()
    }

    /// Whether a service is on its way here, perhaps waiting for its source's decision.
    pub(crate) fn is_arriving(&self, name: &str) -> bool {
        self.is_busy(name) || self.local().doubts.has(name)
    }

    /// Enters a migration; what the service is doing, if it cannot begin one.
    pub(crate) async fn begin_migration(
        &self,
        name: &ServiceName,
        migrating: Migrating,
    ) -> Result<(), String> {
        loop {
            self.past_preparation(name).await;
            let begin = |transient: &mut Transient| {
                (!transient.preparing.contains_key(name)).then(|| transient.begin(name, &migrating))
            };
            // `None`: one has begun meanwhile.
            if let Some(begun) = self.past_looks(name, begin).await {
                return begun;
            }
        }
    }

    /// The same before this node looks at its services.
    pub(crate) fn resume_migration(&self, name: &ServiceName, migrating: &Migrating) -> Result<(), String> {
        self.transient().begin(name, migrating)
    }

    /// Forgets a migration that has ended.
    pub(crate) fn end_migration(&self, name: &ServiceName) {
        self.transient().migrating.remove(name);
        self.freed.notify_waiters();
    }

    /// The migration of a service that is under way.
    pub(crate) fn migration(&self, name: &str) -> Option<Migrating> {
        self.transient().migrating.get(name).cloned()
    }

    /// Waits a while for what is ending on a name: a user who was told that an operation is over may start the next one
    /// before this node has finished the last of it.
    pub(crate) async fn settle(&self, name: &ServiceName) {
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

    /// Waits a while for the end of a migration from here that has committed: a service that comes straight back may
    /// find it still being released.
    pub(crate) async fn let_leave(&self, name: &ServiceName) {
        if let Some(mut leaving) = self.migration(name)
            && leaving.progress.borrow().is_committed()
        {
            // An error means that the sender is gone, which is what is waited for.
            let _ = tokio::time::timeout(LEAVE, leaving.ended.changed()).await;
        }
    }

    /// All migrations under way, of services that are on their way from here, or whose pages are.
    pub(crate) fn migrating(&self) -> Vec<(ServiceName, Migrating)> {
        let transient = self.transient();
        transient.migrating.iter().map(|(name, migrating)| (name.clone(), migrating.clone())).collect()
    }

    /// The same without names.
    pub(crate) fn migrations(&self) -> Vec<Migrating> {
        self.transient().migrating.values().cloned().collect()
    }

    /// Returns when something that was being done with a service has ended, or that is to be looked at again. Nothing is missed
    /// once it is enabled.
    pub(crate) fn changes(&self) -> Notified<'_> {
        self.freed.notified()
    }

    /// Has those look again who wait for changes.
    pub(crate) fn look_again(&self) {
        self.freed.notify_waiters();
    }

    /// Remembers what a peer told of itself.
    pub(crate) fn hear(&self, info: NodeInfo) {
        self.transient().last_seen.insert(info.name.clone(), info);
    }

    /// Forgets a node that was removed.
    pub(crate) fn forget(&self, name: &str) {
        self.transient().last_seen.remove(name);
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
    pub(crate) fn last_seen(&self, name: &str) -> Option<NodeInfo> {
        self.transient().last_seen.get(name).cloned()
    }

    /// The link-layer addresses with which nodes answer for their services.
    pub(crate) fn known_macs(&self) -> Vec<Mac> {
        let transient = self.transient();
        let told = transient.last_seen.values().filter_map(|info| info.network.as_ref());
        told.filter_map(|network| convert::parse_mac(&network.uplink_mac)).collect()
    }

    /// Reserves a name for an operation as soon as it is free.
    pub(crate) async fn wait_to_occupy(self: &Arc<Self>, name: &ServiceName) -> Occupied {
        loop {
            let freed = self.freed.notified();
            tokio::pin!(freed);
            // From here on no notification is missed.
            freed.as_mut().enable();
            if let Some(occupied) = self.occupy(name) {
                return occupied;
            }
            match self.migration(name) {
                Some(mut migrating) => tokio::select! {
                    () = freed => {}
                    // An error means that the sender is gone, which is what is waited for.
                    _ = migrating.ended.changed() => {}
                },
                None => freed.await,
            }
        }
    }

    /// The address of a member's peer API.
    pub(crate) fn member_address(&self, name: &str) -> Result<Option<String>, StateError> {
        Ok(self.state.member(name)?.map(|member| member.address))
    }

    /// Where a service is, if any node has it.
    pub(crate) fn placement(&self, name: &ServiceName) -> Result<Option<Placement>, StateError> {
        Ok(self.state.placement(name)?.filter(|placement| !placement.removed))
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
            service: service.name.to_string(),
            address: service.address.to_string(),
            more: service.more.iter().map(ToString::to_string).collect(),
            node: node.to_string(),
            epoch,
            removed,
            id: service.id.clone(),
            publish: convert::shown_ports(&service.publish),
            aliases: service.aliases.clone(),
        })?;
        self.news.notify_one();
        Ok(())
    }

    /// Why there cannot be a service of this name, addresses, published ports and volumes, as far as this node knows;
    /// nothing if there can. What node `asker` has does not count: it knows that better.
    pub(crate) fn conflict(
        &self,
        name: &ServiceName,
        Claim { addresses, ports, volumes, .. }: &Claim,
        id: &str,
        asker: &str,
    ) -> Result<Option<Conflict>, StateError> {
        let about = |sentence, address| Ok(Some(Conflict { sentence, address, node: None }));
        for address in addresses {
            let network = self.networks().of(*address);
            if let Err(error) = network.and_then(|network| network.config().subnet.check(*address)) {
                return about(format!("node {}: {error}", self.name), None);
            }
        }
        let ports = convert::shown_ports(ports);
        let taken = |theirs: &[PublishedPort]| {
            let same = |port: &&PublishedPort| {
                theirs.iter().any(|o| o.host_port == port.host_port && o.protocol == port.protocol)
            };
            ports.iter().find(same).map(|port| format!("{}/{}", port.host_port, port.protocol))
        };
        for placement in self.state.placements()? {
            if placement.removed || placement.id == id || (placement.node == asker && asker != self.name) {
                continue;
            }
            let Placement { service, node, .. } = &placement;
            let with = |sentence, address| {
                let node = Some(node.clone()).filter(|node| *node != self.name);
                Ok(Some(Conflict { sentence, address, node }))
            };
            if name == service.as_str() {
                return with(format!("the name {name} is taken by a service on node {node}"), None);
            }
            let theirs = convert::addresses_of(&placement);
            if let Some(address) = addresses.iter().find(|address| theirs.contains(*address)) {
                return with(
                    format!("the address {address} is taken by service {service} on node {node}"),
                    Some(*address),
                );
            }
            if let Some(port) = taken(&placement.publish) {
                return with(
                    format!(
                        "port {port} is already published by service {service} on node {node}, and a published port leads to the same service on every node; choose another port"
                    ),
                    None,
                );
            }
        }
        for volume in volumes {
            let is_new = id.is_empty() && asker == self.name;
            if let Some(sentence) = self.volume_conflict(name, volume, is_new) {
                return about(sentence, None);
            }
        }
        let busy = self.transient().busy.clone();
        for (other, claim) in &busy {
            let coming = || {
                format!("service {other}, which is being created on node {} or on its way there", self.name)
            };
            if other == name {
                return about(
                    format!(
                        "a service {name} is being created or removed on node {}, or an earlier migration of it has not ended there; try again in a moment",
                        self.name
                    ),
                    None,
                );
            }
            if let Some(address) = addresses.iter().find(|address| claim.addresses.contains(*address)) {
                return about(format!("the address {address} is taken by {}", coming()), Some(*address));
            }
            if let Some(port) = taken(&convert::shown_ports(&claim.ports)) {
                return about(format!("port {port} is published by {}; choose another port", coming()), None);
            }
            if let Some(volume) = volumes.iter().find(|volume| claim.volumes.contains(volume)) {
                return about(format!("volume {volume} is that of {}; choose another one", coming()), None);
            }
        }
        Ok(None)
    }
}

impl Node {
    /// Why a service of this name cannot have a volume, in a sentence: each is on one node, and one service at most has it. A new
    /// service of this node may take one that is here; another's is elsewhere.
    fn volume_conflict(&self, name: &ServiceName, volume: &VolumeName, is_new: bool) -> Option<String> {
        let here = &self.name;
        match self.local().volume(volume) {
            Ok(None) => None,
            Ok(Some(Volume { service: Some(other), .. })) => (other != *name).then(|| {
                format!("service {other} on node {here} has volume {volume}, and one service at most has a volume; choose another one")
            }),
            Ok(Some(Volume { service: None, .. })) => (!is_new).then(|| {
                format!("node {here} has a volume {volume}; run the service there, remove the volume there with `godwit volume rm {volume}`, or choose another one")
            }),
            Err(error) => Some(format!("node {here} cannot tell whether it has volume {volume}: {}", error_chain(&error))),
        }
    }

    /// Which other service has the service's network namespace, if godwit did not create that, in a sentence:
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

/// A name that is reserved for an operation; free again when this is dropped.
pub(crate) struct Occupied {
    node: Arc<Node>,
    name: ServiceName,
}

/// A preparation of a move; it has ended when this is dropped.
pub(crate) struct Preparing {
    node: Arc<Node>,
    name: ServiceName,
}

impl Drop for Preparing {
    fn drop(&mut self) {
        self.node.transient().preparing.remove(&self.name);
        self.node.freed.notify_waiters();
    }
}

impl Drop for Occupied {
    fn drop(&mut self) {
        self.node.transient().busy.remove(&self.name);
        self.node.freed.notify_waiters();
    }
}
