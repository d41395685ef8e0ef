//! The latency that a client has, from what its connections show.
//!
//! The kernel's estimate of a round trip (`tcpi_rtt`) changes only when the service sends. It is 0 after a restore,
//! and then shows the pause for a while. So each sample is the least of a client's connections, samples soon after a move are
//! skipped, and the median of the last five counts. Delayed acknowledgements are in it
//! ([`Reading::beside`]).

use std::time::Duration;

use crate::latency::Reading;
use crate::quantity::{Moment, bounded, median};

/// Samples that are kept.
const KEPT: usize = 5;

/// After a move no sample is taken for this time.
const SKIPPED: Duration = Duration::from_secs(3);

/// An older sample says nothing of now, while there is a newer one.
const OLDEST: Duration = Duration::from_secs(10);

/// No deviation is taken to be less than this part of the latency: five samples in a row may be alike by chance. One or two
/// say little.
const LEAST: u32 = 20;
const LEAST_OF_FEW: u32 = 4;
const FEW: usize = 3;

/// The last latencies of a client.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Samples {
    /// The last of them, oldest first.
    pub last: Vec<(Moment, Duration)>,
    /// When the service came.
    pub came: Option<Moment>,
}

impl Samples {
    /// Of a service that has come just now.
    #[must_use]
    pub fn after_move(now: Moment) -> Self {
        Self { last: Vec::new(), came: Some(now) }
    }

    /// Notes the round trips of a client's active connections, or nothing where they show none.
    pub fn add(&mut self, now: Moment, connections: impl IntoIterator<Item = Duration>) {
        if self.came.is_some_and(|came| now.since(came) < SKIPPED) {
            return;
        }
        let Some(least) = connections.into_iter().filter(|latency| !latency.is_zero()).min() else { return };
        self.last.retain(|(taken, _)| now.since(*taken) <= OLDEST);
        self.last.push((now, bounded(least)));
        self.last.drain(..self.last.len().saturating_sub(KEPT));
    }

    /// The last one.
    #[must_use]
    pub fn newest(&self) -> Option<Duration> {
        self.last.last().map(|(_, latency)| *latency)
    }

    /// The median, how far the samples are from it, and the age of the newest. None without samples.
    #[must_use]
    pub fn reading(&self, now: Moment) -> Option<Reading> {
        let newest = self.last.iter().map(|(taken, _)| *taken).max()?;
        let latency = median(self.last.iter().map(|(_, latency)| *latency).collect())?;
        let apart = median(self.last.iter().map(|(_, other)| other.abs_diff(latency)).collect())?;
        // The median distance times 1.48 is the deviation of a normal distribution.
        let least = if self.last.len() < FEW { LEAST_OF_FEW } else { LEAST };
        let deviation = bounded(apart).mul_f64(1.48).max(latency / least);
        Some(Reading { latency, deviation, age: now.since(newest) })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ms(ms: u64) -> Duration {
        Duration::from_millis(ms)
    }

    fn at(seconds: u64) -> Moment {
        Moment(Duration::from_secs(seconds))
    }

    #[test]
    fn the_median_of_the_last_five_counts_and_one_that_is_far_off_does_not() {
        let mut samples = Samples::default();
        for (second, latency) in [90, 20, 21, 400, 22, 20].into_iter().enumerate() {
            samples.add(Moment(Duration::from_secs(second as u64)), [ms(latency), ms(latency + 9)]);
        }
        let reading = samples.reading(at(7));
        assert_eq!(
            reading.map(|reading| (reading.latency, reading.age)),
            Some((ms(21), Duration::from_secs(2)))
        );
        assert_eq!(samples.newest(), Some(ms(20)));
        assert_eq!(reading.map(|reading| reading.deviation), Some(ms(1).mul_f64(1.48)));
    }

    #[test]
    fn what_connections_show_soon_after_a_move_is_skipped() {
        let mut samples = Samples::after_move(at(10));
        samples.add(at(11), [Duration::ZERO]);
        samples.add(at(12), [ms(300)]);
        assert_eq!(samples.reading(at(12)), None);
        samples.add(at(13), [Duration::ZERO, ms(20)]);
        assert_eq!(samples.reading(at(13)).map(|reading| reading.latency), Some(ms(20)));
        samples.add(at(14), []);
        let deviation = |samples: &Samples| samples.reading(at(14)).map(|reading| reading.deviation);
        assert_eq!(deviation(&samples), Some(ms(5)), "one says little");
        samples.add(at(14), [ms(20)]);
        samples.add(at(14), [ms(20)]);
        assert_eq!(deviation(&samples), Some(ms(1)), "a twentieth at least");
    }

    #[test]
    fn after_a_pause_nothing_counts_that_was_before() {
        let mut samples = Samples::default();
        for second in 0..5 {
            samples.add(at(second), [ms(90)]);
        }
        assert_eq!(samples.reading(at(20)).map(|reading| reading.age), Some(Duration::from_secs(16)));
        samples.add(at(20), [ms(20)]);
        assert_eq!(samples.reading(at(20)).map(|reading| reading.latency), Some(ms(20)));
    }

    #[test]
    fn a_clock_that_was_set_back_makes_no_sample_of_tomorrow() {
        let mut samples = Samples::default();
        samples.add(at(100), [Duration::MAX]);
        let reading = samples.reading(at(5));
        assert!(
            reading
                .is_some_and(|reading| reading.age.is_zero() && reading.deviation < crate::quantity::LONGEST)
        );
    }
}
