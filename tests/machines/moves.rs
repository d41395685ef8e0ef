//! Services live through what happens to machines. What moves between which machines is in matrix.rs.

use std::net::Ipv4Addr;

use std::process::{Command, Output};

use godwit_lab::workload::{RedisClient, Workload, resp::Reply};
use godwit_tests::{Bed, CLIENT, programs};

use crate::{PATIENCE, all_ready, machines, send};

const ADDRESS: Ipv4Addr = Ipv4Addr::new(10, 88, 0, 10);

/// Counts on, over one connection: nothing that was answered before may be missing.
fn count(client: &mut RedisClient, number: &mut i64) {
    for _ in 0..10 {
        *number += 1;
        let answer = client.call(&["INCR", "counter"]).unwrap();
        assert_eq!(answer, Reply::Integer(*number));
    }
}

/// `godwit lab` with these words, as a user types them.
fn lab(bed: &Bed, words: &[&str]) -> Output {
    let mut command = Command::new(programs().join("godwit"));
    command.args(["--lab", bed.lab().name(), "lab"]).args(words).output().unwrap()
}

/// The same, which must succeed; what it printed.
fn done(bed: &Bed, words: &[&str]) -> String {
    let output = lab(bed, words);
    assert!(output.status.success(), "{words:?}: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap()
}

#[test]
#[ignore = "boots virtual machines: make test-machines"]
fn a_node_that_loses_power_comes_back_and_takes_services_with_its_clock_an_hour_ahead() {
    let bed = Bed::up_with("power", |config| machines(config, &[("a", "debian12"), ("b", "debian13")]));
    let preset = bed.build(Workload::Redis);
    send(&bed, "a", &preset);
    bed.run("a", "redis", ADDRESS, &preset, &[]);
    let mut client = RedisClient::connect(bed.lab(), CLIENT, preset.at(ADDRESS), PATIENCE).unwrap();
    let mut number = 0;
    count(&mut client, &mut number);

    assert_eq!(done(&bed, &["power", "b", "cut"]), "b has no power\n");
    assert!(String::from_utf8_lossy(&lab(&bed, &["power", "b", "cut"]).stderr).contains("it has none"));
    count(&mut client, &mut number);
    assert_eq!(done(&bed, &["power", "b", "on"]), "b has booted and answers\n");
    all_ready(&bed, "a");
    all_ready(&bed, "b");
    bed.migrate("redis", "a", "b");
    count(&mut client, &mut number);

    done(&bed, &["clock", "b", "+1h"]);
    let there: i64 = done(&bed, &["exec", "b", "--", "date", "+%s"]).trim().parse().unwrap();
    let here = std::time::SystemTime::UNIX_EPOCH.elapsed().unwrap().as_secs().try_into().unwrap_or(0_i64);
    assert!((there - here - 3600).abs() < 60, "{there} there, {here} here");
    bed.migrate("redis", "b", "a");
    count(&mut client, &mut number);

    let booted = || done(&bed, &["exec", "b", "--", "cat", "/proc/sys/kernel/random/boot_id"]);
    let before = booted();
    done(&bed, &["power", "b", "reset"]);
    assert_ne!(booted(), before, "it has not booted");
    all_ready(&bed, "a");
    count(&mut client, &mut number);
}
