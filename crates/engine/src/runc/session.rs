//! Starts a [`Session`]: brings `godwit-exec` (`monitor/main.rs`) into a container, and has runc run it there.
//!
//! The program is a file without a name in the container's root filesystem, and is open in `runc exec`: no user's file is
//! changed, and CRIU dumps it with the process that runs it, so that each node restores the program with which the session
//! began. What runc starts forks and ends, and the kernel gives the child to the container's first process.

use std::fs::{File, Permissions};
use std::io::{self, ErrorKind, Read as _, Write as _};
use std::os::fd::{AsRawFd as _, OwnedFd};
use std::os::unix::fs::PermissionsExt as _;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::sync::Arc;
use std::time::Duration;

use nix::sys::socket::{ControlMessageOwned, MsgFlags, recvmsg, setsockopt, sockopt};
use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;
use tempfile::TempDir;
use tokio::io::AsyncReadExt as _;
use tokio::process::Command;
use tokio::time::timeout;

use super::{Runc, message, program_error, spec};
use crate::container::{ContainerConfig, EngineError, io_error};
use crate::exec::{ExecRequest, TerminalSize, hand_over, inherit};
use crate::processes::cgroup::Cgroup;
use crate::processes::process;
use crate::sessions::{MOST, Session, on_thread};

/// The program.
const MONITOR: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/godwit-exec"));

/// Where it finds itself, and the socket.
const PROGRAM_FD: i32 = 3;
const SOCKET_FD: i32 = 4;
const PROGRAM_PATH: &str = "/proc/self/fd/3";

/// Longest a start may take, until it is known how it went.
const START_LIMIT: Duration = Duration::from_secs(20);

/// Most bytes of runc's messages: a program in the container may write there, too.
const MESSAGES: u64 = 64 << 10;

/// Highest errno of Linux.
const LAST_ERRNO: i32 = 4095;

/// Most zombies that this leaves in a container whose first process does not wait for children that it has not started.
/// Further commands are children of runc, and do not move.
const MOST_ENDED: usize = 16;

/// What `/proc/PID/stat` says of one.
const ENDED: &str = " (godwit-exec) Z ";

/// What goes into a name that nobody else has.
const TOKEN_BYTES: usize = 16;

impl Runc {
    /// Starts a command on a terminal; none where the container cannot have one that moves with it.
    pub(super) async fn start_session(
        &self,
        config: &ContainerConfig,
        request: &ExecRequest,
    ) -> Result<Option<Arc<Session>>, EngineError> {
        let name = &config.name;
        let Some(TerminalSize { rows, columns }) = request.terminal else { return Ok(None) };
        // CRIU could not restore a file without a name in what is read-only.
        if config.confinement.read_only || self.sessions.of(name).len() >= MOST {
            return Ok(None);
        }
        let main = self.main_pid(config).await?;
        if ended_before(main) >= MOST_ENDED {
            return Ok(None);
        }
        let root = PathBuf::from(format!("/proc/{main}/root"));
        let program = match bring(&root) {
            Ok(program) => program,
            Err(error) => {
                tracing::warn!(service = %name, %error, "a command on a terminal does not move with its service: godwit-exec cannot be written into the root filesystem");
                return Ok(None);
            }
        };
        let failed = |source| io_error(name, format!("run {}", self.config.runc.display()), source);
        let mut process = spec::command(config, &ExecRequest { terminal: None, ..request.clone() })
            .map_err(|source| EngineError::User { name: name.clone(), source })?;
        let words = [PROGRAM_PATH.to_owned(), rows.to_string(), columns.to_string()];
        process["args"] = words.iter().chain(&request.command).cloned().collect();
        let (ours, theirs) = UnixStream::pair().map_err(failed)?;
        setsockopt(&ours, sockopt::PassCred, &true).map_err(|errno| failed(errno.into()))?;
        ours.set_read_timeout(Some(START_LIMIT)).map_err(failed)?;
        ours.set_write_timeout(Some(START_LIMIT)).map_err(failed)?;
        let in_time = self.root_in_time(config, main).await.map_err(failed)?;
        let mut command = self.runc_at(in_time.as_ref().map_or(&self.config.root, TempDir::path), &["exec"]);
        let file = hand_over(&mut command, process.to_string().as_bytes()).map_err(failed)?;
        command.args(["--preserve-fds", "2", "--process", &file, name.as_str()]);
        inherit(&mut command, [(program, PROGRAM_FD), (theirs.into(), SOCKET_FD)]).map_err(failed)?;
        if in_time.is_some() {
            join_time(&mut command, main).map_err(failed)?;
        }
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped()).kill_on_drop(true);
        let cgroup = self.processes.cgroup(config)?;
        let starting = async {
            let (succeeded, messages) = output(&mut command).await.map_err(failed)?;
            // Its copies of what it has handed over are closed: the socket ends with the container's.
            drop(command);
            if !succeeded {
                return Err(program_error(name, "exec", message(&messages)));
            }
            let started = on_thread(move || started(&ours, main, |pid| inner_pid(&cgroup, pid))).await;
            started.map_err(|source| io_error(name, "start a command in it".into(), source))
        };
        let late = || {
            let why = format!("godwit-exec does not say within {} s how that went", START_LIMIT.as_secs());
            io_error(name, "start a command in it".into(), io::Error::new(ErrorKind::TimedOut, why))
        };
        match timeout(START_LIMIT, starting).await.map_err(|_| late())?? {
            Ok(session) => Ok(Some(self.sessions.add(name, session, true))),
            Err(reason) => Err(EngineError::Command {
                name: name.clone(),
                command: request.command.first().cloned().unwrap_or_default(),
                reason: reason.to_string(),
            }),
        }
    }

    /// How many commands on a terminal run in it, also of another life of godwitd.
    pub(super) async fn count_sessions(&self, config: &ContainerConfig) -> Result<usize, EngineError> {
        let members = self.processes.members(config)?;
        let is_monitor = |pid: &u32| {
            let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
            stat.contains(" (godwit-exec) ") && !stat.contains(ENDED)
        };
        // A service may have thousands of processes.
        let counting =
            tokio::task::spawn_blocking(move || members.iter().filter(|pid| is_monitor(pid)).count());
        let counted = counting.await.map_err(|error| {
            io_error(&config.name, "examine its processes".into(), io::Error::other(error))
        })?;
        Ok(counted.max(self.sessions.of(&config.name).len()))
    }

    /// Where runc finds a container's state when it runs in the container's time namespace, if that is another one than this
    /// program's: runc knows the first process again by its start, which has another time there. runc does not join time
    /// namespaces; a container that was restored has one, and CRIU dumps all of it from one.
    async fn root_in_time(&self, config: &ContainerConfig, main: u32) -> io::Result<Option<TempDir>> {
        let namespace = |process: &str| std::fs::read_link(format!("/proc/{process}/ns/time"));
        match (namespace("self"), namespace(&main.to_string())) {
            (Ok(own), Ok(its)) if own != its => {}
            // Linux without time namespaces, too.
            _ => return Ok(None),
        }
        let mut cat = Command::new("cat");
        cat.arg(format!("/proc/{main}/stat")).stdin(Stdio::null()).kill_on_drop(true);
        join_time(&mut cat, main)?;
        let stat = String::from_utf8_lossy(&cat.output().await?.stdout).into_owned();
        // proc_pid_stat(5), field 22; the name before it may have any letters.
        let start =
            stat.rsplit_once(')').and_then(|(_, rest)| rest.split_whitespace().nth(19)?.parse::<u64>().ok());
        let start = start.ok_or_else(|| io::Error::other(format!("/proc/{main}/stat has no start")))?;
        let mut state: serde_json::Value =
            serde_json::from_slice(&std::fs::read(self.state_directory(&config.name).join("state.json"))?)?;
        state["init_process_start"] = start.into();
        let root = tempfile::Builder::new().prefix("exec-root-").tempdir_in(&config.directory)?;
        let directory = root.path().join(&config.name);
        std::fs::create_dir(&directory)?;
        std::fs::write(directory.join("state.json"), serde_json::to_vec(&state)?)?;
        Ok(Some(root))
    }
}

/// Runs a program to its end: whether it has succeeded, and the beginning of its messages.
async fn output(program: &mut Command) -> io::Result<(bool, Vec<u8>)> {
    let mut child = program.spawn()?;
    let pipe = child.stderr.take();
    let reading = async move {
        let mut messages = Vec::new();
        if let Some(pipe) = pipe {
            pipe.take(MESSAGES).read_to_end(&mut messages).await?;
        }
        Ok::<_, io::Error>(messages)
    };
    let (status, messages) = tokio::try_join!(child.wait(), reading)?;
    Ok((status.success(), messages))
}

/// The PID of a process of a container in its PID namespace; an error where the process is none of the container's.
pub(super) fn inner_pid(cgroup: &Cgroup, pid: u32) -> io::Result<u32> {
    if !cgroup.members()?.contains(&pid) {
        return Err(io::Error::new(ErrorKind::NotFound, format!("process {pid} is not in the container")));
    }
    let statuses = process::statuses([pid])?;
    Ok(statuses.first().ok_or(ErrorKind::NotFound)?.inner_pid)
}

/// Has a program run in the time namespace of the process `main`.
fn join_time(program: &mut Command, main: u32) -> io::Result<()> {
    let namespace = File::open(format!("/proc/{main}/ns/time"))?;
    // SAFETY: between fork and exec one system call is made, by the only thread that there is. The file is open for as long
    // as there is the command.
    unsafe {
        program.pre_exec(move || match libc::setns(namespace.as_raw_fd(), libc::CLONE_NEWTIME) {
            -1 => Err(io::Error::last_os_error()),
            _ => Ok(()),
        });
    }
    Ok(())
}

/// How many have ended before and are zombies, as the container's first process does not wait for them.
fn ended_before(main: u32) -> usize {
    let children = std::fs::read_to_string(format!("/proc/{main}/task/{main}/children")).unwrap_or_default();
    let is_zombie = |pid: &&str| {
        let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
        stat.contains(ENDED)
    };
    children.split_whitespace().filter(is_zombie).count()
}

/// Writes the program into a filesystem, as a file without a name, and opens it.
fn bring(root: &Path) -> io::Result<OwnedFd> {
    let flags = OFlags::RDWR | OFlags::CLOEXEC;
    let mode = Mode::RUSR | Mode::WUSR;
    let file = match rustix::fs::open(root, flags | OFlags::TMPFILE, mode) {
        Ok(file) => file,
        // Linux before 6.1, in an overlayfs.
        Err(Errno::OPNOTSUPP | Errno::ISDIR) => {
            let path = root.join(format!(".godwit-exec-{}", random()?));
            let file =
                rustix::fs::open(&path, flags | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW, mode)?;
            std::fs::remove_file(&path)?;
            file
        }
        Err(errno) => return Err(errno.into()),
    };
    let mut file = File::from(file);
    file.write_all(MONITOR)?;
    file.set_permissions(Permissions::from_mode(0o555))?;
    // What is open for writing is not run.
    let path = format!("/proc/self/fd/{}", file.as_raw_fd());
    Ok(rustix::fs::open(path, OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty())?)
}

/// A random name.
fn random() -> io::Result<String> {
    let mut bytes = [0; TOKEN_BYTES];
    File::open("/dev/urandom")?.read_exact(&mut bytes)?;
    Ok(bytes.iter().map(|byte| format!("{byte:02x}")).collect())
}

/// Waits until `godwit-exec` says how the start went, and takes what it has, or the reason. What comes may be anybody's in
/// the container.
fn started(
    socket: &UnixStream,
    main: u32,
    identify: impl Fn(u32) -> io::Result<u32>,
) -> io::Result<Result<Session, io::Error>> {
    let mut said = [0; 4];
    let mut parts = [io::IoSliceMut::new(&mut said)];
    let mut control = nix::cmsg_space!(nix::sys::socket::UnixCredentials);
    let received = recvmsg::<()>(socket.as_raw_fd(), &mut parts, Some(&mut control), MsgFlags::empty())?;
    let credentials = received.cmsgs()?.find_map(|part| match part {
        ControlMessageOwned::ScmCredentials(credentials) => Some(credentials),
        _ => None,
    });
    let (length, pid) = (received.bytes, credentials.map(|credentials| credentials.pid()));
    let pid = pid.and_then(|pid| u32::try_from(pid).ok()).filter(|pid| *pid > 0 && length == said.len());
    let Some(pid) = pid else {
        return Err(io::Error::new(ErrorKind::UnexpectedEof, "godwit-exec ended before the command began"));
    };
    match i32::from_ne_bytes(said) {
        0 => {}
        errno @ 1..=LAST_ERRNO => return Ok(Err(io::Error::from_raw_os_error(errno))),
        other => return Err(io::Error::new(ErrorKind::InvalidData, format!("godwit-exec says {other}"))),
    }
    let session = Session::open((pid, main), identify, random()?, 0)?;
    (&mut &*socket).write_all(&[1])?;
    // It closes its end before the service may be dumped.
    match (&mut &*socket).read(&mut [0])? {
        0 => Ok(Ok(session)),
        _ => Err(io::Error::new(ErrorKind::InvalidData, "godwit-exec says more than how the start went")),
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    /// What becomes of a start of which somebody in the container says this.
    fn heard(said: &[u8]) -> io::Result<Result<Session, io::Error>> {
        let (ours, theirs) = UnixStream::pair().unwrap();
        setsockopt(&ours, sockopt::PassCred, &true).unwrap();
        (&theirs).write_all(said).unwrap();
        drop(theirs);
        started(&ours, 1, |pid| Err(io::Error::new(ErrorKind::NotFound, format!("{pid} is somebody else"))))
    }

    #[test]
    fn what_somebody_in_the_container_says_of_a_start_is_checked() {
        let reason = heard(&libc::ENOENT.to_ne_bytes()).unwrap().unwrap_err();
        assert_eq!(reason.raw_os_error(), Some(libc::ENOENT));
        for errno in [-1, i32::MIN, LAST_ERRNO + 1, i32::MAX] {
            assert_eq!(heard(&errno.to_ne_bytes()).unwrap_err().kind(), ErrorKind::InvalidData, "{errno}");
        }
        assert_eq!(heard(b"\0").unwrap_err().kind(), ErrorKind::UnexpectedEof);
        let error = heard(&0_i32.to_ne_bytes()).unwrap_err();
        assert_eq!(error.to_string(), format!("{} is somebody else", std::process::id()));
    }

    #[tokio::test]
    async fn messages_without_an_end_are_cut_off() {
        let mut endless = Command::new("sh");
        endless.args(["-c", "trap '' PIPE; yes >&2; exit 3"]).stderr(Stdio::piped()).kill_on_drop(true);
        let (succeeded, messages) = output(&mut endless).await.unwrap();
        assert_eq!((succeeded, messages.len() as u64), (false, MESSAGES));
    }
}
