//! TCP sockets as the kernel shows them, of the client's host and of a service: `/proc/<pid>/net/tcp`; and
//! what waits in those of UDP.

use std::{fs, time::Duration};

use crate::{Bed, CLIENT};

/// What this needs of the states of RFC 9293, as the kernel numbers them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum State {
    /// Open in both directions.
    Established,
    /// Has asked for a connection.
    SynSent,
    /// Was asked for one, and has answered.
    SynReceived,
    /// Has sent its FIN, which is acknowledged.
    FinWait2,
    /// The other end has sent its FIN.
    CloseWait,
    /// Takes connections.
    Listen,
    /// Another one.
    Other(u8),
}

/// One socket.
#[derive(Clone, Copy, Debug)]
pub struct Socket {
    /// Its port.
    pub port: u16,
    /// The port of the other end; 0 of one that listens.
    pub peer: u16,
    /// Its state.
    pub state: State,
    /// Bytes that the other end has not acknowledged, sent or not.
    pub unsent: u64,
    /// Bytes that were not read; of one that listens, connections that were not accepted.
    pub unread: u64,
    /// Time-outs in a row after which it sent again.
    pub retransmits: u64,
    /// Probes that were not answered: of keepalive, or of a window that is zero.
    pub probes: u32,
    /// In what time its timer expires, if one runs.
    pub timer: Duration,
}

/// Those of the client's host.
pub fn of_client(bed: &Bed) -> Vec<Socket> {
    // `/proc/net` would be the namespace of this process's first thread.
    bed.lab().inside(CLIENT, || read("/proc/thread-self/net/tcp")).unwrap()
}

/// Those of a service that runs on this node.
pub fn of_service(bed: &Bed, node: &str, name: &str) -> Vec<Socket> {
    let service: serde_json::Value = bed.json(node, &["inspect", name]);
    read(&format!("/proc/{}/net/tcp", service["pid"]))
}

/// Bytes that the kernel holds for the datagrams that wait at a service's port on this node.
pub fn datagrams_of_service(bed: &Bed, node: &str, name: &str, port: u16) -> u64 {
    let service: serde_json::Value = bed.json(node, &["inspect", name]);
    // It has the columns of the other one.
    let sockets = read(&format!("/proc/{}/net/udp", service["pid"]));
    sockets.iter().filter(|socket| socket.port == port).map(|socket| socket.unread).sum()
}

/// The socket with these ports, if there is one.
pub fn between(sockets: &[Socket], port: u16, peer: u16) -> Option<Socket> {
    sockets.iter().find(|socket| (socket.port, socket.peer) == (port, peer)).copied()
}

fn read(path: &str) -> Vec<Socket> {
    let text = fs::read_to_string(path).unwrap();
    text.lines().skip(1).map(|line| socket(line).unwrap_or_else(|| panic!("{path}: {line}"))).collect()
}

/// `sl local remote state unsent:unread timer:when retransmissions uid probes …`, mostly hexadecimal.
fn socket(line: &str) -> Option<Socket> {
    let words: Vec<&str> = line.split_whitespace().collect();
    let port = |place: usize| u16::from_str_radix(words.get(place)?.split_once(':')?.1, 16).ok();
    let (unsent, unread) = words.get(4)?.split_once(':')?;
    let number = |text: &str| u64::from_str_radix(text, 16).ok();
    let state = match u8::from_str_radix(words.get(3)?, 16).ok()? {
        1 => State::Established,
        2 => State::SynSent,
        3 => State::SynReceived,
        5 => State::FinWait2,
        8 => State::CloseWait,
        10 => State::Listen,
        other => State::Other(other),
    };
    Some(Socket {
        port: port(1)?,
        peer: port(2)?,
        state,
        unsent: number(unsent)?,
        unread: number(unread)?,
        retransmits: number(words.get(6)?)?,
        probes: words.get(8)?.parse().ok()?,
        // In hundredths of a second (USER_HZ).
        timer: Duration::from_millis(number(words.get(5)?.split_once(':')?.1)?.checked_mul(10)?),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_of_the_kernel_is_read() {
        let line = "   3: 0A580A3C:1B62 64006363:9C40 08 0000002A:00001000 04:000000C8 00000003     0        2 12345 2 0 21 4 30 10 -1";
        let socket = socket(line).unwrap();
        assert_eq!((socket.port, socket.peer, socket.state), (7010, 40_000, State::CloseWait));
        assert_eq!((socket.unsent, socket.unread, socket.retransmits, socket.probes), (42, 4096, 3, 2));
        assert_eq!(socket.timer, Duration::from_secs(2));
    }
}
