//! Numbered steps that bring a database file of this node up to what this version of godwit reads and writes.
//!
//! SQLite's `user_version` counts the steps that a file has taken; 0 is a new file, or one of a version that did
//! not count yet, whose tables the first step finds.

use rusqlite::Connection;

/// Why a file cannot be brought up to this version.
#[derive(Debug, thiserror::Error)]
pub enum SchemaError {
    /// SQLite's answer.
    #[error(transparent)]
    Database(#[from] rusqlite::Error),
    /// The file was written by a newer godwit.
    #[error(
        "the file has schema version {found}, and this version of godwit knows only {known}; install the newer godwit again"
    )]
    Newer {
        /// What the file says.
        found: usize,
        /// The last version that is known here.
        known: usize,
    },
}

/// Takes the steps that the file has not taken yet, each whole or not at all.
pub fn upgrade(database: &mut Connection, steps: &[&str]) -> Result<(), SchemaError> {
    let found: usize = database.query_row("PRAGMA user_version", [], |row| row.get(0))?;
    if found > steps.len() {
        return Err(SchemaError::Newer { found, known: steps.len() });
    }
    for (number, step) in (1..).zip(steps).skip(found) {
        let transaction = database.transaction()?;
        transaction.execute_batch(step)?;
        transaction.pragma_update(None, "user_version", number)?;
        transaction.commit()?;
    }
    Ok(())
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    const STEPS: [&str; 2] =
        ["CREATE TABLE IF NOT EXISTS t (a INTEGER) STRICT", "ALTER TABLE t ADD COLUMN b INTEGER DEFAULT 7"];

    #[test]
    fn each_step_is_taken_once_and_what_is_there_stays() {
        let mut database = Connection::open_in_memory().unwrap();
        // A file of before versions were counted.
        database.execute_batch("CREATE TABLE t (a INTEGER) STRICT; INSERT INTO t VALUES (1)").unwrap();
        for _ in 0..2 {
            upgrade(&mut database, &STEPS).unwrap();
        }
        let row = database.query_row("SELECT a, b FROM t", [], |row| Ok((row.get(0)?, row.get(1)?))).unwrap();
        assert_eq!(row, (1, 7));
    }

    #[test]
    fn a_step_that_fails_leaves_nothing() {
        let mut database = Connection::open_in_memory().unwrap();
        let steps = [STEPS[0], "ALTER TABLE t ADD COLUMN b INTEGER; SELECT nonsense"];
        assert!(upgrade(&mut database, &steps).is_err());
        upgrade(&mut database, &STEPS).unwrap();
    }

    #[test]
    fn a_file_of_a_newer_version_is_left_alone() {
        let mut database = Connection::open_in_memory().unwrap();
        upgrade(&mut database, &STEPS).unwrap();
        let error = upgrade(&mut database, &STEPS[..1]).unwrap_err().to_string();
        assert!(error.contains("schema version 2"), "{error}");
    }
}
