//! Bounds on what a source announces: each is reserved, or refused before anything comes.

use godwit_engine::tree;

use crate::images::KERNEL_STATE_BYTES;
use crate::message::Open;

/// Largest upper directory taken over: larger ones want a volume.
pub(super) const MAX_TREE_BYTES: u64 = 1 << 40;

/// Most names in it.
const MAX_TREE_ENTRIES: u64 = 50_000_000;

/// How much of changed files may come beyond those announced: the service continues to write.
const TREE_GROWTH: u64 = 1 << 30;

/// Most bytes of images beside the memory that is reserved for a service.
pub(super) const MAX_IMAGES_BESIDE_MEMORY: u64 = KERNEL_STATE_BYTES;

/// What is wrong with an offer's numbers, in sentences.
pub(super) fn objections(open: &Open) -> Vec<String> {
    let mut reasons = Vec::new();
    let most = open.memory_bytes.saturating_add(MAX_IMAGES_BESIDE_MEMORY);
    if open.images_bytes > most {
        reasons.push(format!(
            "{} MiB of images are announced, and a service with {} MiB of memory has {} MiB at most",
            open.images_bytes >> 20,
            open.memory_bytes >> 20,
            most >> 20
        ));
    }
    if open.tree_bytes > MAX_TREE_BYTES {
        reasons.push(format!(
            "{} GiB of changed files are announced, and {} GiB are taken at most; put them into a volume",
            open.tree_bytes >> 30,
            MAX_TREE_BYTES >> 30
        ));
    }
    reasons
}

/// What is taken of changed files, of so many bytes announced.
pub(super) fn tree_limits(announced: u64, devices: bool) -> tree::Limits {
    tree::Limits { entries: MAX_TREE_ENTRIES, bytes: tree_limit(announced), devices }
}

fn tree_limit(announced: u64) -> u64 {
    announced.saturating_mul(2).max(announced.saturating_add(TREE_GROWTH)).min(MAX_TREE_BYTES)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn open(memory_bytes: u64, images_bytes: u64, tree_bytes: u64) -> Open {
        Open { memory_bytes, images_bytes, tree_bytes, ..Open::default() }
    }

    #[test]
    fn images_and_files_beyond_what_a_service_can_have_are_refused() {
        let memory = 1 << 20;
        assert_eq!(objections(&open(memory, memory + KERNEL_STATE_BYTES, 0)), Vec::<String>::new());
        assert!(objections(&open(memory, 1 << 40, 0))[0].contains("of images are announced"));
        assert!(objections(&open(memory, memory, u64::MAX))[0].contains("of changed files are announced"));
        assert_eq!(objections(&open(u64::MAX, u64::MAX, 0)), Vec::<String>::new(), "no memory is that large");
    }

    #[test]
    fn no_sum_of_announced_bytes_wraps() {
        assert_eq!(tree_limit(0), TREE_GROWTH);
        assert_eq!(tree_limit(u64::MAX), MAX_TREE_BYTES);
    }
}
