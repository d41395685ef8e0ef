//! How a migration's progress is shown: a bar for people, a line per phase for everything else.

use std::time::Duration;

use godwit_api::v1::{LackingLayers, MigrationProgress};
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use serde_json::json;

use crate::output;

/// How often the bar's clock moves when nothing is reported.
const TICK: Duration = Duration::from_millis(100);

/// Shows the phases of one migration on standard error.
pub struct Progress {
    name: String,
    /// What is done with it.
    doing: &'static str,
    kind: Kind,
    /// What was shown last: the phase, and its round.
    shown: (String, u32),
    /// Whether it was said what the destination lacks of the image.
    told: bool,
}

enum Kind {
    Bar(ProgressBar),
    Lines,
    /// One JSON object a line on standard output, before the report.
    Json,
    Silent,
}

impl Progress {
    /// A bar on a terminal; lines elsewhere; nothing where a program reads a report as JSON.
    #[must_use]
    pub fn new(name: &str, json: bool) -> Self {
        Self::of_kind(name, Self::kind(name, json))
    }

    /// Events as JSON where a program reads them, else as [`Progress::new`].
    pub(crate) fn events(name: &str, json: bool) -> Self {
        Self::of_kind(name, if json { Kind::Json } else { Self::kind(name, false) })
    }

    /// Of a preparation.
    pub(crate) fn preparing(name: &str, json: bool) -> Self {
        Self { doing: "preparing", ..Self::events(name, json) }
    }

    fn of_kind(name: &str, kind: Kind) -> Self {
        Self {
            name: name.to_owned(),
            doing: "migrating",
            kind,
            shown: <(String, u32)>::default(),
            told: false,
        }
    }

    fn kind(name: &str, json: bool) -> Kind {
        match (output::watched(), json) {
            (true, _) => {
                let bar = ProgressBar::with_draw_target(None, ProgressDrawTarget::stderr());
                bar.set_style(style("{prefix} {spinner} {msg} {elapsed}"));
                bar.set_prefix(name.to_owned());
                bar.enable_steady_tick(TICK);
                Kind::Bar(bar)
            }
            (false, true) => Kind::Silent,
            (false, false) => Kind::Lines,
        }
    }

    /// Shows one step.
    pub fn show(&mut self, step: &MigrationProgress) {
        if let Some(lacking) = &step.lacking
            && !std::mem::replace(&mut self.told, true)
        {
            self.tell(lacking);
        }
        let now = (step.phase.clone(), step.round);
        let new = now != self.shown;
        self.shown = now;
        let (what, figures) = (title(step), figures(step));
        match &self.kind {
            Kind::Bar(bar) => {
                bar.set_message(what);
                let template = match (step.bytes_total, step.bytes_done) {
                    (1.., _) => {
                        "{prefix} {msg:10} [{bar:30}] {binary_bytes} of {binary_total_bytes} {elapsed}"
                    }
                    (0, 1..) => "{prefix} {spinner} {msg:10} {binary_bytes} {elapsed}",
                    (0, 0) => "{prefix} {spinner} {msg:10} {elapsed}",
                };
                // Braces would be read as a template's own.
                bar.set_style(style(&format!("{template}{}", figures.replace(['{', '}'], ""))));
                bar.set_length(step.bytes_total);
                bar.set_position(step.bytes_done);
            }
            Kind::Lines if new => {
                let size = match step.bytes_total {
                    0 => String::new(),
                    bytes => format!(" ({})", output::bytes(bytes)),
                };
                output::note(&format!("{} {}: {what}{size}{figures}", self.doing, self.name));
            }
            Kind::Json => {
                // A reader that is gone is noticed at the report.
                let _ = output::json(&json!({ "event": "progress", "progress": step }));
            }
            Kind::Lines | Kind::Silent => {}
        }
    }

    /// Says in advance what is sent of the image.
    fn tell(&self, lacking: &LackingLayers) {
        match &self.kind {
            Kind::Json => {
                let _ = output::json(&json!({ "event": "layers", "layers": lacking }));
            }
            Kind::Bar(_) | Kind::Lines if lacking.bytes > 0 || lacking.layers > 0 => {
                self.say(&advance(lacking, &self.name));
            }
            Kind::Bar(_) | Kind::Lines | Kind::Silent => {}
        }
    }

    /// Says something besides.
    pub(crate) fn say(&self, text: &str) {
        match &self.kind {
            Kind::Bar(bar) => bar.suspend(|| output::note(text)),
            Kind::Lines | Kind::Json | Kind::Silent => output::note(text),
        }
    }

    /// Takes the bar away.
    pub fn end(&self) {
        if let Kind::Bar(bar) = &self.kind {
            bar.finish_and_clear();
        }
    }
}

/// In a sentence, what the destination lacks of the image of a service.
fn advance(lacking: &LackingLayers, name: &str) -> String {
    let LackingLayers { node, image, layers, of, bytes, asks_registry } = lacking;
    let image = if image.is_empty() { name } else { image };
    let bytes = output::bytes(*bytes);
    let mut said = match of {
        0 => format!("{node} lacks the image {image}, at most {bytes}"),
        1 => format!("{node} lacks the layer of {image}, {bytes}"),
        _ => format!("{node} lacks {layers} of {of} layers of {image}, {bytes}"),
    };
    if *asks_registry {
        said.push_str(&format!("; {node} asks the image's registry first"));
    }
    said
}

/// The phase as people call it.
fn title(step: &MigrationProgress) -> String {
    match step.phase.as_str() {
        "copy" => format!("round {}", step.round),
        phase => phase.to_owned(),
    }
}

/// What is known of a round, or of pages that follow.
fn figures(step: &MigrationProgress) -> String {
    let mut text = String::new();
    if step.phase == "copy" && step.round > 1 {
        let written = output::bytes_per_second(step.dirty_pages_per_second * 4096.0);
        text.push_str(&format!(", writes {written}"));
        if step.bandwidth > 0.0 {
            text.push_str(&format!(", link {}", output::bytes_per_second(step.bandwidth)));
        }
        if step.predicted_frozen_ms > 0.0 {
            text.push_str(&format!(", would be frozen {}", output::millis(step.predicted_frozen_ms)));
        }
    }
    if step.phase == "serve" {
        text.push_str(&format!(", {} waited for", step.faults));
    }
    text
}

/// A template that is a constant of ours; a mistake in it shows the plain style.
fn style(template: &str) -> ProgressStyle {
    ProgressStyle::with_template(template)
        .unwrap_or_else(|_| ProgressStyle::default_bar())
        .progress_chars("=> ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_the_destination_lacks_is_said_in_advance() {
        let lacking = LackingLayers {
            node: "b".into(),
            image: "docker.io/library/redis:7".into(),
            layers: 3,
            of: 5,
            bytes: 40 << 20,
            asks_registry: false,
        };
        let said = |lacking: &LackingLayers| advance(lacking, "cache");
        assert_eq!(said(&lacking), "b lacks 3 of 5 layers of docker.io/library/redis:7, 40.0 MiB");
        let asks = LackingLayers { asks_registry: true, ..lacking.clone() };
        assert!(said(&asks).ends_with("40.0 MiB; b asks the image's registry first"));
        let only = LackingLayers { layers: 1, of: 1, image: String::new(), ..lacking.clone() };
        assert_eq!(said(&only), "b lacks the layer of cache, 40.0 MiB");
        let kept = LackingLayers { layers: 0, of: 0, ..lacking };
        assert_eq!(said(&kept), "b lacks the image docker.io/library/redis:7, at most 40.0 MiB");
    }
}
