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
//! queued in the broker.

use std::{
    io::{Read, Write},
    net::TcpStream,
};

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
        assert_eq!(kind & !DUP, PUBLISH | QOS_1, "{body:?}");
        let length = usize::from(u16::from_be_bytes([body[0], body[1]]));
        let (topic, rest) = body[2..].split_at(length);
        Message {
            topic: String::from_utf8(topic.to_vec()).unwrap(),
            id: u16::from_be_bytes([rest[0], rest[1]]),
            text: String::from_utf8(rest[2..].to_vec()).unwrap(),
            again: kind & DUP != 0,
        }
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
