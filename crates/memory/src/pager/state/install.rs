//! How a page comes into a process: a fault is answered, or the push puts it there unasked.

use super::super::index::Place;
use super::super::layout::clip;
use super::super::uffd::Outcome;
use super::{LiveId, State, Work, fault};
use crate::{PAGE_SIZE, Space};

/// Pages of one UFFDIO_COPY of the push: 128 KiB, which a fault waits for at most: some 80 µs where
/// memory is copied at 1.6 GB/s.
const CHUNK: u64 = 32;

/// Bytes of the window around a page that is waited for, out of which its neighbours come with it: 64 KiB, as the
/// kernel maps around a fault in a file (`fault_around_bytes`). Copying them takes less than the next fault would.
const AROUND: u64 = 16 * PAGE_SIZE;

/// How an installation went.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Progress {
    Complete,
    Later,
    Ended,
    /// The pager has failed: nothing more is put anywhere.
    Failed,
}

impl State {
    /// Installs one chunk in one process.
    pub(super) fn push_chunk(&mut self) -> Work {
        let Some((space, range, slot)) = self.index.last_put(CHUNK) else { return Work::Wait };
        if self.is_shared(space) {
            let is_filled = self.fill(space, &range, slot);
            self.check_shared();
            return if is_filled { Work::Go } else { Work::Wait };
        }
        let found = self
            .lives
            .iter()
            .filter(|(_, live)| live.space == space)
            .find_map(|(id, live)| live.layout.first_lacking(&range).map(|part| (*id, part)));
        let Some((id, (part, destination))) = found else {
            self.release(space, &range);
            return Work::Go;
        };
        let slot = slot + (part.start - range.start) / PAGE_SIZE;
        let progress = self.install(id, destination, slot, (part.end - part.start) / PAGE_SIZE);
        self.close_if_empty(id);
        match progress {
            Progress::Complete | Progress::Ended => Work::Go,
            Progress::Later => Work::Backoff,
            Progress::Failed => Work::Wait,
        }
    }

    /// Answers a fault, or remembers it. A minor one is at shared memory that has a page there.
    pub(super) fn serve(&mut self, id: LiveId, destination: u64, is_minor: bool) {
        let Some(live) = self.lives.get_mut(&id) else { return };
        let space = live.space;
        let place = live.layout.origin(destination).map(|origin| (origin, self.index.get(space, origin)));
        let progress = match place {
            _ if live.view.shows(destination) => {
                let Some(progress) = self.serve_shown(id, destination, is_minor) else { return };
                progress
            }
            Some((origin, Some(Place::Stored(slot)))) => {
                let (before, after) = self.neighbours(id, destination, origin);
                self.install(id, destination - before * PAGE_SIZE, slot - before, before + after)
            }
            Some((origin, Some(Place::Pending))) => {
                return self.await_page(space, origin, (id, destination));
            }
            Some((origin, None)) => {
                self.fail(format!(
                    "process {space} waits at {destination:#x} for the page {origin:#x} of the source, which the pager no longer knows: this is a defect of godwit; please report it with the pager's log"
                ));
                Progress::Failed
            }
            None if live.view.is_known => {
                let Some(progress) = self.serve_unknown(id, destination, is_minor) else { return };
                progress
            }
            None => self.install_zero(id, destination),
        };
        match progress {
            Progress::Complete => self.faults += 1,
            Progress::Later => {
                self.retry.insert((id, destination, is_minor));
            }
            Progress::Ended | Progress::Failed => {}
        }
        self.close_if_empty(id);
    }

    /// Remembers who waits for a page, and asks for it the first time.
    pub(super) fn await_page(&mut self, space: Space, origin: u64, waiter: (LiveId, u64)) {
        let waiters = self.waiting.entry((space, origin)).or_insert_with(|| {
            self.events.push_back(fault(space, origin));
            Vec::new()
        });
        if !waiters.contains(&waiter) {
            waiters.push(waiter);
        }
    }

    /// How many pages before a page that is waited for, and from it on, lie beside each other in the process, at the source
    /// and in the store.
    fn neighbours(&self, id: LiveId, destination: u64, origin: u64) -> (u64, u64) {
        let window = destination / AROUND * AROUND..destination / AROUND * AROUND + AROUND;
        let live = self.lives.get(&id);
        let lacking = live.and_then(|live| Some((live.layout.run(destination)?, live.space)));
        let runs = lacking.and_then(|(lacking, space)| Some((lacking, self.index.run(space, origin)?)));
        let Some((lacking, stored)) = runs else { return (0, 1) };
        let lacking = clip(&lacking, &window);
        let before = (destination - lacking.start).min(origin - stored.start);
        let after = (lacking.end - destination).min(stored.end - origin);
        (before / PAGE_SIZE, after / PAGE_SIZE)
    }

    /// UFFDIO_COPY of pages that follow each other in the store and in the process.
    fn install(&mut self, id: LiveId, destination: u64, slot: u64, pages: u64) -> Progress {
        let source = match self.store.populated(slot, pages) {
            Ok(source) => source,
            Err(error) => {
                self.fail(format!("slots {slot} to {} of the store cannot be read: {error}", slot + pages));
                return Progress::Failed;
            }
        };
        let (mut at, end) = (0, pages * PAGE_SIZE);
        let mut step = end;
        while at < end {
            let Some(live) = self.lives.get(&id) else { return Progress::Ended };
            let target = destination + at;
            let length = step.min(end - at);
            let offset = usize::try_from(at).unwrap_or(usize::MAX);
            match live.uffd.copy(target, source.wrapping_byte_add(offset), length) {
                Outcome::Filled(bytes) => {
                    self.installed += bytes / PAGE_SIZE;
                    self.no_longer_lacking(id, &(target..target + bytes));
                    at += bytes;
                }
                // The process keeps what it has only where that is known to be right.
                Outcome::Exists => {
                    if let Some(reason) = self.foreign_page(id, target) {
                        self.fail(reason);
                        return Progress::Failed;
                    }
                    self.pass_over(id, target);
                    at += PAGE_SIZE;
                }
                // A range over two areas is refused as a whole.
                Outcome::NoArea if length > PAGE_SIZE => step = (length / 2).next_multiple_of(PAGE_SIZE),
                // Before the restore is finished the area may not be registered yet.
                Outcome::NoArea if !self.restore_finished => {
                    live.uffd.wake(&(target..target + PAGE_SIZE));
                    at += PAGE_SIZE;
                }
                Outcome::NoArea => {
                    if let Some(reason) = self.unwatched_area(id, target) {
                        self.fail(reason);
                        return Progress::Failed;
                    }
                    self.pass_over(id, target);
                    at += PAGE_SIZE;
                }
                Outcome::Again | Outcome::NoMemory => return Progress::Later,
                Outcome::Ended => {
                    self.drop_live(id);
                    return Progress::Ended;
                }
                Outcome::Strange(errno) => {
                    let space = live.space;
                    self.fail(format!("UFFDIO_COPY to {target:#x} of process {space}: {errno}"));
                    return Progress::Failed;
                }
            }
        }
        Progress::Complete
    }

    pub(super) fn install_zero(&mut self, id: LiveId, destination: u64) -> Progress {
        let Some(live) = self.lives.get(&id) else { return Progress::Ended };
        let outcome = live.uffd.zero(destination);
        self.answered(id, destination, "UFFDIO_ZEROPAGE", outcome)
    }

    /// What has come of a call that was to put one page there.
    pub(super) fn answered(
        &mut self,
        id: LiveId,
        destination: u64,
        call: &str,
        outcome: Outcome,
    ) -> Progress {
        let Some(live) = self.lives.get(&id) else { return Progress::Ended };
        match outcome {
            Outcome::Filled(_) => Progress::Complete,
            // It lacks nothing here: another thread's fault was answered before, or the area has changed.
            Outcome::Exists | Outcome::NoArea => {
                live.uffd.wake(&(destination..destination + PAGE_SIZE));
                Progress::Complete
            }
            Outcome::Again | Outcome::NoMemory => Progress::Later,
            Outcome::Ended => {
                self.drop_live(id);
                Progress::Ended
            }
            Outcome::Strange(errno) => {
                let space = live.space;
                self.fail(format!("{call} at {destination:#x} of process {space}: {errno}"));
                Progress::Failed
            }
        }
    }

    /// Answers again what could not be answered.
    pub(crate) fn retry(&mut self) {
        if self.failed.is_some() {
            // Who waits must not go on.
            return self.retry.clear();
        }
        for (id, destination, is_minor) in std::mem::take(&mut self.retry) {
            self.serve(id, destination, is_minor);
        }
        self.check_shared();
    }

    /// Faults are left that could not be answered.
    pub(crate) fn has_retries(&self) -> bool {
        !self.retry.is_empty()
    }
}
