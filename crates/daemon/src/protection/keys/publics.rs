//! The keys of the kernel's WireGuard: each node tells the others its public one.
//!
//! ```text
//!   a: its public key ──── Keys ───►  b: takes a as a peer
//!   a: takes b as a peer ◄─── key ──
//! ```
//!
//! The kernel keeps device, key and peers while the daemon is away, so a turn after a restart changes
//! nothing. A node that was booted has another key, which takes the older one's place at the next turn.

use std::collections::{BTreeSet, HashMap};
use std::net::{Ipv4Addr, SocketAddrV4};
use std::sync::{Mutex, PoisonError};

use godwit_api::v1::{KeysRequest, KeysResponse};
use godwit_migration::error_chain;
use godwit_network::{PublicKey, WireGuard};
use tonic::Status;

use super::port_of;

/// The device with its key, and those of the other nodes.
pub(crate) struct Publics {
    /// What they are for.
    pub wireguard: WireGuard,
    /// Why there are no keys of a node since the last turn, by its name; empty when there are.
    troubles: Mutex<HashMap<String, String>>,
}

impl Publics {
    pub(super) fn new(wireguard: WireGuard) -> Self {
        Self { wireguard, troubles: Mutex::default() }
    }

    /// What another node is asked.
    pub(super) async fn request(&self) -> KeysRequest {
        let KeysResponse { public_key, port, .. } = self.response().await;
        KeysRequest { public_key, port, ..KeysRequest::default() }
    }

    /// What another node is answered.
    pub(super) async fn response(&self) -> KeysResponse {
        let public_key = self.wireguard.public_key().await.as_bytes().to_vec().into();
        KeysResponse { public_key, port: self.wireguard.config().port.into(), ..KeysResponse::default() }
    }

    /// Takes what another node has told.
    pub(super) async fn install(&self, vtep: Ipv4Addr, port: u32, public_key: &[u8]) -> Result<(), Status> {
        let (at, key) = understood(vtep, port, public_key)?;
        let installed = self.wireguard.install(at, key).await;
        installed.map(drop).map_err(|error| Status::failed_precondition(error_chain(&error)))
    }

    /// Makes the device again where it was removed, and forgets all nodes but these.
    pub(super) async fn put_right(&self, nodes: &BTreeSet<Ipv4Addr>) {
        let mended = self.wireguard.mend().await;
        if let Ok(true) = mended {
            tracing::warn!("WireGuard's device was gone or changed, and is made again with a new key");
        }
        let kept = match mended {
            Ok(_) => self.wireguard.keep_only(nodes).await,
            Err(error) => Err(error),
        };
        // The empty name is no node's.
        self.noted("", &kept.err().map(|error| error_chain(&error)).unwrap_or_default());
    }

    /// Why there are no keys for a node; empty where there are, or nothing is known yet.
    pub(super) fn trouble(&self, other: &str) -> String {
        let troubles = self.troubles.lock().unwrap_or_else(PoisonError::into_inner);
        troubles.get(other).cloned().unwrap_or_default()
    }

    /// Keeps what went wrong with a node, and says it when it is new; nothing when nothing did.
    pub(super) fn noted(&self, other: &str, trouble: &str) {
        let mut troubles = self.troubles.lock().unwrap_or_else(PoisonError::into_inner);
        let before = troubles.insert(other.to_owned(), trouble.to_owned()).unwrap_or_default();
        match (before == trouble, trouble.is_empty(), other.is_empty()) {
            (true, _, _) | (_, true, _) => {}
            (_, _, false) => tracing::warn!(node = other, %trouble, "no keys could be agreed on"),
            (_, _, true) => tracing::error!(%trouble, "packets between nodes cannot be encrypted"),
        }
    }
}

fn understood(vtep: Ipv4Addr, port: u32, public_key: &[u8]) -> Result<(SocketAddrV4, PublicKey), Status> {
    let both = port_of(port).zip(PublicKey::from_bytes(public_key));
    let (port, key) = both.ok_or_else(|| Status::invalid_argument("no key, or no port, for WireGuard"))?;
    Ok((SocketAddrV4::new(vtep, port), key))
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn what_is_no_key_is_refused() {
        let vtep = Ipv4Addr::new(10, 99, 0, 11);
        let (at, key) = understood(vtep, 7119, &[5; 32]).unwrap();
        assert_eq!((at.to_string().as_str(), key.as_bytes()), ("10.99.0.11:7119", [5; 32].as_slice()));
        for (port, key) in [(7119, [5; 31].as_slice()), (7119, &[0; 32]), (0, &[5; 32]), (65_536, &[5; 32])] {
            assert_eq!(understood(vtep, port, key).unwrap_err().code(), tonic::Code::InvalidArgument);
        }
    }
}
