//! Whether a service could move, asked of this node or of the one that has it.

use std::sync::Arc;
use std::time::Duration;

use godwit_api::v1 as api;
use godwit_criu::obstacles::Obstacle;
use godwit_migration::needs::version;
use godwit_migration::source::{Findings, Forecast};
use godwit_migration::{Options, Progress, Service, Source, error_chain};
use godwit_names::ServiceName;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;
use tonic::Status;

use crate::convert;
use crate::directory::{elsewhere, nodes, too_old};
use crate::doctor::CLOCKS_DIFFER_MS;
use crate::engine_changes;
use crate::migrate::leaving;
use crate::node::Node;
use crate::plain::plain;
use crate::services::occupied;
use crate::status::internal;
use crate::verbs;

/// Most that is taken of a peer of each list, and the longest of its sentences, in bytes.
const MOST: usize = 4096;

/// Most obstacles that are shown, and most sentences of a kind: with the longest ones an answer stays below the 4 MiB that
/// another node takes.
pub(crate) const MOST_SHOWN: usize = 200;

/// Whether a service could move, wherever it is.
pub(crate) async fn anywhere(
    node: &Arc<Node>,
    request: api::CheckMoveRequest,
) -> Result<api::CheckMoveResponse, Status> {
    let name = convert::service_name(&asked(&request)?.name)?;
    let Some((owner, address)) = elsewhere(node, &name)? else { return here(node, &request).await };
    let asked = node.peers.get_patient(&owner, &address).check_move(request).await;
    let answer = asked.map_err(|status| match verbs::is_unknown(&status) {
        true => too_old(node, &name, &owner, "checks no moves"),
        false => status,
    });
    let answer = answer?.into_inner();
    if is_plain(&answer) {
        return Ok(answer);
    }
    Err(Status::internal(format!("node {owner} returned an invalid answer about service {name}")))
}

/// The move that it is about.
pub(crate) fn asked(request: &api::CheckMoveRequest) -> Result<&api::MigrateRequest, Status> {
    request.r#move.as_ref().ok_or_else(|| Status::invalid_argument("the request names no service"))
}

/// Whether a service of this node could move.
pub(crate) async fn here(
    node: &Arc<Node>,
    request: &api::CheckMoveRequest,
) -> Result<api::CheckMoveResponse, Status> {
    of_service(node, asked(request)?).await
}

/// The same, of the move that it is about.
pub(crate) async fn of_service(
    node: &Arc<Node>,
    request: &api::MigrateRequest,
) -> Result<api::CheckMoveResponse, Status> {
    let name: ServiceName = convert::service_name(&request.name)?;
    let options = convert::options(request).map_err(Status::invalid_argument)?;
    node.settle(&name).await;
    let to = Some(request.to.as_str()).filter(|to| !to.is_empty());
    let service = engine_changes::taken_over(node, leaving(node, &name, to)?).await?;
    // The service must not move, stop or be asked about twice meanwhile. What is asked for waits for some seconds.
    let occupied = node.reserve_alone(&name).await.ok_or_else(|| occupied(&name))?;
    let cancel = node.local().ending.child_token();
    // Whoever asked may leave: then it ends, and with it what holds the service.
    let _leaving = cancel.clone().drop_guard();
    let source = source(node, service, &request.to, options, cancel);
    // In a task of its own, to its end: the tracker must not be left in the service.
    let checking = node.checks.spawn(async move {
        let findings = source.check().await;
        drop(occupied);
        findings
    });
    let findings = checking.await.map_err(internal)?;
    let findings = findings.map_err(|error| {
        Status::unavailable(format!("service {name} cannot be checked: {}", plain(&error_chain(&error))))
    })?;
    told_of(node, name.to_string(), &request.to, findings)
}

/// What checks a service, for a move to that node if one is named.
pub(crate) fn source(
    node: &Node,
    service: Service,
    to: &str,
    options: Options,
    cancel: CancellationToken,
) -> Source {
    let (progress, _) = watch::channel(Progress::default());
    let (local, id) = (Arc::clone(node.local()), ulid::Ulid::new().to_string());
    Source::new(local, service, id, to.to_owned(), options, progress, cancel)
}

/// What was found, with that in which the nodes differ.
pub(crate) fn told_of(
    node: &Node,
    name: String,
    to: &str,
    mut findings: Findings,
) -> Result<api::CheckMoveResponse, Status> {
    let nodes = nodes(node).map_err(internal)?;
    findings.warnings.extend(differences(&nodes, &node.name, to));
    Ok(response(name, node.name.clone(), to.to_owned(), findings))
}

/// In what two nodes differ that a service may notice.
fn differences(nodes: &[api::NodeInfo], here: &str, there: &str) -> Vec<String> {
    let of = |name: &str| nodes.iter().find(|node| node.name == name);
    let Some((ours, theirs)) = of(here).zip(of(there)) else { return Vec::new() };
    let mut all = Vec::new();
    let ahead = theirs.clock_ahead_ms.saturating_sub(ours.clock_ahead_ms);
    if ahead.unsigned_abs() > CLOCKS_DIFFER_MS {
        let way = if ahead > 0 { "forward" } else { "back" };
        all.push(format!(
            "the time of day jumps {way} by {:.0} s for the service: the clocks of the nodes differ",
            ahead.unsigned_abs() as f64 / 1e3
        ));
    }
    if let Some((ours, theirs)) = version(&ours.kernel).zip(version(&theirs.kernel))
        && theirs < ours
    {
        all.push(format!(
            "node {there} has Linux {}.{}, older than {}.{} on node {here}: where the service uses what that lacks, the restore fails and the service stays",
            theirs.0, theirs.1, ours.0, ours.1
        ));
    }
    all
}

fn response(name: String, source: String, destination: String, findings: Findings) -> api::CheckMoveResponse {
    let Findings { obstacles, mut objections, warnings, forecast, .. } = findings;
    if let Some(more) = obstacles.len().checked_sub(MOST_SHOWN).filter(|more| *more > 0) {
        objections.push(format!("{more} more obstacles are not shown"));
    }
    // The destination's words are among them.
    let sentences = |all: Vec<String>| all.iter().take(MOST_SHOWN + 1).map(|each| plain(each)).collect();
    api::CheckMoveResponse {
        name,
        source,
        destination,
        obstacles: obstacles.into_iter().take(MOST_SHOWN).map(obstacle).collect(),
        objections: sentences(objections),
        warnings: sentences(warnings),
        forecast: forecast.map(told),
    }
}

/// An obstacle, as it is told to users.
pub(crate) fn obstacle(found: Obstacle) -> api::Obstacle {
    let Obstacle { pid, inside, name, what, why } = found;
    // A process gives itself its name, and chooses those of its files.
    api::Obstacle { pid, inside, name: plain(&name), what: plain(&what), why: why.to_owned() }
}

fn told(forecast: Forecast) -> api::Forecast {
    let ms = |time: Duration| convert::to_microseconds(time.as_secs_f64() * 1e3);
    let Forecast {
        mode,
        why,
        memory_bytes,
        written_bytes_per_second,
        layer_bytes,
        file_bytes,
        file_bytes_per_second,
        link,
        outlook,
    } = forecast;
    api::Forecast {
        mode: mode.to_owned(),
        why,
        memory_bytes,
        written_bytes_per_second,
        layer_bytes,
        file_bytes,
        file_bytes_per_second,
        round_trip_ms: link.map(|link| ms(link.round_trip)),
        bandwidth: link.map(|link| link.bandwidth),
        rounds: outlook.map(|times| times.rounds),
        wire_bytes: outlook.map(|times| times.bytes),
        total_ms: outlook.map(|times| ms(times.total)),
        frozen_ms: outlook.map(|times| ms(times.frozen)),
    }
}

/// Whether the words of another node are few enough, and do a terminal no harm.
fn is_plain(answer: &api::CheckMoveResponse) -> bool {
    let plain = |text: &String| text.len() <= MOST && !text.chars().any(char::is_control);
    let lists = [&answer.objections, &answer.warnings];
    let of_forecast = answer.forecast.iter().flat_map(|forecast| [&forecast.mode, &forecast.why]);
    let of_obstacles = answer.obstacles.iter().flat_map(|found| [&found.name, &found.what, &found.why]);
    answer.obstacles.len() <= MOST
        && lists.iter().all(|list| list.len() <= MOST && list.iter().all(plain))
        && of_forecast.chain(of_obstacles).all(plain)
        && [&answer.name, &answer.source, &answer.destination].into_iter().all(plain)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plain::LONGEST;

    #[test]
    fn what_another_node_says_does_a_terminal_no_harm() {
        let good = api::CheckMoveResponse {
            name: "web".into(),
            objections: vec!["it lacks memory".into()],
            obstacles: vec![api::Obstacle { name: "x".into(), ..Default::default() }],
            ..Default::default()
        };
        assert!(is_plain(&good));
        let bad = "\u{1b}[2J".to_owned();
        for worse in [
            api::CheckMoveResponse { name: bad.clone(), ..good.clone() },
            api::CheckMoveResponse { warnings: vec![bad.clone()], ..good.clone() },
            api::CheckMoveResponse { objections: vec!["x".repeat(MOST + 1)], ..good.clone() },
            api::CheckMoveResponse { warnings: vec![String::new(); MOST + 1], ..good.clone() },
            api::CheckMoveResponse {
                obstacles: vec![api::Obstacle { what: bad.clone(), ..Default::default() }],
                ..good.clone()
            },
            api::CheckMoveResponse {
                forecast: Some(api::Forecast { why: bad.clone(), ..Default::default() }),
                ..good.clone()
            },
        ] {
            assert!(!is_plain(&worse), "{worse:?}");
        }
    }

    #[test]
    fn clocks_and_kernels_that_differ_are_told() {
        let node = |name: &str, clock_ahead_ms, kernel: &str| api::NodeInfo {
            name: name.into(),
            clock_ahead_ms,
            kernel: kernel.into(),
            ..Default::default()
        };
        let between = |b| differences(&[node("a", 0, "6.12.1"), b], "a", "b");
        assert_eq!(between(node("b", 900, "6.12.43+deb13")), Vec::<String>::new());
        assert_eq!(between(node("b", 0, "6.18.2")), Vec::<String>::new());
        let all = between(node("b", -3_600_000, "6.1.0-30"));
        assert!(all[0].contains("jumps back by 3600 s"), "{all:?}");
        assert!(all[1].contains("node b has Linux 6.1, older than 6.12 on node a"), "{all:?}");
        assert_eq!(differences(&[], "a", ""), Vec::<String>::new());
    }

    #[test]
    fn a_process_cannot_write_to_the_users_terminal_by_its_name() {
        let found = Obstacle {
            pid: 7,
            inside: 1,
            name: "a\u{1b}[2J".into(),
            what: "has /tmp/\n open".into(),
            why: "close it",
        };
        let told = obstacle(found);
        assert_eq!((told.name.as_str(), told.what.as_str()), ("a?[2J", "has /tmp/? open"));
    }

    #[test]
    fn the_destinations_words_are_made_harmless_and_few_and_pass_the_node_that_passes_them_on() {
        let found = |_| Obstacle { pid: 7, inside: 1, name: "x".into(), what: "is".into(), why: "bad" };
        let bad = "\u{1b}[2J\nweb can move".repeat(1000);
        let findings = Findings {
            obstacles: (0..MOST_SHOWN + 7).map(found).collect(),
            objections: vec![bad.clone()],
            warnings: vec![bad],
            ..Findings::default()
        };
        let told = response("web".into(), "a".into(), "b".into(), findings);
        assert!(is_plain(&told) && told.objections[0].starts_with("?[2J?web can move?"), "{told:?}");
        assert_eq!((told.obstacles.len(), told.objections[0].len()), (MOST_SHOWN, LONGEST));
        assert_eq!(told.objections[1], "7 more obstacles are not shown");
    }
}
