//! This node for Prometheus: `godwitd serve --metrics ADDRESS`.
//!
//! ```text
//!  GET /metrics ──▶ endpoint ──▶ collect ─┬─ counters   what has ended since the start
//!                   bounds, one           ├─ state      the node, its peers, moves under way
//!                   answer a second       └─ services   each service's state and figures
//! ```
//! An answer is collected by one thread beside those of the moves, at most once a second, however many ask. It reads what the
//! daemon has in memory and on its disk, and the cgroups of the services; nothing of it asks another node.

mod collect;
mod endpoint;
mod series;
mod services;
mod state;

use std::net::SocketAddr;
use std::sync::Arc;

use anyhow::Context as _;
use tokio::net::TcpListener;

use crate::node::Node;

/// Listens for those who ask, where that is wanted.
pub(crate) async fn listen(address: Option<SocketAddr>) -> anyhow::Result<Option<TcpListener>> {
    let Some(address) = address else { return Ok(None) };
    let listener = TcpListener::bind(address).await;
    Ok(Some(listener.with_context(|| format!("cannot listen on {address} (--metrics)"))?))
}

/// Answers them, for as long as the node lives.
pub(crate) async fn run(node: &Arc<Node>, listener: Option<TcpListener>) {
    match listener {
        Some(listener) => endpoint::serve(listener, collect::Collecting::new(node)).await,
        None => std::future::pending().await,
    }
}
