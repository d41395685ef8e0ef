//! A database's file: closed to other users, and written for good.

use std::fs::{File, Permissions};
use std::os::unix::fs::{OpenOptionsExt, PermissionsExt};
use std::path::Path;

use rusqlite::Connection;

/// Makes a database's file, if it is not there, and closes it to other users. SQLite gives its further files the
/// same mode.
///
/// # Errors
/// The system's answer.
pub fn own(path: &Path) -> std::io::Result<()> {
    let file = File::options().create(true).append(true).mode(0o600).open(path)?;
    file.set_permissions(Permissions::from_mode(0o600))
}

/// From now on what the connection has committed is on the disk, and readers do not hold up the writer.
///
/// # Errors
/// SQLite's answer.
pub fn make_durable(database: &Connection) -> Result<(), rusqlite::Error> {
    database.pragma_update(None, "journal_mode", "WAL")?;
    database.pragma_update(None, "synchronous", "FULL")
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn a_file_and_those_beside_it_are_closed_to_other_users_even_one_that_was_open_to_them() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("some.db");
        std::fs::write(&path, "").unwrap();
        std::fs::set_permissions(&path, Permissions::from_mode(0o644)).unwrap();
        own(&path).unwrap();
        let database = Connection::open(&path).unwrap();
        make_durable(&database).unwrap();
        database.execute_batch("CREATE TABLE t (a INTEGER) STRICT").unwrap();
        let files: Vec<_> = std::fs::read_dir(directory.path()).unwrap().map(Result::unwrap).collect();
        assert!(files.len() > 1, "the write-ahead log is not there");
        for file in files {
            assert_eq!(file.metadata().unwrap().permissions().mode() & 0o777, 0o600, "{file:?}");
        }
    }

    #[test]
    fn a_durable_connection_keeps_a_log_and_syncs_it_with_each_commit() {
        let directory = tempfile::tempdir().unwrap();
        let database = Connection::open(directory.path().join("some.db")).unwrap();
        make_durable(&database).unwrap();
        let mode: String = database.query_row("PRAGMA journal_mode", [], |row| row.get(0)).unwrap();
        let full: u8 = database.query_row("PRAGMA synchronous", [], |row| row.get(0)).unwrap();
        assert_eq!((mode.as_str(), full), ("wal", 2));
    }
}
