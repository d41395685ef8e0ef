//! The presets serve what they promise, and the load client sees what happens to a service. Needs root.
#![allow(clippy::unwrap_used, clippy::zombie_processes)]

use std::{
    io::{Read, Write},
    net::{SocketAddr, SocketAddrV4, TcpStream},
    path::Path,
    process::{Child, Command, Stdio},
    time::{Duration, Instant},
};

use godwit_lab::{
    Lab, LabConfig,
    workload::{ClosedLoop, Preset, RedisClient, RedisLoad, Workload, resp::Reply},
};
use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};

const PATIENCE: Duration = Duration::from_secs(20);

/// A lab with one node; what runs in it ends with it.
struct Guard(Lab);

impl Guard {
    fn up(name: &str) -> Self {
        let mut config = LabConfig::new(name, ["a"]);
        config.daemons = false;
        Self(Lab::up(&config).unwrap())
    }

    /// Runs a preset as a container would see it, but for its namespaces.
    fn run(&self, preset: &Preset) -> Child {
        let root = preset.rootfs.display();
        let user = preset.user.as_deref().unwrap_or("root");
        let script = format!(
            "mount --rbind /dev {root}/dev && mount -t proc proc {root}/proc &&
             exec chroot --userspec={user} {root} \"$@\""
        );
        let mut command = self.0.command("a", "unshare").unwrap();
        command.args(["--mount", "--propagation=slave", "sh", "-c", &script, "sh"]).args(&preset.command);
        command
            .env_clear()
            .env("PATH", std::env::var_os("PATH").unwrap())
            .stdout(Stdio::null())
            .spawn()
            .unwrap()
    }

    fn address(&self, preset: &Preset) -> SocketAddrV4 {
        preset.at(self.0.address("a").unwrap())
    }

    /// Connects to a service that starts.
    fn connect(&self, preset: &Preset) -> TcpStream {
        let address = SocketAddr::V4(self.address(preset));
        let begun = Instant::now();
        loop {
            let tried = self.0.inside("client", || TcpStream::connect_timeout(&address, PATIENCE)).unwrap();
            match tried {
                Ok(stream) => {
                    stream.set_read_timeout(Some(PATIENCE)).unwrap();
                    return stream;
                }
                Err(error) => assert!(begun.elapsed() < PATIENCE, "{address}: {error}"),
            }
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    fn redis(&self, directory: &Path) -> (Preset, Child) {
        let preset = Workload::Redis.build(directory).unwrap();
        let child = self.run(&preset);
        (preset, child)
    }

    fn client(&self, preset: &Preset) -> RedisClient {
        RedisClient::connect(&self.0, "client", self.address(preset), PATIENCE).unwrap()
    }

    fn load(&self, preset: &Preset) -> RedisLoad {
        RedisLoad::start(&self.0, "client", self.address(preset), 1000).unwrap()
    }
}

impl Drop for Guard {
    fn drop(&mut self) {
        Lab::down(self.0.name()).unwrap();
    }
}

fn signal(child: &Child, signal: Signal) {
    kill(Pid::from_raw(i32::try_from(child.id()).unwrap()), signal).unwrap();
}

#[test]
fn a_quiet_redis_gives_a_clean_report() {
    let (guard, scratch) = (Guard::up("load-quiet"), tempfile::tempdir().unwrap());
    let (preset, _child) = guard.redis(scratch.path());
    guard.client(&preset);
    let begun = Instant::now();
    let load = guard.load(&preset);
    std::thread::sleep(Duration::from_secs(1));
    let lap = load.lap().unwrap();
    // One a millisecond.
    let due = u64::try_from(begun.elapsed().as_millis()).unwrap();
    assert!(lap.is_clean() && (due / 2..due + 10).contains(&lap.sent), "{due}: {lap:?}");
    std::thread::sleep(Duration::from_millis(200));
    let report = load.stop().unwrap();
    assert!(report.is_clean() && report.reconnects == 0, "{report:?}");
    assert_eq!(report.sent, report.answered);
    assert!(report.sent > lap.sent && report.median_us > 0, "{report:?}");
    assert!(u128::from(report.median_us) < begun.elapsed().as_micros(), "{report:?}");
    assert_eq!(report.latency.len(), report.answered);
}

#[test]
fn a_pause_is_seen_by_every_request_that_was_due_in_it() {
    let (guard, scratch) = (Guard::up("load-pause"), tempfile::tempdir().unwrap());
    let (preset, child) = guard.redis(scratch.path());
    guard.client(&preset);
    let load = guard.load(&preset);
    std::thread::sleep(Duration::from_millis(500));
    let all = Instant::now();
    load.lap().unwrap();
    // From here on most of what is reported is the pause.
    signal(&child, Signal::SIGSTOP);
    // What it had answered before is read.
    let mut answered = load.answered();
    loop {
        std::thread::sleep(Duration::from_millis(50));
        if load.answered() == answered {
            break;
        }
        answered = load.answered();
    }
    let stopped = Instant::now();
    std::thread::sleep(Duration::from_millis(400));
    let pause = stopped.elapsed();
    signal(&child, Signal::SIGCONT);
    let lap = load.lap().unwrap();
    assert!(lap.is_clean(), "{lap:?}");
    let longest_ms = lap.longest_us as f64 / 1e3;
    let (pause_ms, all_ms) = (pause.as_secs_f64() * 1e3, all.elapsed().as_secs_f64() * 1e3);
    assert!(longest_ms > pause_ms - 20.0 && lap.downtime_ms < all_ms + 20.0, "{pause_ms} {all_ms} {lap:?}");
    // One request a millisecond: half of them waited for more than half of the pause.
    let long = lap.latency.count_between(200_000, u64::MAX);
    assert!(long > 120 && u128::from(long) < all.elapsed().as_millis(), "{long}");
    let anew = Instant::now();
    std::thread::sleep(Duration::from_millis(300));
    let next = load.lap().unwrap();
    let anew_ms = anew.elapsed().as_secs_f64() * 1e3;
    assert!(next.downtime_ms < anew_ms + 20.0, "a lap begins anew: {anew_ms} {next:?}");
    assert!(load.stop().unwrap().downtime_ms >= lap.downtime_ms - 1.0);
}

#[test]
fn a_repeated_or_lost_execution_gives_wrong_answers() {
    let (guard, scratch) = (Guard::up("load-wrong"), tempfile::tempdir().unwrap());
    let (preset, _child) = guard.redis(scratch.path());
    let mut client = guard.client(&preset);
    let load = guard.load(&preset);
    while load.answered() < 100 {
        std::thread::yield_now();
    }
    let Reply::Array(Some(keys)) = client.call(&["KEYS", "load:*"]).unwrap() else { panic!() };
    let Some(Reply::Bulk(Some(key))) = keys.first() else { panic!() };
    client.call(&["INCR", std::str::from_utf8(key).unwrap()]).unwrap();
    std::thread::sleep(Duration::from_millis(200));
    let report = load.stop().unwrap();
    assert!(report.wrong > 0 && report.first_wrong.is_some() && !report.is_clean(), "{report:?}");
}

#[test]
fn a_dead_redis_is_reported_and_never_reconnected_to() {
    let (guard, scratch) = (Guard::up("load-dead"), tempfile::tempdir().unwrap());
    let (preset, mut child) = guard.redis(scratch.path());
    guard.client(&preset);
    let load = guard.load(&preset);
    while load.answered() < 100 {
        std::thread::yield_now();
    }
    signal(&child, Signal::SIGSTOP);
    let sent = load.sent();
    while load.sent() < sent + 50 {
        std::thread::yield_now();
    }
    signal(&child, Signal::SIGKILL);
    let report = load.stop().unwrap();
    assert!(report.broken.is_some() && report.lost_ops >= 50 && report.reconnects == 0, "{report:?}");
    assert_eq!(report.sent - report.answered, report.lost_ops);
    child.wait().unwrap();
    let message = RedisLoad::start(&guard.0, "client", guard.address(&preset), 1000).unwrap_err().to_string();
    assert!(message.contains("10.99.0.11:6379"), "{message}");
}

#[test]
fn a_filled_redis_holds_what_was_stored_and_damage_is_found() {
    let (guard, scratch) = (Guard::up("load-fill"), tempfile::tempdir().unwrap());
    let (preset, _child) = guard.redis(scratch.path());
    let mut client = guard.client(&preset);
    client.fill(20 << 20).unwrap();
    client.check_fill(20 << 20).unwrap();
    let Reply::Bulk(Some(memory)) = client.call(&["INFO", "memory"]).unwrap() else { panic!() };
    let memory = String::from_utf8(memory).unwrap();
    let used = memory.lines().find_map(|line| line.strip_prefix("used_memory:")).unwrap();
    assert!((20 << 20..40 << 20).contains(&used.parse::<u64>().unwrap()), "{used}");
    client.call(&["SETRANGE", "fill:7", "100", "damage"]).unwrap();
    let message = client.check_fill(20 << 20).unwrap_err().to_string();
    assert!(message.contains("fill:7 was 16384 other bytes"), "{message}");
    client.call(&["DEL", "fill:3"]).unwrap();
    assert!(client.check_fill(20 << 20).unwrap_err().to_string().contains("fill:3"));
}

#[test]
fn a_writer_reaches_all_of_a_fill_and_what_was_lost_is_found() {
    const FILL: u64 = 4 << 20;
    let (guard, scratch) = (Guard::up("load-write"), tempfile::tempdir().unwrap());
    let (preset, _child) = guard.redis(scratch.path());
    let mut client = guard.client(&preset);
    client.fill(FILL).unwrap();
    let begun = Instant::now();
    let load = RedisLoad::start_writing(&guard.0, "client", guard.address(&preset), 4000, FILL).unwrap();
    while load.answered() < 10_000 {
        std::thread::sleep(Duration::from_millis(10));
    }
    let report = load.stop().unwrap();
    assert!(report.is_clean(), "{report:?}");
    assert!(report.timeline.quantile(begun, Instant::now(), 0.5).unwrap() < begun.elapsed());
    assert_eq!(report.timeline.quantile(Instant::now(), Instant::now(), 0.5), None);
    let writes = report.writes.unwrap();
    // Of 1,024 counters and 10,000 writes one is missed in about sixty runs.
    assert!(writes.touched() > 1000, "{}", writes.touched());
    client.check_written(FILL, &writes).unwrap();
    assert!(client.check_fill(FILL).is_err(), "it was written to");
    // As if a page were again what it was before the last write to it.
    client.call(&["BITFIELD", "fill:200", "INCRBY", "u32", "#2048", "-1"]).unwrap();
    let message = client.check_written(FILL, &writes).unwrap_err().to_string();
    assert!(message.contains("fill:200 was 16384 other bytes"), "{message}");
}

#[test]
fn a_closed_loop_counts_what_is_answered_and_nothing_while_nothing_is() {
    const FILL: u64 = 1 << 20;
    let (guard, scratch) = (Guard::up("load-closed"), tempfile::tempdir().unwrap());
    let (preset, child) = guard.redis(scratch.path());
    guard.client(&preset).fill(FILL).unwrap();
    let busy = ClosedLoop::start(&guard.0, "client", guard.address(&preset), FILL).unwrap();
    let begun = Instant::now();
    std::thread::sleep(Duration::from_millis(500));
    signal(&child, Signal::SIGSTOP);
    // What was under way is over when all has been read: thousands of answers.
    let unread = || {
        let output = guard.0.command("client", "ss").unwrap().args(["-Htn", "state", "established"]).output();
        let sockets = String::from_utf8(output.unwrap().stdout).unwrap();
        assert!(!sockets.is_empty());
        sockets.lines().any(|line| !line.trim_start().starts_with("0 "))
    };
    while unread() {
        std::thread::sleep(Duration::from_millis(50));
    }
    std::thread::sleep(Duration::from_millis(1500));
    let (stopped, end) = (Instant::now(), Instant::now() + Duration::from_millis(200));
    std::thread::sleep(Duration::from_millis(200));
    signal(&child, Signal::SIGCONT);
    let answers = busy.stop().unwrap();
    assert!(answers.rate(begun, stopped).unwrap() > 100.0, "{:?}", answers.rate(begun, stopped));
    assert_eq!(answers.rate(stopped, end), Some(0.0));
    assert_eq!(answers.rate(end, stopped), None);
}

#[test]
fn nginx_serves_its_files() {
    let (guard, scratch) = (Guard::up("preset-nginx"), tempfile::tempdir().unwrap());
    let preset = Workload::Nginx.build(scratch.path()).unwrap();
    let _child = guard.run(&preset);
    for (path, length, end) in [("/", 16, "served by nginx\n"), ("/large", 65_536, "")] {
        let mut stream = guard.connect(&preset);
        write!(stream, "GET {path} HTTP/1.0\r\n\r\n").unwrap();
        let mut answer = Vec::new();
        stream.read_to_end(&mut answer).unwrap();
        let answer = String::from_utf8_lossy(&answer).into_owned();
        assert!(answer.starts_with("HTTP/1.1 200 OK") && answer.ends_with(end), "{answer:.200}");
        assert!(answer.contains(&format!("Content-Length: {length}\r\n")), "{answer:.300}");
    }
}

#[test]
fn mosquitto_takes_and_gives_messages() {
    let (guard, scratch) = (Guard::up("preset-mqtt"), tempfile::tempdir().unwrap());
    let preset = Workload::Mosquitto.build(scratch.path()).unwrap();
    let _child = guard.run(&preset);
    drop(guard.connect(&preset));
    let address = guard.address(&preset).ip().to_string();
    let common = ["-h", &address, "-q", "1", "-t", "test"];
    let publish = |program: &str, more: &[&str]| -> Command {
        let mut command = guard.0.command("client", program).unwrap();
        command.args(common).args(more);
        command
    };
    assert!(publish("mosquitto_pub", &["-m", "kept", "-r"]).status().unwrap().success());
    let output = publish("mosquitto_sub", &["-C", "1", "-W", "10"]).output().unwrap();
    assert_eq!(String::from_utf8_lossy(&output.stdout), "kept\n");
}

#[test]
fn postgres_answers_queries() {
    let (guard, scratch) = (Guard::up("preset-pg"), tempfile::tempdir().unwrap());
    let preset = Workload::Postgres.build(scratch.path().join("root")).unwrap();
    // The user's number, as this machine has another or none of that name.
    let preset = Preset { user: Some("5432:5432".to_owned()), ..preset };
    let _child = guard.run(&preset);
    drop(guard.connect(&preset));
    let address = guard.address(&preset).ip().to_string();
    let begun = Instant::now();
    loop {
        let mut query = guard.0.command("client", "psql").unwrap();
        query.args([
            "-h",
            &address,
            "-U",
            "postgres",
            "-Atc",
            "select sum(i) from generate_series(1, 100) i",
        ]);
        let output = query.output().unwrap();
        if output.status.success() {
            assert_eq!(String::from_utf8_lossy(&output.stdout), "5050\n");
            break;
        }
        // It says so while it starts.
        assert!(begun.elapsed() < PATIENCE, "{}", String::from_utf8_lossy(&output.stderr));
        std::thread::sleep(Duration::from_millis(50));
    }
}

#[test]
fn python_and_busybox_run_programs() {
    let (guard, scratch) = (Guard::up("preset-python"), tempfile::tempdir().unwrap());
    let python = Workload::Python.build(scratch.path().join("python")).unwrap();
    let program = "import socket, ssl, json, threading, sqlite3, ctypes\nopen('/tmp/done', 'w').write(json.dumps([1]))\n";
    std::fs::write(python.rootfs.join("program.py"), program).unwrap();
    assert!(guard.run(&python).wait().unwrap().success());
    assert_eq!(std::fs::read_to_string(python.rootfs.join("tmp/done")).unwrap(), "[1]");
    let mut busybox = Workload::Busybox.build(scratch.path().join("busybox")).unwrap();
    busybox.command = ["/bin/sh", "-c", "echo abc | tr b x > /tmp/done"].map(str::to_owned).to_vec();
    assert!(guard.run(&busybox).wait().unwrap().success());
    assert_eq!(std::fs::read_to_string(busybox.rootfs.join("tmp/done")).unwrap(), "axc\n");
}

#[test]
fn an_unknown_workload_is_refused_with_a_choice() {
    let message = "mysql".parse::<Workload>().unwrap_err().to_string();
    assert!(message.contains("\"mysql\"") && message.contains("choose redis"), "{message}");
    assert_eq!("redis".parse::<Workload>().unwrap(), Workload::Redis);
}
