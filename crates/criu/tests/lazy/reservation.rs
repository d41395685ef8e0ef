//! Processes that reserve more memory than any machine has, as databases and runtimes do.
//!
//! ```text
//! root: a reservation of terabytes, of which a MiB is in use; an area without a page; written
//!  │    pages without rights
//!  └ child: has written into the area without a page, and taken the rights away again
//! ```

use std::io::{Read, Write};
use std::path::Path;
use std::ptr::null_mut;

use crate::subject::{PAGE, ask, fork, verdict, wait_for_signal};

/// Length of the reservation: 8 TiB, as MariaDB's.
const RESERVED: usize = 8 << 40;
/// Where in it the part in use begins.
const USED_AT: usize = 1 << 30;
const USED: usize = 1 << 20;
/// Length of the other two areas.
const SMALL: usize = 64 * PAGE;

const NONE: i32 = libc::PROT_NONE;
const BOTH: i32 = libc::PROT_READ | libc::PROT_WRITE;

fn map(length: usize, protection: i32) -> *mut u8 {
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
    // SAFETY: a new mapping.
    let at = unsafe { libc::mmap(null_mut(), length, protection, flags, -1, 0) };
    assert_ne!(at, libc::MAP_FAILED);
    at.cast()
}

fn protect(at: *mut u8, length: usize, protection: i32) {
    // SAFETY: an area of this process, which nothing uses meanwhile.
    assert_eq!(unsafe { libc::mprotect(at.cast(), length, protection) }, 0);
}

/// Writes into each page.
fn fill(at: *mut u8, length: usize, value: u8) {
    for offset in (0..length).step_by(PAGE) {
        // SAFETY: the area is writable.
        unsafe { at.add(offset).write_volatile(value) };
    }
}

/// Whether each page has what [`fill`] wrote; what cannot be read is made readable.
fn has(what: &str, at: *mut u8, length: usize, value: u8) -> Result<(), String> {
    protect(at, length, BOTH);
    // SAFETY: the area is readable now.
    match (0..length).step_by(PAGE).find(|&offset| unsafe { at.add(offset).read_volatile() } != value) {
        Some(offset) => Err(format!("{what}: the page at {offset:#x} is not {value}")),
        None => Ok(()),
    }
}

/// Is the root; returns its exit code.
pub(crate) fn run(directory: &Path) -> i32 {
    let reserved = map(RESERVED, NONE);
    // SAFETY: inside of the reservation.
    let used = unsafe { reserved.add(USED_AT) };
    protect(used, USED, BOTH);
    fill(used, USED, 1);
    let closed = map(2 * SMALL + PAGE, NONE);
    // SAFETY: both are inside of the area.
    let (between, empty) = unsafe { (closed.add(SMALL), closed.add(SMALL + PAGE)) };
    protect(between, PAGE, libc::PROT_READ);
    protect(closed, SMALL, BOTH);
    fill(closed, SMALL, 2);
    protect(closed, SMALL, NONE);

    let (mut ready, mut tell) = std::io::pipe().unwrap();
    let child = fork(|| {
        protect(empty, SMALL, BOTH);
        fill(empty, SMALL, 3);
        protect(empty, SMALL, NONE);
        fill(used, USED, 4);
        tell.write_all(b"x").unwrap();
        wait_for_signal();
        let result = has("empty", empty, SMALL, 3)
            .and_then(|()| has("closed", closed, SMALL, 2))
            .and_then(|()| has("used", used, USED, 4));
        verdict(directory, "child", result)
    });
    ready.read_exact(&mut [0]).unwrap();
    // SAFETY: raise has no conditions. Whoever waits for this process sees it.
    unsafe { libc::raise(libc::SIGSTOP) };
    wait_for_signal();
    let result = has("empty", empty, SMALL, 0)
        .and_then(|()| has("closed", closed, SMALL, 2))
        .and_then(|()| has("used", used, USED, 1))
        .and_then(|()| ask(child));
    verdict(directory, "root", result)
}

/// The areas of a process with their rights and what the kernel says of them, as far as a restore is to
/// bring it back. With pages that come later the kernel forgets that an area without rights was
/// accounted, as there is no page yet when the rights are taken away.
pub(crate) fn areas(pid: u32, later: bool) -> Vec<(String, String)> {
    let text = std::fs::read_to_string(format!("/proc/{pid}/smaps")).unwrap();
    let (mut areas, mut head) = (Vec::new(), Vec::new());
    for line in text.lines() {
        if let Some(flags) = line.strip_prefix("VmFlags: ") {
            // Soft-dirty, and what a userfaultfd watches.
            let mut ignored = vec!["sd", "um", "uw", "ui"];
            // A mapping of a file that was writable once stays accounted, though it has no page.
            let is_file = head.get(5).is_some_and(|path: &&str| path.starts_with('/'));
            if is_file || (later && head[1] == "---p") {
                ignored.push("ac");
            }
            let flags: Vec<_> = flags.split(' ').filter(|flag| !ignored.contains(flag)).collect();
            areas.push((head[..2].join(" "), flags.join(" ")));
        } else if !line.split_whitespace().next().unwrap().ends_with(':') {
            head = line.split_whitespace().collect();
        }
    }
    assert!(areas.len() > 10 && areas.iter().any(|(_, flags)| flags.contains("ac")), "{text}");
    areas
}
