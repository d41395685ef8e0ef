//! The listening sockets of a service, and what waits at them.
//!
//! The kernel is asked for sockets that listen only: reading `/proc/net/tcp` walks over all connections of the node,
//! which takes a millisecond where there are none.

use std::io;
use std::time::Duration;

use godwit_sockets::SockDiag;
use godwit_sockets::inet::{Family, Socket, States, Transport};

/// The kernel's `TCP_TIMEOUT_INIT` (RFC 6298).
const FIRST_TIME_OUT: Duration = Duration::from_secs(1);

/// What is known of the sockets of one service that listen.
pub trait Listening: Send + Sync {
    /// The first of them at which connections wait.
    fn waiting(&self) -> io::Result<Option<Waiting>>;
    /// Whether a connection is half made whose client was answered (SYN, ACK) within this time, so that its last word may be
    /// under way.
    fn being_made(&self, within: Duration) -> io::Result<bool>;
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

    /// The sockets in these states.
    fn ask(&self, states: States) -> io::Result<Vec<Socket>> {
        let mut found = Vec::new();
        for family in [Family::V4, Family::V6] {
            self.0.inet(family, Transport::Tcp, states, |socket| found.push(socket))?;
        }
        Ok(found)
    }
}

impl Listening for Listeners {
    fn waiting(&self) -> io::Result<Option<Waiting>> {
        let sockets = self.ask(States::LISTENING)?;
        let first = sockets.iter().find(|socket| socket.receive_queue > 0);
        Ok(first.map(|socket| Waiting { port: socket.local.port(), connections: socket.receive_queue }))
    }

    fn being_made(&self, within: Duration) -> io::Result<bool> {
        Ok(self.ask(States::HALF_MADE)?.iter().any(|socket| since_answer(socket) < within))
    }
}

/// How long ago the client of a half-made connection was answered last. The kernel tells when it will be answered again:
/// a second after the first time, two after the second.
fn since_answer(half_made: &Socket) -> Duration {
    let time_out = FIRST_TIME_OUT.saturating_mul(1 << half_made.retransmits.min(16));
    time_out.saturating_sub(Duration::from_millis(half_made.timer_ms.into()))
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::net::{SocketAddr, TcpListener, TcpStream};
    use std::os::fd::AsRawFd;
    use std::time::Instant;

    use godwit_sockets::inet::TcpInfo;

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
    fn a_half_made_connection_is_waited_for_while_its_clients_answer_may_be_under_way() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        // Before data of its client, a connection is half made for as long as this.
        let seconds = 60_i32;
        let length = libc::socklen_t::try_from(size_of_val(&seconds)).unwrap();
        // SAFETY: the option's value is that of an int of this length.
        let set = unsafe {
            let value = (&raw const seconds).cast();
            libc::setsockopt(listener.as_raw_fd(), libc::IPPROTO_TCP, libc::TCP_DEFER_ACCEPT, value, length)
        };
        assert_eq!(set, 0, "{}", io::Error::last_os_error());
        let address = listener.local_addr().unwrap();
        let listeners = Listeners::open().unwrap();
        let begun = Instant::now();
        let _client = TcpStream::connect(address).unwrap();
        let ours = || {
            let half_made = listeners.ask(States::HALF_MADE).unwrap();
            half_made.into_iter().find(|socket| socket.local == address).unwrap()
        };
        assert!(listeners.being_made(FIRST_TIME_OUT).unwrap(), "{:?}", ours());
        while since_answer(&ours()) < FIRST_TIME_OUT / 4 {
            assert!(begun.elapsed() < Duration::from_secs(30), "{:?}", ours());
            std::thread::sleep(Duration::from_millis(10));
        }
        assert!(begun.elapsed() >= FIRST_TIME_OUT / 5, "{:?}", ours());
    }

    #[test]
    fn the_age_of_an_answer_follows_from_the_time_until_the_next() {
        let half_made = |retransmits, timer_ms| Socket {
            state: 3,
            local: ([127, 0, 0, 1], 1).into(),
            remote: ([127, 0, 0, 1], 2).into(),
            timer: 1,
            timer_ms,
            retransmits,
            receive_queue: 0,
            send_queue: 0,
            tcp: TcpInfo::default(),
            identity: godwit_sockets::inet::Identity::default(),
        };
        let ages = [(0, 1000), (0, 400), (1, 1990), (3, 1000), (255, 1000), (0, 5000)]
            .map(|(retransmits, timer_ms)| since_answer(&half_made(retransmits, timer_ms)).as_millis());
        assert_eq!(ages, [0, 600, 10, 7000, 65_535_000, 0]);
    }
}
