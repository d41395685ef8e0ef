//! The data plane's frames, over any ordered stream of bytes.
//!
//! ```text
//!   once, at the start of each direction:
//!   +---------------+-------------+--------------+
//!   | "GWDF", 4     | u16 version | u16 zero     |
//!   +---------------+-------------+--------------+
//!
//!   then any number of frames:
//!   +----------+-----------+------------+------------+-------------------+
//!   | u16 kind | u16 flags | u32 length | u32 CRC32C | payload, `length` |
//!   +----------+-----------+------------+------------+-------------------+
//! ```
//!
//! Numbers are big-endian. Kind 0 is invalid, so that a run of zeroes is never a frame; kinds mean
//! something to the layer above alone, and so do flags, but for [`SELF_CHECKED`]. `length` is at most
//! [`MAX_PAYLOAD`]. The CRC32C (Castagnoli, RFC 3720) covers the eight bytes before it and, unless the
//! payload has a checksum of its own, the payload: TLS protects against the network, the checksum
//! against our own mistakes with buffers. After any error, and after a [`FrameWriter::send`] that was
//! dropped half-way, the direction is broken and stays so.
//!
//! A direction ends cleanly between two frames only, by a TLS close ([`FrameWriter::finish`]).

use std::collections::VecDeque;
use std::io::{self, IoSlice};
use std::ops::RangeInclusive;
use std::sync::Arc;
use std::time::Duration;

use bytes::{BufMut, Bytes, BytesMut};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};

/// What each direction starts with.
pub const MAGIC: [u8; 4] = *b"GWDF";

/// The versions of the framing that are read. A direction has the version that its preamble names, and that goes out
/// before anything is known of the reader: the oldest of these is written. So a release that makes a version reads it and
/// still writes the one before, and the next release writes it.
pub const VERSIONS: RangeInclusive<u16> = 2..=2;

/// The flag of a frame whose payload carries its own checksum, which the layer above looks at: bulk
/// data are not read once more for the frame's.
pub const SELF_CHECKED: u16 = 1 << 15;

/// Length of magic, version and reserved bytes.
pub const PREAMBLE_LENGTH: usize = 8;

/// Length of a frame's header.
pub const HEADER_LENGTH: usize = 12;

/// Longest payload: 1 MiB. Above some 256 KiB the header's cost is nothing any more, and a receiver
/// holds a whole frame in memory, once per connection.
pub const MAX_PAYLOAD: usize = 1024 * 1024;

/// Payloads up to this size are copied beside their header, so that many small frames share a TLS
/// record; longer ones are never copied.
const COPIED_PAYLOAD: usize = 4 * 1024;

/// When the writer's buffer of small frames is written out: four TLS records.
const WRITE_BUFFER: usize = 64 * 1024;

/// Memory taken for a payload before any of it has arrived. A length is a claim until then.
const FIRST_ALLOCATION: usize = 320 * 1024;

/// Shorter payloads are not worth keeping a buffer for.
const REUSED_PAYLOAD: usize = 64 * 1024;

/// Most buffers kept for reuse: more than a receiver has under way at once.
const MAX_REUSED: usize = 16;

/// A frame.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Frame {
    /// What it is; never 0.
    pub kind: u16,
    /// Modifies the kind.
    pub flags: u16,
    /// What it carries.
    pub payload: Bytes,
}

/// Why a frame could not be sent or received. `peer` is the node's name.
#[derive(Debug, thiserror::Error)]
pub enum FrameError {
    /// The peer closed its direction after a whole frame. The one end that is not a failure of the
    /// connection.
    #[error("node `{peer}` has closed the connection")]
    Closed {
        /// The node.
        peer: Arc<str>,
    },
    /// The stream ended inside a frame, or without the close_notify that TLS asks for.
    #[error(
        "the connection to node `{peer}` was closed without close_notify: its godwitd or the link is down"
    )]
    Truncated {
        /// The node.
        peer: Arc<str>,
    },
    /// The checksum is wrong.
    #[error("a frame from node `{peer}` (kind {kind}, {length} bytes) was damaged: its checksum is wrong")]
    Checksum {
        /// The node.
        peer: Arc<str>,
        /// The frame's kind.
        kind: u16,
        /// Its payload's length in bytes.
        length: u32,
    },
    /// A payload is longer than allowed, received or to be sent.
    #[error(
        "a frame of {length} bytes between this node and node `{peer}` is too long; {MAX_PAYLOAD} are allowed"
    )]
    TooLong {
        /// The node.
        peer: Arc<str>,
        /// The claimed length in bytes.
        length: u64,
    },
    /// The stream does not start as a data connection does.
    #[error("node `{peer}` does not speak godwit's data protocol on this connection")]
    BadMagic {
        /// The node.
        peer: Arc<str>,
    },
    /// The peer's frames are of a version that is not read here.
    #[error(
        "node `{peer}` sends frames of version {theirs}, and this node reads versions {} to {}; install a newer godwit on {}",
        VERSIONS.start(), VERSIONS.end(), if theirs < VERSIONS.start() { "that node" } else { "this node" }
    )]
    Version {
        /// The node.
        peer: Arc<str>,
        /// Its version.
        theirs: u16,
    },
    /// A frame of kind 0, received or to be sent.
    #[error("a frame between this node and node `{peer}` has the invalid kind 0")]
    InvalidKind {
        /// The node.
        peer: Arc<str>,
    },
    /// Nothing moved for too long.
    #[error("node `{peer}` was silent for {:.1} s", after.as_secs_f64())]
    TimedOut {
        /// The node.
        peer: Arc<str>,
        /// How long was waited.
        after: Duration,
    },
    /// The peer refused the connection with a TLS alert.
    #[error(
        "node `{peer}` refused this node ({alert:?}); is this node's certificate of the same cluster, and still valid?"
    )]
    Refused {
        /// The node.
        peer: Arc<str>,
        /// Its reason, as TLS has it.
        alert: rustls::AlertDescription,
    },
    /// Another error of the connection.
    #[error("the connection to node `{peer}` failed")]
    Io {
        /// The node.
        peer: Arc<str>,
        /// What the system or TLS said.
        source: io::Error,
    },
    /// An earlier error, or a send that was given up, made this direction useless.
    #[error("the connection to node `{peer}` is broken since an earlier failure")]
    Broken {
        /// The node.
        peer: Arc<str>,
    },
}

impl FrameError {
    /// Whether the peer ended the conversation as agreed.
    pub fn is_closed(&self) -> bool {
        matches!(self, Self::Closed { .. })
    }

    fn io(peer: &Arc<str>, source: io::Error) -> Self {
        let peer = peer.clone();
        match source.get_ref().and_then(|inner| inner.downcast_ref()) {
            Some(rustls::Error::AlertReceived(alert)) => return Self::Refused { peer, alert: *alert },
            _ if source.kind() == io::ErrorKind::UnexpectedEof => return Self::Truncated { peer },
            _ => {}
        }
        Self::Io { peer, source }
    }
}

/// Header fields as they are on the wire, without the checksum.
fn header_fields(kind: u16, flags: u16, length: u32) -> [u8; 8] {
    let mut fields = [0; 8];
    fields[..2].copy_from_slice(&kind.to_be_bytes());
    fields[2..4].copy_from_slice(&flags.to_be_bytes());
    fields[4..].copy_from_slice(&length.to_be_bytes());
    fields
}

/// Sends frames.
#[derive(Debug)]
pub struct FrameWriter<W> {
    io: W,
    peer: Arc<str>,
    buffer: BytesMut,
    stall_timeout: Option<Duration>,
    wire_bytes: u64,
    broken: bool,
}

impl<W: AsyncWrite + Unpin> FrameWriter<W> {
    /// A writer on a fresh stream to `peer` (a name for errors). The preamble goes out with the
    /// first flush.
    pub fn new(io: W, peer: &str) -> Self {
        let mut buffer = BytesMut::with_capacity(WRITE_BUFFER + COPIED_PAYLOAD + HEADER_LENGTH);
        buffer.put_slice(&MAGIC);
        buffer.put_u16(*VERSIONS.start());
        buffer.put_u16(0);
        Self {
            io,
            peer: peer.into(),
            wire_bytes: buffer.len() as u64,
            buffer,
            stall_timeout: None,
            broken: false,
        }
    }

    /// After how long without progress a write fails; without a limit at first.
    pub fn set_stall_timeout(&mut self, timeout: Option<Duration>) {
        self.stall_timeout = timeout;
    }

    /// Bytes of preamble, headers and payloads sent so far, buffered ones included; TLS not.
    pub fn wire_bytes(&self) -> u64 {
        self.wire_bytes
    }

    /// Sends a frame without flags. See [`FrameWriter::send_parts`].
    pub async fn send(&mut self, kind: u16, payload: Bytes) -> Result<(), FrameError> {
        self.send_parts(kind, 0, &[&payload]).await
    }

    /// Sends one frame whose payload is the concatenation of `parts`. Small frames wait in the
    /// buffer until it is full or flushed; parts are not copied if the payload is long.
    ///
    /// Not cancel-safe: if the future is dropped before it ends, the writer is broken.
    pub async fn send_parts(&mut self, kind: u16, flags: u16, parts: &[&[u8]]) -> Result<(), FrameError> {
        if kind == 0 {
            return Err(FrameError::InvalidKind { peer: self.peer.clone() });
        }
        let total: usize = parts.iter().map(|part| part.len()).sum();
        let length = match u32::try_from(total) {
            Ok(length) if total <= MAX_PAYLOAD => length,
            _ => return Err(FrameError::TooLong { peer: self.peer.clone(), length: total as u64 }),
        };
        if self.broken {
            return Err(FrameError::Broken { peer: self.peer.clone() });
        }
        let fields = header_fields(kind, flags, length);
        let checked = if flags & SELF_CHECKED == 0 { parts } else { &[] };
        let checksum =
            checked.iter().fold(crc32c::crc32c(&fields), |sum, part| crc32c::crc32c_append(sum, part));
        self.buffer.put_slice(&fields);
        self.buffer.put_u32(checksum);
        self.wire_bytes += (HEADER_LENGTH + total) as u64;
        if total <= COPIED_PAYLOAD {
            parts.iter().for_each(|part| self.buffer.put_slice(part));
            if self.buffer.len() < WRITE_BUFFER {
                return Ok(());
            }
            return self.write_out(&[]).await;
        }
        self.write_out(parts).await
    }

    /// Hands everything to the kernel. As [`FrameWriter::send_parts`], not cancel-safe.
    pub async fn flush(&mut self) -> Result<(), FrameError> {
        if self.broken {
            return Err(FrameError::Broken { peer: self.peer.clone() });
        }
        self.write_out(&[]).await?;
        self.broken = true;
        within(self.stall_timeout, &self.peer, self.io.flush()).await?;
        self.broken = false;
        Ok(())
    }

    /// Flushes and sends close_notify: the peer's reader gets [`FrameError::Closed`] after the last frame.
    /// Nothing can be sent afterwards.
    pub async fn finish(&mut self) -> Result<(), FrameError> {
        self.flush().await?;
        self.broken = true;
        within(self.stall_timeout, &self.peer, self.io.shutdown()).await
    }

    /// Writes the buffer, then `parts`. The writer counts as broken until all is written.
    async fn write_out(&mut self, parts: &[&[u8]]) -> Result<(), FrameError> {
        self.broken = true;
        let mut slices = Vec::with_capacity(parts.len() + 1);
        slices.push(IoSlice::new(&self.buffer));
        slices.extend(parts.iter().map(|part| IoSlice::new(part)));
        let mut rest = slices.as_mut_slice();
        IoSlice::advance_slices(&mut rest, 0); // past empty ones
        while !rest.is_empty() {
            let written = within(self.stall_timeout, &self.peer, self.io.write_vectored(rest)).await?;
            if written == 0 {
                return Err(FrameError::io(&self.peer, io::ErrorKind::WriteZero.into()));
            }
            IoSlice::advance_slices(&mut rest, written);
        }
        self.buffer.clear();
        self.broken = false;
        Ok(())
    }
}

/// `operation`, within `limit` if there is one.
async fn within<T>(
    limit: Option<Duration>,
    peer: &Arc<str>,
    operation: impl Future<Output = io::Result<T>>,
) -> Result<T, FrameError> {
    let result = match limit {
        None => operation.await,
        Some(after) => tokio::time::timeout(after, operation)
            .await
            .map_err(|_| FrameError::TimedOut { peer: peer.clone(), after })?,
    };
    result.map_err(|error| FrameError::io(peer, error))
}

/// Receives frames.
#[derive(Debug)]
pub struct FrameReader<R> {
    io: R,
    peer: Arc<str>,
    idle_timeout: Option<Duration>,
    wire_bytes: u64,
    state: State,
    head: [u8; HEADER_LENGTH],
    filled: usize,
    payload: BytesMut,
    checksum: u32,
    buffers: Buffers,
}

/// Payloads that were handed out, the latest last, to be used again when nobody has them any more: the
/// first use of fresh memory costs as much as receiving into it.
#[derive(Debug, Default)]
struct Buffers(VecDeque<Bytes>);

impl Buffers {
    fn take(&mut self, length: usize) -> BytesMut {
        if length >= REUSED_PAYLOAD
            // The one used last is the likeliest to be in the processor's cache.
            && let Some(free) = self.0.iter().rposition(Bytes::is_unique)
            && let Some(Ok(mut buffer)) = self.0.remove(free).map(Bytes::try_into_mut)
        {
            buffer.clear();
            return buffer;
        }
        BytesMut::with_capacity(length.min(FIRST_ALLOCATION))
    }

    fn lent(&mut self, payload: &Bytes) {
        if payload.len() >= REUSED_PAYLOAD {
            if self.0.len() == MAX_REUSED {
                // Whoever has the oldest keeps it.
                self.0.pop_front();
            }
            self.0.push_back(payload.clone());
        }
    }
}

/// What the reader is in the middle of.
#[derive(Debug, Clone, Copy)]
enum State {
    Preamble,
    Header,
    Payload { kind: u16, flags: u16, length: u32, expected: u32 },
    Closed,
    Broken,
}

impl<R: AsyncRead + Unpin> FrameReader<R> {
    /// A reader on a fresh stream from `peer` (a name for errors).
    pub fn new(io: R, peer: &str) -> Self {
        Self {
            io,
            peer: peer.into(),
            idle_timeout: None,
            wire_bytes: 0,
            state: State::Preamble,
            head: [0; HEADER_LENGTH],
            filled: 0,
            payload: BytesMut::new(),
            checksum: 0,
            buffers: Buffers::default(),
        }
    }

    /// After how long without a byte from the peer a read fails; without a limit at first.
    pub fn set_idle_timeout(&mut self, timeout: Option<Duration>) {
        self.idle_timeout = timeout;
    }

    /// Bytes of preamble, headers and payloads received so far; TLS not.
    pub fn wire_bytes(&self) -> u64 {
        self.wire_bytes
    }

    /// Waits for the peer's preamble, if it was not read yet. Cancel-safe.
    pub async fn start(&mut self) -> Result<(), FrameError> {
        match self.state {
            State::Preamble => {
                let result = self.read_preamble().await;
                self.note(result)
            }
            _ => Ok(()),
        }
    }

    /// The next frame. [`FrameError::Closed`] when the peer has ended its direction.
    ///
    /// Cancel-safe: what was read of a frame is kept, and the next call goes on from there. A
    /// time-out starts anew with each call.
    pub async fn recv(&mut self) -> Result<Frame, FrameError> {
        self.start().await?;
        let result = self.read_frame().await;
        self.note(result)
    }

    /// Remembers that the direction has ended.
    fn note<T>(&mut self, result: Result<T, FrameError>) -> Result<T, FrameError> {
        if let Err(error) = &result {
            self.state = if error.is_closed() { State::Closed } else { State::Broken };
            (self.payload, self.buffers) = (BytesMut::new(), Buffers::default());
        }
        result
    }

    async fn read_preamble(&mut self) -> Result<(), FrameError> {
        self.fill_head(PREAMBLE_LENGTH).await?;
        let head = &self.head;
        if head[..4] != MAGIC {
            return Err(FrameError::BadMagic { peer: self.peer.clone() });
        }
        let theirs = u16::from_be_bytes([head[4], head[5]]);
        if !VERSIONS.contains(&theirs) {
            return Err(FrameError::Version { peer: self.peer.clone(), theirs });
        }
        if head[6..8] != [0, 0] {
            return Err(FrameError::BadMagic { peer: self.peer.clone() });
        }
        (self.state, self.filled) = (State::Header, 0);
        Ok(())
    }

    async fn read_frame(&mut self) -> Result<Frame, FrameError> {
        loop {
            match self.state {
                State::Header => {
                    self.fill_head(HEADER_LENGTH).await?;
                    self.state = self.parse_header()?;
                    self.filled = 0;
                }
                State::Payload { kind, flags, length, expected } => {
                    self.fill_payload(length as usize, flags & SELF_CHECKED == 0).await?;
                    if self.checksum != expected {
                        return Err(FrameError::Checksum { peer: self.peer.clone(), kind, length });
                    }
                    self.state = State::Header;
                    let payload = std::mem::take(&mut self.payload).freeze();
                    self.buffers.lent(&payload);
                    return Ok(Frame { kind, flags, payload });
                }
                State::Closed => return Err(FrameError::Closed { peer: self.peer.clone() }),
                State::Preamble | State::Broken => {
                    return Err(FrameError::Broken { peer: self.peer.clone() });
                }
            }
        }
    }

    fn parse_header(&mut self) -> Result<State, FrameError> {
        let [k0, k1, f0, f1, l0, l1, l2, l3, c0, c1, c2, c3] = self.head;
        let kind = u16::from_be_bytes([k0, k1]);
        let flags = u16::from_be_bytes([f0, f1]);
        let length = u32::from_be_bytes([l0, l1, l2, l3]);
        let expected = u32::from_be_bytes([c0, c1, c2, c3]);
        if kind == 0 {
            return Err(FrameError::InvalidKind { peer: self.peer.clone() });
        }
        if length as usize > MAX_PAYLOAD {
            return Err(FrameError::TooLong { peer: self.peer.clone(), length: length.into() });
        }
        self.checksum = crc32c::crc32c(&self.head[..8]);
        self.payload = self.buffers.take(length as usize);
        Ok(State::Payload { kind, flags, length, expected })
    }

    /// Reads on until `head` holds `wanted` bytes.
    async fn fill_head(&mut self, wanted: usize) -> Result<(), FrameError> {
        while self.filled < wanted {
            let space = &mut self.head[self.filled..wanted];
            let read = within(self.idle_timeout, &self.peer, self.io.read(space)).await?;
            if read == 0 {
                let peer = self.peer.clone();
                let between = self.filled == 0;
                return Err(if between {
                    FrameError::Closed { peer }
                } else {
                    FrameError::Truncated { peer }
                });
            }
            self.filled += read;
            self.wire_bytes += read as u64;
        }
        Ok(())
    }

    /// Reads on until the payload is whole; the checksum is computed while the bytes are in the
    /// processor's cache.
    async fn fill_payload(&mut self, length: usize, checked: bool) -> Result<(), FrameError> {
        while self.payload.len() < length {
            let have = self.payload.len();
            if have == self.payload.capacity() {
                self.payload.reserve(length - have);
            }
            let mut space = (&mut self.payload).limit(length - have);
            let read = within(self.idle_timeout, &self.peer, self.io.read_buf(&mut space)).await?;
            if read == 0 {
                return Err(FrameError::Truncated { peer: self.peer.clone() });
            }
            if checked {
                self.checksum = crc32c::crc32c_append(self.checksum, &self.payload[have..]);
            }
            self.wire_bytes += read as u64;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests;
