//! A process that may open no more files and map no more memory, as programs in a sandbox.

use std::path::Path;

use crate::subject::{verdict, wait_for_signal};

/// Its soft limit of open files: all that it has open.
const FILES: u64 = 3;

/// What is limited, as `/proc/PID/limits` calls it.
const NAMES: [&str; 2] = ["Max open files", "Max address space"];

fn limits(resource: libc::__rlimit_resource_t, new: Option<libc::rlimit>) -> (u64, u64) {
    let mut old = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    let new = new.as_ref().map_or(std::ptr::null(), std::ptr::from_ref);
    // SAFETY: both live in this frame.
    assert_eq!(unsafe { libc::prlimit(0, resource, new, &raw mut old) }, 0);
    (old.rlim_cur, old.rlim_max)
}

/// How much it has mapped.
fn mapped() -> u64 {
    let text = std::fs::read_to_string("/proc/self/statm").unwrap();
    let pages: u64 = text.split(' ').next().unwrap().parse().unwrap();
    pages * crate::subject::PAGE as u64
}

/// Is the process; returns its exit code.
pub(crate) fn run(directory: &Path) -> i32 {
    let all = [(libc::RLIMIT_NOFILE, FILES), (libc::RLIMIT_AS, mapped())];
    let before = all.map(|(resource, soft)| {
        let before = limits(resource, None);
        limits(resource, Some(libc::rlimit { rlim_cur: soft, rlim_max: before.1 }));
        before
    });
    // SAFETY: raise has no conditions. Whoever waits for this process sees it.
    unsafe { libc::raise(libc::SIGSTOP) };
    wait_for_signal();
    let after = all.map(|(resource, _)| limits(resource, None));
    // To be able to tell of it.
    for ((resource, _), (soft, hard)) in all.into_iter().zip(before) {
        limits(resource, Some(libc::rlimit { rlim_cur: soft, rlim_max: hard }));
    }
    let expected: Vec<_> = all.iter().zip(before).map(|((_, soft), (_, hard))| (*soft, hard)).collect();
    let result = if after[..] == expected { Ok(()) } else { Err(format!("its limits are {after:?}")) };
    verdict(directory, "root", result)
}

/// The lines of these limits of a process.
pub(crate) fn limits_of(pid: u32) -> Vec<String> {
    let text = std::fs::read_to_string(format!("/proc/{pid}/limits")).unwrap();
    let is_one = |line: &&str| NAMES.iter().any(|name| line.starts_with(name));
    text.lines().filter(is_one).map(str::to_owned).collect()
}
