//! Connections to unix sockets that wait to be accepted and that CRIU cannot dump: those whose other end has
//! closed, or has sent something. The kernel tells of them through sock_diag(7).

use std::collections::HashMap;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};

use nix::sys::socket::{AddressFamily, MsgFlags, SockFlag, SockProtocol, SockType, recv, send, socket};

pub(super) const WAITING: &str = "and CRIU cannot dump that; try again when the service has accepted it";

/// `linux/netlink.h`, `linux/sock_diag.h` and `linux/unix_diag.h`.
const NLMSG_ERROR: u16 = 2;
const NLMSG_DONE: u16 = 3;
const SOCK_DIAG_BY_FAMILY: u16 = 20;
const NLM_F_REQUEST_DUMP: u16 = 0x301;
const SHOW_NAME: u32 = 0x1;
const SHOW_WAITING: u32 = 0x8;
const SHOW_QUEUES: u32 = 0x10;
const NAME: u16 = 0;
const WAITING_INODES: u16 = 3;
const QUEUES: u16 = 4;
/// `TCP_ESTABLISHED` and `TCP_LISTEN` as bits of a set of states.
const ESTABLISHED: u32 = 1 << 1;
const LISTENING: u32 = 1 << 10;
/// Bytes of a message's header, of `struct unix_diag_req`, and of `struct unix_diag_msg` before the attributes.
const HEADER: usize = 16;
const REQUEST: usize = 24;
const MESSAGE: usize = 16;
/// Where `struct unix_diag_msg` has the inode.
const INODE: usize = 4;
/// Answers at once: what the kernel takes for a dump.
const ANSWERS: usize = 32 << 10;

/// The kernel's answers about the unix sockets of a network namespace.
#[derive(Debug)]
pub struct UnixSockets(OwnedFd);

/// A connection that waits at a listening socket and cannot be dumped.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Waiting {
    /// The inode of the listening socket.
    pub(super) listener: u64,
    /// Its name; empty if it has none that can be shown.
    name: String,
    is_closed: bool,
}

impl Waiting {
    pub(super) fn what(&self) -> String {
        let matter = if self.is_closed { "whose other end has closed" } else { "and carries data already" };
        format!("has not accepted a connection to its unix socket {}, {matter},", self.name)
    }
}

/// A socket in an answer.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
struct Socket {
    inode: u64,
    name: String,
    waiting: Vec<u64>,
    /// Bytes that it has sent and that are not read.
    sent: u32,
}

impl UnixSockets {
    /// Those of the calling thread's network namespace.
    ///
    /// # Errors
    /// The kernel refuses.
    pub fn open() -> io::Result<Self> {
        let protocol = SockProtocol::NetlinkSockDiag;
        Ok(Self(socket(AddressFamily::Netlink, SockType::Raw, SockFlag::SOCK_CLOEXEC, protocol)?))
    }

    pub(super) fn waiting(&self) -> io::Result<Vec<Waiting>> {
        let listeners = self.ask(LISTENING, SHOW_NAME | SHOW_WAITING)?;
        let mut sent = HashMap::new();
        if listeners.iter().any(|listener| listener.waiting.iter().any(|inode| *inode != 0)) {
            let connected = self.ask(ESTABLISHED, SHOW_QUEUES)?;
            sent.extend(connected.into_iter().map(|socket| (socket.inode, socket.sent)));
        }
        let mut found = Vec::new();
        for Socket { inode: listener, name, waiting, .. } in listeners {
            let has_closed = waiting.contains(&0);
            let has_sent = waiting.iter().any(|inode| sent.get(inode).is_some_and(|sent| *sent > 0));
            for (_, is_closed) in [(has_closed, true), (has_sent, false)].into_iter().filter(|(has, _)| *has)
            {
                found.push(Waiting { listener, name: name.clone(), is_closed });
            }
        }
        Ok(found)
    }

    fn ask(&self, states: u32, show: u32) -> io::Result<Vec<Socket>> {
        send(self.0.as_raw_fd(), &request(states, show), MsgFlags::empty())?;
        let mut found = Vec::new();
        let mut buffer = vec![0; ANSWERS];
        loop {
            let length = recv(self.0.as_raw_fd(), &mut buffer, MsgFlags::empty())?;
            let (sockets, is_last) = read(buffer.get(..length).unwrap_or_default())?;
            found.extend(sockets);
            if is_last {
                return Ok(found);
            }
        }
    }
}

fn request(states: u32, show: u32) -> Vec<u8> {
    let length = HEADER + REQUEST;
    let mut message = Vec::with_capacity(length);
    message.extend(u32::try_from(length).unwrap_or_default().to_ne_bytes());
    message.extend(SOCK_DIAG_BY_FAMILY.to_ne_bytes());
    message.extend(NLM_F_REQUEST_DUMP.to_ne_bytes());
    message.extend([0; 8]);
    message.extend([u8::try_from(libc::AF_UNIX).unwrap_or_default(), 0, 0, 0]);
    message.extend(states.to_ne_bytes());
    message.extend([0; 4]);
    message.extend(show.to_ne_bytes());
    message.resize(length, 0);
    message
}

/// Reads a piece of the answer: the sockets in it, and whether it is the last piece.
fn read(mut messages: &[u8]) -> io::Result<(Vec<Socket>, bool)> {
    let short = || io::Error::new(io::ErrorKind::InvalidData, "the kernel's answer is cut off");
    let mut found = Vec::new();
    while !messages.is_empty() {
        let length = usize::try_from(number(messages, 0).ok_or_else(short)?).unwrap_or_default();
        let kind = messages.get(4..6).and_then(<[u8]>::first_chunk).copied().ok_or_else(short)?;
        let body = messages.get(HEADER..length).ok_or_else(short)?;
        match u16::from_ne_bytes(kind) {
            NLMSG_DONE => return Ok((found, true)),
            NLMSG_ERROR => {
                let code = number(body, 0).ok_or_else(short)?.cast_signed();
                return Err(io::Error::from_raw_os_error(-code));
            }
            SOCK_DIAG_BY_FAMILY => found.push(parse(body).ok_or_else(short)?),
            _ => {}
        }
        // Messages begin at multiples of four.
        messages = messages.get(length.next_multiple_of(4)..).unwrap_or_default();
    }
    Ok((found, false))
}

fn parse(body: &[u8]) -> Option<Socket> {
    let mut socket = Socket { inode: number(body, INODE)?.into(), ..Socket::default() };
    let mut attributes = body.get(MESSAGE..)?;
    while !attributes.is_empty() {
        let word = |at| attributes.get(at..)?.first_chunk().copied().map(u16::from_ne_bytes);
        let length = usize::from(word(0)?);
        let content = attributes.get(4..length)?;
        match word(2)? {
            // One that begins with a zero is in the abstract namespace: written with an @, as elsewhere.
            NAME => {
                let name = String::from_utf8_lossy(content);
                let name = match name.strip_prefix('\0') {
                    Some(name) => format!("@{name}"),
                    None => name.trim_end_matches('\0').to_owned(),
                };
                socket.name = name.chars().map(|c| if c.is_control() { '?' } else { c }).collect();
            }
            WAITING_INODES => {
                let inodes = content.chunks_exact(4).filter_map(|inode| number(inode, 0));
                socket.waiting = inodes.map(u64::from).collect();
            }
            QUEUES => socket.sent = number(content, 4)?,
            _ => {}
        }
        attributes = attributes.get(length.next_multiple_of(4)..).unwrap_or_default();
    }
    Some(socket)
}

fn number(bytes: &[u8], at: usize) -> Option<u32> {
    bytes.get(at..)?.first_chunk().copied().map(u32::from_ne_bytes)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::io::Write;
    use std::os::unix::fs::MetadataExt;
    use std::os::unix::net::{UnixListener, UnixStream};

    use super::*;

    #[test]
    fn connections_that_cannot_be_dumped_are_found_until_they_are_accepted() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("socket");
        let listener = UnixListener::bind(&path).unwrap();
        let inode = std::fs::metadata(format!("/proc/self/fd/{}", listener.as_raw_fd())).unwrap().ino();
        let sockets = UnixSockets::open().unwrap();
        let here = || -> Vec<_> {
            let waiting = sockets.waiting().unwrap();
            waiting.into_iter().filter(|waiting| waiting.listener == inode).collect()
        };
        assert_eq!(here(), []);
        // One that has said nothing can be dumped.
        let mut client = UnixStream::connect(&path).unwrap();
        assert_eq!(here(), []);
        let waiting = |is_closed| Waiting { listener: inode, name: path.display().to_string(), is_closed };
        client.write_all(b"x").unwrap();
        assert_eq!(here(), [waiting(false)]);
        drop(UnixStream::connect(&path).unwrap());
        assert_eq!(here(), [waiting(true), waiting(false)]);
        listener.accept().unwrap();
        assert_eq!(here(), [waiting(true)]);
        assert!(here()[0].what().contains("socket, whose other end has closed"), "{}", here()[0].what());
        listener.accept().unwrap();
        assert_eq!(here(), []);
    }

    #[test]
    fn an_answer_that_is_cut_off_is_an_error() {
        let message = request(LISTENING, SHOW_NAME);
        for length in 1..message.len() {
            assert!(read(&message[..length]).is_err(), "{length}");
        }
        let mut body = vec![0; MESSAGE];
        body.extend([8, 0, 4, 0, 1, 0, 0, 0]);
        assert_eq!(parse(&body), None, "one of two queues");
        assert_eq!(parse(&body[..MESSAGE + 6]), None);
    }
}
