//! Files in memory ([`programs/tmpfs.c`](../programs/tmpfs.c)), which move while the service changes them. Needs root.

use std::io::{BufRead, BufReader, Write};
use std::net::{Ipv4Addr, SocketAddrV4, TcpStream};

use godwit_lab::workload::{Preset, Rootfs};
use godwit_tests::{Bed, compile};

const ADDRESS: Ipv4Addr = Ipv4Addr::new(10, 88, 0, 84);
const LIMITED: Ipv4Addr = Ipv4Addr::new(10, 88, 0, 85);
const PORT: u16 = 7000;
/// Of the file that is mapped.
const MIB: u64 = 24;
const BYTES: u64 = MIB << 20;

/// All files are as they were left; how often they were changed.
fn check(connection: &mut BufReader<TcpStream>, how: u8, when: &str) -> u64 {
    let mut answer = String::new();
    connection.get_mut().write_all(&[how]).unwrap();
    connection.read_line(&mut answer).unwrap();
    let changed = answer.strip_prefix("ok ").and_then(|number| number.trim().parse().ok());
    changed.unwrap_or_else(|| panic!("{when}: the processes say {answer:?}"))
}

fn preset(bed: &Bed) -> Preset {
    let root = bed.scratch().join("root");
    Rootfs::new(&root).unwrap();
    compile("tmpfs.c", &root.join("program"));
    let command = ["/program".to_owned(), MIB.to_string()].into();
    Preset { rootfs: root, command, env: Vec::new(), user: None, port: PORT }
}

const MOUNT: [&str; 2] = ["--mount", "type=tmpfs,dst=/scratch,size=32m"];

#[test]
fn files_of_a_tmpfs_move_before_the_freeze_and_only_what_changed_since_crosses_in_it() {
    let bed = Bed::up("tmpfs");
    let preset = preset(&bed);
    bed.run("a", "files", ADDRESS, &preset, &MOUNT);
    let mut connection = BufReader::new(bed.connect(SocketAddrV4::new(ADDRESS, PORT)));
    let mut changed = check(&mut connection, b'?', "at the start");
    let moves = [("a", "b"), ("b", "a")].into_iter().cycle();
    for ((from, to), mode) in moves.zip(["precopy", "hybrid", "cold", "postcopy", "hybrid", "precopy"]) {
        let report = bed.migrate_so("files", from, to, &["--mode", mode]);
        let figures = (report.shared_bytes >> 10, report.shared_dump_bytes >> 10, report.dump_bytes >> 10);
        println!(
            "{mode}: KiB of files before the freeze and in it, KiB of all in it: {figures:?}, {} ms",
            report.frozen_ms
        );
        let now = check(&mut connection, b'?', mode);
        assert!(now > changed, "{mode}: nothing was changed since the last check");
        changed = now;
        if mode == "cold" {
            // CRIU dumps them.
            assert_eq!((report.shared_bytes, report.shared_dump_bytes), (0, 0), "{report:?}");
            assert!(report.dump_bytes > BYTES, "{report:?}");
            continue;
        }
        assert!(report.shared_bytes >= BYTES, "{mode}: {report:?}");
        assert!(report.shared_dump_bytes < BYTES / 4, "{mode}: {report:?}");
        assert!(report.dump_bytes < BYTES / 2, "{mode}: they are in the images, too: {report:?}");
        assert!(report.criu.contains("+external-tmpfs"), "{mode}: {report:?}");
    }
    // Of a file that is open under a deleted name and has another one, CRIU's third name is in the archive.
    check(&mut connection, b'l', "with another name");
    let report = bed.migrate_so("files", "a", "b", &["--mode", "precopy"]);
    check(&mut connection, b'?', "with another name, moved");
    assert!(report.dump_bytes < BYTES, "/dev/shm has no such file: {report:?}");
    assert!(report.shared_bytes >= BYTES, "{report:?}");
}

#[test]
fn files_of_a_tmpfs_count_for_the_limit_of_the_service() {
    let bed = Bed::up("tmpfslimit");
    let preset = preset(&bed);
    let limit = ["--memory", "256MiB"];
    bed.run("a", "limited", LIMITED, &preset, &[MOUNT, limit].concat());
    let mut connection = BufReader::new(bed.connect(SocketAddrV4::new(LIMITED, PORT)));
    check(&mut connection, b'?', "with a limit");
    let moves = [("a", "b"), ("b", "a")].into_iter().cycle();
    for ((from, to), mode) in moves.zip(["precopy", "hybrid", "postcopy"]) {
        let report = bed.migrate_so("limited", from, to, &["--mode", mode]);
        assert!(report.shared_bytes >= BYTES, "{mode}: {report:?}");
        check(&mut connection, b'?', mode);
        let charged = crate::shared::charged(bed.pid(to, "limited")).0;
        println!("{mode}: {} KiB of shared memory are charged to it", charged >> 10);
        assert!(charged > BYTES * 9 / 10, "{mode}: {charged}");
    }
}
