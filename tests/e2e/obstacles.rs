//! Programs that cannot move: each is named before anything is done, and where one gets so far all the same, the move fails,
//! the error says what was the cause, and the service runs on. Needs root.

use std::{
    io::{BufRead, BufReader, Write},
    net::{Ipv4Addr, SocketAddrV4, TcpStream},
    path::Path,
};

use godwit_lab::workload::{Preset, Rootfs};
use godwit_tests::{BUSY, Bed, TRIES, compile, hold::Points, victim::Attempt};
use serde_json::Value;

const ADDRESS: Ipv4Addr = Ipv4Addr::new(10, 88, 0, 65);
const PORT: u16 = 7000;

/// Where a move is held that has found nothing in the way.
const POINT: &str = "source.copied";

/// How many of them any kernel of a distribution has at least.
const LEAST: usize = 25;

/// What a kernel says of what was left out when it was built, or is switched off.
const LACKING: [&str; 3] =
    ["Function not implemented", "Address family not supported", "Protocol not supported"];

/// What the program is told to have, and words of what godwit says of it, before a move and where CRIU met it in one.
const CASES: [(&str, &str); 41] = [
    ("io_uring", "has an io_uring open"),
    ("io_uring mapped", "has an io_uring mapped"),
    ("queue open", "has the POSIX message queue /held open"),
    ("queue closed", "has the POSIX message queue /held"),
    ("perf", "has a perf event open"),
    ("bpf", "has a BPF object (bpf-prog) open"),
    ("userfaultfd", "has a userfaultfd open"),
    ("seccomp notify", "has a kernel object of the kind seccomp notify open"),
    ("fscontext", "has a kernel object of the kind fscontext open"),
    ("mptcp", "has a socket of the protocol MPTCP open"),
    ("vsock", "has a socket of the protocol AF_VSOCK open"),
    ("xdp", "has a socket of the protocol XDP open"),
    ("corked", "has a corked UDP socket open"),
    ("unix data", "has not accepted a connection to its unix socket /waiting, and carries data already"),
    ("unix closed", "has not accepted a connection to its unix socket /waiting, whose other end has closed"),
    ("pidfd of a thread", "has a pidfd of a thread open"),
    ("deleted", "has the deleted file /large of 257 MiB open"),
    ("character device", "has the device /device (10:229) open"),
    ("graphics", "has the device /device (226:128) open"),
    ("block device", "has the block device /device (7:0) open"),
    ("traced", "is traced by process"),
    ("headless", "continues in other threads although its main thread has ended"),
    ("leaderless", LEADERLESS),
    ("trap", "has a SIGTRAP waiting for it"),
    ("user namespace", "has a user namespace of its own"),
    ("PID namespace", NESTED),
    ("IPC namespace", "has an IPC namespace of its own"),
    ("UTS namespace", "has a UTS namespace of its own"),
    ("time namespace", "has a time namespace of its own"),
    ("cgroup namespace", "has a cgroup namespace of its own"),
    ("epoll of another's file", "by an epoll (descriptor"),
    ("netlink unread", "has a netlink socket with messages that it has not read open"),
    ("netlink groups", "has a netlink socket that listens to groups beyond the 32nd open"),
    ("netlink without a port", "has a netlink socket that listens to groups and has no port open"),
    ("packets", "has a pipe in packet mode (O_DIRECT) open"),
    ("no vDSO", VDSO),
    ("name of a FIFO", "has the name of the FIFO /device (O_PATH) open"),
    ("name of a socket", "has the name of the socket /device (O_PATH) open"),
    ("nameless terminal", "has its terminal open as /dev/tty (descriptor"),
    ("secret memory", "has secret memory (memfd_secret(2)) open"),
    ("secret memory mapped", "has secret memory (memfd_secret(2)) mapped"),
];

/// CRIU dumps that, and cannot restore it.
const LEADERLESS: &str = "lives on in session";
/// Neither can it restore that.
const VDSO: &str = "has unmapped the kernel's vDSO";
/// The tracker of memory meets that before CRIU does.
const NESTED: &str = "has a PID namespace of its own";

/// The words in a move.
fn meanwhile(before: &str) -> &str {
    match before {
        LEADERLESS => "a process of the service lives on in a session whose leader has ended",
        VDSO => "a process has unmapped the kernel's vDSO",
        NESTED => "it has PID namespaces of its own",
        before => before,
    }
}

/// CRIU's log, of which a reason tells.
fn log_of(reason: &str) -> Option<&Path> {
    let (_, path) = reason.rsplit_once("its log is ")?;
    Some(Path::new(path.split([' ', ';']).next()?))
}

/// The limits of address space that processes of the service have, in their order.
fn limits_of_address_space(bed: &Bed, node: &str) -> Vec<String> {
    let main = bed.pid(node, "odd");
    let children = std::fs::read_to_string(format!("/proc/{main}/task/{main}/children")).unwrap();
    let limit = |pid: &str| {
        let limits = std::fs::read_to_string(format!("/proc/{pid}/limits")).unwrap();
        limits.lines().find(|line| line.starts_with("Max address space")).unwrap().to_owned()
    };
    children.split_whitespace().map(limit).collect()
}

fn tell(connection: &mut BufReader<TcpStream>, word: &str) -> String {
    connection.get_mut().write_all(format!("{word}\n").as_bytes()).unwrap();
    let mut line = String::new();
    connection.read_line(&mut line).unwrap();
    line.trim_end().to_owned()
}

#[test]
fn each_of_them_is_found_before_a_move_and_explained_where_it_appears_in_one() {
    let mut points = None;
    let bed = Bed::up_with("cannot-move", |config| points = Some(Points::among(config, &[POINT])));
    let points = points.unwrap();
    let rootfs = bed.scratch().join("root");
    Rootfs::new(&rootfs).unwrap();
    compile("obstacles.c", &rootfs.join("obstacles"));
    let command = ["/obstacles".to_owned(), PORT.to_string()].into();
    let preset = Preset { rootfs, command, env: Vec::new(), user: None, port: PORT };
    let may = [
        "--security-opt=seccomp=unconfined",
        "--cap-add=SYS_ADMIN",
        "--cap-add=BPF",
        "--cap-add=PERFMON",
        "--cap-add=NET_RAW",
        "--cap-add=MKNOD",
    ];
    bed.run("a", "odd", ADDRESS, &preset, &may);
    let mut connection = BufReader::new(bed.connect(SocketAddrV4::new(ADDRESS, PORT)));
    let (mut wrong, mut tried) = (Vec::new(), 0);
    for (name, before) in CASES {
        let mut tries = 0..TRIES;
        let reason = loop {
            let begin = || Attempt::begin(&bed, "odd", "a", "b", &["--mode", "precopy"]);
            let attempt = Attempt::held(&points, POINT, begin);
            let made = tell(&mut connection, name);
            points.let_go(POINT);
            if LACKING.iter().any(|lacking| made.contains(lacking)) {
                println!("this kernel has no {name}: {made}");
                attempt.moved();
                bed.migrate("odd", "b", "a");
                break None;
            }
            assert_eq!(made, "done", "{name}");
            let reason = attempt.aborted();
            let is_busy = BUSY.iter().any(|busy| reason.contains(busy)) && !reason.contains(before);
            if !is_busy || tries.next().is_none() {
                break Some(reason);
            }
            assert_eq!(tell(&mut connection, "end"), "done");
        };
        let Some(reason) = reason else { continue };
        tried += 1;
        if !reason.contains(meanwhile(before)) {
            wrong.push(format!("{name}, in a move: {reason}"));
        }
        // The tracker of memory has no log.
        if before != NESTED && !log_of(&reason).is_some_and(Path::is_file) {
            wrong.push(format!("{name}, in a move, without CRIU's log: {reason}"));
        }
        let said = bed.check("a", &["odd", "--to", "b"]);
        let answer: Value = serde_json::from_str(&said.stdout).unwrap();
        let found: Vec<_> =
            answer["obstacles"].as_array().unwrap().iter().map(|it| it["what"].as_str().unwrap()).collect();
        if said.code != 1 || !found.iter().any(|what| what.contains(before)) || found.len() != 1 {
            wrong.push(format!("{name}, checked: {} {found:?}", said.code));
        }
        assert_eq!(tell(&mut connection, "end"), "done");
    }
    assert!(wrong.is_empty(), "{wrong:#?}");
    assert!(tried >= LEAST, "only {tried} could be tried on this kernel");
    // One whose limit of address space is reached moves, with its limit.
    assert_eq!(tell(&mut connection, "no room"), "done");
    let before = limits_of_address_space(&bed, "a");
    assert!(
        matches!(&before[..], [one] if !one.starts_with("Max address space         unlimited")),
        "{before:?}"
    );
    bed.migrate("odd", "a", "b");
    assert_eq!(limits_of_address_space(&bed, "b"), before);
    bed.migrate("odd", "b", "a");
    assert_eq!(tell(&mut connection, "end"), "done");
    // Without them it is the service that it was.
    bed.migrate("odd", "a", "b");
    assert_eq!(tell(&mut connection, "end"), "done");
}
