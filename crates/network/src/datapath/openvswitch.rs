//! Open vSwitch, driven by its own programs.
//!
//! ```text
//!                      bridge of Open vSwitch
//!   gw0 (its own) ──┬──────────────────────────┐
//!   gws… (veth)   ──┤ flows (flows.rs)         ├─ gwvx0-o ═══ gwvx0-i ◄─nftables─► gwvx0 ── nodes
//!   gws… (veth)   ──┘                          │        (veth)                    (VXLAN)
//!                      ────────────────────────┘
//! ```
//!
//! **The datapath** is the kernel's where the kernel has the module, else ovs-vswitchd's own (`netdev`),
//! which takes frames from interfaces by packet sockets, and from `gw0`, a TAP device then.
//!
//! **The tunnel** is the kernel's VXLAN device with godwit's entries, as it is beside the kernel's bridge.
//! Open vSwitch's own tunnels would need, with the userspace datapath, the uplink as a port and its
//! address on a bridge: the node would be cut off whenever ovs-vswitchd is.
//!
//! **Whole frames.** The userspace datapath cannot carry a frame of several segments, or one whose check sum
//! is still to be made. What services send is whole once their interfaces do not offload. But what comes
//! out of the VXLAN device may have been put together by the uplink's receive offload, which concerns the
//! whole machine. So it comes by a veth that does not offload either: the kernel cuts what crosses it. Two
//! rules of nftables hand each frame that comes in at the one device on to the other, ahead of everything
//! else. (A bridge of the kernel between them would show the frames to packet filters and to connection
//! tracking, where bridged frames are: a second time, as they were sent by a process in between.)
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
use rtnetlink::packet_route::link::{InfoKind, LinkAttribute};
use rtnetlink::{LinkMessageBuilder, LinkUnspec, LinkVeth};

use self::programs::Programs;
use super::kernel::{bring_vxlan_up, found, need_kind};
use super::{Behind, Datapath};
use crate::endpoint::PORT_PREFIX;
use crate::netlink::{Link, Netlink, PortState};
use crate::netns::set_sysctl;
use crate::overlay::GATEWAY_MAC;
use crate::{Mac, NetworkError, OverlayConfig, mac_to_string, offload, publish};

/// Frames that the gateway's TAP device keeps for ovs-vswitchd: some more than it takes in one go, as
/// when what was held for a service goes on.
const TAP_QUEUE: u32 = 8192;
/// Open vSwitch's names for the datapath of its kernel module, and for its own.
const SYSTEM: &str = "system";
const USERSPACE: &str = "netdev";
/// Answer no ARP request (`arp_ignore` in the kernel's ip-sysctl): what comes by a port of the switch is
/// the switch's business, but the kernel sees it too where the switch is not the kernel's.
const NEVER: &str = "8";

/// Open vSwitch's bridge, up.
#[derive(Debug)]
pub(crate) struct OpenVswitch {
    netlink: Arc<Netlink>,
    programs: Programs,
    bridge: u32,
    bridge_name: String,
    vxlan: u32,
    vxlan_name: String,
    join: Join,
    /// The tunnel's OpenFlow port number.
    tunnel: u32,
    userspace: bool,
    /// How often the bridge's interface had got or lost its carrier when the flows were last looked at.
    carrier_changes: AtomicU32,
    /// OpenFlow port numbers by the names of the interfaces.
    numbers: Mutex<HashMap<String, u32>>,
}

/// What lies between the VXLAN device and the switch.
#[derive(Debug)]
struct Join {
    /// The end of the veth that is at the VXLAN device.
    inner_name: String,
    /// The end that is a port of the switch.
    outer_name: String,
    /// The indices of both ends.
    ends: [u32; 2],
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
        let userspace = bring_switch_up(&netlink, &programs, config, mtu).await?;
        let bridge = bring_gateway_up(&netlink, &config.bridge, mtu).await?;
        let join = Join::up(&netlink, &programs, config, mtu, userspace).await?;
        let vxlan = bring_vxlan_up(&netlink, config, mtu, None, 0).await?;
        join.hand_on(&config.vxlan).await?;

        let numbers = plug_tunnel(&netlink, &programs, config, &join.outer_name).await?;
        let tunnel = numbers.get(&join.outer_name).copied().unwrap_or(0);
        let switch = Self {
            netlink,
            programs,
            bridge,
            bridge_name: config.bridge.clone(),
            vxlan,
            vxlan_name: config.vxlan.clone(),
            join,
            tunnel,
            userspace,
            carrier_changes: AtomicU32::new(u32::MAX),
            numbers: Mutex::new(numbers),
        };
        switch.write_flows(config.subnet.gateway()).await?;
        Ok(switch)
    }

    /// Writes the flows that are always there, and removes those of ports that are gone: their numbers
    /// will be others'.
    async fn write_flows(&self, gateway: Ipv4Addr) -> Result<(), NetworkError> {
        let mut text = flows::base(self.tunnel, gateway, GATEWAY_MAC);
        let ours = |name: &str| name.starts_with(PORT_PREFIX) || name == self.join.outer_name;
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

    fn number(&self, port: &str) -> Option<u32> {
        self.lock().get(port).copied().filter(|number| *number > 0)
    }

    async fn find_number(&self, port: &str) -> Result<Option<u32>, NetworkError> {
        if let Some(number) = self.number(port) {
            return Ok(Some(number));
        }
        self.read_numbers().await?;
        Ok(self.number(port))
    }

    async fn need_number(&self, port: &Link) -> Result<u32, NetworkError> {
        self.find_number(&port.name).await?.ok_or_else(|| self.not_plugged(&port.name))
    }

    /// Drops ports that are gone and adds those that are not known. Those that are known stay as they are:
    /// they may be newer than what was read.
    async fn read_numbers(&self) -> Result<(), NetworkError> {
        let read = self.programs.numbers().await?;
        let mut numbers = self.lock();
        numbers.retain(|port, _| read.contains_key(port));
        for (port, number) in read {
            numbers.entry(port).or_insert(number);
        }
        Ok(())
    }

    fn not_plugged(&self, port: &str) -> NetworkError {
        let message = "it could not set up the interface; its log says why".to_owned();
        NetworkError::OpenVswitch { action: format!("make {port} a port of {}", self.bridge_name), message }
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

    fn passages(&self) -> &[u32] {
        &self.join.ends
    }

    fn wants_whole_frames(&self) -> bool {
        self.userspace
    }

    async fn plug(&self, port: &Link) -> Result<(), NetworkError> {
        let name = port.name.as_str();
        set_sysctl(&format!("ipv4/conf/{name}/arp_ignore"), NEVER)?;
        self.netlink.set_up(port.index, name).await?;
        let action = format!("make {name} a port of {}", self.bridge_name);
        // Without flows it is closed.
        self.programs.change(&action, &["add-port", &self.bridge_name, name]).await?;
        let numbers = self.programs.numbers().await?;
        let Some(number) = numbers.get(name).copied().filter(|number| *number > 0) else {
            return Err(self.not_plugged(name));
        };
        self.lock().insert(name.to_owned(), number);
        // An earlier port may have had the number.
        self.set_flows(&action, &flows::forget(number)).await
    }

    async fn unplug(&self, port: &str) -> Result<(), NetworkError> {
        if let Some(number) = self.number(port) {
            self.set_flows(&format!("forget {port}"), &flows::forget(number)).await?;
        }
        let arguments = ["--if-exists", "del-port", &self.bridge_name, port];
        self.programs.change(&format!("remove {port} from {}", self.bridge_name), &arguments).await?;
        self.lock().remove(port);
        Ok(())
    }

    async fn is_plugged(&self, port: &Link) -> Result<bool, NetworkError> {
        Ok(self.find_number(&port.name).await?.is_some())
    }

    async fn open_ports(&self, among: &[Link]) -> Result<HashSet<String>, NetworkError> {
        self.read_numbers().await?;
        let open = flows::open_ports(&self.programs.flows(&self.bridge_name, "table=0").await?);
        let numbers = self.lock();
        let is_open = |link: &&Link| numbers.get(&link.name).is_some_and(|number| open.contains(number));
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
        self.netlink.delete_link(&self.join.inner_name).await?;
        let script = "add table netdev godwit\ndelete table netdev godwit\n";
        publish::run("remove the table of the tunnel", script).await
    }
}

/// Makes the bridge or corrects one that exists; says whether its datapath is the userspace one.
async fn bring_switch_up(
    netlink: &Netlink,
    programs: &Programs,
    config: &OverlayConfig,
    mtu: u32,
) -> Result<bool, NetworkError> {
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
            return Ok(datapath == USERSPACE);
        }
    }
    let message = "the bridge's interface is not here: its ovs-vswitchd runs in another network namespace, or \
                   could not make it (its log says why)";
    Err(NetworkError::OpenVswitch { action, message: message.into() })
}

/// Sets up the bridge's own interface, which will have the gateway's address.
async fn bring_gateway_up(netlink: &Netlink, name: &str, mtu: u32) -> Result<u32, NetworkError> {
    set_sysctl(&format!("ipv6/conf/{name}/disable_ipv6"), "1")?;
    let index = netlink.need_link(name).await?.index;
    let message = LinkUnspec::new_with_index(index)
        .address(GATEWAY_MAC.to_vec())
        .mtu(mtu)
        .append_extra_attribute(LinkAttribute::TxQueueLen(TAP_QUEUE))
        .up()
        .build();
    let changed = netlink.handle.link().change(message).execute().await;
    changed.map_err(NetworkError::kernel(format!("set up the interface {name}")))?;
    Ok(index)
}

impl Join {
    /// Makes the veth and the kernel's bridge, and makes the inner end its port.
    async fn up(
        netlink: &Netlink,
        programs: &Programs,
        config: &OverlayConfig,
        mtu: u32,
        userspace: bool,
    ) -> Result<Self, NetworkError> {
        let vxlan = &config.vxlan;
        let (inner_name, outer_name) = (format!("{vxlan}-i"), format!("{vxlan}-o"));
        match netlink.link(&inner_name).await? {
            Some(link) => need_kind(&link, InfoKind::Veth)?,
            None => {
                // The number that the switch had given to an earlier one means nothing any more.
                let stale = ["--if-exists", "del-port", &config.bridge, &outer_name];
                programs.change(&format!("remove {outer_name} from {}", config.bridge), &stale).await?;
                let message = LinkMessageBuilder::<LinkVeth>::new(&inner_name, &outer_name).build();
                let added = netlink.handle.link().add(message).execute().await;
                added.map_err(NetworkError::kernel(format!("make the veth {inner_name}")))?;
            }
        }
        let refused = |name: &str| NetworkError::kernel(format!("set up the interface {name}"));
        let mut ends = [0; 2];
        for (name, end) in [&inner_name, &outer_name].into_iter().zip(&mut ends) {
            set_sysctl(&format!("ipv6/conf/{name}/disable_ipv6"), "1")?;
            set_sysctl(&format!("ipv4/conf/{name}/arp_ignore"), NEVER)?;
            *end = netlink.need_link(name).await?.index;
            let message = LinkUnspec::new_with_index(*end).mtu(mtu).up().build();
            netlink.handle.link().change(message).execute().await.map_err(refused(name))?;
        }
        if userspace {
            offload::make_frames_whole(&inner_name)?;
        }
        Ok(Self { inner_name, outer_name, ends })
    }

    /// Has every frame that comes in at the VXLAN device or at the inner end go out at the other.
    async fn hand_on(&self, vxlan: &str) -> Result<(), NetworkError> {
        let inner = &self.inner_name;
        // Each statement is harmless when repeated. A chain goes with its device.
        let script = format!(
            r#"add table netdev godwit
add chain netdev godwit in {{ type filter hook ingress device "{vxlan}" priority 0; }}
add chain netdev godwit out {{ type filter hook ingress device "{inner}" priority 0; }}
flush chain netdev godwit in
flush chain netdev godwit out
add rule netdev godwit in fwd to "{inner}"
add rule netdev godwit out fwd to "{vxlan}"
"#
        );
        publish::run(&format!("join {vxlan} and {inner}"), &script).await
    }
}

/// Makes the tunnel's veth a port of the switch, and takes out ports whose interfaces are gone. Returns
/// all ports' numbers.
async fn plug_tunnel(
    netlink: &Netlink,
    programs: &Programs,
    config: &OverlayConfig,
    tunnel: &str,
) -> Result<HashMap<String, u32>, NetworkError> {
    let bridge = config.bridge.as_str();
    let action = format!("make {tunnel} a port of {bridge}");
    let ports = programs.read(&action, &["list-ports", bridge]).await?;
    let links = netlink.links().await?;
    let gone = ports.lines().filter(|port| !links.iter().any(|link| link.name == *port));
    let mut arguments = vec!["--may-exist", "add-port", bridge, tunnel];
    for port in gone {
        arguments.extend(["--", "--if-exists", "del-port", bridge, port]);
    }
    programs.change(&action, &arguments).await?;
    let numbers = programs.numbers().await?;
    match numbers.get(tunnel) {
        Some(number) if *number > 0 => Ok(numbers),
        _ => Err(NetworkError::OpenVswitch {
            action,
            message: "it could not set up the interface; its log says why".into(),
        }),
    }
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
