//! Shared memory at the source: which segments there are, which of their pages changed since they were sent, and sending
//! those.
//!
//! A scan reads all pages and compares their [hashes](crate::page_hash) with those of what was sent last
//! ([`godwit_memory::shared`] says why). That takes 0.2 s to 0.4 s of a processor for each GiB; each stream looks at its own
//! pages. Where the tracker is certain of what was written since the scan before, only that is compared.
//!
//! So are the pages that a process has written in private mappings of files ([`Part::Copied`]): a restore needs all of
//! them before it begins.
//!
//! Where pages stay here for after the commit, those of shared anonymous memory can, too: nothing of it is compared or
//! sent before that, and all that it has is named.

mod content;
mod tmpfs;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use godwit_criu::{external_shared, external_system_v};
use godwit_engine::Tmpfs;
use godwit_memory::process::ProcessError;
use godwit_memory::shared::{self, FIRST_SPACE, Kind, Segment, space_by_inode};
use godwit_memory::{PAGE_SIZE, Range, Space};
use rangemap::RangeSet;

use self::content::Compared;
use self::tmpfs::FollowedTmpfs;
pub(crate) use self::tmpfs::Names;
use super::{Owner, Pages, PagesError, Remaining, pages_of, within};
use crate::message::{Segments, SharedSegment};

/// Most segments that are followed: each costs both nodes a descriptor, and CRIU a line of its options.
const MOST: usize = 256;

/// Bytes read at once: what a processor's cache holds while they are compared.
const PIECE: usize = 256 * 1024;

/// Smaller segments are compared in the time that it takes to ask what was written to them.
const LARGE: u64 = 16 << 20;

/// Most processes whose copies of files' pages are followed.
const MOST_PROCESSES: usize = 256;

/// Most memory that all of them lock, KiB: it is in CRIU's images, which are written once more with the copies.
const MOST_LOCKED_KIB: u64 = 64 << 10;

/// Which kinds of segments go over the streams, besides files of a tmpfs.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Kinds {
    /// Shared anonymous memory and memory files.
    pub(crate) memory: bool,
    /// Segments of System V.
    pub(crate) system_v: bool,
    /// Pages that processes have written in private mappings of files.
    pub(crate) copied: bool,
}

impl Kinds {
    pub(crate) fn has(self, kind: &Kind) -> bool {
        match kind {
            Kind::Anonymous | Kind::Memfd { .. } => self.memory,
            Kind::SystemV { .. } => self.system_v,
            Kind::Copied { .. } => self.copied,
            Kind::Tmpfs { .. } => false,
        }
    }
}

/// By which a segment is recognised.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Identity {
    /// The inode of memory without a name.
    Memory(u64),
    /// The identifier of a segment of System V.
    SystemV(u64),
    /// Of a file of a tmpfs: that one's number, and the inode.
    File(u32, u64),
    /// Whose copies: its PID and start time.
    Copied(Space, Option<u64>),
}

/// Which of the segments.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Part {
    /// All.
    All,
    /// Pages that processes have written in private mappings of files.
    Copied,
    /// All others.
    Others,
}

impl Part {
    fn has(self, followed: &Followed) -> bool {
        match self {
            Self::All => true,
            Self::Copied => followed.is_copied(),
            Self::Others => !followed.is_copied(),
        }
    }
}

/// What becomes of segments that were followed: some have another size now than that, and some are followed no more.
#[derive(Debug, Default)]
struct Changed {
    resized: Vec<(Space, u64)>,
    gone: Vec<(Space, u64)>,
}

/// A segment that is followed.
#[derive(Debug)]
pub(super) struct Followed {
    segment: Arc<Segment>,
    /// Where there were pages at the last scan.
    populated: Vec<Range>,
    /// Whether there was one.
    scanned: bool,
    /// Pages to send.
    pub(super) data: RangeSet<u64>,
    /// Pages that are gone.
    zero: RangeSet<u64>,
    /// Whether its pages stay here for after the commit.
    stays: bool,
    /// Of these, those that the destination was told of.
    named: RangeSet<u64>,
}

/// The segments that are followed.
#[derive(Debug, Default)]
pub(super) struct Shared {
    pub(super) segments: BTreeMap<Space, Followed>,
    tmpfs: Vec<FollowedTmpfs>,
    /// Of these, those that the last look left alone: nothing of them is opened.
    unfit: BTreeSet<u32>,
    /// What the destination has been told.
    told: Segments,
    /// How many there have been.
    begun: Space,
    /// Whether no page tables are to be made for it.
    spares_tables: bool,
    /// Whether pages of shared anonymous memory stay here for after the commit.
    stays: bool,
    /// Processes that have been found not to need that in place.
    plain: BTreeSet<i32>,
    /// Whether copies of files' pages are followed, of all processes.
    copied: bool,
    /// Whether they never are: CRIU's images are too large to be written once more.
    leaves_copied: bool,
}

impl Shared {
    /// Pages that are noted and not sent.
    pub(super) fn todo_pages(&self) -> u64 {
        let go = self.segments.values().filter(|followed| !followed.stays);
        go.map(|followed| pages_of(&followed.data)).sum()
    }

    /// Those of a part that are sent before the commit.
    pub(super) fn segments_of(&self, part: Part) -> impl Iterator<Item = (Space, &Followed)> {
        let all = self.segments.iter().map(|(space, followed)| (*space, followed));
        all.filter(move |(_, followed)| part.has(followed) && !followed.stays)
    }

    /// Those whose pages stay here.
    pub(super) fn that_stay(&self) -> impl Iterator<Item = (Space, Owner)> {
        let stay = self.segments.iter().filter(|(_, followed)| followed.stays);
        stay.map(|(space, followed)| (*space, Owner::Segment(Arc::clone(&followed.segment))))
    }

    /// Fails where a process has come that needs memory in place whose pages stay here. If one locks memory later, the
    /// destination finds pages in place that it has not filled.
    fn need_not_be_in_place(&mut self, pids: &[i32]) -> Result<(), PagesError> {
        if self.that_stay().next().is_none() {
            return Ok(());
        }
        let new: Vec<i32> = pids.iter().copied().filter(|pid| !self.plain.contains(pid)).collect();
        if shared::needs_in_place(&new)? {
            return Err(PagesError::InPlace);
        }
        self.plain.extend(new);
        Ok(())
    }

    /// Pages that stay here and that the destination was told of.
    pub(super) fn named_pages(&self) -> u64 {
        self.segments.values().map(|followed| pages_of(&followed.named)).sum()
    }

    /// Adds the pages that stay here and that the destination was not told of.
    pub(super) fn name(&mut self, unnamed: &mut Remaining) {
        for (space, followed) in self.segments.iter_mut().filter(|(_, followed)| followed.stays) {
            let new = followed.data.iter().flat_map(|range| followed.named.gaps(range).collect::<Vec<_>>());
            let new: RangeSet<u64> = new.collect();
            followed.named.extend(new.iter().cloned());
            unnamed.put(*space, &Owner::Segment(Arc::clone(&followed.segment)), new);
        }
    }

    /// Adds all pages that stay here. What the service has given back since the destination was told of it reads as zero.
    pub(super) fn leave(&mut self, shared: &mut Remaining) {
        for (space, followed) in self.segments.iter_mut().filter(|(_, followed)| followed.stays) {
            let named = std::mem::take(&mut followed.named);
            shared.put(*space, &Owner::Segment(Arc::clone(&followed.segment)), named);
        }
    }

    /// What the last scan found of them.
    pub(super) fn populated_pages(&self) -> u64 {
        let of =
            |followed: &Followed| followed.populated.iter().map(|range| range.end - range.start).sum::<u64>();
        self.segments.values().map(of).sum::<u64>() / PAGE_SIZE
    }

    /// All that is noted of this part has been sent.
    pub(super) fn sent(&mut self, part: Part) {
        for followed in self.segments.values_mut().filter(|followed| part.has(followed) && !followed.stays) {
            followed.data.clear();
            followed.zero.clear();
        }
    }

    /// Those whose writers the tracker can watch: nobody has them open.
    fn watchable(&self) -> BTreeSet<u64> {
        if self.spares_tables {
            return BTreeSet::new();
        }
        let segments = self.segments.values().map(|followed| &followed.segment);
        let watchable = segments
            .filter(|segment| *segment.kind() == Kind::Anonymous && segment.size() >= LARGE && !self.stays);
        watchable.map(|segment| segment.inode()).collect()
    }

    /// Follows these segments that are in no tmpfs, the largest first if there are too many, and no others.
    fn follow(&mut self, mut found: BTreeMap<Identity, Segment>) -> Changed {
        let changed = self.keep(|followed| {
            let identity = identity(&followed.segment);
            match found.get(&identity) {
                // What has become another begins anew.
                Some(now) if !followed.is_like(now) => false,
                Some(_) => found.remove(&identity).is_some_and(|now| followed.is_still(now)),
                None => followed.is_in_tmpfs() || followed.is_copied(),
            }
        });
        let copied = self.segments.values().filter(|followed| followed.is_copied()).count();
        self.begin(found, MOST + copied);
        changed
    }

    /// Follows the copies that all these processes have of files' pages, or of none of them. What the processes lock is
    /// looked at as long as the service runs.
    fn follow_copied(&mut self, pids: &[i32], frozen: bool) -> Result<Changed, PagesError> {
        let followed = self.segments.values().filter(|followed| followed.is_copied());
        let live: BTreeSet<i32> = followed.clone().filter_map(|followed| followed.segment.writer()).collect();
        let mut locked_kib = 0_u64;
        if !frozen {
            locked_kib = followed.map(|followed| followed.segment.locked_kib()).sum();
        }
        let mut found = BTreeMap::new();
        for pid in pids.iter().filter(|pid| !live.contains(pid)) {
            match Segment::copied(*pid) {
                Ok(segment) => {
                    locked_kib += segment.locked_kib();
                    found.insert(identity(&segment), segment);
                }
                Err(ProcessError::Gone { .. }) => {}
                Err(error) => return Err(error.into()),
            }
        }
        self.leaves_copied |= locked_kib > MOST_LOCKED_KIB;
        self.copied = !self.leaves_copied && pids.len() <= MOST_PROCESSES;
        let follows = self.copied;
        let changed = self.keep(|followed| {
            let writer = followed.segment.writer().filter(|pid| follows && pids.contains(pid));
            !followed.is_copied() || writer.is_some()
        });
        if follows {
            self.begin(found, usize::MAX);
        }
        Ok(changed)
    }

    /// Keeps what fulfils this.
    fn keep(&mut self, mut keeps: impl FnMut(&mut Followed) -> bool) -> Changed {
        let mut changed = Changed::default();
        self.segments.retain(|space, followed| {
            let before = followed.segment.size();
            let kept = keeps(followed);
            if !kept {
                changed.gone.push((*space, before));
            } else if followed.segment.size() != before {
                changed.resized.push((*space, before));
            }
            kept
        });
        changed
    }

    /// Begins to follow the largest of these, until there are so many in all.
    fn begin(&mut self, found: BTreeMap<Identity, Segment>, most: usize) {
        let mut new: Vec<_> = found.into_values().collect();
        new.sort_by_cached_key(|segment| std::cmp::Reverse(segment.allocated().unwrap_or(0)));
        for segment in new.into_iter().take(most.saturating_sub(self.segments.len())) {
            // The source finds it again by that, when this daemon has been started anew.
            let by_inode = match self.stays && segment.is_only_mapped() {
                true => space_by_inode(segment.inode()),
                false => None,
            };
            let stays = by_inode.is_some();
            let by_number = || FIRST_SPACE.checked_add(self.begun);
            let Some(space) = by_inode.or_else(by_number) else { break };
            self.begun += 1;
            let followed = Followed {
                stays,
                named: RangeSet::new(),
                segment: Arc::new(segment),
                populated: Vec::new(),
                scanned: false,
                data: RangeSet::new(),
                zero: RangeSet::new(),
            };
            self.segments.insert(space, followed);
        }
    }
}

impl Followed {
    fn is_in_tmpfs(&self) -> bool {
        self.segment.kind().tmpfs().is_some()
    }

    fn is_copied(&self) -> bool {
        matches!(self.segment.kind(), Kind::Copied { .. })
    }

    /// Whether it may have gone since it was found, as long as the service runs: the next look tells.
    fn may_be_gone(&self) -> bool {
        self.is_in_tmpfs() || self.is_copied()
    }

    /// Whether its inode is that of memory without a name.
    fn is_memory(&self) -> bool {
        matches!(self.segment.kind(), Kind::Anonymous | Kind::Memfd { .. })
    }

    fn is_of_system_v(&self) -> bool {
        matches!(self.segment.kind(), Kind::SystemV { .. })
    }

    /// Whether this, which has the same identity, was made as it was.
    fn is_like(&self, now: &Segment) -> bool {
        now.size() == self.segment.size() && now.kind() == self.segment.kind()
    }

    /// Notes all pages that there are.
    fn look(&mut self) -> std::io::Result<()> {
        self.populated = self.segment.populated()?;
        self.data = self.populated.iter().cloned().collect();
        Ok(())
    }

    /// Goes on with this, which has the same identity, if it was made as it was: the kernel, or the service, may have given
    /// the identifier of a segment of System V to another.
    fn is_still(&mut self, now: Segment) -> bool {
        let is_like = self.is_like(&now);
        if is_like && self.is_of_system_v() && !self.segment.is(&now) {
            self.is_now(now);
        }
        is_like
    }

    /// This is it now, perhaps of another size; or another file, where the service has mounted another filesystem: what
    /// differs will be found.
    fn is_now(&mut self, now: Segment) {
        let size = now.size().next_multiple_of(PAGE_SIZE);
        for noted in [&mut self.data, &mut self.zero] {
            noted.remove(size..u64::MAX);
        }
        self.populated.retain_mut(|range| {
            range.end = range.end.min(size);
            range.start < range.end
        });
        self.segment = Arc::new(now);
    }
}

fn by_identity(segments: impl IntoIterator<Item = Segment>) -> BTreeMap<Identity, Segment> {
    segments.into_iter().map(|segment| (identity(&segment), segment)).collect()
}

fn identity(segment: &Segment) -> Identity {
    match segment.kind() {
        Kind::Anonymous | Kind::Memfd { .. } => Identity::Memory(segment.inode()),
        Kind::SystemV { .. } => Identity::SystemV(segment.inode()),
        Kind::Tmpfs { number } => Identity::File(*number, segment.inode()),
        Kind::Copied { process } => Identity::Copied(*process, segment.start_time()),
    }
}

impl Pages {
    /// Pages of shared anonymous memory stay here for after the commit. Before any is found.
    pub(crate) fn let_shared_stay(&mut self) {
        self.shared.stays = true;
    }

    /// The page tables that watching shared memory takes, an eighth of it at most, would count for the service's limit.
    pub(crate) fn spare_page_tables(&mut self) {
        self.shared.spares_tables = true;
    }

    /// Looks for the segments of these kinds that these processes have, and in these tmpfs; what is to be told to the
    /// destination, if that has changed.
    pub(crate) fn find_shared(
        &mut self,
        pids: &[i32],
        kinds: Kinds,
        tmpfs: Vec<Tmpfs>,
    ) -> Result<Option<Segments>, PagesError> {
        let found = if kinds.memory || kinds.system_v { shared::find(pids)? } else { Vec::new() };
        let found = found.into_iter().filter(|segment| kinds.has(segment.kind()));
        let changed = self.shared.follow(by_identity(found));
        self.forget(changed);
        self.shared.need_not_be_in_place(pids)?;
        if kinds.copied {
            let changed = self.shared.follow_copied(pids, false)?;
            self.forget(changed);
        }
        let changed = self.shared.follow_tmpfs(tmpfs, false);
        self.forget(changed);
        self.tracker.watch_shared(&self.shared.watchable(), pids);
        Ok(self.tell())
    }

    /// Follows no segment of processes any more that has another size than it was announced with, and looks at the
    /// processes and at these tmpfs once more. The service is frozen.
    pub(crate) fn settle_shared(
        &mut self,
        pids: &[i32],
        kinds: Kinds,
        tmpfs: Vec<Tmpfs>,
    ) -> Result<(), PagesError> {
        if kinds.copied {
            let changed = self.shared.follow_copied(pids, true)?;
            self.forget(changed);
        }
        let of_system_v = self.shared.segments.values().any(Followed::is_of_system_v);
        let mut found = by_identity(if of_system_v { shared::find_system_v(pids)? } else { Vec::new() });
        let mut failed = None;
        let changed = self.shared.keep(|followed| {
            if followed.is_of_system_v() {
                let now = found.remove(&identity(&followed.segment));
                return now.is_some_and(|now| followed.is_still(now));
            }
            followed.is_in_tmpfs()
                || followed.segment.has_its_size().unwrap_or_else(|error| {
                    failed.get_or_insert(error);
                    false
                })
        });
        self.forget(changed);
        if let Some(source) = failed {
            return Err(PagesError::Shared { action: "examined", source });
        }
        self.shared.need_not_be_in_place(pids)?;
        for followed in self.shared.segments.values_mut().filter(|followed| followed.stays) {
            followed.look().map_err(|source| PagesError::Shared { action: "examined", source })?;
        }
        let changed = self.shared.follow_tmpfs(tmpfs, true);
        self.forget(changed);
        Ok(())
    }

    /// Notes what the destination has no more of these.
    fn forget(&mut self, Changed { resized, gone }: Changed) {
        for stream in &mut self.streams {
            for (space, size) in &gone {
                stream.forget(*space, 0..*size);
            }
            for (space, before) in &resized {
                if let Some(followed) = self.shared.segments.get(space) {
                    stream.resized(*space, *before, followed.segment.size());
                }
            }
        }
    }

    /// What the destination is to be told of those that are followed, if it has not been.
    pub(crate) fn tell(&mut self) -> Option<Segments> {
        let all = self.shared.segments.iter();
        let now = Segments {
            all: all.map(|(space, followed)| SharedSegment::of(*space, &followed.segment)).collect(),
        };
        if self.shared.told == now {
            return None;
        }
        self.shared.told = now.clone();
        Some(now)
    }

    /// By what CRIU knows those that are followed and that it is to leave out, by the patch that it does so with. It leaves
    /// out each whole tmpfs, and all copies.
    pub(crate) fn external_segments(&self) -> [(&'static str, Vec<String>); 2] {
        let (mut memory, mut system_v) = (Vec::new(), Vec::new());
        for segment in self.shared.segments.values().map(|followed| &followed.segment) {
            match segment.kind() {
                Kind::Anonymous | Kind::Memfd { .. } => memory.push(external_shared(segment.inode())),
                Kind::SystemV { .. } => system_v.push(external_system_v(segment.inode())),
                Kind::Tmpfs { .. } | Kind::Copied { .. } => {}
            }
        }
        [("external-shmem", memory), ("external-sysvshm", system_v)]
    }

    /// Whether the copies of files' pages are followed that there are: CRIU is to leave them out.
    pub(crate) fn follows_copied(&self) -> bool {
        self.shared.copied
    }

    /// Where each tmpfs that is followed is mounted, and its key, for CRIU.
    pub(crate) fn external_tmpfs(&self) -> Vec<(String, String)> {
        self.shared.tmpfs.iter().map(|followed| followed.tmpfs.external.clone()).collect()
    }

    /// The names in each tmpfs that is followed, of a service that is frozen.
    pub(crate) fn names(&mut self) -> Vec<Names> {
        let all = std::mem::take(&mut self.shared.tmpfs).into_iter();
        all.map(|FollowedTmpfs { tmpfs, items }| Names { number: tmpfs.number, items }).collect()
    }

    /// Notes what of these segments differs from what was sent. `pids` are the processes that there are, listed after
    /// [`Pages::find_shared`]; `frozen` says that none of them can run until after the scan. Whether all had to be
    /// compared.
    pub(crate) fn scan_shared(&mut self, pids: &[i32], part: Part, frozen: bool) -> Result<bool, PagesError> {
        let failed = |source| PagesError::Shared { action: "read", source };
        // Before anything is read: what is written from now on is for the next scan.
        let written = if part == Part::Copied { None } else { self.tracker.shared(pids, frozen) };
        let watchable = self.shared.watchable();
        let (mut all, mut to_compare) = (false, Vec::new());
        for (space, followed) in self.shared.segments.iter_mut().filter(|(_, followed)| part.has(followed)) {
            if followed.segment.kind().tmpfs().is_some_and(|number| self.shared.unfit.contains(&number)) {
                continue;
            }
            if followed.stays {
                // Of a frozen service that has been done before the rest was named.
                if !frozen {
                    followed.look().map_err(failed)?;
                }
                continue;
            }
            let populated = match followed.segment.populated() {
                // Or somebody has a lease.
                Err(_) if followed.may_be_gone() && !frozen => continue,
                populated => populated.map_err(failed)?,
            };
            let now: RangeSet<u64> = populated.iter().cloned().collect();
            for range in &followed.populated {
                followed.zero.extend(now.gaps(range));
            }
            followed.zero =
                followed.zero.iter().flat_map(|range| now.gaps(range).collect::<Vec<_>>()).collect();
            followed.populated = populated;
            let inode = followed.segment.inode();
            let told = written.as_ref().filter(|_| followed.scanned && followed.is_memory());
            let known = told.and_then(|written| written.get(&inode));
            let ranges = match known {
                Some(written) => {
                    let written: RangeSet<u64> = written.iter().cloned().collect();
                    // What was to be sent still is, whatever was written since.
                    followed.data = followed.data.iter().flat_map(|range| within(&now, range)).collect();
                    written.iter().flat_map(|range| within(&now, range)).collect()
                }
                None => {
                    all |= followed.is_memory() && watchable.contains(&inode);
                    followed.data.clear();
                    followed.populated.clone()
                }
            };
            followed.scanned = true;
            let gives_up = followed.may_be_gone() && !frozen;
            to_compare.push(Compared {
                space: *space,
                segment: Arc::clone(&followed.segment),
                ranges,
                gives_up,
            });
        }
        for (space, ranges) in self.compare(&to_compare)? {
            if let Some(followed) = self.shared.segments.get_mut(&space) {
                followed.data.extend(ranges);
            }
        }
        Ok(all)
    }

    /// What of these differs from what was sent. Each stream looks at its own pages.
    fn compare(&self, to_compare: &[Compared]) -> Result<Vec<(Space, Vec<Range>)>, PagesError> {
        if to_compare.is_empty() {
            return Ok(Vec::new());
        }
        let (count, key) = (self.streams.len(), &self.key);
        let results: Vec<_> = std::thread::scope(|scope| {
            let start = |(index, stream)| {
                scope.spawn(move || {
                    let (mut all, mut buffer) = (Vec::new(), vec![0; PIECE]);
                    for compared in to_compare {
                        match compared.differing(stream, (index, count), key, &mut buffer) {
                            Ok(ranges) => all.push((compared.space, ranges)),
                            Err(_) if compared.gives_up => {}
                            Err(source) => return Err(PagesError::Shared { action: "read", source }),
                        }
                    }
                    Ok(all)
                })
            };
            let threads: Vec<_> = (0..).zip(&self.streams).map(start).collect();
            threads
                .into_iter()
                .map(|thread| thread.join().unwrap_or_else(|panic| Err(PagesError::of_panic(panic.as_ref()))))
                .collect()
        });
        results.into_iter().try_fold(Vec::new(), |mut all, found| {
            all.extend(found?);
            Ok(all)
        })
    }
}
