//! Network configuration of a lab's hosts, by netlink.

use std::{
    fs::{self, File},
    io,
    net::{IpAddr, Ipv4Addr},
};

use futures::TryStreamExt;
use rtnetlink::{
    Handle, LinkBridge, LinkUnspec, RouteMessageBuilder, new_connection, packet_route::link::LinkAttribute,
};

use crate::{
    config::{CLIENT, CLIENT_ADDRESS, Link, MORE_SUBNETS, Paths, SERVICE_SUBNET, UNDERLAY_PREFIX, UPLINK},
    error::{Context, LabError},
    netns,
    switch::tap::Tap,
};

/// Packets that a host's uplink holds while the link program is busy with others.
const QUEUE_PACKETS: u32 = 4096;
/// On a slow link a large frame is cut up by the host, so that no frame holds the wire for longer:
/// half a millisecond.
const LONGEST_FRAMES_PER_SECOND: u64 = 2000;
/// Smallest and largest size that the kernel may give a frame before segmentation.
const GSO_BYTES: (u64, u64) = (1514, 65_536);

/// Gives a host its address, and the client its way to the services.
pub(crate) fn configure(
    paths: &Paths,
    host: &str,
    address: Ipv4Addr,
    link: Option<Link>,
) -> Result<(), LabError> {
    with_netlink(paths, host, async |handle| apply(&handle, address, link, host == CLIENT).await)
}

/// Fits a host's uplink to another link.
pub(crate) fn reshape(paths: &Paths, host: &str, link: Option<Link>) -> Result<(), LabError> {
    with_netlink(paths, host, async |handle| {
        let uplink = index(&handle, UPLINK).await?;
        let message = LinkUnspec::new_with_index(uplink).append_extra_attribute(largest_frame(link)).build();
        handle.link().change(message).execute().await.map_err(|error| ("configuring uplink0", error))
    })
}

/// Between a machine's uplink and the lab's switch, in the machine's namespace.
const BRIDGE: &str = "bridge0";
/// The end of a machine's uplink there.
const MACHINE: &str = "machine0";

/// Prepares the namespace that a machine's emulator runs in: its uplink is bridged to the lab's switch.
pub(crate) fn configure_machine(paths: &Paths, host: &str, link: Option<Link>) -> Result<(), LabError> {
    let silent = "/proc/sys/net/ipv6/conf/all/disable_ipv6";
    netns::inside(&paths.netns(host), || match fs::write(silent, "1") {
        // A kernel without version 6 sends nothing by it.
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    })?
    .context("writing", silent)?;
    with_netlink(paths, host, async |handle| {
        let up = |index| LinkUnspec::new_with_index(index).up();
        let change = async |message| handle.link().change(message).execute().await;
        let loopback = index(&handle, "lo").await?;
        change(up(loopback).build()).await.map_err(|error| ("setting lo up", error))?;
        let made = handle.link().add(LinkBridge::new(BRIDGE).build()).execute().await;
        made.map_err(|error| ("making the bridge of a machine", error))?;
        let bridge = index(&handle, BRIDGE).await?;
        change(up(bridge).build()).await.map_err(|error| ("setting the bridge of a machine up", error))?;
        let uplink = index(&handle, UPLINK).await?;
        let message = up(uplink)
            .controller(bridge)
            .append_extra_attribute(LinkAttribute::TxQueueLen(QUEUE_PACKETS))
            .append_extra_attribute(largest_frame(link))
            .build();
        change(message).await.map_err(|error| ("configuring uplink0", error))
    })
}

/// Makes the TAP device that a machine's uplink is, on the bridge; it lives as long as the file.
pub(crate) fn machine_uplink(paths: &Paths, host: &str) -> Result<File, LabError> {
    let tap = Tap::create(&paths.netns(host), MACHINE)?;
    with_netlink(paths, host, async |handle| {
        let (device, bridge) = (index(&handle, MACHINE).await?, index(&handle, BRIDGE).await?);
        let message = LinkUnspec::new_with_index(device).controller(bridge).up().build();
        let done = handle.link().change(message).execute().await;
        done.map_err(|error| ("connecting a machine's uplink", error))
    })?;
    Ok(tap.into_file())
}

/// Runs `work` with a netlink socket of the host's.
fn with_netlink(
    paths: &Paths,
    host: &str,
    work: impl AsyncFnOnce(Handle) -> Step<()> + Send,
) -> Result<(), LabError> {
    let failed = |action: &str, reason: &dyn ToString| LabError::Netlink {
        action: action.to_owned(),
        host: paths.netns_name(host),
        reason: reason.to_string(),
    };
    netns::inside(&paths.netns(host), || {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
        let runtime = runtime.map_err(|error| failed("starting netlink", &error))?;
        runtime.block_on(async {
            let (connection, handle, _) =
                new_connection().map_err(|error| failed("opening netlink", &error))?;
            let connection = tokio::spawn(connection);
            let done = work(handle).await;
            connection.abort();
            done.map_err(|(action, error)| failed(action, &error))
        })
    })?
}

type Step<T> = Result<T, (&'static str, rtnetlink::Error)>;

async fn apply(handle: &Handle, address: Ipv4Addr, link: Option<Link>, client: bool) -> Step<()> {
    let loopback = index(handle, "lo").await?;
    let up = LinkUnspec::new_with_index(loopback).up().build();
    handle.link().change(up).execute().await.map_err(|error| ("setting lo up", error))?;

    let uplink = index(handle, UPLINK).await?;
    let [a, b, c, d] = address.octets();
    let message = LinkUnspec::new_with_index(uplink)
        .address(vec![0x02, 0x00, a, b, c, d])
        .append_extra_attribute(LinkAttribute::TxQueueLen(QUEUE_PACKETS))
        .append_extra_attribute(largest_frame(link))
        .build();
    handle.link().change(message).execute().await.map_err(|error| ("configuring uplink0", error))?;
    handle
        .address()
        .add(uplink, IpAddr::V4(address), UNDERLAY_PREFIX)
        .execute()
        .await
        .map_err(|error| ("giving uplink0 its address", error))?;
    let up = LinkUnspec::new_with_index(uplink).up().build();
    handle.link().change(up).execute().await.map_err(|error| ("setting uplink0 up", error))?;

    if client {
        for (subnet, bits) in [SERVICE_SUBNET, MORE_SUBNETS] {
            let route = RouteMessageBuilder::<Ipv4Addr>::new()
                .destination_prefix(subnet, bits)
                .output_interface(uplink)
                .pref_source(CLIENT_ADDRESS)
                .scope(rtnetlink::packet_route::route::RouteScope::Link)
                .build();
            let routed = handle.route().add(route).execute().await;
            routed.map_err(|error| ("routing the services' subnets", error))?;
        }
    }
    Ok(())
}

/// The largest frame that the kernel may leave to be cut up later.
fn largest_frame(link: Option<Link>) -> LinkAttribute {
    let bytes = link.map_or(GSO_BYTES.1, |link| link.rate / 8 / LONGEST_FRAMES_PER_SECOND);
    let bytes = bytes.clamp(GSO_BYTES.0, GSO_BYTES.1);
    LinkAttribute::GsoMaxSize(u32::try_from(bytes).unwrap_or(u32::MAX))
}

async fn index(handle: &Handle, name: &'static str) -> Step<u32> {
    let mut links = handle.link().get().match_name(name.to_owned()).execute();
    let found = links.try_next().await.map_err(|error| ("looking up an interface", error))?;
    found.map(|link| link.header.index).ok_or(("looking up an interface", rtnetlink::Error::RequestFailed))
}
