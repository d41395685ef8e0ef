//! Files that a service has and that no name leads to: deleted ones of its image, ones from outside, watched ones that were
//! deleted. Each is named before a move, and where one appears in a move, that fails and says the same. Needs root.

use std::{
    cell::Cell,
    fs::{self, File},
    io::{BufRead, BufReader, IoSlice, Write},
    mem::MaybeUninit,
    net::{Ipv4Addr, SocketAddrV4, TcpStream},
    os::fd::{AsFd, OwnedFd},
    os::unix::net::UnixStream,
};

use godwit_lab::workload::{Preset, Rootfs};
use godwit_tests::{BUSY, Bed, TRIES, compile, hold::Points, victim::Attempt};
use rustix::fs::inotify;
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};
use serde_json::Value;

const ADDRESS: Ipv4Addr = Ipv4Addr::new(10, 88, 0, 68);
const PORT: u16 = 7000;
const NAME: &str = "nameless";

/// Where a move is held that has found nothing in the way.
const POINT: &str = "source.copied";

/// Files of the image, each of which can be deleted once.
const FILES: u32 = 64;

/// What the program is told, with `*` for the number of a file, and words of what godwit says of it.
const CASES: [(&str, &str); 9] = [
    ("open /of-image/*", "has the deleted file /of-image/* open (descriptor"),
    ("mapped /of-image/*", "has the deleted file /of-image/* mapped"),
    (
        "inotify /of-image/*",
        "watches a file that was deleted, or that has no name in UTF-8 (inotify, descriptor",
    ),
    ("inotify /new", "watches a file that was deleted, or that has no name in UTF-8 (inotify, descriptor"),
    (
        "inotify /tmp/new",
        "watches a file that was deleted, or that has no name in UTF-8 (inotify, descriptor",
    ),
    ("fanotify /new", "watches a file that was deleted, or that has no name in UTF-8 (fanotify, descriptor"),
    ("elsewhere /directory", "has the file /file open (descriptor"),
    ("receives", "/outside open (descriptor"),
    ("receives a watch", "watches a file that is on none of its mounts (inotify, descriptor"),
];

/// The service, and a connection to it.
struct Nameless {
    bed: Bed,
    connection: BufReader<TcpStream>,
    /// The next file of the image.
    next: Cell<u32>,
    /// A file that it watches, and that is not its own.
    outside: Option<tempfile::NamedTempFile>,
}

impl Nameless {
    fn up(test: &str, points: &mut Option<Points>) -> Self {
        let bed = Bed::up_with(test, |config| *points = Some(Points::among(config, &[POINT])));
        let rootfs = bed.scratch().join("root");
        Rootfs::new(&rootfs).unwrap();
        compile("nameless.c", &rootfs.join("nameless"));
        for directory in ["directory", "of-image"] {
            fs::create_dir(rootfs.join(directory)).unwrap();
        }
        for number in 0..FILES {
            fs::write(rootfs.join(format!("of-image/{number}")), format!("file {number}")).unwrap();
        }
        let command = ["/nameless".to_owned(), PORT.to_string()].into();
        let preset = Preset { rootfs, command, env: Vec::new(), user: None, port: PORT };
        let may = ["--cap-add=SYS_ADMIN", "--security-opt=seccomp=unconfined"];
        let mounts = ["-v", "data:/data", "--mount", "type=tmpfs,dst=/tmp"];
        bed.run("a", NAME, ADDRESS, &preset, &[&may[..], &mounts].concat());
        let connection = BufReader::new(bed.connect(SocketAddrV4::new(ADDRESS, PORT)));
        Self { bed, connection, next: Cell::new(0), outside: None }
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

    /// Passes the service, which is on this node, a file.
    fn passed(&mut self, node: &str, file: OwnedFd) {
        self.told("listens /socket");
        let socket = format!("/proc/{}/root/socket", self.bed.pid(node, NAME));
        let stream = UnixStream::connect(socket).unwrap();
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        let files = [file.as_fd()];
        assert!(control.push(SendAncillaryMessage::ScmRights(&files)));
        sendmsg(&stream, &[IoSlice::new(b"x")], &mut control, SendFlags::empty()).unwrap();
        self.told("receives");
    }

    /// Has it do what a case says; the words that godwit is to say.
    fn does(&mut self, words: &str, said: &str) -> String {
        let number = self.next.get();
        if words == "receives" {
            let outside = self.bed.scratch().join("outside");
            fs::write(&outside, "of the node").unwrap();
            self.passed("a", File::open(outside).unwrap().into());
        } else if words == "receives a watch" {
            // No file system of the service's.
            let outside = tempfile::NamedTempFile::new_in("/dev/shm").unwrap();
            let watch = inotify::init(inotify::CreateFlags::CLOEXEC).unwrap();
            inotify::add_watch(&watch, outside.path(), inotify::WatchFlags::ATTRIB).unwrap();
            self.passed("a", watch);
            self.outside = Some(outside);
        } else {
            self.next.set(number + u32::from(words.contains('*')));
            assert!(number < FILES);
            self.told(&words.replace('*', &number.to_string()));
        }
        said.replace('*', &number.to_string())
    }

    /// What a check finds in its processes.
    fn found(&self) -> (i32, Vec<String>) {
        let said = self.bed.check("a", &[NAME, "--to", "b"]);
        let answer: Value =
            serde_json::from_str(&said.stdout).unwrap_or_else(|error| panic!("{error}: {said:?}"));
        let found = answer["obstacles"].as_array().unwrap().iter();
        (said.code, found.map(|it| it["what"].as_str().unwrap().to_owned()).collect())
    }
}

#[test]
fn each_is_named_before_a_move_and_in_one() {
    let mut points = None;
    let mut nameless = Nameless::up("nameless", &mut points);
    let points = points.unwrap();
    let mut wrong = Vec::new();
    for (words, said) in CASES {
        let mut tries = 0..TRIES;
        let (reason, expected) = loop {
            let begin = || Attempt::begin(&nameless.bed, NAME, "a", "b", &["--mode", "precopy"]);
            let attempt = Attempt::held(&points, POINT, begin);
            let expected = nameless.does(words, said);
            points.let_go(POINT);
            let reason = attempt.aborted();
            let is_busy = BUSY.iter().any(|busy| reason.contains(busy)) && !reason.contains(&expected);
            if !is_busy || tries.next().is_none() {
                break (reason, expected);
            }
            nameless.told("end");
        };
        if !reason.contains(&expected) || !reason.contains("its log is ") {
            wrong.push(format!("{words}, in a move: {reason}"));
        }
        let (code, found) = nameless.found();
        if code != 1 || found.len() != 1 || !found[0].contains(&expected) {
            wrong.push(format!("{words}, checked: {code} {found:?}"));
        }
        // It stays what it was.
        nameless.told("use");
        nameless.told("end");
    }
    assert!(wrong.is_empty(), "{wrong:#?}");
}

#[test]
fn what_has_another_name_or_needs_none_is_no_obstacle_and_moves() {
    let mut nameless = Nameless::up("another-name", &mut None);
    nameless.told("linked /of-image/0");
    assert_eq!(nameless.found().1, Vec::<String>::new());
    nameless.bed.migrate(NAME, "a", "b");
    nameless.told("use");
    nameless.told("end");
    // One of the service's own files that came back to it over a socket.
    let own = format!("/proc/{}/root/of-image/1", nameless.bed.pid("b", NAME));
    nameless.passed("b", File::open(own).unwrap().into());
    // It was opened on the mount of the service.
    nameless.bed.migrate(NAME, "b", "a");
    nameless.told("use");
    nameless.told("end");
    // In a volume CRIU opens by its handle what is watched.
    nameless.told("inotify /data/watched");
    assert_eq!(nameless.found().1, Vec::<String>::new());
    nameless.bed.migrate(NAME, "a", "b");
    nameless.told("use");
    nameless.told("end");
    nameless.bed.migrate(NAME, "b", "a");
    for words in ["open /data/kept", "open /tmp/kept"] {
        let (word, path) = words.split_once(' ').unwrap();
        let inside = format!("/proc/{}/root{path}", nameless.bed.pid("a", NAME));
        fs::write(&inside, "of the service").unwrap();
        nameless.told(&format!("{word} {path}"));
        assert_eq!(nameless.found().1, Vec::<String>::new(), "{words}");
        nameless.bed.migrate(NAME, "a", "b");
        nameless.told("use");
        nameless.told("end");
        nameless.bed.migrate(NAME, "b", "a");
    }
}
