//! Sockets that CRIU cannot dump, of other families than unix.
//!
//! The kernel tells a socket's protocol as an extended attribute of its descriptor in `/proc/PID/fd`. The rest only the
//! socket itself tells, so that is opened here for a moment (pidfd_getfd(2)).

use std::ffi::{CStr, CString};
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::process::{Pid, PidfdFlags, PidfdGetfdFlags, pidfd_getfd, pidfd_open};

use super::files::What;

const SOCKET: &str = "and CRIU cannot dump sockets of that kind; the service can move when it has closed it";
const MPTCP: &str = "and CRIU cannot dump sockets of that kind; switch multipath TCP off (for programs in Go by \
                     GODEBUG=multipathtcp=0 in their environment)";
const CORKED: &str = "and CRIU cannot dump a socket that holds back data; try again when UDP_CORK is off";
const UNREAD: &str = "and CRIU cannot dump those; try again when it has read them";
const GROUPS: &str =
    "and CRIU cannot dump more than the first 32 groups; the service can move when it has closed it";
const NO_PORT: &str = "and CRIU cannot dump that; the program has to bind(2) it, or the service can move when it has \
                       closed it";

/// Protocols, as the kernel names them, that CRIU cannot dump, whatever their address family. Those of families that it does not
/// know are found by that.
const BAD_PROTOCOLS: [&str; 8] = ["MPTCP", "MPTCPv6", "SCTP", "SCTPv6", "DCCP", "DCCPv6", "SMC", "SMC6"];

/// Address families of which CRIU dumps sockets (`dump_socket` in `criu/sockets.c`).
const FAMILIES: [i32; 5] = [libc::AF_UNIX, libc::AF_INET, libc::AF_INET6, libc::AF_PACKET, libc::AF_NETLINK];

/// Words of 32 groups that the kernel can have of a netlink socket at most.
const GROUP_WORDS: usize = 1024;

/// What a socket is.
pub(super) enum Socket {
    Unix,
    Bad(What),
    Good,
}

/// The sockets of one process.
pub(super) struct Sockets {
    pid: u32,
    /// Opened when it is needed.
    pidfd: Option<OwnedFd>,
}

impl Sockets {
    pub(super) fn of(pid: u32) -> Self {
        Self { pid, pidfd: None }
    }

    /// The socket of this number, whose path in `/proc/PID/fd` is told. What cannot be asked is taken to be good.
    pub(super) fn examine(&mut self, number: i32, path: &Path) -> Socket {
        let bad = match protocol(path).as_deref() {
            Some("UNIX" | "UNIX-STREAM") => return Socket::Unix,
            Some("UDP" | "UDPv6" | "UDP-Lite" | "UDPLITEv6") => {
                let is_corked = self.open(number).and_then(|socket| is_corked(&socket)).unwrap_or(false);
                is_corked.then(|| ("a corked UDP socket".to_owned(), CORKED))
            }
            Some("NETLINK") => self.open(number).and_then(|socket| netlink(&socket)).unwrap_or(None),
            Some(bad) if BAD_PROTOCOLS.contains(&bad) => {
                let why = if bad.starts_with("MPTCP") { MPTCP } else { SOCKET };
                Some((format!("a socket of the protocol {bad}"), why))
            }
            Some("TCP" | "TCPv6" | "PACKET" | "RAW" | "RAWv6" | "PING" | "PINGv6") => None,
            protocol => {
                let family = self.open(number).and_then(|socket| family(&socket));
                let bad = family.ok().filter(|family| !FAMILIES.contains(family));
                let protocol = protocol.filter(|protocol| !protocol.is_empty());
                bad.map(|family| match protocol {
                    Some(protocol) => (format!("a socket of the protocol {protocol}"), SOCKET),
                    None => (format!("a socket of the address family {family}"), SOCKET),
                })
            }
        };
        bad.map_or(Socket::Good, Socket::Bad)
    }

    fn open(&mut self, number: i32) -> io::Result<OwnedFd> {
        let pidfd = match &self.pidfd {
            Some(pidfd) => pidfd,
            None => {
                let pid = i32::try_from(self.pid).ok().and_then(Pid::from_raw).ok_or(Errno::INVAL)?;
                self.pidfd.insert(pidfd_open(pid, PidfdFlags::empty())?)
            }
        };
        Ok(pidfd_getfd(pidfd, number, PidfdGetfdFlags::empty())?)
    }
}

/// The protocol of a socket as the kernel names it.
fn protocol(path: &Path) -> Option<String> {
    let path = CString::new(path.as_os_str().as_bytes()).ok()?;
    let mut name = [0_u8; 64];
    let attribute: &CStr = c"system.sockprotoname";
    // SAFETY: two strings that end with a zero, and a buffer of the length told.
    let length =
        unsafe { libc::getxattr(path.as_ptr(), attribute.as_ptr(), name.as_mut_ptr().cast(), name.len()) };
    let name = name.get(..usize::try_from(length).ok()?)?;
    Some(String::from_utf8_lossy(name).trim_end_matches('\0').to_owned())
}

/// The address family of a socket.
fn family(socket: &OwnedFd) -> io::Result<i32> {
    let mut family = [0_i32];
    option(socket, libc::SOL_SOCKET, libc::SO_DOMAIN, &mut family)?;
    Ok(family[0])
}

fn is_corked(socket: &OwnedFd) -> io::Result<bool> {
    let mut corked = [0_i32];
    // UDP_CORK is 1; libc does not have it.
    option(socket, libc::SOL_UDP, 1, &mut corked)?;
    Ok(corked != [0])
}

/// What is wrong with a netlink socket, if something is, by the rules of CRIU (`dump_one_netlink_fd`).
fn netlink(socket: &OwnedFd) -> io::Result<Option<What>> {
    let mut polled = [PollFd::new(socket, PollFlags::IN)];
    if poll(&mut polled, Some(&Timespec::default()))? > 0 {
        return Ok(Some(("a netlink socket with messages that it has not read".into(), UNREAD)));
    }
    let mut groups = [0_u32; GROUP_WORDS];
    let bytes = option(socket, libc::SOL_NETLINK, libc::NETLINK_LIST_MEMBERSHIPS, &mut groups)?;
    // Before Linux 6.5 the length may be one word short.
    let set = groups.iter().rposition(|word| *word != 0).map_or(0, |last| last + 1);
    let groups = groups.get(..set.max(bytes / size_of::<u32>())).unwrap_or(&groups);
    Ok(if has_too_many(groups) {
        Some(("a netlink socket that listens to groups beyond the 32nd".into(), GROUPS))
    } else if !groups.is_empty() && port(socket)? == 0 {
        Some(("a netlink socket that listens to groups and has no port".into(), NO_PORT))
    } else {
        None
    })
}

/// Whether CRIU takes these for more than 32 groups: the kernel tells it of longs, and it leaves out the last half of one.
fn has_too_many(groups: &[u32]) -> bool {
    match groups {
        [] | [_] => false,
        [_, second] => *second != 0,
        _ => true,
    }
}

/// The address of a netlink socket in its network namespace; 0 if it has none.
fn port(socket: &OwnedFd) -> io::Result<u32> {
    // SAFETY: numbers, of which all zeros are valid.
    let mut address: libc::sockaddr_nl = unsafe { std::mem::zeroed() };
    let mut length = libc::socklen_t::try_from(size_of_val(&address)).map_err(io::Error::other)?;
    // SAFETY: an address and its length, which live in this frame.
    match unsafe { libc::getsockname(socket.as_raw_fd(), (&raw mut address).cast(), &raw mut length) } {
        0 => Ok(address.nl_pid),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Reads an option of a socket; returns its length in bytes, which may be more than there is room for.
fn option<T: Copy, const N: usize>(
    socket: &OwnedFd,
    level: i32,
    name: i32,
    value: &mut [T; N],
) -> io::Result<usize> {
    let mut length = libc::socklen_t::try_from(size_of_val(value)).map_err(io::Error::other)?;
    let (socket, value) = (socket.as_raw_fd(), value.as_mut_ptr().cast());
    // SAFETY: numbers and their length, which live in the caller's frame and in this one.
    match unsafe { libc::getsockopt(socket, level, name, value, &raw mut length) } {
        0 => usize::try_from(length).map_err(io::Error::other),
        _ => Err(io::Error::last_os_error()),
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn groups_are_too_many_as_criu_counts_them() {
        // Those of a socket without groups, of an old kernel, of rtnetlink and of generic netlink.
        for (groups, expected) in
            [(&[][..], false), (&[1], false), (&[1, 0], false), (&[0, 1], true), (&[1, 0, 0, 0], true)]
        {
            assert_eq!(has_too_many(groups), expected, "{groups:?}");
        }
    }
}
