//! `godwitd serve --metrics`: what Prometheus reads of a node agrees with what the node says otherwise, whoever else asks.
//! Needs root, and `promtool` and `prometheus` of Debian's package prometheus.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    io::{Read, Write},
    net::{Ipv4Addr, SocketAddrV4, TcpStream},
    path::{Path, PathBuf},
    process::{Child, Command, Output, Stdio},
};

use godwit_lab::workload::Workload;
use godwit_tests::{
    Bed, Report, tier,
    victim::{self, Victim},
    wait_for,
};
use serde_json::Value;

use crate::place::{Client, NAME};

const ADDRESS: Ipv4Addr = Ipv4Addr::new(10, 88, 0, 71);
const PORT: u16 = 7121;
/// More than the connections that a node has at a time.
const IDLE: usize = 200;

/// Two nodes with metrics.
fn up(test: &str) -> Bed {
    Bed::up_with(test, |config| {
        // Nodes of a lab share processors, which other tests keep busy.
        config.programs.serve_arguments.extend(["--busy-permille", "100"].map(str::to_owned));
        config.programs.serve_arguments.extend(metrics_flags());
    })
}

/// A service with a client, on nodes with metrics, whose moves can be held.
fn watched(test: &str) -> Victim {
    Victim::up_with(test, |config, _| config.programs.serve_arguments.extend(metrics_flags()), |_| Vec::new())
}

/// Within reach of the client host.
fn metrics_flags() -> [String; 2] {
    ["--metrics".into(), format!("0.0.0.0:{PORT}")]
}

fn address(bed: &Bed, node: &str) -> SocketAddrV4 {
    SocketAddrV4::new(bed.lab().address(node).unwrap(), PORT)
}

/// Status and body of an answer.
fn ask(bed: &Bed, node: &str, method: &str, path: &str) -> (u16, String) {
    let mut stream = bed.connect(address(bed, node));
    write!(stream, "{method} {path} HTTP/1.1\r\nHost: {node}\r\n\r\n").unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    let (head, body) = answer.split_once("\r\n\r\n").unwrap_or_else(|| panic!("{answer}"));
    let status = head.split(' ').nth(1).and_then(|status| status.parse().ok());
    (status.unwrap_or_else(|| panic!("{head}")), body.to_owned())
}

/// One answer.
struct Scrape {
    text: String,
    /// By name and labels, as they are written.
    samples: BTreeMap<String, f64>,
}

impl Scrape {
    fn of(bed: &Bed, node: &str) -> Self {
        let (status, text) = ask(bed, node, "GET", "/metrics");
        assert_eq!(status, 200, "{text}");
        let lines = text.lines().filter(|line| !line.starts_with('#'));
        let sample = |line: &str| {
            let (series, value) = line.rsplit_once(' ').unwrap_or_else(|| panic!("{line}"));
            (series.to_owned(), value.parse().unwrap_or_else(|error| panic!("{line}: {error}")))
        };
        let samples = lines.map(sample).collect();
        Self { text, samples }
    }

    fn get(&self, series: &str) -> Option<f64> {
        self.samples.get(series).copied()
    }

    fn has(&self, series: &str, value: f64) -> bool {
        self.get(series).is_some_and(|found| (found - value).abs() < 1e-6)
    }

    /// Names of metrics, not of the series of a histogram.
    fn names(&self) -> BTreeSet<String> {
        let types = self.text.lines().filter_map(|line| line.strip_prefix("# TYPE "));
        types.filter_map(|line| line.split(' ').next()).map(str::to_owned).collect()
    }

    /// Whether any series is about the service.
    fn is_about(&self, service: &str) -> bool {
        self.text.contains(&format!("service=\"{service}\""))
    }
}

/// Waits for an answer as it should be.
fn scrape(bed: &Bed, node: &str, what: &str, right: impl Fn(&Scrape) -> bool) -> Scrape {
    wait_for(what, || Some(Scrape::of(bed, node)).filter(&right))
}

fn packaged(file: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../packaging/prometheus").join(file)
}

fn promtool(arguments: &[&str], input: &str) -> Output {
    let mut command = Command::new("promtool");
    command.args(arguments).current_dir(packaged("")).stdin(Stdio::piped());
    let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    child.stdin.take().unwrap().write_all(input.as_bytes()).unwrap();
    child.wait_with_output().unwrap()
}

/// All expressions of the dashboard.
fn expressions(of: &Value, found: &mut Vec<String>) {
    match of {
        Value::Object(fields) => {
            for (name, value) in fields {
                match (name.as_str(), value) {
                    ("expr" | "definition", Value::String(text)) => found.push(text.clone()),
                    _ => expressions(value, found),
                }
            }
        }
        Value::Array(values) => values.iter().for_each(|value| expressions(value, found)),
        _ => {}
    }
}

fn dashboard() -> Vec<String> {
    let text = fs::read_to_string(packaged("godwit-dashboard.json")).unwrap();
    let mut found = Vec::new();
    expressions(&serde_json::from_str(&text).unwrap(), &mut found);
    assert!(found.len() > 30, "{found:?}");
    found
}

/// Names of metrics in a text, but the parts of histograms, whose metrics they are.
fn named(text: &str) -> BTreeSet<String> {
    let words = text.split(|letter: char| !letter.is_ascii_alphanumeric() && letter != '_');
    let words = words.filter(|word| word.starts_with("godwit_") || word.starts_with("process_"));
    let parts = ["_bucket", "_sum", "_count"];
    words
        .map(|word| parts.iter().find_map(|part| word.strip_suffix(part)).unwrap_or(word).to_owned())
        .collect()
}

/// Those of the table in the documentation; a test of godwitd says that they are all that it has.
fn documented() -> BTreeSet<String> {
    let page = fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/metrics.md")).unwrap();
    let cells = page.lines().filter_map(|line| line.strip_prefix("| `")?.split('`').next());
    cells
        .filter(|name| name.starts_with("godwit_") || name.starts_with("process_"))
        .map(str::to_owned)
        .collect()
}

/// The report's frozen time is in the histogram's sum, and in each bucket above it.
fn agrees(scrape: &Scrape, report: &Report) {
    let labels = format!("mode=\"{}\",outcome=\"moved\"", report.mode);
    let of = |name: &str| {
        scrape.get(&format!("{name}{{{labels}}}")).unwrap_or_else(|| panic!("{name}{{{labels}}}"))
    };
    assert!((of("godwit_migrations_total") - 1.0).abs() < 1e-9);
    for (name, ms) in [
        ("godwit_migration_frozen_seconds", report.frozen_ms),
        ("godwit_migration_duration_seconds", report.total_ms),
    ] {
        assert!((of(&format!("{name}_count")) - 1.0).abs() < 1e-9, "{name}");
        // The report has microseconds.
        assert!((of(&format!("{name}_sum")) - ms / 1e3).abs() < 1e-5, "{name}: {report:?}");
        let bucket = format!("{name}_bucket{{{labels},le=\"");
        let mut buckets = 0;
        for (series, count) in scrape.samples.range(bucket.clone()..) {
            let Some(bound) = series.strip_prefix(&bucket) else { break };
            let bound = bound.trim_end_matches("\"}").replace("+Inf", "inf");
            let is_below = ms / 1e3 <= bound.parse::<f64>().unwrap();
            assert!((count - f64::from(u8::from(is_below))).abs() < 1e-9, "{series} {count}: {report:?}");
            buckets += 1;
        }
        assert!(buckets > 10, "{name}: {}", scrape.text);
    }
    let mode = format!("mode=\"{}\"", report.mode);
    let of = |series: String| scrape.get(&series).unwrap_or_else(|| panic!("{series}: {}", scrape.text));
    let rounds = of(format!("godwit_migration_rounds_sum{{{mode}}}"));
    assert!((rounds - f64::from(report.rounds)).abs() < 1e-9, "{rounds}: {report:?}");
    let in_vain = of(format!("godwit_migrations_total{{{mode},outcome=\"aborted\"}}"));
    let sent = of(format!("godwit_migration_sent_bytes_total{{{mode},phase=\"frozen\"}}"));
    let wire = of(format!("godwit_migration_wire_bytes_total{{{mode}}}"));
    let [reported_sent, reported_wire] = [report.dump_bytes, report.wire_bytes].map(|bytes| bytes as f64);
    // A busy machine may have had it tried again: that has sent something, too.
    assert!(sent >= reported_sent && wire >= reported_wire, "{sent} {wire} {report:?}");
    if in_vain == 0.0 {
        assert_eq!((sent, wire), (reported_sent, reported_wire), "{report:?}");
    }
}

#[test]
fn a_move_is_counted_at_both_nodes_as_its_report_says_and_its_series_move_along() {
    let bed = up("metrics");
    bed.run("a", NAME, ADDRESS, &bed.build(Workload::Redis), &["--memory", "256m"]);
    let client = Client::of(&bed);
    // So much that it never moves by itself.
    bed.done("a", &["policy", "set", NAME, "--follow-clients", "--latency", "10s"]);
    let state = |state: &str| format!("godwit_service_state{{service=\"{NAME}\",state=\"{state}\"}}");
    let latency = format!("godwit_service_client_latency_median_seconds{{service=\"{NAME}\"}}");
    let before = scrape(&bed, "a", "a client whose latency is known", |told| {
        told.get(&latency).is_some_and(|latency| latency < 10.0) && told.has(&state("running"), 1.0)
    });
    for (series, value) in [
        (format!("godwit_service_clients{{service=\"{NAME}\"}}"), 1.0),
        (format!("godwit_service_memory_limit_bytes{{service=\"{NAME}\"}}"), f64::from(256 << 20)),
        (format!("godwit_service_info{{service=\"{NAME}\",engine=\"runc\",follows=\"true\"}}"), 1.0),
        (state("failed"), 0.0),
        ("godwit_services{engine=\"runc\",state=\"running\"}".into(), 1.0),
        ("godwit_peer_up{peer=\"b\"}".into(), 1.0),
        ("godwit_node_busy_ratio".into(), 0.1),
        ("godwit_node_cordoned".into(), 0.0),
        ("godwit_migrations_total{mode=\"precopy\",outcome=\"moved\"}".into(), 0.0),
        ("godwit_migrations_in_doubt".into(), 0.0),
        ("godwit_migrations_unfinished{role=\"source\",stage=\"frozen\"}".into(), 0.0),
    ] {
        assert!(before.has(&series, value), "{series} is not {value}: {}", before.text);
    }
    let stats: Value = bed.json("a", &["stats", "--no-stream", NAME]);
    let stats = stats[0].clone();
    for (name, field) in [
        ("godwit_service_cpu_seconds_total", "cpu_ns"),
        ("godwit_service_memory_bytes", "memory_bytes"),
        ("godwit_service_pids", "pids"),
        ("godwit_service_network_receive_bytes_total", "received_bytes"),
        ("godwit_service_network_transmit_bytes_total", "sent_bytes"),
        ("godwit_service_disk_read_bytes_total", "read_bytes"),
        ("godwit_service_disk_written_bytes_total", "written_bytes"),
    ] {
        let told = before.get(&format!("{name}{{service=\"{NAME}\"}}"));
        assert_eq!(told.is_some(), stats[field].is_u64(), "{name}: {stats} {}", before.text);
    }

    let report = bed.migrate_so(NAME, "a", "b", &["--mode", "precopy"]);
    let moved = "godwit_migrations_total{mode=\"precopy\",outcome=\"moved\"}";
    let source = scrape(&bed, "a", "the source without the service", |told| {
        told.has(moved, 1.0)
            && !told.is_about(NAME)
            && told.has("godwit_migrations_unfinished{role=\"source\",stage=\"committed\"}", 0.0)
    });
    agrees(&source, &report);
    let there = scrape(&bed, "b", "the destination with the service", |told| {
        told.has("godwit_incoming_migrations_total{outcome=\"moved\"}", 1.0)
            && told.has(&state("running"), 1.0)
            && told.has(&format!("godwit_service_awaited_bytes{{service=\"{NAME}\"}}"), 0.0)
            && told.get(&latency).is_some()
    });
    assert!(there.has(moved, 0.0), "a move is counted at its source: {}", there.text);

    // A node that takes none refuses.
    bed.done("a", &["node", "cordon", "a"]);
    let said = bed.godwit("b", &["migrate", NAME, "--to", "a", "--mode", "cold"]);
    assert!(said.code != 0 && said.stderr.contains("cordon"), "{said:?}");
    let refused = "godwit_migrations_total{mode=\"cold\",outcome=\"refused\"}";
    let there = scrape(&bed, "b", "the refused move", |told| {
        told.has(refused, 1.0) && told.has("godwit_peer_cordoned{peer=\"a\"}", 1.0)
    });
    let source = scrape(&bed, "a", "the move that was not taken", |told| {
        told.has("godwit_incoming_migrations_total{outcome=\"refused\"}", 1.0)
            && told.has("godwit_node_cordoned", 1.0)
    });

    // Prometheus' own check has nothing to say.
    for told in [&source, &there] {
        let checked = promtool(&["check", "metrics"], &told.text);
        let said = [&checked.stdout, &checked.stderr].map(|output| String::from_utf8_lossy(output));
        assert!(checked.status.success() && said.concat().is_empty(), "{said:?}");
    }
    // All that is described is there, and nothing else; what this machine cannot tell has no series.
    let served: BTreeSet<_> = [before, source, there].iter().flat_map(Scrape::names).collect();
    let cannot = |name: &str| {
        (name.contains("_disk_read_") && stats["read_bytes"].is_null())
            || (name.contains("_disk_written_") && stats["written_bytes"].is_null())
            || (name == "godwit_service_memory_bytes" && stats["memory_bytes"].is_null())
            || (name == "godwit_service_pids" && stats["pids"].is_null())
    };
    let documented: BTreeSet<_> = documented().into_iter().filter(|name| !cannot(name)).collect();
    assert_eq!(documented, served);
    assert!(client.leaves() > 10);

    bed.lab().stop_node("b").unwrap();
    scrape(&bed, "a", "a peer that is silent", |told| told.has("godwit_peer_up{peer=\"b\"}", 0.0));
}

#[test]
fn who_asks_for_something_else_or_says_nothing_keeps_nobody_from_the_metrics() {
    let bed = up("metrics-bad");
    for (method, path, status) in [
        ("GET", "/", 404),
        ("GET", "/metrics/../metrics/x", 404),
        ("POST", "/metrics", 405),
        ("PUT", "/metrics", 405),
    ] {
        assert_eq!(ask(&bed, "a", method, path).0, status, "{method} {path}");
    }
    let mut nonsense = bed.connect(address(&bed, "a"));
    nonsense.write_all(&[0; 512]).unwrap();
    let mut answer = Vec::new();
    // It may be closed before all was read.
    let _ = nonsense.read_to_end(&mut answer);
    assert!(!String::from_utf8_lossy(&answer).contains("200 OK"));

    let silent: Vec<TcpStream> = (0..IDLE).map(|_| bed.connect(address(&bed, "a"))).collect();
    let mut half = bed.connect(address(&bed, "a"));
    half.write_all(b"GET /metrics HTTP/1.1\r\nHost:").unwrap();
    let told = Scrape::of(&bed, "a");
    assert!(told.has("godwit_peer_up{peer=\"b\"}", 1.0), "{}", told.text);
    // The node has room for others: it does not hold all of them.
    let open = told.get("process_open_fds").unwrap();
    assert!(open < 200.0, "{open} descriptors are open, of {IDLE} silent connections");
    // And each has its end.
    let mut end = Vec::new();
    let _ = half.read_to_end(&mut end);
    assert!(!String::from_utf8_lossy(&end).contains("200 OK"), "half a request was answered");
    drop(silent);
    bed.done("a", &["nodes"]);
}

#[test]
fn alerts_and_dashboard_name_metrics_that_there_are_and_each_alert_fires_when_it_should() {
    for arguments in [
        ["check", "rules", "godwit-alerts.yml"].as_slice(),
        &["test", "rules", "godwit-alerts.test.yml"],
        &["check", "config", "--syntax-only", "godwit-scrape.yml"],
    ] {
        let done = promtool(arguments, "");
        assert!(done.status.success(), "{arguments:?}: {done:?}");
    }
    let [alerts, tests] = ["godwit-alerts.yml", "godwit-alerts.test.yml"]
        .map(|file| fs::read_to_string(packaged(file)).unwrap());
    let names: Vec<_> = alerts.lines().filter_map(|line| line.trim().strip_prefix("- alert: ")).collect();
    let tested: Vec<_> = tests.lines().filter_map(|line| line.trim().strip_prefix("- name: ")).collect();
    assert_eq!(names, tested, "each alert has its test, in their order");
    let page = fs::read_to_string(packaged("../../docs/metrics.md")).unwrap();
    for alert in &names {
        assert!(page.contains(&format!("`{alert}`")), "docs/metrics.md does not say what {alert} means");
    }

    let expressions = dashboard();
    let documented = documented();
    let groups = ["godwit-nodes", "godwit-moves", "godwit-services", "godwit-following"];
    let words =
        alerts.lines().filter(|line| !line.trim_start().starts_with('#')).collect::<Vec<_>>().join("\n");
    assert!(groups.iter().all(|group| words.contains(group)));
    for text in [words, expressions.join("\n")] {
        let dead: Vec<_> = named(&text).difference(&documented).cloned().collect();
        assert!(dead.is_empty(), "no node has {dead:?}");
    }
    // Prometheus takes each expression, with what Grafana puts in the place of its variables.
    let rules = expressions.iter().filter(|text| !text.starts_with("label_values("));
    let rules = rules.enumerate().map(|(at, text)| {
        let text =
            text.replace("$__rate_interval", "5m").replace("$instance", ".*").replace("$service", ".*");
        serde_json::json!({ "record": format!("panel:{at}"), "expr": text })
    });
    let rules =
        serde_json::json!({ "groups": [{ "name": "dashboard", "rules": rules.collect::<Vec<_>>() }] });
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("dashboard.yml");
    fs::write(&file, rules.to_string()).unwrap();
    let done = promtool(&["check", "rules", file.to_str().unwrap()], "");
    assert!(done.status.success(), "{done:?}");
}

#[test]
fn memory_that_is_still_at_the_source_is_told_at_both_nodes_until_it_has_come() {
    const POINT: &str = "source.pushing";
    // So much that more than what is being sent has stayed behind.
    let fill = 128 << 20;
    let victim = Victim::up_filled("metrics-late", fill, |config, _| {
        config.programs.serve_arguments.extend(metrics_flags());
    });
    let attempt = victim.begin_with_and_hold("a", "b", &["--mode", "postcopy"], POINT);
    let awaited = format!("godwit_service_awaited_bytes{{service=\"{}\"}}", victim::NAME);
    scrape(&victim.bed, "b", "memory that is awaited", |told| {
        told.get(&awaited).is_some_and(|bytes| bytes > 0.0)
    });
    scrape(&victim.bed, "a", "memory that is to be served", |told| {
        told.get("godwit_migration_unserved_bytes").is_some_and(|bytes| bytes > 0.0)
            && told.has("godwit_migrations_unfinished{role=\"source\",stage=\"serving\"}", 1.0)
    });
    victim.let_go(POINT);
    attempt.moved_well();
    scrape(&victim.bed, "b", "memory that has come", |told| told.has(&awaited, 0.0));
    scrape(&victim.bed, "a", "nothing that is to be served", |told| {
        told.has("godwit_migration_unserved_bytes", 0.0)
            && told.has("godwit_migrations_unfinished{role=\"source\",stage=\"serving\"}", 0.0)
    });
    victim.ends_at_b();
}

#[test]
fn a_move_in_doubt_is_told_until_its_source_has_decided() {
    const POINT: &str = "destination.restored";
    let victim = watched("metrics-doubt");
    let attempt = victim.begin_and_hold(POINT);
    victim.bed.lab().stop_node("a").unwrap();
    victim.let_go(POINT);
    attempt.end();
    scrape(&victim.bed, "b", "a doubt that its source does not end", |told| {
        told.has("godwit_migrations_in_doubt", 1.0) && told.has("godwit_migrations_to_resolve", 1.0)
    });
    victim.bed.lab().start_node("a").unwrap();
    scrape(&victim.bed, "b", "the end of the doubt", |told| {
        told.has("godwit_migrations_in_doubt", 0.0)
            && told.has("godwit_migrations_to_resolve", 0.0)
            && told.has("godwit_incoming_migrations_total{outcome=\"aborted\"}", 1.0)
    });
    victim.is_as_before();
    victim.moves_in_the_end();
}

/// A Prometheus, which ends with the test.
struct Server(Child);

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[test]
fn a_prometheus_scrapes_the_nodes_by_the_example_of_its_configuration() {
    if !tier::is_full() {
        return;
    }
    const WEB: u16 = 9090;
    let bed = up("prometheus");
    let example = fs::read_to_string(packaged("godwit-scrape.yml")).unwrap();
    let targets = ["a", "b"].map(|node| address(&bed, node).to_string());
    let config = example
        .replace("192.0.2.1:7121", &targets[0])
        .replace("192.0.2.2:7121", &targets[1])
        .replace("/etc/prometheus/godwit-alerts.yml", packaged("godwit-alerts.yml").to_str().unwrap())
        .replace("15s", "1s");
    let file = bed.scratch().join("prometheus.yml");
    fs::write(&file, config).unwrap();
    let mut command = bed.on_client("prometheus");
    command.arg(format!("--config.file={}", file.display()));
    command.arg(format!("--storage.tsdb.path={}", bed.scratch().join("prometheus").display()));
    command.arg(format!("--web.listen-address=0.0.0.0:{WEB}"));
    let _server = Server(command.stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap());
    let web = SocketAddrV4::new(bed.lab().address("client").unwrap(), WEB);
    let get = |path: &str| -> Option<Value> {
        let mut stream = bed.connect(web);
        write!(stream, "GET /api/v1/{path} HTTP/1.0\r\nHost: a\r\n\r\n").unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).unwrap();
        serde_json::from_str(answer.split_once("\r\n\r\n")?.1).ok()
    };
    let result = |query: &str| -> Vec<Value> {
        let found = get(&format!("query?query={query}"));
        found.map_or_else(Vec::new, |found| found["data"]["result"].as_array().cloned().unwrap_or_default())
    };
    wait_for("both nodes to be up", || {
        let up = result("up%7Bjob%3D%22godwit%22%7D%20%3D%3D%201");
        (up.len() == 2).then_some(())
    });
    let heard = wait_for("an answer", || Some(result("godwit_peer_up")).filter(|found| found.len() == 2));
    assert!(heard.iter().all(|one| one["value"][1] == "1"), "{heard:?}");
    let rules = get("rules").unwrap();
    let alerts = rules["data"]["groups"].as_array().unwrap().iter();
    assert_eq!(alerts.clone().count(), 4, "{rules}");
    let healthy = |rule: &Value| rule["health"] != "err";
    assert!(alerts.flat_map(|group| group["rules"].as_array().unwrap()).all(healthy), "{rules}");
}
