//! nginx: several workers under wrk, over connections that all stay. Needs root.

use std::{
    fs,
    io::{BufRead, BufReader, Read, Write},
    net::{Ipv4Addr, TcpStream},
    process::Stdio,
};

use godwit_lab::workload::Workload;
use godwit_tests::{Bed, PATIENCE, wait_for};
use rustix::process::{Pid, Signal, kill_process};

const ADDRESS: Ipv4Addr = Ipv4Addr::new(10, 88, 0, 30);
/// Connections of wrk.
const CONNECTIONS: u64 = 16;

/// A connection over which one request after the other is made.
struct Http(BufReader<TcpStream>);

impl Http {
    fn get(&mut self, path: &str) -> String {
        write!(self.0.get_mut(), "GET {path} HTTP/1.1\r\nHost: nginx\r\n\r\n").unwrap();
        let mut length = 0;
        for number in 0.. {
            let mut line = String::new();
            self.0.read_line(&mut line).unwrap();
            assert!(number > 0 || line == "HTTP/1.1 200 OK\r\n", "{path}: {line:?}");
            if let Some(value) = line.strip_prefix("Content-Length: ") {
                length = value.trim().parse().unwrap();
            }
            if line == "\r\n" {
                break;
            }
        }
        let mut body = vec![0; length];
        self.0.read_exact(&mut body).unwrap();
        String::from_utf8(body).unwrap()
    }

    /// What nginx has counted so far: connections that it accepted, those that it took care of, and requests. While a
    /// worker accepts a connection, the first is one more than the second.
    fn status(&mut self) -> [u64; 3] {
        let text = self.get("/status");
        let numbers = text.lines().nth(2).unwrap().split_whitespace().map(|word| word.parse().unwrap());
        numbers.collect::<Vec<u64>>().try_into().unwrap_or_else(|_| panic!("{text}"))
    }
}

#[test]
fn moves_break_no_connection_of_wrk() {
    let bed = Bed::up("nginx");
    let preset = bed.build(Workload::Nginx);
    let configuration = preset.rootfs.join("etc/nginx/nginx.conf");
    let text = fs::read_to_string(&configuration).unwrap();
    let changed = text
        .replace("worker_processes 2;", "worker_processes 4;")
        .replace("root /srv;", "root /srv; location = /status { stub_status; }");
    assert!(changed.contains("stub_status") && changed.contains("worker_processes 4;"), "{text}");
    fs::write(&configuration, changed).unwrap();
    bed.run("a", "web", ADDRESS, &preset, &[]);

    let mut own = Http(BufReader::new(bed.connect(preset.at(ADDRESS))));
    assert_eq!(own.get("/"), "served by nginx\n");
    let mut wrk = bed.on_client("wrk");
    wrk.args(["--threads", "1", "--connections", &CONNECTIONS.to_string(), "--duration", "3600s"]);
    // By itself it counts an answer that takes 2 s as an error: on a busy machine a pause alone takes 1.5 s.
    wrk.args(["--timeout", &format!("{}s", PATIENCE.as_secs())]);
    wrk.arg(format!("http://{ADDRESS}/large")).stdout(Stdio::piped()).stderr(Stdio::piped());
    let wrk = wrk.spawn().unwrap();
    // All of wrk's connections and our own.
    wait_for("all connections of wrk", || (own.status()[1] > CONNECTIONS).then_some(()));
    let [accepted, handled, mut served] = own.status();
    assert_eq!(accepted, handled);
    let progress = |own: &mut Http, served: &mut u64| {
        *served = wait_for("more requests", || {
            let [.., now] = own.status();
            (now > *served + 500).then_some(now)
        });
    };
    progress(&mut own, &mut served);
    bed.move_to_and_fro("web", |number, _| {
        progress(&mut own, &mut served);
        let now = own.status();
        assert_eq!(now[..2], [accepted; 2], "a connection was made anew by move {number}");
        assert_eq!(own.get("/"), "served by nginx\n");
    });
    // wrk says what it saw when it is interrupted.
    kill_process(Pid::from_child(&wrk), Signal::INT).unwrap();
    let output = wrk.wait_with_output().unwrap();
    let said = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success() && said.contains("requests in"), "{output:?}");
    assert!(!said.contains("Socket errors") && !said.contains("Non-2xx"), "{said}");
    println!("{served} requests served over {accepted} connections");
}
