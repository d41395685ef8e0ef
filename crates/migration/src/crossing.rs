//! A service that goes on under the executables which another node's image has: of another instruction set, or of the
//! same one where that is asked for. Its processes were built by `godwit-cc` and come to rest (`isa/ABI.md`, section 7)
//! before the freeze; `godwit-crossing` says which may, and rewrites CRIU's images.
//!
//! ```text
//! source                                    destination
//! processes, offer ─── Open ──────────────▶ destination/cross.rs: may they? under which executables?
//! source/park.rs: they come to rest
//! freeze, dump ─────── images, records ───▶ destination/cross.rs: rewrites the images; CRIU restores them
//! ```
//! - [`offer`]: what a destination is told of processes that run.
//! - [`processes`]: what is seen of them. - [`requests`]: what they are asked for. - [`waits`]: why one does not rest.

pub(crate) mod offer;
pub(crate) mod processes;
pub(crate) mod requests;
pub(crate) mod waits;

use std::fs;

use godwit_criu::images::page_size;
use godwit_crossing::{Node, Owner, Set, areas_of_maps};

pub use offer::{AtRest, CrossingOffer};

/// What the timeline of the destination calls the rewriting of the images.
pub(crate) const REWRITING: &str = "rewrite";

/// This node, for processes that come to it; none where its kernel tells no memory of this process.
pub(crate) fn this_node() -> Option<Node> {
    let set = Set::native()?;
    Some(Node { set, page_bytes: page_size(), address_end: address_end(&fs::read("/proc/self/maps").ok()?)? })
}

/// Where the memory of processes ends that have this: the kernel puts the first stack close below it.
fn address_end(maps: &[u8]) -> Option<u64> {
    let areas = areas_of_maps(maps)?;
    let stack = areas.iter().find(|area| area.owner == Owner::FirstStack)?;
    stack.range.end.checked_next_power_of_two()
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn the_first_stack_tells_where_addresses_end() {
        let end = |stack: &str| address_end(format!("{stack} rw-p 00000000 00:00 0   [stack]\n").as_bytes());
        assert_eq!(end("7fff4a022000-7fff4a043000"), Some(1 << 47));
        assert_eq!(end("ffffd4a22000-ffffd4a43000"), Some(1 << 48));
        assert_eq!(end("7fd4a22000-7fd4a43000"), Some(1 << 39));
        assert_eq!(address_end(b"1000-2000 rw-p 00000000 00:00 0\n"), None);
        assert!(this_node().is_some_and(|node| node.address_end >= 1 << 39));
    }
}
