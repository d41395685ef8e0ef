//! Packet sockets (packet(7)): whole frames, sent and collected. The system calls that no crate
//! here wraps, and nothing else.

pub(crate) mod watch;

use std::io;
use std::mem::{self, ManuallyDrop};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};

use tokio::io::Interest;
use tokio::io::unix::AsyncFd;

use crate::Mac;
use crate::subnet::SCOUT_MAC;

/// The length of `struct virtio_net_hdr`, which stands before each frame: check sums and segments
/// that are still to be made. All zeroes means none.
pub(crate) const OFFLOAD_HEADER: usize = 10;
/// The largest frame: 64 KiB of segments to be cut, with headers to spare.
const LARGEST_FRAME: usize = OFFLOAD_HEADER + (66 << 10);
/// More than any queue of held frames can have: the kernel counts at least 512 bytes for each.
pub(crate) const MOST_AT_ONCE: u64 = 1 << 17;
const LINK_HEADER: usize = 14;
const BPF_RETURN: u16 = 0x06;

/// A packet socket, which passes frames in and out with what offloading has left to do, and so
/// unchanged. It receives nothing until [`PacketSocket::collect`].
///
/// The kernel takes 10 ms and more to close one: when it is dropped within a runtime, nobody waits for that.
#[derive(Debug)]
pub(crate) struct PacketSocket(ManuallyDrop<OwnedFd>);

impl Drop for PacketSocket {
    fn drop(&mut self) {
        // SAFETY: it is taken here only, and never used again.
        let fd = unsafe { ManuallyDrop::take(&mut self.0) };
        match tokio::runtime::Handle::try_current() {
            Ok(runtime) => drop(runtime.spawn_blocking(move || drop(fd))),
            Err(_) => drop(fd),
        }
    }
}

impl PacketSocket {
    pub(crate) fn new() -> io::Result<Self> {
        // Protocol 0: no frame comes in.
        // SAFETY: socket(2) takes no pointers.
        let fd = unsafe { libc::socket(libc::AF_PACKET, libc::SOCK_RAW | libc::SOCK_CLOEXEC, 0) };
        if fd < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: the descriptor was just opened, and nobody else has it.
        let socket = Self(ManuallyDrop::new(unsafe { OwnedFd::from_raw_fd(fd) }));
        socket.set(libc::SOL_PACKET, libc::PACKET_VNET_HDR, &1_i32)?;
        Ok(socket)
    }

    /// Starts to collect, in a queue of at most `memory` bytes, these frames to `mac`.
    pub(crate) fn collect(&self, mac: Mac, which: Which<'_>, memory: i32) -> io::Result<()> {
        self.set(libc::SOL_SOCKET, libc::SO_RCVBUFFORCE, &memory)?;
        self.filter(&mut collecting(mac, which))?;
        let every = u16::try_from(libc::ETH_P_ALL).map_err(io::Error::other)?;
        self.bind(0, every)
    }

    /// Starts to collect, in a queue of at most `memory` bytes, the frames of an interface that `program` takes.
    pub(crate) fn collect_at(
        &self,
        index: u32,
        program: &mut [libc::sock_filter],
        memory: i32,
    ) -> io::Result<()> {
        self.set(libc::SOL_SOCKET, libc::SO_RCVBUFFORCE, &memory)?;
        self.filter(program)?;
        let every = u16::try_from(libc::ETH_P_ALL).map_err(io::Error::other)?;
        self.bind(index, every)
    }

    fn bind(&self, index: u32, ethertype: u16) -> io::Result<()> {
        let (address, length) = link_address(index, ethertype, None)?;
        // SAFETY: `address` is readable for `length` bytes during the call.
        let bound = unsafe { libc::bind(self.0.as_raw_fd(), (&raw const address).cast(), length) };
        if bound < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
    }

    /// Starts to collect the frames of an Ethernet type that come in at the interface.
    pub(crate) fn listen(&self, index: u32, ethertype: u16) -> io::Result<()> {
        self.bind(index, ethertype)
    }

    /// The socket with what waits for its frames; to be called within a runtime.
    pub(crate) fn awaited(self) -> io::Result<AsyncFd<Self>> {
        // SAFETY: the descriptor is open, is the same whenever it is asked for, and is closed by
        // nobody before the socket is dropped.
        unsafe { AsyncFd::register_with_interest(self, Interest::READABLE) }.map_err(io::Error::from)
    }

    /// Stops collecting; what was collected stays in the queue.
    pub(crate) fn collect_nothing(&self) -> io::Result<()> {
        self.filter(&mut [libc::sock_filter { code: BPF_RETURN, jt: 0, jf: 0, k: 0 }])
    }

    /// Sends what is in the queue from another socket on the interface; says how many frames. What the
    /// interface does not take is lost, as on any wire. Ends after [`MOST_AT_ONCE`], as more may come for as
    /// long as it goes on.
    pub(crate) fn send_all(&self, sender: &Self, index: u32) -> io::Result<u64> {
        self.send_all_changed(sender, index, |_| ())
    }

    /// The same, with each frame changed before.
    pub(crate) fn send_all_changed(
        &self,
        sender: &Self,
        index: u32,
        change: impl Fn(&mut [u8]),
    ) -> io::Result<u64> {
        let (mut count, mut buffer) = (0, Vec::new());
        while count < MOST_AT_ONCE
            && let Some(frame) = self.take(&mut buffer)?
        {
            change(frame);
            match sender.send(index, frame) {
                Err(error) if error.raw_os_error() != Some(libc::ENOBUFS) => return Err(error),
                _ => count += 1,
            }
        }
        Ok(count)
    }

    /// Frames for which the queue had no room, since it was asked last.
    pub(crate) fn dropped(&self) -> io::Result<u64> {
        Ok(statistics(self.0.as_raw_fd())?.tp_drops.into())
    }

    /// Takes the oldest frame out of the queue; `None` when it is empty.
    pub(crate) fn take<'a>(&self, buffer: &'a mut Vec<u8>) -> io::Result<Option<&'a mut [u8]>> {
        buffer.resize(LARGEST_FRAME, 0);
        loop {
            // SAFETY: `buffer` is writable for its length during the call.
            let length = unsafe {
                libc::recv(self.0.as_raw_fd(), buffer.as_mut_ptr().cast(), buffer.len(), libc::MSG_DONTWAIT)
            };
            if let Ok(length) = usize::try_from(length) {
                return Ok(Some(&mut buffer[..length]));
            }
            let error = io::Error::last_os_error();
            match error.raw_os_error() {
                Some(libc::EAGAIN) => return Ok(None),
                // A frame whose offloads cannot be told is dropped by the kernel; go on with the
                // next. ENETDOWN: an interface went down meanwhile, what it brought is kept.
                Some(libc::EINTR | libc::EINVAL | libc::ENETDOWN) => {}
                _ => return Err(error),
            }
        }
    }

    /// Sends a frame, with its offload header, on the interface.
    pub(crate) fn send(&self, index: u32, frame: &[u8]) -> io::Result<()> {
        let header = frame.get(OFFLOAD_HEADER..OFFLOAD_HEADER + LINK_HEADER);
        let Some(&[a, b, c, d, e, f, .., high, low]) = header else {
            return Err(io::Error::new(io::ErrorKind::InvalidData, "the frame is shorter than its header"));
        };
        let protocol = u16::from_be_bytes([high, low]);
        let (address, length) = link_address(index, protocol, Some([a, b, c, d, e, f]))?;
        // SAFETY: `frame` and `address` are readable for the lengths given during the call.
        let sent = unsafe {
            libc::sendto(
                self.0.as_raw_fd(),
                frame.as_ptr().cast(),
                frame.len(),
                0,
                (&raw const address).cast(),
                length,
            )
        };
        if sent < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
    }

    /// Sends a frame that leaves nothing to do for offloading.
    pub(crate) fn send_whole(&self, index: u32, frame: &[u8]) -> io::Result<()> {
        self.send(index, &[&[0; OFFLOAD_HEADER][..], frame].concat())
    }

    fn filter(&self, program: &mut [libc::sock_filter]) -> io::Result<()> {
        let len = program.len().try_into().map_err(io::Error::other)?;
        let filter = libc::sock_fprog { len, filter: program.as_mut_ptr() };
        self.set(libc::SOL_SOCKET, libc::SO_ATTACH_FILTER, &filter)
    }

    fn set<T>(&self, level: i32, option: i32, value: &T) -> io::Result<()> {
        let length = mem::size_of::<T>().try_into().map_err(io::Error::other)?;
        // SAFETY: `value` is readable for its size during the call; the kernel copies what a
        // `sock_fprog` points at, which the caller keeps alive.
        let set = unsafe {
            libc::setsockopt(self.0.as_raw_fd(), level, option, (&raw const *value).cast(), length)
        };
        if set < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
    }
}

/// What came since it was asked last, and how much of that was dropped because the queue was full.
fn statistics(socket: RawFd) -> io::Result<libc::tpacket_stats> {
    let mut figures = libc::tpacket_stats { tp_packets: 0, tp_drops: 0 };
    let mut length = mem::size_of_val(&figures).try_into().map_err(io::Error::other)?;
    // SAFETY: `figures` is writable for `length` bytes during the call, and plain old data.
    let got = unsafe {
        libc::getsockopt(
            socket,
            libc::SOL_PACKET,
            libc::PACKET_STATISTICS,
            (&raw mut figures).cast(),
            &raw mut length,
        )
    };
    if got < 0 { Err(io::Error::last_os_error()) } else { Ok(figures) }
}

impl AsRawFd for PacketSocket {
    fn as_raw_fd(&self) -> RawFd {
        self.0.as_raw_fd()
    }
}

fn link_address(
    index: u32,
    protocol: u16,
    to: Option<Mac>,
) -> io::Result<(libc::sockaddr_ll, libc::socklen_t)> {
    // SAFETY: sockaddr_ll is plain old data, for which all zeroes is a valid value.
    let mut address: libc::sockaddr_ll = unsafe { mem::zeroed() };
    address.sll_family = libc::AF_PACKET.try_into().map_err(io::Error::other)?;
    address.sll_protocol = protocol.to_be();
    address.sll_ifindex = index.try_into().map_err(io::Error::other)?;
    if let Some(to) = to {
        address.sll_halen = 6;
        address.sll_addr[..6].copy_from_slice(&to);
    }
    let length = mem::size_of_val(&address).try_into().map_err(io::Error::other)?;
    Ok((address, length))
}

/// Which frames are collected.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Which<'a> {
    /// Those that come in by this interface.
    CameBy(u32),
    /// Those that come in by any interface but the listed ones, and those that this one sends itself. What
    /// other interfaces send has come in before, and so has what comes in by the listed ones.
    CameOrSentBy(u32, &'a [u32]),
}

/// The filter of [`PacketSocket::collect`], in the kernel's classic BPF (bpf(4), and
/// `Documentation/networking/filter.rst` for the two negative offsets). It passes over what `scout.rs` sends.
fn collecting(mac: Mac, which: Which<'_>) -> Vec<libc::sock_filter> {
    const LOAD_WORD: u16 = 0x20;
    const LOAD_HALF: u16 = 0x28;
    const JUMP_IF_EQUAL: u16 = 0x15;
    const PACKET_TYPE: u32 = u32::MAX - 0x1000 + 1 + 4;
    const INTERFACE: u32 = u32::MAX - 0x1000 + 1 + 8;
    const OUTGOING: u32 = 4;
    const WHOLE: u32 = u32::MAX;

    let op = |code, k| libc::sock_filter { code, jt: 0, jf: 0, k };
    let (whole, nothing) = (op(BPF_RETURN, WHOLE), op(BPF_RETURN, 0));
    // Each passes over the one instruction that follows it.
    let skip_if = |k| libc::sock_filter { code: JUMP_IF_EQUAL, jt: 1, jf: 0, k };
    let skip_unless = |k| libc::sock_filter { code: JUMP_IF_EQUAL, jt: 0, jf: 1, k };

    let [a, b, c, d, e, f] = mac;
    let [g, h, i, j, ..] = SCOUT_MAC;
    let mut program = vec![
        op(LOAD_WORD, 0),
        skip_if(u32::from_be_bytes([a, b, c, d])),
        nothing,
        op(LOAD_HALF, 4),
        skip_if(u32::from(u16::from_be_bytes([e, f]))),
        nothing,
        op(LOAD_WORD, 6),
        skip_unless(u32::from_be_bytes([g, h, i, j])),
        nothing,
        op(LOAD_WORD, INTERFACE),
    ];
    match which {
        Which::CameBy(interface) => program.extend([skip_if(interface), nothing]),
        Which::CameOrSentBy(interface, passages) => {
            program.extend([skip_unless(interface), whole]);
            program.extend(passages.iter().flat_map(|passage| [skip_unless(*passage), nothing]));
        }
    }
    program.extend([op(LOAD_WORD, PACKET_TYPE), skip_unless(OUTGOING), nothing, whole]);
    program
}
