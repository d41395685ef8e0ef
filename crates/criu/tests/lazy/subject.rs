//! The processes that are dumped: this test program again, with memory of all kinds whose contents
//! it can tell at any time.
//!
//! ```text
//! root ─ 3 threads with full stacks     SIGUSR1 to the root: all look at their memory; the root
//!  └ child                              ends with 0 when it is right
//!     └ grandchild
//! ```

use std::fs::{File, OpenOptions};
use std::io::Write;
use std::os::fd::AsRawFd;
use std::path::Path;
use std::ptr::null_mut;
use std::sync::mpsc;
use std::thread;

pub(crate) const PAGE: usize = 4096;
const WORDS: usize = PAGE / 8;

/// Pages in each area.
const PAGES: usize = 600;

/// `MADV_GUARD_INSTALL` of Linux 6.13.
const MADV_GUARD_INSTALL: i32 = 102;

/// Who wrote a page last.
const BEFORE_FORK: u64 = 1;
const ROOT: u64 = 2;
const CHILD: u64 = 3;
const GRANDCHILD: u64 = 4;

#[derive(Clone, Copy)]
struct Area {
    name: &'static str,
    at: *mut u8,
    /// Whether a process sees what another one writes.
    shared: bool,
    /// Whether the pages that nobody wrote have the file's contents.
    file: bool,
}

/// Pages of the mapped file have this in each byte.
const FILE_BYTE: u8 = 0x5a;

fn word(writer: u64, page: usize, index: usize) -> u64 {
    let mut x = writer << 48 ^ (page as u64) << 16 ^ index as u64;
    x = (x ^ x >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    x = (x ^ x >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ x >> 31
}

impl Area {
    fn page(self, page: usize) -> &'static mut [u64] {
        // SAFETY: the area has that many pages and lives as long as the process.
        unsafe { std::slice::from_raw_parts_mut(self.at.add(page * PAGE).cast(), WORDS) }
    }

    fn write(self, writer: u64, every: usize) {
        for page in (0..PAGES).step_by(every) {
            self.page(page).iter_mut().enumerate().for_each(|(index, at)| *at = word(writer, page, index));
        }
    }

    /// Who wrote a page last, as seen by `me`; none: nobody did.
    fn writer(self, me: u64, page: usize) -> Option<u64> {
        let before = (!page.is_multiple_of(7) || self.shared).then_some(BEFORE_FORK);
        let mut steps = vec![(CHILD, 5), (GRANDCHILD, 11), (ROOT, 3)];
        // A process has what its parents had when it was made.
        steps.retain(|(writer, _)| self.shared || *writer == me || (me == GRANDCHILD && *writer == CHILD));
        if self.shared {
            // The child is done before the grandchild begins, the root comes last.
            return steps
                .iter()
                .rev()
                .find(|(_, every)| page.is_multiple_of(*every))
                .map(|(w, _)| *w)
                .or(before);
        }
        steps.sort_by_key(|(writer, _)| *writer);
        steps.iter().rev().find(|(_, every)| page.is_multiple_of(*every)).map(|(w, _)| *w).or(before)
    }

    fn check(self, me: u64) -> Result<(), String> {
        for page in 0..PAGES {
            let writer = self.writer(me, page);
            let empty = if self.file { u64::from_ne_bytes([FILE_BYTE; 8]) } else { 0 };
            for (index, seen) in self.page(page).iter().enumerate() {
                let expected = writer.map_or(empty, |writer| word(writer, page, index));
                if *seen != expected {
                    return Err(format!(
                        "{}: page {page} word {index} is {seen:#x}, not {expected:#x} of {writer:?}",
                        self.name
                    ));
                }
            }
        }
        Ok(())
    }
}

fn map(flags: i32, file: Option<&File>) -> *mut u8 {
    let fd = file.map_or(-1, AsRawFd::as_raw_fd);
    // SAFETY: a new mapping, of a file or of none.
    let at =
        unsafe { libc::mmap(null_mut(), PAGES * PAGE, libc::PROT_READ | libc::PROT_WRITE, flags, fd, 0) };
    assert_ne!(at, libc::MAP_FAILED);
    at.cast()
}

fn protect(area: Area, protection: i32) {
    // SAFETY: the area is this process's, and nothing uses it meanwhile.
    assert_eq!(unsafe { libc::mprotect(area.at.cast(), PAGES * PAGE, protection) }, 0);
}

struct Memory {
    written: Vec<Area>,
    /// Cannot be accessed between preparation and check.
    closed: Area,
    /// Only read once: no page of its own.
    zero: *const u8,
    /// A page in it is a guard, if the kernel and CRIU (since 4.2) have them.
    guarded: Option<Area>,
}

impl Memory {
    fn prepare(directory: &Path, with_guards: bool) -> Self {
        let private = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
        let area = |name, at| Area { name, at, shared: false, file: false };
        let heap = vec![0_u8; (PAGES + 1) * PAGE].leak().as_mut_ptr();
        // SAFETY: the next page boundary is inside of the allocation.
        let heap = unsafe { heap.add(heap.align_offset(PAGE)) };
        let path = directory.join("mapped");
        std::fs::write(&path, vec![FILE_BYTE; PAGES * PAGE]).unwrap();
        let file = OpenOptions::new().read(true).write(true).open(&path).unwrap();
        let locked = area("locked", map(private, None));
        // SAFETY: the area is this process's.
        assert_eq!(unsafe { libc::mlock(locked.at.cast(), PAGES * PAGE) }, 0);
        let written = vec![
            area("anonymous", map(private, None)),
            area("heap", heap),
            locked,
            Area { shared: true, ..area("shared", map(libc::MAP_SHARED | libc::MAP_ANONYMOUS, None)) },
            Area { file: true, ..area("file", map(libc::MAP_PRIVATE, Some(&file))) },
        ];
        let closed = area("closed", map(private, None));
        let zero = map(private, None);
        // SAFETY: a readable page.
        assert_eq!(unsafe { zero.read_volatile() }, 0);
        let guarded = area("guarded", map(private, None));
        guarded.write(BEFORE_FORK, 1);
        // SAFETY: the second page of an area that nothing else uses.
        let has_guard = with_guards
            && unsafe { libc::madvise(guarded.at.add(PAGE).cast(), PAGE, MADV_GUARD_INSTALL) } == 0;
        let memory = Self { written, closed, zero, guarded: has_guard.then_some(guarded) };
        for area in memory.written.iter().chain([&memory.closed]) {
            for page in (0..PAGES).filter(|page| area.shared || !page.is_multiple_of(7)) {
                let words = area.page(page).iter_mut().enumerate();
                words.for_each(|(index, at)| *at = word(BEFORE_FORK, page, index));
            }
        }
        memory
    }

    fn write(&self, writer: u64, every: usize) {
        self.written.iter().chain([&self.closed]).for_each(|area| area.write(writer, every));
        protect(self.closed, libc::PROT_NONE);
    }

    fn check(&self, me: u64) -> Result<(), String> {
        protect(self.closed, libc::PROT_READ | libc::PROT_WRITE);
        self.written.iter().chain([&self.closed]).try_for_each(|area| area.check(me))?;
        // SAFETY: readable pages of this process.
        let zero = unsafe { std::slice::from_raw_parts(self.zero, PAGES * PAGE) };
        if zero.iter().any(|byte| *byte != 0) {
            return Err("zero: it is not".into());
        }
        let Some(guarded) = self.guarded else { return Ok(()) };
        if readable(guarded.at.wrapping_add(PAGE)) || !readable(guarded.at) {
            return Err("guarded: the guard is not where it was".into());
        }
        let pages = (0..PAGES).filter(|page| *page != 1);
        let mut words = pages.flat_map(|page| guarded.page(page).iter().enumerate().map(move |w| (page, w)));
        match words.find(|(page, (index, seen))| **seen != word(BEFORE_FORK, *page, *index)) {
            Some((page, _)) => Err(format!("guarded: page {page} is wrong")),
            None => Ok(()),
        }
    }
}

/// Whether the kernel can read there.
fn readable(at: *const u8) -> bool {
    let mut byte = 0_u8;
    let [local, remote] =
        [(&raw mut byte), at.cast_mut()].map(|base| libc::iovec { iov_base: base.cast(), iov_len: 1 });
    // SAFETY: the kernel checks the address.
    unsafe { libc::process_vm_readv(libc::getpid(), &raw const local, 1, &raw const remote, 1, 0) == 1 }
}

/// The signal on which processes look at their memory. It is blocked before the program begins, as
/// any thread could be chosen for it.
pub(crate) fn signals() -> libc::sigset_t {
    // SAFETY: the set is made before it is used.
    unsafe {
        let mut set = std::mem::zeroed();
        libc::sigemptyset(&raw mut set);
        libc::sigaddset(&raw mut set, libc::SIGUSR1);
        set
    }
}

pub(crate) fn wait_for_signal() {
    let mut signal = 0;
    // SAFETY: both live in this frame or are temporaries of this call.
    assert_eq!(unsafe { libc::sigwait(&raw const *Box::new(signals()), &raw mut signal) }, 0);
}

/// Says what is wrong where the test will look, and gives the exit code.
pub(crate) fn verdict(directory: &Path, who: &str, result: Result<(), String>) -> i32 {
    match result {
        Ok(()) => 0,
        Err(reason) => {
            let _ = std::fs::write(directory.join(format!("wrong-{who}")), reason);
            1
        }
    }
}

/// Forks; the child does its work and ends.
pub(crate) fn fork(work: impl FnOnce() -> i32) -> i32 {
    // SAFETY: the child goes on in a single thread; the others hold no lock that it needs, as they
    // are not there yet.
    match unsafe { libc::fork() } {
        -1 => panic!("no fork"),
        0 => {
            let code = work();
            // SAFETY: ends at once.
            unsafe { libc::_exit(code) }
        }
        pid => pid,
    }
}

/// Tells a process to look at its memory, and gives what it found.
pub(crate) fn ask(pid: i32) -> Result<(), String> {
    let mut status = 0;
    // SAFETY: a child of this process; the status lives in this frame.
    unsafe {
        libc::kill(pid, libc::SIGUSR1);
        libc::waitpid(pid, &raw mut status, 0);
    }
    if status == 0 { Ok(()) } else { Err(format!("process {pid} ended with {status:#x}")) }
}

/// Is the root of the tree; returns its exit code.
pub(crate) fn run(directory: &Path, with_guards: bool) -> i32 {
    let memory = Memory::prepare(directory, with_guards);
    let (mut ready, mut tell) = std::io::pipe().unwrap();
    let child = fork(|| {
        memory.write(CHILD, 5);
        protect(memory.closed, libc::PROT_READ | libc::PROT_WRITE);
        let grandchild = fork(|| {
            memory.write(GRANDCHILD, 11);
            tell.write_all(b"x").unwrap();
            wait_for_signal();
            verdict(directory, "grandchild", memory.check(GRANDCHILD))
        });
        protect(memory.closed, libc::PROT_NONE);
        wait_for_signal();
        let result = memory.check(CHILD).and(ask(grandchild));
        verdict(directory, "child", result)
    });
    let mut byte = [0];
    std::io::Read::read_exact(&mut ready, &mut byte).unwrap();
    memory.write(ROOT, 3);

    let (mut wakers, mut threads) = (Vec::new(), Vec::new());
    let (started, all_started) = mpsc::channel();
    for number in 0..3 {
        let (waker, woken) = mpsc::channel::<()>();
        wakers.push(waker);
        let started = started.clone();
        threads.push(thread::spawn(move || {
            let mut stack = [0_u64; 8192];
            stack.iter_mut().enumerate().for_each(|(index, at)| *at = word(9, number, index));
            std::hint::black_box(&mut stack);
            started.send(()).unwrap();
            woken.recv().unwrap();
            std::hint::black_box(&mut stack);
            stack.iter().enumerate().all(|(index, seen)| *seen == word(9, number, index))
        }));
    }
    (0..3).for_each(|_| all_started.recv().unwrap());
    // SAFETY: raise has no conditions. Whoever waits for this process sees it.
    unsafe { libc::raise(libc::SIGSTOP) };
    wait_for_signal();
    wakers.iter().for_each(|waker| waker.send(()).unwrap());
    let stacks = threads.into_iter().all(|thread| thread.join().unwrap());
    let result = match stacks {
        true => memory.check(ROOT).and_then(|()| ask(child)),
        false => Err("a thread's stack is wrong".into()),
    };
    verdict(directory, "root", result)
}

/// A process with this much written memory, in MiB, in pages of the usual size.
pub(crate) fn run_large(mebibytes: usize) -> ! {
    let length = mebibytes << 20;
    // SAFETY: a new mapping of this process; all of it is written.
    unsafe {
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
        let at = libc::mmap(null_mut(), length, libc::PROT_READ | libc::PROT_WRITE, flags, -1, 0);
        assert_ne!(at, libc::MAP_FAILED);
        libc::madvise(at, length, libc::MADV_NOHUGEPAGE);
        for page in 0..length / PAGE {
            *at.cast::<u64>().add(page * WORDS) = word(1, page, 0) | 1;
        }
        libc::raise(libc::SIGSTOP);
        loop {
            libc::pause();
        }
    }
}
