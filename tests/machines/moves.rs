//! Services move between machines of different distributions, with their clients, and live through what happens to
//! machines.

use std::{
    net::Ipv4Addr,
    thread,
    time::{Duration, Instant},
};

use godwit_lab::workload::{Preset, RedisClient, Workload, resp::Reply};
use godwit_tests::{Bed, CLIENT, MODES};
use serde_json::Value;

use crate::machines;

const ADDRESS: Ipv4Addr = Ipv4Addr::new(10, 88, 0, 10);
/// How long a machine that is emulated on a busy host may take for what a real one does at once.
const PATIENCE: Duration = Duration::from_secs(240);
/// Data of the service.
const FILL: u64 = 16 << 20;

/// Puts what a service is made of where it is on the host.
fn send(bed: &Bed, node: &str, preset: &Preset) {
    bed.lab().send(node, &preset.rootfs, &preset.rootfs).unwrap_or_else(|error| panic!("{error}"));
}

fn wait_for<T>(what: &str, mut found: impl FnMut() -> Option<T>) -> T {
    let begun = Instant::now();
    loop {
        if let Some(found) = found() {
            return found;
        }
        assert!(begun.elapsed() < PATIENCE, "{what} did not happen within {PATIENCE:?}");
        thread::sleep(Duration::from_millis(200));
    }
}

/// Counts on, over one connection: nothing that was answered before may be missing.
fn count(client: &mut RedisClient, number: &mut i64) {
    for _ in 0..10 {
        *number += 1;
        let answer = client.call(&["INCR", "counter"]).unwrap();
        assert_eq!(answer, Reply::Integer(*number));
    }
}

/// Waits until a node sees both ready.
fn both_ready(bed: &Bed, node: &str) {
    wait_for(&format!("two ready nodes, as {node} sees them"), || {
        let said = bed.godwit(node, &["--json", "nodes"]);
        let nodes: Vec<Value> = serde_json::from_str(&said.stdout).ok()?;
        (nodes.iter().filter(|node| node["state"] == "ready").count() == 2).then_some(())
    });
}

#[test]
#[ignore = "boots virtual machines: make test-machines"]
fn redis_moves_between_debian_12_and_13_in_each_mode_with_its_client() {
    let bed = Bed::up_with("machines", |config| machines(config, &[("a", "debian12"), ("b", "debian13")]));
    let preset = bed.build(Workload::Redis);
    send(&bed, "a", &preset);
    bed.run("a", "redis", ADDRESS, &preset, &[]);
    let mut client = RedisClient::connect(bed.lab(), CLIENT, preset.at(ADDRESS), PATIENCE).unwrap();
    client.fill(FILL).unwrap();
    let mut number = 0;
    // They are five, so that each goes in both directions.
    for (turn, mode) in MODES.iter().chain(&MODES).enumerate() {
        let (from, to) = if turn % 2 == 0 { ("a", "b") } else { ("b", "a") };
        let report = bed.migrate_so("redis", from, to, &["--mode", mode]);
        println!(
            "{from} to {to}, {mode}: frozen {:.0} ms, {:.0} ms in all",
            report.frozen_ms, report.total_ms
        );
        count(&mut client, &mut number);
    }
    client.check_fill(FILL).unwrap();
}

#[test]
#[ignore = "boots virtual machines: make test-machines"]
fn a_node_that_loses_power_comes_back_and_takes_services_with_its_clock_an_hour_ahead() {
    let bed = Bed::up_with("power", |config| machines(config, &[("a", "debian12"), ("b", "debian13")]));
    let lab = bed.lab();
    let preset = bed.build(Workload::Redis);
    send(&bed, "a", &preset);
    bed.run("a", "redis", ADDRESS, &preset, &[]);
    let mut client = RedisClient::connect(lab, CLIENT, preset.at(ADDRESS), PATIENCE).unwrap();
    let mut number = 0;
    count(&mut client, &mut number);

    lab.cut_power("b").unwrap();
    assert!(lab.cut_power("b").unwrap_err().to_string().contains("it has none"));
    count(&mut client, &mut number);
    lab.power_on("b").unwrap();
    both_ready(&bed, "a");
    both_ready(&bed, "b");
    bed.migrate("redis", "a", "b");
    count(&mut client, &mut number);

    lab.shift_clock("b", 3600).unwrap();
    let date = lab.command("b", "date").unwrap().arg("+%s").output().unwrap();
    let there: i64 = String::from_utf8(date.stdout).unwrap().trim().parse().unwrap();
    let here = std::time::SystemTime::UNIX_EPOCH.elapsed().unwrap().as_secs().try_into().unwrap_or(0_i64);
    assert!((there - here - 3600).abs() < 60, "{there} there, {here} here");
    bed.migrate("redis", "b", "a");
    count(&mut client, &mut number);
}
