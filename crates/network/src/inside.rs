//! What is done inside a service's network namespace, by a thread that enters it.

use std::net::Ipv4Addr;
use std::path::Path;

use rtnetlink::RouteMessageBuilder;
use rtnetlink::packet_route::route::RouteScope;

use crate::netlink::{Link, Netlink};
use crate::subnet::GATEWAY_MAC;
use crate::{NetworkError, Prefix6, Subnet, enter, ipv6};

/// The name that the service's interface to its `nth` network has inside its namespace.
pub(crate) fn interface(nth: u8) -> String {
    format!("eth{nth}")
}

/// What is to be done.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Inside {
    /// Bring the interface up.
    Up,
    /// Give the service its address there, and on the first of its networks the way out.
    Address { subnet: Subnet, prefix6: Option<Prefix6>, address: Ipv4Addr, mtu: u32 },
}

/// Does it, with the service's interface to its `nth` network.
pub(crate) async fn inside(netns: &Path, nth: u8, work: Inside) -> Result<(), NetworkError> {
    on_netlink_inside(netns, move |netlink| async move {
        let own = interface(nth);
        match work {
            Inside::Up => {
                for name in ["lo", own.as_str()] {
                    let link = netlink.need_link(name).await?;
                    netlink.set_up(link.index, name).await?;
                }
                Ok(())
            }
            Inside::Address { subnet, prefix6, address, mtu } => {
                let link = netlink.need_link(&own).await?;
                if link.mtu != mtu {
                    netlink.set_mtu(link.index, &own, mtu).await?;
                }
                let way_out = nth == 0;
                address_inside(&netlink, &link, subnet, address, way_out).await?;
                let Some(prefix) = prefix6 else { return Ok(()) };
                let gateway = subnet.gateway();
                ipv6::address_inside(&netlink, &link, prefix, address, gateway, way_out).await
            }
        }
    })
    .await
}

/// Whether its interface to its `nth` network is there and up.
pub(crate) async fn has_inside(netns: &Path, nth: u8) -> Result<bool, NetworkError> {
    let up = move |netlink: Netlink| async move {
        Ok(netlink.link(&interface(nth)).await?.is_some_and(|link| link.up))
    };
    on_netlink_inside(netns, up).await
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

async fn address_inside(
    netlink: &Netlink,
    link: &Link,
    subnet: Subnet,
    address: Ipv4Addr,
    way_out: bool,
) -> Result<(), NetworkError> {
    let (handle, name) = (&netlink.handle, &link.name);
    let added = handle.address().add(link.index, address.into(), subnet.prefix()).replace().execute().await;
    added.map_err(NetworkError::kernel(format!("give {name} the address {address}")))?;
    if !way_out {
        return Ok(());
    }
    let route = RouteMessageBuilder::<Ipv4Addr>::new()
        .gateway(subnet.gateway())
        .output_interface(link.index)
        .scope(RouteScope::Universe)
        .build();
    let routed = handle.route().add(route).replace().execute().await;
    routed.map_err(NetworkError::kernel(format!("route from {address} through {}", subnet.gateway())))?;
    // The gateway is the same everywhere: no need to ask for it after a move.
    netlink.set_neighbour(link.index, name, subnet.gateway(), GATEWAY_MAC).await
}
