//! Connections of unix sockets that CRIU cannot dump: those that wait to be accepted, and whose other end has closed or has
//! sent something; and those to a process outside of the container, through a socket of the node that is mounted into it.

use std::collections::HashMap;
use std::io;

use godwit_sockets::SockDiag;
use godwit_sockets::unix::{Show, Socket, States};

pub(super) const WAITING: &str = "and CRIU cannot dump that; try again when the service has accepted it";

pub(super) const OUTSIDE: &str =
    "and CRIU cannot dump that; have the service close it, or mount no socket of the node into the container";

/// The kernel's answers about the unix sockets of a network namespace.
#[derive(Debug)]
pub struct UnixSockets(SockDiag);

/// A connection that waits at a listening socket and cannot be dumped.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Waiting {
    /// The inode of the listening socket.
    pub(super) listener: u64,
    /// Its name; empty if it has none that can be shown.
    name: String,
    is_closed: bool,
}

/// A socket of the service that is connected to one of a process outside.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Outside {
    pub(super) inode: u64,
    /// Empty if it has none that is known.
    name: String,
}

impl Outside {
    /// With the inode: it is another thing than one that was found before, and may have been closed meanwhile.
    pub(super) fn what(&self) -> String {
        let name = if self.name.is_empty() { String::new() } else { format!(" ({})", self.name) };
        format!("has unix socket {}{name} connected to a process outside of the container", self.inode)
    }
}

impl Waiting {
    pub(super) fn what(&self) -> String {
        let matter = if self.is_closed { "whose other end has closed" } else { "and carries data already" };
        format!("has not accepted a connection to its unix socket {}, {matter}", self.name)
    }
}

impl UnixSockets {
    /// Those of the calling thread's network namespace.
    ///
    /// # Errors
    /// The kernel refuses.
    pub fn open() -> io::Result<Self> {
        SockDiag::open().map(Self)
    }

    /// Of these, which processes of the service have open: those whose other end none of them has. `is_here` tells
    /// whether one of them is used in this network namespace: the kernel makes an accepted socket in that of the client,
    /// so that one from outside is not among those that it tells of here.
    pub(super) fn outside(
        &self,
        open: &HashMap<u64, usize>,
        is_here: impl Fn(usize) -> bool,
    ) -> io::Result<Vec<Outside>> {
        let all = self.0.unix(States::ANY, Show::PEER)?;
        let all: HashMap<u64, Socket> = all.into_iter().map(|socket| (socket.inode, socket)).collect();
        let mut found: Vec<Outside> = open
            .iter()
            .filter_map(|(inode, place)| {
                let name = match all.get(inode) {
                    Some(Socket { peer: 0, .. }) => return None,
                    Some(socket) => (!open.contains_key(&socket.peer)).then(|| socket.name.clone())?,
                    None => is_here(*place).then(String::new)?,
                };
                Some(Outside { inode: *inode, name })
            })
            .collect();
        found.sort_by_key(|outside| outside.inode);
        Ok(found)
    }

    pub(super) fn waiting(&self) -> io::Result<Vec<Waiting>> {
        let listeners = self.0.unix(States::LISTENING, Show::WAITING)?;
        let mut sent = HashMap::new();
        if listeners.iter().any(|listener| listener.waiting.iter().any(|inode| *inode != 0)) {
            let connected = self.0.unix(States::CONNECTED, Show::QUEUES)?;
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
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::io::Write;
    use std::os::fd::AsRawFd;
    use std::os::unix::fs::MetadataExt;
    use std::os::unix::net::{UnixListener, UnixStream};

    use super::*;

    #[test]
    fn connections_to_a_process_outside_are_found() {
        let (one, other) = UnixStream::pair().unwrap();
        let inode =
            |of: &UnixStream| std::fs::metadata(format!("/proc/self/fd/{}", of.as_raw_fd())).unwrap().ino();
        let sockets = UnixSockets::open().unwrap();
        let outside = |open: &[u64], is_here| {
            let open = open.iter().map(|inode| (*inode, 0)).collect();
            let found = sockets.outside(&open, |_| is_here).unwrap();
            found.iter().map(|outside| outside.inode).collect::<Vec<_>>()
        };
        assert_eq!(outside(&[inode(&one), inode(&other)], true), [0; 0]);
        assert_eq!(outside(&[inode(&one)], true), [inode(&one)]);
        // One that a client of another network namespace has made.
        assert_eq!((outside(&[1], true), outside(&[1], false)), (vec![1], vec![]));
        let alone = inode(&one);
        drop(other);
        assert_eq!(outside(&[alone], true), [0; 0], "its other end has closed");
    }

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
}
