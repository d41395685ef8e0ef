//! What `godwit migrate` was asked to keep to: its bandwidth, and with a service that writes faster
//! than the link carries the frozen time, the CPU it may be slowed to, pages that may follow. Needs root.

use std::net::Ipv4Addr;

use godwit_lab::workload::{RedisClient, Workload};
use godwit_tests::{
    Bed, CLIENT, PATIENCE, tier,
    victim::Shown,
    wait_for,
    writer::{MEMORY, NAME, Writer},
};

/// A round of the writer's memory takes more than a second of it.
const LINK: &str = "50mbit,1ms";
/// Less than its memory takes on that link, and more than nothing.
const MAX_FROZEN_MS: &str = "600";

/// What moves the writer, which is to be kept.
const KEPT: [&str; 7] = ["--json", "migrate", NAME, "--to", "b", "--max-frozen-ms", MAX_FROZEN_MS];

/// The numbers in a sentence.
fn numbers(sentence: &str) -> Vec<u64> {
    sentence.split(|c: char| !c.is_ascii_digit()).filter_map(|word| word.parse().ok()).collect()
}

/// Waits until both nodes show the service as running on `node`.
fn runs_at(writer: &Writer, node: &str) {
    for asked in ["a", "b"] {
        let state = if asked == node { "running" } else { "remote" };
        wait_for(&format!("{NAME} on {node}, as node {asked} shows it"), || {
            let shown: Vec<Shown> = writer.bed.json(asked, &["ps", "-a"]);
            let right = |shown: &&Shown| (shown.state.as_str(), shown.node.as_str()) == (state, node);
            shown.iter().find(right).map(|_| ())
        });
    }
}

#[test]
fn what_would_be_frozen_for_too_long_is_kept_before_any_freeze_with_figures_and_advice() {
    let mut writer = Writer::up("max-frozen", LINK, &[]);
    let said = writer.bed.godwit("a", &[&KEPT[..], &["--mode", "precopy"]].concat());
    let report = said.report();
    assert_eq!((said.code, report.outcome.as_str()), (1, "aborted"), "{said:?}");
    let reason = report.reason;
    assert!(said.stderr.contains(&reason), "{said:?}");
    let words = ["rounds", "it would still be frozen for", "more than the 600 ms allowed", "can be sent"];
    for words in words.into_iter().chain(["--allow throttle", "--allow postcopy", "--max-frozen-ms"]) {
        assert!(reason.contains(words), "{words:?}: {reason}");
    }
    let [rounds, predicted, asked, writes, sent] = numbers(&reason)[..] else { panic!("{reason}") };
    assert_eq!(rounds, u64::from(report.rounds) + 1, "the last look was sent by no round: {reason}");
    assert!(predicted > asked && writes > 0 && sent > 0, "{reason}");
    // It was never touched.
    assert_eq!(report.frozen_ms, 0.0);
    runs_at(&writer, "a");
    writer.check("after it was aborted");
    // What the sentence advises helps.
    let report = writer.bed.migrate_so(NAME, "a", "b", &["--mode", "precopy", "--max-frozen-ms", "60000"]);
    assert_eq!((report.mode.as_str(), report.reason.as_str()), ("precopy", ""));
    runs_at(&writer, "b");
    writer.check("after the move");
}

/// A service with this CPU limit, in thousandths, is slowed in a migration that is cancelled, in one
/// that keeps it, and in one that moves it; each time it has its own limit again.
fn slowed(test: &str, flags: &[&str], limit: Option<u64>) {
    let mut writer = Writer::up(test, LINK, flags);
    assert_eq!(writer.cpu_millis("a"), limit);
    // The first rounds tell that copying does not pay, the others that slowing this one does not help.
    let how = ["--mode", "precopy", "--allow", "throttle", "--max-rounds", "6"];
    let is_slowed = |writer: &Writer| {
        let now = writer.cpu_millis("a");
        assert!(now.is_some_and(|now| limit.is_none_or(|limit| now < limit)), "{now:?} instead of {limit:?}");
    };

    let attempt = writer.begin_and_hold("a", "b", &how, "source.frozen");
    is_slowed(&writer);
    assert_eq!(writer.bed.godwit("a", &["cancel", NAME]).code, 0);
    writer.points.let_go("source.frozen");
    assert!(attempt.aborted().contains("cancelled"));
    assert_eq!(writer.cpu_millis("a"), limit, "after it was cancelled");
    writer.check("after it was cancelled");

    let said = writer.bed.godwit("a", &[&KEPT[..], &how].concat());
    assert_eq!(said.code, 1, "{said:?}");
    let reason = said.report().reason;
    assert!(
        reason.contains("more than the 600 ms allowed") && reason.contains("--allow postcopy"),
        "{reason}"
    );
    assert!(!reason.contains("--allow throttle"), "it was allowed: {reason}");
    assert_eq!(writer.cpu_millis("a"), limit, "after it was aborted");
    writer.check("after it was aborted");

    let attempt = writer.begin_and_hold("a", "b", &how, "source.frozen");
    is_slowed(&writer);
    writer.points.let_go("source.frozen");
    let (_, report) = attempt.report("moved", 0);
    assert_eq!(report.mode, "precopy");
    assert_eq!(writer.cpu_millis("b"), limit, "after the move");
    writer.check("after the move");
    runs_at(&writer, "b");
}

#[test]
fn a_service_with_a_cpu_limit_that_was_slowed_has_its_own_limit_again() {
    slowed("slow-limit", &["--cpus", "1.5"], Some(1500));
}

#[test]
fn a_service_without_a_cpu_limit_that_was_slowed_has_none_again() {
    if tier::is_full() {
        slowed("slow-free", &[], None);
    }
}

#[test]
fn rounds_that_do_not_pay_end_in_hybrid_where_pages_may_follow_and_the_report_says_why() {
    let mut writer = Writer::up("to-hybrid", LINK, &[]);
    for (from, to, mode) in [("a", "b", "precopy"), ("b", "a", "auto")] {
        let how = ["--mode", mode, "--allow", "postcopy"];
        let report = writer.bed.migrate_so(NAME, from, to, &how);
        assert_eq!(report.mode, "hybrid", "{report:?}");
        assert!(report.why.contains("rounds do not pay"), "{report:?}");
        let [writes, sent] = numbers(&report.why)[..] else { panic!("{report:?}") };
        assert!(writes > 0 && sent > 0, "{report:?}");
        assert!(report.rounds > 1, "it was copied in rounds before: {report:?}");
        // What is left begins to cross at the freeze.
        assert!(report.dump_bytes + report.faulted_bytes > MEMORY / 2, "{report:?}");
        writer.check(&format!("after {mode}"));
        runs_at(&writer, to);
    }
    // Who asks for hybrid has chosen: there is nothing to explain.
    let report = writer.bed.migrate_so(NAME, "a", "b", &["--mode", "hybrid"]);
    assert_eq!((report.mode.as_str(), report.why.as_str(), report.rounds), ("hybrid", "", 1));
    writer.check("after hybrid");
}

#[test]
fn auto_leaves_no_page_behind_unless_that_was_allowed() {
    let mut writer = Writer::up("auto", LINK, &[]);
    for (from, to, more) in [("a", "b", &[][..]), ("b", "a", &["--allow", "throttle", "--max-rounds", "5"])] {
        let report = writer.bed.migrate_so(NAME, from, to, &[&["--mode", "auto"], more].concat());
        assert_eq!(report.mode, "precopy", "{report:?}");
        assert!(
            report.why.contains("rounds do not pay") && report.why.contains("--allow postcopy"),
            "{report:?}"
        );
        assert_eq!((report.faulted_bytes, report.faults), (0, 0), "{report:?}");
        writer.check(&format!("after {more:?}"));
        runs_at(&writer, to);
    }
}

#[test]
fn memory_takes_no_more_bandwidth_than_was_allowed() {
    const ADDRESS: Ipv4Addr = Ipv4Addr::new(10, 88, 0, 81);
    const FILL: u64 = 16 << 20;
    const LIMIT: f64 = 6e6;
    /// A batch with its framing.
    const BATCH: u64 = 260 << 10;
    // On links as fast as the machine: a second would be enough for all of it.
    let bed = Bed::up_with("bandwidth", |config| {
        config.programs.serve_arguments.extend(["--retained-memory", "0"].map(str::to_owned));
    });
    let preset = bed.build(Workload::Redis);
    bed.run("a", "redis", ADDRESS, &preset, &[]);
    let mut data = RedisClient::connect(bed.lab(), CLIENT, preset.at(ADDRESS), PATIENCE).unwrap();
    data.fill(FILL).unwrap();
    for (from, to, mode) in [("a", "b", "cold"), ("b", "a", "precopy"), ("a", "b", "postcopy")] {
        let how = ["--mode", mode, "--compress", "off", "--max-bandwidth", "6MB/s"];
        let report = bed.migrate_so("redis", from, to, &how);
        assert!(report.memory_wire_bytes > FILL, "{mode}: {report:?}");
        // What a process waits for is not held up. Each stretch of sending begins with a batch at once.
        let at_once = 3 * BATCH + report.faults * (4096 + 256);
        let carried = (report.memory_wire_bytes - at_once) as f64 / 1.02;
        let most = LIMIT * report.total_ms / 1e3;
        assert!(carried <= most, "{mode}: {carried} bytes in the time of {most}: {report:?}");
        data.check_fill(FILL).unwrap();
    }
}
