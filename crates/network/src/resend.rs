//! Segments that were in doubt when a service was frozen: sent, and not acknowledged. They are sent again as
//! soon as the service's port is open.
//!
//! A restored socket holds them for sent, and waits for a time-out before it sends them again: 1 s from the
//! restore on, then 2 s, 4 s and so on, most of it behind a port that is closed until the commit. No system
//! call makes it send them sooner. But another may send the same bytes with the same numbers, which are in
//! CRIU's images: to who gets them they are the socket's own, and so is the acknowledgement to the socket,
//! which then goes on by itself.
//!
//! ```text
//!   restored   [`Resend::prepare`]: is the socket's queue as the images tell?
//!   port open  [`Resend::send`]: what is in doubt still? Held acknowledgements may have come.
//!                 the first segments, as many as a new connection may send (RFC 6928), and
//!                 the last ones: what lies between is then known to be lost (RFC 6675, RFC 8985)
//! ```

use std::io;
use std::net::{IpAddr, SocketAddr};
use std::ops::Range;
use std::path::Path;
use std::time::Instant;

use godwit_sockets::SockDiag;

use crate::connections::{self, TcpSocket};
use crate::raw::RawSocket;
use crate::{NetworkError, enter};

/// Segments that are sent at once from the beginning (RFC 6928).
const FIRST: usize = 10;
/// Segments that are sent of the end: as many duplicate acknowledgements tell of a loss (RFC 5681).
const LAST: usize = 3;
/// Most bytes in a segment: fits every path of the overlay. The loopback interface could take more.
const LARGEST: usize = 1300;
/// Bytes of the option for timestamps, with two to fill up.
const TIMESTAMPS: usize = 12;

const FIN: u8 = 0x01;
const PUSH: u8 = 0x08;
const ACK: u8 = 0x10;

/// A connection with segments in doubt, as CRIU's images tell.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct InDoubt {
    /// Its own end.
    pub local: SocketAddr,
    /// The other end.
    pub remote: SocketAddr,
    /// The number of the first byte that was not acknowledged.
    pub sequence: u32,
    /// Bytes from there on, also those that were not sent yet.
    pub bytes: Vec<u8>,
    /// Whether a FIN comes after them.
    pub finished: bool,
    /// The number of the next byte that it expects.
    pub received: u32,
    /// Most bytes in a segment of it.
    pub segment: u32,
    /// The window that it offers, as in a segment: scaled.
    pub window: u16,
    /// Its clock at the dump, if both ends use timestamps (RFC 7323): milliseconds.
    pub timestamp: Option<u32>,
}

/// What was sent again.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Resent {
    /// Connections of which segments were in doubt still.
    pub connections: u64,
    /// Segments.
    pub segments: u64,
}

/// Connections whose segments can be sent again.
#[derive(Debug)]
pub struct Resend {
    /// Each with what its socket was before its port opened.
    connections: Vec<(InDoubt, TcpSocket)>,
    sockets: SockDiag,
    raw: RawSocket,
    since: Instant,
}

impl Resend {
    /// Looks at sockets that were restored from these images in the namespace that is mounted there, and whose
    /// processes do not run. Those that are not as they should be are left to themselves.
    ///
    /// # Errors
    /// When the namespace cannot be entered, or the kernel refuses.
    pub async fn prepare(netns: &Path, all: Vec<InDoubt>) -> Result<Self, NetworkError> {
        let look = move || {
            let (sockets, raw) = (SockDiag::open()?, RawSocket::new()?);
            let mut connections = Vec::new();
            for connection in all {
                let socket = connections::look_up(&sockets, connection.local, connection.remote)?;
                let length = connection.bytes.len() + usize::from(connection.finished);
                match socket {
                    Some(socket) if socket.queue as usize == length => {
                        connections.push((connection, socket));
                    }
                    other => tracing::debug!(
                        local = %connection.local,
                        remote = %connection.remote,
                        ?other,
                        length,
                        "a restored connection differs from its image; only its own timer sends again"
                    ),
                }
            }
            Ok(Self { connections, sockets, raw, since: Instant::now() })
        };
        let failed = NetworkError::system(format!("examine the connections in {}", netns.display()));
        enter(netns, look).await?.map_err(failed)
    }

    /// How many connections there are.
    #[must_use]
    pub fn count(&self) -> usize {
        self.connections.len()
    }

    /// Sends what is in doubt still. Blocks for some microseconds for each connection.
    ///
    /// # Errors
    /// When the kernel cannot be asked. A packet that it does not take is as one that is lost.
    pub fn send(&self) -> io::Result<Resent> {
        let mut resent = Resent::default();
        for (connection, before) in &self.connections {
            let Some(socket) = connections::look_up(&self.sockets, connection.local, connection.remote)?
            else {
                continue;
            };
            let Some((bytes, fin)) = connection.due(before, &socket) else { continue };
            // Not ahead of the socket's own clock, which began a little earlier.
            let elapsed = u32::try_from(self.since.elapsed().as_millis()).unwrap_or_default();
            let timestamp = connection.timestamp.map(|then| then.wrapping_add(elapsed));
            resent.connections += 1;
            let largest = (connection.segment as usize).clamp(1, LARGEST);
            // To one that gets an acknowledgement of less than it knows of, the clock in it is old, too.
            let received = u32::try_from(socket.received.wrapping_sub(before.received)).unwrap_or_default();
            let received = connection.received.wrapping_add(received);
            for piece in pieces(&bytes, largest) {
                let fin = fin && piece.end == bytes.end;
                let packet = connection.packet(piece, fin, received, timestamp);
                match self.raw.send(&packet, connection.remote.ip()) {
                    Ok(()) => resent.segments += 1,
                    Err(error) => {
                        tracing::debug!(remote = %connection.remote, %error, "a segment is not sent again");
                        break;
                    }
                }
            }
        }
        Ok(resent)
    }
}

impl InDoubt {
    /// Which of its bytes the socket holds for sent and not acknowledged, and whether its FIN is, too.
    fn due(&self, before: &TcpSocket, socket: &TcpSocket) -> Option<(Range<usize>, bool)> {
        let acknowledged = usize::try_from(socket.acknowledged.checked_sub(before.acknowledged)?).ok()?;
        let sent = socket.queue.saturating_sub(socket.not_sent) as usize;
        let begin = acknowledged;
        if begin > self.bytes.len() {
            return None;
        }
        let end = begin.saturating_add(sent);
        let fin = self.finished && end > self.bytes.len();
        let end = end.min(self.bytes.len());
        (end > begin || fin).then_some((begin..end, fin))
    }

    /// An IP packet with a TCP segment.
    fn packet(&self, bytes: Range<usize>, fin: bool, received: u32, timestamp: Option<u32>) -> Vec<u8> {
        let offset = u32::try_from(bytes.start).unwrap_or_default();
        let options = if timestamp.is_some() { TIMESTAMPS } else { 0 };
        let words = u8::try_from((20 + options) / 4).unwrap_or_default();
        let mut segment = Vec::with_capacity(20 + options + bytes.len());
        segment.extend(self.local.port().to_be_bytes());
        segment.extend(self.remote.port().to_be_bytes());
        segment.extend(self.sequence.wrapping_add(offset).to_be_bytes());
        segment.extend(received.to_be_bytes());
        segment.extend([words << 4, ACK | PUSH | if fin { FIN } else { 0 }]);
        segment.extend(self.window.to_be_bytes());
        // Check sum and urgent pointer.
        segment.extend([0; 4]);
        if let Some(timestamp) = timestamp {
            // Twice nothing, then the option. It echoes no time: nobody shall take the pause for a round trip.
            segment.extend([1, 1, 8, 10]);
            segment.extend(timestamp.to_be_bytes());
            segment.extend([0; 4]);
        }
        segment.extend(self.bytes.get(bytes).unwrap_or_default());
        let sum = check_sum(self.local.ip(), self.remote.ip(), &segment);
        if let Some(place) = segment.get_mut(16..18) {
            place.copy_from_slice(&sum.to_be_bytes());
        }
        let mut packet = header(self.local.ip(), self.remote.ip(), segment.len());
        packet.extend(segment);
        packet
    }
}

/// The segments in which bytes are sent: the first of them, and the last.
fn pieces(bytes: &Range<usize>, largest: usize) -> Vec<Range<usize>> {
    if bytes.is_empty() {
        // A FIN alone.
        return vec![bytes.clone()];
    }
    let all: Vec<_> =
        bytes.clone().step_by(largest).map(|at| at..at.saturating_add(largest).min(bytes.end)).collect();
    let first = all.len().min(FIRST);
    let last = all.len().saturating_sub(LAST).max(first);
    all.iter().take(first).chain(all.iter().skip(last)).cloned().collect()
}

/// What comes before a TCP segment. The kernel adds what is missing in that of IPv4: length and check sum.
fn header(from: IpAddr, to: IpAddr, length: usize) -> Vec<u8> {
    const TCP: u8 = 6;
    const HOPS: u8 = 64;
    match (from, to) {
        (IpAddr::V4(from), IpAddr::V4(to)) => {
            let mut header = vec![0x45, 0, 0, 0, 0, 0, 0x40, 0, HOPS, TCP, 0, 0];
            header.extend(from.octets().iter().chain(&to.octets()));
            header
        }
        (from, to) => {
            let mut header = vec![0x60, 0, 0, 0];
            header.extend(u16::try_from(length).unwrap_or_default().to_be_bytes());
            header.extend([TCP, HOPS]);
            header.extend(octets(from).iter().chain(&octets(to)));
            header
        }
    }
}

fn octets(address: IpAddr) -> Vec<u8> {
    match address {
        IpAddr::V4(address) => address.octets().to_vec(),
        IpAddr::V6(address) => address.octets().to_vec(),
    }
}

/// The check sum of a TCP segment whose own is zero (RFC 9293, 3.1).
fn check_sum(from: IpAddr, to: IpAddr, segment: &[u8]) -> u16 {
    let length = u32::try_from(segment.len()).unwrap_or_default().to_be_bytes();
    let addresses = [octets(from), octets(to)].concat();
    let pseudo = [&addresses[..], &length, &[0, 0, 0, 6]].concat();
    let words = |bytes: &[u8]| -> u64 {
        let word = |pair: &[u8]| {
            let high = pair.first().copied().unwrap_or_default();
            u64::from(u16::from_be_bytes([high, pair.get(1).copied().unwrap_or_default()]))
        };
        bytes.chunks(2).map(word).sum()
    };
    let mut sum = words(&pseudo) + words(segment);
    while sum > 0xffff {
        sum = (sum & 0xffff) + (sum >> 16);
    }
    !u16::try_from(sum).unwrap_or_default()
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn connection() -> InDoubt {
        InDoubt {
            local: "10.88.0.10:80".parse().unwrap(),
            remote: "10.99.0.100:40000".parse().unwrap(),
            sequence: u32::MAX - 4,
            bytes: (0..=99).collect(),
            finished: true,
            received: 7,
            segment: 1398,
            window: 500,
            timestamp: Some(9),
        }
    }

    fn socket(queue: u32, not_sent: u32, acknowledged: u64) -> TcpSocket {
        TcpSocket { queue, not_sent, acknowledged, received: 0 }
    }

    #[test]
    fn what_is_acknowledged_or_was_never_sent_is_not_sent_again() {
        let (connection, before) = (connection(), socket(101, 0, 5));
        // All is sent, and a FIN.
        assert_eq!(connection.due(&before, &socket(101, 0, 5)), Some((0..100, true)));
        // Some is acknowledged.
        assert_eq!(connection.due(&before, &socket(61, 0, 45)), Some((40..100, true)));
        // The FIN is in doubt only.
        assert_eq!(connection.due(&before, &socket(1, 0, 105)), Some((100..100, true)));
        // All is acknowledged, and more was written since.
        assert_eq!(connection.due(&before, &socket(0, 0, 106)), None);
        assert_eq!(connection.due(&before, &socket(50, 0, 200)), None);
        // Some is not sent yet: an acknowledgement of it would mean nothing to the socket.
        assert_eq!(connection.due(&before, &socket(101, 71, 5)), Some((0..30, false)));
        assert_eq!(connection.due(&before, &socket(101, 101, 5)), None);
        // More was written and sent since.
        let open = InDoubt { finished: false, ..connection };
        assert_eq!(open.due(&socket(100, 0, 0), &socket(600, 0, 0)), Some((0..100, false)));
    }

    #[test]
    fn the_first_segments_are_sent_and_the_last() {
        assert_eq!(pieces(&(5..5), 100), std::iter::once(5..5).collect::<Vec<_>>());
        assert_eq!(pieces(&(5..205), 100), [5..105, 105..205]);
        let some = pieces(&(0..10_050), 100);
        assert_eq!(some.len(), FIRST + LAST);
        assert_eq!(
            (some[9].clone(), some[10].clone(), some[12].clone()),
            (900..1000, 9800..9900, 10_000..10_050)
        );
        assert_eq!(pieces(&(0..1150), 100).len(), 12);
    }

    #[test]
    fn a_segment_is_one_of_the_connection_and_its_sum_is_right() {
        for (local, remote) in [("10.88.0.10:80", "10.99.0.100:40000"), ("[fd67::a]:80", "[fd99::64]:40000")]
        {
            let connection =
                InDoubt { local: local.parse().unwrap(), remote: remote.parse().unwrap(), ..connection() };
            let packet = connection.packet(10..31, false, 7, Some(77));
            let header = if connection.local.is_ipv4() { 20 } else { 40 };
            let segment = &packet[header..];
            assert_eq!(segment.len(), 20 + TIMESTAMPS + 21);
            assert_eq!(segment[..4], [0, 80, 156, 64]);
            // It has wrapped around.
            assert_eq!(segment[4..8], 5_u32.to_be_bytes());
            assert_eq!(segment[8..16], [0, 0, 0, 7, 8 << 4, ACK | PUSH, 1, 244]);
            assert_eq!(segment[20..32], [1, 1, 8, 10, 0, 0, 0, 77, 0, 0, 0, 0]);
            assert_eq!(segment[32..], connection.bytes[10..31]);
            // With its sum in place it adds up to nothing.
            assert_eq!(check_sum(connection.local.ip(), connection.remote.ip(), segment), 0);
            if connection.local.is_ipv6() {
                assert_eq!(packet[4..8], [0, 53, 6, 64]);
            }
        }
        let last = connection().packet(90..100, true, 7, None);
        assert_eq!((last.len(), last[20 + 13]), (20 + 20 + 10, ACK | PUSH | FIN));
    }
}
