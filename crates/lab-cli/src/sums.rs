//! The service of sums (`sums.c`), built by `godwit-cc`, and moves of it with crossing and without, in turns.
//!
//! Both kinds take turns in one lab, with one service and one connection, so that what else the machine does falls on both.

use std::{
    io::{self, Read as _, Write as _},
    net::{Ipv4Addr, SocketAddrV4, TcpStream},
    path::Path,
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

use anyhow::{Context as _, bail, ensure};
use godwit_api::v1::Ulimit;
use godwit_cli::migration::{How, Mode};
use godwit_lab::Lab;
use nix::sys::resource::{Resource, getrlimit, setrlimit};
use serde_json::Value;

use crate::{
    services::{Program, Service},
    trial::{self, DESTINATION, SOURCE, blocking},
};

const SERVICE: &str = "sums";
const ADDRESS: Ipv4Addr = Ipv4Addr::new(10, 88, 0, 30);
const PORT: u16 = 7000;
pub(crate) const PROGRAM: Program = Program { name: SERVICE, source: include_str!("sums.c") };
/// Moves there and back that are not counted: the first ones bring its files and all of its memory.
const WARM_UP: u32 = 1;
/// How long it may take until the service listens.
const START: Duration = Duration::from_secs(30);
/// How long an answer may take.
const PATIENCE: Duration = Duration::from_secs(30);
/// Between two requests of the client.
const PAUSE: Duration = Duration::from_millis(1);

/// What the service is like.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Shape {
    pub(crate) processes: u32,
    /// Of each process.
    pub(crate) threads: u32,
    /// That say nothing, beside the one of the client.
    pub(crate) connections: u32,
    /// Threads of the first process that compute without a pause.
    pub(crate) computing: u32,
    /// Of all processes, in bytes.
    pub(crate) memory: u64,
}

impl Default for Shape {
    fn default() -> Self {
        Self { processes: 1, threads: 1, connections: 0, computing: 0, memory: 64 << 20 }
    }
}

impl Shape {
    /// What the program is started with.
    pub(crate) fn words(&self, port: u16) -> Vec<String> {
        let Self { processes, threads, connections, computing, memory } = *self;
        let more = [processes, connections, computing].map(u64::from);
        let numbers = [&[u64::from(port), threads.into(), memory], &more[..]].concat();
        numbers.iter().map(ToString::to_string).collect()
    }
}

/// Moves a service of this shape there and back so many times in each way; a row for each move goes to `add`.
pub(crate) async fn there_and_back(
    lab: &Lab,
    compiler: &Path,
    shape: Shape,
    mode: Mode,
    runs: u32,
    add: &mut impl FnMut(Value) -> io::Result<()>,
) -> anyhow::Result<()> {
    let connection = trial::connect(lab, SOURCE).await?;
    let files = u64::from(shape.connections) + 1024;
    let service = Service {
        name: SERVICE,
        address: ADDRESS,
        source: PROGRAM.root(lab, compiler).await?,
        command: [vec![format!("/{SERVICE}")], shape.words(PORT)].concat(),
        ulimits: vec![Ulimit { name: "nofile".to_owned(), soft: files, hard: files }],
    };
    service.run(&connection).await?;
    let quiet = trial::quiet(lab);
    let there = lab.clone();
    let client = blocking(move || Client::start(&there, shape.connections)).await?;
    for run in 0..runs + WARM_UP {
        for cross in [false, true] {
            for to in [DESTINATION, SOURCE] {
                let mut request = How::default().request(mode, SERVICE, to);
                request.cross = cross;
                client.lap()?;
                let report = trial::moves(&connection, request, &quiet).await?;
                ensure!(
                    report.set.is_empty() != cross,
                    "a move with cross: {cross} reports the set {:?}",
                    report.set
                );
                let mut row = serde_json::to_value(&report)?;
                row["series"] = if cross { "crossing" } else { "plain" }.into();
                row["processes"] = shape.processes.into();
                row["threads"] = shape.threads.into();
                row["connections"] = shape.connections.into();
                row["memory"] = shape.memory.into();
                row["longest_wait_ms"] = client.lap()?.into();
                row["run"] = run.into();
                if run >= WARM_UP {
                    add(row)?;
                }
            }
        }
    }
    blocking(move || client.stop()).await
}

/// The service's client, with one connection, which it never renews; it checks each answer. Further connections say nothing.
struct Client {
    idle: Vec<TcpStream>,
    stop: Arc<AtomicBool>,
    longest: Arc<Mutex<Duration>>,
    thread: JoinHandle<anyhow::Result<()>>,
}

impl Client {
    fn start(lab: &Lab, idle: u32) -> anyhow::Result<Self> {
        raise_limit(u64::from(idle) + 1024)?;
        // The service accepts them in this order.
        let idle = (0..idle).map(|_| connect(lab)).collect::<anyhow::Result<Vec<_>>>()?;
        let stream = connect(lab)?;
        stream.set_nodelay(true)?;
        stream.set_read_timeout(Some(PATIENCE))?;
        let (stop, longest) = (Arc::<AtomicBool>::default(), Arc::<Mutex<Duration>>::default());
        let (stopped, waits) = (Arc::clone(&stop), Arc::clone(&longest));
        let thread = thread::spawn(move || ask(stream, &stopped, &waits));
        Ok(Self { idle, stop, longest, thread })
    }

    /// The longest wait for an answer since this was asked last, in milliseconds.
    fn lap(&self) -> anyhow::Result<f64> {
        ensure!(
            !self.thread.is_finished(),
            "the client has ended before the service was moved as often as asked"
        );
        let mut longest = self.longest.lock().unwrap_or_else(PoisonError::into_inner);
        Ok(std::mem::take(&mut *longest).as_secs_f64() * 1e3)
    }

    fn stop(self) -> anyhow::Result<()> {
        self.stop.store(true, Ordering::Relaxed);
        self.thread.join().unwrap_or_else(|_| bail!("the client has panicked"))?;
        // With its end the service says something on the others.
        for mut stream in self.idle {
            stream.set_read_timeout(Some(PATIENCE))?;
            stream.read_exact(&mut [0]).context("a connection that had said nothing")?;
        }
        Ok(())
    }
}

fn connect(lab: &Lab) -> anyhow::Result<TcpStream> {
    let address = SocketAddrV4::new(ADDRESS, PORT);
    let deadline = Instant::now() + START;
    loop {
        match lab.inside("client", || TcpStream::connect(address))? {
            Ok(stream) => return Ok(stream),
            Err(error) if Instant::now() >= deadline => {
                return Err(error).context("the service does not listen");
            }
            Err(_) => thread::sleep(PAUSE),
        }
    }
}

/// Lets this process have so many open files more.
fn raise_limit(files: u64) -> anyhow::Result<()> {
    let (soft, hard) = getrlimit(Resource::RLIMIT_NOFILE)?;
    if soft < files {
        setrlimit(Resource::RLIMIT_NOFILE, files, hard.max(files))
            .context("raising the limit of open files")?;
    }
    Ok(())
}

fn ask(mut stream: TcpStream, stopped: &AtomicBool, longest: &Mutex<Duration>) -> anyhow::Result<()> {
    let (mut number, mut due) = (0_u64, 0_u64);
    while !stopped.load(Ordering::Relaxed) {
        number += 1;
        due = due.wrapping_add(number.wrapping_mul(0x9e37_79b9_7f4a_7c15));
        let begun = Instant::now();
        stream.write_all(&number.wrapping_mul(0x9e37_79b9_7f4a_7c15).to_le_bytes())?;
        let mut answer = [0; 8];
        stream.read_exact(&mut answer).context("the connection of the client")?;
        let sum = u64::from_le_bytes(answer);
        ensure!(sum == due, "after {number} words their sum is {sum:#x} and not {due:#x}");
        let mut longest = longest.lock().unwrap_or_else(PoisonError::into_inner);
        *longest = (*longest).max(begun.elapsed());
        drop(longest);
        thread::sleep(PAUSE);
    }
    Ok(())
}
