//! Packet sockets that only receive: what one interface carries, both ways, each frame with the moment
//! at which the kernel saw it. System calls, and nothing else.

use std::io::{self, IoSliceMut};
use std::mem;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};

use nix::errno::Errno;
use nix::sys::socket::{ControlMessageOwned, LinkAddr, MsgFlags, recvmsg};
use nix::sys::time::TimeSpec;

use super::{PacketSocket, statistics};

/// What [`PacketSocket::see`] found.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Received {
    Frame(Seen),
    /// The queue is empty.
    Empty,
    /// The interface went down, or away. What it brought before is still in the queue.
    Down,
}

/// A frame, of which the first `kept` bytes are in the buffer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Seen {
    pub(crate) kept: usize,
    /// Its length on the interface, in bytes.
    pub(crate) length: u32,
    /// When, in nanoseconds since 1970 by this machine's clock.
    pub(crate) time_ns: i64,
    /// Whether the interface sent it.
    pub(crate) outgoing: bool,
}

/// Room for what the kernel tells beside a frame: the time, and the lengths.
pub(crate) fn room_beside() -> Vec<u8> {
    nix::cmsg_space!(TimeSpec, libc::tpacket_auxdata)
}

impl PacketSocket {
    /// Starts to look at the interface: frames that `program` takes, as many bytes of each as it
    /// says, in a queue of at most `memory` bytes (the kernel doubles it for its book-keeping).
    pub(crate) fn watch(index: u32, program: &mut [libc::sock_filter], memory: i32) -> io::Result<Self> {
        let socket = Self::new()?;
        // Plain frames, as capture files have them.
        socket.set(libc::SOL_PACKET, libc::PACKET_VNET_HDR, &0_i32)?;
        socket.set(libc::SOL_PACKET, libc::PACKET_AUXDATA, &1_i32)?;
        socket.set(libc::SOL_SOCKET, libc::SO_TIMESTAMPNS, &1_i32)?;
        socket.set(libc::SOL_SOCKET, libc::SO_RCVBUFFORCE, &memory)?;
        socket.filter(program)?;
        let every = u16::try_from(libc::ETH_P_ALL).map_err(io::Error::other)?;
        socket.bind(index, every)?;
        Ok(socket)
    }

    /// Takes the oldest frame out of the queue. `beside` is from [`room_beside`].
    pub(crate) fn see(&self, buffer: &mut [u8], beside: &mut [u8]) -> io::Result<Received> {
        let mut parts = [IoSliceMut::new(buffer)];
        loop {
            let fd = self.0.as_raw_fd();
            let message =
                match recvmsg::<LinkAddr>(fd, &mut parts, Some(&mut *beside), MsgFlags::MSG_DONTWAIT) {
                    Ok(message) => message,
                    Err(Errno::EINTR) => continue,
                    Err(Errno::EAGAIN) => return Ok(Received::Empty),
                    Err(Errno::ENETDOWN) => return Ok(Received::Down),
                    Err(errno) => return Err(errno.into()),
                };
            let kept = message.bytes;
            let mut seen = Seen {
                kept,
                length: u32::try_from(kept).unwrap_or(u32::MAX),
                time_ns: 0,
                outgoing: message.address.is_some_and(|from| from.pkttype() == libc::PACKET_OUTGOING),
            };
            for told in message.cmsgs()? {
                match told {
                    ControlMessageOwned::ScmTimestampns(time) => seen.time_ns = nanoseconds(time),
                    ControlMessageOwned::Unknown(other)
                        if other.cmsg_header.cmsg_level == libc::SOL_PACKET
                            && other.cmsg_header.cmsg_type == libc::PACKET_AUXDATA =>
                    {
                        // struct tpacket_auxdata: tp_status, then tp_len, the length before it was cut.
                        if let Some(length) = other.data_bytes.get(4..8).and_then(|b| b.try_into().ok()) {
                            seen.length = u32::from_ne_bytes(length);
                        }
                    }
                    _ => {}
                }
            }
            return Ok(Received::Frame(seen));
        }
    }

    /// Frames that the filter took since this was last asked, and how many of them were dropped
    /// because the queue was full.
    pub(crate) fn counts(&self) -> io::Result<(u32, u32)> {
        let libc::tpacket_stats { tp_packets, tp_drops } = statistics(self.0.as_raw_fd())?;
        Ok((tp_packets, tp_drops))
    }

    /// Whether the interface that the socket was bound to is no more.
    pub(crate) fn interface_is_gone(&self) -> io::Result<bool> {
        // SAFETY: sockaddr_ll is plain old data, for which all zeroes is a valid value.
        let mut address: libc::sockaddr_ll = unsafe { mem::zeroed() };
        let mut length = mem::size_of_val(&address).try_into().map_err(io::Error::other)?;
        // SAFETY: `address` is writable for `length` bytes during the call.
        let got =
            unsafe { libc::getsockname(self.0.as_raw_fd(), (&raw mut address).cast(), &raw mut length) };
        // The kernel puts -1 there when it unregisters the interface (af_packet.c, packet_notifier).
        if got < 0 { Err(io::Error::last_os_error()) } else { Ok(address.sll_ifindex < 0) }
    }

    /// For poll(2).
    pub(crate) fn descriptor(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

fn nanoseconds(time: TimeSpec) -> i64 {
    time.tv_sec().saturating_mul(1_000_000_000).saturating_add(time.tv_nsec())
}
