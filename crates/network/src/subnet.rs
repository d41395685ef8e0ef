//! The services' IPv4 subnet, and the link-layer addresses that follow from it.

use std::fmt;
use std::net::Ipv4Addr;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

use crate::{Mac, NetworkError};

/// The longest prefix that leaves room for a gateway and services.
const LONGEST_PREFIX: u8 = 29;
/// The shortest prefix accepted: a whole class A network.
const SHORTEST_PREFIX: u8 = 8;

/// Every node's gateway: `02:67` as the services, then an address that is none of theirs.
pub(crate) const GATEWAY_MAC: Mac = [0x02, 0x67, 0xff, 0x00, 0x00, 0x01];
/// From whom the frames are by which a switch learns a way (`scout.rs`).
pub(crate) const SCOUT_MAC: Mac = [0x02, 0x67, 0xfe, 0x00, 0x00, 0x01];

/// An IPv4 subnet in which every service of the cluster has its address.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct Subnet {
    network: u32,
    prefix: u8,
}

impl Subnet {
    /// The subnet of `address` with a prefix of `prefix` bits.
    ///
    /// # Errors
    /// [`NetworkError::BadSubnet`] when the prefix is not from 8 to 29 or bits are set behind it.
    pub fn new(address: Ipv4Addr, prefix: u8) -> Result<Self, NetworkError> {
        let bad = |reason| NetworkError::BadSubnet { text: format!("{address}/{prefix}"), reason };
        if !(SHORTEST_PREFIX..=LONGEST_PREFIX).contains(&prefix) {
            return Err(bad("the prefix must be from 8 to 29 bits long"));
        }
        let subnet = Self { network: address.to_bits(), prefix };
        if subnet.network & !subnet.mask() != 0 {
            return Err(bad("bits are set behind the prefix"));
        }
        if address.is_loopback() || address.is_multicast() || address.is_unspecified() {
            return Err(bad("services cannot have such addresses"));
        }
        Ok(subnet)
    }

    fn mask(self) -> u32 {
        u32::MAX << (32 - u32::from(self.prefix))
    }

    /// The number of leading bits that are the same in every address.
    #[must_use]
    pub fn prefix(self) -> u8 {
        self.prefix
    }

    /// The subnet's first address, which no host has.
    #[must_use]
    pub fn network(self) -> Ipv4Addr {
        Ipv4Addr::from_bits(self.network)
    }

    /// The first host: every node's bridge has it, so that a service's default route stays the
    /// same wherever it goes.
    #[must_use]
    pub fn gateway(self) -> Ipv4Addr {
        Ipv4Addr::from_bits(self.network + 1)
    }

    /// The subnet's last address.
    #[must_use]
    pub fn broadcast(self) -> Ipv4Addr {
        Ipv4Addr::from_bits(self.network | !self.mask())
    }

    /// Whether `address` lies in the subnet, whatever its use there.
    #[must_use]
    pub fn contains(self, address: Ipv4Addr) -> bool {
        address.to_bits() & self.mask() == self.network
    }

    /// Whether this subnet and the prefix `other`/`prefix` have an address in common.
    #[must_use]
    pub fn overlaps(self, other: Ipv4Addr, prefix: u8) -> bool {
        let shorter = self.prefix.min(prefix.min(32));
        let mask = if shorter == 0 { 0 } else { u32::MAX << (32 - u32::from(shorter)) };
        self.network & mask == other.to_bits() & mask
    }

    /// The addresses that services may have, in order.
    pub fn hosts(self) -> impl Iterator<Item = Ipv4Addr> {
        (self.network + 2..self.broadcast().to_bits()).map(Ipv4Addr::from_bits)
    }

    /// Accepts an address that a service may have.
    ///
    /// # Errors
    /// [`NetworkError::OutsideSubnet`], or [`NetworkError::ReservedAddress`] for the network
    /// address, the gateway and the broadcast address.
    pub fn check(self, address: Ipv4Addr) -> Result<(), NetworkError> {
        if !self.contains(address) {
            return Err(NetworkError::OutsideSubnet { address, subnet: self });
        }
        let role = match address {
            a if a == self.network() => "network address",
            a if a == self.gateway() => "gateway",
            a if a == self.broadcast() => "broadcast address",
            _ => return Ok(()),
        };
        Err(NetworkError::ReservedAddress { address, role, subnet: self })
    }
}

impl FromStr for Subnet {
    type Err = NetworkError;

    fn from_str(text: &str) -> Result<Self, NetworkError> {
        let bad = |reason| NetworkError::BadSubnet { text: text.to_owned(), reason };
        let (address, prefix) = text.split_once('/').ok_or_else(|| bad("it has no prefix length"))?;
        let address = address.parse().map_err(|_| bad("its address is not an IPv4 address"))?;
        let prefix = prefix.parse().map_err(|_| bad("its prefix length is not a number"))?;
        Self::new(address, prefix)
    }
}

impl fmt::Display for Subnet {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.network(), self.prefix)
    }
}

impl TryFrom<String> for Subnet {
    type Error = NetworkError;

    fn try_from(text: String) -> Result<Self, NetworkError> {
        text.parse()
    }
}

impl From<Subnet> for String {
    fn from(subnet: Subnet) -> Self {
        subnet.to_string()
    }
}

/// The link-layer address of the service with this address: `02:67` (locally administered, `g`),
/// then the four bytes of the address. It is the same on every node, so no neighbour's cache goes
/// stale when the service moves.
#[must_use]
pub fn mac_of(address: Ipv4Addr) -> Mac {
    let [a, b, c, d] = address.octets();
    [0x02, 0x67, a, b, c, d]
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    fn subnet(text: &str) -> Subnet {
        text.parse().unwrap()
    }

    #[test]
    fn a_subnet_knows_its_special_addresses() {
        let subnet = subnet("10.88.0.0/16");
        assert_eq!(subnet.gateway(), Ipv4Addr::new(10, 88, 0, 1));
        assert_eq!(subnet.broadcast(), Ipv4Addr::new(10, 88, 255, 255));
        assert_eq!(subnet.to_string(), "10.88.0.0/16");
        assert!(subnet.contains(Ipv4Addr::new(10, 88, 7, 7)));
        assert!(!subnet.contains(Ipv4Addr::new(10, 89, 0, 1)));
    }

    #[test]
    fn hosts_leave_out_gateway_and_broadcast() {
        let hosts: Vec<_> = subnet("192.168.5.8/29").hosts().collect();
        let expected: Vec<_> = (10..15).map(|d| Ipv4Addr::new(192, 168, 5, d)).collect();
        assert_eq!(hosts, expected);
    }

    #[test]
    fn an_address_that_no_service_may_have_is_refused_with_a_sentence() {
        let subnet = subnet("10.88.0.0/16");
        assert!(subnet.check(Ipv4Addr::new(10, 88, 0, 2)).is_ok());
        for (address, words) in [
            ([10, 89, 0, 1], "outside the services' subnet 10.88.0.0/16"),
            ([10, 88, 0, 0], "network address"),
            ([10, 88, 0, 1], "gateway"),
            ([10, 88, 255, 255], "broadcast address"),
        ] {
            let message = subnet.check(Ipv4Addr::from(address)).unwrap_err().to_string();
            assert!(message.contains(words), "{message}");
            assert!(message.contains(&Ipv4Addr::from(address).to_string()), "{message}");
        }
    }

    #[test]
    fn text_that_is_no_subnet_is_refused_with_its_reason() {
        for (text, words) in [
            ("10.88.0.0", "no prefix length"),
            ("10.88.0/16", "not an IPv4 address"),
            ("10.88.0.0/x", "not a number"),
            ("10.88.0.0/300", "not a number"),
            ("10.88.0.0/31", "from 8 to 29"),
            ("0.0.0.0/0", "from 8 to 29"),
            ("10.88.0.1/16", "bits are set behind the prefix"),
            ("127.0.0.0/8", "cannot have such addresses"),
            ("224.0.0.0/8", "cannot have such addresses"),
        ] {
            let message = text.parse::<Subnet>().unwrap_err().to_string();
            assert!(message.contains(words) && message.contains(text), "{message}");
        }
    }

    #[test]
    fn overlap_is_seen_in_both_directions() {
        let subnet = subnet("10.88.0.0/16");
        assert!(subnet.overlaps(Ipv4Addr::new(10, 88, 4, 0), 24));
        assert!(subnet.overlaps(Ipv4Addr::new(10, 0, 0, 0), 8));
        assert!(!subnet.overlaps(Ipv4Addr::new(10, 99, 0, 0), 24));
        assert!(!subnet.overlaps(Ipv4Addr::new(10, 89, 0, 0), 16));
    }

    #[test]
    fn a_mac_follows_from_its_address_and_is_locally_administered_unicast() {
        let mac = mac_of(Ipv4Addr::new(10, 88, 0, 10));
        assert_eq!(mac, [0x02, 0x67, 10, 88, 0, 10]);
        assert_eq!(mac[0] & 0b11, 0b10);
    }

    #[test]
    fn a_subnet_survives_json() {
        let subnet = subnet("10.88.0.0/16");
        let json = serde_json::to_string(&subnet).unwrap();
        assert_eq!(json, "\"10.88.0.0/16\"");
        assert_eq!(serde_json::from_str::<Subnet>(&json).unwrap(), subnet);
        assert!(serde_json::from_str::<Subnet>("\"10.88.0.1/16\"").is_err());
    }
}
