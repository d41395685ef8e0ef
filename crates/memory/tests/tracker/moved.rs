//! Writes are noticed wherever mremap(2) has brought the memory.

use std::os::fd::{AsRawFd, OwnedFd};
use std::ptr::null_mut;

use godwit_memory::tracker::{Backend, Tracker, detect};

use crate::child::{Child, pipe, poke, read_byte};
use crate::replica::Replica;

const PAGE: usize = 4096;
/// Pages of a mapping, of which the lower half goes away and comes back.
const PAGES: usize = 16;
const LOWER: usize = PAGES / 2 * PAGE;

/// What a child does with a mapping and another place for half of it.
struct Moving {
    child: Child,
    order: OwnedFd,
    answers: OwnedFd,
    at: usize,
}

impl Moving {
    fn start() -> Self {
        let (orders, order) = pipe();
        let (answers, answer) = pipe();
        let (access, flags) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
        // SAFETY: new mappings, which no reference points to.
        let [at, away] = [PAGES * PAGE, LOWER].map(|length| unsafe {
            let at = libc::mmap(null_mut(), length, access, flags, -1, 0);
            assert_ne!(at, libc::MAP_FAILED);
            at.cast::<u8>()
        });
        let child = Child::fork(|| {
            let moved = |from: *mut u8, to: *mut u8| {
                let flags = libc::MREMAP_MAYMOVE | libc::MREMAP_FIXED;
                // SAFETY: from one mapping of ours to a place that was another's.
                unsafe { libc::mremap(from.cast(), LOWER, LOWER, flags, to) != libc::MAP_FAILED }
            };
            // SAFETY: pages of the mapping, to which there are no references.
            let write = |page: usize, value: u8| unsafe { at.add(page * PAGE).write_volatile(value) };
            (0..PAGES).for_each(|page| write(page, 1));
            poke(&answer);
            loop {
                let mut order = 0_u8;
                // SAFETY: a byte, a variable of ours.
                if unsafe { libc::read(orders.as_raw_fd(), (&raw mut order).cast(), 1) } != 1 {
                    return 0;
                }
                let done = match order {
                    b'a' => moved(at, away),
                    b'b' => moved(away, at),
                    page => {
                        write(page.into(), 2);
                        true
                    }
                };
                if !done {
                    return 1;
                }
                poke(&answer);
            }
        });
        assert!(read_byte(&answers));
        Self { child, order, answers, at: at.addr() }
    }

    fn does(&self, order: u8) {
        assert_eq!(nix::unistd::write(&self.order, &[order]), Ok(1));
        assert!(read_byte(&self.answers), "order {order}");
    }

    /// The pages of the mapping that a scan finds written.
    fn scan(&self, tracker: &mut Tracker) -> Vec<usize> {
        let round = tracker.round(&[self.child.pid], false).expect("a scan");
        let at = |page: usize| (self.at + page * PAGE) as u64;
        let written = &round.spaces[0].written;
        (0..PAGES).filter(|page| written.iter().any(|range| range.contains(&at(*page)))).collect()
    }
}

/// Where memory comes back beside memory that stayed, the kernel makes one area of both, and watches neither.
#[test]
fn what_stayed_is_followed_when_memory_comes_back_beside_it() {
    if detect().backend != Backend::Uffd {
        return;
    }
    let moving = Moving::start();
    let mut tracker = Tracker::new(Backend::Uffd);
    assert_eq!(moving.scan(&mut tracker).len(), PAGES);
    moving.does(b'a');
    moving.scan(&mut tracker);
    moving.does(b'b');
    moving.does(12);
    assert!(moving.scan(&mut tracker).contains(&12), "written while nothing was watched");
    for page in [12, 13, 3] {
        moving.does(page);
        assert_eq!(moving.scan(&mut tracker), [usize::from(page)]);
    }
    assert!(moving.scan(&mut tracker).is_empty());
}

#[test]
fn executable_memory_is_told_of_in_each_scan_whether_it_was_written_since_or_not() {
    let (orders, order) = pipe();
    let (answers, answer) = pipe();
    let access = libc::PROT_READ | libc::PROT_WRITE | libc::PROT_EXEC;
    // SAFETY: a new mapping, which no reference points to.
    let at = unsafe { libc::mmap(null_mut(), PAGE, access, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS, -1, 0) };
    assert_ne!(at, libc::MAP_FAILED);
    let child = Child::fork(|| {
        // SAFETY: the mapping, to which there are no references.
        unsafe { at.cast::<u8>().write_volatile(1) };
        poke(&answer);
        i32::from(read_byte(&orders))
    });
    assert!(read_byte(&answers));
    let (mut tracker, mut replica) = (Tracker::new(detect().backend), Replica::new());
    let has =
        |ranges: &[godwit_memory::Range]| ranges.iter().any(|range| range.contains(&(at.addr() as u64)));
    for frozen in [false, false, true] {
        if frozen {
            child.stop();
        }
        let round = replica.scan(&mut tracker, &[child.pid], frozen);
        assert!(has(&round.spaces[0].executable), "frozen: {frozen}");
    }
    replica.assert_equals(&[child.pid]);
    drop(order);
}
