//! `godwit bench crossing`: what it adds to a move that the service goes on under the destination's executables.
//!
//! ```text
//!   for each number of threads ─▶ a lab, the service, a client ─▶ for each run ─▶ there and back: plain, then with --cross
//! ```
//!
//! Both kinds take turns in one lab, with one service and one connection, so that what else the machine does falls on both.
//! Both nodes have one instruction set: the work is that of a crossing, and the time is that of real processors.

use std::{
    collections::BTreeMap,
    io::{Read as _, Write as _},
    net::{Ipv4Addr, SocketAddrV4, TcpStream},
    path::{Path, PathBuf},
    process::{Command, ExitCode},
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

use anyhow::{Context as _, bail, ensure};
use godwit_api::v1::{RunRequest, run_request::Source};
use godwit_cli::{
    global::Global,
    migration::{How, Mode, Outcome},
    output::{self, Table},
    values,
};
use godwit_lab::{Lab, Link};
use serde_json::Value;

use super::{Bed, plot::data::median, results::Results};
use crate::trial::{self, DESTINATION, SOURCE, blocking};

const SERVICE: &str = "crossing";
const ADDRESS: Ipv4Addr = Ipv4Addr::new(10, 88, 0, 30);
const PORT: u16 = 7000;
const PROGRAM: &str = include_str!("crossing.c");
/// Moves there and back that are not counted: the first ones bring its files and all of its memory.
const WARM_UP: u32 = 1;
/// How long it may take until the service listens.
const START: Duration = Duration::from_secs(30);
/// How long an answer may take.
const PATIENCE: Duration = Duration::from_secs(30);
/// Between two requests of the client.
const PAUSE: Duration = Duration::from_millis(1);

#[derive(Debug, Clone, clap::Args)]
pub(super) struct Args {
    /// Threads of the service; several numbers are measured one after the other
    #[arg(long, value_name = "NUMBER", value_delimiter = ',', default_value = "1,8,64", value_parser = clap::value_parser!(u32).range(1..=200))]
    threads: Vec<u32>,
    /// How much memory it holds
    #[arg(long, value_name = "SIZE", default_value = "64MiB", value_parser = values::size)]
    memory: u64,
    /// How its memory moves
    #[arg(long, value_enum, default_value = "precopy")]
    mode: Mode,
    /// Rate and one-way delay of each host's link: 1gbit,1ms [default: unshaped]
    #[arg(long, value_name = "RATE[,DELAY]")]
    link: Option<Link>,
    /// How often it moves there and back in each way
    #[arg(long, value_name = "NUMBER", default_value_t = 10, value_parser = clap::value_parser!(u32).range(1..=1000))]
    runs: u32,
    /// The compiler that builds the service
    #[arg(long, value_name = "PROGRAM", default_value = "godwit-cc")]
    compiler: PathBuf,
    /// Write the lines into this file too; one that is there is replaced
    #[arg(long, value_name = "FILE")]
    out: Option<PathBuf>,
}

pub(super) async fn measure(args: &Args, lab: &str, global: &Global) -> anyhow::Result<ExitCode> {
    // Else pages that a node has kept from the move before would not cross at all.
    let daemon_arguments = ["--retained-memory", "0"].map(str::to_owned).to_vec();
    let bed = Bed { name: lab.to_owned(), link: args.link, daemon_arguments, ..Bed::default() };
    let mut results = Results::new(args.out.as_deref(), global.json)?;
    for &threads in &args.threads {
        bed.lab(true, async |lab| there_and_back(args, threads, lab, &mut results).await).await?;
    }
    if !global.json {
        table(&results.rows).print()?;
    }
    Ok(ExitCode::SUCCESS)
}

async fn there_and_back(args: &Args, threads: u32, lab: &Lab, results: &mut Results) -> anyhow::Result<()> {
    let root = build(args, lab).await?;
    let connection = trial::connect(lab, SOURCE).await?;
    let request = RunRequest {
        name: SERVICE.to_owned(),
        address: ADDRESS.to_string(),
        source: Some(Source::Rootfs(root.to_string_lossy().into_owned())),
        command: vec![format!("/{SERVICE}"), PORT.to_string(), threads.to_string(), args.memory.to_string()],
        ..RunRequest::default()
    };
    connection.node.clone().run(request).await.map_err(|status| connection.explain(&status))?;
    let quiet = Global { json: true, socket: None, node: None, lab: lab.name().to_owned() };
    let there = lab.clone();
    let client = blocking(move || Client::start(&there)).await?;
    for run in 0..args.runs + WARM_UP {
        for cross in [false, true] {
            for to in [DESTINATION, SOURCE] {
                let mut request = How::default().request(args.mode, SERVICE, to);
                request.cross = cross;
                client.lap()?;
                let (report, _) = trial::asked(&connection, request, &quiet).await?;
                ensure!(
                    Outcome::of(&report) == Outcome::Moved,
                    "it was {}: {}",
                    report.outcome,
                    report.reason
                );
                ensure!(
                    report.set.is_empty() != cross,
                    "a move with cross: {cross} reports the set {:?}",
                    report.set
                );
                let mut row = serde_json::to_value(&report)?;
                row["bench"] = "crossing".into();
                row["series"] = if cross { "crossing" } else { "plain" }.into();
                row["threads"] = threads.into();
                row["memory"] = args.memory.into();
                row["link"] = args.link.map(|link| link.to_string()).into();
                row["longest_wait_ms"] = client.lap()?.into();
                row["run"] = run.into();
                if run >= WARM_UP {
                    results.add(row)?;
                }
            }
        }
    }
    blocking(move || client.stop()).await
}

/// The root filesystem of the service, with nothing but its program for this machine.
async fn build(args: &Args, lab: &Lab) -> anyhow::Result<PathBuf> {
    let directory = lab.state(SOURCE)?.with_file_name(SERVICE);
    let compiler = args.compiler.clone();
    blocking(move || {
        let root = directory.join("root");
        std::fs::create_dir_all(&root).with_context(|| format!("making {}", root.display()))?;
        let source = directory.join("crossing.c");
        std::fs::write(&source, PROGRAM).with_context(|| format!("writing {}", source.display()))?;
        let built = directory.join(SERVICE);
        compile(&compiler, &source, &built)?;
        let executable = directory.join(format!("{SERVICE}.{}", std::env::consts::ARCH));
        let copied = std::fs::copy(&executable, root.join(SERVICE));
        copied.with_context(|| format!("copying {}", executable.display()))?;
        Ok(root)
    })
    .await
}

fn compile(compiler: &Path, source: &Path, to: &Path) -> anyhow::Result<()> {
    let output = Command::new(compiler).arg("-O2").arg(source).arg("-o").arg(to).output();
    let output = output.with_context(|| {
        format!(
            "{} does not start; install the package godwit-isa, or name it with --compiler",
            compiler.display()
        )
    })?;
    let said = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "{} failed: {}", compiler.display(), said.trim());
    Ok(())
}

/// The service's only client, with one connection, which it never renews; it checks each answer.
struct Client {
    stop: Arc<AtomicBool>,
    longest: Arc<Mutex<Duration>>,
    thread: JoinHandle<anyhow::Result<()>>,
}

impl Client {
    fn start(lab: &Lab) -> anyhow::Result<Self> {
        let address = SocketAddrV4::new(ADDRESS, PORT);
        let deadline = Instant::now() + START;
        let stream = loop {
            match lab.inside("client", || TcpStream::connect(address))? {
                Ok(stream) => break stream,
                Err(error) if Instant::now() >= deadline => {
                    return Err(error).context("the service does not listen");
                }
                Err(_) => thread::sleep(PAUSE),
            }
        };
        stream.set_nodelay(true)?;
        stream.set_read_timeout(Some(PATIENCE))?;
        let (stop, longest) = (Arc::<AtomicBool>::default(), Arc::<Mutex<Duration>>::default());
        let (stopped, waits) = (Arc::clone(&stop), Arc::clone(&longest));
        let thread = thread::spawn(move || ask(stream, &stopped, &waits));
        Ok(Self { stop, longest, thread })
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
        self.thread.join().unwrap_or_else(|_| bail!("the client has panicked"))
    }
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

/// Medians of both kinds by number of threads, and what crossing adds.
fn table(rows: &[Value]) -> Table {
    let mut table = Table::new([
        "THREADS",
        "SERIES",
        "FROZEN",
        "ADDED",
        "LONGEST WAIT",
        "REST",
        "REWRITING",
        "ON THE WIRE",
    ]);
    let mut groups: BTreeMap<(u64, bool), Vec<&Value>> = BTreeMap::new();
    for row in rows {
        let key = (row["threads"].as_u64().unwrap_or(0), row["series"] == "crossing");
        groups.entry(key).or_default().push(row);
    }
    for (&(threads, cross), rows) in &groups {
        let of = |cross: bool, field: &str| of_all(groups.get(&(threads, cross))?, field);
        let time = |field: &str| of_all(rows, field).map(output::millis).unwrap_or_default();
        let added = of(true, "frozen_ms").zip(of(false, "frozen_ms")).map(|(with, without)| with - without);
        table.row([
            threads.to_string(),
            if cross { "crossing" } else { "plain" }.to_owned(),
            time("frozen_ms"),
            added.filter(|_| cross).map(|added| format!("{added:+.1} ms")).unwrap_or_default(),
            time("longest_wait_ms"),
            if cross { time("park_ms") } else { String::new() },
            if cross { time("rewrite_ms") } else { String::new() },
            of_all(rows, "wire_bytes").map(|bytes| format!("{:.1} MB", bytes / 1e6)).unwrap_or_default(),
        ]);
    }
    table
}

fn of_all(rows: &[&Value], field: &str) -> Option<f64> {
    median(rows.iter().filter_map(|row| row[field].as_f64()).collect())
}
