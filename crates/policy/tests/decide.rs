//! When a service moves, where to, and what an explanation has of it.

#![allow(clippy::unwrap_used)]

mod world;

use std::time::Duration;

use godwit_policy::Mode;
use godwit_policy::assess::Cause;
use godwit_policy::constraint::{InstructionSet, Refusal};
use godwit_policy::decide::{Decision, Other, Reason};
use godwit_policy::quantity::Share;
use godwit_policy::state::{Made, NodeId, State};
use world::{World, at, clients, other};

fn reasons(decision: &Decision) -> &[Reason] {
    match decision {
        Decision::Stay(reasons) => reasons,
        Decision::Move { .. } => &[],
    }
}

/// What rules out the first of these.
fn refused(others: &[(NodeId, Other)]) -> &[Refusal] {
    match others.first() {
        Some((_, Other::Refused(refusals))) => refusals,
        _ => &[],
    }
}

fn near(found: f64, wanted: f64, by: f64) -> bool {
    (found - wanted).abs() <= by
}

/// Armed, and each node has been paid for.
fn ready(world: &World) -> State {
    let mut state = State::default();
    let rested = World { dwell: Duration::ZERO, ..world.clone() };
    assert_eq!(rested.until_it_moves(&mut state, 0, 60), None, "it gains nothing yet");
    state
}

fn made(second: u64, frozen: u64, took: u64) -> Made {
    let [frozen, took] = [frozen, took].map(Duration::from_millis);
    Made { at: at(second), frozen, took }
}

#[test]
fn the_example_of_the_design_is_explained_with_all_of_its_figures() {
    let mut world = World::example();
    let arm = other(&[Some(11); 4]);
    world.others.push(arm);
    world.others[1].facts.instruction_set = InstructionSet::Arm64;
    world.others.push(other(&[Some(12); 4]));
    world.others[2].facts.host.free = 200 << 20;
    world.others.push(other(&[Some(25); 4]));
    let mut state = State::default();
    let first = world.decide(&mut state, at(100));
    let [Reason::NotArmed { part, left, .. }, Reason::Unpaid { .. }] = *reasons(&first.decision) else {
        panic!("{first:?}");
    };
    assert!(near(part, 1.15 / 4.0, 1e-9) && left == Some(Duration::from_secs(1)));
    for second in 101..103 {
        let _ = world.decide(&mut state, at(second));
    }
    // Two seconds of Δ have been lost by now, more than the move's cost halved.
    let verdict = world.decide(&mut state, at(103));
    let suffering = &verdict.suffering;
    assert_eq!((suffering.active, suffering.unmeasured, suffering.over.len()), (4, 0, 3));
    let over: Vec<_> = suffering.over.iter().map(|over| over.here.expected.as_millis()).collect();
    assert_eq!(over, [31, 28, 24]);
    assert!(near(suffering.losses.clients, 1.15, 1e-9));
    let best = verdict.best.as_ref().unwrap();
    let there = best.there[0].unwrap();
    let range = [there.better(), there.expected, there.worse()].map(|time| time.as_millis());
    assert_eq!((best.node, range), (NodeId(1), [9, 12, 15]));
    let forecast = &best.priced.forecast;
    assert_eq!((best.priced.mode, forecast.rounds), (Mode::Precopy, 2), "{forecast:?}");
    assert!(near(forecast.total.as_secs_f64(), 3.0, 0.2), "{forecast:?}");
    assert!(near(forecast.frozen.as_secs_f64(), 0.11, 0.02), "{forecast:?}");
    assert!(best.priced.upper > forecast.frozen && best.priced.upper < Duration::from_millis(200));
    assert!(near(best.priced.cost.total(), 3.3, 0.2), "{:?}", best.priced.cost);
    assert!(near(best.gain, 43.0, 1.0), "{best:?}");
    assert!(near(best.debt, 3.0 * best.delta, 1e-9));
    assert_eq!(verdict.decision, Decision::Move { to: NodeId(1), mode: Mode::Precopy, then: vec![] });
    let [(arm, Other::Refused(isa)), (full, Other::Refused(memory)), (far, less)] = &verdict.others[..]
    else {
        panic!("{:?}", verdict.others);
    };
    assert_eq!((*arm, *full, *far), (NodeId(2), NodeId(3), NodeId(4)));
    assert!(matches!(isa[..], [Refusal::InstructionSet { has: InstructionSet::Arm64, .. }]), "{isa:?}");
    let (free, needed) = (200 << 20, 296_432_436);
    assert_eq!(memory[..], [Refusal::Memory { free, needed }]);
    assert!(matches!(less, Other::Less { worth, .. } if *worth < best.worth()), "{less:?}");
}

#[test]
fn a_move_waits_until_half_of_it_is_paid_for() {
    // One client at 24 ms loses 0.2 in a second, of a cost of some 2.9.
    let mut world = World::example();
    world.clients = vec![clients(1, 20, Some(24))];
    world.others = vec![other(&[Some(12)])];
    world.dwell = Duration::from_secs(120);
    let mut state = State::default();
    let (second, verdict) = world.until_it_moves(&mut state, 0, 60).unwrap();
    let best = verdict.best.unwrap();
    assert!(best.debt >= best.priced.cost.total() / 2.0);
    let needed = best.priced.cost.total() / 2.0 / best.delta;
    assert!(near(second as f64, needed, 1.0), "{second} {needed}");
    let earlier = world.decide(&mut State::default(), at(0));
    let Some(Reason::Unpaid { suffered, left, .. }) = reasons(&earlier.decision).last() else {
        panic!("{earlier:?}");
    };
    assert!(*suffered == 0.0 && near(left.as_secs_f64(), needed, 0.1));
}

#[test]
fn clients_that_are_content_or_silent_move_nothing() {
    let mut world = World::example();
    world.clients = [9, 19, 12, 20].map(|ms| clients(1, 20, Some(ms))).to_vec();
    let verdict = world.decide(&mut State::default(), at(0));
    assert!(matches!(reasons(&verdict.decision)[0], Reason::NotArmed { left: None, .. }), "{verdict:?}");
    world.clients = vec![clients(0, 20, Some(50))];
    let verdict = world.decide(&mut State::default(), at(0));
    assert_eq!(reasons(&verdict.decision)[0], Reason::NoClients);
    world.others = vec![];
    let alone = world.decide(&mut State::default(), at(0));
    assert_eq!((reasons(&alone.decision)[1], alone.best), (Reason::NoCandidate, None));
}

#[test]
fn a_node_that_is_no_better_or_only_perhaps_better_is_not_taken() {
    let mut world = World::example();
    world.others = vec![other(&[Some(31), Some(29), Some(25), Some(9)])];
    let verdict = world.decide(&mut State::default(), at(0));
    assert!(
        matches!(reasons(&verdict.decision)[1], Reason::NoBetter { delta } if delta < 0.0),
        "{verdict:?}"
    );
    // 3 ms each: one deviation is more than what is gained.
    world.others = vec![other(&[Some(29), Some(27), Some(23), Some(9)])];
    let state = &mut ready(&world);
    let verdict = World { dwell: Duration::from_secs(900), ..world }.decide(state, at(60));
    assert!(
        matches!(reasons(&verdict.decision), [Reason::Uncertain { delta }] if *delta < 0.0),
        "{verdict:?}"
    );
}

#[test]
fn a_move_for_a_client_that_will_be_gone_is_not_made() {
    let world = World::example();
    let state = &mut ready(&world);
    let brief = World { dwell: Duration::from_secs(5), ..world }.decide(state, at(60));
    assert!(
        matches!(reasons(&brief.decision), [Reason::TooLittle { gain, needed }] if gain < needed),
        "{brief:?}"
    );
}

#[test]
fn a_client_whose_latency_is_unknown_there_counts_as_lost_and_one_unknown_here_has_no_say() {
    let mut world = World::example();
    world.others = vec![other(&[Some(12), Some(12), None, None])];
    let verdict = world.decide(&mut State::default(), at(0));
    let best = verdict.best.unwrap();
    assert!(near(best.losses.unknown, 2.0, 1e-9) && near(best.losses.clients, 2.0, 1e-9) && best.delta < 0.0);
    world.clients[2].here = None;
    world.clients[3].here = None;
    let verdict = world.decide(&mut State::default(), at(0));
    assert!(near(verdict.best.unwrap().delta, 0.95, 1e-3));
    assert_eq!(verdict.suffering.unmeasured, 2);
}

#[test]
fn the_best_of_several_is_taken_and_the_next_two_are_tried_after_it() {
    let mut world = World::example();
    world.others = [22, 12, 23, 21, 24].map(|ms| other(&[Some(ms), Some(ms), Some(ms), Some(9)])).to_vec();
    let state = &mut ready(&world);
    let verdict = world.decide(state, at(60));
    let then = vec![NodeId(4), NodeId(1)];
    assert_eq!(verdict.decision, Decision::Move { to: NodeId(2), mode: Mode::Precopy, then });
    // Pages that a node kept make a move cheaper, and of nodes that are alike this one is taken.
    world.others[3] = other(&[Some(12); 4]);
    world.others[3].kept = 60_000;
    let verdict = world.decide(&mut ready(&world), at(60));
    assert!(matches!(verdict.decision, Decision::Move { to: NodeId(4), .. }), "{:?}", verdict.decision);
}

#[test]
fn budgets_hold_a_service_back() {
    let world = World::example();
    let with = |made: &[Made]| {
        let mut state = State { moves: made.to_vec(), ..ready(&world) };
        reasons(&world.decide(&mut state, at(3700)).decision).to_vec()
    };
    assert_eq!(with(&[]), []);
    let six: Vec<_> = (0..6).map(|n| made(200 + n * 10, 1, 1)).collect();
    let left = Duration::from_secs(100);
    assert_eq!(with(&six), [Reason::Moves { made: 6, most: 6, left }]);
    let seven: Vec<_> = (0..7).map(|n| made(200 + n * 10, 1, 1)).collect();
    let left = Duration::from_secs(110);
    assert_eq!(with(&seven), [Reason::Moves { made: 7, most: 6, left }], "two have to be over");
    let frozen = with(&[made(200, 3500, 1)]);
    assert!(
        matches!(frozen[..], [Reason::Frozen { spent, .. }] if spent == Duration::from_millis(3500)),
        "{frozen:?}"
    );
    let lately = with(&[made(3600, 1, 15_000)]);
    assert_eq!(lately, [Reason::Rests { left: Duration::from_secs(50) }]);
    assert_eq!(with(&[made(50, 3600, 15_000)]), [], "more than an hour ago");
    let sending = World { sending: 1, ..world.clone() }.decide(&mut ready(&world), at(60));
    assert_eq!(reasons(&sending.decision), [Reason::Sending { now: 1, most: 1 }]);
}

#[test]
fn a_destination_at_which_a_move_was_given_up_waits_and_another_is_taken() {
    let mut world = World::example();
    world.others.push(other(&[Some(14); 4]));
    let mut state = State::default();
    state.kept(NodeId(1), at(0));
    let (second, verdict) = world.until_it_moves(&mut state, 0, 50).unwrap();
    assert!(matches!(verdict.decision, Decision::Move { to: NodeId(2), .. }));
    let left = Duration::from_secs(60 - second);
    assert_eq!(verdict.others, [(NodeId(1), Other::Refused(vec![Refusal::Waits { left }]))]);
}

#[test]
fn a_node_that_is_to_become_empty_sends_its_services_at_once_to_where_they_lose_least() {
    let mut world = World { cause: Cause::Draining, dwell: Duration::from_secs(40), ..World::example() };
    world.clients = vec![clients(1, 20, Some(10))];
    world.others = [30, 25, 38].map(|ms| other(&[Some(ms)])).to_vec();
    let mut state = State { moves: vec![made(0, 3600, 100_000); 6], ..State::default() };
    let verdict = world.decide(&mut state, at(1));
    let then = vec![NodeId(1), NodeId(3)];
    assert_eq!(verdict.decision, Decision::Move { to: NodeId(2), mode: Mode::Precopy, then });
    assert!(verdict.best.unwrap().delta < 0.0);
    for other in &mut world.others {
        other.facts.host.load = Share::new(0.95).unwrap();
    }
    let busy = world.decide(&mut state, at(1));
    assert!(
        matches!(busy.decision, Decision::Move { to: NodeId(2), .. }),
        "busy is better than none: {busy:?}"
    );
    world.cause = Cause::Asked;
    assert_eq!(world.decide(&mut state, at(1)).decision, Decision::Stay(vec![Reason::NoCandidate]));
    world.cause = Cause::Draining;
    for other in &mut world.others {
        other.facts.heard = Duration::from_secs(6);
    }
    let nowhere = world.decide(&mut state, at(2));
    assert_eq!(nowhere.decision, Decision::Stay(vec![Reason::NoCandidate]));
}

#[test]
fn a_service_whose_user_asks_moves_at_once_where_that_pays() {
    let mut world = World { cause: Cause::Asked, ..World::example() };
    // It has moved often, a moment ago.
    let mut state = State { moves: vec![made(0, 3600, 100_000); 6], ..State::default() };
    let verdict = world.decide(&mut state, at(1));
    assert!(matches!(verdict.decision, Decision::Move { to: NodeId(1), .. }), "{verdict:?}");
    world.dwell = Duration::from_secs(2);
    let short = world.decide(&mut state, at(2));
    assert!(matches!(reasons(&short.decision), [Reason::TooLittle { .. }]), "{short:?}");
    world.others = vec![other(&[Some(200); 4])];
    let far = world.decide(&mut state, at(3));
    assert!(matches!(reasons(&far.decision), [Reason::NoBetter { .. }]), "{far:?}");
    world.clients.clear();
    let alone = world.decide(&mut state, at(4));
    assert_eq!(reasons(&alone.decision), [Reason::NoClients]);
}

#[test]
fn a_fast_writer_moves_with_its_pages_after_it_and_stays_where_that_is_not_allowed() {
    let mut world = World::example();
    world.writes = world::curve(60_000, world.pages);
    world.allowed.max_frozen = Some(Duration::from_millis(250));
    // Few of its requests meet a page that is missing.
    let requests = godwit_policy::degradation::Requests {
        rate: godwit_policy::quantity::RequestRate::new(20.0).unwrap(),
        time: Duration::from_millis(1),
        threads: 1,
        misses: godwit_policy::quantity::PagesMet::new(1.3).unwrap(),
    };
    world.behaviour.requests = Some(requests);
    let (_, verdict) = world.until_it_moves(&mut State::default(), 0, 60).unwrap();
    assert!(
        matches!(verdict.decision, Decision::Move { mode: Mode::Postcopy | Mode::Hybrid, .. }),
        "{verdict:?}"
    );
    (world.allowed.postcopy, world.allowed.hybrid) = (false, false);
    let verdict = world.decide(&mut State::default(), at(0));
    assert!(matches!(refused(&verdict.others), [Refusal::Frozen { .. }]), "{verdict:?}");
}

#[test]
fn a_slow_node_is_no_place_for_a_service_that_computes() {
    let mut world = World::example();
    world.usage.request = Some(Duration::from_millis(6));
    world.others[0].facts.host.speed = godwit_policy::quantity::Speed::new(0.25).unwrap();
    let verdict = world.decide(&mut State::default(), at(0));
    // 12 ms of path and 24 ms of work.
    let best = verdict.best.unwrap();
    assert!(near(best.losses.clients, 4.0 * 0.8, 1e-9) && best.delta < 0.0, "{best:?}");
    world.others[0].facts.host.load = Share::new(0.9).unwrap();
    let verdict = world.decide(&mut State::default(), at(0));
    assert!(matches!(refused(&verdict.others), [Refusal::Cpu { .. }]), "{verdict:?}");
}
