//! The keys of what keeps the overlay private: agreed between each two nodes over their mutually
//! authenticated connection, and kept in memory only.
//!
//! Every node asks every other once a second. For the tunnel both give a secret, of which the keys are made
//! (`secrets.rs`); for WireGuard both give their public keys, and its own handshake does the rest
//! (`publics.rs`). Nodes that encrypt differently agree on nothing, and say so.

mod publics;
mod secrets;

use std::collections::BTreeSet;
use std::net::Ipv4Addr;
use std::time::{Duration, SystemTime};

use godwit_api::v1::peer_client::PeerClient;
use godwit_api::v1::{KeysRequest, KeysResponse, Member};
use godwit_migration::error_chain;
use godwit_network::{NetworkError, Stopped, Tunnel, WireGuard};
use tonic::Status;
use tonic::transport::Channel;

use publics::Publics;
use secrets::{RENEW, Secrets};

/// What keeps packets private, with its keys.
pub(crate) enum Keys {
    /// godwit's own tunnel.
    Tunnel(Secrets),
    /// The kernel's WireGuard.
    WireGuard(Publics),
}

/// How packets to a node are encrypted.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Keyed {
    /// How old the keys are.
    pub age: Duration,
    /// Packets sent with them; not known for WireGuard.
    pub packets: u64,
    /// Bytes sent to the node, of WireGuard.
    pub sent: u64,
    /// Bytes that came from it, of WireGuard.
    pub received: u64,
}

/// Session keys of WireGuard that are older are not used any more, and as something is sent every 25 s, there
/// are newer ones if the other node is reached (`REJECT_AFTER_TIME`, section 6.1 of its paper).
const WIREGUARD_KEYS_LAST: Duration = Duration::from_secs(180);

/// Everything that is known of the encryption at one moment.
pub(crate) struct KeysStatus<'a> {
    keys: &'a Keys,
    wireguard: Result<godwit_network::WireGuardStatus, NetworkError>,
}

impl Keys {
    /// Of a tunnel that is up.
    pub(crate) fn of_tunnel(node: &str, tunnel: Tunnel) -> Self {
        Self::Tunnel(Secrets::new(node, tunnel.config().port, tunnel))
    }

    /// Of a WireGuard device that is up.
    pub(crate) fn of_wireguard(wireguard: WireGuard) -> Self {
        Self::WireGuard(Publics::new(wireguard))
    }

    /// Makes again what was removed, and forgets all nodes but these.
    pub(crate) async fn put_right(&self, nodes: &BTreeSet<Ipv4Addr>) {
        if let Self::WireGuard(publics) = self {
            publics.put_right(nodes).await;
        }
    }

    /// The present status.
    pub(crate) async fn status(&self) -> KeysStatus<'_> {
        let wireguard = match self {
            Self::Tunnel(_) => Ok(godwit_network::WireGuardStatus::default()),
            Self::WireGuard(publics) => publics.wireguard.status().await,
        };
        KeysStatus { keys: self, wireguard }
    }

    /// Agrees on keys with another node.
    pub(crate) async fn exchange(&self, mut peer: PeerClient<Channel>, member: &Member) {
        let Some(vtep) = vtep_of(member) else { return };
        match self {
            Self::Tunnel(secrets) => {
                let (own, request) = match secrets.request(&member.name, vtep, |age| age >= RENEW) {
                    Ok(request) => request,
                    Err(error) => {
                        tracing::error!(%error, "cannot make keys");
                        return;
                    }
                };
                let answer = peer.keys(request).await;
                let answered = answer
                    .and_then(|answer| secrets.answered(&own, &member.name, vtep, &answer.into_inner()));
                if let Err(status) = answered {
                    secrets.failed(&member.name, status.message());
                }
            }
            Self::WireGuard(publics) => {
                let installed = match peer.keys(publics.request().await).await {
                    Ok(answer) => {
                        let KeysResponse { public_key, port, .. } = answer.into_inner();
                        publics.install(vtep, port, &public_key).await
                    }
                    Err(status) => Err(status),
                };
                publics.noted(&member.name, installed.err().as_ref().map_or("", Status::message));
            }
        }
    }

    fn trouble(&self, other: &str) -> String {
        match self {
            Self::Tunnel(secrets) => secrets.trouble(other),
            Self::WireGuard(publics) => publics.trouble(other),
        }
    }
}

impl KeysStatus<'_> {
    /// Why nothing passes at all, with what to do; nothing when it works.
    pub(crate) fn broken(&self) -> Option<String> {
        match (self.keys, &self.wireguard) {
            (Keys::Tunnel(secrets), _) if !secrets.tunnel.is_running() => {
                Some("the tunnel's device is gone; restart godwitd on this node".into())
            }
            (Keys::WireGuard(_), Err(error)) => Some(error_chain(error)),
            _ => None,
        }
    }

    /// What did not pass.
    pub(crate) fn stopped(&self) -> Stopped {
        match (self.keys, &self.wireguard) {
            (Keys::Tunnel(secrets), _) => secrets.tunnel.stopped(),
            (Keys::WireGuard(_), Ok(status)) => status.stopped,
            (Keys::WireGuard(_), Err(_)) => Stopped::default(),
        }
    }

    /// How packets to the node of that name and address are encrypted, or why they are not.
    pub(crate) fn keyed(&self, name: &str, vtep: Option<Ipv4Addr>) -> Result<Keyed, String> {
        if let Some(broken) = self.broken() {
            return Err(broken);
        }
        let none = || self.keys.trouble(name);
        match (self.keys, &self.wireguard) {
            (Keys::Tunnel(secrets), _) => {
                let keyed = vtep.and_then(|vtep| secrets.tunnel.keyed(vtep)).ok_or_else(none)?;
                Ok(Keyed { age: keyed.since.elapsed(), packets: keyed.sent, ..Keyed::default() })
            }
            (Keys::WireGuard(publics), Ok(status)) => {
                let seen = vtep.and_then(|vtep| status.nodes.get(&vtep)).ok_or_else(none)?;
                let age = seen.handshake.map(|at| SystemTime::now().duration_since(at).unwrap_or_default());
                match age.filter(|age| *age <= WIREGUARD_KEYS_LAST) {
                    Some(age) => Ok(Keyed { age, packets: 0, sent: seen.sent, received: seen.received }),
                    None => Err(format!(
                        "its WireGuard does not answer; let UDP port {} through between the nodes",
                        publics.wireguard.config().port
                    )),
                }
            }
            (Keys::WireGuard(_), Err(_)) => Err(none()),
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
    let differs = |how: &str| {
        Status::failed_precondition(format!(
            "node {own} {how}; start godwitd on all nodes with the same --encrypt"
        ))
    };
    let keys = keys.ok_or_else(|| differs("does not encrypt what it sends"))?;
    let member = members.iter().find(|member| member.name == from);
    let vtep = member.and_then(vtep_of).ok_or_else(|| {
        Status::unavailable(format!("node {own} does not know the address of node {from} yet"))
    })?;
    match keys {
        Keys::Tunnel(_) if request.secret.is_empty() => Err(differs("encrypts by godwit's own tunnel")),
        Keys::WireGuard(_) if request.public_key.is_empty() => Err(differs("encrypts by WireGuard")),
        Keys::Tunnel(secrets) => secrets.answer(from, vtep, request),
        Keys::WireGuard(publics) => {
            publics.install(vtep, request.port, &request.public_key).await?;
            publics.noted(from, "");
            Ok(publics.response().await)
        }
    }
}
