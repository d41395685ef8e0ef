//! The service of many connections: it gives back what it gets, and puts its connections into states on
//! order.
//!
//! ```text
//!   PORT        TCP: every byte comes back        UDP: every datagram comes back
//!   PORT + 1    TCP: nobody accepts before "accept"
//!   PORT + 2    TCP: orders, a line each, each answered by a line
//! ```
//!
//! | order | what | answer |
//! |---|---|---|
//! | `count` | | connections that are given back what they send |
//! | `mute P` | neither reads from nor writes to the client with port P, so that its queues fill | `ok` |
//! | `unmute P` | does so again | `ok` |
//! | `fill P` | sends as much of stream P ([`stream`]) as the socket takes now | bytes of it so far |
//! | `keep P` | does not close when the client has sent its FIN | `ok` |
//! | `finish P` | sends a FIN; what comes after that is read, and not given back | `ok` |
//! | `received P` | | bytes that have come, and their digest |
//! | `keepalive P IDLE EVERY COUNT` | seconds, seconds, probes | `ok` |
//! | `leave` | does not read datagrams, so that they wait | `ok` |
//! | `take` | does so again | `ok` |
//! | `accept` | takes all that wait at PORT + 1 | how many |
//! | `connect ADDRESS:PORT N` | connects to a server, which is given back what it sends too | `ok` |
//! | `ring N` | makes N connections to itself of each family, and fills all their queues | bytes in them |
//! | `unring` | reads and compares what is in them, and as much again, and closes them | bytes |
//!
//! One thread, which waits for all of them with epoll(7). An order that cannot be carried out is answered
//! with a sentence that begins with `no:`.

use std::{
    collections::{HashMap, VecDeque},
    io::{self, Read as _, Write as _},
    net::{Ipv4Addr, Shutdown, SocketAddrV4, TcpListener, TcpStream, UdpSocket},
    os::fd::AsFd,
    process::ExitCode,
};

use anyhow::Context as _;
use godwit_lab::workload::stream;
use nix::sys::{
    epoll::{Epoll, EpollCreateFlags, EpollEvent, EpollFlags, EpollTimeout},
    socket::{Backlog, listen, setsockopt, sockopt},
};

use super::ring::Ring;

#[derive(Debug, Clone, clap::Args)]
pub(super) struct Args {
    /// Port for TCP and UDP; the next two are for connections that wait, and for orders
    #[arg(long)]
    port: u16,
    /// How many connections may wait at the port where nobody accepts
    #[arg(long, default_value_t = 4)]
    backlog: u16,
    /// Give what comes back by two small writes, the second of which waits until the first is acknowledged
    /// (Nagle's algorithm, RFC 896)
    #[arg(long)]
    halves: bool,
}

/// How many connections may wait to be accepted for a moment where they are.
const QUEUE: i32 = 4096;
/// Read at once; a connection to which so much is owed is not read until some of it has left.
const PIECE: usize = 64 << 10;
/// Events taken at once.
const EVENTS: usize = 256;

/// What an event is about; connections have the numbers from [`FIRST`] on.
const SERVED: u64 = 0;
const ORDERS: u64 = 1;
const DATAGRAMS: u64 = 2;
const FIRST: u64 = 3;

pub(super) fn run(args: &Args) -> anyhow::Result<ExitCode> {
    let mut service = Service::new(args)?;
    let mut events = vec![EpollEvent::empty(); EVENTS];
    loop {
        let count = match service.epoll.wait(&mut events, EpollTimeout::NONE) {
            Ok(count) => count,
            Err(nix::errno::Errno::EINTR) => 0,
            Err(error) => return Err(error).context("waiting for connections"),
        };
        for event in events.iter().take(count) {
            service.serve(event.data(), event.events())?;
        }
    }
}

/// Everything that is open.
struct Service {
    epoll: Epoll,
    served: TcpListener,
    waiting: TcpListener,
    orders: TcpListener,
    datagrams: UdpSocket,
    connections: HashMap<u64, Connection>,
    /// The connections of clients, by their port.
    clients: HashMap<u16, u64>,
    next: u64,
    halves: bool,
    ring: Ring,
}

/// What a connection is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Purpose {
    /// What it sends is given back.
    Echo,
    /// What it sends are orders.
    Orders,
}

struct Connection {
    stream: TcpStream,
    purpose: Purpose,
    /// The other end's port, if it is a client.
    port: Option<u16>,
    /// To be written.
    owed: VecDeque<u8>,
    /// Orders: what came of a line so far.
    line: Vec<u8>,
    /// Bytes of its stream that `fill` has sent.
    filled: u64,
    /// Bytes that came, and their digest.
    received: (u64, u64),
    /// We have sent our FIN.
    finished: bool,
    mute: bool,
    /// Not closed when the client has ended.
    keep: bool,
    /// The other end has sent its FIN.
    ended: bool,
    /// What it gets is written in two halves.
    halves: bool,
}

impl Service {
    fn new(args: &Args) -> anyhow::Result<Self> {
        let port = |more: u16| args.port.checked_add(more).context("the port must be below 65534");
        let open = |port: u16, queue: i32| {
            let listener = TcpListener::bind((Ipv4Addr::UNSPECIFIED, port))?;
            // What std asks for is 128.
            listen(&listener, Backlog::new(queue)?)?;
            listener.set_nonblocking(true)?;
            Ok::<_, io::Error>(listener)
        };
        let datagrams = UdpSocket::bind((Ipv4Addr::UNSPECIFIED, args.port)).context("taking datagrams")?;
        datagrams.set_nonblocking(true)?;
        let service = Self {
            epoll: Epoll::new(EpollCreateFlags::EPOLL_CLOEXEC)?,
            served: open(args.port, QUEUE).context("listening")?,
            waiting: open(port(1)?, args.backlog.into()).context("listening where nobody accepts")?,
            orders: open(port(2)?, QUEUE).context("listening for orders")?,
            datagrams,
            connections: HashMap::new(),
            clients: HashMap::new(),
            next: FIRST,
            halves: args.halves,
            ring: Ring::default(),
        };
        let readable = |number| EpollEvent::new(EpollFlags::EPOLLIN, number);
        service.epoll.add(&service.served, readable(SERVED))?;
        service.epoll.add(&service.orders, readable(ORDERS))?;
        service.epoll.add(&service.datagrams, readable(DATAGRAMS))?;
        Ok(service)
    }

    /// Does what one event asks for. A client that goes away is no error; what is, ends the service.
    fn serve(&mut self, number: u64, events: EpollFlags) -> anyhow::Result<()> {
        match number {
            SERVED => self.accept_all(Purpose::Echo).map(drop),
            ORDERS => self.accept_all(Purpose::Orders).map(drop),
            DATAGRAMS => self.datagrams(),
            number => {
                let open = match self.connections.get_mut(&number) {
                    Some(_) if events.intersects(EpollFlags::EPOLLERR) => Ok(false),
                    Some(connection) => connection.give_back(),
                    // It was closed by an order that came with this event.
                    None => return Ok(()),
                };
                match open {
                    Ok(true) => {
                        self.obey(number)?;
                        self.watch(number)?;
                    }
                    // Its client has gone, in order or by a reset.
                    Ok(false) | Err(_) => self.close(number),
                }
                Ok(())
            }
        }
    }

    /// Takes all that wait; how many.
    fn accept_all(&mut self, purpose: Purpose) -> anyhow::Result<usize> {
        let mut count = 0;
        loop {
            let listener = if purpose == Purpose::Orders { &self.orders } else { &self.served };
            match listener.accept() {
                Ok((stream, from)) => self.add(stream, purpose, Some(from.port()))?,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(count),
                // It went away before it was accepted.
                Err(error) if error.kind() == io::ErrorKind::ConnectionAborted => continue,
                Err(error) => return Err(error).context("accepting a connection"),
            }
            count += 1;
        }
    }

    fn add(&mut self, stream: TcpStream, purpose: Purpose, port: Option<u16>) -> anyhow::Result<()> {
        stream.set_nonblocking(true)?;
        let halves = self.halves && purpose == Purpose::Echo;
        stream.set_nodelay(!halves)?;
        let number = self.next;
        self.next += 1;
        self.epoll.add(&stream, EpollEvent::new(EpollFlags::EPOLLIN, number))?;
        let port = port.filter(|_| purpose == Purpose::Echo);
        if let Some(port) = port {
            self.clients.insert(port, number);
        }
        let (owed, line) = (VecDeque::new(), Vec::new());
        let connection = Connection {
            stream,
            purpose,
            port,
            owed,
            line,
            filled: 0,
            received: (0, 0),
            finished: false,
            mute: false,
            keep: false,
            ended: false,
            halves,
        };
        self.connections.insert(number, connection);
        Ok(())
    }

    fn close(&mut self, number: u64) {
        let Some(connection) = self.connections.remove(&number) else { return };
        // Another client may have come from the same port since.
        if let Some(port) = connection.port.filter(|port| self.clients.get(port) == Some(&number)) {
            self.clients.remove(&port);
        }
    }

    /// Asks for the events that a connection can do something about. None are asked for where nothing can
    /// be done: the end of both directions would be told again and again.
    fn watch(&self, number: u64) -> anyhow::Result<()> {
        let Some(connection) = self.connections.get(&number) else { return Ok(()) };
        let mut events = EpollFlags::empty();
        if !connection.mute {
            events.set(EpollFlags::EPOLLIN, !connection.ended && connection.owed.len() < PIECE);
            events.set(EpollFlags::EPOLLOUT, !connection.owed.is_empty());
        }
        watch(&self.epoll, &connection.stream, EpollEvent::new(events, number))
            .context("watching a connection")
    }

    fn datagrams(&self) -> anyhow::Result<()> {
        let mut buffer = vec![0; PIECE];
        loop {
            match self.datagrams.recv_from(&mut buffer) {
                Ok((length, from)) => {
                    // What cannot be sent is lost, as datagrams may be.
                    let _ = self.datagrams.send_to(buffer.get(..length).unwrap_or_default(), from);
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(()),
                // A datagram that had been sent was refused by who was to get it.
                Err(error) if error.kind() == io::ErrorKind::ConnectionRefused => {}
                Err(error) => return Err(error).context("taking datagrams"),
            }
        }
    }

    /// Carries out the orders that have come over a connection.
    fn obey(&mut self, number: u64) -> anyhow::Result<()> {
        loop {
            let Some(connection) = self.connections.get_mut(&number) else { return Ok(()) };
            let Some(end) = connection.line.iter().position(|byte| *byte == b'\n') else { return Ok(()) };
            let line: Vec<u8> = connection.line.drain(..=end).collect();
            let words = String::from_utf8_lossy(&line);
            let words: Vec<&str> = words.split_whitespace().collect();
            let answer = self.order(&words).unwrap_or_else(|error| format!("no: {error:#}"));
            let Some(connection) = self.connections.get_mut(&number) else { return Ok(()) };
            connection.owed.extend(answer.bytes().chain([b'\n']));
            if connection.write().is_err() {
                // Whoever gave the order has gone.
                self.close(number);
            }
        }
    }

    fn order(&mut self, words: &[&str]) -> anyhow::Result<String> {
        let done = "ok".to_owned();
        match *words {
            ["count"] => {
                let echo = self.connections.values().filter(|connection| connection.purpose == Purpose::Echo);
                return Ok(echo.count().to_string());
            }
            ["accept"] => {
                let mut count = 0;
                // Non-blocking: it says when there are no more.
                while let Ok((stream, from)) = self.waiting.accept() {
                    self.add(stream, Purpose::Echo, Some(from.port()))?;
                    count += 1;
                }
                return Ok(count.to_string());
            }
            [word @ ("leave" | "take")] => {
                let wanted = if word == "take" { EpollFlags::EPOLLIN } else { EpollFlags::empty() };
                watch(&self.epoll, &self.datagrams, EpollEvent::new(wanted, DATAGRAMS))?;
                return Ok(done);
            }
            ["connect", server, count] => {
                let server: SocketAddrV4 = server.parse()?;
                for _ in 0..count.parse::<u32>()? {
                    self.add(TcpStream::connect(server)?, Purpose::Echo, None)?;
                }
                return Ok(done);
            }
            ["ring", count] => return Ok(self.ring.fill(count.parse()?)?.to_string()),
            ["unring"] => return Ok(self.ring.empty()?.to_string()),
            _ => {}
        }
        let [order, port, ref rest @ ..] = *words else { anyhow::bail!("there is no order {words:?}") };
        let port: u16 = port.parse()?;
        let number = *self.clients.get(&port).with_context(|| format!("no client has port {port}"))?;
        let connection = self.connections.get_mut(&number).context("it is closed")?;
        let mut answer = done;
        match (order, rest) {
            ("mute", []) => connection.mute = true,
            ("unmute", []) => connection.mute = false,
            ("keep", []) => connection.keep = true,
            ("finish", []) => {
                connection.stream.shutdown(Shutdown::Write)?;
                connection.finished = true;
            }
            ("received", []) => {
                let (count, digest) = connection.received;
                answer = format!("{count} {digest:x}");
            }
            ("fill", []) => answer = connection.fill(port.into())?.to_string(),
            ("keepalive", [idle, every, count]) => {
                let stream = &connection.stream;
                setsockopt(stream, sockopt::TcpKeepIdle, &idle.parse()?)?;
                setsockopt(stream, sockopt::TcpKeepInterval, &every.parse()?)?;
                setsockopt(stream, sockopt::TcpKeepCount, &count.parse()?)?;
                setsockopt(stream, sockopt::KeepAlive, &true)?;
            }
            _ => anyhow::bail!("there is no order {words:?}"),
        }
        self.watch(number)?;
        Ok(answer)
    }
}

impl Connection {
    /// Reads and writes what it can; whether it stays open.
    fn give_back(&mut self) -> io::Result<bool> {
        if self.mute {
            return Ok(true);
        }
        let mut buffer = [0; PIECE];
        while !self.ended && self.owed.len() < PIECE {
            match self.stream.read(&mut buffer) {
                Ok(0) => self.ended = true,
                Ok(length) => {
                    let bytes = buffer.get(..length).unwrap_or_default();
                    let (count, digest) = self.received;
                    self.received = (count + length as u64, stream::digest(digest, bytes));
                    match self.purpose {
                        Purpose::Echo if self.finished => {}
                        Purpose::Echo => self.owed.extend(bytes),
                        Purpose::Orders => self.line.extend(bytes),
                    }
                    self.write()?;
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => break,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        self.write()?;
        Ok(!self.ended || self.keep || !self.owed.is_empty())
    }

    fn write(&mut self) -> io::Result<()> {
        let mut whole = true;
        while !self.owed.is_empty() {
            let owed = self.owed.as_slices().0;
            let length = if self.halves && whole { owed.len().div_ceil(2) } else { owed.len() };
            whole = false;
            match self.stream.write(owed.get(..length).unwrap_or_default()) {
                Ok(length) => drop(self.owed.drain(..length)),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => break,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    /// Sends of a stream what the socket takes; bytes of it so far.
    fn fill(&mut self, number: u64) -> anyhow::Result<u64> {
        anyhow::ensure!(self.owed.is_empty(), "{} bytes are still owed to it", self.owed.len());
        loop {
            let piece = stream::part(number, self.filled, PIECE);
            match self.stream.write(&piece) {
                Ok(length) => self.filled += length as u64,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(self.filled),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error.into()),
            }
        }
    }
}

/// Asks for these events of a socket, or for none at all.
fn watch(epoll: &Epoll, socket: impl AsFd, mut event: EpollEvent) -> nix::Result<()> {
    if event.events().is_empty() {
        return match epoll.delete(socket) {
            Err(nix::errno::Errno::ENOENT) => Ok(()),
            done => done,
        };
    }
    match epoll.modify(socket.as_fd(), &mut event) {
        Err(nix::errno::Errno::ENOENT) => epoll.add(socket, event),
        done => done,
    }
}
