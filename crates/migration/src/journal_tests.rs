//! Tests of the journal: what it keeps, what it forgets, and what becomes of older entries of a service.
#![allow(clippy::unwrap_used)]

use super::*;
use crate::options::Compress;
use crate::service::tests::service;

fn journal() -> (tempfile::TempDir, Journal) {
    let directory = tempfile::tempdir().unwrap();
    let journal = Journal::open(&directory.path().join("journal.db")).unwrap();
    (directory, journal)
}

fn begin(journal: &Journal, id: &str, role: Role, peer: &str, service: &Service) -> Result<(), JournalError> {
    journal.begin(&Beginning { id, role, peer, peer_journal: "", service, serving: None })
}

/// The service with another epoch.
fn at(epoch: u64) -> Service {
    Service { epoch, ..service() }
}

fn another(id: &str) -> Service {
    Service { id: id.into(), ..service() }
}

fn stage(journal: &Journal, id: &str) -> Stage {
    journal.get(id).unwrap().unwrap().stage
}

#[test]
fn the_journal_is_closed_to_other_users_even_where_its_file_was_open_to_them() {
    use std::os::unix::fs::PermissionsExt;
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("journal.db");
    let open = || {
        let _journal = Journal::open(&path).unwrap();
        let found: Vec<_> = std::fs::read_dir(directory.path())
            .unwrap()
            .map(|entry| entry.unwrap())
            .map(|entry| (entry.file_name(), entry.metadata().unwrap().permissions().mode() & 0o777))
            .collect();
        assert!(found.len() > 1, "SQLite has further files while it is open: {found:?}");
        assert!(found.iter().all(|(_, mode)| *mode == 0o600), "{found:?}");
    };
    open();
    std::fs::remove_file(&path).unwrap();
    std::fs::write(&path, "").unwrap();
    std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o644)).unwrap();
    open();
}

#[test]
fn an_entry_with_a_name_that_is_a_path_is_damaged_and_the_file_is_named() {
    let (directory, journal) = journal();
    begin(&journal, "01A", Role::Source, "b", &service()).unwrap();
    let other = Connection::open(directory.path().join("journal.db")).unwrap();
    other
        .execute("UPDATE migration SET service = replace(service, '\"name\":\"', '\"name\":\"../')", [])
        .unwrap();
    let error = journal.unfinished().unwrap_err().to_string();
    assert!(error.contains("01A is damaged") && error.contains("journal.db"), "{error}");
}

#[test]
fn a_migration_is_found_again_as_it_was_left() {
    let (directory, journal) = journal();
    begin(&journal, "01A", Role::Source, "b", &service()).unwrap();
    let arriving = another("02SERVICE");
    let new = Beginning {
        id: "01B",
        role: Role::Destination,
        peer: "c",
        peer_journal: "c's journal",
        service: &arriving,
        serving: None,
    };
    journal.begin(&new).unwrap();
    journal.set("01A", Stage::Frozen, "").unwrap();
    journal.set_restored("01B", &[7, 9]).unwrap();
    let identity = journal.identity().to_owned();
    drop(journal);

    let journal = Journal::open(&directory.path().join("journal.db")).unwrap();
    assert_eq!(journal.identity(), identity);
    let left = journal.unfinished().unwrap();
    assert_eq!(left.len(), 2);
    assert_eq!((left[0].role, left[0].stage, left[0].peer.as_str()), (Role::Source, Stage::Frozen, "b"));
    assert_eq!((left[1].role, left[1].stage), (Role::Destination, Stage::Restored));
    assert_eq!(
        (left[1].keep_stopped.as_slice(), left[1].peer_journal.as_str()),
        (&[7, 9][..], "c's journal")
    );
    assert_eq!(left[0].service, service());
}

#[test]
fn what_is_final_needs_nothing_more_but_is_still_known() {
    let (_directory, journal) = journal();
    for (id, stage) in [("01A", Stage::Aborted), ("01B", Stage::Dropped), ("01C", Stage::Done)] {
        begin(&journal, id, Role::Source, "b", &service()).unwrap();
        journal.set(id, stage, "why").unwrap();
    }
    assert!(journal.unfinished().unwrap().is_empty());
    assert_eq!(journal.get("01A").unwrap().unwrap().reason, "why");
    assert!(journal.get("01X").unwrap().is_none());
}

#[test]
fn a_migration_begins_once_and_none_advances_that_did_not_begin() {
    let (_directory, journal) = journal();
    begin(&journal, "01A", Role::Source, "b", &service()).unwrap();
    assert!(begin(&journal, "01A", Role::Destination, "c", &another("02SERVICE")).is_err());
    assert!(journal.set("01B", Stage::Committed, "").is_err());
}

#[test]
fn every_stage_has_a_name_of_its_own() {
    for stage in Stage::ALL {
        assert_eq!(Stage::parse(stage.name()), Some(stage));
    }
    assert_eq!(Stage::parse("thawed"), None);
}

#[test]
fn every_journal_has_an_identity_of_its_own() {
    let (_one, first) = journal();
    let (_other, second) = journal();
    assert_eq!(first.identity().len(), 32);
    assert_ne!(first.identity(), second.identity());
}

#[test]
fn a_commit_is_forgotten_only_when_it_was_acknowledged() {
    let (directory, journal) = journal();
    for id in ["01A", "01B", "01C"] {
        begin(&journal, id, Role::Source, "b", &another(id)).unwrap();
        journal.set(id, Stage::Frozen, "").unwrap();
        assert!(matches!(journal.commit(id, Stage::Committed), Commit::Written));
    }
    journal.acknowledge("01A", "b").unwrap();
    journal.acknowledge("01B", "c").unwrap();
    for id in ["01A", "01B", "01C"] {
        journal.let_go(id, "").unwrap();
    }
    assert_eq!(stage(&journal, "01A"), Stage::Done);
    assert_eq!(stage(&journal, "01B"), Stage::Released, "another node's word counts for nothing");
    assert!(journal.unfinished().unwrap().is_empty(), "nothing is left to do");
    // Long ago.
    journal.lock().execute("UPDATE migration SET updated_ms = 1", []).unwrap();
    drop(journal);
    let journal = Journal::open(&directory.path().join("journal.db")).unwrap();
    assert!(journal.get("01A").unwrap().is_none());
    assert_eq!(stage(&journal, "01C"), Stage::Released);
    journal.acknowledge("01C", "b").unwrap();
    assert_eq!(stage(&journal, "01C"), Stage::Done);
}

#[test]
fn a_service_that_came_back_ends_the_entry_by_which_it_had_left() {
    let (_directory, journal) = journal();
    begin(&journal, "01A", Role::Source, "b", &at(3)).unwrap();
    journal.set("01A", Stage::Frozen, "").unwrap();
    assert!(matches!(journal.commit("01A", Stage::Committed), Commit::Written));
    // Nobody can send it here before the destination knows that it has it.
    let early = begin(&journal, "01B", Role::Destination, "b", &at(4)).unwrap_err();
    assert!(matches!(early, JournalError::Unsettled { .. }), "{early}");
    begin(&journal, "01B", Role::Destination, "b", &at(5)).unwrap();
    assert_eq!(stage(&journal, "01A"), Stage::Done);
    // It leaves again while its arrival is not quite over.
    journal.set_restored("01B", &[]).unwrap();
    journal.set("01B", Stage::Committed, "").unwrap();
    begin(&journal, "01C", Role::Source, "b", &at(5)).unwrap();
    assert_eq!(stage(&journal, "01B"), Stage::Committed);
    journal.set("01C", Stage::Frozen, "").unwrap();
    assert!(matches!(journal.commit("01C", Stage::Serving), Commit::Written));
    assert_eq!(stage(&journal, "01B"), Stage::Done, "or it would be taken over again after it has left");
}

#[test]
fn a_copy_that_was_not_dropped_is_superseded_by_the_next_attempt() {
    let (_directory, journal) = journal();
    begin(&journal, "01A", Role::Destination, "b", &at(4)).unwrap();
    begin(&journal, "01B", Role::Destination, "b", &at(4)).unwrap();
    assert_eq!(stage(&journal, "01A"), Stage::Dropped);
    assert_eq!(journal.unfinished_of(&service().id).unwrap().len(), 1);
}

#[test]
fn nothing_begins_over_a_copy_in_doubt_or_pages_that_are_served() {
    let (_directory, journal) = journal();
    begin(&journal, "01A", Role::Destination, "b", &at(4)).unwrap();
    journal.set_restored("01A", &[]).unwrap();
    let error = begin(&journal, "01B", Role::Destination, "b", &at(4)).unwrap_err().to_string();
    assert!(error.contains("01A") && error.contains("restored") && error.contains("redis"), "{error}");
    assert!(journal.get("01B").unwrap().is_none());

    let served = another("02SERVICE");
    begin(&journal, "01C", Role::Source, "b", &served).unwrap();
    assert!(matches!(journal.commit("01C", Stage::Serving), Commit::Written));
    let back = Service { epoch: served.epoch + 2, ..served };
    assert!(begin(&journal, "01D", Role::Destination, "b", &back).is_err());
    assert_eq!(stage(&journal, "01C"), Stage::Serving);
}

#[test]
fn a_journal_of_an_older_version_is_taken_over() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("journal.db");
    let database = Connection::open(&path).unwrap();
    database.execute_batch(STEPS[0].sql).unwrap();
    let text = serde_json::to_string(&at(3)).unwrap();
    let now = now_ms();
    for (id, stage, service) in [
        ("01A", "committed", text.as_str()),
        ("01B", "committed", "not what was written"),
        ("01D", "kept", text.as_str()),
    ] {
        database
            .execute(
                "INSERT INTO migration (id, role, peer, stage, service, updated_ms)
                 VALUES (?1, 'source', 'b', ?2, ?3, ?4)",
                params![id, stage, service, now],
            )
            .unwrap();
    }
    drop(database);
    let journal = Journal::open(&path).unwrap();
    assert_eq!(stage(&journal, "01A"), Stage::Committed);
    assert_eq!(stage(&journal, "01D"), Stage::Aborted);
    assert!(matches!(journal.get("01B"), Err(JournalError::Damaged(_))));
    begin(&journal, "01C", Role::Destination, "b", &at(5)).unwrap();
    assert_eq!(stage(&journal, "01A"), Stage::Done, "its service and epoch are known");
}

#[test]
fn a_commit_whose_write_failed_counts_if_it_is_on_the_disk() {
    let (_directory, journal) = journal();
    begin(&journal, "01A", Role::Source, "b", &service()).unwrap();
    journal.set("01A", Stage::Frozen, "").unwrap();
    // An error after the bytes had gone, as of an fsync.
    let _fault = failpoint::failing(&["journal.committed"]);
    assert!(matches!(journal.commit("01A", Stage::Committed), Commit::Written));
    assert_eq!(stage(&journal, "01A"), Stage::Committed);
}

#[test]
fn a_commit_whose_write_failed_does_not_count_if_the_disk_does_not_have_it() {
    let (directory, journal) = journal();
    begin(&journal, "01A", Role::Source, "b", &service()).unwrap();
    journal.set("01A", Stage::Frozen, "").unwrap();
    let room = directory.path().join("journal.room");
    assert!(room.exists());
    let _fault = failpoint::failing(&["journal.committing"]);
    assert!(matches!(journal.commit("01A", Stage::Committed), Commit::NotWritten(_)));
    assert_eq!(stage(&journal, "01A"), Stage::Frozen);
    assert!(!room.exists(), "on a full disk this could not be written");
    journal.set("01A", Stage::Undoing, "the disk is full").unwrap();
    journal.set("01A", Stage::Aborted, "").unwrap();
    begin(&journal, "01B", Role::Source, "b", &service()).unwrap();
    assert!(room.exists());
}

#[test]
fn of_a_commit_that_can_neither_be_written_nor_read_nothing_is_said() {
    let (directory, journal) = journal();
    begin(&journal, "01A", Role::Source, "b", &service()).unwrap();
    journal.set("01A", Stage::Frozen, "").unwrap();
    {
        let _fault = failpoint::failing(&["journal.committed", "journal.reading"]);
        assert!(!journal.is_undecided());
        assert!(matches!(journal.commit("01A", Stage::Committed), Commit::Unknown(_)));
        assert!(journal.is_undecided(), "nobody is answered from it");
    }
    // Nor of one whose file is gone: another one must not be made in its place.
    let _fault = failpoint::failing(&["journal.committing"]);
    for entry in std::fs::read_dir(directory.path()).unwrap() {
        std::fs::remove_file(entry.unwrap().path()).unwrap();
    }
    assert!(matches!(journal.commit("01A", Stage::Committed), Commit::Unknown(_)));
    assert!(!directory.path().join("journal.db").exists());
}

#[test]
fn how_pages_are_sent_is_known_to_the_next_life_of_the_daemon() {
    let (directory, journal) = journal();
    let serving = ServeOptions { streams: 5, max_bandwidth: Some(7_000_000), compress: Compress::Zstd };
    let service = service();
    let new = Beginning {
        id: "01A",
        role: Role::Source,
        peer: "b",
        peer_journal: "",
        service: &service,
        serving: Some(serving),
    };
    journal.begin(&new).unwrap();
    drop(journal);
    let path = directory.path().join("journal.db");
    assert_eq!(Journal::open(&path).unwrap().serving("01A").unwrap(), serving);
}

#[test]
fn a_migration_that_an_older_version_began_is_served_as_usual() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("journal.db");
    let mut old = Connection::open(&path).unwrap();
    schema::upgrade(&mut old, &STEPS[..2], None).unwrap();
    let text = serde_json::to_string(&service()).unwrap();
    old.execute(
        "INSERT INTO migration (id, role, peer, stage, service, updated_ms)
         VALUES ('01A', 'source', 'b', 'serving', ?1, 0)",
        params![text],
    )
    .unwrap();
    drop(old);
    let journal = Journal::open(&path).unwrap();
    assert_eq!(stage(&journal, "01A"), Stage::Serving);
    assert_eq!(journal.serving("01A").unwrap(), ServeOptions::default());
}

#[test]
fn the_journals_of_release_0_2_0_are_read() {
    let directory = tempfile::tempdir().unwrap();
    let open = |name: &str, sql: &str| {
        let path = directory.path().join(name);
        Connection::open(&path).unwrap().execute_batch(sql).unwrap();
        Journal::open(&path).unwrap()
    };
    let source = open("source", include_str!("journal/fixtures/0.2.0-source.sql"));
    let destination = open("destination", include_str!("journal/fixtures/0.2.0-destination.sql"));
    let [serving] = source.unfinished().unwrap().try_into().unwrap();
    let [committed] = destination.unfinished().unwrap().try_into().unwrap();
    assert_eq!((serving.stage, serving.role), (Stage::Serving, Role::Source));
    assert_eq!((committed.stage, committed.role), (Stage::Committed, Role::Destination));
    assert_eq!(serving.id, committed.id);
    assert_eq!((serving.service.name.as_str(), serving.service.epoch), ("big", 1));
    assert_eq!(committed.service.epoch, 2);
    assert_eq!(committed.peer_journal, source.identity());
    assert_eq!(source.serving(&serving.id).unwrap().streams, 2);
}

#[test]
fn how_an_older_version_was_to_send_pages_is_read() {
    let text = r#"{"lanes":5,"max_bandwidth":7000000,"compress":"zstd"}"#;
    let serving: ServeOptions = serde_json::from_str(text).unwrap();
    assert_eq!(
        serving,
        ServeOptions { streams: 5, max_bandwidth: Some(7_000_000), compress: Compress::Zstd }
    );
}
