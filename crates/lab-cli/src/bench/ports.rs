//! `godwit bench ports`: what the way through a published port costs a client.
//!
//! ```text
//!   address   client ─▶ the service's own address, at the node that has it
//!   here      client ─▶ port of the node that has it ─▶ service
//!   detour    client ─▶ port of the other node ─▶ the node that has it ─▶ service
//! ```
//!
//! Each way in turn, on one lab: round trips of one byte, one after the other, and the rate of one stream
//! to the service. The service does not move meanwhile; that connections by each way outlive moves is for
//! the tests.

use std::{
    io::{Read as _, Write as _},
    net::{Shutdown, SocketAddrV4, TcpStream},
    path::PathBuf,
    process::ExitCode,
    time::{Duration, Instant},
};

use godwit_cli::{
    global::Global,
    output::{self, Table},
};
use godwit_lab::{Lab, Link};
use serde_json::{Value, json};

use super::{
    Bed,
    results::Results,
    service::{self, Service},
};
use crate::trial::{ADDRESS, DESTINATION, SOURCE, blocking};

#[derive(Debug, Clone, clap::Args)]
pub(super) struct Args {
    /// Rate and one-way delay of each host's link
    #[arg(long, value_name = "RATE[,DELAY]", default_value = "1gbit,1ms")]
    link: Link,
    /// How often each way is measured
    #[arg(long, value_name = "NUMBER", default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..=1000))]
    runs: u32,
    /// Write the lines into this file too; one that is there is replaced
    #[arg(long, value_name = "FILE")]
    out: Option<PathBuf>,
}

const SERVICE: Service = Service { name: "ports", address: ADDRESS, port: 7010, published: Some(17_010) };
/// Round trips of a run.
const ROUND_TRIPS: usize = 500;
/// What a stream carries.
const BYTES: usize = 128 << 20;
/// Written at once.
const PIECE: usize = 64 << 10;
/// How long an answer may take.
const PATIENCE: Duration = Duration::from_secs(30);

pub(super) async fn measure(args: &Args, lab: &str, global: &Global) -> anyhow::Result<ExitCode> {
    let mut results = Results::new(args.out.as_deref(), global.json)?;
    let bed = Bed { name: lab.to_owned(), link: Some(args.link), ..Bed::default() };
    let rows = bed.lab(true, async |lab| {
        service::start(lab, SERVICE, &[]).await?;
        let mut rows = Vec::new();
        for run in 1..=args.runs {
            for (way, at) in ways(lab)? {
                let lab = lab.clone();
                let (round_trip, rate) =
                    blocking(move || Ok((round_trip(&lab, at)?, rate(&lab, at)?))).await?;
                rows.push(json!({
                    "series": format!("ports-{way}"), "run": run, "link": args.link.to_string(),
                    "round_trip_ms": round_trip.as_secs_f64() * 1e3, "stream_mb_s": rate / 1e6,
                }));
            }
        }
        Ok(rows)
    });
    for row in rows.await? {
        results.add(row)?;
    }
    if !global.json {
        table(&results.rows).print()?;
    }
    Ok(ExitCode::SUCCESS)
}

fn ways(lab: &Lab) -> anyhow::Result<[(&'static str, SocketAddrV4); 3]> {
    let published = SERVICE.published.unwrap_or_default();
    Ok([
        ("address", SocketAddrV4::new(SERVICE.address, SERVICE.port)),
        ("here", SocketAddrV4::new(lab.address(SOURCE)?, published)),
        ("detour", SocketAddrV4::new(lab.address(DESTINATION)?, published)),
    ])
}

fn connect(lab: &Lab, at: SocketAddrV4) -> anyhow::Result<TcpStream> {
    let stream = lab.inside("client", || TcpStream::connect_timeout(&at.into(), PATIENCE))??;
    stream.set_nodelay(true)?;
    stream.set_read_timeout(Some(PATIENCE))?;
    Ok(stream)
}

/// The median of the round trips of one byte. Blocks.
fn round_trip(lab: &Lab, at: SocketAddrV4) -> anyhow::Result<Duration> {
    let mut stream = connect(lab, at)?;
    let mut times = Vec::with_capacity(ROUND_TRIPS);
    for _ in 0..ROUND_TRIPS {
        let begun = Instant::now();
        stream.write_all(b"?")?;
        stream.read_exact(&mut [0])?;
        times.push(begun.elapsed());
    }
    times.sort_unstable();
    Ok(times[ROUND_TRIPS / 2])
}

/// The rate at which the service gives back what one stream brings, bytes per second. Blocks.
fn rate(lab: &Lab, at: SocketAddrV4) -> anyhow::Result<f64> {
    let mut stream = connect(lab, at)?;
    let mut writer = stream.try_clone()?;
    let begun = Instant::now();
    let sent = std::thread::spawn(move || -> std::io::Result<()> {
        for _ in 0..BYTES / PIECE {
            writer.write_all(&[7; PIECE])?;
        }
        writer.shutdown(Shutdown::Write)
    });
    let (mut buffer, mut got) = (vec![0; PIECE], 0);
    while got < BYTES {
        match stream.read(&mut buffer)? {
            0 => anyhow::bail!("the service closed the connection to {at} after {got} bytes"),
            n => got += n,
        }
    }
    let took = begun.elapsed();
    sent.join().map_err(|_| anyhow::anyhow!("the thread that sends has panicked"))??;
    #[allow(clippy::cast_precision_loss, reason = "128 MiB are far below 2^53")]
    Ok(BYTES as f64 / took.as_secs_f64())
}

fn table(rows: &[Value]) -> Table {
    let mut table = Table::new(["RUN", "WAY", "ROUND TRIP", "RATE"]);
    for row in rows {
        let number = |field: &str| row[field].as_f64().unwrap_or_default();
        table.row([
            row["run"].to_string(),
            row["series"].as_str().unwrap_or_default().to_owned(),
            output::millis(number("round_trip_ms")),
            format!("{:.1} MB/s", number("stream_mb_s")),
        ]);
    }
    table
}
