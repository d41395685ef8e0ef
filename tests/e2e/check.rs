//! `godwit check`: whether a service could move, and what that would be like, without moving it. Needs root.

use std::{
    io::{BufRead, BufReader, Write},
    net::{Ipv4Addr, SocketAddrV4},
    time::Duration,
};

use godwit_lab::Link;
use godwit_lab::workload::{Preset, RedisClient, Rootfs, Workload};
use godwit_tests::{Bed, CLIENT, PATIENCE, Said, compile, wait_for, wait_for_within};
use serde_json::Value;

const ADDRESS: Ipv4Addr = Ipv4Addr::new(10, 88, 0, 63);
const OTHER: Ipv4Addr = Ipv4Addr::new(10, 88, 0, 64);
/// Data in Redis.
const FILL: u64 = 32 << 20;

/// What a check prints with `--json`.
fn told(said: &Said) -> Value {
    serde_json::from_str(&said.stdout).unwrap_or_else(|error| panic!("{error}: {said:?}"))
}

/// A list of sentences in it, as one text.
fn sentences(told: &Value, list: &str) -> String {
    let all = told[list].as_array().unwrap().iter();
    all.map(|sentence| sentence.as_str().unwrap()).collect::<Vec<_>>().join("\n")
}

#[test]
fn a_service_that_can_move_is_measured_and_moves_as_was_predicted() {
    let bed = Bed::up("check");
    let preset = bed.build(Workload::Redis);
    bed.run("a", "redis", ADDRESS, &preset, &[]);
    let mut data = RedisClient::connect(bed.lab(), CLIENT, preset.at(ADDRESS), PATIENCE).unwrap();
    data.fill(FILL).unwrap();
    bed.knows("b", "redis");
    let mut predicted = Value::Null;
    // The second node passes the question on.
    for node in ["a", "b"] {
        let said = bed.check(node, &["redis", "--to", "b"]);
        assert_eq!(said.code, 0, "{said:?}");
        let answer = told(&said);
        assert_eq!((&answer["source"], &answer["destination"]), (&"a".into(), &"b".into()));
        predicted = answer["forecast"].clone();
        assert_eq!(predicted["mode"], "precopy", "{predicted}");
        let figure = |name: &str| predicted[name].as_f64().unwrap_or_else(|| panic!("{name}: {predicted}"));
        assert!(figure("memory_bytes") > FILL as f64 && figure("wire_bytes") >= figure("memory_bytes"));
        assert!(figure("bandwidth") > 1e6 && figure("round_trip_ms") > 0.0, "{predicted}");
        // Without a move before: what dump and restore take in general.
        assert!((94.0..250.0).contains(&figure("frozen_ms")), "{predicted}");
        assert!(figure("total_ms") > figure("frozen_ms"), "{predicted}");
        assert!(figure("written_bytes_per_second") < 64e6, "nobody writes much: {predicted}");
    }
    // It is measured where it is alone.
    let alone = bed.godwit("a", &["--json", "check", "redis"]);
    assert_eq!((alone.code, &told(&alone)["forecast"]["bandwidth"]), (0, &Value::Null), "{alone:?}");
    for (node, words) in [("a", "is on node a already"), ("nowhere", "there is no node nowhere")] {
        let said = bed.godwit("a", &["check", "redis", "--to", node]);
        assert!(said.code == 1 && said.stderr.contains(words), "{said:?}");
    }
    let short = bed.check("a", &["redis", "--to", "b", "--max-frozen-ms", "1"]);
    let why = sentences(&told(&short), "objections");
    assert!(short.code == 1 && why.contains("more than the 1 ms allowed"), "{short:?}");
    let cold = bed.check("a", &["redis", "--to", "b", "--max-frozen-ms", "1", "--mode", "cold"]);
    assert_eq!((cold.code, &told(&cold)["forecast"]["mode"]), (2, &"cold".into()), "{cold:?}");
    // The destination's reasons are told before anything is sent.
    let directory = bed.scratch().join("bound");
    std::fs::create_dir(&directory).unwrap();
    let mount = format!("type=bind,src={},dst=/bound,move=skip", directory.display());
    bed.run("a", "bound", OTHER, &preset, &["--mount", &mount]);
    let refused = bed.check("a", &["bound", "--to", "b"]);
    let objections = sentences(&told(&refused), "objections");
    assert!(refused.code == 1 && objections.contains("node b: "), "{refused:?}");
    assert!(objections.contains("--allow-bind"), "{objections}");
    bed.done("a", &["rm", "--force", "bound"]);
    // Nothing of the tracker is left in the service.
    let open = std::fs::read_dir(format!("/proc/{}/fd", bed.pid("a", "redis"))).unwrap();
    // It has opened and closed another one meanwhile.
    let open: Vec<_> = open.filter_map(|file| std::fs::read_link(file.unwrap().path()).ok()).collect();
    assert!(!open.is_empty());
    assert!(!open.iter().any(|file| file.to_string_lossy().contains("userfaultfd")), "{open:?}");
    let report = bed.migrate("redis", "a", "b");
    data.check_fill(FILL).unwrap();
    let sent = report.page_bytes as f64 / predicted["wire_bytes"].as_f64().unwrap();
    assert!((0.5..2.0).contains(&sent), "{sent}: {report:?} {predicted}");

    // What it took is noted for the next prediction: of all moves, of those to b, and of this service among them.
    let notes = bed.lab().state("a").unwrap().join("past_moves.json");
    let mut notes: Vec<Value> = serde_json::from_slice(&std::fs::read(notes).unwrap()).unwrap();
    notes.sort_by_key(|note| note.to_string().len());
    let of = |name: &str| notes.iter().map(|note| note[name].as_str().unwrap()).collect::<Vec<_>>();
    assert_eq!(
        (of("destination"), of("service")[..2].concat()),
        (vec!["", "b", "b"], String::new()),
        "{notes:?}"
    );
    assert!(!of("service")[2].is_empty(), "{notes:?}");
    assert!(notes.iter().all(|note| note["weight"] == 1.0 && note["sum"] == notes[0]["sum"]), "{notes:?}");
}

#[test]
fn files_that_change_are_in_the_forecast_and_cross_while_it_is_frozen() {
    let bed = Bed::up_with("writer", |config| {
        config.link = Some(Link { rate: 100_000_000, delay: Duration::ZERO });
    });
    let mut preset = bed.build(Workload::Busybox);
    // All of a file of 32 MiB again and again: 2.7 seconds of this link, so that no busy machine makes less than the half of
    // one second of it.
    let write = "/bin/busybox dd if=/dev/urandom of=/data bs=1M conv=notrunc 2>/dev/null";
    let script =
        format!("{write} count=32; until [ -e /stop ]; do {write} count=32; done; exec sleep 100000");
    preset.command = ["/bin/busybox", "sh", "-c", &script].map(str::to_owned).into();
    bed.run("a", "writer", ADDRESS, &preset, &[]);
    let size = ["exec", "writer", "/bin/busybox", "stat", "-c", "%s", "/data"];
    wait_for("all of the file", || bed.done("a", &size).starts_with("33554432").then_some(()));
    let figure = |said: &Said, name: &str| told(said)["forecast"][name].as_f64().unwrap_or(f64::NAN);
    let changes = bed.check("a", &["writer", "--to", "b"]);
    assert!(figure(&changes, "file_bytes") >= f64::from(32 << 20), "{changes:?}");
    let rate = figure(&changes, "file_bytes_per_second");
    assert!((1e6..40e6).contains(&rate), "the same bytes are counted once: {changes:?}");
    let warned = sentences(&told(&changes), "warnings");
    assert!(warned.contains("MB of changed files and log; have it write less"), "{changes:?}");
    assert!(!warned.contains("memory follows"), "{changes:?}");
    let frozen = figure(&changes, "frozen_ms");
    // Where a busy machine makes the link seem slow, what it writes to its memory is more than that can carry, too.
    wait_for("a check that finds the files too much", || {
        let refused = bed.check("a", &["writer", "--to", "b", "--max-frozen-ms", "600", "--mode", "precopy"]);
        let why = sentences(&told(&refused), "objections");
        assert!(refused.code == 1 && why.contains("more than the 600 ms allowed"), "{why}");
        why.contains("MB of changed files and log to send meanwhile").then_some(())
    });
    // It is right, and a move meets the same machine.
    wait_for_within(Duration::from_secs(120), "a move that finds the files too much", || {
        let flags = ["--max-frozen-ms", "600", "--mode", "precopy"];
        let said = bed.godwit("a", &[&["migrate", "writer", "--to", "b"], &flags[..]].concat());
        assert!(said.code == 1 && said.stderr.contains("more than the 600 ms allowed"), "{said:?}");
        said.stderr.contains("MB of changed files and log").then_some(())
    });
    bed.done("a", &["exec", "writer", "/bin/busybox", "touch", "/stop"]);
    let name = ["exec", "writer", "/bin/busybox", "cat", "/proc/1/comm"];
    wait_for("the end of the writes", || (bed.done("a", &name) == "sleep\n").then_some(()));
    let idle = bed.check("a", &["writer", "--to", "b"]);
    assert!(figure(&idle, "file_bytes_per_second") < rate / 4.0, "{idle:?} after {changes:?}");
    assert!(figure(&idle, "frozen_ms") < frozen / 2.0, "{idle:?} after {changes:?}");
}

#[test]
fn each_obstacle_is_named_with_its_process_and_what_is_not_measured_is_a_warning() {
    let bed = Bed::up("obstacles");
    let rootfs = bed.scratch().join("root");
    Rootfs::new(&rootfs).unwrap();
    compile("queue.c", &rootfs.join("queue"));
    let command = ["/queue", "7000"].map(str::to_owned).into();
    let preset = Preset { rootfs, command, env: Vec::new(), user: None, port: 7000 };
    bed.run("a", "queue", ADDRESS, &preset, &[]);
    let mut connection = BufReader::new(bed.connect(SocketAddrV4::new(ADDRESS, 7000)));
    let mut tell = |word: &str| {
        let mut line = String::new();
        connection.get_mut().write_all(format!("{word}\n").as_bytes()).unwrap();
        connection.read_line(&mut line).unwrap();
        assert_eq!(line, "done\n");
    };
    tell("open");
    let said = bed.check("a", &["queue", "--to", "b"]);
    let answer = told(&said);
    let obstacle = &answer["obstacles"][0];
    assert_eq!((said.code, &answer["forecast"]), (1, &Value::Null), "{answer}");
    assert_eq!((&obstacle["inside"], &obstacle["name"]), (&1.into(), &"queue".into()), "{answer}");
    assert_eq!(obstacle["pid"].as_u64(), Some(bed.pid("a", "queue")));
    assert!(obstacle["what"].as_str().unwrap().contains("/held open"), "{answer}");
    let shown = bed.godwit("a", &["check", "queue", "--to", "b"]);
    for words in ["queue cannot move from a to b:\n  process ", "PID 1 in the service", "mq_unlink"] {
        assert!(shown.code == 1 && shown.stdout.contains(words), "{words}: {shown:?}");
    }
    tell("close");
    tell("remove");
    assert_eq!(bed.check("a", &["queue", "--to", "b"]).code, 0);

    let rootfs = bed.scratch().join("shared");
    Rootfs::new(&rootfs).unwrap();
    compile("shared.c", &rootfs.join("shared"));
    let command = ["/shared", "8"].map(str::to_owned).into();
    let preset = Preset { rootfs, command, env: Vec::new(), user: None, port: 7000 };
    bed.run("a", "shared", OTHER, &preset, &[]);
    drop(bed.connect(SocketAddrV4::new(OTHER, 7000)));
    let said = bed.check("a", &["shared", "--to", "b"]);
    let warnings = sentences(&told(&said), "warnings");
    assert!(said.code == 2 && warnings.contains("MiB are shared memory"), "{said:?}");
    bed.done("a", &["stop", "--time", "0", "shared"]);
    let stopped = bed.godwit("a", &["check", "shared", "--to", "b"]);
    assert!(stopped.code == 1 && stopped.stderr.contains("service shared is stopped"), "{stopped:?}");
}
