//! The two threads of a tunnel: one takes packets from the device, encrypts them and sends them to
//! the node they are for; the other takes them from the wire and hands the genuine ones in.

use std::collections::{HashMap, VecDeque};
use std::fs::File;
use std::io::{self, ErrorKind, Read, Write};
use std::net::{Ipv4Addr, SocketAddrV4, UdpSocket};
use std::os::fd::AsFd;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};

use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::eventfd::EventFd;

use super::session::{HEADER, Session, TAG, session_of};

/// The longest IP packet.
const LONGEST: usize = 65_535;
/// Sessions of a node that are still listened to: the newest, the one before, whose packets may be
/// on their way, and one that the other side has just begun.
const KEPT: usize = 3;
const UDP: u8 = 17;

/// A node at the other end.
#[derive(Debug)]
pub(super) struct Peer {
    /// Where it takes encrypted packets.
    pub(super) at: SocketAddrV4,
    /// What packets to it are encrypted with.
    pub(super) sending: Option<Arc<Session>>,
    /// Its sessions, oldest first.
    sessions: VecDeque<u64>,
}

#[derive(Debug, Default)]
pub(super) struct Tables {
    /// By their address on the underlay.
    pub(super) peers: HashMap<Ipv4Addr, Peer>,
    /// By their name, with the node's address.
    pub(super) sessions: HashMap<u64, (Arc<Session>, Ipv4Addr)>,
}

impl Tables {
    /// Takes packets of this session from now on, if it is not known already: a session that is
    /// made once more would begin to count again.
    pub(super) fn install(&mut self, at: SocketAddrV4, session: Session) {
        let (address, id) = (*at.ip(), session.id());
        let peer = self.peers.entry(address).or_insert_with(|| Peer {
            at,
            sending: None,
            sessions: VecDeque::new(),
        });
        peer.at = at;
        if self.sessions.contains_key(&id) {
            return;
        }
        self.sessions.insert(id, (Arc::new(session), address));
        peer.sessions.push_back(id);
        let sending = peer.sending.as_ref().map(|session| session.id());
        while peer.sessions.len() > KEPT {
            let oldest = peer.sessions.iter().position(|id| Some(*id) != sending);
            let Some(gone) = oldest.and_then(|place| peer.sessions.remove(place)) else { return };
            self.sessions.remove(&gone);
        }
    }

    /// Encrypts with this session, if it is known, from now on.
    pub(super) fn send_with(&mut self, id: u64) {
        if let Some((session, address)) = self.sessions.get(&id)
            && let Some(peer) = self.peers.get_mut(address)
        {
            peer.sending = Some(Arc::clone(session));
        }
    }
}

/// What both threads and their owner share.
#[derive(Debug)]
pub(super) struct Shared {
    /// This node's address on the underlay.
    pub(super) own: Ipv4Addr,
    /// The only thing that goes through: VXLAN.
    pub(super) vxlan_port: u16,
    tables: RwLock<Tables>,
    /// Packets from the wire that were not genuine, or came before.
    pub(super) refused: AtomicU64,
    /// Packets for nodes with which there are no keys.
    pub(super) unsent: AtomicU64,
}

impl Shared {
    pub(super) fn new(own: Ipv4Addr, vxlan_port: u16) -> Self {
        Self {
            own,
            vxlan_port,
            tables: RwLock::default(),
            refused: AtomicU64::new(0),
            unsent: AtomicU64::new(0),
        }
    }

    // Every change under the lock is a few insertions and removals, none of which panics.
    pub(super) fn read(&self) -> RwLockReadGuard<'_, Tables> {
        self.tables.read().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn write(&self) -> RwLockWriteGuard<'_, Tables> {
        self.tables.write().unwrap_or_else(PoisonError::into_inner)
    }

    /// Encrypts the packet of `length` bytes behind the room for a header; how much of the buffer
    /// goes where.
    fn seal(&self, buffer: &mut [u8], length: usize) -> Option<(usize, SocketAddrV4)> {
        let to = addresses(buffer.get(HEADER..HEADER + length)?)?.1;
        let (session, at) = {
            let tables = self.read();
            let peer = tables.peers.get(&to)?;
            (Arc::clone(peer.sending.as_ref()?), peer.at)
        };
        Some((session.seal(buffer, length)?, at))
    }

    /// The packet in what came from the wire, if it is genuine and what it says it is.
    fn open<'a>(&self, wire: &'a mut [u8]) -> Option<&'a [u8]> {
        let (session, from) = self.read().sessions.get(&session_of(wire)?).cloned()?;
        let packet = session.open(wire)?;
        is_vxlan(packet, from, self.own, self.vxlan_port).then_some(packet)
    }
}

/// Source and destination of an IPv4 packet.
fn addresses(packet: &[u8]) -> Option<(Ipv4Addr, Ipv4Addr)> {
    let header = packet.first_chunk::<20>()?;
    let address = |at: usize| Ipv4Addr::new(header[at], header[at + 1], header[at + 2], header[at + 3]);
    (header[0] >> 4 == 4).then(|| (address(12), address(16)))
}

/// Whether this is a whole IPv4 packet with a UDP header to that port, between those addresses. A
/// node is believed about its own packets only.
fn is_vxlan(packet: &[u8], from: Ipv4Addr, to: Ipv4Addr, port: u16) -> bool {
    let Some(header) = packet.first_chunk::<20>() else { return false };
    let length = usize::from(header[0] & 0x0f) * 4;
    let number = |at: usize| u16::from_be_bytes([header[at], header[at + 1]]);
    let is_fragment = number(6) & 0x3fff != 0;
    addresses(packet) == Some((from, to))
        && length >= 20
        && usize::from(number(2)) == packet.len()
        && header[9] == UDP
        && !is_fragment
        && packet.get(length + 2..length + 4) == Some(port.to_be_bytes().as_slice())
        && packet.len() >= length + 8
}

/// Waits until the file can be read or written, or this is to end; whether it is to go on.
fn ready(file: &impl AsFd, wanted: PollFlags, stop: &EventFd) -> io::Result<bool> {
    let mut files = [PollFd::new(file.as_fd(), wanted), PollFd::new(stop.as_fd(), PollFlags::POLLIN)];
    loop {
        match poll(&mut files, PollTimeout::NONE) {
            Ok(_) => break,
            Err(Errno::EINTR) => {}
            Err(errno) => return Err(errno.into()),
        }
    }
    Ok(files[1].revents().is_none_or(|events| events.is_empty()))
}

/// From the device to the wire, until told to end.
pub(super) fn outward(shared: &Shared, device: &File, socket: &UdpSocket, stop: &EventFd) -> io::Result<()> {
    let mut buffer = vec![0; HEADER + LONGEST + TAG];
    while ready(device, PollFlags::POLLIN, stop)? {
        loop {
            let mut source = device;
            let length = match source.read(&mut buffer[HEADER..HEADER + LONGEST]) {
                Ok(length) => length,
                Err(error) if error.kind() == ErrorKind::WouldBlock => break,
                Err(error) if error.kind() == ErrorKind::Interrupted => continue,
                Err(error) => return Err(error),
            };
            let Some((length, at)) = shared.seal(&mut buffer, length) else {
                shared.unsent.fetch_add(1, Ordering::Relaxed);
                continue;
            };
            while let Err(error) = socket.send_to(&buffer[..length], at) {
                let full = error.kind() == ErrorKind::WouldBlock;
                // Anything else concerns this packet: no route, no buffer. Networks lose packets.
                if !full || !ready(socket, PollFlags::POLLOUT, stop)? {
                    break;
                }
            }
        }
    }
    Ok(())
}

/// From the wire to the device, until told to end.
pub(super) fn inward(shared: &Shared, device: &File, socket: &UdpSocket, stop: &EventFd) -> io::Result<()> {
    let mut buffer = vec![0; HEADER + LONGEST + TAG];
    while ready(socket, PollFlags::POLLIN, stop)? {
        loop {
            let length = match socket.recv(&mut buffer) {
                Ok(length) => length,
                Err(error) if error.kind() == ErrorKind::WouldBlock => break,
                Err(error) if error.kind() == ErrorKind::Interrupted => continue,
                Err(error) => return Err(error),
            };
            let Some(packet) = shared.open(&mut buffer[..length]) else {
                shared.refused.fetch_add(1, Ordering::Relaxed);
                continue;
            };
            let mut sink = device;
            if let Err(error) = sink.write(packet) {
                // The device is down for a moment, or its queue is full: the packet is lost.
                tracing::debug!(%error, "the tunnel's device did not take a packet");
            }
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use crate::tunnel::Secret;

    const A: Ipv4Addr = Ipv4Addr::new(10, 99, 0, 11);
    const B: Ipv4Addr = Ipv4Addr::new(10, 99, 0, 12);

    /// A UDP packet to VXLAN's port with some payload.
    fn packet(from: Ipv4Addr, to: Ipv4Addr) -> Vec<u8> {
        let mut packet = vec![0x45, 0, 0, 36, 0, 0, 0, 0, 64, UDP, 0, 0];
        packet.extend(from.octets());
        packet.extend(to.octets());
        packet.extend([0xc0, 0, 0x12, 0xb5, 0, 16, 0, 0]);
        packet.extend(*b"8 bytes.");
        packet
    }

    fn shared(own: Ipv4Addr) -> Shared {
        Shared::new(own, 4789)
    }

    fn through(from: &Shared, to: &Shared, packet: &[u8]) -> Option<Vec<u8>> {
        let mut buffer = [[0; HEADER].as_slice(), packet, &[0; TAG]].concat();
        let (length, _) = from.seal(&mut buffer, packet.len())?;
        to.open(&mut buffer[..length]).map(<[u8]>::to_vec)
    }

    /// Two nodes, and a way to give them a session.
    fn nodes() -> (Shared, Shared, impl Fn(&Secret, &Secret) -> [Session; 2]) {
        let agree =
            |a: &Secret, b: &Secret| [Session::agree(("a", a), ("b", b)), Session::agree(("b", b), ("a", a))];
        (shared(A), shared(B), agree)
    }

    fn at(address: Ipv4Addr) -> SocketAddrV4 {
        SocketAddrV4::new(address, 7119)
    }

    #[test]
    fn only_whole_udp_packets_between_the_two_to_vxlans_port_are_let_in() {
        let good = packet(A, B);
        assert!(is_vxlan(&good, A, B, 4789));
        assert!(!is_vxlan(&good, B, A, 4789));
        assert!(!is_vxlan(&good, A, B, 4790));
        let changed = |place: usize, value: u8| {
            let mut packet = good.clone();
            packet[place] = value;
            is_vxlan(&packet, A, B, 4789)
        };
        assert!(!changed(0, 0x65), "IPv6");
        assert!(!changed(0, 0x44), "a short header");
        assert!(!changed(0, 0x4f), "a header that ends beyond the packet");
        assert!(!changed(3, 35), "another length");
        assert!(!changed(9, 6), "TCP");
        assert!(!changed(6, 0x20) && !changed(7, 1), "a fragment");
        for length in 0..good.len() {
            assert!(!is_vxlan(&good[..length], A, B, 4789), "{length} bytes");
        }
    }

    #[test]
    fn a_node_without_keys_is_sent_nothing() {
        let (a, b, agree) = nodes();
        assert_eq!(through(&a, &b, &packet(A, B)), None);
        let (secret_a, secret_b) = (Secret::new().unwrap(), Secret::new().unwrap());
        let [at_a, at_b] = agree(&secret_a, &secret_b);
        let id = at_a.id();
        a.write().install(at(B), at_a);
        assert_eq!(through(&a, &b, &packet(A, B)), None, "it is only listened to");
        a.write().send_with(id);
        b.write().install(at(A), at_b);
        assert_eq!(through(&a, &b, &packet(A, B)).unwrap(), packet(A, B));
        assert_eq!(through(&a, &b, &packet(A, Ipv4Addr::new(10, 99, 0, 13))), None, "a third node");
    }

    #[test]
    fn a_node_cannot_speak_for_another() {
        let (a, b, agree) = nodes();
        let (secret_a, secret_b) = (Secret::new().unwrap(), Secret::new().unwrap());
        let [at_a, at_b] = agree(&secret_a, &secret_b);
        let id = at_a.id();
        a.write().install(at(B), at_a);
        a.write().send_with(id);
        b.write().install(at(A), at_b);
        let foreign = packet(Ipv4Addr::new(10, 99, 0, 13), B);
        assert_eq!(through(&a, &b, &foreign), None);
    }

    #[test]
    fn packets_of_the_session_before_are_still_taken_and_a_known_one_is_not_begun_again() {
        let (a, b, agree) = nodes();
        let secrets: Vec<_> = (0..5).map(|_| Secret::new().unwrap()).collect();
        let mut ids = Vec::new();
        for secret in &secrets {
            let [at_a, at_b] = agree(secret, &secrets[0]);
            ids.push(at_a.id());
            a.write().install(at(B), at_a);
            b.write().install(at(A), at_b);
        }
        for (place, id) in ids.iter().enumerate() {
            assert_eq!(a.read().sessions.contains_key(id), place >= 2, "session {place}");
        }
        a.write().send_with(ids[3]);
        assert!(through(&a, &b, &packet(A, B)).is_some());
        let [again, _] = agree(&secrets[3], &secrets[0]);
        a.write().install(at(B), again);
        assert_eq!(a.read().sessions[&ids[3]].0.sent(), 1, "numbers must not begin again");
        assert!(through(&a, &b, &packet(A, B)).is_some());
    }
}
