//! `godwit stats`: what services use.

use std::{collections::HashMap, process::ExitCode, time::Duration};

use godwit_api::v1::{ServiceStats, StatsRequest};
use serde_json::{Value, json};
use tokio::time::{Instant, sleep_until};

use crate::{
    client::Connection,
    global::Global,
    interrupts::Interrupts,
    output::{self, Table},
};

/// Show the CPU, memory, network and disk that services of this node use, again and again
///
/// CPU is that of the time since the last figures, in per cent of one CPU. Bytes count from the start or the arrival of the
/// service on this node.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// Show it once
    #[arg(long)]
    no_stream: bool,
    /// Seconds between two figures
    #[arg(short, long, value_name = "SECONDS", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=3600))]
    interval: u32,
    /// The services [default: all that run]
    name: Vec<String>,
}

pub(crate) async fn run(args: Args, global: &Global) -> anyhow::Result<ExitCode> {
    let mut connection = Connection::open(global).await?;
    let interval = Duration::from_secs(args.interval.into());
    let mut interrupts = Interrupts::new()?;
    let mut before = HashMap::new();
    let mut shown = 0_u64;
    loop {
        let due = Instant::now() + interval;
        let answer = connection.node.stats(StatsRequest { names: args.name.clone() }).await;
        let services = answer.map_err(|status| connection.explain(&status))?.into_inner().services;
        // A share of CPU time takes two looks.
        if shown > 0 || !before.is_empty() || services.is_empty() {
            show(&services, &before, global)?;
            shown += 1;
            if args.no_stream {
                return Ok(ExitCode::SUCCESS);
            }
        }
        before = services.into_iter().map(|stats| (stats.name.clone(), stats)).collect();
        tokio::select! {
            () = sleep_until(due) => {}
            () = interrupts.next() => return Ok(ExitCode::SUCCESS),
        }
    }
}

fn show(
    services: &[ServiceStats],
    before: &HashMap<String, ServiceStats>,
    global: &Global,
) -> anyhow::Result<()> {
    let shares: Vec<_> = services.iter().map(|now| cpu(now, before.get(&now.name))).collect();
    if global.json {
        let all: Vec<_> =
            services.iter().zip(&shares).map(|(stats, share)| document(stats, *share)).collect();
        return Ok(output::json(&all)?);
    }
    let mut table = Table::new(["NAME", "CPU", "MEMORY", "PIDS", "RECEIVED", "SENT", "READ", "WRITTEN"]);
    for (stats, share) in services.iter().zip(shares) {
        let bytes = |bytes: Option<u64>| bytes.map_or_else(|| "-".to_owned(), output::bytes);
        let memory = match (stats.memory_bytes, stats.memory_limit_bytes) {
            (Some(now), limit) if limit > 0 => format!("{} of {}", output::bytes(now), output::bytes(limit)),
            (now, _) => bytes(now),
        };
        table.row([
            stats.name.clone(),
            share.map_or_else(|| "-".to_owned(), |share| format!("{share:.1} %")),
            memory,
            stats.pids.map_or_else(|| "-".to_owned(), |pids| pids.to_string()),
            bytes(stats.received_bytes),
            bytes(stats.sent_bytes),
            bytes(stats.read_bytes),
            bytes(stats.written_bytes),
        ]);
    }
    Ok(table.print()?)
}

/// Per cent of one CPU since the figures before; nothing where they are of another life of the service.
fn cpu(now: &ServiceStats, before: Option<&ServiceStats>) -> Option<f64> {
    let before = before?;
    let used = now.cpu_ns?.checked_sub(before.cpu_ns?)?;
    let time = now.time_ns.checked_sub(before.time_ns).filter(|time| *time > 0)?;
    #[allow(clippy::cast_precision_loss)]
    Some(used as f64 / time as f64 * 100.0)
}

fn document(stats: &ServiceStats, cpu: Option<f64>) -> Value {
    json!({
        "name": stats.name,
        "cpu_percent": cpu.map(|share| (share * 10.0).round() / 10.0),
        "cpu_ns": stats.cpu_ns,
        "memory_bytes": stats.memory_bytes,
        "memory_limit_bytes": (stats.memory_limit_bytes > 0).then_some(stats.memory_limit_bytes),
        "pids": stats.pids,
        "received_bytes": stats.received_bytes,
        "sent_bytes": stats.sent_bytes,
        "read_bytes": stats.read_bytes,
        "written_bytes": stats.written_bytes,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn stats(cpu_ns: Option<u64>, time_ns: u64) -> ServiceStats {
        ServiceStats { cpu_ns, time_ns, ..ServiceStats::default() }
    }

    #[test]
    fn the_share_of_a_cpu_is_of_the_time_between_two_figures() {
        let before = stats(Some(1_000), 10_000);
        assert_eq!(cpu(&stats(Some(2_500), 11_000), Some(&before)), Some(150.0));
        assert_eq!(cpu(&stats(Some(2_500), 11_000), None), None);
        // It began anew on this node.
        assert_eq!(cpu(&stats(Some(10), 11_000), Some(&before)), None);
        assert_eq!(cpu(&stats(Some(2_500), 10_000), Some(&before)), None);
        assert_eq!(cpu(&stats(None, 11_000), Some(&before)), None);
    }
}
