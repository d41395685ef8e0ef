//! To where archives are unpacked, what stays of a failure, and what a destination that somebody else writes to could do.

use std::fs;
use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _, symlink};

use tokio::sync::mpsc;

use super::super::pack::pack;
use super::*;

fn packed(path: &Path, contents: bool) -> Vec<u8> {
    let (pieces, mut incoming) = mpsc::channel(1024);
    pack(path, contents, pieces).unwrap();
    let mut archive = Vec::new();
    while let Ok(piece) = incoming.try_recv() {
        archive.extend_from_slice(&piece.unwrap());
    }
    archive
}

fn tree() -> tempfile::TempDir {
    let scratch = tempfile::tempdir().unwrap();
    let source = scratch.path().join("source");
    fs::create_dir_all(source.join("deep")).unwrap();
    fs::write(source.join("file"), "one").unwrap();
    fs::set_permissions(source.join("file"), fs::Permissions::from_mode(0o6750)).unwrap();
    fs::write(source.join("deep/other"), "two").unwrap();
    symlink("file", source.join("link")).unwrap();
    scratch
}

#[test]
fn a_path_says_where_what_is_copied_goes() {
    let scratch = tree();
    let at = |path: &str| scratch.path().join(path);
    let read = |path: &str| fs::read_to_string(at(path)).unwrap();
    let (whole, contents) = (packed(&at("source"), false), packed(&at("source/."), true));
    // Under another name; into a directory; its contents, into one that is there and into a new one.
    unpack(&whole[..], &at("new"), false, false).unwrap();
    assert_eq!(
        (read("new/file"), read("new/deep/other"), read("new/link")),
        ("one".into(), "two".into(), "one".into())
    );
    unpack(&whole[..], &at("new"), false, false).unwrap();
    assert_eq!(read("new/source/deep/other"), "two");
    fs::create_dir(at("there")).unwrap();
    unpack(&contents[..], &at("there"), true, false).unwrap();
    unpack(&contents[..], &at("made"), true, false).unwrap();
    assert_eq!((read("there/file"), read("made/deep/other")), ("one".into(), "two".into()));
    let file = packed(&at("source/file"), false);
    unpack(&file[..], &at("name"), false, false).unwrap();
    unpack(&file[..], &at("there/"), false, false).unwrap();
    assert_eq!((read("name"), read("there/file")), ("one".into(), "one".into()));
    for (archive, to, is_contents) in [
        (&file, "none/", false),
        (&file, "none/x", false),
        (&contents, "name", true),
        (&whole, "name", false),
    ] {
        assert!(unpack(&archive[..], &at(to), is_contents, false).is_err(), "{to}");
    }
    assert_eq!(read("name"), "one");
    assert!(!at("none").exists());
    // Nothing is left of the names under which files were made.
    assert_eq!(fs::read_dir(at("there")).unwrap().count(), 3);
}

#[test]
fn modes_that_change_who_a_program_runs_as_are_kept_on_request_only() {
    let scratch = tree();
    let file = packed(&scratch.path().join("source/file"), false);
    let mode = |name: &str| fs::metadata(scratch.path().join(name)).unwrap().mode() & 0o7777;
    unpack(&file[..], &scratch.path().join("plain"), false, false).unwrap();
    unpack(&file[..], &scratch.path().join("kept"), false, true).unwrap();
    assert_eq!((mode("plain") & 0o7000, mode("kept")), (0, 0o6750));
}

#[test]
fn a_copy_that_is_cut_off_leaves_the_file_that_was_there() {
    let scratch = tree();
    let to = scratch.path().join("there");
    fs::write(&to, "before").unwrap();
    let mut file = packed(&scratch.path().join("source/file"), false);
    file.truncate(512 + 1);
    assert!(unpack(&file[..], &to, false, false).is_err());
    assert_eq!(fs::read_to_string(&to).unwrap(), "before");
    assert_eq!(fs::read_dir(scratch.path()).unwrap().count(), 2);
}

#[test]
fn nothing_is_written_outside() {
    let scratch = tree();
    let outside = scratch.path().join("outside");
    let to = scratch.path().join("to");
    fs::create_dir(&outside).unwrap();
    fs::create_dir(&to).unwrap();
    // One that whoever writes to the destination has laid.
    symlink(&outside, to.join("laid")).unwrap();
    let archive = |name: &str| {
        let mut builder = tar::Builder::new(Vec::new());
        let mut header = tar::Header::new_gnu();
        header.set_entry_type(tar::EntryType::Symlink);
        header.set_size(0);
        header.set_mode(0o777);
        header.set_mtime(1);
        builder.append_link(&mut header, "x", &outside).unwrap();
        let mut header = tar::Header::new_gnu();
        header.set_size(4);
        header.set_mode(0o644);
        header.set_mtime(1);
        header.as_gnu_mut().unwrap().name[..name.len()].copy_from_slice(name.as_bytes());
        header.set_cksum();
        builder.append(&header, &b"harm"[..]).unwrap();
        builder.into_inner().unwrap()
    };
    for name in ["x/file", "laid/file", "../outside/file", "/outside/file"] {
        assert!(unpack(&archive(name)[..], &to, false, false).is_err(), "{name}");
    }
    assert_eq!(fs::read_dir(&outside).unwrap().count(), 0);
    // A link in the place of a file is replaced.
    unpack(&archive("laid")[..], &to, false, false).unwrap();
    assert_eq!(fs::read_to_string(to.join("laid")).unwrap(), "harm");
}

#[test]
fn a_file_that_grows_while_it_is_packed_does_not_write_into_the_archive() {
    let scratch = tree();
    let growing = scratch.path().join("source/file");
    let (pieces, mut incoming) = mpsc::channel(1024);
    let file = fs::OpenOptions::new().append(true).open(&growing).unwrap();
    let packing = std::thread::spawn({
        let source = scratch.path().join("source");
        move || pack(&source, false, pieces)
    });
    for _ in 0..100 {
        (&file).write_all(&[b'x'; 1000]).unwrap();
    }
    let mut archive = Vec::new();
    while let Some(piece) = incoming.blocking_recv() {
        archive.extend_from_slice(&piece.unwrap());
    }
    packing.join().unwrap().unwrap();
    let mut read = tar::Archive::new(&archive[..]);
    let names: Result<Vec<_>, _> =
        read.entries().unwrap().map(|entry| entry?.path().map(PathBuf::from)).collect();
    assert_eq!(names.unwrap().len(), 5);
}

#[test]
fn a_file_that_becomes_shorter_while_it_is_packed_is_no_whole_file() {
    let scratch = tree();
    let (pieces, mut incoming) = mpsc::channel(1024);
    // The kernel says a page of it, and gives fewer bytes.
    let shorter = Path::new("/sys/kernel/uevent_seqnum");
    assert!(fs::metadata(shorter).unwrap().len() > fs::read(shorter).unwrap().len() as u64);
    let said = format!("{:#}", pack(shorter, false, pieces).unwrap_err());
    assert!(said.contains("it became shorter"), "{said}");
    let (mut archive, mut is_cut_off) = (Vec::new(), false);
    while let Ok(piece) = incoming.try_recv() {
        match piece {
            Ok(piece) => archive.extend_from_slice(&piece),
            Err(_) => is_cut_off = true,
        }
    }
    assert!(is_cut_off);
    let to = scratch.path().join("there");
    fs::write(&to, "before").unwrap();
    assert!(unpack(&archive[..], &to, false, false).is_err());
    assert_eq!(fs::read_to_string(&to).unwrap(), "before");
}

#[test]
fn what_is_no_file_gets_none_in_its_place() {
    let scratch = tree();
    let file = packed(&scratch.path().join("source/file"), false);
    let fifo = scratch.path().join("fifo");
    nix::unistd::mkfifo(&fifo, nix::sys::stat::Mode::S_IRWXU).unwrap();
    for to in [&fifo, Path::new("/dev/null")] {
        let said = unpack(&file[..], to, false, false).unwrap_err().to_string();
        assert!(said.contains("is neither a file nor a directory"), "{said}");
    }
}

#[test]
fn links_below_what_is_packed_are_not_followed() {
    let scratch = tree();
    let outside = scratch.path().join("outside");
    fs::create_dir(&outside).unwrap();
    fs::write(outside.join("secret"), "secret").unwrap();
    symlink(&outside, scratch.path().join("source/away")).unwrap();
    symlink(outside.join("secret"), scratch.path().join("source/deep/secret")).unwrap();
    let archive = packed(&scratch.path().join("source"), false);
    let mut read = tar::Archive::new(&archive[..]);
    for entry in read.entries().unwrap() {
        let mut text = String::new();
        entry.unwrap().read_to_string(&mut text).unwrap();
        assert!(!text.contains("secret"));
    }
    // What the user has named may be one.
    symlink(scratch.path().join("source"), scratch.path().join("named")).unwrap();
    assert!(!packed(&scratch.path().join("named/."), true).is_empty());
}
