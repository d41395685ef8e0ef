//! `hcontainer-payload`: how much of its throughput a Redis loses to larger values.
//!
//! In the paper values of 3 B to 300 B are alike, and 3 KB lose 15 % on its near Atom (figures 17 to 19, right).

use std::path::Path;

use serde_json::Value;

use super::{
    Args, Lines, Verdict,
    picture::Paper,
    throughput::{self, Setting},
};
use crate::picture::BLUE;

const SIZES: [usize; 4] = [3, 30, 300, 3000];
/// What is judged: the throughput of these is that of the smallest, less so much of it at most.
const ALIKE: [usize; 2] = [30, 300];
const WITHIN: f64 = 0.05;

fn setting(value_bytes: usize) -> Setting {
    Setting { added_ms: 0, value_bytes }
}

pub(super) async fn measure(args: &Args, lines: &mut Lines) -> anyhow::Result<()> {
    throughput::measure(args, lines, "hcontainer-payload", &SIZES.map(setting)).await
}

pub(super) fn tell(rows: &[Value], path: &Path) -> anyhow::Result<Vec<Verdict>> {
    let rate = |bytes| throughput::median(rows, setting(bytes));
    let smallest = rate(SIZES[0]);
    let paper = smallest.map(|rate| Paper {
        label: "the paper: to 300 B alike, 3 KB −15 %",
        from: rate * 0.85,
        to: rate,
    });
    let settings = SIZES.map(|bytes| (format!("values of {bytes} B"), BLUE, setting(bytes)));
    throughput::draw(path, "Requests that a Redis answers: least, median, most", rows, settings, paper)?;
    let verdict = |bytes: usize| {
        let more = rate(bytes).zip(smallest).map(|(rate, smallest)| rate / smallest - 1.0);
        Verdict {
            what: format!("{bytes} B: throughput beside that of {} B", SIZES[0]),
            goal: format!("less by {:.0} % at most", WITHIN * 100.0),
            found: more.map(|more| format!("{:+.1} %", more * 100.0)).unwrap_or_default(),
            holds: more.is_some_and(|more| more >= -WITHIN),
        }
    };
    Ok(ALIKE.map(verdict).into())
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn larger_values_are_judged_beside_the_smallest() -> anyhow::Result<()> {
        let scratch = tempfile::tempdir()?;
        let rates = [(3, 1000.0), (30, 960.0), (300, 940.0), (3000, 500.0)];
        let row =
            |(bytes, rate): (u32, f64)| json!({"added_ms": 0, "value_bytes": bytes, "requests_s": rate});
        let verdicts = tell(&rates.map(row), &scratch.path().join("x.svg"))?;
        assert_eq!(verdicts.iter().map(|verdict| verdict.holds).collect::<Vec<_>>(), [true, false]);
        Ok(())
    }
}
