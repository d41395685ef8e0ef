//! A decision, as it is told to users; and whether another node's answer may be passed on to them.

use std::collections::BTreeMap;
use std::time::Duration;

use godwit_api::v1 as api;
use godwit_api::v1::place_reason as reason;
use godwit_api::v1::place_refusal as refusal;
use godwit_migration::source::Findings;
use godwit_names::ServiceName;
use godwit_policy::assess::{Assessment, Losses};
use godwit_policy::constraint::{InstructionSet, Refusal};
use godwit_policy::decide::{Decision, Other, Reason, Verdict};
use godwit_policy::latency::{Estimate, Origin, here};
use godwit_policy::state::NodeId;

use super::clients::{Client, MOST};
use super::decision::Matter;
use crate::check::{MOST_SHOWN, obstacle};
use crate::plain::plain;

/// The longest word of a peer that is passed on, and most entries of a list.
const LONGEST: usize = 4096;
const LONGEST_LIST: usize = 4096;

pub(crate) fn answer(name: &ServiceName, node: &str) -> api::PlaceResponse {
    api::PlaceResponse { name: name.to_string(), node: node.to_owned(), ..Default::default() }
}

/// Tells what a look at the service has found; whether that keeps it from moving anywhere.
pub(crate) fn keeps(answer: &mut api::PlaceResponse, found: &Findings) -> bool {
    answer.objections = found.objections.iter().map(|each| plain(each)).collect();
    answer.obstacles = found.obstacles.iter().take(MOST_SHOWN).cloned().map(obstacle).collect();
    answer.warnings = found.warnings.iter().map(|each| plain(each)).collect();
    if let Some(more) = found.obstacles.len().checked_sub(MOST_SHOWN).filter(|more| *more > 0) {
        answer.objections.push(format!("{more} more obstacles are not shown"));
    }
    !(answer.objections.is_empty() && answer.obstacles.is_empty())
}

/// Tells a decision, and what it rests on.
pub(crate) fn tell(answer: &mut api::PlaceResponse, verdict: &Verdict, matter: &Matter) {
    let Matter { clients, places, target, .. } = *matter;
    let names: BTreeMap<NodeId, &str> = places.iter().map(|place| (place.id, place.name.as_str())).collect();
    let name = |node: &NodeId| names.get(node).copied().unwrap_or_default().to_owned();
    match &verdict.decision {
        Decision::Move { to, mode, then } => {
            answer.to = name(to);
            mode.name().clone_into(&mut answer.mode);
            answer.then = then.iter().map(name).collect();
        }
        Decision::Stay(reasons) => answer.reasons = reasons.iter().map(said).collect(),
    }
    let there = verdict.best.as_ref().map_or(&[][..], |best| &best.there);
    let mut all: Vec<_> =
        clients.iter().enumerate().map(|(at, client)| told_client(client, there.get(at))).collect();
    all.sort_by_key(|client| std::cmp::Reverse(client.here.as_ref().map_or(0, |here| here.expected_us)));
    answer.clients = all;
    answer.active = verdict.suffering.active;
    answer.over = verdict.suffering.over.iter().map(|over| over.count).sum();
    answer.unmeasured = verdict.suffering.unmeasured;
    answer.latency_us = us(target.get());
    answer.stay_ms = u64::try_from(verdict.dwell.as_millis()).unwrap_or(u64::MAX);
    answer.losses = Some(losses(&verdict.suffering.losses));
    answer.best = verdict.best.as_ref().map(|best| told_node(name(&best.node), best));
    let mut others: BTreeMap<_, _> = places
        .iter()
        .filter(|place| !place.words.is_empty() || !place.refused.is_empty())
        .map(|place| {
            let words = place.words.iter().map(|words| refused(refusal::Kind::Words(words.clone())));
            let refusals = place.refused.iter().map(why).chain(words).collect();
            (place.name.clone(), api::PlaceOther { name: place.name.clone(), refusals, ..Default::default() })
        })
        .collect();
    for (node, other) in &verdict.others {
        let (refusals, delta, worth) = match other {
            Other::Refused(refusals) => (refusals.iter().map(why).collect(), 0.0, 0.0),
            Other::Less { delta, worth } => (Vec::new(), *delta, *worth),
        };
        others.insert(name(node), api::PlaceOther { name: name(node), refusals, delta, worth });
    }
    answer.others = others.into_values().collect();
}

/// Why it stays.
fn said(why: &Reason) -> api::PlaceReason {
    let left_ms = |left: Duration| u64::try_from(left.as_millis()).unwrap_or(u64::MAX);
    let kind = match *why {
        Reason::NoClients => reason::Kind::NoClients(true),
        Reason::NoCandidate => reason::Kind::NoCandidate(true),
        Reason::NoBetter { delta } => reason::Kind::NoBetter(reason::NoBetter { delta }),
        Reason::Uncertain { delta } => reason::Kind::Uncertain(reason::Uncertain { delta }),
        Reason::TooLittle { gain, needed } => reason::Kind::TooLittle(reason::TooLittle { gain, needed }),
        Reason::Sending { now, most } => reason::Kind::Sending(reason::Sending { now, most }),
        Reason::NotArmed { part, threshold, left } => {
            reason::Kind::NotArmed(reason::NotArmed { part, threshold, left_ms: left.map(left_ms) })
        }
        Reason::Unpaid { suffered, needed, left } => {
            reason::Kind::Unpaid(reason::Unpaid { suffered, needed, left_ms: left_ms(left) })
        }
        Reason::Moves { made, most, left } => {
            reason::Kind::Moves(reason::Moves { made, most, left_ms: left_ms(left) })
        }
        Reason::Frozen { spent, needed, most } => reason::Kind::Frozen(reason::Frozen {
            spent_ms: ms(spent),
            needed_ms: ms(needed),
            most_ms: ms(most),
        }),
        Reason::Rests { left } => reason::Kind::Rests(reason::Rests { left_ms: left_ms(left) }),
    };
    api::PlaceReason { kind: Some(kind) }
}

fn refused(kind: refusal::Kind) -> api::PlaceRefusal {
    api::PlaceRefusal { kind: Some(kind) }
}

fn why(why: &Refusal) -> api::PlaceRefusal {
    refused(match why {
        Refusal::InstructionSet { has, built } => refusal::Kind::InstructionSet(refusal::InstructionSet {
            has: instruction_set(*has).to_owned(),
            built: built.iter().map(|each| instruction_set(*each).to_owned()).collect(),
        }),
        Refusal::Memory { free, needed } => {
            refusal::Kind::Memory(refusal::Memory { free: *free, needed: *needed })
        }
        Refusal::Cpu { after, most } => refusal::Kind::Cpu(refusal::Cpu { after: *after, most: *most }),
        Refusal::Silent { heard, .. } => refusal::Kind::Silent(refusal::Silent {
            heard_ms: u64::try_from(heard.as_millis()).unwrap_or(u64::MAX),
        }),
        Refusal::Cordoned => refusal::Kind::Cordoned(true),
        Refusal::Frozen { upper, limit } => {
            refusal::Kind::Frozen(refusal::Frozen { most_ms: ms(*upper), limit_ms: ms(*limit) })
        }
        Refusal::NoMode => {
            refusal::Kind::Words("it takes the service in none of the modes that are allowed".into())
        }
        Refusal::Features { missing } => lacks("CPU features", missing),
        Refusal::Mounts { missing } => lacks("mounts", missing),
        Refusal::Labels { missing } => lacks("labels", missing),
        Refusal::Criu { .. } => refusal::Kind::Words("its CRIU is too old".into()),
        Refusal::Mtu { .. } => refusal::Kind::Words("its network has smaller packets".into()),
        Refusal::Taking { now, .. } => refusal::Kind::Words(format!("{now} services are on their way to it")),
        Refusal::Waits { left } => refusal::Kind::Words(format!(
            "a move to it was given up; it is tried again in {} s",
            left.as_secs()
        )),
    })
}

fn lacks(what: &str, missing: &std::collections::BTreeSet<String>) -> refusal::Kind {
    let missing: Vec<_> = missing.iter().map(String::as_str).collect();
    refusal::Kind::Words(format!("it lacks {what}: {}", missing.join(", ")))
}

/// As `uname -m` names it.
fn instruction_set(of: InstructionSet) -> &'static str {
    match of {
        InstructionSet::X86_64 => "x86_64",
        InstructionSet::Arm64 => "aarch64",
    }
}

fn us(time: Duration) -> u64 {
    u64::try_from(time.as_micros()).unwrap_or(u64::MAX)
}

fn ms(time: Duration) -> f64 {
    time.as_secs_f64() * 1e3
}

fn latency(of: &Estimate) -> api::Latency {
    let from = match of.from {
        Origin::Own => "own",
        Origin::Probe => "probe",
        Origin::Entry => "entry",
        Origin::Prefix => "prefix",
        Origin::Bounds => "bounds",
    };
    api::Latency {
        expected_us: us(of.expected),
        deviation_us: us(of.deviation),
        age_ms: u64::try_from(of.age.as_millis()).unwrap_or(u64::MAX),
        from: from.to_owned(),
    }
}

fn told_client(client: &Client, there: Option<&Option<Estimate>>) -> api::PlaceClient {
    api::PlaceClient {
        address: client.address.to_string(),
        here: client.here.and_then(here).as_ref().map(latency),
        there: there.and_then(Option::as_ref).map(latency),
    }
}

fn losses(losses: &Losses) -> api::Losses {
    api::Losses { clients: losses.clients, residence: losses.residence }
}

fn told_node(name: String, best: &Assessment) -> api::PlaceNode {
    let forecast = &best.priced.forecast;
    api::PlaceNode {
        name,
        losses: Some(losses(&best.losses)),
        delta: best.delta,
        delta_worse: best.delta_worse,
        r#move: Some(api::PlaceMove {
            mode: best.priced.mode.name().to_owned(),
            becomes: forecast.mode.name().to_owned(),
            rounds: forecast.rounds,
            bytes: forecast.bytes,
            total_ms: ms(forecast.total),
            frozen_ms: ms(forecast.frozen),
            most_frozen_ms: ms(best.priced.upper),
            cost: best.priced.cost.total(),
        }),
        gain: best.gain,
    }
}

/// Whether the words of another node are few enough, and do a terminal no harm.
pub(crate) fn is_plain(answer: &api::PlaceResponse) -> bool {
    let plain = |text: &String| text.len() <= LONGEST && !text.chars().any(char::is_control);
    let latency = |of: &Option<api::Latency>| of.as_ref().is_none_or(|of| plain(&of.from));
    let of_refusal = |each: &api::PlaceRefusal| match &each.kind {
        Some(refusal::Kind::InstructionSet(found)) => {
            found.built.len() <= LONGEST_LIST && plain(&found.has) && found.built.iter().all(plain)
        }
        Some(refusal::Kind::Words(words)) => plain(words),
        _ => true,
    };
    let of_best = |best: &api::PlaceNode| {
        let modes = best.r#move.iter().flat_map(|found| [&found.mode, &found.becomes]);
        plain(&best.name) && modes.into_iter().all(plain)
    };
    let lists = [answer.reasons.len(), answer.others.len(), answer.obstacles.len()];
    answer.clients.len() <= MOST
        && answer.then.len() <= 2
        && lists.into_iter().all(|length| length <= LONGEST_LIST)
        && answer.objections.len().max(answer.warnings.len()) <= LONGEST_LIST
        && [&answer.name, &answer.node, &answer.to, &answer.mode].into_iter().all(plain)
        && answer.then.iter().chain(&answer.objections).chain(&answer.warnings).all(plain)
        && answer.obstacles.iter().flat_map(|found| [&found.name, &found.what, &found.why]).all(plain)
        && answer
            .clients
            .iter()
            .all(|client| plain(&client.address) && latency(&client.here) && latency(&client.there))
        && answer.best.iter().all(of_best)
        && answer.others.iter().all(|other| {
            plain(&other.name)
                && other.refusals.len() <= LONGEST_LIST
                && other.refusals.iter().all(of_refusal)
        })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_another_node_says_does_a_terminal_no_harm() {
        let good = api::PlaceResponse {
            name: "web".into(),
            node: "a".into(),
            clients: vec![api::PlaceClient { address: "192.0.2.1".into(), ..Default::default() }],
            others: vec![api::PlaceOther { name: "c".into(), ..Default::default() }],
            best: Some(api::PlaceNode { name: "b".into(), ..Default::default() }),
            ..Default::default()
        };
        assert!(is_plain(&good));
        let bad = || "\u{1b}[2J".to_owned();
        let words = refused(refusal::Kind::Words(bad()));
        let of = |has: String, built| {
            refused(refusal::Kind::InstructionSet(refusal::InstructionSet { has, built: vec![built] }))
        };
        let other = |refusals| api::PlaceOther { refusals, ..Default::default() };
        let from = Some(api::Latency { from: bad(), ..Default::default() });
        let client = api::PlaceClient::default();
        let becomes = api::PlaceMove { becomes: bad(), ..Default::default() };
        for worse in [
            api::PlaceResponse { to: bad(), ..good.clone() },
            api::PlaceResponse { then: vec![bad()], ..good.clone() },
            api::PlaceResponse { warnings: vec![bad()], ..good.clone() },
            api::PlaceResponse { objections: vec!["x".repeat(LONGEST + 1)], ..good.clone() },
            api::PlaceResponse {
                obstacles: vec![api::Obstacle { what: bad(), ..Default::default() }],
                ..good.clone()
            },
            api::PlaceResponse {
                clients: vec![api::PlaceClient { here: from, ..client.clone() }],
                ..good.clone()
            },
            api::PlaceResponse { clients: vec![client; MOST + 1], ..good.clone() },
            api::PlaceResponse { others: vec![other(vec![words])], ..good.clone() },
            api::PlaceResponse { others: vec![other(vec![of("x86_64".into(), bad())])], ..good.clone() },
            api::PlaceResponse {
                best: Some(api::PlaceNode { r#move: Some(becomes), ..Default::default() }),
                ..good.clone()
            },
        ] {
            assert!(!is_plain(&worse), "{worse:?}");
        }
    }
}
