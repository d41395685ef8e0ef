//! A store in memory, for speed: what the trait says, and nothing else.

use std::collections::BTreeMap;
use std::sync::Mutex;

use async_trait::async_trait;
use godwit_cluster::store::{
    Entry, Folder, Key, MAX_PAGE, Page, ReadError, Revision, Store, Swap, SwapError, Swapped, Watch,
    WatchError,
};

/// Entries, and the newest revision.
#[derive(Default)]
pub(crate) struct Memory(Mutex<(BTreeMap<Key, Entry>, u64)>);

impl Memory {
    /// Writes what a swap writes, whatever its comparisons would say.
    pub(crate) fn write(&self, swap: &Swap) -> Revision {
        let (entries, newest) = &mut *self.0.lock().unwrap();
        *newest += 1;
        let revision = Revision(*newest);
        for write in swap.writes() {
            let key = write.key().clone();
            match write.value() {
                Some(value) => entries.insert(key.clone(), Entry { key, value: value.to_vec(), revision }),
                None => entries.remove(&key),
            };
        }
        revision
    }

    /// What is there of a key.
    pub(crate) fn entry(&self, key: &Key) -> Option<Entry> {
        self.0.lock().unwrap().0.get(key).cloned()
    }
}

#[async_trait]
impl Store for Memory {
    async fn get(&self, key: &Key) -> Result<Option<Entry>, ReadError> {
        Ok(self.entry(key))
    }

    async fn range(&self, folder: Folder, after: Option<&str>, limit: usize) -> Result<Page, ReadError> {
        let (entries, newest) = &*self.0.lock().unwrap();
        let found = entries.values().filter(|entry| entry.key.folder() == folder);
        let mut found = found.filter(|entry| after.is_none_or(|after| entry.key.name() > after));
        let entries = found.by_ref().take(limit.clamp(1, MAX_PAGE)).cloned().collect();
        Ok(Page { entries, revision: Revision(*newest), more: found.next().is_some() })
    }

    async fn swap(&self, swap: &Swap) -> Result<Swapped, SwapError> {
        let there: Vec<_> = swap.compares().iter().map(|compare| self.entry(&compare.key)).collect();
        let same = swap.compares().iter().zip(&there).all(|(compare, entry)| {
            entry.as_ref().map_or(Revision::NONE, |entry| entry.revision) == compare.revision
        });
        Ok(if same { Swapped::Done(self.write(swap)) } else { Swapped::Differs(there) })
    }

    /// It keeps no changes: who watches is told to read all.
    async fn watch(&self, _: Folder, after: Revision) -> Result<Box<dyn Watch>, WatchError> {
        Err(WatchError::Compacted { after })
    }
}
