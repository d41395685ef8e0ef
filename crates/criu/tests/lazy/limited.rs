//! A process that may open no more files, as programs in a sandbox.

use std::path::Path;

use crate::subject::{verdict, wait_for_signal};

/// Its soft limit: all that it has open.
const LIMIT: u64 = 3;

fn limits(new: Option<libc::rlimit>) -> (u64, u64) {
    let mut old = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    let new = new.as_ref().map_or(std::ptr::null(), std::ptr::from_ref);
    // SAFETY: both live in this frame.
    assert_eq!(unsafe { libc::prlimit(0, libc::RLIMIT_NOFILE, new, &raw mut old) }, 0);
    (old.rlim_cur, old.rlim_max)
}

/// Is the process; returns its exit code.
pub(crate) fn run(directory: &Path) -> i32 {
    let (before, hard) = limits(None);
    limits(Some(libc::rlimit { rlim_cur: LIMIT, rlim_max: hard }));
    // SAFETY: raise has no conditions. Whoever waits for this process sees it.
    unsafe { libc::raise(libc::SIGSTOP) };
    wait_for_signal();
    let after = limits(None);
    // To be able to tell of it.
    limits(Some(libc::rlimit { rlim_cur: before, rlim_max: hard }));
    let result = if after == (LIMIT, hard) { Ok(()) } else { Err(format!("its limits are {after:?}")) };
    verdict(directory, "root", result)
}

/// The line of a process's limit of open files.
pub(crate) fn limit_of(pid: u32) -> String {
    let text = std::fs::read_to_string(format!("/proc/{pid}/limits")).unwrap();
    text.lines().find(|line| line.starts_with("Max open files")).unwrap().to_owned()
}
