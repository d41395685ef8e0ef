//! What is told to be an obstacle is what a real CRIU cannot dump; needs root.
#![allow(clippy::unwrap_used)]

use std::ffi::CString;
use std::fs::{self, File};
use std::io::{Read, Write};
use std::net::UdpSocket;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use godwit_criu::obstacles::{self, Obstacle, UnixSockets};
use godwit_criu::{Criu, CriuError, DumpOptions, Memory};
use nix::sys::resource::{Resource, UsageWho, getrlimit, getrusage, setrlimit};
use nix::unistd::{ForkResult, Pid, fork, getpid, getppid, pause};

const ROLE: &str = "GODWIT_OBSTACLES_SUBJECT";
const PATIENCE: Duration = Duration::from_secs(30);
/// How many files a busy server has open.
const MANY: u64 = 20_000;
/// What the subject says.
const READY: &str = "it is ready";

fn criu() -> Criu {
    Criu::new(std::env::var_os("GODWIT_CRIU").map_or("/usr/local/lib/godwit/bin/criu".into(), PathBuf::from))
}

/// No test: the process that the others check and dump.
#[test]
#[ignore = "started by the other tests"]
fn subject() {
    let held = hold(&std::env::var(ROLE).unwrap());
    println!("{READY}");
    std::io::stdout().flush().unwrap();
    loop {
        pause();
        assert!(!held.is_empty());
    }
}

fn call(result: libc::c_long) -> i32 {
    assert!(result >= 0, "{}", std::io::Error::last_os_error());
    i32::try_from(result).unwrap()
}

fn own(descriptor: libc::c_long) -> OwnedFd {
    // SAFETY: it is new, and nobody else's.
    unsafe { OwnedFd::from_raw_fd(call(descriptor)) }
}

/// Makes a child that does something and waits.
fn child(work: impl FnOnce()) {
    let (mut ready, mut tell) = std::io::pipe().unwrap();
    // SAFETY: the child uses what this thread has only.
    match unsafe { fork() }.unwrap() {
        ForkResult::Child => {
            work();
            tell.write_all(b"x").unwrap();
            drop((ready, tell));
            loop {
                pause();
            }
        }
        ForkResult::Parent { .. } => ready.read_exact(&mut [0]).unwrap(),
    }
}

// SAFETY of the calls below: their pointers are to what lives in their frames, or null where that is allowed.
#[allow(clippy::undocumented_unsafe_blocks)]
fn hold(role: &str) -> Vec<OwnedFd> {
    let ring = || {
        let mut parameters = [0_u8; 120];
        own(unsafe { libc::syscall(libc::SYS_io_uring_setup, 4, parameters.as_mut_ptr()) })
    };
    let socket = |domain, kind, protocol| own(unsafe { libc::socket(domain, kind, protocol) }.into());
    let pidfd =
        |pid: Pid, flags: i32| own(unsafe { libc::syscall(libc::SYS_pidfd_open, pid.as_raw(), flags) });
    match role {
        "nothing" => {
            let mut signals: libc::sigset_t = unsafe { std::mem::zeroed() };
            unsafe { libc::sigemptyset(&raw mut signals) };
            let zombie = match unsafe { fork() }.unwrap() {
                ForkResult::Child => unsafe { libc::_exit(0) },
                ForkResult::Parent { child } => child,
            };
            let (a, b) = UnixStream::pair().unwrap();
            // One that waits and can be dumped.
            let path = std::env::temp_dir().join("waits");
            let listener = UnixListener::bind(&path).unwrap();
            let client = UnixStream::connect(path).unwrap();
            vec![
                own(unsafe { libc::eventfd(0, 0) }.into()),
                own(unsafe { libc::epoll_create1(0) }.into()),
                own(unsafe { libc::timerfd_create(libc::CLOCK_MONOTONIC, 0) }.into()),
                own(unsafe { libc::signalfd(-1, &raw const signals, 0) }.into()),
                own(unsafe { libc::inotify_init1(0) }.into()),
                own(unsafe { libc::memfd_create(c"memory".as_ptr(), 0) }.into()),
                pidfd(getpid(), 0),
                pidfd(zombie, 0),
                socket(libc::AF_INET, libc::SOCK_DGRAM, 0),
                socket(libc::AF_INET, libc::SOCK_STREAM, 0),
                (a.into()),
                (b.into()),
                (listener.into()),
                (client.into()),
            ]
        }
        "many" => {
            let (_, most) = getrlimit(Resource::RLIMIT_NOFILE).unwrap();
            setrlimit(Resource::RLIMIT_NOFILE, most, most).unwrap();
            let files = (0..MANY.min(most / 2)).map(|_| UdpSocket::bind("127.0.0.1:0").unwrap().into());
            files.collect()
        }
        "reservation" => {
            let (none, private) = (libc::PROT_NONE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
            // Less than the 16 TiB at which CRIU's count begins anew.
            let at = unsafe { libc::mmap(std::ptr::null_mut(), 15 << 40, none, private, -1, 0) };
            assert_ne!(at, libc::MAP_FAILED);
            vec![File::open("/dev/null").unwrap().into()]
        }
        "ring" => vec![ring()],
        "mapped ring" => {
            let ring = ring();
            let (both, shared) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_SHARED);
            let at = unsafe { libc::mmap(std::ptr::null_mut(), 4096, both, shared, ring.as_raw_fd(), 0) };
            assert_ne!(at, libc::MAP_FAILED);
            vec![File::open("/dev/null").unwrap().into()]
        }
        "queue" => {
            let name = CString::new(format!("/obstacles-{}", getpid())).unwrap();
            let attributes = std::ptr::null_mut::<libc::mq_attr>();
            let flags = libc::O_CREAT | libc::O_RDWR;
            let queue = own(unsafe { libc::mq_open(name.as_ptr(), flags, 0o600, attributes) }.into());
            call(unsafe { libc::mq_unlink(name.as_ptr()) }.into());
            vec![queue]
        }
        "faults" => vec![own(unsafe { libc::syscall(libc::SYS_userfaultfd, 0) })],
        "multipath" => vec![socket(libc::AF_INET, libc::SOCK_STREAM, 262)],
        "virtual" => vec![socket(libc::AF_VSOCK, libc::SOCK_STREAM, 0)],
        "pidfd of another" => vec![pidfd(getppid(), 0)],
        "pidfd of a thread" => vec![pidfd(getpid(), libc::O_EXCL)],
        "cork" => {
            let socket = UdpSocket::bind("127.0.0.1:0").unwrap();
            let on = 1_i32;
            let set =
                unsafe { libc::setsockopt(socket.as_raw_fd(), libc::SOL_UDP, 1, (&raw const on).cast(), 4) };
            call(set.into());
            vec![socket.into()]
        }
        "closed connection" | "connection with data" => {
            let path = std::env::temp_dir().join("listens");
            let listener = UnixListener::bind(&path).unwrap();
            let mut client = UnixStream::connect(path).unwrap();
            if role == "closed connection" {
                return vec![listener.into()];
            }
            client.write_all(b"x").unwrap();
            vec![listener.into(), client.into()]
        }
        "headless" => {
            let child = match unsafe { fork() }.unwrap() {
                ForkResult::Child => {
                    std::thread::spawn(|| {
                        loop {
                            pause();
                        }
                    });
                    // This thread alone.
                    unsafe { libc::syscall(libc::SYS_exit, 0) };
                    unreachable!()
                }
                ForkResult::Parent { child } => child,
            };
            while !fs::read_to_string(format!("/proc/{child}/stat")).unwrap().contains(") Z ") {
                std::thread::yield_now();
            }
            vec![File::open("/dev/null").unwrap().into()]
        }
        "traced" => {
            let subject = getpid();
            child(move || nix::sys::ptrace::seize(subject, nix::sys::ptrace::Options::empty()).unwrap());
            vec![File::open("/dev/null").unwrap().into()]
        }
        "namespace" => {
            child(|| nix::sched::unshare(nix::sched::CloneFlags::CLONE_NEWUTS).unwrap());
            vec![File::open("/dev/null").unwrap().into()]
        }
        "leaderless" => {
            child(|| {
                // What loses its parent becomes the child of this one.
                call(unsafe { libc::prctl(libc::PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) }.into());
                if let ForkResult::Child = unsafe { fork() }.unwrap() {
                    nix::unistd::setsid().unwrap();
                    child(|| ());
                    unsafe { libc::_exit(0) };
                }
                nix::sys::wait::wait().unwrap();
            });
            vec![File::open("/dev/null").unwrap().into()]
        }
        "trap" => {
            let mut signals: libc::sigset_t = unsafe { std::mem::zeroed() };
            unsafe { libc::sigaddset(&raw mut signals, libc::SIGTRAP) };
            unsafe { libc::sigprocmask(libc::SIG_BLOCK, &raw const signals, std::ptr::null_mut()) };
            nix::sys::signal::raise(nix::sys::signal::Signal::SIGTRAP).unwrap();
            vec![File::open("/dev/null").unwrap().into()]
        }
        "large ghost" => {
            let path = std::env::temp_dir().join("ghost");
            let file = File::create(&path).unwrap();
            call(unsafe { libc::fallocate(file.as_raw_fd(), 0, 0, 257 << 20) }.into());
            fs::remove_file(path).unwrap();
            vec![file.into()]
        }
        other => panic!("there is no role {other}"),
    }
}

/// The process and its children; ended when this is dropped.
struct Subject {
    child: Child,
    /// Whether it is to be dumped as by a CRIU without godwit's patches.
    by_stock: bool,
    directory: tempfile::TempDir,
}

impl Subject {
    fn start(role: &str) -> Self {
        let directory = tempfile::tempdir().unwrap();
        let output = directory.path().join("output");
        let stream = File::create(&output).unwrap();
        let mut command = Command::new(std::env::current_exe().unwrap());
        command
            .args(["--exact", "subject", "--ignored", "--nocapture", "--test-threads=1"])
            .env(ROLE, role)
            .env("TMPDIR", directory.path())
            .stdin(Stdio::null())
            .stdout(stream.try_clone().unwrap())
            .stderr(stream);
        // SAFETY: only async-signal-safe calls.
        unsafe {
            command.pre_exec(|| {
                libc::setsid();
                // What the starter of the tests has left open cannot be dumped.
                libc::close_range(3, u32::MAX, libc::CLOSE_RANGE_CLOEXEC.cast_signed());
                Ok(())
            });
        }
        let mut subject = Self { child: command.spawn().unwrap(), by_stock: false, directory };
        let begin = Instant::now();
        loop {
            let said = fs::read_to_string(&output).unwrap();
            if said.contains(READY) {
                return subject;
            }
            assert!(subject.child.try_wait().unwrap().is_none(), "{role}: it ended: {said}");
            assert!(begin.elapsed() < PATIENCE, "{role}: it is not ready: {said}");
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    fn processes(&self) -> Vec<u32> {
        let mut all = vec![self.child.id()];
        let mut at = 0;
        while let Some(pid) = all.get(at) {
            for thread in fs::read_dir(format!("/proc/{pid}/task")).into_iter().flatten().flatten() {
                let children = fs::read_to_string(thread.path().join("children")).unwrap_or_default();
                all.extend(children.split_whitespace().map(|pid| pid.parse::<u32>().unwrap()));
            }
            at += 1;
        }
        all
    }

    fn check(&self) -> Vec<Obstacle> {
        let sockets = UnixSockets::open().unwrap();
        let processes = self.processes();
        let proc = Path::new("/proc");
        let main = self.child.id();
        obstacles::Subject {
            proc,
            main,
            processes: &processes,
            unix: Some(&sockets),
            places: None,
            looks_at_memory: self.by_stock,
        }
        .check()
    }

    async fn dump(&self) -> Result<(), CriuError> {
        let images = self.directory.path().join("images");
        fs::create_dir(&images).unwrap();
        let mut options = DumpOptions::new(self.child.id(), "/", &images, self.directory.path());
        options.memory = Memory::Lazy;
        let criu = if self.by_stock { criu().as_stock() } else { criu() };
        criu.dump(options).await.map(drop)
    }
}

impl Drop for Subject {
    fn drop(&mut self) {
        for pid in self.processes() {
            // SAFETY: a call without pointers.
            unsafe { libc::kill(pid.cast_signed(), libc::SIGKILL) };
        }
        self.child.wait().unwrap();
    }
}

/// Checks a process, and has CRIU try to dump it.
async fn is_obstacle(role: &str, what: &str, why: &str) {
    let subject = Subject::start(role);
    let found = subject.check();
    let sentences = obstacles::sentences(&found);
    assert!(
        matches!(&sentences[..], [one] if one.contains(what) && one.contains(why)),
        "{role}: {what}, {why}: {sentences:?}"
    );
    assert_eq!(
        obstacles::still_there(found.clone(), &subject.check()),
        found,
        "{role}: it is the same again"
    );
    let dumped = subject.dump().await;
    assert!(matches!(dumped, Err(CriuError::Dump { .. })), "{role}: CRIU can: {dumped:?}");
}

#[tokio::test]
async fn what_criu_can_dump_is_no_obstacle() {
    let subject = Subject::start("nothing");
    assert_eq!(subject.check(), []);
    subject.dump().await.unwrap();
}

#[tokio::test]
async fn kernel_objects_that_criu_cannot_dump_are_obstacles() {
    is_obstacle("ring", "has an io_uring open (descriptor 3)", "configuration").await;
    is_obstacle("mapped ring", "has an io_uring mapped", "configuration").await;
    is_obstacle("queue", "has the POSIX message queue /obstacles-", "mq_unlink").await;
    is_obstacle("faults", "has a userfaultfd open", "which CRIU cannot dump").await;
    is_obstacle("pidfd of another", "has a pidfd of process", "of the service").await;
    is_obstacle("pidfd of a thread", "has a pidfd of a thread", "whole processes").await;
    is_obstacle("large ghost", "/ghost of 257 MiB", "does not move along").await;
}

#[tokio::test]
async fn sockets_that_criu_cannot_dump_are_obstacles() {
    is_obstacle("multipath", "protocol MPTCP", "GODEBUG").await;
    is_obstacle("virtual", "protocol AF_VSOCK", "sockets of that kind").await;
    is_obstacle("cork", "a corked UDP socket", "try again").await;
    is_obstacle("closed connection", "/listens, whose other end has closed", "try again").await;
    is_obstacle("connection with data", "/listens, and carries data", "try again").await;
}

#[tokio::test]
async fn processes_in_states_that_criu_cannot_dump_are_obstacles() {
    is_obstacle("headless", "although its main thread has ended", "keep its main thread").await;
    is_obstacle("traced", "is traced by process", "end the debugger").await;
    is_obstacle("namespace", "has a UTS namespace of its own", "sandbox").await;
    is_obstacle("trap", "has a SIGTRAP waiting", "try again").await;
}

/// A dump has it; it is the restore that fails.
#[test]
fn a_process_in_a_session_that_cannot_be_made_again_is_an_obstacle() {
    let subject = Subject::start("leaderless");
    let sentences = obstacles::sentences(&subject.check());
    assert!(matches!(&sentences[..], [one] if one.contains("lives on in session")), "{sentences:?}");
}

/// On a machine with less than 60 GiB, whose kernel judges by that.
#[tokio::test]
async fn a_reservation_is_an_obstacle_where_criu_looks_at_memory_and_has_too_little() {
    let subject = Subject::start("reservation");
    assert_eq!(subject.check(), []);
    subject.dump().await.unwrap();
    let mut subject = Subject::start("reservation");
    subject.by_stock = true;
    let sentences = obstacles::sentences(&subject.check());
    let dumped = subject.dump().await;
    assert_eq!(sentences.is_empty(), dumped.is_ok(), "{sentences:?}, {dumped:?}");
    assert!(
        sentences.iter().all(|it| it.contains("has reserved 1536") && it.contains("setup-criu")),
        "{sentences:?}"
    );
}

/// As many open files as a busy server has.
#[test]
fn a_check_of_many_open_files_takes_no_seconds() {
    let subject = Subject::start("many");
    // Of the processor: a busy machine does not count.
    let spent = || {
        let usage = getrusage(UsageWho::RUSAGE_THREAD).unwrap();
        usage.user_time() + usage.system_time()
    };
    let before = spent();
    let found = subject.check();
    let took = spent() - before;
    assert_eq!(found, []);
    assert!(took.tv_sec() < 3, "{took}");
}
