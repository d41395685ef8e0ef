//! The TCP socket under TLS: its options and its counters.
//!
//! The counters say what really crosses the network (TLS included, TCP/IP headers not). There is no
//! buffer here: rustls reads and writes whole records, and a read buffer below it was measured to
//! gain nothing.

use std::io::{self, IoSlice};
use std::pin::Pin;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Weak};
use std::task::{Context, Poll};
use std::time::Duration;

use rustix::net::sockopt;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpStream;

use crate::gauge::Gauge;
use crate::removal::Membership;

/// A TLS connection between nodes.
pub type SecureStream = tokio_rustls::TlsStream<Socket>;

/// How a dead link is noticed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LinkOptions {
    /// `TCP_USER_TIMEOUT`: how long sent data may stay unacknowledged before the connection fails.
    /// The kernel counts a peer's closed receive window too, so a receiver that reads nothing for
    /// so long loses the connection: it must take frames off the connection while it waits for
    /// something else, or raise this.
    pub user_timeout: Duration,
    /// How long a connection may be idle before the kernel probes the peer; it probes as often as
    /// that, until `user_timeout` has passed without an answer. Whole seconds, at least one.
    pub keepalive: Duration,
}

impl Default for LinkOptions {
    /// 10 s, probed every 3 s: longer than a radio link's hand-over, shorter than a person's
    /// patience with a service that stands still.
    fn default() -> Self {
        Self { user_timeout: Duration::from_secs(10), keepalive: Duration::from_secs(3) }
    }
}

/// Bytes that crossed the network on one connection.
#[derive(Debug, Default)]
pub struct Traffic {
    sent: AtomicU64,
    received: AtomicU64,
}

impl Traffic {
    /// Bytes given to the kernel.
    pub fn sent(&self) -> u64 {
        self.sent.load(Ordering::Relaxed)
    }

    /// Bytes taken from the kernel.
    pub fn received(&self) -> u64 {
        self.received.load(Ordering::Relaxed)
    }
}

/// A TCP connection that counts its bytes.
#[derive(Debug)]
pub struct Socket {
    stream: TcpStream,
    traffic: Arc<Traffic>,
    gauge: Arc<Gauge>,
    /// Of the peer, once it has shown its certificate.
    membership: Option<Membership>,
}

impl Socket {
    /// Sets the options of `stream`: no delay (Nagle), keep-alive, user time-out.
    pub fn new(stream: TcpStream, options: &LinkOptions) -> io::Result<Self> {
        stream.set_nodelay(true)?;
        let probe = options.keepalive.max(Duration::from_secs(1));
        let probes = options.user_timeout.as_secs().div_ceil(probe.as_secs()).clamp(1, 100);
        sockopt::set_socket_keepalive(&stream, true)?;
        sockopt::set_tcp_keepidle(&stream, probe)?;
        sockopt::set_tcp_keepintvl(&stream, probe)?;
        sockopt::set_tcp_keepcnt(&stream, u32::try_from(probes).unwrap_or(1))?;
        let user_timeout = u32::try_from(options.user_timeout.as_millis()).unwrap_or(u32::MAX);
        sockopt::set_tcp_user_timeout(&stream, user_timeout)?;
        prefer_short_queues(&stream);
        let gauge = Arc::new(Gauge::new(&stream)?);
        Ok(Self { stream, traffic: Arc::default(), gauge, membership: None })
    }

    /// The counters; they live on after the connection.
    pub fn traffic(&self) -> Arc<Traffic> {
        self.traffic.clone()
    }

    /// The kernel's figures; there are none after the connection.
    pub fn gauge(&self) -> Weak<Gauge> {
        Arc::downgrade(&self.gauge)
    }

    /// The connection fails from the moment on that its peer is removed from the cluster.
    pub(crate) fn only_for(&mut self, membership: Option<Membership>) {
        self.membership = membership;
    }

    /// Whether the peer is still a member; nothing before it has shown its certificate.
    #[must_use]
    pub fn membership(&self) -> Option<Membership> {
        self.membership.clone()
    }

    fn check_peer(&mut self) -> io::Result<()> {
        self.membership.as_mut().map_or(Ok(()), Membership::check)
    }

    /// The TCP connection.
    pub fn tcp(&self) -> &TcpStream {
        &self.stream
    }
}

/// Asks for BBR, which keeps the queues on the way short: a page that a process waits for shares them
/// with the bulk of the others. Where the kernel does not have it, its default has to do.
fn prefer_short_queues(stream: &TcpStream) {
    if let Err(error) = sockopt::set_tcp_congestion(stream, "bbr") {
        tracing::debug!(%error, "no BBR on this kernel");
    }
}

impl AsyncRead for Socket {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        self.check_peer()?;
        let before = buffer.filled().len();
        let polled = Pin::new(&mut self.stream).poll_read(cx, buffer);
        let read = buffer.filled().len().saturating_sub(before);
        self.traffic.received.fetch_add(read as u64, Ordering::Relaxed);
        polled
    }
}

impl Socket {
    fn count_sent(&self, polled: Poll<io::Result<usize>>) -> Poll<io::Result<usize>> {
        if let Poll::Ready(Ok(written)) = &polled {
            self.traffic.sent.fetch_add(*written as u64, Ordering::Relaxed);
        }
        polled
    }
}

impl AsyncWrite for Socket {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        self.check_peer()?;
        let polled = Pin::new(&mut self.stream).poll_write(cx, bytes);
        self.count_sent(polled)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        slices: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        self.check_peer()?;
        let polled = Pin::new(&mut self.stream).poll_write_vectored(cx, slices);
        self.count_sent(polled)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(cx)
    }
}
