//! `hcontainer-follow`: a client goes from beside the origin to beside the destination, while a Redis stays at one of them,
//! or crosses on the way.
//!
//! ```text
//!   round trip   origin   0 ms ──────────────▶ 10 ms
//!           destination  10 ms ──────────────▶  0 ms
//!                                  ▲ at the threshold of 5 ms `moved` crosses
//! ```
//!
//! In the paper (figures 17 to 21, and 28) a proxy finds the new place, and connections are made anew; here each stays. Its
//! destination is the slower machine; ours are alike.

use std::{
    path::Path,
    time::{Duration, Instant},
};

use godwit_api::v1::MigrationReport;
use godwit_cli::migration::{How, Mode};
use godwit_lab::{
    Lab,
    config::CLIENT,
    workload::{Gets, RedisClient},
};
use plotters::style::RGBColor;
use serde_json::{Value, json};

use super::{
    Args, Lines, Verdict,
    curves::{self, Curve, Panel},
    quantile,
    throughput::{CONNECTIONS, UNIT},
    values,
};
use crate::{
    bench::Bed,
    follow::road::Road,
    picture::{BLUE, GREEN, ORANGE},
    redis,
    trial::{self, DESTINATION, SERVICE, SOURCE, blocking},
};

const RUNS: u32 = 3;
/// Data in the Redis beside the value that is read.
const MEMORY: u64 = 16 << 20;
/// Bytes of that value.
const VALUE: usize = 3;
/// How long Redis may take to answer its first request.
const START: Duration = Duration::from_secs(10);
/// Answers are counted in spans of this length.
const SPAN: Duration = Duration::from_millis(500);
/// Connections of the client, with a request under way on each: one, and as many as elsewhere.
const CLIENTS: [u32; 2] = [1, CONNECTIONS];
/// Where the Redis moves: when the client has the half of its way behind it, both nodes are equally far.
const THRESHOLD: f64 = 0.5;

/// Where the Redis is.
#[derive(Clone, Copy)]
struct Place {
    name: &'static str,
    /// Where it is run.
    node: &'static str,
    moves: bool,
    colour: RGBColor,
    /// The gain of moving over this, as the paper has it.
    gain: &'static str,
}

const PLACES: [Place; 3] = [
    Place { name: "origin", node: SOURCE, moves: false, colour: BLUE, gain: "19.9 to 27.5 %" },
    Place { name: "destination", node: DESTINATION, moves: false, colour: ORANGE, gain: "81.2 to 108.3 %" },
    Place { name: "moved", node: SOURCE, moves: true, colour: GREEN, gain: "" },
];
const PAPER: &str =
    "the paper's means: origin 15,497 to 21,036, destination 10,907 to 12,105, moved 19,766 to 25,221 req/s";

/// The client stays for a moment beside either node, as long at one as at the other, and goes at an even pace between.
fn road(takes: Duration) -> Road {
    Road { takes, stations: &[(0.0, 0.0), (0.05, 0.0), (0.95, 1.0), (1.0, 1.0)], near: 0.0, slope: 5.0 }
}

pub(super) async fn measure(args: &Args, lines: &mut Lines) -> anyhow::Result<()> {
    let (runs, takes) =
        if args.quick { (1, Duration::from_secs(12)) } else { (RUNS, Duration::from_secs(60)) };
    let image = redis::image(&args.image)?;
    let bed = Bed { name: args.name.clone(), ..Bed::default() };
    for run in 1..=runs {
        for connections in CLIENTS {
            for place in PLACES {
                let trip = Trip { place, connections, takes };
                for mut row in bed.lab(true, async |lab| trip.take(lab, &image).await).await? {
                    row["experiment"] = "hcontainer-follow".into();
                    row["run"] = run.into();
                    row["place"] = place.name.into();
                    row["connections"] = connections.into();
                    lines.add(row)?;
                }
            }
        }
    }
    Ok(())
}

/// One way of the client, with the Redis at one place.
#[derive(Clone, Copy)]
struct Trip {
    place: Place,
    connections: u32,
    takes: Duration,
}

impl Trip {
    /// A row for each span, and one of all of it.
    async fn take(self, lab: &Lab, image: &Path) -> anyhow::Result<Vec<Value>> {
        let node = trial::connect(lab, self.place.node).await?;
        let at = redis::run(&node, image, &redis::WITHOUT_SNAPSHOTS).await?;
        let there = lab.clone();
        let start = move || {
            let mut data = RedisClient::connect(&there, CLIENT, at, START)?;
            data.fill(MEMORY)?;
            let gets = Gets::start(&there, CLIENT, at, self.connections, VALUE)?;
            road(self.takes).begin(&there, &[SOURCE, DESTINATION])?;
            Ok((data, gets))
        };
        let (mut data, gets) = blocking(start).await?;
        let (begun, before) = (Instant::now(), gets.answered());
        let crossing = async {
            if !self.place.moves {
                return Ok(MigrationReport::default());
            }
            tokio::time::sleep_until((begun + self.takes.mul_f64(THRESHOLD)).into()).await;
            let mut request = How::default().request(Mode::Precopy, SERVICE, DESTINATION);
            request.cross = true;
            trial::moves(&node, request, &trial::quiet(lab)).await
        };
        let (mut rows, report) = tokio::join!(spans(&gets, begun, self.takes), crossing);
        let report = report?;
        let mean = (gets.answered() - before) as f64 / begun.elapsed().as_secs_f64();
        let end = move || {
            let seen = gets.stop()?;
            data.check_fill(MEMORY)?;
            Ok(seen)
        };
        let seen = blocking(end).await?;
        rows.push(json!({
            "mean_s": mean, "requests": seen.sent, "lost_or_wrong": seen.lost_ops + seen.wrong,
            "reconnects": seen.reconnects, "broken": seen.broken, "frozen_ms": report.frozen_ms,
            "total_ms": report.total_ms,
        }));
        Ok(rows)
    }
}

/// What is answered in each span until the client has arrived.
async fn spans(gets: &Gets, begun: Instant, takes: Duration) -> Vec<Value> {
    let mut rows = Vec::new();
    let mut last = (begun, gets.answered());
    let mut tick = tokio::time::interval_at((begun + SPAN).into(), SPAN);
    while begun.elapsed() < takes {
        tick.tick().await;
        let now = (Instant::now(), gets.answered());
        let rate = (now.1 - last.1) as f64 / (now.0 - last.0).as_secs_f64();
        rows.push(json!({ "at_s": (now.0 - begun).as_secs_f64(), "requests_s": rate }));
        last = now;
    }
    rows
}

fn like(connections: u32, place: &str) -> [(&'static str, Value); 2] {
    [("connections", connections.into()), ("place", place.into())]
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
        let of = like(connections, place.name);
        let is_of = |row: &&Value| row["run"] == 1 && of.iter().all(|(field, value)| row[*field] == *value);
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
    let mean = |place: &str| quantile(&values(rows, &like(connections, place), "mean_s"), 0.5);
    let moved = mean("moved");
    let gains = PLACES.into_iter().filter(|place| !place.moves).map(|place| {
        let means = moved.zip(mean(place.name));
        let gain = means.map(|(moved, fixed)| moved / fixed - 1.0);
        Verdict {
            what: format!("connections: {connections}, gain of moved over {}", place.name),
            goal: format!("above 0 (the paper: {})", place.gain),
            found: means
                .zip(gain)
                .map(|((moved, fixed), gain)| {
                    format!("{:+.1} %: {moved:.0} and {fixed:.0} {UNIT}", gain * 100.0)
                })
                .unwrap_or_default(),
            holds: gain.is_some_and(|gain| gain > 0.0),
        }
    });
    let sum = |field: &str| values(rows, &[("connections", connections.into())], field).iter().sum::<f64>();
    let (bad, requests) = (sum("lost_or_wrong") + sum("reconnects"), sum("requests"));
    let answers = Verdict {
        what: format!("connections: {connections}, answers lost or wrong, and connections made anew"),
        goal: "0".to_owned(),
        found: format!("{bad:.0} of {requests:.0} requests"),
        holds: bad == 0.0 && requests > 0.0,
    };
    gains.chain([answers]).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_gain_is_that_of_the_means_and_a_lost_answer_fails() {
        let row = |place: &str, mean: f64, bad: u32| {
            json!({
                "connections": 1, "place": place, "mean_s": mean, "lost_or_wrong": bad, "reconnects": 0,
                "requests": 1000,
            })
        };
        let rows = |bad| [row("origin", 100.0, 0), row("destination", 200.0, 0), row("moved", 150.0, bad)];
        let found = verdicts(&rows(0), 1);
        let holds = |verdicts: &[Verdict]| verdicts.iter().map(|one| one.holds).collect::<Vec<_>>();
        assert_eq!(holds(&found), [true, false, true]);
        assert!(found[0].found.starts_with("+50.0 %") && found[1].found.starts_with("-25.0 %"));
        assert_eq!(holds(&verdicts(&rows(1), 1)), [true, false, false]);
        assert_eq!(holds(&verdicts(&rows(0), 50)), [false; 3]);
    }
}
