//! Segments of shared memory as real processes have them.
#![allow(clippy::unwrap_used)]

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Write};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};

use godwit_memory::PAGE_SIZE;
use godwit_memory::shared::{Kind, Segment, find};

/// A tree of processes that do what they are told in Python, all of them as children of the first.
const PROGRAM: &str = r"
import ctypes, mmap, os, sys
libc = ctypes.CDLL(None, use_errno=True)
libc.mmap.restype = libc.mremap.restype = ctypes.c_void_p
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
        let mut command = Command::new("python3");
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
        find(&self.pids()).unwrap()
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
    // A child that has it elsewhere, and not at the beginning.
    tree.does(
        "moved = fork(lambda: ctypes.memset(libc.mremap(ctypes.c_void_p(at + 4 * PAGE), ctypes.c_size_t(4 * PAGE), ctypes.c_size_t(4 * PAGE), 3, ctypes.c_void_p(at + 1024 * PAGE)) + PAGE, 6, 1))",
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
fn memory_files_are_found_when_nobody_has_them_open() {
    let mut tree = Tree::start();
    tree.does("fd = os.memfd_create('a name', os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)");
    tree.does("os.truncate(fd, 2 * PAGE + 5); m = mmap.mmap(fd, 2 * PAGE + 5); m[PAGE] = 7");
    assert!(tree.segments().is_empty(), "it is open");
    tree.does("child = fork(lambda: None); os.close(fd)");
    assert!(tree.segments().is_empty(), "mmap of Python has it open, too");
    tree.does("fd = os.memfd_create('a name', os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)");
    tree.does("os.truncate(fd, 2 * PAGE + 5); os.pwrite(fd, b'ab', PAGE)");
    tree.does("at = libc.mmap(None, ctypes.c_size_t(3 * PAGE), 3, 1, fd, ctypes.c_long(0)); os.close(fd)");
    let segment = tree.segment();
    assert_eq!(segment.kind(), &Kind::Memfd { name: "a name".into(), sealable: true });
    assert_eq!((segment.size(), segment.has_its_size().unwrap()), (2 * PAGE_SIZE + 5, true));
    assert_eq!(pages(&segment)[1], Some(b'a'));
    // Private mappings have pages of their own.
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
