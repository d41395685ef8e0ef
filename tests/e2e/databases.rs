//! SQLite databases that a service has open while it moves, and while it is a file: connections go on as before, with those
//! that are opened afterwards. What cannot be helped is told. Needs root.

use std::fs;
use std::io::{BufRead as _, BufReader, Write as _};
use std::net::{Ipv4Addr, SocketAddrV4};

use godwit_lab::workload::Workload;
use godwit_tests::Bed;

const ADDRESS: Ipv4Addr = Ipv4Addr::new(10, 88, 0, 51);
const PORT: u16 = 7000;

#[test]
fn connections_to_sqlite_databases_go_on_beside_new_ones() {
    let bed = Bed::up("databases");
    let preset = bed.build(Workload::Python);
    fs::write(preset.rootfs.join("program.py"), include_str!("../programs/sqlite.py")).unwrap();
    bed.run("a", "store", ADDRESS, &preset, &["-v", "data:/data"]);
    let mut connection = BufReader::new(bed.connect(SocketAddrV4::new(ADDRESS, PORT)));
    let mut rows = 0;
    let mut write = |when: &str| {
        rows += 2;
        for name in ["rollback", "wal"] {
            connection.get_mut().write_all(format!("{name}\n").as_bytes()).unwrap();
            let mut line = String::new();
            connection.read_line(&mut line).unwrap();
            assert_eq!(line.trim_end(), rows.to_string(), "{name} {when}");
        }
    };
    write("before");
    let said = bed.check("a", &["store", "--to", "b"]);
    let is_told = |text: &str| {
        let of = |name: &str| text.matches(&format!("has the SQLite database /{name}.db open")).count();
        (of("other"), of("rollback"), of("data/wal"), of("none"))
    };
    assert_eq!((said.code, is_told(&said.stdout)), (2, (1, 0, 0, 0)), "{said:?}");
    assert!(!said.stdout.contains("more like this"), "{said:?}");
    for (mode, (from, to)) in
        ["cold", "precopy", "hybrid", "postcopy"].into_iter().zip([("a", "b"), ("b", "a")].repeat(2))
    {
        bed.migrate_so("store", from, to, &["--mode", mode]);
        write(mode);
    }
    let events = bed.godwit("a", &["events"]);
    assert_eq!(is_told(&events.stdout), (2, 0, 0, 0), "of the moves from a: {events:?}");
    assert!(!events.stdout.contains("more like this"), "{events:?}");

    let file = bed.scratch().join("store.tar");
    let file = file.to_str().unwrap();
    bed.done("a", &["checkpoint", "store", "--tcp-established", "-o", file]);
    bed.done("a", &["rm", "store"]);
    bed.done("a", &["volume", "rm", "data"]);
    bed.done("a", &["restore", file, "--tcp-established"]);
    write("after a restore");
}
