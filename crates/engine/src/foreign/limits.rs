//! Limits and restart policy of a container that an engine of others keeps, changed: by the engine, which has them.

use super::making::{WantedRestart, limit};

/// What is to change; nothing of what is none.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Changes {
    /// Memory limit in bytes; 0 for none.
    pub memory_bytes: Option<u64>,
    /// CPU limit in thousandths; 0 for none.
    pub cpu_millis: Option<u32>,
    /// Most processes and threads; 0 for no limit.
    pub pids_limit: Option<u64>,
    /// When it is started again.
    pub restart: Option<WantedRestart>,
}

/// A memory limit, and what memory and swap together are limited to with it: as much swap as memory, unless its user has said
/// another thing. `old` are those before, 0 for none; nothing where there is none and is to be none.
pub(crate) fn memory(old: (i64, i64), bytes: u64, engine: &str) -> Result<Option<(i64, i64)>, String> {
    let (old_memory, old_swap) = old;
    let memory = limit(bytes);
    match (bytes, old_memory) {
        (0, ..=0) => Ok(None),
        (0, _) => Err(lifted(engine, "memory limit (--memory)")),
        _ if old_swap < 0 => Ok(Some((memory, old_swap))),
        _ => match old_swap - old_memory.max(0) {
            swap if old_swap == 0 || swap == old_memory => Ok(Some((memory, memory.saturating_mul(2)))),
            swap => Ok(Some((memory, memory.saturating_add(swap)))),
        },
    }
}

/// What a user is told who wants no limit any more.
pub(crate) fn lifted(engine: &str, what: &str) -> String {
    format!("{engine} cannot lift a {what}; give one as large as the node")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_swap_beside_the_memory_stays_what_its_user_has_said() {
        for (old, wanted) in [
            ((0, 0), (40, 80)),
            ((10, 0), (40, 80)),
            ((10, 20), (40, 80)),
            ((10, 15), (40, 45)),
            ((10, 10), (40, 40)),
            ((10, -1), (40, -1)),
        ] {
            assert_eq!(memory(old, 40, "Docker"), Ok(Some(wanted)), "{old:?}");
        }
        assert_eq!(memory((0, 0), 0, "Docker"), Ok(None));
        assert!(memory((1, 2), 0, "Docker").is_err_and(|said| said.contains("Docker cannot lift")));
    }
}
