//! Open vSwitch, driven by its own programs.
//!
//! ```text
//!                            bridge of Open vSwitch
//!             gw0 (its own) ──┬──────────────────┐
//!   gws… ◄─nftables─► gwt… ───┤ flows (flows.rs) ├─── gwvx0-t ◄─nftables─► gwvx0 ── nodes
//!   gws… ◄─nftables─► gwt… ───┘                  │                        (VXLAN)
//!  (veth)          (its own)  ───────────────────┘ (its own)
//! ```
//!
//! **The datapath** is the kernel's where the kernel has the module, else ovs-vswitchd's own (`netdev`).
//!
//! **The tunnel** is the kernel's VXLAN device with godwit's entries, as it is beside the kernel's bridge.
//! Open vSwitch's own tunnels would need, with the userspace datapath, the uplink as a port and its
//! address on a bridge: the node would be cut off whenever ovs-vswitchd is.
//!
//! **All ports are the switch's own** (`type=internal`), each joined with its device by two rules of nftables
//! that hand on every frame, ahead of everything else the kernel would do with it. With the userspace
//! datapath such a port is a TAP device. That matters:
//! - The userspace datapath cannot carry a frame of several segments, or one whose check sum is still to be
//!   made. Services and the uplink's receive offload make such frames; the kernel completes them where they
//!   enter the TAP device.
//! - Other interfaces it reads by packet sockets, which hold some 90 frames and drop the rest: one TCP
//!   stream sent a fifth of its segments again so. A TAP device has a queue.
//!
//! (A bridge of the kernel in place of the rules would show the frames to packet filters and connection
//! tracking, where bridged frames are shown to them: once more, as frames that a process sent.)
//!
//! **State** is where it is with the kernel's bridge, beside the services: which ports there are in the
//! database, what is open and where services are in the flows. Both are read back by a daemon that starts.
//! While it runs it also remembers the flows that it wrote (`table.rs`) and the ports that it joined, and
//! makes again what is lost of them: at once when ovs-vswitchd was restarted, else when it is asked to look.
//!
//! **Changes of flows** go over a connection that is kept (`bridge.rs`, `channel.rs`): a service that moves
//! waits for them. What concerns the database is left to `ovs-vsctl` (`programs.rs`), which takes some
//! milliseconds and is called before or after.

mod bridge;
mod channel;
mod control;
mod flows;
mod joins;
mod openflow;
mod programs;
mod table;
mod tap;

use std::collections::{HashMap, HashSet};
use std::net::Ipv4Addr;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use async_trait::async_trait;
use rtnetlink::LinkUnspec;
use rtnetlink::packet_route::link::LinkAttribute;
use tokio_util::task::AbortOnDropHandle;

pub use self::openflow::read_anything;

use self::bridge::{Bridge, Memory};
use self::joins::Join;
use self::programs::Programs;
use super::kernel::{bring_vxlan_up, found};
use super::{Behind, Datapath};
use crate::netlink::{Link, Netlink, PortState};
use crate::netns::set_sysctl;
use crate::port::PORT_PREFIX;
use crate::subnet::GATEWAY_MAC;
use crate::{Mac, NetworkError, OverlayConfig, mac_to_string, nft};

/// The start of the name of the switch's end of a service's port, in place of the port's own.
const END_PREFIX: &str = "gwt";
/// Frames that a TAP device keeps for ovs-vswitchd: what several services send at once, or what comes while
/// it is busy for some milliseconds.
const QUEUE: u32 = 8192;
/// Open vSwitch's names for the datapath of its kernel module, and for its own.
const SYSTEM: &str = "system";
const USERSPACE: &str = "netdev";

/// Open vSwitch's bridge, up.
#[derive(Debug)]
pub(crate) struct OpenVswitch {
    netlink: Arc<Netlink>,
    programs: Programs,
    mtu: u32,
    index: u32,
    name: String,
    datapath: &'static str,
    vxlan: u32,
    vxlan_name: String,
    /// The name of the switch's end of the tunnel.
    tunnel_name: String,
    tunnel: Mutex<Tunnel>,
    bridge: Arc<Bridge>,
    /// Ports that were joined with their devices, and what indices the two had.
    joined: Mutex<HashMap<Join, [u32; 2]>>,
    _connected: AbortOnDropHandle<()>,
}

/// The switch's end of the tunnel.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Tunnel {
    /// Of its interface.
    index: u32,
    /// OpenFlow's number.
    number: u32,
}

impl OpenVswitch {
    pub(crate) async fn up(
        netlink: Arc<Netlink>,
        config: &OverlayConfig,
        mtu: u32,
        run: Option<PathBuf>,
    ) -> Result<Self, NetworkError> {
        let directory = control::directory(run.as_deref());
        let programs = Programs::new(run);
        programs.check().await?;
        let datapath = bring_switch_up(&netlink, &programs, config, mtu).await?;
        let index = set_up(&netlink, &config.bridge, mtu, Some(GATEWAY_MAC)).await?;
        let vxlan = bring_vxlan_up(&netlink, config, mtu, None, 0).await?;
        let memory = if datapath == SYSTEM { Memory::Corrected } else { Memory::Forgotten };
        let bridge = Arc::new(Bridge::connect(&config.bridge, memory, directory).await?);
        let connected = AbortOnDropHandle::new(tokio::spawn(Arc::clone(&bridge).keep_connected()));
        let switch = Self {
            netlink,
            programs,
            mtu,
            index,
            name: config.bridge.clone(),
            datapath,
            vxlan,
            vxlan_name: config.vxlan.clone(),
            tunnel_name: format!("{}-t", config.vxlan),
            tunnel: Mutex::new(Tunnel { index: 0, number: 0 }),
            bridge,
            joined: Mutex::default(),
            _connected: connected,
        };
        switch.make_tunnel(config.subnet.gateway()).await?;
        switch.join_again().await?;
        Ok(switch)
    }

    /// Makes the switch's end of the tunnel, or corrects it, and writes the flows that are always there.
    async fn make_tunnel(&self, gateway: Ipv4Addr) -> Result<(), NetworkError> {
        let tunnel = self.make_end(&self.tunnel_name).await?;
        *lock(&self.tunnel) = tunnel;
        let changes = flows::base(tunnel.number, gateway, GATEWAY_MAC);
        self.bridge.change("write the flows", changes).await
    }

    /// Makes a port of the switch's own, or corrects one that exists.
    async fn make_end(&self, end: &str) -> Result<Tunnel, NetworkError> {
        let action = format!("make {end} a port of {}", self.name);
        if self.netlink.link(end).await?.is_none() {
            // If it is a port, its interface was taken away from it, and does not come back.
            self.programs.change(&action, &["--if-exists", "del-port", &self.name, end]).await?;
        }
        let mtu = format!("mtu_request={}", self.mtu);
        let port = ["--may-exist", "add-port", &self.name, end];
        let settings = ["--", "set", "Interface", end, "type=internal", &mtu];
        self.programs.change(&action, &[port.as_slice(), &settings].concat()).await?;
        match (self.bridge.new_number(end).await?, self.netlink.link(end).await?) {
            (Some(number), Some(_)) => {
                set_sysctl(&format!("ipv6/conf/{end}/disable_ipv6"), "1")?;
                Ok(Tunnel { index: set_up(&self.netlink, end, self.mtu, None).await?, number })
            }
            _ => Err(self.not_plugged(end)),
        }
    }

    /// Joins the tunnel, and the ports that exist, with their devices; takes those ports out whose devices are
    /// gone, and their flows.
    async fn join_again(&self) -> Result<(), NetworkError> {
        let links = self.netlink.links().await?;
        let exists = |name: &str| links.iter().any(|link| link.name == name);
        let mut joins = vec![self.tunnel_join()];
        let (mut gone, mut arguments) = (String::new(), Vec::new());
        let ports = self.programs.ports(&self.name).await?;
        for end in &ports {
            let Some(port) = port_of(end) else { continue };
            if exists(&port) && exists(end) {
                if links.iter().any(|link| link.name == *end && link.mtu != self.mtu) {
                    self.make_end(end).await?;
                }
                joins.push(Join::new(end, port));
            } else {
                gone.push_str(&Join::undo(end));
                arguments.extend(["--", "--if-exists", "del-port", &self.name, end]);
            }
        }
        if !arguments.is_empty() {
            self.programs.change("remove ports that are gone", &arguments[1..]).await?;
        }
        let ends = joins.iter().map(|join| join.end.clone()).collect();
        self.bridge.forget_all_but(&ends).await?;
        if !gone.is_empty() {
            nft::run("remove joins of ports that are gone", &gone).await?;
        }
        self.join(joins).await
    }

    /// Joins ports with their devices, as if they had never been.
    async fn join(&self, joins: Vec<Join>) -> Result<(), NetworkError> {
        let links = self.netlink.links().await?;
        let index = |name: &str| links.iter().find(|link| link.name == name).map_or(0, |link| link.index);
        let indices: Vec<_> = joins.iter().map(|join| [index(&join.end), index(&join.device)]).collect();
        let script: String = joins.iter().map(Join::script).collect();
        nft::run("join the switch with its devices", &script).await?;
        lock(&self.joined).extend(joins.into_iter().zip(indices));
        Ok(())
    }

    fn tunnel_join(&self) -> Join {
        Join::new(&self.tunnel_name, &self.vxlan_name)
    }

    /// The ports that were joined with their devices and are not any more, though both are there.
    async fn parted(&self) -> Result<Vec<Join>, NetworkError> {
        let links = self.netlink.links().await?;
        let index = |name: &str| links.iter().find(|link| link.name == name).map(|link| link.index);
        let joined = lock(&self.joined).clone();
        let there = joined.into_iter().filter_map(|(join, indices)| {
            let now = [index(&join.end)?, index(&join.device)?];
            Some((join, now == indices))
        });
        // Rules are of the devices that they were made for, whatever is called so now.
        let (same, other): (Vec<_>, Vec<_>) = there.partition(|(_, same)| *same);
        let lost = joins::lost(same.into_iter().map(|(join, _)| join).collect()).await?;
        Ok(other.into_iter().map(|(join, _)| join).chain(lost).collect())
    }

    async fn need_number(&self, port: &Link) -> Result<u32, NetworkError> {
        let end = end_of(&port.name);
        self.bridge.number(&end).await?.ok_or_else(|| self.not_plugged(&end))
    }

    fn not_plugged(&self, end: &str) -> NetworkError {
        let message = "it could not set up the interface; its log says why".to_owned();
        NetworkError::OpenVswitch { action: format!("make {end} a port of {}", self.name), message }
    }

    /// The bridge's own interface, if it is there; it must be the one that was brought up.
    async fn own(&self) -> Result<Option<Link>, NetworkError> {
        match self.netlink.link(&self.name).await? {
            Some(link) if link.index != self.index => {
                Err(NetworkError::Replaced { interface: self.name.clone() })
            }
            // Its number is the kernel module's to choose: what goes by it would have to be made anew.
            None if self.datapath == SYSTEM => Err(NetworkError::SwitchGone { bridge: self.name.clone() }),
            link => Ok(link),
        }
    }

    /// Makes the bridge again, with the interface's index that it had. All its other ports are gone then.
    async fn make_bridge_again(&self, config: &OverlayConfig, mtu: u32) -> Result<(), NetworkError> {
        self.bridge.start_over().await;
        lock(&self.joined).clear();
        let name = self.name.as_str();
        let action = format!("make the bridge {name} again");
        self.programs.change(&action, &["--if-exists", "del-br", name]).await?;
        tap::make(name, self.index).map_err(NetworkError::system(format!("make the TAP device {name}")))?;
        if let Err(error) = make_bridge(&self.programs, config, mtu, self.datapath).await {
            // It would be in the way of the next attempt.
            self.netlink.delete_link(name).await?;
            return Err(error);
        }
        set_sysctl(&format!("ipv6/conf/{name}/disable_ipv6"), "1")
    }
}

#[async_trait]
impl Datapath for OpenVswitch {
    fn bridge(&self) -> u32 {
        self.index
    }

    fn vxlan(&self) -> u32 {
        self.vxlan
    }

    async fn passages(&self, port: &str) -> Result<Vec<u32>, NetworkError> {
        let end = self.netlink.link(&end_of(port)).await?;
        let tunnel = lock(&self.tunnel).index;
        Ok(end.map(|link| link.index).into_iter().chain([tunnel]).collect())
    }

    fn entrances(&self) -> Vec<u32> {
        if self.datapath == SYSTEM { vec![self.index, lock(&self.tunnel).index] } else { Vec::new() }
    }

    async fn plug(&self, port: &Link) -> Result<(), NetworkError> {
        let end = end_of(&port.name);
        self.netlink.set_up(port.index, &port.name).await?;
        // Without flows it is closed.
        let number = self.make_end(&end).await?.number;
        // An earlier port may have had the number.
        self.bridge.change(&format!("close {end}"), flows::forget(number)).await?;
        self.join(vec![Join::new(&end, &port.name)]).await
    }

    async fn unplug(&self, port: &str) -> Result<(), NetworkError> {
        let end = end_of(port);
        lock(&self.joined).remove(&Join::new(&end, port));
        if let Some(number) = self.bridge.number(&end).await? {
            self.bridge.change(&format!("forget {end}"), flows::forget(number)).await?;
        }
        let arguments = ["--if-exists", "del-port", &self.name, &end];
        self.programs.change(&format!("remove {end} from {}", self.name), &arguments).await?;
        self.bridge.forget_number(&end).await;
        nft::run(&format!("part {end} and {port}"), &Join::undo(&end)).await
    }

    async fn is_plugged(&self, port: &Link) -> Result<bool, NetworkError> {
        let end = end_of(&port.name);
        Ok(self.bridge.number(&end).await?.is_some() && self.netlink.link(&end).await?.is_some())
    }

    async fn open_ports(&self, among: &[Link]) -> Result<HashSet<String>, NetworkError> {
        let open = self.bridge.open_ports().await?;
        let is_open = |link: &&Link| open.contains(&end_of(&link.name));
        Ok(among.iter().filter(is_open).map(|link| link.name.clone()).collect())
    }

    async fn set_port(&self, port: &Link, state: PortState) -> Result<(), NetworkError> {
        let number = self.need_number(port).await?;
        let (action, changes) = match state {
            PortState::Open => ("open", flows::open(number)),
            PortState::Closed => ("close", flows::close(number)),
        };
        self.bridge.change(&format!("{action} {}", port.name), changes).await
    }

    async fn set_entry(&self, address: Ipv4Addr, mac: Mac, behind: Behind<'_>) -> Result<(), NetworkError> {
        let changes = match behind {
            Behind::Port(link) => flows::entry_here(address, mac, self.need_number(link).await?),
            Behind::Tunnel => flows::entry_there(address, mac, lock(&self.tunnel).number),
        };
        self.bridge.change(&format!("add the forwarding entry of {address}"), changes).await
    }

    async fn delete_tunnel_entry(&self, address: Ipv4Addr, mac: Mac) -> Result<(), NetworkError> {
        let changes = flows::delete_entry(address, mac, lock(&self.tunnel).number);
        self.bridge.change(&format!("remove the forwarding entry of {address}"), changes).await
    }

    async fn check_unchanged(&self) -> Result<(), NetworkError> {
        // With the userspace datapath it is found and mended as the kernel's bridge is.
        if self.datapath == SYSTEM { self.own().await.map(drop) } else { Ok(()) }
    }

    async fn damage(&self) -> Result<Option<String>, NetworkError> {
        let mut found = Vec::new();
        match self.own().await? {
            // With all that is in it.
            None => return Ok(Some(format!("the bridge {} is missing", self.name))),
            Some(link) if !link.up => found.push(format!("the bridge {} is down", self.name)),
            Some(_) => {}
        }
        let vxlan = &self.vxlan_name;
        match self.netlink.link(vxlan).await? {
            None => found.push(format!("the VXLAN device {vxlan} is missing")),
            Some(link) if link.index != self.vxlan => {
                return Err(NetworkError::Replaced { interface: vxlan.clone() });
            }
            Some(link) if !link.up => found.push(format!("the VXLAN device {vxlan} is down")),
            Some(_) => {}
        }
        let (name, tunnel) = (&self.tunnel_name, *lock(&self.tunnel));
        let number = self.bridge.number(name).await?;
        match self.netlink.link(name).await? {
            None => found.push(format!("the tunnel's port {name} is missing")),
            Some(link) if link.index != tunnel.index || number != Some(tunnel.number) => {
                found.push(format!("the tunnel's port {name} is another one"));
            }
            Some(link) if !link.up => found.push(format!("the tunnel's port {name} is down")),
            Some(_) => {}
        }
        found.extend(self.bridge.damage().await?);
        let parted: Vec<_> = self
            .parted()
            .await?
            .into_iter()
            .map(|join| format!("{} and {}", join.end, join.device))
            .collect();
        if !parted.is_empty() {
            found.push(format!("not joined are {}", parted.join("; ")));
        }
        Ok((!found.is_empty()).then(|| found.join(", ")))
    }

    async fn mend(&self, config: &OverlayConfig, mtu: u32) -> Result<(), NetworkError> {
        if self.own().await?.is_none() {
            self.make_bridge_again(config, mtu).await?;
        }
        if set_up(&self.netlink, &self.name, mtu, Some(GATEWAY_MAC)).await? != self.index {
            return Err(NetworkError::Replaced { interface: self.name.clone() });
        }
        let vxlan = bring_vxlan_up(&self.netlink, config, mtu, None, self.vxlan).await?;
        if vxlan != self.vxlan {
            return Err(NetworkError::Replaced { interface: self.vxlan_name.clone() });
        }
        self.make_tunnel(config.subnet.gateway()).await?;
        self.bridge.mend().await?;
        // The tunnel's in any case: its rules may be those of a device that had the same index.
        let mut joins = self.parted().await?;
        joins.push(self.tunnel_join());
        self.join(joins).await
    }

    async fn down(&self) -> Result<(), NetworkError> {
        let arguments = ["--if-exists", "del-br", &self.name];
        self.programs.change(&format!("remove the bridge {}", self.name), &arguments).await?;
        self.netlink.delete_link(&self.vxlan_name).await?;
        let action = format!("part {} and {}", self.tunnel_name, self.vxlan_name);
        nft::run(&action, &Join::undo(&self.tunnel_name)).await
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // Each change is one call.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Removes the bridge, where there is one, and the VXLAN device.
pub(super) async fn clear(
    netlink: &Netlink,
    config: &OverlayConfig,
    run: Option<PathBuf>,
) -> Result<(), NetworkError> {
    let bridge = &config.bridge;
    let arguments = ["--if-exists", "del-br", bridge];
    Programs::new(run).change(&format!("remove the bridge {bridge}"), &arguments).await?;
    netlink.delete_link(&config.vxlan).await
}

/// The switch's end of a service's port.
fn end_of(port: &str) -> String {
    format!("{END_PREFIX}{}", port.strip_prefix(PORT_PREFIX).unwrap_or(port))
}

/// The service's port that this is the switch's end of, if it is one.
fn port_of(end: &str) -> Option<String> {
    end.strip_prefix(END_PREFIX).map(|rest| format!("{PORT_PREFIX}{rest}"))
}

/// Makes the bridge, or corrects one that exists; which datapath it has.
async fn bring_switch_up(
    netlink: &Netlink,
    programs: &Programs,
    config: &OverlayConfig,
    mtu: u32,
) -> Result<&'static str, NetworkError> {
    let name = config.bridge.as_str();
    let action = format!("make the bridge {name}");
    let bridges = programs.read(&action, &["list-br"]).await?;
    let mut exists = bridges.lines().any(|bridge| bridge == name);
    match netlink.link(name).await? {
        Some(link) if !exists => {
            return Err(NetworkError::InterfaceInTheWay {
                interface: link.name.clone(),
                found: found(&link),
                wanted: "a bridge of Open vSwitch".into(),
            });
        }
        // Its own interface was taken away from it, and does not come back.
        None if exists => {
            programs.change(&action, &["del-br", name]).await?;
            exists = false;
        }
        _ => {}
    }
    // What the kernel can do is tried: Open vSwitch does not tell.
    let datapath = programs.datapath(name).await?.filter(|_| exists);
    let datapaths = match datapath.as_deref() {
        None => vec![SYSTEM, USERSPACE],
        Some(USERSPACE) => vec![USERSPACE],
        Some(_) => vec![SYSTEM],
    };
    for datapath in datapaths {
        make_bridge(programs, config, mtu, datapath).await?;
        if netlink.link(name).await?.is_some() {
            if !exists {
                // An interface has no IPv6 but what it is given (ipv6.rs).
                set_sysctl(&format!("ipv6/conf/{name}/disable_ipv6"), "1")?;
            }
            return Ok(datapath);
        }
    }
    let message = "the bridge's interface is not here: its ovs-vswitchd runs in another network namespace, or \
                   could not make it (its log says why)";
    Err(NetworkError::OpenVswitch { action, message: message.into() })
}

async fn make_bridge(
    programs: &Programs,
    config: &OverlayConfig,
    mtu: u32,
    datapath: &str,
) -> Result<(), NetworkError> {
    let name = config.bridge.as_str();
    let mac = format!("other_config:hwaddr=\"{}\"", mac_to_string(GATEWAY_MAC));
    let (mtu, kind) = (format!("mtu_request={mtu}"), format!("datapath_type={datapath}"));
    let bridge = ["--may-exist", "add-br", name, "--", "set", "Bridge", name, &kind, &mac];
    // Secure: without flows no frame passes.
    let settings = ["fail_mode=secure", "protocols=OpenFlow13,OpenFlow14"];
    let interface = ["--", "set", "Interface", name, &mtu];
    programs
        .change(&format!("make the bridge {name}"), &[bridge.as_slice(), &settings, &interface].concat())
        .await
}

/// Sets up an interface of the switch's own; its index.
async fn set_up(netlink: &Netlink, name: &str, mtu: u32, mac: Option<Mac>) -> Result<u32, NetworkError> {
    let index = netlink.need_link(name).await?.index;
    let mut message = LinkUnspec::new_with_index(index)
        .mtu(mtu)
        .append_extra_attribute(LinkAttribute::TxQueueLen(QUEUE))
        .up();
    if let Some(mac) = mac {
        message = message.address(mac.to_vec());
    }
    let changed = netlink.handle.link().change(message.build()).execute().await;
    changed.map_err(NetworkError::kernel(format!("set up the interface {name}")))?;
    Ok(index)
}

/// Says which Open vSwitch serves the bridge and how, for `godwit doctor`.
pub(crate) async fn examine(bridge: &str, run: Option<PathBuf>) -> Result<String, NetworkError> {
    let directory = control::directory(run.as_deref());
    let programs = Programs::new(run);
    let version = programs.version().await?;
    programs.check().await?;
    if !Bridge::connect(bridge, Memory::Forgotten, directory).await?.has_base().await {
        return Err(NetworkError::SwitchGone { bridge: bridge.to_owned() });
    }
    let datapath = programs.datapath(bridge).await?;
    Ok(match datapath.as_deref() {
        Some(SYSTEM) => format!("{version}, with its kernel module"),
        _ => format!("{version}, with its userspace datapath: slower than the kernel's bridge"),
    })
}
