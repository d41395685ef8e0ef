//! How long a decision takes among ten thousand nodes: all are gone through, and the best get the full model.

#![allow(clippy::unwrap_used)]

#[path = "../tests/world/mod.rs"]
mod world;

use std::hint::black_box;
use std::time::Duration;

use criterion::{Criterion, criterion_group, criterion_main};
use godwit_policy::fleet::{BEST, Fleet, Property, Query, ZONES, Zone};
use godwit_policy::loss::Prices;
use godwit_policy::quantity::{Share, Speed};
use godwit_policy::state::{NodeId, State};
use world::{World, at, clients, host, other};

const NODES: u32 = 10_000;

/// Numbers that differ, the same in each run.
fn noise(seed: &mut u64) -> u64 {
    *seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
    *seed >> 33
}

fn fleet() -> Fleet {
    let (mut fleet, seed) = (Fleet::new(NODES, ZONES, 8), &mut 1);
    for node in (0..NODES).map(NodeId) {
        let load = Share::clamped((noise(seed) % 100) as f64 / 100.0);
        fleet.set_host(node, &godwit_policy::loss::Host { load, ..host() }, at(100));
        for zone in 0..ZONES {
            fleet.set_latency(zone, node, Some(Duration::from_micros(1000 + noise(seed) % 60_000)));
        }
        for property in 0..8 {
            fleet.set_property(Property(property), node, !noise(seed).is_multiple_of(16));
        }
    }
    fleet
}

fn place(criterion: &mut Criterion) {
    let fleet = fleet();
    let mut world = World::example();
    world.clients = (0..64).map(|zone| clients(1, 20, Some(20 + zone % 20))).collect();
    world.others = (0..16).map(|node| other(&[Some(10 + node); 64])).collect();
    let zones: Vec<_> = world
        .clients
        .iter()
        .enumerate()
        .map(|(row, clients)| Zone { row, weight: clients.weight, target: clients.target })
        .collect();
    let all: Vec<_> = (0..6).map(Property).collect();
    let query = Query {
        node: NodeId(0),
        speed: Speed::REFERENCE,
        usage: world.usage,
        prices: Prices::default(),
        zones: &zones,
        all: &all,
        any: &[Property(6), Property(7)],
        now: at(101),
    };
    assert_eq!(fleet.find(&query).best.len(), BEST);

    criterion.bench_function("10,000 nodes: find 16", |bench| {
        bench.iter(|| fleet.find(black_box(&query)));
    });
    criterion.bench_function("16 nodes: full model", |bench| {
        let mut state = State::default();
        bench.iter(|| world.decide(&mut state, black_box(at(100))));
    });
    criterion.bench_function("10,000 nodes: both", |bench| {
        let mut state = State::default();
        bench.iter(|| (fleet.find(black_box(&query)), world.decide(&mut state, black_box(at(100)))));
    });
}

criterion_group!(benches, place);
criterion_main!(benches);
