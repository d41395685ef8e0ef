//! Images that their source has changed, so that the service would have more at its destination than it was defined
//! with: refused there with the process and the object, and the service goes on at its source. Needs root.

use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
};

use godwit_tests::victim::Victim;

/// A field in a message of protobuf and where it ends: number, wire type, and the bytes of its value.
pub(crate) fn field(bytes: &[u8]) -> (u64, u64, usize, usize) {
    let (key, mut at) = varint(bytes);
    let begin = match key & 7 {
        0 => at,
        2 => {
            let (length, after) = varint(&bytes[at..]);
            at += after;
            return (key >> 3, 2, at, at + usize::try_from(length).unwrap());
        }
        1 => return (key >> 3, 1, at, at + 8),
        5 => return (key >> 3, 5, at, at + 4),
        other => panic!("wire type {other}"),
    };
    (key >> 3, 0, begin, begin + varint(&bytes[begin..]).1)
}

fn varint(bytes: &[u8]) -> (u64, usize) {
    let length = 1 + bytes.iter().position(|byte| byte & 0x80 == 0).unwrap();
    let value = bytes[..length].iter().rev().fold(0, |value, byte| value << 7 | u64::from(byte & 0x7f));
    (value, length)
}

pub(crate) fn encoded(mut value: u64) -> Vec<u8> {
    let mut bytes = Vec::new();
    loop {
        let low = u8::try_from(value & 0x7f).unwrap();
        value >>= 7;
        if value == 0 {
            bytes.push(low);
            return bytes;
        }
        bytes.push(low | 0x80);
    }
}

/// A message with one number more, behind all others of its field, below the messages of these fields: the last one
/// of a field that is not repeated counts.
pub(crate) fn with_number(message: &[u8], path: &[u64], value: u64) -> Vec<u8> {
    let (number, rest) = path.split_first().unwrap();
    if rest.is_empty() {
        return [message, &encoded(number << 3), &encoded(value)].concat();
    }
    let (mut changed, mut at) = (Vec::new(), 0);
    while at < message.len() {
        let (this, wire, begin, end) = field(&message[at..]);
        let (begin, end) = (at + begin, at + end);
        if (this, wire) == (*number, 2) {
            let inner = with_number(&message[begin..end], rest, value);
            changed.extend([encoded(number << 3 | 2), encoded(inner.len() as u64), inner].concat());
        } else {
            changed.extend(&message[at..end]);
        }
        at = end;
    }
    changed
}

/// An image with a head of two words and one record.
fn image(head: &[u8], record: &[u8]) -> Vec<u8> {
    [head, &u32::try_from(record.len()).unwrap().to_le_bytes(), record].concat()
}

/// Changes a number in what the images have of process 1's credentials or filters.
fn core(images: &Path, path: &[u64], value: u64) {
    let file = images.join("core-1.img");
    let bytes = fs::read(&file).unwrap();
    // Of a thread: `thread_core_entry`, and in it `creds_entry`.
    fs::write(&file, image(&bytes[..8], &with_number(&bytes[12..], path, value))).unwrap();
}

/// Filters that let all calls pass, as many as there may be.
fn all_pass(images: &Path) {
    let file = images.join("seccomp.img");
    let bytes = fs::read(&file).unwrap();
    // BPF_RET | BPF_K with SECCOMP_RET_ALLOW.
    let program = [6, 0, 0, 0, 0, 0, 0xff, 0x7f];
    let filter = [&encoded(1 << 3 | 2), &encoded(8), &program[..]].concat();
    let filters = [encoded(1 << 3 | 2), encoded(filter.len() as u64), filter].concat().repeat(1000);
    fs::write(&file, image(&bytes[..8], &filters)).unwrap();
}

/// The node's disk in the container's `/dev`, which CRIU archives in a cold move.
fn disk(images: &Path) {
    let names = fs::read_dir(images).unwrap().map(|entry| entry.unwrap().path());
    let archive = |path: &PathBuf| path.file_name().unwrap().to_string_lossy().starts_with("tmpfs-dev-");
    let directory = tempfile::tempdir().unwrap();
    let done = |program: &str, words: &[&str]| {
        assert!(
            Command::new(program).args(words).current_dir(&directory).status().unwrap().success(),
            "{words:?}"
        );
    };
    done("mknod", &["disk", "b", "8", "0"]);
    done("tar", &["--create", "--gzip", "--file", "archive", "disk"]);
    let archives: Vec<_> = names.filter(archive).collect();
    assert!(!archives.is_empty(), "the container has a /dev");
    for path in archives {
        fs::copy(directory.path().join("archive"), path).unwrap();
    }
}

#[test]
fn what_a_source_adds_to_the_images_is_refused_by_name_and_the_service_goes_on() {
    let held = ["--user", "1000:1000", "--security-opt", "no-new-privileges", "--cap-drop", "ALL"]
        .map(str::to_owned);
    let mut victim = Victim::up_with("doctored", |_, _| {}, |_| held.to_vec());
    type Change = fn(&Path);
    let changes: [(Change, &str); 9] = [
        (|images| core(images, &[5, 10, 3], 0), "process 1 has the user id 0"),
        (|images| core(images, &[5, 10, 6], 0), "process 1 has the group id 0"),
        (|images| core(images, &[5, 10, 14], 0), "process 1 has the supplementary group 0"),
        (|images| core(images, &[5, 10, 13], 1), "process 1 has securebits 0x1"),
        (|images| core(images, &[5, 10, 18], 0), "process 1 may gain privileges (no_new_privs is not set)"),
        (|images| core(images, &[5, 11], 0), "process 1 has no seccomp filter"),
        (
            |images| core(images, &[3, 11], 0),
            "process 1 has its seccomp filter where CRIU had it before 2018",
        ),
        (all_pass, "process 1 has a seccomp filter that allows"),
        (disk, "disk in tmpfs-dev-"),
    ];
    for (change, said) in changes {
        let mode = if said.starts_with("disk") { "cold" } else { "auto" };
        let attempt = victim.begin_with_and_hold("a", "b", &["--mode", mode], "destination.received");
        let lab = Path::new("/run/godwit/labs").join(victim.bed.lab().name());
        let migrations = lab.join("b/migrations");
        let migration = fs::read_dir(migrations).unwrap().next().unwrap().unwrap().path();
        change(&migration.join("images"));
        victim.let_go("destination.received");
        let reason = attempt.aborted();
        assert!(
            reason.contains("node b gave up")
                && reason.contains("more than it was defined with")
                && reason.contains(said),
            "{said}: {reason}"
        );
        victim.is_as_before();
        victim.has_its_data();
    }
    // As it is, it moves.
    victim.moves_in_the_end();
}
