//! The benchmarks: what they write is what docs/measuring.md says, and it can be drawn. Needs root.
//!
//! Whether figures are good is not asked here: tests share the machine.

use std::{fs, path::Path, process::Command};

use godwit_isa_programs::compile::Compiler;
use godwit_tests::{leftovers, programs, tier};
use serde_json::Value;

fn bench(words: &[&str], out: &Path) {
    let mut command = Command::new(programs().join("godwit"));
    command.arg("bench").args(words).arg("--out").arg(out);
    let output = command.output().unwrap();
    assert!(output.status.success(), "{words:?}: {}", String::from_utf8_lossy(&output.stderr));
}

fn lines(file: &Path) -> Vec<Value> {
    let text = fs::read_to_string(file).unwrap();
    text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

#[test]
fn modes_and_baselines_take_turns_and_are_drawn() {
    let (lab, directory) = (format!("bench{}", std::process::id()), tempfile::tempdir().unwrap());
    let moves = directory.path().join("moves.jsonl");
    let how = ["--name", &lab, "--memory", "8MiB", "--rate", "500", "--runs", "1", "--return"];
    let what = ["--mode", "cold,precopy", "--baseline", "floor,bare,stock-cold"];
    bench(&[&["migrate"], &how[..], &what[..]].concat(), &moves);

    let rows = lines(&moves);
    let series: Vec<_> = rows.iter().map(|row| row["series"].as_str().unwrap()).collect();
    let godwit = ["godwit-cold", "godwit-cold-return", "godwit-precopy", "godwit-precopy-return"];
    assert_eq!(series, [&godwit[..], &["floor", "bare", "stock-cold"]].concat());
    for row in &rows {
        assert_eq!((&row["outcome"], &row["lost_ops"]), (&"moved".into(), &0.into()), "{row}");
        assert_eq!((&row["memory"], &row["rate"], &row["run"]), (&(8 << 20).into(), &500.into(), &1.into()));
        assert!(row["downtime_ms"].as_f64().unwrap() > 0.0, "{row}");
    }
    for row in &rows[..4] {
        assert!(row["p99_before_ms"].is_f64() && row["memory_bytes"].as_u64() > Some(8 << 20), "{row}");
        assert!(row["link_bytes"].as_u64() > row["wire_bytes"].as_u64(), "{row}");
        assert!(row["wire_bytes"].as_u64() > row["memory_wire_bytes"].as_u64(), "{row}");
        assert!(row["page_bytes"].as_u64() > Some(8 << 20), "{row}");
        for (node, what) in [(&row["source"], "dump"), (&row["destination"], "restore")] {
            let mut spans = row["timeline"].as_array().unwrap().iter();
            let span = spans.find(|span| &span["node"] == node && span["what"] == what);
            let (start, ms) =
                (span.unwrap()["start_ms"].as_f64().unwrap(), span.unwrap()["ms"].as_f64().unwrap());
            let frozen = row["frozen_ms"].as_f64().unwrap();
            assert!(start > 0.0 && ms > 0.0 && start + ms < frozen, "{what} is in the frozen time: {row}");
        }
    }
    let left = leftovers::of(&lab);
    assert!(left.is_empty(), "{left:?}");

    let drawn = directory.path().join("drawn");
    bench(&["plot", moves.to_str().unwrap()], &drawn);
    for name in ["downtime.svg", "wire.svg", "frozen.svg", "timeline.svg"] {
        let picture = fs::read_to_string(drawn.join(name)).unwrap();
        assert!(picture.starts_with("<svg") && picture.contains("godwit-precopy"), "{name}: {picture:.200}");
    }
    let summary = fs::read_to_string(drawn.join("summary.md")).unwrap();
    assert!(summary.contains("| godwit-precopy-return | 1 |"), "{summary}");
    assert!(summary.contains("\n## Goals\n") && summary.contains("| freeze | dump |"), "{summary}");
}

#[test]
fn parts_are_measured_beside_iperf_and_no_page_is_lost() {
    let (lab, directory) = (format!("part{}", std::process::id()), tempfile::tempdir().unwrap());
    let file = directory.path().join("parts.jsonl");
    let how = ["--name", &lab, "--memory", "16MiB", "--runs", "1", "--link", "1gbit,1ms"];
    bench(&[&["faults"], &how[..]].concat(), &file);
    let [row] = &lines(&file)[..] else { panic!("one line is due") };
    assert_eq!((&row["series"], &row["wrong_pages"]), (&"faults".into(), &0.into()), "{row}");
    assert!(row["iperf_mb_s"].as_f64() > Some(0.0) && row["pages_mb_s"].as_f64() > Some(0.0), "{row}");
    assert!(row["fault_max_ms"].as_f64() >= row["fault_p99_ms"].as_f64(), "{row}");

    bench(&["streams", "--name", &lab, "--memory", "16MiB", "--runs", "1"], &file);
    let [plain, tls] = &lines(&file)[..] else { panic!("two lines are due") };
    assert_eq!((&plain["series"], &tls["series"]), (&"streams-plain".into(), &"streams-tls".into()));
    for row in [plain, tls] {
        assert!(
            row["pages_mb_s"].as_f64() > Some(0.0) && row["cpu_ns_per_byte"].as_f64() > Some(0.0),
            "{row}"
        );
    }

    bench(&[&["return"], &how[..]].concat(), &file);
    let rows = lines(&file);
    let series: Vec<_> = rows.iter().map(|row| row["series"].as_str().unwrap()).collect();
    assert_eq!(series, ["return-precopy", "return-postcopy"]);
    for row in &rows {
        assert_eq!(row["written_pages"], 40, "{row}");
        let bytes = |field: &str| row[field].as_u64().unwrap();
        // A hundredth of 16 MiB is less than what CRIU writes beside it.
        assert!(bytes("first_wire_bytes") > 16 << 20, "{row}");
        assert!(bytes("return_wire_bytes") < 4 << 20, "{row}");
    }
    let left = leftovers::of(&lab);
    assert!(left.is_empty(), "{left:?}");

    bench(&["scan", "--memory", "64MiB", "--runs", "1"], &file);
    let [row] = &lines(&file)[..] else { panic!("one line is due") };
    assert!(row["cpu_ms"].as_f64() > Some(0.0) && row["populated_pages"].as_u64() >= Some(16_384), "{row}");
}

#[test]
fn what_copying_takes_from_a_service_is_told_beside_what_iperf_takes() {
    if !tier::is_full() {
        return;
    }
    let (lab, directory) = (format!("busy{}", std::process::id()), tempfile::tempdir().unwrap());
    let file = directory.path().join("busy.jsonl");
    // Slow enough that the copying is there to be measured.
    let how = ["--memory", "8MiB", "--runs", "1", "--link", "1gbit,1ms", "--max-bandwidth", "64mbit"];
    bench(&[&["migrate", "--name", &lab, "--mode", "precopy", "--busy"], &how[..]].concat(), &file);
    let [row] = &lines(&file)[..] else { panic!("one line is due") };
    let of = |field: &str| row[field].as_f64().unwrap_or_else(|| panic!("no {field}: {row}"));
    let before = of("answered_before_s");
    assert!(before > 0.0, "{row}");
    for (ratio, answered) in
        [("throughput_ratio", "answered_copy_s"), ("throughput_ratio_iperf", "answered_iperf_s")]
    {
        assert!((of(ratio) * before - of(answered)).abs() < 1.0, "{row}");
    }
}

#[test]
fn pauses_with_frames_held_and_dropped_take_turns_and_are_drawn() {
    if !tier::is_full() {
        return;
    }
    let (lab, directory) = (format!("cut{}", std::process::id()), tempfile::tempdir().unwrap());
    let how = ["cutover", "--name", &lab, "--runs", "1", "--link", "1gbit,1ms"];
    let many = directory.path().join("many.jsonl");
    bench(&[&how[..], &["--connections", "50"]].concat(), &many);
    let one = directory.path().join("one.jsonl");
    bench(&[&how[..], &["--connections", "1", "--cutover", "hold", "--pause", "100"]].concat(), &one);
    let rows = [lines(&many), lines(&one)].concat();
    let seen: Vec<_> = rows.iter().map(|row| [&row["series"], &row["cutover"]]).collect();
    let alone = ["idle", "busy", "small", "doubt"].map(|series| [series, "hold"]);
    assert_eq!(seen, [&[["many", "hold"], ["many", "drop"]], &alone[..]].concat());
    for row in &rows {
        assert_eq!(
            (&row["outcome"], &row["lost_ops"], &row["broken"]),
            (&"moved".into(), &0.into(), &0.into())
        );
        let connections = if row["series"] == "many" { 50 } else { 1 };
        assert_eq!(row["connections"], connections, "{row}");
        for field in ["downtime_ms", "frozen_ms", "usual_ms", "memory_bytes", "requests"] {
            assert!(row[field].as_f64() > Some(0.0), "{field}: {row}");
        }
        assert!(row["beyond_ms"].is_f64() && row["pause_ms"].is_u64(), "{row}");
        assert!(row["frozen_ms"].as_f64() > row["pause_ms"].as_f64(), "{row}");
        for who in ["", "node_", "service_"] {
            for what in ["timeouts", "retransmissions", "loss_probes"] {
                assert!(row[format!("{who}{what}")].is_u64(), "{who}{what}: {row}");
            }
        }
    }
    // A thousand requests a second do not get through a pause in which all are dropped.
    assert!(rows[1]["retransmissions"].as_u64() > Some(0), "{}", rows[1]);

    let drawn = directory.path().join("drawn");
    bench(&["plot", many.to_str().unwrap(), one.to_str().unwrap()], &drawn);
    let picture = fs::read_to_string(drawn.join("cutover.svg")).unwrap();
    assert!(picture.contains("50 connections") && picture.contains("dropped"), "{picture:.300}");
    let summary = fs::read_to_string(drawn.join("summary.md")).unwrap();
    assert!(summary.contains("| one idle connection, held 100.0 ms | held | 1 |"), "{summary}");
    assert!(summary.contains("| cut-over, 50 connections: time-outs |"), "{summary}");
    let left = leftovers::of(&lab);
    assert!(left.is_empty(), "{left:?}");
}

#[test]
fn an_experiment_writes_what_it_measured_and_draws_it_beside_the_paper() {
    let (directory, compiler) = (tempfile::tempdir().unwrap(), Compiler::godwit().unwrap());
    let lab = format!("park{}", std::process::id());
    let mut command = Command::new(programs().join("godwit"));
    command.args(["lab", "experiment", "hcontainer-park", "--quick", "--name", &lab, "--compiler"]);
    let output = command.arg(&compiler.command[0]).arg("--out").arg(directory.path()).output().unwrap();
    let said = String::from_utf8_lossy(&output.stdout);
    // Whether it was quick enough is not asked of a machine that is shared.
    assert!([Some(0), Some(1)].contains(&output.status.code()) && said.contains("HOLDS"), "{output:?}");
    let rows = lines(&directory.path().join("hcontainer-park.jsonl"));
    assert_eq!(rows.len(), 600);
    for row in &rows {
        let ms = |field: &str| row[field].as_f64().unwrap();
        assert!(ms("park_ms") > 0.0 && ms("park_ms") <= ms("seen_ms"), "{row}");
    }
    let drawn = fs::read_to_string(directory.path().join("hcontainer-park.svg")).unwrap();
    assert!(drawn.contains("threads: 64, busy") && drawn.contains("the paper"), "{drawn}");
}
