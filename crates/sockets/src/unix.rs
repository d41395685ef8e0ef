//! Unix sockets. The layouts are those of `linux/unix_diag.h`.

use std::io;

use rustix::net::AddressFamily;

use crate::SockDiag;
use crate::message::{first_attribute, malformed, word};

/// Bytes of `struct unix_diag_req`, and of `struct unix_diag_msg` before the attributes.
const REQUEST: usize = 24;
const MESSAGE: usize = 16;
/// Where `struct unix_diag_msg` has the inode.
const INODE: usize = 4;
/// Attributes: `UNIX_DIAG_NAME`, `UNIX_DIAG_PEER`, `UNIX_DIAG_ICONS`, `UNIX_DIAG_RQLEN`.
const NAME: u16 = 0;
const PEER: u16 = 2;
const WAITING_INODES: u16 = 3;
const QUEUES: u16 = 4;

/// States as bits of a set.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct States(u32);

impl States {
    /// `TCP_ESTABLISHED`.
    pub const CONNECTED: Self = Self(1 << 1);
    /// `TCP_LISTEN`.
    pub const LISTENING: Self = Self(1 << 10);
    /// Whatever state it is.
    pub const ANY: Self = Self(u32::MAX);
}

/// What the kernel is to tell of each socket, as bits of a set; [`Socket`] has nothing of the rest.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Show(u32);

impl Show {
    /// The name and the connections that wait (`UDIAG_SHOW_NAME`, `UDIAG_SHOW_ICONS`).
    pub const WAITING: Self = Self(0x1 | 0x8);
    /// The name and the other end (`UDIAG_SHOW_NAME`, `UDIAG_SHOW_PEER`).
    pub const PEER: Self = Self(0x1 | 0x4);
    /// How much is in its queues (`UDIAG_SHOW_RQLEN`).
    pub const QUEUES: Self = Self(0x10);
}

/// One socket (`struct unix_diag_msg`).
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Socket {
    /// Its inode.
    pub inode: u64,
    /// Its name, to be shown to people: one in the abstract namespace begins with an `@`. Empty if it has none.
    pub name: String,
    /// The inode of the other end; 0 if it has none, or one that has closed or was not accepted.
    pub peer: u64,
    /// Of a listening socket: the inodes of the other ends of the connections that it has not accepted; 0 is one that
    /// has closed.
    pub waiting: Vec<u64>,
    /// Bytes that it has sent and that are not read, with what the kernel needs to keep them.
    pub sent: u32,
}

impl SockDiag {
    /// Unix sockets in one of these states.
    ///
    /// # Errors
    /// When the kernel refuses.
    pub fn unix(&self, states: States, show: Show) -> io::Result<Vec<Socket>> {
        let mut found = Vec::new();
        self.dump(&request(states, show), |body| {
            found.push(parse(body).ok_or_else(|| malformed("a unix socket that cannot be read"))?);
            Ok(())
        })?;
        Ok(found)
    }
}

fn request(states: States, show: Show) -> Vec<u8> {
    let mut request = Vec::with_capacity(REQUEST);
    request.extend([u8::try_from(AddressFamily::UNIX.as_raw()).unwrap_or_default(), 0, 0, 0]);
    request.extend(states.0.to_ne_bytes());
    // Whatever its inode is.
    request.extend([0; 4]);
    request.extend(show.0.to_ne_bytes());
    request.resize(REQUEST, 0);
    request
}

/// Reads `struct unix_diag_msg` and the attributes behind it.
fn parse(body: &[u8]) -> Option<Socket> {
    let mut socket = Socket { inode: word(body, INODE)?.into(), ..Socket::default() };
    let mut attributes = body.get(MESSAGE..)?;
    while !attributes.is_empty() {
        let (kind, content, behind) = first_attribute(attributes)?;
        match kind {
            NAME => socket.name = shown(content),
            PEER => socket.peer = word(content, 0)?.into(),
            WAITING_INODES => {
                let inodes = content.chunks_exact(4).filter_map(|inode| word(inode, 0));
                socket.waiting = inodes.map(u64::from).collect();
            }
            QUEUES => socket.sent = word(content, 4)?,
            _ => {}
        }
        attributes = behind;
    }
    Some(socket)
}

/// A name that begins with a zero is in the abstract namespace: written with an @, as elsewhere.
fn shown(name: &[u8]) -> String {
    let name = String::from_utf8_lossy(name);
    let name = match name.strip_prefix('\0') {
        Some(name) => format!("@{name}"),
        None => name.trim_end_matches('\0').to_owned(),
    };
    name.chars().map(|c| if c.is_control() { '?' } else { c }).collect()
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::io::Write;
    use std::os::fd::AsRawFd;
    use std::os::unix::fs::MetadataExt;
    use std::os::unix::net::{UnixListener, UnixStream};

    use proptest::prelude::*;

    use super::*;

    fn inode(socket: &impl AsRawFd) -> u64 {
        std::fs::metadata(format!("/proc/self/fd/{}", socket.as_raw_fd())).unwrap().ino()
    }

    #[test]
    fn the_two_ends_of_a_connection_know_each_other() {
        let (one, other) = UnixStream::pair().unwrap();
        let sockets = SockDiag::open().unwrap();
        let peer = |of: &UnixStream| {
            let all = sockets.unix(States::ANY, Show::PEER).unwrap();
            all.into_iter().find(|socket| socket.inode == inode(of)).unwrap().peer
        };
        assert_eq!((peer(&one), peer(&other)), (inode(&other), inode(&one)));
        drop(other);
        assert_eq!(peer(&one), 0);
    }

    #[test]
    fn connections_that_wait_are_found_with_what_they_sent() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("socket");
        let listener = UnixListener::bind(&path).unwrap();
        let sockets = SockDiag::open().unwrap();
        let here = || {
            let listening = sockets.unix(States::LISTENING, Show::WAITING).unwrap();
            listening.into_iter().find(|socket| socket.inode == inode(&listener)).unwrap()
        };
        assert_eq!((here().name, here().waiting), (path.display().to_string(), vec![]));
        let mut client = UnixStream::connect(&path).unwrap();
        assert_eq!(here().waiting, [inode(&client)]);
        let sent = || {
            let connected = sockets.unix(States::CONNECTED, Show::QUEUES).unwrap();
            connected.into_iter().find(|socket| socket.inode == inode(&client)).unwrap().sent
        };
        assert_eq!(sent(), 0);
        (&client).write_all(b"x").unwrap();
        assert!(sent() > 0);
        client.flush().unwrap();
        drop(client);
        assert_eq!(here().waiting, [0]);
    }

    #[test]
    fn what_is_cut_off_is_not_guessed() {
        let mut body = vec![0; MESSAGE];
        assert_eq!(parse(&body), Some(Socket::default()));
        assert_eq!(parse(&body[..MESSAGE - 1]), None);
        body.extend([8, 0, 4, 0, 1, 0, 0, 0]);
        assert_eq!(parse(&body), None, "one of two queues");
        assert_eq!(parse(&body[..MESSAGE + 6]), None);
        assert_eq!(parse(&body[..MESSAGE + 2]), None);
    }

    #[test]
    fn a_name_can_be_shown() {
        assert_eq!(shown(b"/run/socket\0"), "/run/socket");
        assert_eq!(shown(b"\0abstract\0\n"), "@abstract??");
        assert_eq!(shown(b""), "");
    }

    proptest! {
        #[test]
        fn no_bytes_bring_it_down(bytes in prop::collection::vec(any::<u8>(), 0..400)) {
            let _ = parse(&bytes);
        }
    }
}
