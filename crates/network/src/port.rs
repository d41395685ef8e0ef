//! A service's port on its node's bridge: its name, and the alias that says whose it is.

use std::net::Ipv4Addr;

use godwit_names::ServiceName;

use crate::netlink::Link;

/// The start of every bridge port's name; the service's address on that network follows, in hexadecimal.
pub(crate) const PORT_PREFIX: &str = "gws";
/// The start of every bridge port's alias.
const ALIAS_PREFIX: &str = "godwit ";

/// The bridge port's name, which goes by the address: the service's name may be longer than the 15 bytes
/// an interface may have, and a service has a port for each of its networks.
pub(crate) fn port_name(address: Ipv4Addr) -> String {
    format!("{PORT_PREFIX}{:08x}", address.to_bits())
}

/// What marks a service's bridge port, so that it is found again from the kernel alone.
pub(crate) fn alias(address: Ipv4Addr, name: &ServiceName) -> String {
    format!("{ALIAS_PREFIX}{address} {name}")
}

/// The address and the service of an endpoint's bridge port.
pub(crate) fn marked(link: &Link) -> Option<(Ipv4Addr, ServiceName)> {
    let (address, name) = link.alias.as_deref().and_then(parse_alias)?;
    (link.name == port_name(address)).then_some((address, name))
}

fn parse_alias(alias: &str) -> Option<(Ipv4Addr, ServiceName)> {
    let (address, name) = alias.strip_prefix(ALIAS_PREFIX)?.split_once(' ')?;
    Some((address.parse().ok()?, name.parse().ok()?))
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn a_port_name_fits_an_interface_and_tells_the_address() {
        assert_eq!(port_name(Ipv4Addr::new(10, 88, 0, 10)), "gws0a58000a");
        assert!(port_name(Ipv4Addr::BROADCAST).len() <= 15);
    }

    #[test]
    fn an_alias_tells_address_and_name() {
        let found = parse_alias("godwit 10.88.0.10 redis").unwrap();
        assert_eq!(found, (Ipv4Addr::new(10, 88, 0, 10), "redis".parse().unwrap()));
        for other in [
            "",
            "godwit",
            "godwit redis",
            "godwit 10.88.0 redis",
            "something 10.88.0.10 redis",
            "godwit 10.88.0.10 ../x",
        ] {
            assert_eq!(parse_alias(other), None, "{other}");
        }
    }
}
