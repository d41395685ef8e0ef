//! The listening sockets of a service, and what waits at them.
//!
//! The kernel is asked through sock_diag(7), for sockets that listen only: reading `/proc/net/tcp` walks
//! over all connections of the node, which takes a millisecond where there are none.

use std::io;
use std::os::fd::{AsRawFd, OwnedFd};

use nix::sys::socket::{AddressFamily, MsgFlags, SockFlag, SockProtocol, SockType, recv, send, socket};

/// What is known of the sockets of one service that listen.
pub trait Listening: Send + Sync {
    /// The first of them at which connections wait.
    fn waiting(&self) -> io::Result<Option<Waiting>>;
    /// Whether a connection is half made.
    fn being_made(&self) -> io::Result<bool>;
}

/// `linux/netlink.h` and `linux/sock_diag.h`.
const NLMSG_ERROR: u16 = 2;
const NLMSG_DONE: u16 = 3;
const SOCK_DIAG_BY_FAMILY: u16 = 20;
const NLM_F_REQUEST_DUMP: u16 = 0x301;
/// Bytes of a message's header.
const HEADER: usize = 16;
/// `TCP_LISTEN` and `TCP_SYN_RECV` as bits of a set of states.
const LISTENING: u32 = 1 << 10;
const BEING_MADE: u32 = 1 << 3;
/// Bytes of `struct inet_diag_req_v2`; where `struct inet_diag_msg` has the port (big endian) and, for a
/// socket that listens, how many connections wait.
const REQUEST: usize = 56;
const PORT: usize = 4;
const WAIT: usize = 56;
/// Answers at once: what the kernel takes for a dump.
const ANSWERS: usize = 32 << 10;

/// What waits at one listening socket.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Waiting {
    /// Its port.
    pub port: u16,
    /// How many connections.
    pub connections: u32,
}

/// The kernel's answers about the sockets of a network namespace.
pub(crate) struct Listeners(OwnedFd);

impl Listeners {
    /// Of the calling thread's network namespace.
    pub(crate) fn open() -> io::Result<Self> {
        let protocol = SockProtocol::NetlinkSockDiag;
        Ok(Self(socket(AddressFamily::Netlink, SockType::Raw, SockFlag::SOCK_CLOEXEC, protocol)?))
    }

    /// What waits at each socket in these states.
    fn ask(&self, states: u32) -> io::Result<Vec<Waiting>> {
        let mut found = Vec::new();
        for family in [libc::AF_INET, libc::AF_INET6] {
            send(self.0.as_raw_fd(), &request(family, states), MsgFlags::empty())?;
            let mut buffer = vec![0; ANSWERS];
            loop {
                let length = recv(self.0.as_raw_fd(), &mut buffer, MsgFlags::empty())?;
                let (sockets, last) = read(buffer.get(..length).unwrap_or_default())?;
                found.extend(sockets);
                if last {
                    break;
                }
            }
        }
        Ok(found)
    }
}

impl Listening for Listeners {
    fn waiting(&self) -> io::Result<Option<Waiting>> {
        Ok(self.ask(LISTENING)?.into_iter().find(|waiting| waiting.connections > 0))
    }

    fn being_made(&self) -> io::Result<bool> {
        Ok(!self.ask(BEING_MADE)?.is_empty())
    }
}

/// Asks for all TCP sockets of this family in these states.
fn request(family: i32, states: u32) -> Vec<u8> {
    let length = HEADER + REQUEST;
    let mut message = Vec::with_capacity(length);
    message.extend(u32::try_from(length).unwrap_or_default().to_ne_bytes());
    message.extend(SOCK_DIAG_BY_FAMILY.to_ne_bytes());
    message.extend(NLM_F_REQUEST_DUMP.to_ne_bytes());
    message.extend([0; 8]);
    let byte = |number: i32| u8::try_from(number).unwrap_or_default();
    message.extend([byte(family), byte(libc::IPPROTO_TCP), 0, 0]);
    message.extend(states.to_ne_bytes());
    message.resize(length, 0);
    message
}

/// Reads a piece of the answer: the sockets in it, and whether it is the last piece.
fn read(mut messages: &[u8]) -> io::Result<(Vec<Waiting>, bool)> {
    let short = || io::Error::new(io::ErrorKind::InvalidData, "the kernel's answer is cut off");
    let mut found = Vec::new();
    while !messages.is_empty() {
        let length: [u8; 4] = messages.first_chunk().copied().ok_or_else(short)?;
        let length = usize::try_from(u32::from_ne_bytes(length)).unwrap_or_default();
        let kind = messages.get(4..6).and_then(<[u8]>::first_chunk).copied().ok_or_else(short)?;
        let body = messages.get(HEADER..length).ok_or_else(short)?;
        match u16::from_ne_bytes(kind) {
            NLMSG_DONE => return Ok((found, true)),
            NLMSG_ERROR => {
                let code = i32::from_ne_bytes(body.first_chunk().copied().ok_or_else(short)?);
                return Err(io::Error::from_raw_os_error(-code));
            }
            SOCK_DIAG_BY_FAMILY => {
                let port = body.get(PORT..).and_then(<[u8]>::first_chunk).copied().ok_or_else(short)?;
                let wait = body.get(WAIT..).and_then(<[u8]>::first_chunk).copied().ok_or_else(short)?;
                let (port, connections) = (u16::from_be_bytes(port), u32::from_ne_bytes(wait));
                found.push(Waiting { port, connections });
            }
            _ => {}
        }
        // Messages begin at multiples of four.
        messages = messages.get(length.next_multiple_of(4)..).unwrap_or_default();
    }
    Ok((found, false))
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::net::{SocketAddr, TcpListener, TcpStream};

    use super::*;

    fn found_until_accepted(address: &str) {
        let listener = TcpListener::bind(address).unwrap();
        let address: SocketAddr = listener.local_addr().unwrap();
        let listeners = Listeners::open().unwrap();
        let port = address.port();
        // Other tests of this program may listen too.
        let here = || listeners.waiting().unwrap().filter(|waiting| waiting.port == port);
        assert_eq!(here(), None);
        let clients = [TcpStream::connect(address).unwrap(), TcpStream::connect(address).unwrap()];
        assert_eq!(here(), Some(Waiting { port, connections: 2 }));
        listener.accept().unwrap();
        assert_eq!(here(), Some(Waiting { port, connections: 1 }));
        listener.accept().unwrap();
        assert_eq!(here(), None);
        drop(clients);
    }

    #[test]
    fn connections_that_wait_are_found_until_they_are_accepted() {
        found_until_accepted("127.0.0.1:0");
        found_until_accepted("[::1]:0");
    }

    #[test]
    fn an_answer_that_is_cut_off_is_an_error() {
        let mut message = request(libc::AF_INET, LISTENING);
        assert!(read(&message[..3]).is_err());
        assert!(read(&message[..message.len() - 1]).is_err());
        message[0] = 0;
        assert!(read(&message).is_err());
    }
}
