//! PostgreSQL: transactions that are open while the server moves. Needs root.

use std::net::Ipv4Addr;
use std::process::Stdio;
use std::time::Duration;

use godwit_lab::workload::{Preset, Workload};
use godwit_tests::{Bed, PATIENCE, Report, psql::Psql, tier, wait_for, wait_for_within};

const ADDRESS: Ipv4Addr = Ipv4Addr::new(10, 88, 0, 40);
const BUFFERED: Ipv4Addr = Ipv4Addr::new(10, 88, 0, 44);
const IDLE: Ipv4Addr = Ipv4Addr::new(10, 88, 0, 45);

/// If this is set, the server has 2 GiB of buffers.
const LARGE: &str = "GODWIT_TEST_BUFFERS";

/// The buffers are full: only what pgbench writes to them during the last round is compared while the server is frozen,
/// and crosses then.
#[test]
fn shared_buffers_move_under_pgbench_before_the_freeze() {
    // MiB of buffers, and how much data pgbench makes. With 2 GiB the disk is busy for minutes: other tests would fail.
    let (buffers, scale) = match std::env::var_os(LARGE) {
        Some(_) => (2048, "130"),
        None if tier::is_full() => (512, "30"),
        None => (192, "10"),
    };
    let bed = Bed::up("buffers");
    let preset = bed.build(Workload::Postgres);
    let options = [format!("shared_buffers={buffers}MB"), "max_wal_size=8GB".into(), "autovacuum=off".into()];
    let options = options.into_iter().flat_map(|option| ["-c".to_owned(), option]);
    let preset = Preset { command: preset.command.iter().cloned().chain(options).collect(), ..preset };
    bed.run("a", "buffered", BUFFERED, &preset, &[]);
    bed.run("a", "idle", IDLE, &bed.build(Workload::Busybox), &[]);
    let mut session = Psql::connect(&bed, BUFFERED, PATIENCE);
    let address = BUFFERED.to_string();
    let pgbench = |more: &[&str]| {
        let mut command = bed.on_client("pgbench");
        command.args(["-h", &address, "-U", "postgres", "-n"]).args(more).arg("postgres");
        command.stdout(Stdio::null());
        command
    };
    assert!(pgbench(&["-i", "-q", "-s", scale]).status().unwrap().success());
    // Reads all of it into the buffers: a scan of the whole table alone would go through a few of them.
    session.query(
        "SET enable_seqscan = off; SET enable_bitmapscan = off; SET max_parallel_workers_per_gather = 0",
    );
    session.query("SELECT sum(abalance) FROM pgbench_accounts WHERE aid > 0");
    let mut load = pgbench(&["-c", "8", "-T", "36000"]).spawn().unwrap();
    let done = "SELECT count(*) > 1000 FROM pgbench_history";
    wait_for_within(Duration::from_secs(300), "pgbench's transactions", || {
        (session.query(done) == ["t"]).then_some(())
    });
    let modes = [("a", "b", "precopy"), ("b", "a", "postcopy"), ("a", "b", "hybrid"), ("b", "a", "postcopy")];
    let enough = if tier::is_full() { 4 } else { 2 };
    let (mut only_written, mut knows) = (0, true);
    for (number, (from, to, mode)) in modes.into_iter().cycle().take(12).enumerate() {
        // The server makes a process now and then, and then all is compared.
        if number >= enough && (only_written > 0 || !knows) {
            break;
        }
        let idle = bed.migrate_so("idle", from, to, &["--mode", mode]);
        let report = bed.migrate_so("buffered", from, to, &["--mode", mode]);
        let compared: Vec<_> =
            report.timeline.iter().filter(|span| span.what.contains("shared memory")).collect();
        println!(
            "{mode}: {} MiB of buffers frozen for {:.0} ms, {:.2} of an idle container; {compared:?}; KiB then: {}",
            (report.shared_bytes + report.shared_left_bytes) >> 20,
            report.frozen_ms,
            report.frozen_ms / idle.frozen_ms,
            report.shared_dump_bytes >> 10,
        );
        let long = report.timeline.iter().filter(|span| span.ms > 10.0);
        println!(
            "  {}",
            long.map(|span| format!("{} {:.0}", span.what, span.ms)).collect::<Vec<_>>().join(", ")
        );
        let follows = mode == "postcopy" && Report::fills_shared();
        let before = if follows { report.shared_left_bytes } else { report.shared_bytes };
        assert!(before > (buffers / 2) << 20, "{report:?}");
        // On a busy machine pgbench writes faster than the rounds send.
        assert!(report.shared_dump_bytes < before / 2, "{report:?}");
        if !follows {
            only_written += usize::from(compared[0].what == "compare shared memory");
            knows &= report.knows_shared_writes();
        }
        assert!(load.try_wait().unwrap().is_none(), "pgbench has ended");
    }
    assert!(only_written > 0 || !knows);
    load.kill().unwrap();
    load.wait().unwrap();
    let sums =
        "SELECT (SELECT sum(abalance) FROM pgbench_accounts) = (SELECT sum(delta) FROM pgbench_history)";
    assert_eq!(session.query(sums), ["t"]);
    session.end();
}

#[test]
fn moves_keep_open_transactions() {
    let bed = Bed::up("postgres");
    let preset = bed.build(Workload::Postgres);
    bed.run("a", "database", ADDRESS, &preset, &[]);
    let connect = || Psql::connect(&bed, ADDRESS, PATIENCE);
    let (mut writer, mut reader, mut waiter) = (connect(), connect(), connect());
    writer.query("CREATE TABLE t (number int PRIMARY KEY, note text)");
    writer.query("INSERT INTO t SELECT -g, repeat('x', 1000) FROM generate_series(1, 5000) g");
    // What only these sessions have.
    writer.query("PREPARE add (int) AS INSERT INTO t VALUES ($1, 'in a transaction')");
    reader.query("CREATE TEMPORARY TABLE seen AS SELECT 0 AS number");
    let count = "SELECT count(*) FROM t WHERE number > 0";

    let begin = |writer: &mut Psql, reader: &mut Psql, waiter: &mut Psql, number: usize| {
        writer.query("BEGIN");
        writer.query(&format!("EXECUTE add ({number})"));
        writer.query("DECLARE rows CURSOR FOR SELECT number FROM t WHERE number < 0 ORDER BY number DESC");
        assert_eq!(writer.query("FETCH 2 FROM rows"), ["-1", "-2"]);
        // It waits in the server for the writer's commit.
        waiter.ask(&format!(
            "INSERT INTO t VALUES ({number}, 'too') ON CONFLICT (number) DO NOTHING RETURNING 1"
        ));
        let waiting = "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock'";
        wait_for("the wait for a lock", || (reader.query(waiting) == ["1"]).then_some(()));
    };
    begin(&mut writer, &mut reader, &mut waiter, 1);
    let moves = bed.move_to_and_fro("database", |number, _| {
        assert_eq!(reader.query(count), [(number - 1).to_string()], "seen before its commit");
        assert_eq!(writer.query("FETCH 2 FROM rows"), ["-3", "-4"]);
        writer.query("COMMIT");
        assert!(waiter.answer().is_empty(), "the other's row is there");
        assert_eq!(reader.query(count), [number.to_string()]);
        reader.query("UPDATE seen SET number = number + 1");
        if number < tier::moves() {
            begin(&mut writer, &mut reader, &mut waiter, number + 1);
        }
    });
    for report in moves.0.iter().filter(|report| report.mode != "cold") {
        // The buffers have the whole table.
        let before = report.shared_bytes + report.shared_left_bytes;
        assert!(before > 5_000_000, "{report:?}");
        // On a busy machine the server writes a part of them between the last round and the freeze.
        assert!(report.shared_dump_bytes < before / 2, "{report:?}");
        let follows = report.mode == "postcopy" && Report::fills_shared();
        assert_eq!(report.shared_left_bytes > 0, follows, "{report:?}");
        // Each process has 1.5 MB of its own of the program's data and its libraries', and there are ten.
        assert!(report.criu.contains("+external-file-pages"), "{report:?}");
        assert!(report.dump_bytes < 10_000_000, "{report:?}");
    }
    assert_eq!(reader.query("SELECT number FROM seen"), [tier::moves().to_string()]);
    assert_eq!(
        reader.query("SELECT sum(number), count(*), sum(length(note)) FROM t WHERE number < 0"),
        [format!("{}|5000|5000000", -5000 * 5001 / 2)]
    );
    // What is on disk is whole: all is written there, and every page of it is read.
    writer.query("CHECKPOINT");
    writer.query("VACUUM FULL t");
    for session in [writer, reader, waiter] {
        session.end();
    }
    if !bed.has_logs() {
        return;
    }
    let log = bed.godwit("a", &["logs", "database"]);
    assert!(log.stderr.contains("ready to accept connections"), "{log:?}");
    // Those who asked for its readiness may have been too early.
    let faults = log.stderr.lines().filter(|line| !line.ends_with("the database system is starting up"));
    let faults: Vec<_> =
        faults.filter(|line| ["PANIC", "FATAL", "ERROR"].iter().any(|word| line.contains(word))).collect();
    assert!(faults.is_empty(), "{faults:?}");
}
