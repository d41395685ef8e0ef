//! The service's changed files and its log on their way: in rounds while it runs, so that only what has changed since
//! the last one is left for the frozen time.

use std::time::{Duration, Instant};

use godwit_engine::tree;
use godwit_policy::files::pays;
use tokio::sync::mpsc;

use super::logs::Logs;
use super::pages::Names;
use super::{Source, SourceError};
use crate::link::{Link, LinkError};
use crate::message::{Message, TmpfsBegin};

/// What a name that comes or goes takes on the wire beside its content, with the work for it, bytes.
pub(super) const NAME: u64 = 512;

/// What an engine keeps of a log is as long as its user likes; so many bytes of it move.
const LATEST: u64 = 8 << 20;

/// A round that carried less shows the round trip, not the bandwidth.
const TELLING: u64 = 4 << 20;

/// The files that follow a service.
pub(super) struct Files {
    tree: tree::TreeSender,
    log: Log,
    /// Whether the destination takes the log, and further rounds, while the service runs.
    ahead: bool,
    /// What the last further round found.
    found: Option<u64>,
    rounds: u32,
    bandwidth: Option<f64>,
    comparing: Duration,
}

/// The log that follows a service.
pub(super) struct Log(Logs);

/// The result of a check of the files.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Ahead {
    /// So many bytes were sent while the service ran.
    Sent(u64),
    /// So many bytes are left for the frozen time.
    Left(u64),
}

impl Files {
    /// After the first round of the tree.
    pub(super) fn new(tree: tree::TreeSender, log: Log, ahead: bool) -> Self {
        Self { tree, log, ahead, found: None, rounds: 0, bandwidth: None, comparing: Duration::ZERO }
    }

    /// How long the last look at them took: the frozen service waits for another one, which compares them again.
    pub(super) fn comparing(&self) -> Duration {
        self.comparing
    }

    /// Bytes of files per second that the link carried, where a round has shown it.
    pub(super) fn bandwidth(&self) -> Option<f64> {
        self.bandwidth
    }

    /// For the last round: the tree, and the log.
    pub(super) fn split(self) -> (tree::TreeSender, Log) {
        (self.tree, Log(self.log.0.ending()))
    }

    /// While the service runs: sends what has changed since the last round, if that pays.
    pub(super) async fn send_ahead(self, link: &mut Link) -> Result<(Self, Ahead), SourceError> {
        let Self { tree, log, ahead, found: before, rounds, bandwidth, .. } = self;
        let looking = Instant::now();
        let (tree, log, left, round) = tokio::task::spawn_blocking(move || {
            let (left, round) = (log.0.left()?, tree.next_round(false)?);
            Ok::<_, SourceError>((tree, log, left, round))
        })
        .await??;
        let comparing = looking.elapsed();
        let changes = &round.changes;
        // What is as it was is sent again only where it changed a moment before.
        let names = changes.entries().saturating_add(changes.removals()).saturating_mul(NAME);
        let found = left.saturating_add(round.bytes).saturating_add(names);
        if !ahead || !pays(found, before, rounds) {
            let files = Self { tree, log, ahead, found: before, rounds, bandwidth, comparing };
            return Ok((files, Ahead::Left(found)));
        }
        let begun = Instant::now();
        let (log, of_log) = log.send(link).await?;
        link.send(Message::TreeAgain).await?;
        let (tree, of_tree) = send_items(link, tree, round).await?;
        match link.receive().await? {
            Message::TreeApplied => {}
            other => return Err(link.unexpected(&other, "TreeApplied").into()),
        }
        let sent = of_log + of_tree;
        let bandwidth = match sent >= TELLING {
            true => Some(sent as f64 / begun.elapsed().as_secs_f64()),
            false => bandwidth,
        };
        let (found, rounds) = (Some(found), rounds + 1);
        // The next look compares other files.
        let comparing = Duration::ZERO;
        Ok((Self { tree, log, ahead, found, rounds, bandwidth, comparing }, Ahead::Sent(sent)))
    }
}

impl Source {
    /// The log of the service: godwit's, or that of the engine which keeps it.
    pub(super) async fn logs(&self) -> Result<Logs, SourceError> {
        let of_engine = match self.service.kept {
            Some(_) => self.local.engine.log_files(&self.local.config(&self.service)).await?,
            None => None,
        };
        Ok(match of_engine {
            Some(log) => Logs::new(log.paths).of(log.entries).latest(LATEST),
            None => Logs::new(self.local.log_files(&self.service)),
        })
    }
}

impl Log {
    /// Nothing of it has been sent.
    pub(super) fn of(logs: Logs) -> Self {
        Self(logs)
    }

    /// Sends what the destination does not have of it, and says how many bytes that were.
    pub(super) async fn send(mut self, link: &Link) -> Result<(Self, u64), SourceError> {
        let (sender, node) = (link.sender(), link.node().to_owned());
        tokio::task::spawn_blocking(move || {
            let sent = self.0.send(&mut |message| Ok::<_, SourceError>(hand(&sender, &node, message)?))?;
            Ok((self, sent))
        })
        .await?
    }
}

pub(super) fn hand(sender: &mpsc::Sender<Message>, node: &str, message: Message) -> Result<(), LinkError> {
    sender.blocking_send(message).map_err(|_| LinkError::Closed(node.to_owned()))
}

/// Finds what the destination lacks of the tree.
pub(super) async fn next_round(
    tree: tree::TreeSender,
    frozen: bool,
) -> Result<(tree::TreeSender, tree::Round), SourceError> {
    Ok(tokio::task::spawn_blocking(move || tree.next_round(frozen).map(|round| (tree, round))).await??)
}

/// Sends the first round, or the last one.
pub(super) async fn send_round(
    link: &Link,
    tree: tree::TreeSender,
    round: tree::Round,
) -> Result<(tree::TreeSender, u64), SourceError> {
    link.send(Message::TreeBegin).await?;
    send_items(link, tree, round).await
}

pub(super) async fn send_items(
    link: &Link,
    mut tree: tree::TreeSender,
    round: tree::Round,
) -> Result<(tree::TreeSender, u64), SourceError> {
    let (sender, node) = (link.sender(), link.node().to_owned());
    let sent = tokio::task::spawn_blocking(move || {
        let mut bytes = 0u64;
        let sent = tree.send(round, &mut |item: tree::Item| {
            let encoded = bytes::Bytes::from(item.encode());
            bytes += encoded.len() as u64;
            hand(&sender, &node, Message::TreeItem(encoded))
        });
        sent.map(|_| (tree, bytes))
    })
    .await??;
    link.send(Message::TreeEnd).await?;
    Ok(sent)
}

/// Sends the names in a tmpfs; how many bytes they take.
pub(super) async fn send_names(link: &Link, Names { number, items }: Names) -> Result<u64, SourceError> {
    link.send(Message::TmpfsBegin(TmpfsBegin { number })).await?;
    let mut bytes = 0;
    for item in items {
        bytes += item.len() as u64;
        link.send(Message::TreeItem(item)).await?;
    }
    link.send(Message::TreeEnd).await?;
    Ok(bytes)
}
