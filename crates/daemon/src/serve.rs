//! Wires a node together and serves it until it is told to end.
//!
//! ```text
//!   unix socket ── Node API (users)             TCP 7117 ── mutual TLS ─┬─ h2: Peer API (nodes)
//!                                                                       └─ data: migrations
//!                                               TCP 7118 ── join (invited hosts)
//!                                               UDP 7119 ── the overlay's packets, encrypted
//! ```
//! Ending the daemon ends neither services nor their logs: each has a shim of its own.

use std::collections::HashMap;
use std::net::SocketAddr;
use std::os::fd::{FromRawFd, OwnedFd};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::pin::Pin;
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context as TaskContext, Poll};
use std::time::Duration;

use anyhow::{Context, bail};
use godwit_api::v1::Member;
use godwit_api::v1::node_server::NodeServer;
use godwit_api::v1::peer_server::PeerServer;
use godwit_criu::Criu;
use godwit_engine::image::Store;
use godwit_engine::runc::{Runc, RuncConfig};
use godwit_memory::tracker::{self, Backend, Detected};
use godwit_migration::arrivals::Arrivals;
use godwit_migration::attach::SystemNetwork;
use godwit_migration::binds::Binds;
use godwit_migration::journal::Journal;
use godwit_migration::link::{self, Link};
use godwit_migration::local::Local;
use godwit_migration::mounts::SystemMounts;
use godwit_migration::pagers::PagerProgram;
use godwit_migration::promised::Promised;
use godwit_migration::retained::Retention;
use godwit_migration::standstill::Standstills;
use godwit_migration::{Doubts, Waits};
use godwit_migration::{Layout, destination, error_chain, recovery};
use godwit_network::{Networks, Overlay, OverlayConfig, Prefix6, Subnet};
use godwit_transfer::listen::JoinListener;
use godwit_transfer::{
    Accepted, Alpn, Connection, Identity, ListenOptions, Listener, NodeName, SecureStream,
};
use nix::sys::stat::{Mode, umask};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::UnixListener;
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::mpsc;
use tokio_stream::wrappers::{ReceiverStream, UnixListenerStream};
use tokio_util::sync::CancellationToken;
use tonic::transport::Server;
use tonic::transport::server::Connected;

use crate::encrypt::{self, Encrypt};
use crate::host::NodeHost;
use crate::node::{Means, Node};
use crate::node_api::NodeService;
use crate::notify::Manager;
use crate::peer_api::{PeerService, VerbsFrom};
use crate::peers::Peers;
use crate::state::{State, now_ms};
use crate::surroundings::Surroundings;
use crate::verbs::Listed;
use crate::{cluster, directory, images, join, networks, peers, removals, renew, restart, services};

/// Connections of peers that wait to be served.
const BACKLOG: usize = 64;

/// VXLAN network id of the overlay.
const VNI: u32 = 88;

/// How `godwitd serve` was called.
#[derive(Debug, Clone, clap::Args)]
pub(crate) struct ServeArgs {
    /// Directory that survives a restart of the machine
    #[arg(long, default_value = "/var/lib/godwit")]
    pub state: PathBuf,
    /// Directory that does not; the socket is in it
    #[arg(long, default_value = "/run/godwit")]
    pub run: PathBuf,
    /// Name of this node
    #[arg(long)]
    pub node: String,
    /// Address and port other nodes reach this one at; the next port serves new nodes
    #[arg(long, value_name = "ADDRESS:PORT")]
    pub listen: SocketAddr,
    /// Interface that carries the overlay and on which clients reach services
    #[arg(long, default_value = "eth0")]
    pub uplink: String,
    /// The switch that services are plugged into
    #[arg(long, value_enum, default_value_t = NetworkBackend::Kernel)]
    pub network_backend: NetworkBackend,
    /// Addresses of services, the same on all nodes
    #[arg(long, default_value = "10.88.0.0/16")]
    pub subnet: Subnet,
    /// Prefix of the IPv6 addresses that services have beside their IPv4 ones, the same on all nodes, such
    /// as fd67:6f64::/96 [default: they have none]
    #[arg(long, value_name = "PREFIX/96")]
    pub subnet6: Option<Prefix6>,
    /// UDP port at which nodes take the overlay's frames, the same on all nodes
    #[arg(long, default_value_t = 4789, value_name = "PORT", value_parser = clap::value_parser!(u16).range(1..))]
    pub vxlan_port: u16,
    /// Whether what nodes send each other for services is encrypted, the same on all nodes [default: as
    /// the cluster was founded, or off]
    #[arg(long, value_enum)]
    pub encrypt: Option<Encrypt>,
    /// Whether it is asked on the uplink who has the address of a service that is to come
    #[arg(long, value_enum, default_value_t = AddressProbe::Auto)]
    pub address_probe: AddressProbe,
    /// CRIU
    #[arg(long, default_value = "/usr/local/lib/godwit/bin/criu")]
    pub criu: PathBuf,
    /// runc
    #[arg(long, default_value = "runc")]
    pub runc: PathBuf,
    /// cgroup below each hierarchy's root under which services live
    #[arg(long, default_value = "/godwit")]
    pub cgroup_parent: String,
    /// The most memory that services on their way to this node may need, in MiB; 0: what is free
    #[arg(long, default_value_t = 0, value_name = "MIB")]
    pub incoming_memory: u64,
    /// How long a destination may bring a frozen service no further before the service goes on here, in seconds
    #[arg(long, default_value_t = 30, value_name = "SECONDS", value_parser = clap::value_parser!(u64).range(1..=3600))]
    pub patience: u64,
    /// Memory for the pages of each migration that are sent again and again, in MiB
    #[arg(long, alias = "agent-memory", default_value_t = 256, value_name = "MIB")]
    pub delta_cache: usize,
    /// Memory for the pages of services that left, in MiB, so that they come back sooner [default: a
    /// quarter of what is free]
    #[arg(long, alias = "keep-memory", value_name = "MIB")]
    pub retained_memory: Option<u64>,
    /// How long image layers stay that no service uses, in hours, so that a service comes back sooner; they go
    /// earlier when the disk runs short
    #[arg(long, default_value_t = 168, value_name = "HOURS")]
    pub keep_layers: u32,
    /// How written pages are found: the best there is, or one of these
    #[arg(long, value_enum, default_value_t = Track::Auto)]
    pub tracker: Track,
    /// Whether services may run here before their pages are in place
    #[arg(long, value_enum, default_value_t = Userfaultfd::Auto)]
    pub userfaultfd: Userfaultfd,
    /// Whether CRIU is asked for what godwit's patches bring it
    #[arg(long, value_enum, default_value_t = CriuPatches::Auto)]
    pub criu_patches: CriuPatches,
    /// Directory in which network namespaces of others are mounted that services may be plugged into
    #[arg(long, default_value = "/run/netns", value_name = "DIR")]
    pub namespaces: PathBuf,
    /// Directory of the programs that services may name as hooks
    #[arg(long, default_value = "/etc/godwit/hooks", value_name = "DIR")]
    pub hooks: PathBuf,
    /// Directory below which services from other nodes may have directories of this node mounted; may be given
    /// several times [default: none]
    #[arg(long, value_name = "DIR")]
    pub allow_bind: Vec<PathBuf>,
    /// Whose users may migrate, cancel, capture and look at the connections of this node's services, beside its own:
    /// those of all nodes, of none, or of these
    #[arg(long, value_name = "all|none|NODE,...", default_value = "none", value_delimiter = ',')]
    pub verbs_from: Vec<String>,
    /// How long certificates last that this node issues, in seconds
    #[arg(long, hide = true)]
    pub certificate_validity: Option<u64>,
    /// What becomes of frames for a service that is on its way from here: dropping them is for comparison
    #[arg(long, value_enum, default_value_t = CutOver::Hold, hide = true)]
    pub cutover: CutOver,
    /// File descriptor that gets one byte when the node serves
    #[arg(long, hide = true)]
    pub ready_fd: Option<i32>,
}

/// The names of [`godwit_network::Backend`]s.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum NetworkBackend {
    /// The kernel's bridge
    Kernel,
    /// Open vSwitch, whose daemons run here already (their sockets: OVS_RUNDIR)
    #[value(name = "openvswitch")]
    OpenVswitch,
}

impl From<NetworkBackend> for godwit_network::Backend {
    fn from(name: NetworkBackend) -> Self {
        match name {
            NetworkBackend::Kernel => Self::Kernel,
            // The programs find the sockets by this process's environment.
            NetworkBackend::OpenVswitch => Self::OpenVswitch { run: None },
        }
    }
}

/// The names of [`Backend`]s.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum Track {
    /// The best that this kernel has
    Auto,
    /// userfaultfd and PAGEMAP_SCAN (Linux 6.7 and newer)
    Uffd,
    /// The soft-dirty bit (x86-64, where the kernel was built with it)
    SoftDirty,
    /// None: only modes cold and postcopy
    None,
}

/// Whether the uplink's hosts are asked for a service's address.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum AddressProbe {
    /// Before a service is let in
    Auto,
    /// Never: there is a router that answers for addresses that nobody has
    Off,
}

/// Whether userfaultfd is used.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum Userfaultfd {
    /// Where it works
    Auto,
    /// Never: services are restored from images
    Off,
}

/// Whether patches of CRIU are used.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum CriuPatches {
    /// Where it has them
    Auto,
    /// Never: it is used as a stock CRIU
    Off,
}

/// What becomes of frames for a service during the pause.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum CutOver {
    /// They are held, and handed in where it runs next
    Hold,
    /// They are dropped, as without godwit
    Drop,
}

/// What finds written pages here.
fn tracker(wanted: Track) -> Detected {
    let forced = |backend| Detected { backend, reasons: vec!["godwitd was told so (--tracker)".into()] };
    match wanted {
        Track::Auto => tracker::detect(),
        Track::Uffd => forced(Backend::Uffd),
        Track::SoftDirty => forced(Backend::SoftDirty),
        Track::None => forced(Backend::None),
    }
}

/// Whether processes can be restored here before their pages are in place.
async fn can_restore_lazily(criu: &Criu) -> bool {
    let reason = match tokio::time::timeout(CRIU_ANSWER, criu.features()).await {
        Ok(Ok(features)) if features.lazy_pages => return true,
        Ok(Ok(_)) => "this kernel does not allow userfaultfd, or CRIU was built without it".to_owned(),
        Ok(Err(error)) => error_chain(&error),
        Err(_) => "CRIU does not answer".to_owned(),
    };
    tracing::warn!(%reason, "services that arrive are restored from images, with all their pages");
    false
}

/// How long CRIU may take to tell what it can do: it does so in milliseconds.
const CRIU_ANSWER: Duration = Duration::from_secs(5);

/// Serves a node until SIGTERM or SIGINT.
pub(crate) async fn serve(args: ServeArgs, manager: &Manager) -> anyhow::Result<()> {
    if !nix::unistd::geteuid().is_root() {
        bail!("godwitd must run as root: it makes containers, mounts and network devices");
    }
    allow_open_files();
    let identity = Arc::new(Identity::load(&args.state.join(peers::IDENTITY)).context(
        "this node has no identity; found a cluster with `godwit cluster init` or join one with `godwit cluster join`",
    )?);
    if identity.node().as_str() != args.node {
        bail!("the certificate of this node says that it is {}, not {}", identity.node(), args.node);
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
    let node = build(&args, Arc::clone(&identity)).await?;

    services::record_all(&node)?;
    // Before anything of services is looked for.
    networks::keep(&node).await?;
    node.local().clear_half_made().await.context("what was half made cannot be looked for")?;
    recovery::recover(node.local()).await.context("migrations left unfinished cannot be ended")?;
    cluster::put_own_right(&node)?;
    services::find_again(&node).await?;

    let listener = Listener::bind(args.listen, &identity, ListenOptions::default()).await?;
    let mut join_at = args.listen;
    join_at.set_port(args.listen.port().checked_add(1).context("the port must be below 65535")?);
    let inviting = JoinListener::bind(join_at, &identity, ListenOptions::default()).await?;
    let socket = args.run.join("godwitd.sock");
    let users = listen_unix(&socket)?;
    tracing::info!(node = %args.node, listen = %args.listen, socket = %socket.display(), "godwitd serves");
    manager.tell("READY=1").context("the service manager cannot be told that the node is ready")?;
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
        () = accept_peers(Arc::clone(&node), listener, peers) => Ok(()),
        () = join::invite(Arc::clone(&node), inviting) => Ok(()),
        () = cluster::run(Arc::clone(&node)) => Ok(()),
        () = relieve(&node) => Ok(()),
        () = images::tend(&node, Duration::from_secs(u64::from(args.keep_layers) * 3600)) => Ok(()),
        reason = ends_at_once(&node) => Err(anyhow::anyhow!(reason)),
        () = renew::run(&node) => Ok(()),
        error = node.networks().failed() => Err(error).context("the uplink cannot be watched"),
        _ = terminate.recv() => Ok(()),
        _ = interrupt.recv() => Ok(()),
    };
    if let Err(error) = manager.tell("STOPPING=1") {
        tracing::warn!(%error, "the service manager cannot be told that the node ends");
    }
    shut_down(&node).await;
    let _ = std::fs::remove_file(&socket);
    ended
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

async fn build(args: &ServeArgs, identity: Arc<Identity>) -> anyhow::Result<Arc<Node>> {
    let state = Arc::new(State::open(&args.state.join("node.db"))?);
    removals::load(&state, &identity)?;
    let vtep = godwit_network::underlay_address(&args.uplink).await?;
    state.put_member(&Member {
        name: args.node.clone(),
        address: args.listen.to_string(),
        vtep: vtep.to_string(),
        revision: u64::try_from(now_ms()).unwrap_or(1),
    })?;
    let config = OverlayConfig {
        vni: VNI,
        port: args.vxlan_port,
        prefix6: args.subnet6,
        netns_dir: args.run.join("netns"),
        encryption: encrypt::of_node(args.encrypt, &state)?,
        backend: args.network_backend.into(),
        ..OverlayConfig::new(args.subnet, &args.uplink, vtep)
    };
    // Before the overlay takes its first frame.
    let (tunnel_port, probes) = (args.listen.port().checked_add(2), args.address_probe == AddressProbe::Auto);
    let network = Surroundings::raise(&config, &args.node, tunnel_port, probes, &state).await?;
    let overlay = Overlay::up(config).await?;
    let store = Store::open(&args.state.join("images"))?;
    let engine = Runc::new(RuncConfig {
        runc: args.runc.clone(),
        criu: args.criu.clone(),
        root: args.run.join("runc"),
        shim: beside_us("godwit-shim")?,
    });
    let criu = match args.criu_patches {
        CriuPatches::Auto => Criu::new(&args.criu),
        CriuPatches::Off => Criu::new(&args.criu).as_stock(),
    };
    if let Err(error) = criu.warm_up().await {
        // It works without, only slower; a CRIU that does not work at all is said by the doctor.
        tracing::warn!(error = %error_chain(&error), "CRIU looks at the kernel anew at every dump and restore");
    }
    let certificate_validity = args.certificate_validity.map(Duration::from_secs);
    let mut node = Node::new(&args.node, state, Peers::new(identity), network);
    node.certificate_validity = certificate_validity;
    let node = Arc::new(node);
    let holds = args.cutover == CutOver::Hold;
    let layout = Layout {
        state: args.state.clone(),
        run: args.run.clone(),
        netns: overlay.config().netns_dir.clone(),
        cgroup_parent: args.cgroup_parent.clone(),
    };
    let networks = Arc::new(Networks::new(overlay));
    let network = SystemNetwork {
        networks: Arc::clone(&networks),
        namespaces: args.namespaces.clone(),
        layout: layout.clone(),
        holds,
    };
    let local = Local {
        node: args.node.clone(),
        layout: layout.clone(),
        engine: Arc::new(engine),
        network: Arc::new(network),
        standstills: Arc::new(Standstills::new(layout, holds)),
        mounts: Arc::new(SystemMounts),
        hooks: args.hooks.clone(),
        binds: Binds { allowed: args.allow_bind.clone(), own: vec![args.state.clone(), args.run.clone()] },
        store: Arc::new(store),
        journal: Journal::open(&args.state.join("journal.db"))?,
        host: Arc::new(NodeHost(Arc::downgrade(&node))),
        promised: Promised::up_to(args.incoming_memory << 20),
        patience: Duration::from_secs(args.patience),
        remembered: args.delta_cache << 20,
        arrivals: Arrivals::default(),
        retention: Retention::new(args.retained_memory.map(|mib| mib << 20)),
        pagers: Arc::new(PagerProgram(beside_us("godwit-pager")?)),
        userfaultfd: args.userfaultfd == Userfaultfd::Auto && can_restore_lazily(&criu).await,
        tracker: tracker(args.tracker),
        ending: CancellationToken::new(),
        doubts: Doubts::default(),
        waits: Waits::default(),
        fatal: tokio::sync::watch::channel(None).0,
        criu: Arc::new(criu.clone()),
    };
    node.equip(Means { local: Arc::new(local), networks, criu, by_policy: restart::by_policy });
    Ok(node)
}

/// A program of ours that lies beside this one.
fn beside_us(name: &str) -> anyhow::Result<PathBuf> {
    let own = std::env::current_exe().context("cannot find this program's own path")?;
    let path = own.with_file_name(name);
    if path.exists() {
        Ok(path)
    } else {
        bail!("{} is missing; install all of godwit's programs together", path.display())
    }
}

/// How long another daemon may have the run directory. One that was killed is still told to have it for as
/// long as a program that it was starting has not been executed, and shares its files.
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
    // The lock says that nobody listens on a socket that is there.
    match std::fs::remove_file(path) {
        Err(e) if e.kind() != std::io::ErrorKind::NotFound => {
            return Err(e).with_context(|| format!("cannot remove {}", path.display()));
        }
        _ => {}
    }
    // With this mode from its first instant: whoever connects before a change stays connected.
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

async fn accept_peers(
    node: Arc<Node>,
    mut listener: Listener,
    peers: mpsc::Sender<std::io::Result<PeerStream>>,
) {
    let mut identities = node.peers.identities();
    let mut clock = tokio::time::interval(Duration::from_secs(1));
    let data = DataSessions::default();
    loop {
        let accepted = tokio::select! {
            accepted = listener.accept() => accepted,
            _ = clock.tick() => {
                let members = node.state.members().unwrap_or_default();
                let addresses = members.iter().filter_map(|m| m.address.parse::<SocketAddr>().ok());
                listener.known().set(addresses.map(|address| address.ip()));
                continue;
            }
            Ok(()) = identities.changed() => {
                let identity = Arc::clone(&identities.borrow_and_update());
                if let Err(error) = listener.set_identity(&identity) {
                    tracing::error!(error = %error_chain(&error), "other nodes are shown the older certificate");
                }
                continue;
            }
        };
        match accepted.alpn {
            Alpn::Data => {
                let Some(session) = data.enter(&accepted.peer) else {
                    tracing::warn!(node = %accepted.peer, "has too many data connections; connection closed");
                    continue;
                };
                let local = Arc::clone(node.local());
                tokio::spawn(async move {
                    receive(local, accepted).await;
                    drop(session);
                });
            }
            _ => {
                let stream = PeerStream { peer: accepted.peer, stream: accepted.stream };
                // Data connections do not wait behind it.
                match peers.try_send(Ok(stream)) {
                    Ok(()) => {}
                    Err(mpsc::error::TrySendError::Full(_)) => {
                        tracing::warn!(
                            "too many connections of other nodes wait to be served; one is closed"
                        );
                    }
                    Err(mpsc::error::TrySendError::Closed(_)) => return,
                }
            }
        }
    }
}

/// Data connections of one member at the same time: all streams of a dozen migrations.
const MAX_DATA_SESSIONS: usize = 256;

/// How many data connections each member has.
#[derive(Clone, Default)]
struct DataSessions(Arc<Mutex<HashMap<NodeName, Arc<()>>>>);

impl DataSessions {
    /// One more, which ends when what is returned is dropped; none where there are too many.
    fn enter(&self, peer: &NodeName) -> Option<Arc<()>> {
        let mut sessions = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let session = sessions.entry(peer.clone()).or_default();
        (Arc::strong_count(session) <= MAX_DATA_SESSIONS).then(|| Arc::clone(session))
    }
}

async fn receive(local: Arc<Local>, accepted: Accepted) {
    let remote = accepted.remote;
    match Connection::accept(accepted, &link::options()).await {
        Ok(connection) => destination::serve(local, Link::new(connection)).await,
        Err(error) => tracing::warn!(%remote, %error, "a data connection did not begin as it must"),
    }
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

/// Gives memory back that only makes later migrations shorter, when the machine runs short of it.
async fn relieve(node: &Node) {
    let total = directory::total_memory();
    let mut clock = tokio::time::interval(Duration::from_secs(1));
    loop {
        clock.tick().await;
        node.local().retention.relieve(total);
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
}

/// A peer's connection that knows whose it is.
struct PeerStream {
    peer: NodeName,
    stream: SecureStream,
}

impl Connected for PeerStream {
    type ConnectInfo = NodeName;

    fn connect_info(&self) -> NodeName {
        self.peer.clone()
    }
}

impl AsyncRead for PeerStream {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut TaskContext<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<std::io::Result<()>> {
        Pin::new(&mut self.stream).poll_read(context, buffer)
    }
}

impl AsyncWrite for PeerStream {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut TaskContext<'_>,
        data: &[u8],
    ) -> Poll<std::io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write(context, data)
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut TaskContext<'_>) -> Poll<std::io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut TaskContext<'_>) -> Poll<std::io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(context)
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn every_flag_is_in_the_documentation() {
        let page = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/install.md");
        let page = std::fs::read_to_string(page).unwrap();
        let command = <ServeArgs as clap::Args>::augment_args(clap::Command::new("serve"));
        let flags =
            command.get_arguments().filter(|flag| !flag.is_hide_set()).filter_map(clap::Arg::get_long);
        let missing: Vec<_> = flags
            .filter(|flag| !page.contains(&format!("`--{flag}`")) && !page.contains(&format!("`--{flag} ")))
            .collect();
        assert!(missing.is_empty(), "not in docs/install.md: {missing:?}");
    }

    #[test]
    fn flags_of_version_0_1_are_taken() {
        let command = <ServeArgs as clap::Args>::augment_args(clap::Command::new("serve"));
        let line = "serve --node a --listen 192.0.2.1:7117 --agent-memory 5 --keep-memory 6";
        let found = command.try_get_matches_from(line.split(' ')).unwrap();
        let args = <ServeArgs as clap::FromArgMatches>::from_arg_matches(&found).unwrap();
        assert_eq!((args.delta_cache, args.retained_memory), (5, Some(6)));
    }

    #[test]
    fn one_members_data_connections_are_bounded_and_take_no_room_from_others() {
        let sessions = DataSessions::default();
        let (b, c) = (NodeName::new("b").unwrap(), NodeName::new("c").unwrap());
        let mut held: Vec<_> = (0..MAX_DATA_SESSIONS).map(|_| sessions.enter(&b).unwrap()).collect();
        assert!(sessions.enter(&b).is_none());
        assert!(sessions.enter(&c).is_some());
        held.pop();
        assert!(sessions.enter(&b).is_some());
    }

    #[tokio::test]
    async fn the_socket_is_for_root_alone_from_its_first_instant() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("socket");
        // What was there before is nobody's: the lock says so.
        std::fs::write(&path, "").unwrap();
        let before = umask(Mode::empty());
        let _listening = listen_unix(&path).unwrap();
        let restored = umask(before);
        assert_eq!(restored, Mode::empty(), "the mask is put back");
        assert_eq!(std::fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
    }
}
