//! How a migration's progress is shown: a bar for people, a line per phase for everything else.

use std::time::Duration;

use godwit_api::v1::MigrationProgress;
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

use crate::output;

/// How often the bar's clock moves when nothing is reported.
const TICK: Duration = Duration::from_millis(100);

/// Shows the phases of one migration on standard error.
pub(crate) struct Progress {
    name: String,
    kind: Kind,
    phase: String,
}

enum Kind {
    Bar(ProgressBar),
    Lines,
    Silent,
}

impl Progress {
    /// A bar on a terminal; lines elsewhere; nothing where a program reads JSON.
    pub(crate) fn new(name: &str, json: bool) -> Self {
        let kind = match (output::watched(), json) {
            (true, _) => {
                let bar = ProgressBar::with_draw_target(None, ProgressDrawTarget::stderr());
                bar.set_style(style("{prefix} {spinner} {msg} {elapsed}"));
                bar.set_prefix(name.to_owned());
                bar.enable_steady_tick(TICK);
                Kind::Bar(bar)
            }
            (false, true) => Kind::Silent,
            (false, false) => Kind::Lines,
        };
        Self { name: name.to_owned(), kind, phase: String::new() }
    }

    /// Shows one step.
    pub(crate) fn show(&mut self, step: &MigrationProgress) {
        let new = step.phase != self.phase;
        self.phase.clone_from(&step.phase);
        match &self.kind {
            Kind::Bar(bar) => {
                bar.set_message(step.phase.clone());
                if step.bytes_total > 0 {
                    bar.set_length(step.bytes_total);
                    bar.set_style(style(
                        "{prefix} {msg:10} [{bar:30}] {binary_bytes} of {binary_total_bytes} {elapsed}",
                    ));
                } else if step.bytes_done > 0 {
                    bar.set_style(style("{prefix} {spinner} {msg:10} {binary_bytes} {elapsed}"));
                } else {
                    bar.set_style(style("{prefix} {spinner} {msg:10} {elapsed}"));
                }
                bar.set_position(step.bytes_done);
            }
            Kind::Lines if new => {
                let size = match step.bytes_total {
                    0 => String::new(),
                    bytes => format!(" ({})", output::bytes(bytes)),
                };
                output::note(&format!("migrating {}: {}{size}", self.name, step.phase));
            }
            Kind::Lines | Kind::Silent => {}
        }
    }

    /// Says something besides.
    pub(crate) fn say(&self, text: &str) {
        match &self.kind {
            Kind::Bar(bar) => bar.suspend(|| output::note(text)),
            Kind::Lines | Kind::Silent => output::note(text),
        }
    }

    /// Takes the bar away.
    pub(crate) fn end(&self) {
        if let Kind::Bar(bar) = &self.kind {
            bar.finish_and_clear();
        }
    }
}

/// A template that is a constant of ours; a mistake in it shows the plain style.
fn style(template: &str) -> ProgressStyle {
    ProgressStyle::with_template(template)
        .unwrap_or_else(|_| ProgressStyle::default_bar())
        .progress_chars("=> ")
}
