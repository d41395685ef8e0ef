//! A container whose files were changed, added and deleted since it started. Needs root.

use std::{
    collections::BTreeMap,
    fs,
    io::{BufRead, BufReader, Write},
    net::{Ipv4Addr, SocketAddrV4, TcpStream},
    os::unix::fs::{PermissionsExt, symlink},
    path::Path,
};

use godwit_lab::workload::Workload;
use godwit_tests::Bed;
use godwit_tests::engine::ENGINE_VARIABLE;
use rustix::fs::{CWD, Mode, XattrFlags, makedev, mknodat, setxattr};
use serde_json::{Value, json};

const ADDRESS: Ipv4Addr = Ipv4Addr::new(10, 88, 0, 60);
const DATABASE: Ipv4Addr = Ipv4Addr::new(10, 88, 0, 61);

fn line(connection: &mut BufReader<TcpStream>, request: &str) -> String {
    connection.get_mut().write_all(format!("{request}\n").as_bytes()).unwrap();
    let mut line = String::new();
    connection.read_line(&mut line).unwrap();
    line
}

fn ask(connection: &mut BufReader<TcpStream>, request: &str) -> Value {
    let line = line(connection, request);
    serde_json::from_str(&line).unwrap_or_else(|error| panic!("{request}: {error}: {line:.200?}"))
}

/// The files that the container starts with, which its program then changes.
fn lay_out(data: &Path) {
    let file = |name: &str| {
        fs::write(data.join(name), format!("{name} of the layer\n")).unwrap();
    };
    fs::create_dir(data).unwrap();
    for name in [
        "kept",
        "changed",
        "appended",
        "deleted",
        "file to directory",
        "renamed",
        "mode",
        "owner",
        "time",
        "old name",
        "open in the layer",
        "xattr of the layer",
    ] {
        file(name);
    }
    for name in ["deleted", "replaced", "to file", "kept"] {
        fs::create_dir(data.join(format!("directory {name}"))).unwrap();
    }
    for name in ["directory deleted/a", "directory replaced/old", "directory to file/a", "directory kept/a"] {
        file(name);
    }
    symlink("kept", data.join("link")).unwrap();
    fs::hard_link(data.join("kept"), data.join("kept too")).unwrap();
    fs::set_permissions(data.join("kept"), fs::Permissions::from_mode(0o6750)).unwrap();
    setxattr(data.join("xattr of the layer"), "user.layer", b"below", XattrFlags::empty()).unwrap();
    let kind = rustix::fs::FileType::CharacterDevice;
    mknodat(CWD, data.join("null"), kind, Mode::from_raw_mode(0o666), makedev(1, 3)).unwrap();
}

/// What Podman or Docker make anew in each container, and in each of its places.
const OF_ENGINES: [&str; 5] = ["/.dockerenv", "/etc", "/etc/hosts", "/etc/mtab", "/run/.containerenv"];

/// Paths that differ, with what they were and are.
fn differences(before: &Value, after: &Value) -> Vec<String> {
    let is_engines = |path: &str| std::env::var_os(ENGINE_VARIABLE).is_some() && OF_ENGINES.contains(&path);
    let entries = |value: &Value| -> BTreeMap<String, Value> {
        value.as_object().unwrap().iter().map(|(path, entry)| (path.clone(), entry.clone())).collect()
    };
    let (before, after) = (entries(before), entries(after));
    let paths = before.keys().chain(after.keys().filter(|path| !before.contains_key(*path)));
    paths
        .filter(|path| before.get(*path) != after.get(*path) && !is_engines(path))
        .map(|path| format!("{path}: {:?} became {:?}", before.get(path), after.get(path)))
        .collect()
}

#[test]
fn moves_keep_every_file() {
    every_file_moves("files", &[]);
}

#[test]
fn moves_keep_every_file_of_a_volume_that_began_with_what_the_image_has_there() {
    every_file_moves("files-volume", &["-v", "data:/data"]);
}

#[test]
fn moves_keep_every_file_of_a_directory_of_the_node_that_is_copied() {
    // Of the node's, on whatever filesystem it has for such.
    let directory = tempfile::tempdir_in("/var/tmp").unwrap();
    lay_out(&directory.path().join("data"));
    let flag = format!("{}:/data:move=copy", directory.path().join("data").display());
    every_file_moves("files-copied", &["-v", &flag]);
    let stays = directory.path().join("data/kept");
    assert_eq!(fs::read_to_string(stays).unwrap(), "kept of the layer\n", "it is the user's");
}

fn every_file_moves(test: &str, flags: &[&str]) {
    let bed = Bed::up(test);
    let preset = bed.build(Workload::Python);
    fs::write(preset.rootfs.join("program.py"), include_str!("../programs/files.py")).unwrap();
    lay_out(&preset.rootfs.join("data"));
    bed.run("a", "files", ADDRESS, &preset, flags);
    let mut connection = BufReader::new(bed.connect(SocketAddrV4::new(ADDRESS, 7000)));
    let open = json!({
        "deleted": true, "lower": "open in the layer of the layer\n", "replaced": "the first", "linked": true, "log": true,
    });
    assert_eq!(ask(&mut connection, "open"), open);
    let mut before = ask(&mut connection, "describe");
    assert!(before["/data/sparse"]["holes"] == true && before["/data/linked 1"]["names"] == 3, "{before}");
    assert!(before.get("/data/deleted").is_none() && before["/data/null"]["device"] == json!([1, 3]));
    bed.move_to_and_fro("files", |number, node| {
        let after = ask(&mut connection, "describe");
        let differences = differences(&before, &after);
        assert!(differences.is_empty(), "move {number} to {node}: {differences:#?}");
        assert_eq!(ask(&mut connection, "open"), open, "move {number}");
        assert_eq!(ask(&mut connection, "change"), "done");
        before = ask(&mut connection, "describe");
    });
    println!("{} files compared after each move", before.as_object().unwrap().len());
}

#[test]
fn of_files_that_are_written_all_the_time_only_blocks_cross_while_the_service_is_frozen() {
    only_blocks_cross("database", &[]);
}

#[test]
fn of_files_in_a_directory_of_the_node_only_blocks_cross_too() {
    let directory = tempfile::tempdir_in("/var/tmp").unwrap();
    only_blocks_cross("bind-base", &["-v", &format!("{}:/data:move=copy", directory.path().display())]);
    assert!(directory.path().join("table").exists());
}

fn only_blocks_cross(test: &str, flags: &[&str]) {
    // The size of the table, of which a few hundred blocks are written in a second.
    const TABLE: u64 = 64 << 20;
    let bed = Bed::up(test);
    let preset = bed.build(Workload::Python);
    fs::write(preset.rootfs.join("program.py"), include_str!("../programs/database.py")).unwrap();
    bed.run("a", "database", DATABASE, &preset, flags);
    let mut connection = BufReader::new(bed.connect(SocketAddrV4::new(DATABASE, 7000)));
    let writes = |answer: &str| answer.trim_end().strip_prefix("right ").map(|writes| writes.parse::<u64>());
    let mut before = 0;
    let modes = [("a", "b", "precopy"), ("b", "a", "cold"), ("a", "b", "hybrid"), ("b", "a", "postcopy")];
    for (from, to, mode) in modes {
        let report = bed.migrate_so("database", from, to, &["--mode", mode]);
        let crossed = (report.file_bytes, report.dump_bytes);
        println!(
            "{mode}: frozen for {:.0} ms; bytes of files, and while frozen: {crossed:?}",
            report.frozen_ms
        );
        let answer = line(&mut connection, "check");
        let now = writes(&answer).unwrap_or_else(|| panic!("{mode}: {answer}")).unwrap();
        assert!(now > before, "{mode}: it wrote nothing");
        before = now;
        // Where the destination has none of it from an earlier move.
        let lacks = report.retained_file_bytes < TABLE;
        assert_eq!(report.file_bytes > TABLE, lacks, "{mode}: {report:?}");
        assert!(lacks || mode != "precopy", "{mode}: {report:?}");
        assert!(report.dump_bytes < TABLE / 2, "{mode}: {report:?}");
    }
}
