//! Frames: what is sent arrives, and whatever else arrives is an error, never a panic.
#![allow(clippy::unwrap_used)]

use std::pin::{Pin, pin};
use std::task::{Context, Poll, Waker};

use proptest::prelude::*;
use tokio::io::ReadBuf;

use super::*;

/// A stream that hands out its bytes in pieces of given sizes, over and over, and then ends.
struct Pieces {
    bytes: Vec<u8>,
    at: usize,
    sizes: Vec<usize>,
    turn: usize,
}

impl Pieces {
    fn new(bytes: Vec<u8>, sizes: Vec<usize>) -> Self {
        Self { bytes, at: 0, sizes, turn: 0 }
    }

    fn whole(bytes: Vec<u8>) -> Self {
        Self::new(bytes, vec![usize::MAX])
    }
}

impl AsyncRead for Pieces {
    fn poll_read(
        mut self: Pin<&mut Self>,
        _: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let size = self.sizes[self.turn % self.sizes.len()];
        self.turn += 1;
        let end = self.at + size.min(buffer.remaining()).min(self.bytes.len() - self.at);
        buffer.put_slice(&self.bytes[self.at..end]);
        self.at = end;
        Poll::Ready(Ok(()))
    }
}

/// Runs what never has to wait.
fn now<T>(future: impl Future<Output = T>) -> T {
    match pin!(future).poll(&mut Context::from_waker(Waker::noop())) {
        Poll::Ready(value) => value,
        Poll::Pending => panic!("the future waits"),
    }
}

fn encode(frames: &[Frame]) -> Vec<u8> {
    let mut writer = FrameWriter::new(Vec::new(), "b");
    for frame in frames {
        now(writer.send_parts(frame.kind, frame.flags, &[&frame.payload])).unwrap();
    }
    now(writer.finish()).unwrap();
    assert_eq!(writer.wire_bytes(), writer.io.len() as u64);
    writer.io
}

/// All frames up to the error that every stream ends with.
fn decode(stream: Pieces) -> (Vec<Frame>, FrameError) {
    let mut reader = FrameReader::new(stream, "a");
    let mut frames = Vec::new();
    loop {
        match now(reader.recv()) {
            Ok(frame) => frames.push(frame),
            Err(error) => return (frames, error),
        }
    }
}

/// Where frames begin and end in their encoding.
fn boundaries(frames: &[Frame]) -> Vec<usize> {
    let mut at = PREAMBLE_LENGTH;
    let mut all = vec![at];
    for frame in frames {
        at += HEADER_LENGTH + frame.payload.len();
        all.push(at);
    }
    all
}

fn frame() -> impl Strategy<Value = Frame> {
    let payload = prop_oneof![
        4 => prop::collection::vec(any::<u8>(), 0..200),
        2 => prop::collection::vec(any::<u8>(), COPIED_PAYLOAD - 2..COPIED_PAYLOAD + 3),
        1 => (any::<u8>(), FIRST_ALLOCATION - 1..FIRST_ALLOCATION * 2).prop_map(|(byte, size)| vec![byte; size]),
    ];
    (1..=u16::MAX, any::<u16>(), payload).prop_map(|(kind, flags, payload)| Frame {
        kind,
        flags,
        payload: payload.into(),
    })
}

fn small_frames() -> impl Strategy<Value = Vec<Frame>> {
    let payload = prop::collection::vec(any::<u8>(), 0..60);
    // Of payloads with a checksum of their own nothing is promised here.
    let frame = (1..=u16::MAX, 0..SELF_CHECKED, payload).prop_map(|(kind, flags, payload)| Frame {
        kind,
        flags,
        payload: payload.into(),
    });
    prop::collection::vec(frame, 0..5)
}

proptest! {
    #[test]
    fn frames_arrive_as_they_were_sent(
        frames in prop::collection::vec(frame(), 0..12),
        sizes in prop::collection::vec(1..100_000_usize, 1..5),
    ) {
        let bytes = encode(&frames);
        prop_assert_eq!(bytes.len(), *boundaries(&frames).last().unwrap());
        let (received, end) = decode(Pieces::new(bytes, sizes));
        prop_assert_eq!(received, frames);
        prop_assert!(end.is_closed(), "{:?}", end);
    }

    #[test]
    fn a_flipped_bit_is_an_error_and_no_wrong_frame_comes_before_it(
        frames in small_frames(), at in any::<prop::sample::Index>(), bit in 0..8_u32,
    ) {
        let mut bytes = encode(&frames);
        let at = at.index(bytes.len());
        bytes[at] ^= 1 << bit;
        let (received, end) = decode(Pieces::whole(bytes));
        prop_assert!(!end.is_closed());
        // All frames before the damaged one, and none after it.
        let whole = boundaries(&frames).iter().filter(|end| **end <= at).count().saturating_sub(1);
        prop_assert_eq!(&received[..], &frames[..whole]);
    }

    #[test]
    fn a_stream_cut_inside_a_frame_is_truncated_and_between_two_it_is_closed(
        frames in small_frames(), at in any::<prop::sample::Index>(),
    ) {
        let mut bytes = encode(&frames);
        let cut = at.index(bytes.len());
        bytes.truncate(cut);
        let (received, end) = decode(Pieces::new(bytes, vec![7]));
        prop_assert_eq!(&received[..], &frames[..received.len()]);
        let between = cut == 0 || boundaries(&frames).contains(&cut);
        prop_assert_eq!(end.is_closed(), between, "{:?}", end);
        prop_assert!(between || matches!(end, FrameError::Truncated { .. }), "{:?}", end);
    }

    #[test]
    fn random_bytes_are_an_error(bytes in prop::collection::vec(any::<u8>(), 1..300), greeted in any::<bool>()) {
        let mut stream = if greeted { encode(&[]) } else { Vec::new() };
        stream.extend(bytes);
        let (received, end) = decode(Pieces::whole(stream));
        prop_assert_eq!(received, vec![]);
        prop_assert!(!end.is_closed());
    }
}

#[test]
fn the_format_on_the_wire_is_as_drawn() {
    let bytes = encode(&[Frame { kind: 0x0102, flags: 0x0304, payload: Bytes::from_static(b"123456789") }]);
    assert_eq!(bytes[..8], *b"GWDF\0\x02\0\0");
    assert_eq!(bytes[8..16], [1, 2, 3, 4, 0, 0, 0, 9]);
    let checksum = crc32c::crc32c(b"\x01\x02\x03\x04\0\0\0\x09123456789");
    assert_eq!(bytes[16..20], checksum.to_be_bytes());
    assert_eq!(bytes[20..], *b"123456789");
    assert_eq!(crc32c::crc32c(b"123456789"), 0xe306_9283, "Castagnoli's check value");
}

#[test]
fn a_payload_with_its_own_checksum_is_left_to_whoever_knows_it_and_its_header_is_not() {
    let frame = Frame { kind: 1, flags: SELF_CHECKED, payload: vec![1; 100].into() };
    let sent = encode(std::slice::from_ref(&frame));
    let mut bytes = sent.clone();
    *bytes.last_mut().unwrap() ^= 1;
    let (received, end) = decode(Pieces::whole(bytes));
    assert!(end.is_closed(), "{end:?}");
    assert_eq!(received[0].payload[99], 0);
    let mut bytes = sent;
    bytes[PREAMBLE_LENGTH + 1] ^= 2;
    let (received, end) = decode(Pieces::whole(bytes));
    assert!(received.is_empty() && matches!(end, FrameError::Checksum { .. }), "{end:?}");
}

#[test]
fn a_buffer_is_used_again_when_nobody_has_its_payload_and_never_before() {
    let frame = |byte| Frame { kind: 1, flags: 0, payload: vec![byte; REUSED_PAYLOAD].into() };
    let bytes = encode(&[frame(1), frame(2), frame(3)]);
    let mut reader = FrameReader::new(&bytes[..], "a");
    let first = now(reader.recv()).unwrap().payload;
    let second = now(reader.recv()).unwrap().payload;
    assert_ne!(first.as_ptr(), second.as_ptr());
    let at = first.as_ptr();
    assert!(first.iter().all(|byte| *byte == 1));
    drop(first);
    let third = now(reader.recv()).unwrap().payload;
    assert_eq!(third.as_ptr(), at);
    assert!(second.iter().all(|byte| *byte == 2) && third.iter().all(|byte| *byte == 3));
}

#[test]
fn a_claimed_length_takes_no_memory_until_it_is_there() {
    let mut stream = encode(&[]);
    let length = u32::try_from(MAX_PAYLOAD).unwrap();
    stream.extend(header_fields(1, 0, length));
    stream.extend([0; 4]);
    let (mut peer, end) = tokio::io::duplex(64);
    now(peer.write_all(&stream)).unwrap();
    let mut reader = FrameReader::new(end, "a");
    {
        let mut waiting = pin!(reader.recv());
        assert!(waiting.as_mut().poll(&mut Context::from_waker(Waker::noop())).is_pending());
    }
    assert!((1..=FIRST_ALLOCATION).contains(&reader.payload.capacity()));
}

#[test]
fn a_longest_frame_passes_and_a_longer_one_is_refused_on_both_sides() {
    let longest = Frame { kind: 1, flags: 0, payload: vec![9; MAX_PAYLOAD].into() };
    let (received, _) = decode(Pieces::new(encode(std::slice::from_ref(&longest)), vec![100_000]));
    assert_eq!(received, [longest]);

    let mut writer = FrameWriter::new(Vec::new(), "b");
    let error = now(writer.send(1, vec![0; MAX_PAYLOAD + 1].into())).unwrap_err();
    assert!(matches!(error, FrameError::TooLong { length: 1_048_577, .. }));
    now(writer.send(1, Bytes::new())).unwrap(); // nothing was sent, so nothing is broken

    let mut stream = encode(&[]);
    stream.extend(header_fields(1, 0, u32::MAX));
    stream.extend([0; 4]);
    let (_, end) = decode(Pieces::whole(stream));
    assert!(matches!(end, FrameError::TooLong { length: 0xffff_ffff, .. }), "{end:?}");
}

#[test]
fn kind_zero_is_refused_on_both_sides() {
    let mut writer = FrameWriter::new(Vec::new(), "b");
    let error = now(writer.send(0, Bytes::new())).unwrap_err();
    assert!(matches!(error, FrameError::InvalidKind { .. }));
    let mut stream = encode(&[]);
    stream.extend([0; HEADER_LENGTH]);
    let (_, end) = decode(Pieces::whole(stream));
    assert!(matches!(end, FrameError::InvalidKind { .. }), "{end:?}");
}

#[test]
fn frames_of_the_versions_that_are_read_are_and_the_oldest_is_written() {
    let preamble = |version: u16| [&b"GWDF"[..], &version.to_be_bytes(), &[0, 0]].concat();
    for version in VERSIONS {
        let (_, end) = decode(Pieces::whole(preamble(version)));
        assert!(end.is_closed(), "{end:?}");
    }
    assert_eq!(encode(&[]), preamble(*VERSIONS.start()));
    for (version, older) in [(VERSIONS.start() - 1, "on that node"), (VERSIONS.end() + 1, "on this node")] {
        let (_, end) = decode(Pieces::whole(preamble(version)));
        assert!(matches!(end, FrameError::Version { theirs, .. } if theirs == version), "{end:?}");
        let said = end.to_string();
        assert!(said.contains(&format!("frames of version {version}")) && said.ends_with(older), "{said}");
    }
    let (_, end) = decode(Pieces::whole(b"HTTP/1.1 400".to_vec()));
    assert!(matches!(end, FrameError::BadMagic { .. }), "{end:?}");
}

#[test]
fn a_reader_is_broken_after_an_error() {
    let frame = Frame { kind: 1, flags: 0, payload: Bytes::from_static(b"x") };
    let mut stream = encode(&[frame.clone(), frame]);
    stream[PREAMBLE_LENGTH + HEADER_LENGTH] ^= 1;
    let mut reader = FrameReader::new(Pieces::whole(stream), "a");
    assert!(matches!(now(reader.recv()), Err(FrameError::Checksum { kind: 1, length: 1, .. })));
    assert!(matches!(now(reader.recv()), Err(FrameError::Broken { .. })));
}

#[tokio::test]
async fn a_receive_that_is_given_up_loses_nothing() {
    let frame = Frame { kind: 7, flags: 1, payload: vec![3; 5000].into() };
    let stream = encode(std::slice::from_ref(&frame));
    for cut in [1, PREAMBLE_LENGTH, PREAMBLE_LENGTH + 3, PREAMBLE_LENGTH + HEADER_LENGTH + 4000] {
        let (mut peer, end) = tokio::io::duplex(stream.len());
        let mut reader = FrameReader::new(end, "a");
        peer.write_all(&stream[..cut]).await.unwrap();
        {
            let mut given_up = pin!(reader.recv());
            assert!(given_up.as_mut().poll(&mut Context::from_waker(Waker::noop())).is_pending());
        }
        peer.write_all(&stream[cut..]).await.unwrap();
        assert_eq!(reader.recv().await.unwrap(), frame, "cut at {cut}");
    }
}

#[tokio::test]
async fn a_send_that_is_given_up_breaks_the_writer() {
    let (end, _peer) = tokio::io::duplex(64);
    let mut writer = FrameWriter::new(end, "b");
    {
        let mut given_up = pin!(writer.send(1, vec![0; 100_000].into()));
        assert!(given_up.as_mut().poll(&mut Context::from_waker(Waker::noop())).is_pending());
    }
    assert!(matches!(writer.send(1, Bytes::new()).await, Err(FrameError::Broken { .. })));
    assert!(matches!(writer.flush().await, Err(FrameError::Broken { .. })));
    assert!(matches!(writer.finish().await, Err(FrameError::Broken { .. })));
}

#[tokio::test]
async fn silence_is_counted_from_the_last_byte_and_not_from_the_frame() {
    const LIMIT: Duration = Duration::from_secs(2);
    let stream = encode(&[Frame { kind: 1, flags: 0, payload: vec![1; 20].into() }]);
    let (mut peer, end) = tokio::io::duplex(stream.len());
    let mut reader = FrameReader::new(end, "a");
    reader.set_idle_timeout(Some(LIMIT));
    let started = tokio::time::Instant::now();
    let slow = tokio::spawn(async move {
        for bytes in stream.chunks(4) {
            tokio::time::sleep(LIMIT / 6).await; // the slow peer is what this test is about
            peer.write_all(bytes).await.unwrap();
        }
        peer
    });
    assert_eq!(reader.recv().await.unwrap().payload.len(), 20);
    assert!(started.elapsed() > LIMIT);
    let _still_open = slow.await.unwrap();
    let before = tokio::time::Instant::now();
    assert!(matches!(reader.recv().await, Err(FrameError::TimedOut { .. })));
    assert!(before.elapsed() >= LIMIT);
}

#[test]
fn small_frames_wait_for_the_flush_and_long_ones_do_not() {
    let mut writer = FrameWriter::new(Vec::new(), "b");
    now(writer.send(1, Bytes::from_static(b"x"))).unwrap();
    assert_eq!(writer.io.len(), 0);
    now(writer.send(1, vec![0; COPIED_PAYLOAD + 1].into())).unwrap();
    assert_eq!(writer.io.len() as u64, writer.wire_bytes());
    for _ in 0..100 {
        now(writer.send(1, vec![0; COPIED_PAYLOAD].into())).unwrap();
    }
    assert!(writer.buffer.len() < WRITE_BUFFER, "the buffer is bounded");
    now(writer.flush()).unwrap();
    assert_eq!(writer.io.len() as u64, writer.wire_bytes());
}
