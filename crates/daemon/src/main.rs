//! `godwitd`: one node of a cluster. Founds or joins a cluster, and serves the node.
//!
//! ```text
//!  godwit ── unix socket ──▶ node_api ─┐            ┌▶ services, restart, exec, logs   services of this node
//!                                      ├─▶ verbs ───┼▶ migrate, host                   moves (godwit-migration)
//!  other nodes ── mutual TLS ▶ peer_api┘  who may   ├▶ networks, network, forward      the overlay (godwit-network)
//!                                                   ├▶ cluster, join, removals, renew  the members
//!  data connections ────────▶ serve ──────────────▶ └▶ images, capture, doctor, …
//!
//!  node: what all of these share ──▶ directory: what is known of the cluster ──▶ state: the same on disk
//! ```
//!
//! [`node_api`] and [`peer_api`] are thin: each verb's work is in the module of its name, and [`verbs`] says who may ask for
//! it. Data connections need no verb: a member's certificate opens them, and what comes over one is `godwit-migration`'s to
//! judge. What users give is checked in [`convert`], what other nodes say in [`trust`]. At its start [`services`] finds the
//! node's services again, which have run on with their shims and pagers, and [`serve`] calls
//! `godwit_migration::recovery`. How pages move, what CRIU does and how the kernel's tables look is not known here.

mod capture;
mod cluster;
mod connections;
mod convert;
mod directory;
mod doctor;
mod encrypt;
mod events;
mod exec;
mod forward;
mod host;
mod images;
mod introduced;
mod join;
mod keys;
mod logs;
mod migrate;
mod network;
mod network_changes;
mod network_info;
mod networks;
mod node;
mod node_api;
mod notify;
mod peer_api;
mod peers;
mod removals;
mod renew;
mod restart;
mod serve;
mod services;
mod state;
mod status;
mod surroundings;
mod tombstones;
mod trust;
mod verbs;

use std::path::PathBuf;
use std::process::ExitCode;

use clap::{Parser, Subcommand};
use tracing_subscriber::EnvFilter;

// What `godwit version` shows is what migrations speak; `migration` must not know the API's crate.
const _: () = assert!(godwit_api::PROTOCOL_VERSION == godwit_migration::message::PROTOCOL_VERSION);

/// What is logged without `GODWIT_LOG`: the netlink crates warn of every attribute newer than they, and boringtun of
/// every handshake without an answer, which `network inspect` shows.
const QUIET: &str = "info,netlink_packet_route=error,netlink_proto=error,boringtun=off";

#[derive(Parser)]
#[command(name = "godwitd", version, about = "The daemon of a godwit node")]
struct Cli {
    #[command(subcommand)]
    verb: Verb,
}

#[derive(Subcommand)]
enum Verb {
    /// Serve this node
    Serve(Box<serve::ServeArgs>),
    /// Found a cluster on this node
    Init {
        /// Directory that survives a restart of the machine
        #[arg(long, default_value = "/var/lib/godwit")]
        state: PathBuf,
        /// Name of the cluster
        #[arg(long, default_value = "godwit")]
        cluster: String,
        /// Name of this node
        #[arg(long)]
        node: String,
        /// Address and port other nodes reach this one at
        #[arg(long, value_name = "ADDRESS:PORT")]
        listen: std::net::SocketAddr,
        /// Whether what nodes send each other for services is encrypted, on this node and on all that join
        #[arg(long, value_enum)]
        encrypt: Option<encrypt::Encrypt>,
    },
    /// Join the cluster that a token invites to
    Join {
        /// Directory that survives a restart of the machine
        #[arg(long, default_value = "/var/lib/godwit")]
        state: PathBuf,
        /// Name of this node
        #[arg(long)]
        node: String,
        /// Address and port other nodes reach this one at
        #[arg(long, value_name = "ADDRESS:PORT")]
        listen: std::net::SocketAddr,
        /// What `godwit cluster token` printed on the founding node; with `-` it is read from standard input,
        /// where the machine's other users do not see it
        token: String,
    },
}

fn main() -> ExitCode {
    let cli = Cli::parse();
    let filter = EnvFilter::try_from_env("GODWIT_LOG").unwrap_or_else(|_| EnvFilter::new(QUIET));
    // A line that cannot be written, as on a full disk, is lost, and must not end the task that wrote it.
    tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(std::io::stderr)
        .with_ansi(false)
        .log_internal_errors(false)
        .init();
    // SAFETY: no thread has been started yet.
    let manager = unsafe { notify::Manager::take() };
    let runtime = match tokio::runtime::Runtime::new() {
        Ok(runtime) => runtime,
        Err(error) => {
            eprintln!("Error: godwitd cannot start its threads: {error}");
            return ExitCode::FAILURE;
        }
    };
    let done = runtime.block_on(async {
        match cli.verb {
            Verb::Serve(args) => serve::serve(*args, &manager).await,
            Verb::Init { state, cluster, node, listen, encrypt } => {
                join::init(&state, &cluster, &node, &listen.to_string(), encrypt)
            }
            Verb::Join { state, node, listen, token } => {
                let token = if token == "-" { join::read_token(std::io::stdin().lock())? } else { token };
                join::join(&state, &node, &listen.to_string(), &token).await
            }
        }
    });
    let code = match done {
        Ok(()) => 0,
        Err(error) => {
            eprintln!("Error: {error:#}");
            1
        }
    };
    // Without dropping the runtime: it would drop tasks one by one, and those that are left would take the end of
    // another task for the end of what that task looks after. The next life goes on from the journal.
    std::process::exit(code)
}
