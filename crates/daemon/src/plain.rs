//! Other nodes' words, as they do a terminal no harm.

use godwit_api::v1::{MigrationProgress, MigrationReport};
use tonic::Status;

/// The longest sentence that is passed on, in characters.
pub(crate) const LONGEST: usize = 1000;

/// A sentence.
pub(crate) fn plain(text: &str) -> String {
    text.chars().map(|each| if each.is_control() { '?' } else { each }).take(LONGEST).collect()
}

/// A refusal.
pub(crate) fn plain_status(status: &Status) -> Status {
    Status::new(status.code(), plain(status.message()))
}

/// The steps of a migration.
pub(crate) fn plain_progress(progress: &mut MigrationProgress) {
    harmless([&mut progress.id, &mut progress.phase]);
    harmless(progress.lacking.iter_mut().flat_map(|lacking| [&mut lacking.node, &mut lacking.image]));
}

/// The report of a migration, whole: its reasons may be many.
pub(crate) fn plain_report(report: &mut MigrationReport) {
    let MigrationReport { name, mode, source, destination, outcome, reason, id, criu, why, .. } = report;
    harmless([name, mode, source, destination, outcome, reason, id, criu, why]);
    let MigrationReport { tracker, network_namespace, criu_there, files_stay, set, .. } = report;
    harmless([tracker, network_namespace, criu_there, files_stay, set]);
    harmless(report.phases.iter_mut().map(|time| &mut time.phase));
    harmless(report.timeline.iter_mut().flat_map(|span| [&mut span.node, &mut span.what]));
}

fn harmless<'a>(words: impl IntoIterator<Item = &'a mut String>) {
    for text in words {
        if text.contains(char::is_control) {
            *text = text.replace(char::is_control, " ");
        }
    }
}

#[cfg(test)]
mod tests {
    use godwit_api::v1::{PhaseTime, TimelineSpan};

    use super::*;

    #[test]
    fn what_another_node_reports_does_a_terminal_no_harm() {
        let bad = || "a\u{1b}[2Jb\n".to_owned();
        let mut report = MigrationReport {
            reason: bad(),
            criu_there: bad(),
            phases: vec![PhaseTime { phase: bad(), ms: 1.0 }],
            timeline: vec![TimelineSpan { what: bad(), ..TimelineSpan::default() }],
            ..MigrationReport::default()
        };
        plain_report(&mut report);
        for word in [&report.reason, &report.criu_there, &report.phases[0].phase, &report.timeline[0].what] {
            assert_eq!(word, "a [2Jb ");
        }
        let status = plain_status(&Status::aborted(bad()));
        assert_eq!((status.code(), status.message()), (tonic::Code::Aborted, "a?[2Jb?"));
    }
}
