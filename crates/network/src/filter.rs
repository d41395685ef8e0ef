//! Which packets a capture keeps: a part of the language of `pcap-filter(7)`.
//!
//! ```text
//! expression = term { ("and" | "or") term }              one after the other, from the left
//! term       = [ "not" ] ( "(" expression ")" | test )   "!", "&&" and "||" mean the same
//! test       = protocol [ direction ] [ kind value ]     protocol or kind may be left out
//! protocol   = "ip" | "ip6" | "arp" | "tcp" | "udp" | "icmp" | "icmp6"
//! direction  = "src" | "dst"
//! kind value = "host" ADDRESS | "port" NUMBER
//! ```
//!
//! It examines the service's own packet, even where that is wrapped in VXLAN. Frames are anybody's
//! bytes: what is too short to have a header has none.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use crate::NetworkError;

/// A person types a filter.
const LONGEST_TEXT: usize = 1024;
/// Parentheses inside parentheses.
const DEEPEST: usize = 16;
/// Extension headers of IPv6 that are passed over.
const MOST_EXTENSIONS: usize = 8;

const ETHERNET: usize = 14;
const VXLAN_HEADER: usize = 8;
const KIND_IPV4: u16 = 0x0800;
const KIND_ARP: u16 = 0x0806;
const KIND_IPV6: u16 = 0x86dd;
const KIND_VLAN: [u16; 2] = [0x8100, 0x88a8];
const ICMP: u8 = 1;
const TCP: u8 = 6;
const UDP: u8 = 17;
const ICMPV6: u8 = 58;

/// Which packets to keep; the default keeps all.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Filter(Option<Test>);

#[derive(Debug, Clone, PartialEq, Eq)]
enum Test {
    Not(Box<Test>),
    And(Box<Test>, Box<Test>),
    Or(Box<Test>, Box<Test>),
    Is(Primitive),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
struct Primitive {
    protocol: Option<Protocol>,
    direction: Option<Direction>,
    value: Option<Value>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Protocol {
    /// By the kind that the Ethernet header names.
    Link(u16),
    /// By the protocol that the IP header names.
    Transport(u8),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Direction {
    Source,
    Destination,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Value {
    Host(IpAddr),
    Port(u16),
}

impl Filter {
    /// Reads a filter; an empty text keeps everything.
    ///
    /// # Errors
    /// [`NetworkError::BadFilter`] with the reason.
    pub fn parse(text: &str) -> Result<Self, NetworkError> {
        let bad = |reason: String| NetworkError::BadFilter { text: text.to_owned(), reason };
        if text.len() > LONGEST_TEXT {
            return Err(NetworkError::BadFilter {
                text: text.chars().take(40).chain(['…']).collect(),
                reason: format!("it is longer than {LONGEST_TEXT} bytes"),
            });
        }
        let spaced = text.replace('(', " ( ").replace(')', " ) ").replace('!', " ! ");
        let mut words = Words(spaced.split_whitespace().collect());
        if words.0.is_empty() {
            return Ok(Self(None));
        }
        let test = words.expression(0).map_err(bad)?;
        match words.0.front() {
            None => Ok(Self(Some(test))),
            Some(word) => Err(bad(format!("\"{word}\" is too much; join tests with `and` or `or`"))),
        }
    }

    /// Whether the frame, or the service's frame that it wraps, is to be kept. `vxlan_port` is the
    /// port of the overlay.
    pub(crate) fn keeps(&self, frame: &[u8], vxlan_port: u16) -> bool {
        let Some(test) = &self.0 else { return true };
        test.holds(&Headers::of(wrapped(frame, vxlan_port).unwrap_or(frame)))
    }
}

/// What has not been read of a filter.
struct Words<'a>(std::collections::VecDeque<&'a str>);

impl Words<'_> {
    fn expression(&mut self, depth: usize) -> Result<Test, String> {
        if depth > DEEPEST {
            return Err(format!("it has more than {DEEPEST} parentheses inside each other"));
        }
        let mut left = self.term(depth)?;
        loop {
            match self.0.front().copied() {
                Some("and" | "&&") => {
                    self.0.pop_front();
                    left = Test::And(Box::new(left), Box::new(self.term(depth)?));
                }
                Some("or" | "||") => {
                    self.0.pop_front();
                    left = Test::Or(Box::new(left), Box::new(self.term(depth)?));
                }
                _ => return Ok(left),
            }
        }
    }

    fn term(&mut self, depth: usize) -> Result<Test, String> {
        let mut negated = false;
        while let Some("not" | "!") = self.0.front().copied() {
            self.0.pop_front();
            negated = !negated;
        }
        let test = if self.0.front() == Some(&"(") {
            self.0.pop_front();
            let inside = self.expression(depth + 1)?;
            if self.0.pop_front() != Some(")") {
                return Err("a parenthesis is not closed".into());
            }
            inside
        } else {
            Test::Is(self.primitive()?)
        };
        Ok(if negated { Test::Not(Box::new(test)) } else { test })
    }

    fn primitive(&mut self) -> Result<Primitive, String> {
        let mut found = Primitive::default();
        if let Some(protocol) = self.0.front().and_then(|word| protocol(word)) {
            self.0.pop_front();
            found.protocol = Some(protocol);
        }
        found.direction = match self.0.front() {
            Some(&"src") => Some(Direction::Source),
            Some(&"dst") => Some(Direction::Destination),
            _ => None,
        };
        if found.direction.is_some() {
            self.0.pop_front();
        }
        found.value = match self.0.front() {
            Some(&"host") => Some(Value::Host(self.value("host")?)),
            Some(&"port") => Some(Value::Port(self.value("port")?)),
            _ => None,
        };
        if found.value.is_some() || (found.protocol.is_some() && found.direction.is_none()) {
            return Ok(found);
        }
        Err(match (found.direction, self.0.front()) {
            (Some(_), _) => "after `src` and `dst` comes `host ADDRESS` or `port NUMBER`".into(),
            (None, Some(word)) => {
                format!(
                    "\"{word}\" is not a test; the tests are ip, ip6, arp, tcp, udp, icmp, icmp6, host and port"
                )
            }
            (None, None) => "a test is missing at its end".into(),
        })
    }

    fn value<T: std::str::FromStr>(&mut self, kind: &str) -> Result<T, String> {
        self.0.pop_front();
        let word = self.0.pop_front().ok_or_else(|| format!("something is missing after `{kind}`"))?;
        let wanted = if kind == "host" { "an IP address" } else { "a port from 0 to 65535" };
        word.parse().map_err(|_| format!("\"{word}\" after `{kind}` is not {wanted}"))
    }
}

fn protocol(word: &str) -> Option<Protocol> {
    Some(match word {
        "ip" => Protocol::Link(KIND_IPV4),
        "ip6" => Protocol::Link(KIND_IPV6),
        "arp" => Protocol::Link(KIND_ARP),
        "tcp" => Protocol::Transport(TCP),
        "udp" => Protocol::Transport(UDP),
        "icmp" => Protocol::Transport(ICMP),
        "icmp6" => Protocol::Transport(ICMPV6),
        _ => return None,
    })
}

impl Test {
    fn holds(&self, headers: &Headers) -> bool {
        match self {
            Self::Not(test) => !test.holds(headers),
            Self::And(left, right) => left.holds(headers) && right.holds(headers),
            Self::Or(left, right) => left.holds(headers) || right.holds(headers),
            Self::Is(primitive) => primitive.holds(headers),
        }
    }
}

impl Primitive {
    fn holds(&self, headers: &Headers) -> bool {
        let of_protocol = match self.protocol {
            None => true,
            Some(Protocol::Link(kind)) => headers.kind == Some(kind),
            Some(Protocol::Transport(protocol)) => headers.protocol == Some(protocol),
        };
        of_protocol
            && match self.value {
                None => true,
                Some(Value::Host(host)) => self.either(headers.addresses, host),
                Some(Value::Port(port)) => self.either(headers.ports, port),
            }
    }

    /// Whether source or destination, whichever is asked for, is the one.
    fn either<T: PartialEq>(&self, pair: Option<(T, T)>, wanted: T) -> bool {
        pair.is_some_and(|(source, destination)| match self.direction {
            None => source == wanted || destination == wanted,
            Some(Direction::Source) => source == wanted,
            Some(Direction::Destination) => destination == wanted,
        })
    }
}

/// What the tests look at. Pairs are source and destination.
#[derive(Debug, Default, PartialEq, Eq)]
struct Headers {
    kind: Option<u16>,
    addresses: Option<(IpAddr, IpAddr)>,
    protocol: Option<u8>,
    ports: Option<(u16, u16)>,
}

impl Headers {
    fn of(frame: &[u8]) -> Self {
        let mut at = 12;
        let mut kind = half(frame, at);
        // A tag, or one inside another.
        for _ in 0..2 {
            if kind.is_some_and(|kind| KIND_VLAN.contains(&kind)) {
                at += 4;
                kind = half(frame, at);
            }
        }
        let packet = frame.get(at + 2..).unwrap_or_default();
        let mut headers = Self { kind, ..Self::default() };
        match kind {
            Some(KIND_IPV4) => headers.take_ipv4(packet),
            Some(KIND_IPV6) => headers.take_ipv6(packet),
            Some(KIND_ARP) => headers.addresses = ipv4(packet, 14).zip(ipv4(packet, 24)),
            _ => {}
        }
        headers
    }

    fn take_ipv4(&mut self, packet: &[u8]) {
        self.addresses = ipv4(packet, 12).zip(ipv4(packet, 16));
        self.protocol = packet.get(9).copied();
        let length = packet.first().map_or(0, |first| usize::from(first & 0x0f) * 4);
        let later_fragment = half(packet, 6).is_some_and(|field| field & 0x1fff != 0);
        if !later_fragment {
            self.take_ports(packet.get(length..).unwrap_or_default());
        }
    }

    fn take_ipv6(&mut self, packet: &[u8]) {
        self.addresses = ipv6(packet, 8).zip(ipv6(packet, 24));
        let mut next = packet.get(6).copied();
        let mut rest = packet.get(40..).unwrap_or_default();
        for _ in 0..MOST_EXTENSIONS {
            // Hop-by-hop options, routing, destination options: next header, length in 8 bytes.
            // Fragment: of fixed length.
            let length = match next {
                Some(0 | 43 | 60) => rest.get(1).map_or(0, |length| (usize::from(*length) + 1) * 8),
                Some(44) => 8,
                _ => break,
            };
            let later_fragment = next == Some(44) && half(rest, 2).is_some_and(|field| field & 0xfff8 != 0);
            next = rest.first().copied();
            rest = if later_fragment { &[] } else { rest.get(length..).unwrap_or_default() };
        }
        self.protocol = next;
        self.take_ports(rest);
    }

    fn take_ports(&mut self, segment: &[u8]) {
        if let Some(TCP | UDP) = self.protocol {
            self.ports = half(segment, 0).zip(half(segment, 2));
        }
    }
}

/// The frame that is wrapped in VXLAN in this one.
fn wrapped(frame: &[u8], port: u16) -> Option<&[u8]> {
    let packet = frame.get(ETHERNET..)?;
    let is_udp = half(frame, 12) == Some(KIND_IPV4) && packet.get(9) == Some(&UDP);
    let whole = half(packet, 6)? & 0x1fff == 0;
    let segment = packet.get(usize::from(packet.first()? & 0x0f) * 4..)?;
    if is_udp && whole && half(segment, 2) == Some(port) { segment.get(8 + VXLAN_HEADER..) } else { None }
}

fn half(bytes: &[u8], at: usize) -> Option<u16> {
    bytes.get(at..at + 2)?.try_into().ok().map(u16::from_be_bytes)
}

fn ipv4(bytes: &[u8], at: usize) -> Option<IpAddr> {
    let bytes: [u8; 4] = bytes.get(at..at + 4)?.try_into().ok()?;
    Some(Ipv4Addr::from(bytes).into())
}

fn ipv6(bytes: &[u8], at: usize) -> Option<IpAddr> {
    let bytes: [u8; 16] = bytes.get(at..at + 16)?.try_into().ok()?;
    Some(Ipv6Addr::from(bytes).into())
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
pub(crate) mod tests {
    use proptest::prelude::*;

    use super::*;

    const CLIENT: [u8; 4] = [10, 99, 0, 100];
    const SERVICE: [u8; 4] = [10, 88, 0, 10];
    const VXLAN: u16 = 4789;

    /// An Ethernet frame of IPv4 with the beginning of a TCP or UDP segment.
    pub(crate) fn ipv4_frame(protocol: u8, from: ([u8; 4], u16), to: ([u8; 4], u16)) -> Vec<u8> {
        let mut frame = vec![2; 12];
        frame.extend([0x08, 0x00, 0x45, 0, 0, 28, 0, 0, 0, 0, 64, protocol, 0, 0]);
        frame.extend(from.0.iter().chain(&to.0));
        frame.extend(from.1.to_be_bytes().iter().chain(&to.1.to_be_bytes()));
        frame.extend([0, 8, 0, 0]);
        frame
    }

    /// That frame on its way between two nodes.
    pub(crate) fn in_vxlan(inner: &[u8]) -> Vec<u8> {
        let mut frame = ipv4_frame(UDP, ([192, 0, 2, 1], 50_000), ([192, 0, 2, 2], VXLAN));
        frame.extend([8, 0, 0, 0, 0, 0, 88, 0]);
        frame.extend(inner);
        frame
    }

    fn ipv6_frame(extensions: &[u8]) -> Vec<u8> {
        let mut frame = vec![2; 12];
        let first = if extensions.is_empty() { TCP } else { 0 };
        frame.extend([0x86, 0xdd, 0x60, 0, 0, 0, 0, 20, first, 64]);
        frame.extend(Ipv6Addr::LOCALHOST.octets());
        frame.extend("fd00::1".parse::<Ipv6Addr>().unwrap().octets());
        frame.extend(extensions);
        frame.extend(443_u16.to_be_bytes().iter().chain(&55_u16.to_be_bytes()));
        frame
    }

    fn keeps(filter: &str, frame: &[u8]) -> bool {
        Filter::parse(filter).unwrap().keeps(frame, VXLAN)
    }

    #[test]
    fn tests_look_at_protocols_addresses_and_ports() {
        let request = ipv4_frame(TCP, (CLIENT, 40_000), (SERVICE, 6379));
        for yes in [
            "",
            "tcp",
            "ip",
            "port 6379",
            "tcp dst port 6379",
            "src port 40000",
            "host 10.88.0.10",
            "src host 10.99.0.100 and dst host 10.88.0.10",
            "not udp",
            "!udp && !arp",
            "udp or tcp",
            "not (udp or icmp) and port 6379",
            // From the left: (udp and arp) or tcp.
            "udp and arp or tcp",
            "not not tcp",
        ] {
            assert!(keeps(yes, &request), "{yes}");
        }
        for no in [
            "udp",
            "arp",
            "ip6",
            "icmp",
            "port 80",
            "src port 6379",
            "udp port 6379",
            "dst host 10.99.0.100",
            "host ::1",
            "tcp or udp and arp",
        ] {
            assert!(!keeps(no, &request), "{no}");
        }
    }

    #[test]
    fn a_frame_in_vxlan_is_looked_at_and_not_its_wrapping() {
        let wrapped = in_vxlan(&ipv4_frame(TCP, (SERVICE, 6379), (CLIENT, 40_000)));
        assert!(keeps("tcp src port 6379 and src host 10.88.0.10", &wrapped));
        assert!(!keeps("port 4789", &wrapped));
        assert!(!keeps("host 192.0.2.1", &wrapped));
        assert!(keeps("udp", &ipv4_frame(UDP, (SERVICE, 53), (CLIENT, 4788))));
    }

    #[test]
    fn vlan_tags_arp_and_ipv6_with_extensions_are_understood() {
        let mut tagged = ipv4_frame(TCP, (CLIENT, 1), (SERVICE, 2));
        tagged.splice(12..12, [0x81, 0, 0, 5]);
        assert!(keeps("tcp port 2", &tagged));
        let mut arp = vec![0xff; 12];
        arp.extend([0x08, 0x06, 0, 1, 8, 0, 6, 4, 0, 1]);
        arp.extend([2, 0, 0, 0, 0, 1].iter().chain(&CLIENT).chain(&[0; 6]).chain(&SERVICE));
        assert!(keeps("arp and src host 10.99.0.100 and dst host 10.88.0.10", &arp));
        assert!(!keeps("ip", &arp));
        for frame in [ipv6_frame(&[]), ipv6_frame(&[TCP, 0, 0, 0, 0, 0, 0, 0])] {
            assert!(keeps("ip6 and tcp src port 443 and dst host fd00::1", &frame), "{frame:?}");
        }
    }

    #[test]
    fn only_the_first_fragment_has_ports() {
        let mut later = ipv4_frame(UDP, (CLIENT, 1), (SERVICE, 2));
        later[21] = 1;
        assert!(keeps("udp", &later));
        assert!(!keeps("port 2", &later));
    }

    #[test]
    fn what_is_no_filter_is_refused_with_the_reason() {
        let deep = format!("{}tcp{}", "(".repeat(40), ")".repeat(40));
        let long = "tcp or ".repeat(300);
        for (text, reason) in [
            ("frob", "\"frob\" is not a test"),
            ("tcp and", "a test is missing at its end"),
            ("tcp udp", "\"udp\" is too much"),
            ("port http", "not a port"),
            ("port 70000", "not a port"),
            ("host web", "not an IP address"),
            ("host", "missing after `host`"),
            ("tcp src", "after `src` and `dst`"),
            ("(tcp", "not closed"),
            ("tcp)", "\")\" is too much"),
            (&deep, "more than 16 parentheses"),
            (&long, "longer than 1024 bytes"),
        ] {
            let message = Filter::parse(text).unwrap_err().to_string();
            assert!(message.contains(reason), "{text}: {message}");
        }
    }

    proptest! {
        #[test]
        fn no_bytes_and_no_text_bring_it_down(frame in prop::collection::vec(any::<u8>(), 0..200), text in ".{0,60}") {
            let filter = Filter::parse("tcp port 1 or host ::1 or udp or arp").unwrap();
            let plain = Filter::parse("not ip").unwrap();
            for length in 0..=frame.len() {
                filter.keeps(&frame[..length], VXLAN);
            }
            let mut made_up = in_vxlan(&frame);
            filter.keeps(&made_up, VXLAN);
            made_up.truncate(made_up.len() / 2);
            plain.keeps(&made_up, VXLAN);
            if let Ok(parsed) = Filter::parse(&text) {
                parsed.keeps(&frame, VXLAN);
            }
        }
    }
}
