//! The scan of a frozen process whose writes are noticed: its clients wait, so that all processors take part.

use std::fs::File;
use std::sync::Mutex;
use std::sync::PoisonError;

use super::super::kernel::{Protect, Scanner};
use super::super::ranges;
use super::{Found, pages_of};
use crate::Range;
use crate::process::{Area, Process};

/// What one thread looks at before it takes the next, bytes: a third of a millisecond.
const PIECE: u64 = 32 << 20;

/// Most pieces of an area: one of terabytes has pages in few places, and the kernel passes over the others at once.
const MOST_PIECES: u64 = 256;

/// Memory that is worth a thread of its own, KiB; and the most threads.
const WORTH_KIB: u64 = 64 << 10;
const MOST_THREADS: u64 = 8;

/// The pages of each of these areas, in the same order; none of one that is not watched as a whole. Nothing is protected:
/// the process does not run.
pub(super) fn scan(
    areas: &[&Area],
    (process, pagemap): (&Process, &File),
    scanner: &mut Scanner,
) -> Vec<Option<Found>> {
    let pieces: Vec<(usize, Range)> = areas
        .iter()
        .enumerate()
        .flat_map(|(area, Area { range, .. })| {
            let most = (range.end - range.start).div_ceil(MOST_PIECES).next_multiple_of(PIECE);
            let starts = (range.start..range.end).step_by(usize::try_from(most).unwrap_or(usize::MAX));
            starts.map(move |start| (area, start..range.end.min(start.saturating_add(most))))
        })
        .collect();
    // What its mappings span tells little.
    let memory_kib = process.status().map_or(0, |status| status.anonymous_kib);
    let processors = std::thread::available_parallelism().map_or(1, |count| count.get() as u64);
    let threads = processors.min(memory_kib / WORTH_KIB).min(MOST_THREADS);
    let left = Mutex::new(pieces.into_iter().enumerate());
    let work = |scanner: &mut Scanner| {
        let mut done = Vec::new();
        loop {
            let next = left.lock().unwrap_or_else(PoisonError::into_inner).next();
            let Some((number, (area, piece))) = next else { return done };
            done.push((number, area, pages_of(scanner, pagemap, &piece, Protect::Watched, false).ok()));
        }
    };
    let mut done = std::thread::scope(|scope| {
        let start = |_| std::thread::Builder::new().spawn_scoped(scope, || work(&mut Scanner::new())).ok();
        // Where there can be none, this one does all.
        let others: Vec<_> = (1..threads).map_while(start).collect();
        let mut done = work(scanner);
        for other in others {
            // A panic is passed on.
            done.extend(other.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)));
        }
        done
    });
    done.sort_unstable_by_key(|(number, ..)| *number);
    let mut all: Vec<Option<Found>> = areas.iter().map(|_| Some(Found::default())).collect();
    for (_, area, found) in done {
        let whole = &mut all[area];
        match (whole.as_mut(), found) {
            (Some(whole), Some(found)) => whole.append(found),
            _ => *whole = None,
        }
    }
    all
}

impl Found {
    /// Adds what was found behind it.
    fn append(&mut self, found: Self) {
        found.populated.into_iter().for_each(|range| ranges::push(&mut self.populated, range));
        found.written.into_iter().for_each(|range| ranges::push(&mut self.written, range));
    }
}
