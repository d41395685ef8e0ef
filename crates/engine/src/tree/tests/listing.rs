//! A receiver tells what it has, whatever that is, and gets what differs.

use proptest::prelude::*;

use super::blocks::{content, hash};
use super::*;

const MOST: (u64, u64) = (1 << 16, 1 << 24);
/// Large enough to be sent by blocks.
const LARGE: usize = 3 * MAX_DATA;

fn always() -> Wanted {
    Wanted::new(|| true)
}

fn listing(root: &Path) -> Listing {
    let mut listing = Listing::new(BlockHash::new(hash), always(), MOST);
    list(root, (&BlockHash::new(hash), &always()), MOST, &mut |listed: Listed| {
        listing.add(Listed::decode(&listed.encode()).unwrap()).map_err(str::to_owned)
    })
    .unwrap();
    listing
}

/// Sends onto what the copy has.
fn onto(pair: &Pair) -> (TreeSender, Sent) {
    let mut sender = TreeSender::new(&pair.source).onto(listing(&pair.copy));
    let sent = pair.round(&mut sender, false);
    (sender, sent)
}

fn begin(root: &Path) {
    fill(root);
    fs::create_dir_all(root.join("some/where")).unwrap();
    for (nth, name) in ["some/where/large", "other", "some/more"].into_iter().enumerate() {
        fs::write(root.join(name), content(nth as u64, LARGE)).unwrap();
    }
    fs::write(root.join("some/small"), "a few words").unwrap();
    // With names that go on in another directory.
    fs::write(root.join("twice"), content(7, LARGE)).unwrap();
    fs::hard_link(root.join("twice"), root.join("some/twice")).unwrap();
}

#[test]
fn what_is_equal_does_not_cross_and_nothing_of_it_is_believed_by_its_times() {
    let pair = Pair::new();
    begin(&pair.source);
    // None has been sent from here: inodes and change times are others.
    let copied =
        std::process::Command::new("cp").arg("-aT").arg(&pair.source).arg(&pair.copy).status().unwrap();
    assert!(copied.success());
    let (sender, sent) = onto(&pair);
    pair.assert_same();
    // An inode with several names comes again.
    let several = (LARGE + 4096) as u64;
    assert!(sent.removed == 0 && sent.bytes <= several, "{sent:?}");
    // Rounds follow.
    let mut sender = sender;
    fs::rename(pair.source.join("other"), pair.source.join("renamed")).unwrap();
    pair.round(&mut sender, false);
    pair.settle(&mut sender);
    pair.assert_same();

    // As many bytes, and the same time.
    for (name, at) in [("some/where/large", 70_000), ("some/small", 3)] {
        let path = pair.copy.join(name);
        let time = fs::metadata(&path).unwrap().modified().unwrap();
        let file = File::options().write(true).open(&path).unwrap();
        file.write_all_at(b"?", at).unwrap();
        file.set_modified(time).unwrap();
    }
    let (_, sent) = onto(&pair);
    pair.assert_same();
    assert!(sent.bytes <= several + 4096 + 11, "{sent:?}");
}

#[test]
fn what_has_another_name_by_now_crosses_by_its_blocks() {
    let pair = Pair::new();
    for (nth, name) in ["log", "log.1", "log.2", "moved"].into_iter().enumerate() {
        fs::write(pair.source.join(name), content(nth as u64, LARGE)).unwrap();
        set_mtime(&pair.source.join(name), 1000 + i64::try_from(nth).unwrap(), 7);
    }
    pair.round(&mut TreeSender::new(&pair.source), true);
    let at = |name: &str| pair.source.join(name);
    fs::rename(at("log.1"), at("log.2")).unwrap();
    fs::rename(at("log"), at("log.1")).unwrap();
    fs::write(at("log"), content(9, LARGE)).unwrap();
    fs::create_dir(at("deep")).unwrap();
    fs::rename(at("moved"), at("deep/moved")).unwrap();
    let (_, sent) = onto(&pair);
    pair.assert_same();
    assert!(sent.bytes <= (LARGE + 4096) as u64, "only the new log: {sent:?}");
}

#[test]
fn whatever_has_become_of_it_is_put_right() {
    let changes: &[(&str, &super::blocks::Change)] = &[
        ("gone", &|root| fs::remove_dir_all(root.join("some")).unwrap()),
        ("new", &|root| {
            fs::create_dir_all(root.join("more/and")).unwrap();
            fs::write(root.join("more/and/more"), "more").unwrap();
        }),
        ("a link in place of a directory", &|root| {
            fs::remove_dir_all(root.join("some")).unwrap();
            symlink("/etc", root.join("some")).unwrap();
        }),
        ("a directory in place of a file", &|root| {
            fs::remove_file(root.join("other")).unwrap();
            fs::create_dir_all(root.join("other/one")).unwrap();
        }),
        ("a mode", &|root| {
            fs::set_permissions(root.join("some/where"), fs::Permissions::from_mode(0o700)).unwrap();
        }),
        ("a time", &|root| set_mtime(&root.join("some/where"), 5, 6)),
        ("the time of the root", &|root| set_mtime(root, 5, 6)),
        ("an attribute", &|root| {
            let time = fs::metadata(root.join("other")).unwrap().modified().unwrap();
            set_xattr(&root.join("other"), "user.mark", b"there");
            File::options().write(true).open(root.join("other")).unwrap().set_modified(time).unwrap();
        }),
        ("other names of one inode", &|root| {
            fs::remove_file(root.join("some/more")).unwrap();
            fs::hard_link(root.join("other"), root.join("some/more")).unwrap();
        }),
        ("names of their own", &|root| {
            fs::remove_file(root.join("some/twice")).unwrap();
            fs::copy(root.join("twice"), root.join("some/twice")).unwrap();
        }),
        ("half a file", &|root| {
            File::options().write(true).open(root.join("other")).unwrap().set_len(100_000).unwrap();
        }),
        ("a name of another", &|root| {
            fs::rename(root.join("other"), root.join("aside")).unwrap();
            fs::rename(root.join("some/more"), root.join("other")).unwrap();
            fs::rename(root.join("aside"), root.join("some/more")).unwrap();
        }),
    ];
    for (what, change) in changes {
        let pair = Pair::new();
        begin(&pair.source);
        let mut sender = TreeSender::new(&pair.source);
        pair.round(&mut sender, true);
        change(&pair.copy);
        assert!(!compare(&pair.source, &pair.copy).unwrap().is_empty(), "{what}");
        onto(&pair);
        let differences = compare(&pair.source, &pair.copy).unwrap();
        assert!(differences.is_empty(), "{what}: {differences:?}");
    }
}

#[test]
fn what_is_in_no_part_goes() {
    let pair = Pair::new();
    let (own, data) = (pair.source.join("own"), pair.source.join("data"));
    for part in [&own, &data] {
        fs::create_dir(part).unwrap();
        fs::write(part.join("large"), content(1, LARGE)).unwrap();
    }
    for left in ["volumes/old/deep", "elsewhere", "diff", "volumes/data"] {
        fs::create_dir_all(pair.copy.join(left)).unwrap();
    }
    fs::write(pair.copy.join("volumes/old/file"), "old").unwrap();
    let sender = TreeSender::of_parts().make("").make("volumes").put("diff", &own);
    let mut sender = sender.put("volumes/data", &data).onto(listing(&pair.copy));
    let sent = pair.round(&mut sender, true);
    assert_eq!(sent.removed, 2, "{sent:?}");
    for (here, there) in [(&own, "diff"), (&data, "volumes/data")] {
        assert!(compare(here, &pair.copy.join(there)).unwrap().is_empty());
    }
    let mut names: Vec<_> =
        fs::read_dir(pair.copy.join("volumes")).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    names.extend(fs::read_dir(&pair.copy).unwrap().map(|entry| entry.unwrap().file_name()));
    names.sort();
    assert_eq!(names, ["data", "diff", "volumes"]);
}

/// A pipe that comes to be where a file was keeps nobody waiting, and what is not wanted any more is not read.
#[test]
fn what_takes_the_place_of_a_file_is_not_read() {
    let pair = Pair::new();
    begin(&pair.source);
    begin(&pair.copy);
    let there = listing(&pair.copy);
    let found = Snapshot::scan(&pair.source).unwrap();
    for name in ["some/small", "other"] {
        fs::remove_file(pair.source.join(name)).unwrap();
        rustix::fs::mkfifoat(rustix::fs::CWD, pair.source.join(name), rustix::fs::Mode::RUSR).unwrap();
    }
    let changes = there.changes_to(&found, &pair.source).unwrap();
    assert!(changes.entries() >= 2, "{changes:?}");

    let mut unwanted = Listing::new(BlockHash::new(hash), Wanted::new(|| false), MOST);
    let hashed = (BlockHash::new(hash), Wanted::new(|| false));
    let nothing = list(&pair.copy, (&hashed.0, &hashed.1), MOST, &mut |_: Listed| Ok::<_, String>(()));
    assert!(nothing.unwrap_err().to_string().contains("read"));
    list(&pair.copy, (&hashed.0, &always()), MOST, &mut |listed: Listed| {
        unwanted.add(listed).map_err(str::to_owned)
    })
    .unwrap();
    assert!(unwanted.changes_to(&Snapshot::scan(&pair.copy).unwrap(), &pair.copy).is_err());
}

#[test]
fn a_receiver_that_tells_nonsense_is_refused() {
    let scratch = scratch();
    fs::write(scratch.path().join("large"), content(1, LARGE)).unwrap();
    fs::write(scratch.path().join("small"), "small").unwrap();
    let mut all = Vec::new();
    list(scratch.path(), (&BlockHash::new(hash), &always()), MOST, &mut |listed: Listed| {
        all.push(listed);
        Ok::<_, String>(())
    })
    .unwrap();
    let refused = |all: &[Listed]| {
        let mut listing = Listing::new(BlockHash::new(hash), always(), (4, 1 << 10));
        all.iter().cloned().find_map(|listed| listing.add(listed).err())
    };
    assert_eq!(refused(&all), None);
    let with = |change: &dyn Fn(&mut super::super::listing::Name)| {
        let mut all = all.clone();
        for listed in &mut all {
            if let Listed::Name(name) = listed
                && name.path == b"large"
            {
                change(name);
            }
        }
        refused(&all)
    };
    for path in ["../large", "/large", "a//b", "small", &"x".repeat(2 << 10)] {
        assert!(with(&|name| name.path = path.into()).is_some(), "{path}");
    }
    for block in [1, 4095, 1 << 40, u64::MAX] {
        assert!(with(&|name| name.block = block).is_some(), "{block}");
    }
    assert!(with(&|name| name.kind = 8).is_some() && with(&|name| name.kind = 99).is_some());
    assert!(with(&|name| name.attributes.truncate(3)).is_some());
    assert!(with(&|name| name.content = vec![0; 16]).is_some());
    for size in [5, u64::MAX, 1 << 63] {
        assert!(with(&|name| name.size = size).is_some(), "blocks beyond its end, or of no file: {size}");
    }
    let mut pieces: Vec<_> =
        all.iter().filter(|listed| matches!(listed, Listed::Piece(_))).cloned().collect();
    assert!(pieces.len() == 3 && refused(&pieces).is_some(), "of no file");
    let piece = pieces.remove(0);
    let mut twice = all.clone();
    let at = twice.iter().position(|listed| *listed == piece).unwrap();
    twice.insert(at, piece);
    assert!(refused(&twice).is_some());
    let many: Vec<_> = (0..5)
        .map(|nth| {
            let Listed::Name(name) = all[0].clone() else { panic!("the root comes first") };
            Listed::Name(super::super::listing::Name { path: vec![b'a' + nth], ..name })
        })
        .collect();
    assert!(refused(&many).is_some(), "more names than are taken");
}

proptest! {
    #[test]
    fn flipped_bytes_are_refused_or_a_round_is_made_of_them(
        flips in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..6),
    ) {
        let scratch = scratch();
        fs::write(scratch.path().join("large"), content(1, LARGE)).unwrap();
        fs::write(scratch.path().join("small"), "small").unwrap();
        let (mut all, mut starts) = (Vec::new(), Vec::new());
        list(scratch.path(), (&BlockHash::new(hash), &always()), MOST, &mut |listed: Listed| {
            starts.push(all.len());
            all.extend(listed.encode());
            Ok::<_, String>(())
        })
        .unwrap();
        for (at, flip) in &flips {
            let at = at.index(all.len());
            all[at] ^= flip;
        }
        starts.push(all.len());
        let mut listing = Listing::new(BlockHash::new(hash), always(), MOST);
        for range in starts.windows(2) {
            let Ok(listed) = Listed::decode(&all[range[0]..range[1]]) else { return Ok(()) };
            if listing.add(listed).is_err() {
                return Ok(());
            }
        }
        // Whatever it says, a sender makes a round of it.
        let mut sender = TreeSender::new(scratch.path()).onto(listing);
        let round = sender.next_round(true).unwrap();
        sender.send(round, &mut |_: Item| Ok::<_, String>(())).unwrap();
    }
}
