//! What it costs to move: how long a thread takes to give up all its frames, and to take them back.

use std::collections::BTreeMap;
use std::path::Path;
use std::process::Command;
use std::time::Instant;

use anyhow::{Context as _, Result, ensure};
use godwit_isa_programs::catalogue::{Kind, programs};
use serde::{Deserialize, Serialize};

use crate::compilers::Compilers;
use crate::measure::{self, summarise};

/// `GW_EXIT_CAPTURED`.
const CAPTURED: i32 = 86;
/// Microseconds after which a kernel is asked to park, each in a run of its own.
const REQUESTS: [u64; 8] = [3_000, 7_100, 13_700, 22_300, 35_900, 51_000, 68_300, 90_100];

/// A thread of some depth; milliseconds.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct Depth {
    pub(crate) frames: u64,
    /// From the request until the thread is parked.
    pub(crate) capture: f64,
    /// Capture and resume, in place.
    pub(crate) there_and_back: f64,
}

/// Requests to computing programs; milliseconds until they were parked.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct Requests {
    pub(crate) requests: usize,
    pub(crate) median: f64,
    pub(crate) p99: f64,
    pub(crate) most: f64,
    /// The program that took longest.
    pub(crate) slowest: String,
}

/// Threads of 50 and of 50,000 frames.
///
/// # Errors
/// When the program cannot be built or captured.
pub(crate) fn depths(compilers: &Compilers, runs: usize, scratch: &Path) -> Result<Vec<Depth>> {
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("programs/deep.c");
    let builds = measure::build(&[compilers.godwit()?], &[source], &[], scratch)?;
    let program = &builds[0].executable.path;
    let mut depths = Vec::new();
    // As many polls between two captures as there are frames, so that going down there is captured once or twice.
    for (frames, turns) in [(50_u64, 20_000_u64), (50_000, 40)] {
        let mut captures = Vec::new();
        let mut back = Vec::new();
        for _ in 0..runs {
            let forever = [frames.to_string(), i64::MAX.to_string()];
            let parked = request(program, &forever, 200_000, scratch)?
                .with_context(|| format!("{} ended before it was captured", program.display()))?;
            captures.push(parked);
            let rounds = [frames.to_string(), (frames * turns).to_string()];
            let whole = seconds(program, &rounds, None)?;
            let turned = seconds(program, &rounds, Some(frames))?;
            #[expect(clippy::cast_precision_loss, reason = "a few thousand")]
            back.push((turned - whole) / turns as f64 * 1e3);
        }
        let depth = Depth { frames, capture: summarise(captures).0, there_and_back: summarise(back).0 };
        eprintln!("{frames} frames: {:.3} ms, and back {:.3} ms", depth.capture, depth.there_and_back);
        depths.push(depth);
    }
    Ok(depths)
}

fn seconds(program: &Path, arguments: &[String], turn: Option<u64>) -> Result<f64> {
    let mut command = Command::new(program);
    command.args(arguments);
    if let Some(polls) = turn {
        command.env("GODWIT_STATE_TURN", polls.to_string());
    }
    let start = Instant::now();
    let output = command.output().with_context(|| format!("cannot run {}", program.display()))?;
    ensure!(output.status.success(), "{} fails: {output:?}", program.display());
    Ok(start.elapsed().as_secs_f64())
}

/// Runs a program until a timer asks it to park; milliseconds that it took, or nothing when it had ended.
fn request(program: &Path, arguments: &[String], after: u64, scratch: &Path) -> Result<Option<f64>> {
    let state = scratch.join("state");
    let output = Command::new(program)
        .args(arguments)
        .env("GODWIT_STATE_SAVE", &state)
        .env("GODWIT_STATE_TIMER", after.to_string())
        .env("GODWIT_STATE_REPORT", "1")
        .output()
        .with_context(|| format!("cannot run {}", program.display()))?;
    if output.status.success() {
        return Ok(None);
    }
    let said = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.code() == Some(CAPTURED), "{} is not captured: {said}", program.display());
    std::fs::remove_file(&state).with_context(|| format!("there is no state {}", state.display()))?;
    let nanoseconds: f64 = said
        .split_once("parked ")
        .and_then(|(_, rest)| rest.split(' ').next())
        .and_then(|number| number.parse().ok())
        .with_context(|| format!("{} does not say how long it took: {said}", program.display()))?;
    Ok(Some(nanoseconds / 1e6))
}

/// Requests at various times to all kernels.
///
/// # Errors
/// When a kernel cannot be built or captured.
pub(crate) fn requests(compilers: &Compilers, scratch: &Path) -> Result<Requests> {
    let mut times: BTreeMap<String, Vec<f64>> = BTreeMap::new();
    for kernel in programs(Kind::Kernels).context("cannot list the kernels")? {
        let Some(size) = kernel.large() else { continue };
        let builds = measure::build(&[compilers.godwit()?], &kernel.sources, &[], scratch)?;
        for after in REQUESTS {
            if let Some(time) = request(&builds[0].executable.path, &[size.to_owned()], after, scratch)? {
                times.entry(kernel.name.clone()).or_default().push(time);
            }
        }
    }
    let mut all: Vec<(f64, &String)> =
        times.iter().flat_map(|(name, times)| times.iter().map(move |&time| (time, name))).collect();
    ensure!(!all.is_empty(), "no kernel ran long enough to be captured");
    all.sort_by(|a, b| a.0.total_cmp(&b.0));
    let at = |percent: usize| all[(all.len() * percent / 100).min(all.len() - 1)];
    let (most, slowest) = all[all.len() - 1];
    let requests =
        Requests { requests: all.len(), median: at(50).0, p99: at(99).0, most, slowest: slowest.clone() };
    eprintln!("{} requests: 99 % parked within {:.3} ms", requests.requests, requests.p99);
    Ok(requests)
}
