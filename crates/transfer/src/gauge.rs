//! What the kernel knows of a TCP connection's way, and how fast it may send: `TCP_INFO` and
//! `SO_MAX_PACING_RATE` (`man 7 tcp`, `man 7 socket`), which no crate wraps.
//!
//! A gauge has a descriptor of its own, so that it can be asked while reader and writer work in tasks
//! of theirs. The connection owns it; others look at it through a [`Weak`](std::sync::Weak), so that it
//! never keeps a connection open.

use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::time::Duration;

/// Rates from here on are no limit: the kernel's word for none.
const UNLIMITED: u64 = u64::MAX;

/// A connection's figures, and the bound on its rate.
#[derive(Debug)]
pub struct Gauge(OwnedFd);

/// What the kernel has measured.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Reading {
    /// The round trip of late, with the queues on the way.
    pub round_trip: Duration,
    /// The shortest round trip: the way itself. Zero while nothing has been acknowledged.
    pub shortest: Duration,
    /// Bytes that the peer's kernel has acknowledged.
    pub acknowledged: u64,
    /// Bytes that wait in this machine for their turn.
    pub unsent: u32,
    /// Bytes that the congestion control lets be on the way at once.
    pub window: u64,
}

impl Gauge {
    pub(crate) fn new(socket: impl AsFd) -> io::Result<Self> {
        Ok(Self(socket.as_fd().try_clone_to_owned()?))
    }

    /// What the kernel has measured so far.
    pub fn read(&self) -> io::Result<Reading> {
        let info = tcp_info(&self.0)?;
        let micros = |time: u32| Duration::from_micros(u64::from(time));
        // Its minimum is all ones before the first measurement.
        let shortest = if info.tcpi_min_rtt == u32::MAX { 0 } else { info.tcpi_min_rtt };
        Ok(Reading {
            round_trip: micros(info.tcpi_rtt),
            shortest: micros(shortest),
            acknowledged: info.tcpi_bytes_acked,
            unsent: info.tcpi_notsent_bytes,
            window: u64::from(info.tcpi_snd_cwnd) * u64::from(info.tcpi_snd_mss),
        })
    }

    /// Sends at most so many bytes per second from now on, evenly; without a number as fast as the
    /// congestion control wants.
    pub fn limit(&self, bytes_per_second: Option<u64>) -> io::Result<()> {
        let rate = bytes_per_second.unwrap_or(UNLIMITED).max(1);
        let length = libc::socklen_t::try_from(size_of_val(&rate)).map_err(io::Error::other)?;
        // SAFETY: the pointer is to a number of this length, which the call only reads.
        let result = unsafe {
            libc::setsockopt(
                self.0.as_raw_fd(),
                libc::SOL_SOCKET,
                libc::SO_MAX_PACING_RATE,
                (&raw const rate).cast(),
                length,
            )
        };
        if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
    }
}

fn tcp_info(socket: &OwnedFd) -> io::Result<libc::tcp_info> {
    // SAFETY: the structure holds numbers only, of which all zero is a value. An older kernel fills in
    // its beginning.
    let mut info: libc::tcp_info = unsafe { std::mem::zeroed() };
    let mut length = libc::socklen_t::try_from(size_of_val(&info)).map_err(io::Error::other)?;
    // SAFETY: the kernel writes at most `length` bytes, which is the size of the structure.
    let result = unsafe {
        libc::getsockopt(
            socket.as_raw_fd(),
            libc::IPPROTO_TCP,
            libc::TCP_INFO,
            (&raw mut info).cast(),
            &raw mut length,
        )
    };
    if result == 0 { Ok(info) } else { Err(io::Error::last_os_error()) }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use std::io::{Read, Write};
    use std::net::{TcpListener, TcpStream};

    use super::*;

    #[test]
    fn it_counts_what_was_acknowledged_and_takes_a_limit() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let mut sender = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let mut receiver = listener.accept().unwrap().0;
        let gauge = Gauge::new(&sender).unwrap();
        let before = gauge.read().unwrap().acknowledged;
        sender.write_all(&[7; 1000]).unwrap();
        receiver.read_exact(&mut [0; 1000]).unwrap();
        // What was read came with an acknowledgement at the latest when the answer to it comes.
        receiver.write_all(&[1]).unwrap();
        sender.read_exact(&mut [0]).unwrap();
        let reading = gauge.read().unwrap();
        assert_eq!(reading.acknowledged - before, 1000);
        assert!(!reading.shortest.is_zero() && reading.shortest <= reading.round_trip, "{reading:?}");
        gauge.limit(Some(1_000_000)).unwrap();
        assert_eq!(tcp_info(&gauge.0).unwrap().tcpi_max_pacing_rate, 1_000_000);
        gauge.limit(None).unwrap();
        assert_eq!(tcp_info(&gauge.0).unwrap().tcpi_max_pacing_rate, UNLIMITED);
    }
}
