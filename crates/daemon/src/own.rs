//! What a node is called and where other nodes reach it: as the command line says, else as recorded, else as this
//! machine's network says.
//!
//! ```text
//!           --name, --listen, --uplink       first
//!   init    name       the machine's host name
//!           listen     the address of the default route, port 7117
//!           uplink     the interface that has this address      ──┐
//!   join    name       the one in the token                       ├─▶ identity/own.json: listen, uplink
//!           listen     the address of the route to the founder  ──┘            │
//!   serve   name       the one in the certificate                              │
//!           listen, uplink ◀───────────────────────────────────────────────────┘
//! ```
//! Where this machine's network says two things, or nothing, the error names the flag to give.

use std::cmp::Reverse;
use std::collections::BTreeSet;
use std::fs::{self, File};
use std::io::{self, Write as _};
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::path::{Path, PathBuf};

use godwit_network::{HostAddress, HostNetwork, HostRoute};
use godwit_transfer::NodeName;
use serde::{Deserialize, Serialize};

/// The port for other nodes; nodes that join use the next one.
const PORT: u16 = 7117;

/// The record's file, in the directory of the identity: who moves that away, moves the record away with it.
const RECORD: &str = "own.json";

/// The uplink of nodes that were told none, before there were records.
const FORMER_UPLINK: &str = "eth0";

/// What the operator says on the command line.
#[derive(Debug, Clone, Default)]
pub(crate) struct Asked {
    pub name: Option<String>,
    pub listen: Option<SocketAddr>,
    pub uplink: Option<String>,
}

/// Where other nodes reach this one: what `init` and `join` choose and record.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Place {
    /// Address and port for other nodes.
    pub listen: SocketAddr,
    /// The interface that carries the overlay. `None`: `--listen` was given, and no interface had its address.
    pub uplink: Option<String>,
}

/// What a node needs to know of itself to serve.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Own {
    pub name: String,
    pub listen: SocketAddr,
    pub uplink: String,
}

/// To whom the address leads at which a node is to be reached.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Toward {
    /// Any machine outside.
    Outside,
    /// The founding node, which the token names.
    Founder(Ipv4Addr),
}

impl std::fmt::Display for Toward {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Outside => f.write_str("the outside"),
            Self::Founder(address) => write!(f, "the founding node at {address}"),
        }
    }
}

/// Why it cannot be told what a node is called or where it is reached.
#[derive(Debug, thiserror::Error)]
pub(crate) enum OwnError {
    /// The host name is not a valid name of a node.
    #[error("the machine's host name cannot be the node's name; name the node with --name")]
    HostName(#[source] godwit_transfer::NodeNameError),
    /// The kernel does not tell the host name.
    #[error("the machine's host name cannot be read; name the node with --name")]
    NoHostName(#[source] io::Error),
    /// The token names a founding node that is not reached by IPv4.
    #[error(
        "the token's address {address} is not an IPv4 address, so no route tells this node's own address; say with --listen ADDRESS:{PORT} at which address other nodes reach this one"
    )]
    Founder {
        /// The address in the token.
        address: String,
    },
    /// No route leads there.
    #[error(
        "this machine has no route to {toward}; say with --listen ADDRESS:{PORT} at which of its addresses other nodes reach it: {addresses}"
    )]
    NoRoute {
        /// Where to.
        toward: Toward,
        /// The addresses that this machine has.
        addresses: String,
    },
    /// Routes by several interfaces are equally good.
    #[error(
        "equal routes by the interfaces {interfaces} lead to {toward}; name the one for other nodes with --uplink"
    )]
    Routes {
        /// Where to.
        toward: Toward,
        /// By which.
        interfaces: String,
    },
    /// The interface that leads there has several addresses.
    #[error(
        "the interface {interface}, which leads to {toward}, has the addresses {addresses}; say with --listen ADDRESS:{PORT} at which one other nodes reach this one"
    )]
    Addresses {
        /// The interface.
        interface: String,
        /// Where to.
        toward: Toward,
        /// Its addresses.
        addresses: String,
    },
    /// The interface that leads there has no address.
    #[error(
        "the interface {interface}, which leads to {toward}, has no IPv4 address; give it one, or name another interface with --uplink"
    )]
    NoAddress {
        /// The interface.
        interface: String,
        /// Where to.
        toward: Toward,
    },
    /// No interface has the name.
    #[error(
        "there is no network interface {interface}; see the interfaces with `ip link`, and name one of them with --uplink"
    )]
    NoInterface {
        /// The name.
        interface: String,
    },
    /// No interface has the address.
    #[error(
        "no network interface has the address {address}; name the one that leads to other nodes with --uplink"
    )]
    NoUplink {
        /// The address.
        address: IpAddr,
    },
    /// Several interfaces have the address.
    #[error(
        "the interfaces {interfaces} all have the address {address}; name the one that leads to other nodes with --uplink"
    )]
    Uplinks {
        /// The address.
        address: IpAddr,
        /// Who has it.
        interfaces: String,
    },
    /// Nothing is known of a node's address.
    #[error(
        "it is not recorded where other nodes reach node {name}; start godwitd with --listen ADDRESS:{PORT}"
    )]
    Unrecorded {
        /// The node.
        name: NodeName,
    },
    /// The record cannot be read.
    #[error("the record {} of this node's address cannot be read; start godwitd with --listen and --uplink", path.display())]
    Unreadable {
        /// The record.
        path: PathBuf,
        /// What the system or the parser said.
        source: io::Error,
    },
    /// The record cannot be written.
    #[error(
        "the node has its identity, but the record {} of its address cannot be written; start godwitd with --listen and --uplink",
        path.display()
    )]
    Unwritable {
        /// The record.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
}

impl Asked {
    /// The name of a node that founds a cluster.
    pub(crate) fn name_of_founder(&self) -> anyhow::Result<NodeName> {
        if let Some(name) = &self.name {
            return Ok(NodeName::new(name)?);
        }
        let host = nix::unistd::gethostname().map_err(|errno| OwnError::NoHostName(errno.into()))?;
        Ok(name_from_host(&host.to_string_lossy())?)
    }

    /// Where a node is to be reached that founds a cluster, or joins one.
    pub(crate) async fn place(&self, toward: Toward) -> anyhow::Result<Place> {
        match (self.listen, &self.uplink) {
            (Some(listen), Some(uplink)) => Ok(Place { listen, uplink: Some(uplink.clone()) }),
            _ => Ok(self.place_in(&HostNetwork::read().await?, toward)?),
        }
    }

    fn place_in(&self, network: &HostNetwork, toward: Toward) -> Result<Place, OwnError> {
        if let Some(listen) = self.listen {
            let uplink = self.uplink.clone().or_else(|| interface_with(listen.ip(), network).ok());
            return Ok(Place { listen, uplink });
        }
        let (address, uplink) = match &self.uplink {
            Some(uplink) => (address_toward(toward, &only(uplink, network)?)?, uplink.clone()),
            None => {
                let address = address_toward(toward, network)?;
                (address, interface_with(address.into(), network)?)
            }
        };
        Ok(Place { listen: SocketAddr::new(address.into(), PORT), uplink: Some(uplink) })
    }

    /// What a member of a cluster needs to know of itself to serve. `identity` is the directory of its identity, `last`
    /// the address that it told other members last.
    pub(crate) async fn own(
        &self,
        name: &NodeName,
        identity: &Path,
        last: Option<SocketAddr>,
    ) -> anyhow::Result<Own> {
        if let (Some(listen), Some(uplink)) = (self.listen, &self.uplink) {
            return Ok(Own { name: name.to_string(), listen, uplink: uplink.clone() });
        }
        let recorded = Place::recorded(identity)?;
        Ok(self.own_in(&HostNetwork::read().await?, name, recorded, last)?)
    }

    fn own_in(
        &self,
        network: &HostNetwork,
        name: &NodeName,
        recorded: Option<Place>,
        last: Option<SocketAddr>,
    ) -> Result<Own, OwnError> {
        let is_recorded = recorded.is_some();
        let (listen, uplink) = recorded.map_or((last, None), |place| (Some(place.listen), place.uplink));
        let Some(listen) = self.listen.or(listen) else {
            return Err(OwnError::Unrecorded { name: name.clone() });
        };
        let is_former = !is_recorded && network.interfaces.iter().any(|name| name == FORMER_UPLINK);
        let uplink = match self.uplink.clone().or(uplink) {
            Some(uplink) => uplink,
            None if is_former => FORMER_UPLINK.to_owned(),
            None => interface_with(listen.ip(), network)?,
        };
        Ok(Own { name: name.to_string(), listen, uplink })
    }
}

impl Place {
    /// Records it beside the identity.
    pub(crate) fn record(&self, identity: &Path) -> Result<(), OwnError> {
        let path = identity.join(RECORD);
        // Whole or not at all, also where the machine loses power.
        let write = || {
            let temporary = identity.join(format!(".{RECORD}.new"));
            let mut file = File::create(&temporary)?;
            file.write_all(&serde_json::to_vec(self)?)?;
            file.sync_all()?;
            fs::rename(&temporary, &path)?;
            File::open(identity)?.sync_all()
        };
        write().map_err(|source| OwnError::Unwritable { path: path.clone(), source })
    }

    /// What was recorded, if the node was founded or has joined since there are records.
    fn recorded(identity: &Path) -> Result<Option<Self>, OwnError> {
        let path = identity.join(RECORD);
        let place = match fs::read(&path) {
            Ok(text) => serde_json::from_slice(&text).map_err(io::Error::from),
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            Err(error) => Err(error),
        };
        place.map(Some).map_err(|source| OwnError::Unreadable { path, source })
    }
}

impl Toward {
    /// The founding node, by the address in its token.
    pub(crate) fn founder(address: &str) -> Result<Self, OwnError> {
        match address.parse() {
            Ok(SocketAddr::V4(founder)) => Ok(Self::Founder(*founder.ip())),
            _ => Err(OwnError::Founder { address: address.to_owned() }),
        }
    }
}

fn name_from_host(host: &str) -> Result<NodeName, OwnError> {
    NodeName::new(host).map_err(OwnError::HostName)
}

/// This machine's address on the best route. A machine without a default route that has one address is reached there.
fn address_toward(toward: Toward, network: &HostNetwork) -> Result<Ipv4Addr, OwnError> {
    let leading = network.routes.iter().filter(|route| match toward {
        Toward::Outside => route.prefix == 0,
        Toward::Founder(address) => route.leads_to(address),
    });
    // As the kernel chooses: the longest prefix, and of these the lowest metric.
    let rank = |route: &&HostRoute| (Reverse(route.prefix), route.metric);
    let Some(best) = leading.clone().min_by_key(rank) else {
        return match &network.addresses[..] {
            [only] if toward == Toward::Outside => Ok(only.address),
            all => Err(OwnError::NoRoute { toward, addresses: listed(all.iter().map(|it| it.address)) }),
        };
    };
    let interfaces: BTreeSet<_> =
        leading.filter(|route| rank(route) == rank(&best)).map(|route| &route.interface).collect();
    if interfaces.len() > 1 {
        return Err(OwnError::Routes { toward, interfaces: listed(interfaces) });
    }
    best.source.map_or_else(|| address_on(best, toward, network), Ok)
}

/// The address of a route's interface: the one in the subnet of the next hop, else the only one.
fn address_on(route: &HostRoute, toward: Toward, network: &HostNetwork) -> Result<Ipv4Addr, OwnError> {
    let next = route.gateway.or(match toward {
        Toward::Outside => None,
        Toward::Founder(address) => Some(address),
    });
    let on: Vec<&HostAddress> =
        network.addresses.iter().filter(|address| address.interface == route.interface).collect();
    let near: Vec<_> =
        on.iter().copied().filter(|address| next.is_some_and(|next| address.is_near(next))).collect();
    let candidates = if near.is_empty() { on } else { near };
    match &candidates[..] {
        [only] => Ok(only.address),
        [] => Err(OwnError::NoAddress { interface: route.interface.clone(), toward }),
        several => Err(OwnError::Addresses {
            interface: route.interface.clone(),
            toward,
            addresses: listed(several.iter().map(|it| it.address)),
        }),
    }
}

/// The interface that has an address.
fn interface_with(address: IpAddr, network: &HostNetwork) -> Result<String, OwnError> {
    let all = network.addresses.iter().filter(|it| IpAddr::V4(it.address) == address);
    let interfaces: Vec<_> = all.map(|it| &it.interface).collect();
    match &interfaces[..] {
        [only] => Ok((*only).clone()),
        [] => Err(OwnError::NoUplink { address }),
        _ => Err(OwnError::Uplinks { address, interfaces: listed(interfaces) }),
    }
}

/// What of the network one interface has.
fn only(interface: &str, network: &HostNetwork) -> Result<HostNetwork, OwnError> {
    if !network.interfaces.iter().any(|name| name == interface) {
        return Err(OwnError::NoInterface { interface: interface.to_owned() });
    }
    let mut one = network.clone();
    one.interfaces.retain(|name| name == interface);
    one.addresses.retain(|address| address.interface == interface);
    one.routes.retain(|route| route.interface == interface);
    Ok(one)
}

fn listed(words: impl IntoIterator<Item = impl ToString>) -> String {
    let words: Vec<_> = words.into_iter().map(|word| word.to_string()).collect();
    match &words[..] {
        [] => "none".to_owned(),
        [only] => only.clone(),
        [first @ .., last] => format!("{} and {last}", first.join(", ")),
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests;
