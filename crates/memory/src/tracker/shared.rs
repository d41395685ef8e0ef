//! Which pages of shared anonymous memory were written since the last scan, where that is certain.
//!
//! Page tables tell what was written through the mappings that there are. They are all there have been since the last
//! scan, and so tell all, because
//!
//! - nobody has a descriptor of such memory. A process gets a mapping of it when it is made by fork(2), or by mremap(2)
//!   in one that has a mapping; who could open it in `/proc/PID/map_files` has capabilities that no process of the
//!   service may have here;
//! - each mapping that there was is known: it was listed, and began to be watched, while its process was stopped;
//! - counters that began in the same stop would have counted each fork and each such mremap ([`events`](super::events));
//! - each is still there: moved, or remapped, it would be watched no more. What is unmapped or has ended is noticed.
//!
//! A page of which that cannot be said counts as written, and so does all memory after a fork. For the next scan counts
//! what happens after [`History::watch`], before the processes are listed and the marks of pages are read: a process
//! that is made in between may not be in the list.

use std::collections::{BTreeMap, BTreeSet};
use std::os::fd::AsFd;
use std::sync::Arc;

use super::events::{Counters, Events};
use super::inject::{self, InjectError};
use super::kernel::{Protect, Scanner, Userfault};
use crate::Range;
use crate::process::nameless::{Memory, mappings};
use crate::process::{Process, ProcessError};

/// Most counters that are open: each is a descriptor.
const MOST_COUNTERS: usize = 1024;

/// Most processes that have one memory: the marks take an entry for each of its pages in the page tables of each of them,
/// so that they take an eighth of the memory at most.
const MOST_HOLDERS: usize = 64;

/// The memory that is watched, by inode.
#[derive(Debug, Default)]
pub(super) struct History {
    inodes: BTreeSet<u64>,
    known: BTreeMap<i32, Known>,
    /// None where the kernel cannot count. It ends after all counters.
    events: Option<Events>,
    /// What had been counted when the processes were watched that the next scan lists.
    begun: Option<u64>,
    /// The same of the last scan; none where what is written since then is not certain to be seen.
    since: Option<u64>,
}

/// A process whose mappings are known.
#[derive(Debug)]
struct Known {
    process: Arc<Process>,
    /// None in a process that has none of the memory: it will not get any.
    holding: Option<Holding>,
}

/// What a process has of the memory.
#[derive(Debug)]
struct Holding {
    areas: Vec<Area>,
    counters: Counters,
}

/// A mapping that is watched.
#[derive(Debug)]
struct Area {
    range: Range,
    inode: u64,
    /// Where in the memory it begins.
    offset: u64,
}

/// A process, as the tracker of its private memory knows it.
pub(super) type Watched<'a> = (&'a Arc<Process>, &'a Userfault);

impl History {
    /// Begins to watch these processes, and only this memory. All that they write later is certain to be found once a
    /// list of the processes that was made after this call has no other one that has the memory.
    pub(super) fn watch<'a>(
        &mut self,
        inodes: &BTreeSet<u64>,
        pids: &[i32],
        scanner: &mut Scanner,
        watched: impl Fn(i32) -> Option<Watched<'a>>,
    ) {
        if !inodes.is_subset(&self.inodes) {
            (self.known, self.since, self.begun) = (BTreeMap::new(), None, None);
        }
        self.inodes.clone_from(inodes);
        if inodes.is_empty() {
            *self = Self::default();
            return;
        }
        if self.events.is_none() {
            match Events::new() {
                Ok(events) => self.events = Some(events),
                Err(error) => return tracing::debug!(%error, "writes to shared memory cannot be followed"),
            }
        }
        self.forget_ended();
        for &pid in pids {
            if self.knows(pid) {
                continue;
            }
            let Some((process, userfault)) = watched(pid) else { continue };
            match self.begin(process, userfault, scanner) {
                Ok(holding) => {
                    let process = Arc::clone(process);
                    drop(self.known.insert(pid, Known { process, holding }));
                }
                // The next call tries again.
                Err(reason) => tracing::debug!(pid, reason, "its writes to shared memory cannot be followed"),
            }
        }
        self.begun = self.counted();
    }

    /// Whether this process is known. One that has the page tables of another is none: it may have no counters.
    fn knows(&self, pid: i32) -> bool {
        self.known.contains_key(&pid)
    }

    /// Forgets processes that have ended, and with them what is certain, if they had the memory.
    fn forget_ended(&mut self) {
        self.known.retain(|_, known| {
            let ended = known.process.has_ended();
            if ended && known.holding.is_some() {
                (self.since, self.begun) = (None, None);
            }
            !ended
        });
    }

    /// Watches what a process has of the memory.
    fn begin(
        &self,
        process: &Process,
        userfault: &Userfault,
        scanner: &mut Scanner,
    ) -> Result<Option<Holding>, String> {
        let Some(events) = &self.events else { return Err("nothing can be counted".into()) };
        let failed = |action: &str, error: &dyn std::fmt::Display| format!("cannot {action}: {error}");
        let (others, holders) = self
            .known
            .values()
            .filter_map(|known| known.holding.as_ref())
            .fold((0, 0), |(counters, holders), holding| (counters + holding.counters.len(), holders + 1));
        let begin = || {
            let text = process.text("maps").map_err(|error| failed("list its mappings", &error))?;
            let areas: Vec<_> = self.areas(&text).collect();
            if areas.is_empty() {
                return Ok(None);
            }
            let tasks = process.tasks().map_err(|error| failed("list its threads", &error))?;
            if holders >= MOST_HOLDERS || others + tasks.len() * events.each() > MOST_COUNTERS {
                return Err("too many have the memory".to_owned());
            }
            let pagemap =
                process.open_file("pagemap").map_err(|error| failed("open its page tables", &error))?;
            for Area { range, .. } in &areas {
                userfault.watch(range).map_err(|errno| failed("watch it", &errno))?;
                // Nothing here has been protected yet. Whatever is marked was left by an earlier watch, and writes
                // might leave it alone.
                let marked = scanner.marked(pagemap.as_fd(), range);
                for pages in marked.map_err(|errno| failed("list its pages", &errno))? {
                    userfault.unmark(&pages).map_err(|errno| failed("unprotect it", &errno))?;
                }
            }
            let counters = events.count(&tasks).map_err(|error| failed("count what it does", &error))?;
            Ok(Some(Holding { areas, counters }))
        };
        match inject::while_stopped(process, begin) {
            Ok(holding) => holding,
            Err(InjectError::Gone) => Err("it has ended".into()),
            Err(InjectError::Refused { reason, .. }) => Err(reason),
        }
    }

    /// The mappings of the memory, of a text of `maps`.
    fn areas(&self, text: &str) -> impl Iterator<Item = Area> {
        let found = mappings(text)
            .into_iter()
            .filter(|mapping| mapping.memory == Memory::Anonymous && self.inodes.contains(&mapping.inode));
        found.map(|mapping| Area { range: mapping.range, inode: mapping.inode, offset: mapping.offset })
    }

    /// The pages, as offsets in each memory, that may have been written since the last call; none where it may be any.
    /// `pids` are the processes that there are. `frozen` says that none of them can run until after the scan.
    pub(super) fn scan(
        &mut self,
        pids: &[i32],
        scanner: &mut Scanner,
        frozen: bool,
    ) -> Option<BTreeMap<u64, Vec<Range>>> {
        self.forget_ended();
        let (since, begun) = (self.since.take(), self.begun.take());
        let complete = !frozen && self.is_complete(pids);
        let counted = self.counted();
        let protect = if frozen { Protect::No } else { Protect::Yes };
        let mut written: BTreeMap<u64, Vec<Range>> = BTreeMap::new();
        let mut lost = Vec::new();
        for (pid, known) in &self.known {
            let Some(holding) = &known.holding else { continue };
            // All of them are scanned, for the next time.
            if self.scan_one(&known.process, holding, scanner, protect, &mut written).is_none() {
                lost.push(*pid);
            }
        }
        for pid in &lost {
            self.known.remove(pid);
        }
        if !lost.is_empty() {
            return None;
        }
        self.since = begun.filter(|_| complete);
        (since? == counted?).then_some(written)
    }

    /// Whether each process that has the memory is known, and none can get at it that is not.
    fn is_complete(&self, pids: &[i32]) -> bool {
        let is_plain = |pid: i32| match Process::open(pid).and_then(|process| process.status()) {
            Ok(status) => self.knows(pid) && !status.opens_mapped(),
            Err(error) => matches!(error, ProcessError::Gone { .. }),
        };
        pids.iter().all(|pid| is_plain(*pid))
            && self.known.values().all(|known| known.holding.is_none() || !known.process.uses_direct_io())
    }

    /// What all counters have counted.
    fn counted(&self) -> Option<u64> {
        let mut holdings = self.known.values().filter_map(|known| known.holding.as_ref());
        holdings.try_fold(0_u64, |sum, holding| Some(sum.wrapping_add(holding.counters.sum().ok()?)))
    }

    /// Notes what was written by a process; none where it has not all that it had any more.
    fn scan_one(
        &self,
        process: &Process,
        holding: &Holding,
        scanner: &mut Scanner,
        protect: Protect,
        written: &mut BTreeMap<u64, Vec<Range>>,
    ) -> Option<()> {
        // Opened anew each time: it stays with the address space that it was opened for.
        let pagemap = process.open_file("pagemap").ok()?;
        let now: Vec<_> = self.areas(&process.text("maps").ok()?).collect();
        for area in &holding.areas {
            if !area.is_in(&now) {
                return None;
            }
            let of_memory = written.entry(area.inode).or_default();
            let note = |pages: Range| {
                let offset = |address: u64| address - area.range.start + area.offset;
                of_memory.push(offset(pages.start)..offset(pages.end));
            };
            scanner.unmarked(pagemap.as_fd(), &area.range, protect, note).ok()?;
        }
        Some(())
    }
}

impl Area {
    /// Whether all of it is in these, which may be its pieces.
    fn is_in(&self, areas: &[Self]) -> bool {
        let mut end = self.range.start;
        for area in areas {
            let shifted = |address: u64| address.wrapping_sub(self.range.start).wrapping_add(self.offset);
            if area.inode == self.inode
                && area.range.start <= end
                && end < area.range.end
                && shifted(area.range.start) == area.offset
            {
                end = area.range.end;
            }
        }
        end >= self.range.end
    }
}
