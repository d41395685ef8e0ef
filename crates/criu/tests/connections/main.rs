//! Connections and datagrams in a dump by a real CRIU, and in a restore; needs root.
//!
//! What takes CRIU long with thousands of connections is counted, not timed: comparisons of an epoll's
//! targets, and images.

#![allow(clippy::unwrap_used)]

mod subject;

use std::cell::Cell;
use std::fs::{self, File};
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::{Command, Stdio};

use godwit_criu::Criu;

const ROLE: &str = "GODWIT_CONNECTIONS_SUBJECT";
const CONNECTIONS: usize = 700;
/// `KCMP_EPOLL_TFD` of kcmp(2).
const EPOLL_TARGET: u32 = 7;

fn criu() -> Criu {
    Criu::new(std::env::var_os("GODWIT_CRIU").map_or("/usr/local/lib/godwit/bin/criu".into(), PathBuf::from))
}

/// No test: the process that the others dump.
#[test]
#[ignore = "started by the other tests"]
fn subject() {
    let role = std::env::var(ROLE).unwrap();
    subject::run(CONNECTIONS, role == "with datagrams");
}

/// A process with connections, the namespace that they are in, and where its images go.
struct Subject {
    pid: u32,
    /// Whether it is there: else somebody else may have its number.
    is_there: Cell<bool>,
    network: File,
    directory: tempfile::TempDir,
}

impl Subject {
    /// Starts it, and returns when it has all its connections.
    fn start(role: &str) -> Self {
        let directory = tempfile::tempdir().unwrap();
        fs::create_dir(directory.path().join("images")).unwrap();
        // SAFETY: a call without pointers. What is restored becomes a child of this process.
        unsafe { libc::prctl(libc::PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) };
        let output = File::create(directory.path().join("output")).unwrap();
        let mut command = Command::new(std::env::current_exe().unwrap());
        command
            .args(["--exact", "subject", "--ignored", "--nocapture", "--test-threads=1"])
            .env(ROLE, role)
            .env("RUST_BACKTRACE", "0")
            .stdin(Stdio::null())
            .stdout(output.try_clone().unwrap())
            .stderr(output);
        // SAFETY: only async-signal-safe calls. The signal waits until it is asked for.
        unsafe {
            command.pre_exec(|| {
                let mut signals = std::mem::zeroed();
                libc::sigemptyset(&raw mut signals);
                libc::sigaddset(&raw mut signals, libc::SIGUSR1);
                libc::sigprocmask(libc::SIG_BLOCK, &raw const signals, std::ptr::null_mut());
                libc::setsid();
                // Nobody else has its ports, so that they are free when it is restored.
                if libc::unshare(libc::CLONE_NEWNET) != 0 {
                    return Err(io::Error::last_os_error());
                }
                // What the starter of the tests has left open cannot be dumped.
                libc::close_range(3, u32::MAX, libc::CLOSE_RANGE_CLOEXEC.cast_signed());
                Ok(())
            });
        }
        let pid = command.spawn().unwrap().id();
        let mut status = 0;
        // SAFETY: the child of this process; the status lives in this frame.
        unsafe { libc::waitpid(pid.cast_signed(), &raw mut status, libc::WUNTRACED) };
        let said = fs::read_to_string(directory.path().join("output")).unwrap();
        assert!(libc::WIFSTOPPED(status), "it ended: {said}");
        // SAFETY: a call without pointers.
        unsafe { libc::kill(pid.cast_signed(), libc::SIGCONT) };
        let network = File::open(format!("/proc/{pid}/ns/net")).unwrap();
        Self { pid, is_there: Cell::new(true), network, directory }
    }

    /// CRIU in the process's network namespace, to which nothing else of it is to be restored.
    fn criu(&self, verb: &str, options: &[&str]) -> Command {
        let mut command = Command::new(criu().path());
        command.arg(verb).arg("--images-dir").arg(self.directory.path().join("images"));
        command.args(["--tcp-established", "--network-lock", "skip", "--manage-cgroups=ignore"]);
        command.args(["--file-locks", "--log-file"]).arg(format!("{verb}.log")).args(options);
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
        let network = self.network.as_raw_fd();
        // SAFETY: a system call on a descriptor that is open until the command has ended.
        unsafe {
            command.pre_exec(move || {
                // It has all connections open for a while.
                let mut files = std::mem::zeroed();
                libc::getrlimit(libc::RLIMIT_NOFILE, &raw mut files);
                files.rlim_cur = files.rlim_max;
                libc::setrlimit(libc::RLIMIT_NOFILE, &raw const files);
                match libc::setns(network, libc::CLONE_NEWNET) {
                    0 => Ok(()),
                    _ => Err(io::Error::last_os_error()),
                }
            });
        }
        command
    }

    fn ends_well(&self, mut command: Command, verb: &str) {
        let status = command.status().unwrap();
        let log = fs::read_to_string(self.directory.path().join("images").join(format!("{verb}.log")));
        assert!(status.success(), "{}", log.unwrap_or_default());
    }

    /// Dumps and ends it.
    fn dump(&self, options: &[&str], may_compare: bool) {
        let mut command = self.criu("dump", options);
        let pid = self.pid.to_string();
        command.args(["--tree", &pid]);
        if !may_compare {
            refuse_comparisons(&mut command, self.pid);
        }
        self.ends_well(command, "dump");
        self.reap();
    }

    /// Waits for its end; its status.
    fn reap(&self) -> i32 {
        let mut status = -1;
        // SAFETY: a child of this process; the status lives in this frame.
        unsafe { libc::waitpid(self.pid.cast_signed(), &raw mut status, 0) };
        self.is_there.set(false);
        status
    }

    /// Images of a connection each.
    fn streams(&self) -> usize {
        let names = fs::read_dir(self.directory.path().join("images")).unwrap();
        let names = names.map(|entry| entry.unwrap().file_name().to_string_lossy().into_owned());
        names.filter(|name| name.starts_with("tcp-stream-")).count()
    }

    /// Restores it and asks it whether all is as it was.
    fn restore(&self) {
        self.ends_well(self.criu("restore", &["--restore-detached"]), "restore");
        self.is_there.set(true);
        // SAFETY: a call without pointers.
        unsafe { libc::kill(self.pid.cast_signed(), libc::SIGUSR1) };
        let status = self.reap();
        assert_eq!(status, 0, "{}", fs::read_to_string(self.directory.path().join("output")).unwrap());
    }
}

impl Drop for Subject {
    fn drop(&mut self) {
        // After a test that failed.
        if self.is_there.get() {
            // SAFETY: a call without pointers.
            unsafe { libc::kill(self.pid.cast_signed(), libc::SIGKILL) };
            self.reap();
        }
    }
}

/// Has the kernel refuse to compare targets of an epoll of this process. (CRIU tries out on itself whether
/// there is such a comparison.)
fn refuse_comparisons(command: &mut Command, pid: u32) {
    let statement =
        |code: u32, k: u32| libc::sock_filter { code: u16::try_from(code).unwrap(), jt: 0, jf: 0, k };
    let unless = |k: u32, skip: u8| libc::sock_filter {
        code: u16::try_from(libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K).unwrap(),
        jt: 0,
        jf: skip,
        k,
    };
    // `struct seccomp_data`: the number, the architecture, the address of the call, then six arguments.
    let load = |offset: u32| statement(libc::BPF_LD | libc::BPF_W | libc::BPF_ABS, offset);
    let argument = |number: u32| load(16 + 8 * number);
    let ret = |what: u32| statement(libc::BPF_RET | libc::BPF_K, what);
    let filter = [
        load(0),
        unless(u32::try_from(libc::SYS_kcmp).unwrap(), 5),
        argument(2),
        unless(EPOLL_TARGET, 3),
        argument(0),
        unless(pid, 1),
        ret(libc::SECCOMP_RET_ERRNO | libc::EPERM.cast_unsigned()),
        ret(libc::SECCOMP_RET_ALLOW),
    ];
    // SAFETY: a system call; the program lives in the closure.
    unsafe {
        command.pre_exec(move || {
            let mut filter = filter;
            let program = libc::sock_fprog { len: 8, filter: filter.as_mut_ptr() };
            match libc::prctl(libc::PR_SET_SECCOMP, libc::SECCOMP_MODE_FILTER, &raw const program) {
                0 => Ok(()),
                _ => Err(io::Error::last_os_error()),
            }
        });
    }
}

/// Whether this CRIU has our patches.
async fn is_patched() -> bool {
    let patched = criu().tcp_inline().await.unwrap();
    if !patched {
        eprintln!("skipped: this CRIU has no --tcp-inline");
    }
    patched
}

#[tokio::test]
async fn sockets_of_an_epoll_are_known_without_a_comparison() {
    if is_patched().await {
        let subject = Subject::start("with connections");
        subject.dump(&[], false);
        assert_eq!(subject.streams(), 2 * CONNECTIONS);
        subject.restore();
    }
}

#[tokio::test]
async fn connections_are_in_the_image_of_the_files_but_for_those_with_much_in_their_queues() {
    if is_patched().await {
        let subject = Subject::start("with connections");
        subject.dump(&["--tcp-inline"], false);
        // The end that has sent it has it, too, as long as the other has not acknowledged it.
        let streams = subject.streams();
        assert!(matches!(streams, 1 | 2), "{streams}");
        subject.restore();
    }
}

#[tokio::test]
async fn datagrams_that_nobody_has_read_come_back_in_their_order() {
    if is_patched().await {
        let subject = Subject::start("with datagrams");
        subject.dump(&[], true);
        subject.restore();
    }
}

#[tokio::test]
async fn connections_have_images_of_their_own_where_nothing_else_is_asked_for() {
    let subject = Subject::start("with connections");
    subject.dump(&[], true);
    assert_eq!(subject.streams(), 2 * CONNECTIONS);
    subject.restore();
}
