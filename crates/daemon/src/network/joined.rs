//! The network namespaces that engines of others make for their containers.

use godwit_migration::{LocalError, Service};

use crate::node::Node;

/// Gives a service that its engine has started the address that it has, where the engine has made it another network namespace.
pub(crate) async fn join(node: &Node, service: &Service, pid: u32) -> Result<(), LocalError> {
    if service.kept.is_none() {
        return Ok(());
    }
    let network = &node.local().network;
    network.join(service, pid).await?;
    network.plug(service).await?;
    network.open(service).await?;
    Ok(())
}
