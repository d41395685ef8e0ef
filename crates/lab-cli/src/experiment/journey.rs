//! A client goes from beside the origin to beside the destination, while a service stays at one of them, or crosses on the
//! way: what `hcontainer-follow` and `hcontainer-compute` measure.
//!
//! ```text
//!   round trip   origin   0 ms ──────────────▶ 10 ms
//!           destination  10 ms ──────────────▶  0 ms
//!                                  ▲ at the threshold of 5 ms `moved` crosses
//! ```

use std::{
    net::SocketAddrV4,
    time::{Duration, Instant},
};

use godwit_api::v1::MigrationReport;
use godwit_cli::{
    client::Connection,
    migration::{How, Mode},
};
use godwit_lab::{Lab, workload::Repeated};
use plotters::style::RGBColor;
use serde_json::{Value, json};

use super::{Verdict, quantile, values};
use crate::{
    follow::road::Road,
    picture::{BLUE, GREEN, ORANGE},
    trial::{self, DESTINATION, SERVICE, SOURCE, blocking},
};

/// Answers are counted in spans of this length.
const SPAN: Duration = Duration::from_millis(500);
/// Where the service moves: when the client has the half of its way behind it, both nodes are equally far.
const THRESHOLD: f64 = 0.5;

/// Where the service is.
#[derive(Clone, Copy)]
pub(super) struct Place {
    pub(super) name: &'static str,
    /// Where it is run.
    pub(super) node: &'static str,
    pub(super) moves: bool,
    pub(super) colour: RGBColor,
}

pub(super) const PLACES: [Place; 3] = [
    Place { name: "origin", node: SOURCE, moves: false, colour: BLUE },
    Place { name: "destination", node: DESTINATION, moves: false, colour: ORANGE },
    Place { name: "moved", node: SOURCE, moves: true, colour: GREEN },
];

/// The client stays for a moment beside either node, as long at one as at the other, and goes at an even pace between.
fn road(takes: Duration) -> Road {
    Road { takes, stations: &[(0.0, 0.0), (0.05, 0.0), (0.95, 1.0), (1.0, 1.0)], near: 0.0, slope: 5.0 }
}

/// What is done with the client's end: a look at what else the service has to have kept.
pub(super) type Check = Box<dyn FnOnce() -> anyhow::Result<()> + Send>;

/// One way of the client, with the service at one place.
#[derive(Clone, Copy)]
pub(super) struct Journey {
    pub(super) place: Place,
    pub(super) takes: Duration,
}

impl Journey {
    /// Runs a service named [`SERVICE`] on the node of its connection, has the client begin, and measures: a row for each span,
    /// and one of all of it.
    pub(super) async fn take(
        self,
        lab: &Lab,
        run: impl AsyncFnOnce(&Connection) -> anyhow::Result<SocketAddrV4>,
        ask: impl FnOnce(&Lab, SocketAddrV4) -> anyhow::Result<(Repeated, Check)> + Send + 'static,
    ) -> anyhow::Result<Vec<Value>> {
        let node = trial::connect(lab, self.place.node).await?;
        let at = run(&node).await?;
        let there = lab.clone();
        let start = move || {
            let started = ask(&there, at)?;
            road(self.takes).begin(&there, &[SOURCE, DESTINATION])?;
            Ok(started)
        };
        let (client, check) = blocking(start).await?;
        let (begun, before) = (Instant::now(), client.answered());
        let crossing = async {
            if !self.place.moves {
                return Ok(MigrationReport::default());
            }
            tokio::time::sleep_until((begun + self.takes.mul_f64(THRESHOLD)).into()).await;
            let mut request = How::default().request(Mode::Precopy, SERVICE, DESTINATION);
            request.cross = true;
            trial::moves(&node, request, &trial::quiet(lab)).await
        };
        let (mut rows, report) = tokio::join!(spans(&client, begun, self.takes), crossing);
        let report = report?;
        let mean = (client.answered() - before) as f64 / begun.elapsed().as_secs_f64();
        let end = move || {
            let seen = client.stop()?;
            check()?;
            Ok(seen)
        };
        let seen = blocking(end).await?;
        rows.push(json!({
            "mean_s": mean, "requests": seen.sent, "lost_or_wrong": seen.lost_ops + seen.wrong,
            "reconnects": seen.reconnects, "broken": seen.broken, "frozen_ms": report.frozen_ms,
            "total_ms": report.total_ms,
        }));
        for row in &mut rows {
            row["place"] = self.place.name.into();
        }
        Ok(rows)
    }
}

/// What is answered in each span until the client has arrived.
async fn spans(client: &Repeated, begun: Instant, takes: Duration) -> Vec<Value> {
    let mut rows = Vec::new();
    let mut last = (begun, client.answered());
    let mut tick = tokio::time::interval_at((begun + SPAN).into(), SPAN);
    while begun.elapsed() < takes {
        tick.tick().await;
        let now = (Instant::now(), client.answered());
        let rate = (now.1 - last.1) as f64 / (now.0 - last.0).as_secs_f64();
        rows.push(json!({ "at_s": (now.0 - begun).as_secs_f64(), "requests_s": rate }));
        last = now;
    }
    rows
}

/// Judges what moving gains over each place where the service stays, in the rows of journeys that are alike.
pub(super) fn gains(
    rows: &[Value],
    like: &[(&str, Value)],
    what: &str,
    least: f64,
    paper: impl Fn(Place) -> String,
) -> Vec<Verdict> {
    let mean = |place: Place| quantile(&values(rows, &at(like, place), "mean_s"), 0.5);
    let fixed = PLACES.into_iter().filter(|place| !place.moves);
    let moved = PLACES.into_iter().find(|place| place.moves).and_then(mean);
    let verdict = |place: Place| {
        let means = moved.zip(mean(place));
        let gain = means.map(|(moved, fixed)| moved / fixed - 1.0);
        let found = means.zip(gain).map(|((moved, fixed), gain)| {
            let digits = if fixed < 100.0 { 1 } else { 0 };
            format!("{:+.1} %: {moved:.digits$} and {fixed:.digits$} req/s", gain * 100.0)
        });
        Verdict {
            what: format!("{what}, gain of moved over {}", place.name),
            goal: format!("above {:.0} %{}", least * 100.0, paper(place)),
            found: found.unwrap_or_default(),
            holds: gain.is_some_and(|gain| gain > least),
        }
    };
    fixed.map(verdict).collect()
}

/// Judges what clients of these journeys saw.
pub(super) fn answers(rows: &[Value], like: &[(&str, Value)], what: &str) -> Verdict {
    let sum = |field: &str| values(rows, like, field).iter().sum::<f64>();
    let (bad, requests) = (sum("lost_or_wrong") + sum("reconnects"), sum("requests"));
    Verdict {
        what: format!("{what}, answers lost or wrong, and connections made anew"),
        goal: "0".to_owned(),
        found: format!("{bad:.0} of {requests:.0} requests"),
        holds: bad == 0.0 && requests > 0.0,
    }
}

/// The fields of rows of one place.
pub(super) fn at<'a>(like: &[(&'a str, Value)], place: Place) -> Vec<(&'a str, Value)> {
    like.iter().cloned().chain([("place", place.name.into())]).collect()
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
        let judged = |bad, connections: u32, least| {
            let like = [("connections", connections.into())];
            let mut verdicts = gains(&rows(bad), &like, "x", least, |_| String::new());
            verdicts.push(answers(&rows(bad), &like, "x"));
            verdicts
        };
        let holds = |verdicts: &[Verdict]| verdicts.iter().map(|one| one.holds).collect::<Vec<_>>();
        let found = judged(0, 1, 0.0);
        assert_eq!(holds(&found), [true, false, true]);
        assert!(found[0].found.starts_with("+50.0 %") && found[1].found.starts_with("-25.0 %: 150 and 200"));
        assert_eq!(holds(&judged(0, 1, -0.3)), [true; 3]);
        assert_eq!(holds(&judged(1, 1, 0.0)), [true, false, false]);
        assert_eq!(holds(&judged(0, 50, 0.0)), [false; 3]);
    }
}
