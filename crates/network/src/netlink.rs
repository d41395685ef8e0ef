//! The few netlink requests the overlay is made of, where `rtnetlink` has no words for them:
//! bridge port states, forwarding entries, and proxy neighbours.
//!
//! **A closed port is in the state LISTENING, not DISABLED.** Neither passes a frame in or out.
//! But the kernel takes a DISABLED port whose link is up for one whose link just came up, and
//! opens it at the next notification about the device, for instance when somebody sets its alias
//! or its queue length (`br_port_carrier_check` in `net/bridge/br_if.c`). A BLOCKING port is
//! opened at once where the spanning tree protocol is off. LISTENING stays, as the bridge's forward
//! delay is zero and so no timer ever moves it on.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::time::Duration;

use futures::StreamExt;
use futures::TryStreamExt;
use futures::channel::mpsc::UnboundedReceiver;
use rtnetlink::packet_core::{
    DefaultNla, NLM_F_ACK, NLM_F_CREATE, NLM_F_REPLACE, NLM_F_REQUEST, NetlinkMessage, NetlinkPayload,
};
use rtnetlink::packet_route::address::{AddressAttribute, AddressMessage, AddressScope};
use rtnetlink::packet_route::link::{
    BridgePortState, InfoBridgePort, InfoKind, InfoPortData, LinkAttribute, LinkFlags, LinkInfo, LinkMessage,
};
use rtnetlink::packet_route::neighbour::{
    NeighbourAddress, NeighbourAttribute, NeighbourFlags, NeighbourMessage, NeighbourState,
};
use rtnetlink::packet_route::route::RouteType;
use rtnetlink::packet_route::{AddressFamily, RouteNetlinkMessage};
use rtnetlink::{Handle, IpVersion, LinkUnspec, MulticastGroup};
use tokio_util::task::AbortOnDropHandle;

use crate::{Mac, NetworkError, mac_to_string};

const IFLA_PROTINFO: u16 = 12;
const IFLA_BRPORT_STATE: u16 = 1;
const IFLA_BRPORT_LEARNING: u16 = 8;
const IFLA_BRPORT_UNICAST_FLOOD: u16 = 9;
const NLA_F_NESTED: u16 = 1 << 15;
const NUD_REACHABLE: u16 = 0x02;
const NUD_NOARP: u16 = 0x40;

/// How long a new interface may take to come up. It takes about a millisecond.
pub(crate) const PATIENCE: Duration = Duration::from_secs(10);

/// Whether frames pass a bridge port.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum PortState {
    /// LISTENING: no frame in, no frame out, the link stays up.
    Closed,
    /// FORWARDING.
    Open,
}

impl PortState {
    fn to_kernel(self) -> u8 {
        match self {
            Self::Closed => BridgePortState::Listening.into(),
            Self::Open => BridgePortState::Forwarding.into(),
        }
    }
}

/// What the overlay needs to know of an interface.
#[derive(Debug, Clone)]
pub(crate) struct Link {
    pub(crate) index: u32,
    pub(crate) name: String,
    pub(crate) mtu: u32,
    pub(crate) mac: Option<Mac>,
    pub(crate) alias: Option<String>,
    pub(crate) kind: Option<InfoKind>,
    pub(crate) master: Option<u32>,
    /// `None` where the interface is no bridge port.
    pub(crate) port: Option<BridgePortState>,
    /// Its kind's own settings, for comparing.
    pub(crate) info: Vec<LinkInfo>,
    /// Whether it was brought up.
    pub(crate) up: bool,
    /// Whether it has a carrier, and carries frames.
    pub(crate) running: bool,
}

impl From<LinkMessage> for Link {
    fn from(message: LinkMessage) -> Self {
        let mut link = Self {
            index: message.header.index,
            name: String::new(),
            mtu: 0,
            mac: None,
            alias: None,
            kind: None,
            master: None,
            port: None,
            info: Vec::new(),
            up: message.header.flags.contains(LinkFlags::Up),
            running: message.header.flags.contains(LinkFlags::LowerUp),
        };
        for attribute in message.attributes {
            match attribute {
                LinkAttribute::IfName(name) => link.name = name,
                LinkAttribute::Mtu(mtu) => link.mtu = mtu,
                LinkAttribute::Address(mac) => link.mac = mac.try_into().ok(),
                LinkAttribute::IfAlias(alias) => link.alias = Some(alias),
                LinkAttribute::Controller(master) => link.master = Some(master),
                LinkAttribute::LinkInfo(infos) => link.info = infos,
                _ => {}
            }
        }
        for info in &link.info {
            match info {
                LinkInfo::Kind(kind) => link.kind = Some(kind.clone()),
                LinkInfo::PortData(InfoPortData::BridgePort(port)) => {
                    link.port = port.iter().find_map(|attribute| match attribute {
                        InfoBridgePort::State(state) => Some(*state),
                        _ => None,
                    });
                }
                _ => {}
            }
        }
        link
    }
}

/// A netlink socket in the network namespace of the thread that made it.
#[derive(Debug)]
pub(crate) struct Netlink {
    pub(crate) handle: Handle,
    /// The kernel lists one thing at a time for a socket, and refuses a second one meanwhile (EBUSY).
    pub(crate) listing: tokio::sync::Mutex<()>,
    _connection: AbortOnDropHandle<()>,
}

impl Netlink {
    /// Opens a socket; needs a tokio runtime.
    pub(crate) fn new() -> Result<Self, NetworkError> {
        let (connection, handle, _) =
            rtnetlink::new_connection().map_err(NetworkError::system("open a netlink socket"))?;
        let connection = AbortOnDropHandle::new(tokio::spawn(connection));
        Ok(Self { handle, listing: tokio::sync::Mutex::default(), _connection: connection })
    }

    /// The interface of that name, if there is one.
    pub(crate) async fn link(&self, name: &str) -> Result<Option<Link>, NetworkError> {
        let mut found = self.handle.link().get().match_name(name.to_owned()).execute();
        match found.try_next().await {
            Ok(message) => Ok(message.map(Link::from)),
            Err(error) if has_errno(&error, libc::ENODEV) => Ok(None),
            Err(error) => Err(NetworkError::kernel(format!("describe the interface {name}"))(error)),
        }
    }

    /// The interface of that name.
    pub(crate) async fn need_link(&self, name: &str) -> Result<Link, NetworkError> {
        self.link(name).await?.ok_or_else(|| NetworkError::NoInterface { interface: name.to_owned() })
    }

    /// All interfaces.
    pub(crate) async fn links(&self) -> Result<Vec<Link>, NetworkError> {
        let _listing = self.listing.lock().await;
        let all = self.handle.link().get().execute().map_ok(Link::from).try_collect().await;
        all.map_err(NetworkError::kernel("list the interfaces"))
    }

    /// The first IPv6 address of an interface that others can reach it by.
    pub(crate) async fn global_address6(
        &self,
        index: u32,
        name: &str,
    ) -> Result<Option<Ipv6Addr>, NetworkError> {
        let _listing = self.listing.lock().await;
        let request = self.handle.address().get().set_link_index_filter(index);
        let all: Vec<AddressMessage> = request
            .execute()
            .try_collect()
            .await
            .map_err(NetworkError::kernel(format!("list the addresses of {name}")))?;
        let global = |message: &AddressMessage| {
            message.attributes.iter().find_map(|attribute| match attribute {
                AddressAttribute::Address(IpAddr::V6(address)) => Some(*address),
                _ => None,
            })
        };
        let wanted = |message: &&AddressMessage| message.header.scope == AddressScope::Universe;
        Ok(all.iter().filter(wanted).find_map(global))
    }

    /// Removes an interface; no error when it is gone already.
    pub(crate) async fn delete_link(&self, name: &str) -> Result<(), NetworkError> {
        let Some(link) = self.link(name).await? else { return Ok(()) };
        let removed = self.handle.link().del(link.index).execute().await;
        removed
            .or_else(|e| if has_errno(&e, libc::ENODEV) { Ok(()) } else { Err(e) })
            .map_err(NetworkError::kernel(format!("remove the interface {name}")))
    }

    /// Brings an interface up.
    pub(crate) async fn set_up(&self, index: u32, name: &str) -> Result<(), NetworkError> {
        let message = LinkUnspec::new_with_index(index).up().build();
        let up = self.handle.link().change(message).execute().await;
        up.map_err(NetworkError::kernel(format!("bring the interface {name} up")))
    }

    /// Sets the longest packet that an interface carries.
    pub(crate) async fn set_mtu(&self, index: u32, name: &str, mtu: u32) -> Result<(), NetworkError> {
        let message = LinkUnspec::new_with_index(index).mtu(mtu).build();
        let set = self.handle.link().change(message).execute().await;
        set.map_err(NetworkError::kernel(format!("set the MTU of the interface {name} to {mtu}")))
    }

    /// Opens or closes a bridge port: one message.
    pub(crate) async fn set_port(
        &self,
        index: u32,
        name: &str,
        state: PortState,
    ) -> Result<(), NetworkError> {
        self.set_bridge_port(index, name, &[(IFLA_BRPORT_STATE, state.to_kernel())]).await
    }

    /// Makes a bridge port neither learn addresses nor take frames to unknown ones.
    pub(crate) async fn set_static_port(&self, index: u32, name: &str) -> Result<(), NetworkError> {
        self.set_bridge_port(index, name, &[(IFLA_BRPORT_LEARNING, 0), (IFLA_BRPORT_UNICAST_FLOOD, 0)]).await
    }

    /// `RTM_SETLINK` of the bridge family: unlike the generic form it sends no notification about
    /// the device, and so has no side effects on the port's state.
    async fn set_bridge_port(
        &self,
        index: u32,
        name: &str,
        attributes: &[(u16, u8)],
    ) -> Result<(), NetworkError> {
        let nested = attributes.iter().flat_map(|(kind, value)| {
            let [low, high] = kind.to_ne_bytes();
            let [len_low, len_high] = 5_u16.to_ne_bytes();
            [len_low, len_high, low, high, *value, 0, 0, 0]
        });
        let mut message = LinkMessage::default();
        message.header.interface_family = AddressFamily::Bridge;
        message.header.index = index;
        message.attributes.push(LinkAttribute::ProtoInfoUnknown(DefaultNla::new(
            IFLA_PROTINFO | NLA_F_NESTED,
            nested.collect(),
        )));
        let set = self.handle.link().set(message).execute().await;
        set.map_err(NetworkError::kernel(format!("set the state of the bridge port {name}")))
    }

    /// Enters a permanent neighbour: `address` is at `mac` on the interface.
    pub(crate) async fn set_neighbour(
        &self,
        index: u32,
        name: &str,
        address: impl Into<IpAddr>,
        mac: Mac,
    ) -> Result<(), NetworkError> {
        let address = address.into();
        let request = self.handle.neighbours().add(index, address);
        let added = request.link_local_address(&mac).replace().execute().await;
        added.map_err(NetworkError::kernel(format!("add the neighbour {address} on {name}")))
    }

    /// Forgets a neighbour; says whether it was there.
    pub(crate) async fn delete_neighbour(
        &self,
        index: u32,
        name: &str,
        address: impl Into<IpAddr>,
    ) -> Result<bool, NetworkError> {
        let address = address.into();
        let message = neighbour(index, address, NeighbourFlags::empty());
        self.forget(message, format!("remove the neighbour {address} on {name}")).await
    }

    /// Has the interface answer ARP requests, or neighbour solicitations, for `address`.
    pub(crate) async fn set_proxy(
        &self,
        index: u32,
        name: &str,
        address: impl Into<IpAddr>,
    ) -> Result<(), NetworkError> {
        let address = address.into();
        let request = self.handle.neighbours().add(index, address).flags(NeighbourFlags::Proxy);
        let added = request.replace().execute().await;
        added.map_err(NetworkError::kernel(format!("answer for the address {address} on {name}")))
    }

    /// Stops answering for `address`; says whether it did answer.
    pub(crate) async fn delete_proxy(
        &self,
        index: u32,
        name: &str,
        address: impl Into<IpAddr>,
    ) -> Result<bool, NetworkError> {
        let address = address.into();
        let message = neighbour(index, address, NeighbourFlags::Proxy);
        self.forget(message, format!("no longer answer for the address {address} on {name}")).await
    }

    /// The IPv4 neighbours of an interface, or with `proxies` the addresses it answers for.
    pub(crate) async fn neighbours(
        &self,
        index: u32,
        proxies: bool,
    ) -> Result<Vec<(Ipv4Addr, Option<Mac>)>, NetworkError> {
        let _listing = self.listing.lock().await;
        let request = self.handle.neighbours().get().set_family(IpVersion::V4);
        let request = if proxies { request.proxies() } else { request };
        let entries: Vec<NeighbourMessage> =
            request.execute().try_collect().await.map_err(NetworkError::kernel("list the neighbours"))?;
        let ours = entries.into_iter().filter(|entry| entry.header.ifindex == index);
        Ok(ours.filter_map(|entry| neighbour_of(&entry.attributes)).collect())
    }

    /// Enters in the bridge's table that `mac` is behind the port, for good.
    pub(crate) async fn set_bridge_entry(&self, port: u32, name: &str, mac: Mac) -> Result<(), NetworkError> {
        let message = forwarding(port, mac, NeighbourFlags::Controller, None);
        self.enter(message, format!("add {} at the bridge port {name}", mac_to_string(mac))).await
    }

    /// Removes the bridge's entry that `mac` is behind the port; no error when there is none.
    pub(crate) async fn delete_bridge_entry(
        &self,
        port: u32,
        name: &str,
        mac: Mac,
    ) -> Result<bool, NetworkError> {
        let message = forwarding(port, mac, NeighbourFlags::Controller, None);
        self.forget(message, format!("remove {} at the bridge port {name}", mac_to_string(mac))).await
    }

    /// Enters in the VXLAN device's table that frames to `mac` go to the node at `vtep`.
    pub(crate) async fn set_vxlan_entry(
        &self,
        index: u32,
        name: &str,
        mac: Mac,
        vtep: Ipv4Addr,
    ) -> Result<(), NetworkError> {
        let message = forwarding(index, mac, NeighbourFlags::Own, Some(vtep));
        self.enter(message, format!("send {} to {vtep} through {name}", mac_to_string(mac))).await
    }

    /// Removes the VXLAN device's entry for `mac`; no error when there is none.
    pub(crate) async fn delete_vxlan_entry(
        &self,
        index: u32,
        name: &str,
        mac: Mac,
    ) -> Result<bool, NetworkError> {
        let message = forwarding(index, mac, NeighbourFlags::Own, None);
        self.forget(message, format!("no longer send {} through {name}", mac_to_string(mac))).await
    }

    async fn enter(&self, message: NeighbourMessage, action: String) -> Result<(), NetworkError> {
        let mut request = NetlinkMessage::from(RouteNetlinkMessage::NewNeighbour(message));
        request.header.flags = NLM_F_REQUEST | NLM_F_ACK | NLM_F_CREATE | NLM_F_REPLACE;
        let mut handle = self.handle.clone();
        let mut answers = match handle.request(request) {
            Ok(answers) => answers,
            Err(error) => return Err(NetworkError::kernel(action)(error)),
        };
        while let Some(answer) = answers.next().await {
            if let NetlinkPayload::Error(error) = answer.payload {
                return Err(NetworkError::kernel(action)(rtnetlink::Error::NetlinkError(error)));
            }
        }
        Ok(())
    }

    async fn forget(&self, message: NeighbourMessage, action: String) -> Result<bool, NetworkError> {
        match self.handle.neighbours().del(message).execute().await {
            Ok(()) => Ok(true),
            Err(error) if has_errno(&error, libc::ENOENT) => Ok(false),
            Err(error) => Err(NetworkError::kernel(action)(error)),
        }
    }
}

/// Notifications about interfaces, from the moment it is made.
pub(crate) struct LinkEvents {
    messages: UnboundedReceiver<(NetlinkMessage<RouteNetlinkMessage>, rtnetlink::sys::SocketAddr)>,
    _connection: AbortOnDropHandle<()>,
}

impl LinkEvents {
    pub(crate) fn new() -> Result<Self, NetworkError> {
        let (connection, _, messages) = rtnetlink::new_multicast_connection(&[MulticastGroup::Link])
            .map_err(NetworkError::system("listen for changes of interfaces"))?;
        Ok(Self { messages, _connection: AbortOnDropHandle::new(tokio::spawn(connection)) })
    }

    /// Waits for the next notification about one of these interfaces; says which.
    pub(crate) async fn next_of(&mut self, indices: &[u32]) -> Result<u32, NetworkError> {
        while let Some((message, _)) = self.messages.next().await {
            if let NetlinkPayload::InnerMessage(
                RouteNetlinkMessage::NewLink(link) | RouteNetlinkMessage::DelLink(link),
            ) = message.payload
                && indices.contains(&link.header.index)
            {
                return Ok(link.header.index);
            }
        }
        let closed = std::io::Error::other("the netlink socket was closed");
        Err(NetworkError::system("listen for changes of interfaces")(closed))
    }

    /// Waits until the interface is as wanted, having been told of each change. Returns false when
    /// that does not happen within `patience`.
    pub(crate) async fn wait_until(
        &mut self,
        netlink: &Netlink,
        name: &str,
        patience: Duration,
        wanted: impl Fn(&Link) -> bool + Send,
    ) -> Result<bool, NetworkError> {
        let deadline = tokio::time::Instant::now() + patience;
        loop {
            if wanted(&netlink.need_link(name).await?) {
                return Ok(true);
            }
            match tokio::time::timeout_at(deadline, self.messages.next()).await {
                Ok(Some(_)) => {}
                Ok(None) | Err(_) => return Ok(false),
            }
        }
    }
}

/// Whether the kernel's answer is this error number.
pub(crate) fn has_errno(error: &rtnetlink::Error, errno: i32) -> bool {
    matches!(error, rtnetlink::Error::NetlinkError(message) if message.raw_code() == -errno)
}

fn neighbour(index: u32, address: IpAddr, flags: NeighbourFlags) -> NeighbourMessage {
    let mut message = NeighbourMessage::default();
    let destination;
    (message.header.family, destination) = match address {
        IpAddr::V4(address) => (AddressFamily::Inet, NeighbourAddress::Inet(address)),
        IpAddr::V6(address) => (AddressFamily::Inet6, NeighbourAddress::Inet6(address)),
    };
    message.header.ifindex = index;
    message.header.flags = flags;
    message.attributes.push(NeighbourAttribute::Destination(destination));
    message
}

/// A forwarding entry that never ages: `NUD_NOARP` is "static" to a bridge, and VXLAN wants
/// `NUD_REACHABLE` beside it.
fn forwarding(index: u32, mac: Mac, table: NeighbourFlags, vtep: Option<Ipv4Addr>) -> NeighbourMessage {
    let mut message = NeighbourMessage::default();
    message.header.family = AddressFamily::Bridge;
    message.header.ifindex = index;
    message.header.flags = table;
    message.header.kind = RouteType::Unspec;
    message.header.state = NeighbourState::Other(NUD_NOARP | NUD_REACHABLE);
    message.attributes.push(NeighbourAttribute::LinkLocalAddress(mac.to_vec()));
    if let Some(vtep) = vtep {
        message.attributes.push(NeighbourAttribute::Destination(NeighbourAddress::Inet(vtep)));
    }
    message
}

fn neighbour_of(attributes: &[NeighbourAttribute]) -> Option<(Ipv4Addr, Option<Mac>)> {
    let address = attributes.iter().find_map(|attribute| match attribute {
        NeighbourAttribute::Destination(NeighbourAddress::Inet(address)) => Some(*address),
        _ => None,
    })?;
    let mac = attributes.iter().find_map(|attribute| match attribute {
        NeighbourAttribute::LinkLocalAddress(mac) => Mac::try_from(mac.as_slice()).ok(),
        _ => None,
    });
    Some((address, mac))
}
