//! What the services of this node use.

use godwit_api::v1::{ServiceStats, StatsRequest, StatsResponse};
use tonic::Status;

use crate::convert;
use crate::node::Node;
use crate::services::owned;
use crate::state::Owned;
use crate::status::internal;

/// The figures of the services that are named, which must run here; of all that run, if none is.
pub(crate) async fn stats(node: &Node, request: StatsRequest) -> Result<StatsResponse, Status> {
    let mut services = Vec::new();
    for name in &request.names {
        let name = convert::service_name(name)?;
        let owned = owned(node, &name)?;
        if owned.exit_code.is_some() {
            return Err(Status::failed_precondition(format!("service {name} is not running")));
        }
        services.push(of(node, &owned).await?);
    }
    if request.names.is_empty() {
        for owned in node.state.services().map_err(internal)? {
            if owned.exit_code.is_none() {
                match of(node, &owned).await {
                    Ok(stats) => services.push(stats),
                    // It may have ended meanwhile, or be on its way to another node.
                    Err(error) => tracing::debug!(service = %owned.service.name, %error, "it has no figures"),
                }
            }
        }
    }
    Ok(StatsResponse { services })
}

/// The figures of a service that runs here.
pub(crate) async fn of(node: &Node, owned: &Owned) -> Result<ServiceStats, Status> {
    let service = &owned.service;
    let usage = node.local().engine.usage(&node.local().config(service)).await.map_err(internal)?;
    let nanoseconds = |time: std::time::Duration| u64::try_from(time.as_nanos()).unwrap_or(u64::MAX);
    Ok(ServiceStats {
        name: service.name.to_string(),
        cpu_ns: usage.cpu.map(nanoseconds),
        time_ns: nanoseconds(monotonic()),
        memory_bytes: usage.memory,
        memory_limit_bytes: service.memory_bytes,
        pids: usage.pids,
        received_bytes: usage.network.map(|(received, _)| received),
        sent_bytes: usage.network.map(|(_, sent)| sent),
        read_bytes: usage.disk.map(|(read, _)| read),
        written_bytes: usage.disk.map(|(_, written)| written),
    })
}

/// The node's monotonic clock.
fn monotonic() -> std::time::Duration {
    nix::time::clock_gettime(nix::time::ClockId::CLOCK_MONOTONIC).map(Into::into).unwrap_or_default()
}
