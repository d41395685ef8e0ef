//! The three threads of a tunnel: one takes packets from the device, encrypts them and sends them to
//! the node they are for; one takes them from the wire and hands the genuine ones in; one renews keys in time.

use std::collections::HashMap;
use std::fs::File;
use std::io::{self, ErrorKind, Read, Write};
use std::net::{Ipv4Addr, SocketAddr, SocketAddrV4, UdpSocket};
use std::os::fd::AsFd;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};
use std::time::Duration;

use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::eventfd::EventFd;

use super::peer::{ADDED, HANDSHAKE, Opened, Peer};

/// The longest IP packet.
const LONGEST: usize = 65_535;
/// How often it is looked what is due.
const TICK: Duration = Duration::from_millis(200);
const UDP: u8 = 17;

/// What the threads and their owner share.
#[derive(Debug)]
pub(super) struct Shared {
    /// This node's address on the underlay.
    pub(super) own: Ipv4Addr,
    /// The only thing that goes through: VXLAN.
    pub(super) vxlan_port: u16,
    /// The other nodes, by their address on the underlay.
    peers: RwLock<HashMap<Ipv4Addr, Arc<Peer>>>,
    /// Packets from the wire that were not genuine, came before, or are of no known node.
    pub(super) refused: AtomicU64,
    /// Packets for nodes with which there are no keys.
    pub(super) unsent: AtomicU64,
}

impl Shared {
    pub(super) fn new(own: Ipv4Addr, vxlan_port: u16) -> Self {
        Self {
            own,
            vxlan_port,
            peers: RwLock::default(),
            refused: AtomicU64::new(0),
            unsent: AtomicU64::new(0),
        }
    }

    // Every change under the lock is one insertion or removal, which does not panic.
    pub(super) fn read(&self) -> RwLockReadGuard<'_, HashMap<Ipv4Addr, Arc<Peer>>> {
        self.peers.read().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn write(&self) -> RwLockWriteGuard<'_, HashMap<Ipv4Addr, Arc<Peer>>> {
        self.peers.write().unwrap_or_else(PoisonError::into_inner)
    }

    fn peer(&self, node: Ipv4Addr) -> Option<Arc<Peer>> {
        self.read().get(&node).cloned()
    }

    /// Encrypts the packet for the node that it is for; the message's length, and where it goes.
    fn seal(&self, packet: &[u8], message: &mut [u8]) -> Option<(usize, SocketAddrV4)> {
        let peer = self.peer(addresses(packet)?.1)?;
        Some((peer.seal(packet, message)?, peer.at))
    }

    /// Takes what came from an address; also the node that has this address. A packet is what it says it is.
    fn open(&self, from: Ipv4Addr, message: &[u8], out: &mut [u8]) -> Option<(Opened, Arc<Peer>)> {
        let peer = self.peer(from)?;
        let opened = match peer.open(message, out) {
            Opened::Packet(length) if !is_vxlan(&out[..length], from, self.own, self.vxlan_port) => {
                return None;
            }
            Opened::Refused => return None,
            opened => opened,
        };
        Some((opened, peer))
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
    let (mut packet, mut message) = (vec![0; LONGEST], vec![0; LONGEST + ADDED]);
    while ready(device, PollFlags::POLLIN, stop)? {
        loop {
            let mut source = device;
            let length = match source.read(&mut packet) {
                Ok(length) => length,
                Err(error) if error.kind() == ErrorKind::WouldBlock => break,
                Err(error) if error.kind() == ErrorKind::Interrupted => continue,
                Err(error) => return Err(error),
            };
            let Some((length, at)) = shared.seal(&packet[..length], &mut message) else {
                shared.unsent.fetch_add(1, Ordering::Relaxed);
                continue;
            };
            while let Err(error) = socket.send_to(&message[..length], at) {
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

/// From the wire to the device, and back to the wire what a handshake wants, until told to end.
pub(super) fn inward(shared: &Shared, device: &File, socket: &UdpSocket, stop: &EventFd) -> io::Result<()> {
    let (mut message, mut out) = (vec![0; LONGEST], vec![0; LONGEST]);
    while ready(socket, PollFlags::POLLIN, stop)? {
        loop {
            let (length, from) = match socket.recv_from(&mut message) {
                Ok(came) => came,
                Err(error) if error.kind() == ErrorKind::WouldBlock => break,
                Err(error) if error.kind() == ErrorKind::Interrupted => continue,
                Err(error) => return Err(error),
            };
            let SocketAddr::V4(from) = from else { continue };
            let Some((opened, peer)) = shared.open(*from.ip(), &message[..length], &mut out) else {
                shared.refused.fetch_add(1, Ordering::Relaxed);
                continue;
            };
            match opened {
                Opened::Packet(length) => {
                    let mut sink = device;
                    if let Err(error) = sink.write(&out[..length]) {
                        // The device is down for a moment, or its queue is full: the packet is lost.
                        tracing::debug!(%error, "the tunnel's device did not take a packet");
                    }
                }
                Opened::Answer(length) => {
                    tell(socket, &peer, &out[..length]);
                    while let Some(length) = peer.more(&mut out) {
                        tell(socket, &peer, &out[..length]);
                    }
                }
                Opened::Nothing | Opened::Refused => {}
            }
        }
    }
    Ok(())
}

/// Does for each node what is due, until told to end.
pub(super) fn due(shared: &Shared, _: &File, socket: &UdpSocket, stop: &EventFd) -> io::Result<()> {
    let every = PollTimeout::try_from(TICK).map_err(io::Error::other)?;
    loop {
        match poll(&mut [PollFd::new(stop.as_fd(), PollFlags::POLLIN)], every) {
            Ok(0) | Err(Errno::EINTR) => {}
            Ok(_) => return Ok(()),
            Err(errno) => return Err(errno.into()),
        }
        let peers: Vec<_> = shared.read().values().cloned().collect();
        for peer in peers {
            do_due(socket, &peer);
        }
    }
}

/// Does what is due with a node now.
pub(super) fn do_due(socket: &UdpSocket, peer: &Peer) {
    let mut message = [0; HANDSHAKE];
    if let Some(length) = peer.tick(&mut message) {
        tell(socket, peer, &message[..length]);
    }
}

/// Sends a message of a handshake, or an empty one. If it is lost, the protocol repeats it.
fn tell(socket: &UdpSocket, peer: &Peer, message: &[u8]) {
    if let Err(error) = socket.send_to(message, peer.at) {
        tracing::debug!(%error, at = %peer.at, "a message of the tunnel could not be sent");
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use crate::tunnel::peer::Identity;
    use crate::tunnel::peer::tests::{A, B, at};

    const C: Ipv4Addr = Ipv4Addr::new(10, 99, 0, 13);

    /// A UDP packet to VXLAN's port with some payload.
    fn packet(from: Ipv4Addr, to: Ipv4Addr) -> Vec<u8> {
        let mut packet = vec![0x45, 0, 0, 36, 0, 0, 0, 0, 64, UDP, 0, 0];
        packet.extend(from.octets());
        packet.extend(to.octets());
        packet.extend([0xc0, 0, 0x12, 0xb5, 0, 16, 0, 0]);
        packet.extend(*b"8 bytes.");
        packet
    }

    /// Two nodes that know each other's keys, and have none for packets yet.
    fn nodes() -> (Shared, Shared) {
        let (a, b) = (Shared::new(A, 4789), Shared::new(B, 4789));
        let (of_a, of_b) = (Identity::new().unwrap(), Identity::new().unwrap());
        a.write().insert(B, Arc::new(Peer::new(&of_a, at(B), of_b.public, 1)));
        b.write().insert(A, Arc::new(Peer::new(&of_b, at(A), of_a.public, 1)));
        (a, b)
    }

    /// Carries a message from one to the other, and what answers it.
    fn carry(from: &Shared, to: &Shared, message: &[u8]) {
        let mut out = vec![0; LONGEST];
        if let Some((Opened::Answer(length), _)) = to.open(from.own, message, &mut out) {
            carry(to, from, &out[..length]);
        }
    }

    fn agree(a: &Shared, b: &Shared) {
        let mut message = [0; HANDSHAKE];
        let length = a.peer(b.own).unwrap().tick(&mut message).unwrap();
        carry(a, b, &message[..length]);
    }

    fn through(from: &Shared, to: &Shared, packet: &[u8]) -> Option<Vec<u8>> {
        let (mut message, mut out) = (vec![0; packet.len() + ADDED], vec![0; LONGEST]);
        let (length, at) = from.seal(packet, &mut message)?;
        assert_eq!(at.ip(), &to.own);
        match to.open(from.own, &message[..length], &mut out)?.0 {
            Opened::Packet(length) => Some(out[..length].to_vec()),
            _ => None,
        }
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
        let (a, b) = nodes();
        assert_eq!(through(&a, &b, &packet(A, B)), None);
        agree(&a, &b);
        assert_eq!(through(&a, &b, &packet(A, B)).unwrap(), packet(A, B));
        assert_eq!(through(&a, &b, &packet(A, C)), None, "a third node");
        a.write().remove(&B);
        assert_eq!(through(&a, &b, &packet(A, B)), None, "it is none any more");
    }

    #[test]
    fn a_node_cannot_speak_for_another() {
        let (a, b) = nodes();
        agree(&a, &b);
        assert_eq!(through(&a, &b, &packet(C, B)), None);
    }

    #[test]
    fn what_comes_from_no_node_is_refused_unread() {
        let (a, b) = nodes();
        agree(&a, &b);
        let (mut message, mut out) = (vec![0; 100], vec![0; LONGEST]);
        let (length, _) = a.seal(&packet(A, B), &mut message).unwrap();
        assert!(b.open(C, &message[..length], &mut out).is_none());
        assert!(b.open(A, &message[..length], &mut out).is_some());
    }
}
