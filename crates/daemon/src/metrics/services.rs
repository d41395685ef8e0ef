//! Each service of this node: its state, what it uses, what it still waits for, and how it follows its clients.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use godwit_api::v1::{PlaceResponse, ServiceState, ServiceStats, place_reason::Kind};
use godwit_migration::error_chain;
use tokio::time::Instant;

use super::series::Series;
use crate::counters::catalog as of;
use crate::node::Node;
use crate::state::Owned;
use crate::{services, stats};

/// How long the figures of one service may take: its engine may be asked for its main process, and its pager, which has a second,
/// for what it lacks.
const PATIENCE: Duration = Duration::from_secs(2);

/// Engines, of whose services there may be none.
const ENGINES: [&str; 3] = ["runc", "podman", "docker"];

/// States as they are told here. A service that runs no more has ended well, has failed, or was stopped by a user.
const STATES: [&str; 6] = ["running", "migrating", "restarting", "stopped", "completed", "failed"];

/// All of them. Figures that are not there when the time is over are left out.
pub(super) async fn collect(node: &Arc<Node>, until: Instant, series: &mut Series) -> Result<(), String> {
    let mut counts: BTreeMap<_, u64> =
        ENGINES.iter().flat_map(|engine| STATES.iter().map(|state| ((*engine, *state), 0))).collect();
    let mut without = 0;
    for owned in node.state.services().map_err(|error| error_chain(&error))? {
        let (engine, state) = (engine(&owned), state(node, &owned));
        *counts.entry((engine, state)).or_default() += 1;
        describe(&owned, engine, state, series);
        if owned.exit_code.is_none() {
            match tokio::time::timeout_at(until.min(Instant::now() + PATIENCE), use_of(node, &owned)).await {
                Ok(Some((used, awaited))) => {
                    use_told(&used, series);
                    awaited_told(&used.name, &awaited, series);
                }
                Ok(None) | Err(_) => without += 1,
            }
        }
        if let Some((_, decided)) =
            node.decision(&owned.service.id).filter(|_| owned.service.follows.is_some())
        {
            follows(&owned.service.name, &decided, series);
        }
    }
    for ((engine, state), count) in counts {
        series.count(of::SERVICES, &[engine, state], count);
    }
    series.count(of::WITHOUT_FIGURES, &[], without);
    Ok(())
}

fn engine(owned: &Owned) -> &'static str {
    owned.service.kept.as_ref().map_or("runc", |kept| kept.keeper.name())
}

fn state(node: &Node, owned: &Owned) -> &'static str {
    let is_migrating = node.migration(&owned.service.name).is_some();
    match services::state(node, owned, is_migrating) {
        ServiceState::Migrating => "migrating",
        ServiceState::Restarting => "restarting",
        ServiceState::Stopped if owned.stopped => "stopped",
        ServiceState::Stopped if owned.exit_code == Some(0) => "completed",
        ServiceState::Stopped => "failed",
        _ => "running",
    }
}

fn describe(owned: &Owned, engine: &str, state: &str, series: &mut Series) {
    let service = &owned.service;
    let name = service.name.as_str();
    let follows = if service.follows.is_some() { "true" } else { "false" };
    series.is(of::SERVICE, &[name, engine, follows], true);
    for known in STATES {
        series.is(of::SERVICE_STATE, &[name, known], known == state);
    }
    series.count(of::RESTARTS, &[name], owned.restarts.into());
    series.put(of::SERVICE_START, &[name], service.started_ms as f64 / 1e3);
}

/// Memory that is still at the source.
#[derive(Default)]
struct Awaited {
    bytes: u64,
    silence: Duration,
}

/// What a service uses, as `godwit stats` tells it; none where it has ended or left meanwhile.
async fn use_of(node: &Node, owned: &Owned) -> Option<(ServiceStats, Awaited)> {
    let used = stats::of(node, owned).await;
    let used = used.inspect_err(|error| {
        tracing::debug!(service = %owned.service.name, error = error.message(), "it has no figures");
    });
    let wait = node.local().waits.of(&owned.service.name).await;
    let awaited = wait.map_or_else(Awaited::default, |wait| Awaited {
        bytes: wait.lacking_bytes,
        silence: wait.unreachable.unwrap_or_default(),
    });
    Some((used.ok()?, awaited))
}

fn use_told(used: &ServiceStats, series: &mut Series) {
    let name = &[used.name.as_str()];
    if let Some(cpu) = used.cpu_ns {
        series.put(of::SERVICE_CPU, name, Duration::from_nanos(cpu).as_secs_f64());
    }
    series.known(of::SERVICE_MEMORY, name, used.memory_bytes);
    series.known(of::SERVICE_LIMIT, name, Some(used.memory_limit_bytes).filter(|limit| *limit != 0));
    series.known(of::SERVICE_PIDS, name, used.pids);
    series.known(of::SERVICE_RECEIVED, name, used.received_bytes);
    series.known(of::SERVICE_SENT, name, used.sent_bytes);
    series.known(of::SERVICE_READ, name, used.read_bytes);
    series.known(of::SERVICE_WRITTEN, name, used.written_bytes);
}

fn awaited_told(name: &str, awaited: &Awaited, series: &mut Series) {
    series.count(of::AWAITED, &[name], awaited.bytes);
    series.put(of::SILENCE, &[name], awaited.silence.as_secs_f64());
}

/// What was decided last. Clients have no series of their own: there may be any number.
fn follows(name: &str, decided: &PlaceResponse, series: &mut Series) {
    let name = &[name];
    series.count(of::CLIENTS, name, decided.active.into());
    series.count(of::CLIENTS_OVER, name, decided.over.into());
    series.count(of::CLIENTS_UNMEASURED, name, decided.unmeasured.into());
    series.put(of::LATENCY_TARGET, name, seconds(decided.latency_us));
    let known = decided.clients.iter().filter_map(|client| client.here.as_ref());
    let mut latencies: Vec<_> = known.map(|here| here.expected_us).collect();
    latencies.sort_unstable();
    if let Some(most) = latencies.last() {
        series.put(of::LATENCY_MEDIAN, name, seconds(latencies[latencies.len() / 2]));
        series.put(of::LATENCY_MOST, name, seconds(*most));
    }
    series.put(of::LOSS, name, decided.losses.as_ref().map_or(0.0, |losses| losses.clients));
    let unpaid = decided.reasons.iter().find_map(|reason| match &reason.kind {
        Some(Kind::Unpaid(unpaid)) => Some(unpaid.needed - unpaid.suffered),
        _ => None,
    });
    series.put(of::UNPAID, name, unpaid.unwrap_or(0.0).max(0.0));
}

fn seconds(us: u64) -> f64 {
    Duration::from_micros(us).as_secs_f64()
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use godwit_api::v1::{Latency, Losses, PlaceClient, PlaceReason, place_reason};

    use super::*;

    fn text(series: Series) -> String {
        prometheus::TextEncoder::new().encode_to_string(&series.with(Vec::new())).unwrap()
    }

    #[test]
    fn clients_are_told_by_their_number_and_the_middle_and_worst_of_their_latencies() {
        let client = |expected_us| PlaceClient {
            address: "198.51.100.7".into(),
            here: Some(Latency { expected_us, ..Latency::default() }),
            there: None,
        };
        let unpaid = place_reason::Unpaid { suffered: 1.5, needed: 4.0, left_ms: 9 };
        let decided = PlaceResponse {
            active: 4,
            over: 1,
            unmeasured: 1,
            latency_us: 20_000,
            clients: vec![client(90_000), client(5_000), client(7_000), PlaceClient::default()],
            losses: Some(Losses { clients: 0.25, ..Losses::default() }),
            reasons: vec![PlaceReason { kind: Some(Kind::Unpaid(unpaid)) }],
            ..PlaceResponse::default()
        };
        let mut series = Series::default();
        follows("redis", &decided, &mut series);
        let text = text(series);
        for line in [
            "godwit_service_clients{service=\"redis\"} 4",
            "godwit_service_client_latency_median_seconds{service=\"redis\"} 0.007",
            "godwit_service_client_latency_max_seconds{service=\"redis\"} 0.09",
            "godwit_service_client_latency_target_seconds{service=\"redis\"} 0.02",
            "godwit_service_client_loss{service=\"redis\"} 0.25",
            "godwit_service_move_debt_client_seconds{service=\"redis\"} 2.5",
        ] {
            assert!(text.lines().any(|shown| shown == line), "{line}: {text}");
        }
        assert!(!text.contains("198.51"), "{text}");
    }

    #[test]
    fn a_figure_that_the_node_cannot_tell_has_no_series() {
        let used =
            ServiceStats { name: "redis".into(), cpu_ns: Some(1_500_000_000), ..ServiceStats::default() };
        let mut series = Series::default();
        use_told(&used, &mut series);
        let text = text(series);
        assert!(text.contains("\ngodwit_service_cpu_seconds_total{service=\"redis\"} 1.5\n"), "{text}");
        assert!(!text.contains("memory") && !text.contains("pids"), "{text}");
    }
}
