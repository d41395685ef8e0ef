//! Connections that the service has not accepted yet, and those that are still being made.
//!
//! The latter come about before the freeze: no more are begun ([`crate::attach`]), and within a round trip
//! those that were are there.
//!
//! They are in the queue of a listening socket and in no process, and CRIU can neither dump them nor put
//! them back there (it gives up: "In-flight connection"). A service that is busy has some now and then, for
//! as long as it takes it to come round. So when it is frozen and nothing more can come, it runs on for a
//! moment, takes them, and is frozen again.
//!
//! The kernel is asked through sock_diag(7), for sockets that listen only: reading `/proc/net/tcp` walks
//! over all connections of the node, which takes a millisecond where there are none.

use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::time::{Duration, Instant};

use godwit_engine::ContainerConfig;
use nix::sys::socket::{AddressFamily, MsgFlags, SockFlag, SockProtocol, SockType, recv, send, socket};

use super::{Source, SourceError};
use crate::local::LocalError;

/// How long those that are being made are waited for: the round trip of a far client. A request that nobody
/// goes on with, as scanners leave them, takes a minute to go away.
const MAKING: Duration = Duration::from_millis(200);
/// Between two looks; no event tells.
const LOOK: Duration = Duration::from_millis(1);
/// How long it runs at first, and how long at last, each time twice as long: an eighth of a second in all.
/// Who has not accepted by then is not about to.
const RUNS: (Duration, Duration) = (Duration::from_millis(1), Duration::from_millis(64));

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
struct Waiting {
    port: u16,
    connections: u32,
}

/// The kernel's answers about the sockets of a network namespace.
pub(super) struct Listeners(OwnedFd);

impl Source {
    /// To be made before the freeze.
    pub(super) async fn listeners(&self, config: &ContainerConfig) -> Result<Listeners, LocalError> {
        let opened = godwit_network::enter(&config.network_namespace, Listeners::open).await?;
        opened.map_err(|source| failed(config, source))
    }

    /// Waits until no connection to the service is half made; for a while.
    pub(super) async fn settle_openings(
        &self,
        config: &ContainerConfig,
        listeners: &Listeners,
    ) -> Result<(), SourceError> {
        let begun = Instant::now();
        while listeners.being_made().map_err(|source| failed(config, source))? {
            if begun.elapsed() > MAKING {
                tracing::debug!(service = %self.service.name, "connections are half made, and will be reset");
                break;
            }
            tokio::time::sleep(LOOK).await;
        }
        Ok(())
    }

    /// Lets a frozen service whose port is closed accept what waits; it is frozen when this returns.
    pub(super) async fn accept_waiting(
        &self,
        config: &ContainerConfig,
        listeners: &Listeners,
    ) -> Result<(), SourceError> {
        let mut runs = RUNS.0;
        while let Some(waiting) = listeners.waiting().map_err(|source| failed(config, source))? {
            if runs > RUNS.1 {
                let Waiting { port, connections } = waiting;
                return Err(SourceError::NotAccepted { port, connections });
            }
            tracing::debug!(service = %self.service.name, ?waiting, "connections wait to be accepted");
            self.local.engine.thaw(config).await?;
            tokio::time::sleep(runs).await;
            self.local.engine.freeze(config).await?;
            runs *= 2;
        }
        Ok(())
    }
}

fn failed(config: &ContainerConfig, source: io::Error) -> LocalError {
    let path = config.network_namespace.clone();
    LocalError::Io { action: "ask for the listening sockets of", path, source }
}

impl Listeners {
    /// Of the calling thread's network namespace.
    fn open() -> io::Result<Self> {
        let protocol = SockProtocol::NetlinkSockDiag;
        Ok(Self(socket(AddressFamily::Netlink, SockType::Raw, SockFlag::SOCK_CLOEXEC, protocol)?))
    }

    /// The first listening socket at which connections wait.
    fn waiting(&self) -> io::Result<Option<Waiting>> {
        Ok(self.ask(LISTENING)?.into_iter().find(|waiting| waiting.connections > 0))
    }

    /// Whether a connection is half made.
    fn being_made(&self) -> io::Result<bool> {
        Ok(!self.ask(BEING_MADE)?.is_empty())
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
