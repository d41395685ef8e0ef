//! `godwit policy`: a service follows its client from node to node, by itself. Needs root.

use std::time::Duration;

use godwit_tests::{Bed, wait_for_within};
use serde_json::Value;

use crate::place::{Client, NAME, far, start};

/// A service is armed after a second; nodes are asked, on a machine that other tests keep busy. After a move it
/// rests for ten times as long as that took.
const SOON: Duration = Duration::from_secs(120);

/// Three nodes that are `busy` in thousandths.
fn bed(lab: &str, busy: &str) -> Bed {
    Bed::up_with(lab, |config| {
        config.nodes.push("c".into());
        // Nodes of a lab share processors, which other tests keep busy.
        config.programs.serve_arguments.extend(["--busy-permille", busy].map(str::to_owned));
    })
}

fn policy(bed: &Bed, node: &str) -> Value {
    bed.json(node, &["policy", "show", NAME])
}

fn follows(bed: &Bed, node: &str, flags: &[&str]) {
    bed.done(node, &[&["policy", "set", NAME, "--follow-clients"], flags].concat());
}

/// Waits until a node has the service, with its client near.
fn comes(bed: &Bed, to: &str) {
    wait_for_within(SOON, &format!("the service on node {to}"), || {
        let shown = bed.godwit(to, &["--json", "inspect", NAME]);
        // While it moves no node may know it.
        let shown: Value = serde_json::from_str(&shown.stdout).ok()?;
        (shown["node"] == to).then_some(())
    });
}

/// What was decided last, once it is as it should be.
fn decided(bed: &Bed, node: &str, what: &str, right: impl Fn(&Value) -> bool) -> Value {
    wait_for_within(SOON, what, || Some(policy(bed, node)["last"].clone()).filter(|last| right(last)))
}

fn reasons(last: &Value) -> Vec<&str> {
    let all = last["reasons"].as_array().into_iter().flatten();
    all.filter_map(|why| why["kind"].as_object()?.keys().next().map(String::as_str)).collect()
}

#[test]
fn a_service_follows_its_client_from_node_to_node() {
    let bed = bed("follow", "100");
    start(&bed);
    let client = Client::of(&bed);
    // So much that what a busy machine adds to a client that is near does not matter.
    follows(&bed, "a", &["--latency", "100ms"]);
    decided(&bed, "a", "a client that is near", |last| {
        last["active"] == 1 && last["unmeasured"] == 0 && last["over"] == 0 && reasons(last) == ["not_armed"]
    });

    // The client comes to node b, and goes on to node c.
    for (from, to) in [("a", "b"), ("b", "c")] {
        for node in ["a", "b", "c"] {
            far(&bed, node, if node == to { 0 } else { 100 });
        }
        comes(&bed, to);
        // The source knows the end of the move a little later.
        let events = wait_for_within(SOON, "the end of the move", || {
            let events = bed.done(from, &["events"]);
            let is_end = |line: &str| line.contains("moved") && line.contains(&format!("to node {to}"));
            events.lines().any(is_end).then_some(events)
        });
        let is_decision = |line: &&str| line.contains("follows: to node");
        let decision = events.lines().find(is_decision).unwrap_or_else(|| panic!("{events}"));
        assert!(decision.contains(&format!("to node {to}: 1 of 1 clients")), "{decision}");
    }
    decided(&bed, "c", "a client that is near c", |last| {
        last["node"] == "c" && last["unmeasured"] == 0 && last["over"] == 0 && reasons(last) == ["not_armed"]
    });

    // What it was told goes along, and so does what it has done; users ask any node.
    bed.knows("a", NAME);
    let shown = policy(&bed, "a");
    assert_eq!(
        (shown["node"].as_str(), &shown["policy"]["latency_us"]),
        (Some("c"), &100_000.into()),
        "{shown}"
    );
    bed.lab().restart_node("c").unwrap();
    decided(&bed, "c", "a decision after godwitd's restart", |last| last["active"] == 1);
    bed.done("c", &["policy", "clear", NAME]);
    let cleared = policy(&bed, "c");
    assert!(cleared["policy"].is_null() && cleared["last"].is_null(), "{cleared}");
    assert!(client.leaves() > 100);
}

#[test]
fn a_service_for_which_no_node_is_better_stays_and_says_why() {
    let bed = bed("follow-none", "990");
    start(&bed);
    far(&bed, "a", 50);
    let client = Client::of(&bed);
    follows(&bed, "a", &["--latency", "30ms", "--max-frozen-ms", "500", "--allow", "postcopy"]);
    let last = decided(&bed, "a", "a service without a place", |last| {
        reasons(last) == ["no_candidate"] && last["others"].as_array().is_some_and(|others| others.len() == 2)
    });
    assert_eq!((&last["over"], &last["latency_us"]), (&1.into(), &30_000.into()), "{last}");
    for other in last["others"].as_array().unwrap() {
        assert!(other["refusals"][0]["kind"]["cpu"].is_object(), "{last}");
    }
    let said = bed.done("a", &["policy", "show", NAME]);
    assert!(
        said.contains("30.0 ms") && said.contains("500 ms") && said.contains("no other node can take it"),
        "{said}"
    );
    // It is an event once no node is left to be asked.
    let events = wait_for_within(SOON, "the event of the decision", || {
        let events = bed.done("a", &["events"]);
        let is_said = |line: &str| line.contains("stays") && line.contains("no other node");
        events.lines().any(is_said).then_some(events)
    });
    // Nothing was asked for that would have frozen it.
    assert!(!events.contains("migration"), "{events}");
    assert!(client.leaves() > 10);
    let said = bed.godwit("a", &["policy", "show", "nobody"]);
    assert!(said.code == 1 && said.stderr.contains("nobody"), "{said:?}");
}
