//! The life of the shim: lock, pipes, the engine's command, the loop, the exit record.

use std::collections::HashMap;
use std::fs::File;
use std::io::Write;
use std::os::fd::{AsFd, AsRawFd, FromRawFd, IntoRawFd, OwnedFd, RawFd};
use std::os::unix::fs::OpenOptionsExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::signal::{SigSet, Signal};
use nix::sys::signalfd::{SfdFlags, SignalFd};
use nix::sys::wait::{WaitPidFlag, WaitStatus, waitpid};
use nix::unistd::Pid;

use crate::Arguments;
use crate::log::{Log, now_ns};
use crate::pump::Stream;

/// How long the beginning of a line waits for its end before it is logged, in milliseconds.
const LINE_WAIT_MS: u16 = 100;

/// How long the pipes may stay open after the main process has ended. They close with the PID
/// namespace's last process; only a process that was given them outside could keep them.
const DRAIN_LIMIT: Duration = Duration::from_secs(2);

/// Runs the command and stays until the container has ended. The error is a sentence for the
/// status line; after the status line has been written there are no errors any more.
pub(crate) fn supervise(arguments: &Arguments) -> Result<(), String> {
    take_lock(arguments.lock_fd)?;
    let signals = take_signals()?;
    nix::sys::prctl::set_child_subreaper(true)
        .map_err(|errno| format!("the shim cannot become a subreaper: {errno}"))?;
    let mut log = Log::open(&arguments.log, arguments.log_max_bytes)
        .map_err(|error| format!("the log {} cannot be opened: {error}", arguments.log.display()))?;
    let pipe_error = |error| format!("the shim cannot make a pipe: {error}");
    let (stdout, container_stdout) = Stream::new("stdout").map_err(pipe_error)?;
    let (stderr, container_stderr) = Stream::new("stderr").map_err(pipe_error)?;

    write_streams(&arguments.directory, [&container_stdout, &container_stderr])
        .map_err(|error| format!("the shim cannot note the pipes of the container: {error}"))?;

    let engine = start(arguments, container_stdout, container_stderr)?;
    let settled = arguments.directory.join("log.settled");
    let mut shim = Shim { signals, streams: [stdout, stderr], settled, ended: HashMap::new() };

    // Until the engine's command has ended its children may be anybody's; then the PID file says
    // which one is the container.
    let status = loop {
        if let Some(status) = shim.ended.remove(&engine) {
            break status;
        }
        shim.turn(&mut log);
    };
    if status != 0 {
        for stream in &mut shim.streams {
            stream.pump(&mut log);
            stream.flush(&mut log);
        }
        return Err(format!("it ended with status {status}"));
    }
    let main = read_pid(&arguments.directory.join("init.pid"))?;
    report(&serde_json::json!({ "pid": main.as_raw() }));
    protect_from_out_of_memory();

    // Other children are strangers by now: their status is of no interest.
    let code = loop {
        if let Some(code) = shim.ended.remove(&main) {
            break code;
        }
        shim.ended.clear();
        shim.turn(&mut log);
    };
    // What the main process wrote is in the pipes: log it before anybody is told of the end.
    let drained = Instant::now();
    for stream in &mut shim.streams {
        while stream.pump(&mut log) > 0 && drained.elapsed() < DRAIN_LIMIT {}
    }
    write_exit_record(&arguments.directory, code);
    while shim.streams.iter().any(|stream| stream.pipe().is_some()) && drained.elapsed() < DRAIN_LIMIT {
        shim.turn(&mut log);
    }
    for stream in &mut shim.streams {
        stream.flush(&mut log);
    }
    Ok(())
}

/// Writes the status line of a failure.
pub(crate) fn report_error(reason: &str) {
    report(&serde_json::json!({ "error": reason }));
}

/// Writes the status line and closes standard output and standard error for good.
fn report(status: &serde_json::Value) {
    // The daemon may be gone; the container lives on all the same.
    let _ = writeln!(std::io::stdout(), "{status}");
    if let Ok(null) = File::options().read(true).write(true).open("/dev/null") {
        let _ = nix::unistd::dup2_stdout(&null);
        let _ = nix::unistd::dup2_stderr(&null);
    }
}

struct Shim {
    signals: SignalFd,
    streams: [Stream; 2],
    /// Where those wait who have asked for a complete log.
    settled: PathBuf,
    /// Exit codes of children that were reaped and not asked for yet.
    ended: HashMap<Pid, i32>,
}

impl Shim {
    /// Waits for output or for a child's end, and handles all there is.
    fn turn(&mut self, log: &mut Log) {
        let waits = self.streams.iter().any(Stream::has_partial_line);
        let timeout = if waits { PollTimeout::from(LINE_WAIT_MS) } else { PollTimeout::NONE };
        let mut fds = vec![PollFd::new(self.signals.as_fd(), PollFlags::POLLIN)];
        fds.extend(self.streams.iter().filter_map(|s| Some(PollFd::new(s.pipe()?, PollFlags::POLLIN))));
        let ready = poll(&mut fds, timeout);
        if ready == Ok(0) {
            for stream in &mut self.streams {
                stream.flush(log);
            }
            return;
        }
        for stream in &mut self.streams {
            stream.pump(log);
        }
        let mut asked = false;
        while let Ok(Some(signal)) = self.signals.read_signal() {
            asked |= i32::try_from(signal.ssi_signo) == Ok(Signal::SIGUSR1 as i32);
        }
        self.reap();
        if asked {
            self.settle(log);
        }
    }

    /// Logs all there is, and says so to whoever asked for it.
    fn settle(&mut self, log: &mut Log) {
        for stream in &mut self.streams {
            stream.pump_dry(log);
            stream.flush(log);
        }
        let mut answer = File::options();
        answer.write(true).custom_flags(libc::O_NONBLOCK | libc::O_NOFOLLOW);
        // Who asked may have gone.
        let _ = answer.open(&self.settled).and_then(|mut answer| answer.write_all(b"\n"));
    }

    fn reap(&mut self) {
        loop {
            match waitpid(Pid::from_raw(-1), Some(WaitPidFlag::WNOHANG)) {
                Ok(WaitStatus::Exited(pid, code)) => self.ended.insert(pid, code),
                Ok(WaitStatus::Signaled(pid, signal, _)) => self.ended.insert(pid, 128 + signal as i32),
                Ok(WaitStatus::StillAlive) | Err(_) => break,
                Ok(_) => None,
            };
        }
    }
}

/// Writes `streams.json`: the names of the container's output pipes, which a process of it may have
/// under any number (a shell that redirects exchanges its descriptors for a moment).
fn write_streams(directory: &Path, pipes: [&OwnedFd; 2]) -> std::io::Result<()> {
    let name = |pipe: &OwnedFd| std::fs::read_link(format!("/proc/self/fd/{}", pipe.as_raw_fd()));
    let [stdout, stderr] = pipes;
    let names = serde_json::json!([name(stdout)?, name(stderr)?]);
    std::fs::write(directory.join("streams.json"), format!("{names}\n"))
}

/// Starts the engine's command with the container's streams as its own.
fn start(arguments: &Arguments, stdout: OwnedFd, stderr: OwnedFd) -> Result<Pid, String> {
    let (program, words) = arguments.command.split_first().ok_or("there is no command")?;
    let mut command = Command::new(program);
    command.args(words).stdin(Stdio::null()).stdout(stdout).stderr(stderr);
    // A child inherits the mask, and so would every process of the container: signals blocked for
    // good, and a SIGCONT that stays pending and that CRIU cannot restore.
    let unblock = || SigSet::empty().thread_set_mask().map_err(std::io::Error::from);
    // SAFETY: the closures only call pthread_sigmask(3) and signal(2), which are async-signal-safe.
    unsafe { command.pre_exec(unblock).pre_exec(heed_signals) };
    if arguments.without_huge_pages {
        // SAFETY: the closure only makes one system call.
        unsafe { command.pre_exec(leave_huge_pages) };
    }
    let child = command
        .spawn()
        .map_err(|error| format!("{} cannot be started: {error}", program.to_string_lossy()))?;
    i32::try_from(child.id()).map(Pid::from_raw).map_err(|error| error.to_string())
}

/// Whoever has started the daemon may have these ignored, as nohup(1) and shells in the background do: a child would
/// inherit that, and so would every process of the container.
fn heed_signals() -> std::io::Result<()> {
    for number in [libc::SIGHUP, libc::SIGINT, libc::SIGQUIT] {
        // SAFETY: the default action is no handler of this program.
        if unsafe { libc::signal(number, libc::SIG_DFL) } == libc::SIG_ERR {
            return Err(std::io::Error::last_os_error());
        }
    }
    Ok(())
}

/// Turns transparent huge pages off for this process and all that it starts, from before its program runs.
///
/// CRIU puts some pages in place itself (those with stack pointers) before the userfaultfd is there that
/// guards the others. Where huge pages are `always`, the kernel makes 512 pages of one that is touched,
/// over the borders of areas that CRIU moves apart later, and of which the rest reads as zero for good
/// (seen with CRIU 4.1 and 4.2). CRIU itself turns them off only where images have parents. It gives each
/// process back the flag that it had at the source (`thp_disabled` of its mm image), when the userfaultfd
/// is there: the kernel makes no huge pages in what that guards. The flag goes through fork(2) and
/// execve(2) (PR_SET_THP_DISABLE(2const)).
fn leave_huge_pages() -> std::io::Result<()> {
    // SAFETY: a system call with integers.
    match unsafe { libc::prctl(libc::PR_SET_THP_DISABLE, 1, 0, 0, 0) } {
        0 => Ok(()),
        _ => Err(std::io::Error::last_os_error()),
    }
}

/// Takes over the lock file that the daemon has locked, and writes this process's PID into it. The
/// lock ends with the last copy of the descriptor: this one, which no child inherits and which is
/// closed by the end of the process.
fn take_lock(fd: RawFd) -> Result<(), String> {
    let failed =
        |error: &dyn std::fmt::Display| format!("the lock on descriptor {fd} is not usable: {error}");
    // SAFETY: the number is checked to be open before it is owned, and nothing else here uses it:
    // it is above the standard streams, and this runs before any other file is opened.
    let mut lock = unsafe {
        if libc::fcntl(fd, libc::F_SETFD, libc::FD_CLOEXEC) == -1 {
            return Err(failed(&std::io::Error::last_os_error()));
        }
        File::from_raw_fd(fd)
    };
    lock.set_len(0)
        .and_then(|()| writeln!(lock, "{}", std::process::id()))
        .map_err(|error| failed(&error))?;
    let _open_to_the_end = lock.into_raw_fd();
    Ok(())
}

/// Blocks every signal that can be blocked, so that none meant for the daemon ends the shim, and
/// gives a descriptor for the ends of children and for questions.
fn take_signals() -> Result<SignalFd, String> {
    let failed = |errno| format!("the shim cannot set up its signals: {errno}");
    SigSet::all().thread_block().map_err(failed)?;
    let mut taken = SigSet::empty();
    taken.add(Signal::SIGCHLD);
    taken.add(Signal::SIGUSR1);
    SignalFd::with_flags(&taken, SfdFlags::SFD_CLOEXEC | SfdFlags::SFD_NONBLOCK).map_err(failed)
}

/// Asks the kernel to choose others first when memory runs out: with the shim the container's
/// output would end. Done after the container was started, which would inherit it.
fn protect_from_out_of_memory() {
    // Refused without CAP_SYS_RESOURCE; then the shim is as likely a victim as its size makes it.
    let _ = std::fs::write("/proc/self/oom_score_adj", "-998");
}

fn read_pid(path: &Path) -> Result<Pid, String> {
    let text = std::fs::read_to_string(path)
        .map_err(|error| format!("it wrote no PID to {}: {error}", path.display()))?;
    text.trim().parse().map(Pid::from_raw).map_err(|_| format!("{} has no PID: {text:?}", path.display()))
}

/// Writes `exit.json` in one step: whoever sees it sees all of it. It need not survive a crash of
/// the node, which ends the container with all that runc knows of it; waiting for the disk would
/// make everybody wait who waits for the exit.
fn write_exit_record(directory: &Path, code: i32) {
    let record = serde_json::json!({ "code": code, "time_ns": now_ns() });
    let temporary = directory.join("exit.json.new");
    // Without space for it the exit is told by the shim's end alone.
    let _ = std::fs::write(&temporary, format!("{record}\n"))
        .and_then(|()| std::fs::rename(&temporary, directory.join("exit.json")));
}
