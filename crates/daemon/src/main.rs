//! `godwitd`: one node of a cluster. Founds or joins a cluster, and serves the node.
//!
//! ```text
//!  godwit ── unix socket ──▶ node_api ─┐            ┌▶ services, restart, exec, logs   services of this node
//!                                      ├─▶ verbs ───┼▶ migrate, cluster_view           moves (godwit-migration)
//!  other nodes ── mutual TLS ▶ peer_api┘  who may   ├▶ network, network_changes        the overlay (godwit-network)
//!                                                   ├▶ cluster, join, removals, renew  the members
//!  data connections ────────▶ serve ──────────────▶ └▶ images, capture, doctor, …
//!
//!  node: what all of these share ──▶ directory: what is known of the cluster ──▶ state: the same on disk
//! ```
//!
//! [`node_api`] and [`peer_api`] are thin: each verb's work is in the module of its name, and [`verbs`] says who may ask for
//! it. Data connections need no verb: a member's certificate opens them, and what comes over one is `godwit-migration`'s to
//! judge. What users give is checked in [`convert`], what other nodes say in [`trust`]. [`own`] says what the node is called
//! and where it is reached, and [`unit`] has systemd start it. At its start [`services`] finds the
//! node's services again, which have run on with their shims and pagers, and [`serve`] calls
//! `godwit_migration::recovery`. How pages move, what CRIU does and how the kernel's tables look is not known here.

mod add_platform;
mod adopt;
mod candidate;
mod capture;
mod check;
mod checkpoint;
mod cluster;
mod cluster_view;
mod connections;
mod convert;
mod copy;
mod cordon;
mod counters;
mod directory;
mod doctor;
mod drain;
mod engine_changes;
mod events;
mod exec;
mod follow;
mod images;
mod introduced;
mod join;
mod layers;
mod load;
mod logs;
mod made_by;
mod metrics;
mod migrate;
mod modules;
mod names;
mod network;
mod network_changes;
mod node;
mod node_api;
mod notify;
mod own;
mod peer_api;
mod peers;
mod pieces;
mod place;
mod plain;
mod prepare;
mod protection;
mod removals;
mod renew;
mod restart;
mod restore;
mod serve;
mod services;
mod sessions;
mod staging;
mod state;
mod stats;
mod status;
mod tombstones;
mod trust;
mod unit;
mod update;
mod verbs;
mod volumes;
mod wait;

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::Context as _;
use clap::{CommandFactory as _, Parser, Subcommand};
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
    /// Found a cluster on this node, and start its daemon
    Init(join::InitArgs),
    /// Join the cluster that a token invites to, and start this node's daemon
    Join(join::JoinArgs),
    /// Write the man pages of godwitd into a directory
    Man {
        /// The directory, made if it is missing
        directory: PathBuf,
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
            Verb::Init(args) => join::init(&args).await,
            Verb::Join(args) => join::join(&args).await,
            Verb::Man { directory } => man(&directory),
        }
    });
    let code = match done {
        Ok(()) => 0,
        Err(error) => {
            eprintln!("Error: {error:#}");
            1
        }
    };
    // Without dropping the runtime: it would drop tasks one by one, and a task that is left would take the end of
    // another one for the end of the process that this one watches. The next start continues from the journal.
    std::process::exit(code)
}

/// Writes a man page of godwitd, and one of each verb.
fn man(directory: &Path) -> anyhow::Result<()> {
    let unwritable = || format!("the man pages cannot be written to {}", directory.display());
    std::fs::create_dir_all(directory).with_context(unwritable)?;
    clap_mangen::generate_to(Cli::command(), directory).with_context(unwritable)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn the_command_line_is_consistent() {
        Cli::command().debug_assert();
    }

    #[test]
    fn the_manual_has_the_versions_of_all_that_has_one() {
        use godwit_migration::{journal, message::Versions};
        let manual = include_str!("../../../docs/compatibility.md");
        let row = |what: &str| -> [&str; 2] {
            let line = manual.lines().find(|line| line.starts_with("| ") && line.contains(what));
            let cells: Vec<_> = line.unwrap().split('|').map(str::trim).collect();
            [cells[2], cells[3]]
        };
        let shown = |oldest: usize, newest: usize| {
            let older = match newest - oldest {
                0 => String::new(),
                1 => oldest.to_string(),
                _ => format!("{oldest} to {}", newest - 1),
            };
            [newest.to_string(), older]
        };
        let (frames, pager) = (godwit_transfer::frame::VERSIONS, godwit_memory::pager::VERSIONS);
        let numbers = [u32::from(*frames.start()), u32::from(*frames.end()), *pager.start(), *pager.end()];
        let [oldest_frame, newest_frame, oldest_pager, newest_pager] = numbers.map(|number| number as usize);
        let (oldest, newest) = (Versions::OWN.oldest() as usize, Versions::OWN.newest() as usize);
        assert_eq!(row("migration protocol"), shown(oldest, newest));
        assert_eq!(row("frames of data"), shown(oldest_frame, newest_frame));
        assert_eq!(row("pager protocol"), shown(oldest_pager, newest_pager));
        assert_eq!(row("`journal.db` |"), shown(0, journal::SCHEMA_VERSION));
        assert_eq!(row("`node.db` |"), shown(0, state::SCHEMA_VERSION));
        for alpn in [godwit_transfer::Alpn::Join.as_bytes(), godwit_transfer::token::TOKEN_PREFIX.as_bytes()]
        {
            let name = std::str::from_utf8(alpn).unwrap();
            assert!(row(name)[0] == "1" && name.contains('1'), "{name}");
        }
    }

    #[test]
    fn every_verb_has_a_man_page_with_its_flags() {
        let directory = tempfile::tempdir().unwrap();
        let pages = directory.path().join("man/man1");
        man(&pages).unwrap();
        for (page, words) in [
            ("godwitd", "godwitd\\-serve(1)"),
            ("godwitd-serve", "\\-\\-address\\-probe"),
            ("godwitd-init", "\\-\\-no\\-start"),
            ("godwitd-join", "\\-\\-uplink"),
            ("godwitd-man", "DIRECTORY"),
        ] {
            let text = std::fs::read_to_string(pages.join(format!("{page}.1"))).unwrap();
            assert!(text.contains(words), "{page}: {text}");
            assert!(!text.contains("ready\\-fd"), "{page} shows what is for programs alone");
        }
    }
}
