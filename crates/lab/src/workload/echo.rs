//! The open-loop client of an echo service over many connections: what their users notice while it moves.
//!
//! ```text
//!   schedule     │  │  │  │  │  │  │  │  │     a request each 1/rate, whatever happens
//!   connection   1  2  3  1  2  3  1  2  3     in turn
//! ```
//!
//! A request is the next piece of a stream of bytes that each connection has of its own, and so is its
//! answer: whatever is lost, repeated or mixed up gives a wrong byte. As for [`super::load`], waits count
//! from when a request was due, and no connection is renewed.

use std::{
    collections::VecDeque,
    io::{self, Read, Write},
    net::{SocketAddr, SocketAddrV4, TcpStream},
    os::fd::AsFd,
    sync::{
        Arc,
        mpsc::{self, Receiver, Sender, TryRecvError},
    },
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

use hdrhistogram::Histogram;
use nix::sys::{
    epoll::{Epoll, EpollCreateFlags, EpollEvent, EpollFlags, EpollTimeout},
    eventfd::{EfdFlags, EventFd},
};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use serde::Serialize;

use super::{redis::failed, stream};
use crate::{error::LabError, handle::Lab};

/// Bytes of a request and of its answer.
const REQUEST: usize = 64;
/// Threads that connect: each waits for a round trip again and again.
const CONNECTING: u32 = 16;
/// How long a connection may take to be made; a first attempt that was lost is repeated after a second.
const CONNECT_PATIENCE: Duration = Duration::from_secs(10);
/// How long answers are waited for at the end: longer than the two minutes that TCP may wait between two
/// attempts to send a segment again (RFC 6298, TCP_RTO_MAX).
const PATIENCE: Duration = Duration::from_secs(130);
/// How many of the first answers tell the usual round trip.
const FIRST: u64 = 500;
/// The longest wait that is told from longer ones, microseconds: an hour.
const LONGEST: u64 = 3_600_000_000;
/// Significant digits of the histogram of waits.
const DIGITS: u8 = 3;
/// Events taken at once.
const EVENTS: usize = 256;
/// The number of the event that wakes the client; connections count from 0.
const WOKEN: u64 = u64::MAX;

/// What the client saw.
#[derive(Clone, Debug, Serialize)]
pub struct EchoReport {
    /// Its connections.
    pub connections: u64,
    /// Requests issued.
    pub sent: u64,
    /// Requests answered rightly.
    pub answered: u64,
    /// Requests that were not, though there was time.
    pub lost_ops: u64,
    /// Connections that broke, or on which something else came than was sent.
    pub broken: u64,
    /// What happened to the first of these.
    pub first_broken: Option<String>,
    /// Longest wait of an answer minus the usual one, in milliseconds.
    pub downtime_ms: f64,
    /// The usual wait, in milliseconds: the lower quartile of the first answers, or of all if that is less.
    pub usual_ms: f64,
}

impl EchoReport {
    /// Whether every request was answered rightly.
    pub fn is_clean(&self) -> bool {
        self.lost_ops == 0 && self.broken == 0 && self.answered > 0
    }
}

/// A running client.
#[derive(Debug)]
pub struct EchoLoad {
    orders: Sender<Order>,
    waker: Arc<EventFd>,
    thread: Option<JoinHandle<()>>,
    address: SocketAddrV4,
}

#[derive(Debug)]
enum Order {
    /// One request more, at once.
    Now,
    /// One request more over each connection, at once.
    All,
    /// Send no more, report, and end.
    Stop(Sender<EchoReport>),
}

impl EchoLoad {
    /// Connects so often from a lab's host, and begins to send so many requests a second in all.
    ///
    /// # Errors
    /// The service cannot be connected to, or the rate is 0.
    pub fn start(
        lab: &Lab,
        host: &str,
        address: SocketAddrV4,
        connections: u32,
        rate_per_s: u32,
    ) -> Result<Self, LabError> {
        let problem = |error: &dyn ToString| failed(address, error.to_string());
        let interval = Duration::from_secs(1).checked_div(rate_per_s);
        let interval =
            interval.ok_or_else(|| problem(&"the rate is 0 requests a second; give at least 1"))?;
        let streams = lab.inside(host, || connect(address, connections))?.map_err(|error| problem(&error))?;
        Self::over(streams, interval, address).map_err(|error| problem(&error))
    }

    /// Begins over these connections.
    fn over(streams: Vec<TcpStream>, interval: Duration, address: SocketAddrV4) -> io::Result<Self> {
        let waker = Arc::new(EventFd::from_flags(EfdFlags::EFD_NONBLOCK)?);
        let (orders, inbox) = mpsc::channel();
        let client = Client::new(streams, interval, inbox, Arc::clone(&waker))?;
        let thread = thread::Builder::new().name("echo-load".to_owned()).spawn(move || client.run())?;
        Ok(Self { orders, waker, thread: Some(thread), address })
    }

    /// Sends one request more, at once.
    ///
    /// # Errors
    /// The client's thread has ended, which only a bug can do.
    pub fn now(&self) -> Result<(), LabError> {
        self.order(Order::Now)
    }

    /// Sends one request more over each connection, at once.
    ///
    /// # Errors
    /// As for [`EchoLoad::now`].
    pub fn all(&self) -> Result<(), LabError> {
        self.order(Order::All)
    }

    /// Issues no more, waits for the answers that are out (for 130 s at most), and reports what happened
    /// since the start.
    ///
    /// # Errors
    /// As for [`EchoLoad::now`].
    pub fn stop(mut self) -> Result<EchoReport, LabError> {
        let (reply, report) = mpsc::channel();
        self.order(Order::Stop(reply))?;
        let report = report.recv_timeout(2 * PATIENCE).map_err(|_| self.ended())?;
        if let Some(thread) = self.thread.take() {
            // A panic has no report, so it was met above.
            let _ = thread.join();
        }
        Ok(report)
    }

    fn order(&self, order: Order) -> Result<(), LabError> {
        self.orders.send(order).map_err(|_| self.ended())?;
        self.waker.write(1).map(drop).map_err(|error| failed(self.address, error.to_string()))
    }

    fn ended(&self) -> LabError {
        failed(self.address, "the client's thread has ended".to_owned())
    }
}

impl Drop for EchoLoad {
    fn drop(&mut self) {
        // The thread ends when it sees that nobody gives orders any more; it may be asleep for long. It
        // cannot fail for a counter that is read at once.
        let _ = self.waker.write(1);
    }
}

/// So many connections, in no order.
fn connect(address: SocketAddrV4, connections: u32) -> io::Result<Vec<TcpStream>> {
    let connect_some = |number: u32| {
        let mine = (number..connections).step_by(CONNECTING as usize);
        let one = |_| {
            let stream = TcpStream::connect_timeout(&SocketAddr::V4(address), CONNECT_PATIENCE)?;
            stream.set_nodelay(true)?;
            stream.set_nonblocking(true)?;
            Ok(stream)
        };
        mine.map(one).collect::<io::Result<Vec<_>>>()
    };
    // They are in the network namespace of this thread.
    thread::scope(|scope| {
        let threads: Vec<_> =
            (0..CONNECTING).map(|number| scope.spawn(move || connect_some(number))).collect();
        let mut streams = Vec::new();
        for thread in threads {
            let some = thread.join().map_err(|_| io::Error::other("a thread that connects has ended"))?;
            streams.extend(some?);
        }
        Ok(streams)
    })
}

/// A request whose answer is out.
struct Waiting {
    due: Instant,
    /// Where its answer ends in the stream.
    end: u64,
}

struct Connection {
    socket: TcpStream,
    /// Bytes of its stream that were to be sent, that were sent, and that came back.
    issued: u64,
    sent: u64,
    received: u64,
    waiting: VecDeque<Waiting>,
    broken: bool,
}

struct Client {
    epoll: Epoll,
    waker: Arc<EventFd>,
    inbox: Receiver<Order>,
    connections: Vec<Connection>,
    begun: Instant,
    interval: Duration,
    /// Requests that were due by the schedule.
    scheduled: u64,
    /// The connection whose turn it is.
    turn: usize,
    sent: u64,
    answered: u64,
    first_broken: Option<String>,
    first: Histogram<u64>,
    all: Histogram<u64>,
}

fn histogram() -> Histogram<u64> {
    #[allow(clippy::unwrap_used)] // fails for other bounds and more than 5 digits only
    Histogram::new_with_bounds(1, LONGEST, DIGITS).unwrap()
}

fn micros(time: Duration) -> u64 {
    u64::try_from(time.as_micros()).unwrap_or(u64::MAX)
}

impl Client {
    fn new(
        streams: Vec<TcpStream>,
        interval: Duration,
        inbox: Receiver<Order>,
        waker: Arc<EventFd>,
    ) -> io::Result<Self> {
        let epoll = Epoll::new(EpollCreateFlags::EPOLL_CLOEXEC)?;
        epoll.add(waker.as_fd(), EpollEvent::new(EpollFlags::EPOLLIN, WOKEN))?;
        let mut connections = Vec::new();
        for (number, socket) in (0..).zip(streams) {
            epoll.add(&socket, EpollEvent::new(EpollFlags::EPOLLIN, number))?;
            let (issued, sent, received) = (0, 0, 0);
            connections.push(Connection {
                socket,
                issued,
                sent,
                received,
                waiting: VecDeque::new(),
                broken: false,
            });
        }
        Ok(Self {
            epoll,
            waker,
            inbox,
            connections,
            begun: Instant::now(),
            interval,
            scheduled: 0,
            turn: 0,
            sent: 0,
            answered: 0,
            first_broken: None,
            first: histogram(),
            all: histogram(),
        })
    }

    fn run(mut self) {
        let mut stopping: Option<(Sender<EchoReport>, Instant)> = None;
        loop {
            if stopping.is_none() {
                while self.due() <= Instant::now() {
                    self.issue_next(self.due());
                    self.scheduled += 1;
                }
            }
            match self.inbox.try_recv() {
                Ok(Order::Now) => self.issue_next(Instant::now()),
                Ok(Order::All) => (0..self.connections.len()).for_each(|_| self.issue_next(Instant::now())),
                Ok(Order::Stop(reply)) => stopping = Some((reply, Instant::now() + PATIENCE)),
                Err(TryRecvError::Empty) => {}
                // Nobody wants to know.
                Err(TryRecvError::Disconnected) if stopping.is_none() => return,
                Err(TryRecvError::Disconnected) => {}
            }
            let until = match &stopping {
                Some((reply, deadline)) => {
                    let out = self.connections.iter().any(|one| !one.broken && !one.waiting.is_empty());
                    if !out || Instant::now() >= *deadline {
                        // Whoever asked and went away does not want it.
                        let _ = reply.send(self.report());
                        return;
                    }
                    *deadline
                }
                None => self.due(),
            };
            self.sleep(until);
            self.take_events();
        }
    }

    /// When the next request is due. By multiplication, so that rounding does not add up.
    fn due(&self) -> Instant {
        let nanos = u64::try_from(self.interval.as_nanos()).unwrap_or(u64::MAX);
        self.begun + Duration::from_nanos(nanos.saturating_mul(self.scheduled))
    }

    /// Issues one request over the connection whose turn it is.
    fn issue_next(&mut self, due: Instant) {
        let number = self.turn;
        self.turn = (number + 1) % self.connections.len().max(1);
        let Some(connection) = self.connections.get_mut(number) else { return };
        connection.issued += REQUEST as u64;
        connection.waiting.push_back(Waiting { due, end: connection.issued });
        self.sent += 1;
        self.attend(number);
    }

    fn take_events(&mut self) {
        let mut events = [EpollEvent::empty(); EVENTS];
        loop {
            // An interruption is a wake-up like any other.
            let count = self.epoll.wait(&mut events, EpollTimeout::ZERO).unwrap_or(0);
            for event in events.iter().take(count) {
                match usize::try_from(event.data()) {
                    _ if event.data() == WOKEN => drop(self.waker.read()),
                    Ok(number) => self.attend(number),
                    Err(_) => {}
                }
            }
            if count < EVENTS {
                return;
            }
        }
    }

    /// Writes and reads what can be over a connection.
    fn attend(&mut self, number: usize) {
        let Some(connection) = self.connections.get_mut(number).filter(|connection| !connection.broken)
        else {
            return;
        };
        let stream = number as u64;
        let (first, all, answered) = (&mut self.first, &mut self.all, &mut self.answered);
        let done = connection.write(stream).and_then(|()| {
            connection.read(stream, |wait| {
                *answered += 1;
                all.saturating_record(wait);
                if first.len() < FIRST {
                    first.saturating_record(wait);
                }
            })
        });
        let events = match &done {
            Ok(()) if connection.sent < connection.issued => EpollFlags::EPOLLIN | EpollFlags::EPOLLOUT,
            Ok(()) => EpollFlags::EPOLLIN,
            Err(_) => EpollFlags::empty(),
        };
        let watched = match events.is_empty() {
            true => self.epoll.delete(&connection.socket),
            false => self.epoll.modify(&connection.socket, &mut EpollEvent::new(events, stream)),
        };
        if let Err(reason) = done.and_then(|()| watched.map_err(|error| error.to_string())) {
            connection.broken = true;
            self.first_broken.get_or_insert_with(|| format!("connection {number}: {reason}"));
        }
    }

    fn report(&self) -> EchoReport {
        let waits = [&self.first, &self.all].into_iter().filter(|waits| !waits.is_empty());
        // The lower quartile: of a few answers, most may have waited for the end of a long pause.
        let usual = waits.map(|waits| waits.value_at_quantile(0.25)).min().unwrap_or(0);
        let oldest = self.connections.iter().filter_map(|connection| connection.waiting.front());
        let oldest = oldest.map(|request| micros(request.due.elapsed())).max().unwrap_or(0);
        let longest = self.all.max().max(oldest);
        EchoReport {
            connections: self.connections.len() as u64,
            sent: self.sent,
            answered: self.answered,
            lost_ops: self.sent - self.answered,
            broken: self.connections.iter().filter(|connection| connection.broken).count() as u64,
            first_broken: self.first_broken.clone(),
            downtime_ms: longest.saturating_sub(usual) as f64 / 1e3,
            usual_ms: usual as f64 / 1e3,
        }
    }

    /// Until then, or until something has happened: to the microsecond, which epoll_wait(2) cannot.
    fn sleep(&self, until: Instant) {
        let wait = until.saturating_duration_since(Instant::now());
        let timeout = Timespec {
            tv_sec: i64::try_from(wait.as_secs()).unwrap_or(i64::MAX),
            tv_nsec: i64::from(wait.subsec_nanos()),
        };
        // An interruption is a wake-up like any other.
        let _ = poll(&mut [PollFd::from_borrowed_fd(self.epoll.0.as_fd(), PollFlags::IN)], Some(&timeout));
    }
}

impl Connection {
    fn write(&mut self, stream: u64) -> Result<(), String> {
        while self.sent < self.issued {
            let length = usize::try_from(self.issued - self.sent).unwrap_or(REQUEST).min(64 * REQUEST);
            match self.socket.write(&stream::part(stream, self.sent, length)) {
                Ok(length) => self.sent += length as u64,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => break,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(format!("sending failed: {error}")),
            }
        }
        Ok(())
    }

    /// Tells the wait of each request that is answered, in microseconds.
    fn read(&mut self, stream: u64, mut answered: impl FnMut(u64)) -> Result<(), String> {
        let mut buffer = [0; 64 * REQUEST];
        loop {
            match self.socket.read(&mut buffer) {
                Ok(0) => return Err("the service closed it".to_owned()),
                Ok(length) => {
                    let bytes = buffer.get(..length).unwrap_or_default();
                    if bytes != stream::part(stream, self.received, length) {
                        return Err(format!("other bytes than those sent came after byte {}", self.received));
                    }
                    self.received += length as u64;
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(()),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(format!("receiving failed: {error}")),
            }
            while let Some(request) = self.waiting.front().filter(|request| request.end <= self.received) {
                answered(micros(request.due.elapsed()));
                self.waiting.pop_front();
            }
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::net::{Ipv4Addr, TcpListener};

    use super::*;

    /// A client with three connections to a server that gives back what `change` makes of each piece, given
    /// the number of the connection and the offset of the piece.
    fn client(change: fn(usize, usize, &mut [u8])) -> EchoLoad {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        let SocketAddr::V4(address) = listener.local_addr().unwrap() else { panic!() };
        let streams = connect(address, 3).unwrap();
        for (number, stream) in listener.incoming().take(3).enumerate() {
            let mut stream = stream.unwrap();
            thread::spawn(move || {
                let (mut piece, mut offset) = ([0; 1000], 0);
                loop {
                    // It ends with the client.
                    let length = stream.read(&mut piece).unwrap_or(0);
                    if length == 0 {
                        return;
                    }
                    change(number, offset, &mut piece[..length]);
                    offset += length;
                    let _ = stream.write_all(&piece[..length]);
                }
            });
        }
        EchoLoad::over(streams, Duration::from_millis(1), address).unwrap()
    }

    #[test]
    fn answers_to_all_requests_are_clean() {
        let load = client(|_, _, _| {});
        for _ in 0..500 {
            load.all().unwrap();
        }
        load.now().unwrap();
        let report = load.stop().unwrap();
        assert!(report.is_clean() && report.sent == report.answered, "{report:?}");
        // What was asked for beside the schedule.
        assert!(report.connections == 3 && report.sent >= 1501, "{report:?}");
    }

    #[test]
    fn one_byte_that_is_another_breaks_one_connection() {
        let load = client(|number, offset, piece| {
            if number == 1 && (offset..offset + piece.len()).contains(&130) {
                piece[130 - offset] ^= 1;
            }
        });
        for _ in 0..5 {
            load.all().unwrap();
        }
        let report = load.stop().unwrap();
        assert!(!report.is_clean() && report.broken == 1, "{report:?}");
        // The first two of its requests may have been answered, and none after that.
        assert!(report.lost_ops >= 3, "{report:?}");
        assert!(report.first_broken.unwrap().contains("other bytes"));
    }

    #[test]
    fn a_server_that_goes_away_is_told() {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        let SocketAddr::V4(address) = listener.local_addr().unwrap() else { panic!() };
        let streams = connect(address, 1).unwrap();
        drop(listener.accept().unwrap());
        let load = EchoLoad::over(streams, Duration::from_millis(1), address).unwrap();
        load.all().unwrap();
        let report = load.stop().unwrap();
        assert_eq!((report.broken, report.answered), (1, 0), "{report:?}");
    }
}
