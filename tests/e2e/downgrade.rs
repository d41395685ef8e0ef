//! A node goes back to an older release: what it would lose is said first, and its services run on. Needs root. The last
//! release is built where it is not there, so the test that has it runs in `make test-full` only.

use std::{
    fs,
    path::{Path, PathBuf},
};

use godwit_tests::{
    release, tier,
    victim::{NAME, Victim},
};
use rusqlite::{Connection, params};

use crate::upgrade::{daemon, install, upgrade};

/// What a release that does not exist yet has made of a state file of node `a`.
fn step_of_a_newer_release(victim: &Victim, file: &str) {
    let database = Connection::open(victim.bed.lab().state("a").unwrap().join(file)).unwrap();
    let known: u32 = database.query_row("PRAGMA user_version", [], |row| row.get(0)).unwrap();
    let adds = "which services are to be moved at night";
    let row = params![known + 1, "9.1.0", adds];
    database.execute("INSERT INTO schema_step (number, release, adds) VALUES (?1, ?2, ?3)", row).unwrap();
    database.pragma_update(None, "user_version", known + 1).unwrap();
}

/// The same undone, as by a copy of before.
fn back(victim: &Victim, file: &str) {
    let database = Connection::open(victim.bed.lab().state("a").unwrap().join(file)).unwrap();
    let newer: u32 = database.query_row("PRAGMA user_version", [], |row| row.get(0)).unwrap();
    database.execute("DELETE FROM schema_step WHERE number = ?1", params![newer]).unwrap();
    database.pragma_update(None, "user_version", newer - 1).unwrap();
}

#[test]
fn a_downgrade_says_what_it_would_lose_and_the_services_go_on() {
    let victim = Victim::up("downgrade");
    for file in ["node.db", "journal.db"] {
        victim.bed.lab().stop_node("a").unwrap();
        step_of_a_newer_release(&victim, file);
        let said = victim.bed.lab().start_node("a").unwrap_err().to_string();
        for word in [
            file,
            "written by godwit 9.1.0",
            "would lose which services are to be moved at night",
            "install godwit 9.1.0 again",
        ] {
            assert!(said.contains(word), "{file}: {word}: {said}");
        }
        back(&victim, file);
        victim.bed.lab().start_node("a").unwrap();
        victim.runs_at("a");
    }
    victim.moves_in_the_end();
}

/// The databases of a node, which an upgrade converts.
const DATABASES: [&str; 2] = ["node.db", "journal.db"];

/// The files of a node's databases, with what SQLite has beside them.
fn database_files(directory: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(directory).unwrap().map(|entry| entry.unwrap().path());
    let is_one = |path: &PathBuf| {
        let name = path.file_name().unwrap().to_string_lossy();
        DATABASES.iter().any(|database| name.starts_with(database))
    };
    entries.filter(is_one).collect()
}

/// Everything in a database, in words.
fn contents(path: &Path) -> Vec<String> {
    let database = Connection::open(path).unwrap();
    let rows = |sql: &str| -> Vec<String> {
        let mut statement = database.prepare(sql).unwrap();
        let columns = statement.column_count();
        let row = |row: &rusqlite::Row<'_>| {
            let values = (0..columns).map(|column| row.get_ref(column).map(|value| format!("{value:?}")));
            Ok(values.collect::<Result<Vec<_>, _>>()?.join(" "))
        };
        statement.query_map([], row).unwrap().map(Result::unwrap).collect()
    };
    let mut tables =
        database.prepare("SELECT name FROM sqlite_master WHERE type = 'table' ORDER BY name").unwrap();
    let tables: Vec<String> = tables.query_map([], |row| row.get(0)).unwrap().map(Result::unwrap).collect();
    let of_tables = tables.iter().flat_map(|table| {
        rows(&format!("SELECT * FROM {table}")).into_iter().map(move |row| format!("{table}: {row}"))
    });
    rows("PRAGMA user_version").into_iter().chain(of_tables).collect()
}

/// What a database says that it holds since the steps which a release that knows only the first `known` would lose.
fn would_lose(path: &Path, known: usize) -> Vec<String> {
    let database = Connection::open(path).unwrap();
    let mut adds = database.prepare("SELECT adds FROM schema_step WHERE number > ?1").unwrap();
    adds.query_map([known], |row| row.get(0)).unwrap().map(Result::unwrap).collect()
}

#[test]
fn a_node_goes_back_to_the_last_release_with_the_copies_of_its_databases_only() {
    if !tier::is_full() {
        return;
    }
    let old = release::last();
    let mut victim =
        Victim::up_with("goes-back", |config, _| install(config, &["a", "b"], &old), |_| Vec::new());
    let state = victim.bed.lab().state("a").unwrap();
    let version = |database: &str| -> usize {
        let database = Connection::open(state.join(database)).unwrap();
        database.query_row("PRAGMA user_version", [], |row| row.get(0)).unwrap()
    };
    // As the manual says: the copies are made while the daemon does not run.
    victim.bed.lab().stop_node("a").unwrap();
    let copy = tempfile::tempdir().unwrap();
    for file in database_files(&state) {
        fs::copy(&file, copy.path().join(file.file_name().unwrap())).unwrap();
    }
    let known = DATABASES.map(version);
    victim.bed.install("a", None);
    victim.bed.lab().start_node("a").unwrap();
    victim.runs_at("a");

    // The old release knows numbers alone, so the new one says at the upgrade what a way back would lose.
    let log = fs::read_to_string(victim.bed.lab().log("a").unwrap()).unwrap();
    for (database, known) in DATABASES.into_iter().zip(known) {
        let lost = would_lose(&state.join(database), known);
        assert!(!lost.is_empty(), "{database} was converted");
        let said = log.lines().find(|line| line.contains("would lose") && line.contains(database));
        let said = said.unwrap_or_else(|| panic!("nothing is said of {database}: {log}"));
        for word in lost.iter().map(String::as_str).chain([format!("knows only {known} ").as_str()]) {
            assert!(said.contains(word), "{database}: {word}: {said}");
        }
    }

    // Without the copies: it does not start, names the file and both versions, and leaves all as it was.
    let (new, newer) = (daemon(victim.bed.lab(), "a"), DATABASES.map(version));
    victim.bed.lab().stop_node("a").unwrap();
    let before = DATABASES.map(|database| contents(&state.join(database)));
    victim.bed.install("a", Some(&old));
    let said = victim.bed.lab().start_node("a").unwrap_err().to_string();
    // What it says at last: its log has the words of the newer one as well.
    let said = said.rsplit("Error: ").next().unwrap();
    println!("{said}");
    let named = DATABASES.iter().position(|database| said.contains(database));
    let named = named.unwrap_or_else(|| panic!("no file is named: {said}"));
    for word in [
        format!("schema version {}", newer[named]),
        format!("knows only {}", known[named]),
        "install the newer godwit again".to_owned(),
    ] {
        assert!(said.contains(&word), "{word}: {said}");
    }
    assert_eq!(DATABASES.map(|database| contents(&state.join(database))), before, "nothing is changed");
    victim.has_its_data();

    // One way on: the newer release again, as if nothing had been.
    victim.bed.install("a", None);
    victim.bed.lab().start_node("a").unwrap();
    assert_eq!(daemon(victim.bed.lab(), "a"), new);
    victim.runs_at("a");

    // The other one: the copies, under the service that runs.
    victim.bed.lab().stop_node("a").unwrap();
    for file in database_files(&state) {
        fs::remove_file(file).unwrap();
    }
    for file in database_files(copy.path()) {
        fs::copy(&file, state.join(file.file_name().unwrap())).unwrap();
    }
    victim.bed.install("a", Some(&old));
    victim.bed.lab().start_node("a").unwrap();
    assert!(daemon(victim.bed.lab(), "a").starts_with(&old));
    assert_eq!(DATABASES.map(version), known);
    victim.runs_at("a");
    // It is the old release's as before, and can be upgraded another time.
    victim.bed.migrate(NAME, "a", "b");
    victim.runs_at("b");
    victim.bed.migrate(NAME, "b", "a");
    upgrade(&mut victim.bed, "a");
    assert_eq!(DATABASES.map(version), newer);
    victim.runs_at("a");
    victim.has_its_data();
    victim.moves_in_the_end();
}
