//! Services move between machines of different distributions, with their clients, and live through what happens to
//! machines.

use std::net::Ipv4Addr;

use godwit_lab::workload::{RedisClient, Workload, resp::Reply};
use godwit_tests::{Bed, CLIENT, MODES};

use crate::{PATIENCE, both_ready, machines, send};

const ADDRESS: Ipv4Addr = Ipv4Addr::new(10, 88, 0, 10);
/// Data of the service.
const FILL: u64 = 16 << 20;

/// Counts on, over one connection: nothing that was answered before may be missing.
fn count(client: &mut RedisClient, number: &mut i64) {
    for _ in 0..10 {
        *number += 1;
        let answer = client.call(&["INCR", "counter"]).unwrap();
        assert_eq!(answer, Reply::Integer(*number));
    }
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
