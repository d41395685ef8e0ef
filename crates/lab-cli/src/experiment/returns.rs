//! `hcontainer-return`: a Redis crosses there and back, again and again, under a client that writes.
//!
//! A node keeps the pages of a service that has left, so each way after the first sends what has changed since. The paper
//! does not come back.

use std::path::Path;

use anyhow::ensure;
use godwit_api::v1::run_request::Source;
use godwit_cli::migration::{How, Mode};
use godwit_lab::Lab;
use serde_json::Value;

use super::{
    Args, Lines, Verdict,
    picture::{Picture, Row},
    quantile, values,
};
use crate::{
    bench::Bed,
    picture::{BLUE, ORANGE},
    redis,
    trial::{self, Clients, DESTINATION, SERVICE, SOURCE},
};

const TURNS: u32 = 10;
const MEMORY: u64 = 200_000_000;
/// The writer's requests a second, sent at their times whether answers come or not.
const RATE: u32 = 1000;
const WAYS: [(&str, &str); 2] = [("there", DESTINATION), ("back", SOURCE)];
/// What is judged: the bytes of a later way, as a part of those of the first.
const GOAL_PART: f64 = 0.1;

pub(super) async fn measure(args: &Args, lines: &mut Lines) -> anyhow::Result<()> {
    let turns = if args.quick { 1 } else { TURNS };
    let image = redis::image(&args.images)?;
    let bed = Bed { name: args.name.clone(), ..Bed::default() };
    bed.lab(true, async |lab| there_and_back(lab, &image, turns, lines).await).await
}

async fn there_and_back(lab: &Lab, image: &Source, turns: u32, lines: &mut Lines) -> anyhow::Result<()> {
    let connection = trial::connect(lab, SOURCE).await?;
    let at = redis::run(&connection, image, &redis::WITHOUT_SNAPSHOTS).await?;
    let mut clients = Clients::start(lab, at, (MEMORY, RATE), |_| Ok(())).await?;
    for turn in 1..=turns {
        for (way, to) in WAYS {
            let mut request = How::default().request(Mode::Precopy, SERVICE, to);
            request.cross = true;
            let report = trial::moves(&connection, request, &trial::quiet(lab)).await?;
            let seen;
            (clients, seen) = clients.watch().await?;
            let mut row = serde_json::to_value(&report)?;
            row["experiment"] = "hcontainer-return".into();
            row["turn"] = turn.into();
            row["way"] = way.into();
            // Files cross once, whatever is kept of the memory.
            let bytes = report.wire_bytes.saturating_sub(report.file_bytes);
            row["way_mb"] = (bytes as f64 / 1e6).into();
            row["downtime_ms"] = seen.downtime_ms.into();
            row["requests"] = seen.sent.into();
            row["lost_or_wrong"] = (seen.lost_ops + seen.wrong).into();
            row["reconnects"] = seen.reconnects.into();
            lines.add(row)?;
            ensure!(
                seen.broken.is_none(),
                "after the way {way} of turn {turn} the client {}",
                seen.loss().unwrap_or_default()
            );
        }
    }
    let seen = clients.finish(|_| Ok(())).await?;
    ensure!(seen.is_clean(), "the client {}", seen.loss().unwrap_or_default());
    Ok(())
}

pub(super) fn tell(rows: &[Value], path: &Path) -> anyhow::Result<Vec<Verdict>> {
    let megabytes: Vec<f64> = rows.iter().filter_map(|row| row["way_mb"].as_f64()).collect();
    let drawn = rows.iter().zip(&megabytes).filter_map(|(row, megabytes)| {
        let way = row["way"].as_str()?;
        let colour = if way == WAYS[0].0 { BLUE } else { ORANGE };
        let label = format!("turn {}, {way}", row["turn"]);
        Some(Row { label, colour, low: 0.0, middle: *megabytes, high: *megabytes })
    });
    let first = megabytes.first();
    let picture = Picture {
        title: "What crosses each time: memory and state, without files",
        unit: "MB",
        rows: drawn.collect(),
        paper: None,
        goal: first.map(|first| first * GOAL_PART),
    };
    picture.draw(path)?;
    let second = megabytes.get(1).copied();
    let mut later: Vec<f64> = megabytes.iter().skip(1).copied().collect();
    later.sort_by(f64::total_cmp);
    let part = |what: &str, later: Option<f64>| {
        let part = later.zip(first).map(|(later, first)| later / first);
        Verdict {
            what: format!("{what}: bytes, as a part of those of the first"),
            goal: format!("below {GOAL_PART}"),
            found: part.map(|part| format!("{part:.3}")).unwrap_or_default(),
            holds: part.is_some_and(|part| part < GOAL_PART),
        }
    };
    let sum = |field: &str| values(rows, &[], field).iter().sum::<f64>();
    let (bad, requests) = (sum("lost_or_wrong") + sum("reconnects"), sum("requests"));
    Ok(vec![
        part("the second way", second),
        part("the median of all later ways", quantile(&later, 0.5)),
        Verdict {
            what: "answers lost or wrong, and connections made anew".to_owned(),
            goal: "0".to_owned(),
            found: format!("{bad:.0} of {requests:.0} requests"),
            holds: bad == 0.0 && requests > 0.0,
        },
    ])
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn each_later_way_is_judged_beside_the_first() -> anyhow::Result<()> {
        let scratch = tempfile::tempdir()?;
        let row = |turn: u32, way: &str, megabytes: f64| {
            json!({
                "turn": turn, "way": way, "way_mb": megabytes, "requests": 100, "lost_or_wrong": 0, "reconnects": 0,
            })
        };
        let rows = [row(1, "there", 200.0), row(1, "back", 10.0), row(2, "there", 30.0)];
        let verdicts = tell(&rows, &scratch.path().join("x.svg"))?;
        assert_eq!(verdicts.iter().map(|verdict| verdict.holds).collect::<Vec<_>>(), [true, false, true]);
        assert_eq!((verdicts[0].found.as_str(), verdicts[1].found.as_str()), ("0.050", "0.150"));
        Ok(())
    }
}
