//! What protects a node's overlay, and is there before that takes frames: the guard, which keeps strangers out and networks
//! apart, and what encrypts packets between nodes.
//!
//! ```text
//!   encrypt   what `--encrypt` can say, and what it comes to
//!   keys      the keys of the encryption, agreed between each two nodes
//! ```

pub(crate) mod encrypt;
pub(crate) mod keys;

use std::collections::BTreeSet;
use std::net::Ipv4Addr;

use anyhow::{Context, bail};
use godwit_migration::error_chain;
use godwit_network::{
    Between, Encryption, Guard, NetworkError, OverlayConfig, Tunnel, TunnelConfig, WireGuard, open_the_clear,
};
use tokio::sync::Mutex;
use tracing::warn;

use self::keys::{Device, Keys, vtep_of};
use crate::convert::overlay_config;
use crate::state::{State, StateError};

/// What is around a node's overlay.
pub(crate) struct Surroundings {
    pub(super) keys: Option<Keys>,
    /// Whether it is asked who has a service's address.
    pub(super) probes: bool,
    /// The guard without its nodes and networks.
    pub(super) guard: Guard,
    /// The guard is changed by one at a time, and what is lost is said once.
    pub(super) unguarded: Mutex<Option<String>>,
    pub(super) mending: Mutex<()>,
}

impl Surroundings {
    /// What must be there before the overlay takes frames: the guard, and the tunnel.
    pub(crate) async fn raise(
        config: &OverlayConfig,
        node: &str,
        tunnel_port: Option<u16>,
        probes: bool,
        state: &State,
    ) -> anyhow::Result<Self> {
        let tunnel = (config.encryption != Encryption::Off)
            .then(|| tunnel_port.context("the port of --listen must be below 65534"))
            .transpose()?
            .map(|port| TunnelConfig::new(&config.uplink, config.vtep, port, config.port))
            .map(|tunnel| match config.encryption {
                Encryption::WireGuard => tunnel.by_wireguard(),
                _ => tunnel,
            });
        let guard = Guard {
            port: config.port,
            networks: Vec::new(),
            tunnel: tunnel.as_ref().map(|tunnel| tunnel.device.clone()),
            nodes: BTreeSet::new(),
        };
        let (nodes, networks) = (others(state, node)?, between(state, config)?);
        let unguarded = match (Guard { nodes: nodes.clone(), networks, ..guard.clone() }).apply().await {
            Ok(()) => None,
            Err(error) if tunnel.is_some() => {
                bail!("cannot block unencrypted packets: {}", error_chain(&error));
            }
            Err(error) => Some(say_unguarded(config.port, &error)),
        };
        let keys = match tunnel {
            Some(tunnel) => {
                let up = bring_up(config.encryption, tunnel).await;
                Some(Keys::new(up.context("packets between nodes cannot be encrypted here")?))
            }
            None => {
                // An earlier life of the daemon may have encrypted.
                open_the_clear().await?;
                None
            }
        };
        if let Some(keys) = &keys {
            keys.put_right(&nodes).await;
        }
        Ok(Self { keys, probes, guard, unguarded: Mutex::new(unguarded), mending: Mutex::default() })
    }

    /// The keys, where packets are encrypted.
    pub(crate) fn keys(&self) -> Option<&Keys> {
        self.keys.as_ref()
    }
}

/// What encrypts packets, brought up.
async fn bring_up(how: Encryption, config: TunnelConfig) -> Result<Device, NetworkError> {
    match how {
        Encryption::WireGuard => WireGuard::up(config).await.map(Device::WireGuard),
        _ => Tunnel::up(config).await.map(Device::Tunnel),
    }
}

/// Says once that the guard is not there, and why.
pub(super) fn say_unguarded(port: u16, error: &NetworkError) -> String {
    let reason = error_chain(error);
    warn!(%reason, "any host that reaches UDP port {port} of this node can send frames to services");
    reason
}

/// The addresses of the other members.
pub(super) fn others(state: &State, own: &str) -> Result<BTreeSet<Ipv4Addr>, StateError> {
    let members = state.members()?;
    Ok(members.iter().filter(|member| member.name != own).filter_map(vtep_of).collect())
}

/// What must not reach each other, before anything is up: the networks that are to be.
pub(crate) fn between(state: &State, first: &OverlayConfig) -> Result<Vec<Between>, StateError> {
    let networks = state.networks()?.into_iter().filter(|network| !network.removed);
    let others = networks.filter_map(|network| overlay_config(first, &network).ok());
    Ok(std::iter::once(Between::of(first)).chain(others.map(|config| Between::of(&config))).collect())
}
