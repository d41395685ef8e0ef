//! Published ports: a port of every node leads to a port of a service, by destination NAT.
//!
//! The service sees the node that was asked as its client (source NAT), so that its answers pass that node
//! again wherever the service is: a connection through a published port goes on when the service moves,
//! and nothing of it has to move along.
//!
//! The rules are few and fixed, a table `godwit` with three chains for IPv4 and one for IPv6, where services
//! and the node's uplink have that; what varies are the elements of one map, `protocol . node's port :
//! service's address . service's port`, with the service's name as the element's comment. Each change is one
//! nft transaction. A table exists only while a port is published: its presence makes the kernel track
//! every connection.
//!
//! A table `arp godwit_` with its bridge's name, for each network, keeps the gateway's address, which every
//! node has, from being claimed on the uplink by all of them.

use std::fmt;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use godwit_names::ServiceName;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use tokio::sync::Mutex;

use crate::prefix6::embedded;
use crate::{NetworkError, OverlayConfig, Subnet, nft};

/// Rules of a whole table.
const RULES: usize = 3;

/// A transport protocol with ports.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Protocol {
    /// TCP.
    Tcp,
    /// UDP.
    Udp,
}

/// A port of the node that leads to a service's.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Published {
    /// The node's port.
    pub host_port: u16,
    /// The service's port.
    pub container_port: u16,
    /// Of which protocol.
    pub protocol: Protocol,
}

/// The two kinds of addresses, which have tables of their own.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Family {
    V4,
    V6,
}

impl fmt::Display for Family {
    /// As nft writes it.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::V4 => "ip",
            Self::V6 => "ip6",
        })
    }
}

impl Family {
    const ALL: [Self; 2] = [Self::V4, Self::V6];

    fn of(address: IpAddr) -> Self {
        match address {
            IpAddr::V4(_) => Self::V4,
            IpAddr::V6(_) => Self::V6,
        }
    }

    /// Adds what is missing of the table; each statement is harmless when repeated. `node` is whom services
    /// see as their client.
    fn table(self, bridge: &str, node: IpAddr) -> String {
        let (address, loopback) = match self {
            Self::V4 => ("ipv4_addr", "127.0.0.0/8"),
            Self::V6 => ("ipv6_addr", "::1"),
        };
        format!(
            r#"add table {self} godwit
add map {self} godwit published {{ type inet_proto . inet_service : {address} . inet_service; }}
add set {self} godwit bridges {{ type ifname; }}
add chain {self} godwit prerouting {{ type nat hook prerouting priority dstnat; }}
add chain {self} godwit output {{ type nat hook output priority -100; }}
add chain {self} godwit postrouting {{ type nat hook postrouting priority srcnat; }}
flush chain {self} godwit prerouting
flush chain {self} godwit output
flush chain {self} godwit postrouting
add rule {self} godwit prerouting fib daddr type local dnat {self} to meta l4proto . th dport map @published
add rule {self} godwit output {self} daddr != {loopback} fib daddr type local dnat {self} to meta l4proto . th dport map @published
add rule {self} godwit postrouting oifname @bridges ct status dnat snat to {node}
add element {self} godwit bridges {{ "{bridge}" }}
"#
        )
    }
}

/// Where a published port leads, and as whom.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Leads {
    /// To the service.
    pub(crate) service: Ipv4Addr,
    /// To the service by IPv6, and the node's own address on the uplink then, if both have one.
    pub(crate) service6: Option<(Ipv6Addr, Ipv6Addr)>,
}

/// One element of a map.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Element {
    owner: String,
    protocol: String,
    host_port: u16,
    address: IpAddr,
    container_port: u16,
}

/// What is published, as the kernel has it: read once, and then changed by nobody else, unless
/// [`Ports::are_lost`] finds that somebody did.
#[derive(Debug, Default)]
pub(crate) struct Ports(Mutex<Option<Vec<Element>>>);

impl Ports {
    /// Publishes exactly these ports of the service, and none that it had before.
    ///
    /// # Errors
    /// [`NetworkError::PortTaken`] when another service has one of them.
    pub(crate) async fn publish(
        &self,
        config: &OverlayConfig,
        name: &ServiceName,
        leads: Leads,
        ports: &[Published],
    ) -> Result<(), NetworkError> {
        if ports.is_empty() {
            return self.unpublish(leads.service).await;
        }
        let mut known = self.0.lock().await;
        let known = read(&mut known).await?;
        let (old, others): (Vec<_>, Vec<_>) =
            known.iter().cloned().partition(|element| element.leads_to(leads.service));
        let service6 = leads.service6.map(|(service, _)| IpAddr::from(service));
        let addresses: Vec<_> = std::iter::once(leads.service.into()).chain(service6).collect();
        let new: Vec<_> = addresses
            .iter()
            .flat_map(|address| ports.iter().map(|port| Element::new(name, *address, *port)))
            .collect();
        if old == new {
            return Ok(());
        }
        for element in &new {
            let same = |e: &&Element| e.protocol == element.protocol && e.host_port == element.host_port;
            if let Some(other) = others.iter().find(same) {
                return Err(NetworkError::PortTaken {
                    port: element.host_port,
                    protocol: element.protocol.clone(),
                    owner: other.owner.clone(),
                });
            }
        }
        let table6 = leads.service6.map(|(_, node)| Family::V6.table(&config.bridge, node.into()));
        let script: String = std::iter::once(Family::V4.table(&config.bridge, config.vtep.into()))
            .chain(table6)
            .chain(old.iter().map(Element::delete))
            .chain(new.iter().map(Element::add))
            .collect();
        nft::run(&format!("publish the ports of the service {name}"), &script).await?;
        *known = others.into_iter().chain(new).collect();
        Ok(())
    }

    /// Publishes no port of the service with this address any more.
    pub(crate) async fn unpublish(&self, address: Ipv4Addr) -> Result<(), NetworkError> {
        let action = format!("take back the published ports of {address}");
        self.take_back(&action, |element| element.leads_to(address)).await
    }

    /// Publishes no port of any service of this network any more.
    pub(crate) async fn unpublish_all(&self, subnet: Subnet) -> Result<(), NetworkError> {
        let action = format!("take back the published ports of {subnet}");
        self.take_back(&action, |element| subnet.contains(element.service())).await
    }

    async fn take_back(&self, action: &str, whose: impl Fn(&Element) -> bool) -> Result<(), NetworkError> {
        let mut known = self.0.lock().await;
        let known = match read(&mut known).await {
            // Without nft, nothing was ever published.
            Err(NetworkError::NoNft(_)) => return Ok(()),
            other => other?,
        };
        let (gone, stay): (Vec<_>, Vec<_>) = known.iter().cloned().partition(|element| whose(element));
        if gone.is_empty() {
            return Ok(());
        }
        let of = |elements: &[Element], family| elements.iter().any(|element| element.family() == family);
        let empty = Family::ALL.into_iter().filter(|family| of(&gone, *family) && !of(&stay, *family));
        let script: String = gone
            .iter()
            .map(Element::delete)
            .chain(empty.map(|family| format!("delete table {family} godwit\n")))
            .collect();
        nft::run(action, &script).await?;
        *known = stay;
        Ok(())
    }

    /// Whether somebody has taken published ports away. They are then unknown here, and publishing them again
    /// makes them anew.
    pub(crate) async fn are_lost(&self) -> Result<bool, NetworkError> {
        let mut known = self.0.lock().await;
        let Some(elements) = known.as_ref().filter(|elements| !elements.is_empty()) else { return Ok(false) };
        let found = read_kernel().await?;
        let lost = elements.iter().any(|element| !found.contains(element));
        if lost {
            *known = Some(found);
        }
        Ok(lost)
    }
}

async fn read(known: &mut Option<Vec<Element>>) -> Result<&mut Vec<Element>, NetworkError> {
    if known.is_none() {
        *known = Some(read_kernel().await?);
    }
    Ok(known.get_or_insert_default())
}

impl Element {
    fn new(owner: &ServiceName, address: IpAddr, port: Published) -> Self {
        Self {
            owner: owner.to_string(),
            protocol: port.protocol.name().to_owned(),
            host_port: port.host_port,
            address,
            container_port: port.container_port,
        }
    }

    fn family(&self) -> Family {
        Family::of(self.address)
    }

    /// The IPv4 address of the service.
    fn service(&self) -> Ipv4Addr {
        match self.address {
            IpAddr::V4(address) => address,
            IpAddr::V6(address) => embedded(address),
        }
    }

    fn leads_to(&self, service: Ipv4Addr) -> bool {
        self.service() == service
    }

    fn add(&self) -> String {
        let Self { owner, protocol, host_port, address, container_port } = self;
        let family = self.family();
        format!(
            "add element {family} godwit published {{ {protocol} . {host_port} comment \"{owner}\" : {address} . {container_port} }}\n"
        )
    }

    fn delete(&self) -> String {
        let (family, protocol, port) = (self.family(), &self.protocol, self.host_port);
        format!("delete element {family} godwit published {{ {protocol} . {port} }}\n")
    }
}

/// Keeps the uplink from answering for the address that a network's gateway has on every node.
pub(crate) async fn guard_gateway(config: &OverlayConfig) -> Result<(), NetworkError> {
    let (table, uplink, gateway) = (gateway_table(&config.bridge), &config.uplink, config.subnet.gateway());
    let script = format!(
        r#"add table arp {table}
add chain arp {table} input {{ type filter hook input priority 0; }}
flush chain arp {table} input
add rule arp {table} input iifname "{uplink}" arp daddr ip {gateway} drop
"#
    );
    nft::run("keep the gateway's address off the uplink", &script).await
}

/// There is no such gateway any more; no error when there was none.
pub(crate) async fn unguard_gateway(config: &OverlayConfig) -> Result<(), NetworkError> {
    let table = gateway_table(&config.bridge);
    // Adding first makes deleting succeed in any case, in one transaction.
    let script = format!("add table arp {table}\ndelete table arp {table}\n");
    match nft::run("remove godwit's table of the gateway", &script).await {
        Err(NetworkError::NoNft(_)) => Ok(()),
        other => other,
    }
}

fn gateway_table(bridge: &str) -> String {
    format!("godwit_{bridge}")
}

/// Says which nft there is, having let it check, not load, the rules of a published port.
pub(crate) async fn check() -> Result<String, NetworkError> {
    let table = Family::V4.table("gw0", Ipv4Addr::LOCALHOST.into());
    let checked = nft::call(&["--check", "-f", "-"], &table).await?;
    if !checked.status.success() {
        return Err(nft::refused("check the rules of a published port", &checked.stderr));
    }
    let version = nft::call(&["--version"], "").await?;
    Ok(String::from_utf8_lossy(&version.stdout).trim().to_owned())
}

/// Reads the maps back from the kernel; no table, or one whose rules are gone, means no elements.
async fn read_kernel() -> Result<Vec<Element>, NetworkError> {
    let mut found = Vec::new();
    for family in Family::ALL {
        let output = nft::call(&["--json", "list", "table", &family.to_string(), "godwit"], "").await?;
        let action = "list the published ports";
        if !output.status.success() {
            if nft::is_missing(&output.stderr) {
                continue;
            }
            return Err(nft::refused(action, &output.stderr));
        }
        let json: Value = serde_json::from_slice(&output.stdout)
            .map_err(|error| NetworkError::Nft { action: action.into(), message: error.to_string() })?;
        found.extend(parse(&json));
    }
    Ok(found)
}

/// Takes the elements out of nft's JSON (libnftables-json(5)):
/// `{"nftables": [{"map": {"table": "godwit", "name": "published", "elem": [[KEY, DATA], …]}}, {"rule": …}]}`,
/// where KEY is `{"elem": {"val": {"concat": ["tcp", 80]}, "comment": "web"}}`.
fn parse(json: &Value) -> Vec<Element> {
    let objects = || json["nftables"].as_array().into_iter().flatten();
    if objects().filter(|object| object["rule"]["table"] == "godwit").count() < RULES {
        return Vec::new();
    }
    let ours = objects()
        .map(|object| &object["map"])
        .filter(|map| map["table"] == "godwit" && map["name"] == "published");
    ours.filter_map(|map| map["elem"].as_array()).flatten().filter_map(element).collect()
}

fn element(pair: &Value) -> Option<Element> {
    let (key, data) = (&pair[0], &pair[1]["concat"]);
    let value = if key["elem"].is_object() { &key["elem"]["val"]["concat"] } else { &key["concat"] };
    let port = |value: &Value| u16::try_from(value.as_u64()?).ok();
    Some(Element {
        owner: key["elem"]["comment"].as_str().unwrap_or("(unknown)").to_owned(),
        protocol: value[0].as_str()?.to_owned(),
        host_port: port(&value[1])?,
        address: data[0].as_str()?.parse().ok()?,
        container_port: port(&data[1])?,
    })
}

impl Protocol {
    /// As nft writes it.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Tcp => "tcp",
            Self::Udp => "udp",
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    /// nft's output, with a map of somebody else's beside this one.
    fn listed(family: &str, elements: &str, rules: usize) -> Value {
        let rules = format!(r#",{{"rule": {{"family": "{family}", "table": "godwit"}}}}"#).repeat(rules);
        let json = format!(
            r#"{{"nftables": [{{"metainfo": {{"version": "1.0.6"}}}},
            {{"map": {{"family": "{family}", "name": "published", "table": "other", "type": "ipv4_addr", "map": "mark",
              "elem": [["10.0.0.1", 1]]}}}},
            {{"map": {{"family": "{family}", "name": "published", "table": "godwit", "handle": 4,
              "type": ["inet_proto", "inet_service"], "map": "ipv4_addr . inet_service",
              "elem": [{elements}]}}}}{rules}]}}"#
        );
        serde_json::from_str(&json).unwrap()
    }

    fn found(owner: &str, protocol: &str, host_port: u16, address: &str, container_port: u16) -> Element {
        let (owner, protocol) = (owner.into(), protocol.into());
        Element { owner, protocol, host_port, address: address.parse().unwrap(), container_port }
    }

    #[test]
    fn elements_are_read_from_nfts_own_output() {
        // As nft 1.0.6 printed them.
        let elements = r#"[{"elem": {"val": {"concat": ["tcp", 80]}, "comment": "redis"}}, {"concat": ["10.88.0.10", 8080]}],
            [{"concat": ["udp", 53]}, {"concat": ["10.88.0.11", 53]}]"#;
        let expected =
            [found("redis", "tcp", 80, "10.88.0.10", 8080), found("(unknown)", "udp", 53, "10.88.0.11", 53)];
        assert_eq!(parse(&listed("ip", elements, RULES)), expected);
        assert_eq!(parse(&listed("ip", elements, RULES - 1)), [], "without its rules a map leads nowhere");
        let elements = r#"[{"elem": {"val": {"concat": ["tcp", 80]}, "comment": "redis"}}, {"concat": ["fd67::a58:a", 8080]}]"#;
        let expected = found("redis", "tcp", 80, "fd67::a58:a", 8080);
        assert_eq!(parse(&listed("ip6", elements, RULES)), std::slice::from_ref(&expected));
        assert!(expected.leads_to(Ipv4Addr::new(10, 88, 0, 10)));
    }

    #[test]
    fn output_of_another_shape_gives_no_elements() {
        for json in ["{}", "[]", r#"{"nftables": [{"map": {"table": "godwit", "name": "published"}}]}"#] {
            assert_eq!(parse(&serde_json::from_str(json).unwrap()), []);
        }
    }
}
