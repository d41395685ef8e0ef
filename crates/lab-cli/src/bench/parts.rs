//! Benchmarks of parts of a move, with the programs as they are: nothing is built for them alone.
//!
//! - `wire`: what the mover gets out of a link, beside iperf3 with as many streams on the same link.
//! - `faults`: how long a page is waited for while the others are pushed, and how fast those go.
//! - `scan`: CPU time of finding what a process wrote.
//!
//! The service is this program itself ([`super::touch`]): its memory does not compress, and it knows
//! when it met a fault.

use std::{
    io::{BufRead as _, BufReader, Write as _},
    net::{SocketAddrV4, TcpStream},
    path::{Path, PathBuf},
    process::{Child, Command, ExitCode, Stdio},
    time::{Duration, Instant},
};

use anyhow::{Context as _, bail, ensure};
use godwit_api::v1::{RunRequest, run_request::Source};
use godwit_cli::{
    client::Connection,
    global::Global,
    migration::{How, Mode, Outcome},
    values,
};
use godwit_lab::{Lab, Link, workload::Rootfs};
use godwit_memory::tracker::{Tracker, detect};
use nix::{
    time::{ClockId, clock_gettime},
    unistd::{SysconfVar, sysconf},
};
use serde_json::{Value, json};

use super::{Bed, results::Results, touch::Touched};
use crate::{
    iperf,
    trial::{self, ADDRESS, DESTINATION, SOURCE, blocking},
};

/// Of how many faults a result has the times.
const LONGEST: usize = 10;

/// A link, and a service that crosses it.
#[derive(Debug, Clone, clap::Args)]
pub(super) struct LinkArgs {
    /// Memory of the service
    #[arg(long, value_name = "SIZE", default_value = "1GiB", value_parser = values::size)]
    pub(super) memory: u64,
    /// Connections for its memory, and of iperf3
    #[arg(long, value_name = "N", default_value_t = 2, value_parser = clap::value_parser!(u32).range(1..=8))]
    pub(super) streams: u32,
    /// Rate and one-way delay of each host's link
    #[arg(long, value_name = "RATE[,DELAY]", default_value = "1gbit,1ms")]
    pub(super) link: Link,
    /// Join the nodes by a veth of their own instead, without a limit
    #[arg(long)]
    pub(super) veth: bool,
    /// How often
    #[arg(long, value_name = "NUMBER", default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..=1000))]
    pub(super) runs: u32,
    /// Write the lines into this file too; one that is there is replaced
    #[arg(long, value_name = "FILE")]
    pub(super) out: Option<PathBuf>,
}

#[derive(Debug, Clone, clap::Args)]
pub(super) struct FaultArgs {
    #[command(flatten)]
    link: LinkArgs,
    /// Threads of the service that touch its memory, each as fast as it can
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=64))]
    threads: u32,
}

#[derive(Debug, Clone, clap::Args)]
pub(super) struct ScanArgs {
    /// Memory of the process that is scanned
    #[arg(long, value_name = "SIZE", default_value = "4GiB", value_parser = values::size)]
    memory: u64,
    /// How often
    #[arg(long, value_name = "NUMBER", default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..=1000))]
    runs: u32,
    /// Write the lines into this file too; one that is there is replaced
    #[arg(long, value_name = "FILE")]
    out: Option<PathBuf>,
}

/// The service.
pub(super) const NAME: &str = "touch";
const PORT: u16 = 7002;
/// How long it may take to fill its memory.
const START: Duration = Duration::from_secs(120);
const PAUSE: Duration = Duration::from_millis(50);
/// How long all memory is checked after a move.
const LOOK: Duration = Duration::from_secs(1);

/// Bulk rates of an idle service's memory: copied before the freeze, and pushed after it.
pub(super) async fn wire(args: &LinkArgs, lab: &str, global: &Global) -> anyhow::Result<ExitCode> {
    let mut results = Results::new(args.out.as_deref(), global.json)?;
    for run in 1..=args.runs {
        for mode in [Mode::Precopy, Mode::Postcopy] {
            let crossed = cross(args, lab, mode, 0).await?;
            let series = format!("wire-{}{}", mode.as_str(), if args.veth { "-veth" } else { "" });
            results.add(row(&series, run, args, &crossed))?;
        }
    }
    Ok(ExitCode::SUCCESS)
}

/// Faults of a service that touches all of its memory at random as fast as it can.
pub(super) async fn faults(args: &FaultArgs, lab: &str, global: &Global) -> anyhow::Result<ExitCode> {
    let FaultArgs { link: args, threads } = args;
    let mut results = Results::new(args.out.as_deref(), global.json)?;
    for run in 1..=args.runs {
        let crossed = cross(args, lab, Mode::Postcopy, *threads).await?;
        let mut row = row("faults", run, args, &crossed);
        let mut faults = crossed.touched.faults;
        faults.sort_unstable();
        let ms = |us: u64| us as f64 / 1e3;
        let at = |share: usize| faults.get(faults.len() * share / 100).map(|fault| ms(fault.us));
        row["fault_p50_ms"] = at(50).into();
        row["fault_p99_ms"] = at(99).into();
        row["fault_max_ms"] = faults.last().map(|fault| ms(fault.us)).into();
        let longest: Vec<_> = faults.iter().rev().take(LONGEST).collect();
        row["longest"] = longest.iter().map(|fault| json!([ms(fault.at_us), ms(fault.us)])).collect();
        row["threads"] = (*threads).into();
        row["faults_timed"] = faults.len().into();
        row["round_trip_ms"] = match args.veth {
            true => 0.0,
            false => 2e3 * args.link.delay.as_secs_f64(),
        }
        .into();
        row["touches"] = crossed.touched.touches.into();
        row["stolen_ms"] = crossed.stolen_ms.into();
        results.add(row)?;
    }
    Ok(ExitCode::SUCCESS)
}

impl LinkArgs {
    /// A lab of these nodes.
    pub(super) async fn lab<T>(
        &self,
        name: &str,
        work: impl AsyncFnOnce(&Lab) -> anyhow::Result<T>,
    ) -> anyhow::Result<T> {
        let link = (!self.veth).then_some(self.link);
        let bed = Bed { name: name.to_owned(), link, ..Bed::default() };
        bed.lab(true, async |lab| {
            if self.veth {
                let lab = lab.clone();
                blocking(move || veth(&lab)).await?;
            }
            work(lab).await
        })
        .await
    }

    /// The link, as results name it.
    pub(super) fn link_name(&self) -> String {
        if self.veth { "veth".to_owned() } else { self.link.to_string() }
    }
}

/// What one move gave.
struct Crossed {
    /// Payload of iperf3, and of the pages, bytes per second.
    iperf: f64,
    rate: f64,
    touched: Touched,
    /// What the hypervisor of this machine has given to others meanwhile, milliseconds of a processor.
    stolen_ms: u64,
    report: Value,
}

fn row(series: &str, run: u32, args: &LinkArgs, crossed: &Crossed) -> Value {
    let mut row = crossed.report.clone();
    row["bench"] = "part".into();
    row["series"] = series.into();
    row["run"] = run.into();
    row["memory"] = args.memory.into();
    row["streams"] = args.streams.into();
    row["link"] = args.link_name().into();
    row["iperf_mb_s"] = (crossed.iperf / 1e6).into();
    row["pages_mb_s"] = (crossed.rate / 1e6).into();
    row["share_of_iperf"] = (crossed.rate / crossed.iperf).into();
    row["wrong_pages"] = crossed.touched.wrong.into();
    row
}

/// A move of the service over a link that iperf3 has just measured, while so many of its threads touch
/// its memory.
async fn cross(args: &LinkArgs, lab: &str, mode: Mode, threads: u32) -> anyhow::Result<Crossed> {
    args.lab(lab, async |lab| {
        let (there, streams) = (lab.clone(), args.streams);
        let measure = move || iperf::measure(&there, (SOURCE, DESTINATION), streams);
        let iperf = blocking(measure).await?.bytes_per_second;
        let (connection, mut orders) = start(lab, args.memory, threads).await?;
        if threads > 0 {
            orders = blocking(move || {
                orders.give("touch")?;
                Ok(orders)
            })
            .await?;
        }
        let how = How::plain(args.streams);
        let job = trial::Job { memory: args.memory, rate: 0, mode, how, back: false, busy: false };
        let quiet = trial::quiet(lab);
        let before = stolen_ms()?;
        let (report, moments) = trial::moved(&connection, &job, NAME, DESTINATION, &quiet).await?;
        ensure!(Outcome::of(&report) == Outcome::Moved, "it was {}: {}", report.outcome, report.reason);
        let touched = blocking(move || orders.check(threads > 0)).await?;
        let stolen_ms = stolen_ms()?.saturating_sub(before);
        let rate = match mode {
            Mode::Postcopy => report.faulted_bytes as f64 / (report.faulted_transfer_ms / 1e3),
            _ => moments.bandwidth,
        };
        Ok(Crossed { iperf, rate, touched, stolen_ms, report: serde_json::to_value(&report)? })
    })
    .await
}

/// What the hypervisor has given to others so far, of all processors (proc_stat(5)).
fn stolen_ms() -> anyhow::Result<u64> {
    let text = std::fs::read_to_string("/proc/stat").context("reading /proc/stat")?;
    let ticks = text.lines().next().and_then(|all| all.split_whitespace().nth(8)?.parse::<u64>().ok());
    let ticks = ticks.context("/proc/stat does not tell stolen time")?;
    let per_second = sysconf(SysconfVar::CLK_TCK)?.and_then(|ticks| u64::try_from(ticks).ok());
    Ok(ticks * 1000 / per_second.filter(|ticks| *ticks > 0).context("there is no length of a tick")?)
}

/// Joins the nodes past the lab's switch, whose program forwards no faster than it can.
pub(super) fn veth(lab: &Lab) -> anyhow::Result<()> {
    let ip = |host: &str, words: &[&str]| run(lab.command(host, "ip")?.args(words));
    let (a, b) = (lab.address(SOURCE)?.to_string(), lab.address(DESTINATION)?.to_string());
    let namespace = lab.namespace(DESTINATION)?;
    let namespace = namespace.file_name().and_then(|name| name.to_str()).unwrap_or_default();
    ip(SOURCE, &["link", "add", "direct0", "type", "veth", "peer", "name", "direct0", "netns", namespace])?;
    for (host, own, other) in [(SOURCE, &a, &b), (DESTINATION, &b, &a)] {
        ip(host, &["link", "set", "direct0", "mtu", "65535", "up"])?;
        ip(host, &["route", "add", &format!("{other}/32"), "dev", "direct0", "src", own])?;
    }
    Ok(())
}

fn run(command: &mut Command) -> anyhow::Result<()> {
    let output = command.stdin(Stdio::null()).output()?;
    ensure!(output.status.success(), "{command:?}: {}", String::from_utf8_lossy(&output.stderr).trim());
    Ok(())
}

/// Runs the service on the source; returns when its memory is filled.
pub(super) async fn start(lab: &Lab, memory: u64, threads: u32) -> anyhow::Result<(Connection, Orders)> {
    let there =
        Global { json: true, socket: Some(lab.socket(SOURCE)?), node: None, lab: lab.name().to_owned() };
    let mut connection = Connection::open(&there).await?;
    let directory = lab.state(SOURCE)?.with_file_name("touch");
    let program = std::env::current_exe()?;
    let copied = program.clone();
    let rootfs = blocking(move || Ok(Rootfs::new(directory)?.binary(copied)?.path().to_owned())).await?;
    let request = RunRequest {
        name: NAME.to_owned(),
        address: ADDRESS.to_string(),
        source: Some(Source::Rootfs(rootfs.to_string_lossy().into_owned())),
        command: command(&program, memory, PORT, threads.max(1)),
        ..RunRequest::default()
    };
    connection.node.run(request).await.map_err(|status| connection.explain(&status))?;
    let there = lab.clone();
    let orders = blocking(move || {
        let address = SocketAddrV4::new(ADDRESS, PORT);
        Orders::connect(|| Ok(there.inside("client", || TcpStream::connect(address))??))
    });
    Ok((connection, orders.await?))
}

fn command(program: &Path, memory: u64, port: u16, threads: u32) -> Vec<String> {
    let program = program.to_string_lossy().into_owned();
    let (memory, port, threads) = (memory.to_string(), port.to_string(), threads.to_string());
    let words = [&program, "bench", "touch", "--memory", &memory, "--port", &port, "--threads", &threads];
    words.map(str::to_owned).to_vec()
}

/// The service as a process of this machine, in no container. It ends with this value.
pub(super) struct Victim {
    process: Child,
    orders: Orders,
}

impl Victim {
    /// Returns when its memory is filled.
    pub(super) fn start(memory: u64) -> anyhow::Result<Self> {
        let words = command(&std::env::current_exe()?, memory, 0, 1);
        let (first, rest) = words.split_first().context("no program")?;
        let mut process =
            Command::new(first).args(rest).stdin(Stdio::null()).stdout(Stdio::piped()).spawn()?;
        let orders = Self::orders(&mut process);
        match orders {
            Ok(orders) => Ok(Self { process, orders }),
            Err(error) => {
                process.kill()?;
                process.wait()?;
                Err(error)
            }
        }
    }

    fn orders(process: &mut Child) -> anyhow::Result<Orders> {
        let mut port = String::new();
        BufReader::new(process.stdout.take().context("no output")?).read_line(&mut port)?;
        let port: u16 = port.trim().parse().context("the service has ended")?;
        Orders::connect(|| Ok(TcpStream::connect(("127.0.0.1", port))?))
    }

    pub(super) fn pid(&self) -> anyhow::Result<i32> {
        Ok(i32::try_from(self.process.id())?)
    }
}

impl Drop for Victim {
    fn drop(&mut self) {
        // Fails for one that has been waited for, which this has not.
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

/// The connection over which the service is told what to do.
pub(super) struct Orders(BufReader<TcpStream>);

impl Orders {
    pub(super) fn connect(connect: impl Fn() -> anyhow::Result<TcpStream>) -> anyhow::Result<Self> {
        let deadline = Instant::now() + START;
        loop {
            match connect() {
                Ok(stream) => return Ok(Self(BufReader::new(stream))),
                Err(error) if Instant::now() >= deadline => {
                    return Err(error.context("the service does not answer"));
                }
                Err(_) => std::thread::sleep(PAUSE),
            }
        }
    }

    pub(super) fn give(&mut self, order: &str) -> anyhow::Result<String> {
        self.0.get_mut().write_all(format!("{order}\n").as_bytes())?;
        let mut answer = String::new();
        ensure!(self.0.read_line(&mut answer)? > 0, "the service has closed the connection");
        Ok(answer.trim().to_owned())
    }

    /// Ends the touching; fails if a page did not hold what belongs there. Where nothing has touched
    /// the memory so far it is checked briefly, so that a lost page is found there too.
    pub(super) fn check(&mut self, touching: bool) -> anyhow::Result<Touched> {
        if !touching {
            self.give("touch")?;
            std::thread::sleep(LOOK);
        }
        let touched: Touched = serde_json::from_str(&self.give("stop")?)?;
        ensure!(touched.wrong == 0, "{} pages did not hold what belongs there", touched.wrong);
        Ok(touched)
    }
}

/// CPU time of a scan of a process that wrote a hundredth of its memory since the last one.
pub(super) fn scan(args: &ScanArgs, global: &Global) -> anyhow::Result<ExitCode> {
    let mut results = Results::new(args.out.as_deref(), global.json)?;
    look(args, &mut Victim::start(args.memory)?, &mut results)?;
    Ok(ExitCode::SUCCESS)
}

fn look(args: &ScanArgs, victim: &mut Victim, results: &mut Results) -> anyhow::Result<()> {
    let pid = victim.pid()?;
    let orders = &mut victim.orders;
    let backend = detect().backend;
    let mut tracker = Tracker::new(backend);
    tracker.round(&[pid], false)?;
    for run in 0..=args.runs {
        let pages = args.memory / 4096 / 100;
        orders.give(&format!("write {pages}"))?;
        let (cpu, begun) = (cpu_ms()?, Instant::now());
        let round = tracker.round(&[pid], false)?;
        let (cpu, wall) = (cpu_ms()? - cpu, begun.elapsed().as_secs_f64() * 1e3);
        let Some(space) = round.spaces.first() else { bail!("the process was passed over") };
        let written: u64 = space.written.iter().map(|range| (range.end - range.start) / 4096).sum();
        ensure!(written >= pages / 2, "{written} pages were found, and {pages} were written");
        // The first is the warm-up.
        if run > 0 {
            results.add(json!({
                "bench": "part", "series": "scan", "run": run, "memory": args.memory,
                "tracker": backend.name(), "populated_pages": space.populated_pages,
                "written_pages": written, "cpu_ms": cpu, "wall_ms": wall,
            }))?;
        }
    }
    Ok(())
}

/// CPU time of this thread so far, to the nanosecond: what getrusage(2) tells is as old as the last
/// tick.
fn cpu_ms() -> anyhow::Result<f64> {
    let time = clock_gettime(ClockId::CLOCK_THREAD_CPUTIME_ID)?;
    Ok(time.tv_sec() as f64 * 1e3 + time.tv_nsec() as f64 / 1e6)
}
