//! Files of an earlier round that will have another name, and have none meanwhile.

use std::collections::BTreeMap;
use std::os::fd::{AsFd, OwnedFd};

use crate::beneath;

/// Files that are held for other names. What is left of them when a round breaks off goes: nobody knows their names.
#[derive(Debug, Default)]
pub(super) struct Held {
    /// The root, as soon as there was one.
    pub(super) root: Option<OwnedFd>,
    /// Their names there, by number.
    pub(super) names: BTreeMap<u32, Vec<u8>>,
}

impl Drop for Held {
    fn drop(&mut self) {
        let Some(root) = &self.root else { return };
        for name in self.names.values() {
            if let Err(error) = beneath::remove_tree(root.as_fd(), name) {
                let name = beneath::display(name);
                tracing::error!(%name, %error, "cannot remove a file of a round that broke off");
            }
        }
    }
}
