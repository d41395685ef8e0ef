//! What this machine is and has: its memory and its instruction set.

/// `MemAvailable` of this machine, bytes; 0 when the kernel does not tell.
#[must_use]
pub fn available_memory() -> u64 {
    let text = std::fs::read_to_string("/proc/meminfo").unwrap_or_default();
    text.lines()
        .find_map(|line| line.strip_prefix("MemAvailable:"))
        .and_then(|rest| rest.trim().trim_end_matches("kB").trim().parse::<u64>().ok())
        .map_or(0, |kib| kib << 10)
}

/// This machine's instruction set as `uname -m` names it.
#[must_use]
pub fn machine() -> String {
    nix::sys::utsname::uname().map(|u| u.machine().to_string_lossy().into_owned()).unwrap_or_default()
}
