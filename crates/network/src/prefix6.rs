//! A service's IPv6 address, beside the IPv4 one that it follows from.
//!
//! The cluster's prefix has 96 bits, and the IPv4 address is the rest (as RFC 6052, section 2.2 embeds one),
//! so that nothing more has to be agreed on.

use std::fmt;
use std::net::{Ipv4Addr, Ipv6Addr};
use std::str::FromStr;

use serde::{Deserialize, Serialize};

use crate::NetworkError;

/// What of an IPv6 address is the cluster's.
pub(crate) const PREFIX_BITS: u8 = 96;

/// The services' IPv6 prefix of 96 bits.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct Prefix6(Ipv6Addr);

impl Prefix6 {
    /// Its first address, which no host has.
    pub(crate) fn network(self) -> Ipv6Addr {
        self.0
    }

    /// The address that goes with a service's IPv4 address.
    #[must_use]
    pub fn of(self, address: Ipv4Addr) -> Ipv6Addr {
        Ipv6Addr::from_bits(self.0.to_bits() | u128::from(address.to_bits()))
    }

    /// The IPv4 address of the service with this IPv6 address, if it is of this prefix.
    #[must_use]
    pub fn address_in(self, address: Ipv6Addr) -> Option<Ipv4Addr> {
        Some(embedded(address)).filter(|found| self.of(*found) == address)
    }
}

/// The IPv4 address that a service's IPv6 address follows from.
pub(crate) fn embedded(address: Ipv6Addr) -> Ipv4Addr {
    let [.., a, b, c, d] = address.octets();
    Ipv4Addr::new(a, b, c, d)
}

impl FromStr for Prefix6 {
    type Err = NetworkError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let bad = |reason| NetworkError::BadPrefix6 { text: text.to_owned(), reason };
        let (address, bits) = text.split_once('/').ok_or_else(|| bad("the number of bits is missing"))?;
        let address: Ipv6Addr = address.parse().map_err(|_| bad("it is not an IPv6 address"))?;
        if bits != "96" {
            return Err(bad("it must have 96 bits"));
        }
        if address.to_bits() & u128::from(u32::MAX) != 0 {
            return Err(bad("bits are set behind the prefix"));
        }
        if address.is_multicast() || address.is_unicast_link_local() || address.is_unspecified() {
            return Err(bad("services cannot have such addresses"));
        }
        Ok(Self(address))
    }
}

impl fmt::Display for Prefix6 {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{PREFIX_BITS}", self.0)
    }
}

impl TryFrom<String> for Prefix6 {
    type Error = NetworkError;

    fn try_from(text: String) -> Result<Self, Self::Error> {
        text.parse()
    }
}

impl From<Prefix6> for String {
    fn from(prefix: Prefix6) -> Self {
        prefix.to_string()
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn an_address_follows_from_the_other_one() {
        let prefix: Prefix6 = "fd67:6f64::/96".parse().unwrap();
        assert_eq!(prefix.of(Ipv4Addr::new(10, 88, 0, 10)).to_string(), "fd67:6f64::a58:a");
        assert_eq!(prefix.to_string(), "fd67:6f64::/96");
    }

    #[test]
    fn what_is_no_prefix_is_refused_with_its_reason() {
        for (text, reason) in [
            ("fd67::", "bits is missing"),
            ("fd67::/64", "96 bits"),
            ("fd67::1/96", "behind the prefix"),
            ("10.88.0.0/96", "not an IPv6 address"),
            ("ff02::/96", "cannot have"),
            ("fe80::/96", "cannot have"),
            ("::/96", "cannot have"),
        ] {
            let error = text.parse::<Prefix6>().unwrap_err().to_string();
            assert!(error.contains(text) && error.contains(reason), "{error}");
        }
    }
}
