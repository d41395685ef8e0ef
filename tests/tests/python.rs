//! A Python program with threads, timers, sockets, pipes, locks and processes that checks itself.
//! Needs root.
#![allow(clippy::unwrap_used)]

use std::{
    fs,
    io::{BufRead, BufReader, Write},
    net::{Ipv4Addr, SocketAddrV4, TcpStream},
};

use godwit_lab::workload::Workload;
use godwit_tests::Bed;
use serde_json::{Value, json};

const ADDRESS: Ipv4Addr = Ipv4Addr::new(10, 88, 0, 50);
const PORT: u16 = 7000;

fn ask(connection: &mut BufReader<TcpStream>, request: &str) -> Value {
    connection.get_mut().write_all(format!("{request}\n").as_bytes()).unwrap();
    let mut line = String::new();
    connection.read_line(&mut line).unwrap();
    serde_json::from_str(&line).unwrap_or_else(|error| panic!("{request}: {error}: {line:?}"))
}

#[test]
fn ten_moves_stop_no_activity_of_a_program() {
    let bed = Bed::up("python");
    let preset = bed.build(Workload::Python);
    fs::write(preset.rootfs.join("program.py"), include_str!("../programs/busy.py")).unwrap();
    bed.run("a", "busy", ADDRESS, &preset, &[]);
    let mut connection = BufReader::new(bed.connect(SocketAddrV4::new(ADDRESS, PORT)));
    let mut rounds = 0;
    let mut check = |when: String, connection: &mut BufReader<TcpStream>| {
        let answer = ask(connection, "check");
        assert_eq!((&answer["slow"], &answer["problems"]), (&json!([]), &json!([])), "{when}: {answer}");
        rounds = answer["rounds"].as_u64().unwrap();
    };
    check("before".to_owned(), &mut connection);
    bed.ten_moves("busy", |number, _| check(format!("move {number}"), &mut connection));
    let end = ask(&mut connection, "end");
    assert_eq!((&end["problems"], &end["pid"]), (&json!([]), &json!(1)), "{end}");
    println!("{rounds} rounds of activities, {} threads", end["threads"]);
    let log = bed.godwit("a", &["logs", "busy"]);
    assert_eq!((log.stdout.as_str(), log.stderr.as_str()), ("ready\n", ""));
}
