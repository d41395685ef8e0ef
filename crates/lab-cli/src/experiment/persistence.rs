//! `hcontainer-persistence`: a Redis that writes itself to the disk, and loads that when it starts, beside a checkpoint and a
//! restore of it.
//!
//! The paper's checkpoints are up to 25 times faster (figures 2 to 4). We do not know its values; a Redis writes many small
//! ones more slowly than few large ones, and both are measured.

use std::{
    net::SocketAddrV4,
    path::Path,
    time::{Duration, Instant},
};

use anyhow::{Context as _, ensure};
use godwit_lab::{
    Lab,
    config::CLIENT,
    workload::{RedisClient, resp::Reply},
};
use plotters::style::RGBColor;
use serde_json::{Value, json};

use super::{
    Args, Lines, Verdict, milliseconds,
    picture::{Paper, Picture, Row},
    quantile, values,
};
use crate::{
    bench::Bed,
    picture::{BLUE, GREEN, ORANGE, PURPLE},
    redis,
    stage::godwit,
    trial::{self, SERVICE, SOURCE, blocking},
};

const RUNS: u32 = 3;
/// MiB of data.
const SIZES: [u64; 3] = [64, 256, 1024];
/// What the data are.
const SMALL: &str = "small";
const LARGE: &str = "large";
const KINDS: [&str; 2] = [SMALL, LARGE];
/// Memory that Redis takes for a key of [`SMALL`] with its value of some ten bytes, approximately: a checkpoint of a million is
/// some 155 MB.
const SMALL_BYTES: u64 = 150;
/// How long Redis may take to write or load a gigabyte.
const PATIENCE: Duration = Duration::from_secs(600);
/// What Redis writes itself to, in its working directory.
const DUMP: &str = "dump.rdb";
/// What was timed: how the rows name it, and the picture.
const TIMED: [(&str, &str, RGBColor); 4] = [
    ("save_ms", "SAVE", ORANGE),
    ("checkpoint_ms", "checkpoint", BLUE),
    ("load_ms", "start and load", PURPLE),
    ("restore_ms", "restore", GREEN),
];
/// So many times faster the paper's are at best.
const PAPER: f64 = 25.0;

pub(super) async fn measure(args: &Args, lines: &mut Lines) -> anyhow::Result<()> {
    let (runs, sizes) = if args.quick { (1, &SIZES[..1]) } else { (RUNS, &SIZES[..]) };
    let image = redis::image(&args.image)?;
    let bed = Bed { name: args.name.clone(), ..Bed::default() };
    for kind in KINDS {
        for &size in sizes {
            bed.lab(true, async |lab| {
                let node = trial::connect(lab, SOURCE).await?;
                let command =
                    [&redis::WITHOUT_SNAPSHOTS[..], &["--enable-debug-command", "yes"][..]].concat();
                let at = redis::run(&node, &image, &command).await?;
                let there = lab.clone();
                blocking(move || fill(&there, at, kind, size << 20)).await?;
                for run in 1..=runs {
                    let there = lab.clone();
                    let mut row = blocking(move || sample(&there, at)).await?;
                    row["experiment"] = "hcontainer-persistence".into();
                    row["values"] = kind.into();
                    row["mib"] = size.into();
                    row["run"] = run.into();
                    lines.add(row)?;
                }
                Ok(())
            })
            .await?;
        }
    }
    Ok(())
}

/// Waits until Redis answers, which it does when it has loaded its data.
fn connect(lab: &Lab, redis: SocketAddrV4) -> anyhow::Result<RedisClient> {
    let mut client = RedisClient::connect(lab, CLIENT, redis, PATIENCE)?;
    client.set_patience(PATIENCE)?;
    Ok(client)
}

fn fill(lab: &Lab, redis: SocketAddrV4, kind: &str, bytes: u64) -> anyhow::Result<()> {
    let mut client = connect(lab, redis)?;
    if kind == LARGE {
        return Ok(client.fill(bytes)?);
    }
    let keys = (bytes / SMALL_BYTES).to_string();
    done(&mut client, &["DEBUG", "POPULATE", &keys])
}

/// Has Redis do something.
fn done(client: &mut RedisClient, words: &[&str]) -> anyhow::Result<()> {
    let answer = client.call(words)?;
    ensure!(answer == Reply::Simple("OK".to_owned()), "Redis answers {} with {answer:?}", words.join(" "));
    Ok(())
}

fn keys(client: &mut RedisClient) -> anyhow::Result<i64> {
    match client.call(&["DBSIZE"])? {
        Reply::Integer(keys) => Ok(keys),
        other => anyhow::bail!("Redis answers DBSIZE with {other:?}"),
    }
}

/// Both ways to the disk and back, one after the other. The service has no connection meanwhile: a checkpoint would refuse it.
fn sample(lab: &Lab, redis: SocketAddrV4) -> anyhow::Result<Value> {
    let archive = lab.state(SOURCE)?.with_file_name("checkpoint.tar");
    let path = archive.to_str().context("the path of the checkpoint is no text")?;
    let godwit = |words: &[&str]| godwit(lab, SOURCE, words);
    let ms = |begun: Instant| begun.elapsed().as_secs_f64() * 1e3;

    let mut client = connect(lab, redis)?;
    let all = keys(&mut client)?;
    let begun = Instant::now();
    done(&mut client, &["SAVE"])?;
    let save_ms = ms(begun);
    drop(client);
    let bytes = godwit(&["exec", SERVICE, "stat", "-c", "%s", DUMP])?;
    let save_bytes: u64 = bytes.parse().with_context(|| format!("the size of {DUMP} is {bytes:?}"))?;
    godwit(&["stop", SERVICE])?;
    let begun = Instant::now();
    godwit(&["start", SERVICE])?;
    let mut client = connect(lab, redis)?;
    let load_ms = ms(begun);
    let loaded = keys(&mut client)?;
    ensure!(loaded == all, "Redis loads {loaded} keys of {all}");
    drop(client);
    // Else it would be a part of the checkpoint.
    godwit(&["exec", SERVICE, "rm", DUMP])?;

    let begun = Instant::now();
    // As Redis goes on after SAVE. Neither compresses what does not compress, and CRIU, which the paper takes, nothing.
    let said = godwit(&[
        "--json",
        "checkpoint",
        SERVICE,
        "--output",
        path,
        "--compress",
        "none",
        "--leave-running",
    ])?;
    let checkpoint_ms = ms(begun);
    let said: Value = serde_json::from_str(&said).context("what godwit checkpoint says")?;
    godwit(&["rm", "--force", SERVICE])?;
    let begun = Instant::now();
    godwit(&["restore", path])?;
    let mut client = connect(lab, redis)?;
    let restore_ms = ms(begun);
    let restored = keys(&mut client)?;
    ensure!(restored == all, "the restored Redis has {restored} keys of {all}");
    std::fs::remove_file(&archive).with_context(|| format!("removing {path}"))?;
    Ok(json!({
        "keys": all, "save_ms": save_ms, "load_ms": load_ms, "save_bytes": save_bytes,
        "checkpoint_ms": checkpoint_ms, "restore_ms": restore_ms, "checkpoint_bytes": said["bytes"],
        "frozen_ms": said["frozen_us"].as_f64().map(|us| us / 1e3),
    }))
}

fn of(rows: &[Value], kind: &str, size: u64, field: &str) -> Vec<f64> {
    values(rows, &[("values", kind.into()), ("mib", size.into())], field)
}

pub(super) fn tell(rows: &[Value], path: &Path) -> anyhow::Result<Vec<Verdict>> {
    let mut drawn = Vec::new();
    for kind in KINDS {
        for size in SIZES {
            for (field, what, colour) in TIMED {
                let label = format!("{kind} values, {size} MiB: {what}");
                drawn.extend(Row::of(label, colour, &of(rows, kind, size, field)));
            }
        }
    }
    let measured =
        |kind: &str| SIZES.into_iter().rev().find(|size| !of(rows, kind, *size, "save_ms").is_empty());
    let largest = KINDS.into_iter().filter_map(|kind| Some((kind, measured(kind)?)));
    let verdicts: Vec<Verdict> = largest.flat_map(|(kind, size)| verdicts(rows, kind, size)).collect();
    let save = measured(SMALL).and_then(|size| quantile(&of(rows, SMALL, size, "save_ms"), 0.5));
    let paper = save.map(|save| Paper {
        label: "the paper: checkpoint, up to 25 × faster",
        from: save / PAPER,
        to: save,
    });
    let picture = Picture {
        title: "To the disk and back: shortest, median, longest",
        unit: "ms",
        rows: drawn,
        paper,
        goal: None,
    };
    picture.draw(path)?;
    Ok(verdicts)
}

/// At one size: what Redis does itself, beside what godwit does.
fn verdicts(rows: &[Value], kind: &str, size: u64) -> [Verdict; 2] {
    let median = |field: &str| quantile(&of(rows, kind, size, field), 0.5);
    let verdict = |what: &str, own: &str, ours: &str| {
        let (own, ours) = (median(own), median(ours));
        let times = own.zip(ours).map(|(own, ours)| own / ours);
        Verdict {
            what: format!("{kind} values, {size} MiB: {what}"),
            goal: "faster (the paper: up to 25 ×)".to_owned(),
            found: format!(
                "{} ×: {} and {}",
                times.map(|times| format!("{times:.2}")).unwrap_or_default(),
                milliseconds(own),
                milliseconds(ours)
            ),
            holds: times.is_some_and(|times| times > 1.0),
        }
    };
    [
        verdict("checkpoint beside SAVE", "save_ms", "checkpoint_ms"),
        verdict("restore beside start and load", "load_ms", "restore_ms"),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_largest_size_is_judged_by_both_times() -> anyhow::Result<()> {
        let scratch = tempfile::tempdir()?;
        let row = |size: u64, save: f64, checkpoint: f64| {
            json!({
                "values": SMALL, "mib": size, "save_ms": save, "checkpoint_ms": checkpoint, "load_ms": 500,
                "restore_ms": 600,
            })
        };
        let rows = [row(64, 10.0, 100.0), row(256, 1000.0, 250.0)];
        let verdicts = tell(&rows, &scratch.path().join("x.svg"))?;
        let holds: Vec<bool> = verdicts.iter().map(|verdict| verdict.holds).collect();
        assert_eq!(holds, [true, false]);
        assert!(verdicts[0].what.contains("256 MiB") && verdicts[0].found.starts_with("4.00 ×"));
        Ok(())
    }
}
