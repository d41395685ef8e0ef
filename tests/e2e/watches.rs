//! A service that watches files with inotify(7). Needs root.

use std::{
    fs,
    io::{BufRead, BufReader, Write},
    net::{Ipv4Addr, SocketAddrV4, TcpStream},
    os::unix::fs::symlink,
    path::Path,
};

use godwit_lab::workload::Workload;
use godwit_tests::{Bed, disks::Small};

const ADDRESS: Ipv4Addr = Ipv4Addr::new(10, 88, 0, 61);

fn touch(connection: &mut BufReader<TcpStream>, path: &str) -> String {
    connection.get_mut().write_all(format!("touch {path}\n").as_bytes()).unwrap();
    let mut line = String::new();
    connection.read_line(&mut line).unwrap();
    line.trim().to_owned()
}

#[test]
fn watches_of_files_move() {
    they_move("watches", |_| {}, |_| {}, &[]);
}

/// Its target leads over a link of the image.
fn with_link(root: &Path) {
    fs::create_dir(root.join("var/data")).unwrap();
    symlink("var/data", root.join("data")).unwrap();
}

#[test]
fn watches_of_files_in_a_volume_move() {
    they_move("watches-volume", |_| {}, with_link, &["-v", "data:/data"]);
}

/// Where the inodes of one node say nothing on the other, and all that godwit binds into the service is of one tmpfs.
#[test]
fn watches_of_files_in_a_volume_move_to_another_file_system() {
    let small = |bed: &Bed| drop(Small::of(bed, "b", 512 << 20));
    they_move("watches-tmpfs", small, with_link, &["-v", "data:/data"]);
}

/// A directory, a file that was renamed since the watch began, and one of the image's layer.
fn they_move(test: &str, lay: impl FnOnce(&Bed), prepare: impl FnOnce(&Path), flags: &[&str]) {
    let bed = Bed::up(test);
    lay(&bed);
    let preset = bed.build(Workload::Python);
    prepare(&preset.rootfs);
    fs::write(preset.rootfs.join("program.py"), include_str!("../programs/watcher.py")).unwrap();
    fs::write(preset.rootfs.join("layer"), "").unwrap();
    bed.run("a", "watches", ADDRESS, &preset, flags);
    let mut connection = BufReader::new(bed.connect(SocketAddrV4::new(ADDRESS, 7000)));
    for (from, to) in [("a", "b"), ("b", "a")] {
        bed.migrate("watches", from, to);
        assert_eq!(touch(&mut connection, "/data/directory/a"), r#"[["/data/directory", "a"]]"#);
        assert_eq!(touch(&mut connection, "/data/directory/new"), r#"[["/data/directory", "new"]]"#);
        assert_eq!(touch(&mut connection, "/data/after"), r#"[["/data/before", ""]]"#);
        assert_eq!(touch(&mut connection, "/layer"), r#"[["/layer", ""]]"#);
    }
}
