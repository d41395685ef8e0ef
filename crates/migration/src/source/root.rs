//! Second: what the service's root filesystem is made of, layers and changed files, and its log.

use std::time::Instant;

use super::files::{Files, Log};
use super::plan::Plan;
use super::recorder::Recorder;
use super::reserve::{Agreed, Reserved};
use super::{Source, SourceError};
use crate::link::Link;
use crate::message::Message;
use crate::page_hash::EarlierVisit;
use crate::report::{Report, ms_since};

/// What a layer or log is cut into on the wire.
pub(super) const CHUNK: usize = 256 * 1024;

/// A service whose files are at the destination, as they were shortly before.
pub(super) struct Prepared {
    pub(super) agreed: Agreed,
    pub(super) plan: Plan,
    pub(super) visit: EarlierVisit,
    pub(super) files: Files,
}

impl Source {
    /// Sends layers, changed files and the log.
    pub(super) async fn send_root(
        &self,
        link: &mut Link,
        recorder: &mut Recorder,
        reserved: Reserved,
    ) -> Result<Prepared, SourceError> {
        let Reserved { agreed, plan, visit, layers, tree, first, ahead, accepted, marks } = reserved;
        let report = &mut recorder.report;
        let sending = Instant::now();
        let total = layers.bytes() + first.changes.bytes();
        self.step("layers", 0, total);
        self.send_layers(link, layers, total, report).await?;
        self.step("files", report.pre_dump_bytes, total);
        let (tree, sent) = match ahead {
            Some(lent) => self.send_onto(link, lent, report).await?,
            None => self.send_onto_told(link, (tree, first), &accepted, report).await?,
        };
        count(report, sent);
        match link.receive().await? {
            Message::TreeApplied => {}
            other => return Err(link.unexpected(&other, "TreeApplied").into()),
        }
        drop(marks);
        let mut log = Log::of(self.logs().await?);
        if agreed.ahead {
            let sent;
            (log, sent) = log.send(link).await?;
            count(report, sent);
        }
        report.pre_dump_transfer_ms = ms_since(sending);
        Ok(Prepared { agreed, plan, visit, files: Files::new(tree, log, agreed.ahead) })
    }
}

/// Files and log that were sent while the service ran.
pub(super) fn count(report: &mut Report, bytes: u64) {
    report.pre_dump_bytes += bytes;
    report.file_bytes += bytes;
}
