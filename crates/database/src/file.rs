//! A database's file: closed to other users, and written for good.

use std::fs::{File, Permissions};
use std::io;
use std::os::unix::fs::{OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};

use rusqlite::{Connection, ErrorCode};

/// Makes a database's file, if it is not there, and closes it to other users. SQLite gives its further files the
/// same mode.
///
/// # Errors
/// The system's answer.
pub fn own(path: &Path) -> std::io::Result<()> {
    let file = File::options().create(true).append(true).mode(0o600).open(path)?;
    file.set_permissions(Permissions::from_mode(0o600))
}

/// From now on what the connection reads and commits is on the disk, and readers do not hold up the writer.
///
/// An earlier life of the daemon may have ended between the write of a commit and its `fsync`. Then the log is whole in the
/// system's memory, and this connection reads the commit, but a power failure would still undo it. So all of the log goes
/// into the file first; or to the disk as it is, where the disk is full or another program reads the file.
///
/// # Errors
/// SQLite's answer, or the log cannot be written out.
pub fn make_durable(database: &Connection) -> Result<(), rusqlite::Error> {
    database.pragma_update(None, "journal_mode", "WAL")?;
    database.pragma_update(None, "synchronous", "FULL")?;
    let busy: Result<bool, _> = database.query_row("PRAGMA wal_checkpoint(TRUNCATE)", [], |row| row.get(0));
    match busy {
        Ok(false) => Ok(()),
        Ok(true) => sync_log(database),
        Err(error) => match error.sqlite_error_code() {
            Some(ErrorCode::DiskFull | ErrorCode::DatabaseBusy) => sync_log(database),
            _ => Err(error),
        },
    }
}

/// Writes out what the log has, in its place.
fn sync_log(database: &Connection) -> Result<(), rusqlite::Error> {
    let file = PathBuf::from(database.path().unwrap_or_default());
    let mut log = file.clone().into_os_string();
    log.push("-wal");
    let sync = || {
        match File::open(&log) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
            log => log?.sync_all()?,
        }
        file.parent().map_or(Ok(()), |directory| File::open(directory)?.sync_all())
    };
    sync().map_err(|error| {
        let code = rusqlite::ffi::Error::new(rusqlite::ffi::SQLITE_IOERR);
        rusqlite::Error::SqliteFailure(code, Some(format!("cannot write out {}: {error}", log.display())))
    })
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

    #[test]
    fn what_an_earlier_life_left_in_the_log_is_in_the_file_before_it_is_read() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("some.db");
        let earlier = Connection::open(&path).unwrap();
        make_durable(&earlier).unwrap();
        earlier.execute_batch("CREATE TABLE t (a INTEGER) STRICT; INSERT INTO t VALUES (7)").unwrap();
        // What a process leaves that is killed: a connection that is closed writes its log back.
        let left = directory.path().join("left.db");
        let log = |path: &Path| path.with_extension("db-wal");
        std::fs::copy(&path, &left).unwrap();
        std::fs::copy(log(&path), log(&left)).unwrap();
        assert!(log(&left).metadata().unwrap().len() > 0);
        let next = Connection::open(&left).unwrap();
        make_durable(&next).unwrap();
        assert_eq!(log(&left).metadata().unwrap().len(), 0);
        // The file alone has it.
        let alone = directory.path().join("alone.db");
        std::fs::copy(&left, &alone).unwrap();
        let alone = Connection::open(&alone).unwrap();
        let found: i64 = alone.query_row("SELECT a FROM t", [], |row| row.get(0)).unwrap();
        assert_eq!(found, 7);
    }

    #[test]
    fn a_file_that_another_program_reads_is_opened_all_the_same() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("some.db");
        let database = Connection::open(&path).unwrap();
        make_durable(&database).unwrap();
        database.execute_batch("CREATE TABLE t (a INTEGER) STRICT").unwrap();
        let reader = Connection::open(&path).unwrap();
        reader.execute_batch("BEGIN; SELECT count(*) FROM t").unwrap();
        let _: i64 = reader.query_row("SELECT count(*) FROM t", [], |row| row.get(0)).unwrap();
        database.execute_batch("INSERT INTO t VALUES (1)").unwrap();
        database.busy_timeout(std::time::Duration::ZERO).unwrap();
        make_durable(&database).unwrap();
        let log = path.with_extension("db-wal");
        assert!(log.metadata().unwrap().len() > 0, "the reader holds the log up");
        database.execute_batch("INSERT INTO t VALUES (2)").unwrap();
    }
}
