//! The journal: what this node has promised about each migration, on disk before it acts on it.
//!
//! ```text
//! source:       started ──► frozen ──► committed | serving ──► released ──► done
//!                  └──► undoing ◄┘                    └──────────────────────►┘
//!                          └─────► aborted
//! destination:  reserved ──► restored ──► committed ──► done
//!                  └────────────┴───────► dropped
//! ```
//! `committed` at the source is the commit point of the whole migration: before it is on disk the
//! source owns the service, after it the destination does. `serving` is the same, where pages of the
//! service are still at the source. `undoing` is the other decision: the service stays, and is rolled back.
//! The destination's `committed` only repeats what the source decided.
//!
//! A commit is forgotten only when the destination has acknowledged it: `released` (nothing of the service is
//! left here) stays until then, for ever if need be. `aborted`, `dropped` and `done` are final, and are forgotten
//! after a month. A journal has a random identity, so that a destination in doubt notices when it asks another
//! journal than the one in which its migration began.
//!
//! On a full disk the decision against a commit must still be written, or the service would stay frozen: beside the journal
//! is a file whose only purpose is to be removed then ([`Room`]).
//!
//! A service has one open migration on a node: [`Journal::begin`] ends older ones, or refuses ([`older`]).

mod room;
mod stage;

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::{SystemTime, UNIX_EPOCH};

use godwit_database::blocking::off_worker;
use godwit_database::file;
use godwit_database::schema::{self, SchemaError, Step};
use godwit_names::ServiceName;
use rusqlite::{Connection, OpenFlags, TransactionBehavior, params};

use crate::failpoint;
use crate::options::ServeOptions;
use crate::service::Service;
use room::Room;
pub use stage::{Older, Role, Stage, older};

/// The result of writing the commit.
#[derive(Debug)]
pub enum Commit {
    /// It is on the disk.
    Written,
    /// It is not, for this reason, and will not be.
    NotWritten(JournalError),
    /// Unknown: the disk can be neither written nor read.
    Unknown(JournalError),
}

/// A migration that begins.
#[derive(Debug, Clone, Copy)]
pub struct Beginning<'a> {
    /// The migration.
    pub id: &'a str,
    /// This node's side.
    pub role: Role,
    /// The other node.
    pub peer: &'a str,
    /// The identity of the source's journal, at the destination; empty where it did not tell.
    pub peer_journal: &'a str,
    /// The service, with the epoch that it has on this node.
    pub service: &'a Service,
    /// How its pages are sent, at the source.
    pub serving: Option<ServeOptions>,
}

/// One migration in the journal.
#[derive(Debug, Clone)]
pub struct Entry {
    /// The migration.
    pub id: String,
    /// This node's side.
    pub role: Role,
    /// The other node.
    pub peer: String,
    /// The identity of the source's journal, at the destination; empty where it did not tell.
    pub peer_journal: String,
    /// How far it has come.
    pub stage: Stage,
    /// The service as it was when the entry was made.
    pub service: Service,
    /// Processes (inside the container) that were stopped by a signal and stay so after the move.
    pub keep_stopped: Vec<u32>,
    /// Why it was aborted or dropped.
    pub reason: String,
}

/// Why the journal could not be read or written.
#[derive(Debug, thiserror::Error)]
pub enum JournalError {
    /// SQLite's answer.
    #[error("the migration journal cannot be used; check the disk that holds godwit's state directory")]
    Database(#[from] rusqlite::Error),
    /// The file cannot be brought up to this version.
    #[error("the migration journal journal.db cannot be used by this version of godwit")]
    Schema(#[from] SchemaError),
    /// A row that this version did not write.
    #[error(
        "the migration journal's entry {0} is damaged; move journal.db aside only after checking with `godwit ps` on both nodes where the service runs"
    )]
    Damaged(String),
    /// An earlier migration of the service has to end first.
    #[error(
        "an earlier migration of service {service} has not ended on this node (journal entry {id}: {stage}); try again in a moment"
    )]
    Unsettled {
        /// The service.
        service: ServiceName,
        /// The earlier migration.
        id: String,
        /// How far that is.
        stage: &'static str,
    },
    /// An error that a test asked for.
    #[error("a fault is injected: the disk does not take the journal's entry")]
    Injected,
    /// The file cannot be closed to other users.
    #[error("{path} cannot be made")]
    File {
        /// The journal.
        path: PathBuf,
        /// The system's answer.
        #[source]
        source: std::io::Error,
    },
}

/// Entries older than this and final are forgotten: nobody asks about them any more.
const KEEP_FINAL_MS: i64 = 30 * 24 * 3600 * 1000;

/// What the file has become from version to version; see [`schema`].
const STEPS: [Step; 5] = [
    Step {
        adds: "all migrations",
        sql: "CREATE TABLE IF NOT EXISTS migration (
        id TEXT PRIMARY KEY,
        role TEXT NOT NULL CHECK (role IN ('source', 'destination')),
        peer TEXT NOT NULL,
        stage TEXT NOT NULL,
        service TEXT NOT NULL,
        keep_stopped TEXT NOT NULL DEFAULT '[]',
        reason TEXT NOT NULL DEFAULT '',
        updated_ms INTEGER NOT NULL
    ) STRICT;",
    },
    Step {
        adds: "which life of a service a migration is of, and which of them the destination has acknowledged",
        sql: "ALTER TABLE migration ADD COLUMN service_id TEXT NOT NULL DEFAULT '';
    ALTER TABLE migration ADD COLUMN epoch INTEGER NOT NULL DEFAULT 0;
    ALTER TABLE migration ADD COLUMN peer_journal TEXT NOT NULL DEFAULT '';
    ALTER TABLE migration ADD COLUMN acknowledged INTEGER NOT NULL DEFAULT 0;
    UPDATE migration SET service_id = coalesce(json_extract(service, '$.id'), ''),
        epoch = coalesce(json_extract(service, '$.epoch'), 0) WHERE json_valid(service);
    CREATE INDEX migration_by_service ON migration (service_id);
    CREATE TABLE identity (id TEXT NOT NULL) STRICT;
    INSERT INTO identity (id) VALUES (lower(hex(randomblob(16))));",
    },
    Step {
        adds: "how the pages that are still to follow are sent",
        sql: "ALTER TABLE migration ADD COLUMN serving TEXT NOT NULL DEFAULT '';",
    },
    Step {
        adds: "which migrations were aborted",
        sql: "UPDATE migration SET stage = 'aborted' WHERE stage = 'kept';",
    },
    // In the descriptions of services.
    Step { adds: "containers of other engines, volumes, and what becomes of bind mounts in a move", sql: "" },
];

/// What a user can do about a file of a newer release: a node's files go back together.
pub const OTHERWISE: &str = "put the copies of node.db and journal.db back that were made before its upgrade";

/// The newest version of the file.
pub const SCHEMA_VERSION: usize = STEPS.len();

/// The journal of one node.
#[derive(Debug)]
pub struct Journal {
    path: PathBuf,
    room: Room,
    identity: String,
    undecided: AtomicBool,
    database: Mutex<Connection>,
    #[cfg(test)]
    observer: Observer,
}

/// Is told of a write before it is made, and says whether it may be.
#[cfg(test)]
type Observing = Box<dyn Fn(&str) -> bool + Send + Sync>;

/// The observer of a test.
#[cfg(test)]
#[derive(Default)]
struct Observer(std::sync::OnceLock<Observing>);

#[cfg(test)]
impl std::fmt::Debug for Observer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Observer")
    }
}

impl Journal {
    /// Opens or makes the journal at `path`. Every write is on the disk when its method returns.
    pub fn open(path: &Path) -> Result<Self, JournalError> {
        file::own(path).map_err(|source| JournalError::File { path: path.to_owned(), source })?;
        let mut database = Connection::open(path)?;
        file::make_durable(&database)?;
        schema::upgrade(&mut database, &STEPS, Some(OTHERWISE))?;
        let identity = database.query_row("SELECT id FROM identity", [], |row| row.get(0))?;
        let journal = Self {
            path: path.to_path_buf(),
            room: Room::beside(path),
            identity,
            undecided: AtomicBool::new(false),
            database: Mutex::new(database),
            #[cfg(test)]
            observer: Observer::default(),
        };
        journal.lock().execute(
            "DELETE FROM migration WHERE stage IN ('aborted', 'dropped', 'done') AND updated_ms < ?1",
            params![now_ms() - KEEP_FINAL_MS],
        )?;
        Ok(journal)
    }

    /// What distinguishes this journal from all others, even from one that is made in its place.
    #[must_use]
    pub fn identity(&self) -> &str {
        &self.identity
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Connection> {
        // A panic while the lock was held cannot have left a half-made row: SQLite rolls it back.
        self.database.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether a test wants this write to fail.
    fn fails(&self, write: &str) -> bool {
        #[cfg(test)]
        if self.observer.0.get().is_some_and(|may| !may(write)) {
            return true;
        }
        failpoint::fails(&format!("journal.{write}"))
    }

    /// Has every write told to this, which says whether it may be made.
    #[cfg(test)]
    pub(crate) fn observe(&self, may: impl Fn(&str) -> bool + Send + Sync + 'static) {
        assert!(self.observer.0.set(Box::new(may)).is_ok(), "a journal has one observer");
    }

    /// Writes the first entry of a migration, and ends older ones of the same service as [`older`] says.
    ///
    /// # Errors
    /// [`JournalError::Unsettled`] when an older one must end by itself.
    pub fn begin(&self, new: &Beginning<'_>) -> Result<(), JournalError> {
        off_worker(|| {
            let Beginning { id, role, peer, peer_journal, service, serving } = *new;
            let damaged = || JournalError::Damaged(id.to_string());
            let (role_name, stage) = match role {
                Role::Source => ("source", Stage::Started),
                Role::Destination => ("destination", Stage::Reserved),
            };
            if self.fails(&format!("begin.{role_name}")) {
                return Err(JournalError::Injected);
            }
            let text = serde_json::to_string(service).map_err(|_| damaged())?;
            let epoch = i64::try_from(service.epoch).map_err(|_| damaged())?;
            let serving =
                serving.map(|serving| serde_json::to_string(&serving)).transpose().map_err(|_| damaged())?;
            self.room.take();
            let mut database = self.lock();
            let transaction = database.transaction_with_behavior(TransactionBehavior::Immediate)?;
            let others = select(&transaction, "service_id = ?1 ORDER BY id", params![service.id])?;
            for other in others {
                match older(other.role, other.stage, other.service.epoch, role, service.epoch) {
                    Older::Stays => {}
                    Older::Ends(stage) => {
                        let reason = format!("superseded by migration {id}");
                        transaction.execute(
                            "UPDATE migration SET stage = ?2, reason = ?3, updated_ms = ?4 WHERE id = ?1",
                            params![other.id, stage.name(), reason, now_ms()],
                        )?;
                    }
                    Older::Refuses => {
                        return Err(JournalError::Unsettled {
                            service: service.name.clone(),
                            id: other.id,
                            stage: other.stage.name(),
                        });
                    }
                }
            }
            transaction.execute(
                "INSERT INTO migration
                (id, role, peer, stage, service, updated_ms, service_id, epoch, peer_journal, serving)
             VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9, ?10)",
                params![
                    id,
                    role_name,
                    peer,
                    stage.name(),
                    text,
                    now_ms(),
                    service.id,
                    epoch,
                    peer_journal,
                    serving.unwrap_or_default()
                ],
            )?;
            Ok(transaction.commit()?)
        })
    }

    /// Advances a migration.
    pub fn set(&self, id: &str, stage: Stage, reason: &str) -> Result<(), JournalError> {
        off_worker(|| {
            if self.fails(&format!("set.{}", stage.name())) {
                return Err(JournalError::Injected);
            }
            let rows = self.lock().execute(
                "UPDATE migration SET stage = ?2, reason = ?3, updated_ms = ?4 WHERE id = ?1",
                params![id, stage.name(), reason, now_ms()],
            )?;
            self.room.is_used();
            if rows == 1 { Ok(()) } else { Err(JournalError::Damaged(id.to_string())) }
        })
    }

    /// Writes the commit of this node's migration: `committed`, or `serving` where pages stay. The migrations by which
    /// the service had come here end with it. An error of the write does not mean "not written": the disk is read
    /// again. Until its content is known nothing else is read from the journal, for ever if need be
    /// ([`Journal::is_undecided`]): an answer could be one that the disk then loses.
    pub fn commit(&self, id: &str, stage: Stage) -> Commit {
        off_worker(|| {
            let mut database = self.lock();
            let Err(error) = self.write_commit(&mut database, id, stage) else { return Commit::Written };
            self.room.give();
            let unknown = match self.read_again(&mut database, id) {
                Ok(Some(entry)) if entry.stage.is_committed() => {
                    tracing::warn!(migration = id, error = %crate::error_chain(&error), "the commit is on the disk, though its write failed");
                    return Commit::Written;
                }
                Ok(Some(_)) => return Commit::NotWritten(error),
                Ok(None) => JournalError::Damaged(id.to_string()),
                Err(error) => error,
            };
            self.undecided.store(true, Ordering::SeqCst);
            Commit::Unknown(unknown)
        })
    }

    fn write_commit(&self, database: &mut Connection, id: &str, stage: Stage) -> Result<(), JournalError> {
        if self.fails("committing") {
            return Err(JournalError::Injected);
        }
        let transaction = database.transaction_with_behavior(TransactionBehavior::Immediate)?;
        let rows = transaction.execute(
            "UPDATE migration SET stage = ?2, reason = '', updated_ms = ?3 WHERE id = ?1 AND role = 'source'",
            params![id, stage.name(), now_ms()],
        )?;
        if rows != 1 {
            return Err(JournalError::Damaged(id.to_string()));
        }
        transaction.execute(
            "UPDATE migration SET stage = 'done', updated_ms = ?2 FROM migration AS left
             WHERE left.id = ?1 AND migration.service_id = left.service_id AND migration.service_id <> ''
                AND migration.role = 'destination' AND migration.stage = 'committed'
                AND migration.epoch <= left.epoch",
            params![id, now_ms()],
        )?;
        transaction.commit()?;
        if self.fails("committed") {
            return Err(JournalError::Injected);
        }
        Ok(())
    }

    /// Whether it is unknown if a commit is on the disk: then this journal answers no question, and the disk is read
    /// when it is opened again.
    #[must_use]
    pub fn is_undecided(&self) -> bool {
        off_worker(|| {
            let _until_known = self.lock();
            self.undecided.load(Ordering::SeqCst)
        })
    }

    /// What the disk has of a migration after a write has failed. It uses a new connection that makes durable what it
    /// reads: otherwise it could read what a failed write left in memory, which would be lost with the machine.
    fn read_again(&self, database: &mut Connection, id: &str) -> Result<Option<Entry>, JournalError> {
        if self.fails("reading") {
            return Err(JournalError::Injected);
        }
        // The old one is closed first: as long as it is open, its cache would answer.
        drop(std::mem::replace(database, Connection::open_in_memory()?));
        let flags = OpenFlags::SQLITE_OPEN_READ_WRITE | OpenFlags::SQLITE_OPEN_NO_MUTEX;
        let again = Connection::open_with_flags(&self.path, flags)?;
        file::make_durable(&again)?;
        *database = again;
        Ok(select(database, "id = ?1", params![id])?.pop())
    }

    /// Records that nothing of a service that has left is here any more. The entry stays until the destination has
    /// acknowledged the commit.
    pub fn let_go(&self, id: &str, reason: &str) -> Result<(), JournalError> {
        off_worker(|| {
            if self.fails("let_go") {
                return Err(JournalError::Injected);
            }
            let rows = self.lock().execute(
            "UPDATE migration SET stage = CASE WHEN acknowledged = 1 OR stage = 'done' THEN 'done' ELSE 'released' END,
                reason = ?2, updated_ms = ?3 WHERE id = ?1 AND role = 'source'",
            params![id, reason, now_ms()],
        )?;
            if rows == 1 { Ok(()) } else { Err(JournalError::Damaged(id.to_string())) }
        })
    }

    /// Records that the destination has acknowledged the commit: it will not ask any more.
    pub fn acknowledge(&self, id: &str, destination: &str) -> Result<(), JournalError> {
        off_worker(|| {
            if self.fails("acknowledge") {
                return Err(JournalError::Injected);
            }
            self.lock().execute(
            "UPDATE migration SET acknowledged = 1, updated_ms = ?3,
                stage = CASE stage WHEN 'released' THEN 'done' ELSE stage END
             WHERE id = ?1 AND role = 'source' AND peer = ?2 AND stage IN ('committed', 'serving', 'released')",
            params![id, destination, now_ms()],
        )?;
            Ok(())
        })
    }

    /// Records that the service is restored and stopped, and which of its processes stay stopped.
    pub fn set_restored(&self, id: &str, keep_stopped: &[u32]) -> Result<(), JournalError> {
        off_worker(|| {
            let damaged = || JournalError::Damaged(id.to_string());
            if self.fails("set.restored") {
                return Err(JournalError::Injected);
            }
            let pids = serde_json::to_string(keep_stopped).map_err(|_| damaged())?;
            let rows = self.lock().execute(
                "UPDATE migration SET stage = ?2, keep_stopped = ?3, updated_ms = ?4 WHERE id = ?1",
                params![id, Stage::Restored.name(), pids, now_ms()],
            )?;
            if rows == 1 { Ok(()) } else { Err(damaged()) }
        })
    }

    /// One migration, if the journal knows it.
    pub fn get(&self, id: &str) -> Result<Option<Entry>, JournalError> {
        off_worker(|| Ok(select(&self.lock(), "id = ?1", params![id])?.pop()))
    }

    /// How the pages of a migration from here are sent; the defaults where an older version began it.
    pub fn serving(&self, id: &str) -> Result<ServeOptions, JournalError> {
        off_worker(|| {
            let query = "SELECT serving FROM migration WHERE id = ?1";
            let text: String = self.lock().query_row(query, params![id], |row| row.get(0))?;
            if text.is_empty() {
                return Ok(ServeOptions::default());
            }
            serde_json::from_str(&text).map_err(|_| JournalError::Damaged(id.to_string()))
        })
    }

    /// All migrations for which this node has something to do, oldest first.
    pub fn unfinished(&self) -> Result<Vec<Entry>, JournalError> {
        off_worker(|| {
            select(
                &self.lock(),
                "stage NOT IN ('aborted', 'dropped', 'done', 'released') ORDER BY id",
                params![],
            )
        })
    }

    /// Those of them that are of one service.
    pub fn unfinished_of(&self, service: &str) -> Result<Vec<Entry>, JournalError> {
        off_worker(|| {
            Ok(self.unfinished()?.into_iter().filter(|entry| entry.service.id == service).collect())
        })
    }
}

fn select(
    database: &Connection,
    which: &str,
    values: impl rusqlite::Params,
) -> Result<Vec<Entry>, JournalError> {
    let mut statement = database.prepare(&format!(
        "SELECT id, role, peer, stage, service, keep_stopped, reason, peer_journal FROM migration WHERE {which}"
    ))?;
    let rows = statement.query_map(values, columns)?.collect::<Result<Vec<_>, _>>()?;
    rows.into_iter().map(parse).collect()
}

type Columns = (String, String, String, String, String, String, String, String);

fn columns(row: &rusqlite::Row<'_>) -> rusqlite::Result<Columns> {
    Ok((
        row.get(0)?,
        row.get(1)?,
        row.get(2)?,
        row.get(3)?,
        row.get(4)?,
        row.get(5)?,
        row.get(6)?,
        row.get(7)?,
    ))
}

fn parse(
    (id, role, peer, stage, service, keep_stopped, reason, peer_journal): Columns,
) -> Result<Entry, JournalError> {
    let damaged = || JournalError::Damaged(id.clone());
    Ok(Entry {
        role: match role.as_str() {
            "source" => Role::Source,
            "destination" => Role::Destination,
            _ => return Err(damaged()),
        },
        stage: Stage::parse(&stage).ok_or_else(damaged)?,
        service: serde_json::from_str(&service).map_err(|_| damaged())?,
        keep_stopped: serde_json::from_str(&keep_stopped).map_err(|_| damaged())?,
        id,
        peer,
        reason,
        peer_journal,
    })
}

/// This node's time of day, milliseconds since 1970.
#[must_use]
pub fn now_ms() -> i64 {
    SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .map_or(0, |d| i64::try_from(d.as_millis()).unwrap_or(i64::MAX))
}

#[cfg(test)]
#[path = "journal_tests.rs"]
mod tests;
