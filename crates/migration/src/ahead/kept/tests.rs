use tempfile::TempDir;

use super::*;
use crate::service::tests::service;

const MIB: u64 = 1 << 20;

fn kept(most: u64) -> (TempDir, Arc<KeptFiles>) {
    let state = tempfile::tempdir().unwrap();
    let kept = Arc::new(KeptFiles::new(state.path(), Some(most)));
    (state, kept)
}

fn named(id: &str) -> Service {
    Service { id: id.into(), ..service() }
}

/// Files of a service come, so many bytes.
async fn bring(all: &Arc<KeptFiles>, id: &str, bytes: u64) -> Result<u64, String> {
    let mut held = all.hold(&named(id), "a").await.unwrap();
    let room = held.make_room(Taken { bytes, names: 2 })?.bytes;
    let begun = held.begin().unwrap();
    fs::write(begun.path().join("file"), vec![7; usize::try_from(bytes).unwrap()]).unwrap();
    held.keep(begun);
    held.measure(room)
}

fn directories(state: &TempDir) -> usize {
    fs::read_dir(state.path().join("prepared")).map_or(0, Iterator::count)
}

// Without a runtime in which it could be done later, what goes is gone at once.
fn now<T>(work: impl Future<Output = T>) -> T {
    futures::executor::block_on(work)
}

fn token(all: &KeptFiles, id: &str) -> Vec<u8> {
    all.token(&named(id), "a")
}

#[tokio::test]
async fn what_came_is_for_one_service_of_one_node_in_one_incarnation() {
    let (state, all) = kept(100 * MIB);
    assert_eq!(bring(&all, "one", MIB).await, Ok(MIB));
    let first = token(&all, "one");
    assert!(!first.is_empty() && token(&all, "two").is_empty());
    assert!(all.token(&named("one"), "c").is_empty());
    let later = Service { epoch: service().epoch + 1, ..named("one") };
    assert!(all.token(&later, "a").is_empty());
    let held = all.hold(&named("one"), "a").await.unwrap();
    assert!(held.token() == first && held.bytes() == MIB && token(&all, "one").is_empty(), "it is in use");
    drop(held);
    // The next one has another token.
    assert_eq!(bring(&all, "one", MIB).await, Ok(MIB));
    assert_ne!(token(&all, "one"), first);
    drop(all.hold(&later, "a").await.unwrap());
    assert!(!all.has_any());
    drop((state, all));
}

#[test]
fn there_is_as_much_as_there_is_room_for_and_what_is_new_is_spared() {
    // Names take room, too, which is announced with them.
    let (state, all) = kept(10 * MIB + 16 * OF_A_NAME);
    assert_eq!(now(bring(&all, "one", 4 * MIB)), Ok(4 * MIB));
    assert_eq!(now(bring(&all, "two", 4 * MIB)), Ok(4 * MIB));
    let refused = now(bring(&all, "three", 4 * MIB)).unwrap_err();
    assert!(refused.contains("room for 2 MiB") && refused.contains("5 MiB are needed"), "{refused}");
    assert_eq!((all.bytes(), directories(&state)), (8 * MIB, 2));
    // Its own files give way, and old ones of others.
    assert_eq!(now(bring(&all, "one", 6 * MIB)), Ok(6 * MIB));
    let three = now(all.hold(&named("three"), "a")).unwrap();
    let wanted = Wanted { taken: Taken { bytes: 4 * MIB, names: 2 }, is_present: false };
    let room = all.make_room(&("a".into(), "three".into()), wanted, Duration::ZERO).unwrap();
    assert!((4 * MIB..5 * MIB).contains(&room.bytes), "the oldest has gone: {room:?}");
    assert!(token(&all, "two").is_empty() && !token(&all, "one").is_empty());
    drop(three);
    assert_eq!(directories(&state), 1);
}

#[test]
fn what_is_promised_to_several_at_once_is_there_once() {
    let (_state, all) = kept(u64::MAX);
    let free = all.space().unwrap().free;
    let part = Taken { bytes: free.bytes / 5 * 3, names: 2 };
    let mut one = now(all.hold(&named("one"), "a")).unwrap();
    let room = one.make_room(part).unwrap();
    assert!(room.bytes >= part.bytes && room.bytes <= free.bytes / 10 * 9, "{room:?} of {free:?}");
    // Nothing of it has come, and most of the disk is free still.
    let mut two = now(all.hold(&named("two"), "a")).unwrap();
    let refused = two.make_room(part).unwrap_err();
    assert!(refused.contains("it has room for"), "{refused}");
    // A small one is not refused for what the first may still grow by.
    assert!(two.make_room(Taken { bytes: free.bytes / 100, names: 2 }).is_ok());
    drop(one);
    assert!(two.make_room(part).is_ok());
}

#[test]
fn names_take_inodes_which_are_counted_as_bytes_are() {
    let (_state, all) = kept(u64::MAX);
    let Taken { names, .. } = all.space().unwrap().free;
    if names == u64::MAX {
        println!("this filesystem has as many inodes as it needs");
        return;
    }
    let part = Taken { bytes: MIB, names: names / 5 * 3 };
    let wanted = Wanted { taken: part, is_present: false };
    let room = |id: &str| all.make_room(&("a".into(), id.into()), wanted, SPARED);
    let one = now(all.hold(&named("one"), "a")).unwrap();
    assert!((part.names..names).contains(&room("one").unwrap().names));
    let two = now(all.hold(&named("two"), "a")).unwrap();
    let refused = room("two").unwrap_err();
    assert!(refused.contains("inodes") && refused.contains(&part.names.to_string()), "{refused}");
    drop((one, two));
}

#[test]
fn files_of_a_service_that_is_not_here_are_taken_as_they_are() {
    let (state, all) = kept(100 * MIB);
    let place = state.path().join("services/redis/upper");
    let files = |bytes: usize| {
        fs::create_dir_all(place.join("deep")).unwrap();
        fs::write(place.join("deep/file"), vec![7; bytes]).unwrap();
    };
    files(1 << 20);
    assert_eq!(all.take(&named("one"), "a", &place), Ok(Some(MIB)));
    let first = token(&all, "one");
    assert!(!place.exists() && !first.is_empty() && all.bytes() == MIB);
    assert_eq!(all.taken(), (1, MIB + 3 * OF_A_NAME));
    // What is there already is not lost to what comes later, nor is nothing something.
    files(1);
    assert_eq!(all.take(&named("one"), "a", &place), Ok(None));
    assert!(place.exists() && token(&all, "one") == first);
    fs::remove_dir_all(&place).unwrap();
    fs::create_dir(&place).unwrap();
    assert_eq!(all.take(&named("two"), "a", &place), Ok(None));
    assert!(token(&all, "two").is_empty());
    // There is no room, or the operator wants none.
    files(100 << 20);
    assert!(all.take(&named("two"), "a", &place).unwrap_err().contains("it has room for 98 MiB"));
    let none = Arc::new(KeptFiles::new(state.path(), Some(0)));
    assert_eq!(none.take(&named("two"), "a", &place), Ok(None));
    assert!(place.join("deep/file").exists() && directories(&state) == 1);
}

#[test]
fn more_than_there_is_room_for_does_not_stay() {
    let (state, all) = kept(100 * MIB);
    let mut held = now(all.hold(&named("one"), "a")).unwrap();
    held.make_room(Taken { bytes: MIB, names: 2 }).unwrap();
    let begun = held.begin().unwrap();
    fs::write(begun.path().join("file"), vec![7; 1 << 20]).unwrap();
    held.keep(begun);
    assert!(held.measure(MIB - 1).unwrap_err().contains("more than the 0 MiB"));
    held.drop_it();
    drop(held);
    assert!(!all.has_any() && directories(&state) == 0);
    // Nor does what was not whole.
    let mut held = now(all.hold(&named("one"), "a")).unwrap();
    drop(held.begin().unwrap());
    assert_eq!(directories(&state), 0);
}

#[test]
fn it_takes_the_place_of_an_empty_directory_only() {
    let (state, all) = kept(100 * MIB);
    now(bring(&all, "one", MIB)).unwrap();
    let place = state.path().join("place");
    fs::create_dir_all(place.join("something")).unwrap();
    assert!(now(all.hold(&named("one"), "a")).unwrap().put_in(&place).is_err());
    assert!(place.join("something").exists() && directories(&state) == 0);
    now(bring(&all, "one", MIB)).unwrap();
    fs::remove_dir(place.join("something")).unwrap();
    now(all.hold(&named("one"), "a")).unwrap().put_in(&place).unwrap();
    assert_eq!(fs::metadata(place.join("file")).unwrap().len(), MIB);
    assert!(directories(&state) == 0 && !all.has_any());
}

#[test]
fn what_is_of_no_use_goes_and_what_an_earlier_life_left() {
    let (state, all) = kept(100 * MIB);
    now(bring(&all, "one", MIB)).unwrap();
    now(bring(&all, "two", MIB)).unwrap();
    all.relieve(|kept| kept.id == "two");
    assert!(token(&all, "one").is_empty() && !token(&all, "two").is_empty());
    assert_eq!(directories(&state), 1);
    now(bring(&all, "three", MIB)).unwrap();
    assert_eq!(directories(&state), 2);
    let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap();
    runtime.block_on(all.give_up_but("two"));
    assert_eq!(directories(&state), 1, "it waits for the removal");
    all.forget("two");
    assert_eq!(directories(&state), 0);
    fs::create_dir_all(state.path().join("prepared/left/deep")).unwrap();
    all.clear_left().unwrap();
    assert_eq!(directories(&state), 0);
}
