//! What is measured for a decision: the service, as `godwit check` looks at it, and the nodes where it could be.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use godwit_api::v1 as api;
use godwit_criu::obstacles::sentences;
use godwit_migration::source::{Findings, Measured, Seen};
use godwit_migration::{Options, Service, error_chain};
use godwit_policy::assess::Cause;
use godwit_policy::constraint::{Facts, Refusal, refusals};
use godwit_policy::latency::Estimate;
use godwit_policy::loss::{Host, Target, Usage, lost};
use godwit_policy::quantity::{Cores, Weight};
use godwit_policy::state::NodeId;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use tonic::Status;

use super::clients::{self, Client, Echoes};
use super::facts;
use crate::check::source;
use crate::node::Node;
use crate::plain::plain;

/// Most nodes whose links are measured, each of which is filled for a part of a second: those that are nearest.
const MOST_ASKED: usize = 8;

/// How long asking nodes may take in all: nothing else may look at the service's memory meanwhile.
const ASKING: Duration = Duration::from_secs(60);

/// Most sentences of a node that are passed on.
const MOST_WORDS: usize = 10;

/// Another node, and what is known of it.
pub(crate) struct Place {
    pub(crate) id: NodeId,
    pub(crate) name: String,
    pub(crate) address: String,
    pub(crate) facts: Facts,
    /// How far the clients are from there.
    pub(crate) echoes: Echoes,
    /// Whether it was asked for that last.
    pub(crate) listened: bool,
    /// What rules it out, and what it says itself.
    pub(crate) refused: Vec<Refusal>,
    pub(crate) words: Vec<String>,
    pub(crate) measured: Option<Measured>,
    /// When it was asked last.
    pub(crate) asked: Option<Instant>,
}

impl Place {
    /// What is known of a node from afar.
    pub(crate) fn new(id: NodeId, info: &api::NodeInfo, usage: &Usage, from: &Host, cause: Cause) -> Self {
        let facts = facts::of(info);
        let refused = refusals(&facts::needs(), usage, from, &facts);
        Self {
            id,
            name: info.name.clone(),
            address: info.address.clone(),
            refused: refused.into_iter().filter(|refusal| cause.heeds(refusal)).collect(),
            facts,
            echoes: BTreeMap::new(),
            listened: false,
            words: Vec::new(),
            measured: None,
            asked: None,
        }
    }

    /// The latency of each client with the service there.
    pub(crate) fn there(
        &self,
        clients: &[Client],
        from_here: &Echoes,
        age: Duration,
    ) -> Vec<Option<Estimate>> {
        let between = self.measured.as_ref().map(|measured| measured.link.round_trip);
        clients::there(clients, (from_here, &self.echoes, age), between)
    }

    /// What orders places: what is lost there, in thousandths, and then all latencies.
    fn distance(&self, clients: &[Client], from_here: &Echoes, target: Target) -> (u64, Duration) {
        distance(&clients::there(clients, (from_here, &self.echoes, Duration::ZERO), None), target)
    }
}

/// Measures for one service.
pub(crate) struct Surveyor<'a> {
    pub(crate) node: &'a Arc<Node>,
    pub(crate) service: &'a Service,
    pub(crate) options: &'a Options,
    pub(crate) target: Target,
    pub(crate) cancel: &'a CancellationToken,
}

impl Surveyor<'_> {
    /// Whether the service can leave this node, and what a destination has to have for it.
    pub(crate) async fn examine(&self, seen: &mut Option<Seen>) -> Result<(Findings, Usage), Status> {
        let (before, begun) = (self.cpu().await, Instant::now());
        let found = self.check("", seen).await?;
        let cores = match (before, self.cpu().await) {
            (Some(before), Some(now)) => {
                now.saturating_sub(before).as_secs_f64() / begun.elapsed().as_secs_f64()
            }
            _ => 0.0,
        };
        let memory = found.forecast.as_ref().map_or(0, |forecast| forecast.memory_bytes);
        Ok((found, Usage { cores: Cores::clamped(cores), memory, request: None }))
    }

    /// The CPU time that it has used; none where the kernel does not tell.
    async fn cpu(&self) -> Option<Duration> {
        let config = self.node.local().config(self.service);
        match self.node.local().engine.usage(&config).await {
            Ok(usage) => usage.cpu,
            Err(error) => {
                tracing::debug!(service = %self.service.name, %error, "its CPU time is not known");
                None
            }
        }
    }

    async fn check(&self, to: &str, seen: &mut Option<Seen>) -> Result<Findings, Status> {
        let Self { node, service, options, cancel, .. } = *self;
        let source = source(node, service.clone(), to, options.clone(), cancel.clone());
        source.check_again(seen).await.map_err(|error| {
            let why = plain(&error_chain(&error));
            Status::unavailable(format!("service {} cannot be checked: {why}", service.name))
        })
    }

    /// How far the clients are from this node; each place that is possible notes how far they are from there.
    pub(crate) async fn listen_for_echoes(
        &self,
        places: &mut [Place],
        clients: &[Client],
    ) -> Result<Echoes, Status> {
        for place in places.iter_mut() {
            // Those of places that are not asked now would be older.
            place.echoes.clear();
            place.listened = place.refused.is_empty();
        }
        let hosts: Vec<IpAddr> = clients.iter().map(|client| client.address).collect();
        if hosts.is_empty() {
            return Ok(Echoes::new());
        }
        let possible = places.iter_mut().filter(|place| place.refused.is_empty());
        let asking = futures::future::join_all(possible.map(|place| async {
            let of = (place.name.as_str(), place.address.as_str());
            place.echoes = clients::distances_from(self.node, of, &hosts).await;
        }));
        let all = async { tokio::join!(asking, clients::distances(&hosts)) };
        let (_, from_here) = self.cancel.run_until_cancelled(all).await.ok_or_else(ended)?;
        Ok(hosts.into_iter().zip(from_here).filter_map(|(host, found)| Some((host, found?))).collect())
    }

    /// Asks the nearest places that nothing rules out whether they take the service, and measures the links to them.
    pub(crate) async fn ask(
        &self,
        places: &mut [Place],
        (clients, from_here): (&[Client], &Echoes),
        is_worth_it: impl Fn(&Place) -> bool,
        seen: &mut Option<Seen>,
    ) -> Result<(), Status> {
        let begun = Instant::now();
        let mut possible: Vec<_> =
            places.iter_mut().filter(|place| place.refused.is_empty() && is_worth_it(place)).collect();
        possible.sort_by_cached_key(|place| place.distance(clients, from_here, self.target));
        let mut measured = 0;
        for place in possible {
            place.words.clear();
            if measured >= MOST_ASKED {
                let why = format!("{MOST_ASKED} nearer ones take it, so it was not asked");
                place.words.push(why);
                continue;
            }
            if begun.elapsed() > ASKING {
                place.words.push(format!("it was not asked: asking others took {} s", ASKING.as_secs()));
                continue;
            }
            place.asked = Some(Instant::now());
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
            measured += usize::from(place.words.is_empty() && place.measured.is_some());
            if place.words.is_empty() && place.measured.is_none() {
                place.words.extend(found.warnings.iter().take(MOST_WORDS).map(|each| plain(each)));
                place.words.push("the link to it was not measured".to_owned());
            }
        }
        Ok(())
    }
}

pub(crate) fn ended() -> Status {
    Status::cancelled("whoever asked has left, or godwitd ends")
}

/// What is lost with such latencies, in thousandths, and then all of them.
fn distance(there: &[Option<Estimate>], target: Target) -> (u64, Duration) {
    let one = Weight::clamped(1.0);
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

/// Whether less may be lost at a place than here, as far as echoes tell.
pub(crate) fn may_be_better(place: &Place, clients: &[Client], from_here: &Echoes, target: Target) -> bool {
    let here: Vec<_> = clients
        .iter()
        .filter(|client| client.here.is_some())
        .map(|client| client.here.and_then(godwit_policy::latency::here))
        .collect();
    let measured: Vec<Client> = clients.iter().filter(|client| client.here.is_some()).cloned().collect();
    place.distance(&measured, from_here, target).0 < distance(&here, target).0
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use godwit_policy::latency::Reading;

    use super::*;

    const NEAR: &str = "192.0.2.1";
    const SILENT: &str = "192.0.2.2";

    fn ms(ms: u64) -> Duration {
        Duration::from_millis(ms)
    }

    fn client(address: &str, latency: Option<Duration>) -> Client {
        let reading = |latency| Reading { latency, deviation: ms(1), age: Duration::ZERO };
        Client { address: address.parse().unwrap(), here: latency.map(reading) }
    }

    fn echoes(of: Duration) -> Echoes {
        Echoes::from([(NEAR.parse().unwrap(), of)])
    }

    fn place(echoes: Echoes) -> Place {
        let nothing = Usage { cores: Cores::LEAST, memory: 0, request: None };
        let info = api::NodeInfo { name: "b".into(), ..Default::default() };
        let mut place = Place::new(NodeId(0), &info, &nothing, &facts::own(&[], "a"), Cause::Watched);
        place.echoes = echoes;
        place
    }

    #[test]
    fn a_place_is_asked_only_where_echoes_say_that_less_is_lost_there() {
        let target = Target::new(ms(20)).unwrap();
        let better =
            |clients: &[Client], there| may_be_better(&place(there), clients, &echoes(ms(30)), target);
        let suffers = || client(NEAR, Some(ms(40)));
        assert!(better(&[suffers()], echoes(ms(2))));
        assert!(!better(&[suffers()], echoes(ms(30))), "as far");
        assert!(!better(&[suffers()], echoes(ms(90))), "farther");
        assert!(!better(&[suffers()], Echoes::new()), "it does not answer that place");
        assert!(!better(&[client(NEAR, Some(ms(15)))], echoes(ms(2))), "it is content here");
        // Of whom nothing is known has no say; who answers no echo would lose everything there.
        assert!(better(&[suffers(), client(SILENT, None)], echoes(ms(2))));
        assert!(!better(&[client(NEAR, Some(ms(25))), client(SILENT, Some(ms(15)))], echoes(ms(2))));
        assert!(!better(&[], echoes(ms(2))));
    }
}
