//! What is believed of what another node says.
//!
//! A node is known by its certificate, and speaks for itself: its address, what it is, and the services it
//! has. No node speaks for others. What a node says of others is used in two ways only: as an address at
//! which a member unknown here may be, which that member's own certificate has to confirm (`introduced.rs`),
//! and as the place to which a service went that it had itself.
//!
//! Everything is bounded: names, numbers, and how much there is of it.

use std::collections::HashMap;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::time::Duration;

use godwit_api::v1::{Member, NodeInfo, Placement};
use godwit_names::{MAX_ALIASES, is_alias, is_name};
use godwit_transfer::NodeName;

use crate::convert;

/// Most members of a cluster. Every node talks to every other one each second: this is for tens.
pub(crate) const MAX_MEMBERS: usize = 256;

/// Most services that one node may tell of, those that were removed among them.
pub(crate) const MAX_SERVICES: usize = 10_000;

/// Highest epoch of a service: a move in each millisecond of thirty years.
pub(crate) const MAX_EPOCH: u64 = 1 << 40;

/// How far another node's clock may be ahead: as far as for a certificate.
const MAX_AHEAD: Duration = godwit_transfer::certificate::CLOCK_SKEW;

/// Longest word of what a node tells of itself.
const MAX_WORD: usize = 256;
/// Interfaces of a service, and its published ports.
const MAX_ADDRESSES: usize = 16;
const MAX_PORTS: usize = 1024;
/// Longest id; a ULID has 26 letters.
const MAX_ID: usize = 64;

/// Why an entry about a member is not valid, if it is not.
pub(crate) fn member_fault(member: &Member, now_ms: i64) -> Option<String> {
    if let Err(error) = NodeName::new(&member.name) {
        return Some(error.to_string());
    }
    let address = member.address.parse::<SocketAddr>();
    if !address.is_ok_and(|address| is_host(address.ip()) && address.port() != 0) {
        return Some(format!("{:?} is not the address of a node", shortened(&member.address)));
    }
    if !member.vtep.parse::<Ipv4Addr>().is_ok_and(|vtep| is_host(vtep.into())) {
        return Some(format!("{:?} is not an address for the overlay", shortened(&member.vtep)));
    }
    let ahead = i64::try_from(MAX_AHEAD.as_millis()).unwrap_or(i64::MAX);
    let latest = u64::try_from(now_ms.saturating_add(ahead)).unwrap_or(0);
    (member.revision > latest).then(|| "its revision is in the future; set the clocks of both nodes".into())
}

/// Whether a host can have this address, other than the one that asks.
pub(crate) fn is_host(address: IpAddr) -> bool {
    let broadcast = matches!(address, IpAddr::V4(v4) if v4.is_broadcast());
    !address.is_unspecified() && !address.is_multicast() && !address.is_loopback() && !broadcast
}

/// Whether the words of a node about itself are short enough and do a terminal no harm.
pub(crate) fn is_plain(info: &NodeInfo) -> bool {
    let plain = |text: &str| text.len() <= MAX_WORD && !text.chars().any(char::is_control);
    let NodeInfo { name, address, state, reason, version, arch, kernel, criu, .. } = info;
    let words = [name, address, state, reason, version, arch, kernel, criu];
    words.into_iter().all(|word| plain(word))
        && info.network.as_ref().is_none_or(|network| {
            plain(&network.encryption) && plain(&network.uplink_mac) && plain(&network.prefix6)
        })
}

/// Whether an entry about a service is valid.
pub(crate) fn is_sound(placement: &Placement) -> bool {
    let address = |text: &String| text.is_empty() || text.parse::<Ipv4Addr>().is_ok();
    is_name(&placement.service)
        && NodeName::new(&placement.node).is_ok()
        && placement.epoch <= MAX_EPOCH
        && placement.id.len() <= MAX_ID
        && placement.id.bytes().all(|byte| byte.is_ascii_alphanumeric())
        && address(&placement.address)
        && placement.more.len() < MAX_ADDRESSES
        && placement.more.iter().all(address)
        && placement.publish.len() <= MAX_PORTS
        && convert::ports(&placement.publish).is_ok()
        && placement.aliases.len() <= MAX_ALIASES
        && placement.aliases.iter().all(|alias| is_alias(alias))
}

/// What is done with an entry about a service.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Belief {
    /// The sender may not say it.
    None,
    /// It counts if it is newer.
    IfNewer,
    /// It counts: the node that had the service is no longer a member.
    Always,
}

/// The services that are known, and who may say what of them.
pub(crate) struct Placements<'a> {
    own: &'a str,
    members: &'a [Member],
    known: HashMap<String, Placement>,
}

impl<'a> Placements<'a> {
    /// What node `own` knows.
    pub(crate) fn new(own: &'a str, members: &'a [Member], known: Vec<Placement>) -> Self {
        let known = known.into_iter().map(|placement| (placement.service.clone(), placement)).collect();
        Self { own, members, known }
    }

    /// How many services are known to be, or have been, on a node.
    pub(crate) fn of(&self, node: &str) -> usize {
        self.known.values().filter(|placement| placement.node == node).count()
    }

    /// Whether the entry is news at all.
    pub(crate) fn knows(&self, told: &Placement) -> bool {
        self.known.get(&told.service) == Some(told)
    }

    /// Whether there is an entry of that name.
    pub(crate) fn has(&self, service: &str) -> bool {
        self.known.contains_key(service)
    }

    /// Whether to believe `told`, which node `from` says.
    ///
    /// The owner that is known so far says where a service goes: it has committed the move. The new owner
    /// alone is not believed, else every member could take every service.
    pub(crate) fn belief(&self, from: &str, told: &Placement) -> Belief {
        if told.node == self.own {
            // This node knows best what it has. Of a service that it knows nothing of, as with an
            // older disk, it lists what the others do, so that an operator can take it off the list.
            return if self.known.contains_key(&told.service) { Belief::None } else { Belief::IfNewer };
        }
        let of_itself = told.node == from;
        let Some(known) = self.known.get(&told.service) else {
            return if of_itself { Belief::IfNewer } else { Belief::None };
        };
        let is_member = |name: &str| name == self.own || self.members.iter().any(|m| m.name == name);
        let same = known.id == told.id;
        if known.node == from && (same || of_itself) {
            Belief::IfNewer
        } else if known.node != self.own && !is_member(&known.node) {
            let forgotten = same && told.removed && told.node == known.node;
            let found = of_itself && (!same || told.epoch >= known.epoch || known.epoch > MAX_EPOCH);
            if forgotten || found { Belief::Always } else { Belief::None }
        } else if known.removed && !same && of_itself {
            // The name is free.
            Belief::IfNewer
        } else {
            Belief::None
        }
    }
}

/// As much of a text as an error shows.
pub(crate) fn shortened(text: &str) -> String {
    text.chars().take(64).collect()
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    const NOW: i64 = 1_800_000_000_000;

    fn member(name: &str) -> Member {
        let (address, vtep) = ("10.99.0.13:7117".into(), "10.99.0.13".into());
        Member { name: name.into(), address, vtep, revision: u64::try_from(NOW).unwrap() }
    }

    fn placement(id: &str, node: &str, epoch: u64) -> Placement {
        let (service, address) = ("web".into(), "10.88.0.10".into());
        Placement { service, address, node: node.into(), epoch, id: id.into(), ..Placement::default() }
    }

    #[test]
    fn an_entry_about_a_member_that_cannot_be_is_refused() {
        assert_eq!(member_fault(&member("a"), NOW), None);
        let day = 24 * 3600 * 1000;
        assert_eq!(member_fault(&member("a"), NOW - day), None, "a clock that is behind is no fault");
        for name in ["", "../../x", "a/b", "x\ny", "A", &"x".repeat(100_000)] {
            assert!(member_fault(&member(name), NOW).is_some(), "{name:?}");
        }
        type Spoil = fn(&mut Member);
        let spoilt: [Spoil; 7] = [
            |m| m.revision = u64::MAX,
            |m| m.revision = 1 << 63,
            |m| m.revision += 25 * 3600 * 1000,
            |m| m.address = "somewhere".into(),
            |m| m.address = "127.0.0.1:7117".into(),
            |m| m.vtep = "0.0.0.0".into(),
            |m| m.vtep = "224.0.0.1".into(),
        ];
        for (which, spoil) in spoilt.into_iter().enumerate() {
            let mut spoilt = member("a");
            spoil(&mut spoilt);
            assert!(member_fault(&spoilt, NOW).is_some(), "{which}");
        }
    }

    #[test]
    fn an_entry_about_a_service_that_cannot_be_is_refused() {
        assert!(is_sound(&placement("01ABC", "b", 1)));
        type Spoil = fn(&mut Placement);
        let spoilt: [Spoil; 8] = [
            |p| p.epoch = u64::MAX,
            |p| p.epoch = MAX_EPOCH + 1,
            |p| p.service = "../x".into(),
            |p| p.service = "x".repeat(64),
            |p| p.node = "B\n".into(),
            |p| p.id = "x".repeat(65),
            |p| p.address = "\u{1b}[2J".into(),
            |p| p.more = vec!["10.88.0.1".into(); 16],
        ];
        for (which, spoil) in spoilt.into_iter().enumerate() {
            let mut spoilt = placement("01ABC", "b", 1);
            spoil(&mut spoilt);
            assert!(!is_sound(&spoilt), "{which}");
        }
    }

    fn belief(known: Option<Placement>, from: &str, told: &Placement) -> Belief {
        let members = ["own", "a", "b", "c"].map(member);
        Placements::new("own", &members, known.into_iter().collect()).belief(from, told)
    }

    #[test]
    fn a_member_speaks_for_its_own_services_and_hands_over_those_it_had() {
        // One that nobody has told of.
        assert_eq!(belief(None, "c", &placement("1", "c", 1)), Belief::IfNewer);
        assert_eq!(belief(None, "c", &placement("1", "a", 1)), Belief::None, "for somebody else");
        // One that `a` has.
        let at_a = Some(placement("1", "a", 1));
        assert_eq!(belief(at_a.clone(), "a", &placement("1", "b", 2)), Belief::IfNewer, "handed over");
        assert_eq!(belief(at_a.clone(), "b", &placement("1", "b", 2)), Belief::None, "taken");
        assert_eq!(belief(at_a.clone(), "c", &placement("1", "b", 2)), Belief::None, "given away");
        let gone = Placement { removed: true, ..placement("1", "a", 2) };
        assert_eq!(belief(at_a.clone(), "a", &gone), Belief::IfNewer);
        assert_eq!(belief(at_a, "c", &gone), Belief::None, "removed by somebody else");
        // A name that is free.
        assert_eq!(belief(Some(gone), "c", &placement("2", "c", 1)), Belief::IfNewer);
    }

    #[test]
    fn nobody_tells_a_node_what_it_has_itself() {
        let own = Some(placement("1", "own", 1));
        for told in [placement("1", "c", 9), placement("2", "c", 9), placement("1", "own", 9)] {
            assert_eq!(belief(own.clone(), "c", &told), Belief::None, "{told:?}");
        }
        let unknown = belief(None, "c", &placement("1", "own", 9));
        assert_eq!(unknown, Belief::IfNewer, "it is listed, and can be taken off the list");
    }

    #[test]
    fn the_services_of_a_node_that_was_removed_can_be_taken_over_and_forgotten() {
        let poisoned = Some(placement("1", "gone", u64::MAX));
        assert_eq!(belief(poisoned.clone(), "a", &placement("1", "a", 1)), Belief::Always);
        let forgotten = Placement { removed: true, ..placement("1", "gone", 7) };
        assert_eq!(belief(poisoned.clone(), "a", &forgotten), Belief::Always);
        assert_eq!(belief(poisoned, "a", &placement("1", "b", 1)), Belief::None);
        assert_eq!(belief(Some(placement("1", "gone", 5)), "a", &placement("1", "a", 4)), Belief::None);
    }

    #[test]
    fn what_a_node_tells_of_itself_does_a_terminal_no_harm() {
        let good = NodeInfo { name: "a".into(), kernel: "6.18.44".into(), ..NodeInfo::default() };
        assert!(is_plain(&good));
        for word in ["\u{1b}[2J", "a\nb", &"x".repeat(257)] {
            assert!(!is_plain(&NodeInfo { kernel: word.into(), ..good.clone() }), "{word:?}");
            assert!(!is_plain(&NodeInfo { criu: word.into(), ..good.clone() }), "{word:?}");
        }
    }
}
