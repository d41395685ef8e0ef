//! What a CRIU that was killed has left in the processes that it dumped.
//!
//! CRIU takes a TCP connection into repair mode while it reads it: a moment for each connection with godwit's
//! patches, the whole dump without them. A connection that stays there refuses each call of its process, which
//! takes it for broken.

use std::collections::{HashMap, HashSet};
use std::ffi::OsStr;
use std::fs;
use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;

use nix::errno::Errno;
use nix::sys::socket::sockopt::{AcceptConn, ReuseAddr, TcpRepair};
use nix::sys::socket::{SockaddrStorage, getsockname, getsockopt, setsockopt};
use rustix::process::{Pid, PidfdFlags, PidfdGetfdFlags, pidfd_getfd, pidfd_open};

/// The sockets of processes, each once.
#[derive(Debug, Default)]
struct Sockets {
    /// What identifies those that were looked at.
    seen: HashSet<Vec<u8>>,
    in_repair: Vec<OwnedFd>,
    /// Whether the sockets that listen at these ports have SO_REUSEADDR.
    listening: HashMap<u16, bool>,
}

/// Takes the TCP sockets of these processes, of which none may run, out of repair mode. Says how many were in it.
///
/// # Errors
/// A socket could not be taken from its process, or did not leave repair mode.
pub fn clear(processes: &[u32]) -> io::Result<usize> {
    let mut sockets = Sockets::default();
    // What cannot be done for one is done for the others all the same.
    let mut failed = None;
    for &process in processes {
        if let Err(error) = sockets.look_at(process) {
            failed.get_or_insert(error);
        }
    }
    for socket in &sockets.in_repair {
        if let Err(error) = sockets.let_go(socket) {
            failed.get_or_insert(error);
        }
    }
    failed.map_or(Ok(sockets.in_repair.len()), Err)
}

impl Sockets {
    fn look_at(&mut self, process: u32) -> io::Result<()> {
        let Some(pid) = i32::try_from(process).ok().and_then(Pid::from_raw) else { return Ok(()) };
        let handle = match pidfd_open(pid, PidfdFlags::empty()) {
            Err(rustix::io::Errno::SRCH) => return Ok(()),
            handle => handle?,
        };
        // What has gone meanwhile has closed its sockets.
        for entry in fs::read_dir(format!("/proc/{process}/fd")).into_iter().flatten().flatten() {
            let Ok(link) = fs::read_link(entry.path()) else { continue };
            let name = link.as_os_str().as_bytes();
            if !name.starts_with(b"socket:[") || !self.seen.insert(name.to_owned()) {
                continue;
            }
            let Some(number) = number(&entry.file_name()) else { continue };
            match pidfd_getfd(handle.as_fd(), number, PidfdGetfdFlags::empty()) {
                Err(rustix::io::Errno::SRCH | rustix::io::Errno::BADF) => {}
                socket => self.sort(socket?)?,
            }
        }
        Ok(())
    }

    fn let_go(&self, socket: &OwnedFd) -> io::Result<()> {
        setsockopt(socket, TcpRepair, &0)?;
        // Repair mode has overwritten it. A connection that was accepted had that of its listener.
        let reuse = port(socket)?.and_then(|port| self.listening.get(&port)).copied();
        Ok(setsockopt(socket, ReuseAddr, &reuse.unwrap_or(false))?)
    }

    fn sort(&mut self, socket: OwnedFd) -> io::Result<()> {
        let in_repair = match getsockopt(&socket, TcpRepair) {
            // It is none of TCP's.
            Err(Errno::ENOPROTOOPT | Errno::EOPNOTSUPP | Errno::EINVAL) => return Ok(()),
            in_repair => in_repair? != 0,
        };
        if in_repair {
            self.in_repair.push(socket);
        } else if getsockopt(&socket, AcceptConn)?
            && let Some(port) = port(&socket)?
        {
            self.listening.insert(port, getsockopt(&socket, ReuseAddr)?);
        }
        Ok(())
    }
}

fn number(name: &OsStr) -> Option<i32> {
    name.to_str()?.parse().ok()
}

/// The port that a socket is bound to.
fn port(socket: &OwnedFd) -> io::Result<Option<u16>> {
    let address: SockaddrStorage = getsockname(socket.as_raw_fd())?;
    let v4 = address.as_sockaddr_in().map(nix::sys::socket::SockaddrIn::port);
    Ok(v4.or(address.as_sockaddr_in6().map(nix::sys::socket::SockaddrIn6::port)))
}
