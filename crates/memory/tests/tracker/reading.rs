//! Reading what the process itself may not, and what is no more; and what a tracker leaves behind.

use std::ptr::null_mut;

use godwit_memory::process::{Piece, Process, ProcessError, Reader};
use godwit_memory::tracker::{Backend, Tracker};
use nix::sys::signal::Signal;

use crate::child::{Child, pipe, poke, read_byte};

const MADV_GUARD_INSTALL: i32 = 102;

/// A child with eight pages of ones, which changes them so and then waits.
fn with_pages(change: impl Fn(*mut libc::c_void)) -> (Child, u64) {
    let protection = libc::PROT_READ | libc::PROT_WRITE;
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
    // SAFETY: a new mapping, which only this function knows; the child gets its own copy.
    let pages = unsafe { libc::mmap(null_mut(), 8 << 12, protection, flags, -1, 0) };
    assert_ne!(pages, libc::MAP_FAILED);
    let (read, write) = pipe();
    let child = Child::fork(|| {
        // SAFETY: eight pages.
        unsafe { pages.cast::<u8>().write_bytes(1, 8 << 12) };
        change(pages);
        poke(&write);
        loop {
            // SAFETY: a plain system call.
            unsafe { libc::pause() };
        }
    });
    assert!(read_byte(&read));
    // SAFETY: as above.
    unsafe { libc::munmap(pages, 8 << 12) };
    (child, pages.addr() as u64)
}

/// The pieces of the eight pages: which pages, and whether they are there.
fn pieces(child: &Child, start: u64) -> Vec<(u64, u64, bool)> {
    let process = Process::open(child.pid).expect("it lives");
    let mut reader = Reader::new();
    let mut pieces = reader.pieces(&process, start..start + (8 << 12));
    let mut all: Vec<(u64, u64, bool)> = Vec::new();
    while let Some(piece) = pieces.next() {
        let (from, to, there) = match piece.expect("it lives") {
            Piece::Data { start, bytes } => {
                assert!(bytes.iter().all(|&byte| byte == 1));
                (start, start + bytes.len() as u64, true)
            }
            Piece::Vanished(range) => (range.start, range.end, false),
        };
        let (from, to) = ((from - start) >> 12, (to - start) >> 12);
        match all.last_mut() {
            Some(last) if last.2 == there => last.1 = to,
            _ => all.push((from, to, there)),
        }
    }
    all
}

#[test]
fn pages_without_rights_are_read_and_vanished_ones_are_told() {
    let (child, start) = with_pages(|pages| {
        // SAFETY: eight pages of the child's.
        unsafe {
            libc::mprotect(pages.byte_add(1 << 12), 2 << 12, libc::PROT_NONE);
            libc::munmap(pages.byte_add(4 << 12), 2 << 12);
        }
    });
    assert_eq!(pieces(&child, start), [(0, 4, true), (4, 6, false), (6, 8, true)]);
}

#[test]
fn guard_pages_have_no_content_and_are_not_populated() {
    let (child, start) = with_pages(|pages| {
        // SAFETY: eight pages of the child's.
        unsafe { libc::madvise(pages.byte_add(2 << 12), 3 << 12, MADV_GUARD_INSTALL) };
    });
    let found = pieces(&child, start);
    if found == [(0, 8, true)] {
        println!("this kernel has no guard pages");
        return;
    }
    assert_eq!(found, [(0, 2, true), (2, 5, false), (5, 8, true)]);
    let round = Tracker::new(Backend::Uffd).round(&[child.pid], false).expect("a scan");
    let covers =
        |page: u64| round.spaces[0].written.iter().any(|range| range.contains(&(start + (page << 12))));
    assert!(covers(1) && covers(5));
    assert!(!covers(2) && !covers(4), "{:x?}", round.spaces[0].written);
}

#[test]
fn a_process_that_ended_is_gone() {
    let (mut child, start) = with_pages(|_| ());
    let process = Process::open(child.pid).expect("it lives");
    let mut tracker = Tracker::new(Backend::Uffd);
    assert_eq!(tracker.round(&[child.pid], false).expect("a scan").spaces.len(), 1);
    child.signal(Signal::SIGKILL);
    // Not reaped yet: a zombie has no memory.
    crate::child::eventually("it is a zombie", || crate::child::state(child.pid) == Some('Z'));
    let gone = |result: Result<_, ProcessError>| matches!(result, Err(ProcessError::Gone { .. }));
    assert!(gone(process.read(start, &mut [0; 8]).map(drop)));
    assert!(gone(process.areas().map(drop)));
    assert!(gone(Process::open(child.pid).map(drop)));
    let round = tracker.round(&[child.pid], false).expect("a scan");
    assert!(round.spaces.is_empty());
    assert_eq!(round.ended, [process.space()]);
    child.wait();
    assert!(gone(Process::open(child.pid).map(drop)));
}

/// The range of an area, in the line of smaps with which it begins.
fn range_of(line: &str) -> Option<std::ops::Range<u64>> {
    let (start, end) = line.split_once(' ')?.0.split_once('-')?;
    let address = |text| u64::from_str_radix(text, 16).ok();
    Some(address(start)?..address(end)?)
}

#[test]
fn a_dropped_tracker_leaves_nothing() {
    let (child, start) = with_pages(|_| ());
    // The kernel writes the list piece by piece: an area that is about to change may be in none of them. It may also have
    // become one with what lies beside it.
    let look = || {
        let text = std::fs::read_to_string(format!("/proc/{}/smaps", child.pid)).expect("its areas");
        let mut is_in = false;
        text.lines().find_map(|line| {
            if let Some(range) = range_of(line) {
                is_in = range.contains(&start);
            }
            (is_in && line.starts_with("VmFlags")).then(|| line.to_owned())
        })
    };
    let flags = || {
        let mut found = None;
        crate::child::eventually("the area is listed", || {
            found = look();
            found.is_some()
        });
        found.unwrap_or_default()
    };
    let before = flags();
    let mut tracker = Tracker::new(Backend::Uffd);
    tracker.round(&[child.pid], false).expect("a scan");
    assert!(flags().contains(" uw"), "writes are noted: {}", flags());
    drop(tracker);
    // Children that other tests forked meanwhile have a copy of its descriptor until they end.
    let begun = std::time::Instant::now();
    while flags() != before {
        assert!(begun.elapsed() < std::time::Duration::from_secs(60), "{} and not {before}", flags());
        std::thread::sleep(std::time::Duration::from_millis(10));
    }
}

/// The same process becomes another program: nothing of the old one stays.
#[test]
fn after_exec_all_pages_are_others() {
    let (read, write) = pipe();
    let (answers, answer) = pipe();
    let child = Child::fork(|| {
        poke(&answer);
        read_byte(&read);
        let arguments = [c"sleep".as_ptr(), c"100".as_ptr(), std::ptr::null()];
        // SAFETY: the arguments end with a null pointer.
        unsafe { libc::execv(c"/bin/sleep".as_ptr(), arguments.as_ptr()) };
        1
    });
    assert!(read_byte(&answers));
    let mut tracker = Tracker::new(Backend::Uffd);
    let mut replica = crate::replica::Replica::new();
    replica.scan(&mut tracker, &[child.pid], false);
    poke(&write);
    child.sleeps_in(libc::SYS_clock_nanosleep);
    let round = replica.scan(&mut tracker, &[child.pid], false);
    let space = &round.spaces[0];
    assert_eq!(space.unwatched, None);
    let written: u64 = space.written.iter().map(|range| (range.end - range.start) >> 12).sum();
    assert_eq!(written, space.populated_pages);
    assert!(!space.gone.is_empty());
    // It has run since, to go back to its sleep, and the kernel has noted in its memory on which processor: rseq(2).
    child.sleeps_again_in(libc::SYS_clock_nanosleep);
    replica.scan(&mut tracker, &[child.pid], false);
    let quiet = replica.scan(&mut tracker, &[child.pid], false);
    assert!(quiet.spaces[0].written.is_empty() && quiet.spaces[0].gone.is_empty(), "{quiet:?}");
    child.stop();
    replica.scan(&mut tracker, &[child.pid], true);
    replica.assert_equals(&[child.pid]);
}
