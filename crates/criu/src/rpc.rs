//! CRIU's RPC: a request and its answer over a socket to `criu swrk FD`, and CRIU's questions in between.
//!
//! ```text
//! godwit                        criu swrk 3
//!   │ ── SOCK_SEQPACKET: request ──▶ │   one protobuf message per packet
//!   │ ◀── NOTIFY: how to go on? ──── │   at each script that CRIU would run, if the request wants that
//!   │ ── NOTIFY ───────────────────▶ │
//!   │ ◀── answer ─────────────────── │
//!   │ ── end of file ──────────────▶ │   CRIU ends
//! ```
//!
//! A CRIU that is killed while it dumps leaves a guard, which ends when the processes are as they were
//! (`packaging/criu/killed-tracer.patch`). It has the socket open as long.
//!
//! The messages are generated from `proto/rpc.proto`, the part of CRIU's file of that name that godwit uses.

use std::ffi::OsString;
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::path::{Path, PathBuf};
use std::process::{ExitStatus, Stdio};

use nix::sys::socket::{AddressFamily, SockFlag, SockType, socketpair};
use prost::Message;
use tokio::net::UnixDatagram;
use tokio::process::{Child, Command};

use crate::CriuError;

/// Largest answer taken, in bytes. CRIU's answers are below 1 KiB; its own clients use 40 KiB.
const ANSWER_LIMIT: usize = 64 * 1024;

/// The number of the socket in the CRIU process.
const SERVICE_FD: i32 = 3;

/// The number of the page server's socket in the CRIU process.
const PAGE_SERVER_FD: i32 = 4;

#[allow(unreachable_pub, clippy::all, clippy::pedantic)]
mod messages {
    include!(concat!(env!("OUT_DIR"), "/criu.rs"));
}

pub(crate) use messages::{
    CriuCgMode, CriuFeatures, CriuNetworkLockMethod, CriuOpts, CriuReq, CriuReqType, CriuResp,
};

impl CriuReq {
    pub(crate) fn of_type(kind: CriuReqType) -> Self {
        Self { r#type: kind.into(), ..Self::default() }
    }
}

impl CriuReq {
    /// The answer to a question of CRIU's: it may go on.
    pub(crate) fn go_on() -> Self {
        Self { notify_success: Some(true), ..Self::of_type(CriuReqType::Notify) }
    }
}

impl CriuResp {
    /// At which script CRIU asks how to go on, if this is such a question.
    pub(crate) fn asks(&self) -> Option<&str> {
        let script = self.notify.as_ref().and_then(|notify| notify.script.as_deref());
        (self.r#type() == CriuReqType::Notify).then_some(script.unwrap_or_default())
    }
}

/// A running `criu swrk` and the socket to it.
#[derive(Debug)]
pub(crate) struct Service {
    path: PathBuf,
    log: Option<PathBuf>,
    // A packet socket is used as a datagram socket is: one call, one message; 0 bytes is its end.
    socket: UnixDatagram,
    process: Process,
}

/// The process of a `criu swrk`. Dropped, it is killed, unless it is at work on a dump: then it would
/// leave its mark in the processes that it dumps.
#[derive(Debug)]
struct Process {
    child: Child,
    at_work: bool,
}

impl Drop for Process {
    fn drop(&mut self) {
        if !self.at_work {
            // Fails only if it has ended. Tokio reaps it.
            let _ = self.child.start_kill();
        }
    }
}

impl Service {
    /// Starts CRIU. For work, other than for a question, it is given the connection on which a page
    /// server would serve its one client, and a directory in which it looks first for programs.
    pub(crate) fn start(
        path: &Path,
        page_server: Option<BorrowedFd<'_>>,
        programs: Option<&Path>,
    ) -> Result<Self, CriuError> {
        let failed = |source: io::Error| CriuError::Start { path: path.to_owned(), source };
        let (ours, theirs) = socketpair(
            AddressFamily::Unix,
            SockType::SeqPacket,
            None,
            SockFlag::SOCK_CLOEXEC | SockFlag::SOCK_NONBLOCK,
        )
        .map_err(|errno| failed(errno.into()))?;
        clear_nonblocking(&theirs).map_err(failed)?;
        let mut handed_over = vec![(theirs.as_raw_fd(), SERVICE_FD)];
        let mut command = Command::new(path);
        if let Some(page_server) = page_server {
            handed_over.push((page_server.as_raw_fd(), PAGE_SERVER_FD));
            command.args(["--ps-socket", &PAGE_SERVER_FD.to_string()]);
        }
        if let Some(directory) = programs {
            command.env("PATH", path_with(directory));
        }
        command
            .arg("swrk")
            .arg(SERVICE_FD.to_string())
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .process_group(0);
        // SAFETY: between fork and exec only async-signal-safe system calls are made, on descriptors
        // that live until after the spawn.
        unsafe {
            command.pre_exec(move || {
                ask_to_be_spared();
                hand_over(&handed_over)
            });
        }
        let child = command.spawn().map_err(failed)?;
        drop(theirs);
        let socket = UnixDatagram::from_std(ours.into()).map_err(failed)?;
        let process = Process { child, at_work: false };
        Ok(Self { path: path.to_owned(), log: None, socket, process })
    }

    /// Where CRIU will write its log, for errors.
    pub(crate) fn set_log(&mut self, log: PathBuf) {
        self.log = Some(log);
    }

    /// Sends a request and waits for its answer.
    pub(crate) async fn ask(&mut self, request: CriuReq) -> Result<CriuResp, CriuError> {
        self.send(&request).await?;
        self.receive().await
    }

    /// From here on CRIU may be in the processes that it dumps, and is not killed with this value.
    pub(crate) fn goes_to_work(&mut self) {
        self.process.at_work = true;
    }

    /// Sends a request, or the answer to a question of CRIU's.
    pub(crate) async fn send(&self, request: &CriuReq) -> Result<(), CriuError> {
        let sent = self.socket.send(&request.encode_to_vec()).await;
        sent.map(drop).map_err(|source| self.broken("sending the request", source))
    }

    /// Waits for an answer, or a question of CRIU's.
    pub(crate) async fn receive(&self) -> Result<CriuResp, CriuError> {
        let mut buffer = vec![0; ANSWER_LIMIT];
        let length = self
            .socket
            .recv(&mut buffer)
            .await
            .map_err(|source| self.broken("waiting for its answer", source))?;
        if length == 0 {
            return Err(self.broken("waiting for its answer", io::ErrorKind::UnexpectedEof.into()));
        }
        // What does not fit is cut off.
        let packet =
            buffer.get(..length).filter(|p| p.len() < ANSWER_LIMIT).ok_or_else(|| CriuError::Answer {
                path: self.path.clone(),
                reason: format!("it has {ANSWER_LIMIT} bytes or more"),
            })?;
        CriuResp::decode(packet)
            .map_err(|error| CriuError::Answer { path: self.path.clone(), reason: error.to_string() })
    }

    /// Closes the socket and waits until CRIU has ended.
    pub(crate) async fn end(self) -> io::Result<ExitStatus> {
        let Self { socket, mut process, .. } = self;
        drop(socket);
        process.child.wait().await
    }

    /// Kills CRIU, and waits until its guard has put the processes right and closes the socket. Returns the error of the
    /// request that was under way.
    pub(crate) async fn kill(&mut self) -> CriuError {
        // It cannot have been reaped: nobody has waited for it.
        let killed = self.process.child.start_kill();
        let mut answer = [0; 1];
        // An answer may have been on its way.
        while killed.is_ok() && self.socket.recv(&mut answer).await.is_ok_and(|length| length > 0) {}
        self.broken("waiting for its answer", killed.err().unwrap_or(io::ErrorKind::UnexpectedEof.into()))
    }

    fn broken(&self, action: &'static str, source: io::Error) -> CriuError {
        CriuError::Talk { path: self.path.clone(), action, log: self.log.clone(), source }
    }
}

/// The path of this process with one more directory before all others.
fn path_with(directory: &Path) -> OsString {
    let mut path = directory.as_os_str().to_owned();
    path.push(":");
    path.push(
        std::env::var_os("PATH")
            .filter(|path| !path.is_empty())
            .unwrap_or("/usr/sbin:/usr/bin:/sbin:/bin".into()),
    );
    path
}

/// Asks the kernel to choose others first when memory runs out: a CRIU that is killed at work lets
/// frozen tasks run. Refused without CAP_SYS_RESOURCE. Only async-signal-safe calls.
fn ask_to_be_spared() {
    // SAFETY: the strings are constants with their zero bytes, the descriptor is this function's own.
    unsafe {
        let fd = libc::open(c"/proc/self/oom_score_adj".as_ptr(), libc::O_WRONLY | libc::O_CLOEXEC);
        if fd >= 0 {
            libc::write(fd, c"-998".as_ptr().cast(), 4);
            libc::close(fd);
        }
    }
}

/// Gives descriptors of this process their numbers in the program that it is about to become. Only
/// async-signal-safe calls.
fn hand_over(descriptors: &[(RawFd, RawFd)]) -> io::Result<()> {
    let check = |result: i32| match result {
        -1 => Err(io::Error::last_os_error()),
        fd => Ok(fd),
    };
    // First away from numbers that another one shall get.
    let mut above = [-1; 2];
    for (place, (from, _)) in above.iter_mut().zip(descriptors) {
        // SAFETY: a system call on a descriptor that the caller holds open.
        *place = check(unsafe { libc::fcntl(*from, libc::F_DUPFD_CLOEXEC, PAGE_SERVER_FD + 1) })?;
    }
    for (from, (_, to)) in above.into_iter().zip(descriptors) {
        // SAFETY: as above; what had the number is not used after the exec.
        check(unsafe { libc::dup2(from, *to) })?;
    }
    Ok(())
}

fn clear_nonblocking(fd: &OwnedFd) -> io::Result<()> {
    use nix::fcntl::{FcntlArg, OFlag, fcntl};
    let flags = OFlag::from_bits_retain(fcntl(fd, FcntlArg::F_GETFL)?);
    fcntl(fd, FcntlArg::F_SETFL(flags - OFlag::O_NONBLOCK))?;
    Ok(())
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn an_answer_with_unknown_fields_is_understood() {
        // success = true for DUMP, and field 14 that no CRIU has today.
        let bytes = [0x08, 1, 0x10, 1, 0x72, 2, b'h', b'i'];
        let answer = CriuResp::decode(&bytes[..]).unwrap();
        assert!(answer.success);
        assert_eq!(answer.r#type(), CriuReqType::Dump);
    }

    #[test]
    fn a_request_carries_the_tags_of_rpc_proto() {
        let mut request = CriuReq::of_type(CriuReqType::Dump);
        let network_lock = Some(CriuNetworkLockMethod::Skip.into());
        request.opts = Some(CriuOpts { images_dir_fd: 7, network_lock, ..CriuOpts::default() });
        // type = 1; opts { images_dir_fd = 7; network_lock (64) = 3 }
        assert_eq!(request.encode_to_vec(), [0x08, 1, 0x12, 5, 0x08, 7, 0x80, 0x04, 3]);
    }
}
