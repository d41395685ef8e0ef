//! Starts a node and serves it until it is told to end.
//!
//! ```text
//!   unix socket ── Node API (users)             TCP 7117 ── mutual TLS ─┬─ h2: Peer API (nodes)
//!                                                                       └─ data: migrations
//!                                               TCP 7118 ── join (invited hosts)
//!                                               UDP 7119 ── the overlay's packets, encrypted
//!             --metrics ADDRESS ── HTTP: Prometheus
//! ```
//! Ending the daemon ends neither services nor their logs: each has a shim of its own.
//!
//! This file is the life cycle of the daemon: checks, start, serving, end. `arguments.rs` has its flags, `build.rs` makes
//! the node out of them, and `accept.rs` takes the connections of other nodes.

mod accept;
mod arguments;
mod build;

use std::os::fd::{FromRawFd, OwnedFd};
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, bail};
use godwit_api::v1::node_server::NodeServer;
use godwit_api::v1::peer_server::PeerServer;
use godwit_migration::ahead::Kept;
use godwit_migration::{error_chain, recovery};
use godwit_transfer::listen::JoinListener;
use godwit_transfer::{Identity, ListenOptions, Listener, NodeName};
use nix::sys::stat::{Mode, umask};
use tokio::net::UnixListener;
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::mpsc;
use tokio_stream::wrappers::{ReceiverStream, UnixListenerStream};
use tonic::transport::Server;

pub(crate) use arguments::ServeArgs;

use crate::network::cluster_networks;
use crate::node::Node;
use crate::node_api::NodeService;
use crate::notify::Manager;
use crate::own::{Asked, Own};
use crate::peer_api::{PeerService, VerbsFrom};
use crate::state::State;
use crate::verbs::Listed;
use crate::{cluster, directory, follow, join, layers, metrics, peers, renew, services, staging};

/// Connections of peers that wait to be served.
const BACKLOG: usize = 64;

/// Serves a node until SIGTERM or SIGINT.
pub(crate) async fn serve(args: ServeArgs, manager: &Manager) -> anyhow::Result<()> {
    if !nix::unistd::geteuid().is_root() {
        bail!("godwitd must run as root: it makes containers, mounts and network devices");
    }
    allow_open_files();
    let identity = Arc::new(Identity::load(&args.state.join(peers::IDENTITY)).context(
        "this node has no identity; found a cluster with `godwit cluster init` or join one with `godwit cluster join`",
    )?);
    if let Some(name) = args.name.as_deref().filter(|name| *name != identity.node().as_str()) {
        bail!("the certificate of this node says that it is {}, not {name}", identity.node());
    }
    for directory in [&args.state, &args.run] {
        std::fs::create_dir_all(directory)
            .with_context(|| format!("cannot create {}", directory.display()))?;
    }
    // Root filesystems hold set-user-id programs and services' data: not for the machine's other users.
    std::fs::set_permissions(&args.state, std::fs::Permissions::from_mode(0o700))
        .with_context(|| format!("cannot close {} to other users", args.state.display()))?;
    // Until the process has ended: its tasks work on when this function has returned.
    std::mem::forget(lock(&args.run)?);
    let state = Arc::new(State::open(&args.state.join("node.db"))?);
    let own = own(&args, identity.node(), &state).await?;
    let node = build::build(&args, &own, state, Arc::clone(&identity)).await?;

    services::record_all(&node)?;
    // Before anything of services is looked for.
    cluster_networks::keep(&node).await?;
    node.local().clear_half_made().await.context("cannot look for services that were half made")?;
    node.local().clear_half_removed_volumes().context("cannot remove what is left of volumes")?;
    recovery::recover(node.local()).await.context("cannot finish or undo earlier migrations")?;
    cluster::put_own_right(&node)?;
    services::go_on_after_checkpoints(&node).await?;
    staging::clear(&node.local().layout).context("cannot remove what is left of checkpoints")?;
    services::find_again(&node).await?;

    let listener = Listener::bind(own.listen, &identity, ListenOptions::default()).await?;
    let mut join_at = own.listen;
    join_at.set_port(own.listen.port().checked_add(1).context("the port must be below 65535")?);
    let inviting = JoinListener::bind(join_at, &identity, ListenOptions::default()).await?;
    let for_metrics = metrics::listen(args.metrics).await?;
    let socket = args.run.join("godwitd.sock");
    let users = listen_unix(&socket)?;
    tracing::info!(node = %own.name, listen = %own.listen, uplink = %own.uplink, socket = %socket.display(), "godwitd serves");
    manager.tell("READY=1").context("cannot tell the service manager that the node is ready")?;
    if let Some(fd) = args.ready_fd {
        tell_ready(fd)?;
    }

    let (peers, incoming) = mpsc::channel(BACKLOG);
    let peer_api = PeerService(Arc::clone(&node), VerbsFrom(args.verbs_from.clone()));
    let peer_api = PeerServer::new(peer_api).max_decoding_message_size(peers::MAX_SYNC);
    let mut terminate = signal(SignalKind::terminate())?;
    let mut interrupt = signal(SignalKind::interrupt())?;
    let ended = tokio::select! {
        served = Server::builder()
            .add_service(Listed(NodeServer::new(NodeService(Arc::clone(&node)))))
            .serve_with_incoming(UnixListenerStream::new(users)) => served.context("the unix socket failed"),
        served = Server::builder()
            .add_service(Listed(peer_api))
            .serve_with_incoming(ReceiverStream::new(incoming)) => served.context("the peer API failed"),
        () = accept::accept_peers(Arc::clone(&node), listener, peers) => Ok(()),
        () = join::invite(Arc::clone(&node), inviting) => Ok(()),
        () = cluster::run(Arc::clone(&node)) => Ok(()),
        () = relieve(&node) => Ok(()),
        () = layers::tend(&node, Duration::from_secs(u64::from(args.keep_layers) * 3600)) => Ok(()),
        reason = ends_at_once(&node) => Err(anyhow::anyhow!(reason)),
        () = renew::run(&node) => Ok(()),
        () = follow::run(&node) => Ok(()),
        () = metrics::run(&node, for_metrics) => Ok(()),
        error = node.networks().failed() => Err(error).context("the uplink cannot be watched"),
        _ = terminate.recv() => Ok(()),
        _ = interrupt.recv() => Ok(()),
    };
    if let Err(error) = manager.tell("STOPPING=1") {
        tracing::warn!(%error, "cannot tell the service manager that the node ends");
    }
    shut_down(&node).await;
    let _ = std::fs::remove_file(&socket);
    ended
}

/// What the node is called and where it is reached: as the flags say, else as recorded.
async fn own(args: &ServeArgs, name: &NodeName, state: &State) -> anyhow::Result<Own> {
    let last = state.member(name.as_str())?.and_then(|member| member.address.parse().ok());
    let asked = Asked { name: None, listen: args.listen, uplink: args.uplink.clone() };
    asked.own(name, &args.state.join(peers::IDENTITY), last).await
}

/// A service's connections are an image file each, and CRIU has each of them open, too: as many files may
/// be open as this process may allow itself. The usual limit of 1,024 is for programs with select(2).
fn allow_open_files() {
    use nix::sys::resource::{Resource, getrlimit, setrlimit};
    let raised = getrlimit(Resource::RLIMIT_NOFILE)
        .and_then(|(_, most)| setrlimit(Resource::RLIMIT_NOFILE, most, most));
    if let Err(error) = raised {
        tracing::warn!(%error, "services with many connections or files cannot be moved: the limit of open files cannot be raised");
    }
}

/// How long another daemon may have the run directory. The lock of one that was killed stays for as long as a child that
/// it forked has not executed its program, and shares its files.
const LOCK_PATIENCE: Duration = Duration::from_secs(1);

/// Two daemons on one run directory would fight over the same containers.
fn lock(run: &Path) -> anyhow::Result<nix::fcntl::Flock<std::fs::File>> {
    let path = run.join("godwitd.lock");
    let mut file =
        std::fs::File::create(&path).with_context(|| format!("cannot create {}", path.display()))?;
    let begun = std::time::Instant::now();
    loop {
        match nix::fcntl::Flock::lock(file, nix::fcntl::FlockArg::LockExclusiveNonblock) {
            Ok(lock) => return Ok(lock),
            Err((same, _)) if begun.elapsed() < LOCK_PATIENCE => file = same,
            Err(_) => bail!("another godwitd uses {} already", run.display()),
        }
        std::thread::sleep(Duration::from_millis(10));
    }
}

fn listen_unix(path: &Path) -> anyhow::Result<UnixListener> {
    // The lock says that no daemon listens on a socket that is there.
    match std::fs::remove_file(path) {
        Err(e) if e.kind() != std::io::ErrorKind::NotFound => {
            return Err(e).with_context(|| format!("cannot remove {}", path.display()));
        }
        _ => {}
    }
    // With this mode from the start: a client that connects before a change stays connected.
    let before = umask(Mode::from_bits_truncate(0o177));
    let listener = UnixListener::bind(path);
    umask(before);
    listener.with_context(|| format!("cannot listen on {}", path.display()))
}

fn tell_ready(fd: i32) -> anyhow::Result<()> {
    use std::io::Write;
    // SAFETY: the descriptor was passed to us by whoever started us, for this one use.
    let fd = unsafe { OwnedFd::from_raw_fd(fd) };
    std::fs::File::from(fd).write_all(b"1").context("cannot tell that the node is ready")
}

/// Why this daemon must not go on.
async fn ends_at_once(node: &Node) -> String {
    let mut fatal = node.local().fatal.subscribe();
    match fatal.wait_for(Option::is_some).await {
        Ok(reason) => reason.clone().unwrap_or_default(),
        // The sender lives as long as the node.
        Err(_) => std::future::pending().await,
    }
}

/// Gives memory and disk back that only make later migrations shorter, when the machine runs short of them or nothing comes of
/// it.
async fn relieve(node: &Node) {
    let total = directory::total_memory();
    let mut clock = tokio::time::interval(Duration::from_secs(1));
    loop {
        clock.tick().await;
        let local = node.local();
        local.retention.relieve(total);
        local.sent_files.relieve(total);
        if local.kept_files.has_any() {
            local.kept_files.relieve(|kept| may_come(node, kept));
        }
    }
}

/// Whether the service whose files were sent ahead is still where they came from, as far as this node knows.
fn may_come(node: &Node, kept: &Kept) -> bool {
    match node.state.placement(&kept.name) {
        // A new one may not be known yet.
        Ok(None) => true,
        Ok(Some(placement)) => placement.id == kept.id && placement.node == kept.source && !placement.removed,
        Err(error) => {
            tracing::error!(service = %kept.name, error = %error_chain(&error), "cannot look for a service whose files were sent ahead");
            true
        }
    }
}

/// Cancels what can be cancelled, so that services do not stay frozen while no daemon runs.
async fn shut_down(node: &Arc<Node>) {
    node.local().ending.cancel();
    for migrating in node.migrations() {
        tracing::info!(migration = %migrating.id, "cancelled: godwitd ends");
        migrating.cancel.cancel();
        let mut ended = migrating.ended;
        // An error means that its sender is gone, which is what is waited for.
        while ended.changed().await.is_ok() {}
    }
    node.checks.close();
    node.checks.wait().await;
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn the_socket_is_for_root_alone_from_its_first_instant() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("socket");
        // What was there before belongs to no daemon: the lock says so.
        std::fs::write(&path, "").unwrap();
        let before = umask(Mode::empty());
        let _listening = listen_unix(&path).unwrap();
        let restored = umask(before);
        assert_eq!(restored, Mode::empty(), "the mask is put back");
        assert_eq!(std::fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
    }
}
