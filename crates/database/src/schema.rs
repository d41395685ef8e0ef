//! Numbered steps that bring a database file of this node up to what this version of godwit reads and writes.
//!
//! SQLite's `user_version` counts the steps that a file has taken; 0 is a new file, or one of a version that did
//! not count yet, whose tables the first step finds. A step that a release has is never changed.
//!
//! A file says of each step which release took it and what it added, in words. A release that does not know the step
//! reads them: it leaves the file alone, and says what a downgrade would lose.

use std::fmt;

use rusqlite::{Connection, OptionalExtension, params};

/// What a file becomes from one version to the next.
#[derive(Debug, Clone, Copy)]
pub struct Step {
    /// What is done to the file.
    pub sql: &'static str,
    /// What the file holds since then, which a release from before would lose: the end of a sentence.
    pub adds: &'static str,
}

/// The steps that a file has taken since release 0.2.0.
const TAKEN: &str = "CREATE TABLE IF NOT EXISTS schema_step (
    number INTEGER PRIMARY KEY, release TEXT NOT NULL, adds TEXT NOT NULL
) STRICT;";

/// This release.
const RELEASE: &str = env!("CARGO_PKG_VERSION");

/// Why a file cannot be brought up to this version.
#[derive(Debug, thiserror::Error)]
pub enum SchemaError {
    /// SQLite's answer.
    #[error(transparent)]
    Database(#[from] rusqlite::Error),
    /// The file was written by a newer godwit.
    #[error("{0}")]
    Newer(Box<Newer>),
}

/// A file that has taken steps which are not known here.
#[derive(Debug)]
pub struct Newer {
    /// Steps that the file has taken.
    pub found: usize,
    /// Steps that are known here.
    pub known: usize,
    /// The release that took the last of them, as the file says.
    pub release: Option<String>,
    /// What the others have added, as the file says.
    pub loses: Vec<String>,
    /// What can be done beside installing that release again.
    pub otherwise: Option<&'static str>,
}

impl fmt::Display for Newer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { found, known, release, loses, otherwise } = self;
        let release =
            release.as_ref().map_or("a newer godwit".to_owned(), |release| format!("godwit {release}"));
        write!(
            f,
            "the file has schema version {found}, written by {release}; godwit {RELEASE} knows only {known}"
        )?;
        if !loses.is_empty() {
            write!(f, ", and would lose {}", loses.join(", "))?;
        }
        write!(f, "; install {release} again")?;
        otherwise.map_or(Ok(()), |otherwise| write!(f, ", or {otherwise}"))
    }
}

/// Takes the steps that the file has not taken yet, each whole or not at all. `otherwise` is what can be done with a file of
/// a newer release, beside installing that one again.
///
/// # Errors
/// The file is of a newer release, and is left as it is; or a step fails.
pub fn upgrade(
    database: &mut Connection,
    steps: &[Step],
    otherwise: Option<&'static str>,
) -> Result<(), SchemaError> {
    upgrade_as(RELEASE, database, steps, otherwise)
}

fn upgrade_as(
    release: &str,
    database: &mut Connection,
    steps: &[Step],
    otherwise: Option<&'static str>,
) -> Result<(), SchemaError> {
    let found: usize = database.query_row("PRAGMA user_version", [], |row| row.get(0))?;
    if found > steps.len() {
        return Err(SchemaError::Newer(Box::new(newer(database, found, steps.len(), otherwise)?)));
    }
    for (number, step) in (1..).zip(steps).skip(found) {
        let transaction = database.transaction()?;
        transaction.execute_batch(step.sql)?;
        transaction.execute_batch(TAKEN)?;
        transaction.execute(
            "INSERT INTO schema_step (number, release, adds) VALUES (?1, ?2, ?3)",
            params![number, release, step.adds],
        )?;
        transaction.pragma_update(None, "user_version", number)?;
        transaction.commit()?;
    }
    let adds: Vec<_> = steps[found..].iter().map(|step| step.adds).collect();
    // A new file has no release to go back to. Release 0.2.0 cannot read what the file says of its steps, and says nothing.
    if found > 0 && !adds.is_empty() {
        tracing::info!(
            file = database.path().unwrap_or_default(),
            "it had schema version {found}, and has {} now: a godwit that knows only {found} does not open it any more, and would lose {}",
            steps.len(),
            adds.join(", ")
        );
    }
    Ok(())
}

/// What a file says of the steps that it has taken and that are not known here.
fn newer(
    database: &Connection,
    found: usize,
    known: usize,
    otherwise: Option<&'static str>,
) -> Result<Newer, rusqlite::Error> {
    let table = "SELECT 1 FROM sqlite_master WHERE type = 'table' AND name = 'schema_step'";
    if database.query_row(table, [], |_| Ok(())).optional()?.is_none() {
        return Ok(Newer { found, known, release: None, loses: Vec::new(), otherwise });
    }
    let mut statement =
        database.prepare("SELECT release, adds FROM schema_step WHERE number > ?1 ORDER BY number")?;
    let rows = statement.query_map([known], |row| Ok((row.get(0)?, row.get(1)?)))?;
    let (releases, loses): (Vec<String>, Vec<String>) =
        rows.collect::<Result<Vec<_>, _>>()?.into_iter().unzip();
    Ok(Newer { found, known, release: releases.into_iter().last(), loses, otherwise })
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    const STEPS: [Step; 3] = [
        Step { sql: "CREATE TABLE IF NOT EXISTS t (a INTEGER) STRICT", adds: "the table" },
        Step { sql: "ALTER TABLE t ADD COLUMN b INTEGER DEFAULT 7", adds: "how often each one has moved" },
        Step { sql: "ALTER TABLE t ADD COLUMN c INTEGER", adds: "when each one has moved" },
    ];

    #[test]
    fn each_step_is_taken_once_and_what_is_there_stays() {
        let mut database = Connection::open_in_memory().unwrap();
        // A file of before versions were counted.
        database.execute_batch("CREATE TABLE t (a INTEGER) STRICT; INSERT INTO t VALUES (1)").unwrap();
        for _ in 0..2 {
            upgrade(&mut database, &STEPS, None).unwrap();
        }
        let row = database.query_row("SELECT a, b FROM t", [], |row| Ok((row.get(0)?, row.get(1)?))).unwrap();
        assert_eq!(row, (1, 7));
    }

    #[test]
    fn a_step_that_fails_leaves_nothing() {
        let mut database = Connection::open_in_memory().unwrap();
        let fails = Step { sql: "ALTER TABLE t ADD COLUMN b INTEGER; SELECT nonsense", ..STEPS[1] };
        assert!(upgrade(&mut database, &[STEPS[0], fails], None).is_err());
        upgrade(&mut database, &STEPS, None).unwrap();
    }

    #[test]
    fn a_file_of_a_newer_release_is_left_alone_and_says_what_a_downgrade_would_lose() {
        let mut database = Connection::open_in_memory().unwrap();
        upgrade_as("0.1.0", &mut database, &STEPS[..1], None).unwrap();
        upgrade_as("0.7.0", &mut database, &STEPS[..2], None).unwrap();
        upgrade_as("0.8.0", &mut database, &STEPS, None).unwrap();
        let error = upgrade(&mut database, &STEPS[..1], Some("ask its owner")).unwrap_err().to_string();
        for said in [
            "schema version 3, written by godwit 0.8.0",
            &format!("godwit {RELEASE} knows only 1"),
            "would lose how often each one has moved, when each one has moved;",
            "install godwit 0.8.0 again, or ask its owner",
        ] {
            assert!(error.contains(said), "{error}");
        }
        let columns = "SELECT a, b, c FROM t";
        database.prepare(columns).unwrap();
    }

    #[test]
    fn a_file_that_does_not_say_who_wrote_it_is_left_alone_too() {
        let mut database = Connection::open_in_memory().unwrap();
        database.pragma_update(None, "user_version", 9).unwrap();
        let error = upgrade(&mut database, &STEPS, None).unwrap_err().to_string();
        assert!(error.contains("schema version 9, written by a newer godwit"), "{error}");
        assert!(error.ends_with("install a newer godwit again"), "{error}");
        let tables: u32 =
            database.query_row("SELECT count(*) FROM sqlite_master", [], |row| row.get(0)).unwrap();
        assert_eq!(tables, 0);
    }
}
