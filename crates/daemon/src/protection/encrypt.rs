//! The values of `--encrypt`, what they mean on this node, and which of them the cluster has.
//!
//! The founding node resolves `auto`, and the cluster keeps the result, so that all nodes encrypt in the same way. A
//! node that cannot refuses to start, and says what to do.

use anyhow::bail;
use clap::ValueEnum;
use godwit_network::{Encryption, NetworkError, WireGuard};

use crate::state::State;

/// The values of `--encrypt`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum Encrypt {
    /// Packets between nodes are in the clear
    Off,
    /// What the cluster was founded with; else the best there is on this node: the kernel's WireGuard, or the tunnel
    /// where the kernel has none
    Auto,
    /// WireGuard in user space, on every kernel that has TUN devices
    Tunnel,
    /// The kernel's WireGuard
    Wireguard,
    /// The kernel's IPsec
    #[value(hide = true)]
    Ipsec,
}

/// The name of the cluster's setting.
const SETTING: &str = "encrypt";

/// As a setting of the cluster.
pub(crate) fn setting(encryption: Encryption) -> (String, String) {
    (SETTING.into(), encryption.name().into())
}

impl Encrypt {
    /// What the cluster was founded with.
    fn of_cluster(state: &State) -> anyhow::Result<Self> {
        let settings = state.settings()?;
        let Some(value) = settings.get(SETTING) else { return Ok(Self::Off) };
        match Self::from_str(value, false) {
            // Written by a godwit of which this was the best.
            Ok(Self::Auto) => Ok(Self::Tunnel),
            Ok(encrypt) => Ok(encrypt),
            Err(_) => bail!(
                "the cluster encrypts by {value:?}, which this godwit does not know; install the same godwit on all nodes"
            ),
        }
    }

    /// What it means where there is no cluster yet.
    pub(crate) fn resolve(self) -> anyhow::Result<Encryption> {
        Ok(match self {
            Self::Off => Encryption::Off,
            Self::Tunnel => Encryption::Tunnel,
            Self::Auto if !WireGuard::is_there()? => Encryption::Tunnel,
            Self::Wireguard if !WireGuard::is_there()? => return Err(NetworkError::NoWireGuard.into()),
            Self::Auto | Self::Wireguard => Encryption::WireGuard,
            Self::Ipsec => bail!(
                "this godwit does not encrypt by IPsec; start godwitd on all nodes with `--encrypt auto`, which is \
                 WireGuard, in user space where the kernel has none"
            ),
        })
    }
}

/// How a node of a cluster encrypts that was started with this value, or without one.
pub(crate) fn of_node(asked: Option<Encrypt>, state: &State) -> anyhow::Result<Encryption> {
    let cluster = Encrypt::of_cluster(state)?;
    match asked {
        None => cluster.resolve(),
        Some(Encrypt::Auto) if cluster != Encrypt::Off => cluster.resolve(),
        Some(encrypt) => encrypt.resolve(),
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn best() -> Encryption {
        if WireGuard::is_there().unwrap() { Encryption::WireGuard } else { Encryption::Tunnel }
    }

    #[test]
    fn a_cluster_has_what_its_founder_resolved() {
        let dir = tempfile::tempdir().unwrap();
        let state = State::open(&dir.path().join("node.db")).unwrap();
        assert_eq!(of_node(None, &state).unwrap(), Encryption::Off);
        assert_eq!(of_node(Some(Encrypt::Auto), &state).unwrap(), best());
        for founded in [Encryption::Off, Encryption::Tunnel] {
            state.put_settings(&[setting(founded)].into()).unwrap();
            assert_eq!(of_node(None, &state).unwrap(), founded);
            assert_eq!(of_node(Some(Encrypt::Off), &state).unwrap(), Encryption::Off);
        }
        // Whatever this kernel has: the other nodes encrypt in this way.
        assert_eq!(of_node(Some(Encrypt::Auto), &state).unwrap(), Encryption::Tunnel);
        state.put_settings(&[(SETTING.to_owned(), "auto".to_owned())].into()).unwrap();
        assert_eq!(of_node(None, &state).unwrap(), Encryption::Tunnel, "of a godwit without WireGuard");
        state.put_settings(&[(SETTING.to_owned(), "magic".to_owned())].into()).unwrap();
        let message = of_node(None, &state).unwrap_err().to_string();
        assert!(message.contains("\"magic\"") && message.contains("the same godwit"), "{message}");
    }

    #[test]
    fn a_node_without_wireguard_is_refused_by_a_cluster_that_has_it() {
        let dir = tempfile::tempdir().unwrap();
        let state = State::open(&dir.path().join("node.db")).unwrap();
        state.put_settings(&[setting(Encryption::WireGuard)].into()).unwrap();
        for asked in [None, Some(Encrypt::Auto), Some(Encrypt::Wireguard)] {
            match (best(), of_node(asked, &state)) {
                (Encryption::WireGuard, result) => assert_eq!(result.unwrap(), Encryption::WireGuard),
                (_, result) => {
                    let message = result.unwrap_err().to_string();
                    assert!(
                        message.contains("no WireGuard") && message.contains("--encrypt tunnel"),
                        "{message}"
                    );
                }
            }
        }
        assert_eq!(of_node(Some(Encrypt::Tunnel), &state).unwrap(), Encryption::Tunnel);
    }

    #[test]
    fn what_cannot_be_encrypted_with_is_refused_with_what_can() {
        assert_eq!(Encrypt::Auto.resolve().unwrap(), best());
        assert_eq!(Encrypt::Off.resolve().unwrap(), Encryption::Off);
        let message = Encrypt::Ipsec.resolve().unwrap_err().to_string();
        assert!(message.contains("IPsec") && message.contains("--encrypt auto"), "{message}");
    }
}
