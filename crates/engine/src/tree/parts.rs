//! A tree that is sent in rounds, and that may be of several directories here: at the receiver it is one.
//!
//! A hard link between two of the directories becomes two files.

use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::path::{Path, PathBuf};

use rustix::fs::{AtFlags, StatxFlags, statx};

use super::item::{End, Entry, Item, Kind, Remove};
use super::send::{self, Sent};
use super::{BlockHash, Listing, Looked, TreeError, Wanted};

/// The mode of a directory that is in none of those here.
const MADE_MODE: u32 = 0o755;

/// A tree that is sent in rounds: keeps what the receiver has.
#[derive(Debug)]
pub struct TreeSender {
    /// Directories that the receiver is to make before all else, parents first.
    made: Vec<Vec<u8>>,
    /// What the receiver is to remove before that.
    strays: Vec<Vec<u8>>,
    parts: Vec<Part>,
    /// Whether the receiver has a whole round.
    settled: bool,
}

/// A directory of this node.
#[derive(Debug)]
struct Part {
    /// Its path in the tree.
    at: Vec<u8>,
    /// Its path here, for people.
    root: PathBuf,
    place: Place,
    sender: send::TreeSender,
    /// Whether its part of a round has been begun that may not have come.
    sends: bool,
}

/// How it is found.
#[derive(Debug)]
enum Place {
    /// By its path.
    Path,
    /// It is open, whatever is at its path by now.
    Open(OwnedFd),
    /// It was open, and was this.
    Closed(Option<Identity>),
}

/// What tells a directory from all others, as far as they are there at the same time: its filesystem, its inode, and when that
/// was made, where the filesystem knows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Identity {
    device: (u32, u32),
    inode: u64,
    born: Option<(i64, u32)>,
}

impl Place {
    /// What it is; none where it cannot be told.
    fn identity(&self) -> Option<Identity> {
        match self {
            Self::Path => None,
            Self::Closed(identity) => *identity,
            Self::Open(opened) => {
                let wanted = StatxFlags::INO | StatxFlags::BTIME;
                let stat = statx(opened, "", AtFlags::EMPTY_PATH, wanted).ok()?;
                let knows = StatxFlags::from_bits_retain(stat.stx_mask).contains(StatxFlags::BTIME);
                Some(Identity {
                    device: (stat.stx_dev_major, stat.stx_dev_minor),
                    inode: stat.stx_ino,
                    born: knows.then_some((stat.stx_btime.tv_sec, stat.stx_btime.tv_nsec)),
                })
            }
        }
    }
}

/// A round that is known but not sent.
#[derive(Debug)]
pub struct Round {
    rounds: Vec<send::Round>,
    /// What will be sent.
    pub changes: Counts,
    /// How many bytes of content the receiver lacks; of a frozen tree at most so many.
    pub bytes: u64,
}

/// How much a round is.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Counts {
    entries: u64,
    removals: u64,
    bytes: u64,
    path_bytes: u64,
}

impl Counts {
    /// How many paths are new or changed.
    #[must_use]
    pub fn entries(self) -> u64 {
        self.entries
    }

    /// How many paths are gone, those below a directory that is gone not counted.
    #[must_use]
    pub fn removals(self) -> u64 {
        self.removals
    }

    /// Bytes of the paths that are new or changed.
    #[must_use]
    pub fn path_bytes(self) -> u64 {
        self.path_bytes
    }

    /// Whether there is nothing to send.
    #[must_use]
    pub fn is_empty(self) -> bool {
        self.entries == 0 && self.removals == 0
    }

    /// Bytes that the files to be sent have on disk; see [`super::Changes::bytes`].
    #[must_use]
    pub fn bytes(self) -> u64 {
        self.bytes
    }
}

impl TreeSender {
    /// The tree below `root`, for a receiver that has nothing of it.
    #[must_use]
    pub fn new(root: &Path) -> Self {
        Self::of(vec![Part::new(Vec::new(), root)])
    }

    /// A tree of what is [made](Self::make) and [put](Self::put) into it. Its root, the empty path, is to be made first.
    #[must_use]
    pub fn of_parts() -> Self {
        Self::of(Vec::new())
    }

    fn of(parts: Vec<Part>) -> Self {
        Self { made: Vec::new(), strays: Vec::new(), parts, settled: false }
    }

    /// Makes a directory at this path in the tree, where nothing else is. Its parent is there.
    #[must_use]
    pub fn make(mut self, path: &str) -> Self {
        self.made.push(path.as_bytes().to_vec());
        self
    }

    /// Puts what is below `root` at this path in the tree, whose parent is there.
    #[must_use]
    pub fn put(mut self, at: &str, root: &Path) -> Self {
        self.parts.push(Part::new(at.as_bytes().to_vec(), root));
        self
    }

    /// The same of a directory that is open, whatever is at its path later. `path` is for people.
    #[must_use]
    pub fn put_open(mut self, at: &str, path: &Path, opened: OwnedFd) -> Self {
        let part = Part::new(at.as_bytes().to_vec(), &magic(&opened));
        self.parts.push(Part { root: path.to_owned(), place: Place::Open(opened), ..part });
        self
    }

    /// Sends only the blocks of files that differ from what the receiver has, from the second round on. For a receiver that
    /// takes [`super::Hold`], [`super::Hole`], and files that begin with what was there.
    #[must_use]
    pub fn by_blocks(self, hash: BlockHash) -> Self {
        let of_part = |part: Part| Part { sender: part.sender.by_blocks(hash.clone()), ..part };
        Self { parts: self.parts.into_iter().map(of_part).collect(), ..self }
    }

    /// For a receiver that says what it has: sends what differs from that, and of large files only blocks that do. In place of
    /// [`Self::by_blocks`].
    #[must_use]
    pub fn onto(self, listing: Listing) -> Self {
        let at: Vec<_> = self.parts.iter().map(|part| part.at.as_slice()).collect();
        let (split, strays) = listing.split(&at, &self.made);
        let with = |(part, listing): (Part, Listing)| Part { sender: part.sender.onto(listing), ..part };
        Self { parts: self.parts.into_iter().zip(split).map(with).collect(), strays, ..self }
    }

    /// For a receiver that keeps its tree when a round breaks off: the next one brings that in order. See [`Self::doubted`].
    #[must_use]
    pub fn lasting(self, lasts: bool) -> Self {
        let of_part = |part: Part| Part { sender: part.sender.lasting(lasts), ..part };
        Self { parts: self.parts.into_iter().map(of_part).collect(), ..self }
    }

    /// After a round of which it is not known how much has come, and whatever became of it at the receiver: what it was to
    /// change is sent again, whole. None where it was the first: the receiver has nothing of use.
    #[must_use]
    pub fn doubted(mut self) -> Option<Self> {
        let of_part = |part: Part| match part.sends {
            true => Some(Part { sender: part.sender.doubted()?, sends: false, ..part }),
            false => Some(part),
        };
        if !self.settled {
            return None;
        }
        let broke_off = self.parts.iter().any(|part| part.sends);
        self.parts = self.parts.into_iter().map(of_part).collect::<Option<_>>()?;
        // What the receiver held of whatever part was in its root, whose time moved.
        if let Some(part) = self.parts.iter_mut().find(|part| broke_off && part.at.is_empty()) {
            part.sender.doubt_root();
        }
        Some(self)
    }

    /// The last round has come.
    pub fn settle(&mut self) {
        self.settled = true;
        for part in &mut self.parts {
            part.sender.settle();
            part.sends = false;
        }
    }

    /// For as long as nothing is sent: keeps nothing open, so that filesystems can be unmounted. See [`Self::reopened`].
    #[must_use]
    pub fn at_rest(self) -> Self {
        let close = |part: Part| match part.place {
            Place::Open(_) => Part { place: Place::Closed(part.place.identity()), ..part },
            Place::Path | Place::Closed(_) => part,
        };
        Self { parts: self.parts.into_iter().map(close).collect(), ..self }
    }

    /// After [`Self::at_rest`]: with the directories that another one has open, which [is of the same](Self::is_of_same).
    ///
    /// # Errors
    /// One cannot be opened once more.
    pub fn reopened(mut self, of: &Self) -> io::Result<Self> {
        for (part, of) in self.parts.iter_mut().zip(&of.parts) {
            if let (Place::Closed(_), Place::Open(opened)) = (&part.place, &of.place) {
                let opened = opened.try_clone()?;
                part.sender.moved_to(&magic(&opened));
                part.place = Place::Open(opened);
            }
        }
        Ok(self)
    }

    /// Whether both are of the same directories, at the same places.
    #[must_use]
    pub fn is_of_same(&self, other: &Self) -> bool {
        self.parts.len() == other.parts.len()
            && self.parts.iter().zip(&other.parts).all(|(one, other)| one.is_same(other))
    }

    /// Memory that it takes about, bytes.
    #[must_use]
    pub fn memory(&self) -> u64 {
        self.parts.iter().map(|part| part.sender.memory()).fold(0, u64::saturating_add)
    }

    /// What the receiver has when the last round has come: names, and bytes of files.
    #[must_use]
    pub fn there(&self) -> (u64, u64) {
        self.parts.iter().map(|part| part.sender.there()).fold((0, 0), |(names, bytes), (more, further)| {
            (names.saturating_add(more), bytes.saturating_add(further))
        })
    }

    /// Finds what the receiver lacks; an error where another filesystem begins in a directory. `frozen` says that no process
    /// writes to the tree until the round is sent.
    pub fn next_round(&self, frozen: bool) -> Result<Round, TreeError> {
        self.round_of(|sender| sender.next_round(frozen))
    }

    /// As [`TreeSender::next_round`], where nobody asks how many bytes will cross, which takes reading all changed files: the
    /// round says at most how many.
    pub fn find_round(&self, frozen: bool) -> Result<Round, TreeError> {
        self.round_of(|sender| sender.find_round(frozen))
    }

    fn round_of(
        &self,
        find: impl Fn(&send::TreeSender) -> Result<send::Round, TreeError>,
    ) -> Result<Round, TreeError> {
        let rounds = self.parts.iter().map(|part| find(&part.sender).map_err(|error| part.of(error)));
        let rounds = rounds.collect::<Result<Vec<_>, _>>()?;
        let sum = |of: fn(&send::Round) -> u64| rounds.iter().map(of).fold(0, u64::saturating_add);
        let changes = Counts {
            entries: sum(|round| round.changes.entries()).saturating_add(self.made.len() as u64),
            removals: sum(|round| round.changes.removals()).saturating_add(self.strays.len() as u64),
            bytes: sum(|round| round.changes.bytes()),
            path_bytes: sum(|round| round.changes.path_bytes()),
        };
        Ok(Round { bytes: sum(|round| round.bytes), changes, rounds })
    }

    /// As if a round had been sent and had come, for [looks](Self::look).
    pub fn suppose(&mut self, round: Round) {
        for (part, round) in self.parts.iter_mut().zip(round.rounds) {
            part.sender.suppose(round);
        }
    }

    /// What a receiver would lack that has had all there was at the last look, or when a round was [supposed](Self::suppose)
    /// to have come. Nothing is sent. Where [blocks](Self::by_blocks) are, the files that have changed are read while that is
    /// `wanted`, and only blocks that differ count; of a file that has changed for the first time, what it has grown. Where
    /// more than `most` bytes would have to be read, the rest is not, and it tells how many at most would be lacking.
    pub fn look(&mut self, most: u64, wanted: &Wanted) -> Result<Looked, TreeError> {
        let mut all = Looked { is_read: true, ..Looked::default() };
        for part in &mut self.parts {
            let looked = part.sender.look(most.saturating_sub(all.read), wanted);
            let looked = looked.map_err(|error| part.of(error))?;
            all.bytes = all.bytes.saturating_add(looked.bytes);
            all.names = all.names.saturating_add(looked.names);
            all.read = all.read.saturating_add(looked.read);
            all.is_read &= looked.is_read;
        }
        Ok(all)
    }

    /// Sends a round, closed by an [`End`]; after an error the receiver's copy is useless, but where it [lasts](Self::lasting).
    pub fn send<E: Into<Box<dyn std::error::Error + Send + Sync>>>(
        &mut self,
        round: Round,
        sink: &mut impl FnMut(Item) -> Result<(), E>,
    ) -> Result<Sent, TreeError> {
        let mut all = Sent::default();
        let root = self.parts.first().map(|part| part.root.clone()).unwrap_or_default();
        let fault = |error: E| TreeError::Sink { root: root.clone(), source: error.into() };
        for path in std::mem::take(&mut self.strays) {
            sink(Item::Remove(Remove { path })).map_err(fault)?;
            all.removed += 1;
        }
        for path in std::mem::take(&mut self.made) {
            sink(Item::Entry(directory(path))).map_err(fault)?;
            all.entries += 1;
        }
        let mut held = 0;
        for (part, round) in self.parts.iter_mut().zip(round.rounds) {
            let (at, mut most) = (&part.at, held);
            part.sends = true;
            let sent = part.sender.send(round, &mut |item| match placed(at, item, held) {
                Ok(None) => Ok(()),
                Ok(Some(item)) => {
                    if let Item::Hold(hold) = &item {
                        most = hold.number + 1;
                    }
                    sink(item).map_err(Into::into)
                }
                Err(error) => Err(error.into()),
            });
            let sent = match sent {
                Ok(sent) => sent,
                Err(error) => return Err(part.of(error)),
            };
            held = most;
            all.entries += sent.entries;
            all.removed += sent.removed;
            all.bytes += sent.bytes;
            all.unsettled.extend(sent.unsettled.into_iter().map(|path| join(at, path)));
        }
        sink(Item::End(End { entries: all.entries, bytes: all.bytes })).map_err(fault)?;
        Ok(all)
    }
}

impl Part {
    fn new(at: Vec<u8>, root: &Path) -> Self {
        Self {
            at,
            root: root.to_owned(),
            place: Place::Path,
            sender: send::TreeSender::new(root),
            sends: false,
        }
    }

    /// Whether both are the same directory at the same place.
    fn is_same(&self, other: &Self) -> bool {
        let same = match (&self.place, &other.place) {
            (Place::Path, Place::Path) => true,
            (Place::Path, _) | (_, Place::Path) => false,
            (one, other) => one.identity().is_some_and(|identity| other.identity() == Some(identity)),
        };
        same && self.at == other.at && self.root == other.root
    }

    /// An error with the path that people know.
    fn of(&self, error: TreeError) -> TreeError {
        match self.place {
            Place::Path => error,
            Place::Open(_) | Place::Closed(_) => error.in_tree(&self.root),
        }
    }
}

/// A path to what is open.
fn magic(opened: &OwnedFd) -> PathBuf {
    PathBuf::from(format!("/proc/self/fd/{}", opened.as_raw_fd()))
}

/// A directory that the receiver makes.
fn directory(path: Vec<u8>) -> Entry {
    Entry { path, kind: Kind::Directory.into(), mode: MADE_MODE, ..Entry::default() }
}

/// A path of a part in the tree.
fn join(at: &[u8], path: Vec<u8>) -> Vec<u8> {
    match (at, path.as_slice()) {
        ([], _) => path,
        (_, []) => at.to_vec(),
        _ => [at, &path].join(&b'/'),
    }
}

/// An item of a part as one of the tree, in which this many files have been held before; none for the end of the part.
fn placed(at: &[u8], item: Item, held: u32) -> io::Result<Option<Item>> {
    let number = |number: u32| {
        let number = number.checked_add(held).filter(|number| *number < u32::MAX);
        number.ok_or_else(|| io::Error::other("more files have new names than can be numbered"))
    };
    Ok(Some(match item {
        Item::End(_) => return Ok(None),
        Item::Data(_) | Item::Hole(_) => item,
        Item::Remove(mut remove) => {
            remove.path = join(at, remove.path);
            Item::Remove(remove)
        }
        Item::Hold(mut hold) => {
            hold.path = join(at, hold.path);
            hold.number = number(hold.number)?;
            Item::Hold(hold)
        }
        Item::Entry(mut entry) => {
            entry.path = join(at, entry.path);
            if !entry.hard_link_of.is_empty() {
                entry.hard_link_of = join(at, entry.hard_link_of);
            }
            entry.held = entry.held.map(number).transpose()?;
            Item::Entry(entry)
        }
    }))
}
