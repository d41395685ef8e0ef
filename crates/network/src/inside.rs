//! What is done inside a service's network namespace, by a thread that enters it.

use std::net::Ipv4Addr;
use std::path::Path;

use rtnetlink::RouteMessageBuilder;
use rtnetlink::packet_route::route::RouteScope;

use crate::netlink::Netlink;
use crate::overlay::GATEWAY_MAC;
use crate::{NetworkError, Prefix6, Subnet, enter, ipv6};

/// The interface's name inside every service's namespace.
pub(crate) const INSIDE: &str = "eth0";

/// What is to be done.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Inside {
    /// Bring the interfaces up.
    Up,
    /// Give the service its address and the way out.
    Address { subnet: Subnet, prefix6: Option<Prefix6>, address: Ipv4Addr, mtu: u32 },
}

/// Does it.
pub(crate) async fn inside(netns: &Path, work: Inside) -> Result<(), NetworkError> {
    on_netlink_inside(netns, move |netlink| async move {
        match work {
            Inside::Up => {
                for name in ["lo", INSIDE] {
                    let link = netlink.need_link(name).await?;
                    netlink.set_up(link.index, name).await?;
                }
                Ok(())
            }
            Inside::Address { subnet, prefix6, address, mtu } => {
                let link = netlink.need_link(INSIDE).await?;
                if link.mtu != mtu {
                    netlink.set_mtu(link.index, INSIDE, mtu).await?;
                }
                address_inside(&netlink, subnet, address).await?;
                let Some(prefix) = prefix6 else { return Ok(()) };
                let link = netlink.need_link(INSIDE).await?;
                let (own, gateway) = (prefix.of(address), prefix.of(subnet.gateway()));
                ipv6::address_inside(&netlink, (link.index, INSIDE), own, gateway).await
            }
        }
    })
    .await
}

/// Whether its interface is there and up.
pub(crate) async fn has_inside(netns: &Path) -> Result<bool, NetworkError> {
    on_netlink_inside(
        netns,
        |netlink| async move { Ok(netlink.link(INSIDE).await?.is_some_and(|link| link.up)) },
    )
    .await
}

async fn on_netlink_inside<T, F, Fut>(netns: &Path, f: F) -> Result<T, NetworkError>
where
    T: Send + 'static,
    F: FnOnce(Netlink) -> Fut + Send + 'static,
    Fut: Future<Output = Result<T, NetworkError>>,
{
    let work = move || {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_io()
            .build()
            .map_err(NetworkError::system("start a runtime"))?;
        runtime.block_on(async { f(Netlink::new()?).await })
    };
    enter(netns, work).await.and_then(|result| result)
}

async fn address_inside(netlink: &Netlink, subnet: Subnet, address: Ipv4Addr) -> Result<(), NetworkError> {
    let link = netlink.need_link(INSIDE).await?;
    let handle = &netlink.handle;
    let added = handle.address().add(link.index, address.into(), subnet.prefix()).replace().execute().await;
    added.map_err(NetworkError::kernel(format!("give {INSIDE} the address {address}")))?;
    let route = RouteMessageBuilder::<Ipv4Addr>::new()
        .gateway(subnet.gateway())
        .output_interface(link.index)
        .scope(RouteScope::Universe)
        .build();
    let routed = handle.route().add(route).replace().execute().await;
    routed.map_err(NetworkError::kernel(format!("route from {address} through {}", subnet.gateway())))?;
    // The gateway is the same everywhere: no need to ask for it after a move.
    netlink.set_neighbour(link.index, INSIDE, subnet.gateway(), GATEWAY_MAC).await
}
