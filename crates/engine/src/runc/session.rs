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
use tokio::process::Command;

use super::{Runc, message, program_error, spec};
use crate::container::{ContainerConfig, EngineError, io_error};
use crate::exec::{ExecRequest, TerminalSize, hand_over, inherit};
use crate::processes::process;
use crate::sessions::{MOST, Session};

/// The program.
const MONITOR: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/godwit-exec"));

/// Where it finds itself, and the socket.
const PROGRAM_FD: i32 = 3;
const SOCKET_FD: i32 = 4;
const PROGRAM_PATH: &str = "/proc/self/fd/3";

/// Longest it may take to say how the command's start went.
const START_LIMIT: Duration = Duration::from_secs(10);

/// Most zombies that this leaves in a container whose first process does not wait for children that it has not started.
/// Further commands are children of runc, and do not move.
const MOST_ENDED: usize = 16;

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
        let in_time = self.root_in_time(config, main).await.map_err(failed)?;
        let mut command = self.runc_at(in_time.as_ref().map_or(&self.config.root, TempDir::path), &["exec"]);
        let file = hand_over(&mut command, process.to_string().as_bytes()).map_err(failed)?;
        command.args(["--preserve-fds", "2", "--process", &file, name.as_str()]);
        inherit(&mut command, [(program, PROGRAM_FD), (theirs.into(), SOCKET_FD)]).map_err(failed)?;
        if in_time.is_some() {
            join_time(&mut command, main).map_err(failed)?;
        }
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped()).kill_on_drop(true);
        let run = command.output().await.map_err(failed)?;
        // Its copies of what it has handed over are closed: the socket ends with the container's.
        drop(command);
        if !run.status.success() {
            return Err(program_error(name, "exec", message(&run.stderr)));
        }
        let started = tokio::task::spawn_blocking(move || started(&ours));
        let started = started.await.map_err(|error| failed(io::Error::other(error)))?;
        match started.map_err(|source| io_error(name, "start a command in it".into(), source))? {
            Ok(session) => Ok(Some(self.sessions.add(name, session, true))),
            Err(errno) => Err(EngineError::Command {
                name: name.clone(),
                command: request.command.first().cloned().unwrap_or_default(),
                reason: io::Error::from(errno).to_string(),
            }),
        }
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
        stat.contains(" (godwit-exec) Z ")
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

/// Waits until `godwit-exec` says how the start went, and takes what it has, or the errno.
fn started(socket: &UnixStream) -> io::Result<Result<Session, Errno>> {
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
        errno => return Ok(Err(Errno::from_raw_os_error(errno))),
    }
    let statuses = process::statuses([pid])?;
    let inner = statuses.first().ok_or(ErrorKind::NotFound)?.inner_pid;
    let session = Session::open(pid, inner, random()?, 0)?;
    // It waits for this: it still is the process with that PID.
    (&mut &*socket).write_all(&[1])?;
    // It closes its end before the service may be dumped.
    (&mut &*socket).read_to_end(&mut Vec::new())?;
    Ok(Ok(session))
}
