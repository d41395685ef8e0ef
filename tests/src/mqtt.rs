//! A small MQTT 3.1.1 client (OASIS standard, 2014) at QoS 1 that keeps one connection and never
//! makes another.
//!
//! ```text
//!   publisher                    broker                     subscriber
//!   PUBLISH id, QoS 1 ─────────▶ │ ────── PUBLISH id', QoS 1 ──────▶
//!            ◀──────── PUBACK id │ ◀────────────────────── PUBACK id'
//! ```
//!
//! The subscriber says itself when it acknowledges, so that a test can have messages in flight and
//! queued in the broker. [`Subscribers`] are many that do so at once, in one thread.

use std::{
    io::{ErrorKind, Read, Write},
    net::TcpStream,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    thread::{self, JoinHandle},
};

use nix::sys::epoll::{Epoll, EpollCreateFlags, EpollEvent, EpollFlags, EpollTimeout};

/// Packet types with the flags they must have.
const CONNECT: u8 = 0x10;
const CONNACK: u8 = 0x20;
const PUBLISH: u8 = 0x30;
const PUBACK: u8 = 0x40;
const SUBSCRIBE: u8 = 0x82;
const SUBACK: u8 = 0x90;
const DISCONNECT: u8 = 0xe0;
/// Flags of PUBLISH: sent again, and QoS 1.
const DUP: u8 = 0x08;
const QOS_1: u8 = 0x02;

/// A message as it came.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Message {
    /// Its topic.
    pub topic: String,
    /// What it says.
    pub text: String,
    /// Its packet identifier, with which it is acknowledged.
    pub id: u16,
    /// Whether the broker says that it has sent it before.
    pub again: bool,
}

impl Message {
    fn read(kind: u8, body: &[u8]) -> Self {
        assert_eq!(kind & !DUP, PUBLISH | QOS_1, "{body:?}");
        let length = usize::from(u16::from_be_bytes([body[0], body[1]]));
        let (topic, rest) = body[2..].split_at(length);
        Self {
            topic: String::from_utf8(topic.to_vec()).unwrap(),
            id: u16::from_be_bytes([rest[0], rest[1]]),
            text: String::from_utf8(rest[2..].to_vec()).unwrap(),
            again: kind & DUP != 0,
        }
    }
}

/// A client with a connection.
#[derive(Debug)]
pub struct MqttClient {
    stream: TcpStream,
    last: u16,
    /// Whether the broker had a session for this client.
    pub session_present: bool,
}

impl MqttClient {
    /// Introduces itself over a connection. The broker keeps the session of a client that is not
    /// `clean` after its connection.
    pub fn new(stream: TcpStream, name: &str, clean: bool) -> Self {
        let mut client = Self { stream, last: 0, session_present: false };
        let mut body = Vec::new();
        string(&mut body, "MQTT");
        // Protocol level 4, whether the session is clean, no keep-alive.
        body.extend([4, if clean { 2 } else { 0 }, 0, 0]);
        string(&mut body, name);
        client.send(CONNECT, &body);
        let (kind, answer) = client.receive();
        assert!(kind == CONNACK && answer.get(1) == Some(&0), "{name} was refused: {kind:#x} {answer:?}");
        client.session_present = answer[0] == 1;
        client
    }

    /// Subscribes to a topic at QoS 1.
    pub fn subscribe(&mut self, topic: &str) {
        let id = self.next();
        let mut body = id.to_be_bytes().to_vec();
        string(&mut body, topic);
        body.push(1);
        self.send(SUBSCRIBE, &body);
        let (kind, answer) = self.receive();
        assert_eq!((kind, answer), (SUBACK, [&id.to_be_bytes()[..], &[1]].concat()));
    }

    /// Publishes at QoS 1 and waits until the broker has acknowledged it.
    pub fn publish(&mut self, topic: &str, text: &str) {
        let id = self.next();
        let mut body = Vec::new();
        string(&mut body, topic);
        body.extend(id.to_be_bytes());
        body.extend(text.as_bytes());
        self.send(PUBLISH | QOS_1, &body);
        let (kind, answer) = self.receive();
        assert_eq!((kind, answer), (PUBACK, id.to_be_bytes().to_vec()));
    }

    /// The next message, not acknowledged yet.
    pub fn message(&mut self) -> Message {
        let (kind, body) = self.receive();
        Message::read(kind, &body)
    }

    /// Acknowledges a message.
    pub fn acknowledge(&mut self, message: &Message) {
        self.send(PUBACK, &message.id.to_be_bytes());
    }

    /// Takes leave.
    pub fn disconnect(mut self) {
        self.send(DISCONNECT, &[]);
    }

    fn next(&mut self) -> u16 {
        self.last = self.last.checked_add(1).unwrap_or(1);
        self.last
    }

    fn send(&mut self, kind: u8, body: &[u8]) {
        let mut packet = vec![kind];
        let mut length = body.len();
        // Seven bits a byte, the lowest first; the top bit says that more follow.
        loop {
            let low = u8::try_from(length % 128).unwrap();
            length /= 128;
            packet.push(if length > 0 { low | 0x80 } else { low });
            if length == 0 {
                break;
            }
        }
        packet.extend(body);
        self.stream.write_all(&packet).unwrap();
    }

    fn receive(&mut self) -> (u8, Vec<u8>) {
        let kind = self.byte();
        let mut length = 0;
        for place in 0..4 {
            let byte = self.byte();
            length |= usize::from(byte & 0x7f) << (7 * place);
            if byte & 0x80 == 0 {
                break;
            }
        }
        let mut body = vec![0; length];
        self.stream.read_exact(&mut body).unwrap();
        (kind, body)
    }

    fn byte(&mut self) -> u8 {
        let mut byte = [0];
        self.stream.read_exact(&mut byte).unwrap();
        byte[0]
    }
}

fn string(packet: &mut Vec<u8>, text: &str) {
    packet.extend(u16::try_from(text.len()).unwrap().to_be_bytes());
    packet.extend(text.as_bytes());
}

/// Milliseconds after which a thread of [`Subscribers`] looks whether it shall end.
const LOOK: u16 = 100;

/// Clients that have subscribed to one topic, whose messages must be `0`, `1`, `2`, … for each of them:
/// each once, in order, and none sent again. They acknowledge each.
#[derive(Debug)]
pub struct Subscribers {
    /// Messages that every one of them has.
    all_have: Arc<AtomicUsize>,
    enough: Arc<AtomicBool>,
    thread: JoinHandle<()>,
}

/// One of them.
struct Subscriber {
    stream: TcpStream,
    received: Vec<u8>,
    /// The number of its next message.
    next: usize,
}

impl Subscribers {
    /// These clients, which have subscribed already.
    pub fn of(clients: Vec<MqttClient>, topic: &str) -> Self {
        let (all_have, enough) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicBool::new(false)));
        let epoll = Epoll::new(EpollCreateFlags::EPOLL_CLOEXEC).unwrap();
        let subscriber = |(number, client): (u64, MqttClient)| {
            client.stream.set_nonblocking(true).unwrap();
            epoll.add(&client.stream, EpollEvent::new(EpollFlags::EPOLLIN, number)).unwrap();
            Subscriber { stream: client.stream, received: Vec::new(), next: 0 }
        };
        let subscribers: Vec<_> = (0..).zip(clients).map(subscriber).collect();
        let thread = thread::spawn({
            let (all_have, enough, topic) = (Arc::clone(&all_have), Arc::clone(&enough), topic.to_owned());
            move || serve(&epoll, subscribers, &topic, &all_have, &enough)
        });
        Self { all_have, enough, thread }
    }

    /// Messages that every one of them has. Ends the test if one of them got a wrong one.
    pub fn all_have(&self) -> usize {
        assert!(!self.thread.is_finished(), "a subscriber has failed; what happened to it is said above");
        self.all_have.load(Ordering::Relaxed)
    }

    /// Ends; messages that every one of them has had.
    pub fn end(self) -> usize {
        self.enough.store(true, Ordering::Relaxed);
        self.thread.join().unwrap();
        self.all_have.load(Ordering::Relaxed)
    }
}

fn serve(
    epoll: &Epoll,
    mut subscribers: Vec<Subscriber>,
    topic: &str,
    all_have: &AtomicUsize,
    enough: &AtomicBool,
) {
    let mut events = [EpollEvent::empty(); 64];
    // How many have got each message that not all have yet; the first is number `all_have`.
    let mut having = std::collections::VecDeque::new();
    while !enough.load(Ordering::Relaxed) {
        // An interruption is a wake-up like any other.
        let count = epoll.wait(&mut events, EpollTimeout::from(LOOK)).unwrap_or(0);
        for event in &events[..count] {
            let number = usize::try_from(event.data()).unwrap();
            let first = subscribers[number].next;
            subscribers[number].take(number, topic);
            for message in first..subscribers[number].next {
                let place = message - all_have.load(Ordering::Relaxed);
                having.resize(having.len().max(place + 1), 0);
                having[place] += 1;
            }
            while having.front() == Some(&subscribers.len()) {
                having.pop_front();
                all_have.fetch_add(1, Ordering::Relaxed);
            }
        }
    }
}

impl Subscriber {
    /// Takes what has come, and acknowledges it.
    fn take(&mut self, number: usize, topic: &str) {
        let mut buffer = [0; 4096];
        loop {
            match self.stream.read(&mut buffer) {
                Ok(0) => panic!("the broker has closed the connection of subscriber {number}"),
                Ok(length) => self.received.extend_from_slice(&buffer[..length]),
                Err(error) if error.kind() == ErrorKind::WouldBlock => break,
                Err(error) => panic!("subscriber {number}: {error}"),
            }
        }
        while let Some((kind, body)) = packet(&mut self.received) {
            let Message { topic: of, text, id, again } = Message::read(kind, &body);
            let seen = (of.as_str(), text.as_str(), again);
            assert_eq!(seen, (topic, self.next.to_string().as_str(), false), "subscriber {number}");
            // Four bytes find room: no more messages are in flight than it has acknowledged before.
            let [high, low] = id.to_be_bytes();
            self.stream.write_all(&[PUBACK, 2, high, low]).unwrap();
            self.next += 1;
        }
    }
}

/// Takes a whole packet from the front of what has come.
fn packet(received: &mut Vec<u8>) -> Option<(u8, Vec<u8>)> {
    let kind = *received.first()?;
    let (mut length, mut at) = (0, 1);
    loop {
        let byte = *received.get(at)?;
        length |= usize::from(byte & 0x7f) << (7 * (at - 1));
        at += 1;
        if byte & 0x80 == 0 {
            break;
        }
    }
    let body = received.get(at..at + length)?.to_vec();
    received.drain(..at + length);
    Some((kind, body))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_packet_is_taken_when_all_of_it_has_come() {
        let body = vec![7; 200];
        let mut whole = vec![0x32, 0xc8, 0x01];
        whole.extend(&body);
        for length in 0..whole.len() {
            assert_eq!(packet(&mut whole[..length].to_vec()), None, "{length}");
        }
        whole.push(0x40);
        assert_eq!(packet(&mut whole), Some((0x32, body)));
        assert_eq!(whole, [0x40]);
    }
}
