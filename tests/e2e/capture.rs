//! Looking inside: packets of a service across moves, and its connections. Needs root.

use std::{
    fs,
    io::{BufRead, BufReader, Read, Write},
    net::{Ipv4Addr, SocketAddr, SocketAddrV4, TcpStream},
    path::Path,
    process::{Child, Command, Stdio},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
        mpsc::{Receiver, channel},
    },
    thread,
    time::Duration,
};

use godwit_lab::workload::Workload;
use godwit_tests::{
    Bed, PATIENCE,
    pcapng::{Capture, stream},
    programs,
};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;

const ADDRESS: Ipv4Addr = Ipv4Addr::new(10, 88, 0, 10);
/// How long a client thinks before it asks again: what it sends then fits the least of machines, on
/// which an unoptimised capture at eight places still drops nothing.
const THINKING: Duration = Duration::from_millis(2);
/// How much later than its successor a packet of the file may be: what a busy machine needs to take a
/// packet out of a queue.
const DISORDER_NS: u64 = 100_000_000;

/// A capture that runs; it ends with the test.
struct Running {
    process: Child,
    /// The lines of its standard error.
    said: Receiver<String>,
}

impl Running {
    /// Begins one, and returns when all nodes look.
    fn start(bed: &Bed, node: &str, arguments: &[&str]) -> Self {
        let mut command = Command::new(programs().join("godwit"));
        command.arg("capture").args(arguments).env("GODWIT_LAB", bed.lab().name()).env("GODWIT_NODE", node);
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut process = command.spawn().unwrap();
        let mut lines = BufReader::new(process.stderr.take().unwrap()).lines().map_while(Result::ok);
        let (sender, said) = channel();
        // A test that no longer listens has heard enough.
        thread::spawn(move || lines.try_for_each(|line| sender.send(line)));
        let running = Self { process, said };
        running.wait_for("capturing ");
        running
    }

    /// Waits until it says a line with these words.
    fn wait_for(&self, words: &str) {
        loop {
            let line = self.said.recv_timeout(PATIENCE).unwrap_or_else(|error| panic!("{words}: {error}"));
            println!("capture: {line}");
            if line.contains(words) {
                return;
            }
        }
    }

    /// Ends it as Ctrl-C does; what it printed.
    fn interrupt(self) -> String {
        kill_process(Pid::from_child(&self.process), Signal::INT).unwrap();
        self.end()
    }

    /// Waits for its end; what it printed.
    fn end(mut self) -> String {
        let mut printed = String::new();
        self.process.stdout.take().unwrap().read_to_string(&mut printed).unwrap();
        let status = self.process.wait().unwrap();
        assert!(status.success(), "{status}: {printed}");
        printed
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        // It has ended already, unless the test fails.
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

/// A client whose every byte, sent and received, is kept.
struct Client {
    connection: TcpStream,
    sent: Vec<u8>,
    received: Vec<u8>,
    rounds: usize,
}

impl Client {
    fn connect(bed: &Bed, to: SocketAddrV4) -> Self {
        Self { connection: bed.connect(to), sent: Vec::new(), received: Vec::new(), rounds: 0 }
    }

    fn address(&self) -> SocketAddrV4 {
        match self.connection.local_addr().unwrap() {
            SocketAddr::V4(address) => address,
            SocketAddr::V6(address) => panic!("{address} is of IPv6"),
        }
    }

    /// Has Redis say something back, now a word and now what fills some segments.
    fn round(&mut self) {
        self.rounds += 1;
        let word = format!("{} ", self.rounds).repeat(1 + self.rounds * 37 % 4000);
        let request = format!("*2\r\n$4\r\nECHO\r\n${}\r\n{word}\r\n", word.len());
        let answer = format!("${}\r\n{word}\r\n", word.len());
        self.connection.write_all(request.as_bytes()).unwrap();
        self.sent.extend(request.as_bytes());
        let mut got = vec![0; answer.len()];
        self.connection.read_exact(&mut got).unwrap();
        assert_eq!(got, answer.as_bytes());
        self.received.extend(got);
    }

    /// The same over and over while `work` runs.
    fn meanwhile(&mut self, work: impl FnOnce() + Send) {
        let done = Arc::new(AtomicBool::new(false));
        thread::scope(|scope| {
            let end = Arc::clone(&done);
            let worker = scope.spawn(move || {
                let _end = OnDrop(end);
                work();
            });
            while !done.load(Ordering::Relaxed) {
                self.round();
                thread::sleep(THINKING);
            }
            worker.join().unwrap();
        });
    }
}

/// Raised at the end of a piece of work, also of one that panics.
struct OnDrop(Arc<AtomicBool>);

impl Drop for OnDrop {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// Every byte of both directions, at these interfaces together.
fn assert_whole(capture: &Capture, client: &Client, service: SocketAddrV4, at: &[&str]) {
    let ways = [(client.address(), service, &client.sent), (service, client.address(), &client.received)];
    for (from, to, expected) in ways {
        let (seen, behind) = stream(capture.at(at), from, to);
        assert_eq!((seen.len(), behind), (expected.len(), 0), "{from} to {to} at {at:?}: whole, and no more");
        assert!(seen == *expected, "{from} to {to} at {at:?}: other bytes");
    }
}

#[test]
fn a_capture_follows_a_service_over_moves_without_a_gap() {
    let bed = Bed::up("capture");
    let preset = bed.build(Workload::Redis);
    bed.run("a", "redis", ADDRESS, &preset, &[]);
    let service = preset.at(ADDRESS);
    let path = bed.scratch().join("redis.pcapng");
    // Asked of the node that the service comes to.
    bed.knows("b", "redis");
    let running = Running::start(&bed, "b", &["redis", "-o", path.to_str().unwrap(), "--at", "all"]);

    let mut client = Client::connect(&bed, service);
    (0..20).for_each(|_| client.round());
    for (mode, from, to) in [("precopy", "a", "b"), ("cold", "b", "a")] {
        client.meanwhile(|| drop(bed.migrate_so("redis", from, to, &["--mode", mode])));
        (0..20).for_each(|_| client.round());
    }
    let printed = running.interrupt();

    let capture = Capture::read(&path);
    println!("{} packets, {} rounds: {printed}", capture.packets.len(), client.rounds);
    let at = |beginning| ["a", "b"].map(|node| capture.interface(node, beginning).to_owned());
    let (inside, ports, uplinks) = (at("eth0"), at("gws"), at("uplink0"));
    for names in [&inside, &ports, &uplinks] {
        let names = names.each_ref().map(String::as_str);
        assert_whole(&capture, &client, service, &names);
        for name in names {
            assert!(capture.at(&[name]).count() > 40, "the service was on both nodes: {name}");
        }
    }
    assert_eq!(capture.interfaces.len(), 8, "{:?}", capture.interfaces);
    assert_eq!(capture.statistics.len(), 8);
    for (interface, (received, dropped)) in &capture.statistics {
        let packets = capture.packets.iter().filter(|packet| packet.interface == *interface).count();
        assert_eq!(*dropped, 0, "{}", capture.interfaces[*interface]);
        assert!(*received >= packets as u64, "{received} received, {packets} in the file");
    }
    for pair in capture.packets.windows(2) {
        assert!(pair[0].time_ns <= pair[1].time_ns + DISORDER_NS, "in the order of time");
    }
    assert!(printed.starts_with(&format!("{} packets in ", capture.packets.len())), "{printed}");
}

#[test]
fn a_capture_goes_on_without_a_node_and_with_it_when_it_is_back() {
    let bed = Bed::up("capt-node");
    let preset = bed.build(Workload::Redis);
    bed.run("a", "redis", ADDRESS, &preset, &[]);
    let path = bed.scratch().join("redis.pcapng");
    let running = Running::start(&bed, "a", &["redis", "-o", path.to_str().unwrap()]);
    let mut client = Client::connect(&bed, preset.at(ADDRESS));
    client.round();
    bed.lab().stop_node("b").unwrap();
    running.wait_for("node b: ");
    client.round();
    bed.lab().start_node("b").unwrap();
    running.wait_for("node b captures again");
    bed.migrate("redis", "a", "b");
    client.round();
    running.interrupt();
    let capture = Capture::read(&path);
    assert_eq!(capture.interfaces.len(), 2, "{:?}", capture.interfaces);
    assert_whole(&capture, &client, preset.at(ADDRESS), &["a:eth0", "b:eth0"]);
    assert!(capture.at(&["b:eth0"]).count() > 0);
}

/// Sockets of a service as `godwit inspect` tells them.
fn sockets(bed: &Bed, node: &str) -> Vec<Value> {
    let service: Value = bed.json(node, &["inspect", "redis"]);
    service["connections"]["list"].as_array().unwrap().clone()
}

fn is_refused(bed: &Bed, arguments: &[&str], reason: &str, file: &Path) {
    let said = bed.godwit("a", &[&["capture", "-o", file.to_str().unwrap()], arguments].concat());
    assert_eq!(said.code, 1, "{said:?}");
    assert!(said.stderr.contains(reason), "{said:?}");
    assert!(!file.exists(), "what is refused writes no file");
}

#[test]
fn inspect_shows_connections_and_a_capture_only_what_it_was_asked_for() {
    let bed = Bed::up("inside");
    let preset = bed.build(Workload::Redis);
    bed.run("a", "redis", ADDRESS, &preset, &[]);
    let service = preset.at(ADDRESS);
    let mut client = Client::connect(&bed, service);
    client.round();

    let remote = client.address().to_string();
    let find = |node| {
        let all = sockets(&bed, node);
        let listening = all.iter().any(|socket| socket["state"] == "listen");
        let ours = all.iter().find(|socket| socket["remote"] == remote.as_str()).cloned();
        assert!(listening, "{all:?}");
        ours.unwrap_or_else(|| panic!("{remote} is not among {all:?}"))
    };
    let socket = find("a");
    assert_eq!((&socket["protocol"], &socket["state"]), (&"tcp".into(), &"established".into()));
    assert_eq!(socket["local"], service.to_string());
    assert!(socket["rtt_us"].as_u64().unwrap() > 0, "{socket}");
    let shown = bed.done("a", &["inspect", "redis"]);
    assert!(shown.contains("1 tcp established") && shown.contains(&remote), "{shown}");

    bed.migrate("redis", "a", "b");
    client.round();
    // Asked of a node that has it no more.
    assert_eq!(find("a")["state"], "established");

    let path = bed.scratch().join("some.pcapng");
    let file = path.to_str().unwrap();
    let filter = ["tcp", "dst", "port", &service.port().to_string()].map(str::to_owned);
    let arguments = ["redis", "-o", file, "--count", "5", "--snaplen", "60"];
    let arguments = [&arguments[..], &filter.each_ref().map(String::as_str)].concat();
    let running = Running::start(&bed, "a", &arguments);
    (0..20).for_each(|_| client.round());
    running.end();
    let capture = Capture::read(&path);
    assert_eq!(capture.packets.len(), 5);
    for packet in &capture.packets {
        assert!(packet.data.len() <= 60, "{packet:?}");
        assert_eq!(packet.data[36..38], service.port().to_be_bytes(), "{packet:?}");
    }
    fs::remove_file(&path).unwrap();

    is_refused(&bed, &["nobody"], "there is no service nobody", &path);
    is_refused(&bed, &["redis", "frob"], "\"frob\" is not a test", &path);
}
