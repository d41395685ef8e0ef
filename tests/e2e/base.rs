//! The base (`isa/base`): a shell that godwit-cc built is the init of a service, and crosses with its children. Needs root,
//! and what `scripts/setup --isa` installs; it builds busybox.

use std::fs;
use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::net::{Ipv4Addr, Shutdown, SocketAddrV4, TcpStream};
use std::os::fd::OwnedFd;
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

use godwit_isa_packages::base::{BUSYBOX_SMALL, Image};
use godwit_isa_packages::package::Recipe;
use godwit_lab::workload::{RedisClient, resp::Reply};
use godwit_tests::mqtt::MqttClient;
use godwit_tests::{Bed, CLIENT, PATIENCE, tier, wait_for};

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

/// The same sums in Lua, with a string that grows and shrinks.
const SESSION_IN_LUA: &str = r#"
local sum = 0
for line in io.lines() do
    sum = sum + tonumber(line)
    local parts = {}
    for i = 1, tonumber(line) do parts[i] = tostring(i) end
    io.write(sum, " ", #table.concat(parts, ","), "\n")
    io.flush()
end
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
fn packed(bed: &Bed, name: &str, busybox: Recipe) -> String {
    let (files, archive) =
        (bed.scratch().join(format!("{name}.files")), bed.scratch().join(format!("{name}.tar")));
    fs::create_dir_all(files.join("srv/www")).unwrap();
    fs::write(files.join("srv/www/page"), page()).unwrap();
    fs::write(files.join("srv/session"), SESSION).unwrap();
    fs::write(files.join("srv/session.lua"), SESSION_IN_LUA).unwrap();
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

/// A client that asks once more, and fails where the answer is not what it has to be.
type Asks = Box<dyn FnMut(u64) + Send>;

/// Lines to and from a server on one connection.
fn lines(bed: &Bed, mut due: impl FnMut(u64) -> (String, String) + Send + 'static) -> Asks {
    let mut stream = BufReader::new(bed.connect(SocketAddrV4::new(ADDRESS, PORT)));
    Box::new(move |turn| {
        let (question, answer) = due(turn);
        stream.get_mut().write_all(question.as_bytes()).unwrap();
        let mut said = String::new();
        stream.read_line(&mut said).unwrap();
        assert_eq!(said, answer, "turn {turn}");
    })
}

fn redis(bed: &Bed) -> Asks {
    let at = SocketAddrV4::new(ADDRESS, 6379);
    let mut client = RedisClient::connect(bed.lab(), CLIENT, at, PATIENCE).unwrap();
    Box::new(move |turn| {
        let value = format!("{turn:x}").repeat(100);
        let turns = Reply::Integer(i64::try_from(turn).unwrap());
        assert_eq!(client.call(&["RPUSH", "all", &value]).unwrap(), turns);
        assert_eq!(client.call(&["INCR", "visits"]).unwrap(), turns);
        let last = client.call(&["EVAL", "return redis.call('lindex', KEYS[1], -1)", "1", "all"]).unwrap();
        assert_eq!(last, Reply::Bulk(Some(value.into_bytes())));
    })
}

/// A transaction each turn, whose journal is a file of its own.
fn sqlite(bed: &Bed) -> Asks {
    let mut sum = 0;
    lines(bed, move |turn| {
        sum += turn * 37 % 400;
        let statements = format!(
            "CREATE TABLE IF NOT EXISTS turns(number, text); INSERT INTO turns VALUES({}, '{turn:x}'); \
             SELECT count(*), sum(number), (SELECT text FROM turns WHERE rowid = {turn}) FROM turns;\n",
            turn * 37 % 400
        );
        (statements, format!("{turn}|{sum}|{turn:x}\n"))
    })
}

/// A page to read each turn, for which a process is started.
fn ocr(bed: &Bed) -> Asks {
    let mut stream = bed.connect(SocketAddrV4::new(ADDRESS, PORT));
    let (question, answer) = godwit_isa_packages::gocr::question(4);
    let mut came = vec![0; answer.len()];
    Box::new(move |turn| {
        stream.write_all(&question).unwrap();
        stream.read_exact(&mut came).unwrap();
        let text = String::from_utf8_lossy(&came);
        assert!(came == answer, "turn {turn}: {text}");
    })
}

fn lua(bed: &Bed) -> Asks {
    let mut sum = 0;
    lines(bed, move |turn| {
        let number = 1 + turn * 37 % 400;
        sum += number;
        let length: usize = (1..=number).map(|part| part.to_string().len() + 1).sum();
        (format!("{number}\n"), format!("{sum} {}\n", length - 1))
    })
}

/// A page that takes a server a while: lighttpd answers 65,535 requests on one connection, and no more.
fn page() -> Vec<u8> {
    let mut random = fastrand::Rng::with_seed(11);
    std::iter::repeat_with(|| random.alphanumeric() as u8).take(1 << 20).collect()
}

fn web(bed: &Bed) -> Asks {
    let mut stream = BufReader::new(bed.connect(SocketAddrV4::new(ADDRESS, PORT)));
    let page = page();
    let mut body = vec![0; page.len()];
    Box::new(move |turn| {
        write!(stream.get_mut(), "GET /page HTTP/1.1\r\nHost: base\r\n\r\n").unwrap();
        let mut head = String::new();
        while !head.ends_with("\r\n\r\n") {
            assert!(stream.read_line(&mut head).unwrap() > 0, "turn {turn}: {head}");
        }
        assert!(head.starts_with("HTTP/1.1 200 OK\r\n"), "turn {turn}: {head}");
        stream.read_exact(&mut body).unwrap();
        assert!(body == page, "turn {turn}: another page");
    })
}

fn mosquitto(bed: &Bed) -> Asks {
    let connect = |name: &str| MqttClient::new(bed.connect(SocketAddrV4::new(ADDRESS, 1883)), name, true);
    let (mut publisher, mut subscriber) = (connect("publisher"), connect("subscriber"));
    subscriber.subscribe("turns");
    Box::new(move |turn| {
        publisher.publish("turns", &turn.to_string());
        let message = subscriber.message();
        assert_eq!(message.text, turn.to_string());
        subscriber.acknowledge(&message);
    })
}

fn aria2(bed: &Bed) -> Asks {
    let mut stream = BufReader::new(bed.connect(SocketAddrV4::new(ADDRESS, PORT)));
    Box::new(move |turn| {
        godwit_isa_packages::aria2::ask(&mut stream, turn).unwrap_or_else(|error| panic!("{error:#}"));
    })
}

/// How many times each service crosses in a full test.
const CROSSINGS: usize = 12;

/// A service of the base crosses in each mode again and again, while a client with connections that it never renews asks
/// without a pause.
fn crosses_under_load(name: &str, command: &[&str], connect: impl Fn(&Bed) -> Asks) {
    if !tier::is_full() {
        return;
    }
    let bed = Bed::up(&format!("base-{name}"));
    let archive = packed(&bed, name, BUSYBOX_SMALL);
    let address = ADDRESS.to_string();
    let mut run = vec!["run", "--name", name, "--ip", &address, "--image", &archive];
    if !command.is_empty() {
        run.push("--");
        run.extend(command);
    }
    assert_eq!(bed.done("a", &run), format!("{name}\n"));
    let enough = Arc::new(AtomicBool::new(false));
    let mut asks = connect(&bed);
    let worker = thread::spawn({
        let enough = Arc::clone(&enough);
        move || {
            for turn in 1.. {
                asks(turn);
                if enough.load(Ordering::Relaxed) {
                    return turn;
                }
            }
            0
        }
    });
    let ways = [("a", "b"), ("b", "a")].into_iter().cycle();
    for (mode, (from, to)) in MODES.into_iter().cycle().zip(ways).take(CROSSINGS) {
        let report = bed.migrate_so(name, from, to, &[&["--mode", mode], &CROSS[..]].concat());
        println!("{name}, {mode}: frozen {:.1} ms, rest {:.1}", report.frozen_ms, report.park_ms);
        assert!(!worker.is_finished(), "the client of {name} has ended");
    }
    enough.store(true, Ordering::Relaxed);
    let turns = worker.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
    println!("{name}: {turns} turns");
}

#[test]
fn redis_of_the_base_crosses_under_load() {
    crosses_under_load("redis", &[], redis);
}

#[test]
fn sqlite_of_the_base_crosses_under_load_with_its_database() {
    crosses_under_load("sqlite", &[], sqlite);
}

#[test]
fn a_shell_that_starts_gocr_for_each_picture_crosses_under_load() {
    crosses_under_load("gocr", &[], ocr);
}

#[test]
fn nginx_of_the_base_crosses_under_load_with_master_and_workers() {
    crosses_under_load("nginx", &[], web);
}

#[test]
fn lighttpd_of_the_base_crosses_under_load() {
    crosses_under_load("lighttpd", &[], web);
}

#[test]
fn mosquitto_of_the_base_crosses_under_load() {
    crosses_under_load("mosquitto", &[], mosquitto);
}

#[test]
fn aria2_of_the_base_crosses_under_load() {
    crosses_under_load("aria2", &[], aria2);
}

#[test]
fn lua_of_the_base_crosses_under_load() {
    crosses_under_load(
        "lua",
        &["/usr/bin/tcpsvd", "0.0.0.0", "7000", "/usr/bin/lua", "/srv/session.lua"],
        lua,
    );
}

/// What is sent to the gzip server, piece by piece.
fn texts() -> impl Iterator<Item = String> {
    let mut random = fastrand::Rng::with_seed(7);
    std::iter::repeat_with(move || (0..1000).map(|_| format!("{} ", random.u16(..5000))).collect())
}

/// Sends until it is enough; how many pieces.
fn sends(stream: &TcpStream, enough: &AtomicBool) -> usize {
    let mut stream = stream;
    let mut count = 0;
    for text in texts() {
        stream.write_all(text.as_bytes()).unwrap();
        count += 1;
        if enough.load(Ordering::Relaxed) {
            break;
        }
    }
    stream.shutdown(Shutdown::Write).unwrap();
    count
}

/// Reads what comes back until its end, by the machine's own gzip; how many pieces.
fn unpacks(stream: &TcpStream) -> usize {
    let input = Stdio::from(OwnedFd::from(stream.try_clone().unwrap()));
    let mut gzip = Command::new("gzip").arg("-dc").stdin(input).stdout(Stdio::piped()).spawn().unwrap();
    let mut output = BufReader::new(gzip.stdout.take().unwrap());
    let mut count = 0;
    for text in texts() {
        if output.fill_buf().unwrap().is_empty() {
            break;
        }
        let mut came = vec![0; text.len()];
        output.read_exact(&mut came).unwrap();
        assert!(came == text.as_bytes(), "piece {count} came back as another one");
        count += 1;
    }
    assert!(gzip.wait().unwrap().success());
    count
}

#[test]
fn a_gzip_server_of_the_base_crosses_under_load() {
    if !tier::is_full() {
        return;
    }
    let bed = Bed::up("base-gzip");
    let archive = packed(&bed, "gzip", BUSYBOX_SMALL);
    let address = ADDRESS.to_string();
    bed.done("a", &["run", "--name", "gzip", "--ip", &address, "--image", &archive]);
    let stream = bed.connect(SocketAddrV4::new(ADDRESS, PORT));
    stream.set_read_timeout(None).unwrap();
    let enough = AtomicBool::new(false);
    let (sent, came) = thread::scope(|scope| {
        let (sender, reader) = (scope.spawn(|| sends(&stream, &enough)), scope.spawn(|| unpacks(&stream)));
        let ways = [("a", "b"), ("b", "a")].into_iter().cycle();
        for (mode, (from, to)) in MODES.into_iter().cycle().zip(ways).take(CROSSINGS) {
            bed.migrate_so("gzip", from, to, &[&["--mode", mode], &CROSS[..]].concat());
            assert!(!sender.is_finished() && !reader.is_finished(), "a client has ended");
        }
        enough.store(true, Ordering::Relaxed);
        (sender.join().unwrap(), reader.join().unwrap())
    });
    assert_eq!(came, sent);
    println!("gzip: {sent} pieces");
}
