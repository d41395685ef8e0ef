//! An archive in pieces: between a thread that reads or writes files and the connection to the daemon.

use std::io::{self, Read, Write};

use bytes::Bytes;
use tokio::sync::mpsc;

/// Where pieces go; an error says that the archive is not whole.
pub(super) type Pieces = mpsc::Sender<io::Result<Bytes>>;

/// Bytes of a piece.
pub(super) const PIECE: usize = 256 << 10;

/// An archive that comes in pieces.
pub(super) struct Incoming {
    pieces: mpsc::Receiver<io::Result<Bytes>>,
    piece: Bytes,
}

impl Incoming {
    pub(super) fn new(pieces: mpsc::Receiver<io::Result<Bytes>>) -> Self {
        Self { pieces, piece: Bytes::new() }
    }
}

impl Read for Incoming {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        while self.piece.is_empty() {
            match self.pieces.blocking_recv() {
                Some(piece) => self.piece = piece?,
                None => return Ok(0),
            }
        }
        let length = self.piece.len().min(buffer.len());
        buffer[..length].copy_from_slice(&self.piece.split_to(length));
        Ok(length)
    }
}

/// An archive that goes in pieces.
pub(super) struct Outgoing(pub(super) Pieces);

impl Write for Outgoing {
    fn write(&mut self, data: &[u8]) -> io::Result<usize> {
        self.0.blocking_send(Ok(Bytes::copy_from_slice(data))).map_err(|_| io::ErrorKind::BrokenPipe)?;
        Ok(data.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// What has gone is not all.
pub(super) fn cut_off(pieces: &Pieces) {
    let _ = pieces.blocking_send(Err(io::Error::other("it is cut off")));
}

/// Lets an archive through until it is shut: its writer would else write an end when it is dropped, which makes a whole one
/// of what is not.
pub(super) struct Valve<W> {
    to: W,
    is_shut: bool,
}

impl<W> Valve<W> {
    pub(super) fn new(to: W) -> Self {
        Self { to, is_shut: false }
    }

    pub(super) fn shut(&mut self) {
        self.is_shut = true;
    }
}

impl<W: Write> Write for Valve<W> {
    fn write(&mut self, data: &[u8]) -> io::Result<usize> {
        if self.is_shut { Err(io::ErrorKind::BrokenPipe.into()) } else { self.to.write(data) }
    }

    fn flush(&mut self) -> io::Result<()> {
        if self.is_shut { Err(io::ErrorKind::BrokenPipe.into()) } else { self.to.flush() }
    }
}
