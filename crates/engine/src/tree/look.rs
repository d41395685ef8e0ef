//! What changes in a tree while nothing of it is sent: the files that change are read, so that the next look knows which of
//! their blocks do. Nothing is written back, and nobody else notices.

use std::collections::{HashMap, HashSet};
use std::io;
use std::path::Path;

use rustix::fs::FileType;

use super::blocks::{Beginning, Blocks, Known, SMALLEST_FILE};
use super::content::{Comparing, Reader, Wanted};
use super::item::Item;
use super::send::{Round, TreeSender};
use super::snapshot::{Changes, Snapshot, has_gone};
use super::{TreeError, open_source};
use crate::beneath::{self, Root};

/// What has changed in a tree between two looks.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Looked {
    /// Bytes of content that would have to be sent; at most so many where the files were not read.
    pub bytes: u64,
    /// Names that would have to be sent or removed.
    pub names: u64,
    /// Bytes that were read.
    pub read: u64,
    /// Whether the files were read.
    pub is_read: bool,
}

impl TreeSender {
    /// As if a round had been sent and had come.
    pub(super) fn suppose(&mut self, round: Round) {
        self.last = Some(round.snapshot);
    }

    /// What a receiver would lack that has had all there was at the last look. See [`super::TreeSender::look`].
    pub(super) fn look(&mut self, most: u64, wanted: &Wanted) -> Result<Looked, TreeError> {
        let Round { snapshot, changes, bytes, .. } = self.find_round(false)?;
        let names = changes.entries().saturating_add(changes.removals());
        if bytes > most {
            return Ok(Looked { bytes, names, read: 0, is_read: false });
        }
        let mut looked = Looked { bytes, names, read: 0, is_read: true };
        if let Some(known) = &mut self.known {
            let (top, last) = (open_source(&self.root)?, self.last.as_ref());
            let mut learning = Learning { root: &self.root, top, known, last, wanted, read: 0 };
            let missing = learning.all(&snapshot, &changes)?;
            looked.read = learning.read;
            looked.bytes = changes.bytes_but_for(|path| missing.get(path).copied());
        }
        self.last = Some(snapshot);
        Ok(looked)
    }
}

/// Reads the files that have changed.
struct Learning<'a> {
    root: &'a Path,
    top: Root,
    known: &'a mut Known,
    last: Option<&'a Snapshot>,
    wanted: &'a Wanted,
    read: u64,
}

impl Learning<'_> {
    /// How many bytes of each file a receiver would lack.
    fn all(&mut self, snapshot: &Snapshot, changes: &Changes) -> Result<HashMap<Vec<u8>, u64>, TreeError> {
        let mut begun = self.known.begin(snapshot, changes);
        let mut missing = HashMap::new();
        // Of a file with several names one is read.
        let mut seen = HashSet::new();
        let large = changes.changed.iter().filter(|(_, record)| {
            let is_file = record.file_type == FileType::RegularFile;
            is_file && record.size >= SMALLEST_FILE && seen.insert(record.inode)
        });
        for (path, _) in large {
            let beginning = begun.of.remove(path).unwrap_or_default();
            match self.file(path, &beginning) {
                Ok(bytes) => drop(missing.insert(path.clone(), bytes)),
                // The next look finds that.
                Err(error) if has_gone(&error) => {}
                Err(source) => {
                    return Err(TreeError::Io {
                        root: self.root.to_owned(),
                        action: "look at".into(),
                        path: beneath::display(path),
                        source,
                    });
                }
            }
            if let Beginning::Kept(there) | Beginning::Held(_, there) = &beginning {
                self.known.release(there);
            }
        }
        Ok(missing)
    }

    /// Reads a file, remembers its blocks, and says how many bytes of it a receiver would lack.
    fn file(&mut self, path: &[u8], beginning: &Beginning) -> io::Result<u64> {
        let node = self.top.node(path)?;
        let stat = node.statx()?;
        if FileType::from_raw_mode(stat.stx_mode.into()) != FileType::RegularFile {
            return Ok(0);
        }
        let (inode, size) = (stat.stx_ino, stat.stx_size);
        let nothing = Blocks::default();
        let (there, blocks) = match beginning {
            Beginning::Kept(there) | Beginning::Held(_, there) => (there, there.again(inode, size)),
            Beginning::Empty => (&nothing, self.known.none(inode, size)),
        };
        let mut lacking = 0_u64;
        let mut comparing =
            Comparing { hash: Some(self.known.hash()), there, is_there: true, room: self.known.room() };
        let reader = Reader::open(&node, size)?.while_wanted(self.wanted);
        let learned = comparing.content(reader, blocks, &mut |item| {
            if let Item::Data(data) = item {
                lacking = lacking.saturating_add(data.bytes.len() as u64);
            }
            Ok::<_, io::Error>(())
        })?;
        if let Some(blocks) = learned {
            self.known.keep(path, blocks);
        }
        self.read = self.read.saturating_add(size);
        // A move would have known its blocks from the first round on: of those that it had, not all have changed.
        let had = self.last.and_then(|last| last.record(path)).filter(|had| had.inode == inode);
        Ok(match (beginning, had) {
            (Beginning::Empty, Some(had)) => size.saturating_sub(had.size),
            _ => lacking,
        })
    }
}
