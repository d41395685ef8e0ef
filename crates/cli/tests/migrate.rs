//! `godwit migrate` and `godwit cancel` against a fake daemon: progress, reports, exit codes, and Ctrl-C.
#![allow(missing_docs, clippy::unwrap_used)]

mod fake;

use std::process::Stdio;

use fake::{Fake, Finished};
use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};
use tokio::{
    io::{AsyncBufReadExt as _, AsyncReadExt as _, AsyncWriteExt as _, BufReader},
    net::{UnixListener, UnixStream},
};

#[tokio::test]
async fn a_migration_shows_its_phases_and_reports_in_a_table() {
    let fake = Fake::start();
    let finished = fake.run(&["migrate", "redis", "--to", "b"]).await;
    assert_eq!(finished.code, 0, "{finished:?}");
    assert_eq!(
        finished.stderr,
        "migrating redis: reserve\nmigrating redis: dump\nmigrating redis: transfer (201.0 MiB)\n"
    );
    assert!(finished.stdout.starts_with("redis moved from a to b\n"), "{finished:?}");
    let row = |name: &str| {
        let line = finished.stdout.lines().find(|line| line.trim_start().starts_with(name)).unwrap();
        line.trim_start()[name.len()..].trim().to_owned()
    };
    assert_eq!(row("frozen time"), "512.3 ms");
    assert_eq!(row("total time"), "1.93 s");
    assert_eq!(row("on the wire"), "202.0 MiB");
}

#[tokio::test]
async fn a_migration_in_json_is_its_steps_and_then_one_report() {
    let fake = Fake::start();
    let finished = fake.run(&["migrate", "redis", "--to", "b", "--json"]).await;
    assert_eq!(finished.stderr, "");
    let lines: Vec<serde_json::Value> =
        finished.stdout.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let (report, steps) = lines.split_last().unwrap();
    assert!(!steps.is_empty());
    for step in steps {
        assert_eq!(step["event"], "progress");
        assert!(step["progress"]["phase"].is_string() && step["progress"]["bytes_done"].is_u64(), "{step}");
    }
    for field in [
        "name",
        "mode",
        "source",
        "destination",
        "outcome",
        "rounds",
        "total_ms",
        "frozen_ms",
        "pre_dump_ms",
        "pre_dump_transfer_ms",
        "dump_ms",
        "dump_transfer_ms",
        "resume_ms",
        "faulted_transfer_ms",
        "pre_dump_bytes",
        "dump_bytes",
        "faulted_bytes",
        "wire_bytes",
        "memory_wire_bytes",
        "file_bytes",
        "page_bytes",
        "shared_bytes",
        "shared_dump_bytes",
        "shared_left_bytes",
        "retained_file_bytes",
        "files_stay",
        "memory_bytes",
    ] {
        assert!(report.get(field).is_some(), "{field} is missing from {report}");
    }
}

#[tokio::test]
async fn a_service_that_was_kept_ends_with_the_reason_and_1() {
    let fake = Fake::start();
    let finished = fake.run(&["migrate", "aborted", "--to", "b"]).await;
    assert_eq!(finished.code, 1);
    assert!(
        finished.stderr.ends_with(
            "Error: migration of aborted aborted, it stays on a: node b has 10 MiB of memory left and 256 MiB are needed\n"
        ),
        "{finished:?}"
    );
    let finished = fake.run(&["migrate", "aborted", "--to", "b", "--json"]).await;
    assert_eq!(finished.code, 1);
    let report: serde_json::Value = serde_json::from_str(finished.stdout.lines().last().unwrap()).unwrap();
    assert_eq!(report["outcome"], "aborted");
}

#[tokio::test]
async fn a_service_that_was_lost_ends_with_where_and_why_and_3() {
    let fake = Fake::start();
    let finished = fake.run(&["migrate", "lost", "--to", "b"]).await;
    assert_eq!((finished.code, finished.stdout.as_str()), (3, ""));
    assert!(
        finished
            .stderr
            .ends_with("Error: lost was lost on b: the processes that held its pages on node a are gone\n"),
        "{finished:?}"
    );
    let finished = fake.run(&["migrate", "lost", "--to", "b", "--json"]).await;
    assert_eq!(finished.code, 3);
    let report: serde_json::Value = serde_json::from_str(finished.stdout.lines().last().unwrap()).unwrap();
    assert_eq!(report["outcome"], "lost");
}

#[tokio::test]
async fn a_migration_that_ends_without_a_report_ends_with_4() {
    let fake = Fake::start();
    let finished = fake.run(&["migrate", "breaks", "--to", "b"]).await;
    assert_eq!(finished.code, 4);
    assert!(finished.stderr.contains("without a report"), "{finished:?}");
}

#[tokio::test]
async fn a_daemon_that_dies_after_the_commit_ends_it_with_what_is_known_and_4() {
    let fake = Fake::start();
    let between = tempfile::tempdir().unwrap();
    let socket = between.path().join("socket");
    let listener = UnixListener::bind(&socket).unwrap();
    let daemon = fake.socket();
    let relay = tokio::spawn(async move {
        let (mut here, _) = listener.accept().await.unwrap();
        let mut there = UnixStream::connect(daemon).await.unwrap();
        tokio::io::copy_bidirectional(&mut here, &mut there).await
    });
    let mut command =
        fake::godwit(&["--socket", socket.to_str().unwrap(), "migrate", "committed", "--to", "b"]);
    let mut child = command.stderr(Stdio::piped()).spawn().unwrap();
    let mut lines = BufReader::new(child.stderr.take().unwrap()).lines();
    assert_eq!(lines.next_line().await.unwrap().unwrap(), "migrating committed: commit");
    // Closes both connections.
    relay.abort();
    let last = lines.next_line().await.unwrap().unwrap();
    assert!(last.starts_with("Error: the connection to godwitd on "), "{last}");
    assert!(last.contains("the migration had committed: committed is on node b"), "{last}");
    assert_eq!(child.wait().await.unwrap().code(), Some(4));
}

/// Starts a migration that waits, sends SIGINT once it says that it freezes, waits for its end.
async fn interrupted(fake: &Fake, name: &str) -> (i32, Vec<String>) {
    let mut child = fake.godwit(&["migrate", name, "--to", "b"]).spawn().unwrap();
    let mut lines = BufReader::new(child.stderr.take().unwrap()).lines();
    let mut seen = vec![lines.next_line().await.unwrap().unwrap()];
    let pid = Pid::from_raw(i32::try_from(child.id().unwrap()).unwrap());
    kill(pid, Signal::SIGINT).unwrap();
    while let Some(line) = lines.next_line().await.unwrap() {
        seen.push(line);
    }
    (child.wait().await.unwrap().code().unwrap(), seen)
}

#[tokio::test]
async fn ctrl_c_cancels_and_waits_for_the_report() {
    let fake = Fake::start();
    let (code, lines) = interrupted(&fake, "slow").await;
    assert_eq!(code, 130, "{lines:?}");
    assert_eq!(lines[0], "migrating slow: freeze");
    assert!(lines[1].starts_with("cancelling the migration of slow"), "{lines:?}");
    let last = lines.last().unwrap();
    assert_eq!(
        last,
        "Error: migration of slow aborted, it stays on a: cancelled by the user before the commit"
    );
    assert_eq!(*fake.asked.cancelled.lock().unwrap(), ["slow"]);
}

#[tokio::test]
async fn ctrl_c_after_the_commit_still_reports_the_move() {
    let fake = Fake::start();
    let (code, lines) = interrupted(&fake, "late").await;
    assert_eq!(code, 0, "{lines:?}");
    assert_eq!(*fake.asked.cancelled.lock().unwrap(), ["late"]);
}

#[tokio::test]
async fn on_a_terminal_a_bar_shows_the_phase_and_ctrl_c_cancels() {
    let fake = Fake::start();
    let command =
        format!("{} migrate slow --to b --socket {}", env!("CARGO_BIN_EXE_godwit"), fake.socket().display());
    // script(1) gives the command a terminal, and ends with its exit code.
    let mut child = tokio::process::Command::new("script")
        .args(["--quiet", "--return", "--command", &command, "/dev/null"])
        .env("TERM", "xterm")
        .env_remove("GODWIT_NODE")
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .kill_on_drop(true)
        .spawn()
        .unwrap();
    let (mut keyboard, mut screen) = (child.stdin.take().unwrap(), child.stdout.take().unwrap());
    let mut seen = Vec::new();
    while !String::from_utf8_lossy(&seen).contains("freeze") {
        assert_ne!(screen.read_buf(&mut seen).await.unwrap(), 0, "{}", String::from_utf8_lossy(&seen));
    }
    keyboard.write_all(b"\x03").await.unwrap();
    while screen.read_buf(&mut seen).await.unwrap() != 0 {}
    let seen = String::from_utf8_lossy(&seen);
    assert!(seen.contains("cancelling the migration of slow"), "{seen}");
    assert!(
        seen.contains(
            "Error: migration of slow aborted, it stays on a: cancelled by the user before the commit"
        ),
        "{seen}"
    );
    assert_eq!(child.wait().await.unwrap().code(), Some(130), "{seen}");
}

#[tokio::test]
async fn cancel_says_whether_it_did() {
    let fake = Fake::start();
    let finished = fake.run(&["cancel", "slow"]).await;
    assert_eq!(finished.code, 0);
    let finished = fake.run(&["cancel", "redis"]).await;
    assert_eq!(finished.code, 1);
    assert_eq!(finished.stderr, "Error: nothing was cancelled for redis: it had committed\n");
    assert_eq!(fake.run(&["cancel", "redis", "--json"]).await.json()["cancelled"], false);
}

#[tokio::test]
async fn a_migration_goes_on_when_nobody_reads_its_progress() {
    let fake = Fake::start();
    let (reader, writer) = std::io::pipe().unwrap();
    drop(reader);
    let child = fake.godwit(&["migrate", "redis", "--to", "b"]).stderr(writer).spawn().unwrap();
    let finished = Finished::from(child.wait_with_output().await.unwrap());
    assert_eq!(finished.code, 0, "{finished:?}");
    assert!(finished.stdout.starts_with("redis moved from a to b"), "{finished:?}");
}

#[tokio::test]
async fn prepare_asks_for_each_node_and_tells_what_is_there() {
    let fake = Fake::start();
    let finished = fake
        .run(&[
            "prepare",
            "redis",
            "--to",
            "b,c",
            "--network",
            "ns:/n",
            "--max-bandwidth",
            "50MB/s",
            "--mount",
            "/srv=skip",
        ])
        .await;
    assert_eq!(finished.code, 0, "{finished:?}");
    assert!(
        finished
            .stdout
            .starts_with("redis can move to b: 200.0 MiB of its memory and 300.0 MiB of its files are there"),
        "{finished:?}"
    );
    assert!(finished.stderr.contains("preparing redis: round"), "{finished:?}");
    {
        let asked = fake.asked.prepared.lock().unwrap();
        let to: Vec<_> = asked.iter().map(|request| request.to.as_str()).collect();
        assert_eq!((to, asked[0].max_bandwidth), (vec!["b", "c"], 50_000_000));
        assert_eq!((asked[1].mounts["/srv"].as_str(), asked[1].network.as_str()), ("skip", "ns:/n"));
    }
    // One that cannot be prepared for does not keep the others from it.
    let finished = fake.run(&["prepare", "redis", "--to", "old,gone,full,b"]).await;
    assert_eq!((finished.code, finished.stdout.lines().count()), (1, 2), "{finished:?}");
    for words in [
        "not prepared for old: node old refuses",
        "Error: there is no node gone",
        "no room for 7.0 MiB",
        "the files of redis cross with the move to full: the disk is full",
    ] {
        assert!(finished.stderr.contains(words), "{words}: {finished:?}");
    }
    assert_eq!(fake.asked.prepared.lock().unwrap().len(), 5);
    // Again and again, but not for what will never be.
    let finished = fake.run(&["prepare", "redis", "--to", "gone", "--every", "1h"]).await;
    assert_eq!(finished.code, 1, "{finished:?}");
}
