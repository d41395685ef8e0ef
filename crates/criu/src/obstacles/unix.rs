//! Connections to unix sockets that wait to be accepted and that CRIU cannot dump: those whose other end has
//! closed, or has sent something.

use std::collections::HashMap;
use std::io;

use godwit_sockets::SockDiag;
use godwit_sockets::unix::{Show, Socket, States};

pub(super) const WAITING: &str = "and CRIU cannot dump that; try again when the service has accepted it";

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

impl Waiting {
    pub(super) fn what(&self) -> String {
        let matter = if self.is_closed { "whose other end has closed" } else { "and carries data already" };
        format!("has not accepted a connection to its unix socket {}, {matter},", self.name)
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
