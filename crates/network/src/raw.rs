//! Raw sockets (raw(7)): whole IP packets, sent as if by a socket of the namespace in which they were made. The
//! system calls, and nothing else.

use std::io;
use std::mem;
use std::net::{IpAddr, Ipv6Addr};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};

/// Sends IPv4 and IPv6.
#[derive(Debug)]
pub(crate) struct RawSocket {
    v4: OwnedFd,
    /// None where the kernel has no IPv6.
    v6: Option<OwnedFd>,
}

impl RawSocket {
    /// One that sends from the namespace of the calling thread.
    pub(crate) fn new() -> io::Result<Self> {
        let v6 = match open(libc::AF_INET6) {
            Err(error) if error.raw_os_error() == Some(libc::EAFNOSUPPORT) => None,
            other => Some(other?),
        };
        Ok(Self { v4: open(libc::AF_INET)?, v6 })
    }

    /// Sends a packet, with its header, to the address that the header names.
    pub(crate) fn send(&self, packet: &[u8], to: IpAddr) -> io::Result<()> {
        match to {
            IpAddr::V4(to) => {
                // SAFETY: sockaddr_in is plain old data, for which all zeroes is a valid value.
                let mut address: libc::sockaddr_in = unsafe { mem::zeroed() };
                address.sin_family = family(libc::AF_INET)?;
                address.sin_addr.s_addr = u32::from_ne_bytes(to.octets());
                send(&self.v4, packet, &address)
            }
            IpAddr::V6(to) => {
                let socket = self.v6.as_ref().ok_or(io::ErrorKind::Unsupported)?;
                send(socket, packet, &address6(to)?)
            }
        }
    }
}

fn address6(to: Ipv6Addr) -> io::Result<libc::sockaddr_in6> {
    // SAFETY: sockaddr_in6 is plain old data, for which all zeroes is a valid value.
    let mut address: libc::sockaddr_in6 = unsafe { mem::zeroed() };
    address.sin6_family = family(libc::AF_INET6)?;
    address.sin6_addr.s6_addr = to.octets();
    Ok(address)
}

fn family(family: i32) -> io::Result<libc::sa_family_t> {
    family.try_into().map_err(io::Error::other)
}

/// IPPROTO_RAW: it receives nothing, and the header is the sender's.
fn open(family: i32) -> io::Result<OwnedFd> {
    let kind = libc::SOCK_RAW | libc::SOCK_CLOEXEC | libc::SOCK_NONBLOCK;
    // SAFETY: socket(2) takes no pointers.
    let fd = unsafe { libc::socket(family, kind, libc::IPPROTO_RAW) };
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the descriptor was just opened, and nobody else has it.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

fn send<A>(socket: &OwnedFd, packet: &[u8], to: &A) -> io::Result<()> {
    let length = mem::size_of::<A>().try_into().map_err(io::Error::other)?;
    // SAFETY: `packet` and `to` are readable for the lengths given during the call, and `to` is a socket
    // address of the socket's family.
    let sent = unsafe {
        libc::sendto(
            socket.as_raw_fd(),
            packet.as_ptr().cast(),
            packet.len(),
            libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL,
            (&raw const *to).cast(),
            length,
        )
    };
    if sent < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}
