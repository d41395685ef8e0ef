//! The journal: what this node has promised about each migration, on disk before it acts on it.
//!
//! ```text
//! source:       started ──► frozen ──► committed | serving ──► done
//!                  └───────────┴─────► kept
//! destination:  reserved ──► restored ──► committed ──► done
//!                  └────────────┴───────► dropped
//! ```
//! `committed` at the source is the commit point of the whole migration: before it is on disk the
//! source owns the service, after it the destination does. `serving` is the same, where pages of the
//! service are still at the source. The destination's `committed` only
//! repeats what the source decided. `kept`, `dropped` and `done` are final.

use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};
use std::time::{SystemTime, UNIX_EPOCH};

use rusqlite::{Connection, OptionalExtension, params};

use crate::service::Service;

/// Which side of a migration this node is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Role {
    /// The service leaves.
    Source,
    /// The service arrives.
    Destination,
}

/// How far a migration has come, as promised on disk.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Stage {
    /// Source: requested; the service runs here.
    Started,
    /// Source: the service is, or was about to be, frozen here.
    Frozen,
    /// Destination: room has been promised, nothing runs here.
    Reserved,
    /// Destination: the stopped copy is complete, the source may commit.
    Restored,
    /// The destination owns the service.
    Committed,
    /// As `committed`; the destination still needs pages from here.
    Serving,
    /// Source: it stayed.
    Kept,
    /// Destination: the copy is gone.
    Dropped,
    /// Nothing is left to do.
    Done,
}

impl Stage {
    fn name(self) -> &'static str {
        match self {
            Self::Started => "started",
            Self::Frozen => "frozen",
            Self::Reserved => "reserved",
            Self::Restored => "restored",
            Self::Committed => "committed",
            Self::Serving => "serving",
            Self::Kept => "kept",
            Self::Dropped => "dropped",
            Self::Done => "done",
        }
    }

    fn parse(name: &str) -> Option<Self> {
        [
            Self::Started,
            Self::Frozen,
            Self::Reserved,
            Self::Restored,
            Self::Committed,
            Self::Serving,
            Self::Kept,
            Self::Dropped,
            Self::Done,
        ]
        .into_iter()
        .find(|stage| stage.name() == name)
    }

    /// Whether nothing is left to do.
    #[must_use]
    pub fn is_final(self) -> bool {
        matches!(self, Self::Kept | Self::Dropped | Self::Done)
    }
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
    /// How far it has come.
    pub stage: Stage,
    /// The service as it was when the entry was made.
    pub service: Service,
    /// Processes (inside the container) that were stopped by a signal and stay so after the move.
    pub keep_stopped: Vec<u32>,
    /// Why it was kept or dropped.
    pub reason: String,
}

/// Why the journal could not be read or written.
#[derive(Debug, thiserror::Error)]
pub enum JournalError {
    /// SQLite's answer.
    #[error("the migration journal cannot be used; check the disk that holds godwit's state directory")]
    Database(#[from] rusqlite::Error),
    /// A row that this version did not write.
    #[error(
        "the migration journal's entry {0} is damaged; move journal.db aside only after checking with `godwit ps` on both nodes where the service runs"
    )]
    Damaged(String),
    /// The file cannot be made root's alone.
    #[error("{path} cannot be made")]
    File {
        /// The journal.
        path: PathBuf,
        /// The system's answer.
        #[source]
        source: std::io::Error,
    },
}

/// Makes a database's file, if it is not there, and closes it to other users. SQLite gives its further files the
/// same mode.
pub fn own_file(path: &Path) -> std::io::Result<()> {
    use std::os::unix::fs::{OpenOptionsExt, PermissionsExt};
    let file = std::fs::File::options().create(true).append(true).mode(0o600).open(path)?;
    file.set_permissions(std::fs::Permissions::from_mode(0o600))
}

/// Entries older than this and final are forgotten: nobody asks about them any more.
const KEEP_FINAL_MS: i64 = 30 * 24 * 3600 * 1000;

/// The journal of one node.
#[derive(Debug)]
pub struct Journal {
    database: Mutex<Connection>,
}

impl Journal {
    /// Opens or makes the journal at `path`. Every write is on the disk when its method returns.
    pub fn open(path: &Path) -> Result<Self, JournalError> {
        own_file(path).map_err(|source| JournalError::File { path: path.to_owned(), source })?;
        let database = Connection::open(path)?;
        database.pragma_update(None, "journal_mode", "WAL")?;
        database.pragma_update(None, "synchronous", "FULL")?;
        database.execute_batch(
            "CREATE TABLE IF NOT EXISTS migration (
                id TEXT PRIMARY KEY,
                role TEXT NOT NULL CHECK (role IN ('source', 'destination')),
                peer TEXT NOT NULL,
                stage TEXT NOT NULL,
                service TEXT NOT NULL,
                keep_stopped TEXT NOT NULL DEFAULT '[]',
                reason TEXT NOT NULL DEFAULT '',
                updated_ms INTEGER NOT NULL
            ) STRICT;",
        )?;
        let journal = Self { database: Mutex::new(database) };
        journal.lock().execute(
            "DELETE FROM migration WHERE stage IN ('kept', 'dropped', 'done') AND updated_ms < ?1",
            params![now_ms() - KEEP_FINAL_MS],
        )?;
        Ok(journal)
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Connection> {
        // A panic while the lock was held cannot have left a half-made row: SQLite rolls it back.
        self.database.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Writes the first entry of a migration.
    pub fn begin(&self, id: &str, role: Role, peer: &str, service: &Service) -> Result<(), JournalError> {
        let (role, stage) = match role {
            Role::Source => ("source", Stage::Started),
            Role::Destination => ("destination", Stage::Reserved),
        };
        let service = serde_json::to_string(service).map_err(|_| JournalError::Damaged(id.to_string()))?;
        self.lock().execute(
            "INSERT INTO migration (id, role, peer, stage, service, updated_ms) VALUES (?1, ?2, ?3, ?4, ?5, ?6)",
            params![id, role, peer, stage.name(), service, now_ms()],
        )?;
        Ok(())
    }

    /// Advances a migration.
    pub fn set(&self, id: &str, stage: Stage, reason: &str) -> Result<(), JournalError> {
        let rows = self.lock().execute(
            "UPDATE migration SET stage = ?2, reason = ?3, updated_ms = ?4 WHERE id = ?1",
            params![id, stage.name(), reason, now_ms()],
        )?;
        if rows == 1 { Ok(()) } else { Err(JournalError::Damaged(id.to_string())) }
    }

    /// Notes that the service is restored, stopped, and which of its processes stay so.
    pub fn set_restored(&self, id: &str, keep_stopped: &[u32]) -> Result<(), JournalError> {
        let damaged = || JournalError::Damaged(id.to_string());
        let pids = serde_json::to_string(keep_stopped).map_err(|_| damaged())?;
        let rows = self.lock().execute(
            "UPDATE migration SET stage = ?2, keep_stopped = ?3, updated_ms = ?4 WHERE id = ?1",
            params![id, Stage::Restored.name(), pids, now_ms()],
        )?;
        if rows == 1 { Ok(()) } else { Err(damaged()) }
    }

    /// One migration, if the journal knows it.
    pub fn get(&self, id: &str) -> Result<Option<Entry>, JournalError> {
        let row =
            self.lock().query_row(&format!("{SELECT} WHERE id = ?1"), params![id], columns).optional()?;
        row.map(parse).transpose()
    }

    /// All migrations that are not final, oldest first.
    pub fn unfinished(&self) -> Result<Vec<Entry>, JournalError> {
        let database = self.lock();
        let mut statement = database
            .prepare(&format!("{SELECT} WHERE stage NOT IN ('kept', 'dropped', 'done') ORDER BY id"))?;
        let rows = statement.query_map([], columns)?.collect::<Result<Vec<_>, _>>()?;
        rows.into_iter().map(parse).collect()
    }
}

const SELECT: &str = "SELECT id, role, peer, stage, service, keep_stopped, reason FROM migration";

type Columns = (String, String, String, String, String, String, String);

fn columns(row: &rusqlite::Row<'_>) -> rusqlite::Result<Columns> {
    Ok((row.get(0)?, row.get(1)?, row.get(2)?, row.get(3)?, row.get(4)?, row.get(5)?, row.get(6)?))
}

fn parse((id, role, peer, stage, service, keep_stopped, reason): Columns) -> Result<Entry, JournalError> {
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
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::service::tests::service;

    #[test]
    fn a_migration_is_found_again_as_it_was_left() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("journal.db");
        let journal = Journal::open(&path).unwrap();
        journal.begin("01A", Role::Source, "b", &service()).unwrap();
        journal.begin("01B", Role::Destination, "c", &service()).unwrap();
        journal.set("01A", Stage::Frozen, "").unwrap();
        journal.set_restored("01B", &[7, 9]).unwrap();
        drop(journal);
        let mode = std::os::unix::fs::MetadataExt::mode(&std::fs::metadata(&path).unwrap());
        assert_eq!(mode & 0o777, 0o600);

        let journal = Journal::open(&path).unwrap();
        let left = journal.unfinished().unwrap();
        assert_eq!(left.len(), 2);
        assert_eq!((left[0].role, left[0].stage, left[0].peer.as_str()), (Role::Source, Stage::Frozen, "b"));
        assert_eq!((left[1].role, left[1].stage), (Role::Destination, Stage::Restored));
        assert_eq!(left[1].keep_stopped, [7, 9]);
        assert_eq!(left[0].service, service());
    }

    #[test]
    fn what_is_final_needs_nothing_more_but_is_still_known() {
        let directory = tempfile::tempdir().unwrap();
        let journal = Journal::open(&directory.path().join("journal.db")).unwrap();
        for (id, stage) in [("01A", Stage::Kept), ("01B", Stage::Dropped), ("01C", Stage::Done)] {
            journal.begin(id, Role::Source, "b", &service()).unwrap();
            journal.set(id, stage, "why").unwrap();
        }
        assert!(journal.unfinished().unwrap().is_empty());
        assert_eq!(journal.get("01A").unwrap().unwrap().reason, "why");
        assert!(journal.get("01X").unwrap().is_none());
    }

    #[test]
    fn a_migration_begins_once_and_none_advances_that_did_not_begin() {
        let directory = tempfile::tempdir().unwrap();
        let journal = Journal::open(&directory.path().join("journal.db")).unwrap();
        journal.begin("01A", Role::Source, "b", &service()).unwrap();
        assert!(journal.begin("01A", Role::Destination, "c", &service()).is_err());
        assert!(journal.set("01B", Stage::Committed, "").is_err());
    }

    #[test]
    fn every_stage_has_a_name_of_its_own() {
        for stage in [
            Stage::Started,
            Stage::Frozen,
            Stage::Reserved,
            Stage::Restored,
            Stage::Committed,
            Stage::Kept,
            Stage::Dropped,
            Stage::Done,
        ] {
            assert_eq!(Stage::parse(stage.name()), Some(stage));
        }
        assert_eq!(Stage::parse("thawed"), None);
    }
}
