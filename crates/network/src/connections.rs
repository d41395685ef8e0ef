//! A service's connections, as the kernel lists them inside its network namespace.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::os::unix::fs::MetadataExt as _;
use std::path::Path;

use godwit_sockets::SockDiag;
use godwit_sockets::inet::{Family, Socket, States, TcpInfo, Transport};

use crate::{NetworkError, Protocol, enter};

/// Connections that are listed; all are counted.
pub const MOST_LISTED: usize = 65_536;

/// What a service's sockets were at one moment.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Connections {
    /// Of TCP, then of UDP; at most [`MOST_LISTED`].
    pub list: Vec<Connection>,
    /// How many of each protocol and state there are.
    pub states: BTreeMap<(&'static str, &'static str), u64>,
    /// Protocols of which this kernel tells nothing.
    pub unavailable: Vec<&'static str>,
}

/// One socket.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Connection {
    /// Its protocol.
    pub protocol: Protocol,
    /// Its state, in the words of RFC 9293 and `ss`.
    pub state: &'static str,
    /// Its own address.
    pub local: SocketAddr,
    /// The other side's; zeroes where there is none.
    pub remote: SocketAddr,
    /// Bytes that the program has not read; of a listening socket, connections it has not accepted.
    pub receive_queue: u32,
    /// Bytes that are not acknowledged; of a listening socket, how many connections may wait.
    pub send_queue: u32,
    /// What it waits for: `retransmit`, `keepalive`, `time-wait`, `probe`, or nothing.
    pub timer: &'static str,
    /// In how many milliseconds that comes.
    pub timer_ms: u32,
    /// Time-outs in a row without an acknowledgement: retransmissions of what is sent now.
    pub retransmits: u32,
    /// More of TCP, where the kernel tells it.
    pub tcp: Option<TcpDetails>,
}

/// What only TCP has.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TcpDetails {
    /// Smoothed round trip, in microseconds.
    pub rtt_us: u32,
    /// Its mean deviation, in microseconds.
    pub rtt_var_us: u32,
    /// Retransmission time-out, in microseconds.
    pub rto_us: u32,
    /// Segments sent again since the connection began.
    pub total_retransmits: u32,
    /// Segments sent and not acknowledged.
    pub unacked: u32,
    /// The congestion window, in segments.
    pub congestion_window: u32,
    /// How long ago data was sent last, in milliseconds: the round trip is no newer. Where none was, the time means nothing.
    pub last_sent_ms: u32,
    /// How long ago data came last, in milliseconds. Where none has come, the time means nothing.
    pub last_received_ms: u32,
    /// Bytes received since the socket was made, which a restore does.
    pub received: u64,
}

/// The sockets in the network namespace that is mounted there.
///
/// # Errors
/// When it cannot be entered, or the kernel refuses.
pub async fn inside(netns: &Path) -> Result<Connections, NetworkError> {
    let listed = enter(netns, list).await?;
    listed.map_err(NetworkError::system(format!("list the connections in {}", netns.display())))
}

/// Ends the TCP connections in the network namespace that is mounted there by addresses that are its own no more, or are about
/// to be: with `all` every one but those by the loopback. A program would wait for minutes for such a connection, and so
/// would the other side, which is told as long as the address is there.
///
/// # Errors
/// When it cannot be entered, or the kernel refuses.
pub async fn end(netns: &Path, all: bool) -> Result<usize, NetworkError> {
    let ended = enter(netns, move || end_here(all)).await?;
    ended.map_err(NetworkError::system(format!("end the connections in {}", netns.display())))
}

fn end_here(all: bool) -> io::Result<usize> {
    let inode = |path: &str| std::fs::metadata(path).map(|found| found.ino());
    if inode("/proc/thread-self/ns/net")? == inode("/proc/self/ns/net")? {
        // As where a process is gone, and another has its number.
        return Err(io::Error::other("it is the node's own"));
    }
    let own: BTreeSet<IpAddr> = nix::ifaddrs::getifaddrs()?.filter_map(|of| ip_of(of.address?)).collect();
    let is_meant =
        |local: IpAddr| !local.is_loopback() && !local.is_unspecified() && (all || !own.contains(&local));
    let sockets = SockDiag::open()?;
    let mut ends = Vec::new();
    for family in [Family::V4, Family::V6] {
        let listed = sockets.inet(family, Transport::Tcp, States::CONNECTED, |socket| {
            if is_meant(socket.local.ip()) {
                ends.push(socket.identity);
            }
        });
        match listed {
            // Without IPv6 there is nothing of it.
            Err(error) if family == Family::V6 && error.kind() == io::ErrorKind::NotFound => {}
            other => other?,
        }
    }
    for identity in &ends {
        sockets.end(identity)?;
    }
    Ok(ends.len())
}

fn ip_of(address: nix::sys::socket::SockaddrStorage) -> Option<IpAddr> {
    let four = address.as_sockaddr_in().map(|four| IpAddr::V4(four.ip()));
    four.or_else(|| address.as_sockaddr_in6().map(|six| IpAddr::V6(six.ip())))
}

/// Lists the sockets of the calling thread's network namespace.
fn list() -> io::Result<Connections> {
    let mut found = Connections::default();
    let sockets = SockDiag::open()?;
    for (protocol, transport, name) in
        [(Protocol::Tcp, Transport::Tcp, "tcp"), (Protocol::Udp, Transport::Udp, "udp")]
    {
        for family in [Family::V4, Family::V6] {
            match sockets.inet(family, transport, States::ALL, |socket| found.take(protocol, name, &socket)) {
                Ok(()) => {}
                // Not in this kernel; without IPv6 there is nothing of it to be missed.
                Err(error) if error.kind() == io::ErrorKind::NotFound => {
                    if family == Family::V4 {
                        found.unavailable.push(name);
                    }
                }
                Err(error) => return Err(error),
            }
        }
    }
    Ok(found)
}

impl Connections {
    fn take(&mut self, protocol: Protocol, name: &'static str, socket: &Socket) {
        let connection = connection(protocol, socket);
        *self.states.entry((name, connection.state)).or_default() += 1;
        if self.list.len() < MOST_LISTED {
            self.list.push(connection);
        }
    }
}

/// What the kernel tells of one TCP socket, as far as it matters to what is in doubt.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct TcpSocket {
    /// What was written and not acknowledged, bytes; a FIN counts as one.
    pub(crate) queue: u32,
    /// Of these, what was not sent.
    pub(crate) not_sent: u32,
    /// What was acknowledged since the socket was made, bytes.
    pub(crate) acknowledged: u64,
    /// What was received in order since the socket was made, bytes.
    pub(crate) received: u64,
}

/// One socket of TCP; none where there is no connection between these ends.
pub(crate) fn look_up(
    sockets: &SockDiag,
    local: SocketAddr,
    remote: SocketAddr,
) -> io::Result<Option<TcpSocket>> {
    let found = sockets.tcp_connection(local, remote)?;
    Ok(found.and_then(|found| {
        Some(TcpSocket {
            queue: found.send_queue,
            not_sent: found.tcp.not_sent()?,
            acknowledged: found.tcp.bytes_acknowledged()?,
            received: found.tcp.bytes_received()?,
        })
    }))
}

fn connection(protocol: Protocol, socket: &Socket) -> Connection {
    Connection {
        protocol,
        state: state_name(socket.state, protocol),
        local: socket.local,
        remote: socket.remote,
        receive_queue: socket.receive_queue,
        send_queue: socket.send_queue,
        timer: timer_name(socket.timer),
        timer_ms: socket.timer_ms,
        // What the timer has counted is of no meaning where it counts no retransmissions.
        retransmits: if socket.timer == 1 { socket.retransmits.into() } else { 0 },
        tcp: tcp_details(&socket.tcp),
    }
}

fn tcp_details(info: &TcpInfo) -> Option<TcpDetails> {
    Some(TcpDetails {
        rtt_us: info.rtt_us()?,
        rtt_var_us: info.rtt_var_us()?,
        rto_us: info.rto_us()?,
        total_retransmits: info.total_retransmits()?,
        unacked: info.unacked()?,
        congestion_window: info.congestion_window()?,
        last_sent_ms: info.last_sent_ms()?,
        last_received_ms: info.last_received_ms()?,
        received: info.bytes_received()?,
    })
}

fn state_name(state: u8, protocol: Protocol) -> &'static str {
    match (protocol, state) {
        (Protocol::Udp, 1) => "connected",
        (Protocol::Udp, _) => "unconnected",
        (_, 1) => "established",
        (_, 2) => "syn-sent",
        // 12 is a request that has no socket yet.
        (_, 3 | 12) => "syn-received",
        (_, 4) => "fin-wait-1",
        (_, 5) => "fin-wait-2",
        (_, 6) => "time-wait",
        (_, 7) => "closed",
        (_, 8) => "close-wait",
        (_, 9) => "last-ack",
        (_, 10) => "listen",
        (_, 11) => "closing",
        _ => "unknown",
    }
}

fn timer_name(timer: u8) -> &'static str {
    match timer {
        1 => "retransmit",
        2 => "keepalive",
        3 => "time-wait",
        4 => "probe",
        _ => "",
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::io::Write;
    use std::net::{TcpListener, TcpStream, UdpSocket};

    use super::*;

    #[test]
    fn only_a_timer_for_retransmissions_counts_them() {
        let mut socket = Socket {
            state: 1,
            local: "10.88.0.10:6379".parse().unwrap(),
            remote: "10.99.0.100:40000".parse().unwrap(),
            timer: 1,
            timer_ms: 180,
            retransmits: 3,
            receive_queue: 5,
            send_queue: 1448,
            tcp: TcpInfo::default(),
            identity: godwit_sockets::inet::Identity::default(),
        };
        let expected = Connection {
            protocol: Protocol::Tcp,
            state: "established",
            local: socket.local,
            remote: socket.remote,
            receive_queue: 5,
            send_queue: 1448,
            timer: "retransmit",
            timer_ms: 180,
            retransmits: 3,
            tcp: None,
        };
        assert_eq!(connection(Protocol::Tcp, &socket), expected);
        socket.timer = 2;
        let keepalive = Connection { timer: "keepalive", retransmits: 0, ..expected };
        assert_eq!(connection(Protocol::Tcp, &socket), keepalive);
    }

    #[test]
    fn this_process_s_own_sockets_are_found() {
        let listener = TcpListener::bind("[::1]:0").or_else(|_| TcpListener::bind("127.0.0.1:0")).unwrap();
        let at = listener.local_addr().unwrap();
        let mut client = TcpStream::connect(at).unwrap();
        client.write_all(b"unread").unwrap();
        // Only what has arrived can be found.
        let (accepted_end, _) = listener.accept().unwrap();
        while accepted_end.peek(&mut [0; 6]).unwrap() < 6 {}
        let datagrams = UdpSocket::bind("127.0.0.1:0").unwrap();
        let found = list().unwrap();
        let one = |local, remote| found.list.iter().find(|c| c.local == local && c.remote == remote).unwrap();
        let client_at = client.local_addr().unwrap();
        let accepted = one(at, client_at);
        assert_eq!((accepted.state, accepted.receive_queue), ("established", 6));
        assert_eq!(one(client_at, at).protocol, Protocol::Tcp);
        assert!(one(client_at, at).tcp.is_some_and(|tcp| tcp.rto_us > 0));
        assert!(accepted.tcp.is_some_and(|tcp| tcp.last_received_ms < 60_000), "{accepted:?}");
        assert!(one(client_at, at).tcp.is_some_and(|tcp| tcp.last_sent_ms < 60_000));
        let listening = found.list.iter().find(|c| c.local == at && c.state == "listen").unwrap();
        assert!(listening.send_queue > 0, "how many connections may wait: {listening:?}");
        // One of them alone.
        let sockets = SockDiag::open().unwrap();
        let looked = look_up(&sockets, client_at, at).unwrap().unwrap();
        assert_eq!((looked.queue, looked.not_sent, looked.received), (0, 0, 0));
        assert!(looked.acknowledged >= 6, "{looked:?}");
        assert_eq!(look_up(&sockets, at, client_at).unwrap().unwrap().received, 6);
        let nobody = SocketAddr::new(at.ip(), 1);
        assert_eq!(look_up(&sockets, at, nobody).unwrap(), None, "there is one that listens");
        let port = datagrams.local_addr().unwrap();
        // A connection of another test may have a port of the same number.
        let datagrams = found.list.iter().find(|c| c.protocol == Protocol::Udp && c.local == port).unwrap();
        assert_eq!(datagrams.state, "unconnected");
    }
}
