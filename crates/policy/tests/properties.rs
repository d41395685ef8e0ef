//! What holds of each decision, whatever is measured.

#![allow(clippy::unwrap_used)]

mod world;

use std::time::Duration;

use godwit_policy::assess::{Assessment, Cause};
use godwit_policy::constraint::{InstructionSet, refusals};
use godwit_policy::decide::{Decision, Other as NotChosen, Reason, Verdict};
use godwit_policy::loss::{Clients, Host, Target};
use godwit_policy::quantity::{Bandwidth, Cores, Moment, Share, Speed, Weight};
use godwit_policy::state::{Debt, Made, NodeId, State, Wait};
use proptest::collection::vec;
use proptest::prelude::*;
use world::{Other, World, at, clients, estimate, other};

/// Times as they are measured, and as they cannot be.
fn times() -> impl Strategy<Value = Duration> {
    prop_oneof![
        8 => (0_u64..100_000).prop_map(Duration::from_micros),
        1 => any::<u64>().prop_map(Duration::from_millis),
        1 => Just(Duration::MAX),
    ]
}

fn numbers() -> impl Strategy<Value = f64> {
    prop_oneof![4 => 0.0..10.0, 1 => any::<f64>(), 1 => Just(f64::NAN), 1 => Just(f64::INFINITY)]
}

/// A host as they are mostly, or as it cannot be.
fn hosts() -> impl Strategy<Value = Host> {
    let usual = (0.0_f64..0.9).prop_map(|load| Host { load: Share::clamped(load), ..world::host() });
    prop_oneof![4 => usual, 1 => odd_hosts()]
}

fn odd_hosts() -> impl Strategy<Value = Host> {
    let memory = prop_oneof![0_u64..16 << 30, any::<u64>()];
    (numbers(), numbers(), 0.0_f64..1.5, memory.clone(), memory).prop_map(
        |(cores, speed, load, memory, free)| Host {
            cores: Cores::clamped(cores),
            speed: Speed::clamped(speed),
            load: Share::clamped(load),
            memory,
            free,
        },
    )
}

fn others() -> impl Strategy<Value = Other> {
    let usual = (vec(1_u64..60, 5), hosts()).prop_map(|(latencies, host)| {
        let mut node = other(&latencies.into_iter().map(Some).collect::<Vec<_>>());
        node.facts.host = host;
        node
    });
    prop_oneof![3 => usual, 1 => odd_others()]
}

fn odd_others() -> impl Strategy<Value = Other> {
    let latencies = vec(proptest::option::of((times(), times())), 0..5);
    (latencies, hosts(), times(), any::<bool>(), 0_u32..4, 0_u64..100_000).prop_map(
        |(latencies, host, heard, arm, taking, kept)| {
            let base = other(&[]);
            let there = latencies.into_iter().map(|latency| {
                let (expected, deviation) = latency?;
                Some(godwit_policy::latency::Estimate { expected, deviation, ..estimate(0, 0) })
            });
            let mut facts = base.facts.clone();
            (facts.host, facts.heard, facts.taking) = (host, heard, taking);
            if arm {
                facts.instruction_set = InstructionSet::Arm64;
            }
            Other { facts, there: there.collect(), kept }
        },
    )
}

fn client_groups() -> impl Strategy<Value = Clients> {
    let usual = (1_u32..9, 5_u64..80).prop_map(|(count, ms)| clients(count, 20, Some(ms)));
    prop_oneof![4 => usual, 1 => odd_clients()]
}

fn odd_clients() -> impl Strategy<Value = Clients> {
    (any::<u32>(), numbers(), 1_u64..100_000, proptest::option::of(times())).prop_map(
        |(count, weight, target, here)| Clients {
            count,
            weight: Weight::clamped(weight),
            target: Target::new(Duration::from_micros(target)).unwrap(),
            here: here.map(|expected| godwit_policy::latency::Estimate { expected, ..estimate(0, 1) }),
        },
    )
}

/// A state in which a service may move soon, or one of a damaged file.
fn states() -> impl Strategy<Value = State> {
    let soon = vec(0.0_f64..20.0, 5).prop_map(|debts| State {
        armed: true,
        debts: (1..).map(NodeId).zip(debts).map(|(node, amount)| Debt { node, amount }).collect(),
        ..State::default()
    });
    prop_oneof![2 => soon, 1 => odd_states()]
}

fn odd_states() -> impl Strategy<Value = State> {
    let moment = || times().prop_map(Moment);
    let debts = vec((0_u32..6, numbers()), 0..6);
    let moves = vec((moment(), times(), times()), 0..8);
    let waits = vec((0_u32..6, moment(), times()), 0..3);
    (debts, moves, waits, any::<bool>(), proptest::option::of(moment())).prop_map(
        |(debts, moves, waits, armed, decided)| State {
            decided,
            over: decided,
            armed,
            debts: debts.into_iter().map(|(node, amount)| Debt { node: NodeId(node), amount }).collect(),
            moves: moves.into_iter().map(|(at, frozen, took)| Made { at, frozen, took }).collect(),
            waits: waits
                .into_iter()
                .map(|(node, since, length)| Wait { node: NodeId(node), since, length })
                .collect(),
        },
    )
}

fn worlds() -> impl Strategy<Value = World> {
    let nodes = vec(others(), 0..5);
    let dwell = prop_oneof![3 => (0_u64..4000).prop_map(Duration::from_secs), 1 => times()];
    let limit = prop_oneof![
        Just(None),
        (50_u64..500).prop_map(Duration::from_millis).prop_map(Some),
        times().prop_map(Some)
    ];
    let modes = prop_oneof![2 => Just([true; 4]), 1 => any::<[bool; 4]>()];
    let cause = prop_oneof![8 => Just(Cause::Watched), 1 => Just(Cause::Asked), 1 => Just(Cause::Draining)];
    let memory = prop_oneof![3 => 0_u64..1 << 30, 1 => 0_u64..1 << 33];
    (vec(client_groups(), 0..5), nodes, hosts(), dwell, cause, limit, modes, memory).prop_map(
        |(clients, others, host, dwell, cause, max_frozen, modes, memory)| {
            let mut world = World::example();
            (world.clients, world.others, world.host, world.cause) = (clients, others, host, cause);
            world.dwell = dwell;
            (world.allowed.max_frozen, world.usage.memory) = (max_frozen, memory);
            let [cold, precopy, postcopy, hybrid] = modes;
            let allowed = &mut world.allowed;
            (allowed.cold, allowed.precopy, allowed.postcopy, allowed.hybrid) =
                (cold, precopy, postcopy, hybrid);
            world
        },
    )
}

fn figures(node: &Assessment) -> Vec<f64> {
    let (losses, cost) = (&node.losses, &node.priced.cost);
    let all = [losses.clients, losses.worse, losses.residence, losses.unknown, node.delta, node.delta_worse];
    let costs =
        [cost.frozen, cost.degraded, cost.bytes, cost.cpu, cost.risk, node.gain, node.debt, node.worth()];
    [&all[..], &costs[..]].concat()
}

fn of_reason(reason: &Reason) -> Vec<f64> {
    match *reason {
        Reason::NotArmed { part, threshold, .. } => vec![part, threshold],
        Reason::NoBetter { delta } | Reason::Uncertain { delta } => vec![delta],
        Reason::TooLittle { gain, needed } => vec![gain, needed],
        Reason::Unpaid { suffered, needed, .. } => vec![suffered, needed],
        _ => vec![],
    }
}

/// Each number of a verdict.
fn numbers_of(verdict: &Verdict) -> Vec<f64> {
    let losses = &verdict.suffering.losses;
    let mut all =
        vec![verdict.suffering.weight, losses.clients, losses.worse, losses.residence, losses.unknown];
    all.extend(verdict.best.iter().flat_map(figures));
    if let Decision::Stay(reasons) = &verdict.decision {
        all.extend(reasons.iter().flat_map(of_reason));
    }
    for (_, other) in &verdict.others {
        if let NotChosen::Less { delta, worth } = other {
            all.extend([*delta, *worth]);
        }
    }
    all
}

proptest! {
    #[test]
    fn each_number_of_each_verdict_is_one_and_each_choice_keeps_all_constraints(
        world in worlds(),
        state in states(),
        moments in vec(times().prop_map(Moment), 1..4),
    ) {
        let mut state = state;
        for now in moments {
            let verdict = world.decide(&mut state, now);
            prop_assert!(numbers_of(&verdict).iter().all(|number| number.is_finite()), "{verdict:?}");
            let mut debts = state.debts.iter().map(|debt| debt.amount);
            prop_assert!(debts.all(|amount| amount.is_finite() && amount > 0.0), "{state:?}");
            let known = usize::from(verdict.best.is_some()) + verdict.others.len();
            prop_assert_eq!(known, world.others.len(), "each node has its place");
            let (to, then) = match &verdict.decision {
                Decision::Stay(reasons) => {
                    prop_assert!(!reasons.is_empty());
                    continue;
                }
                Decision::Move { to, then, .. } => (to, then),
            };
            prop_assert!(then.len() <= 2 && !then.contains(to));
            for node in then.iter().chain([to]) {
                let facts = &world.others[node.0 as usize - 1].facts;
                let mut refused = refusals(&world.needs, &world.usage, &world.host, facts);
                refused.retain(|refusal| world.cause.heeds(refusal));
                prop_assert_eq!(refused, vec![]);
                prop_assert_eq!(state.waits(*node, now), None);
            }
            let best = verdict.best.unwrap();
            prop_assert_eq!(best.node, *to);
            prop_assert!(world.allowed.max_frozen.is_none_or(|limit| best.priced.upper <= limit));
            prop_assert!(world.allowed.modes().any(|mode| mode == best.priced.mode));
            let cost = best.priced.cost.total();
            if world.cause != Cause::Draining {
                prop_assert!(best.delta > 0.0 && best.delta_worse > 0.0, "{best:?}");
                prop_assert!(best.gain >= 2.0 * cost, "{best:?}");
            }
            prop_assert!(world.cause != Cause::Watched || best.debt >= cost / 2.0, "{best:?}");
        }
    }

    #[test]
    fn the_longer_the_latency_here_the_sooner_a_service_leaves(
        latencies in vec((5_u64..60, 0_u64..40), 1..5),
        there in vec(5_u64..60, 5),
        dwell in 5_u64..300,
    ) {
        let mut near = World::example();
        near.dwell = Duration::from_secs(dwell);
        near.clients = latencies.iter().map(|(ms, _)| clients(1, 20, Some(*ms))).collect();
        let there: Vec<_> = there.into_iter().map(Some).collect();
        near.others = vec![other(&there)];
        let mut far = near.clone();
        far.clients = latencies.iter().map(|(ms, more)| clients(1, 20, Some(ms + more))).collect();
        let moves = |world: &World| {
            world.until_it_moves(&mut State::default(), 0, 40).map(|(second, _)| second)
        };
        if let Some(second) = moves(&near) {
            prop_assert!(moves(&far).is_some_and(|sooner| sooner <= second));
        }
        let delta = |world: &World| {
            world.decide(&mut State::default(), at(0)).best.map(|best| (best.delta, best.gain))
        };
        if let (Some(near), Some(far)) = (delta(&near), delta(&far)) {
            prop_assert!(near.0 <= far.0 + 1e-9 && near.1 <= far.1 + 1e-9);
        }
    }

    #[test]
    fn the_dearer_a_move_the_later_it_is_made(more in 0_u64..200_000, bandwidth in 1.0_f64..20.0) {
        let mut dear = World::example();
        dear.dwell = Duration::from_secs(3600);
        dear.rules.budgets.frozen = Duration::MAX;
        dear.allowed.max_frozen = None;
        dear.clients = vec![clients(1, 20, Some(25))];
        dear.others = vec![other(&[Some(10)])];
        let cheap = dear.clone();
        dear.pages += more;
        dear.link.bandwidth = Bandwidth::clamped(dear.link.bandwidth.get() / bandwidth);
        dear.writes = world::curve(0, dear.pages);
        let moves = |world: &World| {
            world.until_it_moves(&mut State::default(), 0, 200).map(|(second, _)| second)
        };
        let (soon, late) = (moves(&cheap).unwrap(), moves(&dear));
        prop_assert!(late.is_none_or(|late| soon <= late), "{soon} {late:?}");
    }
}
