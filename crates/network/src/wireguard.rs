//! Privacy between nodes by the kernel's WireGuard: VXLAN's packets go through a device of its, by the way
//! of [`crate::privacy`].
//!
//! Each other node is a peer, which may send and is sent packets of its underlay address only. What a peer's
//! public key is, the caller knows: [`WireGuard::install`].
//!
//! **Keys.** The private key is made here, given to the kernel, and forgotten: it is in no file and, once
//! there, in nobody's hands. It lives as long as the device, which stays when the daemon goes, with its peers
//! and sessions. The next daemon finds all of it and changes what is not right: nothing is lost meanwhile.
//! The keys that packets are encrypted with are agreed on by WireGuard itself, anew every two minutes.

mod kernel;

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::io;
use std::net::{Ipv4Addr, SocketAddrV4};
use std::time::{Duration, SystemTime};

use futures::TryStreamExt;
use ring::error::Unspecified;
use ring::rand::{SecureRandom, SystemRandom};
use rtnetlink::LinkWireguard;
use rtnetlink::packet_route::link::{InfoKind, LinkAttribute};
use tokio::sync::Mutex;

use crate::netlink::Netlink;
use crate::{Encryption, NetworkError, TunnelConfig, privacy};
use kernel::Kernel;

/// Seconds after which an idle peer is sent an empty packet. It keeps the session's keys fresh, so that no
/// frame of a service waits for a handshake, and shows whether the other node is reached.
pub(crate) const KEEPALIVE: u16 = 25;

/// What a node is known by to the others' WireGuard.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct PublicKey(pub(crate) [u8; 32]);

impl PublicKey {
    /// Another node's, as it told it; nothing if it is none.
    #[must_use]
    pub fn from_bytes(bytes: &[u8]) -> Option<Self> {
        bytes.try_into().ok().filter(|bytes| *bytes != [0; 32]).map(Self)
    }

    /// To be told to the other nodes.
    #[must_use]
    pub fn as_bytes(&self) -> &[u8] {
        &self.0
    }
}

impl fmt::Debug for PublicKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let start: String = self.0[..4].iter().map(|byte| format!("{byte:02x}")).collect();
        write!(f, "PublicKey({start}…)")
    }
}

/// A change of peers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Change {
    /// It is none any more.
    Remove(PublicKey),
    /// It takes packets there, and sends such as come from that address.
    Set(PublicKey, SocketAddrV4),
}

/// What the kernel has been told of a peer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Place {
    /// The address whose packets it may send; nothing where somebody else changed that.
    node: Option<Ipv4Addr>,
    /// Where packets to it are sent.
    at: Option<SocketAddrV4>,
}

impl From<SocketAddrV4> for Place {
    fn from(at: SocketAddrV4) -> Self {
        Self { node: Some(*at.ip()), at: Some(at) }
    }
}

#[derive(Debug)]
struct State {
    public: PublicKey,
    peers: BTreeMap<PublicKey, Place>,
}

/// What WireGuard tells of another node.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct PeerStatus {
    /// When the keys in use were agreed on with it; nothing when they never were.
    pub handshake: Option<SystemTime>,
    /// Packets encrypted for it; 0 in the kernel, which counts bytes.
    pub packets: u64,
    /// Bytes sent to it, with all that WireGuard adds but IP and UDP headers; 0 in user space.
    pub sent: u64,
    /// Bytes that came from it; 0 in user space.
    pub received: u64,
}

impl PeerStatus {
    /// How old the keys in use are.
    #[must_use]
    pub fn age(&self) -> Option<Duration> {
        self.handshake.map(|at| SystemTime::now().duration_since(at).unwrap_or_default())
    }
}

/// Packets that did not pass.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Stopped {
    /// From the wire: not genuine, sent once more, or of no known node.
    pub refused: u64,
    /// From here: for nodes with which there are no keys.
    pub unsent: u64,
}

/// What WireGuard tells.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct WireGuardStatus {
    /// By the nodes' addresses.
    pub nodes: BTreeMap<Ipv4Addr, PeerStatus>,
    /// What did not pass, as far as the kernel counts it: forged packets are dropped uncounted.
    pub stopped: Stopped,
}

/// A node's WireGuard device, up. It stays when this is gone, until [`crate::open_the_clear`].
#[derive(Debug)]
pub struct WireGuard {
    config: TunnelConfig,
    kernel: Kernel,
    netlink: Netlink,
    /// What the kernel has been told; changed by one at a time.
    state: Mutex<State>,
}

impl WireGuard {
    /// Whether the kernel has it. Asking makes the kernel load its module, where there is one.
    ///
    /// # Errors
    /// When the kernel cannot be asked.
    pub fn is_there() -> Result<bool, NetworkError> {
        open().map(|kernel| kernel.is_some())
    }

    /// Closes the clear way for VXLAN's packets, and brings the device up, in the network namespace of the
    /// calling thread. A device that is there keeps its key, peers and sessions.
    ///
    /// # Errors
    /// When the kernel has no WireGuard, the port is taken, or the kernel refuses. The clear way stays closed
    /// then.
    pub async fn up(config: TunnelConfig) -> Result<Self, NetworkError> {
        let netlink = Netlink::new()?;
        privacy::close_the_clear(&netlink, config.vxlan_port).await?;
        let kernel = open()?.ok_or(NetworkError::NoWireGuard)?;
        let state = Mutex::new(raise(&netlink, &kernel, &config).await?);
        Ok(Self { config, kernel, netlink, state })
    }

    /// How it was configured.
    #[must_use]
    pub fn config(&self) -> &TunnelConfig {
        &self.config
    }

    /// What the other nodes must know.
    pub async fn public_key(&self) -> PublicKey {
        self.state.lock().await.public
    }

    /// Sends packets to the node that takes them at `at` and has this key, and takes its own; says whether
    /// that is new. A key that the node had before is forgotten.
    ///
    /// # Errors
    /// When another node has this key, or the kernel refuses.
    pub async fn install(&self, at: SocketAddrV4, key: PublicKey) -> Result<bool, NetworkError> {
        let mut state = self.state.lock().await;
        let changes = changes(&state, at, key)?;
        self.change(&mut state, &changes)?;
        Ok(!changes.is_empty())
    }

    /// Forgets the peers that are none of these nodes.
    ///
    /// # Errors
    /// When the kernel refuses.
    pub async fn keep_only(&self, nodes: &BTreeSet<Ipv4Addr>) -> Result<(), NetworkError> {
        let mut state = self.state.lock().await;
        let is_other = |place: &Place| place.node.is_none_or(|node| !nodes.contains(&node));
        let others = state.peers.iter().filter(|(_, place)| is_other(place));
        let changes: Vec<_> = others.map(|(key, _)| Change::Remove(*key)).collect();
        self.change(&mut state, &changes)
    }

    fn change(&self, state: &mut State, changes: &[Change]) -> Result<(), NetworkError> {
        if changes.is_empty() {
            return Ok(());
        }
        let device = &self.config.device;
        self.kernel.change(device, changes).map_err(refused(format!("change the peers of {device}")))?;
        for change in changes {
            match change {
                Change::Remove(key) => state.peers.remove(key),
                Change::Set(key, at) => state.peers.insert(*key, (*at).into()),
            };
        }
        Ok(())
    }

    /// Makes the device again where somebody removed it, gave it another key or took it down; whether that
    /// was so. The other nodes are then to be told of its key, and their keys to be installed.
    ///
    /// # Errors
    /// When it cannot be made again.
    pub async fn mend(&self) -> Result<bool, NetworkError> {
        let mut state = self.state.lock().await;
        let device = self.config.device.as_str();
        if self.netlink.link(device).await?.is_some_and(|link| link.up && is_wireguard(link.kind.as_ref()))
            && device_of(&self.kernel, device)?.public == Some(state.public)
        {
            return Ok(false);
        }
        *state = raise(&self.netlink, &self.kernel, &self.config).await?;
        Ok(true)
    }

    /// What WireGuard tells of the other nodes now.
    ///
    /// # Errors
    /// When the device is gone, or the kernel refuses.
    pub async fn status(&self) -> Result<WireGuardStatus, NetworkError> {
        let device = self.config.device.as_str();
        let peers = device_of(&self.kernel, device)?.peers;
        let seen = |peer: kernel::Peer| {
            let kernel::Peer { node, handshake, sent, received, .. } = peer;
            Some((node?, PeerStatus { handshake, packets: 0, sent, received }))
        };
        let nodes = peers.into_iter().filter_map(seen).collect();
        Ok(WireGuardStatus { nodes, stopped: self.stopped().await? })
    }

    async fn stopped(&self) -> Result<Stopped, NetworkError> {
        let device = &self.config.device;
        let mut found = self.netlink.handle.link().get().match_name(device.clone()).execute();
        let message = found.try_next().await.map_err(NetworkError::kernel(format!("describe {device}")))?;
        let attributes = message.map(|message| message.attributes).unwrap_or_default();
        Ok(attributes
            .iter()
            .find_map(|attribute| match attribute {
                LinkAttribute::Stats64(all) => Some(Stopped {
                    refused: all.rx_errors + all.rx_dropped,
                    unsent: all.tx_errors + all.tx_dropped,
                }),
                _ => None,
            })
            .unwrap_or_default())
    }
}

fn refused(action: String) -> impl FnOnce(io::Error) -> NetworkError {
    move |source| NetworkError::Kernel { action, source }
}

fn open() -> Result<Option<Kernel>, NetworkError> {
    Kernel::open().map_err(NetworkError::system("ask the kernel for WireGuard"))
}

fn device_of(kernel: &Kernel, device: &str) -> Result<kernel::Device, NetworkError> {
    kernel.device(device).map_err(refused(format!("describe the WireGuard device {device}")))
}

fn is_wireguard(kind: Option<&InfoKind>) -> bool {
    kind == Some(&InfoKind::Wireguard)
}

/// Makes of the device what is missing: itself, its key, its port, the way that leads to it.
async fn raise(netlink: &Netlink, kernel: &Kernel, config: &TunnelConfig) -> Result<State, NetworkError> {
    let device = config.device.as_str();
    match netlink.link(device).await? {
        Some(link) if is_wireguard(link.kind.as_ref()) => {}
        Some(link) => {
            return Err(NetworkError::InterfaceInTheWay {
                interface: device.to_owned(),
                found: link
                    .kind
                    .map_or_else(|| "another interface".into(), |kind| format!("of kind {kind:?}")),
                wanted: "a WireGuard device".into(),
            });
        }
        None => {
            let made = netlink.handle.link().add(LinkWireguard::new(device).build()).execute().await;
            made.map_err(NetworkError::kernel(format!("make the WireGuard device {device}")))?;
        }
    }
    let found = device_of(kernel, device)?;
    if found.public.is_none() {
        let key = random().map_err(NetworkError::system("make a key"))?;
        kernel.set_private_key(device, key).map_err(refused(format!("give {device} a key")))?;
    }
    let at_port =
        || format!("take encrypted packets of other nodes at UDP port {} with {device}", config.port);
    if found.port != config.port {
        kernel.set_port(device, config.port).map_err(refused(at_port()))?;
    }
    let index = netlink.need_link(device).await?.index;
    let up = rtnetlink::LinkUnspec::new_with_index(index).up().build();
    // Only now does it take the port.
    netlink.handle.link().change(up).execute().await.map_err(NetworkError::kernel(at_port()))?;
    privacy::lead_through(netlink, config, Encryption::WireGuard).await?;
    let kernel::Device { public, peers, .. } = device_of(kernel, device)?;
    let public =
        public.ok_or_else(|| refused(format!("give {device} a key"))(io::Error::other("it has none")))?;
    Ok(State {
        public,
        peers: peers.into_iter().map(|peer| (peer.key, Place { node: peer.node, at: peer.at })).collect(),
    })
}

/// 32 random bytes: a private key is made of them, a scalar of Curve25519.
pub(crate) fn random() -> io::Result<[u8; 32]> {
    let mut key = [0; 32];
    let filled = SystemRandom::new().fill(&mut key);
    filled.map_err(|Unspecified| io::Error::other("the system gives no random numbers"))?;
    Ok(key)
}

/// What is to change for the node that takes packets at `at` to have this key and no other.
fn changes(state: &State, at: SocketAddrV4, key: PublicKey) -> Result<Vec<Change>, NetworkError> {
    let taken = |holder: String| NetworkError::KeyTaken { vtep: *at.ip(), holder };
    if key == state.public {
        return Err(taken("this node".into()));
    }
    let known = state.peers.get(&key).copied();
    if let Some(other) = known.and_then(|known| known.node).filter(|node| node != at.ip()) {
        return Err(taken(format!("the node at {other}")));
    }
    let is_older =
        |(other, place): &(&PublicKey, &Place)| **other != key && place.node.as_ref() == Some(at.ip());
    let older = state.peers.iter().filter(is_older).map(|(other, _)| Change::Remove(*other));
    let new = (known != Some(at.into())).then_some(Change::Set(key, at));
    Ok(older.chain(new).collect())
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    const OWN: PublicKey = PublicKey([1; 32]);
    const B: PublicKey = PublicKey([2; 32]);
    const C: PublicKey = PublicKey([3; 32]);

    fn at(last: u8, port: u16) -> SocketAddrV4 {
        SocketAddrV4::new(Ipv4Addr::new(10, 99, 0, last), port)
    }

    fn state(peers: &[(PublicKey, Place)]) -> State {
        State { public: OWN, peers: peers.iter().copied().collect() }
    }

    #[test]
    fn a_node_that_is_known_as_it_is_costs_nothing() {
        let state = state(&[(B, at(12, 7119).into())]);
        assert_eq!(changes(&state, at(12, 7119), B).unwrap(), []);
        assert_eq!(changes(&state, at(12, 7219), B).unwrap(), [Change::Set(B, at(12, 7219))]);
        assert_eq!(changes(&state, at(13, 7119), C).unwrap(), [Change::Set(C, at(13, 7119))]);
    }

    #[test]
    fn a_new_key_of_a_node_takes_the_place_of_the_older_one() {
        let state = state(&[(B, at(12, 7119).into())]);
        let expected = [Change::Remove(B), Change::Set(C, at(12, 7119))];
        assert_eq!(changes(&state, at(12, 7119), C).unwrap(), expected);
    }

    #[test]
    fn a_peer_that_somebody_else_changed_is_set_again() {
        let sends_elsewhere = Place { at: Some(at(66, 7119)), ..at(12, 7119).into() };
        for changed in [Place { node: None, ..at(12, 7119).into() }, sends_elsewhere] {
            let state = state(&[(B, changed)]);
            assert_eq!(changes(&state, at(12, 7119), B).unwrap(), [Change::Set(B, at(12, 7119))]);
        }
    }

    #[test]
    fn no_node_takes_anothers_place_by_showing_its_key() {
        let state = state(&[(B, at(12, 7119).into())]);
        let message = changes(&state, at(13, 7119), B).unwrap_err().to_string();
        assert!(message.contains("10.99.0.13") && message.contains("the node at 10.99.0.12"), "{message}");
        let message = changes(&state, at(13, 7119), OWN).unwrap_err().to_string();
        assert!(
            message.contains("the key of this node") || message.contains("key of this node"),
            "{message}"
        );
    }

    #[test]
    fn what_is_no_key_is_none() {
        assert_eq!(PublicKey::from_bytes(&[1; 31]), None);
        assert_eq!(PublicKey::from_bytes(&[0; 32]), None);
        assert_eq!(PublicKey::from_bytes(&[1; 32]), Some(OWN));
    }
}
