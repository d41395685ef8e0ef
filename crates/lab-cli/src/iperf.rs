//! iperf3 between two nodes of a lab: what the link carries, to compare with.

use std::{
    process::Stdio,
    time::{Duration, Instant},
};

use anyhow::{Context as _, bail};
use godwit_lab::Lab;
use serde_json::Value;

/// How long it measures, seconds.
const SECONDS: &str = "4";
/// How long its server may take to listen, and how often it is tried.
const START: Duration = Duration::from_secs(5);
const PAUSE: Duration = Duration::from_millis(50);
/// Its first moments are left out of [`Measured::window`]: connections begin slowly.
const BEGIN: Duration = Duration::from_millis(500);

/// What it got.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Measured {
    /// Payload from the one to the other.
    pub(crate) bytes_per_second: f64,
    /// When it sent at its full rate.
    pub(crate) window: (Instant, Instant),
}

/// Sends over so many connections from one node to another. Blocks.
pub(crate) fn measure(lab: &Lab, (from, to): (&str, &str), streams: u32) -> anyhow::Result<Measured> {
    let mut server = lab.command(to, "iperf3")?;
    let server = server.args(["-s", "-1"]).stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    let mut server = server.spawn().context("iperf3 cannot be run")?;
    let measured = send(lab, (from, to), streams);
    // It has ended by itself, unless the client failed.
    let _ = server.kill();
    server.wait()?;
    measured
}

fn send(lab: &Lab, (from, to): (&str, &str), streams: u32) -> anyhow::Result<Measured> {
    let address = lab.address(to)?.to_string();
    let deadline = Instant::now() + START;
    loop {
        let mut client = lab.command(from, "iperf3")?;
        client.args(["-c", &address, "-J", "-t", SECONDS, "-P", &streams.to_string()]);
        let begun = Instant::now();
        let output = client.stdin(Stdio::null()).output().context("iperf3 cannot be run")?;
        let ended = Instant::now();
        let said: Value = serde_json::from_slice(&output.stdout).unwrap_or_default();
        match said["end"]["sum_received"]["bits_per_second"].as_f64() {
            Some(bits) => {
                let seconds = said["end"]["sum_sent"]["seconds"].as_f64().unwrap_or_default();
                // Afterwards it takes some time to close its connections.
                let sent = (begun + Duration::from_secs_f64(seconds)).min(ended);
                return Ok(Measured { bytes_per_second: bits / 8.0, window: (begun + BEGIN, sent) });
            }
            // The server may not listen yet.
            None if Instant::now() < deadline => std::thread::sleep(PAUSE),
            None => bail!("iperf3 says: {}", said["error"]),
        }
    }
}
