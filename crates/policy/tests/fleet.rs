//! The best of all nodes are found, and those that are ruled out are not among them.

#![allow(clippy::unwrap_used)]

use std::time::Duration;

use godwit_policy::fleet::{BEST, Fleet, Property, Query, Zone};
use godwit_policy::loss::{Host, Prices, Target, Usage, lost};
use godwit_policy::quantity::{Cores, Moment, Share, Speed, Weight};
use godwit_policy::state::NodeId;
use proptest::collection::vec;
use proptest::prelude::*;

const X86: Property = Property(0);
const ARM: Property = Property(1);
const NOW: Moment = Moment(Duration::from_secs(100));

fn host(load: f64, free: u64) -> Host {
    Host {
        cores: Cores::new(4.0).unwrap(),
        speed: Speed::REFERENCE,
        load: Share::new(load).unwrap(),
        memory: 8 << 30,
        free,
    }
}

fn zone(row: usize) -> Zone {
    let target = Target::new(Duration::from_millis(20)).unwrap();
    Zone { row, weight: Weight::new(2.0).unwrap(), target }
}

fn query(zones: &[Zone]) -> Query<'_> {
    let usage = Usage { cores: Cores::new(1.0).unwrap(), memory: 1 << 20, request: None };
    Query {
        node: NodeId(0),
        speed: Speed::REFERENCE,
        usage,
        prices: Prices::default(),
        zones,
        all: &[],
        any: &[X86],
        now: NOW,
    }
}

/// Nodes with these latencies of one zone, all alike.
fn fleet(ms: &[u64]) -> Fleet {
    let mut fleet = Fleet::new(u32::try_from(ms.len()).unwrap(), 1, 2);
    for (node, ms) in (0..).map(NodeId).zip(ms) {
        assert!(fleet.set_latency(0, node, Some(Duration::from_millis(*ms))));
        assert!(fleet.set_property(X86, node, true) && fleet.set_host(node, &host(0.2, 4 << 30), NOW));
    }
    fleet
}

fn nodes(found: &[(NodeId, f32)]) -> Vec<u32> {
    found.iter().map(|(node, _)| node.0).collect()
}

#[test]
fn the_best_are_those_that_lose_least_and_the_rest_is_counted() {
    let ms: Vec<u64> = (0..100).map(|node| 40 - node % 40).collect();
    let found = fleet(&ms).find(&query(&[zone(0)]));
    assert_eq!((found.best.len(), found.more, found.ruled_out), (BEST, 83, 0));
    // All below the target are alike.
    assert!(found.best.iter().all(|(node, loss)| ms[node.0 as usize] <= 20 && *loss < 0.01), "{found:?}");
    let ms = [1, 30, 28, 26, 22];
    assert_eq!(nodes(&fleet(&ms).find(&query(&[zone(0)])).best), [4, 3, 2, 1], "not where it is");
}

#[test]
fn a_node_that_is_ruled_out_is_not_among_them_but_named() {
    let mut fleet = fleet(&[50, 30, 28, 26, 24, 22, 21]);
    assert!(fleet.set_property(X86, NodeId(6), false) && fleet.set_property(ARM, NodeId(6), true));
    fleet.set_host(NodeId(5), &host(0.2, 1 << 20), NOW);
    fleet.set_host(NodeId(4), &host(0.7, 4 << 30), NOW);
    fleet.set_host(NodeId(3), &host(0.2, 4 << 30), Moment(Duration::from_millis(94_999)));
    let found = fleet.find(&query(&[zone(0)]));
    assert_eq!((nodes(&found.best), nodes(&found.refused)), (vec![2, 1], vec![6, 5, 4, 3]));
    assert_eq!((found.more, found.ruled_out), (0, 4));
    let both = Query { any: &[X86, ARM], ..query(&[]) };
    assert!(nodes(&fleet.find(&both).best).contains(&6));
    let unheard = Query { all: &[Property(9)], ..query(&[]) };
    assert!(fleet.find(&unheard).best.is_empty(), "a property that no node can have");
}

#[test]
fn a_node_of_which_nothing_is_known_is_ruled_out() {
    let found = Fleet::new(70, 64, 1).find(&Query { any: &[], ..query(&[zone(0), zone(70)]) });
    assert_eq!((found.best.len(), found.ruled_out), (0, 69));
    let mut fleet = Fleet::new(1, 1, 1);
    assert!(!fleet.set_latency(1, NodeId(0), None) && !fleet.set_latency(0, NodeId(1), None));
    assert!(!fleet.set_property(ARM, NodeId(0), true) && !fleet.set_host(NodeId(1), &host(0.0, 0), NOW));
    assert!(!fleet.set_latency(usize::MAX, NodeId(0), None));
}

proptest! {
    #[test]
    fn what_is_lost_there_is_what_the_full_model_says(
        ms in vec(0_u64..100, 2..40),
        (load, request) in (0.0_f64..0.6, 0_u64..20),
    ) {
        let mut fleet = fleet(&ms);
        let host = host(load, 4 << 30);
        for node in (0..).map(NodeId).take(ms.len()) {
            fleet.set_host(node, &host, NOW);
        }
        let zones = [zone(0)];
        let base = query(&zones);
        let usage = Usage { request: Some(Duration::from_millis(request)), ..base.usage };
        for (node, loss) in fleet.find(&Query { usage, ..base }).best {
            let latency = Duration::from_millis(ms[node.0 as usize] + request);
            let by_clients = lost(zones[0].weight, zones[0].target, latency);
            let wanted = by_clients + host.residence_with(&usage, &base.prices);
            prop_assert!((f64::from(loss) - wanted).abs() < 1e-4, "{node:?}: {loss} {wanted}");
        }
    }

    #[test]
    fn nothing_that_is_set_makes_a_loss_that_is_no_number(
        (latency, load, free) in (any::<u64>(), any::<f64>(), any::<u64>()),
        (cores, speed, weight) in (any::<f64>(), any::<f64>(), any::<f64>()),
    ) {
        let mut fleet = fleet(&[1, 2, 3]);
        fleet.set_latency(0, NodeId(1), Some(Duration::from_nanos(latency)));
        fleet.set_latency(0, NodeId(2), None);
        let host = Host {
            cores: Cores::clamped(cores),
            speed: Speed::clamped(speed),
            load: Share::clamped(load),
            memory: latency,
            free,
        };
        fleet.set_host(NodeId(1), &host, Moment(Duration::MAX));
        let zones = [Zone { weight: Weight::clamped(weight), ..zone(0) }];
        let usage = Usage { cores: Cores::clamped(cores), memory: free, request: Some(Duration::MAX) };
        let found = fleet.find(&Query { usage, ..query(&zones) });
        let all = found.best.iter().chain(&found.refused);
        prop_assert!(all.into_iter().all(|(_, loss)| loss.is_finite() && *loss >= 0.0), "{found:?}");
    }
}
