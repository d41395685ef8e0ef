//! Takes questions over UDP and TCP, and says what is known of services or what the node's own name servers say.
//!
//! Who asks too much is not answered, and asks again: nothing here grows with the number of questions.

use std::collections::HashMap;
use std::io;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::os::fd::AsRawFd;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use hickory_proto::op::{Message, MessageType, OpCode, ResponseCode};
use nix::sys::socket::{
    AddressFamily, SockFlag, SockType, SockaddrIn, bind, setsockopt, socket, sockopt::BindToDevice,
};
use tokio::net::{TcpListener, TcpSocket, TcpStream, UdpSocket};
use tokio::time::{sleep, timeout};

use crate::PORT;
use crate::answer::{Answer, Names, Transport, answer, failure};
use crate::upstream::{Said, Upstream, read_message, write_message};

/// Questions that wait for the node's own name servers at a time: of all, and of one service.
const MOST_WAITING: (usize, usize) = (1024, 64);
/// Connections at a time: of all, and of one service.
const MOST_CONNECTIONS: (usize, usize) = (256, 16);
/// How long a connection may be silent, and how long it may last.
const SILENCE: Duration = Duration::from_secs(10);
const LIFE: Duration = Duration::from_secs(60);
/// Connections that wait to be taken.
const BACKLOG: u32 = 64;
/// The pause after an error, as when the process has no descriptor left.
const PAUSE: Duration = Duration::from_millis(100);
/// More than a question has.
const LARGEST_QUESTION: usize = 4096;
/// As much as an answer has for who names no size.
const UDP_SIZE: usize = 512;

/// The server of one network.
#[derive(Debug)]
pub struct Server {
    datagrams: UdpSocket,
    connections: TcpListener,
}

struct Shared {
    names: Arc<dyn Names>,
    upstream: Upstream,
    waiting: Shares,
    connections: Shares,
}

/// What can be had at a time, so that no service takes all of it from the others.
#[derive(Debug, Clone)]
struct Shares {
    most: (usize, usize),
    taken: Arc<Mutex<(usize, HashMap<Ipv4Addr, usize>)>>,
}

/// One of it, until it is dropped.
struct Share {
    of: Shares,
    asker: Ipv4Addr,
}

impl Shares {
    fn new(most: (usize, usize)) -> Self {
        Self { most, taken: Arc::default() }
    }

    /// None where all is taken, or all that this service may have.
    fn take(&self, asker: Ipv4Addr) -> Option<Share> {
        let mut taken = self.taken.lock().unwrap_or_else(PoisonError::into_inner);
        let (all, each) = &mut *taken;
        let own = each.get(&asker).copied().unwrap_or_default();
        if *all >= self.most.0 || own >= self.most.1 {
            return None;
        }
        *all += 1;
        each.insert(asker, own + 1);
        Some(Share { of: self.clone(), asker })
    }
}

impl Drop for Share {
    fn drop(&mut self) {
        let mut taken = self.of.taken.lock().unwrap_or_else(PoisonError::into_inner);
        let (all, each) = &mut *taken;
        *all -= 1;
        match each.get_mut(&self.asker) {
            Some(own) if *own > 1 => *own -= 1,
            _ => drop(each.remove(&self.asker)),
        }
    }
}

impl Server {
    /// Takes a port of an address, for packets of one interface.
    ///
    /// # Errors
    /// When somebody else has it, or there is no such interface or address.
    pub fn bind(address: Ipv4Addr, port: u16, interface: &str) -> io::Result<Self> {
        let datagrams = socket(
            AddressFamily::Inet,
            SockType::Datagram,
            SockFlag::SOCK_CLOEXEC | SockFlag::SOCK_NONBLOCK,
            None,
        )?;
        // Before it has an address: no packet of another interface reaches it.
        setsockopt(&datagrams, BindToDevice, &interface.into())?;
        bind(datagrams.as_raw_fd(), &SockaddrIn::from(std::net::SocketAddrV4::new(address, port)))?;
        let connections = TcpSocket::new_v4()?;
        connections.set_reuseaddr(true)?;
        connections.bind_device(Some(interface.as_bytes()))?;
        connections.bind((address, port).into())?;
        Ok(Self {
            datagrams: UdpSocket::from_std(datagrams.into())?,
            connections: connections.listen(BACKLOG)?,
        })
    }

    /// Answers, until it is dropped.
    pub async fn serve(self, names: Arc<dyn Names>, upstream: Upstream) {
        let Self { datagrams, connections } = self;
        let (waiting, taken) = (Shares::new(MOST_WAITING), Shares::new(MOST_CONNECTIONS));
        let shared = Arc::new(Shared { names, upstream, waiting, connections: taken });
        tokio::join!(serve_datagrams(Arc::new(datagrams), &shared), serve_connections(connections, &shared));
    }
}

impl Shared {
    /// The answer to a question; none where it gets none.
    async fn reply(&self, question: &[u8], asker: Ipv4Addr, transport: Transport) -> Option<Vec<u8>> {
        match self.known(question, asker, transport) {
            Answer::Reply(reply) => Some(reply),
            Answer::Silence => None,
            Answer::Elsewhere => {
                let _share = self.waiting.take(asker)?;
                self.elsewhere(question, transport).await
            }
        }
    }

    fn known(&self, question: &[u8], asker: Ipv4Addr, transport: Transport) -> Answer {
        answer(question, asker, transport, self.names.as_ref())
    }

    async fn elsewhere(&self, question: &[u8], transport: Transport) -> Option<Vec<u8>> {
        let code = match self.upstream.ask(question, transport).await {
            Said::Reply(reply) => return Some(reply),
            Said::Nothing => ResponseCode::ServFail,
            // Then there are no other names than those of services.
            Said::NoServers => ResponseCode::NXDomain,
        };
        match failure(question, code, transport) {
            Answer::Reply(reply) => Some(reply),
            _ => None,
        }
    }
}

async fn serve_datagrams(socket: Arc<UdpSocket>, shared: &Arc<Shared>) {
    let mut buffer = vec![0; LARGEST_QUESTION];
    loop {
        let (length, from) = match socket.recv_from(&mut buffer).await {
            Ok(received) => received,
            Err(error) => {
                tracing::debug!(%error, "a question for a name is lost");
                sleep(PAUSE).await;
                continue;
            }
        };
        let IpAddr::V4(asker) = from.ip() else { continue };
        let Some(question) = buffer.get(..length) else { continue };
        match shared.known(question, asker, Transport::Udp) {
            Answer::Reply(reply) => send(&socket, &reply, from).await,
            Answer::Silence => {}
            Answer::Elsewhere => {
                let Some(share) = shared.waiting.take(asker) else { continue };
                let (shared, socket, question) = (Arc::clone(shared), Arc::clone(&socket), question.to_vec());
                tokio::spawn(async move {
                    let _share = share;
                    if let Some(reply) = shared.elsewhere(&question, Transport::Udp).await {
                        send(&socket, &reply, from).await;
                    }
                });
            }
        }
    }
}

/// As with every datagram, who asks finds out by itself that it is lost.
async fn send(socket: &UdpSocket, reply: &[u8], to: SocketAddr) {
    if let Err(error) = socket.send_to(reply, to).await {
        tracing::debug!(%to, %error, "an answer to a question for a name is lost");
    }
}

async fn serve_connections(listener: TcpListener, shared: &Arc<Shared>) {
    loop {
        match listener.accept().await {
            Ok((stream, from)) => {
                let IpAddr::V4(asker) = from.ip() else { continue };
                // It is closed at once.
                let Some(share) = shared.connections.take(asker) else { continue };
                let shared = Arc::clone(shared);
                tokio::spawn(async move {
                    let _share = share;
                    let served = timeout(LIFE, serve_connection(stream, asker, &shared));
                    if let Ok(Err(error)) = served.await {
                        tracing::debug!(%asker, %error, "a connection with questions for names has ended");
                    }
                });
            }
            Err(error) => {
                tracing::debug!(%error, "a connection with questions for names is not taken");
                sleep(PAUSE).await;
            }
        }
    }
}

async fn serve_connection(mut stream: TcpStream, asker: Ipv4Addr, shared: &Shared) -> io::Result<()> {
    while let Ok(question) = timeout(SILENCE, read_message(&mut stream)).await {
        let Some(reply) = shared.reply(&question?, asker, Transport::Tcp).await else { return Ok(()) };
        timeout(SILENCE, write_message(&mut stream, &reply)).await??;
    }
    Ok(())
}

/// How long [`hears`] waits before it asks again, and how long at last. Only where nothing gets through is all of it waited for.
const WAITS: [Duration; 5] = [
    Duration::from_millis(100),
    Duration::from_millis(200),
    Duration::from_millis(400),
    Duration::from_millis(800),
    Duration::from_millis(1500),
];

/// Whether the server at an address gets what the calling thread's network namespace asks it.
///
/// # Errors
/// When no answer comes.
pub fn hears(server: Ipv4Addr) -> io::Result<()> {
    let socket = std::net::UdpSocket::bind((Ipv4Addr::UNSPECIFIED, 0))?;
    socket.connect((server, PORT))?;
    // What it does not do, it says itself, and asks nobody else.
    let asked = Message::new(fastrand::u16(..), MessageType::Query, OpCode::Status);
    let question = asked.to_vec().map_err(io::Error::other)?;
    let mut buffer = [0; UDP_SIZE];
    let mut last = io::Error::other("no answer comes");
    for wait in WAITS {
        socket.set_read_timeout(Some(wait))?;
        let received = socket.send(&question).and_then(|_| socket.recv(&mut buffer));
        match received {
            Ok(length) => {
                let reply = buffer.get(..length).and_then(|reply| Message::from_vec(reply).ok());
                // Others have other words for that.
                let is_own = |reply: &Message| {
                    reply.metadata.id == asked.metadata.id
                        && reply.metadata.response_code == ResponseCode::NotImp
                        && reply.metadata.recursion_available
                };
                if reply.as_ref().is_some_and(is_own) {
                    return Ok(());
                }
            }
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
            Err(error) => {
                // It is refused at once.
                std::thread::sleep(wait);
                last = error;
            }
        }
    }
    Err(last)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn no_service_takes_what_others_need() {
        let shares = Shares::new((3, 2));
        let (one, other) = (Ipv4Addr::new(10, 88, 0, 2), Ipv4Addr::new(10, 88, 0, 3));
        let taken = [shares.take(one).unwrap(), shares.take(one).unwrap()];
        assert!(shares.take(one).is_none(), "it has all that it may have");
        let last = shares.take(other).unwrap();
        assert!(shares.take(other).is_none(), "there is no more");
        drop(taken);
        let _again = shares.take(one).unwrap();
        drop(last);
        assert_eq!(*shares.taken.lock().unwrap(), (1, HashMap::from([(one, 1)])));
    }
}
