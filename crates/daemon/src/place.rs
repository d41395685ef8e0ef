//! On which node a service is best for its clients, asked of this node or of the one that has it. Nothing moves.
//!
//! ```text
//!   the service      clients ┬─ echoes of all nodes ──▶ the nearest ──▶ each asked, its link measured ──▶ decide
//!                    looks at its memory and files ──────────────────▶
//! ```
//! What is measured of the service is measured as `godwit check` does, once; what is measured of a node, too.

pub(crate) mod clients;
mod facts;
mod told;

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use godwit_api::v1 as api;
use godwit_criu::obstacles::sentences;
use godwit_migration::source::{Findings, Measured, Seen};
use godwit_migration::{Options, Service, error_chain};
use godwit_names::ServiceName;
use godwit_policy::assess::{Candidate, Cause, Situation};
use godwit_policy::constraint::{Facts, Needs, Refusal, refusals};
use godwit_policy::cost::{Allowed, Prospect};
use godwit_policy::curve::Curve;
use godwit_policy::decide::{Verdict, decide};
use godwit_policy::degradation::Behaviour;
use godwit_policy::fixed::Parts;
use godwit_policy::latency::Estimate;
use godwit_policy::loss::{Prices, Target, Usage, lost};
use godwit_policy::predict::{Cargo, Link, Steps};
use godwit_policy::quantity::{Bandwidth, Cores, Moment, WireRatio};
use godwit_policy::rules::Rules;
use godwit_policy::state::{NodeId, State};
use tokio_util::sync::CancellationToken;
use tonic::Status;

use self::clients::Client;
use crate::check::{plain, source};
use crate::convert;
use crate::directory::{elsewhere, nodes, too_old};
use crate::engine_changes;
use crate::migrate::leaving;
use crate::node::Node;
use crate::services::occupied;
use crate::status::internal;
use crate::verbs;

/// The longest latency with which a client is content, unless the user says so.
const LATENCY: Duration = Duration::from_millis(20);

/// How long clients stay where they are, unless the user says so.
const STAY: Duration = Duration::from_secs(60);

/// Most nodes whose links are measured, each of which is filled for a part of a second: those that are nearest.
const MOST_ASKED: usize = 8;

/// CRIU's images, of most services, bytes.
const IMAGES: u64 = 1 << 20;

const PAGE: u64 = 4096;

/// How long asking nodes may take in all: the service is occupied meanwhile.
const ASKING: Duration = Duration::from_secs(60);

/// Most sentences of a node that are passed on.
const MOST_WORDS: usize = 10;

/// What is asked for.
struct Asked {
    name: ServiceName,
    options: Options,
    /// The only node that is considered; else empty.
    to: String,
    target: Target,
    stay: Duration,
}

/// What is known of another node.
struct Place {
    name: String,
    address: String,
    facts: Facts,
    there: Vec<Option<Estimate>>,
    echoes: Vec<Option<Duration>>,
    /// What rules it out, and what it says itself.
    refused: Vec<Refusal>,
    words: Vec<String>,
    measured: Option<Measured>,
}

/// The best node, wherever the service is.
pub(crate) async fn anywhere(
    node: &Arc<Node>,
    request: api::PlaceRequest,
) -> Result<api::PlaceResponse, Status> {
    let name = asked(&request)?.name;
    let Some((owner, address)) = elsewhere(node, &name)? else { return here(node, &request).await };
    let answer = node.peers.get_patient(&owner, &address).place(request).await;
    let answer = answer.map_err(|status| match verbs::is_unknown(&status) {
        true => too_old(node, &name, &owner, "places no services"),
        false => status,
    });
    let answer = answer?.into_inner();
    if told::is_plain(&answer) && answer.name == name.as_str() {
        return Ok(answer);
    }
    Err(Status::internal(format!("node {owner} returned an invalid answer about service {name}")))
}

fn asked(request: &api::PlaceRequest) -> Result<Asked, Status> {
    let missing = || Status::invalid_argument("the request names no service");
    let of_move = request.r#move.as_ref().ok_or_else(missing)?;
    let auto = api::MigrateRequest { mode: String::new(), ..of_move.clone() };
    let latency = match request.latency_us {
        0 => LATENCY,
        us => Duration::from_micros(us),
    };
    let target = Target::new(latency)
        .ok_or_else(|| Status::invalid_argument("no client has a latency of more than a day"))?;
    let stay = match request.stay_ms {
        0 => STAY,
        ms => Duration::from_millis(ms),
    };
    Ok(Asked {
        name: convert::service_name(&of_move.name)?,
        options: convert::options(&auto).map_err(Status::invalid_argument)?,
        to: of_move.to.clone(),
        target,
        stay,
    })
}

/// The best node for a service of this node.
pub(crate) async fn here(
    node: &Arc<Node>,
    request: &api::PlaceRequest,
) -> Result<api::PlaceResponse, Status> {
    let asked = asked(request)?;
    let name = asked.name.clone();
    node.settle(&name).await;
    let to = Some(asked.to.as_str()).filter(|to| !to.is_empty());
    let service = engine_changes::taken_over(node, leaving(node, &name, to)?).await?;
    let sending = u32::try_from(node.migrations().len()).unwrap_or(u32::MAX);
    // It must not move, stop or be asked about twice meanwhile.
    let occupied = node.reserve_alone(&name).await.ok_or_else(|| occupied(&name))?;
    let cancel = node.local().ending.child_token();
    // Whoever asked may leave: then it ends, and with it what holds the service.
    let _leaving = cancel.clone().drop_guard();
    let looking = Placing { node: Arc::clone(node), service, asked, cancel };
    // In a task of its own, to its end: the tracker must not be left in the service.
    let placing = node.checks.spawn(async move {
        let answer = looking.place(sending).await;
        drop(occupied);
        answer
    });
    placing.await.map_err(internal)?
}

struct Placing {
    node: Arc<Node>,
    service: Service,
    asked: Asked,
    cancel: CancellationToken,
}

impl Placing {
    async fn place(&self, sending: u32) -> Result<api::PlaceResponse, Status> {
        let config = self.node.local().config(&self.service);
        let (mut seen, cpu_before) = (None, self.cpu().await);
        let begun = tokio::time::Instant::now();
        let finding = self.cancel.run_until_cancelled(clients::find(&config.network_namespace));
        let (found, clients) = tokio::join!(self.check("", &mut seen), finding);
        let (found, clients) = (found?, clients.ok_or_else(ended)??);
        let mut answer = told::answer(&self.service.name, &self.node.name);
        if told::keeps(&mut answer, &found) {
            return Ok(answer);
        }
        let cores = match (cpu_before, self.cpu().await) {
            (Some(before), Some(now)) => {
                now.saturating_sub(before).as_secs_f64() / begun.elapsed().as_secs_f64()
            }
            _ => 0.0,
        };
        // What a destination has to have for it.
        let memory = found.forecast.as_ref().map_or(0, |forecast| forecast.memory_bytes);
        let usage = Usage { cores: Cores::clamped(cores), memory, request: None };

        let infos = nodes(&self.node).map_err(internal)?;
        let own = infos.iter().find(|info| info.name == self.node.name);
        let host = facts::host(own.unwrap_or(&api::NodeInfo::default()));
        let needs = facts::needs();
        let others = infos.iter().filter(|info| info.name != self.node.name);
        let others = others.filter(|info| self.asked.to.is_empty() || info.name == self.asked.to);
        let mut places: Vec<_> = others.map(|info| place(info, (&needs, &usage), &host)).collect();
        let hosts: Vec<IpAddr> = clients.iter().map(|client| client.address).collect();
        let listening = self.listen_for_echoes(&mut places, &hosts);
        let from_here = self.cancel.run_until_cancelled(listening).await.ok_or_else(ended)?;
        self.ask(&mut places, (&clients, &from_here), &mut seen).await?;
        for place in &mut places {
            let between = place.measured.as_ref().map(|measured| measured.link.round_trip);
            place.there = clients::there(&clients, &from_here, &place.echoes, between);
        }
        let verdict = self.decide(&places, &clients, (&needs, usage), (host, sending));
        told::tell(&mut answer, &verdict, &clients, &places, &self.asked);
        Ok(answer)
    }

    /// The CPU time that it has used; none where the kernel does not tell.
    async fn cpu(&self) -> Option<Duration> {
        let config = self.node.local().config(&self.service);
        match self.node.local().engine.usage(&config).await {
            Ok(usage) => usage.cpu,
            Err(error) => {
                tracing::debug!(service = %self.service.name, %error, "its CPU time is not known");
                None
            }
        }
    }

    async fn check(&self, to: &str, seen: &mut Option<Seen>) -> Result<Findings, Status> {
        let Placing { node, service, asked, cancel } = self;
        let source = source(node, service.clone(), to, asked.options.clone(), cancel.clone());
        source.check_again(seen).await.map_err(|error| {
            let why = plain(&error_chain(&error));
            Status::unavailable(format!("service {} cannot be checked: {why}", service.name))
        })
    }

    /// How far the clients are from this node; each place notes how far they are from there.
    async fn listen_for_echoes(&self, places: &mut [Place], hosts: &[IpAddr]) -> Vec<Option<Duration>> {
        if hosts.is_empty() {
            return Vec::new();
        }
        let possible = places.iter_mut().filter(|place| place.refused.is_empty());
        let asking = futures::future::join_all(possible.map(|place| async move {
            let of = (place.name.as_str(), place.address.as_str());
            place.echoes = clients::distances_from(&self.node, of, hosts).await;
        }));
        let (_, from_here) = tokio::join!(asking, clients::distances(hosts));
        from_here
    }

    /// Asks the nearest places whether they take the service, and measures the links to them.
    async fn ask(
        &self,
        places: &mut [Place],
        (clients, from_here): (&[Client], &[Option<Duration>]),
        seen: &mut Option<Seen>,
    ) -> Result<(), Status> {
        let (target, begun) = (self.asked.target, tokio::time::Instant::now());
        let mut possible: Vec<_> = places.iter_mut().filter(|place| place.refused.is_empty()).collect();
        possible.sort_by_cached_key(|place| {
            let there = clients::there(clients, from_here, &place.echoes, None);
            distance(&there, target)
        });
        for (index, place) in possible.into_iter().enumerate() {
            if index >= MOST_ASKED {
                place
                    .words
                    .push(format!("its clients are nearer to {MOST_ASKED} others, so it was not asked"));
                continue;
            }
            if begun.elapsed() > ASKING {
                place.words.push(format!("it was not asked: asking others took {} s", ASKING.as_secs()));
                continue;
            }
            let found = match self.check(&place.name, seen).await {
                Ok(found) => found,
                Err(status) if self.cancel.is_cancelled() => return Err(status),
                // What is wrong with one node is nothing to the others.
                Err(status) => {
                    place.words.push(plain(status.message()));
                    continue;
                }
            };
            let of_node = format!("node {}: ", place.name);
            let words = found.objections.into_iter().chain(sentences(&found.obstacles));
            let words = words.map(|each| plain(each.strip_prefix(&of_node).unwrap_or(&each)));
            place.words.extend(words.take(MOST_WORDS));
            place.measured = found.measured;
            if place.words.is_empty() && place.measured.is_none() {
                place.words.extend(found.warnings.iter().take(MOST_WORDS).map(|each| plain(each)));
                place.words.push("the link to it was not measured".to_owned());
            }
        }
        Ok(())
    }

    fn decide(
        &self,
        places: &[Place],
        clients: &[Client],
        (needs, usage): (&Needs, Usage),
        (host, sending): (godwit_policy::loss::Host, u32),
    ) -> Verdict {
        let nothing = Curve::fit(&[], usage.memory / PAGE);
        let candidates: Vec<_> = places
            .iter()
            .zip(0..)
            .filter(|(place, _)| place.words.is_empty())
            .filter_map(|(place, index)| {
                let prospect = self.prospect(place.measured.as_ref()?, &nothing);
                Some(Candidate { node: NodeId(index), facts: &place.facts, there: &place.there, prospect })
            })
            .collect();
        let tracks =
            places.iter().filter_map(|place| place.measured.as_ref()).all(|each| each.writes.is_some());
        let Options { postcopy, throttle, max_frozen, max_rounds, .. } = self.asked.options;
        let situation = Situation {
            node: NodeId(u32::MAX),
            host,
            sending,
            cause: Cause::Asked,
            needs,
            usage,
            behaviour: Behaviour::default(),
            allowed: Allowed {
                cold: true,
                precopy: tracks,
                postcopy,
                hybrid: postcopy && tracks,
                throttle,
                max_frozen,
                max_rounds,
            },
            clients: &clients::counted(clients, self.asked.target),
            candidates: &candidates,
            dwell: self.asked.stay,
            prices: Prices::default(),
        };
        decide(&situation, &Rules::default(), &mut State::default(), Moment::default())
    }

    /// The move to a place.
    fn prospect<'a>(&self, measured: &'a Measured, nothing: &'a Curve) -> Prospect<'a> {
        let (fixed, margin) = measured.fixed;
        let bandwidth = Bandwidth::clamped(measured.link.bandwidth);
        let most = self.asked.options.max_bandwidth.map(|most| Bandwidth::clamped(most as f64));
        Prospect {
            cargo: Cargo {
                pages: measured.memory / PAGE,
                kept: 0,
                images: IMAGES,
                layers: measured.layers,
                files: &measured.files,
                writes: measured.writes.as_ref().unwrap_or(nothing),
            },
            link: Link {
                bandwidth,
                of_pages: most.filter(|most| *most < bandwidth).unwrap_or(bandwidth),
                ratio: WireRatio::clamped(1.0),
                round_trip: measured.link.round_trip,
            },
            steps: Steps { fixed: Parts::of(measured.memory, 0).corrected(fixed), ..Steps::default() },
            margin,
            userfaultfd: measured.userfaultfd,
        }
    }
}

fn ended() -> Status {
    Status::cancelled("whoever asked has left, or godwitd ends")
}

fn place(info: &api::NodeInfo, (needs, usage): (&Needs, &Usage), from: &godwit_policy::loss::Host) -> Place {
    let facts = facts::of(info);
    Place {
        name: info.name.clone(),
        address: info.address.clone(),
        refused: refusals(needs, usage, from, &facts),
        facts,
        there: Vec::new(),
        echoes: Vec::new(),
        words: Vec::new(),
        measured: None,
    }
}

/// What orders places: what is lost there, in thousandths, and then all latencies.
fn distance(there: &[Option<Estimate>], target: Target) -> (u64, Duration) {
    let one = godwit_policy::quantity::Weight::clamped(1.0);
    let of = |found: &Option<Estimate>| {
        found.map_or((1000.0, Duration::from_secs(1)), |found| {
            (lost(one, target, found.expected) * 1000.0, found.expected)
        })
    };
    let (lost, all) = there.iter().map(of).fold((0.0, Duration::ZERO), |(lost, all), (more, latency)| {
        (lost + more, all.saturating_add(latency))
    });
    #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss)] // at most a thousand for each client
    (lost as u64, all)
}

/// The names of places by the numbers that the policy has for them.
fn names(places: &[Place]) -> BTreeMap<NodeId, &str> {
    places.iter().zip(0..).map(|(place, index)| (NodeId(index), place.name.as_str())).collect()
}
