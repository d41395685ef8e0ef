//! `hcontainer-persistence`: services that write themselves to the disk, and load that when they start, beside a checkpoint and
//! a restore of them.
//!
//! The paper's checkpoints are up to 25 times faster for Redis, and 23 times for SQLite (figures 2 to 4). We do not know its
//! values; a Redis writes many small ones more slowly than few large ones, and both are measured.

use std::{path::Path, time::Instant};

use anyhow::{Context as _, ensure};
use plotters::style::RGBColor;
use serde_json::{Value, json};

use super::{
    Args, Lines, Verdict, milliseconds,
    picture::{Paper, Picture, Row},
    quantile,
    stores::{Running, Store},
    values,
};
use crate::{
    bench::Bed,
    picture::{BLUE, GREEN, ORANGE, PURPLE},
    stage::godwit,
    trial::{self, SERVICE, SOURCE, blocking},
};

const RUNS: u32 = 3;
/// MiB of data.
const SIZES: [u64; 3] = [64, 256, 1024];
/// What was timed: how the rows name it, and the picture.
const TIMED: [(&str, &str, RGBColor); 4] = [
    ("save_ms", "save", ORANGE),
    ("checkpoint_ms", "checkpoint", BLUE),
    ("load_ms", "start and load", PURPLE),
    ("restore_ms", "restore", GREEN),
];
/// So many times faster the paper's are at best.
const PAPER: f64 = 25.0;

pub(super) async fn measure(args: &Args, lines: &mut Lines) -> anyhow::Result<()> {
    let (runs, sizes) = if args.quick { (1, &SIZES[..1]) } else { (RUNS, &SIZES[..]) };
    let bed = Bed { name: args.name.clone(), ..Bed::default() };
    for store in Store::ALL {
        let image = store.image(args)?;
        for &size in sizes {
            bed.lab(true, async |lab| {
                let node = trial::connect(lab, SOURCE).await?;
                let running = Running { store, lab: lab.clone(), at: store.run(&node, &image).await? };
                let filled = running.clone();
                blocking(move || filled.fill(size << 20)).await?;
                for run in 1..=runs {
                    let sampled = running.clone();
                    let mut row = blocking(move || sample(&sampled)).await?;
                    row["experiment"] = "hcontainer-persistence".into();
                    row["store"] = store.name().into();
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

/// Both ways to the disk and back, one after the other. The service has no connection meanwhile: a checkpoint would refuse it.
fn sample(running: &Running) -> anyhow::Result<Value> {
    let Running { store, lab, .. } = running;
    let archive = lab.state(SOURCE)?.with_file_name("checkpoint.tar");
    let path = archive.to_str().context("the path of the checkpoint is no text")?;
    let godwit = |words: &[&str]| godwit(lab, SOURCE, words);
    let ms = |begun: Instant| begun.elapsed().as_secs_f64() * 1e3;

    let all = running.count()?;
    let begun = Instant::now();
    running.save()?;
    let save_ms = ms(begun);
    let file = store.file();
    let bytes = godwit(&["exec", SERVICE, "stat", "-c", "%s", file])?;
    let save_bytes: u64 = bytes.parse().with_context(|| format!("the size of {file} is {bytes:?}"))?;
    godwit(&["stop", SERVICE])?;
    let begun = Instant::now();
    let loaded = running.start()?;
    let load_ms = ms(begun);
    ensure!(loaded == all, "{} loads {loaded} values of {all}", store.name());
    // Else it would be a part of the checkpoint.
    godwit(&["exec", SERVICE, "rm", file])?;

    let begun = Instant::now();
    // As the service goes on after it has saved. Neither compresses what does not compress, and CRIU, which the paper takes,
    // nothing.
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
    let restored = running.count()?;
    let restore_ms = ms(begun);
    ensure!(restored == all, "after its restore {} has {restored} values of {all}", store.name());
    std::fs::remove_file(&archive).with_context(|| format!("removing {path}"))?;
    Ok(json!({
        "values": all, "save_ms": save_ms, "load_ms": load_ms, "save_bytes": save_bytes,
        "checkpoint_ms": checkpoint_ms, "restore_ms": restore_ms, "checkpoint_bytes": said["bytes"],
        "frozen_ms": said["frozen_us"].as_f64().map(|us| us / 1e3),
    }))
}

fn of(rows: &[Value], store: Store, size: u64, field: &str) -> Vec<f64> {
    values(rows, &[("store", store.name().into()), ("mib", size.into())], field)
}

pub(super) fn tell(rows: &[Value], path: &Path) -> anyhow::Result<Vec<Verdict>> {
    let mut drawn = Vec::new();
    for store in Store::ALL {
        for size in SIZES {
            for (field, what, colour) in TIMED {
                let label = format!("{}, {size} MiB: {what}", store.name());
                drawn.extend(Row::of(label, colour, &of(rows, store, size, field)));
            }
        }
    }
    let measured = |store| SIZES.into_iter().rev().find(|size| !of(rows, store, *size, "save_ms").is_empty());
    let largest = Store::ALL.into_iter().filter_map(|store| Some((store, measured(store)?)));
    let verdicts: Vec<Verdict> = largest.flat_map(|(store, size)| verdicts(rows, store, size)).collect();
    let small = Store::RedisSmall;
    let save = measured(small).and_then(|size| quantile(&of(rows, small, size, "save_ms"), 0.5));
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

/// At one size: what the service does itself, beside what godwit does.
fn verdicts(rows: &[Value], store: Store, size: u64) -> [Verdict; 2] {
    let median = |field: &str| quantile(&of(rows, store, size, field), 0.5);
    let verdict = |what: &str, own: &str, ours: &str| {
        let (own, ours) = (median(own), median(ours));
        let times = own.zip(ours).map(|(own, ours)| own / ours);
        Verdict {
            what: format!("{}, {size} MiB: {what}", store.name()),
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
        verdict("checkpoint beside save", "save_ms", "checkpoint_ms"),
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
                "store": Store::RedisSmall.name(), "mib": size, "save_ms": save, "checkpoint_ms": checkpoint, "load_ms": 500,
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
