//! A service with something that CRIU cannot dump: it is refused before anything is done. Needs root.

use std::{
    io::{BufRead, BufReader, Write},
    net::{Ipv4Addr, SocketAddrV4, TcpStream},
};

use godwit_lab::workload::{Preset, Rootfs};
use godwit_tests::{Bed, compile};

const ADDRESS: Ipv4Addr = Ipv4Addr::new(10, 88, 0, 62);
const PORT: u16 = 7000;

fn tell(connection: &mut BufReader<TcpStream>, word: &str) {
    connection.get_mut().write_all(format!("{word}\n").as_bytes()).unwrap();
    let mut line = String::new();
    connection.read_line(&mut line).unwrap();
    assert_eq!(line, "done\n");
}

#[test]
fn a_service_with_a_message_queue_is_refused_untouched_and_moves_without() {
    let bed = Bed::up("ineligible");
    let rootfs = bed.scratch().join("root");
    Rootfs::new(&rootfs).unwrap();
    compile("queue.c", &rootfs.join("queue"));
    let command = ["/queue".to_owned(), PORT.to_string()].into();
    let preset = Preset { rootfs, command, env: Vec::new(), user: None, port: PORT };
    bed.run("a", "queue", ADDRESS, &preset, &[]);
    let mut connection = BufReader::new(bed.connect(SocketAddrV4::new(ADDRESS, PORT)));
    for (word, what) in [
        ("open", "has the POSIX message queue /held open (descriptor"),
        ("close", "has the POSIX message queue /held, "),
    ] {
        tell(&mut connection, word);
        let said = bed.godwit("a", &["--json", "migrate", "queue", "--to", "b"]);
        let report = said.report();
        assert_eq!((said.code, report.outcome.as_str()), (1, "aborted"), "{report:?}");
        for part in ["process ", "(queue, PID 1 in the service)", what, "mq_unlink"] {
            assert!(report.reason.contains(part), "{part}: {}", report.reason);
        }
        let done = (report.frozen_ms, report.wire_bytes, report.file_bytes, report.rounds);
        assert_eq!(done, (0.0, 0, 0, 0), "{report:?}");
        // The destination has heard nothing of it.
        assert!(!said.stdout.contains("reserve"), "{}", said.stdout);
    }
    tell(&mut connection, "remove");
    bed.migrate("queue", "a", "b");
    tell(&mut connection, "open");
}
