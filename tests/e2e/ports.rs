//! What belongs to a service besides its processes: published ports, logs, limits, environment,
//! and commands run inside it. Needs root.

use std::{
    fs,
    io::{BufRead, BufReader, Read, Write},
    net::{Ipv4Addr, SocketAddr, SocketAddrV4, TcpStream},
    process::Stdio,
    time::Duration,
};

use godwit_lab::workload::Workload;
use godwit_tests::{Bed, CLIENT, PATIENCE, wait_for};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::{Value, json};

const ADDRESS: Ipv4Addr = Ipv4Addr::new(10, 88, 0, 70);
const PUBLISHED: u16 = 8080;
/// Serves files, and writes numbered lines, every third of them to standard error.
const COMMAND: &str = "mkdir -p /www && cat > /www/index.html <<EOF\nserved inside\nEOF\n\
    httpd -p 80 -h /www\n\
    n=0; while :; do n=$((n+1)); [ $((n % 3)) = 0 ] && echo \"line $n\" >&2 || echo \"line $n\"; usleep 5000; done";

/// The answer of a server to one request, or none if it cannot be reached.
fn get(bed: &Bed, address: SocketAddrV4) -> Option<String> {
    let once = || TcpStream::connect_timeout(&SocketAddr::V4(address), Duration::from_secs(2)).ok();
    let mut stream = bed.lab().inside(CLIENT, once).unwrap()?;
    stream.set_read_timeout(Some(PATIENCE)).unwrap();
    stream.write_all(b"GET /index.html HTTP/1.0\r\n\r\n").unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    Some(answer)
}

fn is_served(bed: &Bed, address: SocketAddrV4) -> bool {
    get(bed, address).is_some_and(|answer| answer.ends_with("served inside\n"))
}

/// Lines that were written to one stream, which must be all that belong there up to the last, in
/// order. The last one's number.
fn check_log(bed: &Bed, node: &str, stream: &str, belongs: impl Fn(&u32) -> bool) -> u32 {
    let log = bed.godwit(node, &["logs", "web"]);
    let text = if stream == "stdout" { log.stdout } else { log.stderr };
    // The end of the last line may still be on its way, in the container or through the shim.
    let text = text.rfind('\n').map_or("", |end| &text[..end]);
    let number = |line: &str| line.strip_prefix("line ").and_then(|number| number.parse().ok());
    let numbers: Vec<u32> =
        text.lines().map(|line| number(line).unwrap_or_else(|| panic!("{line:?} in {text}"))).collect();
    let last = *numbers.last().unwrap();
    let expected: Vec<u32> = (1..=last).filter(belongs).collect();
    assert!(numbers == expected, "{stream} on {node}: {} of {} lines", numbers.len(), expected.len());
    last
}

#[test]
fn moves_keep_ports_logs_limits_and_commands() {
    let bed = Bed::up("ports");
    let mut preset = bed.build(Workload::Busybox);
    preset.command = ["/bin/sh", "-c", COMMAND].map(str::to_owned).to_vec();
    let publish = format!("{PUBLISHED}:80");
    let more =
        ["--publish", &publish, "--memory", "64MiB", "--cpus", "0.5", "--env", "COLOUR=green and blue"];
    let more: Vec<_> = more.into_iter().chain(["--hostname", "inside", "--label", "team=birds"]).collect();
    bed.run("a", "web", ADDRESS, &preset, &more);
    let at = |node: &str| SocketAddrV4::new(bed.lab().address(node).unwrap(), PUBLISHED);
    wait_for("the published port", || is_served(&bed, at("a")).then_some(()));
    wait_for("the published port of the other node", || is_served(&bed, at("b")).then_some(()));
    // Somebody else cannot have it, on either node.
    let rootfs = preset.rootfs.to_str().unwrap();
    for node in ["a", "b"] {
        let other = bed.godwit(
            node,
            &["run", "--name", "other", "--publish", "8080:81", "--rootfs", rootfs, "--", "/bin/true"],
        );
        assert_ne!(other.code, 0);
        let why = "port 8080/tcp is already published by service web on node a";
        assert!(other.stderr.contains(why), "{}", other.stderr);
    }

    let mut last = 0;
    bed.move_to_and_fro("web", |number, node| {
        for node in ["a", "b"] {
            wait_for(&format!("the port of {node} after move {number}"), || {
                is_served(&bed, at(node)).then_some(())
            });
        }
        wait_for(&format!("its own address after move {number}"), || {
            is_served(&bed, SocketAddrV4::new(ADDRESS, 80)).then_some(())
        });
        let goes_on = || {
            let now = check_log(&bed, node, "stdout", |n| n % 3 != 0);
            (now > last + 5).then_some(now)
        };
        last = wait_for("more lines", goes_on);
        check_log(&bed, node, "stderr", |n| n % 3 == 0);

        let environment =
            bed.done(node, &["exec", "web", "--", "sh", "-c", "echo $COLOUR; hostname; ls /www"]);
        assert_eq!(environment, "green and blue\ninside\nindex.html\n", "move {number}");
        let first = bed.done(node, &["exec", "web", "--", "sh", "-c", "tr '\\0' '\\n' < /proc/1/environ"]);
        assert!(first.contains("COLOUR=green and blue\n"), "{first}");
        let failing = bed.godwit(node, &["exec", "web", "--", "sh", "-c", "echo no >&2; exit 7"]);
        assert_eq!((failing.code, failing.stderr.as_str()), (7, "no\n"), "move {number}");
        let service: Value = bed.json(node, &["inspect", "web"]);
        let expected = json!({
            "node": node, "memory_bytes": 64 << 20, "cpu_millis": 500, "hostname": "inside",
            "epoch": number + 1, "labels": ["team=birds"],
        });
        for (field, value) in expected.as_object().unwrap() {
            assert_eq!(&service[field], value, "move {number}: {field}");
        }
        assert_eq!(limits(service["pid"].as_u64().unwrap()), (64 << 20, 0.5), "move {number}");
    });
    println!("{last} lines in the log");
    // Who follows the log sees what is written now.
    let mut follow = bed.command("a", &["logs", "--follow", "--tail", "1", "web"]);
    let mut follow = follow.stdout(Stdio::piped()).stderr(Stdio::null()).spawn().unwrap();
    let mut lines = BufReader::new(follow.stdout.take().unwrap()).lines();
    let seen: Vec<_> = lines.by_ref().take(5).map(|line| line.unwrap()).collect();
    kill_process(Pid::from_child(&follow), Signal::TERM).unwrap();
    follow.wait().unwrap();
    assert!(seen.iter().all(|line| line.starts_with("line ")), "{seen:?}");
    bed.done("a", &["rm", "--force", "web"]);
    for node in ["a", "b"] {
        wait_for("the port to close with the service", || (!is_served(&bed, at(node))).then_some(()));
    }
}

#[test]
fn connections_through_published_ports_go_on_after_moves() {
    let bed = Bed::up("portsgoon");
    let preset = bed.build(Workload::Redis);
    bed.run("a", "redis", ADDRESS, &preset, &["--publish", "16379:6379"]);
    let at = |node: &str| SocketAddrV4::new(bed.lab().address(node).unwrap(), 16379);
    // One through each node, and each is used before, between and after all moves.
    let connect = |node| {
        let once = || TcpStream::connect_timeout(&SocketAddr::V4(at(node)), Duration::from_secs(2)).ok();
        wait_for("the published port", || bed.lab().inside(CLIENT, once).unwrap())
    };
    let mut connections = ["a", "b"].map(connect);
    let mut count = 0;
    let mut ask_all = |when: &str| {
        for connection in &mut connections {
            count += 1;
            connection.set_read_timeout(Some(PATIENCE)).unwrap();
            connection.write_all(b"INCR counter\r\n").unwrap();
            let mut answer = String::new();
            BufReader::new(&mut *connection).read_line(&mut answer).unwrap();
            assert_eq!(answer, format!(":{count}\r\n"), "{when}");
        }
    };
    ask_all("before");
    for (from, to) in [("a", "b"), ("b", "a"), ("a", "b")] {
        bed.migrate("redis", from, to);
        ask_all(&format!("after the move from {from} to {to}"));
    }
    // Whoever takes the rules away finds them again soon, at the service's node and at the other.
    for node in ["a", "b"] {
        let mut nft = bed.lab().command(node, "nft").unwrap();
        assert!(nft.args(["delete", "table", "ip", "godwit"]).status().unwrap().success());
        connect(node);
    }
}

/// Memory in bytes and CPUs that the kernel lets a process have, from its cgroups.
fn limits(pid: u64) -> (u64, f64) {
    let text = fs::read_to_string(format!("/proc/{pid}/cgroup")).unwrap();
    let read = |controller: &str, file: &str| {
        let path = text.lines().find_map(|line| {
            let mut parts = line.splitn(3, ':').skip(1);
            let (names, path) = (parts.next().unwrap(), parts.next().unwrap());
            names.split(',').any(|name| name == controller).then_some(path)
        })?;
        fs::read_to_string(format!("/sys/fs/cgroup/{controller}{path}/{file}")).ok()
    };
    let number = |text: Option<String>| text.unwrap().trim().parse::<f64>().unwrap();
    if let Some(memory) = read("memory", "memory.limit_in_bytes") {
        let quota = number(read("cpu", "cpu.cfs_quota_us"));
        return (memory.trim().parse().unwrap(), quota / number(read("cpu", "cpu.cfs_period_us")));
    }
    let path = text.lines().find_map(|line| line.strip_prefix("0::")).unwrap();
    let read = |file: &str| fs::read_to_string(format!("/sys/fs/cgroup{path}/{file}")).unwrap();
    let maximum = read("cpu.max");
    let words: Vec<f64> = maximum.split_whitespace().map(|word| word.parse().unwrap()).collect();
    (read("memory.max").trim().parse().unwrap(), words[0] / words[1])
}
