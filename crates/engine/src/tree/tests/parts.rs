//! A tree of several directories here, which is one at the receiver.

use std::os::fd::OwnedFd;

use super::blocks::{content, hash};
use super::*;

const SIZE: usize = 3 * MAX_DATA;

#[test]
fn directories_of_several_places_become_one_tree_and_stay_it_round_after_round() {
    let pair = Pair::new();
    let (one, other) = (pair.source.join("one"), pair.source.join("other"));
    for part in [&one, &other] {
        fs::create_dir(part).unwrap();
        fill(part);
        // The same names in both, with content that is known by its blocks.
        for nth in 0..3 {
            fs::write(part.join(format!("log {nth}")), content(nth, SIZE)).unwrap();
        }
    }
    let opened = OwnedFd::from(File::open(&other).unwrap());
    let sender = TreeSender::of_parts().make("").make("volumes").put("diff", &one);
    let mut sender = sender.put_open("volumes/data", &other, opened).by_blocks(BlockHash::new(hash));
    // Whatever comes to be at its path.
    let away = pair.source.join("away");
    fs::rename(&other, &away).unwrap();
    fs::create_dir(&other).unwrap();

    let same = |what: &str| {
        for (here, there) in [(&one, "diff"), (&away, "volumes/data")] {
            let differences = compare(here, &pair.copy.join(there)).unwrap();
            assert!(differences.is_empty(), "{what}: {there}: {differences:?}");
        }
    };
    let first = sender.next_round(false).unwrap();
    let names = fs::read_dir(&one).unwrap().count() + fs::read_dir(&away).unwrap().count();
    assert!(first.changes.entries() > names as u64 && first.changes.bytes() > 0);
    pair.round(&mut sender, false);
    same("the first round");
    assert_eq!(fs::read_dir(&pair.copy).unwrap().count(), 2);
    pair.settle(&mut sender);
    // Files of both have new names, and are held for them.
    for part in [&one, &away] {
        fs::rename(part.join("log 0"), part.join("log 3")).unwrap();
        fs::rename(part.join("log 1"), part.join("log 4")).unwrap();
        fs::remove_dir_all(part.join("directory")).unwrap();
        let file = File::options().write(true).open(part.join("log 4")).unwrap();
        file.write_all_at(b"written", 7).unwrap();
    }
    let sent = pair.round(&mut sender, true);
    same("the last round");
    assert!(sent.removed >= 2 && sent.bytes < SIZE as u64, "{sent:?}");
}

#[test]
fn an_error_names_the_path_that_a_directory_had() {
    // Neither a directory nor a file.
    let opened = OwnedFd::from(File::open("/dev/null").unwrap());
    let sender = TreeSender::of_parts().make("").put_open("data", Path::new("/srv/data"), opened);
    let error = sender.next_round(false).unwrap_err().to_string();
    assert!(error.contains("tree /srv/data"), "{error}");
}

#[test]
fn a_file_is_a_part_whatever_is_at_its_path_later() {
    let pair = Pair::new();
    let file = pair.source.join("conf");
    fs::write(&file, "one").unwrap();
    let opened = OwnedFd::from(File::open(&file).unwrap());
    let mut sender = TreeSender::of_parts().make("").make("volume").put_open(
        "volume/app.conf",
        Path::new("/etc/conf"),
        opened,
    );
    pair.round(&mut sender, false);
    let there = pair.copy.join("volume/app.conf");
    assert_eq!(fs::read_to_string(&there).unwrap(), "one");
    let written = File::options().write(true).open(&file).unwrap();
    fs::rename(&file, pair.source.join("away")).unwrap();
    fs::write(&file, "another").unwrap();
    written.write_all_at(b"two and more", 0).unwrap();
    pair.round(&mut sender, true);
    assert_eq!(fs::read_to_string(&there).unwrap(), "two and more");
}

#[test]
fn looks_tell_what_has_changed_and_nothing_is_sent() {
    let pair = Pair::new();
    let (one, other) = (pair.source.join("one"), pair.source.join("other"));
    for part in [&one, &other] {
        fs::create_dir(part).unwrap();
        fs::write(part.join("database"), content(1, SIZE)).unwrap();
        fs::write(part.join("small"), content(2, 1000)).unwrap();
    }
    let sender =
        TreeSender::of_parts().make("").make("volumes").put("diff", &one).put("volumes/data", &other);
    let mut sender = sender.by_blocks(BlockHash::new(hash));
    let first = sender.next_round(false).unwrap();
    assert_eq!(first.bytes, 2 * (SIZE as u64 + 1000));
    sender.suppose(first);
    let wanted = Wanted::new(|| true);
    // Small files count each time that they may have changed since: those written a moment before a look, too.
    let look = |sender: &mut TreeSender, changed: u64| {
        let looked = sender.look(u64::MAX, &wanted).unwrap();
        assert!(
            looked.is_read && (changed..=changed + 2000).contains(&looked.bytes),
            "{looked:?}, {changed}"
        );
        looked.names
    };
    let database = File::options().write(true).open(other.join("database")).unwrap();
    // Which blocks of it change is not known yet, but that it has grown.
    database.write_all_at(b"new", 70_000).unwrap();
    database.write_all_at(&content(3, 5000), SIZE as u64).unwrap();
    look(&mut sender, 5000);
    database.write_all_at(b"other", 70_000).unwrap();
    database.write_all_at(b"other", 0).unwrap();
    // Of a size that no others have together.
    const NEW: usize = SIZE + 100_000;
    fs::write(one.join("new"), content(4, NEW)).unwrap();
    fs::remove_file(one.join("small")).unwrap();
    assert!(look(&mut sender, 2 * 4096 + NEW as u64) >= 4, "the file that is gone counts, too");
    // Of a file with two names one is read.
    fs::hard_link(one.join("new"), one.join("again")).unwrap();
    let looked = sender.look(u64::MAX, &wanted).unwrap();
    // Large files, too, may have changed since the look before, if they were written shortly before that.
    let others = [0, SIZE, SIZE + 5000, 2 * SIZE + 5000].map(|others| (others + NEW) as u64);
    assert!(others.contains(&looked.read), "{looked:?}");
    // Another file takes its place.
    fs::write(other.join("next"), content(1, SIZE)).unwrap();
    fs::rename(other.join("next"), other.join("database")).unwrap();
    let looked = sender.look(u64::MAX, &wanted).unwrap();
    assert!(looked.bytes < SIZE as u64 / 2, "most of it has the same blocks: {looked:?}");
    let database = File::options().write(true).open(other.join("database")).unwrap();
    database.write_all_at(b"once more", 0).unwrap();
    let unread = sender.look(1000, &wanted).unwrap();
    assert!(!unread.is_read && unread.bytes >= SIZE as u64, "{unread:?}");
    assert_eq!(fs::read_dir(&pair.copy).unwrap().count(), 0);
    let error = sender.look(u64::MAX, &Wanted::new(|| false)).unwrap_err();
    assert!(error.to_string().contains("cannot look at"), "{error}");
}
