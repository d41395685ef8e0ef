//! The process that is dumped: this test program again, with connections to itself in one epoll(7), and
//! datagrams that nobody has read. It can tell at any time whether all of it is as it was.

use std::collections::BTreeSet;
use std::io::{Read, Write};
use std::net::{Ipv4Addr, Ipv6Addr, TcpListener, TcpStream, UdpSocket};
use std::process::Command;

use nix::sys::epoll::{Epoll, EpollCreateFlags, EpollEvent, EpollFlags, EpollTimeout};
use nix::sys::resource::{Resource, getrlimit, setrlimit};
use nix::sys::signal::{SigSet, Signal, raise};

/// More than CRIU puts into the image of the files.
pub(crate) const MUCH: usize = 20_000;

/// Both ends of a connection.
struct Pair {
    client: TcpStream,
    server: TcpStream,
    /// What the server has not read.
    waiting: Vec<u8>,
}

/// What waits in the queue of a connection's server: of the first there is much, of most nothing.
fn waiting(number: usize) -> Vec<u8> {
    let length = match number {
        0 => MUCH,
        _ if number.is_multiple_of(3) => number % 1000,
        _ => 0,
    };
    (0..length).map(|at| u8::try_from((number + at) % 251).unwrap()).collect()
}

/// Datagrams of all sizes: one is empty, one is larger than any packet on a wire.
fn datagrams() -> [Vec<u8>; 4] {
    [b"first".to_vec(), Vec::new(), vec![7; 40_000], b"last".to_vec()]
}

/// A socket with datagrams in its queue, and the one that sent them.
struct Datagrams {
    server: UdpSocket,
    client: UdpSocket,
}

impl Datagrams {
    fn new(server: UdpSocket, client: UdpSocket) -> Self {
        let to = server.local_addr().unwrap();
        for datagram in datagrams() {
            client.send_to(&datagram, to).unwrap();
        }
        server.set_nonblocking(true).unwrap();
        Self { server, client }
    }

    fn assert_right(&self) {
        let from = self.client.local_addr().unwrap();
        let mut buffer = vec![0; 65_536];
        for datagram in datagrams() {
            let (length, sender) = self.server.recv_from(&mut buffer).unwrap();
            assert_eq!((sender, &buffer[..length]), (from, &datagram[..]));
        }
        let after = self.server.recv_from(&mut buffer).unwrap_err();
        assert_eq!(after.kind(), std::io::ErrorKind::WouldBlock);
    }
}

/// Is it, until it is asked by SIGUSR1 whether all is right; a panic says that it is not.
pub(crate) fn run(connections: usize, with_datagrams: bool) {
    let status = Command::new("ip").args(["link", "set", "lo", "up"]).status().unwrap();
    assert!(status.success());
    let (_, most) = getrlimit(Resource::RLIMIT_NOFILE).unwrap();
    setrlimit(Resource::RLIMIT_NOFILE, most, most).unwrap();

    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    let epoll = Epoll::new(EpollCreateFlags::EPOLL_CLOEXEC).unwrap();
    let mut pairs: Vec<Pair> = (0..connections)
        .map(|number| {
            let mut client = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
            let (server, _) = listener.accept().unwrap();
            epoll.add(&server, EpollEvent::new(EpollFlags::EPOLLIN, number as u64)).unwrap();
            let waiting = waiting(number);
            client.write_all(&waiting).unwrap();
            Pair { client, server, waiting }
        })
        .collect();
    let mut queues = Vec::new();
    if with_datagrams {
        let v4 = || UdpSocket::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        let v6 = || UdpSocket::bind((Ipv6Addr::LOCALHOST, 0)).unwrap();
        queues = vec![Datagrams::new(v4(), v4()), Datagrams::new(v6(), v6())];
    }
    raise(Signal::SIGSTOP).unwrap();
    let mut asked = SigSet::empty();
    asked.add(Signal::SIGUSR1);
    asked.wait().unwrap();

    assert_eq!(readable(&epoll, connections), {
        let waiting = pairs.iter().enumerate().filter(|(_, pair)| !pair.waiting.is_empty());
        waiting.map(|(number, _)| number).collect::<BTreeSet<_>>()
    });
    for (number, pair) in pairs.iter_mut().enumerate() {
        let mut read = vec![0; pair.waiting.len()];
        pair.server.read_exact(&mut read).unwrap();
        assert!(read == pair.waiting, "connection {number}");
        // They are connected to each other, and to nobody else.
        let (client, server) = (&pair.client, &pair.server);
        let there_and_back = [(client, server, number), (server, client, !number)];
        for (mut from, mut to, bytes) in there_and_back.map(|(from, to, n)| (from, to, n.to_be_bytes())) {
            from.write_all(&bytes).unwrap();
            let mut read = [0; size_of::<usize>()];
            to.read_exact(&mut read).unwrap();
            assert_eq!(read, bytes, "connection {number}");
        }
    }
    for queue in &queues {
        queue.assert_right();
    }
}

/// The connections that can be read now.
fn readable(epoll: &Epoll, connections: usize) -> BTreeSet<usize> {
    let mut events = vec![EpollEvent::empty(); connections];
    let count = epoll.wait(&mut events, EpollTimeout::ZERO).unwrap();
    events.iter().take(count).map(|event| usize::try_from(event.data()).unwrap()).collect()
}
