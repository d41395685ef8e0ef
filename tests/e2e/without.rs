//! Nodes that lack what the page mover would like to have: it works by the plain way, and says so.
//! Needs root.

use std::{fs, net::Ipv4Addr};

use godwit_lab::workload::{RedisClient, Workload};
use godwit_tests::{Bed, CLIENT, MODES, PATIENCE, compile};

const ADDRESS: Ipv4Addr = Ipv4Addr::new(10, 88, 0, 10);
/// Data in it.
const FILL: u64 = 16 << 20;

/// A filled Redis on node `a` of a lab whose daemons have these arguments.
fn up(test: &str, arguments: [&str; 2]) -> (Bed, RedisClient) {
    let bed = Bed::up_with(test, |config| {
        config.programs.serve_arguments = arguments.map(str::to_owned).to_vec();
    });
    let preset = bed.build(Workload::Redis);
    bed.run("a", "redis", ADDRESS, &preset, &[]);
    let mut data = RedisClient::connect(bed.lab(), CLIENT, preset.at(ADDRESS), PATIENCE).unwrap();
    data.fill(FILL).unwrap();
    (bed, data)
}

/// The mode is refused with a sentence that has these words.
fn refused(bed: &Bed, mode: &str, words: &[&str]) {
    let said = bed.godwit("a", &["migrate", "redis", "--to", "b", "--mode", mode]);
    assert_eq!(said.code, 1, "{said:?}");
    for word in words {
        assert!(said.stderr.contains(word), "{mode}: {word:?}: {said:?}");
    }
}

#[test]
fn where_userfaultfd_is_forbidden_services_are_restored_from_images() {
    let (bed, mut data) = up("no-uffd", ["--userfaultfd", "off"]);
    for mode in ["postcopy", "hybrid"] {
        refused(&bed, mode, &["needs userfaultfd", "node b", "precopy"]);
    }
    for (from, to, mode) in [("a", "b", "precopy"), ("b", "a", "cold"), ("a", "b", "auto")] {
        // What is allowed is not possible.
        let report = bed.migrate_so("redis", from, to, &["--mode", mode, "--allow", "postcopy"]);
        assert_eq!(report.faulted_bytes, 0, "{report:?}");
        data.check_fill(FILL).unwrap();
    }
    let checks = bed.done("b", &["doctor", "--json"]);
    assert!(checks.contains("restored from images"), "{checks}");
}

#[test]
fn with_a_criu_without_patches_services_move_in_all_modes() {
    let (bed, mut data) = up("stock-criu", ["--criu-patches", "off"]);
    for ((from, to), mode) in [("a", "b"), ("b", "a")].into_iter().cycle().zip(MODES) {
        let report = bed.migrate_so("redis", from, to, &["--mode", mode, "--allow", "postcopy"]);
        for made_use_of in ["+lazy-pages-external", "+tcp-inline", "+external-smaps"] {
            assert!(!report.criu.contains(made_use_of), "{report:?}");
        }
        data.check_fill(FILL).unwrap();
    }
    let checks = bed.done("b", &["doctor", "--json"]);
    assert!(checks.contains("an unpatched CRIU"), "{checks}");
}

#[test]
fn where_writes_cannot_be_followed_services_move_cold_or_postcopy() {
    let (bed, mut data) = up("no-track", ["--tracker", "none"]);
    for mode in ["precopy", "hybrid"] {
        refused(&bed, mode, &["which pages are written", "node a", "cold or postcopy"]);
    }
    // Auto leaves pages behind only where that is allowed.
    for (from, to, flags, mode) in [
        ("a", "b", &["--mode", "auto"][..], "cold"),
        ("b", "a", &["--mode", "auto", "--allow", "postcopy"], "postcopy"),
        ("a", "b", &["--mode", "postcopy"], "postcopy"),
        ("b", "a", &["--mode", "cold"], "cold"),
    ] {
        let report = bed.migrate_so("redis", from, to, flags);
        assert_eq!((report.mode.as_str(), report.rounds), (mode, 0), "{report:?}");
        // What postcopy leaves begins to cross at the freeze: where the restore takes long, all has crossed before.
        assert!(mode == "postcopy" || report.faulted_bytes == 0, "{report:?}");
        data.check_fill(FILL).unwrap();
    }
    // Only the nodes' own tests force it.
    let checks = bed.done("b", &["doctor", "--json"]);
    assert!(checks.contains("only modes cold and postcopy"), "{checks}");
}

/// On a machine with less than 64 GiB, whose kernel judges by that.
#[test]
fn what_the_criu_of_a_destination_cannot_restore_is_refused_untouched() {
    let mode = fs::read_to_string("/proc/sys/vm/overcommit_memory").unwrap();
    let memory = fs::read_to_string("/proc/meminfo").unwrap();
    let total = memory.lines().find_map(|line| line.strip_prefix("MemTotal:")).unwrap();
    let total: u64 = total.trim().trim_end_matches(" kB").parse().unwrap();
    assert!(mode.trim() == "0" && total < 60 << 20, "this machine restores it: {mode} {total}");
    let through = "case $GODWIT_NODE in b) exec \"$@\" --criu-patches off;; esac; exec \"$@\"";
    let bed = Bed::up_with("stock-there", |config| {
        config.programs.serve_through = ["sh", "-c", through, "sh"].map(str::to_owned).into();
    });
    let root = bed.scratch().join("root");
    fs::create_dir_all(&root).unwrap();
    compile("reserve.c", &root.join("reserve"));
    let run = |name: &str, words: &[&str]| {
        let arguments = ["run", "--name", name, "--rootfs", root.to_str().unwrap(), "--", "/reserve"];
        bed.done("a", &[&arguments, words].concat());
    };
    run("counted", &[]);
    for mode in ["precopy", "postcopy"] {
        let said = bed.godwit("a", &["--json", "migrate", "counted", "--to", "b", "--mode", mode]);
        let report = said.report();
        assert_eq!((said.code, report.outcome.as_str()), (1, "aborted"), "{report:?}");
        let parts = [
            "node b refuses: process ",
            "(reserve, PID 1 in the service)",
            "has reserved 64 GiB",
            "setup-criu",
        ];
        for part in parts {
            assert!(report.reason.contains(part), "{part}: {}", report.reason);
        }
        let done = (report.frozen_ms, report.file_bytes, report.rounds);
        assert_eq!(done, (0.0, 0, 0), "nothing was touched: {report:?}");
    }
    // What the program itself did not have counted is not counted there either.
    run("uncounted", &["uncounted"]);
    let report = bed.migrate("uncounted", "a", "b");
    let (_, series) = report.criu.split_once("+godwit.").unwrap();
    assert!(series.starts_with(|digit: char| digit.is_ascii_digit()), "{report:?}");
    assert!(!report.criu_there.is_empty() && !report.criu_there.contains("+godwit"), "{report:?}");
    // A CRIU with the patches has no trouble with it.
    bed.migrate("uncounted", "b", "a");
}
