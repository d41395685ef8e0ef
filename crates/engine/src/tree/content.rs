//! Reads the content of a file in pieces, and finds what of it a receiver lacks: data, and holes where it has data.

use std::fmt;
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::sync::Arc;

use rustix::fs::{CWD, Mode, OFlags, SeekFrom};
use rustix::io::Errno;

use super::blocks::{BlockHash, Blocks, HOLE, PIECE};
use super::item::{Data, Hole, Item};
use crate::beneath::Node;

/// Compares a file with what the receiver has of it.
pub(super) struct Comparing<'a> {
    /// None where nothing is remembered.
    pub(super) hash: Option<&'a BlockHash>,
    pub(super) there: &'a Blocks,
    /// Whether the file begins with that, and not with holes.
    pub(super) is_there: bool,
    /// Memory for what is learned of the file, bytes.
    pub(super) room: u64,
}

impl Comparing<'_> {
    /// Hands on what the receiver lacks. The blocks that it has then, if all of `blocks` are known: none of a file that has
    /// shrunk meanwhile, which ends early, and none that needs more memory than there is.
    pub(super) fn content<E: From<io::Error>>(
        &mut self,
        mut reader: Reader,
        mut blocks: Blocks,
        sink: &mut impl FnMut(Item) -> Result<(), E>,
    ) -> Result<Option<Blocks>, E> {
        let mut next = 0;
        loop {
            let with_data = reader.next_piece(next)?;
            let Some(number) = with_data.into_iter().chain(self.there.next_piece(next)).min() else { break };
            if number.saturating_mul(PIECE) >= blocks.size() {
                break;
            }
            next = number + 1;
            let piece = reader.read(number)?;
            let mut hashes: Vec<u128> = Vec::new();
            let mut differ: Vec<(u64, u64)> = Vec::new();
            for (offset, length) in blocks.of_piece(number) {
                let hash = match (piece.bytes(offset, length), self.hash) {
                    (None, _) => HOLE,
                    (Some(bytes), Some(hash)) => hash.of(bytes),
                    // It is compared with nothing.
                    (Some(_), None) => HOLE + 1,
                };
                hashes.push(hash);
                match differ.last_mut() {
                    _ if self.there.has((offset, length), hash) => {}
                    Some((_, end)) if *end == offset => *end += length,
                    _ => differ.push((offset, offset + length)),
                }
            }
            for item in differ.into_iter().flat_map(|range| piece.items(range)) {
                if self.is_there || matches!(item, Item::Data(_)) {
                    sink(item)?;
                }
            }
            if piece.ends_early {
                return Ok(None);
            }
            if self.room > 0 && hashes.iter().any(|hash| *hash != HOLE) {
                self.room = self.room.saturating_sub(blocks.learn(number, hashes));
                if self.room == 0 {
                    // It will be known no more: what was learned needs not be kept either.
                    blocks = blocks.again(0, blocks.size());
                }
            }
        }
        Ok((self.room > 0).then_some(blocks))
    }
}

/// Reads a file piece by piece.
pub(super) struct Reader {
    file: File,
    size: u64,
    /// The range with data that was found last, and from where on it is the next one.
    data: Option<(u64, (u64, u64))>,
    wanted: Option<Wanted>,
}

/// Whether somebody still waits for what is read.
#[derive(Clone)]
pub struct Wanted(Arc<dyn Fn() -> bool + Send + Sync>);

impl Wanted {
    /// As long as this says so.
    pub fn new(wanted: impl Fn() -> bool + Send + Sync + 'static) -> Self {
        Self(Arc::new(wanted))
    }

    pub(super) fn check(&self) -> io::Result<()> {
        if (self.0)() { Ok(()) } else { Err(io::Error::other("nobody waits for it any more")) }
    }
}

impl fmt::Debug for Wanted {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Wanted")
    }
}

/// Opens a regular file. Whatever has come to be in its place does not keep the caller waiting.
pub(super) fn open(node: &Node) -> io::Result<File> {
    let flags = OFlags::RDONLY | OFlags::NOATIME | OFlags::NONBLOCK | OFlags::CLOEXEC;
    Ok(File::from(rustix::fs::openat(CWD, node.magic(), flags, Mode::empty())?))
}

/// A part of a file, with its data and its holes.
struct FilePiece {
    start: u64,
    buffer: Vec<u8>,
    /// Ranges with data, by their offsets in the file.
    data: Vec<(u64, u64)>,
    /// Whether the file has shrunk below the end of its data.
    ends_early: bool,
}

impl Reader {
    /// Opens a file, of which there are so many bytes to read.
    pub(super) fn open(node: &Node, size: u64) -> io::Result<Self> {
        Ok(Self { file: open(node)?, size, data: None, wanted: None })
    }

    /// It ends with an error once it is not wanted any more.
    pub(super) fn while_wanted(self, wanted: &Wanted) -> Self {
        Self { wanted: Some(wanted.clone()), ..self }
    }

    pub(super) fn file(&self) -> &File {
        &self.file
    }

    fn next_data(&mut self, position: u64) -> io::Result<Option<(u64, u64)>> {
        match self.data {
            Some((from, (start, end))) if from <= position && position < end => {
                return Ok(Some((start.max(position), end)));
            }
            _ => {}
        }
        let found = next_data(&self.file, position, self.size)?;
        self.data = found.map(|range| (position, range));
        Ok(found)
    }

    /// The number of the first piece with data from this one on.
    fn next_piece(&mut self, from: u64) -> io::Result<Option<u64>> {
        let position = from.saturating_mul(PIECE);
        if position >= self.size {
            return Ok(None);
        }
        Ok(self.next_data(position)?.map(|(start, _)| start / PIECE))
    }

    fn read(&mut self, number: u64) -> io::Result<FilePiece> {
        self.wanted.as_ref().map_or(Ok(()), Wanted::check)?;
        let start = number * PIECE;
        let end = self.size.min(start + PIECE);
        let length = usize::try_from(end - start).unwrap_or_default();
        let mut piece = FilePiece { start, buffer: vec![0; length], data: Vec::new(), ends_early: false };
        let mut position = start;
        while position < end && !piece.ends_early {
            let Some((from, to)) = self.next_data(position)?.filter(|(from, _)| *from < end) else { break };
            let to = to.min(end);
            let mut filled = from;
            while filled < to {
                let [first, last] = [filled, to].map(|at| usize::try_from(at - start).unwrap_or(length));
                match self.file.read_at(&mut piece.buffer[first..last], filled)? {
                    0 => {
                        piece.ends_early = true;
                        break;
                    }
                    read => filled += read as u64,
                }
            }
            if from < filled {
                piece.data.push((from, filled));
            }
            position = to;
        }
        Ok(piece)
    }
}

impl FilePiece {
    /// What is there, if it is not a hole.
    fn bytes(&self, offset: u64, length: u64) -> Option<&[u8]> {
        let is_data = self.data.iter().any(|(start, end)| *start < offset + length && offset < *end);
        is_data.then(|| self.range(offset, offset + length))
    }

    fn range(&self, start: u64, end: u64) -> &[u8] {
        let [first, last] =
            [start, end].map(|at| usize::try_from(at - self.start).unwrap_or(self.buffer.len()));
        &self.buffer[first..last]
    }

    /// A range as data and holes.
    fn items(&self, (start, end): (u64, u64)) -> Vec<Item> {
        let mut items = Vec::new();
        let mut position = start;
        let hole = |offset, end| Item::Hole(Hole { offset, length: end - offset });
        for (from, to) in &self.data {
            let (from, to) = ((*from).max(position), (*to).min(end));
            if from >= to {
                continue;
            }
            if position < from {
                items.push(hole(position, from));
            }
            items.push(Item::Data(Data { offset: from, bytes: self.range(from, to).to_vec() }));
            position = to;
        }
        if position < end {
            items.push(hole(position, end));
        }
        items
    }
}

/// The next range with data at or after `position` and below `size`.
pub(super) fn next_data(file: &File, position: u64, size: u64) -> io::Result<Option<(u64, u64)>> {
    let start = match rustix::fs::seek(file, SeekFrom::Data(position)) {
        Ok(start) => start,
        Err(Errno::NXIO) => return Ok(None),
        // A filesystem that knows no holes.
        Err(Errno::INVAL | Errno::OPNOTSUPP) => return Ok(Some((position, size))),
        Err(error) => return Err(error.into()),
    };
    let end = match rustix::fs::seek(file, SeekFrom::Hole(start)) {
        Ok(end) => end,
        Err(Errno::NXIO) => return Ok(None),
        Err(error) => return Err(error.into()),
    };
    Ok((start < size).then_some((start, end.min(size))))
}
