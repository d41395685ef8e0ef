//! The store in a file: swaps, pages, watches, a second process, and how fast it is.
#![allow(clippy::unwrap_used)]

use std::time::Instant;

use tempfile::TempDir;

use super::*;
use crate::store::{Compare, Write};

fn key(name: &str) -> Key {
    Key::service(&name.parse().unwrap())
}

fn put(key: &Key, value: &str, over: Revision) -> Swap {
    let compare = Compare { key: key.clone(), revision: over };
    Swap::new(vec![compare], vec![Write::Put(key.clone(), value.into())]).unwrap()
}

fn new_store(kept: u64) -> (TempDir, SqliteStore) {
    let directory = tempfile::tempdir().unwrap();
    let store = SqliteStore::open_keeping(&directory.path().join("cluster.db"), kept).unwrap();
    (directory, store)
}

async fn done(store: &SqliteStore, swap: &Swap) -> Revision {
    match store.swap(swap).await.unwrap() {
        Swapped::Done(revision) => revision,
        differs @ Swapped::Differs(_) => panic!("{differs:?}"),
    }
}

#[tokio::test]
async fn a_swap_is_done_once_and_one_that_differs_says_what_is_there() {
    let (_directory, store) = new_store(KEPT);
    let (web, db) = (key("web"), key("db"));
    let first = done(&store, &put(&web, "1", Revision::NONE)).await;
    let there = store.get(&web).await.unwrap();
    assert_eq!(there, Some(Entry { key: web.clone(), value: b"1".to_vec(), revision: first }));
    let again = store.swap(&put(&web, "1", Revision::NONE)).await.unwrap();
    assert_eq!(again, Swapped::Differs(vec![there.clone()]));

    // One key of two differs: neither is written.
    let compares =
        [(&web, first), (&db, first)].map(|(key, revision)| Compare { key: key.clone(), revision }).to_vec();
    let writes = vec![Write::Put(web.clone(), b"2".to_vec()), Write::Put(db.clone(), b"2".to_vec())];
    let both = Swap::new(compares, writes).unwrap();
    assert_eq!(store.swap(&both).await.unwrap(), Swapped::Differs(vec![there, None]));
    assert_eq!(store.get(&db).await.unwrap(), None);

    let compare = Compare { key: web.clone(), revision: first };
    let removal = Swap::new(vec![compare], vec![Write::Delete(web.clone())]).unwrap();
    assert_eq!(done(&store, &removal).await, Revision(2), "a swap that differed has no revision");
    assert_eq!(store.get(&web).await.unwrap(), None);
}

#[tokio::test]
async fn pages_have_each_entry_of_their_folder_once() {
    let (_directory, store) = new_store(KEPT);
    let names = ["a", "a-b", "a.b", "a0", "b", "z_"];
    for name in names {
        done(&store, &put(&key(name), name, Revision::NONE)).await;
        done(&store, &put(&Key::node(&name.parse().unwrap()), name, Revision::NONE)).await;
    }
    for limit in [0, 1, 4, 6, usize::MAX] {
        let (mut listed, mut after) = (Vec::new(), None);
        loop {
            let page = store.range(Folder::Services, after.as_deref(), limit).await.unwrap();
            assert_eq!(page.revision, Revision(12));
            listed.extend(page.entries.iter().map(|entry| entry.key.clone()));
            after = page.entries.last().map(|entry| entry.key.name().to_owned());
            if !page.more {
                break;
            }
        }
        let mut all = names.map(key).to_vec();
        all.sort();
        assert_eq!(listed, all, "by {limit}");
    }
}

#[tokio::test]
async fn a_watch_gives_the_changes_of_its_folder_in_their_order_and_waits_for_the_next() {
    let (_directory, store) = new_store(KEPT);
    let (web, node) = (key("web"), Key::node(&"a".parse().unwrap()));
    let first = done(&store, &put(&web, "1", Revision::NONE)).await;
    done(&store, &put(&node, "1", Revision::NONE)).await;
    let second = done(&store, &put(&web, "2", first)).await;
    let mut watch = store.watch(Folder::Services, Revision::NONE).await.unwrap();
    let event = |value: Option<&str>, revision| Event {
        key: web.clone(),
        value: value.map(|value| value.as_bytes().to_vec()),
        revision,
    };
    assert_eq!(watch.next().await.unwrap(), [event(Some("1"), first), event(Some("2"), second)]);
    let compare = Compare { key: web.clone(), revision: second };
    let removal = Swap::new(vec![compare], vec![Write::Delete(web.clone())]).unwrap();
    let (events, third) = tokio::join!(watch.next(), done(&store, &removal));
    assert_eq!(events.unwrap(), [event(None, third)]);
}

#[tokio::test]
async fn a_watch_from_before_the_oldest_change_is_told_to_read_all() {
    let (_directory, store) = new_store(2);
    let mut revision = Revision::NONE;
    for _ in 0..5 {
        revision = done(&store, &put(&key("web"), "x", revision)).await;
    }
    let watch = async |after| store.watch(Folder::Services, Revision(after)).await.unwrap().next().await;
    assert_eq!(watch(3).await.unwrap().len(), 2);
    for lost in [0, 2, 6] {
        let error = watch(lost).await.unwrap_err();
        assert!(matches!(error, WatchError::Compacted { after } if after == Revision(lost)), "{error}");
    }
}

#[tokio::test]
async fn what_was_written_is_there_after_a_restart_and_two_processes_cannot_have_the_file() {
    let (directory, store) = new_store(KEPT);
    let path = directory.path().join("cluster.db");
    let first = done(&store, &put(&key("web"), "1", Revision::NONE)).await;
    assert!(matches!(SqliteStore::open(&path), Err(OpenError::Busy { .. })));
    drop(store);
    let store = SqliteStore::open(&path).unwrap();
    assert_eq!(store.get(&key("web")).await.unwrap().unwrap().revision, first);
    assert_eq!(done(&store, &put(&key("web"), "2", first)).await, Revision(2));
}

#[test]
fn a_file_that_is_no_store_of_a_cluster_is_named_and_left_as_it_is() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("other.db");
    std::fs::write(
        &path,
        "# a file of settings, which is longer than the header of a database is\n".repeat(9),
    )
    .unwrap();
    let tables = directory.path().join("tables.db");
    Connection::open(&tables).unwrap().execute_batch("CREATE TABLE t (a INTEGER)").unwrap();
    let application = directory.path().join("application.db");
    Connection::open(&application).unwrap().pragma_update(None, "application_id", 7).unwrap();
    for path in [path, tables, application] {
        let before = std::fs::read(&path).unwrap();
        let error = SqliteStore::open(&path).unwrap_err();
        assert!(matches!(error, OpenError::Foreign { .. }), "{error:?}");
        assert!(error.to_string().contains(path.to_str().unwrap()), "{error}");
        assert_eq!(std::fs::read(&path).unwrap(), before);
    }
    let nowhere = SqliteStore::open(&directory.path().join("none/cluster.db")).unwrap_err();
    assert!(nowhere.to_string().contains("none/cluster.db"), "{nowhere}");
}

#[test]
fn a_store_of_a_newer_release_names_no_copy_to_put_back() {
    let (directory, store) = new_store(KEPT);
    store.0.lock().pragma_update(None, "user_version", 9).unwrap();
    drop(store);
    let error = SqliteStore::open(&directory.path().join("cluster.db")).unwrap_err();
    let OpenError::Schema { source, .. } = &error else { panic!("{error:?}") };
    assert!(
        source.to_string().contains("schema version 9") && !source.to_string().contains("cop"),
        "{source}"
    );
}

#[tokio::test]
async fn keys_that_no_release_writes_hide_no_others() {
    let (_directory, store) = new_store(KEPT);
    let long = format!("service/b{}", "/".repeat(1 << 20));
    for unknown in ["service/a/b", "service/a/c", "service/zz/", &long] {
        store.0.lock().execute("INSERT INTO entry VALUES (?1, x'00', 0)", [unknown]).unwrap();
        store.0.lock().execute("INSERT INTO change VALUES (1, ?1, x'00')", [unknown]).unwrap();
    }
    let bytes = "INSERT INTO entry VALUES (CAST(x'736572766963652fff' AS TEXT), x'00', 0)";
    store.0.lock().execute(bytes, []).unwrap();
    for name in ["a", "c", "z"] {
        done(&store, &put(&key(name), name, Revision::NONE)).await;
    }
    for limit in 1..5 {
        let page = store.range(Folder::Services, None, limit).await.unwrap();
        let names: Vec<_> = page.entries.iter().map(|entry| entry.key.name().to_owned()).collect();
        assert_eq!(names, ["a", "c", "z"][..limit.min(3)]);
        assert_eq!(page.more, limit < 3, "no page is awaited that would be empty");
    }
    let mut watch = store.watch(Folder::Services, Revision::NONE).await.unwrap();
    assert_eq!(watch.next().await.unwrap().len(), 3);
}

#[tokio::test]
#[ignore = "it measures: cargo test -p godwit-cluster --release --lib measure -- --ignored --nocapture"]
async fn measure_ten_thousand_services() {
    const SERVICES: u32 = 10_000;
    let (_directory, store) = new_store(KEPT);
    let begun = Instant::now();
    for service in 0..SERVICES {
        done(&store, &put(&key(&format!("service-{service}")), &"x".repeat(150), Revision::NONE)).await;
    }
    println!("claims: {:.0}/s", f64::from(SERVICES) / begun.elapsed().as_secs_f64());
    let (begun, mut listed, mut after) = (Instant::now(), 0, None);
    loop {
        let page = store.range(Folder::Services, after.as_deref(), MAX_PAGE).await.unwrap();
        listed += page.entries.len();
        after = page.entries.last().map(|entry| entry.key.name().to_owned());
        if !page.more {
            break;
        }
    }
    println!("list in pages of {MAX_PAGE}: {:?}", begun.elapsed());
    let (begun, mut seen) = (Instant::now(), 0);
    let mut watch = store.watch(Folder::Services, Revision::NONE).await.unwrap();
    while seen < listed {
        seen += watch.next().await.unwrap().len();
    }
    println!("watch catches up: {:?}", begun.elapsed());
    assert_eq!((listed, seen), (10_000, 10_000));
}
