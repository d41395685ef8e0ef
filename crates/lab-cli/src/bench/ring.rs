//! Connections of the service to itself over the loopback interface, IPv4 and IPv6, with both queues of both
//! ends full: what no switch between it and its clients can hold back.

use std::{
    io::{self, Read as _, Write as _},
    net::{IpAddr, Ipv4Addr, Ipv6Addr, TcpListener, TcpStream},
    os::fd::AsFd as _,
};

use anyhow::Context as _;
use godwit_lab::workload::stream;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};

/// Written and read at once.
const PIECE: usize = 64 << 10;
/// So much more is sent by each end while all is read: the connections still work.
const MORE: u64 = 1 << 20;

/// All of them.
#[derive(Debug, Default)]
pub(super) struct Ring {
    ends: Vec<End>,
}

/// One end, which reads what the end beside it has written. What it writes is the stream with its number.
#[derive(Debug)]
struct End {
    stream: TcpStream,
    written: u64,
    read: u64,
}

impl Ring {
    /// So many connections more of each family, and as much in their queues as these take; how much.
    pub(super) fn fill(&mut self, count: usize) -> anyhow::Result<u64> {
        for address in [IpAddr::from(Ipv4Addr::LOCALHOST), Ipv6Addr::LOCALHOST.into()] {
            let listener = TcpListener::bind((address, 0)).context("listening at the loopback interface")?;
            for _ in 0..count {
                let near = TcpStream::connect(listener.local_addr()?)?;
                for stream in [near, listener.accept()?.0] {
                    stream.set_nonblocking(true)?;
                    self.ends.push(End { stream, written: 0, read: 0 });
                }
            }
        }
        // What is under way makes room for more.
        while self.write(u64::MAX)? {}
        Ok(self.ends.iter().map(|end| end.written).sum())
    }

    /// Reads and compares all that is in the queues, and as much again that is sent meanwhile; how much. The
    /// connections are closed.
    pub(super) fn empty(&mut self) -> anyhow::Result<u64> {
        let until = self.ends.iter().map(|end| end.written).max().unwrap_or_default() + MORE;
        loop {
            let wrote = self.write(until)?;
            let read = self.read()?;
            if self.ends.iter().all(|end| end.read >= until && end.written >= until) {
                let sum = self.ends.iter().map(|end| end.read).sum();
                self.ends.clear();
                return Ok(sum);
            }
            if !wrote && !read {
                let wanted = |end: &End| {
                    let mut wanted = PollFlags::POLLIN;
                    wanted.set(PollFlags::POLLOUT, end.written < until);
                    wanted
                };
                let mut all: Vec<_> =
                    self.ends.iter().map(|end| PollFd::new(end.stream.as_fd(), wanted(end))).collect();
                poll(&mut all, PollTimeout::NONE).context("waiting for the loopback interface")?;
            }
        }
    }

    /// Whether any was written.
    fn write(&mut self, until: u64) -> anyhow::Result<bool> {
        let mut any = false;
        for (number, end) in self.ends.iter_mut().enumerate() {
            while end.written < until {
                let length = usize::try_from(until - end.written).unwrap_or(PIECE).min(PIECE);
                match end.stream.write(&stream::part(number as u64, end.written, length)) {
                    Ok(length) => end.written += length as u64,
                    Err(error) if error.kind() == io::ErrorKind::WouldBlock => break,
                    Err(error) => return Err(error).context("writing to the loopback interface"),
                }
                any = true;
            }
        }
        Ok(any)
    }

    /// Whether any was read.
    fn read(&mut self) -> anyhow::Result<bool> {
        let (mut any, mut buffer) = (false, vec![0; PIECE]);
        for (number, end) in self.ends.iter_mut().enumerate() {
            loop {
                let length = match end.stream.read(&mut buffer) {
                    Ok(length) => length,
                    Err(error) if error.kind() == io::ErrorKind::WouldBlock => break,
                    Err(error) => return Err(error).context("reading from the loopback interface"),
                };
                let got = buffer.get(..length).unwrap_or_default();
                let right = stream::part(number as u64 ^ 1, end.read, length);
                anyhow::ensure!(
                    length > 0 && *got == right[..],
                    "end {number} read something else than was sent, or the end, after byte {}",
                    end.read
                );
                end.read += length as u64;
                any = true;
            }
        }
        Ok(any)
    }
}
