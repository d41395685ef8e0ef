//! `godwit check`: whether a service could move, and what that would be like, without moving it.

use std::process::ExitCode;

use godwit_api::v1::{CheckMoveRequest, CheckMoveResponse, Forecast};

use crate::{
    client::Connection,
    global::Global,
    migration::{How, Mode},
    output::{self, Table},
};

/// Exit code for a service that can move, with warnings.
const WARNED: u8 = 2;

/// Find out whether a service could move, and what that would be like, without moving it
///
/// The service runs on. What it writes is measured for a second, and the link to the node for a part of one. Without
/// --to no other node is asked, and no time is predicted. The exit code is 0 when it can move, 1 when it cannot, and 2
/// when it can and there are warnings. A container of this node's Podman or Docker is checked before it is adopted, and
/// stays theirs.
#[derive(Debug, clap::Args)]
#[command(after_long_help = "\
Examples:
  godwit check web --to b
  godwit check docker:web --to b && godwit adopt docker:web")]
pub(crate) struct Args {
    /// The service; or a container that is not adopted yet: podman: or docker:, and its name or ID
    #[arg(value_name = "NAME|ENGINE:CONTAINER")]
    name: String,
    /// The node that it would move to
    #[arg(long, value_name = "NODE")]
    to: Option<String>,
    /// How its memory would move
    #[arg(long, value_enum, default_value_t)]
    mode: Mode,
    /// Network namespace at the destination, for a service in a namespace of yours [default: the same path
    /// as at the source]
    #[arg(long, value_name = "ns:PATH")]
    network: Option<String>,
    #[command(flatten)]
    how: How,
}

pub(crate) async fn run(args: Args, global: &Global) -> anyhow::Result<ExitCode> {
    let mut connection = Connection::open(global).await?;
    let mut request = args.how.request(args.mode, &args.name, args.to.as_deref().unwrap_or_default());
    request.network = args.network.unwrap_or_default();
    let answer = connection.node.check_move(CheckMoveRequest { r#move: Some(request) }).await;
    let answer = answer.map_err(|status| connection.explain(&status))?.into_inner();
    if global.json {
        output::json(&answer)?;
    } else {
        print(&answer)?;
    }
    Ok(ExitCode::from(code(&answer)))
}

fn can_move(answer: &CheckMoveResponse) -> bool {
    answer.obstacles.is_empty() && answer.objections.is_empty()
}

fn code(answer: &CheckMoveResponse) -> u8 {
    match (can_move(answer), answer.warnings.is_empty()) {
        (true, true) => 0,
        (false, _) => 1,
        (true, false) => WARNED,
    }
}

fn print(answer: &CheckMoveResponse) -> anyhow::Result<()> {
    output::line(&verdict(answer))?;
    for objection in &answer.objections {
        output::line(&format!("  {objection}"))?;
    }
    for found in &answer.obstacles {
        output::line(&format!(
            "  process {} ({}, PID {} in the service) {}, {}",
            found.pid, found.name, found.inside, found.what, found.why
        ))?;
    }
    if let Some(forecast) = &answer.forecast {
        let mut table = Table::plain();
        for (what, figure) in figures(forecast) {
            table.row([format!("  {what}"), figure]);
        }
        table.print()?;
    }
    for warning in &answer.warnings {
        output::line(&format!("warning: {warning}"))?;
    }
    Ok(())
}

fn verdict(answer: &CheckMoveResponse) -> String {
    let CheckMoveResponse { name, source, destination, .. } = answer;
    let way = match destination.as_str() {
        "" => format!("leave {source}"),
        to => format!("move from {source} to {to}"),
    };
    // No service has such a name.
    let adopted = if name.contains(':') { "be adopted and " } else { "" };
    match can_move(answer) {
        true => format!("{name} can {adopted}{way}"),
        false => format!("{name} cannot {adopted}{way}:"),
    }
}

fn figures(forecast: &Forecast) -> Vec<(&'static str, String)> {
    let mut figures = Vec::new();
    let mode = match forecast.why.as_str() {
        "" => forecast.mode.clone(),
        why => format!("{} ({why})", forecast.mode),
    };
    figures.push(("mode", mode));
    let written = match forecast.written_bytes_per_second {
        Some(rate) => format!(", {} written", output::bytes_per_second(rate)),
        None => String::new(),
    };
    figures.push(("memory", format!("{}{written}", output::bytes(forecast.memory_bytes))));
    let changing = match forecast.file_bytes_per_second {
        Some(rate) => format!(", {} written", output::bytes_per_second(rate)),
        None => String::new(),
    };
    figures.push(("changed files", format!("{}{changing}", output::bytes(forecast.file_bytes))));
    if let (Some(bandwidth), Some(round_trip)) = (forecast.bandwidth, forecast.round_trip_ms) {
        figures.push(("layers to send", output::bytes(forecast.layer_bytes)));
        let rate = output::bytes_per_second(bandwidth);
        figures.push(("link", format!("{rate}, {} there and back", output::millis(round_trip))));
    }
    if let (Some(bytes), Some(rounds)) = (forecast.wire_bytes, forecast.rounds) {
        let rounds = match rounds {
            0 => String::new(),
            1 => ", memory in 1 round".to_owned(),
            rounds => format!(", memory in {rounds} rounds"),
        };
        figures.push(("to send in all", format!("{}{rounds}", output::bytes(bytes))));
    }
    if let (Some(total), Some(frozen)) = (forecast.total_ms, forecast.frozen_ms) {
        figures.push(("time", output::millis(total)));
        figures.push(("frozen for", format!("about {}", output::millis(frozen))));
    }
    figures
}

#[cfg(test)]
mod tests {
    use godwit_api::v1::Obstacle;

    use super::*;

    #[test]
    fn the_exit_code_says_whether_it_can_move_and_whether_there_are_warnings() {
        let fine = CheckMoveResponse { name: "web".into(), source: "a".into(), ..Default::default() };
        let warned = CheckMoveResponse { warnings: vec!["slow".into()], ..fine.clone() };
        let refused = CheckMoveResponse { objections: vec!["no memory".into()], ..warned.clone() };
        let stuck = CheckMoveResponse { obstacles: vec![Obstacle::default()], ..fine.clone() };
        assert_eq!([&fine, &warned, &refused, &stuck].map(code), [0, 2, 1, 1]);
        assert_eq!(verdict(&fine), "web can leave a");
        let to_b = CheckMoveResponse { destination: "b".into(), ..refused };
        assert_eq!(verdict(&to_b), "web cannot move from a to b:");
        let of_engine = CheckMoveResponse { name: "docker:web".into(), ..to_b };
        assert_eq!(verdict(&of_engine), "docker:web cannot be adopted and move from a to b:");
    }

    #[test]
    fn what_is_not_known_is_not_shown() {
        let little = Forecast { mode: "cold".into(), memory_bytes: 1 << 20, ..Default::default() };
        let shown: Vec<_> = figures(&little).into_iter().map(|(what, _)| what).collect();
        assert_eq!(shown, ["mode", "memory", "changed files"]);
        let all = Forecast {
            written_bytes_per_second: Some(2e6),
            file_bytes_per_second: Some(1e6),
            bandwidth: Some(125e6),
            round_trip_ms: Some(0.5),
            rounds: Some(2),
            wire_bytes: Some(3 << 20),
            total_ms: Some(1500.0),
            frozen_ms: Some(250.0),
            why: "it is small".into(),
            ..little
        };
        let shown: Vec<_> = figures(&all).into_iter().map(|(_, figure)| figure).collect();
        assert_eq!(
            shown,
            [
                "cold (it is small)",
                "1.0 MiB, 2.0 MB/s written",
                "0 B, 1.0 MB/s written",
                "0 B",
                "125.0 MB/s, 0.5 ms there and back",
                "3.0 MiB, memory in 2 rounds",
                "1.50 s",
                "about 250.0 ms",
            ]
        );
    }
}
