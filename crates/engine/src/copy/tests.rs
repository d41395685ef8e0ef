//! Archives to and fro, and what a container that does harm could do with them.
#![allow(clippy::unwrap_used)]

use std::fs;
use std::os::unix::fs::{MetadataExt, PermissionsExt, symlink};

use super::out::Exactly;
use super::*;

const CHUNK: usize = 256 << 10;

/// A root filesystem, and a directory beside it which nothing may reach.
struct Bed {
    scratch: tempfile::TempDir,
    root: PathBuf,
}

impl Bed {
    fn new() -> Self {
        let scratch = tempfile::tempdir().unwrap();
        let root = scratch.path().join("root");
        fs::create_dir_all(root.join("data/deep")).unwrap();
        fs::write(root.join("data/file"), "one").unwrap();
        fs::write(root.join("data/deep/other"), vec![7; CHUNK + 1]).unwrap();
        symlink("../secret", root.join("data/link")).unwrap();
        fs::write(scratch.path().join("secret"), "secret").unwrap();
        Self { scratch, root }
    }

    fn filesystem(&self) -> Filesystem {
        Filesystem::of_ended(&self.root, []).unwrap()
    }

    fn out(&self, path: &str) -> Result<Vec<u8>, CopyError> {
        let mut archive = Vec::new();
        self.filesystem().copy_out(path.as_bytes(), &mut archive).map(|_| archive)
    }

    fn put(&self, path: &str, contents: bool, archive: &[u8]) -> Result<Copied, CopyError> {
        let how = CopyIn { path: path.into(), contents, keep_owners: false };
        self.filesystem().copy_in(&how, archive)
    }

    fn read(&self, path: &str) -> String {
        fs::read_to_string(self.root.join(path)).unwrap()
    }

    fn is_untouched_beside(&self) {
        assert_eq!(fs::read_to_string(self.scratch.path().join("secret")).unwrap(), "secret");
        assert_eq!(fs::read_dir(self.scratch.path()).unwrap().count(), 2);
    }
}

fn names(archive: &[u8]) -> Vec<String> {
    let mut archive = tar::Archive::new(archive);
    let entries = archive.entries().unwrap();
    let mut names: Vec<_> =
        entries.map(|entry| entry.unwrap().path().unwrap().display().to_string()).collect();
    names.sort();
    names
}

/// An archive of these members: name, kind, link, data.
fn archive(members: &[(&str, tar::EntryType, &str, &str)]) -> Vec<u8> {
    let mut builder = tar::Builder::new(Vec::new());
    for (name, kind, link, data) in members {
        let mut header = tar::Header::new_gnu();
        header.set_entry_type(*kind);
        header.set_mode(0o6755);
        header.set_uid(12);
        header.set_gid(34);
        header.set_mtime(1_000);
        header.set_size(data.len() as u64);
        let field = |field: &mut [u8], text: &str| field[..text.len()].copy_from_slice(text.as_bytes());
        // As they are: the crate refuses names that lead out.
        field(&mut header.as_gnu_mut().unwrap().name, name);
        field(&mut header.as_gnu_mut().unwrap().linkname, link);
        header.set_cksum();
        builder.append(&header, data.as_bytes()).unwrap();
    }
    builder.into_inner().unwrap()
}

use tar::EntryType::{Char, Directory, Link, Regular, Symlink};

#[test]
fn what_is_copied_out_and_in_again_is_the_same() {
    let bed = Bed::new();
    let out = bed.out("/data").unwrap();
    assert_eq!(names(&out), ["data/", "data/deep/", "data/deep/other", "data/file", "data/link"]);
    let copied = bed.put("/copy", false, &out).unwrap();
    assert_eq!(copied, Copied { files: 5, bytes: CHUNK as u64 + 4 });
    assert_eq!(bed.read("copy/file"), "one");
    assert_eq!(fs::read(bed.root.join("copy/deep/other")).unwrap(), vec![7; CHUNK + 1]);
    assert_eq!(fs::read_link(bed.root.join("copy/link")).unwrap(), Path::new("../secret"));
    assert_eq!(names(&bed.out("/copy/.").unwrap()), ["deep/", "deep/other", "file", "link"]);
    assert_eq!(names(&bed.out("/").unwrap())[..2], ["copy/", "copy/deep/"]);
    // Nothing is left of the names under which files were made.
    assert_eq!(fs::read_dir(bed.root.join("copy")).unwrap().count(), 3);
}

#[test]
fn a_path_says_where_the_archives_top_goes() {
    let bed = Bed::new();
    let (directory, inside, file) =
        (bed.out("/data").unwrap(), bed.out("/data/.").unwrap(), bed.out("/data/file").unwrap());
    assert_eq!(names(&file), ["file"]);
    // Into a directory that is there, under its name; its contents alone; under another name.
    bed.put("/data/deep", false, &file).unwrap();
    assert_eq!(bed.read("data/deep/file"), "one");
    bed.put("/data/deep/", true, &inside).unwrap();
    assert_eq!(bed.read("data/deep/deep/other").len(), CHUNK + 1);
    bed.put("/new/", true, &inside).unwrap();
    assert_eq!(bed.read("new/file"), "one");
    bed.put("/", false, &archive(&[("x", Regular, "", "x"), ("y/", Directory, "", "")])).unwrap();
    assert_eq!(bed.read("x"), "x");
    bed.put("/data/file", false, &archive(&[("x", Regular, "", "two")])).unwrap();
    assert_eq!(bed.read("data/file"), "two");
    let said = |path, contents, archive: &[u8]| bed.put(path, contents, archive).unwrap_err().to_string();
    for (path, contents, archive, words) in [
        ("/none/x", false, &file, "the directory /none"),
        ("/none/", false, &file, "/none/ of the service does not exist"),
        ("/data/file", false, &directory, "is not a directory"),
        ("/data/file", true, &inside, "is not a directory"),
        ("/data/file/x", false, &file, "/data/file"),
        (
            "/two",
            false,
            &archive(&[("x", Regular, "", ""), ("y", Regular, "", "")]),
            "x and y are both at its top",
        ),
        ("/data", false, &archive(&[("deep", Regular, "", "")]), "/data/deep of the service is a directory"),
        ("/data", false, &b"no archive".to_vec(), "tar archive"),
        ("/data", false, &vec![0; 1024], "nothing in it"),
    ] {
        let said = said(path, contents, archive);
        assert!(said.contains(words), "{path}: {said}");
    }
    assert_eq!(bed.read("data/file"), "two");
    for (path, words) in [("/none", "cannot find /none"), ("/data/none", "/data/none")] {
        let said = bed.out(path).unwrap_err().to_string();
        assert!(said.contains(words), "{said}");
    }
}

#[test]
fn owners_and_the_bits_that_change_who_a_program_runs_as_are_kept_on_request_only() {
    let bed = Bed::new();
    let file = archive(&[("x", Regular, "", "x")]);
    bed.put("/data", false, &file).unwrap();
    let plain = fs::metadata(bed.root.join("data/x")).unwrap();
    assert_eq!((plain.uid(), plain.gid(), plain.permissions().mode() & 0o7777), (0, 0, 0o755));
    assert_eq!(plain.mtime(), 1_000);
    let how = CopyIn { path: b"/data".to_vec(), contents: false, keep_owners: true };
    bed.filesystem().copy_in(&how, &file[..]).unwrap();
    let kept = fs::metadata(bed.root.join("data/x")).unwrap();
    assert_eq!((kept.uid(), kept.gid(), kept.permissions().mode() & 0o7777), (12, 34, 0o6755));
}

#[test]
fn nothing_outside_of_the_root_is_read_or_written() {
    let bed = Bed::new();
    let outside = bed.scratch.path().to_str().unwrap();
    symlink(outside, bed.root.join("data/away")).unwrap();
    symlink("../../..", bed.root.join("data/up")).unwrap();
    // A link leads to a place within the root, if anywhere.
    for path in ["/data/link", "/data/away/secret", "/data/up/secret", "/../secret", "/data/../../secret"] {
        assert!(bed.out(path).is_err(), "{path}");
    }
    fs::write(bed.root.join("secret"), "inside").unwrap();
    assert!(bed.out("/data/link").unwrap().windows(6).any(|bytes| bytes == b"inside"));
    for members in [
        &[("../secret", Regular, "", "harm")][..],
        &[("a/../../secret", Regular, "", "harm")],
        &[("x", Symlink, outside, ""), ("x/secret", Regular, "", "harm")],
        &[("x", Symlink, "../..", ""), ("x/secret", Regular, "", "harm")],
        &[("x", Link, "../../secret", "")],
    ] {
        let _ = bed.put("/data", false, &archive(members));
        bed.is_untouched_beside();
    }
    let _ = bed.put("/data/away", false, &archive(&[("secret", Regular, "", "harm")]));
    let _ = bed.put("/data/up", false, &archive(&[("secret", Regular, "", "harm")]));
    bed.is_untouched_beside();
}

#[test]
fn devices_and_sockets_are_passed_over_in_both_directions() {
    let bed = Bed::new();
    let _listener = std::os::unix::net::UnixListener::bind(bed.root.join("data/socket")).unwrap();
    nix::unistd::mkfifo(&bed.root.join("data/fifo"), nix::sys::stat::Mode::S_IRWXU).unwrap();
    assert_eq!(names(&bed.out("/data").unwrap()).len(), 5);
    for path in ["/data/socket", "/data/fifo"] {
        let said = bed.out(path).unwrap_err().to_string();
        assert!(said.contains("neither a file nor a directory"), "{said}");
    }
    bed.put("/data", false, &archive(&[("null", Char, "", ""), ("x", Regular, "", "")])).unwrap();
    assert!(!bed.root.join("data/null").exists());
}

#[test]
fn a_file_whose_data_are_cut_off_is_not_there_and_the_one_that_was_stays() {
    let bed = Bed::new();
    let mut cut = archive(&[("file", Regular, "", "0123456789")]);
    cut.truncate(512 + 5);
    assert!(bed.put("/data", false, &cut).is_err());
    assert_eq!(bed.read("data/file"), "one");
    assert_eq!(fs::read_dir(bed.root.join("data")).unwrap().count(), 3);
}

#[test]
fn an_archive_that_fails_has_no_end() {
    let bed = Bed::new();
    let mut out = Vec::new();
    nix::unistd::mkfifo(&bed.root.join("fifo"), nix::sys::stat::Mode::S_IRWXU).unwrap();
    assert!(bed.filesystem().copy_out(b"/fifo", &mut out).is_err());
    assert_eq!(out.len(), 0);
    bed.filesystem().copy_out(b"/data/file", &mut out).unwrap();
    assert_eq!(out.len(), 4 * 512);
}

#[test]
fn a_file_that_becomes_shorter_while_it_is_read_fails_the_copy() {
    let scratch = tempfile::tempfile().unwrap();
    scratch.set_len(10).unwrap();
    let mut contents = Exactly { file: scratch, left: 11, fault: None };
    let mut read = Vec::new();
    assert!(contents.read_to_end(&mut read).is_err());
    assert_eq!(read.len(), 10);
    assert!(contents.fault.unwrap().to_string().contains("shorter"));
}

#[test]
fn a_link_at_the_destination_is_followed_and_one_below_it_that_leads_out_is_refused() {
    let bed = Bed::new();
    symlink("/data/file", bed.root.join("to-file")).unwrap();
    symlink("/data", bed.root.join("data/deep/absolute")).unwrap();
    symlink("../deep", bed.root.join("data/deep/relative")).unwrap();
    bed.put("/to-file", false, &archive(&[("x", Regular, "", "two")])).unwrap();
    assert_eq!(bed.read("data/file"), "two");
    assert!(fs::symlink_metadata(bed.root.join("to-file")).unwrap().is_symlink());
    let within = |name: &str| bed.put("/data", false, &archive(&[(name, Regular, "", "three")]));
    within("deep/relative/new").unwrap();
    assert_eq!(bed.read("data/deep/new"), "three");
    within("deep/absolute/new").unwrap();
    assert_eq!(bed.read("data/new"), "three");
    fs::create_dir(bed.root.join("database")).unwrap();
    symlink("/database", bed.root.join("data/out")).unwrap();
    let said = within("out/new").unwrap_err().to_string();
    assert!(said.contains("/data/out of the service is a link that leads out"), "{said}");
    // From the root nothing leads out.
    let members = [("data/out/", Directory, "", ""), ("data/out/new", Regular, "", "four")];
    bed.put("/", false, &archive(&members)).unwrap();
    assert_eq!(bed.read("database/new"), "four");
    assert!(fs::symlink_metadata(bed.root.join("data/out")).unwrap().is_symlink());
    for path in ["/data/fifo", "/to-fifo"] {
        let _ = nix::unistd::mkfifo(&bed.root.join("data/fifo"), nix::sys::stat::Mode::S_IRWXU);
        let _ = symlink("/data/fifo", bed.root.join("to-fifo"));
        let said = bed.put(path, false, &archive(&[("x", Regular, "", "")])).unwrap_err().to_string();
        assert!(said.contains("neither a file nor a directory"), "{said}");
    }
}

#[test]
fn directories_get_their_times_when_the_archive_has_left_them() {
    let bed = Bed::new();
    let members = [
        ("a/", Directory, "", ""),
        ("a/b/", Directory, "", ""),
        ("a/b/file", Regular, "", "x"),
        ("a/c", Regular, "", "x"),
        ("d/", Directory, "", ""),
        ("d/file", Regular, "", "x"),
        ("a/late", Regular, "", "x"),
    ];
    bed.put("/data", false, &archive(&members)).unwrap();
    let time = |path: &str| fs::metadata(bed.root.join("data").join(path)).unwrap().mtime();
    assert_eq!([time("a/b"), time("d"), time("a/b/file")], [1_000; 3]);
    assert!(time("a") > 1_000, "it was written to after the archive had left it");
}

#[test]
fn nothing_is_copied_to_or_from_mounts_that_are_not_there() {
    let bed = Bed::new();
    symlink("/data", bed.root.join("link")).unwrap();
    symlink("data/deep", bed.root.join("mounted")).unwrap();
    let filesystem = Filesystem::of_ended(&bed.root, ["/mounted".into(), "/none".into()]).unwrap();
    let put = |path: &str, name: &str| {
        let how = CopyIn { path: path.into(), contents: false, keep_owners: false };
        filesystem.copy_in(&how, &archive(&[(name, Regular, "", "x")])[..])
    };
    for (path, name) in [
        ("/data/deep", "x"),
        ("/data/deep/x", "x"),
        ("/link/deep/x", "x"),
        ("/mounted/x", "x"),
        ("/data", "deep/x"),
        ("/", "link/deep/x"),
        ("/", "none"),
        ("/none", "x"),
    ] {
        let said = put(path, name).map_err(|error| error.to_string());
        assert!(said.is_err(), "{path} {name}");
    }
    assert_eq!(fs::read_dir(bed.root.join("data/deep")).unwrap().count(), 1);
    assert!(!bed.root.join("none").exists());
    put("/data", "x").unwrap();
    let mut out = Vec::new();
    assert!(filesystem.copy_out(b"/mounted/other", &mut out).is_err());
    out.clear();
    filesystem.copy_out(b"/data", &mut out).unwrap();
    assert_eq!(names(&out), ["data/", "data/deep/", "data/file", "data/link", "data/x"]);
}

#[test]
fn a_container_that_ends_meanwhile_fails_the_copy() {
    let mut process = std::process::Command::new("sleep").arg("1000").spawn().unwrap();
    let filesystem = Filesystem::of_process(process.id()).unwrap();
    let scratch = tempfile::tempdir().unwrap();
    let path = scratch.path().as_os_str().as_encoded_bytes().to_vec();
    let how = CopyIn { path, contents: false, keep_owners: false };
    let file = archive(&[("x", Regular, "", "x")]);
    filesystem.copy_in(&how, &file[..]).unwrap();
    process.kill().unwrap();
    process.wait().unwrap();
    assert!(matches!(filesystem.copy_in(&how, &file[..]), Err(CopyError::Ended) | Err(CopyError::Io { .. })));
    assert!(Filesystem::of_process(process.id()).is_err());
}

#[test]
fn files_that_the_kernel_makes_are_passed_over() {
    let filesystem = Filesystem::of_process(std::process::id()).unwrap();
    for path in ["/proc/self/status", "/sys", "/proc"] {
        let said = filesystem.copy_out(path.as_bytes(), io::sink()).unwrap_err().to_string();
        assert!(said.contains("is made by the kernel"), "{path}: {said}");
    }
}

mod any {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]
        #[test]
        fn bytes_of_strangers_are_refused_but_never_a_panic(bytes: Vec<u8>, contents: bool) {
            let bed = Bed::new();
            let _ = bed.put("/data", contents, &bytes);
            bed.is_untouched_beside();
        }
    }
}
