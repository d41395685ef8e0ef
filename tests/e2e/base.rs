//! The base (`isa/base`): a shell that godwit-cc built is the init of a service, and crosses with its children. Needs root,
//! and what `scripts/setup --isa` installs; it builds busybox.

use std::fs;
use std::io::{BufRead as _, BufReader, Write as _};
use std::net::{Ipv4Addr, SocketAddrV4, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

use godwit_isa_packages::base::{BUSYBOX_SMALL, Image};
use godwit_tests::{Bed, wait_for};

const ADDRESS: Ipv4Addr = Ipv4Addr::new(10, 88, 0, 100);
const PORT: u16 = 7000;
const MODES: [&str; 4] = ["precopy", "cold", "postcopy", "hybrid"];
/// How to cross; a busy machine takes longer than the default to let all threads poll.
const CROSS: [&str; 3] = ["--cross", "--max-park-ms", "20000"];

/// The init: a job in the background that counts, a server that starts a session for each connection, and jobs that end
/// all the time, for which it waits.
const INIT: &str = r#"
count() { n=0; while :; do n=$((n + 1)); echo "count $n"; sleep 0.02; done; }
count &
tcpsvd 0.0.0.0 7000 /bin/sh /srv/session &
trap 'echo asked to end; kill %1 %2; exit 7' TERM
turn=0
while :; do
    turn=$((turn + 1))
    sleep 0.05 & job=$!
    (exit $((turn % 100))) & other=$!
    wait $job || echo "wrong: sleep ended with $?"
    wait $other; status=$?
    [ $status = $((turn % 100)) ] || echo "wrong: turn $turn ended with $status"
done
"#;

/// What a client sends is a number; the answer is their sum, and what processes say that a pipeline, a command
/// substitution, a here-document and a job have started.
const SESSION: &str = r#"
sum=0
while read -r number; do
    sum=$((sum + number))
    lines=$(seq "$number" | sort -rn | wc -l)
    (exit $((number % 7))); status=$?
    there=$(rev <<END
$number
END
    )
    echo more >/dev/null & wait $!
    echo "$sum $lines $status $there $?"
done
"#;

/// The client of a session, with one connection, which it never renews.
struct Client {
    stream: BufReader<TcpStream>,
    sum: u64,
    sent: u64,
}

impl Client {
    fn connect(bed: &Bed) -> Self {
        let stream = bed.connect(SocketAddrV4::new(ADDRESS, PORT));
        Self { stream: BufReader::new(stream), sum: 0, sent: 0 }
    }

    fn asks(&mut self) {
        self.sent += 1;
        let number = 1 + self.sent * 37 % 400;
        self.sum += number;
        writeln!(self.stream.get_mut(), "{number}").unwrap();
        let mut answer = String::new();
        self.stream.read_line(&mut answer).unwrap();
        let reversed: String = number.to_string().chars().rev().collect();
        let due = format!("{} {number} {} {reversed} 0\n", self.sum, number % 7);
        assert_eq!(answer, due, "the answer to question {}", self.sent);
    }
}

/// What has been counted so far, which has to be all numbers in their order.
fn counted(bed: &Bed, node: &str, service: &str) -> usize {
    let log = bed.done(node, &["logs", service]);
    assert!(!log.contains("wrong"), "{log}");
    let counts: Vec<_> = log.lines().filter_map(|line| line.strip_prefix("count ")).collect();
    for (number, count) in (1..).zip(&counts) {
        assert_eq!(count.parse(), Ok(number), "{log}");
    }
    counts.len()
}

/// Packs an image of the base, and gives its archive.
fn packed(bed: &Bed, name: &str, busybox: godwit_isa_packages::package::Recipe) -> String {
    let (files, archive) =
        (bed.scratch().join(format!("{name}.files")), bed.scratch().join(format!("{name}.tar")));
    fs::create_dir_all(files.join("srv")).unwrap();
    fs::write(files.join("srv/session"), SESSION).unwrap();
    let image = Image::named(name).unwrap();
    let words = image.pack(busybox, &files, &archive).unwrap_or_else(|error| panic!("{error:#}"));
    let words: Vec<_> = words.iter().map(|word| word.to_str().unwrap()).collect();
    let said = bed.done("a", &words);
    assert!(said.starts_with(&format!("godwit/{name}:")), "{said}");
    archive.to_str().unwrap().to_owned()
}

#[test]
fn a_shell_as_init_crosses_with_pipes_jobs_and_children_in_every_mode() {
    let bed = Bed::up("base");
    let archive = packed(&bed, "base", BUSYBOX_SMALL);
    let address = ADDRESS.to_string();
    let run = ["run", "--name", "shell", "--ip", &address, "--image", &archive, "--", "/bin/sh", "-c", INIT];
    assert_eq!(bed.done("a", &run), "shell\n");
    let enough = Arc::new(AtomicBool::new(false));
    let mut client = Client::connect(&bed);
    client.asks();
    let worker = thread::spawn({
        let enough = Arc::clone(&enough);
        move || {
            while !enough.load(Ordering::Relaxed) {
                client.asks();
            }
            client
        }
    });
    for (mode, (from, to)) in MODES.into_iter().zip([("a", "b"), ("b", "a")].into_iter().cycle()) {
        let report = bed.migrate_so("shell", from, to, &[&["--mode", mode], &CROSS[..]].concat());
        assert!(report.park_ms > 0.0 && report.rewrite_ms > 0.0, "{report:?}");
        println!(
            "{mode}: frozen {:.1} ms, rest {:.1}, rewriting {:.2}",
            report.frozen_ms, report.park_ms, report.rewrite_ms
        );
        let before = counted(&bed, to, "shell");
        wait_for("the job in the background to go on", || {
            (counted(&bed, to, "shell") > before).then_some(())
        });
    }
    enough.store(true, Ordering::Relaxed);
    let mut client = worker.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
    client.asks();
    println!("{} answers on one connection", client.sent);
    // The base's own programs can be executed in it, and are no obstacle.
    assert_eq!(bed.done("a", &["exec", "shell", "/bin/sh", "-c", "seq 3 | sort -rn | head -n 1"]), "3\n");
    bed.done("a", &["stop", "shell"]);
    assert!(bed.done("a", &["logs", "shell"]).contains("asked to end\n"));
}
