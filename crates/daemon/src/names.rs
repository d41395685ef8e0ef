//! The names by which services find each other: who has them, and how this node's DNS servers are.

use std::collections::{BTreeMap, HashMap};
use std::net::Ipv4Addr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use godwit_api::v1::Placement;
use godwit_migration::error_chain;
use godwit_network::Overlay;
use tokio_util::task::AbortOnDropHandle;

use crate::convert::addresses_of;
use crate::state::State;

/// The DNS servers of this node.
#[derive(Default)]
pub(crate) struct NameServers {
    /// The port at which they serve, as what is asked at port 53 is led there; none where the operator wants no such servers.
    pub(crate) port: Option<u16>,
    /// One starts and ends them at a time.
    pub(crate) keeping: tokio::sync::Mutex<()>,
    /// By the address of the gateway.
    running: Mutex<BTreeMap<Ipv4Addr, Running>>,
    known: Mutex<Option<(u64, Arc<Index>)>>,
}

/// The server of one network.
#[derive(Default)]
pub(crate) struct Running {
    /// The network that it serves: one of the same addresses may be raised in its place.
    pub(crate) network: Option<Arc<Overlay>>,
    /// None where it could not be started.
    pub(crate) serving: Option<AbortOnDropHandle<()>>,
    /// Why services do not ask it.
    pub(crate) trouble: Option<Trouble>,
}

/// Why services do not ask a server.
#[derive(Debug, Clone)]
pub(crate) struct Trouble {
    pub(crate) since: Instant,
    pub(crate) why: String,
    /// Whether a service that starts has found it, and not godwitd by itself: only another one finds that it is over.
    pub(crate) is_found: bool,
}

impl Running {
    /// Whether it runs.
    pub(crate) fn serves(&self) -> bool {
        self.serving.as_ref().is_some_and(|serving| !serving.is_finished())
    }
}

/// The services that there are, by name and address.
#[derive(Debug, Default)]
pub(crate) struct Index {
    services: Vec<(String, Vec<Ipv4Addr>)>,
    by_name: HashMap<String, Vec<usize>>,
    by_alias: HashMap<String, Vec<usize>>,
    by_address: HashMap<Ipv4Addr, usize>,
}

impl Index {
    fn new(placements: &[Placement]) -> Self {
        let mut index = Self::default();
        for placement in placements.iter().filter(|placement| !placement.removed) {
            let (at, addresses) = (index.services.len(), addresses_of(placement));
            for address in &addresses {
                index.by_address.entry(*address).or_insert(at);
            }
            index.by_name.entry(placement.service.to_ascii_lowercase()).or_default().push(at);
            for alias in &placement.aliases {
                index.by_alias.entry(alias.to_ascii_lowercase()).or_default().push(at);
            }
            index.services.push((placement.service.clone(), addresses));
        }
        index
    }

    /// The addresses on these networks of the services with a name. Whose own name it is goes before whose further one.
    pub(crate) fn find(&self, name: &str, is_on: impl Fn(Ipv4Addr) -> bool) -> Vec<Ipv4Addr> {
        for of in [&self.by_name, &self.by_alias] {
            let named = of.get(name).into_iter().flatten().filter_map(|at| self.services.get(*at));
            let near =
                named.filter_map(|(_, addresses)| addresses.iter().copied().find(|address| is_on(*address)));
            let found: Vec<_> = near.collect();
            if !found.is_empty() {
                return found;
            }
        }
        Vec::new()
    }

    /// The service that has an address, and all its addresses.
    pub(crate) fn at(&self, address: Ipv4Addr) -> Option<&(String, Vec<Ipv4Addr>)> {
        self.services.get(*self.by_address.get(&address)?)
    }
}

impl NameServers {
    /// The services as they are now.
    pub(crate) fn index(&self, state: &State) -> Option<Arc<Index>> {
        let mut known = self.known.lock().unwrap_or_else(PoisonError::into_inner);
        let version = state.version_of_placements();
        if let Some((_, index)) = known.as_ref().filter(|(at, _)| *at == version) {
            return Some(Arc::clone(index));
        }
        match state.placements() {
            Ok(placements) => {
                let index = Arc::new(Index::new(&placements));
                *known = Some((version, Arc::clone(&index)));
                Some(index)
            }
            Err(error) => {
                tracing::error!(error = %error_chain(&error), "names of services cannot be read");
                // What was known last is better than to send those who ask elsewhere.
                known.as_ref().map(|(_, index)| Arc::clone(index))
            }
        }
    }

    /// They, while nobody changes them.
    pub(crate) fn running(&self) -> MutexGuard<'_, BTreeMap<Ipv4Addr, Running>> {
        self.running.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Why services of the network with this gateway do not find each other by name; nothing where they do.
    pub(crate) fn trouble(&self, gateway: Ipv4Addr) -> Option<String> {
        match self.running().get(&gateway) {
            Some(running) => running.trouble.as_ref().map(|trouble| trouble.why.clone()),
            None if self.port.is_none() => {
                Some("the operator has switched that off (`godwitd serve --dns off`)".into())
            }
            None => Some("its DNS server has not been started yet".into()),
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn placement(service: &str, addresses: &[&str], aliases: &[&str]) -> Placement {
        let (first, more) = addresses.split_first().unwrap();
        let texts = |all: &[&str]| all.iter().copied().map(str::to_owned).collect();
        Placement {
            service: service.into(),
            address: (*first).into(),
            more: texts(more),
            aliases: texts(aliases),
            ..Placement::default()
        }
    }

    #[test]
    fn a_name_is_that_of_its_service_before_it_is_an_alias_and_only_where_it_is_reached() {
        let index = Index::new(&[
            placement("db", &["10.88.0.2"], &["store"]),
            placement("Cache", &["10.88.0.3", "10.89.0.3"], &["db", "store"]),
            placement("far", &["10.90.0.2"], &["store"]),
            Placement { removed: true, ..placement("gone", &["10.88.0.9"], &["store"]) },
            // In a namespace of somebody else's.
            placement("own", &["0.0.0.0"], &["store"]),
        ]);
        let at = |name: &str, network: u8| {
            let found = index.find(name, |address| address.octets()[1] == network);
            found.iter().map(ToString::to_string).collect::<Vec<_>>()
        };
        assert_eq!(at("db", 88), ["10.88.0.2"]);
        assert_eq!(at("db", 89), ["10.89.0.3"], "nobody there has it as a name");
        assert_eq!(at("cache", 88), ["10.88.0.3"]);
        assert_eq!(at("store", 88), ["10.88.0.2", "10.88.0.3"]);
        for (name, network) in [("far", 88), ("gone", 88), ("own", 88), ("other", 88)] {
            assert_eq!(at(name, network), [""; 0], "{name}");
        }
        let name = |address: &str| index.at(address.parse().unwrap()).map(|(name, _)| name.as_str());
        assert_eq!((name("10.89.0.3"), name("10.88.0.9"), name("0.0.0.0")), (Some("Cache"), None, None));
    }
}
