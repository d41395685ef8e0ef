//! Services find each other by name: this node's DNS server of each network, and what it knows.
//!
//! Every node answers its own services, from what it knows of all. A service that asks is known by its address; it is told of
//! services on its networks alone, each by its address there.

use std::collections::BTreeMap;
use std::net::{IpAddr, Ipv4Addr};
use std::path::PathBuf;
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use godwit_dns::{Names, Server, Upstream};
use godwit_migration::{Service, error_chain};
use godwit_network::{NetworkError, Overlay, enter, redirect_names};
use tokio_util::task::AbortOnDropHandle;

use crate::names::{Index, Running, Trouble};
use crate::node::Node;

/// The node's name servers.
const RESOLV_CONF: &str = "/etc/resolv.conf";
/// A network whose services did not get through to the server is tried again by a service that starts so much later.
const AGAIN: Duration = Duration::from_secs(60);

/// What the server of one network knows.
struct Known {
    node: Weak<Node>,
    gateway: Ipv4Addr,
}

impl Known {
    /// The networks of who asks: those of the service that has the address, else the one whose server is asked.
    fn networks(&self, node: &Node, index: &Index, asker: Ipv4Addr) -> Vec<Arc<Overlay>> {
        let of = |address: &Ipv4Addr| node.networks().of(*address).ok();
        match index.at(asker) {
            Some((_, addresses)) => addresses.iter().filter_map(of).collect(),
            None => of(&self.gateway).into_iter().collect(),
        }
    }
}

impl Names for Known {
    fn addresses(&self, asker: Ipv4Addr, name: &str) -> Option<Vec<IpAddr>> {
        let node = self.node.upgrade()?;
        let index = node.names.index(&node.state)?;
        let networks = self.networks(&node, &index, asker);
        let of =
            |address: Ipv4Addr| networks.iter().find(|network| network.config().subnet.contains(address));
        let found = index.find(name, |address| of(address).is_some());
        let both = |address: Ipv4Addr| {
            let six =
                of(address).and_then(|network| network.config().prefix6).map(|prefix| prefix.of(address));
            [Some(IpAddr::V4(address)), six.map(IpAddr::V6)].into_iter().flatten()
        };
        (!found.is_empty()).then(|| found.into_iter().flat_map(both).collect())
    }

    fn name(&self, asker: Ipv4Addr, address: IpAddr) -> Option<String> {
        let node = self.node.upgrade()?;
        let index = node.names.index(&node.state)?;
        let networks = self.networks(&node, &index, asker);
        let near = networks.iter().find_map(|network| {
            let config = network.config();
            let four = match address {
                IpAddr::V4(address) => address,
                IpAddr::V6(address) => config.prefix6?.address_in(address)?,
            };
            config.subnet.contains(four).then_some(four)
        });
        index.at(near?).map(|(name, _)| name.clone())
    }
}

/// Notes how it is with a network; it is said when trouble begins.
fn note(node: &Node, gateway: Ipv4Addr, trouble: Option<Trouble>) {
    node.networks().set_name_server(gateway, trouble.is_none());
    let mut running = node.names.running();
    let Some(running) = running.get_mut(&gateway) else { return };
    if let (None, Some(Trouble { why, .. })) = (&running.trouble, &trouble) {
        tracing::warn!(%gateway, why, "services do not find each other by name");
        let detail = format!("services do not find each other by name: {why}");
        node.events.tell("node", "no names", &node.name, &detail);
    }
    running.trouble = trouble;
}

/// Serves names on each network that is up, and on no other. What is asked is led there only where it is heard.
pub(crate) async fn keep(node: &Arc<Node>) {
    let names = &node.names;
    let _alone = names.keeping.lock().await;
    let networks = if names.port.is_some() { node.networks().all() } else { Vec::new() };
    let up: BTreeMap<_, _> =
        networks.into_iter().map(|network| (network.config().subnet.gateway(), network)).collect();
    let port = names.port.unwrap_or_default();
    let same = |gateway: &Ipv4Addr, running: &Running| {
        let network = up.get(gateway).zip(running.network.as_ref());
        network.is_some_and(|(one, other)| Arc::ptr_eq(one, other))
    };
    names.running().retain(|gateway, running| same(gateway, running));
    let mut silent = BTreeMap::new();
    for (gateway, network) in &up {
        if names.running().get(gateway).is_some_and(Running::serves) {
            continue;
        }
        let (serving, why) = match serve(node, *gateway, port, network) {
            Ok(serving) => (Some(serving), None),
            Err(why) => (None, Some(why)),
        };
        let mut running = names.running();
        let running = running.entry(*gateway).or_default();
        (running.serving, running.network) = (serving, Some(Arc::clone(network)));
        silent.extend(why.map(|why| (*gateway, why)));
    }
    let served = up.iter().filter(|(gateway, _)| !silent.contains_key(gateway));
    let bridges: Vec<_> =
        served.map(|(gateway, network)| (network.config().bridge.clone(), *gateway)).collect();
    let led = redirect_names(port, &bridges).await.map_err(|error| error_chain(&error));
    if let (true, Err(error)) = (bridges.is_empty(), &led) {
        tracing::debug!(error, "questions for names may still be led to an earlier godwitd");
    }
    for gateway in up.into_keys() {
        match silent.remove(&gateway).or_else(|| led.clone().err()) {
            Some(why) => {
                note(node, gateway, Some(Trouble { since: Instant::now(), why, is_found: false }));
            }
            None => {
                // What a service has found stays until another one gets through.
                let trouble = names.running().get(&gateway).and_then(|running| running.trouble.clone());
                if trouble.is_none_or(|trouble| !trouble.is_found) {
                    note(node, gateway, None);
                }
            }
        }
    }
}

fn serve(
    node: &Arc<Node>,
    gateway: Ipv4Addr,
    port: u16,
    network: &Overlay,
) -> Result<AbortOnDropHandle<()>, String> {
    let bridge = &network.config().bridge;
    let server = Server::bind(gateway, port, bridge)
        .map_err(|error| format!("port {port} of {gateway} on {bridge} cannot be taken: {error}"))?;
    let known = Arc::new(Known { node: Arc::downgrade(node), gateway });
    let serving = tokio::spawn(server.serve(known, Upstream::new(PathBuf::from(RESOLV_CONF))));
    Ok(AbortOnDropHandle::new(serving))
}

/// The first network of a service, where names are served on it.
fn served(node: &Node, service: &Service) -> Option<Arc<Overlay>> {
    let network = node.networks().of(*service.addresses().first()?).ok()?;
    let running = node.names.running();
    running.get(&network.config().subnet.gateway())?.serves().then_some(network)
}

/// Asks the server of a network from a service's namespace: why it does not answer, if it does not. An error says nothing of
/// the server.
async fn ask(node: &Node, service: &Service, network: &Overlay) -> Result<Option<String>, NetworkError> {
    let gateway = network.config().subnet.gateway();
    let heard = enter(&node.local().layout.namespace(service), move || godwit_dns::hears(gateway)).await?;
    Ok(heard.err().map(|why| why.to_string()))
}

/// The same, and once more if it does not answer: somebody may have taken away what leads there.
async fn ask_twice(
    node: &Arc<Node>,
    service: &Service,
    network: &Overlay,
) -> Result<Option<String>, NetworkError> {
    match ask(node, service, network).await {
        Ok(Some(_)) => {
            keep(node).await;
            ask(node, service, network).await
        }
        heard => heard,
    }
}

/// Whether what a container asks that runs already gets through. If not, that may be its own doing, and says nothing of others.
pub(crate) async fn gets_through(node: &Arc<Node>, service: &Service) -> bool {
    let Some(network) = served(node, service) else { return false };
    match ask_twice(node, service, &network).await {
        Ok(None) => {
            // Whatever was found before.
            note(node, network.config().subnet.gateway(), None);
            true
        }
        Ok(Some(why)) => {
            tracing::warn!(service = %service.name, why, "what it asks for names does not get through: it keeps its name servers");
            false
        }
        Err(error) => {
            tracing::warn!(service = %service.name, error = %error_chain(&error), "nothing can be asked from its network namespace");
            false
        }
    }
}

/// Finds out, before its program runs, whether what a service asks gets through to the server of its first network: a firewall
/// of the node may drop it. Then services keep the node's own name servers.
pub(crate) async fn try_out(node: &Arc<Node>, service: &Service) {
    let Some(network) = served(node, service) else { return };
    let gateway = network.config().subnet.gateway();
    let trouble = node.names.running().get(&gateway).and_then(|running| running.trouble.clone());
    if trouble.is_some_and(|trouble| trouble.since.elapsed() < AGAIN) {
        return;
    }
    match ask_twice(node, service, &network).await {
        Ok(None) => note(node, gateway, None),
        Ok(Some(why)) => {
            let why = format!(
                "what they ask {gateway} does not get through ({why}); have the firewall of this node accept port {}, UDP and TCP, from {}",
                node.names.port.unwrap_or_default(),
                network.config().bridge
            );
            note(node, gateway, Some(Trouble { since: Instant::now(), why, is_found: true }));
        }
        Err(error) => {
            tracing::warn!(service = %service.name, error = %error_chain(&error), "nothing can be asked from its network namespace");
        }
    }
}
