//! The kernel's bridge, with the VXLAN device as one of its ports; and that device itself, which Open
//! vSwitch needs as well.

use std::collections::HashSet;
use std::net::Ipv4Addr;
use std::sync::Arc;

use async_trait::async_trait;
use rtnetlink::packet_route::link::{
    BridgePortState, BridgeStpState, InfoData, InfoKind, InfoVxlan, LinkInfo,
};
use rtnetlink::{LinkBridge, LinkMessageBuilder, LinkUnspec, LinkVxlan};

use super::{Behind, Datapath};
use crate::netlink::{Link, LinkEvents, Netlink, PATIENCE, PortState};
use crate::netns::set_sysctl;
use crate::subnet::GATEWAY_MAC;
use crate::{Mac, NetworkError, OverlayConfig, obstacle};

/// The kernel's bridge, up.
#[derive(Debug)]
pub(crate) struct Kernel {
    netlink: Arc<Netlink>,
    bridge: u32,
    bridge_name: String,
    vxlan: u32,
    vxlan_name: String,
}

impl Kernel {
    pub(crate) async fn up(
        netlink: Arc<Netlink>,
        config: &OverlayConfig,
        mtu: u32,
    ) -> Result<Self, NetworkError> {
        let bridge = bring_bridge_up(&netlink, &config.bridge, mtu, 0).await?;
        let vxlan = bring_vxlan_up(&netlink, config, mtu, Some(bridge), 0).await?;
        netlink.set_static_port(vxlan, &config.vxlan).await?;
        let (bridge_name, vxlan_name) = (config.bridge.clone(), config.vxlan.clone());
        Ok(Self { netlink, bridge, bridge_name, vxlan, vxlan_name })
    }
}

#[async_trait]
impl Datapath for Kernel {
    fn bridge(&self) -> u32 {
        self.bridge
    }

    fn vxlan(&self) -> u32 {
        self.vxlan
    }

    async fn passages(&self, _port: &str) -> Result<Vec<u32>, NetworkError> {
        Ok(Vec::new())
    }

    fn entrances(&self) -> Vec<u32> {
        Vec::new()
    }

    async fn plug(&self, port: &Link) -> Result<(), NetworkError> {
        let (index, name) = (port.index, &port.name);
        let mut events = LinkEvents::new()?;
        let message = LinkUnspec::new_with_index(index).controller(self.bridge).up().build();
        let plugged = self.netlink.handle.link().change(message).execute().await;
        plugged.map_err(NetworkError::kernel(format!("plug {name} into the bridge {}", self.bridge_name)))?;
        // The port opens by itself when the link comes up; only then can it be closed.
        if !events.wait_until(&self.netlink, name, PATIENCE, is_open).await? {
            return Err(NetworkError::NotUp { interface: name.clone(), seconds: PATIENCE.as_secs() });
        }
        self.netlink.set_static_port(index, name).await?;
        self.netlink.set_port(index, name, PortState::Closed).await
    }

    async fn unplug(&self, _port: &str) -> Result<(), NetworkError> {
        // The kernel does it with the interface.
        Ok(())
    }

    async fn is_plugged(&self, port: &Link) -> Result<bool, NetworkError> {
        Ok(port.master == Some(self.bridge))
    }

    async fn open_ports(&self, among: &[Link]) -> Result<HashSet<String>, NetworkError> {
        Ok(among.iter().filter(|link| is_open(link)).map(|link| link.name.clone()).collect())
    }

    async fn set_port(&self, port: &Link, state: PortState) -> Result<(), NetworkError> {
        self.netlink.set_port(port.index, &port.name, state).await
    }

    async fn set_entry(&self, _address: Ipv4Addr, mac: Mac, behind: Behind<'_>) -> Result<(), NetworkError> {
        let (index, name) = match behind {
            Behind::Port(link) => (link.index, &link.name),
            Behind::Tunnel => (self.vxlan, &self.vxlan_name),
        };
        self.netlink.set_bridge_entry(index, name, mac).await
    }

    async fn delete_tunnel_entry(&self, _address: Ipv4Addr, mac: Mac) -> Result<(), NetworkError> {
        self.netlink.delete_bridge_entry(self.vxlan, &self.vxlan_name, mac).await.map(|_| ())
    }

    async fn check_unchanged(&self) -> Result<(), NetworkError> {
        Ok(())
    }

    async fn damage(&self) -> Result<Option<String>, NetworkError> {
        let (bridge, vxlan) = (&self.bridge_name, &self.vxlan_name);
        let mut missing = Vec::new();
        match self.own(bridge, self.bridge).await? {
            None => missing.push(format!("the bridge {bridge} is missing")),
            Some(link) if !link.up => missing.push(format!("the bridge {bridge} is down")),
            Some(_) => {}
        }
        match self.own(vxlan, self.vxlan).await? {
            None => missing.push(format!("the VXLAN device {vxlan} is missing")),
            Some(link) if link.master != Some(self.bridge) => {
                missing.push(format!("the VXLAN device {vxlan} is not plugged into {bridge}"));
            }
            Some(link) if !link.up => missing.push(format!("the VXLAN device {vxlan} is down")),
            Some(_) => {}
        }
        Ok((!missing.is_empty()).then(|| missing.join(", ")))
    }

    async fn mend(&self, config: &OverlayConfig, mtu: u32) -> Result<(), NetworkError> {
        let bridge = bring_bridge_up(&self.netlink, &self.bridge_name, mtu, self.bridge).await?;
        if bridge != self.bridge {
            return Err(NetworkError::Replaced { interface: self.bridge_name.clone() });
        }
        let vxlan = bring_vxlan_up(&self.netlink, config, mtu, Some(bridge), self.vxlan).await?;
        if vxlan != self.vxlan {
            return Err(NetworkError::Replaced { interface: self.vxlan_name.clone() });
        }
        self.netlink.set_static_port(vxlan, &self.vxlan_name).await
    }

    async fn down(&self) -> Result<(), NetworkError> {
        self.netlink.delete_link(&self.vxlan_name).await?;
        self.netlink.delete_link(&self.bridge_name).await
    }
}

impl Kernel {
    /// The interface of that name, if there is one; it must be the one that was brought up.
    async fn own(&self, name: &str, index: u32) -> Result<Option<Link>, NetworkError> {
        let link = self.netlink.link(name).await?;
        match link {
            Some(link) if link.index != index => Err(NetworkError::Replaced { interface: name.to_owned() }),
            other => Ok(other),
        }
    }
}

fn is_open(link: &Link) -> bool {
    link.port == Some(BridgePortState::Forwarding)
}

/// Makes the bridge, where it is missing with this index (0: any), or corrects it; its index.
async fn bring_bridge_up(netlink: &Netlink, name: &str, mtu: u32, index: u32) -> Result<u32, NetworkError> {
    match netlink.link(name).await? {
        Some(link) => need_kind(&link, InfoKind::Bridge)?,
        None => {
            let message = LinkMessageBuilder::<LinkBridge>::new(name).index(index);
            let message = message.address(GATEWAY_MAC.to_vec()).build();
            let added = netlink.handle.link().add(message).execute().await;
            added.map_err(NetworkError::kernel(format!("make the bridge {name}")))?;
            // An interface has no IPv6 but what it is given (ipv6.rs).
            set_sysctl(&format!("ipv6/conf/{name}/disable_ipv6"), "1")?;
        }
    }
    // A forward delay of zero: a port opens at once, and a closed one stays closed (netlink.rs).
    let message = LinkMessageBuilder::<LinkBridge>::new(name)
        .stp_state(BridgeStpState::Disabled)
        .forward_delay(0)
        .mcast_snooping(false)
        .address(GATEWAY_MAC.to_vec())
        .mtu(mtu)
        .up()
        .build();
    let changed = netlink.handle.link().change(message).execute().await;
    changed.map_err(NetworkError::kernel(format!("set up the bridge {name}")))?;
    Ok(netlink.need_link(name).await?.index)
}

/// Makes the VXLAN device, where it is missing with this index (0: any), or corrects the one that exists, and
/// makes it a port of the bridge, or of none.
pub(super) async fn bring_vxlan_up(
    netlink: &Netlink,
    config: &OverlayConfig,
    mtu: u32,
    bridge: Option<u32>,
    index: u32,
) -> Result<u32, NetworkError> {
    let name = &config.vxlan;
    if let Some(link) = netlink.link(name).await? {
        need_kind(&link, InfoKind::Vxlan)?;
        if !is_as_configured(&link, config) {
            // Most of a VXLAN device's settings cannot be changed while it exists.
            netlink.delete_link(name).await?;
        }
    }
    if netlink.link(name).await?.is_none() {
        let message = LinkVxlan::new(name, config.vni)
            .local(config.vtep)
            .port(config.port)
            .learning(false)
            .proxy(true)
            .index(index)
            .build();
        if let Err(error) = netlink.handle.link().add(message).execute().await {
            let action = format!(
                "make the VXLAN device {name} (network {}, UDP port {}, from {})",
                config.vni, config.port, config.vtep
            );
            return Err(obstacle::explain(netlink, config, action, error).await);
        }
    }
    set_sysctl(&format!("ipv6/conf/{name}/disable_ipv6"), "1")?;
    let index = netlink.need_link(name).await?.index;
    let message = LinkUnspec::new_with_index(index).mtu(mtu).controller(bridge.unwrap_or(0)).up().build();
    if let Err(error) = netlink.handle.link().change(message).execute().await {
        let action = format!("set up the VXLAN device {name}");
        return Err(obstacle::explain(netlink, config, action, error).await);
    }
    Ok(index)
}

/// Refuses an interface that has a name of ours and is something else.
fn need_kind(link: &Link, wanted: InfoKind) -> Result<(), NetworkError> {
    if link.kind.as_ref() == Some(&wanted) {
        return Ok(());
    }
    Err(NetworkError::InterfaceInTheWay {
        interface: link.name.clone(),
        found: found(link),
        wanted: format!("of the kind {wanted}"),
    })
}

/// What an interface is, in words.
pub(super) fn found(link: &Link) -> String {
    let kind = link.kind.as_ref();
    kind.map_or_else(|| "a plain interface".into(), |kind| format!("of the kind {kind}"))
}

/// Whether an existing VXLAN device has the settings that cannot be changed.
fn is_as_configured(link: &Link, config: &OverlayConfig) -> bool {
    let data = link.info.iter().find_map(|info| match info {
        LinkInfo::Data(InfoData::Vxlan(data)) => Some(data.as_slice()),
        _ => None,
    });
    let wanted = [
        InfoVxlan::Id(config.vni),
        InfoVxlan::Local(config.vtep),
        InfoVxlan::Port(config.port),
        InfoVxlan::Learning(false),
        InfoVxlan::Proxy(true),
    ];
    data.is_some_and(|data| wanted.iter().all(|setting| data.contains(setting)))
}
