//! The last scan of memory that is looked at in pieces, by several threads.

use std::ptr::null_mut;

use godwit_memory::tracker::{Backend, Tracker, detect};

use crate::child::{Child, pipe, poke, read_byte};
use crate::replica::Replica;

const PAGE: usize = 4096;
/// Bytes of the mappings: some pieces, and more than there are pieces of that size.
const SIZES: [usize; 2] = [200 << 20, 64 << 30];
/// Of the first, so much is there that several threads look.
const FILLED: usize = 160 << 20;
/// No piece ends elsewhere than at a multiple of this.
const PIECE: usize = 32 << 20;

/// Offsets around the end of each of the first pieces, and of the last.
fn places(size: usize) -> impl Iterator<Item = usize> {
    let ends = (PIECE..size).step_by(PIECE).take(12).chain([size - 5 * PAGE]);
    [0].into_iter().chain(ends.flat_map(|end| (0..8).map(move |page| end - 4 * PAGE + page * PAGE)))
}

#[test]
fn what_was_written_at_the_ends_of_pieces_is_found_once_it_is_frozen() {
    let (orders, order) = pipe();
    let (answers, answer) = pipe();
    let (access, flags) =
        (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE);
    // SAFETY: new mappings, which no reference points to; one page must be one page here.
    let areas = SIZES.map(|size| unsafe {
        let at = libc::mmap(null_mut(), size, access, flags, -1, 0);
        assert_ne!(at, libc::MAP_FAILED);
        libc::madvise(at, size, libc::MADV_NOHUGEPAGE);
        (at.cast::<u8>(), size)
    });
    let child = Child::fork(|| {
        // SAFETY: pages of the mappings, to which there are no references.
        let write = |at: *mut u8, place: usize, value: u8| unsafe { at.add(place).write_volatile(value) };
        (0..FILLED).step_by(PAGE).for_each(|place| write(areas[0].0, place, 1));
        for (at, size) in areas {
            places(size).for_each(|place| write(at, place, 1));
        }
        poke(&answer);
        assert!(read_byte(&orders));
        for (at, size) in areas {
            places(size).step_by(3).for_each(|place| write(at, place, 2));
        }
        poke(&answer);
        i32::from(read_byte(&orders))
    });
    assert!(read_byte(&answers));
    let backend = detect().backend;
    let (mut tracker, mut replica) = (Tracker::new(backend), Replica::new());
    replica.scan(&mut tracker, &[child.pid], false);
    poke(&order);
    assert!(read_byte(&answers));
    child.stop();
    let round = replica.scan(&mut tracker, &[child.pid], true);
    let pages = |step: usize| {
        let each =
            areas.iter().flat_map(|(at, size)| places(*size).step_by(step).map(|place| at.addr() + place));
        each.collect::<Vec<_>>()
    };
    let written = &round.spaces[0].written;
    let is_written = |page: &usize| written.iter().any(|range| range.contains(&(*page as u64)));
    let found: Vec<_> = pages(1).into_iter().filter(is_written).collect();
    if round.spaces[0].unwatched.is_none() && backend != Backend::None {
        assert_eq!(found, pages(3));
    }
    assert!(pages(3).iter().all(is_written));
    assert_eq!(round.spaces[0].gone, []);
    replica.assert_equals(&[child.pid]);
}
