//! The service whose memory is measured: it holds memory, and touches it when it is told to.
//!
//! ```text
//!   fill ─▶ listen ─▶ "touch"    threads read random pages, one after the other, as fast as they can
//!                     "write N"  N random pages are written, once
//!                     "stop"     {"touches": …, "wrong": …, "faults": [{"us": …, "at_us": …}, …]}
//! ```
//!
//! Each page begins with a word that follows from its number, and every word that is read is checked.
//! A touch that took long counts as a fault if the kernel counted one for its thread: others were only
//! kept from the processor.

use std::{
    io::{self, BufRead as _, BufReader, Write as _},
    net::{Ipv4Addr, TcpListener, TcpStream},
    process::ExitCode,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

use anyhow::Context as _;
use godwit_cli::values;
use nix::sys::resource::{UsageWho, getrusage};
use serde::{Deserialize, Serialize};

#[derive(Debug, Clone, clap::Args)]
pub(super) struct Args {
    /// How much memory
    #[arg(long, value_parser = values::size)]
    memory: u64,
    /// Threads that touch it
    #[arg(long, default_value_t = 1)]
    threads: usize,
    /// TCP port for orders; 0: any that is free. It is printed on standard output
    #[arg(long)]
    port: u16,
}

/// What the threads met since "touch".
#[derive(Debug, Default, Serialize, Deserialize)]
pub(super) struct Touched {
    pub(super) touches: u64,
    /// Pages that did not hold what belongs there.
    pub(super) wrong: u64,
    /// Each fault but the longest of each thread, which is the freeze.
    pub(super) faults: Vec<Fault>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub(super) struct Fault {
    /// How long it took, microseconds.
    pub(super) us: u64,
    /// When it began, microseconds after the freeze; 0 for one before it.
    pub(super) at_us: u64,
}

/// What no touch of a page that is there takes, unless its thread lost the processor.
const LONG: Duration = Duration::from_micros(20);
/// Words of a page.
const WORDS: usize = 4096 / size_of::<u64>();

pub(super) fn run(args: &Args) -> anyhow::Result<ExitCode> {
    let pages = usize::try_from(args.memory / 4096)?;
    let mut random = Random(1);
    // The first word of a page follows from its number; the others do not compress.
    let memory: Arc<[AtomicU64]> = (0..pages * WORDS)
        .map(|at| AtomicU64::new(if at % WORDS == 0 { word(at / WORDS) } else { random.next() }))
        .collect();
    let listener = TcpListener::bind((Ipv4Addr::UNSPECIFIED, args.port)).context("listening")?;
    println!("{}", listener.local_addr()?.port());
    let mut busy = Busy::default();
    for stream in listener.incoming() {
        // A client that goes away is no reason to stop.
        let _ = serve(stream?, &memory, args.threads, &mut busy);
    }
    Ok(ExitCode::SUCCESS)
}

fn serve(
    mut stream: TcpStream,
    memory: &Arc<[AtomicU64]>,
    threads: usize,
    busy: &mut Busy,
) -> io::Result<()> {
    let mut random = Random(2);
    for line in BufReader::new(stream.try_clone()?).lines() {
        let line = line?;
        let answer = match line.split_once(' ').unwrap_or((line.as_str(), "")) {
            ("touch", _) => {
                busy.begin(memory, threads);
                "ok".to_owned()
            }
            ("write", count) => {
                for _ in 0..count.parse().unwrap_or(0) {
                    let page = random.below(memory.len() / WORDS);
                    memory[page * WORDS + 1].fetch_add(1, Ordering::Relaxed);
                }
                "ok".to_owned()
            }
            ("stop", _) => serde_json::to_string(&busy.end())?,
            _ => "there are touch, write N and stop".to_owned(),
        };
        writeln!(stream, "{answer}")?;
    }
    Ok(())
}

/// The threads that touch.
#[derive(Debug, Default)]
struct Busy {
    threads: Vec<JoinHandle<Touched>>,
    stop: Arc<AtomicBool>,
}

impl Busy {
    fn begin(&mut self, memory: &Arc<[AtomicU64]>, threads: usize) {
        self.stop = Arc::default();
        for number in 0..threads {
            let (memory, stop) = (Arc::clone(memory), Arc::clone(&self.stop));
            let seed = u64::try_from(number).unwrap_or(0) + 100;
            self.threads.push(thread::spawn(move || touch(&memory, seed, &stop)));
        }
    }

    fn end(&mut self) -> Touched {
        self.stop.store(true, Ordering::Relaxed);
        let mut all = Touched::default();
        for touched in self.threads.drain(..).filter_map(|thread| thread.join().ok()) {
            all.touches += touched.touches;
            all.wrong += touched.wrong;
            all.faults.extend(touched.faults);
        }
        all
    }
}

fn touch(memory: &[AtomicU64], seed: u64, stop: &AtomicBool) -> Touched {
    let mut random = Random(seed);
    let mut touched = Touched::default();
    let started = Instant::now();
    let mut before = faults();
    while !stop.load(Ordering::Relaxed) {
        let page = random.below(memory.len() / WORDS);
        let begun = Instant::now();
        let right = memory[page * WORDS].load(Ordering::Relaxed) == word(page);
        let took = begun.elapsed();
        touched.touches += 1;
        touched.wrong += u64::from(!right);
        if took > LONG {
            let now = faults();
            if now != before {
                touched.faults.push(Fault { us: micros(took), at_us: micros(begun - started) });
            }
            before = now;
        }
    }
    touched.faults.sort_unstable();
    let resumed = touched.faults.pop().map_or(0, |freeze| freeze.at_us + freeze.us);
    for fault in &mut touched.faults {
        fault.at_us = fault.at_us.saturating_sub(resumed);
    }
    touched
}

fn micros(time: Duration) -> u64 {
    u64::try_from(time.as_micros()).unwrap_or(u64::MAX)
}

/// Faults of this thread that the kernel counted.
fn faults() -> i64 {
    getrusage(UsageWho::RUSAGE_THREAD)
        .map_or(0, |usage| usage.minor_page_faults() + usage.major_page_faults())
}

/// What page `number` begins with.
fn word(number: usize) -> u64 {
    Random(number as u64).next()
}

/// SplitMix64 (Steele, Lea, Flood 2014).
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    fn below(&mut self, limit: usize) -> usize {
        usize::try_from((u128::from(self.next()) * limit as u128) >> u64::BITS).unwrap_or(0)
    }
}
