//! `godwit prepare`: the move that follows sends only what differs; until then the service stays where it is. Needs root.

use std::{
    collections::BTreeMap,
    fs,
    io::{self, BufRead, BufReader, Lines, Read},
    net::Ipv4Addr,
    os::unix::fs::FileExt,
    path::{Path, PathBuf},
    process::{Child, ChildStdout, Stdio},
};

use godwit_lab::workload::{RedisClient, Workload, resp::Reply};
use godwit_tests::{Bed, CLIENT, PATIENCE, Report, disks::Small, victim::programs_of, wait_for};

pub(crate) const ADDRESS: Ipv4Addr = Ipv4Addr::new(10, 88, 0, 84);
const FILL: u64 = 64 << 20;
/// The root filesystem has more, and what else crosses of a small service has less.
const FILES: u64 = 4 << 20;
/// A file in a volume.
const LARGE: u64 = 32 << 20;

fn three(name: &str) -> Bed {
    Bed::up_with(name, |config| {
        config.nodes.push("c".into());
        config.programs.serve_arguments.extend(["--verbs-from", "all"].map(str::to_owned));
    })
}

/// A file of random bytes.
pub(crate) fn noise(path: &Path, bytes: u64) {
    let mut noise = fs::File::open("/dev/urandom").unwrap().take(bytes);
    io::copy(&mut noise, &mut fs::File::create(path).unwrap()).unwrap();
}

pub(crate) fn prepared(bed: &Bed, node: &str, to: &str) -> Report {
    let text = bed.done(node, &["--json", "prepare", "redis", "--to", to]);
    let report: Report = serde_json::from_str(text.lines().last().unwrap()).unwrap();
    assert_eq!(report.outcome, "prepared", "{report:?}");
    report
}

#[test]
fn a_move_that_was_prepared_sends_only_what_differs() {
    let bed = three("prepare");
    let preset = bed.build(Workload::Redis);
    bed.run("a", "redis", ADDRESS, &preset, &["-v", "data:/srv"]);
    let mut data = RedisClient::connect(bed.lab(), CLIENT, preset.at(ADDRESS), PATIENCE).unwrap();
    data.fill(FILL).unwrap();
    let large = bed.scratch().join("large");
    noise(&large, LARGE);
    bed.done("a", &["cp", large.to_str().unwrap(), "redis:/srv"]);
    let said = bed.done("a", &["prepare", "redis", "--to", "b,c"]);
    let lines: Vec<_> = said.lines().collect();
    assert!(
        lines[0].starts_with("redis can move to b: ") && lines[1].starts_with("redis can move to c: "),
        "{said}"
    );
    // It has stayed, with its name and address, and nothing keeps it from being used.
    data.check_fill(FILL).unwrap();
    assert_eq!(bed.done("a", &["exec", "redis", "--", "redis-cli", "ping"]), "PONG\n");
    for node in ["b", "c"] {
        let seen: serde_json::Value = bed.json(node, &["ps", "-a"]);
        assert_eq!(
            (seen[0]["node"].as_str(), seen[0]["state"].as_str()),
            (Some("a"), Some("remote")),
            "{seen}"
        );
    }

    // Before anything was written, all is there already.
    let again = prepared(&bed, "a", "b");
    assert!(again.memory_wire_bytes < FILL / 10 && again.file_bytes < FILES, "{again:?}");
    let report = bed.migrate_so("redis", "a", "b", &["--mode", "precopy", "--compress", "off"]);
    assert!(report.memory_wire_bytes * 20 < report.page_bytes, "{report:?}");
    assert!(report.page_bytes >= FILL, "{report:?}");
    assert!(report.file_bytes < FILES && report.retained_file_bytes >= LARGE, "{report:?}");
    data.check_fill(FILL).unwrap();

    // Any node can be asked. What has been written since it was prepared the first time crosses, and only that.
    data.call(&["SET", "later", &"x".repeat(8 << 20)]).unwrap();
    let fresh = prepared(&bed, "a", "c");
    assert_eq!((fresh.source.as_str(), fresh.destination.as_str()), ("b", "c"));
    assert!(fresh.memory_wire_bytes < FILL / 4, "{fresh:?}");
    let report = bed.migrate_so("redis", "b", "c", &["--mode", "postcopy", "--compress", "off"]);
    assert!(report.memory_wire_bytes * 20 < report.page_bytes, "{report:?}");
    data.check_fill(FILL).unwrap();
    assert_eq!(data.call(&["STRLEN", "later"]).unwrap(), Reply::Integer(8 << 20));
}

#[test]
fn what_is_written_meanwhile_is_sent_ahead_again() {
    let bed = Bed::up("prepevery");
    let preset = bed.build(Workload::Redis);
    bed.run("a", "redis", ADDRESS, &preset, &[]);
    let mut data = RedisClient::connect(bed.lab(), CLIENT, preset.at(ADDRESS), PATIENCE).unwrap();
    let words = ["--json", "prepare", "redis", "--to", "b", "--every", "10s"];
    let mut preparing = bed.command("a", &words).stdout(Stdio::piped()).spawn().unwrap();
    let mut events = BufReader::new(preparing.stdout.take().unwrap()).lines().map(Result::unwrap);
    let mut prepared = || events.find(|line| line.contains(r#""outcome":"prepared""#)).expect("it goes on");
    prepared();
    data.fill(FILL).unwrap();
    // One may have begun in the middle of it.
    let mut next = || serde_json::from_str::<Report>(&prepared()).unwrap();
    let second = Some(next()).filter(|report| report.page_bytes >= FILL).unwrap_or_else(next);
    assert!(second.page_bytes >= FILL, "{second:?}");
    interrupt_child(&mut preparing, 0);
    let report = bed.migrate_so("redis", "a", "b", &["--mode", "precopy", "--compress", "off"]);
    assert!(report.page_bytes >= FILL && report.memory_wire_bytes * 10 < FILL, "{report:?}");
    data.check_fill(FILL).unwrap();
}

/// A preparation that takes a minute, when it copies.
fn slow(bed: &Bed) -> (Child, Lines<BufReader<ChildStdout>>) {
    slow_between(bed, "a", "b", "copy")
}

/// The same between other nodes, in this phase.
fn slow_between(bed: &Bed, from: &str, to: &str, phase: &str) -> (Child, Lines<BufReader<ChildStdout>>) {
    let arguments = ["--json", "prepare", "redis", "--to", to, "--max-bandwidth", "1MB/s"];
    let told = format!(r#""phase":"{phase}""#);
    let mut child = bed.command(from, &arguments).stdout(Stdio::piped()).spawn().unwrap();
    let mut events = BufReader::new(child.stdout.take().unwrap()).lines();
    events.find(|line| line.as_ref().unwrap().contains(&told)).expect("it tells how it goes").unwrap();
    (child, events)
}

/// The user has enough of it.
fn interrupt((mut child, _events): (Child, Lines<BufReader<ChildStdout>>)) {
    interrupt_child(&mut child, 130);
}

fn interrupt_child(child: &mut Child, code: i32) {
    let id = rustix::process::Pid::from_child(child);
    rustix::process::kill_process(id, rustix::process::Signal::INT).unwrap();
    assert_eq!(child.wait().unwrap().code(), Some(code));
}

/// How a preparation ended that was ended by something else.
fn reason((mut child, events): (Child, Lines<BufReader<ChildStdout>>)) -> String {
    let last = events.last().unwrap().unwrap();
    assert_eq!(child.wait().unwrap().code(), Some(1), "{last}");
    let report: Report = serde_json::from_str(&last).unwrap();
    assert_eq!(report.outcome, "aborted", "{last}");
    report.reason
}

/// What node b has of a preparation.
fn left_on_b(bed: &Bed) -> usize {
    let pagers = std::path::Path::new("/run/godwit/labs").join(bed.lab().name()).join("b/pagers");
    let directories = fs::read_dir(&pagers).map_or(0, Iterator::count);
    directories + programs_of(bed, "b", "godwit-pager").len()
}

#[test]
fn a_preparation_ends_with_whoever_asked_for_it_and_gives_way_to_a_move() {
    let bed = Bed::up("prepint");
    let preset = bed.build(Workload::Redis);
    bed.run("a", "redis", ADDRESS, &preset, &[]);
    let mut data = RedisClient::connect(bed.lab(), CLIENT, preset.at(ADDRESS), PATIENCE).unwrap();
    data.fill(FILL).unwrap();

    let preparation = slow(&bed);
    assert!(left_on_b(&bed) > 0);
    // The service is as free as before, but for a second preparation.
    assert_eq!(bed.done("a", &["exec", "redis", "--", "redis-cli", "ping"]), "PONG\n");
    let refused = bed.godwit("a", &["prepare", "redis", "--to", "b"]);
    assert!(refused.code == 1 && refused.stderr.contains("is being prepared already"), "{refused:?}");
    interrupt(preparation);
    wait_for("the preparation to end", || (left_on_b(&bed) == 0).then_some(()));
    data.check_fill(FILL).unwrap();

    // The destination's daemon dies: the next one ends what was left to it.
    let preparation = slow(&bed);
    bed.lab().stop_node("b").unwrap();
    let why = reason(preparation);
    println!("b died: {why}");
    bed.lab().start_node("b").unwrap();
    wait_for("the pager to end", || (left_on_b(&bed) == 0).then_some(()));
    bed.knows("b", "redis");

    // What needs the service's memory for itself ends a preparation.
    let preparation = slow(&bed);
    let file = bed.scratch().join("redis.tar.zst");
    bed.done("a", &["checkpoint", "redis", "-R", "--tcp-established", "-o", file.to_str().unwrap()]);
    assert!(reason(preparation).contains("cancelled"));
    data.check_fill(FILL).unwrap();

    let preparation = slow(&bed);
    bed.migrate("redis", "a", "b");
    assert!(reason(preparation).contains("cancelled"));
    data.check_fill(FILL).unwrap();
    // Where it is already it cannot be prepared for; nor for a node that there is not.
    for (to, words) in [("b", "is on node b already"), ("nix", "no node nix")] {
        let refused = bed.godwit("b", &["prepare", "redis", "--to", to]);
        assert!(refused.code == 1 && refused.stderr.contains(words), "{refused:?}");
    }
}

#[test]
fn where_there_is_no_room_nothing_is_prepared() {
    let bed = Bed::up_with("prepnone", |config| {
        config.programs.serve_arguments.extend(["--retained-memory", "0"].map(str::to_owned));
    });
    let preset = bed.build(Workload::Redis);
    bed.run("a", "redis", ADDRESS, &preset, &[]);
    let refused = bed.godwit("a", &["prepare", "redis", "--to", "b"]);
    assert!(refused.code == 1 && refused.stderr.contains("node b has no room"), "{refused:?}");
    bed.migrate("redis", "a", "b");
}

/// Random files of a volume, and their bytes.
const VOLUME: [(&str, u64); 4] =
    [("large", 64 << 20), ("truncated", 2 << 20), ("renamed", 8 << 20), ("deleted", 2 << 20)];

/// What a move or a preparation may send of a few changes, with the log and what Redis writes.
pub(crate) const FEW: u64 = 1 << 20;

/// Where the files of the volume are on a node.
pub(crate) fn volume(bed: &Bed, node: &str) -> PathBuf {
    let shown: serde_json::Value = bed.json(node, &["volume", "inspect", "data"]);
    shown["path"].as_str().unwrap().into()
}

pub(crate) fn contents(volume: &Path) -> BTreeMap<String, Vec<u8>> {
    let entries = fs::read_dir(volume).unwrap().map(Result::unwrap);
    let content =
        |entry: fs::DirEntry| (entry.file_name().into_string().unwrap(), fs::read(entry.path()).unwrap());
    entries.map(content).collect()
}

/// A service on node a with files in a volume and beside it.
pub(crate) fn with_files(bed: &Bed) -> u64 {
    let preset = bed.build(Workload::Redis);
    bed.run("a", "redis", ADDRESS, &preset, &["-v", "data:/srv"]);
    let volume = volume(bed, "a");
    VOLUME.iter().for_each(|(name, bytes)| noise(&volume.join(name), *bytes));
    fs::write(volume.join("small"), "a few words").unwrap();
    let beside = bed.scratch().join("beside");
    noise(&beside, 4 << 20);
    bed.done("a", &["cp", beside.to_str().unwrap(), "redis:/beside"]);
    VOLUME.iter().map(|(_, bytes)| bytes).sum::<u64>() + (4 << 20)
}

/// A bit of everything that can happen to files.
pub(crate) fn change(volume: &Path) {
    let at = |name: &str| volume.join(name);
    let large = fs::File::options().write(true).open(at("large")).unwrap();
    large.write_all_at(&[7; 5000], 33 << 20).unwrap();
    fs::File::options().write(true).open(at("truncated")).unwrap().set_len(100_001).unwrap();
    fs::rename(at("renamed"), at("its new name")).unwrap();
    fs::remove_file(at("deleted")).unwrap();
    fs::write(at("small"), "other words").unwrap();
    fs::write(at("new"), "it was not there").unwrap();
}

/// The directories of files that were sent ahead to a node.
pub(crate) fn kept_on(bed: &Bed, node: &str) -> usize {
    let prepared = fs::read_dir(bed.lab().state(node).unwrap().join("prepared"));
    prepared.map_or(0, Iterator::count)
}

pub(crate) fn are_gone(bed: &Bed, node: &str) {
    wait_for("what was sent ahead to be gone", || (kept_on(bed, node) == 0).then_some(()));
}

#[test]
fn a_move_sends_only_what_differs_of_files_and_volumes() {
    let bed = three("prepfiles");
    let all = with_files(&bed);
    let first = prepared(&bed, "a", "b");
    assert!(first.retained_file_bytes >= all && first.file_bytes >= all, "{first:?}");
    assert_eq!((first.files_stay.as_str(), kept_on(&bed, "b")), ("", 1));
    let said = bed.done("a", &["prepare", "redis", "--to", "b"]);
    assert!(said.contains(" of its memory and ") && said.contains(" of its files are there, "), "{said}");

    // Nobody who comes later finds the volume twice.
    let listed: serde_json::Value = bed.json("b", &["volume", "ls"]);
    assert_eq!(listed.as_array().map(Vec::len), Some(0), "{listed}");

    change(&volume(&bed, "a"));
    let checked: serde_json::Value = bed.json("a", &["check", "redis", "--to", "b"]);
    let forecast = checked["forecast"]["file_bytes"].as_u64().unwrap();
    assert!(forecast < FEW, "{checked}");
    let expected = contents(&volume(&bed, "a"));
    let report = bed.migrate_so("redis", "a", "b", &[]);
    assert!(report.file_bytes < FEW && report.retained_file_bytes >= all, "{report:?}");
    assert_eq!(contents(&volume(&bed, "b")), expected);
    bed.done("b", &["cp", "redis:/beside", bed.scratch().join("back").to_str().unwrap()]);
    let [there, back] = ["beside", "back"].map(|name| fs::read(bed.scratch().join(name)).unwrap());
    assert!(there == back, "what the service changed beside its volume");
    assert_eq!(bed.done("b", &["exec", "redis", "--", "redis-cli", "ping"]), "PONG\n");
    are_gone(&bed, "b");

    // It moves on while another preparation is under way: what that has touched crosses again, and nothing else.
    prepared(&bed, "b", "c");
    let here = volume(&bed, "b");
    noise(&here.join("large"), 16 << 20);
    let expected = contents(&here);
    let preparation = slow_between(&bed, "b", "c", "files");
    let report = bed.migrate_so("redis", "b", "c", &[]);
    assert!(reason(preparation).contains("cancelled"));
    assert!(report.file_bytes < (16 << 20) + FEW && report.retained_file_bytes > 0, "{report:?}");
    assert_eq!(contents(&volume(&bed, "c")), expected);
    are_gone(&bed, "c");
}

#[test]
fn files_of_a_directory_of_the_node_are_sent_ahead_too() {
    let bed = Bed::up("prepbind");
    let preset = bed.build(Workload::Redis);
    let directory = tempfile::tempdir_in("/var/tmp").unwrap();
    VOLUME.iter().for_each(|(name, bytes)| noise(&directory.path().join(name), *bytes));
    fs::write(directory.path().join("small"), "a few words").unwrap();
    let all = VOLUME.iter().map(|(_, bytes)| bytes).sum::<u64>();
    bed.run("a", "redis", ADDRESS, &preset, &["-v", &format!("{}:/bound", directory.path().display())]);
    let prepared = |how: &str| {
        let words = ["--json", "prepare", "redis", "--to", "b", "--mount", how];
        serde_json::from_str::<Report>(bed.done("a", &words).lines().last().unwrap()).unwrap()
    };
    assert!(prepared("/bound=copy").file_bytes >= all);
    change(directory.path());
    assert!(prepared("/bound=copy").file_bytes < FEW);
    fs::write(directory.path().join("newer"), "nor this").unwrap();
    let expected = contents(directory.path());
    let report = bed.migrate_so("redis", "a", "b", &["--mount", "/bound=copy"]);
    assert!(report.file_bytes < FEW && report.retained_file_bytes >= all / 2, "{report:?}");
    let shown: serde_json::Value = bed.json("b", &["volume", "inspect", "redis-bound"]);
    assert_eq!(contents(Path::new(shown["path"].as_str().unwrap())), expected);
    assert_eq!(contents(directory.path()), expected, "it stays");
    are_gone(&bed, "b");
}

#[test]
fn of_files_that_were_sent_ahead_nothing_stays_that_is_of_no_use() {
    let bed = Bed::up("prepgone");
    let all = with_files(&bed);
    // One that brought not all of it has brought nothing.
    let preparation = slow_between(&bed, "a", "b", "files");
    wait_for("files to come", || (kept_on(&bed, "b") == 1).then_some(()));
    interrupt(preparation);
    are_gone(&bed, "b");
    bed.done("a", &["check", "redis", "--to", "b"]);

    // A destination that starts has none any more.
    assert!(prepared(&bed, "a", "b").file_bytes >= all);
    bed.lab().restart_node("b").unwrap();
    are_gone(&bed, "b");
    bed.knows("b", "redis");
    assert!(prepared(&bed, "a", "b").file_bytes >= all);
    // A source that starts does not know what it has sent, and asks.
    bed.lab().restart_node("a").unwrap();
    assert!(prepared(&bed, "a", "b").file_bytes < FEW);
    assert_eq!(kept_on(&bed, "b"), 1);
    assert!(prepared(&bed, "a", "b").file_bytes < FEW);

    // One that breaks off later leaves what came before it.
    let here = volume(&bed, "a");
    noise(&here.join("large"), 16 << 20);
    interrupt(slow_between(&bed, "a", "b", "files"));
    let again = wait_for("the preparation to end", || {
        let said = bed.godwit("a", &["--json", "prepare", "redis", "--to", "b"]);
        (said.code == 0).then(|| serde_json::from_str::<Report>(said.stdout.lines().last().unwrap()).unwrap())
    });
    assert!((16 << 20..(16 << 20) + FEW).contains(&again.file_bytes), "{again:?}");

    bed.done("a", &["rm", "--force", "redis"]);
    are_gone(&bed, "b");
}

#[test]
fn where_there_is_no_room_for_files_they_cross_with_the_move() {
    let bed = Bed::up_with("prepfull", |config| {
        config.programs.serve_arguments.extend(["--retained-files", "1"].map(str::to_owned));
    });
    let all = with_files(&bed);
    let said = bed.godwit("a", &["prepare", "redis", "--to", "b"]);
    let words = "Warning: the files of redis cross with the move to b: node b: it has room for 1 MiB";
    assert!(said.code == 0 && said.stderr.contains(words), "{said:?}");
    assert_eq!(kept_on(&bed, "b"), 0);
    let report = bed.migrate("redis", "a", "b");
    assert!(report.file_bytes >= all && report.retained_file_bytes == 0, "{report:?}");
}

#[test]
fn a_disk_that_fills_up_ends_a_preparation_and_harms_no_move() {
    let bed = Bed::up("prepdisk");
    let disk = Small::of(&bed, "b", 640 << 20);
    let all = with_files(&bed);
    bed.knows("b", "redis");
    let preparation = slow_between(&bed, "a", "b", "files");
    wait_for("files to come", || (kept_on(&bed, "b") == 1).then_some(()));
    let full = disk.fill();
    let why = reason(preparation);
    assert!(why.contains("No space left on device"), "{why}");
    are_gone(&bed, "b");
    drop(full);
    let expected = contents(&volume(&bed, "a"));
    let report = bed.migrate("redis", "a", "b");
    assert!(report.file_bytes >= all, "{report:?}");
    assert_eq!(contents(&volume(&bed, "b")), expected);
}
