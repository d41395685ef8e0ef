//! SQLite itself, in this process, whose database's file becomes another one under its connection, as by a move.

#![allow(clippy::unwrap_used)]

use std::collections::BTreeMap;
use std::fs;
use std::os::fd::AsRawFd as _;
use std::path::{Path, PathBuf};

use godwit_memory::process::Process;
use godwit_sqlite::{Database, Identity, correct, databases};
use rusqlite::{Connection, ErrorCode};

fn own() -> i32 {
    i32::try_from(std::process::id()).unwrap()
}

fn rows(connection: &Connection) -> i64 {
    connection.query_row("SELECT count(*) FROM rows", (), |row| row.get(0)).unwrap()
}

fn write(connection: &Connection) -> rusqlite::Result<usize> {
    connection.execute("INSERT INTO rows VALUES (1)", ())
}

/// The databases of this process in a directory.
fn found(directory: &Path) -> Vec<Database> {
    let mut found = databases(own(), &|| true).unwrap();
    found.retain(|database| Path::new(&database.path).starts_with(directory));
    found
}

/// Puts a copy in the place of each file of a directory that is open.
fn move_files(directory: &Path) {
    let mut moved = BTreeMap::new();
    for entry in fs::read_dir("/proc/self/fd").unwrap().flatten() {
        let Ok(path) = fs::read_link(entry.path()) else { continue };
        // The name of the one that is gone, which another descriptor had before.
        let path = PathBuf::from(path.to_str().unwrap().trim_end_matches(" (deleted)"));
        if !path.starts_with(directory) || !path.is_file() {
            continue;
        }
        let file = moved.entry(path.clone()).or_insert_with(|| {
            let copy = path.with_extension("copy");
            fs::copy(&path, &copy).unwrap();
            fs::rename(&copy, &path).unwrap();
            fs::OpenOptions::new().read(true).write(true).open(&path).unwrap()
        });
        let number: i32 = entry.file_name().to_str().unwrap().parse().unwrap();
        // SAFETY: both are open, and SQLite goes on with the number, as it does after a move.
        assert_eq!(unsafe { libc::dup2(file.as_raw_fd(), number) }, number);
    }
}

#[test]
fn a_connection_writes_again_once_the_identity_is_corrected_and_shares_it_with_new_ones() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("data.db");
    let connection = Connection::open(&path).unwrap();
    connection.execute_batch("CREATE TABLE rows (row)").unwrap();
    let other = Connection::open(directory.path().join("other.db")).unwrap();
    other.execute_batch("PRAGMA journal_mode=WAL; CREATE TABLE rows (row)").unwrap();
    let read_only = Connection::open_with_flags(&path, rusqlite::OpenFlags::SQLITE_OPEN_READ_ONLY).unwrap();
    assert_eq!(rows(&read_only), 0);
    fs::write(directory.path().join("no database"), "SQLite format 4").unwrap();

    let mut before = found(directory.path());
    before.sort_by(|one, other| one.path.cmp(&other.path));
    let [data, wal] = &before[..] else { panic!("{before:?}") };
    assert_eq!((Path::new(&data.path), data.has_log, wal.has_log), (path.as_path(), false, true));
    // In its own memory it may find what it has read.
    assert!(!data.places.is_empty() && !wal.places.is_empty(), "{before:?}");
    assert_eq!((data.descriptors.len(), data.is_writable), (2, true), "{data:?}");
    assert_eq!((data.pid, data.program.is_empty()), (own(), false));

    move_files(directory.path());
    let refused = write(&connection).unwrap_err();
    assert_eq!(refused.sqlite_error_code(), Some(ErrorCode::ReadOnly), "{refused}");
    let process = Process::open(own()).unwrap();
    for database in &before {
        let new = Identity::of_open_file(&process, database.descriptors[0]).unwrap();
        assert_ne!(new, database.identity);
        let correct = || {
            let places = database.places.iter();
            places.filter(|place| correct(&process, **place, database.identity, new).unwrap()).count()
        };
        assert!(correct() > 0);
        // It is not there any more.
        assert_eq!(correct(), 0);
        let mut settled = database.clone();
        settled.settle().unwrap();
        assert!(settled.descriptors.is_empty() && settled.places.is_empty(), "{settled:?}");
    }
    assert_eq!(write(&connection).unwrap(), 1);
    assert_eq!(write(&other).unwrap(), 1);
    // What is opened now knows the file by the same structure.
    let new = Connection::open(&path).unwrap();
    new.busy_timeout(std::time::Duration::ZERO).unwrap();
    assert_eq!(rows(&new), 1);
    let after = found(directory.path());
    assert!(after.len() == 2 && after.iter().all(|database| !database.places.is_empty()), "{after:?}");
    let mut settled = after.clone();
    settled.iter_mut().for_each(|database| database.settle().unwrap());
    let descriptors = |all: &[Database]| all.iter().map(|one| one.descriptors.clone()).collect::<Vec<_>>();
    assert_eq!(descriptors(&settled), descriptors(&after));
    connection.execute_batch("BEGIN EXCLUSIVE").unwrap();
    let locked = write(&new).unwrap_err();
    assert_eq!(locked.sqlite_error_code(), Some(ErrorCode::DatabaseBusy), "{locked}");
    connection.execute_batch("COMMIT").unwrap();
    assert_eq!(write(&new).unwrap(), 1);
    assert_eq!((rows(&connection), rows(&read_only)), (2, 2));
}
