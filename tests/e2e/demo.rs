//! What the README shows first: the demo, also on a machine with cgroup version 2 alone. Needs root.

use std::process::{Command, Output};

use godwit_tests::{BUSY, TRIES, leftovers, programs};

/// Data in Redis: enough for several pages files, little enough to be quick.
const MEMORY: &str = "24MiB";

fn demo(lab: &str, program: &str, before: &[&str]) -> Output {
    let godwit = programs().join("godwit");
    Command::new(program)
        .args(before)
        .arg(godwit)
        .args(["lab", "demo", "--name", lab, "--memory", MEMORY])
        .output()
        .unwrap()
}

/// Tries again where the move was aborted only because the machine is busy.
fn patiently(run: impl Fn() -> Output) -> Output {
    let mut tries = 1..TRIES;
    loop {
        let output = run();
        let is_busy = BUSY.iter().any(|busy| String::from_utf8_lossy(&output.stderr).contains(busy));
        if !is_busy || tries.next().is_none() {
            return output;
        }
    }
}

fn assert_moved(lab: &str, output: &Output) {
    let said = String::from_utf8_lossy(&output.stdout);
    let complaints = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{said}{complaints}");
    for line in [&["outcome", "moved from a to b"], &["lost answers", "0"], &["reconnects", "0"]] {
        let shown = said.lines().any(|l| l.trim().starts_with(line[0]) && l.trim().ends_with(line[1]));
        assert!(shown, "{line:?} is not in:\n{said}");
    }
    assert!(said.contains("downtime as the client saw it"), "{said}");
    let left = leftovers::of(lab);
    assert!(left.is_empty(), "{left:?}");
}

#[test]
fn the_demo_moves_a_busy_redis_and_leaves_nothing() {
    let lab = format!("demo{}", std::process::id());
    let output = patiently(|| demo(&lab, "env", &[]));
    assert_moved(&lab, &output);
}

/// A mount namespace in which `/sys/fs/cgroup` is version 2, whatever this machine has mounted there.
#[test]
fn the_demo_works_with_cgroup_version_2_alone() {
    let lab = format!("demo2-{}", std::process::id());
    let script = "umount -R /sys/fs/cgroup; mount -t cgroup2 none /sys/fs/cgroup && exec \"$@\"";
    let before = ["--mount", "--propagation", "private", "sh", "-c", script, "sh"];
    let output = patiently(|| demo(&lab, "unshare", &before));
    assert_moved(&lab, &output);
}
