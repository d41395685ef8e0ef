//! Sends a part of a file as frames, with two frames' worth of memory: one is read while the other
//! is sent.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::sync::Arc;

use bytes::{Bytes, BytesMut};
use tokio::io::AsyncWrite;
use tokio::task::JoinHandle;

use crate::frame::{FrameError, FrameWriter};

/// Payload of each frame but the last: big enough that headers and system calls do not matter,
/// small enough for the processor's second-level cache.
pub const REGION_FRAME: usize = 256 * 1024;

/// Why a part of a file was not sent.
#[derive(Debug, thiserror::Error)]
pub enum RegionError {
    /// The file could not be read.
    #[error("cannot read {length} bytes at {offset} of the file to be sent")]
    Read {
        /// Where, in bytes.
        offset: u64,
        /// How much, in bytes.
        length: usize,
        /// What the system said; `UnexpectedEof` if the file is shorter than the caller believed.
        source: io::Error,
    },
    /// The connection failed.
    #[error(transparent)]
    Frame(#[from] FrameError),
}

/// Sends `length` bytes of `file` from `offset` on, as frames of `kind` of at most
/// [`REGION_FRAME`] bytes each. The receiver must know offset and length from a frame before.
///
/// The file's own position is not used. After [`RegionError::Read`] the connection is whole, but
/// the region on it is short. Not cancel-safe, as sending is not.
pub async fn send_region<W: AsyncWrite + Unpin>(
    writer: &mut FrameWriter<W>,
    kind: u16,
    file: Arc<File>,
    offset: u64,
    length: u64,
) -> Result<(), RegionError> {
    let end = offset.checked_add(length).ok_or_else(|| RegionError::Read {
        offset,
        length: 0,
        source: io::ErrorKind::InvalidInput.into(),
    })?;
    let mut next = read_ahead(&file, offset, end);
    while let Some((at, size, reading)) = next {
        let chunk = match reading.await {
            Ok(read) => read,
            Err(error) => Err(io::Error::other(error)),
        };
        let chunk = chunk.map_err(|source| RegionError::Read { offset: at, length: size, source })?;
        next = read_ahead(&file, at + size as u64, end);
        writer.send(kind, chunk).await?;
    }
    Ok(())
}

type Reading = JoinHandle<io::Result<Bytes>>;

/// Starts to read the chunk at `offset`, if the region goes on there.
fn read_ahead(file: &Arc<File>, offset: u64, end: u64) -> Option<(u64, usize, Reading)> {
    let left = end.checked_sub(offset).filter(|left| *left > 0)?;
    let size = usize::try_from(left).unwrap_or(REGION_FRAME).min(REGION_FRAME);
    let file = file.clone();
    let reading = tokio::task::spawn_blocking(move || {
        let mut chunk = BytesMut::zeroed(size);
        file.read_exact_at(&mut chunk, offset)?;
        Ok(chunk.freeze())
    });
    Some((offset, size, reading))
}
