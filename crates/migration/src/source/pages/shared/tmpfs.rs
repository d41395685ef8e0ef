//! Files of a tmpfs at the source: the large ones are segments. Their names, and all else that is in it, cross while the
//! service is frozen ([`Names`]): what is created, renamed and removed before needs no care.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::os::fd::AsRawFd;
use std::path::PathBuf;

use bytes::Bytes;
use godwit_engine::{Tmpfs, tree};
use godwit_memory::shared::Segment;

use super::{Changed, Identity, MOST, Shared, identity};
use crate::message::MOST_TMPFS_NAMES;

/// Smaller files of a tmpfs cross with its names.
const LEAST_FILE: u64 = 64 << 10;

/// Most bytes of smaller files, or of those that are too many: a tmpfs with more is left to CRIU, which has them charged
/// to the service.
const MOST_IN_SMALL: u64 = 4 << 20;

/// Most bytes of all paths in a tmpfs.
const MOST_IN_PATHS: u64 = 16 << 20;

/// Most files of tmpfs among the segments: other segments come first, as only they are left to CRIU otherwise.
const MOST_FILES: usize = MOST / 2;

/// A tmpfs that is followed.
#[derive(Debug)]
pub(super) struct FollowedTmpfs {
    pub(super) tmpfs: Tmpfs,
    /// Its names, once the service is frozen.
    pub(super) items: Vec<Bytes>,
}

/// The names in a tmpfs that is followed.
#[derive(Debug)]
pub(crate) struct Names {
    /// The tmpfs's number.
    pub(crate) number: u32,
    /// Encoded items of a tree.
    pub(crate) items: Vec<Bytes>,
}

impl Shared {
    /// Follows these tmpfs. As long as the service runs, others stay that were followed: what is in the way now may be over
    /// by the freeze. One that cannot be followed is left to CRIU.
    pub(super) fn follow_tmpfs(&mut self, all: Vec<Tmpfs>, frozen: bool) -> Changed {
        let (mut looked, mut found) = (Vec::new(), BTreeMap::new());
        for tmpfs in all {
            match look_into(&tmpfs, frozen, &mut found) {
                Ok(Some(snapshot)) => looked.push((tmpfs, snapshot)),
                Ok(None) => {
                    tracing::debug!(target = %tmpfs.external.0, "a tmpfs with so many names is left to CRIU")
                }
                Err(error) => left_to_criu(&tmpfs, &error),
            }
        }
        let numbers: BTreeSet<_> = looked.iter().map(|(tmpfs, _)| tmpfs.number).collect();
        let mut before = std::mem::take(&mut self.tmpfs);
        // However it was before, it is as it is when the service is frozen.
        before.retain(|_| !frozen);
        let known: BTreeSet<_> = before.iter().map(|followed| followed.tmpfs.number).collect();
        before.retain(|followed| !numbers.contains(&followed.tmpfs.number));
        self.unfit = before.iter().map(|followed| followed.tmpfs.number).collect();
        let mut changed = self.keep(|followed| {
            let Some(number) = followed.segment.kind().tmpfs() else { return true };
            if !numbers.contains(&number) {
                return known.contains(&number);
            }
            match found.remove(&identity(&followed.segment)) {
                Some(now) => {
                    followed.is_now(now);
                    true
                }
                // It was perhaps renamed while the names were read.
                None => !frozen && followed.segment.is_as_it_was(),
            }
        });
        let files = self.segments.values().filter(|followed| followed.is_in_tmpfs()).count();
        self.begin(found, self.segments.len() + MOST_FILES.saturating_sub(files));
        self.tmpfs = before;
        let mut left = BTreeSet::new();
        for (tmpfs, snapshot) in looked {
            let elsewhere = self.elsewhere(tmpfs.number);
            let is_too_much = snapshot.bytes_without(&elsewhere) > MOST_IN_SMALL;
            let names = match is_too_much && !known.contains(&tmpfs.number) {
                true => Err(io::Error::other("it has too much in files that are not followed")),
                false if frozen => names(&snapshot, &elsewhere).map_err(io::Error::other),
                false => Ok(Vec::new()),
            };
            match names {
                Ok(items) => self.tmpfs.push(FollowedTmpfs { tmpfs, items }),
                Err(error) => {
                    left_to_criu(&tmpfs, &error);
                    left.insert(tmpfs.number);
                }
            }
        }
        let more = self
            .keep(|followed| followed.segment.kind().tmpfs().is_none_or(|number| !left.contains(&number)));
        changed.gone.extend(more.gone);
        changed.resized.retain(|(space, _)| self.segments.contains_key(space));
        changed
    }

    /// The files of a tmpfs that are followed.
    fn elsewhere(&self, number: u32) -> tree::Elsewhere {
        let of = self.segments.iter().filter(|(_, of)| of.segment.kind().tmpfs() == Some(number));
        of.map(|(space, followed)| (followed.segment.inode(), *space)).collect()
    }
}

/// Looks at all names of a tmpfs, and finds its large files. None if there are too many names.
fn look_into(
    tmpfs: &Tmpfs,
    frozen: bool,
    found: &mut BTreeMap<Identity, Segment>,
) -> io::Result<Option<tree::Snapshot>> {
    let root = PathBuf::from(format!("/proc/self/fd/{}", tmpfs.root.as_raw_fd()));
    let snapshot = tree::Snapshot::scan_at_most(&root, frozen, MOST_TMPFS_NAMES, MOST_IN_PATHS);
    let Some(snapshot) = snapshot.map_err(io::Error::other)? else { return Ok(None) };
    let mut segments = Vec::new();
    for file in snapshot.large_files(LEAST_FILE, MOST_FILES).map_err(io::Error::other)? {
        let segment = Segment::of_tmpfs(tmpfs.number, &tmpfs.root, &file)?;
        segments.extend(segment.map(|segment| (identity(&segment), segment)));
    }
    found.extend(segments);
    Ok(Some(snapshot))
}

/// The names of a tmpfs that nobody changes, with the content of files that is not elsewhere.
fn names(snapshot: &tree::Snapshot, elsewhere: &tree::Elsewhere) -> Result<Vec<Bytes>, tree::TreeError> {
    let mut items = Vec::new();
    tree::send_without(snapshot.root(), &snapshot.everything(), elsewhere, &mut |item: tree::Item| {
        items.push(item.encode().into());
        Ok::<_, io::Error>(())
    })?;
    Ok(items)
}

fn left_to_criu(tmpfs: &Tmpfs, error: &io::Error) {
    tracing::debug!(target = %tmpfs.external.0, error = %crate::error_chain(error), "a tmpfs is left to CRIU");
}
