//! Which pages of a service exist and which were written since the last scan, without stopping it.
//!
//! A scan ([`Tracker::round`]) gives, for each process, the pages to read now and the pages that are
//! gone. A receiver that after each scan reads the former and forgets the latter has the exact memory of
//! the service once a scan was made while it was frozen. A page is protected before it is read, so the
//! next scan sees a write in between. A page whose history is not certain counts as written.
//!
//! ```text
//!              first sight, exec, an area not watched yet         each scan
//! process ──▶ userfaultfd made inside (inject) ──▶ watch area ──▶ PAGEMAP_SCAN: populated, written,
//!                         │                                       protected again in one step
//!                         └─ refused: everything populated counts as written
//! ```

mod detect;
mod entries;
mod events;
mod inject;
mod kernel;
mod ranges;
mod same;
mod shared;
mod watch;

use std::collections::{BTreeMap, BTreeSet};
use std::os::fd::AsFd as _;
use std::sync::Arc;
use std::time::{Duration, Instant};

use nix::errno::Errno;
use thiserror::Error;

pub use detect::{Detected, detect, pagemap_scan};
pub(crate) use entries::copied as copied_entries;
pub use events::shared_writes;

pub(crate) use self::kernel::{Protect, Scanner};
use self::shared::History;
use self::watch::Watch;
use crate::process::{Process, ProcessError};
use crate::{Range, Space};

/// How long a read past the page cache may be under way. The kernel notes the write when such a read
/// begins, and the device writes later, unnoticed: pages it may still have written to count as
/// written again for so long.
const DIRECT_READ_LIMIT: Duration = Duration::from_secs(2);

/// The same for the first scan of a process, after which all of its pages would count as written
/// again: it waits instead for reads that are under way. No event tells of their end.
const DIRECT_READ_PAUSE: Duration = Duration::from_millis(100);

/// How writes are noticed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Backend {
    /// userfaultfd's asynchronous write protection and `PAGEMAP_SCAN` (Linux 6.7).
    Uffd,
    /// The soft-dirty bit of page tables (x86-64 kernels with `CONFIG_MEM_SOFT_DIRTY`).
    SoftDirty,
    /// Not at all: all pages count as written at each scan.
    None,
}

impl Backend {
    /// Its name in reports and on command lines.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Uffd => "uffd",
            Self::SoftDirty => "soft-dirty",
            Self::None => "none",
        }
    }
}

/// Why a scan failed. The next one counts all pages as written.
#[derive(Debug, Error)]
pub enum TrackError {
    /// A process could not be examined.
    #[error(transparent)]
    Process(#[from] ProcessError),
    /// Two processes have one number inside the service.
    #[error(
        "processes {pid} and {other} both have the PID {space} inside the service: it has PID namespaces of its own, and CRIU cannot move it"
    )]
    SameSpace {
        /// In the node's PID namespace.
        pid: i32,
        /// In the node's PID namespace.
        other: i32,
        /// Inside the service.
        space: Space,
    },
    /// The kernel refused to tell the pages of a process.
    #[error("process {pid}: its pages at {:#x}..{:#x} cannot be listed: {}; move the service in mode cold or postcopy", range.start, range.end, errno.desc())]
    Scan {
        /// In the node's PID namespace.
        pid: i32,
        /// Where.
        range: Range,
        /// What the kernel said.
        errno: Errno,
    },
}

/// What a scan of all processes of a service found. The receiver forgets [`Round::ended`] before it
/// applies [`Round::spaces`].
#[derive(Debug, Default)]
pub struct Round {
    /// One for each process.
    pub spaces: Vec<SpaceRound>,
    /// Spaces of earlier scans that are gone.
    pub ended: Vec<Space>,
}

/// What a scan of one process found. All ranges are ascending and apart from each other.
#[derive(Debug)]
pub struct SpaceRound {
    /// Its PID inside the service.
    pub space: Space,
    /// To read from.
    pub process: Arc<Process>,
    /// Populated pages that may differ from what they were at the scan before.
    pub written: Vec<Range>,
    /// Pages that earlier scans gave as written and that are gone: they read as zeros, or are not mapped, or are carried
    /// by CRIU.
    pub gone: Vec<Range>,
    /// Pages that there are.
    pub populated_pages: u64,
    /// Executable areas. CRIU's parasite may write there during its dump, so that their pages are to be read after it,
    /// whenever they were found written.
    pub executable: Vec<Range>,
    /// Why writes to this process cannot be noticed, so that all its pages count as written; none
    /// when they are.
    pub unwatched: Option<String>,
}

/// Tracks the processes of one service. Dropping it ends the write protection.
#[derive(Debug)]
pub struct Tracker {
    backend: Backend,
    spaces: BTreeMap<Space, Tracked>,
    scanner: Scanner,
    /// Whether the last scan gave its findings to the caller.
    complete: bool,
    history: History,
}

#[derive(Debug)]
struct Tracked {
    process: Arc<Process>,
    /// Populated pages that were given to the caller as written at some time, and not as gone since.
    known: Vec<Range>,
    /// Pages that a device may still write to: what was written, and when that was seen.
    direct: Vec<(Instant, Vec<Range>)>,
    watch: Watch,
}

/// Where a process has pages in an area of private memory that is of no file; nothing is watched for that.
///
/// # Errors
/// [`ProcessError::Gone`] when the process has ended.
pub fn populated(process: &Process, area: &Range) -> Result<Vec<Range>, ProcessError> {
    let pagemap = process.open_file("pagemap")?;
    let mut found = Vec::new();
    let each = |pages, _| ranges::push(&mut found, pages);
    let scanned = match Scanner::small().scan(pagemap.as_fd(), area, Protect::No, each) {
        // Before Linux 6.7.
        Err(Errno::ENOTTY) => entries::pages(&pagemap, area, |pages, _| ranges::push(&mut found, pages)),
        scanned => scanned,
    };
    scanned.map_err(|errno| process.failed("read its page tables", errno.into()))?;
    Ok(found)
}

impl Tracker {
    /// A tracker that has seen nothing yet.
    pub fn new(backend: Backend) -> Self {
        let history = History::default();
        Self { backend, spaces: BTreeMap::new(), scanner: Scanner::new(), complete: true, history }
    }

    /// Begins to watch writes to these segments of shared anonymous memory, by their inodes, and to no others, in
    /// processes that a scan has seen. Where that does not work, [`Tracker::shared`] says nothing.
    pub fn watch_shared(&mut self, inodes: &BTreeSet<u64>, pids: &[i32]) {
        let Self { backend, spaces, scanner, history, .. } = self;
        if *backend != Backend::Uffd {
            return;
        }
        history.watch(inodes, pids, scanner, |pid| {
            let tracked = spaces.values().find(|tracked| tracked.process.pid() == pid)?;
            match &tracked.watch {
                Watch::Uffd { userfault, .. } => Some((&tracked.process, userfault)),
                _ => None,
            }
        });
    }

    /// The pages of the watched segments that may have been written since the last call, by the inode of each, as
    /// offsets in it; without order, and some more than once. None where that is not certain: then it may be any page.
    /// `pids` and `frozen` as for [`Tracker::round`]; the list was made after the last [`Tracker::watch_shared`].
    pub fn shared(&mut self, pids: &[i32], frozen: bool) -> Option<BTreeMap<u64, Vec<Range>>> {
        self.history.scan(pids, &mut self.scanner, frozen)
    }

    /// One scan of all processes of the service: `pids` are those that live now, in the node's PID
    /// namespace, without threads. `frozen` says that none of them can run until after the scan; then
    /// nothing is run inside them. A scan with `frozen` unset must not meet a freezer.
    ///
    /// # Errors
    /// [`TrackError`] when a process that lives cannot be examined.
    pub fn round(&mut self, pids: &[i32], frozen: bool) -> Result<Round, TrackError> {
        // A scan that failed has protected pages without reporting them.
        let certain = std::mem::replace(&mut self.complete, false);
        let mut round = Round::default();
        let mut seen = Vec::new();
        for &pid in pids {
            match self.scan(pid, frozen, certain) {
                Ok(Some(space)) => {
                    seen.push(space.space);
                    round.spaces.push(space);
                }
                Ok(None) | Err(TrackError::Process(ProcessError::Gone { .. })) => {}
                Err(error) => return Err(error),
            }
        }
        self.spaces.retain(|space, _| {
            let stays = seen.contains(space);
            if !stays {
                round.ended.push(*space);
            }
            stays
        });
        self.complete = true;
        Ok(round)
    }

    /// A scan of one process; none when the process is to be skipped.
    fn scan(&mut self, pid: i32, frozen: bool, certain: bool) -> Result<Option<SpaceRound>, TrackError> {
        let (process, unwatched) = match self.tracked(pid) {
            Some(tracked) => (Arc::clone(&tracked.process), matches!(tracked.watch, Watch::New)),
            None => (Arc::new(Process::open(pid)?), true),
        };
        // A child of vfork(2) has its parent's memory until it executes a program. A scan of one would remove the
        // marks that the scan of the other needs.
        let shares = |other: &Tracked| other.process.pid() != pid && same::memory(pid, other.process.pid());
        if !frozen && unwatched && self.spaces.values().any(shares) {
            return Ok(None);
        }
        let space = process.space();
        if let Some(other) = self.spaces.get(&space).filter(|other| !other.process.has_ended())
            && other.process.pid() != pid
        {
            return Err(TrackError::SameSpace { pid, other: other.process.pid(), space });
        }
        let told = self.spaces.contains_key(&space);
        let mut tracked = match self.spaces.remove(&space) {
            Some(tracked) if Arc::ptr_eq(&tracked.process, &process) => tracked,
            // Another process had the number before: its pages are gone, unless the new one has them.
            before => {
                let known = before.map(|tracked| tracked.known).unwrap_or_default();
                Tracked { process, known, direct: Vec::new(), watch: Watch::New }
            }
        };
        let first = tracked.known.is_empty();
        let found = tracked.watch.scan(self.backend, &tracked.process, &mut self.scanner, frozen);
        let result = found.map(|found| {
            let mut written = match certain {
                true => ranges::union(&found.written, &ranges::subtract(&found.populated, &tracked.known)),
                false => found.populated.clone(),
            };
            let seen = written.clone();
            for (_, again) in &tracked.direct {
                written = ranges::union(&written, &ranges::intersect(again, &found.populated));
            }
            tracked.direct.retain(|(time, _)| time.elapsed() < DIRECT_READ_LIMIT);
            if frozen {
                // Reads end before a process is frozen.
            } else if !tracked.process.uses_direct_io() {
                tracked.direct.clear();
            } else if first {
                std::thread::sleep(DIRECT_READ_PAUSE);
            } else {
                tracked.direct.push((Instant::now(), seen));
            }
            let round = SpaceRound {
                space,
                process: Arc::clone(&tracked.process),
                gone: ranges::subtract(&tracked.known, &found.populated),
                populated_pages: ranges::pages(&found.populated),
                executable: found.executable,
                written,
                unwatched: tracked.watch.refusal().map(str::to_owned),
            };
            tracked.known = found.populated;
            Some(round)
        });
        // Even after an error, if the caller knows the space: it has to be told what is gone.
        if told || result.is_ok() {
            self.spaces.insert(space, tracked);
        }
        result
    }

    /// The process with this PID if it was seen before.
    fn tracked(&self, pid: i32) -> Option<&Tracked> {
        self.spaces.values().find(|tracked| tracked.process.pid() == pid && !tracked.process.has_ended())
    }
}
