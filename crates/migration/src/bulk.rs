//! A round of a process's memory over streams alone, for the benchmark that measures the cost of sending and
//! storing pages, without TLS and with it.
//!
//! ```text
//! send ── scan ── Pages::send ══ streams ══ take ── godwit-pager ── receive
//! ```
//!
//! It is the code of a migration between the scan and the store, without the conversation around it: no
//! service, no daemon, no commit. The streams may be [`Connection`]s of any kind; those of a migration are
//! TLS by their type.

use std::ops::ControlFlow;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use godwit_memory::pager::{self, Client, PagerError};
use godwit_memory::tracker::detect;
use godwit_transfer::{Carrier, Connection};
use tokio::sync::watch;
use tokio::task::JoinSet;

use crate::destination::page_receiver::{PageReceiverError, Shared, Status, Storing, Target, Waiting, take};
use crate::link::{Link, LinkError};
use crate::options::Compress;
use crate::source::pages::{Pages, PagesError, State};
use crate::source::streams::Streams;

/// Why a round failed.
#[derive(Debug, thiserror::Error)]
pub enum BulkError {
    /// At the sending end.
    #[error(transparent)]
    Pages(#[from] PagesError),
    /// A stream.
    #[error(transparent)]
    Link(#[from] LinkError),
    /// At the receiving end.
    #[error(transparent)]
    Receiver(#[from] PageReceiverError),
    /// A thread.
    #[error("a thread of the benchmark failed")]
    Task(#[from] tokio::task::JoinError),
}

impl From<PagerError> for BulkError {
    fn from(error: PagerError) -> Self {
        Self::Receiver(error.into())
    }
}

/// What a round sent.
#[derive(Debug, Clone, Copy)]
pub struct Round {
    /// Pages with content.
    pub pages: u64,
    /// From the first page until the receiver had all.
    pub took: Duration,
}

/// Sends all memory of these processes, once.
///
/// # Errors
/// The memory cannot be read, or a stream broke.
pub async fn send<S: Carrier>(streams: Vec<Connection<S>>, pids: Vec<i32>) -> Result<Round, BulkError> {
    let count = streams.len();
    let mut streams = Streams::of(streams);
    let mut pages = Pages::new(detect().backend, count, Compress::Off, None, 0);
    let mut pages = tokio::task::spawn_blocking(move || {
        pages.scan(&pids, false)?;
        Ok::<_, PagesError>(pages)
    })
    .await??;
    let begun = Instant::now();
    let senders = streams.senders();
    let send = move || pages.send(&senders, State::Running, &|_| ControlFlow::Continue(()));
    let sent = tokio::task::spawn_blocking(send).await??;
    streams.arrived().await?;
    let took = begun.elapsed();
    streams.close().await;
    Ok(Round { pages: sent.pages, took })
}

/// Takes at most `bytes` of pages into a pager of its own in this directory, until the streams end.
///
/// # Errors
/// The pager cannot be started, or what came could not be stored.
pub async fn receive<S: Carrier>(
    streams: Vec<Connection<S>>,
    binary: &Path,
    directory: &Path,
    bytes: u64,
) -> Result<(), BulkError> {
    let (binary, there) = (binary.to_owned(), directory.to_owned());
    let (client, _events) = tokio::task::spawn_blocking(move || {
        pager::spawn(&binary, &there, bytes, &there.join("log"))?;
        Client::connect(&there)
    })
    .await??;
    let client = Arc::new(client);
    let (status_tx, _status) = watch::channel(Status::default());
    let target =
        Target { client: Arc::clone(&client), retained: None, shared: Shared::default(), most: bytes };
    let mut taking = JoinSet::new();
    for stream in streams {
        taking.spawn(take(Link::new(stream), Storing::new(&target, &Waiting::default()), status_tx.clone()));
    }
    let mut outcome = Ok(());
    while let Some(ended) = taking.join_next().await {
        match ended? {
            Err(PageReceiverError::Link(LinkError::Broken(error))) if error.is_closed() => {}
            ended => outcome = outcome.and(ended),
        }
    }
    let ended = tokio::task::spawn_blocking(move || client.abandon()).await?;
    outcome?;
    Ok(ended?)
}
