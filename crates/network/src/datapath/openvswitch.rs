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
//! database, what is open and where services are in the flows. Both are read back. Flows may be gone when
//! ovs-vswitchd was restarted. With the userspace datapath `gw0` loses its carrier meanwhile, by which that
//! is noticed; the daemon then ends and, started again, sets all up anew.

mod flows;
mod programs;

use std::collections::{HashMap, HashSet};
use std::net::Ipv4Addr;
use std::path::PathBuf;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use async_trait::async_trait;
use rtnetlink::LinkUnspec;
use rtnetlink::packet_route::link::LinkAttribute;

use self::programs::Programs;
use super::kernel::{bring_vxlan_up, found};
use super::{Behind, Datapath};
use crate::endpoint::PORT_PREFIX;
use crate::netlink::{Link, Netlink, PortState};
use crate::netns::set_sysctl;
use crate::overlay::GATEWAY_MAC;
use crate::{Mac, NetworkError, OverlayConfig, mac_to_string, publish};

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
    bridge: u32,
    bridge_name: String,
    vxlan: u32,
    vxlan_name: String,
    /// The switch's end of the tunnel: its name, index and OpenFlow port number.
    tunnel_name: String,
    tunnel_index: u32,
    tunnel: u32,
    /// How often the bridge's interface had got or lost its carrier when the flows were last looked at.
    carrier_changes: AtomicU32,
    /// OpenFlow port numbers by the names of the switch's interfaces.
    numbers: Mutex<HashMap<String, u32>>,
}

impl OpenVswitch {
    pub(crate) async fn up(
        netlink: Arc<Netlink>,
        config: &OverlayConfig,
        mtu: u32,
        run: Option<PathBuf>,
    ) -> Result<Self, NetworkError> {
        let programs = Programs::new(run);
        programs.check().await?;
        bring_switch_up(&netlink, &programs, config, mtu).await?;
        let bridge = set_up(&netlink, &config.bridge, mtu, Some(GATEWAY_MAC)).await?;
        let vxlan = bring_vxlan_up(&netlink, config, mtu, None, 0).await?;
        let mut switch = Self {
            netlink,
            programs,
            mtu,
            bridge,
            bridge_name: config.bridge.clone(),
            vxlan,
            vxlan_name: config.vxlan.clone(),
            tunnel_name: format!("{}-t", config.vxlan),
            tunnel_index: 0,
            tunnel: 0,
            carrier_changes: AtomicU32::new(u32::MAX),
            numbers: Mutex::default(),
        };
        switch.read_numbers().await?;
        (switch.tunnel_index, switch.tunnel) = switch.make_end(&switch.tunnel_name).await?;
        switch.join_again().await?;
        switch.write_flows(config.subnet.gateway()).await?;
        Ok(switch)
    }

    /// Makes a port of the switch's own, or corrects one that exists; its index and its number.
    async fn make_end(&self, end: &str) -> Result<(u32, u32), NetworkError> {
        let (bridge, action) = (&self.bridge_name, format!("make {end} a port of {}", self.bridge_name));
        let known = self.lock().contains_key(end);
        if known && self.netlink.link(end).await?.is_none() {
            // Its interface was taken away from it, and does not come back.
            self.programs.change(&action, &["--if-exists", "del-port", bridge, end]).await?;
            self.lock().remove(end);
        }
        let mtu = format!("mtu_request={}", self.mtu);
        let port = ["--may-exist", "add-port", bridge, end];
        let settings = ["--", "set", "Interface", end, "type=internal", &mtu];
        self.programs.change(&action, &[port.as_slice(), &settings].concat()).await?;
        self.read_numbers().await?;
        match (self.number(end), self.netlink.link(end).await?) {
            (Some(number), Some(_)) => {
                set_sysctl(&format!("ipv6/conf/{end}/disable_ipv6"), "1")?;
                Ok((set_up(&self.netlink, end, self.mtu, None).await?, number))
            }
            _ => Err(self.not_plugged(end)),
        }
    }

    /// Joins the tunnel, and the ports that exist, with their devices; takes those ports out whose devices are
    /// gone.
    async fn join_again(&self) -> Result<(), NetworkError> {
        let links = self.netlink.links().await?;
        let exists = |name: &str| links.iter().any(|link| link.name == name);
        let ends: Vec<String> = self.lock().keys().filter(|name| port_of(name).is_some()).cloned().collect();
        let mut script = joined(&self.tunnel_name, &self.vxlan_name);
        let (mut gone, mut arguments) = (String::new(), Vec::new());
        for end in &ends {
            match port_of(end).filter(|port| exists(port) && exists(end)) {
                Some(port) => {
                    if links.iter().any(|link| link.name == *end && link.mtu != self.mtu) {
                        self.make_end(end).await?;
                    }
                    script.push_str(&joined(end, &port));
                }
                None => {
                    gone.push_str(&parted(end));
                    arguments.extend(["--", "--if-exists", "del-port", self.bridge_name.as_str(), end]);
                }
            }
        }
        if !arguments.is_empty() {
            self.programs.change("remove ports that are gone", &arguments[1..]).await?;
            self.read_numbers().await?;
        }
        publish::run("join the switch with its devices", &(script + &gone)).await
    }

    /// Writes the flows that are always there, and removes those of ports that are gone: their numbers
    /// will be others'.
    async fn write_flows(&self, gateway: Ipv4Addr) -> Result<(), NetworkError> {
        let mut text = flows::base(self.tunnel, gateway, GATEWAY_MAC);
        let ours = |name: &str| port_of(name).is_some() || name == self.tunnel_name;
        let there: HashSet<u32> =
            self.lock().iter().filter(|(name, _)| ours(name)).map(|(_, number)| *number).collect();
        let open = flows::open_ports(&self.programs.flows(&self.bridge_name, "table=0").await?);
        text.extend(open.difference(&there).map(|gone| flows::forget(*gone)));
        self.set_flows("write the flows", &text).await
    }

    async fn set_flows(&self, action: &str, text: &str) -> Result<(), NetworkError> {
        self.programs.set_flows(action, &self.bridge_name, text).await
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<String, u32>> {
        // Each change is one call.
        self.numbers.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn number(&self, end: &str) -> Option<u32> {
        self.lock().get(end).copied().filter(|number| *number > 0)
    }

    async fn find_number(&self, end: &str) -> Result<Option<u32>, NetworkError> {
        if let Some(number) = self.number(end) {
            return Ok(Some(number));
        }
        self.read_numbers().await?;
        Ok(self.number(end))
    }

    async fn need_number(&self, port: &Link) -> Result<u32, NetworkError> {
        let end = end_of(&port.name);
        self.find_number(&end).await?.ok_or_else(|| self.not_plugged(&end))
    }

    /// Drops ports that are gone and adds those that are not known. Those that are known stay as they are:
    /// they may be newer than what was read.
    async fn read_numbers(&self) -> Result<(), NetworkError> {
        let read = self.programs.numbers().await?;
        let mut numbers = self.lock();
        numbers.retain(|end, number| *number > 0 && read.contains_key(end));
        for (end, number) in read {
            numbers.entry(end).or_insert(number);
        }
        Ok(())
    }

    fn not_plugged(&self, end: &str) -> NetworkError {
        let message = "it could not set up the interface; its log says why".to_owned();
        NetworkError::OpenVswitch { action: format!("make {end} a port of {}", self.bridge_name), message }
    }
}

#[async_trait]
impl Datapath for OpenVswitch {
    fn bridge(&self) -> u32 {
        self.bridge
    }

    fn vxlan(&self) -> u32 {
        self.vxlan
    }

    async fn passages(&self, port: &str) -> Result<Vec<u32>, NetworkError> {
        let end = self.netlink.link(&end_of(port)).await?;
        Ok(end.map(|link| link.index).into_iter().chain([self.tunnel_index]).collect())
    }

    async fn plug(&self, port: &Link) -> Result<(), NetworkError> {
        let end = end_of(&port.name);
        self.netlink.set_up(port.index, &port.name).await?;
        // Without flows it is closed.
        let (_, number) = self.make_end(&end).await?;
        // An earlier port may have had the number.
        self.set_flows(&format!("close {end}"), &flows::forget(number)).await?;
        publish::run(&format!("join {end} and {}", port.name), &joined(&end, &port.name)).await
    }

    async fn unplug(&self, port: &str) -> Result<(), NetworkError> {
        let end = end_of(port);
        if let Some(number) = self.find_number(&end).await? {
            self.set_flows(&format!("forget {end}"), &flows::forget(number)).await?;
        }
        let arguments = ["--if-exists", "del-port", &self.bridge_name, &end];
        self.programs.change(&format!("remove {end} from {}", self.bridge_name), &arguments).await?;
        self.lock().remove(&end);
        publish::run(&format!("part {end} and {port}"), &parted(&end)).await
    }

    async fn is_plugged(&self, port: &Link) -> Result<bool, NetworkError> {
        let end = end_of(&port.name);
        Ok(self.find_number(&end).await?.is_some() && self.netlink.link(&end).await?.is_some())
    }

    async fn open_ports(&self, among: &[Link]) -> Result<HashSet<String>, NetworkError> {
        self.read_numbers().await?;
        let open = flows::open_ports(&self.programs.flows(&self.bridge_name, "table=0").await?);
        let is_open = |link: &&Link| self.number(&end_of(&link.name)).is_some_and(|n| open.contains(&n));
        Ok(among.iter().filter(is_open).map(|link| link.name.clone()).collect())
    }

    async fn set_port(&self, port: &Link, state: PortState) -> Result<(), NetworkError> {
        let number = self.need_number(port).await?;
        match state {
            PortState::Open => self.set_flows(&format!("open {}", port.name), &flows::open(number)).await,
            PortState::Closed => self.set_flows(&format!("close {}", port.name), &flows::close(number)).await,
        }
    }

    async fn set_entry(&self, address: Ipv4Addr, mac: Mac, behind: Behind<'_>) -> Result<(), NetworkError> {
        let text = match behind {
            Behind::Port(link) => flows::entry_here(address, mac, self.need_number(link).await?),
            Behind::Tunnel => flows::entry_there(address, mac, self.tunnel),
        };
        self.set_flows(&format!("enter where {address} is"), &text).await
    }

    async fn delete_tunnel_entry(&self, address: Ipv4Addr, mac: Mac) -> Result<(), NetworkError> {
        let text = flows::delete_entry(address, mac, self.tunnel);
        self.set_flows(&format!("forget where {address} was"), &text).await
    }

    async fn check_unchanged(&self) -> Result<(), NetworkError> {
        let gone = || NetworkError::SwitchGone { bridge: self.bridge_name.clone() };
        let link = self.netlink.link(&self.bridge_name).await?;
        let link = link.filter(|link| link.index == self.bridge).ok_or_else(gone)?;
        if self.carrier_changes.swap(link.carrier_changes, Ordering::Relaxed) == link.carrier_changes {
            return Ok(());
        }
        if flows::is_empty(&self.programs.flows(&self.bridge_name, "table=0").await?) {
            return Err(gone());
        }
        Ok(())
    }

    async fn damage(&self) -> Result<Option<String>, NetworkError> {
        // Flows and ports are set up anew by the daemon's next life. That the carrier was lost is not
        // noted here: who watches the switch is to find it.
        let gone = || NetworkError::SwitchGone { bridge: self.bridge_name.clone() };
        let link = self.netlink.link(&self.bridge_name).await?;
        let link = link.filter(|link| link.index == self.bridge).ok_or_else(gone)?;
        let looked_at = self.carrier_changes.load(Ordering::Relaxed) == link.carrier_changes;
        if !looked_at && flows::is_empty(&self.programs.flows(&self.bridge_name, "table=0").await?) {
            return Err(gone());
        }
        let vxlan = self.netlink.link(&self.vxlan_name).await?;
        if vxlan.is_none_or(|link| link.index != self.vxlan || !link.up) {
            return Err(NetworkError::Replaced { interface: self.vxlan_name.clone() });
        }
        Ok(None)
    }

    async fn mend(&self, _config: &OverlayConfig, _mtu: u32) -> Result<(), NetworkError> {
        // Nothing is found that could be.
        Ok(())
    }

    async fn down(&self) -> Result<(), NetworkError> {
        let arguments = ["--if-exists", "del-br", &self.bridge_name];
        self.programs.change(&format!("remove the bridge {}", self.bridge_name), &arguments).await?;
        self.netlink.delete_link(&self.vxlan_name).await?;
        let action = format!("part {} and {}", self.tunnel_name, self.vxlan_name);
        publish::run(&action, &parted(&self.tunnel_name)).await
    }
}

/// The switch's end of a service's port.
fn end_of(port: &str) -> String {
    format!("{END_PREFIX}{}", port.strip_prefix(PORT_PREFIX).unwrap_or(port))
}

/// The service's port that this is the switch's end of, if it is one.
fn port_of(end: &str) -> Option<String> {
    end.strip_prefix(END_PREFIX).map(|rest| format!("{PORT_PREFIX}{rest}"))
}

/// Has every frame that comes in at one of the two go out at the other. Each statement is harmless when it
/// is repeated; a chain goes with its device.
fn joined(end: &str, device: &str) -> String {
    format!(
        r#"add table netdev {end}
add chain netdev {end} in {{ type filter hook ingress device "{device}" priority 0; }}
add chain netdev {end} out {{ type filter hook ingress device "{end}" priority 0; }}
flush chain netdev {end} in
flush chain netdev {end} out
add rule netdev {end} in fwd to "{end}"
add rule netdev {end} out fwd to "{device}"
"#
    )
}

/// Undoes [`joined`], and does nothing where that was not done.
fn parted(end: &str) -> String {
    format!("add table netdev {end}\ndelete table netdev {end}\n")
}

/// Makes the bridge, or corrects one that exists.
async fn bring_switch_up(
    netlink: &Netlink,
    programs: &Programs,
    config: &OverlayConfig,
    mtu: u32,
) -> Result<(), NetworkError> {
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
    let datapaths = datapath.map_or_else(|| vec![SYSTEM.to_owned(), USERSPACE.to_owned()], |kind| vec![kind]);
    let mac = format!("other_config:hwaddr=\"{}\"", mac_to_string(GATEWAY_MAC));
    let mtu = format!("mtu_request={mtu}");
    for datapath in datapaths {
        let kind = format!("datapath_type={datapath}");
        let bridge = ["--may-exist", "add-br", name, "--", "set", "Bridge", name, &kind, &mac];
        // Secure: without flows no frame passes.
        let settings = ["fail_mode=secure", "protocols=OpenFlow13,OpenFlow14"];
        let interface = ["--", "set", "Interface", name, &mtu];
        programs.change(&action, &[bridge.as_slice(), &settings, &interface].concat()).await?;
        if netlink.link(name).await?.is_some() {
            if !exists {
                // An interface has no IPv6 but what it is given (ipv6.rs).
                set_sysctl(&format!("ipv6/conf/{name}/disable_ipv6"), "1")?;
            }
            return Ok(());
        }
    }
    let message = "the bridge's interface is not here: its ovs-vswitchd runs in another network namespace, or \
                   could not make it (its log says why)";
    Err(NetworkError::OpenVswitch { action, message: message.into() })
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
    let programs = Programs::new(run);
    let version = programs.version().await?;
    programs.check().await?;
    if flows::is_empty(&programs.flows(bridge, "table=0").await?) {
        return Err(NetworkError::SwitchGone { bridge: bridge.to_owned() });
    }
    let datapath = programs.datapath(bridge).await?;
    Ok(match datapath.as_deref() {
        Some(SYSTEM) => format!("{version}, with its kernel module"),
        _ => format!("{version}, with its userspace datapath: slower than the kernel's bridge"),
    })
}
