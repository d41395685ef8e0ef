//! The few messages of OpenFlow 1.3 by which flows are written and read, as bytes and back.
//!
//! Our own code: of the crates that speak OpenFlow one calls itself unfinished (`rovs-openflow`), the others
//! know version 1.0 or are controllers that were left years ago.
//!
//! ```text
//!  0       1      2        4         8
//!  ├───────┼──────┼────────┼─────────┼──────────────
//!  │version│ kind │ length │ number  │ body …            (all numbers big-endian)
//! ```
//!
//! The length counts the eight bytes of the head, so a message has at most 65,535 bytes; longer answers come
//! in several. Nothing that arrives is taken on trust: each length is checked against what is there.
//!
//! Source: OpenFlow Switch Specification 1.3.5, section 7; for `reg0` and `move`, which are Nicira's,
//! `openflow/nicira-ext.h` of Open vSwitch.

use std::collections::BTreeMap;

use thiserror::Error;

/// OpenFlow 1.3.
const VERSION: u8 = 4;
/// Of a message's head.
const HEAD: usize = 8;
/// Of what comes before the match in the body of a change of flows.
const FLOW_MOD: usize = 40;

/// Kinds of messages.
pub(crate) mod kind {
    pub(crate) const HELLO: u8 = 0;
    pub(crate) const ERROR: u8 = 1;
    pub(crate) const ECHO_REQUEST: u8 = 2;
    pub(crate) const ECHO_REPLY: u8 = 3;
    pub(crate) const FLOW_MOD: u8 = 14;
    pub(crate) const MULTIPART_REQUEST: u8 = 18;
    pub(crate) const MULTIPART_REPLY: u8 = 19;
    pub(crate) const BARRIER_REQUEST: u8 = 20;
    pub(crate) const BARRIER_REPLY: u8 = 21;
}

const MULTIPART_FLOWS: u16 = 1;
const MULTIPART_PORTS: u16 = 13;
/// In a multipart reply: another message follows.
const MORE: u16 = 1;

const ADD: u8 = 0;
const DELETE: u8 = 3;
const DELETE_STRICT: u8 = 4;
const ALL_TABLES: u8 = 0xff;
/// No buffer, any port, any group.
const ANY: u32 = 0xffff_ffff;
/// A match in the extensible form.
const MATCH_OXM: u16 = 1;

const APPLY_ACTIONS: u16 = 4;
const GOTO_TABLE: u16 = 1;
const OUTPUT: u16 = 0;
const SET_FIELD: u16 = 25;
const EXPERIMENTER: u16 = 0xffff;
const NICIRA: u32 = 0x0000_2320;
const NICIRA_MOVE: u16 = 6;

/// The bridge's own interface, as a port.
pub(crate) const LOCAL: u32 = 0xffff_fffe;
/// Where the frame came in.
pub(crate) const IN_PORT: u32 = 0xffff_fff8;

/// A field of a frame, or of what goes with it through the switch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Field {
    InPort,
    EthDst,
    EthSrc,
    EthType,
    ArpOp,
    ArpSpa,
    ArpTpa,
    ArpSha,
    ArpTha,
    Reg0,
}

impl Field {
    /// The first four bytes of the field wherever it is named: class, number, no mask, length.
    const fn header(self) -> u32 {
        let (class, number, length): (u32, u32, u32) = match self {
            Self::InPort => (0x8000, 0, 4),
            Self::EthDst => (0x8000, 3, 6),
            Self::EthSrc => (0x8000, 4, 6),
            Self::EthType => (0x8000, 5, 2),
            Self::ArpOp => (0x8000, 21, 2),
            Self::ArpSpa => (0x8000, 22, 4),
            Self::ArpTpa => (0x8000, 23, 4),
            Self::ArpSha => (0x8000, 24, 6),
            Self::ArpTha => (0x8000, 25, 6),
            Self::Reg0 => (0x0001, 0, 4),
        };
        class << 16 | number << 9 | length
    }

    const fn bits(self) -> u16 {
        (self.header() & 0xff) as u16 * 8
    }
}

/// What is wrong with bytes that should be OpenFlow.
#[derive(Debug, Error, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Malformed {
    /// Another version than was agreed upon.
    #[error("a message of version {0} came where 4 (OpenFlow 1.3) was agreed upon")]
    Version(u8),
    /// A length that cannot be.
    #[error("{0} has a length that cannot be")]
    Length(&'static str),
    /// It ends too early.
    #[error("{0} ends in the middle")]
    Short(&'static str),
    /// A match in a form that is not used any more.
    #[error("a match has the unknown form {0}")]
    Match(u16),
}

/// Which frames a flow is for: the fields' headers and values. The order is that of the headers, in
/// which what a field presupposes comes before it.
#[derive(Debug, Clone, Default, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Match(BTreeMap<u32, Vec<u8>>);

impl Match {
    pub(crate) fn with(mut self, field: Field, value: impl AsRef<[u8]>) -> Self {
        self.0.insert(field.header(), value.as_ref().to_vec());
        self
    }

    /// Whether it has these fields and no others.
    pub(crate) fn only(&self, fields: &[Field]) -> bool {
        self.0.len() == fields.len() && fields.iter().all(|field| self.0.contains_key(&field.header()))
    }

    /// The value of a field of four bytes.
    pub(crate) fn number(&self, field: Field) -> Option<u32> {
        self.0
            .get(&field.header())
            .and_then(|value| <[u8; 4]>::try_from(value.as_slice()).ok())
            .map(u32::from_be_bytes)
    }

    /// Whether every frame that the other one is for is one of these.
    pub(crate) fn covers(&self, other: &Self) -> bool {
        self.0.iter().all(|(field, value)| other.0.get(field) == Some(value))
    }

    fn write(&self, to: &mut Vec<u8>) {
        let mut fields = Vec::new();
        for (header, value) in &self.0 {
            fields.extend(header.to_be_bytes());
            fields.extend(value);
        }
        to.extend(MATCH_OXM.to_be_bytes());
        // The padding does not count.
        to.extend(short(4 + fields.len()).to_be_bytes());
        to.extend(fields);
        pad(to);
    }

    /// Takes a match and its padding off the front.
    fn read(from: &mut Bytes<'_>) -> Result<Self, Malformed> {
        const WHAT: &str = "a match";
        let form = from.u16(WHAT)?;
        if form != MATCH_OXM {
            return Err(Malformed::Match(form));
        }
        let length = usize::from(from.u16(WHAT)?).checked_sub(4).ok_or(Malformed::Length(WHAT))?;
        let mut fields = Bytes(from.take(length, WHAT)?);
        from.take((8 - (4 + length) % 8) % 8, WHAT)?;
        let mut found = BTreeMap::new();
        while !fields.0.is_empty() {
            let header = fields.u32(WHAT)?;
            let value = fields.take((header & 0xff) as usize, WHAT)?;
            found.insert(header, value.to_vec());
        }
        Ok(Self(found))
    }
}

/// A flow, but for its counters and time limits.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Flow {
    pub(crate) table: u8,
    pub(crate) priority: u16,
    pub(crate) cookie: u64,
    pub(crate) matched: Match,
    /// As the switch takes and gives them.
    pub(crate) instructions: Vec<u8>,
}

/// A change of a bridge's flows.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Change {
    /// Takes the place of one with the same table, priority and match.
    Add(Flow),
    /// Removes every flow with this cookie, where one is given, whose frames all are among these.
    Delete { table: u8, cookie: Option<u64>, matched: Match },
    /// Removes the one flow with this table, priority and match.
    DeleteOne { table: u8, priority: u16, matched: Match },
}

/// A port of a bridge.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Port {
    pub(crate) number: u32,
    pub(crate) name: String,
}

/// What is done with a frame, in order.
#[derive(Debug, Default)]
pub(crate) struct Actions(Vec<u8>);

impl Actions {
    pub(crate) fn output(mut self, port: u32) -> Self {
        self.0.extend(OUTPUT.to_be_bytes());
        self.0.extend(16_u16.to_be_bytes());
        self.0.extend(port.to_be_bytes());
        // Nothing goes to a controller.
        self.0.extend([0; 8]);
        self
    }

    pub(crate) fn set(mut self, field: Field, value: impl AsRef<[u8]>) -> Self {
        let value = value.as_ref();
        // Unlike that of a match, the padding counts.
        let length = (8 + value.len()).next_multiple_of(8);
        self.0.extend(SET_FIELD.to_be_bytes());
        self.0.extend(short(length).to_be_bytes());
        self.0.extend(field.header().to_be_bytes());
        self.0.extend(value);
        pad(&mut self.0);
        self
    }

    /// Copies the whole of a field into another one of the same size.
    pub(crate) fn copy(mut self, from: Field, to: Field) -> Self {
        self.0.extend(EXPERIMENTER.to_be_bytes());
        self.0.extend(24_u16.to_be_bytes());
        self.0.extend(NICIRA.to_be_bytes());
        self.0.extend(NICIRA_MOVE.to_be_bytes());
        self.0.extend(from.bits().to_be_bytes());
        // Both from their first bit.
        self.0.extend([0; 4]);
        self.0.extend(from.header().to_be_bytes());
        self.0.extend(to.header().to_be_bytes());
        self
    }

    /// As a flow's instructions: these actions, and then another table, if one is named.
    pub(crate) fn then(self, table: Option<u8>) -> Vec<u8> {
        let mut bytes = Vec::new();
        if !self.0.is_empty() {
            bytes.extend(APPLY_ACTIONS.to_be_bytes());
            bytes.extend(short(8 + self.0.len()).to_be_bytes());
            bytes.extend([0; 4]);
            bytes.extend(self.0);
        }
        if let Some(table) = table {
            bytes.extend(GOTO_TABLE.to_be_bytes());
            bytes.extend(8_u16.to_be_bytes());
            bytes.extend([table, 0, 0, 0]);
        }
        bytes
    }
}

/// What is in a part of an answer, and whether more parts follow.
pub(crate) type Part<T> = Result<(Vec<T>, bool), Malformed>;

/// A whole message that came.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Message {
    pub(crate) version: u8,
    pub(crate) kind: u8,
    pub(crate) number: u32,
    pub(crate) body: Vec<u8>,
}

impl Message {
    /// Takes the first message off what was received, if it is there whole.
    pub(crate) fn take(received: &mut Vec<u8>) -> Result<Option<Self>, Malformed> {
        let Some(head) = received.first_chunk::<HEAD>() else { return Ok(None) };
        let [version, kind, l1, l2, n1, n2, n3, n4] = *head;
        let length = usize::from(u16::from_be_bytes([l1, l2]));
        if length < HEAD {
            return Err(Malformed::Length("a message"));
        }
        // Hello is said in whichever version each side likes best.
        if version != VERSION && kind != kind::HELLO {
            return Err(Malformed::Version(version));
        }
        if received.len() < length {
            return Ok(None);
        }
        let body = received[HEAD..length].to_vec();
        received.drain(..length);
        Ok(Some(Self { version, kind, number: u32::from_be_bytes([n1, n2, n3, n4]), body }))
    }

    /// Whether who says hello so speaks our version.
    pub(crate) fn speaks_our_version(&self) -> bool {
        const VERSIONS: u16 = 1;
        let mut body = Bytes(&self.body);
        // A list of bits, where there is one, counts, not the version of the message.
        while let (Ok(kind), Ok(length)) = (body.u16(""), body.u16("")) {
            let Some(length) = usize::from(length).checked_sub(4) else { break };
            let Ok(bits) = body.take(length, "") else { break };
            if kind == VERSIONS {
                let first = bits.first_chunk::<4>().map(|bits| u32::from_be_bytes(*bits));
                return first.is_some_and(|bits| bits & 1 << VERSION != 0);
            }
            let padding = (8 - (4 + length) % 8) % 8;
            if body.take(padding, "").is_err() {
                break;
            }
        }
        self.version >= VERSION
    }

    /// The type and code of an error.
    pub(crate) fn error(&self) -> Result<(u16, u16), Malformed> {
        let mut body = Bytes(&self.body);
        Ok((body.u16("an error")?, body.u16("an error")?))
    }

    /// The flows in a part of an answer.
    pub(crate) fn flows(&self) -> Part<Flow> {
        const WHAT: &str = "a flow";
        let (mut body, more) = self.multipart(MULTIPART_FLOWS)?;
        let mut flows = Vec::new();
        while !body.0.is_empty() {
            let length = usize::from(body.u16(WHAT)?).checked_sub(2).ok_or(Malformed::Length(WHAT))?;
            let mut entry = Bytes(body.take(length, WHAT)?);
            let table = entry.u8(WHAT)?;
            entry.take(1 + 4 + 4, WHAT)?;
            let priority = entry.u16(WHAT)?;
            entry.take(2 + 2 + 2 + 4, WHAT)?;
            let cookie = entry.u64(WHAT)?;
            entry.take(8 + 8, WHAT)?;
            let matched = Match::read(&mut entry)?;
            flows.push(Flow { table, priority, cookie, matched, instructions: entry.0.to_vec() });
        }
        Ok((flows, more))
    }

    /// The ports in a part of an answer.
    pub(crate) fn ports(&self) -> Part<Port> {
        const WHAT: &str = "a port";
        let (mut body, more) = self.multipart(MULTIPART_PORTS)?;
        let mut ports = Vec::new();
        while !body.0.is_empty() {
            let number = body.u32(WHAT)?;
            body.take(4 + 6 + 2, WHAT)?;
            let name = body.take(16, WHAT)?;
            body.take(8 * 4, WHAT)?;
            let end = name.iter().position(|byte| *byte == 0).unwrap_or(name.len());
            ports.push(Port { number, name: String::from_utf8_lossy(&name[..end]).into_owned() });
        }
        Ok((ports, more))
    }

    fn multipart(&self, wanted: u16) -> Result<(Bytes<'_>, bool), Malformed> {
        const WHAT: &str = "an answer";
        let mut body = Bytes(&self.body);
        let (found, flags) = (body.u16(WHAT)?, body.u16(WHAT)?);
        body.take(4, WHAT)?;
        if found != wanted {
            return Err(Malformed::Length(WHAT));
        }
        Ok((body, flags & MORE != 0))
    }
}

fn message(kind: u8, number: u32, body: &[u8]) -> Vec<u8> {
    let mut bytes = vec![VERSION, kind];
    bytes.extend(short(HEAD + body.len()).to_be_bytes());
    bytes.extend(number.to_be_bytes());
    bytes.extend(body);
    bytes
}

/// Our version, and no other.
pub(crate) fn hello(number: u32) -> Vec<u8> {
    let bits = 1_u32 << VERSION;
    let mut body = vec![0, 1, 0, 8];
    body.extend(bits.to_be_bytes());
    message(kind::HELLO, number, &body)
}

pub(crate) fn echo(asked: &Message) -> Vec<u8> {
    message(kind::ECHO_REPLY, asked.number, &asked.body)
}

/// Asks for a word when all before it is done.
pub(crate) fn barrier(number: u32) -> Vec<u8> {
    message(kind::BARRIER_REQUEST, number, &[])
}

/// Asks for all flows of all tables.
pub(crate) fn ask_flows(number: u32) -> Vec<u8> {
    let mut body = MULTIPART_FLOWS.to_be_bytes().to_vec();
    body.extend([0; 6]);
    body.extend([ALL_TABLES, 0, 0, 0]);
    body.extend(ANY.to_be_bytes());
    body.extend(ANY.to_be_bytes());
    // Padding; any cookie.
    body.extend([0; 4 + 8 + 8]);
    Match::default().write(&mut body);
    message(kind::MULTIPART_REQUEST, number, &body)
}

/// Asks for all ports.
pub(crate) fn ask_ports(number: u32) -> Vec<u8> {
    let mut body = MULTIPART_PORTS.to_be_bytes().to_vec();
    body.extend([0; 6]);
    message(kind::MULTIPART_REQUEST, number, &body)
}

impl Change {
    pub(crate) fn message(&self, number: u32) -> Vec<u8> {
        let nothing = Vec::new();
        let (command, table, priority, cookie, mask, matched, instructions) = match self {
            Self::Add(flow) => {
                (ADD, flow.table, flow.priority, flow.cookie, 0, &flow.matched, &flow.instructions)
            }
            Self::Delete { table, cookie, matched } => {
                let mask = if cookie.is_some() { u64::MAX } else { 0 };
                (DELETE, *table, 0, cookie.unwrap_or(0), mask, matched, &nothing)
            }
            Self::DeleteOne { table, priority, matched } => {
                (DELETE_STRICT, *table, *priority, 0, 0, matched, &nothing)
            }
        };
        let mut body = cookie.to_be_bytes().to_vec();
        body.extend(mask.to_be_bytes());
        body.extend([table, command]);
        // It stays until it is removed.
        body.extend([0; 4]);
        body.extend(priority.to_be_bytes());
        for any in ["buffer", "port", "group"].map(|_| ANY) {
            body.extend(any.to_be_bytes());
        }
        // No flags; padding.
        body.extend([0; 4]);
        matched.write(&mut body);
        body.extend(instructions);
        message(kind::FLOW_MOD, number, &body)
    }
}

/// A length: of what is made here, which has some hundred bytes, or has come in a message.
fn short(length: usize) -> u16 {
    u16::try_from(length).unwrap_or(u16::MAX)
}

fn pad(bytes: &mut Vec<u8>) {
    bytes.resize(bytes.len().next_multiple_of(8), 0);
}

/// What is left to read.
struct Bytes<'a>(&'a [u8]);

impl<'a> Bytes<'a> {
    fn take(&mut self, length: usize, what: &'static str) -> Result<&'a [u8], Malformed> {
        let (taken, rest) = self.0.split_at_checked(length).ok_or(Malformed::Short(what))?;
        self.0 = rest;
        Ok(taken)
    }

    fn array<const N: usize>(&mut self, what: &'static str) -> Result<[u8; N], Malformed> {
        let (taken, rest) = self.0.split_first_chunk::<N>().ok_or(Malformed::Short(what))?;
        self.0 = rest;
        Ok(*taken)
    }

    fn u8(&mut self, what: &'static str) -> Result<u8, Malformed> {
        self.array(what).map(u8::from_be_bytes)
    }

    fn u16(&mut self, what: &'static str) -> Result<u16, Malformed> {
        self.array(what).map(u16::from_be_bytes)
    }

    fn u32(&mut self, what: &'static str) -> Result<u32, Malformed> {
        self.array(what).map(u32::from_be_bytes)
    }

    fn u64(&mut self, what: &'static str) -> Result<u64, Malformed> {
        self.array(what).map(u64::from_be_bytes)
    }
}

/// Reads any bytes as a stream of messages, in pieces of that size, and what is in them: for the fuzz target
/// `openflow`.
///
/// # Panics
/// When the size of the pieces makes a difference, or flows are not the same when they are written and read
/// again.
pub fn read_anything(bytes: &[u8], piece: usize) {
    let read = |piece: usize| {
        let (mut received, mut messages) = (Vec::new(), Vec::new());
        for bytes in bytes.chunks(piece.max(1)) {
            received.extend(bytes);
            loop {
                match Message::take(&mut received) {
                    Ok(Some(message)) => messages.push(message),
                    Ok(None) => break,
                    Err(error) => return (messages, Some(error)),
                }
            }
        }
        (messages, None)
    };
    let whole = read(bytes.len());
    assert_eq!(whole, read(piece), "the size of reads made a difference");
    for message in whole.0 {
        // Whatever they say, they come to an end.
        let _ = (message.speaks_our_version(), message.error(), message.ports());
        for flow in message.flows().map(|(flows, _)| flows).unwrap_or_default() {
            let mut written = Change::Add(flow.clone()).message(message.number);
            let again = Message::take(&mut written).map(|again| again.map(|again| again.body));
            let Ok(Some(body)) = again else { panic!("a flow was written as something else: {again:?}") };
            let mut rest = Bytes(&body[FLOW_MOD..]);
            assert_eq!(Match::read(&mut rest), Ok(flow.matched), "a match came otherwise");
            assert_eq!(rest.0, flow.instructions, "instructions came otherwise");
        }
    }
}

#[cfg(test)]
mod tests;
