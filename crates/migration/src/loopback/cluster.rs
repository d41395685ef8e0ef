//! What the daemon does above a migration: the state, the names, and the way to the other node.

use std::collections::BTreeSet;
use std::net::Ipv4Addr;
use std::sync::{Arc, Mutex, PoisonError};

use async_trait::async_trait;
use godwit_names::ServiceName;
use godwit_transfer::{Connection, Identity};

use super::machine::Machine;
use super::wire::Wire;
use crate::resources::{ArrivalEnd, Cluster, ClusterError, Decision, Known, Place};
use crate::service::Service;
use crate::{error_chain, link, recovery};

/// The names that an operation of this daemon has.
pub(super) type Names = Arc<Mutex<BTreeSet<ServiceName>>>;

/// One daemon's.
pub(super) struct Above {
    pub(super) machine: Arc<Machine>,
    pub(super) peer: Arc<Machine>,
    pub(super) wire: Arc<Wire>,
    pub(super) identity: Identity,
    pub(super) names: Names,
}

struct Occupied(Names, ServiceName);

impl Drop for Occupied {
    fn drop(&mut self) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).remove(&self.1);
    }
}

impl Above {
    fn step<T>(&self, verb: &str, work: impl FnOnce() -> Result<T, ClusterError>) -> Result<T, ClusterError> {
        let failed = || Err(ClusterError(format!("a fault is injected into {verb}")));
        self.machine.script.step(&format!("cluster.{verb}"), work).unwrap_or_else(failed)
    }

    fn take(&self, name: &ServiceName) -> Option<Place> {
        let mut names = self.names.lock().unwrap_or_else(PoisonError::into_inner);
        names.insert(name.clone()).then(|| Box::new(Occupied(Arc::clone(&self.names), name.clone())) as Place)
    }
}

#[async_trait]
impl Cluster for Above {
    async fn admit(&self, service: &Service, _: &str) -> Result<Place, Vec<String>> {
        let admitted = self.step("admit", || {
            if self.machine.there().own.contains_key(&service.id) {
                return Err(ClusterError("it is here".into()));
            }
            if self.machine.daemon().is_some_and(|local| local.doubts.has(&service.name)) {
                return Err(ClusterError("it is in doubt".into()));
            }
            self.take(&service.name).ok_or_else(|| ClusterError("its name is taken".into()))
        });
        admitted.map_err(|error| vec![error.0])
    }

    fn known(&self, service: &Service) -> Result<Known, ClusterError> {
        self.step("known", || {
            let there = self.machine.there();
            Ok(Known {
                here: there.own.get(&service.id).map(|own| own.epoch),
                elsewhere: there.elsewhere.get(&service.id).map(|(_, epoch)| *epoch),
            })
        })
    }

    fn occupy(&self, name: &ServiceName) -> Option<Place> {
        self.take(name)
    }

    async fn adopt(&self, service: &Service) -> Result<(), ClusterError> {
        self.step("adopt", || {
            let mut there = self.machine.there();
            there.own.insert(service.id.clone(), service.clone());
            there.elsewhere.remove(&service.id);
            Ok(())
        })
    }

    async fn release(&self, service: &Service, to: &str) -> Result<(), ClusterError> {
        self.step("release", || {
            let mut there = self.machine.there();
            if there.own.get(&service.id).is_some_and(|own| own.epoch == service.epoch) {
                there.own.remove(&service.id);
            }
            there.elsewhere.insert(service.id.clone(), (to.into(), service.epoch + 1));
            Ok(())
        })
    }

    fn serves(&self, service: &Service, _: &str, _: &str) -> Result<Place, ClusterError> {
        self.step("serves", || {
            self.take(&service.name).ok_or_else(|| ClusterError("its name is taken".into()))
        })
    }

    async fn decision(&self, source: &str, migration: &str, journal: &str) -> Result<Decision, ClusterError> {
        assert_eq!(source, self.peer.name);
        self.step("decision", || {
            let local = self.peer.daemon().ok_or_else(|| ClusterError(format!("node {source} is down")))?;
            recovery::decision(&local, migration, &self.machine.name, journal)
                .map_err(|error| ClusterError(error_chain(&error)))
        })
    }

    async fn acknowledge(&self, source: &str, migration: &str) -> Result<(), ClusterError> {
        self.step("acknowledge", || {
            let local = self.peer.daemon().ok_or_else(|| ClusterError(format!("node {source} is down")))?;
            // The word is for the other node; what becomes of it there is not this one's fault.
            let noted = local.journal.acknowledge(migration, &self.machine.name);
            noted.map_err(|error| ClusterError(error_chain(&error)))
        })
    }

    fn vtep(&self, _: &str) -> Result<Ipv4Addr, ClusterError> {
        self.step("vtep", || Ok(Ipv4Addr::LOCALHOST))
    }

    fn release_of(&self, _: &str) -> Option<String> {
        None
    }

    async fn connect(&self, node: &str) -> Result<Connection, ClusterError> {
        assert_eq!(node, self.peer.name);
        self.step("connect", || Ok(()))?;
        let (address, to) = (self.wire.address(), self.peer_name());
        let opened = Connection::open(&self.identity, &address, &to, &link::options()).await;
        opened.map_err(|error| ClusterError(error_chain(&error)))
    }

    async fn lost(&self, _: &Service, reason: &str) {
        self.machine.script.note(&format!("lost: {reason}"));
    }

    async fn told(&self, _: &Service, what: &str) {
        self.machine.script.note(&format!("told: {what}"));
    }

    async fn in_doubt(&self, _: &Service, _: &str) {
        self.machine.script.note("in doubt");
    }

    fn arrival_ended(&self, end: ArrivalEnd) {
        self.machine.script.note(&format!("counted: {}", end.name()));
        self.machine.there().arrivals.push(end);
    }
}

impl Above {
    fn peer_name(&self) -> godwit_transfer::NodeName {
        godwit_transfer::NodeName::new(&self.peer.name).unwrap()
    }
}
