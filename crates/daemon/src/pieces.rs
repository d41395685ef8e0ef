//! Bytes in pieces: between a stream of the API's and a thread that reads or writes files.

use std::io::{self, Read, Write};
use std::time::{Duration, Instant};

use bytes::Bytes;
use tokio::sync::mpsc;
use tonic::Status;

/// Bytes of a piece.
pub(crate) const PIECE: usize = 256 << 10;
/// Pieces that wait for whoever is slower.
pub(crate) const PIECES: usize = 4;
/// How long the user may take for a piece: meanwhile nobody else can stop or move the service.
pub(crate) const PATIENCE: Duration = Duration::from_secs(60);

/// Where pieces go.
pub(crate) struct Outgoing<T> {
    pieces: mpsc::Sender<Result<T, Status>>,
    as_message: fn(Bytes) -> T,
    runtime: tokio::runtime::Handle,
    /// A piece was not taken: no other is offered.
    is_shut: bool,
    /// When all of it must have been taken.
    until: Option<Instant>,
}

impl<T> Outgoing<T> {
    /// To there, each in a message; made in a task, written to by a thread.
    pub(crate) fn new(pieces: mpsc::Sender<Result<T, Status>>, as_message: fn(Bytes) -> T) -> Self {
        Self { pieces, as_message, runtime: tokio::runtime::Handle::current(), is_shut: false, until: None }
    }

    /// The same, all of which must be taken in this time.
    pub(crate) fn within(self, limit: Duration) -> Self {
        Self { until: Some(Instant::now() + limit), ..self }
    }
}

impl<T> Write for Outgoing<T> {
    fn write(&mut self, data: &[u8]) -> io::Result<usize> {
        let piece = (self.as_message)(Bytes::copy_from_slice(data));
        if self.is_shut {
            return Err(io::ErrorKind::BrokenPipe.into());
        }
        if self.until.is_some_and(|until| Instant::now() > until) {
            self.is_shut = true;
            return Err(io::Error::new(io::ErrorKind::TimedOut, "all of it was not taken in time"));
        }
        // The last place is for an error.
        let free = self.runtime.block_on(tokio::time::timeout(PATIENCE, self.pieces.reserve_many(2)));
        self.is_shut = !matches!(free, Ok(Ok(_)));
        let mut free = free
            .map_err(|_| {
                io::Error::new(io::ErrorKind::TimedOut, format!("nothing of it was taken for {PATIENCE:?}"))
            })?
            .map_err(|_| io::ErrorKind::BrokenPipe)?;
        free.next().ok_or(io::ErrorKind::BrokenPipe)?.send(Ok(piece));
        Ok(data.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Where pieces come from.
pub(crate) struct Incoming {
    pieces: mpsc::Receiver<io::Result<Bytes>>,
    piece: Bytes,
}

impl Incoming {
    pub(crate) fn new(pieces: mpsc::Receiver<io::Result<Bytes>>) -> Self {
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

/// Hands pieces on as they come, until whoever takes them has enough; why there are not all of them is handed on, too.
/// `data` tells a piece from what does not belong here.
pub(crate) async fn hand_on<T>(
    input: &mut tonic::Streaming<T>,
    pieces: mpsc::Sender<io::Result<Bytes>>,
    data: impl Fn(T) -> Option<Bytes>,
) {
    let cut_off = loop {
        let Ok(message) = tokio::time::timeout(PATIENCE, input.message()).await else {
            break format!("nothing of it came for {PATIENCE:?}");
        };
        match message {
            Ok(Some(message)) => match data(message) {
                Some(data) => {
                    if pieces.send(Ok(data)).await.is_err() {
                        // It has come to its end, or failed.
                        return;
                    }
                }
                None => break "a message of it has no data".to_owned(),
            },
            Ok(None) => return,
            Err(status) => break status.message().to_owned(),
        }
    };
    let _ = pieces.send(Err(io::Error::other(cut_off))).await;
}
