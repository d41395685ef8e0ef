//! The IPv4 network of this machine as the kernel has it: interfaces, their addresses, and routes. It tells by which
//! interface, and from which address, the machine reaches others.

use std::collections::BTreeMap;
use std::net::{IpAddr, Ipv4Addr};

use futures::TryStreamExt;
use rtnetlink::RouteMessageBuilder;
use rtnetlink::packet_route::address::{AddressAttribute, AddressMessage};
use rtnetlink::packet_route::link::{LinkAttribute, LinkFlags, LinkMessage};
use rtnetlink::packet_route::route::{RouteAddress, RouteAttribute, RouteHeader, RouteMessage, RouteType};

use crate::NetworkError;
use crate::netlink::Netlink;

/// Interfaces, addresses and routes, all without the loopback's.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct HostNetwork {
    /// The names of the interfaces.
    pub interfaces: Vec<String>,
    /// Their IPv4 addresses.
    pub addresses: Vec<HostAddress>,
    /// The IPv4 routes of the main table.
    pub routes: Vec<HostRoute>,
}

/// An IPv4 address of an interface.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HostAddress {
    /// The interface's name.
    pub interface: String,
    /// The address.
    pub address: Ipv4Addr,
    /// How many bits of it name its subnet.
    pub prefix: u8,
}

/// An IPv4 route to another machine; one for each next hop, where a route has several.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HostRoute {
    /// Where it leads; 0.0.0.0 where it is a default route.
    pub destination: Ipv4Addr,
    /// How many bits of the destination count; 0 where it is a default route.
    pub prefix: u8,
    /// By which interface.
    pub interface: String,
    /// The next hop, if it is not the destination itself.
    pub gateway: Option<Ipv4Addr>,
    /// The address that packets get as their source, if the route says so.
    pub source: Option<Ipv4Addr>,
    /// Of routes with the same prefix the kernel takes that with the lowest metric.
    pub metric: u32,
}

impl HostNetwork {
    /// Reads it, in the network namespace of the calling thread.
    ///
    /// # Errors
    /// When the kernel refuses.
    pub async fn read() -> Result<Self, NetworkError> {
        let netlink = Netlink::new()?;
        let links: Vec<LinkMessage> = netlink
            .handle
            .link()
            .get()
            .execute()
            .try_collect()
            .await
            .map_err(NetworkError::kernel("list the interfaces"))?;
        let names: BTreeMap<u32, String> = links.iter().filter_map(name_of).collect();
        let addresses: Vec<AddressMessage> = netlink
            .handle
            .address()
            .get()
            .execute()
            .try_collect()
            .await
            .map_err(NetworkError::kernel("list the addresses"))?;
        let request = RouteMessageBuilder::<Ipv4Addr>::new().build();
        let routes: Vec<RouteMessage> = netlink
            .handle
            .route()
            .get(request)
            .execute()
            .try_collect()
            .await
            .map_err(NetworkError::kernel("list the routes"))?;
        Ok(Self {
            addresses: addresses.iter().filter_map(|message| address_of(message, &names)).collect(),
            routes: routes.iter().flat_map(|message| routes_of(message, &names)).collect(),
            interfaces: names.into_values().collect(),
        })
    }
}

impl HostAddress {
    /// Whether another address is of the same subnet.
    #[must_use]
    pub fn is_near(&self, other: Ipv4Addr) -> bool {
        begin_alike(self.address, other, self.prefix)
    }
}

impl HostRoute {
    /// Whether it leads to an address.
    #[must_use]
    pub fn leads_to(&self, address: Ipv4Addr) -> bool {
        begin_alike(self.destination, address, self.prefix)
    }
}

/// Whether the first bits of two addresses are the same.
fn begin_alike(one: Ipv4Addr, other: Ipv4Addr, bits: u8) -> bool {
    let mask = u32::MAX.checked_shl(32_u32.saturating_sub(bits.into())).unwrap_or(0);
    (u32::from(one) ^ u32::from(other)) & mask == 0
}

fn name_of(link: &LinkMessage) -> Option<(u32, String)> {
    if link.header.flags.contains(LinkFlags::Loopback) {
        return None;
    }
    link.attributes.iter().find_map(|attribute| match attribute {
        LinkAttribute::IfName(name) => Some((link.header.index, name.clone())),
        _ => None,
    })
}

fn address_of(message: &AddressMessage, names: &BTreeMap<u32, String>) -> Option<HostAddress> {
    let interface = names.get(&message.header.index)?.clone();
    message.attributes.iter().find_map(|attribute| match attribute {
        AddressAttribute::Local(IpAddr::V4(address)) => Some(HostAddress {
            interface: interface.clone(),
            address: *address,
            prefix: message.header.prefix_len,
        }),
        _ => None,
    })
}

fn routes_of(message: &RouteMessage, names: &BTreeMap<u32, String>) -> Vec<HostRoute> {
    if message.header.kind != RouteType::Unicast || message.header.table != RouteHeader::RT_TABLE_MAIN {
        return Vec::new();
    }
    let (mut destination, mut source, mut metric) = (Ipv4Addr::UNSPECIFIED, None, 0);
    let mut hops = Vec::new();
    for attribute in &message.attributes {
        match attribute {
            RouteAttribute::Destination(RouteAddress::Inet(address)) => destination = *address,
            RouteAttribute::PrefSource(RouteAddress::Inet(address)) => source = Some(*address),
            RouteAttribute::Priority(priority) => metric = *priority,
            RouteAttribute::Oif(index) => hops.push((*index, gateway_of(&message.attributes))),
            RouteAttribute::MultiPath(next) => {
                hops.extend(next.iter().map(|hop| (hop.interface_index, gateway_of(&hop.attributes))));
            }
            _ => {}
        }
    }
    let routes = hops.into_iter().filter_map(|(index, gateway)| {
        Some(HostRoute {
            destination,
            prefix: message.header.destination_prefix_length,
            interface: names.get(&index)?.clone(),
            gateway,
            source,
            metric,
        })
    });
    routes.collect()
}

fn gateway_of(attributes: &[RouteAttribute]) -> Option<Ipv4Addr> {
    attributes.iter().find_map(|attribute| match attribute {
        RouteAttribute::Gateway(RouteAddress::Inet(address)) => Some(*address),
        _ => None,
    })
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use rtnetlink::packet_route::route::RouteNextHop;

    use super::*;

    fn at(text: &str) -> Ipv4Addr {
        text.parse().unwrap()
    }

    #[test]
    fn a_route_with_two_next_hops_is_two_routes() {
        let names = BTreeMap::from([(2, "eth0".to_owned()), (3, "eth1".to_owned())]);
        let mut message = RouteMessage::default();
        message.header.kind = RouteType::Unicast;
        message.header.table = RouteHeader::RT_TABLE_MAIN;
        let hop = |index, gateway| {
            let mut hop = RouteNextHop::default();
            hop.interface_index = index;
            hop.attributes = vec![RouteAttribute::Gateway(RouteAddress::Inet(at(gateway)))];
            hop
        };
        let hops = vec![hop(2, "192.0.2.254"), hop(3, "198.51.100.254"), hop(9, "203.0.113.254")];
        message.attributes = vec![RouteAttribute::Priority(100), RouteAttribute::MultiPath(hops)];
        let routes = routes_of(&message, &names);
        let found: Vec<_> = routes.iter().map(|route| (route.interface.as_str(), route.gateway)).collect();
        assert_eq!(found, [("eth0", Some(at("192.0.2.254"))), ("eth1", Some(at("198.51.100.254")))]);
        assert!(routes.iter().all(|route| route.metric == 100 && route.leads_to(at("203.0.113.1"))));

        message.header.table = RouteHeader::RT_TABLE_MAIN - 1;
        assert_eq!(routes_of(&message, &names), []);
    }

    #[test]
    fn a_prefix_counts_to_its_last_bit() {
        let address = |prefix| HostAddress { interface: "eth0".into(), address: at("192.0.2.1"), prefix };
        for (prefix, other, near) in [
            (0, "203.0.113.1", true),
            (24, "192.0.2.254", true),
            (24, "192.0.3.1", false),
            (25, "192.0.2.127", true),
            (25, "192.0.2.128", false),
            (32, "192.0.2.1", true),
            (32, "192.0.2.0", false),
        ] {
            assert_eq!(address(prefix).is_near(at(other)), near, "{other} near 192.0.2.1/{prefix}");
        }
    }

    #[tokio::test]
    async fn what_the_kernel_lists_fits_together_and_has_no_loopback() {
        let network = HostNetwork::read().await.unwrap();
        let known = |name: &String| network.interfaces.contains(name);
        assert!(network.addresses.iter().all(|address| known(&address.interface)), "{network:?}");
        assert!(network.routes.iter().all(|route| known(&route.interface)), "{network:?}");
        assert!(!network.interfaces.iter().any(|name| name == "lo"), "{network:?}");
        assert!(!network.addresses.iter().any(|address| address.address.is_loopback()), "{network:?}");
    }
}
