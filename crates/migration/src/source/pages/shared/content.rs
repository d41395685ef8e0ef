//! The pages of segments: which differ from what was sent last, and sending them.

use std::io;
use std::sync::Arc;

use godwit_memory::batch::{Builder, is_zero};
use godwit_memory::shared::{Kind, Segment};
use godwit_memory::{PAGE_SIZE, Range, Space};

use super::super::stream::{Sending, Stream};
use super::super::{PAGE, PagesError};
use super::{Followed, PIECE};
use crate::page_hash::{PageKey, ZERO};

/// What is to be compared of a segment.
pub(super) struct Compared {
    pub(super) space: Space,
    pub(super) segment: Arc<Segment>,
    pub(super) ranges: Vec<Range>,
    /// Whether it is passed over if it cannot be read.
    pub(super) gives_up: bool,
}

impl Compared {
    /// The pages of a stream whose content is another than what it sent last.
    pub(super) fn differing(
        &self,
        stream: &Stream,
        (index, count): (usize, usize),
        key: &PageKey,
        buffer: &mut [u8],
    ) -> io::Result<Vec<Range>> {
        let mut differing: Vec<Range> = Vec::new();
        for range in self.ranges.iter().flat_map(|range| super::super::stream::shares(range, index, count)) {
            for start in (range.start..range.end).step_by(PIECE) {
                let length = usize::try_from(range.end - start).unwrap_or(PIECE).min(PIECE);
                let piece = &mut buffer[..length];
                self.segment.read(start, piece)?;
                for (address, content) in (start..).step_by(PAGE).zip(piece.as_chunks::<PAGE>().0) {
                    if stream.sent(self.space, address) == hash(key, self.segment.kind(), content) {
                        continue;
                    }
                    match differing.last_mut() {
                        Some(Range { end, .. }) if *end == address => *end += PAGE_SIZE,
                        _ => differing.push(address..address + PAGE_SIZE),
                    }
                }
            }
        }
        Ok(differing)
    }
}

/// The hash of a page of a segment. What the destination has nothing of is zero, unless a file's page may lie beneath.
fn hash(key: &PageKey, kind: &Kind, content: &[u8; PAGE]) -> u128 {
    match kind {
        Kind::Copied { .. } => key.hash(content),
        _ if is_zero(content) => ZERO,
        _ => key.hash(content),
    }
}

impl Sending<'_> {
    /// Sends what of a segment is this stream's. Its pages are announced to nobody, and always go whole.
    pub(in super::super) fn shared(&mut self, space: Space, followed: &Followed) -> Result<(), PagesError> {
        let mut batch = Builder::with(space, self.pool());
        for range in followed.zero.iter() {
            for piece in self.mine(range) {
                self.forget(space, &piece);
                batch.zero(&piece);
                if batch.is_full() {
                    self.ship(&mut batch)?;
                }
            }
        }
        let mut buffer = vec![0; PIECE];
        for range in followed.data.iter() {
            for range in self.mine(range) {
                for start in (range.start..range.end).step_by(PIECE) {
                    let length = usize::try_from(range.end - start).unwrap_or(PIECE).min(PIECE);
                    let piece = &mut buffer[..length];
                    match followed.segment.read(start, piece) {
                        // The next look tells whether it has gone. What is not sent differs then, too.
                        Err(_) if followed.may_be_gone() && !self.all => {
                            break;
                        }
                        read => read.map_err(|source| PagesError::Shared { action: "read", source })?,
                    }
                    for (address, content) in (start..).step_by(PAGE).zip(piece.as_chunks::<PAGE>().0) {
                        // Of what goes, whatever it was at the scan.
                        let hash = hash(self.key, followed.segment.kind(), content);
                        self.note(space, address, hash);
                        self.sent.pages += 1;
                        self.sent.found += u64::from(hash != ZERO);
                        self.sent.shared += u64::from(!followed.is_copied());
                        match followed.is_copied() {
                            true => batch.whole_page(address, content),
                            false => batch.page(address, content),
                        }
                        if batch.is_full() {
                            self.ship(&mut batch)?;
                        }
                    }
                }
            }
        }
        if batch.is_empty() { Ok(()) } else { self.ship(&mut batch) }
    }
}
