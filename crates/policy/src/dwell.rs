//! How long a node stays the best one for a service.
//!
//! The time is taken to be exponentially distributed. Its mean is the whole time that was watched by the number of
//! changes of the best node: a time that has not ended counts too. A service of which little is known has the mean of
//! its cluster.

use std::time::Duration;

use crate::quantity::{Moment, bounded, seconds};
use crate::state::NodeId;

/// Before anything is known. Too long a time makes a service move earlier than it pays, too short a time makes it
/// stay; the debt rule bounds what either costs.
const USUAL: f64 = 60.0;

/// For how many changes the belief of the level above counts.
const ABOVE: f64 = 3.0;

/// After this time what was watched counts half.
const HALF: f64 = 7.0 * 24.0 * 3600.0;

/// Watches the best node of one service.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct Watch {
    /// The best node, and when it was the best one last.
    pub best: Option<(NodeId, Moment)>,
    /// Seconds watched.
    pub seconds: f64,
    /// Changes seen.
    pub changes: f64,
}

impl Watch {
    /// Notes the best node of this moment. Of a longer pause only a minute counts.
    pub fn see(&mut self, best: NodeId, now: Moment) {
        if let Some((before, seen)) = self.best {
            let passed = now.since(seen).min(Duration::from_secs(60)).as_secs_f64();
            let left = (-passed / HALF).exp2();
            self.seconds = sane(self.seconds) * left + passed;
            self.changes = sane(self.changes) * left + f64::from(u8::from(before != best));
        }
        self.best = Some((best, now));
    }

    /// The mean time, for a service of a cluster in which it is so long.
    #[must_use]
    pub fn mean(&self, cluster: Duration) -> Duration {
        mean((sane(self.seconds), sane(self.changes)), bounded(cluster).as_secs_f64())
    }
}

/// The mean time in a cluster, of all its services.
#[must_use]
pub fn of_cluster<'a>(services: impl Iterator<Item = &'a Watch>) -> Duration {
    let all = services.fold((0.0, 0.0), |(seconds, changes), watch| {
        (seconds + sane(watch.seconds), changes + sane(watch.changes))
    });
    mean(all, USUAL)
}

fn mean((watched, changes): (f64, f64), above: f64) -> Duration {
    seconds((ABOVE * above + watched) / (ABOVE + changes))
}

/// What a damaged file may have in its place.
fn sane(number: f64) -> f64 {
    if number.is_finite() { number.clamp(0.0, 1e12) } else { 0.0 }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn watched(every: u64, times: u64) -> Watch {
        let mut watch = Watch::default();
        for second in 0..=every * times {
            watch.see(NodeId(u32::from((second / every) % 2 == 1)), Moment(Duration::from_secs(second)));
        }
        watch
    }

    #[test]
    fn many_changes_are_believed_and_few_are_not() {
        let cluster = of_cluster([].into_iter());
        assert_eq!(cluster, Duration::from_secs(60));
        let often = watched(10, 100).mean(cluster);
        assert!((10..12).contains(&often.as_secs()), "{often:?}");
        let once = watched(10, 1).mean(cluster);
        assert!((40..55).contains(&once.as_secs()), "{once:?}");
        // Nothing has changed for an hour.
        assert!(watched(3600, 1).mean(cluster) > Duration::from_secs(900));
        let all = of_cluster([watched(10, 100), watched(20, 100)].iter());
        assert!((14..17).contains(&all.as_secs()), "{all:?}");
    }

    #[test]
    fn a_damaged_watch_and_a_clock_that_was_set_back_do_no_harm() {
        let mut watch = Watch {
            seconds: f64::NAN,
            changes: f64::NEG_INFINITY,
            best: Some((NodeId(1), Moment(Duration::MAX))),
        };
        assert_eq!(watch.mean(Duration::from_secs(40)), Duration::from_secs(40));
        watch.see(NodeId(1), Moment(Duration::from_secs(5)));
        watch.see(NodeId(1), Moment(Duration::from_secs(6)));
        assert!(watch.mean(Duration::from_secs(60)) > Duration::from_secs(60));
    }
}
