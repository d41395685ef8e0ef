//! The service's memory at the source: scanning for what was written, and sending it over streams.
//!
//! [`Pages::scan`] notes what is to be sent; [`Pages::send`] sends it, each stream in a thread of its
//! own ([`stream`]). A page always goes over the same stream, so that a later content never arrives before an
//! earlier one. A [hash](crate::page_hash) of each page as it was sent last is kept: a page that was written with the
//! same content does not cross again. The delta cache keeps, within a bound, the contents of pages that are written
//! repeatedly, and their deltas are sent. Pages that the destination retained when the service left it are named, not
//! sent. Shared memory is no process's: [`shared`] finds what of it changed.

mod remaining;
mod shared;
mod stream;

use std::collections::BTreeMap;
use std::ops::ControlFlow;
use std::sync::Arc;
use std::time::{Duration, Instant};

use godwit_memory::process::{Process, ProcessError};
use godwit_memory::tracker::{Backend, Round, TrackError, Tracker};
use godwit_memory::{Range, Space};
use rangemap::RangeSet;
use tokio::sync::mpsc;

use crate::message::Message;
use crate::options::Compress;
use crate::page_hash::{EarlierVisit, Hashes, PageKey, no_hashes};
use crate::source::pace::Pacer;
use remaining::within;
use shared::Shared;
use stream::{Sending, Stream};

pub(crate) use remaining::{Leaving, Owner, Remaining, pages_of};
pub(crate) use shared::{Kinds, Names, Part};

const PAGE: usize = 4096;

/// Why memory could not be sent.
#[derive(Debug, thiserror::Error)]
pub enum PagesError {
    /// It could not be examined.
    #[error("the service's memory cannot be followed")]
    Track(#[from] TrackError),
    /// It could not be read.
    #[error("the service's memory cannot be read")]
    Read(#[from] ProcessError),
    /// Shared memory could not be read or examined.
    #[error("shared memory of the service cannot be {action}")]
    Shared {
        /// What was tried.
        action: &'static str,
        /// What the kernel said.
        #[source]
        source: std::io::Error,
    },
    /// A process came that needs shared memory in place of which pages were to follow.
    #[error(
        "a process has begun in the service that has locked memory, or that can open its shared memory (CAP_SYS_ADMIN, CAP_CHECKPOINT_RESTORE), while that was to follow it; move it again"
    )]
    InPlace,
    /// A thread of ours ended by a panic.
    #[error("a thread that sends pages has failed: {0}; this is a defect of godwit; see godwitd's log")]
    Panic(String),
    /// The migration has ended.
    #[error("the migration has ended before its pages were sent")]
    Stopped,
    /// The kernel has a page and cannot read it: a broken swap disk, or broken memory.
    #[error(
        "the page at {page:#x} of process {pid} exists and cannot be read; check the kernel's log for errors of the memory or the swap"
    )]
    Unreadable {
        /// The process.
        pid: i32,
        /// The page's address.
        page: u64,
    },
    /// The stream takes no more; what is read from it next says why.
    #[error("a stream for pages is no longer writable")]
    Closed,
}

/// What is to be sent of one space.
#[derive(Debug)]
struct Todo {
    process: Arc<Process>,
    /// Pages with content.
    data: RangeSet<u64>,
    /// Pages that are gone, and read as zero.
    zero: RangeSet<u64>,
    /// Of the pages with content, those that CRIU may change for a moment while it dumps.
    executable: RangeSet<u64>,
    /// Of the pages with content, those that the destination has not been told of, once it was told of
    /// some.
    unnamed: Option<RangeSet<u64>>,
}

/// Is told of bytes that went to a stream, and says whether to continue.
pub(crate) type OnProgress<'a> = dyn Fn(u64) -> ControlFlow<()> + Sync + 'a;

/// A process that has ended.
#[derive(Debug)]
struct Ended {
    space: Space,
    /// What was noted of it and not sent; the destination may have been told of it, or have what it was before.
    owed: RangeSet<u64>,
    /// The pages of the process that has its number now.
    lives: RangeSet<u64>,
}

/// What the service does while its pages are sent.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum State {
    /// It runs.
    Running,
    /// It runs, and only its shared memory goes.
    Shared,
    /// It is frozen, and only what a restore needs from its beginning goes: copies of files' pages, and which pages are
    /// gone.
    Needed,
    /// It is frozen and CRIU dumps it: pages that CRIU may change meanwhile stay noted.
    Dumping,
    /// It is frozen.
    Frozen,
}

/// What a call of [`Pages::send`] did.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Sent {
    /// Pages with content.
    pub(crate) pages: u64,
    /// Pages that the destination has as they are.
    pub(crate) same: u64,
    /// Bytes handed to the streams.
    pub(crate) bytes: u64,
    /// Pages examined that were not zero, whether they had to cross or not.
    pub(crate) found: u64,
    /// Of the pages, those of shared memory.
    pub(crate) shared: u64,
}

impl Sent {
    /// Counts what another call did, too.
    pub(crate) fn add(&mut self, other: Self) {
        self.pages += other.pages;
        self.same += other.same;
        self.bytes += other.bytes;
        self.found += other.found;
        self.shared += other.shared;
    }
}

/// The memory of a service that moves.
pub(crate) struct Pages {
    tracker: Tracker,
    todo: BTreeMap<Space, Todo>,
    shared: Shared,
    ended: Vec<Ended>,
    streams: Vec<Stream>,
    /// What the last scan found written in processes that were known before.
    recent: BTreeMap<Space, RangeSet<u64>>,
    /// What the destination retained when the service left it.
    retained: Hashes,
    /// Makes these, and those of the streams.
    key: PageKey,
    pacer: Pacer,
    last_scan: Option<Instant>,
    populated: u64,
}

/// What a scan found.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Found {
    /// Pages to send.
    pub(crate) pages: u64,
    /// Since the scan before.
    pub(crate) since: Duration,
    /// Pages with content that the service has in all.
    pub(crate) populated: u64,
}

impl PagesError {
    fn of_panic(panic: &(dyn std::any::Any + Send)) -> Self {
        let text = panic.downcast_ref::<&str>().map(|text| (*text).to_owned());
        let text = text.or_else(|| panic.downcast_ref::<String>().cloned());
        Self::Panic(text.unwrap_or_else(|| "a panic without a message".into()))
    }
}

impl Pages {
    /// Follows nothing yet. `delta_cache` bytes of pages are kept for deltas.
    pub(crate) fn new(
        backend: Backend,
        streams: usize,
        compress: Compress,
        max_bandwidth: Option<u64>,
        delta_cache: usize,
    ) -> Self {
        let EarlierVisit { hashes: retained, key } = EarlierVisit::none();
        let streams = streams.max(1);
        let stream = || Stream::new(compress, delta_cache / streams);
        Self {
            tracker: Tracker::new(backend),
            todo: BTreeMap::new(),
            shared: Shared::default(),
            ended: Vec::new(),
            recent: BTreeMap::new(),
            streams: (0..streams).map(|_| stream()).collect(),
            retained,
            key,
            pacer: Pacer::new(max_bandwidth),
            last_scan: None,
            populated: 0,
        }
    }

    /// What the destination has of an earlier visit of the service is not sent. Before the first page is.
    pub(crate) fn know_retained(&mut self, EarlierVisit { hashes, key }: EarlierVisit) {
        (self.retained, self.key) = (hashes, key);
    }

    /// Notes what was written since the last scan, in the processes that live now.
    pub(crate) fn scan(&mut self, pids: &[i32], frozen: bool) -> Result<Found, PagesError> {
        let round = self.tracker.round(pids, frozen)?;
        let now = Instant::now();
        let since = self.last_scan.map_or(Duration::ZERO, |last| now - last);
        self.last_scan = Some(now);
        self.populated = 0;
        self.recent.clear();
        self.note(round, since);
        Ok(Found { pages: self.todo_pages(), since, populated: self.populated })
    }

    /// Notes what a scan found, on top of what earlier ones found and what was not sent yet.
    fn note(&mut self, round: Round, since: Duration) {
        for space in round.ended {
            let owed = self.todo.remove(&space).map(Todo::owed).unwrap_or_default();
            self.ended.push(Ended { space, owed, lives: RangeSet::new() });
        }
        for found in round.spaces {
            self.populated += found.populated_pages;
            let before = self.todo.remove(&found.space);
            let todo = self.todo.entry(found.space).or_insert_with(|| Todo::of(&found.process));
            match before {
                Some(before) if before.is_of(&found.process) => {
                    *todo = before;
                    if since > Duration::ZERO {
                        self.recent.insert(found.space, found.written.iter().cloned().collect());
                    }
                }
                // Another process had the number. Its pages are gone, unless this one has them.
                Some(before) => todo.zero = before.owed(),
                None => {}
            }
            for range in found.gone {
                todo.gave_back(range);
            }
            for range in found.written {
                todo.wrote(range);
            }
            todo.executable = found.executable.into_iter().collect();
        }
        for ended in &mut self.ended {
            ended.lives = self.todo.get(&ended.space).map(|todo| todo.data.clone()).unwrap_or_default();
        }
    }

    /// Pages with content that are noted and not sent.
    fn todo_pages(&self) -> u64 {
        self.todo.values().map(|todo| pages_of(&todo.data)).sum::<u64>() + self.shared.todo_pages()
    }

    /// Pages of shared memory that are noted and not sent.
    pub(crate) fn shared_pages(&self) -> u64 {
        self.shared.todo_pages()
    }

    /// Pages of shared memory that stay here for after the commit, and that the destination was told of.
    pub(crate) fn shared_that_stays(&self) -> u64 {
        self.shared.named_pages()
    }

    /// What there is to send, after a scan of the shared memory, too.
    pub(crate) fn with_shared(&self, found: Found) -> Found {
        let populated = found.populated + self.shared.populated_pages();
        Found { pages: self.todo_pages(), populated, ..found }
    }

    /// Sends what is noted, over one sender for each stream. Blocks.
    pub(crate) fn send(
        &mut self,
        senders: &[mpsc::Sender<Message>],
        state: State,
        on_progress: &OnProgress<'_>,
    ) -> Result<Sent, PagesError> {
        let (mut todo, ended) = match state {
            State::Shared => Default::default(),
            State::Needed => (self.take_gone(), std::mem::take(&mut self.ended)),
            _ => (std::mem::take(&mut self.todo), std::mem::take(&mut self.ended)),
        };
        if state == State::Dumping {
            for (space, all) in &mut todo {
                let later = all.take_executable();
                if !later.is_empty() {
                    let later = Todo { data: later, ..Todo::of(&all.process) };
                    self.todo.insert(*space, later);
                }
            }
        }
        let count = self.streams.len();
        let (pacer, retained, key, todo, ended) = (&self.pacer, &self.retained, &self.key, &todo, &ended);
        let shared = &self.shared;
        let part = if state == State::Needed { Part::Copied } else { Part::All };
        // What was announced is waited for, also where it is what the destination has.
        let all = matches!(state, State::Needed | State::Dumping | State::Frozen);
        let results = std::thread::scope(|scope| {
            let threads: Vec<_> = self
                .streams
                .iter_mut()
                .zip(senders)
                .enumerate()
                .map(|(index, (stream, sender))| {
                    scope.spawn(move || {
                        let mut sending = Sending {
                            stream,
                            index,
                            count,
                            sender,
                            retained,
                            key,
                            pacer,
                            on_progress,
                            all,
                            sent: Sent::default(),
                        };
                        sending.work(todo, ended, (shared, part))?;
                        Ok(sending.sent)
                    })
                })
                .collect();
            threads
                .into_iter()
                .map(|thread| thread.join().unwrap_or_else(|panic| Err(PagesError::of_panic(panic.as_ref()))))
                .collect::<Vec<_>>()
        });
        let mut total = Sent::default();
        for result in results {
            total.add(result?);
        }
        self.shared.sent(part);
        Ok(total)
    }

    /// Whether the destination has pages that are gone: a restore would put them into the service.
    pub(crate) fn has_gone(&self) -> bool {
        !self.ended.is_empty() || self.todo.values().any(|todo| !todo.zero.is_empty())
    }

    /// Takes which pages are gone.
    fn take_gone(&mut self) -> BTreeMap<Space, Todo> {
        let with_gone = self.todo.iter_mut().filter(|(_, todo)| !todo.zero.is_empty());
        let take = |(space, todo): (&Space, &mut Todo)| {
            let zero = std::mem::take(&mut todo.zero);
            (*space, Todo { zero, ..Todo::of(&todo.process) })
        };
        with_gone.map(take).collect()
    }

    /// What is noted and was not asked for here before: the destination is to be told of it.
    pub(crate) fn unnamed(&mut self) -> Remaining {
        let mut unnamed = Remaining::default();
        for (space, todo) in &mut self.todo {
            let pages = match todo.unnamed.replace(RangeSet::new()) {
                Some(pages) => pages,
                None => todo.data.clone(),
            };
            unnamed.put(*space, &Owner::Process(Arc::clone(&todo.process)), pages);
        }
        self.shared.name(&mut unnamed);
        unnamed
    }

    /// Whose pages are noted.
    pub(crate) fn owners(&self) -> BTreeMap<Space, Owner> {
        let noted = self.todo.iter().filter(|(_, todo)| !todo.data.is_empty());
        let processes = noted.map(|(space, todo)| (*space, Owner::Process(Arc::clone(&todo.process))));
        processes.chain(self.shared.that_stay()).collect()
    }

    /// Sends no pages with content any more: they stay here for after the commit, to be sent in
    /// another way.
    pub(crate) fn leave(&mut self) -> Leaving {
        let hashes = std::mem::replace(&mut self.retained, no_hashes());
        let retained = Some(EarlierVisit { hashes, key: self.key.clone() });
        let mut leaving = Leaving { retained, ..Leaving::default() };
        for (space, todo) in &mut self.todo {
            let untouched = todo.take_executable();
            let mut rest = std::mem::take(&mut todo.data);
            let mut recent = RangeSet::new();
            if let Some(written) = self.recent.get(space) {
                recent = written.iter().flat_map(|range| within(&rest, range)).collect();
                for range in recent.iter() {
                    rest.remove(range.clone());
                }
            }
            let owner = Owner::Process(Arc::clone(&todo.process));
            leaving.untouched.put(*space, &owner, untouched);
            leaving.recent.put(*space, &owner, recent);
            leaving.rest.put(*space, &owner, rest);
        }
        self.shared.leave(&mut leaving.shared);
        leaving
    }
}

impl Todo {
    fn of(process: &Arc<Process>) -> Self {
        Self {
            process: Arc::clone(process),
            data: RangeSet::new(),
            zero: RangeSet::new(),
            executable: RangeSet::new(),
            unnamed: None,
        }
    }

    /// These pages have content that is to be sent.
    fn wrote(&mut self, range: Range) {
        self.zero.remove(range.clone());
        if let Some(unnamed) = &mut self.unnamed {
            unnamed.insert(range.clone());
        }
        self.data.insert(range);
    }

    /// These pages are gone.
    fn gave_back(&mut self, range: Range) {
        self.data.remove(range.clone());
        if let Some(unnamed) = &mut self.unnamed {
            unnamed.remove(range.clone());
        }
        self.zero.insert(range);
    }

    /// All that is noted.
    fn owed(self) -> RangeSet<u64> {
        let mut owed = self.zero;
        owed.extend(self.data);
        owed
    }

    fn is_of(&self, process: &Arc<Process>) -> bool {
        Arc::ptr_eq(&self.process, process)
    }

    fn take_executable(&mut self) -> RangeSet<u64> {
        let later: RangeSet<u64> =
            self.executable.iter().flat_map(|range| within(&self.data, range)).collect();
        for range in later.iter() {
            self.data.remove(range.clone());
        }
        later
    }
}

/// Fails where a page of a frozen process has content, and reading it found none.
pub(super) fn is_empty(process: &Process, vanished: &Range) -> Result<(), PagesError> {
    match process.first_with_content(vanished)? {
        None => Ok(()),
        Some(page) => Err(PagesError::Unreadable { pid: process.pid(), page }),
    }
}

#[cfg(test)]
mod tests;
