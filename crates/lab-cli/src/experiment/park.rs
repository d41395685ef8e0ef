//! `hcontainer-park`: from the request until all threads of a process are at rest, at random times.
//!
//! The paper stops threads at migration points between functions, and rewrites their stacks there (figure 13). Here threads
//! come to polls, also in loops, and system calls that wait are ended.

use std::{
    fs,
    path::Path,
    process::{Child, Command, Stdio},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

use anyhow::{Context as _, ensure};
use godwit_crossing::{Record, Request};
use godwit_isa_plan::RECORD;
use godwit_memory::process::Process;
use serde_json::json;

use super::{
    Args, Lines, Verdict, milliseconds,
    picture::{Paper, Picture, Row},
    quantile, scratch, values,
};
use crate::{
    picture::{BLUE, ORANGE},
    sums::{self, Shape},
    trial::blocking,
};

const THREADS: [u32; 3] = [1, 8, 64];
const REQUESTS: u32 = 1000;
/// The longest time between two requests.
const APART: Duration = Duration::from_millis(10);
/// Between two looks at the process: nobody is told when it has come to rest.
const LOOK: Duration = Duration::from_micros(50);
/// How long a process may take to listen, to come to rest, or to go on.
const LONGEST: Duration = Duration::from_secs(30);
/// What is judged: 99 of 100 come to rest in less, with a processor free.
const GOAL_MS: f64 = 10.0;
const PAPER: Paper = Paper { label: "the paper: tens to hundreds of ms", from: 10.0, to: 1000.0 };

pub(super) async fn measure(args: &Args, lines: &mut Lines) -> anyhow::Result<()> {
    let requests = if args.quick { REQUESTS / 10 } else { REQUESTS };
    let compiler = args.compiler.clone();
    let directory = scratch()?;
    let place = directory.path().to_owned();
    let program = blocking(move || sums::PROGRAM.build(&compiler, &place)).await?;
    for load in ["idle", "busy"] {
        for threads in THREADS {
            let program = program.clone();
            let rows = blocking(move || {
                let _busy = (load == "busy").then(Busy::start).transpose()?;
                let mut service = Service::start(&program, threads)?;
                (0..requests).map(|number| service.rest_at(number)).collect::<anyhow::Result<Vec<_>>>()
            });
            for (request, (park, seen)) in rows.await?.into_iter().enumerate() {
                let ms = |time: Duration| time.as_secs_f64() * 1e3;
                lines.add(json!({
                    "experiment": "hcontainer-park", "load": load, "threads": threads, "request": request,
                    "park_ms": ms(park), "seen_ms": ms(seen),
                }))?;
            }
        }
    }
    Ok(())
}

pub(super) fn tell(rows: &[serde_json::Value], path: &Path) -> anyhow::Result<Vec<Verdict>> {
    let (mut drawn, mut verdicts) = (Vec::new(), Vec::new());
    for (load, colour) in [("idle", BLUE), ("busy", ORANGE)] {
        for threads in THREADS {
            let found = values(rows, &[("load", load.into()), ("threads", threads.into())], "seen_ms");
            let at = |part| quantile(&found, part);
            let label = format!("threads: {threads}, {load}");
            if let (Some(low), Some(middle), Some(high)) = (at(0.5), at(0.99), at(1.0)) {
                drawn.push(Row { label: label.clone(), colour, low, middle, high });
            }
            if load == "idle" {
                verdicts.push(Verdict {
                    what: format!("{label}: 99 of 100 requests"),
                    goal: format!("below {GOAL_MS} ms"),
                    found: milliseconds(at(0.99)),
                    holds: at(0.99).is_some_and(|found| found < GOAL_MS),
                });
            }
        }
    }
    let picture = Picture {
        title: "From the request until all threads rest: median, 99 %, longest",
        unit: "ms",
        rows: drawn,
        paper: Some(PAPER),
        goal: Some(GOAL_MS),
    };
    picture.draw(path)?;
    Ok(verdicts)
}

/// A process whose threads wait and work.
struct Service {
    _child: Ended,
    process: Process,
    random: u64,
}

impl Service {
    fn start(program: &Path, threads: u32) -> anyhow::Result<Self> {
        let shape = Shape { threads, memory: 8 << 20, computing: u32::from(threads > 1), ..Shape::default() };
        // It ends with this program, however that ends.
        let child = Command::new("setpriv")
            .args(["--pdeathsig", "KILL", "--"])
            .arg(program)
            .args(shape.words(0))
            .stdin(Stdio::null())
            .spawn()
            .with_context(|| format!("starting {}", program.display()))?;
        let child = Ended(child);
        let pid = child.0.id();
        let begun = Instant::now();
        while fs::read_link(format!("/proc/{pid}/exe"))? != program {
            ensure!(begun.elapsed() < LONGEST, "setpriv does not start {}", program.display());
            thread::sleep(LOOK);
        }
        let process = Process::open(pid.try_into()?)?;
        let service = Self { _child: child, process, random: 0x9e37_79b9_7f4a_7c15 };
        // One thread after the other begins; the last of them is in the work before its memory is written.
        service.until("does not listen", |record| record.ready)?;
        let begun = Instant::now();
        while service.listening()? < usize::try_from(threads)? {
            ensure!(begun.elapsed() < LONGEST, "the service does not start its threads");
            thread::sleep(LOOK);
        }
        Ok(service)
    }

    /// How many of its threads run, and would hear a request: those that stand still block it.
    fn listening(&self) -> anyhow::Result<usize> {
        let mut listening = 0;
        for task in fs::read_dir(format!("/proc/{}/task", self.process.pid()))? {
            let status = fs::read_to_string(task?.path().join("status"))?;
            let blocked = status.lines().find_map(|line| line.strip_prefix("SigBlk:"));
            let blocked = blocked.context("the kernel does not tell what a thread blocks")?;
            let bits = u64::from_str_radix(blocked.trim(), 16)?;
            listening += usize::from(bits >> (Request::SIGNAL - 1) & 1 == 0);
        }
        Ok(listening)
    }

    /// Asks it at a random time, and lets it go on: what it says that it took, and when that was seen from outside.
    fn rest_at(&mut self, number: u32) -> anyhow::Result<(Duration, Duration)> {
        thread::sleep(self.pause());
        let number = number + 1;
        let queue = |request: Request| self.process.queue(Request::SIGNAL, Request::CODE, request.value());
        let asked = Instant::now();
        queue(Request::Rest(number))?;
        let record = self.until("does not come to rest", |record| record.rest.is_some())?;
        let seen = asked.elapsed();
        let rest = record.rest.context("it has just been at rest")?;
        ensure!(rest.number == u64::from(number), "it is at rest {} and not at {number}", rest.number);
        queue(Request::GoOn(number))?;
        self.until("does not go on", |record| record.rest.is_none())?;
        // All of its threads go on before they are asked again.
        while self.listening()? < usize::try_from(rest.threads)? {
            ensure!(asked.elapsed() < LONGEST, "not all threads of the service go on");
            thread::sleep(LOOK);
        }
        Ok((rest.park_time, seen))
    }

    fn until(&self, otherwise: &str, is: impl Fn(&Record) -> bool) -> anyhow::Result<Record> {
        let begun = Instant::now();
        loop {
            let mut bytes = [0; Record::BYTES];
            self.process.read(RECORD, &mut bytes)?;
            let record = Record::decode(&bytes).ok().filter(&is);
            if let Some(record) = record {
                return Ok(record);
            }
            ensure!(begun.elapsed() < LONGEST, "process {} {otherwise}", self.process.pid());
            thread::sleep(LOOK);
        }
    }

    /// The time until the next request.
    fn pause(&mut self) -> Duration {
        // xorshift64, of Marsaglia.
        self.random ^= self.random << 13;
        self.random ^= self.random >> 7;
        self.random ^= self.random << 17;
        APART.mul_f64((self.random >> 40) as f64 / f64::from(1 << 24))
    }
}

/// A process that does not stay.
struct Ended(Child);

impl Drop for Ended {
    fn drop(&mut self) {
        // It may have ended by itself, which its measurement has said.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// As many tasks that work without a pause as there are processors.
struct Busy {
    stop: Arc<AtomicBool>,
    threads: Vec<JoinHandle<()>>,
}

impl Busy {
    fn start() -> anyhow::Result<Self> {
        let stop = Arc::<AtomicBool>::default();
        let work = |_| {
            let stop = Arc::clone(&stop);
            thread::spawn(move || {
                while !stop.load(Ordering::Relaxed) {
                    std::hint::spin_loop();
                }
            })
        };
        let threads = (0..thread::available_parallelism()?.get()).map(work).collect();
        Ok(Self { stop, threads })
    }
}

impl Drop for Busy {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        for thread in self.threads.drain(..) {
            // They do nothing that could fail.
            let _ = thread.join();
        }
    }
}
