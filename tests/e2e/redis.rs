//! Redis: busy over one connection, with clients that wait inside it for an answer. Needs root.

use std::{
    net::Ipv4Addr,
    thread::{self, JoinHandle},
    time::Duration,
};

use godwit_lab::workload::{RedisClient, RedisLoad, Workload, resp::Reply};
use godwit_tests::{Bed, CLIENT, PATIENCE, tier, wait_for};

const ADDRESS: Ipv4Addr = Ipv4Addr::new(10, 88, 0, 10);
/// Data in it.
const FILL: u64 = 32 << 20;

fn bulk(text: &str) -> Reply {
    Reply::Bulk(Some(text.as_bytes().to_vec()))
}

/// How long a client waits inside Redis: longer than all the moves of a test take on any machine.
const ALL_MOVES: Duration = Duration::from_secs(1800);

/// A client that is blocked inside Redis until there is something in a list.
fn waiting(mut client: RedisClient, list: String) -> JoinHandle<(RedisClient, Reply)> {
    client.set_patience(ALL_MOVES).unwrap();
    thread::spawn(move || {
        let answer = client.call(&["BLPOP", &list, "0"]).unwrap();
        (client, answer)
    })
}

#[test]
fn moves_lose_no_answer_and_no_data() {
    let bed = Bed::up("redis");
    let preset = bed.build(Workload::Redis);
    bed.run("a", "redis", ADDRESS, &preset, &[]);
    let connect = || RedisClient::connect(bed.lab(), CLIENT, preset.at(ADDRESS), PATIENCE).unwrap();
    let mut data = connect();
    data.fill(FILL).unwrap();
    let load = RedisLoad::start(bed.lab(), CLIENT, preset.at(ADDRESS), 1000).unwrap();
    let mut blocked = Some(waiting(connect(), "list:1".to_owned()));
    // One more that waits over all the moves.
    let patient = waiting(connect(), "at the end".to_owned());
    let both_wait = |data: &mut RedisClient| {
        wait_for("both clients to wait in Redis", || {
            let Reply::Bulk(Some(info)) = data.call(&["INFO", "clients"]).unwrap() else { panic!() };
            String::from_utf8(info).unwrap().contains("blocked_clients:2\r\n").then_some(())
        });
    };
    both_wait(&mut data);

    let mut worst: f64 = 0.0;
    bed.move_to_and_fro("redis", |number, _| {
        let lap = load.lap().unwrap();
        assert!(lap.is_clean(), "move {number}: {lap:?}");
        worst = worst.max(lap.downtime_ms);
        let list = format!("list:{number}");
        assert_eq!(data.call(&["RPUSH", &list, "x"]).unwrap(), Reply::Integer(1));
        let (client, answer) = blocked.take().unwrap().join().unwrap();
        assert_eq!(answer, Reply::Array(Some(vec![bulk(&list), bulk("x")])), "move {number}");
        blocked = Some(waiting(client, format!("list:{}", number + 1)));
        both_wait(&mut data);
    });
    let report = load.stop().unwrap();
    assert!(report.is_clean() && report.reconnects == 0, "{report:?}");
    assert_eq!(report.sent, report.answered);
    println!("{} requests, the longest downtime {worst:.0} ms", report.sent);
    assert_eq!(data.call(&["RPUSH", "at the end", "x"]).unwrap(), Reply::Integer(1));
    assert_eq!(patient.join().unwrap().1, Reply::Array(Some(vec![bulk("at the end"), bulk("x")])));
    data.check_fill(FILL).unwrap();
    // Unblocked, so that the thread ends.
    data.call(&["RPUSH", &format!("list:{}", tier::moves() + 1), "x"]).unwrap();
    blocked.take().unwrap().join().unwrap();
}

#[test]
fn a_service_that_comes_back_sends_only_what_differs() {
    let bed = Bed::up("return");
    let preset = bed.build(Workload::Redis);
    bed.run("a", "redis", ADDRESS, &preset, &[]);
    let mut data = RedisClient::connect(bed.lab(), CLIENT, preset.at(ADDRESS), PATIENCE).unwrap();
    data.fill(2 * FILL).unwrap();
    for mode in ["precopy", "postcopy", "hybrid", "cold"] {
        let there = bed.migrate_so("redis", "a", "b", &["--mode", "precopy", "--compress", "off"]);
        let back = bed.migrate_so("redis", "b", "a", &["--mode", mode, "--compress", "off"]);
        println!("{mode}: {} bytes there, {} back", there.wire_bytes, back.wire_bytes);
        // Kernel state, which crosses each time, is 1.2 MB of this.
        assert!(back.wire_bytes < 2 * FILL / 10, "{mode}: {back:?}");
        assert!(back.memory_wire_bytes * 20 < back.page_bytes, "{mode}: {back:?}");
        data.check_fill(2 * FILL).unwrap();
    }
}

/// A share of so many bytes in a hundred more.
const FRAMING: u64 = 2;

#[test]
fn the_report_tells_memory_from_files_and_each_page_crosses_once() {
    let bed = Bed::up_with("bytes", |config| {
        // Else pages that a node kept would not cross at all.
        config.programs.serve_arguments.extend(["--retained-memory", "0"].map(str::to_owned));
    });
    let preset = bed.build(Workload::Redis);
    bed.run("a", "redis", ADDRESS, &preset, &[]);
    let mut data = RedisClient::connect(bed.lab(), CLIENT, preset.at(ADDRESS), PATIENCE).unwrap();
    data.fill(FILL).unwrap();
    for (number, mode) in ["cold", "precopy", "postcopy", "hybrid"].into_iter().enumerate() {
        let (from, to) = if number % 2 == 0 { ("a", "b") } else { ("b", "a") };
        let report = bed.migrate_so("redis", from, to, &["--mode", mode, "--compress", "off"]);
        println!("{mode}: {report:?}");
        // The root filesystem crosses at the first move to a node that lacks it, and never again.
        let files = report.file_bytes > 4 << 20;
        assert_eq!(files, number == 0, "{mode}: {report:?}");
        assert!(report.wire_bytes > report.memory_wire_bytes + report.file_bytes, "{mode}: {report:?}");
        assert!(report.page_bytes >= FILL, "{mode}: {report:?}");
        // A page that is waited for while it is under way crosses once more.
        let twice = report.faults * (4096 + 256);
        let most = report.page_bytes * (100 + FRAMING) / 100 + twice;
        assert!((FILL..most).contains(&report.memory_wire_bytes), "{mode}: {report:?}");
        data.check_fill(FILL).unwrap();
    }
}
