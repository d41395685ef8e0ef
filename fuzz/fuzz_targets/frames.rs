//! The frame reader on any stream: frames come out as they were written, however the stream is cut
//! into reads, and after an error there is nothing more.
#![no_main]

use std::io;
use std::pin::Pin;
use std::task::{Context, Poll};

use arbitrary::Arbitrary;
use godwit_fuzz::block_on;
use godwit_transfer::{Frame, FrameError, FrameReader, FrameWriter, MAX_PAYLOAD};
use libfuzzer_sys::fuzz_target;
use tokio::io::{AsyncRead, ReadBuf};

#[derive(Debug, Arbitrary)]
struct Input<'a> {
    /// Written with right checksums before the raw bytes.
    good: Vec<(u16, u16, &'a [u8])>,
    without_preamble: bool,
    read_size: u8,
    raw: &'a [u8],
}

/// Gives at most so many bytes at a time.
struct Piecewise<'a> {
    rest: &'a [u8],
    size: usize,
}

impl AsyncRead for Piecewise<'_> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        _: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let length = self.size.min(self.rest.len()).min(buffer.remaining());
        let (piece, rest) = self.rest.split_at(length);
        buffer.put_slice(piece);
        self.rest = rest;
        Poll::Ready(Ok(()))
    }
}

async fn read(stream: &[u8], size: usize) -> (Vec<Frame>, FrameError) {
    let mut reader = FrameReader::new(Piecewise { rest: stream, size }, "fuzz");
    let mut frames = Vec::new();
    loop {
        match reader.recv().await {
            Ok(frame) => {
                assert!(frame.kind != 0 && frame.payload.len() <= MAX_PAYLOAD);
                frames.push(frame);
                assert!(reader.wire_bytes() <= stream.len() as u64);
            }
            Err(error) => {
                assert!(reader.recv().await.is_err(), "a frame after {error}");
                return (frames, error);
            }
        }
    }
}

fuzz_target!(|input: Input<'_>| {
    block_on(async {
        let mut stream = Vec::new();
        let mut sent = Vec::new();
        if !input.without_preamble {
            let mut writer = FrameWriter::new(&mut stream, "fuzz");
            for (kind, flags, payload) in &input.good {
                if writer.send_parts(*kind, *flags, &[payload]).await.is_ok() {
                    let (kind, flags) = (*kind, *flags);
                    sent.push(Frame { kind, flags, payload: payload.to_vec().into() });
                }
            }
            writer.flush().await.expect("memory takes everything");
        }
        stream.extend_from_slice(input.raw);
        let (whole, end) = read(&stream, usize::MAX).await;
        assert_eq!(whole[..sent.len()], sent, "what was written came otherwise");
        let (pieces, end_of_pieces) = read(&stream, usize::from(input.read_size).max(1)).await;
        assert_eq!(whole, pieces, "the size of reads made a difference");
        assert_eq!(end.to_string(), end_of_pieces.to_string());
        let mut again = Vec::new();
        let mut writer = FrameWriter::new(&mut again, "fuzz");
        for frame in &whole {
            writer
                .send_parts(frame.kind, frame.flags, &[&frame.payload])
                .await
                .expect("memory takes everything");
        }
        writer.flush().await.expect("memory takes everything");
        assert!(whole.is_empty() || stream.starts_with(&again), "frames that were not in the stream");
    });
});
