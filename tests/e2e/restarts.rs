//! Services that have ended and are started again from their files: by a user, by their policy, after the power of
//! their node was cut, and never where they are not any more. Needs root.

use std::{
    fs,
    net::Ipv4Addr,
    os::unix::fs::PermissionsExt,
    path::{Path, PathBuf},
};

use godwit_lab::workload::Workload;
use godwit_tests::{Bed, hold::Points, victim::Attempt, wait_for};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;

const NAME: &str = "lives";
const ADDRESS: Ipv4Addr = Ipv4Addr::new(10, 88, 0, 90);
/// Notes each of its lives in a file, and then stays.
const LIVES: &str = "echo life >> /lives; exec sleep 100000";

/// Where its memory has been copied, and it is to be frozen next.
const COPIED: &str = "source.copied";

fn run(bed: &Bed, restart: &str, script: &str) {
    run_from(bed, &bed.build(Workload::Busybox).rootfs, restart, script);
}

fn run_from(bed: &Bed, root: &Path, restart: &str, script: &str) {
    let (root, address) = (root.to_str().unwrap(), ADDRESS.to_string());
    let flags = ["run", "--name", NAME, "--ip", &address, "--restart", restart, "--rootfs", root];
    bed.done("a", &[&flags[..], &["--", "sh", "-c", script]].concat());
}

fn inspect(bed: &Bed, node: &str) -> Value {
    bed.json(node, &["inspect", NAME])
}

/// What a node says of the service once it is as it should be.
fn shown(bed: &Bed, node: &str, what: &str, right: impl Fn(&Value) -> bool) -> Value {
    wait_for(what, || Some(inspect(bed, node)).filter(&right))
}

fn main_process(shown: &Value) -> Pid {
    Pid::from_raw(i32::try_from(shown["pid"].as_i64().unwrap()).unwrap()).unwrap()
}

/// How often its program has begun, as its files say.
fn lives(bed: &Bed, node: &str) -> usize {
    let file = bed.lab().state(node).unwrap().join("services").join(NAME).join("upper/lives");
    fs::read_to_string(file).unwrap_or_default().lines().count()
}

fn has_lived(bed: &Bed, node: &str, times: usize) {
    wait_for(&format!("life {times} of the service"), || (lives(bed, node) == times).then_some(()));
}

fn has_event(bed: &Bed, node: &str, action: &str) -> String {
    wait_for(&format!("the event {action:?}"), || {
        let events = bed.done(node, &["events"]);
        events.lines().rev().find(|line| line.contains(action)).map(str::to_owned)
    })
}

/// All files of a node's database, as far as they are there.
fn copy_database(from: &Path, to: &Path) {
    for file in ["node.db", "node.db-wal", "node.db-shm", "journal.db", "journal.db-wal", "journal.db-shm"] {
        let _ = fs::remove_file(to.join(file));
        if from.join(file).exists() {
            fs::copy(from.join(file), to.join(file)).unwrap();
        }
    }
}

#[test]
fn a_service_that_ends_is_started_again_wherever_it_is_and_one_that_is_stopped_is_not() {
    let bed = Bed::up("restart");
    run(&bed, "always", LIVES);
    has_lived(&bed, "a", 1);
    let first = inspect(&bed, "a");
    kill_process(main_process(&first), Signal::KILL).unwrap();
    let again = |before: &Value, node: &str| {
        let other = before["pid"].clone();
        // 0 between two lives.
        let lives = |s: &Value| s["state"] == "running" && s["pid"] != 0 && s["pid"] != other;
        shown(&bed, node, "another process of it", lives)
    };
    let second = again(&first, "a");
    assert_eq!(second["restarts"], 1, "{second}");
    for same in ["address", "mac", "created_ms", "epoch", "restart"] {
        assert_eq!(second[same], first[same], "{same}");
    }
    has_lived(&bed, "a", 2);
    assert!(has_event(&bed, "a", "restarted").contains("exit code 137"));

    bed.done("a", &["stop", "--time", "0", NAME]);
    let stopped = inspect(&bed, "a");
    assert_eq!(
        (stopped["state"].as_str(), stopped["reason"].as_str()),
        (Some("stopped"), Some("stopped by `godwit stop`"))
    );
    // Its policy is asked again when the daemon starts.
    bed.lab().restart_node("a").unwrap();
    bed.done("a", &["restart", "--time", "0", NAME]);
    has_lived(&bed, "a", 3);
    bed.done("a", &["stop", "--time", "0", NAME]);
    bed.done("a", &["start", NAME]);
    has_lived(&bed, "a", 4);
    let running = inspect(&bed, "a");
    assert_eq!(running["restarts"], 0, "a user started it: {running}");
    bed.done("a", &["start", NAME]);
    assert_eq!(inspect(&bed, "a")["pid"], running["pid"], "one that runs is left alone");
    bed.done("a", &["restart", "--time", "0", NAME]);
    has_lived(&bed, "a", 5);

    // The policy and the files move with it.
    let kept = tempfile::tempdir().unwrap();
    bed.lab().stop_node("a").unwrap();
    copy_database(&bed.lab().state("a").unwrap(), kept.path());
    bed.lab().start_node("a").unwrap();
    bed.migrate(NAME, "a", "b");
    let there = inspect(&bed, "b");
    kill_process(main_process(&there), Signal::KILL).unwrap();
    again(&there, "b");
    has_lived(&bed, "b", 6);

    // Node a gets a disk of before the service left, and finds none of its processes.
    bed.lab().stop_node("a").unwrap();
    copy_database(kept.path(), &bed.lab().state("a").unwrap());
    bed.lab().start_node("a").unwrap();
    let refused = has_event(&bed, "a", "not restarted");
    assert!(refused.contains("on node b"), "{refused}");
    let said = bed.godwit("a", &["start", NAME]);
    assert!(said.code == 1 && said.stderr.contains("on node b"), "{said:?}");
    assert_eq!(lives(&bed, "a"), 0);
    assert_eq!(lives(&bed, "b"), 6);
}

#[test]
fn on_failure_starts_a_service_as_often_as_it_says() {
    let bed = Bed::up("on-failure");
    let root = bed.build(Workload::Busybox).rootfs;
    run_from(&bed, &root, "on-failure:2", "echo life >> /lives; exit 3");
    let ended = shown(&bed, "a", "the last of its lives", |s| s["state"] == "stopped" && s["restarts"] == 2);
    assert_eq!((ended["exit_code"].as_i64(), lives(&bed, "a")), (Some(3), 3), "{ended}");
    bed.done("a", &["rm", NAME]);
    run_from(&bed, &root, "on-failure", "echo life >> /lives; exit 0");
    shown(&bed, "a", "its only life", |s| s["state"] == "stopped" && s["restarts"] == 0);
    assert_eq!(lives(&bed, "a"), 1);
    let said = bed.godwit("a", &["run", "--restart", "sometimes", "--rootfs", "/", "true"]);
    assert!(said.code == 125 && said.stderr.contains("on-failure:N"), "{said:?}");
}

/// What a power cut leaves of a service of a stopped node: its files.
fn cut_the_power(bed: &Bed, node: &str, main: Pid) {
    let state = bed.lab().state(node).unwrap();
    let shim = fs::read_to_string(state.join("services").join(NAME).join("container/shim.lock")).unwrap();
    let shim = Pid::from_raw(shim.trim().parse().unwrap()).unwrap();
    kill_process(shim, Signal::KILL).unwrap();
    kill_process(main, Signal::KILL).unwrap();
    wait_for("the end of its processes", || {
        let alive = [shim, main].iter().any(|pid| {
            let stat = fs::read_to_string(format!("/proc/{}/stat", pid.as_raw_nonzero()));
            stat.is_ok_and(|stat| !stat.contains(") Z "))
        });
        (!alive).then_some(())
    });
    rustix::mount::unmount(
        state.join("services").join(NAME).join("rootfs"),
        rustix::mount::UnmountFlags::DETACH,
    )
    .unwrap();
    // The run directory is on a file system that does not outlive the machine.
    let run = bed.lab().socket(node).unwrap().parent().unwrap().to_path_buf();
    fs::remove_dir_all(run.join("runc").join(NAME)).unwrap();
    let namespace = run.join("netns").join(NAME);
    rustix::mount::unmount(&namespace, rustix::mount::UnmountFlags::DETACH).unwrap();
    fs::remove_file(namespace).unwrap();
}

#[test]
fn after_a_power_cut_a_service_is_started_from_its_files_where_it_was() {
    let bed = Bed::up("power-cut");
    run(&bed, "on-failure", "echo life >> /lives; exec httpd -f -p 80 -h /");
    has_lived(&bed, "a", 1);
    let before = inspect(&bed, "a");
    bed.lab().stop_node("a").unwrap();
    cut_the_power(&bed, "a", main_process(&before));
    bed.lab().start_node("a").unwrap();
    let after = shown(&bed, "a", "the service to run again", |s| s["state"] == "running");
    for same in ["address", "mac", "networks", "created_ms", "epoch"] {
        assert_eq!(after[same], before[same], "{same}");
    }
    has_lived(&bed, "a", 2);
    let event = has_event(&bed, "a", "restarted");
    assert!(event.contains("its processes are gone"), "{event}");
    // Its clients reach it, and what it is moves as it did.
    drop(bed.connect(std::net::SocketAddrV4::new(ADDRESS, 80)));
    bed.migrate(NAME, "a", "b");
    drop(bed.connect(std::net::SocketAddrV4::new(ADDRESS, 80)));
}

/// A runc that finds the service ended by itself whenever the file that is returned names its directory.
fn unlucky_runc(directory: &Path) -> (PathBuf, PathBuf) {
    let (mark, path) = (directory.join("mark"), directory.join("runc"));
    let script = format!(
        "#!/bin/sh\n\
         case \" $* \" in *' kill '*)\n\
         if [ -e {0} ]; then\n\
             there=$(cat {0}); rm {0}; kill -9 $(cat $there/init.pid)\n\
             while [ ! -e $there/exit.json ]; do sleep 0.01; done\n\
         fi ;;\n\
         esac\n\
         exec runc \"$@\"\n",
        mark.display()
    );
    fs::write(&path, script).unwrap();
    fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
    (mark, path)
}

#[test]
fn a_service_that_ends_by_itself_while_it_is_stopped_is_stopped() {
    let directory = tempfile::tempdir().unwrap();
    let (mark, runc) = unlucky_runc(directory.path());
    let bed = Bed::up_with("stop-ended", |config| config.programs.runc = Some(runc));
    run(&bed, "no", LIVES);
    has_lived(&bed, "a", 1);
    let container = bed.lab().state("a").unwrap().join("services").join(NAME).join("container");
    fs::write(&mark, container.to_str().unwrap()).unwrap();
    let said = bed.godwit("a", &["stop", NAME]);
    assert!(!mark.exists(), "it ended by itself just before it was told to");
    let stopped = inspect(&bed, "a");
    assert_eq!((said.code, stopped["state"].as_str()), (0, Some("stopped")), "{said:?}: {stopped}");
    assert_eq!(stopped["exit_code"], 137, "{stopped}");
}

#[test]
fn a_service_that_ends_while_its_memory_is_copied_stays_and_follows_its_policy() {
    let mut points = None;
    let bed = Bed::up_with("ends-midway", |config| points = Some(Points::among(config, &[COPIED])));
    let points = points.unwrap();
    let root = bed.build(Workload::Busybox).rootfs;
    for (restart, state, times) in [("no", "stopped", 1), ("always", "running", 2)] {
        run_from(&bed, &root, restart, LIVES);
        has_lived(&bed, "a", 1);
        let main = main_process(&inspect(&bed, "a"));
        let begin = || Attempt::begin(&bed, NAME, "a", "b", &["--mode", "precopy"]);
        let attempt = Attempt::held(&points, COPIED, begin);
        kill_process(main, Signal::KILL).unwrap();
        points.let_go(COPIED);
        println!("{restart}: {}", attempt.aborted());
        shown(&bed, "a", &format!("it to be {state}"), |shown| shown["state"] == state);
        has_lived(&bed, "a", times);
        let there = bed.lab().state("b").unwrap().join("services").join(NAME);
        wait_for("node b to have nothing of it", || (!there.exists()).then_some(()));
        bed.done("a", &["rm", "--force", NAME]);
    }
}
