//! `hcontainer-follow`: a client goes from beside the origin to beside the destination, while a Redis stays at one of them,
//! or crosses on the way.
//!
//! In the paper (figures 17 to 21, and 28) a proxy finds the new place, and connections are made anew; here each stays. Its
//! destination is the slower machine; ours are alike.

use std::{path::Path, time::Duration};

use godwit_lab::{
    Lab,
    config::CLIENT,
    workload::{RedisClient, Repeated},
};
use serde_json::Value;

use super::{
    Args, Lines, Verdict,
    curves::{self, Curve, Panel},
    journey::{self, Check, Journey, PLACES, Place},
    throughput::{CONNECTIONS, UNIT},
};
use crate::{bench::Bed, redis, trial::SOURCE};

const RUNS: u32 = 3;
/// Data in the Redis beside the value that is read.
const MEMORY: u64 = 16 << 20;
/// Bytes of that value.
const VALUE: usize = 3;
/// How long Redis may take to answer its first request.
const START: Duration = Duration::from_secs(10);
/// Connections of the client, with a request under way on each: one, and as many as elsewhere.
const CLIENTS: [u32; 2] = [1, CONNECTIONS];
const PAPER: &str =
    "the paper's means: origin 15,497 to 21,036, destination 10,907 to 12,105, moved 19,766 to 25,221 req/s";

pub(super) async fn measure(args: &Args, lines: &mut Lines) -> anyhow::Result<()> {
    let (runs, takes) =
        if args.quick { (1, Duration::from_secs(12)) } else { (RUNS, Duration::from_secs(60)) };
    let image = redis::image(&args.images)?;
    let bed = Bed { name: args.name.clone(), ..Bed::default() };
    for run in 1..=runs {
        for connections in CLIENTS {
            for place in PLACES {
                let journey = Journey { place, takes };
                let take = async |lab: &Lab| {
                    let run = async |node: &_| redis::run(node, &image, &redis::WITHOUT_SNAPSHOTS).await;
                    let ask = move |lab: &Lab, at| {
                        let mut data = RedisClient::connect(lab, CLIENT, at, START)?;
                        data.fill(MEMORY)?;
                        let client = Repeated::gets(lab, CLIENT, at, connections, VALUE)?;
                        let check: Check = Box::new(move || Ok(data.check_fill(MEMORY)?));
                        Ok((client, check))
                    };
                    journey.take(lab, run, ask).await
                };
                for mut row in bed.lab(true, take).await? {
                    row["experiment"] = "hcontainer-follow".into();
                    row["run"] = run.into();
                    row["connections"] = connections.into();
                    lines.add(row)?;
                }
            }
        }
    }
    Ok(())
}

pub(super) fn tell(rows: &[Value], path: &Path) -> anyhow::Result<Vec<Verdict>> {
    curves::draw(
        path,
        "What a client is answered on its way (log scale)",
        &CLIENTS.map(|connections| panel(rows, connections)),
        PAPER,
    )?;
    Ok(CLIENTS.into_iter().flat_map(|connections| verdicts(rows, connections)).collect())
}

/// The first run.
fn panel(rows: &[Value], connections: u32) -> Panel {
    let curve = |place: Place| {
        let of = journey::at(&[("connections", connections.into()), ("run", 1.into())], place);
        let is_of = |row: &&Value| of.iter().all(|(field, value)| row[*field] == *value);
        let point = |row: &Value| Some((row["at_s"].as_f64()?, row["requests_s"].as_f64()?));
        Curve {
            label: place.name,
            colour: place.colour,
            points: rows.iter().filter(is_of).filter_map(point).collect(),
        }
    };
    let title = match connections {
        1 => format!("one connection, {UNIT}"),
        many => format!("{many} connections, {UNIT}"),
    };
    Panel { title, curves: PLACES.map(curve).into() }
}

fn verdicts(rows: &[Value], connections: u32) -> Vec<Verdict> {
    let like = [("connections", connections.into())];
    let what = format!("connections: {connections}");
    let paper = |place: Place| {
        let gain = if place.node == SOURCE { "19.9 to 27.5 %" } else { "81.2 to 108.3 %" };
        format!(" (the paper: {gain})")
    };
    let mut verdicts = journey::gains(rows, &like, &what, 0.0, paper);
    verdicts.push(journey::answers(rows, &like, &what));
    verdicts
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn each_gain_stands_beside_the_paper_s() {
        let row = |place: &str, mean: f64| {
            json!({
                "connections": 50, "place": place, "mean_s": mean, "lost_or_wrong": 0, "reconnects": 0,
                "requests": 10,
            })
        };
        let rows = [row("origin", 100.0), row("destination", 80.0), row("moved", 120.0)];
        let found = verdicts(&rows, 50);
        assert!(found.iter().all(|verdict| verdict.holds) && found.len() == 3);
        assert!(found[0].goal.contains("27.5") && found[1].goal.contains("81.2"));
    }
}
