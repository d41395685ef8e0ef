//! A service that changes its instruction set between this host and a machine of arm64.

use std::time::Duration;

use godwit_isa_programs::catalogue::Kind;
use godwit_tests::{
    Bed,
    again::groups,
    ledger::{ADDRESS, Client, NAME, image},
};

use crate::{all_ready, machines};

/// How long an emulated processor may take to come to a poll.
const PARK: [&str; 2] = ["--max-park-ms", "60000"];

/// As the service tells its machine.
const SETS: [u64; 2] = [1, 2];

#[test]
#[ignore = "boots virtual machines: make test-machines"]
fn a_service_goes_to_arm64_and_back_in_every_mode_with_its_connection() {
    let bed = Bed::up_with("cross-arm64", |config| machines(config, &[("b", "arm64")]));
    all_ready(&bed, "a");
    let archive = image(&bed, "a");
    let archive = archive.to_str().unwrap();
    bed.done("a", &["run", "--name", NAME, "--ip", &ADDRESS.to_string(), "--image", archive]);
    let mut client = Client::connect(&bed);
    client.wait_up_to(Duration::from_secs(240));
    let mut asks = |machine: u64, when: &str| {
        for _ in 0..250 {
            assert_eq!(client.asks().unwrap_or_else(|error| panic!("{when}: {error}")), machine, "{when}");
        }
    };
    asks(SETS[0], "at first");
    for mode in ["precopy", "cold", "postcopy", "hybrid"] {
        for (from, to, machine) in [("a", "b", SETS[1]), ("b", "a", SETS[0])] {
            let report = bed.migrate_so(NAME, from, to, &[&["--mode", mode], &PARK[..]].concat());
            let set = if to == "b" { "aarch64" } else { std::env::consts::ARCH };
            assert_eq!(report.set, set, "{report:?}");
            println!(
                "{mode} to {set}: frozen {:.1} ms, rest {:.1}, rewriting {:.2}",
                report.frozen_ms, report.park_ms, report.rewrite_ms
            );
            asks(machine, &format!("{mode} to {to}"));
        }
    }
}

/// So many in all, to the machine and back.
const CROSSINGS: usize = 50;

#[test]
#[ignore = "boots virtual machines: make test-machines"]
fn programs_do_not_tell_that_they_went_to_arm64_and_back() {
    let bed = Bed::up_with("again-arm64", |config| machines(config, &[("b", "arm64")]));
    all_ready(&bed, "a");
    let groups = groups(&bed, &[Kind::Language, Kind::Threads, Kind::Signals]);
    let pairs = CROSSINGS.div_ceil(2 * groups.len());
    for group in groups {
        let archive = group.image(&bed, "a");
        bed.done("a", &["run", "--name", &group.name, "--image", archive.to_str().unwrap()]);
        group.goes_on(&bed, "a");
        for _ in 0..pairs {
            for (from, to) in [("a", "b"), ("b", "a")] {
                bed.migrate_so(&group.name, from, to, &PARK);
                group.is_right(&bed, to);
            }
        }
        group.goes_on(&bed, "a");
        bed.done("a", &["rm", "-f", &group.name]);
    }
}
