//! Processes that reserve so much memory that a CRIU without godwit's patches cannot dump them.
//!
//! In a lazy dump such a CRIU makes a list with room for each page of all private areas, reserved or used. Where
//! the kernel judges a demand for memory by the memory that there is (vm.overcommit_memory 0), it refuses one that is
//! larger than all of it. (What a restore needs depends on the destination, and is not looked at here.)

use std::fs;
use std::path::Path;

use super::Obstacle;
use super::tasks::Task;

const RESERVED: &str = "and the CRIU of this node cannot dump that; let scripts/setup-criu --build build one with \
                        godwit's patches, or let the service reserve less";

/// Bytes of an entry in CRIU's list (`struct iovec`).
const ENTRY: u64 = 16;
/// Bytes of a page, where the node's kernel does not tell.
const PAGE: u64 = 4096;

/// The most that the kernel gives at once, bytes; none where that has no bound, or another one.
pub(super) fn most_at_once(proc: &Path) -> Option<u64> {
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
    let area = |line: &str| {
        let mut words = line.split(' ');
        let (start, end) = words.next()?.split_once('-')?;
        let is_private = words.next()?.ends_with('p');
        let number = |text| u64::from_str_radix(text, 16).ok();
        let is_of_kernel =
            ["[vsyscall]", "[vvar]", "[vvar_vclock]", "[vdso]"].iter().any(|name| line.ends_with(name));
        (is_private && !is_of_kernel).then(|| Some(number(end)?.saturating_sub(number(start)?)))?
    };
    maps.lines().filter_map(area).sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn private_areas_are_summed_up() {
        let maps = "1000-3000 ---p 00000000 00:00 0 \n4000-5000 rw-s 00000000 00:01 7 /dev/zero (deleted)\n\
                    6000-7000 r--p 00000000 fd:00 12 /lib/x\n8000-9000 r-xp 00000000 00:00 0    [vdso]\n";
        assert_eq!(private_bytes(maps), 0x3000);
    }
}
