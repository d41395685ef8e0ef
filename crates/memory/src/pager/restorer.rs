//! The socket on which CRIU's restorer hands over the userfaultfds of the processes it restores.
//!
//! ```text
//! CRIU (all its processes over one connection)             pager, at DIRECTORY/lazy-pages.socket
//!   │ ── i32 pid inside the namespace ─────────────────────▶ │
//!   │ ── 1 byte + userfaultfd by SCM_RIGHTS ───────────────▶ │   not for a zombie, whose pid is negative
//!   │    … for every process …                               │
//!   │ ── u32 0x52535446, "restore finished" ───────────────▶ │   the processes run soon after
//!   │ ── end of file ──────────────────────────────────────▶ │   without the former: it failed
//! ```
//!
//! Source: CRIU's `criu/uffd.c`; numbers are in the machine's byte order. No page is asked for before
//! a process's areas are registered, and all are when the restore is finished.

use std::io::{self, IoSliceMut};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::path::{Path, PathBuf};

use nix::errno::Errno;
use nix::fcntl::{OFlag, open};
use nix::sys::socket::{
    AddressFamily, Backlog, ControlMessageOwned, MsgFlags, SockFlag, SockType, UnixAddr, accept4, bind,
    listen, recv, recvmsg, socket,
};
use nix::sys::stat::Mode;

use super::uffd::Uffd;
use crate::Space;

/// CRIU's name of the socket.
const NAME: &str = "lazy-pages.socket";

/// `LAZY_PAGES_RESTORE_FINISHED`.
const FINISHED: i32 = 0x5253_5446;

/// What the restorer says.
#[derive(Debug)]
pub(crate) enum Word {
    Process(Space, Uffd),
    Zombie(Space),
    Finished,
    /// It went away before it was finished, or violated the protocol.
    Failed(String),
}

/// The listening socket.
#[derive(Debug)]
pub(crate) struct RestorerListener {
    socket: OwnedFd,
    path: PathBuf,
}

impl RestorerListener {
    /// Listens in the directory; a socket that is left from before is removed.
    pub(crate) fn open(directory: &Path) -> io::Result<Self> {
        // The path may be longer than a socket's address can be, but its directory's descriptor is short.
        let at = open(directory, OFlag::O_PATH | OFlag::O_DIRECTORY | OFlag::O_CLOEXEC, Mode::empty())?;
        let path = directory.join(NAME);
        match std::fs::remove_file(&path) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
            _ => {}
        }
        let flags = SockFlag::SOCK_CLOEXEC | SockFlag::SOCK_NONBLOCK;
        let socket = socket(AddressFamily::Unix, SockType::Stream, flags, None)?;
        let short = PathBuf::from(format!("/proc/self/fd/{}", at.as_raw_fd())).join(NAME);
        bind(socket.as_raw_fd(), &UnixAddr::new(&short)?)?;
        listen(&socket, Backlog::new(4)?)?;
        Ok(Self { socket, path })
    }

    /// The restorer that connects, if one does.
    pub(crate) fn accept(&self) -> io::Result<Option<Restorer>> {
        match accept4(self.socket.as_raw_fd(), SockFlag::SOCK_CLOEXEC | SockFlag::SOCK_NONBLOCK) {
            Ok(fd) => {
                // SAFETY: the descriptor was just made for us.
                let socket = unsafe { OwnedFd::from_raw_fd(fd) };
                Ok(Some(Restorer { socket, number: Vec::new(), pid: None }))
            }
            Err(Errno::EAGAIN | Errno::EINTR | Errno::ECONNABORTED) => Ok(None),
            Err(errno) => Err(errno.into()),
        }
    }
}

impl AsFd for RestorerListener {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

impl Drop for RestorerListener {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.path);
    }
}

/// The connection to a restorer.
#[derive(Debug)]
pub(crate) struct Restorer {
    socket: OwnedFd,
    /// The bytes of a number that have come.
    number: Vec<u8>,
    /// The process whose descriptor comes next.
    pid: Option<Space>,
}

impl Restorer {
    /// The next thing that it says, if it has said it.
    pub(crate) fn next(&mut self) -> Option<Word> {
        loop {
            let result = match self.pid {
                Some(pid) => self.descriptor(pid),
                None => self.number(),
            };
            match result {
                Ok(Some(word)) => return Some(word),
                Ok(None) => {}
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return None,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Some(Word::Failed(error.to_string())),
            }
        }
    }

    fn number(&mut self) -> io::Result<Option<Word>> {
        let mut buffer = [0; 4];
        let wanted = buffer.len() - self.number.len();
        let length = recv(self.socket.as_raw_fd(), &mut buffer[..wanted], MsgFlags::empty())?;
        if length == 0 {
            return Ok(Some(Word::Failed(
                "CRIU went away before the restore was finished; see its log".into(),
            )));
        }
        self.number.extend_from_slice(&buffer[..length]);
        let Ok(bytes) = <[u8; 4]>::try_from(self.number.as_slice()) else { return Ok(None) };
        self.number.clear();
        match i32::from_ne_bytes(bytes) {
            FINISHED => Ok(Some(Word::Finished)),
            0 => Err(nonsense("a process with number 0")),
            pid if pid < 0 => Ok(Some(Word::Zombie(pid.unsigned_abs()))),
            pid => {
                self.pid = Some(pid.unsigned_abs());
                Ok(None)
            }
        }
    }

    fn descriptor(&mut self, pid: Space) -> io::Result<Option<Word>> {
        let mut byte = [0];
        let mut slices = [IoSliceMut::new(&mut byte)];
        let mut control = nix::cmsg_space!([std::os::fd::RawFd; 4]);
        let message = recvmsg::<()>(
            self.socket.as_raw_fd(),
            &mut slices,
            Some(&mut control),
            MsgFlags::MSG_CMSG_CLOEXEC,
        )?;
        let mut fds = Vec::new();
        for control in message.cmsgs()? {
            if let ControlMessageOwned::ScmRights(numbers) = control {
                // SAFETY: the kernel made these descriptors for the receiver of the message.
                fds.extend(numbers.into_iter().map(|fd| unsafe { OwnedFd::from_raw_fd(fd) }));
            }
        }
        if message.bytes == 0 {
            return Ok(Some(Word::Failed("CRIU went away in the middle of a process".into())));
        }
        self.pid = None;
        match fds.pop() {
            Some(fd) if fds.is_empty() => Ok(Some(Word::Process(pid, Uffd::new(fd)?))),
            _ => Err(nonsense("a process without its userfaultfd")),
        }
    }
}

impl AsFd for Restorer {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

fn nonsense(what: &str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, format!("CRIU sent {what} on {NAME}"))
}
