//! A Python program with threads, timers, sockets, pipes, locks and processes that checks itself.
//! Needs root.

use std::{
    fs,
    io::{BufRead, BufReader, Write},
    net::{Ipv4Addr, SocketAddrV4, TcpStream},
};

use godwit_lab::workload::Workload;
use godwit_tests::{Bed, wait_for};
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
fn moves_stop_no_activity_of_a_program() {
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
    bed.move_to_and_fro("busy", |number, _| check(format!("move {number}"), &mut connection));
    let end = ask(&mut connection, "end");
    assert_eq!((&end["problems"], &end["pid"]), (&json!([]), &json!(1)), "{end}");
    println!("{rounds} rounds of activities, {} threads", end["threads"]);
    let log = bed.godwit("a", &["logs", "busy"]);
    assert_eq!((log.stdout.as_str(), log.stderr.as_str()), ("ready\n", ""));
}

/// Waits in vfork on request, until somebody writes to a FIFO, and then says so.
const SPAWNER: &str = r#"
import os, socket
os.mkfifo("/tmp/fifo")
with socket.create_server(("0.0.0.0", 7000)) as server:
    connection = server.accept()[0]
while connection.recv(100):
    opening = (os.POSIX_SPAWN_OPEN, 0, "/tmp/fifo", os.O_RDONLY, 0)
    child = os.posix_spawn("/usr/bin/python3", ["python3", "-c", ""], os.environ, file_actions=[opening])
    connection.sendall(b"%d\n" % os.waitpid(child, 0)[1])
"#;

#[test]
fn a_process_that_stays_in_vfork_is_not_moved_and_not_harmed() {
    let bed = Bed::up("vfork");
    let preset = bed.build(Workload::Python);
    fs::write(preset.rootfs.join("program.py"), SPAWNER).unwrap();
    bed.run("a", "spawner", ADDRESS, &preset, &[]);
    let mut connection = BufReader::new(bed.connect(SocketAddrV4::new(ADDRESS, PORT)));
    let service: Value = bed.json("a", &["inspect", "spawner"]);
    let place = format!("/proc/{}/wchan", service["pid"]);
    for (from, to) in [("a", "b"), ("b", "a")] {
        connection.get_mut().write_all(b"x").unwrap();
        if from == "a" {
            let in_vfork = || (fs::read_to_string(&place).unwrap() == "kernel_clone").then_some(());
            wait_for("the vfork", in_vfork);
            let refused = bed.godwit("a", &["migrate", "spawner", "--to", "b"]);
            assert_eq!(refused.code, 1, "{refused:?}");
            assert!(
                refused.stderr.contains("made by vfork") && refused.stderr.contains("try again"),
                "{refused:?}"
            );
        }
        let write = ["exec", "spawner", "--", "/usr/bin/python3", "-c", "open('/tmp/fifo', 'w')"];
        bed.done(from, &write);
        let mut answer = String::new();
        connection.read_line(&mut answer).unwrap();
        assert_eq!(answer, "0\n");
        bed.migrate("spawner", from, to);
    }
}
