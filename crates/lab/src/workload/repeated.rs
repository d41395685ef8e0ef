//! The closed-loop client whose rate the round trip bounds: over each of its connections one question is under way, always
//! the same one.
//!
//! ```text
//!   connection 1    question ─▶ answer, question ─▶ answer, question ─▶ …
//!   connection 2    question ─▶ answer, question ─▶ answer, question ─▶ …
//! ```
//!
//! Each answer is compared with the one that is due. No connection is renewed. How much a Redis can do at most is for
//! [`super::closed_loop`] to tell.

use std::{
    io::{self, Read, Write},
    net::{SocketAddrV4, TcpStream},
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

use nix::sys::epoll::{Epoll, EpollCreateFlags, EpollEvent, EpollFlags, EpollTimeout};

use super::{
    redis::{RedisClient, connect, failed},
    resp::{self, Reply},
};
use crate::{error::LabError, handle::Lab};

/// What is read of a Redis.
const KEY: &str = "gets";
/// How long a service may take until it can be connected to, and a Redis to answer the first request.
const START: Duration = Duration::from_secs(60);
/// Between two attempts to connect.
const AGAIN: Duration = Duration::from_millis(10);
/// How long answers are waited for at the end: longer than the two minutes that TCP may wait between two attempts to send a
/// segment again (RFC 6298, TCP_RTO_MAX).
const PATIENCE: Duration = Duration::from_secs(130);
/// How often it looks whether it is to end, milliseconds.
const LOOK: u8 = 20;
/// Events taken at once.
const EVENTS: usize = 64;

/// What the client saw.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RepeatedReport {
    /// Requests issued.
    pub sent: u64,
    /// Requests answered as is due.
    pub answered: u64,
    /// Requests answered by something else; the connection is used no more.
    pub wrong: u64,
    /// Requests not answered, though there was time.
    pub lost_ops: u64,
    /// Connections made after the first ones: always 0.
    pub reconnects: u64,
    /// Why a connection broke, if one did.
    pub broken: Option<String>,
}

impl RepeatedReport {
    /// Whether every request was answered rightly on the connection that sent it.
    pub fn is_clean(&self) -> bool {
        self.wrong == 0 && self.lost_ops == 0 && self.broken.is_none() && self.answered > 0
    }
}

/// What is asked, and the answer that is due.
#[derive(Clone, Debug)]
pub struct Question {
    /// What is sent.
    pub request: Vec<u8>,
    /// All that has to come back.
    pub answer: Vec<u8>,
}

impl Question {
    /// A GET of a value that has been stored.
    fn get(value: &str) -> Self {
        let mut request = Vec::new();
        resp::encode(&mut request, &[b"GET", KEY.as_bytes()]);
        Self { request, answer: format!("${}\r\n{value}\r\n", value.len()).into_bytes() }
    }
}

/// A running client.
#[derive(Debug)]
pub struct Repeated {
    address: SocketAddrV4,
    stop: Arc<AtomicBool>,
    answered: Arc<AtomicU64>,
    thread: JoinHandle<RepeatedReport>,
}

impl Repeated {
    /// Stores a value of so many bytes in a Redis, connects so often from a lab's host, and begins to read it.
    ///
    /// # Errors
    /// The Redis does not answer, or cannot be connected to.
    pub fn gets(
        lab: &Lab,
        host: &str,
        address: SocketAddrV4,
        connections: u32,
        bytes: usize,
    ) -> Result<Self, LabError> {
        let value = "v".repeat(bytes);
        let stored = RedisClient::connect(lab, host, address, START)?.call(&["SET", KEY, &value])?;
        if stored != Reply::Simple("OK".to_owned()) {
            return Err(failed(address, format!("it answered SET with {stored:?}")));
        }
        Self::start(lab, host, address, connections, Question::get(&value))
    }

    /// Connects so often from a lab's host, once the service listens, and begins to ask.
    ///
    /// # Errors
    /// The service cannot be connected to within a minute.
    pub fn start(
        lab: &Lab,
        host: &str,
        address: SocketAddrV4,
        connections: u32,
        question: Question,
    ) -> Result<Self, LabError> {
        let problem = |error: io::Error| failed(address, error.to_string());
        let deadline = Instant::now() + START;
        let mut streams = Vec::new();
        for _ in 0..connections {
            streams.push(loop {
                match connect(lab, host, address)? {
                    Ok(stream) => break stream,
                    Err(error) if Instant::now() >= deadline => return Err(problem(error)),
                    // Nobody is told when a service listens.
                    Err(_) => thread::sleep(AGAIN),
                }
            });
        }
        Self::over(streams, question, address).map_err(problem)
    }

    /// Begins over these connections.
    fn over(streams: Vec<TcpStream>, question: Question, address: SocketAddrV4) -> io::Result<Self> {
        let (stop, answered) = (Arc::<AtomicBool>::default(), Arc::<AtomicU64>::default());
        let client = Client::new(streams, question, Arc::clone(&answered))?;
        let stopped = Arc::clone(&stop);
        let thread =
            thread::Builder::new().name("repeated".to_owned()).spawn(move || client.run(&stopped))?;
        Ok(Self { address, stop, answered, thread })
    }

    /// Requests answered rightly so far.
    pub fn answered(&self) -> u64 {
        self.answered.load(Ordering::Relaxed)
    }

    /// Issues no more, waits for the answers that are out (for 130 s at most), and reports.
    ///
    /// # Errors
    /// The client's thread has ended, which only a bug can do.
    pub fn stop(self) -> Result<RepeatedReport, LabError> {
        self.stop.store(true, Ordering::Relaxed);
        let ended = |_| failed(self.address, "the client's thread has ended".to_owned());
        self.thread.join().map_err(ended)
    }
}

struct Connection {
    stream: TcpStream,
    /// What has come of an answer.
    received: Vec<u8>,
    /// A request is out.
    waits: bool,
}

struct Client {
    epoll: Epoll,
    connections: Vec<Connection>,
    question: Question,
    answered: Arc<AtomicU64>,
    report: RepeatedReport,
}

impl Client {
    fn new(streams: Vec<TcpStream>, question: Question, answered: Arc<AtomicU64>) -> io::Result<Self> {
        let epoll = Epoll::new(EpollCreateFlags::EPOLL_CLOEXEC)?;
        for (number, stream) in (0..).zip(&streams) {
            epoll.add(stream, EpollEvent::new(EpollFlags::EPOLLIN, number))?;
        }
        let connection = |stream| Connection { stream, received: Vec::new(), waits: false };
        Ok(Self {
            epoll,
            connections: streams.into_iter().map(connection).collect(),
            question,
            answered,
            report: RepeatedReport::default(),
        })
    }

    fn run(mut self, stop: &AtomicBool) -> RepeatedReport {
        for number in 0..self.connections.len() {
            self.ask(number);
        }
        let mut deadline = None;
        let mut events = [EpollEvent::empty(); EVENTS];
        loop {
            let stopping = stop.load(Ordering::Relaxed);
            if stopping {
                let deadline = deadline.get_or_insert_with(|| Instant::now() + PATIENCE);
                if Instant::now() >= *deadline || !self.connections.iter().any(|one| one.waits) {
                    break;
                }
            }
            // An interruption is a wake-up like any other.
            let count = self.epoll.wait(&mut events, EpollTimeout::from(LOOK)).unwrap_or(0);
            for event in events.iter().take(count) {
                let Ok(number) = usize::try_from(event.data()) else { continue };
                if self.take(number) && !stopping {
                    self.ask(number);
                }
            }
        }
        self.report.lost_ops = self.report.sent - self.report.answered - self.report.wrong;
        self.report
    }

    /// Sends a request. It waits where the socket has no room for it, which a service that reads all before it answers makes.
    fn ask(&mut self, number: usize) {
        let Some(connection) = self.connections.get_mut(number) else { return };
        connection.waits = true;
        self.report.sent += 1;
        if let Err(error) = connection.stream.write_all(&self.question.request) {
            self.end(number, format!("sending failed: {error}"));
        }
    }

    /// Reads what has come; whether the answer is there, and right.
    fn take(&mut self, number: usize) -> bool {
        let Some(connection) = self.connections.get_mut(number) else { return false };
        let mut buffer = [0; 8 << 10];
        match connection.stream.read(&mut buffer) {
            Ok(0) => self.end(number, "the service closed it".to_owned()),
            Ok(length) => {
                connection.received.extend_from_slice(buffer.get(..length).unwrap_or_default());
                if connection.received == self.question.answer {
                    connection.received.clear();
                    connection.waits = false;
                    self.report.answered += 1;
                    self.answered.fetch_add(1, Ordering::Relaxed);
                    return true;
                }
                if !self.question.answer.starts_with(&connection.received) {
                    let answer = String::from_utf8_lossy(&connection.received).into_owned();
                    self.report.wrong += 1;
                    self.end(number, format!("an answer was {answer:?}"));
                }
            }
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => self.end(number, format!("receiving failed: {error}")),
        }
        false
    }

    /// Uses a connection no more.
    fn end(&mut self, number: usize, reason: String) {
        let Some(connection) = self.connections.get_mut(number) else { return };
        connection.waits = false;
        let watched = self.epoll.delete(&connection.stream);
        let reason = match watched {
            Ok(()) => reason,
            Err(error) => format!("{reason}, and it is still watched: {error}"),
        };
        self.report.broken.get_or_insert_with(|| format!("connection {number}: {reason}"));
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::net::{Ipv4Addr, SocketAddr, TcpListener};

    use super::*;

    const RIGHT: &str = "$3\r\nabc\r\n";

    /// A client with two connections to a server that gives on each always this answer, in pieces of four bytes; on one
    /// without an answer it ends at the first request.
    fn client(answers: [&'static str; 2]) -> Repeated {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        let SocketAddr::V4(address) = listener.local_addr().unwrap() else { panic!() };
        let mut streams = Vec::new();
        for answer in answers {
            streams.push(TcpStream::connect(address).unwrap());
            let (mut stream, _) = listener.accept().unwrap();
            stream.set_nodelay(true).unwrap();
            thread::spawn(move || {
                let mut request = [0; b"*2\r\n$3\r\nGET\r\n$4\r\ngets\r\n".len()];
                // It ends with the client.
                while stream.read_exact(&mut request).is_ok() && !answer.is_empty() {
                    assert!(request.ends_with(b"GET\r\n$4\r\ngets\r\n"));
                    if answer.as_bytes().chunks(4).any(|piece| stream.write_all(piece).is_err()) {
                        return;
                    }
                }
            });
        }
        Repeated::over(streams, Question::get("abc"), address).unwrap()
    }

    #[test]
    fn each_answer_sends_the_next_request_and_all_are_counted() {
        let repeated = client([RIGHT; 2]);
        while repeated.answered() < 100 {
            thread::yield_now();
        }
        let report = repeated.stop().unwrap();
        assert!(report.is_clean() && report.answered >= 100, "{report:?}");
        assert_eq!((report.sent, report.reconnects), (report.answered, 0), "{report:?}");
    }

    #[test]
    fn another_value_is_a_wrong_answer_and_a_closed_connection_loses_one() {
        let report = client([RIGHT, "$3\r\nabd\r\n"]).stop().unwrap();
        assert_eq!((report.wrong, report.lost_ops), (1, 0), "{report:?}");
        assert!(!report.is_clean() && report.broken.unwrap().contains("abd"));
        let report = client([RIGHT, ""]).stop().unwrap();
        assert_eq!((report.wrong, report.lost_ops), (0, 1), "{report:?}");
        assert!(!report.is_clean() && report.broken.unwrap().starts_with("connection 1: the service closed"));
    }
}
