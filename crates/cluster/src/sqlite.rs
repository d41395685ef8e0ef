//! The store in one file of SQLite, for a cluster one of whose nodes has it.
//!
//! ```text
//! entry    (key, value, revision)          what is there
//! change   (revision, key, value or null)  what has come to be, for watches; the oldest are dropped
//! progress (revision, compacted)           the newest revision, and the newest whose changes are dropped
//! ```
//! A swap is one transaction, on the disk when it returns. One process has the file open: SQLite's exclusive lock refuses a
//! second one. A write that fails before `COMMIT` is undone; when `COMMIT` itself fails, the outcome is unknown.

use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use async_trait::async_trait;
use godwit_database::blocking::off_worker;
use godwit_database::file;
use godwit_database::schema::{self, SchemaError};
use rusqlite::{Connection, OptionalExtension, Row, TransactionBehavior, params};
use tokio::sync::watch;

use crate::store::{
    Entry, Event, Folder, Key, MAX_PAGE, Page, ReadError, Revision, Store, Swap, SwapError, Swapped, Watch,
    WatchError,
};

/// Revisions whose changes are stored: eleven minutes of a hundred nodes that renew their leases each second. Who was away
/// for longer reads all entries.
const KEPT: u64 = 1 << 16;

/// Revisions that a watch reads at once.
const AT_ONCE: u64 = 1024;

/// What the file has become from version to version; see [`schema`].
const STEPS: [schema::Step; 1] = [schema::Step {
    adds: "owners of services, and nodes with their leases",
    sql: "CREATE TABLE entry (
        key TEXT PRIMARY KEY, value BLOB NOT NULL, revision INTEGER NOT NULL
    ) STRICT, WITHOUT ROWID;
    CREATE TABLE change (
        revision INTEGER NOT NULL, key TEXT NOT NULL, value BLOB, PRIMARY KEY (revision, key)
    ) STRICT, WITHOUT ROWID;
    CREATE TABLE progress (
        only INTEGER PRIMARY KEY CHECK (only = 1), revision INTEGER NOT NULL, compacted INTEGER NOT NULL
    ) STRICT;
    INSERT INTO progress (only, revision, compacted) VALUES (1, 0, 0);",
}];

/// Bytes of an unknown key that are shown.
const MAX_SHOWN: usize = 64;

/// What SQLite's `application_id` of the file is: "gwcs", godwit's store of a cluster.
const APPLICATION: u32 = 0x6777_6373;

/// Why the file cannot be opened.
#[derive(Debug, thiserror::Error)]
pub enum OpenError {
    /// It cannot be made, or closed to other users.
    #[error("the cluster's store {} cannot be made; check its directory and the disk", path.display())]
    File {
        /// The file.
        path: PathBuf,
        /// The system's answer.
        #[source]
        source: std::io::Error,
    },
    /// Another process has it open.
    #[error("another process has the cluster's store {} open; end the other godwitd first", path.display())]
    Busy {
        /// The file.
        path: PathBuf,
    },
    /// It is another program's file, or another one of godwit's.
    #[error("{} is not the store of a cluster, and is left as it is; name another file", path.display())]
    Foreign {
        /// The file.
        path: PathBuf,
    },
    /// SQLite's answer.
    #[error("the cluster's store {} cannot be used; check the disk", path.display())]
    Database {
        /// The file.
        path: PathBuf,
        /// The answer.
        #[source]
        source: rusqlite::Error,
    },
    /// The file cannot be brought up to this version.
    #[error("the cluster's store {} cannot be used by this version of godwit", path.display())]
    Schema {
        /// The file.
        path: PathBuf,
        /// Why.
        #[source]
        source: SchemaError,
    },
}

impl OpenError {
    fn new(path: &Path, source: SchemaError) -> Self {
        use rusqlite::ErrorCode::{DatabaseBusy, DatabaseLocked, NotADatabase};
        let path = path.to_owned();
        match source {
            SchemaError::Database(source) => match source.sqlite_error_code() {
                Some(DatabaseBusy | DatabaseLocked) => Self::Busy { path },
                Some(NotADatabase) => Self::Foreign { path },
                _ => Self::Database { path, source },
            },
            source @ SchemaError::Newer(_) => Self::Schema { path, source },
        }
    }
}

/// A store in a file. Its copies and its watches share it.
#[derive(Clone)]
pub struct SqliteStore(Arc<Shared>);

struct Shared {
    database: Mutex<Connection>,
    newest: watch::Sender<u64>,
    kept: u64,
    /// Whether an unknown key was told of.
    warned: AtomicBool,
}

impl fmt::Debug for SqliteStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SqliteStore").field("newest", &*self.0.newest.borrow()).finish_non_exhaustive()
    }
}

impl SqliteStore {
    /// Opens the file, or makes it.
    ///
    /// # Errors
    /// Another process has it, a later release wrote it, or the disk is broken.
    pub fn open(path: &Path) -> Result<Self, OpenError> {
        Self::open_keeping(path, KEPT)
    }

    /// The same with the changes of so many revisions.
    fn open_keeping(path: &Path, kept: u64) -> Result<Self, OpenError> {
        file::own(path).map_err(|source| OpenError::File { path: path.to_owned(), source })?;
        let database = Self::connect(path).map_err(|error| OpenError::new(path, error))?;
        let Some(database) = database else { return Err(OpenError::Foreign { path: path.to_owned() }) };
        let newest = progress(&database).map_err(|error| OpenError::new(path, error.into()))?.newest;
        Ok(Self(Arc::new(Shared {
            database: Mutex::new(database),
            newest: watch::Sender::new(newest),
            kept,
            warned: AtomicBool::new(false),
        })))
    }

    /// A connection to the file, which has the tables of this version. None where it is another program's.
    fn connect(path: &Path) -> Result<Option<Connection>, SchemaError> {
        let mut database = Connection::open(path)?;
        // Who has the file does not let go of it.
        database.busy_timeout(Duration::ZERO)?;
        // Before the first use of the write-ahead log, so that its index is in this process's memory alone.
        database.pragma_update(None, "locking_mode", "EXCLUSIVE")?;
        let tables = "SELECT count(*) FROM sqlite_master";
        let is_new = database.query_row(tables, [], |row| row.get(0).map(|count: u64| count == 0))?;
        let found: u32 = database.pragma_query_value(None, "application_id", |row| row.get(0))?;
        if found != APPLICATION && !(is_new && found == 0) {
            return Ok(None);
        }
        file::make_durable(&database)?;
        database.pragma_update(None, "application_id", APPLICATION)?;
        // An older copy of the file would not know what nodes have acted on: there is no other way than a newer godwit.
        schema::upgrade(&mut database, &STEPS, None)?;
        Ok(Some(database))
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, Connection> {
        // A panic while the lock was held cannot have left a half-made row: SQLite rolls it back.
        self.database.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn swap(&self, swap: &Swap) -> Result<Swapped, SwapError> {
        let not_done = |error: rusqlite::Error| SwapError::NotDone(error.into());
        let mut database = self.lock();
        let transaction =
            database.transaction_with_behavior(TransactionBehavior::Immediate).map_err(not_done)?;
        let mut there = Vec::with_capacity(swap.compares().len());
        for compare in swap.compares() {
            there.push(entry(&transaction, &compare.key).map_err(not_done)?);
        }
        let revisions =
            there.iter().map(|entry| entry.as_ref().map_or(Revision::NONE, |entry| entry.revision));
        if revisions.zip(swap.compares()).any(|(revision, compare)| revision != compare.revision) {
            return Ok(Swapped::Differs(there));
        }
        let revision = write(&transaction, swap, self.kept).map_err(not_done)?;
        transaction.commit().map_err(|error| SwapError::Unknown(error.into()))?;
        drop(database);
        self.newest.send_replace(revision);
        Ok(Swapped::Done(Revision(revision)))
    }

    fn range(&self, folder: Folder, after: Option<&str>, limit: usize) -> Result<Page, ReadError> {
        let (limit, prefix) = (limit.clamp(1, MAX_PAGE), folder.prefix());
        let mut database = self.lock();
        let transaction = database.transaction().map_err(unavailable)?;
        let newest = progress(&transaction).map_err(unavailable)?.newest;
        let first = format!("{prefix}{}", after.unwrap_or_default());
        let mut statement = transaction
            .prepare_cached("SELECT key, value, revision FROM entry WHERE key > ?1 AND key < ?2 ORDER BY key")
            .map_err(unavailable)?;
        let mut rows = statement.query(params![first, end(folder)]).map_err(unavailable)?;
        let (mut entries, mut more) = (Vec::new(), false);
        while let Some(row) = rows.next().map_err(unavailable)? {
            let Some(key) = self.known(row).map_err(unavailable)? else { continue };
            more = entries.len() == limit;
            if more {
                break;
            }
            let value = row.get(1).map_err(unavailable)?;
            entries.push(Entry { key, value, revision: Revision(number(row, 2).map_err(unavailable)?) });
        }
        Ok(Page { entries, revision: Revision(newest), more })
    }

    /// The key of a row. One that no release writes hides no others: it is passed over, and the first one is told of.
    fn known(&self, row: &Row<'_>) -> Result<Option<Key>, rusqlite::Error> {
        let text = row.get_ref(0)?.as_bytes()?;
        let key = std::str::from_utf8(text).ok().and_then(Key::parse);
        if key.is_none() && !self.warned.swap(true, Ordering::Relaxed) {
            let shown = text[..text.len().min(MAX_SHOWN)].escape_ascii();
            let bytes = text.len();
            tracing::warn!(
                "the cluster's store has a key of {bytes} bytes that this godwit does not know ({shown}), and passes over such keys; install the newest godwit that a node of the cluster has"
            );
        }
        Ok(key)
    }

    /// The changes of the next revisions after this one, with the revision that was reached.
    fn changes(&self, folder: Folder, after: u64) -> Result<(Vec<Event>, u64), WatchError> {
        let mut database = self.lock();
        let transaction = database.transaction().map_err(unavailable)?;
        let progress = progress(&transaction).map_err(unavailable)?;
        if after < progress.compacted || after > progress.newest {
            return Err(WatchError::Compacted { after: Revision(after) });
        }
        let until = progress.newest.min(after.saturating_add(AT_ONCE));
        let mut statement = transaction
            .prepare_cached(
                "SELECT key, value, revision FROM change
                 WHERE revision > ?1 AND revision <= ?2 AND key > ?3 AND key < ?4 ORDER BY revision, key",
            )
            .map_err(unavailable)?;
        let range = params![signed(after), signed(until), folder.prefix(), end(folder)];
        let mut rows = statement.query(range).map_err(unavailable)?;
        let mut events = Vec::new();
        while let Some(row) = rows.next().map_err(unavailable)? {
            let Some(key) = self.known(row).map_err(unavailable)? else { continue };
            let value = row.get(1).map_err(unavailable)?;
            events.push(Event { key, value, revision: Revision(number(row, 2).map_err(unavailable)?) });
        }
        Ok((events, until))
    }
}

struct Progress {
    newest: u64,
    compacted: u64,
}

fn progress(database: &Connection) -> Result<Progress, rusqlite::Error> {
    let mut statement = database.prepare_cached("SELECT revision, compacted FROM progress")?;
    statement.query_row([], |row| Ok(Progress { newest: number(row, 0)?, compacted: number(row, 1)? }))
}

fn entry(database: &Connection, key: &Key) -> Result<Option<Entry>, rusqlite::Error> {
    let mut statement = database.prepare_cached("SELECT value, revision FROM entry WHERE key = ?1")?;
    let read = |row: &Row<'_>| {
        Ok(Entry { key: key.clone(), value: row.get(0)?, revision: Revision(number(row, 1)?) })
    };
    statement.query_row([key.to_string()], read).optional()
}

/// Writes what a swap writes, with its revision, and drops the oldest changes.
fn write(database: &Connection, swap: &Swap, kept: u64) -> Result<u64, rusqlite::Error> {
    let revision = database
        .prepare_cached("UPDATE progress SET revision = revision + 1 RETURNING revision")?
        .query_row([], |row| number(row, 0))?;
    for write in swap.writes() {
        let (key, value) = (write.key().to_string(), write.value());
        match value {
            Some(_) => database
                .prepare_cached("INSERT OR REPLACE INTO entry (key, value, revision) VALUES (?1, ?2, ?3)")?
                .execute(params![key, value, signed(revision)])?,
            None => database.prepare_cached("DELETE FROM entry WHERE key = ?1")?.execute([&key])?,
        };
        database
            .prepare_cached("INSERT INTO change (revision, key, value) VALUES (?1, ?2, ?3)")?
            .execute(params![signed(revision), key, value])?;
    }
    if let Some(compacted) = revision.checked_sub(kept).filter(|compacted| *compacted > 0) {
        let compacted = signed(compacted);
        database.prepare_cached("DELETE FROM change WHERE revision <= ?1")?.execute([compacted])?;
        database.prepare_cached("UPDATE progress SET compacted = ?1")?.execute([compacted])?;
    }
    Ok(revision)
}

/// What no key of a folder reaches: the character after the slash.
fn end(folder: Folder) -> String {
    format!("{}0", folder.prefix().trim_end_matches('/'))
}

/// SQLite's integers have a sign. A thousand swaps a second reach the highest one in 290 million years.
fn signed(number: u64) -> i64 {
    i64::try_from(number).unwrap_or(i64::MAX)
}

fn number(row: &Row<'_>, column: usize) -> Result<u64, rusqlite::Error> {
    let number: i64 = row.get(column)?;
    u64::try_from(number).map_err(|_| rusqlite::Error::IntegralValueOutOfRange(column, number))
}

fn unavailable(error: rusqlite::Error) -> ReadError {
    ReadError::Unavailable(error.into())
}

#[async_trait]
impl Store for SqliteStore {
    async fn get(&self, key: &Key) -> Result<Option<Entry>, ReadError> {
        off_worker(|| entry(&self.0.lock(), key).map_err(unavailable))
    }

    async fn range(&self, folder: Folder, after: Option<&str>, limit: usize) -> Result<Page, ReadError> {
        off_worker(|| self.0.range(folder, after, limit))
    }

    async fn swap(&self, swap: &Swap) -> Result<Swapped, SwapError> {
        off_worker(|| self.0.swap(swap))
    }

    async fn watch(&self, folder: Folder, after: Revision) -> Result<Box<dyn Watch>, WatchError> {
        let newest = self.0.newest.subscribe();
        Ok(Box::new(Watching { store: Arc::clone(&self.0), newest, folder, after: after.0 }))
    }
}

struct Watching {
    store: Arc<Shared>,
    newest: watch::Receiver<u64>,
    folder: Folder,
    after: u64,
}

#[async_trait]
impl Watch for Watching {
    async fn next(&mut self) -> Result<Vec<Event>, WatchError> {
        loop {
            // Marked before it is read: what comes after the read wakes this up.
            let newest = *self.newest.borrow_and_update();
            let (events, reached) = off_worker(|| self.store.changes(self.folder, self.after))?;
            self.after = reached;
            if !events.is_empty() {
                return Ok(events);
            }
            if reached >= newest {
                let closed = self.newest.changed().await;
                closed.map_err(|error| ReadError::Unavailable(error.into()))?;
            }
        }
    }
}

#[cfg(test)]
#[path = "sqlite/tests.rs"]
mod tests;
