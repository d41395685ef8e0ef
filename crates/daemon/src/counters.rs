//! What is counted on this node since godwitd was started, for Prometheus: each where it ends, and once.
//!
//! ```text
//!  migrate        report of a move from here ──┐
//!  cluster_view   end of a move to here ───────┤
//!  prepare        report of a preparation ─────┼──▶ Counters ──▶ metrics: the answer to a scrape
//!  checkpoint     end of a checkpoint ─────────┤
//!  follow, node   decisions and moves ─────────┘
//! ```
//! Counting is an addition in memory, whether anybody reads it or not. Where the values of a label are known in advance, each
//! begins with 0: Prometheus sees no increase to a series that was not there.

pub(crate) mod catalog;

use godwit_api::v1::{PlaceReason, PlaceRefusal, PlaceResponse, place_reason, place_refusal};
use godwit_migration::resources::ArrivalEnd;
use godwit_migration::{Mode, Outcome, Report};
use prometheus::core::Collector;
use prometheus::process_collector::ProcessCollector;
use prometheus::proto::MetricFamily;
use prometheus::{HistogramVec, IntCounter, IntCounterVec, Registry};

/// How migrations from here, preparations and moves of followers end. `failed`: neither moved nor rolled back yet.
const OUTCOMES: [&str; 5] = ["moved", "aborted", "refused", "lost", "failed"];

/// Why services stay, and why nodes are ruled out: see [`stays`] and [`refuses`].
const STAYS: [&str; 11] = [
    "no_clients",
    "no_candidate",
    "no_better",
    "uncertain",
    "too_little",
    "sending",
    "not_armed",
    "unpaid",
    "moves",
    "frozen",
    "rests",
];
const REFUSALS: [&str; 7] = ["instruction_set", "memory", "cpu", "silent", "frozen", "cordoned", "other"];

/// The counters.
pub(crate) struct Counters {
    registry: Registry,
    migrations: IntCounterVec,
    incoming: IntCounterVec,
    frozen: HistogramVec,
    whole: HistogramVec,
    rounds: HistogramVec,
    sent: IntCounterVec,
    wire: IntCounterVec,
    faults: IntCounter,
    frames: IntCounterVec,
    preparations: IntCounterVec,
    checkpoints: IntCounterVec,
    decisions: IntCounterVec,
    stays: IntCounterVec,
    refused: IntCounterVec,
    follow_moves: IntCounterVec,
}

impl Counters {
    pub(crate) fn new() -> Self {
        let counters = Self {
            registry: Registry::new(),
            migrations: catalog::MIGRATIONS.counters(),
            incoming: catalog::INCOMING.counters(),
            frozen: catalog::FROZEN.histograms(),
            whole: catalog::WHOLE.histograms(),
            rounds: catalog::ROUNDS.histograms(),
            sent: catalog::SENT.counters(),
            wire: catalog::WIRE.counters(),
            faults: catalog::FAULTS.counter(),
            frames: catalog::FRAMES.counters(),
            preparations: catalog::PREPARATIONS.counters(),
            checkpoints: catalog::CHECKPOINTS.counters(),
            decisions: catalog::FOLLOW_DECISIONS.counters(),
            stays: catalog::FOLLOW_STAYS.counters(),
            refused: catalog::FOLLOW_REFUSED.counters(),
            follow_moves: catalog::FOLLOW_MOVES.counters(),
        };
        counters.begin_with_nothing();
        counters.register();
        counters
    }

    /// Makes the series whose labels are known.
    fn begin_with_nothing(&self) {
        for mode in Mode::ALL.map(Mode::name) {
            for outcome in OUTCOMES {
                self.migrations.with_label_values(&[mode, outcome]);
            }
        }
        for end in ArrivalEnd::ALL {
            self.incoming.with_label_values(&[end.name()]);
        }
        let each = |counters: &IntCounterVec, values: &[&str]| {
            values.iter().for_each(|value| drop(counters.with_label_values(&[value])));
        };
        each(&self.frames, &["delivered", "dropped"]);
        each(&self.preparations, &["prepared", "aborted", "refused"]);
        each(&self.checkpoints, &["written", "failed"]);
        each(&self.decisions, &["move", "stay"]);
        each(&self.stays, &STAYS);
        each(&self.refused, &REFUSALS);
        each(&self.follow_moves, &OUTCOMES);
    }

    fn register(&self) {
        let all: [Box<dyn Collector>; 16] = [
            Box::new(self.migrations.clone()),
            Box::new(self.incoming.clone()),
            Box::new(self.frozen.clone()),
            Box::new(self.whole.clone()),
            Box::new(self.rounds.clone()),
            Box::new(self.sent.clone()),
            Box::new(self.wire.clone()),
            Box::new(self.faults.clone()),
            Box::new(self.frames.clone()),
            Box::new(self.preparations.clone()),
            Box::new(self.checkpoints.clone()),
            Box::new(self.decisions.clone()),
            Box::new(self.stays.clone()),
            Box::new(self.refused.clone()),
            Box::new(self.follow_moves.clone()),
            Box::new(ProcessCollector::for_self()),
        ];
        for collector in all {
            #[allow(clippy::expect_used, reason = "each node registers each of them once")]
            self.registry.register(collector).expect("a metric that is registered once");
        }
    }

    /// All of them, with those of this process.
    pub(crate) fn gather(&self) -> Vec<MetricFamily> {
        self.registry.gather()
    }

    /// A migration from here has ended with a report.
    pub(crate) fn moved(&self, report: &Report) {
        let (mode, outcome) = (report.mode.as_str(), outcome(report));
        self.migrations.with_label_values(&[mode, outcome]).inc();
        self.whole.with_label_values(&[mode, outcome]).observe(report.total_ms / 1e3);
        // One that was refused or given up early has not frozen the service.
        if report.frozen_ms > 0.0 {
            self.frozen.with_label_values(&[mode, outcome]).observe(report.frozen_ms / 1e3);
        }
        if report.outcome == Outcome::Moved {
            self.rounds.with_label_values(&[mode]).observe(f64::from(report.rounds));
        }
        let sent = [
            ("before_freeze", report.pre_dump_bytes),
            ("frozen", report.dump_bytes),
            ("after_resume", report.faulted_bytes),
        ];
        for (phase, bytes) in sent {
            self.sent.with_label_values(&[mode, phase]).inc_by(bytes);
        }
        self.wire.with_label_values(&[mode]).inc_by(report.wire_bytes);
        self.faults.inc_by(report.faults);
        self.frames.with_label_values(&["delivered"]).inc_by(report.held_frames);
        self.frames.with_label_values(&["dropped"]).inc_by(report.held_dropped);
    }

    /// A migration from here, in a mode as it was asked for, has ended without one.
    pub(crate) fn failed(&self, mode: Mode) {
        self.migrations.with_label_values(&[mode.name(), "failed"]).inc();
    }

    /// A migration to here has ended.
    pub(crate) fn arrived(&self, end: ArrivalEnd) {
        self.incoming.with_label_values(&[end.name()]).inc();
    }

    /// A preparation of a move from here has ended.
    pub(crate) fn prepared(&self, report: &Report) {
        self.preparations.with_label_values(&[outcome(report)]).inc();
    }

    /// A checkpoint has ended; whether its file is whole.
    pub(crate) fn checkpointed(&self, is_whole: bool) {
        self.checkpoints.with_label_values(&[if is_whole { "written" } else { "failed" }]).inc();
    }

    /// It was decided about a service that follows its clients.
    pub(crate) fn decided(&self, decided: &PlaceResponse) {
        let decision = if decided.to.is_empty() { "stay" } else { "move" };
        self.decisions.with_label_values(&[decision]).inc();
        for reason in decided.reasons.iter().filter_map(stays) {
            self.stays.with_label_values(&[reason]).inc();
        }
        for reason in decided.others.iter().flat_map(|other| &other.refusals).filter_map(refuses) {
            self.refused.with_label_values(&[reason]).inc();
        }
    }

    /// A service has moved after its clients, or not: the outcome of its report, if there is one.
    pub(crate) fn followed(&self, outcome: Option<&str>, is_refused: bool) {
        let known = outcome.and_then(|outcome| OUTCOMES.into_iter().find(|known| *known == outcome));
        let outcome = if is_refused { "refused" } else { known.unwrap_or("failed") };
        self.follow_moves.with_label_values(&[outcome]).inc();
    }
}

fn outcome(report: &Report) -> &'static str {
    if report.refused { "refused" } else { report.outcome.name() }
}

/// Why it stays, by the words of `godwit --json policy show`.
fn stays(why: &PlaceReason) -> Option<&'static str> {
    use place_reason::Kind;
    Some(match why.kind.as_ref()? {
        Kind::NoClients(_) => "no_clients",
        Kind::NoCandidate(_) => "no_candidate",
        Kind::NoBetter(_) => "no_better",
        Kind::Uncertain(_) => "uncertain",
        Kind::TooLittle(_) => "too_little",
        Kind::Sending(_) => "sending",
        Kind::NotArmed(_) => "not_armed",
        Kind::Unpaid(_) => "unpaid",
        Kind::Moves(_) => "moves",
        Kind::Frozen(_) => "frozen",
        Kind::Rests(_) => "rests",
    })
}

/// Why a node is ruled out, by the same words; its own sentences are `other`.
fn refuses(why: &PlaceRefusal) -> Option<&'static str> {
    use place_refusal::Kind;
    Some(match why.kind.as_ref()? {
        Kind::InstructionSet(_) => "instruction_set",
        Kind::Memory(_) => "memory",
        Kind::Cpu(_) => "cpu",
        Kind::Silent(_) => "silent",
        Kind::Frozen(_) => "frozen",
        Kind::Words(_) => "other",
        Kind::Cordoned(_) => "cordoned",
    })
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use godwit_api::v1::PlaceOther;
    use godwit_names::ServiceName;
    use prometheus::TextEncoder;

    use super::*;

    fn text(counters: &Counters) -> String {
        TextEncoder::new().encode_to_string(&counters.gather()).unwrap()
    }

    fn report(outcome: Outcome) -> Report {
        let name: ServiceName = "redis".parse().unwrap();
        Report { outcome, mode: "precopy".into(), ..Report::begin("01A", &name, "a", "b") }
    }

    #[test]
    fn a_move_counts_once_with_what_its_report_says() {
        let counters = Counters::new();
        let zero = text(&counters);
        assert!(zero.contains("\ngodwit_migrations_total{mode=\"precopy\",outcome=\"moved\"} 0\n"), "{zero}");
        let moved = Report {
            frozen_ms: 42.0,
            total_ms: 2000.0,
            rounds: 3,
            dump_bytes: 7,
            wire_bytes: 9,
            held_frames: 5,
            ..report(Outcome::Moved)
        };
        counters.moved(&moved);
        // It froze nothing.
        counters.moved(&Report { refused: true, ..report(Outcome::Aborted) });
        counters.failed(Mode::Auto);
        let text = text(&counters);
        for line in [
            "godwit_migrations_total{mode=\"precopy\",outcome=\"moved\"} 1",
            "godwit_migrations_total{mode=\"precopy\",outcome=\"refused\"} 1",
            "godwit_migrations_total{mode=\"precopy\",outcome=\"aborted\"} 0",
            "godwit_migrations_total{mode=\"auto\",outcome=\"failed\"} 1",
            "godwit_migration_frozen_seconds_bucket{mode=\"precopy\",outcome=\"moved\",le=\"0.03\"} 0",
            "godwit_migration_frozen_seconds_bucket{mode=\"precopy\",outcome=\"moved\",le=\"0.05\"} 1",
            "godwit_migration_frozen_seconds_count{mode=\"precopy\",outcome=\"moved\"} 1",
            "godwit_migration_rounds_sum{mode=\"precopy\"} 3",
            "godwit_migration_sent_bytes_total{mode=\"precopy\",phase=\"frozen\"} 7",
            "godwit_migration_held_frames_total{fate=\"delivered\"} 5",
        ] {
            assert!(text.lines().any(|shown| shown == line), "{line}: {text}");
        }
        assert!(!text.contains("frozen_seconds_count{mode=\"precopy\",outcome=\"refused\"}"), "{text}");
        assert!(text.contains("\nprocess_open_fds "), "{text}");
    }

    #[test]
    fn a_decision_counts_with_each_reason_and_no_word_of_another_node_becomes_a_label() {
        let counters = Counters::new();
        let refusal = |kind| PlaceRefusal { kind: Some(kind) };
        let words = place_refusal::Kind::Words("free text \" of\nanother node".into());
        let other = PlaceOther {
            refusals: vec![refusal(words), refusal(place_refusal::Kind::Cordoned(true))],
            ..PlaceOther::default()
        };
        let reason = PlaceReason { kind: Some(place_reason::Kind::NoCandidate(true)) };
        let decided =
            PlaceResponse { reasons: vec![reason], others: vec![other], ..PlaceResponse::default() };
        counters.decided(&decided);
        counters.decided(&PlaceResponse { to: "b".into(), ..PlaceResponse::default() });
        counters.followed(Some("moved"), false);
        counters.followed(None, false);
        let text = text(&counters);
        for line in [
            "godwit_follow_decisions_total{decision=\"stay\"} 1",
            "godwit_follow_decisions_total{decision=\"move\"} 1",
            "godwit_follow_stays_total{reason=\"no_candidate\"} 1",
            "godwit_follow_refused_nodes_total{reason=\"other\"} 1",
            "godwit_follow_refused_nodes_total{reason=\"cordoned\"} 1",
            "godwit_follow_moves_total{outcome=\"moved\"} 1",
            "godwit_follow_moves_total{outcome=\"failed\"} 1",
        ] {
            assert!(text.lines().any(|shown| shown == line), "{line}: {text}");
        }
        assert!(!text.contains("free text"), "{text}");
    }
}
