//! The bridge, the VXLAN device or what joins them is gone while the daemon runs: seen, said, and made again
//! where that can be done.
//!
//! What is made again has the number (ifindex) that it had, as entries, sockets and filters go by
//! it. Endpoints are not plugged in again here: a bridge that gets a port lets frames through at
//! once, and whether a service may have any is for the caller to say
//! ([`Overlay::create_endpoint`], [`Overlay::open`], [`Overlay::set_remote`]).

use super::{Overlay, address_bridge, apply_settings};
use crate::netlink::{LinkEvents, PATIENCE};
use crate::{NetworkError, ipv6};

impl Overlay {
    /// What is missing of the bridge and the VXLAN device; nothing when both are as they must be.
    ///
    /// # Errors
    /// When the kernel refuses, or only a restart of the daemon makes it whole: somebody else made an
    /// interface of that name, or Open vSwitch does not run or has lost the bridge.
    pub async fn damage(&self) -> Result<Option<String>, NetworkError> {
        self.datapath.damage().await
    }

    /// Makes the bridge and the VXLAN device again, if anything of them is missing; what was, or
    /// nothing. Endpoints and the entries of services elsewhere are then for the caller to set.
    ///
    /// # Errors
    /// When they cannot be made again.
    pub async fn mend(&self) -> Result<Option<String>, NetworkError> {
        let Some(damage) = self.damage().await? else { return Ok(None) };
        let config = &self.config;
        let mut events = LinkEvents::new()?;
        self.datapath.mend(config, self.mtu).await?;
        if !events.wait_until(&self.netlink, &config.bridge, PATIENCE, |link| link.running).await? {
            let interface = config.bridge.clone();
            return Err(NetworkError::NotUp { interface, seconds: PATIENCE.as_secs() });
        }
        address_bridge(&self.netlink, config, self.bridge).await?;
        ipv6::up(&self.netlink, config, self.bridge).await?;
        apply_settings(config)?;
        Ok(Some(damage))
    }
}
