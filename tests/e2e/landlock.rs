//! Services that confine themselves by Landlock: a domain cannot be read, and so not be restored. Needs root, and CRIU with
//! godwit's patches.

use std::{
    io::{BufRead, BufReader, Write},
    net::{Ipv4Addr, SocketAddrV4, TcpStream},
};

use godwit_lab::workload::{Preset, Rootfs};
use godwit_tests::{Bed, compile, victim::Attempt};

const ADDRESS: Ipv4Addr = Ipv4Addr::new(10, 88, 0, 66);
const PORT: u16 = 7000;

/// What a domain is about. Kernels have had these one after the other.
const KINDS: [&str; 4] = ["files", "network", "signals", "everything"];

/// What a kernel says that has no Landlock, or not that of this kind.
const LACKING: [&str; 3] = ["Function not implemented", "Operation not supported", "Argument list too long"];

fn tell(connection: &mut BufReader<TcpStream>, word: &str) -> String {
    connection.get_mut().write_all(format!("{word}\n").as_bytes()).unwrap();
    let mut line = String::new();
    connection.read_line(&mut line).unwrap();
    line.trim_end().to_owned()
}

fn start(bed: &Bed, more: &[&str]) -> BufReader<TcpStream> {
    let rootfs = bed.scratch().join("root");
    Rootfs::new(&rootfs).unwrap();
    compile("landlocked.c", &rootfs.join("landlocked"));
    let command = ["/landlocked".to_owned(), PORT.to_string()].into();
    bed.run("a", "own", ADDRESS, &Preset { rootfs, command, env: Vec::new(), user: None, port: PORT }, more);
    BufReader::new(bed.connect(SocketAddrV4::new(ADDRESS, PORT)))
}

#[test]
fn a_service_with_a_thread_that_confined_itself_stays_and_is_confined_still() {
    let bed = Bed::up("landlocked");
    let mut connection = start(&bed, &["--security-opt=seccomp=unconfined"]);
    let mut tried = 0;
    for kind in KINDS {
        let made = tell(&mut connection, kind);
        if LACKING.iter().any(|lacking| made.contains(lacking)) {
            println!("this kernel has no Landlock of {kind}: {made}");
            continue;
        }
        tried += 1;
        assert_eq!(made, "done", "{kind}");
        assert_eq!(tell(&mut connection, "ask"), "confined", "{kind}");
        for mode in ["precopy", "cold"] {
            let reason = Attempt::begin(&bed, "own", "a", "b", &["--mode", mode]).aborted();
            assert!(reason.contains("Landlock"), "{kind}, {mode}: {reason}");
            assert_eq!(tell(&mut connection, "ask"), "confined", "{kind}, {mode}");
        }
        assert_eq!(tell(&mut connection, "end"), "done");
    }
    assert!(tried > 0, "this kernel has no Landlock: nothing was tried");
    // It was that thread alone.
    bed.migrate("own", "a", "b");
    assert_eq!(tell(&mut connection, KINDS[0]), "done");
    assert_eq!(tell(&mut connection, "ask"), "confined");
}

#[test]
fn a_program_learns_at_its_start_that_it_cannot_confine_itself() {
    let bed = Bed::up("no-landlock");
    let mut connection = start(&bed, &[]);
    for kind in KINDS {
        assert_eq!(tell(&mut connection, kind), "fails: Function not implemented", "{kind}");
    }
    bed.migrate("own", "a", "b");
    assert_eq!(tell(&mut connection, KINDS[0]), "fails: Function not implemented");
}
