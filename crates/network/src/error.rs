//! What can go wrong in a node's network, as sentences for the operator.

use std::io;
use std::net::Ipv4Addr;
use std::path::PathBuf;

use godwit_names::ServiceName;

use crate::Subnet;

/// A failed operation on the overlay. The message names the object and what to do about it; the
/// kernel's own word, where there is one, is the source.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum NetworkError {
    /// The text is not an IPv4 subnet.
    #[error("\"{text}\" is not a subnet: {reason}; write it as 10.88.0.0/16")]
    BadSubnet {
        /// What was given.
        text: String,
        /// What is wrong with it.
        reason: &'static str,
    },
    /// The text is not an IPv6 prefix for services.
    #[error("\"{text}\" is not an IPv6 prefix for services: {reason}; write it as fd67:6f64::/96")]
    BadPrefix6 {
        /// What was given.
        text: String,
        /// What is wrong with it.
        reason: &'static str,
    },
    /// The address is not of the services' subnet.
    #[error("the address {address} is outside the services' subnet {subnet}; choose one inside it")]
    OutsideSubnet {
        /// The address asked for.
        address: Ipv4Addr,
        /// The services' subnet.
        subnet: Subnet,
    },
    /// The number is no VXLAN network identifier.
    #[error("{vni} cannot be the number of a VXLAN network; choose one from 1 to {most}")]
    BadVni {
        /// The number.
        vni: u32,
        /// The largest one.
        most: u32,
    },
    /// No network has the address.
    #[error(
        "the address {address} is of none of this node's networks; `godwit network ls` lists all networks"
    )]
    NoNetwork {
        /// The address.
        address: Ipv4Addr,
    },
    /// The address has another use in the subnet.
    #[error("the address {address} is the {role} of the subnet {subnet}; choose another one")]
    ReservedAddress {
        /// The address asked for.
        address: Ipv4Addr,
        /// What it is: network address, gateway or broadcast address.
        role: &'static str,
        /// The services' subnet.
        subnet: Subnet,
    },
    /// No interface has this name.
    #[error(
        "there is no network interface {interface}; see the interfaces with `ip link` and name one of them"
    )]
    NoInterface {
        /// The interface asked for.
        interface: String,
    },
    /// The uplink has no IPv4 address to be reached at by other nodes.
    #[error("the uplink {interface} has no IPv4 address; give it one, or name another uplink")]
    NoUplinkAddress {
        /// The uplink.
        interface: String,
    },
    /// Something else has VXLAN's port.
    #[error(
        "UDP port {port}, at which the overlay's device {interface} takes other nodes' frames, is in use by \
         {holder}; end that, or give the overlay another port on all nodes (godwitd serve --vxlan-port)"
    )]
    PortInUse {
        /// The port.
        port: u16,
        /// The VXLAN device that needs it.
        interface: String,
        /// Who has it, as far as it can be told.
        holder: String,
    },
    /// Another program has replaced the bridge or the VXLAN device.
    #[error(
        "another program has removed, replaced or set down the interface {interface} that godwitd made; restart godwitd on this node"
    )]
    Replaced {
        /// The interface.
        interface: String,
    },
    /// The kernel has no devices for the tunnel.
    #[error(
        "the overlay's packets cannot be encrypted here, as /dev/net/tun cannot be opened; load the module \
         tun, or start godwitd on all nodes with `--encrypt off`"
    )]
    NoTun(#[source] io::Error),
    /// The kernel has no WireGuard.
    #[error(
        "the kernel of this node has no WireGuard: install a kernel that has (with Debian's, `modprobe wireguard` \
         must work), or start godwitd on all nodes with `--encrypt tunnel`"
    )]
    NoWireGuard,
    /// Another node has shown a key that cannot be its own.
    #[error(
        "the node at {vtep} shows the WireGuard key of {holder}; give it one of its own: restart godwitd there, after \
         `ip link del gwwg0` where it encrypts by the kernel's WireGuard"
    )]
    KeyTaken {
        /// Where the node is that has shown it.
        vtep: std::net::Ipv4Addr,
        /// Whose it is.
        holder: String,
    },
    /// The uplink's frames are too small for the overlay.
    #[error("the uplink {interface} has an MTU of {mtu}, the overlay needs at least {least}; raise it")]
    SmallMtu {
        /// The uplink.
        interface: String,
        /// Its MTU in bytes.
        mtu: u32,
        /// The least MTU in bytes.
        least: u32,
    },
    /// A route to another interface covers addresses of the services' subnet.
    #[error(
        "the subnet {subnet} overlaps the route to {route} on {interface}; \
         choose another subnet for the services, or remove the route"
    )]
    Overlap {
        /// The services' subnet.
        subnet: Subnet,
        /// The route's destination.
        route: String,
        /// The interface the route leads to.
        interface: String,
    },
    /// An interface of that name exists and is not ours.
    #[error("the interface {interface} exists and is {found}, not {wanted}; rename or remove it")]
    InterfaceInTheWay {
        /// The interface.
        interface: String,
        /// What it is.
        found: String,
        /// What it should be.
        wanted: String,
    },
    /// A file stands where a service's network namespace should be mounted.
    #[error("{} is in the way of the service's network namespace; move or remove it", path.display())]
    FileInTheWay {
        /// The file.
        path: PathBuf,
    },
    /// The service's endpoint exists with another address.
    #[error(
        "the service {name} already has a network endpoint with the address {existing}, not {wanted}; \
         remove that one first"
    )]
    OtherAddress {
        /// The service.
        name: ServiceName,
        /// The address it has.
        existing: Ipv4Addr,
        /// The address asked for.
        wanted: Ipv4Addr,
    },
    /// Another service on this node has the address.
    #[error("the address {address} belongs to the service {owner} on this node; choose another address")]
    AddressTaken {
        /// The address asked for.
        address: Ipv4Addr,
        /// The service that has it.
        owner: ServiceName,
    },
    /// The service has no endpoint on this node.
    #[error("the service {name} has no network endpoint on this node; create it first")]
    NoEndpoint {
        /// The service.
        name: ServiceName,
    },
    /// A service cannot be remote at this node's own address.
    #[error(
        "the address {address} cannot be remote at {vtep}: that is this node itself; open its endpoint instead"
    )]
    RemoteIsSelf {
        /// The service's address.
        address: Ipv4Addr,
        /// This node's underlay address.
        vtep: Ipv4Addr,
    },
    /// An interface did not come up in time.
    #[error("the interface {interface} did not come up within {seconds} s; try again")]
    NotUp {
        /// The interface.
        interface: String,
        /// How long was waited, in seconds.
        seconds: u64,
    },
    /// A port of the node is published by another service.
    #[error(
        "port {port}/{protocol} of this node is already published by the service {owner}; choose another port"
    )]
    PortTaken {
        /// The node's port.
        port: u16,
        /// `tcp` or `udp`.
        protocol: String,
        /// Who has it.
        owner: String,
    },
    /// A service cannot be in this namespace.
    #[error(
        "a service cannot be in the network namespace {}: {reason}; make one with `ip netns add`, and name it",
        path.display()
    )]
    NoNamespace {
        /// Where it should be mounted.
        path: PathBuf,
        /// What is wrong.
        reason: &'static str,
    },
    /// A namespace that does not lie where the operator has them.
    #[error(
        "the network namespace {} is not directly in {}, where this node takes such from (godwitd --namespaces)",
        path.display(), directory.display()
    )]
    NamespaceElsewhere {
        /// The namespace.
        path: PathBuf,
        /// Where it should be.
        directory: PathBuf,
    },
    /// nftables' program is missing.
    #[error("the program `nft` could not be started; install the package nftables")]
    NoNft(#[source] io::Error),
    /// nftables' program did not end.
    #[error("`nft` did not end within {seconds} s and was killed; see whether `nft list ruleset` answers")]
    NftLate {
        /// Its time limit in seconds.
        seconds: u64,
    },
    /// nftables refused a rule.
    #[error("nft could not {action}: {message}")]
    Nft {
        /// What it was asked to do.
        action: String,
        /// Its own words.
        message: String,
    },
    /// The text is no filter of packets.
    #[error("\"{text}\" is not a filter: {reason}")]
    BadFilter {
        /// What was given.
        text: String,
        /// What is wrong with it.
        reason: String,
    },
    /// So many captures run that another one would take too much memory.
    #[error("{most} captures run on this node already; end one of them first")]
    TooManyCaptures {
        /// How many may run.
        most: usize,
    },
    /// A program of Open vSwitch is missing.
    #[error(
        "Open vSwitch needs the program `{program}`, which could not be started; install the package \
         openvswitch-switch, or use the kernel's bridge (--network-backend kernel)"
    )]
    NoOpenVswitch {
        /// The program.
        program: &'static str,
        /// Why it could not be started.
        #[source]
        source: io::Error,
    },
    /// A daemon of Open vSwitch does not answer.
    #[error(
        "{server} of Open vSwitch does not answer ({message}); start it (`systemctl start openvswitch-switch`), \
         or set OVS_RUNDIR if its sockets are elsewhere"
    )]
    OpenVswitchStopped {
        /// The daemon.
        server: &'static str,
        /// What the program said that tried to reach it.
        message: String,
    },
    /// Open vSwitch did not do something in time.
    #[error(
        "Open vSwitch could not {action}: `{program}` did not answer within {seconds} s; see whether \
         ovs-vswitchd runs, and what its log says"
    )]
    OpenVswitchLate {
        /// What it was asked to do.
        action: String,
        /// The program that was called.
        program: &'static str,
        /// Its time limit in seconds.
        seconds: u64,
    },
    /// Open vSwitch refused something.
    #[error("Open vSwitch could not {action}: {message}")]
    OpenVswitch {
        /// What it was asked to do.
        action: String,
        /// Its own words.
        message: String,
    },
    /// The switch that was brought up is no longer there, or is another one.
    #[error(
        "another program has removed the bridge {bridge} of Open vSwitch or its flows; godwitd makes them again within ten seconds where it can; if not, restart godwitd on this node"
    )]
    SwitchGone {
        /// The bridge.
        bridge: String,
    },
    /// The kernel refused something asked for over netlink.
    #[error("the kernel refused to {action}; run as root and see `godwit doctor`")]
    Kernel {
        /// What it was asked to do.
        action: String,
        /// Its answer.
        #[source]
        source: io::Error,
    },
    /// A file, a mount, a socket or a kernel setting could not be used.
    #[error("could not {action}; run as root and see `godwit doctor`")]
    System {
        /// What was tried.
        action: String,
        /// The system's answer.
        #[source]
        source: io::Error,
    },
}

impl NetworkError {
    /// Wraps a failed system call; `action` completes "could not …".
    pub(crate) fn system(action: impl Into<String>) -> impl FnOnce(io::Error) -> Self {
        let action = action.into();
        move |source| Self::System { action, source }
    }

    /// Wraps a failed netlink request; `action` completes "the kernel refused to …".
    pub(crate) fn kernel(action: impl Into<String>) -> impl FnOnce(rtnetlink::Error) -> Self {
        let action = action.into();
        move |error| {
            let source = match error {
                rtnetlink::Error::NetlinkError(message) => message.to_io(),
                other => io::Error::other(other),
            };
            Self::Kernel { action, source }
        }
    }
}
