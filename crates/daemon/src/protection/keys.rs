//! The keys of what keeps the overlay private: told between each two nodes over their mutually
//! authenticated connection, and kept in memory only.
//!
//! ```text
//!   a: its public key ──── Keys ───►  b: takes a as a peer
//!   a: takes b as a peer ◄─── key ──
//! ```
//!
//! Every node asks every other once a second; WireGuard's own handshake does the rest, in the kernel or in
//! user space. Nodes that encrypt differently tell each other nothing but that.
//!
//! The kernel keeps device, key and peers while the daemon is away, so a turn after a restart changes nothing. A
//! node that was booted has another key, and where it encrypts in user space, each of its daemons: it takes the older
//! one's place at the next turn.

mod device;

use std::collections::{BTreeSet, HashMap};
use std::net::{Ipv4Addr, SocketAddrV4};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use godwit_api::v1::peer_client::PeerClient;
use godwit_api::v1::{KeysRequest, KeysResponse, Member};
use godwit_migration::error_chain;
use godwit_network::{Encryption, NetworkError, PublicKey, Stopped};
use tonic::Status;
use tonic::transport::Channel;

pub(crate) use device::Device;

/// What keeps packets private, with its key and those of the other nodes.
pub(crate) struct Keys {
    device: Device,
    /// Why there are no keys of a node since the last turn, by its name; empty when there are.
    troubles: Mutex<HashMap<String, String>>,
}

/// How packets to a node are encrypted.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Keyed {
    /// How old the keys are.
    pub age: Duration,
    /// Packets encrypted for the node in user space.
    pub packets: u64,
    /// Bytes sent to the node, by the kernel.
    pub sent: u64,
    /// Bytes that came from it, to the kernel.
    pub received: u64,
}

/// Session keys that are older are not used any more, and as something is sent every 25 s, there
/// are newer ones if the other node is reached (`REJECT_AFTER_TIME`, section 6.1 of WireGuard's paper).
const KEYS_LAST: Duration = Duration::from_secs(180);

/// What a node answers whose godwit is older than WireGuard in user space.
const OLDER: &str = "encrypts by godwit's own tunnel";

/// Everything that is known of the encryption at one moment.
pub(crate) struct KeysStatus<'a> {
    keys: &'a Keys,
    seen: Result<godwit_network::WireGuardStatus, NetworkError>,
}

impl Keys {
    /// Of what is up.
    pub(crate) fn new(device: Device) -> Self {
        Self { device, troubles: Mutex::default() }
    }

    /// What encrypts.
    pub(crate) fn how(&self) -> Encryption {
        self.device.how()
    }

    /// Makes again what was removed, and forgets all nodes but these.
    pub(crate) async fn put_right(&self, nodes: &BTreeSet<Ipv4Addr>) {
        let trouble = self.device.put_right(nodes).await.err();
        // The empty name is no node's.
        self.noted("", &trouble.map(|error| error_chain(&error)).unwrap_or_default());
    }

    /// The present status.
    pub(crate) async fn status(&self) -> KeysStatus<'_> {
        KeysStatus { keys: self, seen: self.device.status().await }
    }

    /// Tells another node this one's key, and takes its.
    pub(crate) async fn exchange(&self, mut peer: PeerClient<Channel>, member: &Member) {
        let Some(vtep) = vtep_of(member) else { return };
        let installed = match peer.keys(self.told().await).await {
            Ok(answer) => {
                let KeysResponse { public_key, tunnel_key, port } = answer.into_inner();
                self.install(vtep, port, self.key_in(&public_key, &tunnel_key)).await
            }
            Err(status) => Err(status),
        };
        let trouble = installed.err().map(|status| refusal(self.how(), &member.name, &status));
        self.noted(&member.name, &trouble.unwrap_or_default());
    }

    /// What another node is told.
    async fn told(&self) -> KeysRequest {
        let key = self.device.public_key().await.as_bytes().to_vec().into();
        let told = KeysRequest { port: self.device.config().port.into(), ..KeysRequest::default() };
        match self.how() {
            Encryption::Tunnel => KeysRequest { tunnel_key: key, ..told },
            _ => KeysRequest { public_key: key, ..told },
        }
    }

    /// That one of the keys a node has told which is for what encrypts here.
    fn key_in<'a>(&self, public_key: &'a [u8], tunnel_key: &'a [u8]) -> &'a [u8] {
        if self.how() == Encryption::Tunnel { tunnel_key } else { public_key }
    }

    /// Takes what another node has told.
    async fn install(&self, vtep: Ipv4Addr, port: u32, key: &[u8]) -> Result<(), Status> {
        let (at, key) = understood(vtep, port, key)?;
        let installed = self.device.install(at, key).await;
        installed.map_err(|error| Status::failed_precondition(error_chain(&error)))
    }

    /// Why there are no keys for a node; empty where there are, or nothing is known yet.
    fn trouble(&self, other: &str) -> String {
        let troubles = self.troubles.lock().unwrap_or_else(PoisonError::into_inner);
        troubles.get(other).cloned().unwrap_or_default()
    }

    /// Keeps what went wrong with a node, and says it when it is new; nothing when nothing did.
    fn noted(&self, other: &str, trouble: &str) {
        let mut troubles = self.troubles.lock().unwrap_or_else(PoisonError::into_inner);
        let before = troubles.insert(other.to_owned(), trouble.to_owned()).unwrap_or_default();
        match (before == trouble, trouble.is_empty(), other.is_empty()) {
            (true, _, _) | (_, true, _) => {}
            (_, _, false) => tracing::warn!(node = other, %trouble, "no keys could be agreed"),
            (_, _, true) => tracing::error!(%trouble, "what nodes send each other cannot be encrypted"),
        }
    }
}

impl KeysStatus<'_> {
    /// Why nothing passes at all, with what to do; nothing when it works.
    pub(crate) fn broken(&self) -> Option<String> {
        match &self.seen {
            Err(error) => Some(error_chain(error)),
            Ok(_) => self.keys.device.broken(),
        }
    }

    /// What did not pass.
    pub(crate) fn stopped(&self) -> Stopped {
        self.seen.as_ref().map(|seen| seen.stopped).unwrap_or_default()
    }

    /// How packets to the node of that name and address are encrypted, or why they are not.
    pub(crate) fn keyed(&self, name: &str, vtep: Option<Ipv4Addr>) -> Result<Keyed, String> {
        if let Some(broken) = self.broken() {
            return Err(broken);
        }
        let nodes = self.seen.as_ref().map(|seen| &seen.nodes).ok();
        let seen = vtep.zip(nodes).and_then(|(vtep, nodes)| nodes.get(&vtep));
        let trouble = self.keys.trouble(name);
        let Some(seen) = seen else { return Err(trouble) };
        match seen.age().filter(|age| *age <= KEYS_LAST) {
            Some(age) => Ok(Keyed { age, packets: seen.packets, sent: seen.sent, received: seen.received }),
            None if !trouble.is_empty() => Err(trouble),
            None => Err(format!(
                "its WireGuard does not answer; let UDP port {} through between the nodes",
                self.keys.device.config().port
            )),
        }
    }
}

/// A UDP port as it was told.
fn port_of(port: u32) -> Option<u16> {
    u16::try_from(port).ok().filter(|port| *port != 0)
}

/// Where a member takes other nodes' packets.
pub(crate) fn vtep_of(member: &Member) -> Option<Ipv4Addr> {
    member.vtep.parse().ok()
}

/// Answers node `from`, which wants to agree on keys with node `own`.
pub(crate) async fn answer(
    keys: Option<&Keys>,
    own: &str,
    members: &[Member],
    from: &str,
    request: &KeysRequest,
) -> Result<KeysResponse, Status> {
    if let Some(objection) = objection(keys.map(Keys::how), own, from, request) {
        return Err(Status::failed_precondition(objection));
    }
    let Some(keys) = keys else { return Ok(KeysResponse::default()) };
    let member = members.iter().find(|member| member.name == from);
    let vtep = member.and_then(vtep_of).ok_or_else(|| {
        Status::unavailable(format!("node {own} does not know the address of node {from} yet"))
    })?;
    keys.install(vtep, request.port, keys.key_in(&request.public_key, &request.tunnel_key)).await?;
    keys.noted(from, "");
    let KeysRequest { public_key, tunnel_key, port } = keys.told().await;
    Ok(KeysResponse { public_key, tunnel_key, port })
}

/// Why node `own`, which encrypts so, tells node `from` no key; nothing when it does.
fn objection(how: Option<Encryption>, own: &str, from: &str, request: &KeysRequest) -> Option<String> {
    let here = match how {
        Some(Encryption::Tunnel) if !request.tunnel_key.is_empty() => return None,
        // It tells no public key at all, but what keys were made of.
        Some(Encryption::Tunnel) if request.public_key.is_empty() => return Some(too_old(from)),
        Some(Encryption::Tunnel) => "encrypts by WireGuard in user space (tunnel)",
        Some(Encryption::WireGuard) if !request.public_key.is_empty() => return None,
        Some(Encryption::WireGuard) => "encrypts by WireGuard",
        Some(Encryption::Off) | None => "does not encrypt what it sends",
    };
    Some(format!("node {own} {here}; start godwitd on all nodes with the same --encrypt"))
}

/// Why there are no keys of a node that has refused.
fn refusal(how: Encryption, other: &str, status: &Status) -> String {
    match status.message() {
        message if how == Encryption::Tunnel && message.contains(OLDER) => too_old(other),
        message => message.to_owned(),
    }
}

fn too_old(node: &str) -> String {
    format!(
        "node {node} has an older godwit, whose tunnel is not WireGuard; install the same godwit on all nodes"
    )
}

fn understood(vtep: Ipv4Addr, port: u32, key: &[u8]) -> Result<(SocketAddrV4, PublicKey), Status> {
    let both = port_of(port).zip(PublicKey::from_bytes(key));
    let (port, key) = both.ok_or_else(|| Status::invalid_argument("no key, or no port, for WireGuard"))?;
    Ok((SocketAddrV4::new(vtep, port), key))
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn what_is_not_a_key_is_refused() {
        let vtep = Ipv4Addr::new(10, 99, 0, 11);
        let (at, key) = understood(vtep, 7119, &[5; 32]).unwrap();
        assert_eq!((at.to_string().as_str(), key.as_bytes()), ("10.99.0.11:7119", [5; 32].as_slice()));
        for (port, key) in [(7119, [5; 31].as_slice()), (7119, &[0; 32]), (0, &[5; 32]), (65_536, &[5; 32])] {
            assert_eq!(understood(vtep, port, key).unwrap_err().code(), tonic::Code::InvalidArgument);
        }
    }

    #[test]
    fn nodes_that_encrypt_differently_tell_each_other_only_that() {
        let key: bytes::Bytes = vec![5; 32].into();
        let by_tunnel = KeysRequest { tunnel_key: key.clone(), ..KeysRequest::default() };
        let by_kernel = KeysRequest { public_key: key, ..KeysRequest::default() };
        let says = |how, request: &KeysRequest| objection(how, "b", "a", request).unwrap_or_default();
        assert_eq!(says(Some(Encryption::Tunnel), &by_tunnel), "");
        assert_eq!(says(Some(Encryption::WireGuard), &by_kernel), "");
        for (how, request, words) in [
            (Some(Encryption::Tunnel), &by_kernel, "node b encrypts by WireGuard in user space (tunnel)"),
            (Some(Encryption::WireGuard), &by_tunnel, "node b encrypts by WireGuard; start"),
            (None, &by_tunnel, "node b does not encrypt"),
        ] {
            let said = says(how, request);
            assert!(said.contains(words) && said.contains("the same --encrypt"), "{said}");
        }
    }

    #[test]
    fn a_node_whose_tunnel_is_the_one_before_is_named_on_both_sides() {
        // It asks with a secret and a session, which are unknown fields here.
        let asked = KeysRequest { port: 7119, ..KeysRequest::default() };
        let there = objection(Some(Encryption::Tunnel), "b", "a", &asked).unwrap();
        let answered =
            "node a encrypts by godwit's own tunnel; start godwitd on all nodes with the same --encrypt";
        let here = refusal(Encryption::Tunnel, "a", &Status::failed_precondition(answered));
        assert_eq!(here, there);
        assert!(here.contains("node a has an older godwit"), "{here}");
        // To a node with the kernel's WireGuard it is another way, as before.
        assert_eq!(refusal(Encryption::WireGuard, "a", &Status::failed_precondition(answered)), answered);
    }
}
