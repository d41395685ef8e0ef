//! Members that others have named, and that have not spoken to this node: an address to try.
//!
//! What others say of them is not believed. It only leads to a connection, which succeeds with the named node's
//! certificate alone; then the node speaks for itself.

use std::collections::BTreeMap;
use std::sync::{Mutex, PoisonError};

use godwit_api::v1::Member;

use crate::trust::MAX_MEMBERS;

/// Who is to be tried.
#[derive(Default)]
pub(crate) struct Introduced(Mutex<BTreeMap<String, String>>);

impl Introduced {
    /// Notes where a member is said to be.
    pub(crate) fn hear(&self, member: &Member) {
        let mut heard = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if heard.len() < MAX_MEMBERS || heard.contains_key(&member.name) {
            heard.insert(member.name.clone(), member.address.clone());
        }
    }

    /// Those to be tried now, each with an address; one that is named again is tried again.
    pub(crate) fn take(&self) -> BTreeMap<String, String> {
        std::mem::take(&mut *self.0.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_is_tried_once_and_no_more_than_a_cluster_can_have() {
        let introduced = Introduced::default();
        for number in 0..2 * MAX_MEMBERS {
            let (name, address) = (format!("n{number:04}"), "10.0.0.1:7117".to_owned());
            introduced.hear(&Member { name, address, ..Member::default() });
        }
        assert_eq!(introduced.take().len(), MAX_MEMBERS);
        assert!(introduced.take().is_empty());
    }
}
