//! IPv6 beside IPv4: the gateway's and the services' addresses, and the routes to them.
//!
//! Services have no neighbours: each reaches everything through
//! the gateway, which is the same on every node (`overlay.rs`), and so nobody has to ask at which
//! link-layer address somebody else is. Addresses are used at once, without detection of duplicates, which
//! would find the service itself at its last place.
//!
//! The node answers on its uplink for the services that are here (`proxy_ndp`), as it does with ARP, and
//! says so when one arrives (unsolicited neighbour advertisement, RFC 4861, section 7.2.6).

use std::net::{Ipv4Addr, Ipv6Addr};

use rtnetlink::RouteMessageBuilder;
use rtnetlink::packet_route::address::{AddressAttribute, AddressFlags};
use rtnetlink::packet_route::route::RouteType;

use crate::netlink::{Link, Netlink};
use crate::netns::set_sysctl;
use crate::packet::PacketSocket;
use crate::prefix6::PREFIX_BITS;
use crate::subnet::GATEWAY_MAC;
use crate::{Mac, NetworkError, OverlayConfig, Prefix6};

/// The table of routes to the machine itself (RT_TABLE_LOCAL).
const LOCAL_TABLE: u32 = 255;
/// All nodes of a link (RFC 4291, section 2.7.1), and where their frames go (RFC 2464, section 7).
const ALL_NODES: Ipv6Addr = Ipv6Addr::new(0xff02, 0, 0, 0, 0, 0, 0, 1);
const ALL_NODES_MAC: Mac = [0x33, 0x33, 0, 0, 0, 1];

/// Gives the bridge the gateway's IPv6 address, routes the prefix to it, and lets the node forward.
pub(crate) async fn up(netlink: &Netlink, config: &OverlayConfig, bridge: u32) -> Result<(), NetworkError> {
    let (name, uplink) = (config.bridge.as_str(), config.uplink.as_str());
    let Some(prefix) = config.prefix6 else {
        return set_sysctl(&format!("ipv6/conf/{name}/disable_ipv6"), "1");
    };
    if std::fs::read_to_string(format!("/proc/sys/net/ipv6/conf/{uplink}/accept_ra"))
        .is_ok_and(|value| value.trim() == "1")
    {
        // A node that forwards hears routers' advertisements with 2 only.
        set_sysctl(&format!("ipv6/conf/{uplink}/accept_ra"), "2")?;
    }
    set_sysctl("ipv6/conf/all/forwarding", "1")?;
    set_sysctl(&format!("ipv6/conf/{uplink}/proxy_ndp"), "1")?;
    set_sysctl(&format!("ipv6/neigh/{uplink}/proxy_delay"), "0")?;
    enable(name)?;
    let gateway = prefix.of(config.subnet.gateway());
    add_address(netlink, bridge, name, gateway).await?;
    route(
        netlink,
        bridge,
        prefix.network(),
        PREFIX_BITS,
        None,
        &format!("route {prefix} to the bridge {name}"),
    )
    .await
}

/// Gives the service its address, in its namespace, and the way to the network's other services, or out
/// to everybody.
pub(crate) async fn address_inside(
    netlink: &Netlink,
    link: &Link,
    prefix: Prefix6,
    address: Ipv4Addr,
    gateway: Ipv4Addr,
    way_out: bool,
) -> Result<(), NetworkError> {
    let (index, name) = (link.index, link.name.as_str());
    let (address, gateway) = (prefix.of(address), prefix.of(gateway));
    enable(name)?;
    // The gateway must not redirect any host.
    set_sysctl(&format!("ipv6/conf/{name}/accept_redirects"), "0")?;
    add_address(netlink, index, name, address).await?;
    route(netlink, index, gateway, 128, None, &format!("route from {address} to {gateway}")).await?;
    let (to, bits) = if way_out { (Ipv6Addr::UNSPECIFIED, 0) } else { (prefix.network(), PREFIX_BITS) };
    route(netlink, index, to, bits, Some(gateway), &format!("route from {address} through {gateway}"))
        .await?;
    netlink.set_neighbour(index, name, gateway, GATEWAY_MAC).await
}

/// Lets an interface have IPv6 addresses, those that it is given and no others.
fn enable(name: &str) -> Result<(), NetworkError> {
    let settings = [("addr_gen_mode", "1"), ("accept_dad", "0"), ("accept_ra", "0"), ("disable_ipv6", "0")];
    for (setting, value) in settings {
        set_sysctl(&format!("ipv6/conf/{name}/{setting}"), value)?;
    }
    Ok(())
}

async fn add_address(
    netlink: &Netlink,
    index: u32,
    name: &str,
    address: Ipv6Addr,
) -> Result<(), NetworkError> {
    let mut request = netlink.handle.address().add(index, address.into(), 128).replace();
    let flags = AddressFlags::Nodad | AddressFlags::Noprefixroute;
    request.message_mut().attributes.push(AddressAttribute::Flags(flags));
    let added = request.execute().await;
    added.map_err(NetworkError::kernel(format!("give {name} the address {address}")))?;
    // The kernel's own route for what comes to the address is made later, by a worker of its: on a busy
    // machine what comes before that would be dropped, held frames too.
    let local =
        RouteMessageBuilder::<Ipv6Addr>::new().destination_prefix(address, 128).output_interface(index);
    let local = local.table_id(LOCAL_TABLE).kind(RouteType::Local);
    let added = netlink.handle.route().add(local.build()).replace().execute().await;
    added.map_err(NetworkError::kernel(format!("take what comes to {address} on {name}")))
}

async fn route(
    netlink: &Netlink,
    index: u32,
    to: Ipv6Addr,
    bits: u8,
    gateway: Option<Ipv6Addr>,
    action: &str,
) -> Result<(), NetworkError> {
    let route = RouteMessageBuilder::<Ipv6Addr>::new().destination_prefix(to, bits).output_interface(index);
    let route = match gateway {
        Some(gateway) => route.gateway(gateway),
        None => route,
    };
    netlink.handle.route().add(route.build()).replace().execute().await.map_err(NetworkError::kernel(action))
}

/// Says on the interface that `address` is at `mac`.
pub(crate) fn announce(
    socket: &PacketSocket,
    index: u32,
    name: &str,
    address: Ipv6Addr,
    mac: Mac,
) -> Result<(), NetworkError> {
    let sent = socket.send_whole(index, &advertisement(address, mac));
    sent.map_err(NetworkError::system(format!("announce the address {address} on {name}")))
}

/// An unsolicited neighbour advertisement (RFC 4861, section 4.4) that overrides what is known.
fn advertisement(address: Ipv6Addr, mac: Mac) -> Vec<u8> {
    let mut message = [0; 32];
    // Type 136; the flag that says: override.
    message[0] = 136;
    message[4] = 0x20;
    message[8..24].copy_from_slice(&address.octets());
    // The target's link-layer address, in one unit of 8 bytes.
    message[24..26].copy_from_slice(&[2, 1]);
    message[26..32].copy_from_slice(&mac);
    let sum = checksum(address, ALL_NODES, &message);
    message[2..4].copy_from_slice(&sum.to_be_bytes());

    let parts: [&[u8]; 7] = [
        &ALL_NODES_MAC,
        &mac,
        &0x86dd_u16.to_be_bytes(),
        // Version 6, 32 bytes of ICMPv6, and the hop limit without which it is ignored.
        &[0x60, 0, 0, 0, 0, 32, 58, 255],
        &address.octets(),
        &ALL_NODES.octets(),
        &message,
    ];
    parts.concat()
}

/// The check sum of an ICMPv6 message (RFC 4443, section 2.3).
fn checksum(from: Ipv6Addr, to: Ipv6Addr, message: &[u8]) -> u16 {
    let length = u32::try_from(message.len()).unwrap_or_default().to_be_bytes();
    let pseudo = [&from.octets()[..], &to.octets(), &length, &[0, 0, 0, 58]].concat();
    let mut sum: u32 = 0;
    for bytes in [pseudo.as_slice(), message] {
        sum += bytes.as_chunks::<2>().0.iter().map(|pair| u32::from(u16::from_be_bytes(*pair))).sum::<u32>();
    }
    while sum >> 16 != 0 {
        sum = (sum & 0xffff) + (sum >> 16);
    }
    // The loop leaves 16 bits.
    !u16::try_from(sum).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn an_advertisement_has_a_sum_that_adds_up() {
        let address: Ipv6Addr = "fd67:6f64::a58:a".parse().unwrap();
        let frame = advertisement(address, [2, 0x67, 10, 88, 0, 10]);
        assert_eq!(frame[..14], [0x33, 0x33, 0, 0, 0, 1, 2, 0x67, 10, 88, 0, 10, 0x86, 0xdd]);
        assert_eq!(checksum(address, ALL_NODES, &frame[54..]), 0);
        assert_eq!(frame[54 + 8..54 + 24], address.octets());
    }
}
