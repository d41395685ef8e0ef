//! WireGuard's protocol with one other node, by the library boringtun.
//!
//! The library makes the handshakes, encrypts, and takes each packet once. Here is what it leaves to its user:
//!
//! - A handshake begins as soon as the node is known, and again where the library has given up.
//! - Session keys are renewed, even if no service sends anything: the library does so for a service's packets only.
//! - A packet for which there are no keys is not queued: who sent it sends it again, or does not want it any more.
//! - A packet whose number is near the last one is refused: the library would count past it.
//!
//! <https://www.wireguard.com/papers/wireguard.pdf>

use std::fmt;
use std::io;
use std::net::SocketAddrV4;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use boringtun::noise::{Tunn, TunnResult};
use boringtun::x25519;

use crate::wireguard::{KEEPALIVE, PublicKey, random};

/// What a message of the protocol adds to a packet: type, receiver and number, tag.
pub(super) const ADDED: usize = 16 + 16;
/// The longest message of a handshake.
pub(super) const HANDSHAKE: usize = 148;
/// Session keys of this age are renewed. The node that began their handshake renews them at 120 s
/// (`REKEY_AFTER_TIME`, section 6.1 of the paper) if a service's packet was sent; nobody uses them beyond 180 s.
const RENEW: Duration = Duration::from_secs(125);
/// The type of a message with a packet, and the first number of a packet that is refused. The protocol allows
/// 2^64 - 2^13; keys are renewed long before.
const DATA: u8 = 4;
const MOST_PACKETS: u64 = 1 << 60;

/// A node's own keys: new in each life of the daemon, and nowhere but here.
pub(super) struct Identity {
    private: x25519::StaticSecret,
    /// What the other nodes know it by.
    pub(super) public: PublicKey,
}

impl fmt::Debug for Identity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Identity({:?})", self.public)
    }
}

impl Identity {
    pub(super) fn new() -> io::Result<Self> {
        let private = x25519::StaticSecret::from(random()?);
        let public = PublicKey(x25519::PublicKey::from(&private).to_bytes());
        Ok(Self { private, public })
    }
}

/// What a message from the wire comes to. What there is to pass on lies at the beginning of the buffer, in so many
/// bytes.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Opened {
    /// An IP packet of the node.
    Packet(usize),
    /// A message for the node: a step of a handshake.
    Answer(usize),
    /// Nothing to pass on.
    Nothing,
    /// It is not genuine, came before, or came too often.
    Refused,
}

/// Another node.
pub(super) struct Peer {
    /// Where it takes encrypted packets.
    pub(super) at: SocketAddrV4,
    pub(super) key: PublicKey,
    tunn: Mutex<Tunn>,
    sent: AtomicU64,
}

impl fmt::Debug for Peer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Peer({}, {:?})", self.at, self.key)
    }
}

impl Peer {
    /// A node without session keys. `number` is this one's only.
    pub(super) fn new(own: &Identity, at: SocketAddrV4, key: PublicKey, number: u32) -> Self {
        let theirs = x25519::PublicKey::from(key.0);
        // Its own limit of handshakes each second.
        let tunn = Tunn::new(own.private.clone(), theirs, None, Some(KEEPALIVE), number, None);
        Self { at, key, tunn: Mutex::new(tunn), sent: AtomicU64::new(0) }
    }

    fn tunn(&self) -> MutexGuard<'_, Tunn> {
        self.tunn.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// How long ago the session keys in use were agreed on; nothing where there are none.
    pub(super) fn age(&self) -> Option<Duration> {
        self.tunn().time_since_last_handshake()
    }

    /// Packets encrypted for it.
    pub(super) fn sent(&self) -> u64 {
        self.sent.load(Ordering::Relaxed)
    }

    /// Writes the message for the packet; its length. Nothing when there are no keys. `message` must be [`ADDED`]
    /// longer than the packet.
    pub(super) fn seal(&self, packet: &[u8], message: &mut [u8]) -> Option<usize> {
        let mut tunn = self.tunn();
        // Otherwise it would be queued.
        tunn.time_since_last_handshake()?;
        let length = written(&tunn.encapsulate(packet, message))?;
        self.sent.fetch_add(1, Ordering::Relaxed);
        Some(length)
    }

    /// Takes a message that came from the node's address. `packet` must be as long as the message, and as
    /// [`HANDSHAKE`].
    pub(super) fn open(&self, message: &[u8], packet: &mut [u8]) -> Opened {
        if message.is_empty() || is_past_the_last(message) {
            return Opened::Refused;
        }
        match self.tunn().decapsulate(Some((*self.at.ip()).into()), message, packet) {
            TunnResult::WriteToTunnelV4(packet, _) => Opened::Packet(packet.len()),
            TunnResult::WriteToNetwork(answer) => Opened::Answer(answer.len()),
            TunnResult::Done => Opened::Nothing,
            TunnResult::WriteToTunnelV6(..) | TunnResult::Err(_) => Opened::Refused,
        }
    }

    /// Writes what is to be sent after an answer; its length. To be repeated until there is nothing.
    pub(super) fn more(&self, message: &mut [u8]) -> Option<usize> {
        written(&self.tunn().decapsulate(None, &[], message))
    }

    /// Does what is due: to be called several times a second. Writes a message for the node, if there is one; its
    /// length. `message` must be as long as [`HANDSHAKE`].
    pub(super) fn tick(&self, message: &mut [u8]) -> Option<usize> {
        let mut tunn = self.tunn();
        if let Some(length) = written(&tunn.update_timers(message)) {
            return Some(length);
        }
        if !is_due(tunn.time_since_last_handshake()) {
            return None;
        }
        // Nothing while a handshake is in progress, which the library repeats every 5 s.
        written(&tunn.format_handshake_initiation(message, false))
    }
}

fn is_due(age: Option<Duration>) -> bool {
    age.is_none_or(|age| age >= RENEW)
}

/// The length of what is to be sent: the library writes from the buffer's beginning.
fn written(result: &TunnResult<'_>) -> Option<usize> {
    match result {
        TunnResult::WriteToNetwork(message) => Some(message.len()),
        _ => None,
    }
}

/// Whether a message has a packet's number that no node comes to.
fn is_past_the_last(message: &[u8]) -> bool {
    let Some((head, rest)) = message.split_first_chunk::<8>() else { return false };
    head[0] == DATA && rest.first_chunk().is_some_and(|number| u64::from_le_bytes(*number) >= MOST_PACKETS)
}

#[cfg(test)]
pub(super) mod tests {
    #![allow(clippy::unwrap_used)]
    use std::net::Ipv4Addr;

    use proptest::prelude::*;

    use super::*;

    pub(in crate::tunnel) const A: Ipv4Addr = Ipv4Addr::new(10, 99, 0, 11);
    pub(in crate::tunnel) const B: Ipv4Addr = Ipv4Addr::new(10, 99, 0, 12);

    pub(in crate::tunnel) fn at(address: Ipv4Addr) -> SocketAddrV4 {
        SocketAddrV4::new(address, 7119)
    }

    /// An IP packet as the library wants one: its length, and addresses.
    fn packet(text: &[u8]) -> Vec<u8> {
        let length = u8::try_from(20 + text.len()).unwrap();
        let mut packet = vec![0x45, 0, 0, length, 0, 0, 0, 0, 64, 17, 0, 0];
        packet.extend(A.octets());
        packet.extend(B.octets());
        packet.extend(text);
        packet
    }

    /// Two nodes, each as the other sees it: `a`'s peer is b, and `b`'s is a.
    fn pair() -> (Peer, Peer) {
        let (a, b) = (Identity::new().unwrap(), Identity::new().unwrap());
        (Peer::new(&a, at(B), b.public, 1), Peer::new(&b, at(A), a.public, 1))
    }

    fn sealed(from: &Peer, packet: &[u8]) -> Option<Vec<u8>> {
        let mut message = vec![0; packet.len() + ADDED];
        let length = from.seal(packet, &mut message)?;
        Some(message[..length].to_vec())
    }

    /// What the node makes of a message, and what it passes on.
    fn opened(by: &Peer, message: &[u8]) -> (Opened, Vec<u8>) {
        let mut out = vec![0; message.len().max(HANDSHAKE)];
        let opened = by.open(message, &mut out);
        out.truncate(match opened {
            Opened::Packet(length) | Opened::Answer(length) => length,
            Opened::Nothing | Opened::Refused => 0,
        });
        (opened, out)
    }

    fn received(by: &Peer, message: &[u8]) -> Option<Vec<u8>> {
        let (opened, packet) = opened(by, message);
        matches!(opened, Opened::Packet(_)).then_some(packet)
    }

    fn began(peer: &Peer) -> Option<Vec<u8>> {
        let mut message = vec![0; HANDSHAKE];
        let length = peer.tick(&mut message)?;
        Some(message[..length].to_vec())
    }

    /// Begins a handshake although there are keys.
    fn renewed(peer: &Peer) -> Vec<u8> {
        let mut message = vec![0; HANDSHAKE];
        let length = written(&peer.tunn().format_handshake_initiation(&mut message, true)).unwrap();
        message[..length].to_vec()
    }

    /// Carries a message of `from` to `to`, and all that follows from it.
    fn carried(from: &Peer, to: &Peer, message: &[u8]) {
        match opened(to, message) {
            (Opened::Answer(_), answer) => {
                carried(to, from, &answer);
                let mut more = vec![0; HANDSHAKE];
                while let Some(length) = to.more(&mut more) {
                    carried(to, from, &more[..length]);
                }
            }
            (opened, _) => assert_eq!(opened, Opened::Nothing),
        }
    }

    /// Two nodes with session keys.
    fn agreed() -> (Peer, Peer) {
        let (a, b) = pair();
        carried(&a, &b, &began(&a).unwrap());
        (a, b)
    }

    fn passes(from: &Peer, to: &Peer, text: &[u8]) {
        let packet = packet(text);
        assert_eq!(received(to, &sealed(from, &packet).unwrap()).unwrap(), packet);
    }

    #[test]
    fn what_one_node_seals_the_other_opens_once() {
        let (a, b) = agreed();
        for (from, to) in [(&a, &b), (&b, &a)] {
            let packet = packet(b"secret");
            let message = sealed(from, &packet).unwrap();
            assert_eq!(message.len(), packet.len() + ADDED);
            assert!(!message.windows(6).any(|window| window == b"secret"));
            assert_eq!(received(to, &message).unwrap(), packet);
            assert_eq!(opened(to, &message).0, Opened::Refused, "a second time");
        }
        assert_eq!((a.sent(), b.sent()), (1, 1));
    }

    #[test]
    fn packets_in_another_order_are_taken_once_each() {
        let (a, b) = agreed();
        let messages: Vec<_> = (0..1000).map(|_| sealed(&a, &packet(b"one")).unwrap()).collect();
        for message in messages.iter().rev() {
            assert!(received(&b, message).is_some());
        }
        assert!(messages.iter().all(|message| received(&b, message).is_none()));
    }

    #[test]
    fn a_changed_or_cut_packet_is_not_opened_and_does_not_spoil_the_genuine_one() {
        let (a, b) = agreed();
        let message = sealed(&a, &packet(b"packet")).unwrap();
        for place in 0..message.len() {
            let mut changed = message.clone();
            changed[place] ^= 1;
            assert_eq!(opened(&b, &changed).0, Opened::Refused, "byte {place}");
            assert_eq!(opened(&b, &message[..place]).0, Opened::Refused, "cut to {place} bytes");
        }
        // Nor does a node take its own packet for the other's.
        assert_eq!(opened(&a, &message).0, Opened::Refused);
        assert!(received(&b, &message).is_some());
    }

    #[test]
    fn another_key_agrees_on_nothing() {
        let (a, b) = pair();
        let third = Identity::new().unwrap();
        let stranger = Peer::new(&third, at(B), a.key, 1);
        let message = began(&stranger).unwrap();
        assert_eq!(opened(&b, &message).0, Opened::Refused, "a's peer is b, and is told of another node");
        assert_eq!(opened(&stranger, &began(&b).unwrap()).0, Opened::Refused);
        assert_eq!((a.age(), b.age(), stranger.age()), (None, None, None));
    }

    #[test]
    fn without_keys_nothing_is_sealed_and_nothing_waits() {
        let (a, b) = pair();
        assert_eq!(sealed(&a, &packet(b"too early")), None);
        carried(&a, &b, &began(&a).unwrap());
        assert_eq!(a.more(&mut [0; 256]), None, "it was queued");
        assert_eq!(a.sent(), 0);
        assert!(a.age().is_some() && b.age().is_some());
        passes(&b, &a, b"now");
    }

    #[test]
    fn a_handshake_begins_at_once_and_only_one() {
        let (a, b) = pair();
        let message = began(&a).unwrap();
        assert_eq!(began(&a), None, "it is in progress");
        carried(&a, &b, &message);
        assert_eq!((began(&a), began(&b)), (None, None), "there are keys");
    }

    #[test]
    fn handshakes_that_cross_agree() {
        let (a, b) = pair();
        let (of_a, of_b) = (began(&a).unwrap(), began(&b).unwrap());
        let (to_a, to_b) = (opened(&b, &of_a).1, opened(&a, &of_b).1);
        carried(&b, &a, &to_a);
        carried(&a, &b, &to_b);
        for _ in 0..3 {
            passes(&a, &b, b"to b");
            passes(&b, &a, b"to a");
        }
    }

    #[test]
    fn keys_are_renewed_before_they_end_and_where_there_are_none() {
        assert!(is_due(None) && is_due(Some(Duration::from_secs(125))));
        assert!(!is_due(Some(Duration::from_secs(124))));
    }

    #[test]
    fn a_renewal_loses_nothing() {
        let (a, b) = agreed();
        for (from, to) in [(&a, &b), (&b, &a), (&a, &b)] {
            let before =
                [(from, to), (to, from)].map(|(from, to)| (to, sealed(from, &packet(b"0")).unwrap()));
            let answer = opened(to, &renewed(from)).1;
            // The answer is on its way: what both send must be understood.
            passes(from, to, b"1");
            passes(to, from, b"2");
            carried(to, from, &answer);
            passes(from, to, b"3");
            passes(to, from, b"4");
            for (to, message) in before {
                assert!(received(to, &message).is_some(), "with the older keys");
            }
            // An answer that is lost costs nothing either.
            opened(to, &renewed(from));
            passes(from, to, b"5");
            passes(to, from, b"6");
        }
    }

    #[test]
    fn a_handshake_is_taken_once_and_many_in_a_second_get_a_cookie() {
        let (a, b) = agreed();
        let message = renewed(&a);
        let answers: Vec<_> = (0..200).map(|_| opened(&b, &message).1.len()).collect();
        assert_eq!(answers.iter().filter(|length| **length == 92).count(), 1, "answers: {answers:?}");
        // Shorter than what was sent: nobody can make this node send more than he does.
        assert!(answers[20..].iter().all(|length| *length == 64), "cookies: {answers:?}");
        passes(&a, &b, b"still");
    }

    #[test]
    fn a_packets_number_does_not_come_to_its_end() {
        let (a, b) = agreed();
        let mut message = sealed(&a, &packet(b"the last one")).unwrap();
        // The one that it has: 0 was the last step of the handshake.
        let own = 1;
        for (number, past) in
            [(u64::MAX, true), (MOST_PACKETS, true), (MOST_PACKETS - 1, false), (own, false)]
        {
            message[8..16].copy_from_slice(&number.to_le_bytes());
            assert_eq!(is_past_the_last(&message), past, "{number}");
            let forged = opened(&b, &message).0;
            assert_eq!(forged == Opened::Refused, number != own, "{number}: {forged:?}");
        }
        assert!(!is_past_the_last(&[DATA; 15]) && !is_past_the_last(&[]));
    }

    proptest! {
        #[test]
        fn bytes_from_the_wire_do_no_harm(
            kind in 0_u8..6, bytes in proptest::collection::vec(any::<u8>(), 0..300), length in 0_usize..4
        ) {
            let (a, b) = agreed();
            let mut message = [[kind, 0, 0, 0].as_slice(), &bytes].concat();
            // Also with the length of each kind of message.
            message.resize([148, 92, 64, message.len()][length], 7);
            prop_assert_eq!(opened(&b, &message).0, Opened::Refused);
            passes(&a, &b, b"unharmed");
            passes(&b, &a, b"unharmed");
        }
    }
}
