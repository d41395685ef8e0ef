//! Redis over IPv6: connections from the client, and one that the service made, go on after moves. Needs root.

use std::{
    io::{BufRead, BufReader, Write},
    net::{Ipv4Addr, SocketAddr, TcpStream},
    process::Command,
    time::Duration,
};

use godwit_lab::workload::Workload;
use godwit_tests::{Bed, CLIENT, PATIENCE, wait_for};
use serde_json::Value;

const ADDRESS: Ipv4Addr = Ipv4Addr::new(10, 88, 0, 80);

/// Gives the hosts of the lab IPv6 addresses, and the client the way to the services.
fn with_ipv6(bed: &Bed) {
    for (host, number) in [("a", 10), ("b", 11), (CLIENT, 12)] {
        let netns = bed.lab().namespace(host).unwrap();
        let script = format!(
            "sysctl -qw net.ipv6.conf.uplink0.accept_dad=0 net.ipv6.conf.uplink0.disable_ipv6=0
             ip address add fd99::{number}/64 dev uplink0 nodad
             [ {host} != {CLIENT} ] || ip -6 route add fd67:6f64::/96 dev uplink0"
        );
        let output = Command::new("nsenter")
            .arg(format!("--net={}", netns.display()))
            .args(["sh", "-ec", &script])
            .output();
        let output = output.unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    }
}

#[test]
fn connections_over_ipv6_go_on_after_moves() {
    let bed = Bed::up_with("ipv6", |config| {
        config.programs.serve_arguments.extend(["--subnet6", "fd67:6f64::/96"].map(str::to_owned));
    });
    with_ipv6(&bed);
    let mut preset = bed.build(Workload::Redis);
    preset.command.extend(["--bind", "0.0.0.0", "::"].map(str::to_owned));
    bed.run("a", "redis", ADDRESS, &preset, &["--publish", "16379:6379"]);
    let service: Value = bed.json("a", &["inspect", "redis"]);
    assert_eq!(service["address6"], "fd67:6f64::a58:50");
    let at = SocketAddr::new("fd67:6f64::a58:50".parse().unwrap(), 6379);
    let connect = || TcpStream::connect_timeout(&at, Duration::from_secs(1)).ok();
    let mut connection = wait_for("Redis over IPv6", || bed.lab().inside(CLIENT, connect).unwrap());
    connection.set_read_timeout(Some(PATIENCE)).unwrap();
    // Published ports of both nodes lead to it by IPv6, too.
    let published = [10, 11].map(|node| {
        let at = format!("[fd99::{node}]:16379").parse::<SocketAddr>().unwrap();
        let once = || TcpStream::connect_timeout(&at, Duration::from_secs(1)).ok();
        wait_for("the published port", || bed.lab().inside(CLIENT, once).unwrap())
    });
    let mut ask = |when: &str, expected: usize| {
        for mut connection in &published {
            connection.set_read_timeout(Some(PATIENCE)).unwrap();
            connection.write_all(b"PING\r\n").unwrap();
            let mut answer = String::new();
            BufReader::new(&mut connection).read_line(&mut answer).unwrap();
            assert_eq!(answer, "+PONG\r\n", "{when}");
        }
        connection.write_all(b"INCR counter\r\n").unwrap();
        let mut answer = String::new();
        BufReader::new(&mut connection).read_line(&mut answer).unwrap();
        assert_eq!(answer, format!(":{expected}\r\n"), "{when}");
    };
    ask("before", 1);
    bed.move_to_and_fro("redis", |number, node| {
        ask(&format!("move {number}"), number + 1);
        wait_for(&format!("a new connection to {node}"), || bed.lab().inside(CLIENT, connect).unwrap());
    });
}
