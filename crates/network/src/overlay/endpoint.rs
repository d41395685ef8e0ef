//! A service's endpoint: its network namespace, its veth into the bridge, and who has the address.
//!
//! ```text
//!                create_endpoint          open
//!   (nothing) ───────────────────► closed ────► open ──┐ close
//!       ▲                            │  ▲              │
//!       └──────── remove_endpoint ───┘  └──────────────┘
//! ```
//!
//! A node enters where a service is with [`Overlay::set_remote`], or by opening its endpoint here.
//! Until it is opened, an endpoint takes nothing over: traffic to the service still goes where it
//! went, so that a copy can be prepared while the original serves.
//!
//! The bridge port's alias, `godwit ADDRESS NAME`, is what [`Overlay::list_endpoints`] reads.

use std::collections::HashSet;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::path::PathBuf;

use godwit_names::ServiceName;
use rtnetlink::packet_route::link::{InfoData, InfoVeth, LinkAttribute};
use rtnetlink::{LinkMessageBuilder, LinkUnspec, LinkVeth};
use serde::{Deserialize, Serialize};

use super::Overlay;
use super::hold::Handed;
use crate::datapath::Behind;
use crate::inside::{Inside, has_inside, inside, interface};
use crate::netlink::{Link, LinkEvents, PortState};
use crate::netns::{self, Found, set_sysctl};
use crate::port::{alias, marked, port_name};
use crate::publish::{Leads, Published};
use crate::{Mac, NetworkError, arp, ipv6, scout, tracked};

/// What a network needs to know of a service.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ServiceEndpoint {
    /// The service's name, unique in the cluster.
    pub name: ServiceName,
    /// Its address, which moves with it.
    pub address: Ipv4Addr,
    /// Its link-layer address, which moves with it; see [`crate::mac_of`].
    pub mac: Mac,
    /// Its published ports.
    pub published: Vec<Published>,
    /// Which of the service's networks this is, from 0: its interface there is `eth0`, `eth1`, …, and by
    /// the first it reaches what is on none of them.
    pub nth: u8,
}

/// An endpoint made by [`Overlay::create_endpoint`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Endpoint {
    /// Where the service's network namespace is mounted.
    pub netns: PathBuf,
    /// The bridge port, on the node's side.
    pub interface: String,
}

/// An endpoint that exists in the kernel, whole or in part.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ExistingEndpoint {
    /// The service's name.
    pub name: ServiceName,
    /// Its address; `None` when only the namespace is left.
    pub address: Option<Ipv4Addr>,
    /// Where its network namespace is or was mounted.
    pub netns: PathBuf,
    /// Whether frames pass.
    pub open: bool,
}

impl Overlay {
    /// Makes the service's network namespace and its veth, **closed**, and reserves its published
    /// ports. Nothing of the address is taken over yet. For a service that has its endpoint
    /// already, completes it and leaves it open or closed as it is.
    ///
    /// # Errors
    /// When the address may not be a service's or is another's here, a port is taken, something
    /// is in the way, or the kernel refuses. Nothing half-made is left.
    pub async fn create_endpoint(&self, service: &ServiceEndpoint) -> Result<Endpoint, NetworkError> {
        self.config.subnet.check(service.address)?;
        let _alone = self.shared.changing.lock().await;
        let endpoint = Endpoint {
            netns: self.config.netns_dir.join(&service.name),
            interface: port_name(service.address),
        };
        let namespace = netns::inspect(&endpoint.netns)?;
        if namespace == Found::Other {
            return Err(NetworkError::FileInTheWay { path: endpoint.netns });
        }
        // A port's name goes by its address: whose that is, is asked of this one port.
        let port = self.netlink.link(&endpoint.interface).await?.filter(|link| marked(link).is_some());
        if let Some((address, owner)) =
            port.as_ref().and_then(marked).filter(|(_, name)| *name != service.name)
        {
            return Err(NetworkError::AddressTaken { address, owner });
        }
        // The last endpoint of a service takes the namespace with it: without one there is none.
        if namespace == Found::Namespace
            && let Some(existing) = self.other_address(service).await?
        {
            let (name, wanted) = (service.name.clone(), service.address);
            return Err(NetworkError::OtherAddress { name, existing, wanted });
        }
        let missing = self.missing(&endpoint, port, namespace, service.nth).await?;
        if let Err(error) = self.make(service, &endpoint, missing).await {
            let undone = match missing {
                Missing::Everything => self.remove_own(&service.name, service.address).await,
                Missing::Veth => self.remove_port(&endpoint.interface).await,
                Missing::Nothing => Ok(()),
            };
            undone.unwrap_or_else(|second| {
                tracing::warn!(service = %service.name, error = %second, "a half-made endpoint is left");
            });
            return Err(error);
        }
        // Before anything can run in it.
        self.plug_captures_in(&service.name, service.address, &endpoint.netns, &endpoint.interface).await;
        Ok(endpoint)
    }

    /// An address that the service has on this network beside the one that it is to have.
    async fn other_address(&self, service: &ServiceEndpoint) -> Result<Option<Ipv4Addr>, NetworkError> {
        let links = self.netlink.links().await?;
        let ours = links.iter().filter_map(marked).filter(|(_, name)| *name == service.name);
        let mut here =
            ours.map(|(address, _)| address).filter(|address| self.config.subnet.contains(*address));
        Ok(here.find(|address| *address != service.address))
    }

    /// What has to be made where this port is there. A namespace that exists is kept, as the service may be running in it.
    async fn missing(
        &self,
        endpoint: &Endpoint,
        port: Option<Link>,
        namespace: Found,
        nth: u8,
    ) -> Result<Missing, NetworkError> {
        if namespace != Found::Namespace {
            return Ok(Missing::Everything);
        }
        let plugged = match port {
            Some(link) => self.datapath.is_plugged(&link).await?,
            None => false,
        };
        let whole = plugged && has_inside(&endpoint.netns, nth).await?;
        Ok(if whole { Missing::Nothing } else { Missing::Veth })
    }

    async fn make(
        &self,
        service: &ServiceEndpoint,
        endpoint: &Endpoint,
        missing: Missing,
    ) -> Result<(), NetworkError> {
        if missing != Missing::Nothing {
            // What is left of an older one would be in the way.
            self.remove_port(&endpoint.interface).await?;
        }
        if missing == Missing::Everything {
            netns::remove(&endpoint.netns)?;
            netns::create(&endpoint.netns).await?;
        }
        // From here on the endpoint is listed, so that whatever is interrupted can be removed.
        self.publish(&service.name, service.address, &service.published).await?;
        if missing != Missing::Nothing {
            self.plug(service, endpoint).await?;
        }
        // One that exists may be older than the overlay's MTU of now: longer packets would be lost.
        let port = self.netlink.need_link(&endpoint.interface).await?;
        if port.mtu != self.mtu {
            self.netlink.set_mtu(port.index, &port.name, self.mtu).await?;
        }
        let (subnet, address, mtu) = (self.config.subnet, service.address, self.mtu);
        let prefix6 = self.config.prefix6;
        inside(&endpoint.netns, service.nth, Inside::Address { subnet, prefix6, address, mtu }).await?;
        if missing != Missing::Nothing {
            self.relax_connections(service).await;
        }
        self.know(service.address, service.mac).await
    }

    /// The kernel may have seen a part of its connections, when it was here before.
    async fn relax_connections(&self, service: &ServiceEndpoint) {
        let address6 = self.address6(service.address).map(IpAddr::from);
        let addresses = address6.into_iter().chain([service.address.into()]).collect();
        match tracked::relax(addresses).await {
            Ok(0) => {}
            Ok(connections) => {
                tracing::debug!(service = %service.name, connections, "the kernel takes up connections that it has not seen all of");
            }
            Err(error) => tracing::warn!(
                service = %service.name,
                %error,
                "a firewall of this node may drop packets of its connections as invalid"
            ),
        }
    }

    /// The IPv6 address of the service with this IPv4 address, if services have one.
    #[must_use]
    pub fn address6(&self, address: Ipv4Addr) -> Option<Ipv6Addr> {
        self.config.prefix6.map(|prefix| prefix.of(address))
    }

    /// The node itself sends to the service by this link-layer address.
    async fn know(&self, address: Ipv4Addr, mac: Mac) -> Result<(), NetworkError> {
        let (index, name) = (self.bridge, &self.config.bridge);
        if let Some(address) = self.address6(address) {
            self.netlink.set_neighbour(index, name, address, mac).await?;
        }
        self.netlink.set_neighbour(index, name, address, mac).await
    }

    async fn know_no_more(&self, address: Ipv4Addr) -> Result<(), NetworkError> {
        let (index, name) = (self.bridge, &self.config.bridge);
        if let Some(address) = self.address6(address) {
            self.netlink.delete_neighbour(index, name, address).await?;
        }
        self.netlink.delete_neighbour(index, name, address).await.map(drop)
    }

    /// This node answers on its uplink for the service's addresses.
    async fn answer(&self, address: Ipv4Addr) -> Result<(), NetworkError> {
        let (index, name) = (self.uplink, &self.config.uplink);
        if let Some(address) = self.address6(address) {
            self.netlink.set_proxy(index, name, address).await?;
        }
        self.netlink.set_proxy(index, name, address).await
    }

    pub(crate) async fn answer_no_more(&self, address: Ipv4Addr) -> Result<(), NetworkError> {
        let (index, name) = (self.uplink, &self.config.uplink);
        if let Some(address) = self.address6(address) {
            self.netlink.delete_proxy(index, name, address).await?;
        }
        self.netlink.delete_proxy(index, name, address).await.map(drop)
    }

    /// Makes the veth and closes its port before the namespace has an address: between the link's
    /// coming up and the closing, frames could pass, but no process is there to answer them.
    async fn plug(&self, service: &ServiceEndpoint, endpoint: &Endpoint) -> Result<(), NetworkError> {
        let (port, own) = (endpoint.interface.as_str(), interface(service.nth));
        let netns = std::fs::File::open(&endpoint.netns)
            .map_err(NetworkError::system(format!("open {}", endpoint.netns.display())))?;
        let peer = LinkMessageBuilder::<LinkUnspec>::default()
            .name(own.clone())
            .address(service.mac.to_vec())
            .mtu(self.mtu)
            .setns_by_fd(std::os::fd::AsRawFd::as_raw_fd(&netns))
            .build();
        let message = LinkMessageBuilder::<LinkVeth>::new(port, &own)
            .mtu(self.mtu)
            .set_info_data(InfoData::Veth(InfoVeth::Peer(peer)))
            .build();
        let handle = &self.netlink.handle;
        let refused = |what: &str| NetworkError::kernel(format!("{what} of the service {}", service.name));
        handle.link().add(message).execute().await.map_err(refused("make the veth"))?;
        set_sysctl(&format!("ipv6/conf/{port}/disable_ipv6"), "1")?;
        let link = self.netlink.need_link(port).await?;

        inside(&endpoint.netns, service.nth, Inside::Up).await?;
        let alias = alias(service.address, &service.name);
        let message = LinkUnspec::new_with_index(link.index)
            .append_extra_attribute(LinkAttribute::IfAlias(alias))
            .build();
        handle.link().change(message).execute().await.map_err(refused("mark the veth"))?;
        self.datapath.plug(&link).await
    }

    /// Takes a port out of the switch and removes its veth.
    async fn remove_port(&self, port: &str) -> Result<(), NetworkError> {
        self.datapath.unplug(port).await?;
        self.netlink.delete_link(port).await
    }

    /// Lets frames pass, takes the service's address over from wherever it was, hands in what was held
    /// for it, and announces it.
    ///
    /// # Errors
    /// [`NetworkError::NoEndpoint`] when it was not created, or when the kernel refuses. What was held is
    /// held still.
    pub async fn open(&self, service: &ServiceEndpoint) -> Result<Handed, NetworkError> {
        let link = self.port_of(service).await?;
        let (netlink, vxlan) = (&self.netlink, &self.config.vxlan);
        self.know(service.address, service.mac).await?;
        self.datapath.set_port(&link, PortState::Open).await?;
        for entrance in self.datapath.entrances() {
            let sent = scout::send(&self.shared.sender, entrance, service.mac);
            sent.map_err(NetworkError::system(format!("learn the way to the service {}", service.name)))?;
        }
        let take_over = async {
            // The moment: before it no frame reaches the service by itself.
            self.datapath.set_entry(service.address, service.mac, Behind::Port(&link)).await?;
            netlink.delete_neighbour(self.vxlan, vxlan, service.address).await?;
            netlink.delete_vxlan_entry(self.vxlan, vxlan, service.mac).await?;
            self.answer(service.address).await
        };
        let handed = self.hand_in(&service.name, link.index, take_over).await?;
        self.announce(service)?;
        Ok(handed)
    }

    /// Says on the uplink and on the bridge that the service is here (gratuitous ARP, both forms; and on
    /// the uplink an unsolicited neighbour advertisement).
    /// [`Overlay::open`] does it; doing it again helps where frames are lost.
    ///
    /// # Errors
    /// When a frame cannot be sent.
    pub fn announce(&self, service: &ServiceEndpoint) -> Result<(), NetworkError> {
        self.announce_on_uplink(service.address)?;
        arp::announce(&self.shared.sender, self.bridge, &self.config.bridge, service.address, service.mac)
    }

    fn announce_on_uplink(&self, address: Ipv4Addr) -> Result<(), NetworkError> {
        let (index, name, mac) = (self.uplink, &self.config.uplink, self.uplink_mac);
        if let Some(address) = self.address6(address) {
            ipv6::announce(&self.shared.sender, index, name, address, mac)?;
        }
        arp::announce(&self.shared.sender, index, name, address, mac)
    }

    /// Stops frames in both directions, at once, without the service seeing its link go down. The
    /// address stays here: its neighbours keep sending to this node, and [`Overlay::open`] goes on
    /// where this stopped.
    ///
    /// # Errors
    /// [`NetworkError::NoEndpoint`] when it was not created, or when the kernel refuses.
    pub async fn close(&self, service: &ServiceEndpoint) -> Result<(), NetworkError> {
        let link = self.port_of(service).await?;
        self.datapath.set_port(&link, PortState::Closed).await
    }

    /// Whether frames pass.
    ///
    /// # Errors
    /// [`NetworkError::NoEndpoint`] when it was not created, or when the kernel refuses.
    pub async fn is_open(&self, service: &ServiceEndpoint) -> Result<bool, NetworkError> {
        let link = self.port_of(service).await?;
        let open = self.datapath.open_ports(std::slice::from_ref(&link)).await?;
        Ok(open.contains(&link.name))
    }

    /// Says that the service with this address lives on the node at `vtep`: frames to it go there,
    /// and this node no longer answers for it. An endpoint that it had here stays, without
    /// traffic, until [`Overlay::remove_endpoint`].
    ///
    /// # Errors
    /// When the address may not be a service's, `vtep` is this node, or the kernel refuses.
    pub async fn set_remote(&self, address: Ipv4Addr, mac: Mac, vtep: Ipv4Addr) -> Result<(), NetworkError> {
        self.config.subnet.check(address)?;
        if vtep == self.config.vtep {
            return Err(NetworkError::RemoteIsSelf { address, vtep });
        }
        let (netlink, vxlan) = (&self.netlink, &self.config.vxlan);
        netlink.set_vxlan_entry(self.vxlan, vxlan, mac, vtep).await?;
        netlink.set_neighbour(self.vxlan, vxlan, address, mac).await?;
        self.know(address, mac).await?;
        self.answer_no_more(address).await?;
        // The moment: before it frames go where they went.
        self.datapath.set_entry(address, mac, Behind::Tunnel).await
    }

    /// Says that no node has the service with this address: forgets what [`Overlay::set_remote`]
    /// entered, and its published ports. Does not touch an endpoint here.
    ///
    /// # Errors
    /// When the kernel refuses.
    pub async fn set_absent(&self, address: Ipv4Addr, mac: Mac) -> Result<(), NetworkError> {
        let (netlink, vxlan) = (&self.netlink, &self.config.vxlan);
        let was_remote = netlink.delete_neighbour(self.vxlan, vxlan, address).await?;
        netlink.delete_vxlan_entry(self.vxlan, vxlan, mac).await?;
        self.datapath.delete_tunnel_entry(address, mac).await?;
        if was_remote {
            self.know_no_more(address).await?;
        }
        self.shared.ports.unpublish(address).await
    }

    /// Has exactly these ports of the node lead to the service, wherever that is.
    ///
    /// # Errors
    /// When another service has one of them, or nft refuses.
    pub async fn publish(
        &self,
        name: &ServiceName,
        address: Ipv4Addr,
        ports: &[Published],
    ) -> Result<(), NetworkError> {
        let mut leads = Leads { service: address, service6: None };
        if let Some(service) = self.address6(address)
            && !ports.is_empty()
        {
            // Answers must come back to this node: without an address of its own there is no way by IPv6.
            let node = self.netlink.global_address6(self.uplink, &self.config.uplink).await?;
            leads.service6 = node.map(|node| (service, node));
        }
        self.shared.ports.publish(&self.config, name, leads, ports).await
    }

    /// Whether another program has removed published ports of this node, of whichever network: they are to be
    /// published again then.
    ///
    /// # Errors
    /// When nft refuses.
    pub async fn lost_ports(&self) -> Result<bool, NetworkError> {
        self.shared.ports.are_lost().await
    }

    /// Removes the service's endpoint: veth, what answers for its address, and the namespace with the last
    /// of the service's endpoints. What [`Overlay::set_remote`] entered stays, and with it the published
    /// ports. No error when it is gone already; what another service has at that address stays.
    ///
    /// # Errors
    /// When the kernel refuses.
    pub async fn remove_endpoint(&self, name: &ServiceName, address: Ipv4Addr) -> Result<(), NetworkError> {
        let _alone = self.shared.changing.lock().await;
        self.remove_own(name, address).await
    }

    async fn remove_own(&self, name: &ServiceName, address: Ipv4Addr) -> Result<(), NetworkError> {
        self.let_go(name);
        let port = port_name(address);
        let link = self.netlink.link(&port).await?;
        let owner = link.as_ref().and_then(marked).map(|(_, owner)| owner);
        if owner.is_none_or(|owner| owner == *name) {
            self.remove_port(&port).await?;
            self.answer_no_more(address).await?;
            let remote = self.netlink.neighbours(self.vxlan, false).await?;
            if !remote.iter().any(|(there, _)| *there == address) {
                self.shared.ports.unpublish(address).await?;
                self.know_no_more(address).await?;
            }
        }
        // Last, as it keeps the endpoint listed until all else is gone.
        self.remove_namespace(name).await
    }

    /// Removes the service's namespace, if no network plugs into it any more.
    async fn remove_namespace(&self, name: &ServiceName) -> Result<(), NetworkError> {
        let links = self.netlink.links().await?;
        if links.iter().filter_map(marked).any(|(_, other)| other == *name) {
            return Ok(());
        }
        netns::remove(&self.config.netns_dir.join(name))
    }

    /// The endpoints of this network that exist on this node, whole or in part, by name.
    ///
    /// # Errors
    /// When the kernel refuses, or the directory of namespaces cannot be read.
    pub async fn list_endpoints(&self) -> Result<Vec<ExistingEndpoint>, NetworkError> {
        let mut found: Vec<ExistingEndpoint> = Vec::new();
        let links = self.netlink.links().await?;
        let open = self.datapath.open_ports(&links).await?;
        for link in &links {
            let Some((address, name)) = marked(link) else { continue };
            if self.config.subnet.contains(address) {
                found.push(ExistingEndpoint {
                    netns: self.config.netns_dir.join(&name),
                    name,
                    address: Some(address),
                    open: open.contains(&link.name),
                });
            }
        }
        let plugged: HashSet<_> = links.iter().filter_map(marked).map(|(_, name)| name).collect();
        let directory = &self.config.netns_dir;
        let failed = || NetworkError::system(format!("read the directory {}", directory.display()));
        let entries = match std::fs::read_dir(directory) {
            Ok(entries) => Some(entries),
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => None,
            Err(error) => return Err(failed()(error)),
        };
        for entry in entries.into_iter().flatten() {
            let path = entry.map_err(|error| failed()(error))?.path();
            let name = path.file_name().and_then(|name| name.to_str()).and_then(|name| name.parse().ok());
            let Some(name) = name else { continue };
            if !plugged.contains(&name)
                && matches!(netns::inspect(&path)?, Found::Namespace | Found::EmptyFile)
            {
                found.push(ExistingEndpoint { name, address: None, netns: path, open: false });
            }
        }
        found.sort_by(|a, b| a.name.cmp(&b.name));
        Ok(found)
    }

    /// Removes the veths of all endpoints and their namespaces, for [`Overlay::down`], which removes the rest at once.
    pub(super) async fn unplug_all(&self) -> Result<(), NetworkError> {
        let endpoints = self.list_endpoints().await?;
        for address in endpoints.iter().filter_map(|endpoint| endpoint.address) {
            self.remove_port(&port_name(address)).await?;
        }
        let links = self.netlink.links().await?;
        let plugged: HashSet<_> = links.iter().filter_map(marked).map(|(_, name)| name).collect();
        for endpoint in endpoints.iter().filter(|endpoint| !plugged.contains(&endpoint.name)) {
            netns::remove(&endpoint.netns)?;
        }
        Ok(())
    }

    /// Takes care, for as long as it is awaited, that the uplink answers for the open services
    /// also after it was down: the kernel then forgets for whom it answered. A daemon keeps this
    /// running in a task of its own.
    ///
    /// # Errors
    /// When the kernel refuses, or [`NetworkError::SwitchGone`]. It does not return otherwise.
    pub async fn follow_uplink(&self) -> Result<std::convert::Infallible, NetworkError> {
        let mut events = LinkEvents::new()?;
        let mut of = self.uplink;
        loop {
            self.datapath.check_unchanged().await?;
            // It may have been down and up again before the first word of that is heard.
            if of == self.uplink && self.netlink.link(&self.config.uplink).await?.is_some_and(|link| link.up)
            {
                // Services come and go meanwhile; the next word of the uplink finds those that are there.
                if let Err(error) = self.answer_again().await {
                    tracing::warn!(%error, uplink = self.config.uplink, "it may not answer for all services");
                }
            }
            of = events.next_of(&[self.uplink, self.bridge]).await?;
        }
    }

    async fn answer_again(&self) -> Result<(), NetworkError> {
        let index = self.uplink;
        let answered = self.netlink.neighbours(index, true).await?;
        for endpoint in self.list_endpoints().await?.into_iter().filter(|endpoint| endpoint.open) {
            let Some(address) = endpoint.address else { continue };
            if !answered.iter().any(|(there, _)| *there == address) {
                self.answer(address).await?;
                self.announce_on_uplink(address)?;
            }
        }
        Ok(())
    }

    async fn port_of(&self, service: &ServiceEndpoint) -> Result<Link, NetworkError> {
        if let Some(link) = self.netlink.link(&port_name(service.address)).await?
            && self.datapath.is_plugged(&link).await?
        {
            return Ok(link);
        }
        Err(NetworkError::NoEndpoint { name: service.name.clone() })
    }
}

/// What of an endpoint has to be made.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Missing {
    Nothing,
    /// The namespace is there.
    Veth,
    Everything,
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A daemon moves these between its threads: that it compiles is the test.
    #[allow(dead_code)]
    fn work_on_an_endpoint_can_move_between_threads(overlay: &Overlay, service: &ServiceEndpoint) {
        fn can_move(_: impl Send) {}
        can_move(overlay.create_endpoint(service));
        can_move(overlay.open(service));
        can_move(overlay.steer(service, service.address));
        can_move(overlay.close(service));
        can_move(overlay.set_remote(service.address, service.mac, service.address));
        can_move(overlay.remove_endpoint(&service.name, service.address));
        can_move(overlay.list_endpoints());
        can_move(overlay.follow_uplink());
        can_move(overlay);
    }
}
