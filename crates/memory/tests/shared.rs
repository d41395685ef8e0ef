//! Segments of shared memory as real processes have them.
#![allow(clippy::unwrap_used)]

use std::collections::{BTreeMap, BTreeSet};
use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::time::{Duration, Instant};

use godwit_memory::PAGE_SIZE;
use godwit_memory::shared::{Filler, IpcNamespace, Kind, Replica, Segment, find, find_system_v};
use godwit_memory::tracker::{Backend, Tracker, detect};

/// Until what must come about has, on a busy machine, too.
const LIMIT: Duration = Duration::from_secs(30);

/// A tree of processes that do what they are told in Python, all of them as children of the first.
const PROGRAM: &str = r"
import ctypes, mmap, os, sys
libc = ctypes.CDLL(None, use_errno=True)
libc.mmap.restype = libc.mremap.restype = libc.shmat.restype = ctypes.c_void_p
PAGE = mmap.PAGESIZE
def fork(work):
    # A child that does something and waits until it is killed with its parent.
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        libc.prctl(1, 9)
        work()
        os.write(write, b'x')
        while True: libc.pause()
    os.read(read, 1)
    os.close(read); os.close(write)
    return child
def gone(work):
    # A child that does something and is gone.
    child = os.fork()
    if child == 0:
        work()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
for line in sys.stdin:
    exec(line)
    print('done', flush=True)
";

struct Tree {
    child: Child,
    input: ChildStdin,
    output: BufReader<ChildStdout>,
}

impl Tree {
    fn start() -> Self {
        Self::run(&mut Command::new("python3"))
    }

    /// One that cannot open what others have mapped, as a process of a container.
    fn contained() -> Self {
        let mut command = Command::new("setpriv");
        Self::run(command.args(["--bounding-set", "-sys_admin,-cap_40", "python3"]))
    }

    fn run(command: &mut Command) -> Self {
        let mut child =
            command.args(["-c", PROGRAM]).stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        let (input, output) = (child.stdin.take().unwrap(), BufReader::new(child.stdout.take().unwrap()));
        Self { child, input, output }
    }

    fn does(&mut self, what: &str) {
        writeln!(self.input, "{what}").unwrap();
        let mut answer = String::new();
        self.output.read_line(&mut answer).unwrap();
        assert_eq!(answer, "done\n", "{what}");
    }

    /// The first process and its children.
    fn pids(&self) -> Vec<i32> {
        let first = self.child.id();
        let children = std::fs::read_to_string(format!("/proc/{first}/task/{first}/children")).unwrap();
        let children = children.split_whitespace().map(|pid| pid.parse().unwrap());
        [i32::try_from(first).unwrap()].into_iter().chain(children).collect()
    }

    fn segments(&self) -> BTreeMap<u64, Segment> {
        let found = find(&self.pids()).unwrap();
        found.into_iter().map(|segment| (segment.inode(), segment)).collect()
    }

    /// The only segment.
    fn segment(&self) -> Segment {
        let (_, segment) = self.segments().pop_first().unwrap();
        assert_eq!(self.segments().len(), 1);
        segment
    }
}

impl Drop for Tree {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// A tree whose shared memory is watched from outside, and what was found of it.
struct Watched {
    tree: Tree,
    tracker: Tracker,
    inode: u64,
}

impl Watched {
    /// Of a tree that has one segment; none where the kernel cannot tell what was written to it.
    fn new(tree: Tree) -> Option<Self> {
        let detected = detect();
        if detected.backend != Backend::Uffd || !Path::new("/sys/kernel/tracing/events").exists() {
            return None;
        }
        let inode = tree.segment().inode();
        let mut watched = Self { tree, tracker: Tracker::new(detected.backend), inode };
        assert_eq!(watched.scan(), None, "nothing is known of it yet");
        assert!(watched.scan().is_some());
        Some(watched)
    }

    /// The pages that may have been written since the last call; none where that is not certain.
    fn scan(&mut self) -> Option<BTreeSet<u64>> {
        self.tracker.round(&self.tree.pids(), false).unwrap();
        self.tracker.watch_shared(&BTreeSet::from([self.inode]), &self.tree.pids());
        self.found(false)
    }

    /// The same where this happens after the processes were listed.
    fn scan_late(&mut self, what: &str) -> Option<BTreeSet<u64>> {
        self.tracker.round(&self.tree.pids(), false).unwrap();
        self.tracker.watch_shared(&BTreeSet::from([self.inode]), &self.tree.pids());
        let pids = self.tree.pids();
        self.tree.does(what);
        self.found_in(&pids, false)
    }

    /// The same of processes that do nothing until it is over.
    fn last_scan(&mut self) -> Option<BTreeSet<u64>> {
        self.found(true)
    }

    fn found(&mut self, frozen: bool) -> Option<BTreeSet<u64>> {
        self.found_in(&self.tree.pids(), frozen)
    }

    fn found_in(&mut self, pids: &[i32], frozen: bool) -> Option<BTreeSet<u64>> {
        let found = self.tracker.shared(pids, frozen)?;
        Some(
            found[&self.inode]
                .iter()
                .flat_map(|range| range.start / PAGE_SIZE..range.end / PAGE_SIZE)
                .collect(),
        )
    }
}

/// The first byte of each page; none where there is no page.
fn pages(segment: &Segment) -> Vec<Option<u8>> {
    let populated = segment.populated().unwrap();
    let page = |page: u64| {
        populated.iter().find(|range| range.contains(&(page * PAGE_SIZE)))?;
        let mut content = vec![0xee; 4096];
        segment.read(page * PAGE_SIZE, &mut content).unwrap();
        Some(content[0])
    };
    (0..segment.size().div_ceil(PAGE_SIZE)).map(page).collect()
}

/// Whether shared memory comes in huge pages: then more of it is there than was written.
fn in_huge_pages() -> bool {
    let setting = std::fs::read_to_string("/sys/kernel/mm/transparent_hugepage/shmem_enabled");
    setting.is_ok_and(|text| text.contains("[always]") || text.contains("[force]"))
}

/// Whoever has written: a child that has ended or executed another program, or a mapping that is gone.
#[test]
fn what_anybody_wrote_is_read_wherever_it_is_mapped() {
    let mut tree = Tree::start();
    tree.does("m = mmap.mmap(-1, 8 * PAGE); m[0] = 1");
    tree.does("child = fork(lambda: m.__setitem__(PAGE, 2))");
    tree.does("gone(lambda: m.__setitem__(2 * PAGE, 3))");
    tree.does("gone(lambda: (m.__setitem__(3 * PAGE, 4), os.execvp('true', ['true'])))");
    // A second mapping of what is at the address, by mremap(2) of no bytes; and it is gone again.
    tree.does("at = ctypes.addressof(ctypes.c_char.from_buffer(m))");
    tree.does("two = libc.mremap(ctypes.c_void_p(at), ctypes.c_size_t(0), ctypes.c_size_t(8 * PAGE), 1)");
    tree.does(
        "ctypes.memset(two + 4 * PAGE, 5, 1); libc.munmap(ctypes.c_void_p(two), ctypes.c_size_t(8 * PAGE))",
    );
    // A child that has it elsewhere, where nothing else is, and not at the beginning.
    tree.does("free = libc.mmap(None, ctypes.c_size_t(4 * PAGE), 0, 0x22, -1, ctypes.c_long(0))");
    tree.does(
        "moved = fork(lambda: ctypes.memset(libc.mremap(ctypes.c_void_p(at + 4 * PAGE), ctypes.c_size_t(4 * PAGE), ctypes.c_size_t(4 * PAGE), 3, ctypes.c_void_p(free)) + PAGE, 6, 1))",
    );
    let segment = tree.segment();
    assert_eq!((segment.kind(), segment.size()), (&Kind::Anonymous, 8 * PAGE_SIZE));
    let mut expected = [1, 2, 3, 4, 5, 6].map(Some).to_vec();
    expected.extend(if in_huge_pages() { [Some(0); 2] } else { [None; 2] });
    assert_eq!(pages(&segment), expected);
    // What is removed is a hole, for all.
    tree.does("libc.madvise(ctypes.c_void_p(at), ctypes.c_size_t(2 * PAGE), 9)");
    let now = pages(&segment);
    assert!(now[..2].iter().all(|page| page.unwrap_or(0) == 0), "{now:?}");
    assert_eq!(now[2..], expected[2..]);
    let private = godwit_memory::shared::needed(&[]).unwrap();
    assert_eq!(private, 0);
    assert!(godwit_memory::shared::needed(&tree.pids()).unwrap() > segment.allocated().unwrap());
    // As long as anybody maps it, it is found.
    tree.does("del m");
    assert_eq!(tree.segment().inode(), segment.inode());
}

#[test]
fn memory_files_are_found_by_whoever_maps_them_or_has_them_open() {
    let mut tree = Tree::start();
    let is_found = |tree: &Tree, how: &str| {
        let segment = tree.segment();
        assert_eq!(segment.kind(), &Kind::Memfd { name: "a name".into(), sealable: true }, "{how}");
        assert_eq!((segment.size(), segment.has_its_size().unwrap()), (2 * PAGE_SIZE + 5, true), "{how}");
        assert_eq!(pages(&segment)[1], Some(b'a'), "{how}");
        segment
    };
    tree.does("fd = os.memfd_create('a name', os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)");
    assert!(tree.segments().is_empty(), "it has no pages");
    tree.does("os.truncate(fd, 2 * PAGE + 5); os.pwrite(fd, b'ab', PAGE)");
    let opened = is_found(&tree, "open");
    tree.does("os.truncate(fd, 5 * PAGE); os.pwrite(fd, b'c' * 3 * PAGE, 2 * PAGE)");
    assert_eq!(opened.populated().unwrap().last(), Some(&(PAGE_SIZE..3 * PAGE_SIZE)), "it has grown since");
    assert!(!opened.has_its_size().unwrap());
    tree.does("os.truncate(fd, 2 * PAGE + 5)");
    tree.does("at = libc.mmap(None, ctypes.c_size_t(3 * PAGE), 3, 1, fd, ctypes.c_long(0))");
    is_found(&tree, "open and mapped");
    tree.does("os.close(fd)");
    let segment = is_found(&tree, "mapped");
    assert_eq!(segment.inode(), opened.inode());
    // One that is mapped privately, whether it is open or not, is left to CRIU.
    tree.does("private = os.memfd_create('c'); os.truncate(private, PAGE)");
    tree.does("libc.mmap(None, ctypes.c_size_t(PAGE), 3, 2, private, ctypes.c_long(0))");
    assert_eq!(tree.segment().inode(), segment.inode());
    tree.does("fd = os.memfd_create('b'); os.truncate(fd, PAGE)");
    tree.does("two = [libc.mmap(None, ctypes.c_size_t(PAGE), 3, how, fd, ctypes.c_long(0)) for how in (1, 2)]; os.close(fd)");
    assert_eq!(tree.segment().inode(), segment.inode());
}

#[test]
fn processes_that_have_ended_are_passed_over() {
    let mut tree = Tree::start();
    tree.does("m = mmap.mmap(-1, PAGE); m[0] = 1; ended = os.fork() or os._exit(0)");
    tree.does("os.waitid(os.P_PID, ended, os.WEXITED | os.WNOWAIT)");
    let pids = tree.pids();
    assert_eq!(pids.len(), 2);
    assert_eq!(find(&[pids[1], pids[0], i32::MAX]).unwrap().len(), 1);
    assert!(find(&pids[1..]).unwrap().is_empty());
}

#[test]
fn only_what_living_processes_wrote_is_to_be_compared_where_that_is_all() {
    let mut tree = Tree::contained();
    // More than one page table.
    tree.does("m = mmap.mmap(-1, 2048 * PAGE); m[0] = 1; m[PAGE] = 1");
    tree.does("child = fork(lambda: m.__setitem__(2 * PAGE, 2))");
    tree.does("at = ctypes.addressof(ctypes.c_char.from_buffer(m))");
    let Some(mut watched) = Watched::new(tree) else { return };
    assert_eq!(watched.scan(), Some(BTreeSet::new()));
    watched.tree.does("m[PAGE] = 2; m[700 * PAGE] = 1");
    assert_eq!(watched.scan(), Some(BTreeSet::from([1, 700])));
    // Page tables lose their entries.
    watched.tree.does("m[3 * PAGE] = 1; m[4 * PAGE] = 1");
    watched.tree.does("libc.madvise(ctypes.c_void_p(at), ctypes.c_size_t(2048 * PAGE), 4)");
    let found = watched.scan().unwrap();
    assert!(found.is_superset(&BTreeSet::from([3, 4])), "{found:?}");
    assert!(!found.contains(&700), "what was not written leaves a mark: {found:?}");
    watched.tree.does("import threading; t = threading.Thread(target=lambda: m.__setitem__(5 * PAGE, 1)); t.start(); t.join()");
    watched.tree.does("m[0] == 1");
    assert_eq!(watched.last_scan(), Some(BTreeSet::from([5])));
}

#[test]
fn all_is_to_be_compared_after_what_page_tables_do_not_tell() {
    let lost = [
        "gone(lambda: m.__setitem__(PAGE, 2))",
        // A second mapping, which is gone again.
        "two = libc.mremap(ctypes.c_void_p(at), ctypes.c_size_t(0), ctypes.c_size_t(64 * PAGE), 1); ctypes.memset(two, 9, 1); libc.munmap(ctypes.c_void_p(two), ctypes.c_size_t(64 * PAGE))",
        "libc.mremap(ctypes.c_void_p(at), ctypes.c_size_t(64 * PAGE), ctypes.c_size_t(64 * PAGE), 5)",
        // What is removed and touched again is zero, as a page that was never written.
        "libc.madvise(ctypes.c_void_p(at), ctypes.c_size_t(PAGE), 9); m[0]",
        "m[PAGE] = 2; libc.munmap(ctypes.c_void_p(at + PAGE), ctypes.c_size_t(PAGE))",
        "m[PAGE] = 2; free = libc.mmap(None, ctypes.c_size_t(64 * PAGE), 0, 0x22, -1, ctypes.c_long(0)); libc.mremap(ctypes.c_void_p(at), ctypes.c_size_t(64 * PAGE), ctypes.c_size_t(64 * PAGE), 3, ctypes.c_void_p(free))",
        "os.kill(child, 9); os.waitpid(child, 0)",
        "child_two = fork(lambda: m.__setitem__(PAGE, 2))",
    ];
    for frozen in [false, true] {
        for what in lost {
            let mut tree = Tree::contained();
            tree.does("m = mmap.mmap(-1, 64 * PAGE); m[0] = 1; child = fork(lambda: None)");
            tree.does("at = ctypes.addressof(ctypes.c_char.from_buffer(m))");
            let Some(mut watched) = Watched::new(tree) else { return };
            watched.tree.does(what);
            if frozen {
                assert_eq!(watched.last_scan(), None, "{what}");
                continue;
            }
            assert_eq!(watched.scan(), None, "{what}");
            watched.scan();
            // Where it is mapped now.
            watched.tree.does("ctypes.memset(globals().get('free', at), 3, 1)");
            assert_eq!(watched.scan(), Some(BTreeSet::from([0])), "after {what}");
        }
    }
}

/// It is in no list, and may write after the scan.
#[test]
fn all_is_to_be_compared_after_a_child_that_was_made_during_a_scan() {
    let mut tree = Tree::contained();
    tree.does("m = mmap.mmap(-1, 64 * PAGE); m[0] = 1");
    let Some(mut watched) = Watched::new(tree) else { return };
    assert_eq!(watched.scan_late("m[1] = 1").map(|pages| pages.len()), Some(1));
    assert_eq!(watched.scan_late("child = fork(lambda: None)"), None);
    watched.tree.does("os.kill(child, 9); os.waitpid(child, 0)");
    assert_eq!(watched.last_scan(), None);
}

#[test]
fn nothing_is_certain_of_processes_that_can_open_what_others_have_mapped() {
    let mut tree = Tree::start();
    tree.does("m = mmap.mmap(-1, 64 * PAGE); m[0] = 1");
    if !std::fs::read_to_string("/proc/self/status").unwrap().contains("CapBnd:\t000001ffffffffff") {
        return;
    }
    let mut watched =
        Watched { inode: tree.segment().inode(), tree, tracker: Tracker::new(detect().backend) };
    for _ in 0..3 {
        assert_eq!(watched.scan(), None);
    }
}

/// A memory cgroup of this test's own; none where the machine has no such controller to give.
struct Cgroup(PathBuf);

impl Cgroup {
    fn new() -> Option<Self> {
        let root = Path::new("/sys/fs/cgroup");
        let controllers = std::fs::read_to_string(root.join("cgroup.subtree_control"));
        let parent = match controllers {
            Ok(controllers) => controllers.contains("memory").then(|| root.to_owned()),
            Err(_) => Some(root.join("memory")).filter(|parent| parent.is_dir()),
        };
        let directory = parent?.join(format!("godwit-test-{}", std::process::id()));
        std::fs::create_dir(&directory).unwrap();
        Some(Self(directory))
    }

    /// Bytes of shared memory that it is charged for.
    fn shared(&self) -> u64 {
        let text = std::fs::read_to_string(self.0.join("memory.stat")).unwrap();
        let line = text.lines().find_map(|line| line.strip_prefix("shmem "));
        line.unwrap().parse().unwrap()
    }
}

/// What a process has of System V, with the sizes of two segments: one that is followed, and one that is too small.
const SYSTEM_V: &str = "libc.unshare(0x8000000)
id = libc.shmget(0x4711, ctypes.c_size_t(20 * PAGE - 5), 0o1640)
at = libc.shmat(id, None, 0)
ctypes.memset(at + PAGE, 7, 5)
small = libc.shmat(libc.shmget(0, ctypes.c_size_t(PAGE), 0o1600), None, 0)
libc.shmget(0x4712, ctypes.c_size_t(20 * PAGE), 0o1600)";

#[test]
fn an_attached_segment_of_system_v_is_found_with_the_key_that_it_has_now() {
    let mut tree = Tree::start();
    tree.does(&format!("exec({SYSTEM_V:?})"));
    let segment = tree.segment();
    assert_eq!((segment.kind(), segment.size()), (&Kind::SystemV { key: 0x4711 }, 20 * PAGE_SIZE - 5));
    assert_eq!(pages(&segment)[1], Some(7));
    assert_eq!(find_system_v(&tree.pids()).unwrap().len(), 1);
    tree.does("assert libc.shmctl(id, 0, None) == 0");
    let removed = tree.segment();
    assert_eq!((removed.kind(), removed.inode()), (&Kind::SystemV { key: 0 }, segment.inode()));
    assert!(removed.is(&segment));
    // What lies behind its end is there for all who have attached it.
    tree.does("ctypes.memset(at + 20 * PAGE - 5, 9, 5)");
    let mut last = [0; 4096];
    removed.read(19 * PAGE_SIZE, &mut last).unwrap();
    assert_eq!(last[4090..], [0, 9, 9, 9, 9, 9]);
    tree.does("libc.shmdt(ctypes.c_void_p(at))");
    assert!(tree.segments().is_empty(), "it is gone, and what is attached is too small");
    // Another with its identifier.
    tree.does("open('/proc/sys/kernel/shm_next_id', 'w').write(str(id))");
    tree.does("assert libc.shmget(0, ctypes.c_size_t(20 * PAGE - 5), 0o1600) == id");
    tree.does("at = libc.shmat(id, None, 0)");
    let other = tree.segment();
    assert_eq!((other.kind(), other.inode()), (&Kind::SystemV { key: 0 }, segment.inode()));
    assert!(!other.is(&removed) && other.is(&tree.segment()));
    let pids = tree.pids();
    let needed = || godwit_memory::shared::needed(&pids).unwrap();
    let before = needed();
    tree.does("ctypes.memset(at, 7, 20 * PAGE); libc.shmdt(ctypes.c_void_p(at))");
    assert!(tree.segments().is_empty() && needed() >= before + 20 * PAGE_SIZE, "it is there, unattached");
}

#[test]
fn a_segment_of_system_v_is_made_where_processes_will_find_it() {
    const SIZE: u64 = 20 * PAGE_SIZE - 5;
    let namespace = IpcNamespace::new().unwrap();
    let inside = |program: &str| {
        let mut command = Command::new("nsenter");
        command.arg(format!("--ipc={}", namespace.path())).args(["python3", "-c"]);
        let head = PROGRAM.split_once("for line").unwrap().0;
        assert!(command.arg(format!("{head}{program}")).status().unwrap().success(), "{program}");
    };
    let replica = Replica::of_system_v(&namespace, 7 << 15 | 3, 0x4711, SIZE).unwrap();
    replica.write(PAGE_SIZE, &[7; 8192]).unwrap();
    replica.write(19 * PAGE_SIZE, &[8; 4096]).unwrap();
    replica.clear(&(2 * PAGE_SIZE..3 * PAGE_SIZE)).unwrap();
    inside(
        "
id = libc.shmget(0x4711, ctypes.c_size_t(20 * PAGE - 5), 0)
assert id == 7 << 15 | 3, id
m = ctypes.string_at(libc.shmat(id, None, 0), 20 * PAGE)
assert m == bytes(PAGE) + b'\\x07' * PAGE + bytes(17 * PAGE) + b'\\x08' * PAGE
",
    );
    assert!(Replica::of_system_v(&namespace, 7 << 15 | 3, 0, SIZE).is_err(), "it is there");
    for (identifier, size) in [(u32::MAX, SIZE), (5, 0), (5, u64::MAX)] {
        assert!(Replica::of_system_v(&namespace, identifier, 0, size).is_err(), "{identifier} {size}");
    }
    namespace.remove(7 << 15 | 3).unwrap();
    inside("assert libc.shmget(0x4711, ctypes.c_size_t(1), 0) == -1");
    assert!(namespace.remove(7 << 15 | 3).is_err());
}

impl Drop for Cgroup {
    fn drop(&mut self) {
        std::fs::remove_dir(&self.0).unwrap();
    }
}

#[test]
fn what_is_written_through_a_filler_is_charged_to_its_cgroup() {
    const SIZE: u64 = 16 << 20;
    let Some(cgroup) = Cgroup::new() else { return };
    let filler = Filler::start(Path::new(env!("CARGO_BIN_EXE_godwit-pager"))).unwrap();
    std::fs::write(cgroup.0.join("cgroup.procs"), filler.pid().to_string()).unwrap();
    for kind in [Kind::Anonymous, Kind::Memfd { name: "filled".into(), sealable: false }] {
        let replica = Replica::new(&kind, SIZE + PAGE_SIZE, None).unwrap();
        replica.charge_to(Some(&filler)).unwrap();
        replica.write(PAGE_SIZE, &vec![7; usize::try_from(SIZE).unwrap()]).unwrap();
        // Kernels count on each processor first.
        let slack = 1 << 20;
        let charged = cgroup.shared();
        assert!(charged > SIZE - slack && charged < SIZE + slack, "{charged}");
        let bytes = std::fs::read(replica.path()).unwrap();
        assert_eq!(bytes.len() as u64, SIZE + PAGE_SIZE);
        let (hole, written) = bytes.split_at(4096);
        assert!(hole.iter().all(|byte| *byte == 0) && written.iter().all(|byte| *byte == 7));
        // Given up, it is nobody's, although the filler lives. A child of another test of this process has it open until
        // it executes its program.
        drop(replica);
        let begun = Instant::now();
        while cgroup.shared() >= slack {
            assert!(begun.elapsed() < LIMIT, "{} bytes are charged still", cgroup.shared());
            std::thread::yield_now();
        }
    }
    let replica = Replica::new(&Kind::Anonymous, SIZE, None).unwrap();
    replica.charge_to(Some(&filler)).unwrap();
    replica.write(0, &[1; 4096]).unwrap();
    replica.charge_to(None).unwrap();
    filler.end();
    assert!(!Path::new(&format!("/proc/{}", filler.pid())).exists());
    replica.write(PAGE_SIZE, &[2; 4096]).unwrap();
    assert_eq!(replica.allocated().unwrap(), 2 * PAGE_SIZE);
    assert_eq!(std::fs::read(replica.path()).unwrap()[4096..8192], [2; 4096]);
    drop(replica);
    // A page that another process has been charged for fails no move, but no filler is no answer.
    let replica = Replica::new(&Kind::Anonymous, SIZE, None).unwrap();
    assert!(replica.charge_to(Some(&filler)).is_err());
}

#[test]
fn a_filler_ends_with_its_daemon() {
    let mut command = Command::new(env!("CARGO_BIN_EXE_godwit-pager"));
    let mut filler = command.arg("fill").stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
    let mut input = filler.stdin.take().unwrap();
    writeln!(input, "/nowhere 4096").unwrap();
    let mut answer = String::new();
    BufReader::new(filler.stdout.take().unwrap()).read_line(&mut answer).unwrap();
    assert!(answer.contains("No such file"), "{answer}");
    // As when the daemon is killed.
    drop(input);
    assert!(filler.wait().unwrap().success());
}
