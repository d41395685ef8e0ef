//! TCP connections of a dump with something in their send queues: in the image of the files (patch tcp-inline),
//! or each in one of its own.
//!
//! ```text
//!   files.img             file_entry: inet_sk_entry, perhaps with tcp_stream_entry and queues
//!   tcp-stream-INODE.img  magic(u32) kind(u32) length(u32) tcp_stream_entry(length bytes) queues
//!   queues                what was received and not read, then what was written and not acknowledged
//! ```

use std::fs::{self, File};
use std::io::Read;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::path::Path;

use prost::Message;

use super::connection::{HEAD, KIND};
use super::{COMMON_MAGIC, ImageError, ImageKind, read_image, split, take_word};

/// Most bytes of send queues that are read in all. Connections beyond are left out.
const MOST: u64 = 64 << 20;
/// States of RFC 9293, as the kernel numbers them, in which something can be in doubt.
const ESTABLISHED: u32 = 1;
const FIN_WAIT_1: u32 = 4;
const CLOSE_WAIT: u32 = 8;
const LAST_ACK: u32 = 9;
const CLOSING: u32 = 11;
/// IPPROTO_TCP.
const TCP: u32 = 6;
/// TCPI_OPT_TIMESTAMPS of `opt_mask`.
const TIMESTAMPS: u32 = 1;
/// TCPI_OPT_WSCALE.
const SCALED: u32 = 4;

/// A connection with bytes that the other end has not acknowledged.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Unacknowledged {
    /// Its own end.
    pub local: SocketAddr,
    /// The other end.
    pub remote: SocketAddr,
    /// The number of the first byte that was not acknowledged.
    pub sequence: u32,
    /// Bytes from there on, sent or not.
    pub bytes: Vec<u8>,
    /// Whether a FIN comes after them.
    pub finished: bool,
    /// The number of the next byte that it expects.
    pub received: u32,
    /// Most bytes in a segment that it sends.
    pub segment: u32,
    /// The window that it offers, scaled as in a segment.
    pub window: u16,
    /// Its clock (TCP timestamps), if it uses one.
    pub timestamp: Option<u32>,
}

/// `file_entry`, as far as it is read here.
#[derive(Clone, PartialEq, Message)]
struct FileEntry {
    #[prost(message, optional, tag = "4")]
    socket: Option<Socket>,
}

/// `inet_sk_entry`.
#[derive(Clone, PartialEq, Message)]
struct Socket {
    #[prost(uint32, required, tag = "2")]
    inode: u32,
    #[prost(uint32, required, tag = "5")]
    protocol: u32,
    #[prost(uint32, required, tag = "6")]
    state: u32,
    #[prost(uint32, required, tag = "7")]
    local_port: u32,
    #[prost(uint32, required, tag = "8")]
    remote_port: u32,
    /// One word of IPv4, or four, as in memory.
    #[prost(uint32, repeated, packed = "false", tag = "11")]
    local: Vec<u32>,
    #[prost(uint32, repeated, packed = "false", tag = "12")]
    remote: Vec<u32>,
    #[prost(message, optional, tag = "1048")]
    stream: Option<Stream>,
    #[prost(bytes = "vec", optional, tag = "1049")]
    queues: Option<Vec<u8>>,
}

/// `tcp_stream_entry`.
#[derive(Clone, Copy, PartialEq, Message)]
struct Stream {
    #[prost(uint32, required, tag = "1")]
    unread: u32,
    #[prost(uint32, required, tag = "2")]
    received: u32,
    /// Without a FIN.
    #[prost(uint32, required, tag = "3")]
    unacknowledged: u32,
    /// The number of what is written next, behind a FIN too.
    #[prost(uint32, required, tag = "4")]
    written: u32,
    #[prost(uint32, required, tag = "5")]
    options: u32,
    #[prost(uint32, required, tag = "7")]
    segment: u32,
    #[prost(uint32, optional, tag = "8")]
    scale: Option<u32>,
    #[prost(uint32, optional, tag = "9")]
    timestamp: Option<u32>,
    #[prost(uint32, optional, tag = "16")]
    window: Option<u32>,
}

/// A connection, and what it has sent; none if its queues are cut off.
type Both = (Stream, Option<Vec<u8>>);

/// The connections of a dump of which something is not acknowledged.
///
/// # Errors
/// An image cannot be read, or is damaged.
pub fn unacknowledged(images: &Path) -> Result<Vec<Unacknowledged>, ImageError> {
    let path = images.join("files.img");
    let damaged = |reason| ImageError::Damaged { path: path.clone(), reason };
    let bytes = read_image(&path, ImageKind::Files)?;
    let (_, records) = split(&bytes, ImageKind::Files).map_err(damaged)?;
    let (mut found, mut left) = (Vec::new(), MOST);
    for record in records {
        let entry = FileEntry::decode(record).map_err(|error| damaged(error.to_string()))?;
        let Some(mut socket) = entry.socket else { continue };
        if socket.protocol != TCP
            || ![ESTABLISHED, FIN_WAIT_1, CLOSE_WAIT, LAST_ACK, CLOSING].contains(&socket.state)
        {
            continue;
        }
        let (stream, bytes) = match socket.stream {
            Some(stream) => (stream, sent(&stream, socket.queues.take().unwrap_or_default())),
            None => match own_image(images, socket.inode, &mut left)? {
                Some(both) => both,
                None => continue,
            },
        };
        let bytes = bytes.ok_or_else(|| damaged("a connection's queues are cut off".to_owned()))?;
        found.extend(socket.with(&stream, bytes));
    }
    Ok(found)
}

/// What was written and not acknowledged, of what is in both queues.
fn sent(stream: &Stream, mut queues: Vec<u8>) -> Option<Vec<u8>> {
    let sent = queues.len().checked_sub(stream.unacknowledged as usize)?;
    (sent == stream.unread as usize).then(|| queues.split_off(sent))
}

/// A connection that has an image of its own; none if that would be too much.
fn own_image(images: &Path, inode: u32, left: &mut u64) -> Result<Option<Both>, ImageError> {
    let path = images.join(format!("tcp-stream-{inode:x}.img"));
    let failed = |source| ImageError::Read { path: path.clone(), source };
    let length = fs::metadata(&path).map_err(failed)?.len();
    let Some(rest) = left.checked_sub(length) else { return Ok(None) };
    *left = rest;
    let mut image = Vec::new();
    File::open(&path).and_then(|file| file.take(length).read_to_end(&mut image)).map_err(failed)?;
    let damaged = |reason: &str| ImageError::Damaged { path: path.clone(), reason: reason.to_owned() };
    let mut rest = &image[..];
    if [take_word(&mut rest), take_word(&mut rest)] != [Some(COMMON_MAGIC), Some(KIND)] {
        return Err(damaged("it is not an image of a connection"));
    }
    let length = take_word(&mut rest).and_then(|length| usize::try_from(length).ok());
    let message = length.and_then(|length| rest.get(..length)).ok_or_else(|| damaged("it is cut off"))?;
    let stream = Stream::decode(message).map_err(|error| damaged(&error.to_string()))?;
    let queues = image.split_off((HEAD + message.len()).min(image.len()));
    Ok(Some((stream, sent(&stream, queues))))
}

impl Socket {
    fn with(&self, stream: &Stream, bytes: Vec<u8>) -> Option<Unacknowledged> {
        let finished = [FIN_WAIT_1, LAST_ACK, CLOSING].contains(&self.state);
        if bytes.is_empty() && !finished {
            return None;
        }
        let end = |address: &[u32], port: u32| {
            Some(SocketAddr::new(address_of(address)?, u16::try_from(port).ok()?))
        };
        let scale = if stream.options & SCALED != 0 { stream.scale.unwrap_or_default() } else { 0 };
        let window = stream.window.unwrap_or_default().checked_shr(scale).unwrap_or_default();
        Some(Unacknowledged {
            local: end(&self.local, self.local_port)?,
            remote: end(&self.remote, self.remote_port)?,
            sequence: stream.written.wrapping_sub(stream.unacknowledged).wrapping_sub(finished.into()),
            bytes,
            finished,
            received: stream.received,
            segment: stream.segment,
            window: u16::try_from(window).unwrap_or(u16::MAX),
            timestamp: stream.timestamp.filter(|_| stream.options & TIMESTAMPS != 0),
        })
    }
}

/// IPv4 through a socket of IPv6 is what it is on the wire.
fn address_of(words: &[u32]) -> Option<IpAddr> {
    match *words {
        [word] => Some(Ipv4Addr::from(word.to_ne_bytes()).into()),
        [a, b, c, d] => {
            let mut bytes = [0; 16];
            for (place, word) in bytes.chunks_mut(4).zip([a, b, c, d]) {
                place.copy_from_slice(&word.to_ne_bytes());
            }
            Some(Ipv6Addr::from(bytes).to_canonical())
        }
        _ => None,
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const FILES: u32 = ImageKind::Files as u32;

    fn stream(unread: u32, unacknowledged: u32) -> Stream {
        Stream {
            unread,
            received: 7000,
            unacknowledged,
            written: 3,
            options: TIMESTAMPS | SCALED,
            segment: 1398,
            scale: Some(9),
            timestamp: Some(5),
            window: Some(64 << 9),
        }
    }

    fn socket(inode: u32, state: u32) -> Socket {
        Socket {
            inode,
            protocol: TCP,
            state,
            local_port: 80,
            remote_port: 40_000,
            local: vec![u32::from_ne_bytes([10, 88, 0, 10])],
            remote: vec![u32::from_ne_bytes([10, 99, 0, 100])],
            stream: None,
            queues: None,
        }
    }

    fn write(directory: &Path, sockets: Vec<Socket>) {
        let mut bytes = [COMMON_MAGIC, FILES].map(u32::to_le_bytes).concat();
        // Another kind of file stands among them.
        for socket in sockets.into_iter().map(Some).chain([None]) {
            let entry = FileEntry { socket }.encode_to_vec();
            bytes.extend(u32::try_from(entry.len()).unwrap().to_le_bytes());
            bytes.extend(entry);
        }
        fs::write(directory.join("files.img"), bytes).unwrap();
    }

    fn own(stream: &Stream, queues: &[u8]) -> Vec<u8> {
        let message = stream.encode_to_vec();
        let length = u32::try_from(message.len()).unwrap().to_le_bytes();
        [&[COMMON_MAGIC, KIND].map(u32::to_le_bytes).concat()[..], &length, &message, queues].concat()
    }

    #[test]
    fn connections_in_both_kinds_of_image_are_found_with_what_they_sent() {
        let directory = tempfile::tempdir().unwrap();
        let inside = |state, stream: Stream, queues: &[u8]| Socket {
            stream: Some(stream),
            queues: Some(queues.to_vec()),
            ..socket(1, state)
        };
        let mapped = [0, 0, u32::from_be(0xffff), u32::from_ne_bytes([10, 99, 0, 100])];
        let sockets = vec![
            inside(ESTABLISHED, stream(2, 5), b"inbytes"),
            // Nothing is in doubt; and these are other states, and no TCP.
            inside(ESTABLISHED, stream(2, 0), b"in"),
            Socket { protocol: 17, ..inside(ESTABLISHED, stream(0, 5), b"bytes") },
            inside(2, stream(0, 5), b"bytes"),
            // A FIN alone, and one behind bytes.
            inside(FIN_WAIT_1, stream(0, 0), b""),
            inside(LAST_ACK, stream(0, 5), b"bytes"),
            Socket { remote: mapped.to_vec(), ..socket(0x2f, CLOSE_WAIT) },
        ];
        write(directory.path(), sockets);
        fs::write(directory.path().join("tcp-stream-2f.img"), own(&stream(1, 3), b"iown")).unwrap();
        let found = unacknowledged(directory.path()).unwrap();
        let first = Unacknowledged {
            local: "10.88.0.10:80".parse().unwrap(),
            remote: "10.99.0.100:40000".parse().unwrap(),
            // It has wrapped around since.
            sequence: u32::MAX - 1,
            bytes: b"bytes".to_vec(),
            finished: false,
            received: 7000,
            segment: 1398,
            window: 64,
            timestamp: Some(5),
        };
        let fin = Unacknowledged { sequence: 2, bytes: Vec::new(), finished: true, ..first.clone() };
        let last = Unacknowledged { sequence: u32::MAX - 2, finished: true, ..first.clone() };
        let own = Unacknowledged { sequence: 0, bytes: b"own".to_vec(), ..first.clone() };
        assert_eq!(found, [first, fin, last, own]);
    }

    #[test]
    fn queues_that_are_not_as_long_as_they_should_be_are_refused() {
        let directory = tempfile::tempdir().unwrap();
        for queues in ["inbyte", "inbytesx"] {
            let damaged = Socket {
                stream: Some(stream(2, 5)),
                queues: Some(queues.as_bytes().to_vec()),
                ..socket(1, ESTABLISHED)
            };
            write(directory.path(), vec![damaged]);
            assert!(matches!(unacknowledged(directory.path()), Err(ImageError::Damaged { .. })), "{queues}");
        }
        write(directory.path(), vec![socket(5, ESTABLISHED)]);
        let image = own(&stream(0, 2), b"ow");
        for length in 0..image.len() {
            fs::write(directory.path().join("tcp-stream-5.img"), &image[..length]).unwrap();
            assert!(unacknowledged(directory.path()).is_err(), "{length}");
        }
        fs::write(directory.path().join("tcp-stream-5.img"), &image).unwrap();
        assert_eq!(unacknowledged(directory.path()).unwrap().len(), 1);
    }

    proptest! {
        #[test]
        fn no_bytes_bring_it_down(files: Vec<u8>, own_image: Vec<u8>, headed: bool) {
            let directory = tempfile::tempdir().unwrap();
            let inside = Socket {
                stream: Stream::decode(&files[..]).ok(),
                queues: Some(own_image.clone()),
                ..socket(1, ESTABLISHED)
            };
            write(directory.path(), vec![inside, socket(7, ESTABLISHED)]);
            if headed {
                let head = [COMMON_MAGIC, KIND].map(u32::to_le_bytes).concat();
                fs::write(directory.path().join("tcp-stream-7.img"), [&head[..], &own_image].concat()).unwrap();
            }
            let _ = unacknowledged(directory.path());
            fs::write(directory.path().join("files.img"), &files).unwrap();
            let _ = unacknowledged(directory.path());
        }
    }
}
