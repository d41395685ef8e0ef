//! `godwit-tar` in the place of tar(1), as CRIU calls it. Needs root: there are devices and owners.

#![allow(clippy::unwrap_used)]

use std::fs::{self, File};
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::Path;
use std::process::{Command, Stdio};

use godwit_engine::tree::compare;
use rustix::fs::{CWD, FileType, Mode, Timespec, Timestamps, makedev, mknodat, utimensat};
use tempfile::TempDir;

const CREATE: &[&str] = &[
    "--create",
    "--gzip",
    "--no-unquote",
    "--no-wildcards",
    "--one-file-system",
    "--check-links",
    "--preserve-permissions",
    "--sparse",
    "--numeric-owner",
    "--directory",
    "/proc/self/fd/0",
    ".",
];
const EXTRACT: &[&str] = &["--extract", "--gzip", "--no-unquote", "--no-wildcards", "--directory"];
const OURS: &str = env!("CARGO_BIN_EXE_godwit-tar");

fn create(program: &str, directory: &Path, archive: &Path) {
    let status = Command::new(program)
        .args(CREATE)
        .stdin(File::open(directory).unwrap())
        .stdout(File::create(archive).unwrap())
        .status();
    assert!(status.unwrap().success(), "{program} archives {}", directory.display());
}

/// Whether it succeeds, and what it says.
fn extract(program: &str, path: Option<&str>, archive: &Path, place: &Path) -> (bool, String) {
    let mut command = Command::new(program);
    command.args(EXTRACT).arg(place).stdin(File::open(archive).unwrap()).stderr(Stdio::piped());
    if let Some(path) = path {
        command.env("PATH", path);
    }
    let output = command.output().unwrap();
    (output.status.success(), String::from_utf8_lossy(&output.stderr).into_owned())
}

/// Sets a time without parts of a second, since an archive has none.
fn set_time(path: &Path, seconds: i64) {
    let time = Timespec { tv_sec: seconds, tv_nsec: 0 };
    let times = Timestamps { last_access: time, last_modification: time };
    utimensat(CWD, path, &times, rustix::fs::AtFlags::SYMLINK_NOFOLLOW).unwrap();
}

/// What a container has in `/dev`, and more.
fn devices(root: &Path) {
    fs::create_dir(root.join("pts")).unwrap();
    fs::create_dir_all(root.join("shm/deep")).unwrap();
    fs::set_permissions(root.join("shm"), fs::Permissions::from_mode(0o1777)).unwrap();
    symlink("/proc/self/fd", root.join("fd")).unwrap();
    for (name, kind, device) in [
        ("null", FileType::CharacterDevice, makedev(1, 3)),
        ("disk", FileType::BlockDevice, makedev(7, 200)),
        ("pipe", FileType::Fifo, 0),
    ] {
        mknodat(CWD, root.join(name), kind, Mode::RUSR | Mode::WGRP, device).unwrap();
    }
    fs::write(root.join("shm/deep/file"), b"content").unwrap();
    fs::write(root.join("empty"), b"").unwrap();
    std::os::unix::fs::lchown(root.join("shm/deep/file"), Some(1000), Some(70_000)).unwrap();
    std::os::unix::fs::lchown(root.join("fd"), Some(7), Some(8)).unwrap();
    let mut all = vec![root.to_owned()];
    let mut next = 0;
    while let Some(path) = all.get(next).cloned() {
        next += 1;
        if path.symlink_metadata().unwrap().is_dir() {
            all.extend(fs::read_dir(path).unwrap().map(|entry| entry.unwrap().path()));
        }
    }
    for (number, path) in all.iter().enumerate().rev() {
        set_time(path, 1_700_000_000 + i64::try_from(number).unwrap());
    }
}

fn new(directory: &TempDir, name: &str) -> std::path::PathBuf {
    let path = directory.path().join(name);
    fs::create_dir(&path).unwrap();
    path
}

fn assert_same(first: &Path, second: &Path) {
    let differences = compare(first, second).unwrap();
    assert!(differences.is_empty(), "{differences:?}");
}

#[test]
fn an_archive_of_either_is_extracted_by_either() {
    let directory = tempfile::tempdir().unwrap();
    let source = new(&directory, "source");
    devices(&source);
    for (by, of) in [(OURS, "tar"), ("tar", OURS), (OURS, OURS)] {
        let (archive, place) = (directory.path().join("archive"), directory.path().join("place"));
        create(of, &source, &archive);
        fs::create_dir(&place).unwrap();
        // Without another tar it does all of it itself.
        let path = (by == OURS).then_some("/nowhere");
        assert_eq!(
            extract(by, path, &archive, &place),
            (true, String::new()),
            "{by} extracts what {of} made"
        );
        assert_same(&source, &place);
        fs::remove_dir_all(&place).unwrap();
    }
}

#[test]
fn what_is_not_small_or_not_plain_is_left_to_tar() {
    let directory = tempfile::tempdir().unwrap();
    for (name, fill) in [
        ("large", (|root| fs::write(root.join("file"), vec![7; 100 << 10]).unwrap()) as fn(&Path)),
        ("linked", |root| {
            fs::write(root.join("file"), b"content").unwrap();
            fs::hard_link(root.join("file"), root.join("other")).unwrap();
        }),
        ("long", |root| fs::write(root.join("x".repeat(200)), b"content").unwrap()),
        ("sparse", |root| File::create(root.join("file")).unwrap().set_len(1 << 30).unwrap()),
        ("many", |root| (0..300).for_each(|n| fs::write(root.join(n.to_string()), b"").unwrap())),
    ] {
        let (source, place) = (new(&directory, name), new(&directory, &format!("{name}-place")));
        fill(&source);
        let archive = directory.path().join("archive");
        let alone = Command::new(OURS)
            .args(CREATE)
            .env("PATH", "/nowhere")
            .stdin(File::open(&source).unwrap())
            .stdout(File::create(&archive).unwrap())
            .stderr(Stdio::null())
            .status();
        assert!(!alone.unwrap().success(), "{name}");
        assert_eq!(
            archive.metadata().unwrap().len(),
            0,
            "{name}: nothing is written before it is left to tar"
        );
        create(OURS, &source, &archive);
        assert_eq!(extract(OURS, None, &archive, &place), (true, String::new()), "{name}");
        for entry in fs::read_dir(&source).unwrap().map(Result::unwrap) {
            let copy = place.join(entry.file_name());
            let length = |path: &Path| path.metadata().unwrap().len();
            assert_eq!(length(&copy), length(&entry.path()), "{name}");
        }
    }
}

#[test]
fn nothing_is_made_outside_of_the_directory() {
    let directory = tempfile::tempdir().unwrap();
    let outside = new(&directory, "outside");
    let gz = |fill: &dyn Fn(&mut tar::Builder<flate2::write::GzEncoder<File>>)| {
        let archive = directory.path().join("archive");
        let encoder =
            flate2::write::GzEncoder::new(File::create(&archive).unwrap(), flate2::Compression::fast());
        let mut builder = tar::Builder::new(encoder);
        fill(&mut builder);
        builder.into_inner().unwrap().finish().unwrap();
        archive
    };
    let file = |name: &[u8]| {
        let mut header = tar::Header::new_gnu();
        header.as_gnu_mut().unwrap().name[..name.len()].copy_from_slice(name);
        header.set_size(0);
        header.set_mode(0o644);
        header.set_uid(0);
        header.set_gid(0);
        header.set_mtime(0);
        header.set_cksum();
        header
    };
    let through_link = gz(&|builder| {
        let mut link = tar::Header::new_gnu();
        link.set_entry_type(tar::EntryType::Symlink);
        link.set_size(0);
        builder.append_link(&mut link, "way", &outside).unwrap();
        builder.append(&file(b"way/in"), &[][..]).unwrap();
    });
    let place = new(&directory, "place");
    assert!(!extract(OURS, Some("/nowhere"), &through_link, &place).0);
    let above = gz(&|builder| builder.append(&file(b"../outside/in"), &[][..]).unwrap());
    let place = new(&directory, "place2");
    assert!(!extract(OURS, Some("/nowhere"), &above, &place).0);
    assert_eq!(fs::read_dir(&outside).unwrap().count(), 0);
    let mut huge = file(b"file");
    huge.set_size(1 << 62);
    huge.set_cksum();
    let lying = gz(&|builder| builder.append(&huge, &[][..]).unwrap());
    let (done, said) = extract(OURS, Some("/nowhere"), &lying, &new(&directory, "place3"));
    assert!(!done && said.contains("install tar"), "{said}");
}

#[test]
fn without_another_tar_it_says_so() {
    let output = Command::new(OURS).arg("--version").env("PATH", "/nowhere").output().unwrap();
    assert_eq!(output.status.code(), Some(2));
    assert!(String::from_utf8_lossy(&output.stderr).contains("install tar"));
    let output = Command::new(OURS).arg("--version").output().unwrap();
    assert!(String::from_utf8_lossy(&output.stdout).starts_with("tar (GNU tar)"), "it became the other");
}
