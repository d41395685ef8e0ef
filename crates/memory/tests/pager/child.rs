//! A process (or thread) that does what it is told: it stands for a restored process. It is this test
//! binary, run again.
//!
//! ```text
//! test ── [operation, a, b, c] ──▶ child
//!      ◀── [n, n words] + maybe a descriptor ──
//! ```
//!
//! A page's contents are one word, its tag, 512 times. A page that is torn answers [`TORN`].

use std::io::{IoSlice, IoSliceMut, Read, Write};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::os::unix::net::UnixStream;
use std::process::Command;

use nix::sys::socket::{ControlMessage, ControlMessageOwned, MsgFlags, recvmsg, sendmsg};

pub(crate) const P: u64 = 4096;
pub(crate) const TORN: u64 = u64::MAX;

const FD_VARIABLE: &str = "GODWIT_TEST_CHILD_FD";

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u64)]
pub(crate) enum Op {
    /// Opens the userfaultfd; it is the answer's descriptor.
    Uffd,
    /// Maps (a, pages b) and registers it.
    Register,
    /// Registers (a, pages b), which is mapped.
    Watch,
    /// Closes the userfaultfd, as CRIU's restorer does: only the pager has it from then on.
    Close,
    /// Maps (a, pages b), not registered.
    Map,
    /// Maps shared memory at (a, pages b) from its beginning; c is its place, by [`place`].
    MapShared,
    /// Locks (a, pages b).
    Lock,
    /// Gives the pages of (a, pages b) back, of the shared memory that is there.
    Remove,
    /// Asks for one huge page in place of (a, pages b); answers whether there is one.
    Collapse,
    /// Makes a second mapping, at c, of the shared memory that is at (a, pages b).
    Duplicate,
    /// Answers the tags of (a, pages b).
    Read,
    /// Answers the tags of pages of (a, pages b) in the order that the seed c gives.
    Shuffled,
    /// The same, and answers for every page how long it took in ns.
    Latency,
    /// Writes tag c to page a.
    Write,
    DontNeed,
    /// Makes (a, pages b) guard pages; answers whether the kernel has such.
    Guard,
    /// Asks for huge pages in (a, pages b).
    Huge,
    Unmap,
    /// Moves (a, pages b) to c; answers 1 for every page that moved: from Linux 6.17 on some may
    /// have, although the call failed at another mapping.
    Remap,
    /// Moves (a, pages b) to c and leaves the mapping, empty, where it was.
    RemapAndKeep,
    /// Moves (a, pages b) to c once the process's main thread has moved away from there.
    Follow,
    /// Has children begin with (a, pages b) empty.
    WipeOnFork,
    /// A child process; its socket is the answer's descriptor.
    Fork,
    /// A thread of the same process; as above.
    Thread,
    /// Answers its PID.
    Pid,
    Exit,
}

const OPS: [Op; 26] = [
    Op::Uffd,
    Op::Register,
    Op::Watch,
    Op::Close,
    Op::Map,
    Op::MapShared,
    Op::Lock,
    Op::Remove,
    Op::Collapse,
    Op::Duplicate,
    Op::Read,
    Op::Shuffled,
    Op::Latency,
    Op::Write,
    Op::DontNeed,
    Op::Guard,
    Op::Huge,
    Op::Unmap,
    Op::Remap,
    Op::RemapAndKeep,
    Op::Follow,
    Op::WipeOnFork,
    Op::Fork,
    Op::Thread,
    Op::Pid,
    Op::Exit,
];

/// The test's end.
pub(crate) struct Child {
    stream: UnixStream,
    process: Option<std::process::Child>,
}

impl Child {
    pub(crate) fn new() -> Self {
        let (ours, theirs) = UnixStream::pair().unwrap();
        nix::fcntl::fcntl(&theirs, nix::fcntl::FcntlArg::F_SETFD(nix::fcntl::FdFlag::empty())).unwrap();
        let process = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "child_process", "--ignored", "--nocapture"])
            .env(FD_VARIABLE, theirs.as_raw_fd().to_string())
            .stdout(std::process::Stdio::null())
            .spawn()
            .unwrap();
        Self { stream: ours, process: Some(process) }
    }

    pub(crate) fn tell(&self, op: Op, a: u64, b: u64, c: u64) {
        let words = [op as u64, a, b, c];
        let bytes: Vec<u8> = words.iter().flat_map(|w| w.to_ne_bytes()).collect();
        (&self.stream).write_all(&bytes).unwrap();
    }

    pub(crate) fn answer(&self) -> (Vec<u64>, Option<OwnedFd>) {
        let mut length = [0; 8];
        let mut slices = [IoSliceMut::new(&mut length)];
        let mut control = nix::cmsg_space!(RawFd);
        let message = recvmsg::<()>(
            self.stream.as_raw_fd(),
            &mut slices,
            Some(&mut control),
            MsgFlags::MSG_CMSG_CLOEXEC | MsgFlags::MSG_WAITALL,
        )
        .unwrap();
        let mut fd = None;
        for control in message.cmsgs().unwrap() {
            if let ControlMessageOwned::ScmRights(fds) = control {
                // SAFETY: just received.
                fd = Some(unsafe { OwnedFd::from_raw_fd(fds[0]) });
            }
        }
        assert_eq!(message.bytes, 8, "the child is gone");
        let count = usize::try_from(u64::from_ne_bytes(length)).unwrap();
        let mut bytes = vec![0; count * 8];
        (&self.stream).read_exact(&mut bytes).unwrap();
        let words = bytes.as_chunks().0.iter().map(|bytes| u64::from_ne_bytes(*bytes)).collect();
        (words, fd)
    }

    pub(crate) fn ask(&self, op: Op, a: u64, b: u64, c: u64) -> Vec<u64> {
        self.tell(op, a, b, c);
        self.answer().0
    }

    pub(crate) fn ask_fd(&self, op: Op) -> OwnedFd {
        self.tell(op, 0, 0, 0);
        self.answer().1.unwrap()
    }

    /// A forked process or a thread.
    pub(crate) fn another(&self, op: Op) -> Self {
        Self { stream: UnixStream::from(self.ask_fd(op)), process: None }
    }

    /// Whether an answer comes within so many milliseconds.
    pub(crate) fn answers_within(&self, milliseconds: u16) -> bool {
        use std::os::fd::AsFd;
        let mut fds = [nix::poll::PollFd::new(self.stream.as_fd(), nix::poll::PollFlags::POLLIN)];
        nix::poll::poll(&mut fds, milliseconds).unwrap() == 1
    }

    pub(crate) fn exit(mut self) {
        self.tell(Op::Exit, 0, 0, 0);
        // The socket closes with the process.
        let _ = (&self.stream).read(&mut [0]);
        if let Some(mut process) = self.process.take() {
            process.wait().unwrap();
        }
    }
}

impl Drop for Child {
    fn drop(&mut self) {
        if let Some(process) = &mut self.process {
            let _ = process.kill();
            let _ = process.wait();
        }
    }
}

/// Linux 6.1.
const MADV_COLLAPSE: libc::c_int = 25;

/// Linux 6.13.
const MADV_GUARD_INSTALL: libc::c_int = 102;

/// Numbers that look random, from a seed.
pub(crate) fn next_random(seed: &mut u64) -> u64 {
    *seed = seed.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let mut z = *seed;
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

pub(crate) fn shuffle(count: u64, mut seed: u64) -> Vec<u64> {
    let mut order: Vec<u64> = (0..count).collect();
    for i in (1..order.len()).rev() {
        let j = usize::try_from(next_random(&mut seed) % (i as u64 + 1)).unwrap();
        order.swap(i, j);
    }
    order
}

/// What [`Op::Shuffled`] answers.
pub(crate) fn shuffled(tags: &[u64], seed: u64) -> Vec<u64> {
    let order = shuffle(tags.len() as u64, seed);
    order.into_iter().map(|i| tags[usize::try_from(i).unwrap()]).collect()
}

/// The child's side: the test `child_process` runs it.
pub(crate) fn main() {
    let Ok(fd) = std::env::var(FD_VARIABLE) else { return };
    // SAFETY: the test left this descriptor for us.
    let stream = unsafe { UnixStream::from_raw_fd(fd.parse().unwrap()) };
    serve(stream, -1);
}

fn serve(stream: UnixStream, mut uffd: RawFd) -> ! {
    loop {
        let mut bytes = [0; 32];
        if (&stream).read_exact(&mut bytes).is_err() {
            end();
        }
        let word = |i: usize| u64::from_ne_bytes(bytes[i * 8..i * 8 + 8].try_into().unwrap());
        let (op, a, b, c) = (OPS[usize::try_from(word(0)).unwrap()], word(1), word(2), word(3));
        let mut answer = Vec::new();
        let mut fd: Option<OwnedFd> = None;
        match op {
            Op::Uffd => {
                uffd = open_uffd();
                // SAFETY: just made; the number stays valid by the duplicate.
                let owned = unsafe { OwnedFd::from_raw_fd(uffd) };
                let copy = owned.try_clone().unwrap();
                fd = Some(owned);
                uffd = std::os::fd::IntoRawFd::into_raw_fd(copy);
            }
            Op::Register => {
                map(a, b);
                register(uffd, a, b);
            }
            Op::Watch => register(uffd, a, b),
            Op::Close => {
                // SAFETY: ours, and not used again.
                drop(unsafe { OwnedFd::from_raw_fd(uffd) });
            }
            Op::Map => map(a, b),
            Op::MapShared => map_shared(a, b, c),
            // SAFETY: the test's own mappings.
            Op::Lock => check(unsafe { libc::mlock(ptr(a).cast(), bytes_of(b)) }),
            // SAFETY: as above.
            Op::Remove => check(unsafe { libc::madvise(ptr(a).cast(), bytes_of(b), libc::MADV_REMOVE) }),
            Op::Collapse => {
                // SAFETY: as above.
                let failed = unsafe { libc::madvise(ptr(a).cast(), bytes_of(b), MADV_COLLAPSE) };
                answer = vec![u64::from(failed == 0)];
            }
            Op::Duplicate => {
                let flags = libc::MREMAP_MAYMOVE | libc::MREMAP_FIXED;
                // SAFETY: addresses that the test chose and nobody else uses.
                let at = unsafe { libc::mremap(ptr(a).cast(), 0, bytes_of(b), flags, ptr(c)) };
                assert_eq!(at.expose_provenance() as u64, c, "{}", std::io::Error::last_os_error());
            }
            Op::Read => answer = (0..b).map(|i| tag(a + i * P)).collect(),
            Op::Shuffled => answer = shuffle(b, c).into_iter().map(|i| tag(a + i * P)).collect(),
            Op::Latency => {
                for i in shuffle(b, c) {
                    let start = std::time::Instant::now();
                    // SAFETY: mapped, as the test says.
                    std::hint::black_box(unsafe { ptr(a + i * P).read_volatile() });
                    answer.push(u64::try_from(start.elapsed().as_nanos()).unwrap());
                }
            }
            Op::Write => {
                for i in 0..512 {
                    // SAFETY: mapped, as the test says.
                    unsafe { ptr(a).add(i).write_volatile(c) };
                }
            }
            // SAFETY: the test's own mappings.
            Op::DontNeed => check(unsafe { libc::madvise(ptr(a).cast(), bytes_of(b), libc::MADV_DONTNEED) }),
            Op::Guard => {
                // SAFETY: as above.
                let failed = unsafe { libc::madvise(ptr(a).cast(), bytes_of(b), MADV_GUARD_INSTALL) };
                answer = vec![u64::from(failed == 0)];
            }
            // SAFETY: as above.
            Op::Huge => check(unsafe { libc::madvise(ptr(a).cast(), bytes_of(b), libc::MADV_HUGEPAGE) }),
            // SAFETY: as above.
            Op::Unmap => check(unsafe { libc::munmap(ptr(a).cast(), bytes_of(b)) }),
            Op::Remap => {
                remap(a, b, c, 0);
                answer = (0..b).map(|i| u64::from(is_mapped(c + i * P))).collect();
            }
            Op::Follow => {
                // It has moved, and the kernel has told of it: it waits until that is read, or for the next request.
                while is_mapped(c) || main_thread() == 'R' {
                    std::hint::spin_loop();
                }
                assert!(remap(a, b, c, 0));
            }
            Op::WipeOnFork => {
                // SAFETY: as above.
                check(unsafe { libc::madvise(ptr(a).cast(), bytes_of(b), libc::MADV_WIPEONFORK) });
            }
            Op::RemapAndKeep => assert!(remap(a, b, c, libc::MREMAP_DONTUNMAP)),
            Op::Fork => {
                let (ours, theirs) = UnixStream::pair().unwrap();
                // SAFETY: the child only serves, which needs nothing that other threads may hold.
                match unsafe { libc::fork() } {
                    0 => {
                        drop(ours);
                        drop(stream);
                        serve(theirs, uffd);
                    }
                    pid => assert!(pid > 0),
                }
                fd = Some(ours.into());
            }
            Op::Thread => {
                let (ours, theirs) = UnixStream::pair().unwrap();
                std::thread::spawn(move || serve(theirs, uffd));
                fd = Some(ours.into());
            }
            Op::Pid => answer = vec![u64::from(std::process::id())],
            Op::Exit => end(),
        }
        let length = (answer.len() as u64).to_ne_bytes();
        let fds: Vec<_> = fd.iter().map(AsRawFd::as_raw_fd).collect();
        let control: Vec<_> = if fds.is_empty() { vec![] } else { vec![ControlMessage::ScmRights(&fds)] };
        sendmsg::<()>(stream.as_raw_fd(), &[IoSlice::new(&length)], &control, MsgFlags::empty(), None)
            .unwrap();
        let bytes: Vec<u8> = answer.iter().flat_map(|w| w.to_ne_bytes()).collect();
        (&stream).write_all(&bytes).unwrap();
    }
}

/// What the main thread of this process does (proc_pid_stat(5)).
fn main_thread() -> char {
    let stat = std::fs::read_to_string("/proc/self/stat").unwrap();
    stat.rsplit_once(") ").and_then(|(_, rest)| rest.chars().next()).unwrap()
}

fn end() -> ! {
    // SAFETY: ends at once.
    unsafe { libc::_exit(0) }
}

fn check(result: libc::c_int) {
    assert_eq!(result, 0, "{}", std::io::Error::last_os_error());
}

fn ptr(addr: u64) -> *mut u64 {
    std::ptr::with_exposed_provenance_mut(usize::try_from(addr).unwrap())
}

fn bytes_of(pages: u64) -> usize {
    usize::try_from(pages * P).unwrap()
}

fn tag(addr: u64) -> u64 {
    // SAFETY: mapped, as the test says.
    let words: Vec<u64> = (0..512).map(|i| unsafe { ptr(addr).add(i).read_volatile() }).collect();
    if words.iter().all(|w| *w == words[0]) { words[0] } else { TORN }
}

fn remap(from: u64, pages: u64, to: u64, flags: libc::c_int) -> bool {
    let flags = flags | libc::MREMAP_MAYMOVE | libc::MREMAP_FIXED;
    let length = bytes_of(pages);
    // SAFETY: addresses that the test chose and nobody else uses.
    let at = unsafe { libc::mremap(ptr(from).cast(), length, length, flags, ptr(to)) };
    at.expose_provenance() as u64 == to
}

fn is_mapped(addr: u64) -> bool {
    let mut present = 0;
    // SAFETY: writes one byte.
    unsafe { libc::mincore(ptr(addr).cast(), bytes_of(1), &raw mut present) == 0 }
}

fn map(addr: u64, pages: u64) {
    // SAFETY: addresses that the test chose and nobody else uses.
    let at = unsafe {
        libc::mmap(
            ptr(addr).cast(),
            bytes_of(pages),
            libc::PROT_READ | libc::PROT_WRITE,
            libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED_NOREPLACE,
            -1,
            0,
        )
    };
    assert_eq!(at.expose_provenance() as u64, addr, "{}", std::io::Error::last_os_error());
}

/// A file of this process, as a word.
pub(crate) fn place(descriptor: &impl AsRawFd) -> u64 {
    let descriptor = u64::try_from(descriptor.as_raw_fd()).unwrap();
    u64::from(std::process::id()) << 32 | descriptor
}

fn map_shared(addr: u64, pages: u64, place: u64) {
    let path = format!("/proc/{}/fd/{}", place >> 32, place & u64::from(u32::MAX));
    let file = std::fs::File::options().read(true).write(true).open(path).unwrap();
    // SAFETY: addresses that the test chose and nobody else uses.
    let at = unsafe {
        libc::mmap(
            ptr(addr).cast(),
            bytes_of(pages),
            libc::PROT_READ | libc::PROT_WRITE,
            libc::MAP_SHARED | libc::MAP_FIXED_NOREPLACE,
            file.as_raw_fd(),
            0,
        )
    };
    assert_eq!(at.expose_provenance() as u64, addr, "{}", std::io::Error::last_os_error());
}

#[repr(C)]
struct Register {
    start: u64,
    len: u64,
    mode: u64,
    ioctls: u64,
}

#[repr(C)]
struct Api {
    api: u64,
    features: u64,
    ioctls: u64,
}

nix::ioctl_readwrite!(uffdio_api, 0xAA, 0x3F, Api);
nix::ioctl_readwrite!(uffdio_register, 0xAA, 0x00, Register);

/// As CRIU does it: with the events FORK, REMAP, REMOVE, UNMAP.
fn open_uffd() -> RawFd {
    // SAFETY: makes a descriptor.
    let fd = unsafe { libc::syscall(libc::SYS_userfaultfd, libc::O_CLOEXEC | libc::O_NONBLOCK) };
    let fd = RawFd::try_from(fd).unwrap();
    assert!(fd >= 0, "userfaultfd: {}", std::io::Error::last_os_error());
    let mut api = Api { api: 0xAA, features: (1 << 1) | (1 << 2) | (1 << 3) | (1 << 6), ioctls: 0 };
    // SAFETY: the structure is the ioctl's.
    unsafe { uffdio_api(fd, &raw mut api) }.unwrap();
    fd
}

fn register(uffd: RawFd, addr: u64, pages: u64) {
    let mut request = Register { start: addr, len: pages * P, mode: 1, ioctls: 0 };
    // SAFETY: the structure is the ioctl's.
    unsafe { uffdio_register(uffd, &raw mut request) }.unwrap();
}
