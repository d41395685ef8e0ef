//! A service's connections, as the kernel tells them inside its network namespace (sock_diag(7)).
//!
//! ```text
//! request   nlmsghdr  inet_diag_req_v2 (family, protocol, extensions, states, no particular socket)
//! answers   nlmsghdr  inet_diag_msg    rtattr INET_DIAG_INFO: tcp_info   …      nlmsghdr NLMSG_DONE
//! ```
//!
//! The layouts are those of `linux/inet_diag.h` and `linux/tcp.h`; the kernel only ever adds fields
//! at the end of `tcp_info`, so what is beyond those read here is passed over.

use std::collections::BTreeMap;
use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::path::Path;

use rtnetlink::sys::protocols::NETLINK_SOCK_DIAG;
use rtnetlink::sys::{Socket, SocketAddr as NetlinkAddress};

use crate::{NetworkError, Protocol, enter};

/// Connections that are listed; all are counted.
pub const MOST_LISTED: usize = 65_536;
/// One answer of the kernel's, which has at most 32 KiB.
const ANSWER: usize = 64 << 10;
/// One that tells of one socket.
const ONE: usize = 4096;

const SOCK_DIAG_BY_FAMILY: u16 = 20;
const NLMSG_ERROR: u16 = 2;
const NLMSG_DONE: u16 = 3;
const NLM_F_REQUEST: u16 = 1;
const NLM_F_DUMP: u16 = 0x300;
const HEADER: usize = 16;
const REQUEST: usize = 56;
/// `struct inet_diag_sockid`, at the end of a request.
const IDENTITY: usize = 48;
/// The length of `struct inet_diag_msg`.
const MESSAGE: usize = 72;
const INET_DIAG_INFO: u16 = 2;
const EVERY_STATE: u32 = u32::MAX;

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
}

/// The sockets in the network namespace that is mounted there.
///
/// # Errors
/// When it cannot be entered, or the kernel refuses.
pub async fn inside(netns: &Path) -> Result<Connections, NetworkError> {
    let listed = enter(netns, list).await?;
    listed.map_err(NetworkError::system(format!("list the connections in {}", netns.display())))
}

/// Lists the sockets of the calling thread's network namespace.
fn list() -> io::Result<Connections> {
    let mut found = Connections::default();
    let families = [libc::AF_INET, libc::AF_INET6].map(|family| u8::try_from(family).unwrap_or_default());
    for (protocol, name) in [(Protocol::Tcp, "tcp"), (Protocol::Udp, "udp")] {
        for family in families {
            match dump(family, protocol, &mut found) {
                Ok(()) => {}
                // Not in this kernel; without IPv6 there is nothing of it to be missed.
                Err(error) if error.raw_os_error() == Some(libc::ENOENT) => {
                    if i32::from(family) == libc::AF_INET {
                        found.unavailable.push(name);
                    }
                }
                Err(error) => return Err(error),
            }
        }
    }
    Ok(found)
}

fn dump(family: u8, protocol: Protocol, found: &mut Connections) -> io::Result<()> {
    let socket = ask_about_sockets()?;
    socket.send(&request(family, protocol, NLM_F_DUMP), 0)?;
    let mut buffer = vec![0; ANSWER];
    loop {
        let received = socket.recv(&mut &mut buffer[..], libc::MSG_TRUNC)?;
        let answer = buffer.get(..received).ok_or_else(|| malformed("an answer longer than any"))?;
        if take_in(answer, protocol, found)? {
            return Ok(());
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

/// What [`look_up`] asks, of the namespace of the calling thread.
pub(crate) fn ask_about_sockets() -> io::Result<Socket> {
    let mut socket = Socket::new(NETLINK_SOCK_DIAG)?;
    socket.bind_auto()?;
    socket.connect(&NetlinkAddress::new(0, 0))?;
    Ok(socket)
}

/// One socket of TCP; none where there is no connection between these ends. Costs a few microseconds, where a list
/// takes milliseconds.
pub(crate) fn look_up(
    socket: &Socket,
    local: SocketAddr,
    remote: SocketAddr,
) -> io::Result<Option<TcpSocket>> {
    let family = if local.is_ipv4() { libc::AF_INET } else { libc::AF_INET6 };
    let mut question = request(u8::try_from(family).unwrap_or_default(), Protocol::Tcp, 0);
    question.truncate(HEADER + REQUEST - IDENTITY);
    question.extend(local.port().to_be_bytes());
    question.extend(remote.port().to_be_bytes());
    for address in [local.ip(), remote.ip()] {
        let mut bytes = match address {
            IpAddr::V4(address) => address.octets().to_vec(),
            IpAddr::V6(address) => address.octets().to_vec(),
        };
        bytes.resize(16, 0);
        question.extend(bytes);
    }
    // Whatever its interface and its cookie (`INET_DIAG_NOCOOKIE`).
    question.extend([0; 4]);
    question.extend([u8::MAX; 8]);
    socket.send(&question, 0)?;
    let mut buffer = [0; ONE];
    let received = socket.recv(&mut &mut buffer[..], libc::MSG_TRUNC)?;
    let answer = buffer.get(..received).ok_or_else(|| malformed("an answer longer than any"))?;
    let length = word(answer, 0).ok_or_else(|| malformed("half a header"))? as usize;
    let kind = short(answer, 4).ok_or_else(|| malformed("half a header"))?;
    let body = answer.get(HEADER..length).ok_or_else(|| malformed("a message longer than its answer"))?;
    if kind == NLMSG_ERROR {
        let errno = word(body, 0).ok_or_else(|| malformed("half an error"))?.cast_signed().saturating_neg();
        return if errno == libc::ENOENT { Ok(None) } else { Err(io::Error::from_raw_os_error(errno)) };
    }
    let found = connection(body, Protocol::Tcp).ok_or_else(|| malformed("a socket that cannot be read"))?;
    // Where there is no connection, one that listens may be found.
    if found.local != local || found.remote != remote {
        return Ok(None);
    }
    let info = body.get(MESSAGE..).and_then(|attributes| attribute(attributes, INET_DIAG_INFO));
    Ok(info.and_then(|info| {
        Some(TcpSocket {
            queue: found.send_queue,
            not_sent: word(info, 144)?,
            acknowledged: u64::from_ne_bytes(info.get(120..128)?.try_into().ok()?),
            received: u64::from_ne_bytes(info.get(128..136)?.try_into().ok()?),
        })
    }))
}

fn request(family: u8, protocol: Protocol, flags: u16) -> Vec<u8> {
    let mut request = Vec::with_capacity(HEADER + REQUEST);
    request.extend(u32::try_from(HEADER + REQUEST).unwrap_or_default().to_ne_bytes());
    request.extend(SOCK_DIAG_BY_FAMILY.to_ne_bytes());
    request.extend((NLM_F_REQUEST | flags).to_ne_bytes());
    // Sequence number and port: one request a socket, so nobody has to tell answers apart.
    request.extend([0; 8]);
    let transport = match protocol {
        Protocol::Tcp => libc::IPPROTO_TCP,
        Protocol::Udp => libc::IPPROTO_UDP,
    };
    let extensions = 1_u8 << (INET_DIAG_INFO - 1);
    request.extend([family, u8::try_from(transport).unwrap_or_default(), extensions, 0]);
    request.extend(EVERY_STATE.to_ne_bytes());
    request.resize(HEADER + REQUEST, 0);
    request
}

/// Takes one answer in, which holds several messages; whether it was the last.
fn take_in(answer: &[u8], protocol: Protocol, found: &mut Connections) -> io::Result<bool> {
    let mut rest = answer;
    while !rest.is_empty() {
        let length = word(rest, 0).ok_or_else(|| malformed("half a header"))? as usize;
        let kind = short(rest, 4).ok_or_else(|| malformed("half a header"))?;
        let body = rest.get(HEADER..length).ok_or_else(|| malformed("a message longer than its answer"))?;
        match kind {
            NLMSG_DONE | NLMSG_ERROR => {
                // Both carry an error number, which is zero or negative.
                let errno = word(body, 0).ok_or_else(|| malformed("half an error"))?.cast_signed();
                return if errno < 0 {
                    Err(io::Error::from_raw_os_error(errno.saturating_neg()))
                } else {
                    Ok(kind == NLMSG_DONE)
                };
            }
            SOCK_DIAG_BY_FAMILY => {
                let connection =
                    connection(body, protocol).ok_or_else(|| malformed("a socket that cannot be read"))?;
                let name = if protocol == Protocol::Tcp { "tcp" } else { "udp" };
                *found.states.entry((name, connection.state)).or_default() += 1;
                if found.list.len() < MOST_LISTED {
                    found.list.push(connection);
                }
            }
            _ => {}
        }
        rest = rest.get(aligned(length)..).unwrap_or_default();
    }
    Ok(false)
}

fn malformed(what: &str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, format!("the kernel sent {what}"))
}

/// `struct inet_diag_msg` and the attributes behind it.
fn connection(body: &[u8], protocol: Protocol) -> Option<Connection> {
    let &[family, state, timer, retransmits, ..] = body else { return None };
    let fixed = body.get(..MESSAGE)?;
    let is_ipv6 = i32::from(family) == libc::AF_INET6;
    // inet_diag_sockid: ports and addresses as on the wire.
    let local = address(fixed.get(8..24)?, is_ipv6)?;
    let remote = address(fixed.get(24..40)?, is_ipv6)?;
    let connection = Connection {
        protocol,
        state: state_name(state, protocol),
        local: SocketAddr::new(local, port(fixed, 4)?),
        remote: SocketAddr::new(remote, port(fixed, 6)?),
        timer: timer_name(timer),
        timer_ms: word(fixed, 52)?,
        receive_queue: word(fixed, 56)?,
        send_queue: word(fixed, 60)?,
        retransmits: retransmits.into(),
        tcp: attribute(body.get(MESSAGE..)?, INET_DIAG_INFO).and_then(tcp_details),
    };
    // What the timer has counted is of no meaning where it counts no retransmissions.
    let retransmits = if timer == 1 { connection.retransmits } else { 0 };
    Some(Connection { retransmits, ..connection })
}

/// A connection over IPv4 through a socket of IPv6 is shown as what it is on the wire.
fn address(bytes: &[u8], is_ipv6: bool) -> Option<IpAddr> {
    if is_ipv6 {
        let bytes: [u8; 16] = bytes.try_into().ok()?;
        return Some(Ipv6Addr::from(bytes).to_canonical());
    }
    let bytes: [u8; 4] = bytes.get(..4)?.try_into().ok()?;
    Some(Ipv4Addr::from(bytes).into())
}

/// Finds an attribute among those behind a message.
fn attribute(attributes: &[u8], wanted: u16) -> Option<&[u8]> {
    let mut rest = attributes;
    loop {
        let (length, kind) = (usize::from(short(rest, 0)?), short(rest, 2)?);
        let value = rest.get(4..length)?;
        if kind == wanted {
            return Some(value);
        }
        rest = rest.get(aligned(length)..)?;
    }
}

/// `struct tcp_info`.
fn tcp_details(info: &[u8]) -> Option<TcpDetails> {
    Some(TcpDetails {
        rto_us: word(info, 8)?,
        unacked: word(info, 24)?,
        rtt_us: word(info, 68)?,
        rtt_var_us: word(info, 72)?,
        congestion_window: word(info, 80)?,
        total_retransmits: word(info, 100)?,
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

/// Messages and attributes begin at multiples of four.
fn aligned(length: usize) -> usize {
    length.saturating_add(3) & !3
}

fn word(bytes: &[u8], at: usize) -> Option<u32> {
    bytes.get(at..at + 4)?.try_into().ok().map(u32::from_ne_bytes)
}

fn short(bytes: &[u8], at: usize) -> Option<u16> {
    bytes.get(at..at + 2)?.try_into().ok().map(u16::from_ne_bytes)
}

fn port(bytes: &[u8], at: usize) -> Option<u16> {
    bytes.get(at..at + 2)?.try_into().ok().map(u16::from_be_bytes)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::io::Write;
    use std::net::{TcpListener, TcpStream, UdpSocket};

    use proptest::prelude::*;

    use super::*;

    fn message(kind: u16, body: &[u8]) -> Vec<u8> {
        let mut message = u32::try_from(HEADER + body.len()).unwrap().to_ne_bytes().to_vec();
        message.extend(kind.to_ne_bytes());
        message.extend([0; 10]);
        message.extend(body);
        message.resize(aligned(message.len()), 0);
        message
    }

    /// An established connection from 10.99.0.100:40000 to 10.88.0.10:6379, in doubt about a segment.
    fn established() -> Vec<u8> {
        let mut body = vec![0; MESSAGE];
        body[..4].copy_from_slice(&[2, 1, 1, 3]);
        body[4..6].copy_from_slice(&6379_u16.to_be_bytes());
        body[6..8].copy_from_slice(&40_000_u16.to_be_bytes());
        body[8..12].copy_from_slice(&[10, 88, 0, 10]);
        body[24..28].copy_from_slice(&[10, 99, 0, 100]);
        for (at, value) in [(52, 180_u32), (56, 5), (60, 1448)] {
            body[at..at + 4].copy_from_slice(&value.to_ne_bytes());
        }
        let mut info = vec![0; 104];
        for (at, value) in [(8, 204_000_u32), (24, 1), (68, 250), (72, 125), (80, 10), (100, 7)] {
            info[at..at + 4].copy_from_slice(&value.to_ne_bytes());
        }
        // Another attribute comes before.
        body.extend(5_u16.to_ne_bytes().iter().chain(&8_u16.to_ne_bytes()).chain(&[9, 0, 0, 0]));
        body.extend(108_u16.to_ne_bytes().iter().chain(&INET_DIAG_INFO.to_ne_bytes()));
        body.extend(info);
        body
    }

    #[test]
    fn an_answer_is_read_to_its_last_field() {
        let mut found = Connections::default();
        let mut answer = message(SOCK_DIAG_BY_FAMILY, &established());
        assert!(!take_in(&answer, Protocol::Tcp, &mut found).unwrap());
        answer.extend(message(NLMSG_DONE, &[0; 4]));
        assert!(take_in(&answer, Protocol::Tcp, &mut found).unwrap());
        assert_eq!(found.states, BTreeMap::from([(("tcp", "established"), 2)]));
        let expected = Connection {
            protocol: Protocol::Tcp,
            state: "established",
            local: "10.88.0.10:6379".parse().unwrap(),
            remote: "10.99.0.100:40000".parse().unwrap(),
            receive_queue: 5,
            send_queue: 1448,
            timer: "retransmit",
            timer_ms: 180,
            retransmits: 3,
            tcp: Some(TcpDetails {
                rtt_us: 250,
                rtt_var_us: 125,
                rto_us: 204_000,
                total_retransmits: 7,
                unacked: 1,
                congestion_window: 10,
            }),
        };
        assert_eq!(found.list, [expected.clone(), expected]);
    }

    #[test]
    fn a_refusal_of_the_kernel_is_its_error() {
        for kind in [NLMSG_ERROR, NLMSG_DONE] {
            let refused = message(kind, &(-libc::ENOENT).to_ne_bytes());
            let error = take_in(&refused, Protocol::Udp, &mut Connections::default()).unwrap_err();
            assert_eq!(error.raw_os_error(), Some(libc::ENOENT));
        }
    }

    #[test]
    fn what_is_cut_short_is_refused_and_not_guessed() {
        let whole = message(SOCK_DIAG_BY_FAMILY, &established());
        for length in 1..whole.len() {
            let mut found = Connections::default();
            assert!(take_in(&whole[..length], Protocol::Tcp, &mut found).is_err(), "{length}");
            assert!(found.list.is_empty());
        }
        // Attributes that are cut short are none; the socket is there all the same.
        let short = message(SOCK_DIAG_BY_FAMILY, &established()[..MESSAGE + 20]);
        let mut found = Connections::default();
        take_in(&short, Protocol::Tcp, &mut found).unwrap();
        assert_eq!(found.list[0].tcp, None);
        // A message that says it has no length must not be read for ever.
        assert!(take_in(&[0; 64], Protocol::Tcp, &mut found).is_err());
    }

    proptest! {
        #[test]
        fn no_bytes_bring_it_down(
            bytes in prop::collection::vec(any::<u8>(), 0..400),
            attributes in prop::collection::vec(any::<u8>(), 0..120),
        ) {
            let mut found = Connections::default();
            let _ = take_in(&bytes, Protocol::Tcp, &mut found);
            let mut body = established();
            body.truncate(MESSAGE);
            body.extend(&attributes);
            take_in(&message(SOCK_DIAG_BY_FAMILY, &body), Protocol::Udp, &mut found).unwrap();
            let _ = take_in(&message(SOCK_DIAG_BY_FAMILY, &bytes), Protocol::Udp, &mut found);
        }
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
        let listening = found.list.iter().find(|c| c.local == at && c.state == "listen").unwrap();
        assert!(listening.send_queue > 0, "how many connections may wait: {listening:?}");
        // One of them alone.
        let kernel = ask_about_sockets().unwrap();
        let looked = look_up(&kernel, client_at, at).unwrap().unwrap();
        assert_eq!((looked.queue, looked.not_sent, looked.received), (0, 0, 0));
        assert!(looked.acknowledged >= 6, "{looked:?}");
        assert_eq!(look_up(&kernel, at, client_at).unwrap().unwrap().received, 6);
        let nobody = SocketAddr::new(at.ip(), 1);
        assert_eq!(look_up(&kernel, at, nobody).unwrap(), None, "there is one that listens");
        let port = datagrams.local_addr().unwrap();
        let datagrams = found.list.iter().find(|c| c.local == port).unwrap();
        assert_eq!((datagrams.protocol, datagrams.state), (Protocol::Udp, "unconnected"));
    }
}
