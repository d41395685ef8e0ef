//! Changed files and volumes on their way ahead of a move, and what of them a move need not send.

use bytes::Bytes;
use godwit_engine::tree::{BlockHash, Item, Listed, Listing, Round, TreeSender, Wanted};

use super::files::{hand, send_items, send_round};
use super::pace::Pacer;
use super::{Source, SourceError};
use crate::ahead::{Lent, MOST_NAMES, MOST_PATH_BYTES, MOST_TOKEN};
use crate::link::{Link, LinkError};
use crate::message::{Accepted, FilesHere, FilesKept, Message};
use crate::page_hash::PageKey;
use crate::report::Report;

/// The files of a service as they are found before the destination is asked.
pub(super) enum Found {
    /// For a destination that has nothing.
    Files(Box<(TreeSender, Round)>),
    /// They cross with the move, for this reason, a sentence.
    Stay(String),
}

impl Found {
    /// Bytes that they have, and names.
    pub(super) fn size(&self) -> (u64, u64) {
        match self {
            Self::Files(files) => (files.1.changes.bytes(), files.1.changes.entries()),
            Self::Stay(_) => (0, 0),
        }
    }
}

impl Source {
    /// Finds the files that a preparation sends ahead.
    pub(super) async fn find_files(&self) -> Result<Found, SourceError> {
        let key = PageKey::random();
        let tree = self.tree().await?;
        let tree = tree.by_blocks(BlockHash::new(move |block| key.hash_block(block))).lasting(true);
        let finding = self.jobs.run(move |_| tree.find_round(false).map(|first| (tree, first)));
        let (tree, first) = finding.await??;
        let (names, bytes) = (first.changes.entries(), first.changes.path_bytes());
        Ok(match names > MOST_NAMES || bytes > MOST_PATH_BYTES {
            true => Found::Stay(format!(
                "it has {names} names, and {MOST_NAMES} with {} MiB in all are sent ahead at most",
                MOST_PATH_BYTES >> 20
            )),
            false => Found::Files(Box::new((tree, first))),
        })
    }

    /// Sends what the destination lacks of them, or says in the report why they stay.
    pub(super) async fn send_files_ahead(
        &self,
        link: &mut Link,
        found: Found,
        accepted: &Accepted,
        report: &mut Report,
    ) -> Result<(), SourceError> {
        let (tree, first) = match found {
            Found::Stay(why) => {
                report.files_stay = why;
                return Ok(());
            }
            Found::Files(_) if !accepted.takes_files => {
                report.files_stay = match accepted.no_files.as_str() {
                    "" => {
                        let (godwit, node) = (self.godwit_there(), &self.destination);
                        format!("the {godwit} of node {node} is too old to take them: upgrade it")
                    }
                    why => why.to_owned(),
                };
                return Ok(());
            }
            Found::Files(files) => *files,
        };
        let (mut lent, round, onto) = match self.lent(&accepted.files, &tree) {
            Some(lent) => self.find_lacking(lent, false).await.map(|(lent, round)| (lent, round, true))?,
            None => {
                let (tree, first, onto) = match self.learn_files(link, accepted).await? {
                    Some(there) => {
                        let (tree, first) = self.find_onto(tree, there).await?;
                        (tree, first, true)
                    }
                    None => (tree, first, false),
                };
                (self.local.sent_files.begin(&self.service, &self.destination, tree), first, onto)
            }
        };
        let total = report.pre_dump_bytes.saturating_add(round.bytes);
        self.step("files", report.pre_dump_bytes, total);
        link.send(if onto { Message::TreeOnto } else { Message::TreeBegin }).await?;
        let (sender, node) = (link.sender(), link.node().to_owned());
        let (progress, pacer) = (self.progress.clone(), Pacer::new(self.options.max_bandwidth));
        let sending = self.jobs.run(move |wanted| {
            let mut bytes = 0_u64;
            lent.send(round, &mut |item: Item| {
                let encoded = Bytes::from(item.encode());
                let length = encoded.len() as u64;
                pacer.wait(length);
                if !wanted.is() {
                    return Err(SourceError::Cancelled);
                }
                bytes += length;
                progress.send_modify(|progress| progress.bytes_done += length);
                Ok(hand(&sender, &node, Message::TreeItem(encoded))?)
            })
            .map(|()| (lent, bytes))
        });
        let (mut lent, sent) = sending.await??;
        super::root::count(report, sent);
        link.send(Message::TreeEnd).await?;
        match link.receive().await? {
            Message::FilesKept(FilesKept { token, bytes }) if token.len() <= MOST_TOKEN => {
                lent.settle(token.to_vec());
                report.retained_file_bytes = bytes;
                Ok(())
            }
            Message::Refused(refused) => {
                Err(SourceError::Refused { node: self.destination.clone(), reasons: refused.reasons })
            }
            other => Err(link.unexpected(&other, "FilesKept").into()),
        }
    }

    /// What the destination says that it has of the service's files, if this node has sent them.
    pub(super) fn lent(&self, token: &[u8], of: &TreeSender) -> Option<Lent> {
        self.local.sent_files.lend(&self.service, &self.destination, token, of)
    }

    /// Finds what the destination lacks, and how much of it where that is asked for.
    pub(super) async fn find_lacking(&self, lent: Lent, counts: bool) -> Result<(Lent, Round), SourceError> {
        let finding = self.jobs.run(move |_| lent.find(counts).map(|round| (lent, round)));
        Ok(finding.await??)
    }

    /// What the destination has of its files of which this node does not know, if there is any.
    async fn learn_files(
        &self,
        link: &mut Link,
        accepted: &Accepted,
    ) -> Result<Option<Listing>, SourceError> {
        if accepted.files.is_empty() || !accepted.tells_files {
            return Ok(None);
        }
        let wrong =
            |wanted| LinkError::Unexpected { node: self.destination.clone(), got: "something else", wanted };
        link.send(Message::TellFiles).await?;
        let key = match link.receive().await? {
            Message::FilesHere(FilesHere { key }) => {
                PageKey::told(&key).ok_or_else(|| wrong("the key of the files' hashes"))?
            }
            other => return Err(link.unexpected(&other, "FilesHere").into()),
        };
        let hash = BlockHash::new(move |block| key.hash_block(block));
        let wanted = self.jobs.wanted();
        let wanted = Wanted::new(move || wanted.is());
        let mut listing = Listing::new(hash, wanted, (MOST_NAMES, MOST_PATH_BYTES));
        loop {
            match link.receive().await? {
                Message::FileHere(listed) => {
                    let listed = Listed::decode(&listed).map_err(|_| wrong("a file that is there"))?;
                    listing.add(listed).map_err(wrong)?;
                }
                Message::FilesHereEnd => return Ok(Some(listing)),
                other => return Err(link.unexpected(&other, "FileHere").into()),
            }
        }
    }

    /// Finds what differs from what the destination has.
    async fn find_onto(&self, tree: TreeSender, there: Listing) -> Result<(TreeSender, Round), SourceError> {
        let tree = tree.onto(there);
        let finding = self.jobs.run(move |_| tree.find_round(false).map(|round| (tree, round)));
        Ok(finding.await??)
    }

    /// In a move: sends what differs from files that the destination has, and of which this node does not know. None where it
    /// has none. How many bytes.
    pub(super) async fn send_onto_told(
        &self,
        link: &mut Link,
        (tree, first): (TreeSender, Round),
        accepted: &Accepted,
        report: &mut Report,
    ) -> Result<(TreeSender, u64), SourceError> {
        let Some(there) = self.learn_files(link, accepted).await? else {
            return send_round(link, tree, first).await;
        };
        // Whatever the other node says: no more than there is.
        report.retained_file_bytes = there.bytes().min(first.changes.bytes());
        let (tree, round) = self.find_onto(tree, there).await?;
        link.send(Message::TreeOnto).await?;
        send_items(link, tree, round).await
    }

    /// In a move: sends what differs from what was sent ahead, and the destination begins with that. How many bytes.
    pub(super) async fn send_onto(
        &self,
        link: &Link,
        lent: Lent,
        report: &mut Report,
    ) -> Result<(TreeSender, u64), SourceError> {
        report.retained_file_bytes = lent.there().1;
        let (lent, round) = self.find_lacking(lent, false).await?;
        link.send(Message::TreeOnto).await?;
        send_items(link, lent.moves(), round).await
    }
}
