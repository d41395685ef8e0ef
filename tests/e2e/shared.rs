//! Memory that processes share ([`programs/shared.c`](../programs/shared.c)), which moves while they write it. Needs root.

use std::{
    fs,
    io::{BufRead, BufReader, Write},
    net::{Ipv4Addr, SocketAddrV4, TcpStream},
    path::PathBuf,
};

use godwit_lab::workload::{Preset, Rootfs};
use godwit_tests::hold::Points;
use godwit_tests::victim::{Attempt, UNKNOWN, programs_of};
use godwit_tests::{Bed, Report, compile, wait_for};

const NAME: &str = "shared";
const ADDRESS: Ipv4Addr = Ipv4Addr::new(10, 88, 0, 81);
const LIMITED: Ipv4Addr = Ipv4Addr::new(10, 88, 0, 82);
const STEADY: Ipv4Addr = Ipv4Addr::new(10, 88, 0, 83);
const PORT: u16 = 7000;
/// Each of four segments, MiB.
const MIB: u64 = 16;
const BYTES: u64 = (4 * MIB) << 20;

/// Runs the processes on node a; what they are run from, and a connection to them.
fn run(bed: &Bed) -> (Preset, BufReader<TcpStream>) {
    let root = bed.scratch().join("root");
    Rootfs::new(&root).unwrap();
    compile("shared.c", &root.join("shared"));
    let command = ["/shared".to_owned(), MIB.to_string()].into();
    let preset = Preset { rootfs: root, command, env: Vec::new(), user: None, port: PORT };
    bed.run("a", NAME, ADDRESS, &preset, &[]);
    let connection = BufReader::new(bed.connect(SocketAddrV4::new(ADDRESS, PORT)));
    (preset, connection)
}

/// All pages are as they were written last; how many were written.
fn check(connection: &mut BufReader<TcpStream>, when: &str) -> u64 {
    ask(connection, b"?", when)
}

/// The same with what is to be done before.
fn ask(connection: &mut BufReader<TcpStream>, what: &[u8; 1], when: &str) -> u64 {
    let mut answer = String::new();
    connection.get_mut().write_all(what).unwrap();
    connection.read_line(&mut answer).unwrap();
    let written = answer.strip_prefix("ok ").and_then(|number| number.trim().parse().ok());
    written.unwrap_or_else(|| panic!("{when}: the processes say {answer:?}"))
}

#[test]
fn shared_memory_moves_before_the_freeze_and_only_what_changed_since_crosses_in_it() {
    let bed = Bed::up("segments");
    let (preset, mut connection) = run(&bed);
    let mut written = check(&mut connection, "at the start");
    let moves = [("a", "b"), ("b", "a")].into_iter().cycle();
    for ((from, to), mode) in moves.zip(["precopy", "hybrid", "postcopy", "cold", "postcopy", "hybrid"]) {
        let report = bed.migrate_so(NAME, from, to, &["--mode", mode]);
        let figures = (report.shared_bytes >> 10, report.shared_dump_bytes >> 10, report.frozen_ms);
        println!("{mode}: KiB of shared memory before the freeze and in it, and frozen ms: {figures:?}");
        let now = check(&mut connection, mode);
        assert!(now > written, "{mode}: nothing was written since the last check");
        written = now;
        if mode == "cold" {
            // CRIU dumps it.
            assert_eq!((report.shared_bytes, report.shared_dump_bytes), (0, 0), "{report:?}");
            assert!(report.dump_bytes > BYTES, "{report:?}");
            continue;
        }
        // In a post-copy the anonymous segment follows the service.
        let left = if mode == "postcopy" && Report::fills_shared() { BYTES / 4 } else { 0 };
        assert!(report.shared_left_bytes >= left, "{mode}: {report:?}");
        assert!(left > 0 || report.shared_left_bytes == 0, "{mode}: {report:?}");
        assert!(report.shared_bytes >= BYTES - left, "{mode}: {report:?}");
        assert!(report.shared_dump_bytes < BYTES / 8, "{mode}: {report:?}");
        assert!(report.dump_bytes < BYTES / 4, "{mode}: it is in the images, too: {report:?}");
        assert!(report.criu.contains("+external-shmem+external-sysvshm"), "{mode}: {report:?}");
        assert!(report.told_mappings(), "{mode}: {report:?}");
        assert!(report.criu.contains("+external-file-pages"), "{mode}: {report:?}");
    }
    // No process begins or ends, so that page tables tell all that is written to the anonymous segment.
    let command = ["/shared".to_owned(), MIB.to_string(), "0".to_owned()].into();
    let steady = Preset { command, ..preset.clone() };
    bed.run("a", "steady", STEADY, &steady, &[]);
    let mut connection = BufReader::new(bed.connect(SocketAddrV4::new(STEADY, PORT)));
    let mut written = check(&mut connection, "of steady processes");
    let moves = [("a", "b"), ("b", "a")].into_iter().cycle();
    for ((from, to), mode) in moves.zip(["precopy", "hybrid", "postcopy"]) {
        let report = bed.migrate_so("steady", from, to, &["--mode", mode]);
        let now = check(&mut connection, mode);
        assert!(now > written, "{mode}: nothing was written since the last check");
        written = now;
        let compared: Vec<_> =
            report.timeline.iter().filter(|span| span.what.contains("shared memory")).collect();
        println!("{mode}: {compared:?}");
        // What stays is not compared.
        let knows = report.knows_shared_writes() || mode == "postcopy" && Report::fills_shared();
        assert_eq!(compared[0].what == "compare shared memory", knows, "{mode}: {report:?}");
    }
    // Its limit counts the pages at the destination, too, whoever has written them there.
    bed.run("a", "limited", LIMITED, &preset, &["--memory", "256MiB"]);
    let mut connection = BufReader::new(bed.connect(SocketAddrV4::new(LIMITED, PORT)));
    check(&mut connection, "with a limit");
    let moves = [("a", "b"), ("b", "a")].into_iter().cycle();
    for ((from, to), mode) in moves.zip(["precopy", "hybrid", "postcopy"]) {
        let report = bed.migrate_so("limited", from, to, &["--mode", mode]);
        assert!(report.shared_bytes >= BYTES, "{mode}: {report:?}");
        assert!(report.shared_dump_bytes < BYTES / 8, "{mode}: {report:?}");
        check(&mut connection, "with a limit, moved");
        let (charged, members) = charged(bed.pid(to, "limited"));
        println!("{mode}: {} KiB of shared memory are charged to it", charged >> 10);
        assert!(charged > BYTES * 9 / 10, "{mode}: {charged}");
        assert_eq!(members.len(), 4, "the server and its workers, and nobody else: {members:?}");
    }
}

/// The service looks at all its pages while they follow it, whatever becomes of the daemons meanwhile. Its processes fork,
/// and write all the time.
#[test]
fn shared_memory_that_is_to_follow_does_so_over_restarts_of_both_daemons() {
    const HELD: &str = "source.pushing";
    let mut points = None;
    let bed = Bed::up_with("follows", |config| points = Some(Points::among(config, &[HELD])));
    let points = points.unwrap();
    let (_, mut connection) = run(&bed);
    let mut written = check(&mut connection, "at the start");
    let postcopy = ["--mode", "postcopy"];
    let held = || Attempt::held(&points, HELD, || Attempt::begin(&bed, NAME, "a", "b", &postcopy));
    let is = |node: &str, state: &str| {
        wait_for(&format!("the service to be {state} on node {node}"), || {
            let shown: serde_json::Value = bed.json(node, &["inspect", NAME]);
            (shown["state"] == state).then_some(())
        });
    };
    let attempt = held();
    is("b", "running");
    bed.lab().stop_node("b").unwrap();
    bed.lab().start_node("b").unwrap();
    bed.lab().stop_node("a").unwrap();
    // It was not told how it ended.
    assert_eq!(attempt.end().code, UNKNOWN);
    points.let_go(HELD);
    bed.lab().start_node("a").unwrap();
    let now = check(&mut connection, "after restarts of both");
    assert!(now > written, "nothing was written since the last check");
    written = now;
    is("a", "remote");
    assert!(check(&mut connection, "when it is complete") > written);
    let report = bed.migrate_so(NAME, "b", "a", &postcopy);
    assert!(report.shared_left_bytes > 0 || !Report::fills_shared(), "{report:?}");
    check(&mut connection, "back again");
    // A pager that is killed has the service lost, not changed.
    let attempt = held();
    is("b", "running");
    for pager in programs_of(&bed, "b", "godwit-pager") {
        rustix::process::kill_process(pager, rustix::process::Signal::KILL).unwrap();
    }
    points.let_go(HELD);
    assert!(attempt.lost().contains("its memory is not complete"));
}

/// Memory that a process has locked has to be there when it is mapped, and not to follow.
#[test]
fn a_process_that_locks_shared_memory_while_that_is_to_follow_aborts_the_move() {
    const HELD: &str = "destination.prepared";
    let mut points = None;
    let bed = Bed::up_with("locks-shared", |config| points = Some(Points::among(config, &[HELD])));
    let points = points.unwrap();
    let (_, mut connection) = run(&bed);
    let written = check(&mut connection, "at the start");
    let postcopy = ["--mode", "postcopy"];
    let attempt = Attempt::held(&points, HELD, || Attempt::begin(&bed, NAME, "a", "b", &postcopy));
    assert!(ask(&mut connection, b"l", "while it is to follow") > written);
    points.let_go(HELD);
    if !Report::fills_shared() {
        // All of it crosses before the commit then, locked or not.
        let (_, report) = attempt.report("moved", 0);
        assert!(report.shared_left_bytes == 0 && report.shared_bytes >= BYTES, "{report:?}");
        assert!(check(&mut connection, "moved") > written);
        return;
    }
    let reason = attempt.aborted();
    assert!(reason.contains("a process has begun in the service that has locked memory"), "{reason}");
    let written = check(&mut connection, "after the abort");
    // It is not left behind another time.
    let report = bed.migrate_so(NAME, "a", "b", &postcopy);
    assert!(report.shared_left_bytes == 0 && report.shared_bytes >= BYTES, "{report:?}");
    assert!(check(&mut connection, "moved") > written);
}

/// Bytes of shared memory that the cgroup of this process is charged for, and its members without the
/// children of workers.
pub(crate) fn charged(pid: u64) -> (u64, Vec<String>) {
    let cgroups = fs::read_to_string(format!("/proc/{pid}/cgroup")).unwrap();
    let of = |controller: &str| {
        let line = cgroups.lines().find(|line| line.split(':').nth(1) == Some(controller))?;
        let path = line.splitn(3, ':').nth(2)?;
        Some(PathBuf::from(format!("/sys/fs/cgroup/{controller}{path}"))).filter(|path| path.is_dir())
    };
    let directory = of("memory").or_else(|| of("")).unwrap();
    let statistics = fs::read_to_string(directory.join("memory.stat")).unwrap();
    let bytes = statistics.lines().find_map(|line| line.strip_prefix("shmem ")).unwrap().parse().unwrap();
    let members = fs::read_to_string(directory.join("cgroup.procs")).unwrap();
    let name = |pid: &str| fs::read_to_string(format!("/proc/{pid}/comm")).ok();
    let parent =
        |pid: &str| fs::read_to_string(format!("/proc/{pid}/stat")).ok()?.split(' ').nth(3)?.parse().ok();
    let all: Vec<_> = members.lines().collect();
    // Children of workers end at once.
    let of_a_worker = |member: &&&str| {
        parent(member).is_some_and(|parent: u64| parent != pid && all.contains(&parent.to_string().as_str()))
    };
    (bytes, all.iter().filter(|member| !of_a_worker(member)).filter_map(|member| name(member)).collect())
}
