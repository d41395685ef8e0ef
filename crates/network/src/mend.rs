//! The bridge or the VXLAN device is gone while the daemon runs: seen, said, and made again.
//!
//! What is made again has the number (ifindex) that it had, as entries, sockets and filters go by
//! it. Endpoints are not plugged in again here: a bridge that gets a port lets frames through at
//! once, and whether a service may have any is for the caller to say
//! ([`Overlay::create_endpoint`], [`Overlay::open`], [`Overlay::set_remote`]).

use crate::netlink::{Link, LinkEvents};
use crate::overlay::{self, PATIENCE};
use crate::{NetworkError, Overlay};

impl Overlay {
    /// What is missing of the bridge and the VXLAN device; nothing when both are as they must be.
    ///
    /// # Errors
    /// When the kernel refuses, or somebody else made an interface of that name.
    pub async fn damage(&self) -> Result<Option<String>, NetworkError> {
        let (bridge, vxlan) = (&self.config.bridge, &self.config.vxlan);
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

    async fn own(&self, name: &str, index: u32) -> Result<Option<Link>, NetworkError> {
        let link = self.netlink.link(name).await?;
        match link {
            Some(link) if link.index != index => Err(NetworkError::Replaced { interface: name.to_owned() }),
            other => Ok(other),
        }
    }

    /// Makes the bridge and the VXLAN device again, if anything of them is missing; what was, or
    /// nothing. Endpoints and the entries of services elsewhere are then for the caller to set.
    ///
    /// # Errors
    /// When they cannot be made again.
    pub async fn mend(&self) -> Result<Option<String>, NetworkError> {
        let Some(damage) = self.damage().await? else { return Ok(None) };
        let (netlink, config) = (&self.netlink, &self.config);
        let mut events = LinkEvents::new()?;
        let bridge = overlay::bring_bridge_up(netlink, config, self.mtu, self.bridge).await?;
        if bridge != self.bridge {
            return Err(NetworkError::Replaced { interface: config.bridge.clone() });
        }
        let vxlan = overlay::bring_vxlan_up(netlink, config, self.mtu, bridge, self.vxlan).await?;
        if vxlan != self.vxlan {
            return Err(NetworkError::Replaced { interface: config.vxlan.clone() });
        }
        if !events.wait_until(netlink, &config.bridge, PATIENCE, |link| link.running).await? {
            let interface = config.bridge.clone();
            return Err(NetworkError::NotUp { interface, seconds: PATIENCE.as_secs() });
        }
        overlay::address_bridge(netlink, config, bridge).await?;
        overlay::apply_settings(config)?;
        Ok(Some(damage))
    }
}
