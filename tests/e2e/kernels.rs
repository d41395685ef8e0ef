//! Mounts of a container between nodes whose kernels have other files in `/proc` and `/sys`, or whose own mounts are shared as
//! systemd shares them. Nodes of a lab have one kernel and one root, so the images of a move are changed to those of a node with
//! another. Needs root.

use std::{
    collections::BTreeSet,
    fs,
    net::Ipv4Addr,
    path::{Path, PathBuf},
};

use godwit_lab::workload::{RedisClient, Workload};
use godwit_tests::{
    Bed, CLIENT, PATIENCE,
    docker::Dockers,
    hold::Points,
    victim::{Attempt, NAME, Victim},
};

use crate::doctored::{encoded, field, with_number};

const RECEIVED: &str = "destination.received";
/// What godwit and Docker cover with an empty file, whatever the kernel.
const FILES: [&str; 5] =
    ["/proc/kcore", "/proc/keys", "/proc/latency_stats", "/proc/sched_debug", "/proc/timer_list"];

/// The images that node b has received.
fn images(bed: &Bed) -> PathBuf {
    let migrations = Path::new("/run/godwit/labs").join(bed.lab().name()).join("b/migrations");
    let mut found = fs::read_dir(migrations).unwrap().map(|entry| entry.unwrap().path().join("images"));
    let images = found.next().unwrap();
    assert!(found.next().is_none(), "one migration is under way");
    images
}

/// The same message with another mountpoint (`mnt_entry`), or none where it goes.
fn elsewhere(message: &[u8], place: impl Fn(&str) -> Option<String>) -> Option<Vec<u8>> {
    let (mut changed, mut at) = (Vec::new(), 0);
    while at < message.len() {
        let (number, wire, begin, end) = field(&message[at..]);
        let (begin, end) = (at + begin, at + end);
        if (number, wire) == (7, 2) {
            // Some are relative to the container's root.
            let place = place(std::str::from_utf8(&message[begin..end]).unwrap().trim_start_matches('.'))?;
            changed.extend([encoded(7 << 3 | 2), encoded(place.len() as u64), place.into_bytes()].concat());
        } else {
            changed.extend(&message[at..end]);
        }
        at = end;
    }
    Some(changed)
}

/// Changes the mounts in images, or takes them out; how many of them.
fn change(images: &Path, other: impl Fn(&[u8]) -> Option<Vec<u8>>) -> usize {
    let mut count = 0;
    for entry in fs::read_dir(images).unwrap() {
        let path = entry.unwrap().path();
        if !path.file_name().unwrap().to_str().unwrap().starts_with("mountpoints-") {
            continue;
        }
        let bytes = fs::read(&path).unwrap();
        let (mut changed, mut at) = (bytes[..8].to_vec(), 8);
        while at < bytes.len() {
            let length = u32::from_le_bytes(bytes[at..at + 4].try_into().unwrap());
            let record = &bytes[at + 4..at + 4 + usize::try_from(length).unwrap()];
            at += 4 + record.len();
            let other = other(record);
            count += usize::from(other.as_deref() != Some(record));
            if let Some(record) = other {
                changed.extend(u32::try_from(record.len()).unwrap().to_le_bytes());
                changed.extend(record);
            }
        }
        fs::write(path, changed).unwrap();
    }
    count
}

/// Changes the places of mounts in images, or takes them out; how many of them.
fn change_places(images: &Path, place: impl Fn(&str) -> Option<String>) -> usize {
    change(images, |record| elsewhere(record, &place))
}

/// The mounts in `/proc` and `/sys` that a process sees, and whether they are read-only.
fn mounts(pid: u64) -> BTreeSet<(String, bool)> {
    let text = fs::read_to_string(format!("/proc/{pid}/mountinfo")).unwrap();
    let mounts = text.lines().map(|line| {
        let words: Vec<_> = line.split(' ').collect();
        (words[4].to_owned(), words[5].split(',').any(|option| option == "ro"))
    });
    mounts.filter(|(place, _)| place.starts_with("/proc") || place.starts_with("/sys")).collect()
}

/// A kernel that has what this one lacks, and lacks what this one has: one file each, of those that are covered.
fn other_file(path: &str) -> Option<String> {
    let has = |path: &&&str| Path::new(path).exists();
    let here = FILES.iter().find(has).expect("a file that is covered");
    let lacked = FILES.iter().find(|path| !has(path)).expect("a file that this kernel lacks");
    Some(if path == *here { *lacked } else { path }.to_owned())
}

#[test]
fn what_only_the_destination_has_is_hidden_there_and_what_only_the_source_has_is_passed_over() {
    let mut victim = Victim::up("kernels");
    let before = mounts(victim.bed.pid("a", NAME));
    for place in ["/proc/irq", "/proc/sys"] {
        assert!(before.contains(&(place.to_owned(), true)), "{before:?}");
    }
    let attempt = victim.begin_with_and_hold("a", "b", &["--mode", "precopy"], RECEIVED);
    let changed = change_places(&images(&victim.bed), |path| match path {
        "/proc/irq" => None,
        other => other_file(other),
    });
    assert_eq!(changed, 2);
    victim.let_go(RECEIVED);
    attempt.moved_well();
    assert_eq!(mounts(victim.bed.pid("b", NAME)), before);
    victim.has_its_data();
    victim.bed.migrate(NAME, "b", "a");
    assert_eq!(mounts(victim.bed.pid("a", NAME)), before);
    victim.ends_at_a();
}

/// On a node with systemd all of a container's mounts that were bound from the node are slaves of the node's.
#[test]
fn mounts_that_follow_the_source_nodes_follow_nothing_at_the_destination() {
    let mut victim = Victim::up("slaves");
    let attempt = victim.begin_with_and_hold("a", "b", &["--mode", "precopy"], RECEIVED);
    // `master_id`
    let changed = change(&images(&victim.bed), |record| Some(with_number(record, &[11], 4711)));
    assert!(changed > 10, "{changed}");
    victim.let_go(RECEIVED);
    attempt.moved_well();
    let text = fs::read_to_string(format!("/proc/{}/mountinfo", victim.bed.pid("b", NAME))).unwrap();
    assert!(!text.contains("master:"), "{text}");
    victim.has_its_data();
    victim.bed.migrate(NAME, "b", "a");
    victim.ends_at_a();
}

#[test]
fn a_container_of_docker_is_kept_from_what_only_the_destination_has() {
    const DIRECTORIES: [&str; 3] = ["/proc/acpi", "/proc/asound", "/sys/firmware"];
    let address = Ipv4Addr::new(10, 88, 0, 10);
    let (mut dockers, mut points) = (Dockers::new(), None);
    let bed = Bed::up_with("kernels-docker", |config| {
        dockers.equip(config);
        points = Some(Points::among(config, &[RECEIVED]));
    });
    dockers.start(&bed);
    let (points, preset) = (points.unwrap(), bed.build(Workload::Redis));
    dockers.image(&["a"], &preset, "redis:1");
    let mut words = vec!["run", "--detach", "--name", "cache", "--network", "none", "redis:1"];
    words.extend(preset.command.iter().map(String::as_str));
    dockers.done("a", &words);
    bed.done("a", &["adopt", "docker:cache", "--ip", &address.to_string()]);
    let mut client = RedisClient::connect(bed.lab(), CLIENT, preset.at(address), PATIENCE).unwrap();
    client.fill(1 << 20).unwrap();
    let before = mounts(bed.pid("a", "cache"));
    let covered: Vec<_> = DIRECTORIES.iter().filter(|path| Path::new(path).exists()).collect();
    for place in &covered {
        assert!(before.contains(&((**place).to_owned(), true)), "{before:?}");
    }
    let attempt =
        Attempt::held(&points, RECEIVED, || Attempt::begin(&bed, "cache", "a", "b", &["--mode", "precopy"]));
    // Of two directories one is covered at the source; where there is one alone, it is.
    let gone = covered.first().filter(|_| covered.len() > 1);
    let changed = change_places(&images(&bed), |path| match gone {
        Some(gone) if ***gone == *path => None,
        _ => other_file(path),
    });
    assert_eq!(changed, covered.len().min(2));
    points.let_go(RECEIVED);
    attempt.moved_well();
    // Docker has its covers writable, and godwit has not.
    let places =
        |mounts: BTreeSet<(String, bool)>| mounts.into_iter().map(|(place, _)| place).collect::<Vec<_>>();
    let after = mounts(bed.pid("b", "cache"));
    assert!(FILES.iter().all(|path| !after.contains(&((*path).to_owned(), false))), "{after:?}");
    assert_eq!(places(after.clone()), places(before));
    client.check_fill(1 << 20).unwrap();
    bed.migrate("cache", "b", "a");
    assert_eq!(mounts(bed.pid("a", "cache")), after);
    client.check_fill(1 << 20).unwrap();
    dockers.clear();
}
