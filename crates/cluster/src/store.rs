//! What a store of the cluster must be able to do: the common part of SQLite and etcd.
//!
//! ```text
//! key            value    revision        A revision is a number of the whole store, which each swap raises by one.
//! node/a         bytes    17              An entry has the revision of the swap that wrote it last; a key that is
//! service/web    bytes    12              not there has revision 0.
//! ```
//! The only way to change entries is [`Store::swap`]: it compares the revisions of some keys and, if none differs, writes
//! some keys, all at once (etcd's `Txn` with comparisons of `mod_revision`). Reads are linearizable: a read that begins
//! after a swap has returned sees it.

use std::fmt;

use async_trait::async_trait;
use godwit_names::{NodeName, ServiceName, is_name};

/// Longest value in bytes. Records are shorter than 1 KiB; etcd takes 1.5 MiB by default.
pub const MAX_VALUE: usize = 64 << 10;

/// Most comparisons and most writes of a swap: etcd's default for `--max-txn-ops`.
pub const MAX_OPERATIONS: usize = 128;

/// Most entries of a page.
pub const MAX_PAGE: usize = 1000;

/// Why a store did not do what was asked: the error of SQLite, or of the connection.
pub type Cause = Box<dyn std::error::Error + Send + Sync>;

/// A kind of records: the part of a key before the slash.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Folder {
    /// Nodes, each with its lease.
    Nodes,
    /// Services, each with its owner.
    Services,
}

impl Folder {
    const ALL: [Self; 2] = [Self::Nodes, Self::Services];

    /// The text that all its keys begin with.
    #[must_use]
    pub fn prefix(self) -> &'static str {
        match self {
            Self::Nodes => "node/",
            Self::Services => "service/",
        }
    }
}

/// A key: a folder and a name. A name has no slash, so a name cannot reach into another folder.
#[derive(Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Key {
    folder: Folder,
    name: String,
}

impl Key {
    /// A node's key.
    #[must_use]
    pub fn node(name: &NodeName) -> Self {
        Self { folder: Folder::Nodes, name: name.to_string() }
    }

    /// A service's key.
    #[must_use]
    pub fn service(name: &ServiceName) -> Self {
        Self { folder: Folder::Services, name: name.to_string() }
    }

    /// What a store has as a key's text; none where this version does not write such a key.
    #[must_use]
    pub fn parse(text: &str) -> Option<Self> {
        let folder = Folder::ALL.into_iter().find(|folder| text.starts_with(folder.prefix()))?;
        let name = &text[folder.prefix().len()..];
        is_name(name).then(|| Self { folder, name: name.to_owned() })
    }

    /// The kind of record that it is a key of.
    #[must_use]
    pub fn folder(&self) -> Folder {
        self.folder
    }

    /// The service's or the node's name.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }
}

impl fmt::Display for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}{}", self.folder.prefix(), self.name)
    }
}

impl fmt::Debug for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{self}")
    }
}

/// A number of the store's history.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Revision(pub u64);

impl Revision {
    /// That of a key that is not there, and of a store before its first swap.
    pub const NONE: Self = Self(0);
}

/// A key that is there.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Entry {
    /// The key.
    pub key: Key,
    /// The bytes, which may be anybody's.
    pub value: Vec<u8>,
    /// That of the swap that wrote it last.
    pub revision: Revision,
}

/// A key with the revision that it must have for a swap to be done.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Compare {
    /// The key.
    pub key: Key,
    /// [`Revision::NONE`]: the key must not be there.
    pub revision: Revision,
}

/// What a swap does to a key.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Write {
    /// Gives it this value.
    Put(Key, Vec<u8>),
    /// Removes it. A swap without an answer that makes the same key may be done after that: remove only a key whose
    /// reappearance does no harm.
    Delete(Key),
}

impl Write {
    /// The key.
    #[must_use]
    pub fn key(&self) -> &Key {
        match self {
            Self::Put(key, _) | Self::Delete(key) => key,
        }
    }

    /// What the key has afterwards.
    #[must_use]
    pub fn value(&self) -> Option<&[u8]> {
        match self {
            Self::Put(_, value) => Some(value),
            Self::Delete(_) => None,
        }
    }
}

/// Comparisons and writes that every store takes. Each written key is compared, so a swap that arrives twice is done once.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Swap {
    compares: Vec<Compare>,
    writes: Vec<Write>,
}

/// Why a swap cannot be asked for.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum SwapLimit {
    /// Nothing, or too much at once.
    #[error(
        "a swap of {compares} comparisons and {writes} writes is not one of 1 to {MAX_OPERATIONS}; split it"
    )]
    Operations {
        /// Comparisons.
        compares: usize,
        /// Writes.
        writes: usize,
    },
    /// A key is written without a comparison, or twice.
    #[error("a swap writes key {0} without comparing it, or twice; compare and write each key once")]
    Blind(Key),
    /// A value is too long.
    #[error("the value of key {key} has {bytes} bytes, and {MAX_VALUE} are allowed")]
    Value {
        /// The key.
        key: Key,
        /// Its bytes.
        bytes: usize,
    },
}

impl Swap {
    /// Checks the limits.
    ///
    /// # Errors
    /// A limit is exceeded, or a written key is not compared.
    pub fn new(compares: Vec<Compare>, writes: Vec<Write>) -> Result<Self, SwapLimit> {
        if writes.is_empty() || writes.len().max(compares.len()) > MAX_OPERATIONS {
            return Err(SwapLimit::Operations { compares: compares.len(), writes: writes.len() });
        }
        for (at, write) in writes.iter().enumerate() {
            let key = write.key();
            if writes[..at].iter().any(|other| other.key() == key)
                || compares.iter().filter(|compare| compare.key == *key).count() != 1
            {
                return Err(SwapLimit::Blind(key.clone()));
            }
            if let Some(value) = write.value().filter(|value| value.len() > MAX_VALUE) {
                return Err(SwapLimit::Value { key: key.clone(), bytes: value.len() });
            }
        }
        Ok(Self { compares, writes })
    }

    /// What is compared.
    #[must_use]
    pub fn compares(&self) -> &[Compare] {
        &self.compares
    }

    /// What is written.
    #[must_use]
    pub fn writes(&self) -> &[Write] {
        &self.writes
    }
}

/// The store's answer to a swap.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Swapped {
    /// It is done, and durable. What it wrote has this revision.
    Done(Revision),
    /// A comparison failed and nothing is written. What is there of each compared key, in their order.
    Differs(Vec<Option<Entry>>),
}

/// Entries of a folder, in the order of their names.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Page {
    /// The entries.
    pub entries: Vec<Entry>,
    /// That of the store when it was read. Pages are read one after another: who reads all of them and then watches
    /// from the revision of the *first* misses nothing.
    pub revision: Revision,
    /// There are further entries after the last one.
    pub more: bool,
}

/// A change of a key.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Event {
    /// The key.
    pub key: Key,
    /// What it has since; none where it was removed.
    pub value: Option<Vec<u8>>,
    /// That of the swap.
    pub revision: Revision,
}

/// Why nothing was read.
#[derive(Debug, thiserror::Error)]
pub enum ReadError {
    /// The store does not answer.
    #[error("the cluster's store does not answer; check its node and this node's connection to it")]
    Unavailable(#[source] Cause),
}

/// Why a swap has no answer. The two are told apart by type, since the caller must act differently.
#[derive(Debug, thiserror::Error)]
pub enum SwapError {
    /// The store did not get it, or has undone it: nothing is changed by it, now or later.
    #[error("the cluster's store did not get the change; check its node and this node's connection to it")]
    NotDone(#[source] Cause),
    /// The outcome is unknown: it may be done by now, may be done later, or never.
    #[error("the cluster's store did not answer whether the change was made")]
    Unknown(#[source] Cause),
}

/// Why a watch ends.
#[derive(Debug, thiserror::Error)]
pub enum WatchError {
    /// The events after that revision are no longer stored, or the store does not have that revision.
    #[error(
        "the cluster's store has no events after revision {}; read all entries, and watch from there", after.0
    )]
    Compacted {
        /// What was asked for.
        after: Revision,
    },
    /// The store does not answer.
    #[error(transparent)]
    Read(#[from] ReadError),
}

/// A store of entries. Another program may have written keys which [`Key::parse`] does not know: they are passed over, and hide
/// no others. A future that is dropped before it ends leaves the outcome of its swap unknown.
#[async_trait]
pub trait Store: Send + Sync {
    /// What a key has.
    async fn get(&self, key: &Key) -> Result<Option<Entry>, ReadError>;

    /// Up to `limit` (at most [`MAX_PAGE`]) entries of a folder with names after this one.
    async fn range(&self, folder: Folder, after: Option<&str>, limit: usize) -> Result<Page, ReadError>;

    /// Compares and writes, all or nothing.
    async fn swap(&self, swap: &Swap) -> Result<Swapped, SwapError>;

    /// The changes of a folder after a revision.
    async fn watch(&self, folder: Folder, after: Revision) -> Result<Box<dyn Watch>, WatchError>;
}

/// Changes in their order, none left out.
#[async_trait]
pub trait Watch: Send {
    /// Waits for the next changes. All those of one revision come together.
    async fn next(&mut self) -> Result<Vec<Event>, WatchError>;
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn a_name_cannot_forge_a_key_and_a_key_is_read_back_as_it_was_written() {
        for key in [Key::node(&"a.b-c_9".parse().unwrap()), Key::service(&"node".parse().unwrap())] {
            assert_eq!(Key::parse(&key.to_string()), Some(key));
        }
        for text in [
            "",
            "service",
            "service/",
            "/web",
            "service/a/b",
            "service//b",
            "service/..",
            "other/a",
            "Node/a",
        ] {
            assert_eq!(Key::parse(text), None, "{text}");
        }
    }

    #[test]
    fn a_swap_compares_each_key_that_it_writes_and_has_limits() {
        let key = Key::service(&"web".parse().unwrap());
        let compare = Compare { key: key.clone(), revision: Revision::NONE };
        let put = |bytes| Write::Put(key.clone(), vec![0; bytes]);
        assert!(Swap::new(vec![compare.clone()], vec![put(MAX_VALUE)]).is_ok());
        assert_eq!(Swap::new(vec![], vec![put(1)]), Err(SwapLimit::Blind(key.clone())));
        assert_eq!(
            Swap::new(vec![compare.clone()], vec![put(1), put(2)]),
            Err(SwapLimit::Blind(key.clone()))
        );
        assert!(matches!(
            Swap::new(vec![compare.clone()], vec![]),
            Err(SwapLimit::Operations { compares: 1, writes: 0 })
        ));
        assert!(matches!(
            Swap::new(vec![compare; MAX_OPERATIONS + 1], vec![put(1)]),
            Err(SwapLimit::Operations { .. })
        ));
        let compare = Compare { key: key.clone(), revision: Revision::NONE };
        assert_eq!(
            Swap::new(vec![compare], vec![put(MAX_VALUE + 1)]),
            Err(SwapLimit::Value { key: key.clone(), bytes: MAX_VALUE + 1 })
        );
    }
}
