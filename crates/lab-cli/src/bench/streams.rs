//! `godwit bench streams`: what the mover's own work costs, and what TLS adds to it.
//!
//! ```text
//!   touch ─▶ [look, read, hash, batch] ══ veth: plain TCP, then TLS ══ [check, store] ─▶ godwit-pager
//! ```
//!
//! Both ends are threads of this program, each in the network namespace of its node, in the very code of
//! a migration ([`godwit_migration::bulk`]). Streams without TLS are of another type than those that a
//! daemon takes, so that no daemon can be told to use them.

use std::{
    net::{Ipv4Addr, SocketAddr},
    path::{Path, PathBuf},
    process::ExitCode,
    sync::mpsc,
};

use anyhow::ensure;
use godwit_cli::{global::Global, values};
use godwit_lab::Lab;
use godwit_migration::bulk::{self, Round};
use godwit_transfer::{
    ClusterAuthority, Connection, ConnectionOptions, Identity, LinkOptions, ListenOptions, Listener,
    NodeName, Socket,
};
use nix::sys::resource::{UsageWho, getrusage};
use serde_json::json;
use tokio::net::{TcpListener, TcpStream};

use super::{
    Bed,
    parts::{Victim, veth},
    results::Results,
};
use crate::{
    iperf,
    trial::{DESTINATION, SOURCE, blocking},
};

#[derive(Debug, Clone, clap::Args)]
pub(super) struct Args {
    /// Memory of the process
    #[arg(long, value_name = "SIZE", default_value = "2GiB", value_parser = values::size)]
    memory: u64,
    /// Connections for its memory, and of iperf3
    #[arg(long, value_name = "N", default_value_t = 2, value_parser = clap::value_parser!(u32).range(1..=8))]
    streams: u32,
    /// How often
    #[arg(long, value_name = "NUMBER", default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..=1000))]
    runs: u32,
    /// Write the lines into this file too; one that is there is replaced
    #[arg(long, value_name = "FILE")]
    out: Option<PathBuf>,
}

/// What carries the frames.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Carrier {
    Plain,
    Tls,
}

/// Threads of each end: as many as a daemon has here, and no fewer than streams want.
const THREADS: usize = 2;

pub(super) async fn measure(args: &Args, name: &str, global: &Global) -> anyhow::Result<ExitCode> {
    let mut results = Results::new(args.out.as_deref(), global.json)?;
    let bed = Bed { name: name.to_owned(), ..Bed::default() };
    bed.lab(false, async |lab| {
        let (lab, args) = (lab.clone(), args.clone());
        blocking(move || {
            veth(&lab)?;
            let pager = std::env::current_exe()?.with_file_name("godwit-pager");
            let victim = Victim::start(args.memory)?;
            each(&lab, &args, &pager, victim.pid()?, &mut results)
        })
        .await
    })
    .await?;
    Ok(ExitCode::SUCCESS)
}

fn each(lab: &Lab, args: &Args, pager: &Path, pid: i32, results: &mut Results) -> anyhow::Result<()> {
    for run in 1..=args.runs {
        for carrier in [Carrier::Plain, Carrier::Tls] {
            let iperf = iperf::measure(lab, (SOURCE, DESTINATION), args.streams)?.bytes_per_second;
            let directory = lab.state(DESTINATION)?.with_file_name(format!("streams-{run}-{carrier:?}"));
            std::fs::create_dir_all(&directory)?;
            let ends = Ends { lab, args, pager, directory: &directory, carrier };
            let before = cpu_seconds()?;
            let Round { pages, took } = ends.cross(pid)?;
            let cpu = cpu_seconds()? - before;
            ensure!(pages >= args.memory / 4096, "{pages} pages crossed, and the process has more");
            let bytes = pages as f64 * 4096.0;
            let rate = bytes / took.as_secs_f64();
            let series = match carrier {
                Carrier::Plain => "streams-plain",
                Carrier::Tls => "streams-tls",
            };
            results.add(json!({
                "bench": "part", "series": series, "run": run, "memory": args.memory, "link": "veth",
                "streams": args.streams, "iperf_mb_s": iperf / 1e6, "pages_mb_s": rate / 1e6,
                "share_of_iperf": rate / iperf, "cpu_ns_per_byte": cpu * 1e9 / bytes,
            }))?;
        }
    }
    Ok(())
}

/// CPU time of this program so far: of both ends, without the pager's.
fn cpu_seconds() -> anyhow::Result<f64> {
    let usage = getrusage(UsageWho::RUSAGE_SELF)?;
    let seconds = |time: nix::sys::time::TimeVal| time.tv_sec() as f64 + time.tv_usec() as f64 / 1e6;
    Ok(seconds(usage.user_time()) + seconds(usage.system_time()))
}

/// Both ends of a round.
#[derive(Clone, Copy)]
struct Ends<'a> {
    lab: &'a Lab,
    args: &'a Args,
    pager: &'a Path,
    /// Of the pager, and of the identities.
    directory: &'a Path,
    carrier: Carrier,
}

impl Ends<'_> {
    fn cross(self, pid: i32) -> anyhow::Result<Round> {
        let source: NodeName = SOURCE.parse()?;
        let destination: NodeName = DESTINATION.parse()?;
        let authority = ClusterAuthority::create(&self.directory.join("ca"), "bench")?;
        let identity = |node: &NodeName| authority.issue_own(&self.directory.join(node.as_str()), node);
        let (sender, receiver) = (identity(&source)?, identity(&destination)?);
        // Where the receiver listens.
        let (tell, told) = mpsc::channel();
        std::thread::scope(|scope| {
            let receiving = scope.spawn(move || {
                self.run(DESTINATION, async move { self.receive(&receiver, &source, tell).await })
            });
            // Without an address the receiver has failed, and says why itself.
            let sent = match told.recv() {
                Ok(address) => self.run(SOURCE, self.send(&sender, &destination, address, pid)),
                Err(_) => Err(anyhow::anyhow!("the receiving end does not listen")),
            };
            let received =
                receiving.join().unwrap_or_else(|_| Err(anyhow::anyhow!("the receiving end failed")));
            received?;
            sent
        })
    }

    /// Runs one end in the network namespace of its node, with threads of its own.
    fn run<T: Send>(
        self,
        host: &str,
        work: impl Future<Output = anyhow::Result<T>> + Send,
    ) -> anyhow::Result<T> {
        self.lab.inside(host, || {
            // Its threads are made here, and so belong to the namespace.
            let runtime =
                tokio::runtime::Builder::new_multi_thread().worker_threads(THREADS).enable_all().build()?;
            runtime.block_on(work)
        })?
    }

    async fn receive(
        self,
        identity: &Identity,
        peer: &NodeName,
        tell: mpsc::Sender<SocketAddr>,
    ) -> anyhow::Result<()> {
        let any = SocketAddr::from((Ipv4Addr::UNSPECIFIED, 0));
        let (options, bytes) = (ConnectionOptions::default(), 2 * self.args.memory);
        let port_of = |local: SocketAddr| -> anyhow::Result<SocketAddr> {
            Ok(SocketAddr::from((self.lab.address(DESTINATION)?, local.port())))
        };
        match self.carrier {
            Carrier::Plain => {
                let listener = TcpListener::bind(any).await?;
                tell.send(port_of(listener.local_addr()?)?)?;
                let mut streams = Vec::new();
                for _ in 0..self.args.streams {
                    let (stream, _) = listener.accept().await?;
                    let socket = Socket::new(stream, &LinkOptions::default())?;
                    streams.push(Connection::unprotected(socket, peer.clone(), &options).await?);
                }
                bulk::receive(streams, self.pager, self.directory, bytes).await?;
            }
            Carrier::Tls => {
                let mut listener = Listener::bind(any, identity, ListenOptions::default()).await?;
                tell.send(port_of(listener.local_addr())?)?;
                let mut streams = Vec::new();
                for _ in 0..self.args.streams {
                    streams.push(Connection::accept(listener.accept().await, &options).await?);
                }
                bulk::receive(streams, self.pager, self.directory, bytes).await?;
            }
        }
        Ok(())
    }

    async fn send(
        self,
        identity: &Identity,
        peer: &NodeName,
        address: SocketAddr,
        pid: i32,
    ) -> anyhow::Result<Round> {
        let options = ConnectionOptions::default();
        Ok(match self.carrier {
            Carrier::Plain => {
                let mut streams = Vec::new();
                for _ in 0..self.args.streams {
                    let socket = Socket::new(TcpStream::connect(address).await?, &LinkOptions::default())?;
                    streams.push(Connection::unprotected(socket, peer.clone(), &options).await?);
                }
                bulk::send(streams, vec![pid]).await?
            }
            Carrier::Tls => {
                let mut streams = Vec::new();
                for _ in 0..self.args.streams {
                    streams.push(Connection::open(identity, &address.to_string(), peer, &options).await?);
                }
                bulk::send(streams, vec![pid]).await?
            }
        })
    }
}
