//! The kernel's side of WireGuard: its device, spoken to over generic netlink (family `wireguard`,
//! `include/uapi/linux/wireguard.h`).
//!
//! The socket is used directly, one request and its answers at a time: what the asynchronous connections of
//! this crate carry is written to the log at level `trace`, and here private keys pass, also in each answer.

use std::io::{self, ErrorKind};
use std::net::{IpAddr, Ipv4Addr, SocketAddr, SocketAddrV4};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, SystemTime};

use netlink_packet_generic::ctrl::nlas::GenlCtrlAttrs;
use netlink_packet_generic::ctrl::{GenlCtrl, GenlCtrlCmd};
use netlink_packet_generic::{GenlFamily, GenlHeader, GenlMessage};
use netlink_packet_wireguard::{
    WireguardAddressFamily, WireguardAllowedIp, WireguardAllowedIpAttr, WireguardAttribute, WireguardCmd,
    WireguardMessage, WireguardPeer, WireguardPeerAttribute, WireguardPeerFlags,
};
use rtnetlink::packet_core::{
    Emitable, NLM_F_ACK, NLM_F_DUMP, NLM_F_DUMP_INTR, NLM_F_REQUEST, NetlinkDeserializable, NetlinkMessage,
    NetlinkPayload, NetlinkSerializable, ParseableParametrized,
};
use rtnetlink::sys::protocols::NETLINK_GENERIC;
use rtnetlink::sys::{Socket, SocketAddr as Place};

use super::{Change, KEEPALIVE, PublicKey};

/// How often a listing that a change came into is begun anew.
const LISTINGS: u32 = 10;
/// Requests are numbered, so that answers are not taken for those to another one.
static NUMBER: AtomicU32 = AtomicU32::new(1);

/// What the kernel knows of the device.
#[derive(Debug, Default)]
pub(super) struct Device {
    /// None where it has no private key.
    pub(super) public: Option<PublicKey>,
    pub(super) port: u16,
    pub(super) peers: Vec<Peer>,
}

/// What the kernel knows of another node.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Peer {
    pub(super) key: PublicKey,
    /// Its address, if packets of that one only are taken from it.
    pub(super) node: Option<Ipv4Addr>,
    /// Where packets to it are sent.
    pub(super) at: Option<SocketAddrV4>,
    /// When the session's keys were last agreed on.
    pub(super) handshake: Option<SystemTime>,
    pub(super) sent: u64,
    pub(super) received: u64,
}

/// A generic netlink socket, in the network namespace of the thread that made it.
#[derive(Debug)]
pub(super) struct Kernel {
    socket: Mutex<Socket>,
    family: u16,
}

impl Kernel {
    /// Nothing when the kernel has no WireGuard. Asking makes it load the module, where there is one.
    pub(super) fn open() -> io::Result<Option<Self>> {
        let mut socket = Socket::new(NETLINK_GENERIC)?;
        socket.bind_auto()?;
        socket.connect(&Place::new(0, 0))?;
        let name = GenlCtrlAttrs::FamilyName(WireguardMessage::family_name().to_owned());
        let question = GenlCtrl { cmd: GenlCtrlCmd::GetFamily, nlas: vec![name] };
        let answers = match ask(&socket, GenlMessage::from_payload(question), NLM_F_ACK) {
            Ok(answers) => answers,
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(None),
            Err(error) => return Err(error),
        };
        let family =
            answers.into_iter().flat_map(|answer| answer.nlas).find_map(|attribute| match attribute {
                GenlCtrlAttrs::FamilyId(family) => Some(family),
                _ => None,
            });
        let family =
            family.ok_or_else(|| io::Error::other("the kernel does not say what WireGuard's family is"))?;
        Ok(Some(Self { socket: Mutex::new(socket), family }))
    }

    fn ask(&self, message: WireguardMessage, flags: u16) -> io::Result<Vec<WireguardMessage>> {
        let mut message = GenlMessage::from_payload(message);
        message.set_resolved_family_id(self.family);
        // One that panicked has left answers behind, which the next one passes over.
        let socket = self.socket.lock().unwrap_or_else(PoisonError::into_inner);
        ask(&socket, message, flags)
    }

    fn set(&self, device: &str, attributes: Vec<WireguardAttribute>) -> io::Result<()> {
        let name = WireguardAttribute::IfName(device.to_owned());
        let attributes = [vec![name], attributes].concat();
        self.ask(WireguardMessage { cmd: WireguardCmd::SetDevice, attributes }, NLM_F_ACK).map(drop)
    }

    /// Gives the device a private key. Sessions that it has end.
    pub(super) fn set_private_key(&self, device: &str, key: [u8; 32]) -> io::Result<()> {
        self.set(device, vec![WireguardAttribute::PrivateKey(key)])
    }

    /// Sets the UDP port at which it takes packets.
    pub(super) fn set_port(&self, device: &str, port: u16) -> io::Result<()> {
        self.set(device, vec![WireguardAttribute::ListenPort(port)])
    }

    /// Makes these changes of peers, in order.
    pub(super) fn change(&self, device: &str, changes: &[Change]) -> io::Result<()> {
        let peers = changes.iter().map(to_peer).collect();
        self.set(device, vec![WireguardAttribute::Peers(peers)])
    }

    /// Everything about the device.
    pub(super) fn device(&self, device: &str) -> io::Result<Device> {
        let name = WireguardAttribute::IfName(device.to_owned());
        let message = WireguardMessage { cmd: WireguardCmd::GetDevice, attributes: vec![name] };
        Ok(describe(self.ask(message, NLM_F_DUMP)?))
    }
}

/// Sends one message, and waits for all answers to it.
fn ask<F>(socket: &Socket, message: GenlMessage<F>, flags: u16) -> io::Result<Vec<F>>
where
    F: GenlFamily + Clone + Emitable + ParseableParametrized<[u8], GenlHeader> + std::fmt::Debug + Eq,
    GenlMessage<F>: NetlinkSerializable + NetlinkDeserializable,
{
    let mut request = NetlinkMessage::from(message);
    request.header.flags = NLM_F_REQUEST | flags;
    for _ in 0..LISTINGS {
        request.header.sequence_number = NUMBER.fetch_add(1, Ordering::Relaxed);
        request.finalize();
        let mut bytes = vec![0; request.buffer_len()];
        request.serialize(&mut bytes);
        socket.send(&bytes, 0)?;
        if let Some(answers) = take(socket, request.header.sequence_number)? {
            return Ok(answers);
        }
    }
    Err(io::Error::other("the device changes all the time"))
}

/// The answers to the message of that number; nothing when they are not of one moment.
fn take<F>(socket: &Socket, number: u32) -> io::Result<Option<Vec<F>>>
where
    F: ParseableParametrized<[u8], GenlHeader> + GenlFamily + std::fmt::Debug,
    GenlMessage<F>: NetlinkDeserializable,
{
    let (mut answers, mut whole) = (Vec::new(), true);
    loop {
        let (bytes, _) = socket.recv_from_full()?;
        let mut rest = bytes.as_slice();
        while !rest.is_empty() {
            let answer = NetlinkMessage::<GenlMessage<F>>::deserialize(rest).map_err(io::Error::other)?;
            // Messages begin at multiples of four.
            let length = usize::try_from(answer.header.length).map_err(io::Error::other)?;
            rest = rest.get(length.next_multiple_of(4)..).unwrap_or_default();
            if answer.header.sequence_number != number {
                continue;
            }
            whole &= answer.header.flags & NLM_F_DUMP_INTR == 0;
            match answer.payload {
                NetlinkPayload::InnerMessage(message) => answers.push(message.payload),
                NetlinkPayload::Error(error) if error.code.is_some() => return Err(error.to_io()),
                NetlinkPayload::Error(_) | NetlinkPayload::Done(_) => return Ok(whole.then_some(answers)),
                _ => {}
            }
        }
    }
}

fn to_peer(change: &Change) -> WireguardPeer {
    WireguardPeer(match change {
        Change::Remove(key) => vec![
            WireguardPeerAttribute::PublicKey(key.0),
            WireguardPeerAttribute::Flags(WireguardPeerFlags::RemoveMe),
        ],
        Change::Set(key, at) => vec![
            WireguardPeerAttribute::PublicKey(key.0),
            WireguardPeerAttribute::Flags(WireguardPeerFlags::ReplaceAllowedIps),
            WireguardPeerAttribute::Endpoint(SocketAddr::V4(*at)),
            WireguardPeerAttribute::PersistentKeepalive(KEEPALIVE),
            WireguardPeerAttribute::AllowedIps(vec![WireguardAllowedIp(vec![
                WireguardAllowedIpAttr::Family(WireguardAddressFamily::Ipv4),
                WireguardAllowedIpAttr::IpAddr(IpAddr::V4(*at.ip())),
                WireguardAllowedIpAttr::Cidr(32),
            ])]),
        ],
    })
}

/// The device of all parts of an answer. A peer may be in several, each with some of its addresses.
fn describe(parts: Vec<WireguardMessage>) -> Device {
    let mut device = Device::default();
    let mut addresses: Vec<Vec<(IpAddr, u8)>> = Vec::new();
    for attribute in parts.into_iter().flat_map(|part| part.attributes) {
        match attribute {
            WireguardAttribute::PublicKey(key) => device.public = Some(PublicKey(key)),
            WireguardAttribute::ListenPort(port) => device.port = port,
            WireguardAttribute::Peers(peers) => {
                for WireguardPeer(attributes) in peers {
                    let Some((peer, allowed)) = describe_peer(attributes) else { continue };
                    match device.peers.iter().position(|known| known.key == peer.key) {
                        Some(place) => addresses[place].extend(allowed),
                        None => {
                            device.peers.push(peer);
                            addresses.push(allowed);
                        }
                    }
                }
            }
            _ => {}
        }
    }
    for (peer, allowed) in device.peers.iter_mut().zip(addresses) {
        peer.node = match allowed.as_slice() {
            [(IpAddr::V4(address), 32)] => Some(*address),
            _ => None,
        };
    }
    device
}

/// A peer, with where its packets are sent, and the addresses whose packets are taken from it.
fn describe_peer(attributes: Vec<WireguardPeerAttribute>) -> Option<(Peer, Vec<(IpAddr, u8)>)> {
    let (mut key, mut allowed) = (None, Vec::new());
    let mut peer =
        Peer { key: PublicKey([0; 32]), node: None, at: None, handshake: None, sent: 0, received: 0 };
    for attribute in attributes {
        match attribute {
            WireguardPeerAttribute::PublicKey(bytes) => key = Some(PublicKey(bytes)),
            WireguardPeerAttribute::Endpoint(SocketAddr::V4(at)) => peer.at = Some(at),
            WireguardPeerAttribute::LastHandshake(time) => {
                let since = u64::try_from(time.seconds).unwrap_or_default();
                // Zero: never.
                peer.handshake = (since > 0).then(|| SystemTime::UNIX_EPOCH + Duration::from_secs(since));
            }
            WireguardPeerAttribute::TxBytes(bytes) => peer.sent = bytes,
            WireguardPeerAttribute::RxBytes(bytes) => peer.received = bytes,
            WireguardPeerAttribute::AllowedIps(all) => allowed.extend(all.into_iter().filter_map(range)),
            _ => {}
        }
    }
    peer.key = key?;
    Some((peer, allowed))
}

fn range(WireguardAllowedIp(attributes): WireguardAllowedIp) -> Option<(IpAddr, u8)> {
    let (mut address, mut bits) = (None, None);
    for attribute in attributes {
        match attribute {
            WireguardAllowedIpAttr::IpAddr(found) => address = Some(found),
            WireguardAllowedIpAttr::Cidr(found) => bits = Some(found),
            _ => {}
        }
    }
    address.zip(bits)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    const KEY: PublicKey = PublicKey([7; 32]);

    fn at() -> SocketAddrV4 {
        "10.99.0.12:7119".parse().unwrap()
    }

    fn part(attributes: Vec<WireguardAttribute>) -> WireguardMessage {
        WireguardMessage { cmd: WireguardCmd::GetDevice, attributes }
    }

    fn peers(peers: Vec<WireguardPeer>) -> WireguardMessage {
        part(vec![WireguardAttribute::Peers(peers)])
    }

    fn allowed(address: &str, bits: u8) -> WireguardPeerAttribute {
        WireguardPeerAttribute::AllowedIps(vec![WireguardAllowedIp(vec![
            WireguardAllowedIpAttr::IpAddr(address.parse().unwrap()),
            WireguardAllowedIpAttr::Cidr(bits),
        ])])
    }

    #[test]
    fn a_peer_is_read_back_as_it_was_set() {
        let device = describe(vec![peers(vec![to_peer(&Change::Set(KEY, at()))])]);
        let peer = &device.peers[0];
        assert_eq!((peer.key, peer.node, peer.at), (KEY, Some(*at().ip()), Some(at())));
        assert_eq!((device.public, peer.handshake), (None, None));
    }

    #[test]
    fn a_peer_whose_other_addresses_come_in_a_later_part_is_not_taken_for_one_of_ours() {
        let more = WireguardPeer(vec![WireguardPeerAttribute::PublicKey(KEY.0), allowed("10.0.0.0", 8)]);
        let device = describe(vec![peers(vec![to_peer(&Change::Set(KEY, at()))]), peers(vec![more])]);
        assert_eq!(device.peers.len(), 1);
        assert_eq!(device.peers[0].node, None);
    }

    #[test]
    fn a_peer_that_may_send_for_many_is_not_taken_for_one_of_ours() {
        for (address, bits) in [("10.99.0.12", 31), ("0.0.0.0", 0), ("::", 0)] {
            let peer = WireguardPeer(vec![
                WireguardPeerAttribute::PublicKey(KEY.0),
                WireguardPeerAttribute::Endpoint(at().into()),
                allowed(address, bits),
            ]);
            assert_eq!(describe(vec![peers(vec![peer])]).peers[0].node, None, "{address}/{bits}");
        }
    }
}
