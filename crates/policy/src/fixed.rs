//! What a service is frozen for beside the pages and files that cross meanwhile, before anything is known of its machines:
//! somewhat longer than `make bench` found on one that was otherwise idle (`docs/frozen-time.md`). What past moves say of it is
//! in [`crate::learn`].

use std::time::Duration;

/// Freeze, dump, restore and commit of a service that hardly has memory.
const ALWAYS: Duration = Duration::from_millis(94);

/// For each GiB of its memory, which the kernel walks over twice.
const GIB: Duration = Duration::from_millis(13);

/// For each TCP connection, in dump and restore.
const CONNECTION: Duration = Duration::from_micros(60);

/// What a service with so many bytes of memory and so many connections is frozen for.
#[must_use]
pub fn fixed(memory: u64, connections: u32) -> Duration {
    ALWAYS + GIB.mul_f64(memory as f64 / f64::from(1 << 30)) + CONNECTION * connections
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_and_connections_lengthen_it() {
        assert_eq!(fixed(0, 0), ALWAYS);
        assert_eq!(fixed(4 << 30, 0), ALWAYS + 4 * GIB);
        assert_eq!(fixed(0, 1000), ALWAYS + Duration::from_millis(60));
    }
}
