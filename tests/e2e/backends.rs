//! Moves over Open vSwitch: a busy Redis, datagrams of which each is answered, and what is lost of the switch
//! beneath a service that runs. Needs root and the package openvswitch-switch.
//!
//! All other end-to-end tests run over it with `GODWIT_TEST_BACKEND=openvswitch`.

use std::{
    fs,
    net::{Ipv4Addr, SocketAddrV4, UdpSocket},
    process::{Child, Stdio},
    thread,
    time::Duration,
};

use godwit_lab::{
    NetworkBackend,
    workload::{RedisClient, RedisLoad, Workload},
};
use godwit_tests::{Bed, CLIENT, PATIENCE, hold::Points, wait_for};
use rustix::process::{Pid, Signal, kill_process};

const REDIS: Ipv4Addr = Ipv4Addr::new(10, 88, 0, 80);
const ECHO: Ipv4Addr = Ipv4Addr::new(10, 88, 0, 81);
/// Data in Redis.
const FILL: u64 = 16 << 20;
/// Answers each datagram with itself.
const PROGRAM: &str = "import socket
s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
s.bind(('0.0.0.0', 7))
while True:
    data, sender = s.recvfrom(2048)
    s.sendto(data, sender)
";

/// Datagrams that are sent in each pause.
const DATAGRAMS: u32 = 50;
/// Where a migration is held: from here on frames go to the destination.
const FROZEN: &str = "source.frozen";

#[test]
fn moves_over_open_vswitch_lose_no_answer_and_no_data() {
    let bed = Bed::up_with("ovsredis", |config| config.network_backend = NetworkBackend::OpenVswitch);
    let preset = bed.build(Workload::Redis);
    bed.run("a", "redis", REDIS, &preset, &[]);
    let mut data = RedisClient::connect(bed.lab(), CLIENT, preset.at(REDIS), PATIENCE).unwrap();
    data.fill(FILL).unwrap();
    let load = RedisLoad::start(bed.lab(), CLIENT, preset.at(REDIS), 1000).unwrap();
    let mut worst: f64 = 0.0;
    bed.move_to_and_fro("redis", |number, _| {
        let lap = load.lap().unwrap();
        assert!(lap.is_clean(), "move {number}: {lap:?}");
        worst = worst.max(lap.downtime_ms);
    });
    let report = load.stop().unwrap();
    assert!(report.is_clean() && report.reconnects == 0, "{report:?}");
    assert_eq!(report.sent, report.answered);
    println!("{} requests, the longest downtime {worst:.0} ms", report.sent);
    data.check_fill(FILL).unwrap();
    let checks = bed.godwit("a", &["--json", "doctor"]).stdout;
    let checks: serde_json::Value = serde_json::from_str(&checks).unwrap();
    let check =
        checks["checks"].as_array().unwrap().iter().find(|check| check["name"] == "openvswitch").unwrap();
    assert_eq!(check["status"], "ok", "{check}");
}

#[test]
fn datagrams_that_come_in_the_pause_are_answered_once_over_open_vswitch() {
    let mut points = None;
    let bed = Bed::up_with("ovsudp", |config| {
        config.network_backend = NetworkBackend::OpenVswitch;
        points = Some(Points::among(config, &[FROZEN]));
    });
    let points = points.unwrap();
    let preset = bed.build(Workload::Python);
    fs::write(preset.rootfs.join("program.py"), PROGRAM).unwrap();
    bed.run("a", "echo", ECHO, &preset, &[]);
    let socket = || {
        let socket = bed.lab().inside(CLIENT, || UdpSocket::bind("0.0.0.0:0").unwrap()).unwrap();
        socket.connect((ECHO, 7)).unwrap();
        socket.set_read_timeout(Some(Duration::from_millis(100))).unwrap();
        socket
    };
    let asks = socket();
    wait_for("an answer", || (asks.send(b"first").is_ok() && asks.recv(&mut [0; 16]).is_ok()).then_some(()));
    // Answers to those that were not waited for come to the other one.
    let socket = socket();
    let soon = |time| socket.set_read_timeout(Some(Duration::from_millis(time))).unwrap();

    let answer = || {
        let mut data = [0; 16];
        let length = socket.recv(&mut data).unwrap();
        u32::from_be_bytes(data[..length].try_into().unwrap())
    };
    for (number, (from, to)) in [("a", "b"), ("b", "a"), ("a", "b"), ("b", "a")].into_iter().enumerate() {
        points.hold(FROZEN);
        thread::scope(|scope| {
            let moving = scope.spawn(|| bed.migrate("echo", from, to));
            points.reached(FROZEN);
            for number in 0..DATAGRAMS {
                socket.send(&u32::to_be_bytes(number)).unwrap();
            }
            soon(100);
            assert!(socket.recv(&mut [0; 16]).is_err(), "move {number}: it was frozen");
            points.let_go(FROZEN);
            moving.join().unwrap();
        });
        socket.set_read_timeout(Some(PATIENCE)).unwrap();
        // A node that has never sent to the client asks for its link-layer address first, and later answers may
        // overtake those that wait for that.
        let mut answers: Vec<u32> = (0..DATAGRAMS).map(|_| answer()).collect();
        answers.sort_unstable();
        assert_eq!(answers, (0..DATAGRAMS).collect::<Vec<_>>(), "move {number}");
        soon(100);
        assert!(socket.recv(&mut [0; 16]).is_err(), "move {number}: one was answered twice");
    }
}

/// An ovs-vswitchd that the lab did not start, and does not end.
struct Switch(Child);

impl Drop for Switch {
    fn drop(&mut self) {
        // It may have been ended by what is tested.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Ends a node's ovs-vswitchd, with its flows, and starts another one.
fn restart_switch(bed: &Bed, node: &str) -> Switch {
    let command = bed.lab().command(node, "ovs-vswitchd").unwrap();
    let run = command.get_envs().find(|(name, _)| *name == "OVS_RUNDIR").unwrap().1.unwrap().to_owned();
    let run = std::path::PathBuf::from(run);
    let pid_file = run.join("ovs-vswitchd.pid");
    let pid = fs::read_to_string(&pid_file).unwrap().trim().parse().ok().and_then(Pid::from_raw).unwrap();
    kill_process(pid, Signal::KILL).unwrap();
    let mut command = command;
    command.arg(format!("unix:{}", run.join("db.sock").display()));
    command.arg(format!("--pidfile={}", pid_file.display())).args(["--no-chdir", "--overwrite-pidfile"]);
    command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    Switch(command.spawn().unwrap())
}

fn on(bed: &Bed, node: &str, line: &str) {
    let words: Vec<_> = line.split(' ').collect();
    let output = bed.lab().command(node, words[0]).unwrap().args(&words[1..]).output().unwrap();
    assert!(output.status.success(), "{line}: {}", String::from_utf8_lossy(&output.stderr));
}

#[test]
fn what_is_lost_of_open_vswitch_beneath_a_service_is_made_again_while_the_daemon_runs() {
    let bed = Bed::up_with("ovsmend", |config| config.network_backend = NetworkBackend::OpenVswitch);
    let preset = bed.build(Workload::Redis);
    bed.run("a", "redis", REDIS, &preset, &[]);
    // One connection, which outlives all of it.
    let mut data = RedisClient::connect(bed.lab(), CLIENT, preset.at(REDIS), PATIENCE).unwrap();
    data.fill(FILL).unwrap();
    let events = || bed.done("a", &["events"]);
    let mut mended = |words: &str| {
        data.check_fill(FILL).unwrap();
        wait_for(words, || {
            let events = events();
            events.lines().any(|line| line.contains("mended") && line.contains(words)).then_some(())
        });
    };
    on(&bed, "a", "ovs-ofctl -O OpenFlow14 del-flows gw0");
    mended("flows are lost in the bridge gw0");
    on(&bed, "a", "nft flush ruleset");
    mended("not joined are");
    let _switch = restart_switch(&bed, "a");
    mended("as Open vSwitch was restarted");

    // It can go, and come back, and the other node is none the worse.
    bed.migrate("redis", "a", "b");
    data.check_fill(FILL).unwrap();
    bed.migrate("redis", "b", "a");
    data.check_fill(FILL).unwrap();
    let at = SocketAddrV4::new(REDIS, 6379);
    drop(bed.connect(at));
}
