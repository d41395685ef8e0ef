//! `hcontainer-latency`: how much of its throughput a Redis loses to the way between it and its client.
//!
//! In the paper 1 to 2 ms lose over a third, and from 4 ms on its machines are within 10 % of one another (figure 1): the
//! round trip alone decides.

use std::path::Path;

use serde_json::Value;

use super::{
    Args, Lines, Verdict,
    picture::Paper,
    throughput::{self, CONNECTIONS, Setting, UNIT},
};
use crate::picture::BLUE;

/// Added to the round trip, milliseconds.
const ADDED: [u32; 9] = [0, 1, 2, 4, 6, 8, 10, 15, 20];
/// What of the throughput is left at most with these.
const LEFT: f64 = 2.0 / 3.0;
const LOSES: u32 = 2;
/// From here on the throughput is that of the round trip, within this part of it.
const ALONE: u32 = 4;
const WITHIN: f64 = 0.1;

fn setting(added_ms: u32) -> Setting {
    Setting { added_ms, value_bytes: 3 }
}

/// What a client gets whose every request takes the added round trip, and nothing else.
fn of_round_trip(added_ms: u32) -> f64 {
    f64::from(CONNECTIONS) * 1e3 / f64::from(added_ms)
}

pub(super) async fn measure(args: &Args, lines: &mut Lines) -> anyhow::Result<()> {
    throughput::measure(args, lines, "hcontainer-latency", &ADDED.map(setting)).await
}

pub(super) fn tell(rows: &[Value], path: &Path) -> anyhow::Result<Vec<Verdict>> {
    let rate = |added_ms| throughput::median(rows, setting(added_ms));
    let near = rate(0);
    let paper = near.map(|near| Paper { label: "the paper, 1 to 2 ms: at most", from: 0.0, to: near * LEFT });
    let settings =
        ADDED.map(|added_ms| (format!("{added_ms} ms added to the round trip"), BLUE, setting(added_ms)));
    throughput::draw(path, "Requests that a Redis answers: least, median, most", rows, settings, paper)?;
    let left = rate(LOSES).zip(near).map(|(rate, near)| rate / near);
    let mut verdicts = vec![Verdict {
        what: format!("{LOSES} ms: throughput, as a part of that without"),
        goal: format!("at most {LEFT:.2}"),
        found: left.map(|left| format!("{left:.2}")).unwrap_or_default(),
        holds: left.is_some_and(|left| left <= LEFT),
    }];
    for added_ms in ADDED.into_iter().filter(|added_ms| *added_ms >= ALONE) {
        let due = of_round_trip(added_ms);
        let found = rate(added_ms);
        verdicts.push(Verdict {
            what: format!("{added_ms} ms: throughput, that of the round trip alone"),
            goal: format!("{due:.0} {UNIT}, less {:.0} % at most", WITHIN * 100.0),
            found: found.map(|found| format!("{found:.0} {UNIT}")).unwrap_or_default(),
            holds: found.is_some_and(|found| found >= due * (1.0 - WITHIN)),
        });
    }
    Ok(verdicts)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn the_round_trip_alone_is_what_throughput_is_judged_by() -> anyhow::Result<()> {
        let scratch = tempfile::tempdir()?;
        let row = |(added_ms, requests_s): (u32, f64)| json!({"added_ms": added_ms, "value_bytes": 3, "requests_s": requests_s});
        let rows: Vec<Value> = [(0, 40_000.0), (2, 24_000.0), (4, 11_300.0), (6, 7000.0)].map(row).into();
        let verdicts = tell(&rows, &scratch.path().join("x.svg"))?;
        let holds: Vec<bool> = verdicts.iter().map(|verdict| verdict.holds).collect();
        // 24,000 are 60 % of 40,000; 50 connections give 12,500 at 4 ms, and 8,333 at 6 ms. Of the others there is nothing.
        assert_eq!(holds, [true, true, false, false, false, false, false]);
        Ok(())
    }
}
