//! `godwit place`: a service goes to where its clients are near. Needs root.

use std::io::{Read, Write};
use std::net::{Ipv4Addr, SocketAddrV4};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

use godwit_lab::conditions::{Conditions, Step};
use godwit_lab::workload::Workload;
use godwit_tests::{Bed, wait_for};
use serde_json::Value;

pub(crate) const NAME: &str = "answers";
const ADDRESS: Ipv4Addr = Ipv4Addr::new(10, 88, 0, 71);
const PORT: u16 = 6379;

/// A client that asks and waits for the answer, again and again.
pub(crate) struct Client {
    ends: Arc<AtomicBool>,
    asking: JoinHandle<u64>,
}

impl Client {
    pub(crate) fn of(bed: &Bed) -> Self {
        Self::that_thinks(bed, Duration::from_millis(10))
    }

    /// Each answer is acknowledged with the next question.
    fn that_thinks(bed: &Bed, thought: Duration) -> Self {
        let mut stream = bed.connect(SocketAddrV4::new(ADDRESS, PORT));
        let ends = Arc::new(AtomicBool::new(false));
        let is_over = Arc::clone(&ends);
        let asking = std::thread::spawn(move || {
            let mut asked = 0;
            while !is_over.load(Ordering::Relaxed) {
                std::thread::sleep(thought);
                stream.write_all(b"PING\r\n").unwrap();
                let mut answer = [0; 7];
                stream.read_exact(&mut answer).unwrap();
                assert_eq!(&answer, b"+PONG\r\n");
                asked += 1;
            }
            asked
        });
        Self { ends, asking }
    }

    /// No answer has been lost.
    pub(crate) fn leaves(self) -> u64 {
        self.ends.store(true, Ordering::Relaxed);
        self.asking.join().unwrap()
    }
}

pub(crate) fn start(bed: &Bed) {
    bed.run("a", NAME, ADDRESS, &bed.build(Workload::Redis), &[]);
}

/// Each way between the client and a node takes so long, each way.
pub(crate) fn far(bed: &Bed, node: &str, ms: u64) {
    let conditions = Conditions { delay: Duration::from_millis(ms), ..Conditions::default() };
    bed.lab().set_way(node, "client", &[Step { at: Duration::ZERO, conditions }]).unwrap();
}

/// The answer, once no node was silent for too long, as on a busy machine, and nothing of the service is under way.
fn placed(bed: &Bed, node: &str, more: &[&str]) -> Value {
    wait_for("a decision among all nodes", || {
        let said = bed.godwit(node, &[&["--json", "place", NAME, "--dry-run"], more].concat());
        let is_busy = said.stderr.contains("try again") || said.stdout.contains("on their way");
        if is_busy || said.stdout.contains("\"silent\"") {
            return None;
        }
        assert_eq!(said.code, 0, "{said:?}");
        Some(serde_json::from_str(&said.stdout).unwrap())
    })
}

fn reasons(answer: &Value) -> Vec<&str> {
    let all = answer["reasons"].as_array().unwrap().iter();
    all.filter_map(|why| why["kind"].as_object()?.keys().next().map(String::as_str)).collect()
}

#[test]
fn a_service_moves_to_where_its_client_is_near_and_stays_there() {
    let bed = Bed::up_with("place", |config| {
        config.nodes.push("c".into());
        // Nodes of a lab share processors, which other tests keep busy.
        config.programs.serve_arguments.extend(["--busy-permille", "100"].map(str::to_owned));
    });
    start(&bed);
    assert_eq!(reasons(&placed(&bed, "a", &[])), ["no_clients"]);
    // So far that what a busy machine adds does not matter.
    far(&bed, "a", 50);
    far(&bed, "c", 50);
    let client = Client::of(&bed);
    let answer = wait_for("a client that has sent something", || {
        let answer = placed(&bed, "a", &[]);
        (answer["active"] == 1).then_some(answer)
    });
    assert_eq!((answer["to"].as_str(), answer["node"].as_str()), (Some("b"), Some("a")), "{answer}");
    assert_eq!((&answer["active"], &answer["over"]), (&1.into(), &1.into()), "{answer}");
    let clients = &answer["clients"][0];
    assert!(clients["here"]["expected_us"].as_u64() >= Some(99_000), "{answer}");
    assert_eq!(clients["there"]["from"], "probe", "{answer}");
    assert!(clients["there"]["expected_us"].as_u64() < clients["here"]["expected_us"].as_u64(), "{answer}");
    let other = answer["others"].as_array().unwrap().iter().find(|other| other["name"] == "c").unwrap();
    assert!(other["refusals"].as_array().unwrap().is_empty(), "{answer}");
    // Nothing has moved, and only c is no better.
    let only = placed(&bed, "a", &["--to", "c"]);
    assert_eq!((only["to"].as_str(), only["node"].as_str()), (Some(""), Some("a")), "{only}");

    let said = bed.done("a", &["place", NAME, "--explain"]);
    assert!(said.starts_with("answers is better on b than on a\n  clients"), "{said}");
    assert!(
        said.contains("by echoes from both nodes") && said.contains("answers moved from a to b"),
        "{said}"
    );
    bed.knows("a", NAME);

    let stays = wait_for("the latency of the connection on b", || {
        let answer = placed(&bed, "b", &[]);
        let is_measured = answer["active"] == 1 && answer["unmeasured"] == 0;
        (is_measured && answer["over"] == 0).then_some(answer)
    });
    assert_eq!((stays["node"].as_str(), reasons(&stays)), (Some("b"), vec!["no_better"]), "{stays}");
    assert!(client.leaves() > 10);
    assert_eq!(reasons(&placed(&bed, "b", &[])), ["no_clients"]);
}

/// The kernel sees the time until a client acknowledges, which is no part of the time that the client waits.
#[test]
fn a_client_that_thinks_is_no_farther_away() {
    let bed = Bed::up("place-thinks");
    start(&bed);
    let client = Client::that_thinks(&bed, Duration::from_millis(35));
    wait_for("a round trip with the client's thought in it", || {
        let list = bed.json::<Value>("a", &["inspect", NAME])["connections"]["list"].clone();
        let of_client = |found: &&Value| found["state"] == "established";
        let found = list.as_array().unwrap().iter().find(of_client)?;
        (found["rtt_us"].as_u64() >= Some(25_000)).then_some(())
    });
    let answer = wait_for("a latency without it", || {
        let answer = placed(&bed, "a", &["--latency", "20ms"]);
        let is_measured = answer["active"] == 1 && answer["unmeasured"] == 0;
        (is_measured && answer["over"] == 0).then_some(answer)
    });
    assert!(answer["clients"][0]["here"]["expected_us"].as_u64() < Some(20_000), "{answer}");
    assert!(client.leaves() > 10);
}

#[test]
fn what_cannot_be_asked_for_is_refused() {
    let bed = Bed::up("place-none");
    start(&bed);
    let said = bed.godwit("a", &["place", NAME, "--to", "a"]);
    assert!(said.code == 1 && said.stderr.contains("is on node a already"), "{said:?}");
    let said = bed.godwit("a", &["place", NAME, "--latency", "0ms"]);
    assert!(said.code == 2 && said.stderr.contains("write a latency with its unit"), "{said:?}");
}
