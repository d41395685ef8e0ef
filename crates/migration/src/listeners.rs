//! The listening sockets of a service, and what waits at them.
//!
//! The kernel is asked for sockets that listen only: reading `/proc/net/tcp` walks over all connections of the node,
//! which takes a millisecond where there are none.

use std::io;

use godwit_sockets::SockDiag;
use godwit_sockets::inet::{Family, States, Transport};

/// What is known of the sockets of one service that listen.
pub trait Listening: Send + Sync {
    /// The first of them at which connections wait.
    fn waiting(&self) -> io::Result<Option<Waiting>>;
    /// Whether a connection is half made.
    fn being_made(&self) -> io::Result<bool>;
}

/// What waits at one listening socket.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Waiting {
    /// Its port.
    pub port: u16,
    /// How many connections.
    pub connections: u32,
}

/// The kernel's answers about the sockets of a network namespace.
pub(crate) struct Listeners(SockDiag);

impl Listeners {
    /// Of the calling thread's network namespace.
    pub(crate) fn open() -> io::Result<Self> {
        SockDiag::open().map(Self)
    }

    /// What waits at each socket in these states.
    fn ask(&self, states: States) -> io::Result<Vec<Waiting>> {
        let mut found = Vec::new();
        for family in [Family::V4, Family::V6] {
            self.0.inet(family, Transport::Tcp, states, |socket| {
                found.push(Waiting { port: socket.local.port(), connections: socket.receive_queue });
            })?;
        }
        Ok(found)
    }
}

impl Listening for Listeners {
    fn waiting(&self) -> io::Result<Option<Waiting>> {
        Ok(self.ask(States::LISTENING)?.into_iter().find(|waiting| waiting.connections > 0))
    }

    fn being_made(&self) -> io::Result<bool> {
        Ok(!self.ask(States::HALF_MADE)?.is_empty())
    }
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
}
