//! Sockets of TCP and UDP. The layouts are those of `linux/inet_diag.h` and `linux/tcp.h`; the kernel only ever adds
//! fields at the end of `tcp_info`.

use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

use rustix::net::{AddressFamily, ipproto};

use crate::SockDiag;
use crate::message::{self, attribute, malformed, short, word};

/// Bytes of `struct inet_diag_req_v2`, of which the last are a `struct inet_diag_sockid`, and of
/// `struct inet_diag_msg`.
const REQUEST: usize = 56;
const MESSAGE: usize = 72;
/// Bytes of `struct inet_diag_sockid`.
const ID: usize = 48;
const INET_DIAG_INFO: u16 = 2;
/// Whatever the socket's number is (`INET_DIAG_NOCOOKIE`).
const NO_COOKIE: [u8; 8] = [u8::MAX; 8];

/// The version of IP of a socket.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Family {
    /// IPv4.
    V4,
    /// IPv6. Such a socket can have connections over IPv4.
    V6,
}

/// What a socket speaks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Transport {
    /// TCP.
    Tcp,
    /// UDP.
    Udp,
}

/// States of TCP as bits of a set.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct States(pub u32);

impl States {
    /// Whatever the state is.
    pub const ALL: Self = Self(u32::MAX);
    /// `TCP_SYN_RECV`: connections that are half made.
    pub const HALF_MADE: Self = Self(1 << 3);
    /// `TCP_ESTABLISHED`, `TCP_SYN_SENT`, and those of connections that are being closed and have a program: `TCP_FIN_WAIT1`,
    /// `TCP_FIN_WAIT2`, `TCP_CLOSE_WAIT`, `TCP_LAST_ACK` and `TCP_CLOSING`.
    pub const CONNECTED: Self = Self(1 << 1 | 1 << 2 | 1 << 4 | 1 << 5 | 1 << 8 | 1 << 9 | 1 << 11);
    /// `TCP_LISTEN`.
    pub const LISTENING: Self = Self(1 << 10);
}

/// One socket (`struct inet_diag_msg`).
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Socket {
    /// Its state, by the kernel's number (`net/tcp_states.h`).
    pub state: u8,
    /// Its own address. A connection over IPv4 has addresses of IPv4, whatever its socket's family.
    pub local: SocketAddr,
    /// The other side's; zeroes where there is none.
    pub remote: SocketAddr,
    /// What it waits for: 1 retransmission, 2 keepalive, 3 the end of time-wait, 4 a window probe, 0 nothing.
    pub timer: u8,
    /// In how many milliseconds that comes.
    pub timer_ms: u32,
    /// What the timer has counted: time-outs or probes in a row.
    pub retransmits: u8,
    /// Bytes that the program has not read; of a listening socket, connections that it has not accepted.
    pub receive_queue: u32,
    /// Bytes that are not acknowledged; of a listening socket, how many connections may wait.
    pub send_queue: u32,
    /// More of TCP.
    pub tcp: TcpInfo,
    /// Which one it is, for [`SockDiag::end`].
    pub identity: Identity,
}

/// Tells one socket from all others, also from later ones with the same addresses (family and `struct inet_diag_sockid`).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Identity {
    family: u8,
    id: [u8; ID],
}

impl Default for Identity {
    fn default() -> Self {
        Self { family: 0, id: [0; ID] }
    }
}

/// `struct tcp_info`; each field is there as far as the kernel gave it.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct TcpInfo(Vec<u8>);

impl TcpInfo {
    /// Retransmission time-out, in microseconds (`tcpi_rto`).
    pub fn rto_us(&self) -> Option<u32> {
        word(&self.0, 8)
    }

    /// Segments sent and not acknowledged (`tcpi_unacked`).
    pub fn unacked(&self) -> Option<u32> {
        word(&self.0, 24)
    }

    /// How long ago data was sent last, in milliseconds (`tcpi_last_data_sent`).
    pub fn last_sent_ms(&self) -> Option<u32> {
        word(&self.0, 44)
    }

    /// How long ago data came last, in milliseconds (`tcpi_last_data_recv`).
    pub fn last_received_ms(&self) -> Option<u32> {
        word(&self.0, 52)
    }

    /// Smoothed round trip, in microseconds (`tcpi_rtt`).
    pub fn rtt_us(&self) -> Option<u32> {
        word(&self.0, 68)
    }

    /// Its mean deviation, in microseconds (`tcpi_rttvar`).
    pub fn rtt_var_us(&self) -> Option<u32> {
        word(&self.0, 72)
    }

    /// The congestion window, in segments (`tcpi_snd_cwnd`).
    pub fn congestion_window(&self) -> Option<u32> {
        word(&self.0, 80)
    }

    /// Segments sent again since the connection began (`tcpi_total_retrans`).
    pub fn total_retransmits(&self) -> Option<u32> {
        word(&self.0, 100)
    }

    /// Bytes acknowledged since the socket was made (`tcpi_bytes_acked`).
    pub fn bytes_acknowledged(&self) -> Option<u64> {
        self.long(120)
    }

    /// Bytes received in order since the socket was made (`tcpi_bytes_received`).
    pub fn bytes_received(&self) -> Option<u64> {
        self.long(128)
    }

    /// Bytes written and not sent (`tcpi_notsent_bytes`).
    pub fn not_sent(&self) -> Option<u32> {
        word(&self.0, 144)
    }

    fn long(&self, at: usize) -> Option<u64> {
        self.0.get(at..)?.first_chunk().copied().map(u64::from_ne_bytes)
    }
}

impl SockDiag {
    /// Hands on each socket of this kind in one of these states.
    ///
    /// # Errors
    /// When the kernel refuses: [`io::ErrorKind::NotFound`] where it tells nothing of this transport.
    pub fn inet(
        &self,
        family: Family,
        transport: Transport,
        states: States,
        mut take: impl FnMut(Socket),
    ) -> io::Result<()> {
        self.dump(&request(family, transport, states, None), |body| {
            take(parse(body).ok_or_else(|| malformed("a socket that cannot be read"))?);
            Ok(())
        })
    }

    /// The TCP connection between these ends, where there is one. Costs a few microseconds, where a list takes
    /// milliseconds.
    ///
    /// # Errors
    /// When the kernel refuses.
    pub fn tcp_connection(&self, local: SocketAddr, remote: SocketAddr) -> io::Result<Option<Socket>> {
        let family = if local.is_ipv4() { Family::V4 } else { Family::V6 };
        let request = request(family, Transport::Tcp, States::ALL, Some((local, remote)));
        let Some(body) = self.one(&request)? else { return Ok(None) };
        let found = parse(&body).ok_or_else(|| malformed("a socket that cannot be read"))?;
        // Where there is no connection, the kernel may find a socket that listens.
        Ok(Some(found).filter(|found| found.local == local && found.remote == remote))
    }
}

impl SockDiag {
    /// Ends a connection of TCP: its program reads and writes no more (ECONNABORTED), and the other side is told by a reset, if
    /// a route leads there. No error where it has ended meanwhile.
    ///
    /// # Errors
    /// When the kernel refuses: [`io::ErrorKind::Unsupported`] where it cannot do this (`CONFIG_INET_DIAG_DESTROY`).
    pub fn end(&self, identity: &Identity) -> io::Result<()> {
        let tcp = u8::try_from(ipproto::TCP.as_raw().get()).unwrap_or_default();
        let mut request = vec![identity.family, tcp, 0, 0];
        request.extend(States::ALL.0.to_ne_bytes());
        request.extend(identity.id);
        self.act(message::DESTROY, &request)
    }
}

/// Asks for all sockets in these states, or for the one between two ends.
fn request(
    family: Family,
    transport: Transport,
    states: States,
    ends: Option<(SocketAddr, SocketAddr)>,
) -> Vec<u8> {
    let family = match family {
        Family::V4 => AddressFamily::INET,
        Family::V6 => AddressFamily::INET6,
    };
    let transport = match transport {
        Transport::Tcp => ipproto::TCP,
        Transport::Udp => ipproto::UDP,
    };
    let mut request = Vec::with_capacity(REQUEST);
    let extensions = 1_u8 << (INET_DIAG_INFO - 1);
    let transport = u8::try_from(transport.as_raw().get()).unwrap_or_default();
    request.extend([u8::try_from(family.as_raw()).unwrap_or_default(), transport, extensions, 0]);
    request.extend(states.0.to_ne_bytes());
    if let Some((local, remote)) = ends {
        request.extend(local.port().to_be_bytes());
        request.extend(remote.port().to_be_bytes());
        for address in [local.ip(), remote.ip()] {
            let mut bytes = match address {
                IpAddr::V4(address) => address.octets().to_vec(),
                IpAddr::V6(address) => address.octets().to_vec(),
            };
            bytes.resize(16, 0);
            request.extend(bytes);
        }
        // Whatever its interface is.
        request.extend([0; 4]);
        request.extend(NO_COOKIE);
    }
    request.resize(REQUEST, 0);
    request
}

/// Reads `struct inet_diag_msg` and the attributes behind it.
fn parse(body: &[u8]) -> Option<Socket> {
    let &[family, state, timer, retransmits, ..] = body else { return None };
    let fixed = body.get(..MESSAGE)?;
    let is_ipv6 = u16::from(family) == AddressFamily::INET6.as_raw();
    let port = |at| short(fixed, at).map(u16::from_be);
    let info = attribute(body.get(MESSAGE..)?, INET_DIAG_INFO);
    Some(Socket {
        state,
        local: SocketAddr::new(address(fixed.get(8..24)?, is_ipv6)?, port(4)?),
        remote: SocketAddr::new(address(fixed.get(24..40)?, is_ipv6)?, port(6)?),
        timer,
        timer_ms: word(fixed, 52)?,
        retransmits,
        receive_queue: word(fixed, 56)?,
        send_queue: word(fixed, 60)?,
        tcp: TcpInfo(info.unwrap_or_default().to_vec()),
        identity: Identity { family, id: *fixed.get(4..)?.first_chunk()? },
    })
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

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::io::Write;
    use std::net::{TcpListener, TcpStream, UdpSocket};

    use proptest::prelude::*;

    use super::*;

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
        let mut info = vec![0; 148];
        let words = [(8, 204_000_u32), (24, 1), (68, 250), (72, 125), (80, 10), (100, 7), (144, 12)];
        for (at, value) in words {
            info[at..at + 4].copy_from_slice(&value.to_ne_bytes());
        }
        for (at, value) in [(120, 5_000_000_000_u64), (128, 9)] {
            info[at..at + 8].copy_from_slice(&value.to_ne_bytes());
        }
        // Another attribute comes before.
        body.extend(5_u16.to_ne_bytes().iter().chain(&8_u16.to_ne_bytes()).chain(&[9, 0, 0, 0]));
        body.extend(152_u16.to_ne_bytes().iter().chain(&INET_DIAG_INFO.to_ne_bytes()));
        body.extend(info);
        body
    }

    #[test]
    fn a_socket_is_read_to_its_last_field() {
        let found = parse(&established()).unwrap();
        let tcp = found.tcp.clone();
        let expected = Socket {
            state: 1,
            local: "10.88.0.10:6379".parse().unwrap(),
            remote: "10.99.0.100:40000".parse().unwrap(),
            timer: 1,
            timer_ms: 180,
            retransmits: 3,
            receive_queue: 5,
            send_queue: 1448,
            tcp: tcp.clone(),
            identity: found.identity,
        };
        assert_eq!(found, expected);
        assert_eq!([tcp.rto_us(), tcp.unacked(), tcp.rtt_us()], [Some(204_000), Some(1), Some(250)]);
        assert_eq!([tcp.rtt_var_us(), tcp.congestion_window()], [Some(125), Some(10)]);
        assert_eq!([tcp.total_retransmits(), tcp.not_sent()], [Some(7), Some(12)]);
        assert_eq!([tcp.bytes_acknowledged(), tcp.bytes_received()], [Some(5_000_000_000), Some(9)]);
    }

    #[test]
    fn what_is_cut_off_is_not_guessed() {
        let whole = established();
        for length in 0..MESSAGE {
            assert_eq!(parse(&whole[..length]), None, "{length}");
        }
        // Attributes that are cut off are none; the socket is there all the same.
        let short = parse(&whole[..MESSAGE + 20]).unwrap();
        assert_eq!((short.tcp.rto_us(), short.tcp.bytes_received()), (None, None));
    }

    proptest! {
        #[test]
        fn no_bytes_bring_it_down(
            bytes in prop::collection::vec(any::<u8>(), 0..400),
            attributes in prop::collection::vec(any::<u8>(), 0..200),
        ) {
            let _ = parse(&bytes);
            let mut body = established();
            body.truncate(MESSAGE);
            body.extend(&attributes);
            let tcp = parse(&body).unwrap().tcp;
            let _ = (tcp.not_sent(), tcp.bytes_acknowledged(), tcp.bytes_received());
        }
    }

    fn all(sockets: &SockDiag, family: Family, transport: Transport, states: States) -> Vec<Socket> {
        let mut found = Vec::new();
        sockets.inet(family, transport, states, |socket| found.push(socket)).unwrap();
        found
    }

    #[test]
    fn sockets_of_this_process_are_found() {
        let sockets = SockDiag::open().unwrap();
        for (family, address) in [(Family::V4, "127.0.0.1:0"), (Family::V6, "[::1]:0")] {
            let listener = TcpListener::bind(address).unwrap();
            let at = listener.local_addr().unwrap();
            let mut client = TcpStream::connect(at).unwrap();
            let client_at = client.local_addr().unwrap();
            let listening = all(&sockets, family, Transport::Tcp, States::LISTENING);
            assert!(listening.iter().any(|socket| socket.local == at && socket.receive_queue == 1));
            assert!(listening.iter().all(|socket| socket.state == 10));
            client.write_all(b"unread").unwrap();
            // Only what has arrived can be found.
            let (accepted, _) = listener.accept().unwrap();
            while accepted.peek(&mut [0; 6]).unwrap() < 6 {}
            let found = sockets.tcp_connection(at, client_at).unwrap().unwrap();
            assert_eq!((found.state, found.receive_queue, found.tcp.bytes_received()), (1, 6, Some(6)));
            assert!(
                all(&sockets, family, Transport::Tcp, States::ALL).iter().any(|one| one.local == client_at)
            );
            let nowhere = SocketAddr::new(client_at.ip(), 1);
            assert_eq!(sockets.tcp_connection(at, nowhere).unwrap(), None, "only the listener is there");
            assert_eq!(sockets.tcp_connection(nowhere, nowhere).unwrap(), None);
        }
        let datagrams = UdpSocket::bind("127.0.0.1:0").unwrap();
        let found = all(&sockets, Family::V4, Transport::Udp, States::ALL);
        assert!(found.iter().any(|socket| socket.local == datagrams.local_addr().unwrap()));
    }
}
