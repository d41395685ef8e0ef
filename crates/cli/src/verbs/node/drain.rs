//! `godwit node drain`: moves all services of a node away, and shows which have gone where, and which stay.
//!
//! Ctrl-C leaves the node as it is: what moves goes on to its end, and the rest stays.

use std::process::ExitCode;

use godwit_api::v1::drain_event::Kind;
use godwit_api::v1::{DrainEvent, DrainRequest, Drained, MigrationReport};
use serde_json::json;
use tonic::{Status, Streaming};

use super::sentence;
use crate::client::Connection;
use crate::global::Global;
use crate::interrupts::{INTERRUPTED, Interrupts};
use crate::migration::{How, Mode, Outcome, failure};
use crate::output;
use crate::progress::Progress;
use crate::verbs::place::words;

/// Cordon a node, and move its services to other nodes
///
/// They move one after the other, the largest first, each to the node that is best for its clients as `godwit place` finds
/// it, though it may be worse than where it is. What is on its way to the node is waited for, and moves on. Services that do
/// not run stay. The exit code is 1 when a service that runs stays, or is lost; the command can be given again. With --json
/// each step is a line, and the last line lists the services. Ctrl-C leaves the node as it is: what moves goes on, the rest
/// stays.
#[derive(Debug, clap::Args)]
#[command(after_long_help = "\
Examples:
  godwit node drain a
  godwit node drain a --to b --allow postcopy")]
pub(super) struct Args {
    /// The node
    name: String,
    /// Move them to this node alone
    #[arg(long, value_name = "NODE")]
    to: Option<String>,
    #[command(flatten)]
    how: How,
}

pub(super) async fn run(args: Args, global: &Global) -> anyhow::Result<ExitCode> {
    let mut connection = Connection::open(global).await?;
    let mut interrupts = Interrupts::new()?;
    let node = args.name;
    let request = DrainRequest {
        node: node.clone(),
        r#move: Some(args.how.request(Mode::Auto, "", args.to.as_deref().unwrap_or_default())),
    };
    let mut shown = Shown { json: global.json, moving: None };
    let asked = tokio::select! {
        asked = connection.node.drain(request) => asked,
        () = interrupts.next() => return Ok(ExitCode::from(INTERRUPTED)),
    };
    let mut events = asked.map_err(|status| connection.explain(&status))?.into_inner();
    let ended = tokio::select! {
        ended = shown.follow(&mut events) => ended?,
        () = interrupts.next() => {
            shown.end();
            output::note(&format!(
                "Error: left while {node} was being drained: what moves goes on to its end, and the rest stays; {}", next(&node)
            ));
            return Ok(ExitCode::from(INTERRUPTED));
        }
    };
    match ended {
        Ok(drained) => finish(&drained, global.json),
        Err(status) => {
            let why = connection.explain(&status);
            output::note(&format!("Error: {why}; {}", next(&node)));
            Ok(ExitCode::FAILURE)
        }
    }
}

/// What can be done with a node that was not drained to the end.
fn next(node: &str) -> String {
    format!(
        "{node} stays cordoned: `godwit node drain {node}` goes on, `godwit node uncordon {node}` has it take services again"
    )
}

/// What is on the screen.
struct Shown {
    json: bool,
    /// The move that goes on.
    moving: Option<Progress>,
}

impl Shown {
    /// Shows what happens; what has become of the services, or why that is not known.
    async fn follow(
        &mut self,
        events: &mut Streaming<DrainEvent>,
    ) -> anyhow::Result<Result<Drained, Status>> {
        loop {
            let event = match events.message().await {
                Ok(Some(event)) => event,
                Ok(None) => {
                    self.end();
                    return Ok(Err(Status::unavailable(
                        "godwitd ended without saying what has become of the services",
                    )));
                }
                Err(status) => {
                    self.end();
                    return Ok(Err(status));
                }
            };
            if let Some(Kind::Drained(drained)) = event.kind {
                self.end();
                return Ok(Ok(drained));
            }
            match self.json {
                true => as_json(&event)?,
                false => self.show(&event)?,
            }
        }
    }

    fn show(&mut self, event: &DrainEvent) -> anyhow::Result<()> {
        let name = &event.name;
        match &event.kind {
            Some(Kind::Cordoned(cordoned)) => output::line(&sentence(cordoned))?,
            // Where it goes is said when it is there.
            Some(Kind::Placed(placed)) if placed.to.is_empty() => words::print(placed, true)?,
            Some(Kind::Progress(step)) => {
                self.moving.get_or_insert_with(|| Progress::new(name, false)).show(step);
            }
            Some(Kind::Report(report)) => {
                self.end();
                match Outcome::of(report) {
                    Outcome::Moved | Outcome::Prepared => output::line(&moved(report))?,
                    Outcome::Lost => output::note(&failure(report).unwrap_or_default()),
                    // The next best node is tried.
                    Outcome::Aborted if report.refused => output::note(&format!("{name}: {}", report.reason)),
                    // Why it stays is told next.
                    Outcome::Aborted => {}
                }
            }
            Some(Kind::Waits(why)) => output::note(&format!("waiting for {name}: {why}")),
            Some(Kind::Stays(why)) => output::line(&format!("{name} stays: {why}"))?,
            Some(Kind::Placed(_) | Kind::Drained(_)) | None => {}
        }
        Ok(())
    }

    /// Takes the bar of the last move away.
    fn end(&mut self) {
        if let Some(moving) = self.moving.take() {
            moving.end();
        }
    }
}

fn as_json(event: &DrainEvent) -> std::io::Result<()> {
    let name = &event.name;
    match &event.kind {
        Some(Kind::Cordoned(cordoned)) => output::json(&json!({ "event": "cordoned", "cordoned": cordoned })),
        Some(Kind::Placed(placed)) => output::json(&json!({ "event": "placed", "placed": placed })),
        Some(Kind::Progress(progress)) => {
            output::json(&json!({ "event": "progress", "name": name, "progress": progress }))
        }
        Some(Kind::Report(report)) => output::json(&json!({ "event": "report", "report": report })),
        Some(Kind::Waits(why)) => output::json(&json!({ "event": "waits", "name": name, "why": why })),
        Some(Kind::Stays(why)) => output::json(&json!({ "event": "stays", "name": name, "why": why })),
        Some(Kind::Drained(_)) | None => Ok(()),
    }
}

fn moved(report: &MigrationReport) -> String {
    format!(
        "{} moved to {}: {}, frozen for {}, {} in all",
        report.name,
        report.destination,
        report.mode,
        output::millis(report.frozen_ms),
        output::millis(report.total_ms)
    )
}

fn finish(drained: &Drained, json: bool) -> anyhow::Result<ExitCode> {
    if json {
        output::json(drained)?;
    } else {
        for line in lines(drained) {
            output::line(&line)?;
        }
    }
    let is_empty = drained.stay.is_empty() && drained.lost.is_empty() && !drained.uncordoned;
    Ok(if is_empty { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// What has become of the services.
fn lines(drained: &Drained) -> Vec<String> {
    let Drained { node, moved, stay, stopped, lost, uncordoned } = drained;
    let count = |names: &[String], one: &str, several: &str| match names.len() {
        1 => format!("1 service {one}"),
        number => format!("{number} services {several}"),
    };
    let named = |names: &[String], one: &str, several: &str| {
        (!names.is_empty()).then(|| format!("{} ({})", count(names, one, several), names.join(", ")))
    };
    let mut lines = Vec::new();
    if !stopped.is_empty() {
        lines.push(format!("not running, and still on {node}: {}", stopped.join(", ")));
    }
    let became = match (uncordoned, stay.is_empty()) {
        (true, _) => "was uncordoned while it was drained",
        (false, true) => "is drained",
        (false, false) => "is not drained",
    };
    let all = [
        Some(count(moved, "has moved", "have moved")),
        named(stay, "stays", "stay"),
        named(lost, "was lost", "were lost"),
    ];
    lines.push(format!("{node} {became}: {}", all.into_iter().flatten().collect::<Vec<_>>().join(", ")));
    lines
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_has_become_of_the_services_is_said_in_a_line_or_two() {
        let names = |names: &[&str]| names.iter().map(ToString::to_string).collect::<Vec<_>>();
        let said = |moved: &[&str], stay: &[&str], stopped: &[&str]| {
            let (moved, stay, stopped) = (names(moved), names(stay), names(stopped));
            lines(&Drained { node: "a".into(), moved, stay, stopped, ..Drained::default() })
        };
        assert_eq!(said(&[], &[], &[]), ["a is drained: 0 services have moved"]);
        assert_eq!(
            said(&["x"], &[], &["y", "z"]),
            ["not running, and still on a: y, z", "a is drained: 1 service has moved"]
        );
        assert_eq!(
            said(&["x", "y"], &["z"], &[]),
            ["a is not drained: 2 services have moved, 1 service stays (z)"]
        );
        let (stay, lost) = (names(&["x", "y"]), names(&["z"]));
        let ended = Drained { node: "a".into(), stay, lost, uncordoned: true, ..Drained::default() };
        assert_eq!(
            lines(&ended),
            [
                "a was uncordoned while it was drained: 0 services have moved, 2 services stay (x, y), 1 service was lost (z)"
            ]
        );
    }
}
