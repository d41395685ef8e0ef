//! How long a service stays frozen: a destination that hangs, and what crosses before the freeze. Needs root.

use std::{net::Ipv4Addr, time::Duration};

use godwit_lab::workload::Workload;
use godwit_tests::{Bed, TRIES, is_passing, victim::Victim, wait_for, wait_for_within};

const ADDRESS: Ipv4Addr = Ipv4Addr::new(10, 88, 0, 90);

#[test]
fn a_destination_that_hangs_freezes_a_service_no_longer_than_its_source_has_patience() {
    // The step that it has told of before it is held at each of these points.
    const POINTS: [(&str, &str); 2] = [
        ("destination.receiving", "take the images of the kernel's state"),
        ("destination.restoring", "write the changed files to its disk"),
    ];
    let patience = |config: &mut godwit_lab::LabConfig, _: &std::path::Path| {
        config.programs.serve_arguments.extend(["--patience", "12"].map(str::to_owned));
    };
    let victim = Victim::up_with("patience", patience, |_| Vec::new());
    for (point, step) in POINTS {
        let mut tries = 1..TRIES;
        let reason = loop {
            let attempt = victim.begin_and_hold(point);
            // Its heartbeats go on, unless the machine is busy.
            let reason = attempt.aborted();
            if !is_passing(&reason) || tries.next().is_none() {
                break reason;
            }
            victim.let_go(point);
        };
        assert!(reason.contains("node b made no progress for"), "{reason}");
        assert!(reason.contains(step), "{reason}");
        victim.let_go(point);
        victim.is_as_before();
    }
    victim.moves_in_the_end();
}

#[test]
fn a_log_crosses_before_the_freeze_but_for_its_last_lines() {
    // Its records are 26 MB, so that it is rotated once.
    const LINES: usize = 400_000;
    let bed = Bed::up("log-ahead");
    let mut preset = bed.build(Workload::Busybox);
    let talk = format!("seq 1 {LINES}; while sleep 0.2; do echo more; done");
    preset.command = ["/bin/sh", "-c", &talk].map(str::to_owned).into();
    bed.run("a", "talker", ADDRESS, &preset, &[]);
    let logged = |node: &str| bed.done(node, &["logs", "talker"]);
    let mut before = wait_for_within(Duration::from_secs(300), "all that it says at first", || {
        let log = logged("a");
        log.ends_with("more\n").then_some(log)
    });
    for (from, to, mode) in [("a", "b", "precopy"), ("b", "a", "cold")] {
        let report = bed.migrate_so("talker", from, to, &["--mode", mode]);
        assert!(report.file_bytes > 24 << 20, "{report:?}");
        assert!(report.dump_bytes < 4 << 20, "what crossed while it was frozen: {report:?}");
        let after = wait_for("a line at its new place", || {
            let log = logged(to);
            (log.len() > before.len()).then_some(log)
        });
        assert!(after.starts_with(&before), "{mode}: lines are missing or double");
        assert!(after[before.len()..].lines().all(|line| line == "more"), "{mode}");
        before = after;
    }
    let first: usize = before.lines().next().unwrap().parse().unwrap();
    let lines = before.lines().take_while(|line| *line != "more");
    assert!(lines.map(|line| line.parse::<usize>().unwrap()).eq(first..=LINES), "from {first} on");
}
