//! Processes that reserve so much memory that CRIU cannot dump them here, or restore them elsewhere.
//!
//! In a lazy dump such a CRIU makes a list with room for each page of all private areas, reserved or used. Where
//! the kernel judges a demand for memory by the memory that there is (vm.overcommit_memory 0), it refuses one that is
//! larger than all of it.
//!
//! A restore maps each private area in one piece. Such a kernel counts what is writable as memory that may be used, and
//! a CRIU without godwit's patches maps all areas so. One that the program itself had not counted (MAP_NORESERVE)
//! is not counted there either.

use std::fs;
use std::ops::Range;
use std::path::Path;

use super::Obstacle;
use super::tasks::Task;

const RESERVED: &str = "and the CRIU of this node cannot dump that; let scripts/setup-criu --build-series build one with \
                        godwit's patches, or let the service reserve less";

const WRITABLE: &str = "in one piece, more than the destination has memory for; move it to a node with more memory, or \
                        let the service reserve less";

const NOT_WRITABLE: &str = "in one piece, and the CRIU of the destination cannot restore that; let scripts/setup-criu \
                            --build-series build one with godwit's patches there, or let the service reserve less";

/// What a node can restore.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Restores {
    /// The most that its kernel gives at once, bytes.
    pub most: u64,
    /// Whether its CRIU maps what is not writable as it was.
    pub keeps_rights: bool,
}

/// What of these processes such a node cannot restore. It reads more of a process only where that has an area of such a
/// size.
#[must_use]
pub fn not_restored(proc: &Path, processes: &[u32], restores: Restores) -> Vec<Obstacle> {
    let obstacle = |pid: &u32| {
        let task = super::tasks::read(proc, *pid)?;
        let directory = proc.join(pid.to_string());
        let too_large = |area: &Range<u64>, writable: bool| {
            area.end - area.start > restores.most && (writable || !restores.keeps_rights)
        };
        let maps = fs::read(directory.join("maps")).ok()?;
        let maps = String::from_utf8_lossy(&maps);
        if !maps.lines().filter_map(private_area).any(|(area, writable)| too_large(&area, writable)) {
            return None;
        }
        // This file alone decides: the process runs, and may have unmapped since what `maps` told of.
        let smaps = fs::read(directory.join("smaps")).ok()?;
        let smaps = String::from_utf8_lossy(&smaps);
        let (area, writable) = counted_areas(&smaps).find(|(area, writable)| too_large(area, *writable))?;
        let what = format!("has reserved {} GiB of memory", (area.end - area.start) >> 30);
        Some(Obstacle::new(&task, what, if writable { WRITABLE } else { NOT_WRITABLE }))
    };
    processes.iter().filter_map(obstacle).collect()
}

/// The private areas that the kernel counts as reserved: those without `nr` in their `VmFlags`.
fn counted_areas(smaps: &str) -> impl Iterator<Item = (Range<u64>, bool)> {
    let mut area = None;
    smaps.lines().filter_map(move |line| {
        if any_area(line).is_some() {
            area = private_area(line);
            return None;
        }
        let flags = line.strip_prefix("VmFlags:")?;
        let area = area.take()?;
        (!flags.split(' ').any(|flag| flag == "nr")).then_some(area)
    })
}

/// Bytes of an entry in CRIU's list (`struct iovec`).
const ENTRY: u64 = 16;
/// Bytes of a page, where the node's kernel does not tell.
const PAGE: u64 = 4096;

/// The most that the kernel gives at once, bytes; none where that has no bound, or another one.
#[must_use]
pub fn most_at_once(proc: &Path) -> Option<u64> {
    let mode = fs::read_to_string(proc.join("sys/vm/overcommit_memory")).ok()?;
    if mode.trim() != "0" {
        return None;
    }
    let text = fs::read_to_string(proc.join("meminfo")).ok()?;
    let field = |name: &str| {
        let line = text.lines().find_map(|line| line.strip_prefix(name))?;
        line.split_whitespace().next()?.parse::<u64>().ok()
    };
    Some((field("MemTotal:")? + field("SwapTotal:")?) << 10)
}

/// Whether a process is an obstacle where the kernel gives at most so many bytes at once.
pub(super) fn obstacle(proc: &Path, task: &Task, most: u64) -> Option<Obstacle> {
    let maps = fs::read(proc.join(task.pid.to_string()).join("maps")).ok()?;
    let pages = private_bytes(&String::from_utf8_lossy(&maps)) / PAGE;
    // As CRIU passes the number on.
    let entries = pages & u64::from(u32::MAX);
    (entries * ENTRY > most).then(|| {
        Obstacle::new(task, format!("has reserved {} GiB of memory", (pages * PAGE) >> 30), RESERVED)
    })
}

/// Bytes of all private areas.
fn private_bytes(maps: &str) -> u64 {
    maps.lines().filter_map(private_area).map(|(area, _)| area.end - area.start).sum()
}

/// The private area that a line of `maps` tells of, and whether it is writable.
fn private_area(line: &str) -> Option<(Range<u64>, bool)> {
    let (area, rights) = any_area(line)?;
    let is_of_kernel =
        ["[vsyscall]", "[vvar]", "[vvar_vclock]", "[vdso]"].iter().any(|name| line.ends_with(name));
    (rights.ends_with('p') && !is_of_kernel).then(|| (area, rights.contains('w')))
}

/// The area that a line tells of, and its rights.
fn any_area(line: &str) -> Option<(Range<u64>, &str)> {
    let mut words = line.split(' ');
    let (start, end) = words.next()?.split_once('-')?;
    let number = |text| u64::from_str_radix(text, 16).ok();
    let (start, end) = (number(start)?, number(end)?);
    (start <= end).then_some((start..end, words.next()?))
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn private_areas_are_summed_up() {
        let maps = "1000-3000 ---p 00000000 00:00 0 \n4000-5000 rw-s 00000000 00:01 7 /dev/zero (deleted)\n\
                    6000-7000 r--p 00000000 fd:00 12 /lib/x\n8000-9000 r-xp 00000000 00:00 0    [vdso]\n";
        assert_eq!(private_bytes(maps), 0x3000);
    }

    #[test]
    fn what_a_destination_cannot_restore_is_named() {
        let proc = tempfile::tempdir().unwrap();
        let directory = proc.path().join("7");
        fs::create_dir(&directory).unwrap();
        let status = "Name:\tdb\nState:\tS\nTgid:\t7\nPPid:\t1\nTracerPid:\t0\nThreads:\t1\nNSpid:\t7\t2\nNSsid:\t7\t2\n";
        fs::write(directory.join("status"), status).unwrap();
        let look = |maps: &str, flags: &str, restores| {
            fs::write(directory.join("maps"), format!("1000-2000 rw-p 0 00:00 0\n{maps}\n")).unwrap();
            let smaps = format!(
                "1000-2000 rw-p 0 00:00 0\nVmFlags: rd nr\n{maps}\nSize: 1 kB\nVmFlags: rd {flags}\n"
            );
            fs::write(directory.join("smaps"), smaps).unwrap();
            not_restored(proc.path(), &[7, 8], restores).iter().map(ToString::to_string).collect::<Vec<_>>()
        };
        // 64 GiB, on a node with 16.
        let (stock, patched) =
            ([false, true]).map(|keeps_rights| Restores { most: 16 << 30, keeps_rights }).into();
        let (reserved, writable) =
            ("1000000000-2000000000 ---p 0 00:00 0", "1000000000-2000000000 rw-p 0 00:00 0");
        let found = look(reserved, "mr mw", stock);
        assert!(
            matches!(&found[..], [one] if one.starts_with("process 7 (db, PID 2 in the service) has reserved 64 GiB")
                && one.contains("setup-criu")),
            "{found:?}"
        );
        assert_eq!(look(reserved, "mr mw", patched), Vec::<String>::new());
        assert_eq!(look(reserved, "mr nr", stock), Vec::<String>::new(), "it was not counted");
        assert_eq!(look(reserved, "mr", Restores { most: 64 << 30, ..stock }), Vec::<String>::new());
        let found = look(writable, "mr", patched);
        assert!(matches!(&found[..], [one] if one.contains("a node with more memory")), "{found:?}");
        let shared = "1000000000-2000000000 rw-s 0 00:00 0";
        assert_eq!(look(shared, "mr", stock), Vec::<String>::new());
        // Unmapped since `maps` was read, as the process runs on.
        look(reserved, "mr mw", stock);
        fs::write(directory.join("smaps"), "1000-2000 rw-p 0 00:00 0\nVmFlags: rd nr\n").unwrap();
        assert_eq!(not_restored(proc.path(), &[7], stock), Vec::new());
    }
}
