//! How writes to one process are noticed, and one scan of its pages.

mod frozen;

use std::fs::File;
use std::os::fd::AsFd;

use nix::errno::Errno;

use super::inject::{self, InjectError};
use super::kernel::{Protect, Scanner, Userfault};
use super::{Backend, TrackError, entries, ranges};
use crate::Range;
use crate::process::{Area, AreaKind, Process, ProcessError};

/// How writes to a process are noticed.
#[derive(Debug)]
pub(super) enum Watch {
    /// Not yet.
    New,
    /// By a userfaultfd of its address space.
    Uffd {
        userfault: Userfault,
        /// Whether nothing else watches. Until then marks mean nothing: an earlier userfaultfd works as long as a copy of
        /// its descriptor exists, as in a process that was forked and has not executed another program.
        is_alone: bool,
        /// Areas that it does not take, such as memory that the kernel may drop: glibc has had some in
        /// each program since 2.41.
        refused: Vec<Range>,
    },
    /// By soft-dirty bits.
    SoftDirty {
        /// The bits tell of all writes since an earlier scan.
        cleared: bool,
        /// Why the process could not be stopped to clear them; none when it could.
        refusal: Option<String>,
    },
    /// Not at all.
    Refused {
        /// Why.
        reason: String,
        /// Whether trying again is of no use.
        lasting: bool,
    },
}

/// What a scan of a process found.
#[derive(Debug, Default)]
pub(super) struct Found {
    /// Pages that there are.
    pub(super) populated: Vec<Range>,
    /// Those of them that count as written.
    pub(super) written: Vec<Range>,
    /// Executable areas.
    pub(super) executable: Vec<Range>,
}

/// What a scan may do.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Manner {
    /// Watches what is not watched, and gives up when the address space is another one.
    First,
    /// Watches what is not watched.
    Second,
    /// The process is frozen and this may be the last scan: what is not watched counts as written.
    Frozen,
}

impl Watch {
    /// Why writes are not noticed; none when they are.
    pub(super) fn refusal(&self) -> Option<&str> {
        match self {
            Self::Refused { reason, .. } => Some(reason),
            Self::SoftDirty { refusal, .. } => refusal.as_deref(),
            Self::New | Self::Uffd { .. } => None,
        }
    }

    /// Scans the pages of the process, and begins to watch what is not watched yet.
    pub(super) fn scan(
        &mut self,
        backend: Backend,
        process: &Process,
        scanner: &mut Scanner,
        frozen: bool,
    ) -> Result<Found, TrackError> {
        if backend == Backend::SoftDirty {
            return self.scan_soft_dirty(process, frozen);
        }
        if backend == Backend::Uffd && !frozen {
            self.prepare(process)?;
            if let Some(found) = self.scan_areas(process, scanner, Manner::First)? {
                return Ok(found);
            }
            // After exec(2) the userfaultfd belongs to an address space that is no more.
            *self = Self::New;
            self.prepare(process)?;
        }
        let manner = if frozen { Manner::Frozen } else { Manner::Second };
        Ok(self.scan_areas(process, scanner, manner)?.unwrap_or_default())
    }

    /// Reads the bits and clears them. A write in between would be lost, so nothing runs meanwhile.
    fn scan_soft_dirty(&mut self, process: &Process, frozen: bool) -> Result<Found, TrackError> {
        let known = matches!(self, Self::SoftDirty { cleared: true, .. });
        let mut refusal = None;
        let mut cleared = known;
        let mut found = None;
        if !frozen {
            let read_and_clear = || {
                let found = soft_dirty(process, !known)?;
                process.clear_soft_dirty()?;
                Ok::<_, TrackError>(found)
            };
            match inject::while_stopped(process, read_and_clear) {
                Ok(result) => {
                    found = Some(result?);
                    cleared = true;
                }
                Err(InjectError::Gone) => return Err(ProcessError::Gone { pid: process.pid() }.into()),
                Err(InjectError::Refused { reason, .. }) => refusal = Some(reason),
            }
        }
        // The bits stay set in this case: the next scan finds these pages again.
        let found = match found {
            Some(found) => found,
            None => soft_dirty(process, !(known && frozen))?,
        };
        *self = Self::SoftDirty { cleared, refusal };
        Ok(found)
    }

    /// Gets a userfaultfd of the process, if that is of use.
    fn prepare(&mut self, process: &Process) -> Result<(), TrackError> {
        if matches!(self, Self::Uffd { .. } | Self::Refused { lasting: true, .. }) {
            return Ok(());
        }
        *self = match inject::userfaultfd(process) {
            Ok(fd) => match Userfault::new(fd) {
                Ok(userfault) => Self::Uffd { userfault, is_alone: false, refused: Vec::new() },
                Err(errno) => Self::Refused {
                    reason: format!("this kernel's userfaultfd does not note writes: {}", errno.desc()),
                    lasting: true,
                },
            },
            Err(InjectError::Gone) => return Err(ProcessError::Gone { pid: process.pid() }.into()),
            Err(InjectError::Refused { reason, lasting }) => Self::Refused { reason, lasting },
        };
        Ok(())
    }

    /// The pages of all areas; none when the watched address space is no longer the process's.
    fn scan_areas(
        &mut self,
        process: &Process,
        scanner: &mut Scanner,
        manner: Manner,
    ) -> Result<Option<Found>, TrackError> {
        let areas = process.areas()?;
        // Opened anew each time: it stays with the address space that it was opened for.
        let pagemap = process.open_file("pagemap")?;
        let private: Vec<&Area> = areas.iter().filter(|area| area.kind == AreaKind::Private).collect();
        let mut pages: Vec<Option<Found>> = private.iter().map(|_| None).collect();
        if let Self::Uffd { userfault, is_alone, refused } = self {
            if *is_alone && manner == Manner::Frozen {
                pages = frozen::scan(&private, (process, &pagemap), scanner);
            } else if *is_alone {
                for (area, pages) in private.iter().zip(&mut pages) {
                    *pages = pages_of(scanner, &pagemap, &area.range, Protect::Yes, false).ok();
                }
            }
            // The others are not watched, or not wholly. Some of their pages may have been protected just now without
            // being reported, so from here on all of them count as written.
            let ranges = |watched: bool| {
                let areas = private.iter().zip(&pages).filter(|(_, pages)| pages.is_some() == watched);
                areas.map(|(area, _)| area.range.clone()).collect::<Vec<_>>()
            };
            let (watched, mut unwatched) = (ranges(true), ranges(false));
            if manner != Manner::Frozen && !unwatched.is_empty() {
                let beginning = Beginning { userfault, is_alone, process, scanner, pagemap: &pagemap };
                match beginning.begin(refused, &watched, &mut unwatched) {
                    Ok(()) => {}
                    Err(Begin::Process(error)) => return Err(error.into()),
                    Err(Begin::Replaced) if manner == Manner::First => return Ok(None),
                    Err(Begin::Replaced) => unwatched.clear(),
                    // Without the userfaultfd nothing is watched, and all counts as written.
                    Err(Begin::Marked(reason)) => {
                        *self = Self::Refused { reason, lasting: false };
                        return self.scan_areas(process, scanner, manner);
                    }
                }
                for (area, pages) in private.iter().zip(&mut pages) {
                    if pages.is_some() || !unwatched.contains(&area.range) {
                        continue;
                    }
                    match pages_of(scanner, &pagemap, &area.range, Protect::Yes, true) {
                        Ok(found) => *pages = Some(found),
                        // What is watched is another address space.
                        Err(Errno::EPERM) if manner == Manner::First => return Ok(None),
                        // It has changed again.
                        Err(_) => {}
                    }
                }
            }
        }
        let mut found = Found::default();
        for (area, pages) in private.iter().zip(pages) {
            if area.executable {
                ranges::push(&mut found.executable, area.range.clone());
            }
            let pages = match pages {
                Some(pages) => pages,
                None => pages_of(scanner, &pagemap, &area.range, Protect::No, true)
                    .map_err(|errno| not_listed(process, &area.range, errno))?,
            };
            pages.populated.into_iter().for_each(|range| ranges::push(&mut found.populated, range));
            pages.written.into_iter().for_each(|range| ranges::push(&mut found.written, range));
        }
        Ok(Some(found))
    }
}

/// The pages of a process, of which those count as written that are soft-dirty, or all.
fn soft_dirty(process: &Process, all: bool) -> Result<Found, TrackError> {
    let areas = process.areas()?;
    let pagemap = process.open_file("pagemap")?;
    let mut found = Found::default();
    for area in areas.iter().filter(|area| area.kind == AreaKind::Private) {
        if area.executable {
            ranges::push(&mut found.executable, area.range.clone());
        }
        let pages = entries::pages(&pagemap, &area.range, |range, dirty| {
            if all || dirty {
                ranges::push(&mut found.written, range.clone());
            }
            ranges::push(&mut found.populated, range);
        });
        pages.map_err(|errno| not_listed(process, &area.range, errno))?;
    }
    Ok(found)
}

fn not_listed(process: &Process, range: &Range, errno: Errno) -> TrackError {
    match errno {
        Errno::ESRCH => ProcessError::Gone { pid: process.pid() }.into(),
        errno => TrackError::Scan { pid: process.pid(), range: range.clone(), errno },
    }
}

/// Why watching did not begin.
enum Begin {
    /// The address space that is watched is no longer the process's.
    Replaced,
    Process(ProcessError),
    /// Marks of an earlier watch cannot be taken away, for this reason.
    Marked(String),
}

/// What it takes to begin.
struct Beginning<'a> {
    userfault: &'a Userfault,
    is_alone: &'a mut bool,
    process: &'a Process,
    scanner: &'a mut Scanner,
    pagemap: &'a File,
}

/// Areas that are watched now and were not when the scan began.
#[derive(Default)]
struct Begun {
    /// All of them.
    all: Vec<Range>,
    /// Those that were not watched before.
    fresh: Vec<Range>,
    /// Areas that cannot be watched.
    refused: Vec<Range>,
    /// Another userfaultfd watches some.
    has_another: bool,
}

impl Beginning<'_> {
    /// Begins to watch areas, and leaves in the list those that are watched.
    ///
    /// For the kernel, a watched part and the rest are two areas, and mremap(2) fails over both. So an area is watched as
    /// a whole, and the process does not run between listing and watching: otherwise it could change the area in between.
    fn begin(
        self,
        refused: &mut Vec<Range>,
        watched: &[Range],
        unwatched: &mut Vec<Range>,
    ) -> Result<(), Begin> {
        unwatched.retain(|range| !refused.contains(range));
        if unwatched.is_empty() {
            return Ok(());
        }
        let Self { userfault, is_alone, process, scanner, pagemap } = self;
        let begun = match inject::while_stopped(process, || {
            watch_all(userfault, process, watched, |area| {
                // Where the kernel does not say, the address space is another one; watching it finds that out.
                *is_alone && scanner.is_watched(pagemap.as_fd(), area).unwrap_or(false)
            })
        }) {
            Ok(begun) => begun?,
            Err(InjectError::Gone) => return Err(Begin::Process(ProcessError::Gone { pid: process.pid() })),
            // The next scan tries again.
            Err(InjectError::Refused { .. }) => {
                unwatched.clear();
                return Ok(());
            }
        };
        *is_alone = !begun.has_another;
        *refused = begun.refused;
        let whole =
            |range: &Range| begun.all.iter().any(|area| area.start <= range.start && range.end <= area.end);
        unwatched.retain(whole);
        // Nothing in these has been protected yet: whatever is marked was left by an earlier watch.
        let mut marked = Vec::new();
        for area in &begun.fresh {
            let left = scanner.marked(pagemap.as_fd(), area);
            marked.extend(
                left.map_err(|errno| Begin::Marked(format!("its pages cannot be listed: {}", errno.desc())))?,
            );
        }
        if marked.is_empty() {
            return Ok(());
        }
        let unmark = || marked.iter().try_for_each(|pages| userfault.unmark(pages));
        match inject::while_stopped(process, unmark) {
            Ok(Ok(())) => Ok(()),
            Ok(Err(errno)) => {
                Err(Begin::Marked(format!("its pages cannot be unprotected: {}", errno.desc())))
            }
            Err(InjectError::Gone) => Err(Begin::Process(ProcessError::Gone { pid: process.pid() })),
            Err(InjectError::Refused { reason, .. }) => Err(Begin::Marked(reason)),
        }
    }
}

/// Watches all areas of a process that does not run, except those that are watched already, according to the list or the
/// function.
fn watch_all(
    userfault: &Userfault,
    process: &Process,
    watched: &[Range],
    mut is_watched: impl FnMut(&Range) -> bool,
) -> Result<Begun, Begin> {
    let mut begun = Begun::default();
    let areas = process.areas_at_once().map_err(Begin::Process)?;
    for Area { range, .. } in areas.into_iter().filter(|area| area.kind == AreaKind::Private) {
        let listed = watched.binary_search_by_key(&range.start, |range| range.start);
        if listed.is_ok_and(|at| watched.get(at) == Some(&range)) {
            continue;
        }
        let before = is_watched(&range);
        match userfault.watch(&range) {
            Ok(()) if before => begun.all.push(range),
            Ok(()) => {
                begun.fresh.push(range.clone());
                begun.all.push(range);
            }
            Err(Errno::ENOMEM | Errno::ESRCH) => return Err(Begin::Replaced),
            Err(Errno::EBUSY) => begun.has_another = true,
            Err(_) => begun.refused.push(range),
        }
    }
    Ok(begun)
}

/// The pages of a range, and those that were written; all of them when `all` says so.
fn pages_of(
    scanner: &mut Scanner,
    pagemap: &File,
    range: &Range,
    protect: Protect,
    all: bool,
) -> Result<Found, Errno> {
    let mut found = Found::default();
    let mut add = |range: Range, written| {
        if all || written {
            ranges::push(&mut found.written, range.clone());
        }
        ranges::push(&mut found.populated, range);
    };
    match scanner.scan(pagemap.as_fd(), range, protect, &mut add) {
        // Linux before 6.7.
        Err(Errno::ENOTTY) if protect == Protect::No => entries::pages(pagemap, range, add)?,
        result => result?,
    }
    Ok(found)
}
