//! What `godwit check` says of the two nodes, and whether a move says the same: their room for processes, memory and files,
//! and their clocks. Needs root.

use std::{
    fs,
    net::Ipv4Addr,
    path::{Path, PathBuf},
    process::Command,
};

use godwit_lab::workload::{Preset, Workload};
use godwit_tests::{Bed, compile, disks::Small, podman::Podmans, wait_for};
use serde_json::Value;

const ADDRESS: Ipv4Addr = Ipv4Addr::new(10, 88, 0, 63);
const NAME: &str = "crowd";

/// Processes of the service.
const CROWD: u64 = 9;
/// And of a container of Podman's.
const ALL_OF_PODMAN: u64 = 24;

fn crowd(bed: &Bed) -> Preset {
    let mut preset = bed.build(Workload::Busybox);
    let children = "sleep 100000 & ".repeat(usize::try_from(CROWD).unwrap() - 1);
    preset.command = ["sh", "-c", &format!("{children} wait")].map(str::to_owned).into();
    bed.run("a", NAME, ADDRESS, &preset, &[]);
    bed.knows("b", NAME);
    preset
}

/// What a check answers with, and its exit code.
fn checked(bed: &Bed, from: &str, to: &str) -> (i32, Value) {
    let said = bed.godwit(from, &["--json", "check", NAME, "--to", to]);
    (said.code, serde_json::from_str(&said.stdout).unwrap_or_else(|error| panic!("{error}: {said:?}")))
}

fn sentences(answer: &Value, list: &str) -> Vec<String> {
    answer[list].as_array().unwrap().iter().map(|sentence| sentence.as_str().unwrap().to_owned()).collect()
}

/// The directory of the service's cgroup that limits its processes.
fn cgroup(bed: &Bed, node: &str) -> PathBuf {
    let root = Path::new("/sys/fs/cgroup");
    let controllers = if root.join("cgroup.controllers").exists() { "" } else { "pids" };
    let text = fs::read_to_string(format!("/proc/{}/cgroup", bed.pid(node, NAME))).unwrap();
    let mut lines = text.lines().map(|line| line.split_once(':').unwrap().1.split_once(':').unwrap());
    let (_, path) = lines.find(|(names, _)| *names == controllers).unwrap();
    root.join(controllers).join(path.trim_start_matches('/'))
}

#[test]
fn a_service_that_has_as_many_processes_as_it_may_or_more_moves_and_keeps_its_limit() {
    let bed = Bed::up("crowd");
    crowd(&bed);
    let mut limits = vec![CROWD, CROWD - 5, 1];
    for (from, to, mode) in [("a", "b", "precopy"), ("b", "a", "cold"), ("a", "b", "postcopy")] {
        let limit = limits.remove(0).to_string();
        bed.done(from, &["update", "--pids-limit", &limit, NAME]);
        let (code, answer) = checked(&bed, from, to);
        assert_ne!(code, 1, "a false alarm: {answer}");
        bed.migrate_so(NAME, from, to, &["--mode", mode]);
        let of = |file: &str| fs::read_to_string(cgroup(&bed, to).join(file)).unwrap();
        assert_eq!((of("pids.current").trim(), of("pids.max").trim()), ("9", limit.as_str()));
    }
    bed.done("b", &["update", "--pids-limit", "0", NAME]);
    bed.migrate(NAME, "b", "a");
    assert_eq!(fs::read_to_string(cgroup(&bed, "a").join("pids.max")).unwrap(), "max\n");
}

#[test]
fn a_service_keeps_its_process_ids_where_other_processes_of_the_node_have_them() {
    let bed = Bed::up("same-ids");
    let preset = crowd(&bed);
    let ids = |node: &str| {
        let pids = fs::read_to_string(cgroup(&bed, node).join("cgroup.procs")).unwrap();
        let inside = |pid: &str| {
            let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
            let ids = status.lines().find_map(|line| line.strip_prefix("NSpid:")).unwrap();
            ids.split_whitespace().map(|id| id.parse::<u64>().unwrap()).collect::<Vec<_>>()
        };
        let mut ids: Vec<_> = pids.lines().map(inside).map(|ids| (*ids.last().unwrap(), ids)).collect();
        ids.sort_unstable();
        ids
    };
    let inside = |ids: &[(u64, Vec<u64>)]| ids.iter().map(|(inside, _)| *inside).collect::<Vec<_>>();
    let before = wait_for("all of its processes", || Some(ids("a")).filter(|ids| ids.len() as u64 == CROWD));
    // It has the first ones, and so has this one.
    bed.run("b", "twin", Ipv4Addr::new(10, 88, 0, 64), &preset, &[]);
    for (from, to, mode) in [("a", "b", "precopy"), ("b", "a", "cold"), ("a", "b", "postcopy")] {
        bed.migrate_so(NAME, from, to, &["--mode", mode]);
        let after = ids(to);
        assert_eq!(inside(&after), inside(&before), "{after:?}");
        // Outside they have other ones: those are taken.
        assert!(after.iter().all(|(inside, ids)| ids[0] != *inside), "{after:?}");
    }
}

/// Its engine limits it before the restore, and godwit lifts the limit for that.
#[test]
fn a_container_of_podmans_that_has_as_many_processes_as_it_may_moves_and_keeps_its_limit() {
    let podmans = Podmans::new();
    let bed = Bed::up_with("crowd-podman", |config| podmans.equip(config));
    let preset = bed.build(Workload::Busybox);
    podmans.image(&bed, &["a", "b"], &preset, "localhost/crowd:1");
    // runc needs some while it starts the container.
    let children = "sleep 100000 & ".repeat(usize::try_from(ALL_OF_PODMAN).unwrap() - 1);
    let limit = ALL_OF_PODMAN.to_string();
    let flags = ["run", "--detach", "--name", NAME, "--network", "none", "--pids-limit", &limit];
    podmans.done(
        &bed,
        "a",
        &[&flags[..], &["localhost/crowd:1", "sh", "-c", &format!("{children} wait")]].concat(),
    );
    bed.done("a", &["adopt", "podman:crowd", "--ip", &ADDRESS.to_string()]);
    bed.knows("b", NAME);
    let of =
        |node: &str, file: &str| fs::read_to_string(cgroup(&bed, node).join(file)).unwrap().trim().to_owned();
    wait_for("all of its processes", || (of("a", "pids.current") == limit).then_some(()));
    let (code, answer) = checked(&bed, "a", "b");
    assert_ne!(code, 1, "a false alarm: {answer}");
    bed.migrate(NAME, "a", "b");
    assert_eq!((of("b", "pids.current"), of("b", "pids.max")), (limit.clone(), limit.clone()));
    bed.done("b", &["rm", "--force", NAME]);
}

#[test]
fn all_that_the_destination_has_no_room_for_is_told_at_once_and_a_move_says_the_same() {
    let bed = Bed::up_with("room", |config| {
        config.programs.serve_arguments.extend(["--incoming-memory", "1"].map(str::to_owned));
    });
    let disk = Small::of(&bed, "b", 256 << 20);
    crowd(&bed);
    let memory = "node b: node b has 1 MiB of memory for services on their way to it";
    let processes = format!("node b: the service has {CROWD} processes and threads, and node b has ");
    let files = "node b: its disk has 0 MiB free and ";
    // That of all services of the node.
    let above = cgroup(&bed, "a").parent().unwrap().with_file_name("b");
    let limit = above.join("pids.max");
    fs::create_dir_all(&above).unwrap();
    fs::write(&limit, CROWD.to_string()).unwrap();
    let full = disk.fill();
    let (code, answer) = checked(&bed, "a", "b");
    let told = sentences(&answer, "objections");
    assert_eq!((code, told.len(), &answer["forecast"]), (1, 3, &Value::Null), "{answer}");
    for words in [memory, files, &processes] {
        assert!(told.iter().any(|reason| reason.starts_with(words)), "{words}: {told:?}");
    }
    assert!(told.iter().any(|reason| reason.contains(limit.to_str().unwrap())), "{told:?}");
    let refused = bed.godwit("a", &["migrate", NAME, "--to", "b"]);
    assert_eq!(refused.code, 1, "{refused:?}");
    for words in [memory, files, &processes] {
        let words = words.strip_prefix("node b: ").unwrap();
        assert!(refused.stderr.contains(words), "{words}: {refused:?}");
    }
    drop(full);
    // CRIU counts with them.
    fs::write(&limit, (CROWD + 1).to_string()).unwrap();
    let (_, answer) = checked(&bed, "a", "b");
    let told = sentences(&answer, "objections");
    assert!(matches!(&told[..], [alone] if alone.starts_with(memory)), "a false alarm: {told:?}");
}

/// The kernel lets a process that is under a filter lift no other's, as CRIU has to, and services inherit the filter. Units with
/// `SystemCallFilter=` and containers with a profile are such places.
#[test]
fn a_node_whose_godwitd_is_under_a_filter_of_system_calls_takes_and_sends_nothing() {
    let directory = tempfile::tempdir().unwrap();
    let filtered = directory.path().join("filtered");
    compile("filtered.c", &filtered);
    let through = format!("case $GODWIT_NODE in b) exec {} \"$@\";; esac; exec \"$@\"", filtered.display());
    let bed = Bed::up_with("filtered", |config| {
        config.programs.serve_through = ["sh", "-c", &through, "sh"].map(str::to_owned).into();
    });
    let mut preset = bed.build(Workload::Busybox);
    preset.command = ["sleep", "100000"].map(str::to_owned).into();
    let words = "godwitd is under a filter of system calls";
    let is_refused = |from: &str, to: &str| {
        let (code, answer) = checked(&bed, from, to);
        let told = sentences(&answer, "objections");
        assert!(code == 1 && told.iter().any(|reason| reason.contains(words)), "{answer}");
        let refused = bed.godwit(from, &["migrate", NAME, "--to", to]);
        assert!(refused.code == 1 && refused.stderr.contains(words), "{refused:?}");
    };
    let doctor = bed.godwit("b", &["doctor"]);
    assert!(doctor.code == 1 && doctor.stdout.contains(words), "{doctor:?}");
    let file = directory.path().join("file");
    let file = file.to_str().unwrap();

    bed.run("a", NAME, ADDRESS, &preset, &[]);
    bed.knows("b", NAME);
    is_refused("a", "b");
    bed.done("a", &["checkpoint", NAME, "-o", file]);
    bed.done("a", &["rm", NAME]);
    let refused = bed.godwit("b", &["restore", file]);
    assert!(refused.code == 1 && refused.stderr.contains(words), "{refused:?}");

    bed.run("b", NAME, ADDRESS, &preset, &[]);
    bed.knows("a", NAME);
    is_refused("b", "a");
    // To no node in particular.
    let refused = bed.godwit("b", &["check", NAME]);
    assert!(refused.code == 1 && refused.stdout.contains(words), "{refused:?}");
    let refused = bed.godwit("b", &["checkpoint", NAME, "-R", "-o", file]);
    assert!(refused.code == 1 && refused.stderr.contains(words), "{refused:?}");
}

#[test]
fn clocks_that_differ_are_told_for_either_way_and_prevent_no_move() {
    let directory = tempfile::tempdir().unwrap();
    let library = directory.path().join("ahead.so");
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("programs/ahead.c");
    let compiled = Command::new("cc").args(["-shared", "-fPIC", "-o"]).arg(&library).arg(source).status();
    assert!(compiled.unwrap().success());
    let through = format!(
        "case $GODWIT_NODE in b) exec env LD_PRELOAD={} \"$@\";; esac; exec \"$@\"",
        library.display()
    );
    let bed = Bed::up_with("ahead", |config| {
        config.programs.serve_through = ["sh", "-c", &through, "sh"].map(str::to_owned).into();
    });
    crowd(&bed);
    for (from, to, way) in [("a", "b", "forward"), ("b", "a", "back")] {
        let (code, answer) = checked(&bed, from, to);
        let warnings = sentences(&answer, "warnings");
        let words = format!("the time of day jumps {way} by ");
        let jump = warnings.iter().find_map(|warning| warning.strip_prefix(&words));
        let seconds: f64 =
            jump.unwrap_or_else(|| panic!("{answer}")).split_once(' ').unwrap().0.parse().unwrap();
        // What a node says of its clock is older the busier the machine is.
        assert!((30.0..=90.0).contains(&seconds) && code == 2, "{answer}");
        bed.migrate(NAME, from, to);
    }
}
