//! What a restored process has where it should lack a page of the source, or an area for it.
//!
//! CRIU restores a process with the pages that its images have, and leaves the others to be filled. A page
//! of another origin hides the service's own: the kernel makes 512 pages, all but one of zeros, of one
//! that is touched where transparent huge pages are `always`. So nothing that "exists already" is taken
//! for ours unless it is known to be:
//!
//! | found | then |
//! |---|---|
//! | a page that CRIU's images have | right: CRIU has put it there |
//! | a guard page | right: the process has given up what was there, and the kernel does not tell |
//! | any other page | the pager fails: before the commit the move is given up, after it the service is lost |
//! | no watched area, and private memory there | the same, except in forked processes, which need not have it |

use std::io;

use rangemap::RangeSet;

use super::super::index::IndexError;
use super::super::protocol::{Extent, Restored};
use super::super::tables::Tables;
use super::{Live, LiveId, State};
use crate::process::ProcessError;
use crate::{PAGE_SIZE, Space};

impl State {
    /// CRIU puts these pages in place.
    pub(crate) fn in_images(&mut self, extent: &Extent) -> Result<(), IndexError> {
        self.in_images.entry(extent.space).or_default().insert(extent.range()?);
        Ok(())
    }

    /// A child of the process has this area empty.
    pub(crate) fn wiped_on_fork(&mut self, extent: &Extent) -> Result<(), IndexError> {
        self.wiped.entry(extent.space).or_default().insert(extent.range()?);
        Ok(())
    }

    /// Checks these restored processes, which do not run: one that has a page where it lacks one has
    /// not been restored as it was. With the last of them all are known.
    pub(crate) fn verify(&mut self, processes: &[Restored], last: bool) -> Result<(), String> {
        if !self.restore_finished {
            return Err("the restore is not finished: there is nothing to verify".into());
        }
        let verified = self.examine(processes).and_then(|()| if last { self.all_examined() } else { Ok(()) });
        match &verified {
            Ok(()) if last => {
                self.is_verified = true;
                self.forget_unshown();
                self.check_shared();
                for id in self.lives.keys().copied().collect::<Vec<_>>() {
                    self.close_if_empty(id);
                }
            }
            Ok(()) => {}
            Err(reason) => self.fail(reason.clone()),
        }
        match self.failed.clone() {
            None => Ok(()),
            Some(reason) => Err(reason),
        }
    }

    fn examine(&mut self, processes: &[Restored]) -> Result<(), String> {
        for Restored { space, pid } in processes {
            let live = self.lives.iter_mut().find(|(_, live)| live.space == *space && !live.is_forked);
            // One without memory that comes from here needs no check.
            let Some((&id, live)) = live else {
                if self.lacks_shared() && !self.lives.values().any(|live| live.space == *space) {
                    let tables = i32::try_from(*pid).map_err(|error| error.to_string())?;
                    let tables = Tables::open(tables, *space).map_err(|error| error.to_string())?;
                    self.shows_none(*space, &tables)?;
                }
                continue;
            };
            let cannot = |error: &dyn std::fmt::Display| {
                format!("cannot check whether process {space} was restored as it was: {error}")
            };
            let tables = i32::try_from(*pid).map_err(|error| cannot(&error))?;
            let tables = Tables::open(tables, *space).map_err(|error| cannot(&error))?;
            let (none, span) = (RangeSet::new(), live.layout.span().unwrap_or_default());
            let in_images = self.in_images.get(space).unwrap_or(&none);
            // What it has is little, and what it lacks are thousands of ranges: the service is frozen.
            let has = tables.populated(&span).map_err(|error| cannot(&error))?;
            let lacking = has.iter().flat_map(|range| live.layout.destinations_but(range, in_images));
            let found = tables.first_page(lacking).map_err(|error| cannot(&error))?;
            live.tables = Some(tables);
            if let Some(address) = found {
                return Err(foreign(*space, address));
            }
            if self.lacks_shared() {
                self.watch_shared(*space, id)?;
            }
        }
        Ok(())
    }

    fn all_examined(&self) -> Result<(), String> {
        match self.lives.values().find(|live| live.tables.is_none() && !live.is_forked) {
            None => Ok(()),
            Some(live) => Err(format!(
                "process {} of the service is not found among those that CRIU restored; see CRIU's log",
                live.space
            )),
        }
    }

    /// Why the page that this process has here already cannot be right; none where it is.
    pub(super) fn foreign_page(&self, id: LiveId, destination: u64) -> Option<String> {
        let live = self.lives.get(&id)?;
        if self.is_in_images(live, destination) {
            return None;
        }
        // A guard page (MADV_GUARD_INSTALL), of which the kernel does not tell: the process has given up
        // what was there.
        let has_page = match &live.tables {
            Some(tables) => tables.has_page(destination),
            None if live.is_forked => self.descendant_has_page(live.space, destination),
            None => Ok(true),
        };
        match has_page {
            Ok(false) => None,
            Ok(true) => Some(foreign(live.space, destination)),
            Err(error) => Some(format!("{} ({error})", foreign(live.space, destination))),
        }
    }

    /// Whether none of the processes that a forked one may be, of which the kernel tells no PID, has a guard
    /// page here.
    fn descendant_has_page(&self, space: Space, destination: u64) -> io::Result<bool> {
        let mut same = self.lives.values().filter(|live| live.space == space);
        match same.find_map(|live| live.tables.as_ref()) {
            Some(ancestor) => Ok(!ancestor.has_relative_with_guard(destination)?),
            None => Ok(true),
        }
    }

    /// Why it is wrong that this process has no watched area here; none where it is not.
    pub(super) fn unwatched_area(&self, id: LiveId, destination: u64) -> Option<String> {
        let live = self.lives.get(&id)?;
        // A forked process may lack areas of its parent (MADV_DONTFORK), and have others there.
        if live.is_forked || self.is_in_images(live, destination) {
            return None;
        }
        // What was unmapped without a word of the kernel (shmat(2) over it) is nobody's loss.
        match live.tables.as_ref()?.has_private_area(destination) {
            Ok(false) => None,
            // It has ended.
            Err(ProcessError::Gone { .. }) => None,
            Ok(true) => Some(unwatched(live.space, destination, "CRIU has not left it to be filled")),
            Err(error) => Some(unwatched(live.space, destination, &error.to_string())),
        }
    }

    fn is_in_images(&self, live: &Live, destination: u64) -> bool {
        let origin = live.layout.origin(destination);
        let ranges = self.in_images.get(&live.space);
        ranges.zip(origin).is_some_and(|(ranges, origin)| ranges.contains(&origin))
    }

    /// What a process has here is its own.
    pub(super) fn pass_over(&mut self, id: LiveId, destination: u64) {
        let page = destination..destination + PAGE_SIZE;
        if let Some(live) = self.lives.get(&id) {
            live.uffd.wake(&page);
        }
        self.no_longer_lacking(id, &page);
    }
}

/// That a process has a page that it should lack, and what to do.
fn foreign(space: Space, address: u64) -> String {
    format!(
        "process {space} has a page at {address:#x} that was put there neither by CRIU's images nor by godwit, \
         and that hides the service's own; move it again, and if that fails in the same way, turn off transparent huge pages on this node (echo never >/sys/kernel/mm/transparent_hugepage/enabled) or start its godwitd \
         with --userfaultfd off, and report it with CRIU's log"
    )
}

/// That a page has no place in a process, and what to do.
fn unwatched(space: Space, address: u64, why: &str) -> String {
    format!(
        "the page {address:#x} of process {space} has no place in the restored process: {why}; start this \
         node's godwitd with --userfaultfd off, and report it with CRIU's log"
    )
}
