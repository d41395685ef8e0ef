//! What a service may hold that CRIU has met trouble with, and shared storage that changes during a move. Needs root.

use std::{
    fs,
    io::{BufRead, BufReader, Write},
    net::{Ipv4Addr, SocketAddrV4, TcpStream},
    os::unix::fs::PermissionsExt,
    path::{Path, PathBuf},
};

use godwit_lab::{
    LabConfig,
    workload::{Preset, Rootfs},
};
use godwit_tests::{Bed, compile, hold::Points, victim::Attempt};

const ADDRESS: Ipv4Addr = Ipv4Addr::new(10, 88, 0, 67);
const PORT: u16 = 7000;
const NAME: &str = "holder";

/// The dump is done, and the restore has not begun.
const POINT: &str = "destination.received";

struct Holder {
    bed: Bed,
    connection: BufReader<TcpStream>,
}

impl Holder {
    fn up(test: &str, change: impl FnOnce(&mut LabConfig), more: impl FnOnce(&Path) -> Vec<String>) -> Self {
        let bed = Bed::up_with(test, change);
        let rootfs = bed.scratch().join("root");
        Rootfs::new(&rootfs).unwrap();
        compile("holder.c", &rootfs.join("holder"));
        let command = ["/holder".to_owned(), PORT.to_string()].into();
        let preset = Preset { rootfs, command, env: Vec::new(), user: None, port: PORT };
        let more = more(bed.scratch());
        bed.run("a", NAME, ADDRESS, &preset, &more.iter().map(String::as_str).collect::<Vec<_>>());
        let connection = BufReader::new(bed.connect(SocketAddrV4::new(ADDRESS, PORT)));
        Self { bed, connection }
    }

    fn answer(&mut self, words: &str) -> String {
        self.connection.get_mut().write_all(format!("{words}\n").as_bytes()).unwrap();
        let mut line = String::new();
        self.connection.read_line(&mut line).unwrap();
        line.trim_end().to_owned()
    }

    fn told(&mut self, words: &str) {
        assert_eq!(self.answer(words), "done", "{words}");
    }

    /// What it has works, here and after moves there and back.
    fn moves_and_uses_it(&mut self) {
        self.told("use");
        for (from, to, mode) in [("a", "b", "precopy"), ("b", "a", "postcopy"), ("a", "b", "cold")] {
            self.bed.migrate_so(NAME, from, to, &["--mode", mode]);
            self.told("use");
        }
    }
}

fn allow_all(config: &mut LabConfig) {
    config.programs.serve_arguments.extend(["--allow-bind", "/"].map(str::to_owned));
}

#[test]
fn a_file_that_got_its_name_after_it_was_written_moves() {
    let mut holder = Holder::up("named-later", |_| {}, |_| Vec::new());
    holder.told("named /");
    holder.moves_and_uses_it();
}

#[test]
fn a_file_that_got_its_name_where_files_do_not_go_along_is_refused_with_its_place() {
    let outside = |scratch: &Path| {
        fs::create_dir(scratch.join("bound")).unwrap();
        let mount = format!("{}:/bound:move=skip", scratch.join("bound").display());
        ["-v".to_owned(), mount].into()
    };
    let mut holder = Holder::up("named-outside", allow_all, outside);
    holder.told("named /bound");
    let reason = Attempt::begin(&holder.bed, NAME, "a", "b", &[]).aborted();
    for words in ["/bound/#", "which has no other name that moves with the service", "when it has closed it"]
    {
        assert!(reason.contains(words), "no {words:?} in {reason}");
    }
    holder.told("use");
}

#[test]
fn a_ring_is_refused_by_a_node_that_counts_with_more_processors() {
    let directory = tempfile::tempdir().unwrap();
    let possible = directory.path().join("possible");
    fs::write(&possible, "0-1023\n").unwrap();
    let file = "/sys/devices/system/cpu/possible";
    let mounted = format!("mount --bind {} {file} && exec \"$@\"", possible.display());
    let through = format!(
        "case $GODWIT_NODE in b) exec unshare --mount sh -c '{mounted}' sh \"$@\";; esac; exec \"$@\""
    );
    let change = |config: &mut LabConfig| {
        config.programs.serve_through = ["sh", "-c", &through, "sh"].map(str::to_owned).into()
    };
    let mut holder = Holder::up("long-ring", change, |_| Vec::new());
    holder.told("ring");
    let refused = holder.bed.godwit("a", &["migrate", NAME, "--to", "b"]);
    let words = "the kernel of node b makes longer ones, as it counts with 1024 processors";
    assert!(refused.code == 1 && refused.stderr.contains(words), "{refused:?}");
    holder.told("use");
}

#[test]
fn a_ring_for_asynchronous_reads_and_writes_moves() {
    let mut holder = Holder::up("aio", |_| {}, |_| Vec::new());
    holder.told("ring");
    holder.moves_and_uses_it();
}

#[test]
fn locks_of_files_move() {
    let mut holder = Holder::up("locks", |_| {}, |_| Vec::new());
    holder.told("locked /locked");
    holder.moves_and_uses_it();
}

#[test]
fn a_service_has_no_link_local_address_that_would_not_move() {
    let subnet = ["--subnet6", "fd67:6f64::/96"].map(str::to_owned);
    let mut holder =
        Holder::up("link-local", |config| config.programs.serve_arguments.extend(subnet), |_| Vec::new());
    // Such an address is made of its interface's, and a connection to it is bound to the interface's number.
    let none = "fails: a link-local address: Cannot assign requested address";
    assert_eq!(holder.answer("linklocal"), none);
    holder.bed.migrate(NAME, "a", "b");
    assert_eq!(holder.answer("linklocal"), none);
}

/// A file of the service's on shared storage, changed between dump and restore, and mended again; words of the reason.
type Change = (&'static str, fn(&Path), fn(&Path), &'static str);

const CHANGES: [Change; 3] = [
    (
        "grows",
        |log| fs::File::options().append(true).open(log).unwrap().write_all(b"of another").unwrap(),
        |_| {},
        "has bad size",
    ),
    (
        "changes its mode",
        |log| fs::set_permissions(log, fs::Permissions::from_mode(0o600)).unwrap(),
        |log| fs::set_permissions(log, fs::Permissions::from_mode(0o644)).unwrap(),
        "has bad mode",
    ),
    (
        "vanishes",
        |log| fs::rename(log, log.with_extension("away")).unwrap(),
        |log| fs::rename(log.with_extension("away"), log).unwrap(),
        "No such file or directory",
    ),
];

#[test]
fn a_file_on_shared_storage_that_another_changes_during_a_move_is_named_and_the_service_stays() {
    let mut points = None;
    let mut shared = PathBuf::new();
    let mut holder = Holder::up(
        "shared-changes",
        |config| {
            allow_all(config);
            points = Some(Points::among(config, &[POINT]));
        },
        |scratch| {
            shared = scratch.join("shared");
            fs::create_dir(&shared).unwrap();
            ["-v".to_owned(), format!("{}:/shared:move=shared", shared.display())].into()
        },
    );
    let points = points.unwrap();
    let log = shared.join("log");
    holder.told("open /shared/log");
    for (what, change, mend, said) in CHANGES {
        let begin = || Attempt::begin(&holder.bed, NAME, "a", "b", &["--mode", "precopy"]);
        let attempt = Attempt::held(&points, POINT, begin);
        change(&log);
        points.let_go(POINT);
        let reason = attempt.aborted();
        for words in ["node b gave up", "shared/log", said, "let nobody else change the file"] {
            assert!(reason.contains(words), "{what}: no {words:?} in {reason}");
        }
        holder.told("use");
        mend(&log);
    }
    holder.moves_and_uses_it();
}
