//! What a migration records of itself: its report, and where the frozen time went.

use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::report::{Phase, PhaseClock, Report, ms_since};
use crate::timeline::{Timeline, TimelineThere};

/// The notes of one migration.
#[derive(Debug)]
pub(super) struct Recorder {
    pub(super) report: Report,
    begun: Instant,
    /// From the freeze on.
    frozen: Option<PhaseClock>,
    /// For how long it stood still for freezes that were undone.
    tries: Duration,
    /// What this node does, and what the destination says that it did.
    timeline: Arc<Timeline>,
    pub(super) there: TimelineThere,
    /// Whether the destination has said that it runs there.
    pub(super) confirmed: bool,
}

impl Recorder {
    /// Begins now.
    pub(super) fn new(report: Report, timeline: Arc<Timeline>) -> Self {
        let (tries, there) = (Duration::ZERO, TimelineThere::default());
        Self { report, begun: Instant::now(), frozen: None, tries, timeline, there, confirmed: false }
    }

    /// The service is frozen next.
    pub(super) fn freezes(&mut self) {
        self.frozen = Some(PhaseClock::start());
    }

    /// It runs again, and will be frozen once more.
    pub(super) fn thaws(&mut self) {
        if let Some(clock) = self.frozen.take() {
            self.tries += clock.started().elapsed();
        }
    }

    /// Ends a phase of the frozen time, and says how many milliseconds it took: none where nothing is frozen.
    pub(super) fn end(&mut self, phase: &str) -> f64 {
        self.end_at(phase, Instant::now())
    }

    /// The same for a phase that has ended already.
    pub(super) fn end_at(&mut self, phase: &str, then: Instant) -> f64 {
        self.frozen.as_mut().map_or(0.0, |clock| clock.end_at(phase, then))
    }

    /// All that the destination needs has left this node.
    pub(super) fn nothing_is_needed(&mut self) {
        self.report.total_ms = ms_since(self.begun);
    }

    /// The migration has ended.
    pub(super) fn finish(mut self) -> Report {
        if self.tries > Duration::ZERO {
            let ms = self.tries.as_secs_f64() * 1e3;
            self.report.frozen_ms = ms;
            self.report.phases.push(Phase { phase: "tries".into(), ms });
        }
        if let Some(clock) = self.frozen {
            self.report.frozen_ms += clock.total_ms();
            self.report.phases.extend(clock.phases());
            let there = (self.report.destination.as_str(), &self.there);
            self.report.timeline = self.timeline.since(clock.started(), &self.report.source, there);
        }
        if self.report.total_ms == 0.0 {
            self.report.total_ms = ms_since(self.begun);
        }
        self.report
    }
}
