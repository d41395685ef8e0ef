//! Trees of files that can be carried to another node, in rounds, while they are written.
//!
//! ```text
//!   source                                            destination
//!   Snapshot::scan ── everything() ─┐
//!                                   ├─ send ── Items ──> Receiver::apply … finish      round 1
//!   Snapshot::scan ── changes_since ┤
//!                                   ├─ send ── Items ──> Receiver::apply … finish      round 2
//!   (freeze)                        │
//!   Snapshot::scan_frozen ── changes_since ── send ───> Receiver::apply … finish       last
//! ```
//!
//! A tree is the upper directory of an overlayfs as a rule, so everything that overlayfs means by
//! files is carried as it is: whiteouts (character device 0/0), opaque directories and the other
//! `trusted.overlay.*` attributes; and beside them owners, modes, modification times in
//! nanoseconds, all extended attributes (file capabilities and access lists are such), hard
//! links, symbolic links, devices, fifos, sockets, holes, and names that are not UTF-8. Not
//! carried: change and access times, inode numbers, SELinux labels (the node's policy), inode
//! flags (`chattr`).
//!
//! A file that is written during a round arrives torn, and is sent again in the next one; after a
//! round of a frozen tree the copy equals the original ([`compare`] says so). Of a file that the
//! receiver has from an earlier round only the blocks that differ cross again
//! ([`TreeSender::by_blocks`]), also where it has another name now. A receiver that has files of
//! which the sender does not know tells it so ([`list()`]).

mod blocks;
mod compare;
mod content;
mod item;
mod listing;
mod look;
mod parts;
mod receive;
mod send;
mod snapshot;
mod writeback;
mod written;

#[cfg(test)]
mod tests;

pub use blocks::BlockHash;
pub use compare::{Difference, compare};
pub use content::Wanted;
pub use item::{Data, DecodeError, End, Entry, Hold, Hole, Item, Kind, MAX_DATA, MAX_ITEM, Remove, Xattr};
pub use listing::{Listed, Listing, list};
pub use look::Looked;
pub use parts::{Counts, Round, TreeSender};
pub use receive::{Contents, Limits, Receiver};
pub use send::{Elsewhere, Sent, send, send_without};
pub use snapshot::{Changes, Snapshot};
pub use written::Written;

use std::io;
use std::path::{Path, PathBuf};

use crate::beneath::{Links, Root};

/// Why a tree could not be read, or an item not be applied.
#[derive(Debug, thiserror::Error)]
pub enum TreeError {
    /// A file or directory of the tree could not be used.
    #[error("tree {}: cannot {action} {path}", root.display())]
    Io {
        /// The tree's root directory.
        root: PathBuf,
        /// What was tried.
        action: String,
        /// Path within the tree.
        path: String,
        /// The system's answer.
        #[source]
        source: io::Error,
    },
    /// The tree holds something that cannot be carried.
    #[error("tree {}: {path} cannot be carried to another node: {reason}", root.display())]
    NotCarried {
        /// The tree's root directory.
        root: PathBuf,
        /// Path within the tree.
        path: String,
        /// Why.
        reason: &'static str,
    },
    /// Another filesystem begins in the tree.
    #[error("tree {}: {path} is another filesystem that is mounted there, or a subvolume, whose files are not the tree's; unmount it first", root.display())]
    NotWhole {
        /// The tree's root directory.
        root: PathBuf,
        /// Path within the tree.
        path: String,
    },
    /// An item breaks the rules; the sender is broken or hostile.
    #[error("tree {}: item for {path} is refused: {reason}; the sending node is broken", root.display())]
    Refused {
        /// The tree's root directory.
        root: PathBuf,
        /// Path the item is for.
        path: String,
        /// Which rule.
        reason: &'static str,
    },
    /// The sender sends more than was agreed.
    #[error("tree {}: the sending node sent more than {limit} {unit}, which is all that was reserved", root.display())]
    Limit {
        /// The tree's root directory.
        root: PathBuf,
        /// What was agreed.
        limit: u64,
        /// `bytes` or `entries`.
        unit: &'static str,
    },
    /// The stream of items ended before its [`End`].
    #[error("tree {}: the items ended early; start the transfer again", root.display())]
    Incomplete {
        /// The tree's root directory.
        root: PathBuf,
    },
    /// The items could not be handed on.
    #[error("tree {}: the items cannot be sent", root.display())]
    Sink {
        /// The tree's root directory.
        root: PathBuf,
        /// What the sink answered.
        #[source]
        source: Box<dyn std::error::Error + Send + Sync>,
    },
}

impl TreeError {
    /// The same, of a tree whose root people know by this path.
    fn in_tree(mut self, path: &Path) -> Self {
        match &mut self {
            Self::Io { root, .. }
            | Self::NotCarried { root, .. }
            | Self::NotWhole { root, .. }
            | Self::Refused { root, .. }
            | Self::Limit { root, .. }
            | Self::Incomplete { root }
            | Self::Sink { root, .. } => path.clone_into(root),
        }
        self
    }
}

/// Writes all of the filesystem that `root` is on to its disk. A service that has been told by
/// fsync(2) that its data are safe must find them after a crash of the node it was moved to: call
/// this after each round, and before the move is committed.
pub fn sync(root: &Path) -> Result<(), TreeError> {
    let fault = |source: io::Error| TreeError::Io {
        root: root.to_path_buf(),
        action: "write to disk".into(),
        path: "/".into(),
        source,
    };
    let directory = std::fs::File::open(root).map_err(fault)?;
    rustix::fs::syncfs(&directory).map_err(|error| fault(error.into()))
}

/// Opens the root of a tree that is to be read: a directory, or a file that is the whole tree.
fn open_source(root: &Path) -> Result<Root, TreeError> {
    Root::open_or_file(root, Links::Refused).map_err(|source| TreeError::Io {
        root: root.to_path_buf(),
        action: "open the directory or file".into(),
        path: "/".into(),
        source,
    })
}

/// Opens the root directory of a tree, beneath which no link is followed.
fn open_root(root: &Path) -> Result<Root, TreeError> {
    Root::open(root, Links::Refused).map_err(|source| TreeError::Io {
        root: root.to_path_buf(),
        action: "open the directory".into(),
        path: "/".into(),
        source,
    })
}
