//! How the files of a service change while it runs: looks at them and at its log, of which nothing is sent.

use std::time::{Duration, Instant};

use godwit_engine::tree::{BlockHash, Round, TreeSender, Wanted};
use godwit_memory::PAGE_SIZE;
use godwit_policy::curve::{Curve, Look};
use godwit_policy::files::Files;

use super::files::{NAME, next_round};
use super::logs::Logs;
use super::{Source, SourceError};
use crate::page_hash::PageKey;

/// When they are looked at, after the look before. The first one only learns which files change, and what is in them.
const LOOKS: [Duration; 3] =
    [Duration::from_millis(250), Duration::from_millis(250), Duration::from_millis(750)];

/// No more than this is read of the files that change, at each look, bytes.
const MOST_READ: u64 = 1 << 30;

/// Files that grow are taken to go on as they do for so long, seconds: a bound of what can change of them.
const GROWS: f64 = 3600.0;

/// The files of a service.
pub(super) struct FileLooks {
    tree: TreeSender,
    log: Logs,
}

/// What the looks have found.
#[derive(Debug)]
pub(super) struct Changing {
    looks: Vec<Look>,
    /// Bytes of all of them in the end, and by how many they have grown in the time of the looks.
    bytes: u64,
    grown: u64,
    /// How long the last look took.
    comparing: Duration,
    /// Bytes of files that change, where they are too many to be read.
    pub(super) unread: Option<u64>,
    /// Whether the looks have failed.
    is_unknown: bool,
}

impl FileLooks {
    /// Of a tree, and what it has; and a log.
    pub(super) fn new(tree: TreeSender, round: Round, log: Logs) -> Self {
        let key = PageKey::random();
        let mut tree = tree.by_blocks(BlockHash::new(move |block| key.hash_block(block)));
        tree.suppose(round);
        // All of it grows, however little of it moves.
        Self { tree, log: log.latest(u64::MAX) }
    }
}

impl Changing {
    /// Nothing is known.
    pub(super) fn unknown() -> Self {
        let comparing = Duration::ZERO;
        Self { looks: Vec::new(), bytes: 0, grown: 0, comparing, unread: None, is_unknown: true }
    }

    /// As a move meets them that has `first` to send before all else, in bytes.
    pub(super) fn files(&self, first: u64) -> Files {
        let time: Duration = self.looks.iter().map(|look| look.time).sum();
        let later = Duration::from_secs_f64(GROWS).div_duration_f64(time.max(Duration::from_millis(1)));
        let most = self.bytes as f64 + self.grown as f64 * later;
        Files { bytes: first, writes: Curve::fit(&self.looks, pages(most)), comparing: self.comparing }
    }

    /// Bytes that change in a second.
    pub(super) fn bytes_per_second(&self) -> Option<f64> {
        let is_known = self.unread.is_none() && !self.is_unknown;
        is_known.then(|| self.files(0).writes.bytes_per_second())
    }
}

impl Source {
    /// All files that move with the service.
    pub(super) async fn file_looks(&self) -> Result<(TreeSender, Round), SourceError> {
        next_round(self.tree().await?, false).await
    }

    /// Looks at them again and again.
    pub(super) async fn changing(&self, files: FileLooks) -> Result<Changing, SourceError> {
        let FileLooks { mut tree, mut log } = files;
        let mut changing = Changing { is_unknown: false, ..Changing::unknown() };
        let (mut before, mut looked) = (None::<(u64, u64)>, Instant::now());
        for time in LOOKS {
            tokio::time::sleep(time).await;
            let begun = Instant::now();
            let looking = self.jobs.run(move |wanted| {
                let wanted = Wanted::new(move || wanted.is());
                let found = tree.look(MOST_READ, &wanted)?;
                let comparing = begun.elapsed();
                let of_log = log.left()?;
                Ok::<_, SourceError>((tree, log, (found, comparing, of_log)))
            });
            let (found, of_log);
            (tree, log, (found, changing.comparing, of_log)) = looking.await??;
            if !found.is_read {
                changing.unread = Some(found.bytes);
                changing.looks.clear();
                break;
            }
            let size = tree.there().1.saturating_add(of_log);
            if let Some((size_before, log_before)) = before.replace((size, of_log)) {
                // A log that was rotated has grown, too, and it is not known how much.
                let log = of_log.saturating_sub(log_before);
                let names = found.names.saturating_mul(NAME);
                let bytes = found.bytes.saturating_add(log).saturating_add(names);
                changing.looks.push(Look { pages: bytes.div_ceil(PAGE_SIZE), time: begun - looked });
                changing.grown = changing.grown.saturating_add(size.saturating_sub(size_before));
            }
            changing.bytes = size;
            looked = begun;
        }
        Ok(changing)
    }
}

#[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss)] // as many as there can be, at most
fn pages(bytes: f64) -> u64 {
    (bytes / PAGE_SIZE as f64).ceil() as u64
}
