//! The processes of the services: small ones that hold a known pattern, and can be asked whether they still do.
//!
//! They are forked by one process, this test binary run again, so that all of them are alike: what one has at an
//! address another can take. Each has a PID namespace of its own and is number 1 in it, as in a container; a restored
//! one has the number of the one that was dumped.
//!
//! ```text
//! test ── a socket ──▶ nursery ── clone ──▶ process
//!   └──────────── [operation, argument] ──────▶ │
//!      ◀────────── [answer] + a descriptor ─────┘
//! ```

use std::fs::File;
use std::io::{IoSlice, IoSliceMut, Read, Write};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::os::unix::fs::FileExt;
use std::os::unix::net::UnixStream;
use std::process::{Child, Command};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{LazyLock, Mutex};
use std::time::{Duration, Instant};

use godwit_memory::PAGE_SIZE;
use godwit_memory::process::Process as Handle;
use nix::poll::{PollFd, PollFlags, poll};
use nix::sys::signal::{Signal, kill};
use nix::sys::socket::{ControlMessage, ControlMessageOwned, MsgFlags, recvmsg, sendmsg};
use nix::unistd::Pid;

/// Where the pattern is: far from everything that the kernel chooses.
pub(super) const BASE: u64 = 0x1000_0000_0000;

/// Pages of the pattern's area. Of the last ones nothing was ever written.
pub(super) const PAGES: u64 = 48;
const WRITTEN: u64 = 40;

/// How long a process may take to do as it is told. It is reached only when something is broken.
const PATIENCE: Duration = Duration::from_secs(20);

/// The service's pattern.
pub(super) const SEED: u64 = 7;

const VARIABLE: &str = "GODWIT_TEST_NURSERY_FD";

#[derive(Debug, Clone, Copy)]
#[repr(u64)]
enum Op {
    /// Writes the pattern of a seed.
    Fill,
    /// Reads the pattern of a seed; the answer is the first page that differs, plus one.
    Check,
    /// Has the kernel ask for the pages of the area; the userfaultfd is the answer's descriptor.
    Lack,
}

/// What a page holds.
fn word(seed: u64, page: u64, at: u64) -> u64 {
    // Some pages are zero, and some are alike.
    match page % 8 {
        _ if page >= WRITTEN => 0,
        3 => 0,
        5 => seed,
        _ => (seed << 32 | page << 16 | at) ^ at.wrapping_mul(0x9e37_79b9_7f4a_7c15),
    }
}

/// A process of a service.
#[derive(Debug)]
pub(super) struct Process {
    pid: i32,
    space: u32,
    handle: Handle,
    socket: Mutex<UnixStream>,
    /// It is about to end: until the kernel has come to it, it is not seen to be stopped any more.
    ends: AtomicBool,
}

impl Process {
    /// A new one, without pattern.
    pub(super) fn new() -> Self {
        static NURSERY: LazyLock<Mutex<(UnixStream, Child)>> = LazyLock::new(|| Mutex::new(nursery()));
        let (ours, theirs) = UnixStream::pair().unwrap();
        let lock = NURSERY.lock().unwrap();
        let nursery = &lock.0;
        let fds = [theirs.as_raw_fd()];
        let control = [ControlMessage::ScmRights(&fds)];
        sendmsg::<()>(nursery.as_raw_fd(), &[IoSlice::new(&[0])], &control, MsgFlags::empty(), None).unwrap();
        let mut pid = [0; 4];
        (&*nursery).read_exact(&mut pid).unwrap();
        drop(lock);
        let pid = i32::from_ne_bytes(pid);
        assert!(pid > 0, "a process cannot be forked: {}", std::io::Error::from_raw_os_error(-pid));
        ours.set_read_timeout(Some(PATIENCE)).unwrap();
        let handle = Handle::open(pid).unwrap();
        Self { pid, space: handle.space(), handle, socket: Mutex::new(ours), ends: AtomicBool::new(false) }
    }

    /// In the node's PID namespace.
    pub(super) fn pid(&self) -> u32 {
        u32::try_from(self.pid).unwrap()
    }

    /// In its own.
    pub(super) fn space(&self) -> u32 {
        self.space
    }

    pub(super) fn handle(&self) -> &Handle {
        &self.handle
    }

    /// Writes the pattern.
    pub(super) fn fill(&self, seed: u64) {
        self.ask(Op::Fill, seed).unwrap();
    }

    /// What is wrong with its pattern, if anything is; it reads all of it. It has to run, and one that is killed
    /// meanwhile has nothing wrong.
    pub(super) fn differs(&self, seed: u64) -> Option<String> {
        match self.ask(Op::Check, seed) {
            Ok((0, _)) => None,
            Ok((page, _)) => Some(format!("page {} of its pattern is not what it was", page - 1)),
            Err(_) if self.handle.has_ended() => None,
            Err(error) => Some(format!("its process does not answer: {error}")),
        }
    }

    /// It lacks its pages from now on: the userfaultfd by which they come. None, and the process ends, where the kernel
    /// gives it none.
    pub(super) fn lack(&self) -> Option<OwnedFd> {
        self.ask(Op::Lack, 0).ok()?.1
    }

    /// Puts a page into it.
    pub(super) fn put(&self, address: u64, bytes: &[u8]) {
        let path = format!("/proc/{}/mem", self.pid);
        File::options().write(true).open(path).unwrap().write_all_at(bytes, address).unwrap();
    }

    fn ask(&self, op: Op, argument: u64) -> std::io::Result<(u64, Option<OwnedFd>)> {
        let socket = self.socket.lock().unwrap();
        let words: Vec<u8> = [op as u64, argument].iter().flat_map(|word| word.to_ne_bytes()).collect();
        (&*socket).write_all(&words)?;
        let mut answer = [0; 8];
        let mut slices = [IoSliceMut::new(&mut answer)];
        let mut control = nix::cmsg_space!(RawFd);
        let flags = MsgFlags::MSG_CMSG_CLOEXEC | MsgFlags::MSG_WAITALL;
        let message = recvmsg::<()>(socket.as_raw_fd(), &mut slices, Some(&mut control), flags)?;
        if message.bytes != 8 {
            return Err(std::io::ErrorKind::UnexpectedEof.into());
        }
        let mut fd = None;
        for control in message.cmsgs().unwrap() {
            if let ControlMessageOwned::ScmRights(fds) = control {
                // SAFETY: just received.
                fd = Some(unsafe { OwnedFd::from_raw_fd(fds[0]) });
            }
        }
        Ok((u64::from_ne_bytes(answer), fd))
    }

    /// Stops it.
    pub(super) fn stop(&self) {
        self.signal(Signal::SIGSTOP);
        let begun = Instant::now();
        while self.runs() {
            assert!(begun.elapsed() < PATIENCE, "process {} does not stop", self.pid);
            std::thread::yield_now(); // the kernel tells it to the parent only
        }
    }

    /// Lets it run.
    pub(super) fn go_on(&self) {
        self.signal(Signal::SIGCONT);
    }

    /// Ends it.
    pub(super) fn kill(&self) {
        self.ends.store(true, Ordering::SeqCst);
        self.signal(Signal::SIGKILL);
        let mut ended = [PollFd::new(self.handle.pidfd(), PollFlags::POLLIN)];
        assert_eq!(poll(&mut ended, 20_000_u16), Ok(1), "process {} does not end", self.pid);
    }

    fn signal(&self, signal: Signal) {
        if !self.handle.has_ended() {
            kill(Pid::from_raw(self.pid), signal).unwrap();
        }
    }

    /// Whether it lives and is not stopped.
    pub(super) fn runs(&self) -> bool {
        let stat = std::fs::read_to_string(format!("/proc/{}/stat", self.pid)).unwrap_or_default();
        let state = stat.rsplit_once(')').and_then(|(_, rest)| rest.trim_start().chars().next());
        state.is_some_and(|state| !"TtZXx".contains(state)) && !self.ends.load(Ordering::SeqCst)
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        self.kill();
    }
}

/// Starts the process that forks the others. It ends with this one.
fn nursery() -> (UnixStream, Child) {
    let (ours, theirs) = UnixStream::pair().unwrap();
    nix::fcntl::fcntl(&theirs, nix::fcntl::FcntlArg::F_SETFD(nix::fcntl::FdFlag::empty())).unwrap();
    let child = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "loopback::process::nursery_process", "--ignored", "--nocapture"])
        .env(VARIABLE, theirs.as_raw_fd().to_string())
        .stdin(std::process::Stdio::null())
        .stdout(std::process::Stdio::null())
        .spawn()
        .unwrap();
    (ours, child)
}

/// Not a test: forks processes until the test has ended.
#[test]
#[ignore = "run by other tests"]
fn nursery_process() {
    let Ok(fd) = std::env::var(VARIABLE) else { return };
    // SAFETY: the test left this descriptor for us.
    let test = unsafe { UnixStream::from_raw_fd(fd.parse().unwrap()) };
    // SAFETY: an address that nobody else uses; nothing is there yet.
    let area = unsafe {
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED_NOREPLACE;
        libc::mmap(at(0).cast(), bytes(), libc::PROT_READ | libc::PROT_WRITE, flags, -1, 0)
    };
    assert_eq!(area.expose_provenance() as u64, BASE);
    // SAFETY: nothing runs at a child's end; nobody waits for one.
    unsafe { libc::signal(libc::SIGCHLD, libc::SIG_IGN) };
    let namespaces = match nix::unistd::geteuid().is_root() {
        true => libc::CLONE_NEWPID,
        // Where that is not allowed, too, the processes have none of their own.
        false => libc::CLONE_NEWPID | libc::CLONE_NEWUSER,
    };
    loop {
        let (mut byte, mut control) = ([0], nix::cmsg_space!(RawFd));
        let mut slices = [IoSliceMut::new(&mut byte)];
        let flags = MsgFlags::MSG_CMSG_CLOEXEC;
        let Ok(message) = recvmsg::<()>(test.as_raw_fd(), &mut slices, Some(&mut control), flags) else {
            end()
        };
        let Some(ControlMessageOwned::ScmRights(fds)) = message.cmsgs().unwrap().next() else { end() };
        // SAFETY: just received.
        let socket = unsafe { UnixStream::from_raw_fd(fds[0]) };
        let pid = match clone(namespaces) {
            Err(libc::EPERM | libc::ENOSPC) => clone(0),
            other => other,
        };
        match pid {
            Ok(0) => {
                drop(test);
                // SAFETY: sets a number of this process.
                unsafe { libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL) };
                serve(&socket);
            }
            Ok(pid) => (&test).write_all(&pid.to_ne_bytes()).unwrap(),
            Err(errno) => (&test).write_all(&(-errno).to_ne_bytes()).unwrap(),
        }
    }
}

fn clone(flags: i32) -> Result<i32, i32> {
    let flags = libc::c_long::from(flags | libc::SIGCHLD);
    // SAFETY: without CLONE_VM this is fork(2). The only other thread is the test harness's, which waits; the child
    // needs nothing that it may hold.
    match unsafe { libc::syscall(libc::SYS_clone, flags, 0, 0, 0, 0) } {
        -1 => Err(std::io::Error::last_os_error().raw_os_error().unwrap()),
        pid => Ok(i32::try_from(pid).unwrap()),
    }
}

/// A process's life.
fn serve(mut socket: &UnixStream) -> ! {
    loop {
        let mut words = [0; 16];
        if socket.read_exact(&mut words).is_err() {
            end();
        }
        let word_at = |i: usize| u64::from_ne_bytes(words[i * 8..i * 8 + 8].try_into().unwrap());
        let seed = word_at(1);
        let (mut answer, mut fd) = (0, None);
        match word_at(0) {
            op if op == Op::Fill as u64 => fill_all(seed),
            op if op == Op::Check as u64 => answer = first_wrong(seed),
            _ => fd = Some(register()),
        }
        let fds: Vec<_> = fd.iter().map(AsRawFd::as_raw_fd).collect();
        let control: Vec<_> = if fds.is_empty() { vec![] } else { vec![ControlMessage::ScmRights(&fds)] };
        let bytes = answer.to_ne_bytes();
        if sendmsg::<()>(socket.as_raw_fd(), &[IoSlice::new(&bytes)], &control, MsgFlags::empty(), None)
            .is_err()
        {
            end();
        }
    }
}

fn end() -> ! {
    // SAFETY: ends at once.
    unsafe { libc::_exit(0) }
}

fn bytes() -> usize {
    usize::try_from(PAGES * PAGE_SIZE).unwrap()
}

/// A page of the area.
fn at(page: u64) -> *mut u64 {
    std::ptr::with_exposed_provenance_mut(usize::try_from(BASE + page * PAGE_SIZE).unwrap())
}

fn fill_all(seed: u64) {
    for page in 0..WRITTEN {
        for i in 0..512 {
            // SAFETY: mapped above.
            unsafe { at(page).add(i).write_volatile(word(seed, page, i as u64)) };
        }
    }
}

fn first_wrong(seed: u64) -> u64 {
    // From the end, so that pages are not wanted in the order in which they come.
    for page in (0..PAGES).rev() {
        for i in 0..512 {
            // SAFETY: mapped above.
            if unsafe { at(page).add(i).read_volatile() } != word(seed, page, i as u64) {
                return page + 1;
            }
        }
    }
    0
}

#[repr(C)]
struct Api {
    api: u64,
    features: u64,
    ioctls: u64,
}

#[repr(C)]
struct Register {
    start: u64,
    len: u64,
    mode: u64,
    ioctls: u64,
}

nix::ioctl_readwrite!(uffdio_api, 0xAA, 0x3F, Api);
nix::ioctl_readwrite!(uffdio_register, 0xAA, 0x00, Register);

/// `UFFD_USER_MODE_ONLY`: what anybody may make.
const USER_MODE_ONLY: i32 = 1;

/// A userfaultfd of the area, as CRIU makes it, but for forks, of which only root may be told.
fn register() -> OwnedFd {
    let flags = libc::O_CLOEXEC | libc::O_NONBLOCK | USER_MODE_ONLY;
    // SAFETY: makes a descriptor.
    let fd = unsafe { libc::syscall(libc::SYS_userfaultfd, flags) };
    let fd = RawFd::try_from(fd).unwrap();
    if fd < 0 {
        end();
    }
    // SAFETY: just made.
    let owned = unsafe { OwnedFd::from_raw_fd(fd) };
    let mut api = Api { api: 0xAA, features: (1 << 2) | (1 << 3) | (1 << 6), ioctls: 0 };
    // SAFETY: the structure is the ioctl's.
    unsafe { uffdio_api(fd, &raw mut api) }.unwrap();
    let mut request = Register { start: BASE, len: PAGES * PAGE_SIZE, mode: 1, ioctls: 0 };
    // SAFETY: the structure is the ioctl's.
    unsafe { uffdio_register(fd, &raw mut request) }.unwrap();
    owned
}

#[test]
fn a_pattern_is_told_from_another_one() {
    let (one, other) = (Process::new(), Process::new());
    one.fill(7);
    other.fill(8);
    assert_eq!((one.differs(7), other.differs(8)), (None, None));
    assert!(one.differs(8).is_some());
    one.stop();
    assert!(!one.runs() && other.runs());
    one.go_on();
    assert_eq!(one.differs(7), None);
    other.kill();
    assert!(!other.runs());
}
