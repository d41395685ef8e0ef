//! A Redis client for single requests, for filling a Redis with data, and for checking them.

use std::{
    io::{self, Read, Write},
    net::{SocketAddr, SocketAddrV4, TcpStream},
    thread,
    time::{Duration, Instant},
};

use super::{
    resp::{self, Reply},
    writer::{Writes, word},
};
use crate::{error::LabError, handle::Lab};

/// Size of the values that fill a Redis.
pub(super) const VALUE: usize = 16 << 10;
/// Requests sent before their answers are read.
const PIPELINE: usize = 64;
/// An answer that takes longer is given up.
const PATIENCE: Duration = Duration::from_secs(60);
/// Pause between two attempts to reach a Redis that starts.
const PAUSE: Duration = Duration::from_millis(20);
const CONNECT_PATIENCE: Duration = Duration::from_secs(1);

/// One connection to a Redis.
#[derive(Debug)]
pub struct RedisClient {
    address: SocketAddrV4,
    stream: TcpStream,
    received: Vec<u8>,
}

impl RedisClient {
    /// Connects from a lab's host, and waits for up to `patience` until Redis answers a PING.
    ///
    /// # Errors
    /// It does not answer in time.
    pub fn connect(
        lab: &Lab,
        host: &str,
        address: SocketAddrV4,
        patience: Duration,
    ) -> Result<Self, LabError> {
        let deadline = Instant::now() + patience;
        loop {
            let problem = match connect(lab, host, address)? {
                Ok(stream) => {
                    let mut client = Self { address, stream, received: Vec::new() };
                    match client.call(&["PING"]) {
                        Ok(Reply::Simple(pong)) if pong == "PONG" => return Ok(client),
                        Ok(other) => format!("it answered PING with {other:?}"),
                        Err(error) => error.to_string(),
                    }
                }
                Err(error) => format!("it cannot be connected to: {error}"),
            };
            if Instant::now() >= deadline {
                return Err(failed(address, problem));
            }
            thread::sleep(PAUSE);
        }
    }

    /// From now on waits for so long for an answer.
    ///
    /// # Errors
    /// The connection broke.
    pub fn set_patience(&mut self, patience: Duration) -> Result<(), LabError> {
        let set = self.stream.set_read_timeout(Some(patience));
        set.map_err(|error| failed(self.address, format!("how long to wait for it cannot be set: {error}")))
    }

    /// One request and its answer.
    ///
    /// # Errors
    /// The connection broke, or no answer came within a minute, unless [`RedisClient::set_patience`] has said how long. An
    /// error that Redis sends is an answer.
    pub fn call(&mut self, words: &[&str]) -> Result<Reply, LabError> {
        let words: Vec<&[u8]> = words.iter().map(|word| word.as_bytes()).collect();
        let mut request = Vec::new();
        resp::encode(&mut request, &words);
        self.send(&request)?;
        self.receive()
    }

    fn send(&mut self, bytes: &[u8]) -> Result<(), LabError> {
        self.stream.write_all(bytes).map_err(|error| failed(self.address, format!("sending failed: {error}")))
    }

    fn receive(&mut self) -> Result<Reply, LabError> {
        let mut buffer = [0; 64 << 10];
        loop {
            match resp::parse(&self.received).map_err(|error| failed(self.address, error.to_string()))? {
                Some((reply, length)) => {
                    self.received.drain(..length);
                    return Ok(reply);
                }
                None => match self.stream.read(&mut buffer) {
                    Ok(0) => return Err(failed(self.address, "the connection was closed".to_owned())),
                    Ok(length) => self.received.extend_from_slice(buffer.get(..length).unwrap_or_default()),
                    Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                    Err(error) => return Err(failed(self.address, format!("no answer came: {error}"))),
                },
            }
        }
    }

    /// Stores about `bytes` bytes that do not compress, under the keys `fill:0`, `fill:1`, …
    ///
    /// # Errors
    /// Redis refused one, or the connection broke.
    pub fn fill(&mut self, bytes: u64) -> Result<(), LabError> {
        self.each_value(bytes, value, |client, out, key, value| {
            resp::encode(out, &[b"SET", key, value]);
            client.expect(Reply::Simple("OK".to_owned()))
        })
    }

    /// Checks that everything [`RedisClient::fill`] stored is there, byte for byte.
    ///
    /// # Errors
    /// A value is missing or differs, or the connection broke.
    pub fn check_fill(&mut self, bytes: u64) -> Result<(), LabError> {
        self.check_written(bytes, &Writes::new(0))
    }

    /// Checks the same of a fill to which a writer has written.
    ///
    /// # Errors
    /// As for [`RedisClient::check_fill`].
    pub fn check_written(&mut self, bytes: u64, writes: &Writes) -> Result<(), LabError> {
        let content = |number| {
            let mut value = value(number);
            writes.apply(number, &mut value);
            value
        };
        self.each_value(bytes, content, |client, out, key, value| {
            resp::encode(out, &[b"GET", key]);
            client.expect(Reply::Bulk(Some(value.to_vec())))
        })
    }

    /// Asks for the last bytes of these values of a fill, all at once; what the answers must be, for
    /// [`RedisClient::check_peek`].
    pub(super) fn ask_peek(&mut self, numbers: impl Iterator<Item = u64>) -> Result<Vec<u8>, LabError> {
        let (mut out, mut expected) = (Vec::new(), Vec::new());
        for number in numbers {
            let key = format!("fill:{number}");
            // The first bytes may be a writer's counter.
            resp::encode(&mut out, &[b"GETRANGE", key.as_bytes(), b"-8", b"-1"]);
            let last = word(number, (VALUE / size_of::<u64>()) as u64 - 1);
            expected.extend_from_slice(b"$8\r\n");
            expected.extend_from_slice(&last.to_le_bytes());
            expected.extend_from_slice(b"\r\n");
        }
        self.send(&out)?;
        Ok(expected)
    }

    /// Waits for these answers.
    pub(super) fn check_peek(&mut self, expected: &[u8]) -> Result<(), LabError> {
        let mut answers = vec![0; expected.len()];
        self.stream
            .read_exact(&mut answers)
            .map_err(|error| failed(self.address, format!("no answer came: {error}")))?;
        if answers == expected {
            return Ok(());
        }
        let answers = String::from_utf8_lossy(&answers).into_owned();
        Err(failed(self.address, format!("the answers to a batch of requests were {answers:?}")))
    }

    /// Runs `request` for each value of a fill, which appends a request and tells the answer to expect.
    fn each_value(
        &mut self,
        bytes: u64,
        content: impl Fn(u64) -> Vec<u8>,
        request: impl Fn(&mut Expected, &mut Vec<u8>, &[u8], &[u8]),
    ) -> Result<(), LabError> {
        let count = values_of(bytes);
        let mut first = 0;
        while first < count {
            let mut out = Vec::new();
            let mut expected = Expected::default();
            let end = count.min(first + PIPELINE as u64);
            for number in first..end {
                request(&mut expected, &mut out, format!("fill:{number}").as_bytes(), &content(number));
            }
            self.send(&out)?;
            let mut wrong = None;
            for (number, expected) in (first..end).zip(expected.0) {
                let reply = self.receive()?;
                if reply != expected {
                    let seen = match reply {
                        Reply::Bulk(Some(bytes)) => format!("{} other bytes", bytes.len()),
                        other => format!("{other:?}"),
                    };
                    wrong.get_or_insert_with(|| format!("the answer for fill:{number} was {seen}"));
                }
            }
            // Only now: the other answers have been read, so the connection can be used again.
            if let Some(wrong) = wrong {
                return Err(failed(self.address, wrong));
            }
            first = end;
        }
        Ok(())
    }
}

/// Answers that are due, in order.
#[derive(Debug, Default)]
struct Expected(Vec<Reply>);

impl Expected {
    fn expect(&mut self, reply: Reply) {
        self.0.push(reply);
    }
}

/// How many values a fill of about `bytes` bytes has.
pub(super) fn values_of(bytes: u64) -> u64 {
    bytes.div_ceil(VALUE as u64)
}

/// The value stored under `fill:<number>`: the same each time, and without a pattern.
pub(super) fn value(number: u64) -> Vec<u8> {
    let mut value = vec![0; VALUE];
    // Word by word: byte by byte it was the tests' largest piece of work.
    for (index, bytes) in (0..).zip(value.as_chunks_mut().0) {
        *bytes = word(number, index).to_le_bytes();
    }
    value
}

/// Connects a socket that belongs to the host's namespace.
pub(crate) fn connect(
    lab: &Lab,
    host: &str,
    address: SocketAddrV4,
) -> Result<io::Result<TcpStream>, LabError> {
    lab.inside(host, || {
        let stream = TcpStream::connect_timeout(&SocketAddr::V4(address), CONNECT_PATIENCE)?;
        stream.set_nodelay(true)?;
        stream.set_read_timeout(Some(PATIENCE))?;
        stream.set_write_timeout(Some(PATIENCE))?;
        Ok(stream)
    })
}

pub(crate) fn failed(address: SocketAddrV4, problem: String) -> LabError {
    LabError::Workload { address: address.to_string(), problem }
}
