//! A Python program with threads, timers, sockets, pipes, locks and processes that checks itself.
//! Needs root.

use std::{
    fs,
    io::{BufRead, BufReader, Write},
    net::{Ipv4Addr, SocketAddrV4, TcpStream},
    time::Duration,
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
    // Longer than the program has patience with its activities.
    connection.get_mut().set_read_timeout(Some(Duration::from_secs(150))).unwrap();
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
    if bed.has_logs() {
        let log = bed.godwit("a", &["logs", "busy"]);
        assert_eq!((log.stdout.as_str(), log.stderr.as_str()), ("ready\n", ""));
    }
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

/// Connections with itself whose queues are full and of which one end, the other or both have finished. `make` makes
/// them, `check` reads all that was sent in them.
const CLOSING: &str = r#"
import socket
PATTERN = bytes(range(251)) * 600
def pair():
    with socket.create_server(("127.0.0.1", 0)) as server:
        client = socket.create_connection(server.getsockname())
        return [client, server.accept()[0]]
def fill(end):
    end.setblocking(False)
    sent = 0
    try:
        while True:
            at = sent % 251
            sent += end.send(PATTERN[at:at + 65536])
    except BlockingIOError:
        return sent
def is_whole(end, due, finished):
    end.setblocking(True)
    end.settimeout(20)
    got = bytearray()
    while len(got) < due or finished:
        piece = end.recv(1 << 20)
        if not piece:
            break
        got += piece
    return len(got) == due and got == (PATTERN * (due // len(PATTERN) + 1))[:due]
made = []
with socket.create_server(("0.0.0.0", 7000)) as server:
    user = server.accept()[0].makefile("rw")
for line in user:
    if line == "make\n":
        for finished in [(0,), (1,), (0, 1), (1, 0), ()] * 3:
            ends = pair()
            sent = [fill(end) for end in ends]
            for end in finished:
                ends[end].shutdown(socket.SHUT_WR)
            made.append((ends, sent, finished))
        print("made", file=user)
    else:
        wrong = []
        for ends, sent, finished in made:
            for end in (0, 1):
                try:
                    whole = is_whole(ends[end], sent[1 - end], 1 - end in finished)
                except OSError as error:
                    whole = str(error)
                if whole is not True:
                    wrong.append([finished, end, sent, whole])
        for ends, _, _ in made:
            for end in ends:
                end.close()
        made = []
        print(wrong, file=user)
    user.flush()
"#;

#[test]
fn connections_of_a_service_with_itself_lose_nothing_while_they_are_closing() {
    let bed = Bed::up("closing");
    let preset = bed.build(Workload::Python);
    fs::write(preset.rootfs.join("program.py"), CLOSING).unwrap();
    bed.run("a", "closing", ADDRESS, &preset, &[]);
    let mut connection = BufReader::new(bed.connect(SocketAddrV4::new(ADDRESS, PORT)));
    let mut ask = |request: &str| {
        connection.get_mut().write_all(format!("{request}\n").as_bytes()).unwrap();
        let mut line = String::new();
        connection.read_line(&mut line).unwrap();
        line
    };
    for (mode, [from, to]) in ["cold", "precopy", "postcopy", "hybrid"]
        .into_iter()
        .zip([["a", "b"], ["b", "a"]].into_iter().cycle())
    {
        assert_eq!(ask("make"), "made\n");
        bed.migrate_so("closing", from, to, &["--mode", mode]);
        assert_eq!(ask("check"), "[]\n", "after a move by {mode}: which ends had finished, which was read");
    }
}
