//! What this machine is and has: its memory, its processors' time and its instruction set.

/// `MemAvailable` of this machine, bytes; 0 when the kernel does not tell.
#[must_use]
pub fn available_memory() -> u64 {
    let text = std::fs::read_to_string("/proc/meminfo").unwrap_or_default();
    text.lines()
        .find_map(|line| line.strip_prefix("MemAvailable:"))
        .and_then(|rest| rest.trim().trim_end_matches("kB").trim().parse::<u64>().ok())
        .map_or(0, |kib| kib << 10)
}

/// The time that all processors were busy since the boot, and all of their time, in ticks; none when the kernel does not tell.
/// What the machine's own host has taken counts as busy: it cannot be had.
#[must_use]
pub fn processor_time() -> Option<(u64, u64)> {
    busy_of(&std::fs::read_to_string("/proc/stat").ok()?)
}

/// The same of the text of `/proc/stat`. The time of guests is part of `user` and `nice` (proc_stat(5)).
fn busy_of(text: &str) -> Option<(u64, u64)> {
    let line = text.lines().find_map(|line| line.strip_prefix("cpu "))?;
    let ticks: Vec<u64> = line.split_whitespace().map(str::parse).collect::<Result<_, _>>().ok()?;
    let [user, nice, system, idle, iowait, irq, softirq, steal] =
        <[u64; 8]>::try_from(ticks.get(..8)?).ok()?;
    let busy = [user, nice, system, irq, softirq, steal].into_iter().fold(0, u64::saturating_add);
    Some((busy, busy.saturating_add(idle).saturating_add(iowait)))
}

/// This machine's instruction set as `uname -m` names it.
#[must_use]
pub fn machine() -> String {
    nix::sys::utsname::uname().map(|u| u.machine().to_string_lossy().into_owned()).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn time_that_waits_for_a_disk_is_idle_and_a_guests_is_not_counted_twice() {
        let text = "cpu  100 10 50 800 40 1 2 7 30 3\ncpu0 100 10 50 800 40 1 2 7 30 3\nintr 5\n";
        assert_eq!(busy_of(text), Some((170, 1010)));
        assert_eq!(busy_of("cpu  1 2 3\n"), None);
        assert_eq!(busy_of("cpu  1 2 3 4 5 6 7 -8\n"), None);
        assert!(processor_time().is_some_and(|(busy, all)| busy < all));
    }
}
