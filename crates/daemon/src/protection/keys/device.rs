//! What encrypts packets on this node, the kernel's WireGuard or the one in user space: what both can do.

use std::collections::BTreeSet;
use std::net::{Ipv4Addr, SocketAddrV4};

use godwit_network::{Encryption, NetworkError, PublicKey, Tunnel, TunnelConfig, WireGuard, WireGuardStatus};

/// What encrypts packets, up.
pub(crate) enum Device {
    /// WireGuard in user space.
    Tunnel(Tunnel),
    /// The kernel's WireGuard.
    WireGuard(WireGuard),
}

impl Device {
    pub(super) fn how(&self) -> Encryption {
        match self {
            Self::Tunnel(_) => Encryption::Tunnel,
            Self::WireGuard(_) => Encryption::WireGuard,
        }
    }

    pub(super) fn config(&self) -> &TunnelConfig {
        match self {
            Self::Tunnel(tunnel) => tunnel.config(),
            Self::WireGuard(wireguard) => wireguard.config(),
        }
    }

    pub(super) async fn public_key(&self) -> PublicKey {
        match self {
            Self::Tunnel(tunnel) => tunnel.public_key(),
            Self::WireGuard(wireguard) => wireguard.public_key().await,
        }
    }

    /// Sends packets to the node that takes them at `at` and has this key, and takes its own.
    pub(super) async fn install(&self, at: SocketAddrV4, key: PublicKey) -> Result<(), NetworkError> {
        match self {
            Self::Tunnel(tunnel) => tunnel.install(at, key).map(drop),
            Self::WireGuard(wireguard) => wireguard.install(at, key).await.map(drop),
        }
    }

    /// Makes the kernel's device again where somebody removed it, and forgets all nodes but these.
    pub(super) async fn put_right(&self, nodes: &BTreeSet<Ipv4Addr>) -> Result<(), NetworkError> {
        match self {
            Self::Tunnel(tunnel) => tunnel.keep_only(nodes),
            Self::WireGuard(wireguard) => {
                if wireguard.mend().await? {
                    tracing::warn!(
                        "WireGuard's device was gone or changed, and is made again with a new key"
                    );
                }
                wireguard.keep_only(nodes).await?;
            }
        }
        Ok(())
    }

    /// What is known of the other nodes now.
    pub(super) async fn status(&self) -> Result<WireGuardStatus, NetworkError> {
        match self {
            Self::Tunnel(tunnel) => Ok(tunnel.status()),
            Self::WireGuard(wireguard) => wireguard.status().await,
        }
    }

    /// Why nothing passes, with what to do; nothing when it works, or [`Self::status`] says why.
    pub(super) fn broken(&self) -> Option<String> {
        match self {
            Self::Tunnel(tunnel) if !tunnel.is_running() => {
                Some("the tunnel's device is gone; restart godwitd on this node".into())
            }
            _ => None,
        }
    }
}
