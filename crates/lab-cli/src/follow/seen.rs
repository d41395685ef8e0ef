//! What the client saw of one service, in figures.

use std::time::{Duration, Instant};

use godwit_lab::workload::LoadReport;
use serde::Serialize;

/// A time over which answers are put together.
const WINDOW: Duration = Duration::from_millis(250);

/// A move: when it was over, after the beginning, and the node to which it went.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Move {
    pub(super) at: Duration,
    pub(super) to: String,
}

/// All that is shown of one service.
pub(super) struct Seen {
    /// What decided where it is: `following`, `fixed` or `threshold`.
    pub(super) rule: &'static str,
    pub(super) report: LoadReport,
    pub(super) moves: Vec<Move>,
    pub(super) windows: Vec<Window>,
    pub(super) figures: Figures,
}

/// Answers to requests that were due in one span of time.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Window {
    /// Its middle, seconds after the beginning.
    pub(super) at: f64,
    /// Half of the answers took no longer, milliseconds.
    pub(super) median_ms: f64,
    /// The longest wait.
    pub(super) most_ms: f64,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub(super) struct Figures {
    /// Average wait of an answer, milliseconds, pauses of moves in it.
    pub(super) average_ms: f64,
    /// Seconds in which most answers took longer than the client is content with.
    pub(super) over_s: f64,
    /// Seconds of service that the client lost: a wait of twice the latency or longer loses all of its time, one of the
    /// latency loses nothing of it.
    pub(super) lost_s: f64,
    /// The longest wait, milliseconds.
    pub(super) longest_ms: f64,
}

impl Seen {
    pub(super) fn new(
        rule: &'static str,
        report: LoadReport,
        moves: Vec<Move>,
        (begun, takes, latency): (Instant, Duration, Duration),
    ) -> Self {
        let answers: Vec<(Duration, Duration)> = report
            .timeline
            .waits()
            .filter_map(|(due, wait)| Some((due.checked_duration_since(begun)?, wait)))
            .filter(|(due, _)| *due < takes)
            .collect();
        let windows = windows(&answers);
        let figures = figures(&answers, &windows, latency);
        Self { rule, report, moves, windows, figures }
    }

    /// Nothing was lost; else what was.
    pub(super) fn verdict(&self) -> Result<(), String> {
        self.report.loss().map_or(Ok(()), |loss| Err(format!("the client of {} {loss}", self.rule)))
    }
}

/// Answers are in the order in which they were due.
fn windows(answers: &[(Duration, Duration)]) -> Vec<Window> {
    let number = |due: &Duration| due.as_millis() / WINDOW.as_millis();
    let groups = answers.chunk_by(|(one, _), (next, _)| number(one) == number(next));
    let window = |group: &[(Duration, Duration)]| {
        let mut waits: Vec<Duration> = group.iter().map(|(_, wait)| *wait).collect();
        waits.sort_unstable();
        let (median, most) = (waits.get(waits.len() / 2)?, waits.last()?);
        let begins = WINDOW * u32::try_from(number(&group.first()?.0)).ok()?;
        Some(Window { at: (begins + WINDOW / 2).as_secs_f64(), median_ms: ms(*median), most_ms: ms(*most) })
    };
    groups.filter_map(window).collect()
}

fn figures(answers: &[(Duration, Duration)], windows: &[Window], latency: Duration) -> Figures {
    let Some((last, _)) = answers.last() else { return Figures::default() };
    let count = f64::from(u32::try_from(answers.len()).unwrap_or(u32::MAX));
    let waits = || answers.iter().map(|(_, wait)| *wait);
    let lost = waits().map(|wait| (wait.as_secs_f64() / latency.as_secs_f64() - 1.0).clamp(0.0, 1.0));
    let over = windows.iter().filter(|window| window.median_ms > ms(latency));
    Figures {
        average_ms: waits().map(ms).sum::<f64>() / count,
        over_s: over.map(|_| WINDOW.as_secs_f64()).sum(),
        lost_s: lost.sum::<f64>() / count * last.as_secs_f64(),
        longest_ms: waits().map(ms).fold(0.0, f64::max),
    }
}

fn ms(time: Duration) -> f64 {
    time.as_secs_f64() * 1e3
}

#[cfg(test)]
mod tests {
    use super::*;

    /// An answer each 50 ms.
    fn answers(waits: impl IntoIterator<Item = u64>) -> Vec<(Duration, Duration)> {
        let each = (0..).map(|number| Duration::from_millis(50) * number);
        each.zip(waits.into_iter().map(Duration::from_millis)).collect()
    }

    #[test]
    fn windows_have_the_median_and_the_longest_wait_of_their_answers() {
        let windows = windows(&answers([1, 2, 3, 4, 90, 7]));
        assert_eq!(
            windows,
            [
                Window { at: 0.125, median_ms: 3.0, most_ms: 90.0 },
                Window { at: 0.375, median_ms: 7.0, most_ms: 7.0 }
            ]
        );
    }

    #[test]
    fn a_client_loses_what_is_above_its_latency_and_no_more_than_all() {
        // A second within the latency, a second at one and a half of it, a second of a pause.
        let waits = [[10; 20], [15; 20], [400; 20]].concat();
        let answers = answers(waits);
        let figures = figures(&answers, &windows(&answers), Duration::from_millis(10));
        assert!((figures.average_ms - 425.0 / 3.0).abs() < 1e-9, "{figures:?}");
        assert!((figures.over_s - 2.0).abs() < 1e-9, "{figures:?}");
        assert!((figures.lost_s - 0.5 * 2.95).abs() < 1e-9, "{figures:?}");
        assert!((figures.longest_ms - 400.0).abs() < 1e-9, "{figures:?}");
        assert_eq!(super::figures(&[], &[], Duration::from_millis(10)), Figures::default());
    }
}
