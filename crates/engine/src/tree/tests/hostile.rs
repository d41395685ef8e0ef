//! Items of a broken or hostile sender: refused, without a panic, and without reaching anything
//! outside of the root.

use proptest::prelude::*;

use super::*;

/// A receiver's root beside things it must not touch.
struct Target {
    scratch: TempDir,
}

impl Target {
    fn new() -> Self {
        let scratch = scratch();
        fs::create_dir(scratch.path().join("root")).unwrap();
        fs::create_dir(scratch.path().join("outside")).unwrap();
        fs::write(scratch.path().join("outside/secret"), b"untouched").unwrap();
        set_mtime(&scratch.path().join("outside/secret"), 1, 1);
        set_mtime(&scratch.path().join("outside"), 1, 1);
        Self { scratch }
    }

    fn receiver(&self) -> Receiver {
        Receiver::new(
            &self.scratch.path().join("root"),
            Limits { entries: 100, bytes: 1 << 20, devices: false },
        )
        .unwrap()
    }

    /// Applies items until one is refused, and gives that error.
    fn apply(&self, items: Vec<Item>) -> Result<(), TreeError> {
        let mut receiver = self.receiver();
        items.into_iter().try_for_each(|item| receiver.apply(item))?;
        receiver.finish().map(drop)
    }

    fn assert_outside_untouched(&self) {
        let outside = self.scratch.path().join("outside");
        let secret = fs::metadata(outside.join("secret")).unwrap();
        assert_eq!(fs::read(outside.join("secret")).unwrap(), b"untouched");
        assert_eq!((secret.mtime(), secret.nlink()), (1, 1));
        assert_eq!(
            (fs::metadata(&outside).unwrap().mtime(), fs::read_dir(&outside).unwrap().count()),
            (1, 1)
        );
        assert_eq!(fs::read_dir(self.scratch.path()).unwrap().count(), 2);
    }
}

fn entry(path: &[u8], kind: Kind) -> Entry {
    Entry { path: path.to_vec(), kind: kind.into(), mode: 0o755, ..Entry::default() }
}

fn file(path: &[u8], size: u64) -> Item {
    Item::Entry(Entry { size, ..entry(path, Kind::File) })
}

fn directory(path: &[u8]) -> Item {
    Item::Entry(entry(path, Kind::Directory))
}

fn link(path: &[u8], target: &[u8]) -> Item {
    Item::Entry(Entry { link_target: target.to_vec(), ..entry(path, Kind::Symlink) })
}

fn hard_link(path: &[u8], of: &[u8]) -> Item {
    Item::Entry(Entry { hard_link_of: of.to_vec(), ..entry(path, Kind::HardLink) })
}

fn data(offset: u64, bytes: &[u8]) -> Item {
    Item::Data(Data { offset, bytes: bytes.to_vec() })
}

fn kept(path: &[u8], size: u64) -> Item {
    Item::Entry(Entry { size, kept: true, ..entry(path, Kind::File) })
}

fn begun_with(path: &[u8], number: u32, size: u64) -> Item {
    Item::Entry(Entry { size, held: Some(number), ..entry(path, Kind::File) })
}

fn hold(path: &[u8], number: u32) -> Item {
    Item::Hold(Hold { path: path.to_vec(), number })
}

fn hole(offset: u64, length: u64) -> Item {
    Item::Hole(Hole { offset, length })
}

fn remove(path: &[u8]) -> Item {
    Item::Remove(Remove { path: path.to_vec() })
}

fn end(entries: u64, bytes: u64) -> Item {
    Item::End(End { entries, bytes })
}

fn with_xattr(name: &[u8], value: Vec<u8>) -> Item {
    let xattrs = vec![Xattr { name: name.to_vec(), value }];
    Item::Entry(Entry { xattrs, ..entry(b"f", Kind::File) })
}

#[test]
fn every_broken_rule_is_refused() {
    let many = |count: usize| (0..count).map(|number| file(format!("f{number}").as_bytes(), 0)).collect();
    let changed = |change: &dyn Fn(&mut Entry)| {
        let mut changed = entry(b"f", Kind::File);
        change(&mut changed);
        vec![Item::Entry(changed)]
    };
    let cases: Vec<(&str, Vec<Item>)> = vec![
        ("absolute", vec![file(b"/etc/x", 0)]),
        ("up", vec![file(b"../outside/x", 0)]),
        ("up inside", vec![directory(b"d"), file(b"d/../../outside/x", 0)]),
        ("dot", vec![file(b"./x", 0)]),
        ("empty component", vec![directory(b"d"), file(b"d//x", 0)]),
        ("trailing slash", vec![directory(b"d/")]),
        ("NUL", vec![file(b"a\0b", 0)]),
        ("long name", vec![file(&[b'x'; 256], 0)]),
        ("long path", vec![file(&b"x/".repeat(2048), 0)]),
        ("root as a file", vec![file(b"", 0)]),
        ("content that comes in no other way", changed(&|entry| entry.content = Some(1))),
        (
            "content of a directory in another way",
            changed(&|entry| {
                entry.kind = Kind::Directory.into();
                entry.content = Some(1);
            }),
        ),
        ("root removed", vec![remove(b"")]),
        ("removal outside", vec![remove(b"../outside")]),
        ("through a link", vec![link(b"l", b"../outside"), file(b"l/x", 0)]),
        ("directory through a link", vec![link(b"l", b"../outside"), directory(b"l/x")]),
        ("hard link through a link", vec![link(b"l", b"../outside"), hard_link(b"x", b"l/secret")]),
        ("hard link outside", vec![hard_link(b"x", b"../outside/secret")]),
        ("hard link to nothing", vec![hard_link(b"x", b"y")]),
        ("hard link to itself", vec![file(b"x", 0), hard_link(b"x", b"x")]),
        ("hard link to a directory", vec![directory(b"d"), hard_link(b"x", b"d")]),
        ("hard link to the root", vec![hard_link(b"x", b"")]),
        ("hard link below itself", vec![directory(b"d"), file(b"d/f", 0), hard_link(b"d", b"d/f")]),
        ("no parent", vec![file(b"d/f", 0)]),
        ("parent is a file", vec![file(b"d", 0), file(b"d/f", 0)]),
        ("link to nothing", vec![link(b"l", b"")]),
        ("link with NUL", vec![link(b"l", b"a\0b")]),
        ("long link", vec![link(b"l", &[b'x'; 5000])]),
        ("no kind", changed(&|entry| entry.kind = 0)),
        ("unknown kind", changed(&|entry| entry.kind = 77)),
        ("mode", changed(&|entry| entry.mode = 0o170_755)),
        ("time", changed(&|entry| entry.mtime_nanoseconds = 1_000_000_000)),
        ("owner", changed(&|entry| entry.uid = u32::MAX)),
        ("group", changed(&|entry| entry.gid = u32::MAX)),
        ("size", changed(&|entry| entry.size = u64::MAX)),
        ("size too large for any filesystem", changed(&|entry| entry.size = i64::MAX as u64)),
        ("link target of a file", changed(&|entry| entry.link_target = b"x".to_vec())),
        ("device number of a file", changed(&|entry| entry.rdev_minor = 1)),
        ("attribute without namespace", vec![with_xattr(b"note", vec![])]),
        ("attribute of the system", vec![with_xattr(b"system.other", vec![])]),
        ("attribute with no name", vec![with_xattr(b"user.", vec![])]),
        ("attribute with NUL", vec![with_xattr(b"user.a\0b", vec![])]),
        ("attribute with long name", vec![with_xattr(&[b"user.".as_slice(), &[b'x'; 251]].concat(), vec![])]),
        ("attribute too large", vec![with_xattr(b"user.x", vec![0; (64 << 10) + 1])]),
        (
            "attribute twice",
            changed(&|entry| {
                entry.xattrs = vec![Xattr { name: b"user.x".to_vec(), value: vec![] }; 2];
            }),
        ),
        ("data first", vec![data(0, b"x")]),
        ("data after a directory", vec![directory(b"d"), data(0, b"x")]),
        ("data beyond the size", vec![file(b"f", 3), data(0, b"1234")]),
        ("data at no place", vec![file(b"f", 3), data(u64::MAX, b"1")]),
        ("data twice", vec![file(b"f", 9), data(0, b"1234"), data(3, b"5")]),
        ("no data", vec![file(b"f", 9), data(0, b"")]),
        ("too much data at once", vec![file(b"f", 1 << 19), data(0, &vec![0; MAX_DATA + 1])]),
        ("more data than agreed", {
            let piece = |number: u64| data(number * MAX_DATA as u64, &vec![1; MAX_DATA]);
            let mut items = vec![file(b"f", 1 << 30)];
            items.extend((0..5).map(piece));
            items
        }),
        ("a hole first", vec![hole(0, 1)]),
        ("a hole in a directory", vec![directory(b"d"), hole(0, 1)]),
        ("no hole", vec![file(b"f", 9), hole(0, 0)]),
        ("a hole beyond the size", vec![file(b"f", 9), hole(5, 5)]),
        ("a hole at no place", vec![file(b"f", 9), hole(u64::MAX, 2)]),
        ("a hole in what came", vec![file(b"f", 9), data(0, b"1234"), hole(3, 2)]),
        ("data in a hole", vec![file(b"f", 9), hole(0, 4), data(3, b"1")]),
        ("kept, and not there", vec![kept(b"f", 9)]),
        ("kept, and a directory", vec![directory(b"d"), kept(b"d", 9)]),
        ("kept, and a link", vec![link(b"l", b"../outside/secret"), kept(b"l", 9)]),
        ("kept through a link", vec![link(b"l", b"../outside"), kept(b"l/secret", 9)]),
        (
            "kept, and no file itself",
            changed(&|entry| {
                entry.kind = Kind::Directory.into();
                entry.kept = true;
            }),
        ),
        (
            "kept, and of a held file",
            changed(&|entry| {
                entry.kept = true;
                entry.held = Some(0);
            }),
        ),
        ("of no held file", vec![begun_with(b"f", 0, 9)]),
        (
            "of a held file twice",
            vec![file(b"f", 9), hold(b"f", 0), begun_with(b"g", 0, 9), begun_with(b"h", 0, 9)],
        ),
        ("held, and not there", vec![hold(b"f", 0)]),
        ("held, and the root", vec![hold(b"", 0)]),
        ("held, and a directory", vec![directory(b"d"), hold(b"d", 0)]),
        ("held, and outside", vec![hold(b"../outside/secret", 0)]),
        ("held, and a link", vec![link(b"l", b"../outside/secret"), hold(b"l", 0)]),
        ("held through a link", vec![link(b"l", b"../outside"), hold(b"l/secret", 0)]),
        ("held twice", vec![file(b"f", 9), hold(b"f", 0), hold(b"f", 0)]),
        ("held, and kept", vec![file(b"f", 9), hold(b"f", 0), kept(b"f", 9)]),
        ("more holes than agreed", {
            let mut items = vec![file(b"f", 1 << 19)];
            items.extend((0..300).map(|number| hole(number, 1)));
            items
        }),
        ("more names than agreed", many(101)),
        ("no end", vec![file(b"f", 0)]),
        ("end with other counts", vec![file(b"f", 0), end(2, 0)]),
        ("end with other bytes", vec![file(b"f", 2), data(0, b"12"), end(1, 3)]),
        ("after the end", vec![end(0, 0), file(b"f", 0)]),
        ("two ends", vec![end(0, 0), end(0, 0)]),
    ];
    for (name, mut items) in cases {
        // An end that would fit, so that nothing is refused for the lack of one.
        let is_about_end = name.contains("end");
        let entries = items.iter().filter(|item| matches!(item, Item::Entry(_))).count() as u64;
        let bytes =
            items.iter().map(|item| if let Item::Data(data) = item { data.bytes.len() as u64 } else { 0 });
        let bytes = bytes.sum();
        if !is_about_end {
            items.push(end(entries, bytes));
        }
        let target = Target::new();
        let error = target.apply(items);
        assert!(error.is_err(), "{name} was taken");
        target.assert_outside_untouched();
    }
}

#[test]
fn a_link_of_any_target_is_made_and_not_followed() {
    let target = Target::new();
    let outside = target.scratch.path().join("outside/secret");
    let outside = outside.as_os_str().as_bytes();
    target.apply(vec![link(b"l", outside), file(b"l", 2), data(0, b"in"), end(2, 2)]).unwrap();
    assert_eq!(fs::read(target.scratch.path().join("root/l")).unwrap(), b"in");
    target.apply(vec![link(b"l", outside), remove(b"l"), end(1, 0)]).unwrap();
    // What is beyond a link is not in the tree: there is nothing to remove.
    target.apply(vec![link(b"l", b"../outside"), remove(b"l/secret"), end(1, 0)]).unwrap();
    target.apply(vec![link(b"l", outside), hard_link(b"m", b"l"), file(b"m", 0), end(3, 0)]).unwrap();
    target.assert_outside_untouched();
}

#[test]
fn a_held_file_is_under_no_name_that_the_sender_knows_and_not_kept_without_one() {
    let target = Target::new();
    let root = target.scratch.path().join("root");
    target.apply(vec![file(b"f", 2), data(0, b"in"), end(1, 2)]).unwrap();
    let mut receiver = target.receiver();
    receiver.apply(hold(b"f", 7)).unwrap();
    let aside: Vec<_> = fs::read_dir(&root).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    assert!(aside.len() == 1 && aside[0].len() > 20, "{aside:?}");
    receiver.apply(directory(b"d")).unwrap();
    receiver.apply(begun_with(b"d/g", 7, 3)).unwrap();
    receiver.apply(data(2, b"!")).unwrap();
    receiver.apply(end(2, 1)).unwrap();
    receiver.finish().unwrap();
    assert_eq!(fs::read(root.join("d/g")).unwrap(), b"in!");
    target.apply(vec![hold(b"d/g", 0), end(0, 0)]).unwrap();
    assert_eq!(fs::read_dir(root.join("d")).unwrap().count(), 0);
    assert_eq!(fs::read_dir(&root).unwrap().count(), 1);
}

#[test]
fn a_fifo_in_the_place_of_a_file_is_not_waited_for() {
    let fifo = || Item::Entry(entry(b"p", Kind::Fifo));
    for use_it in [kept(b"p", 9), hold(b"p", 0)] {
        let error = Target::new().apply(vec![fifo(), use_it]).unwrap_err().to_string();
        assert!(error.contains("its content is to be used, and it is no file"), "{error}");
    }
}

#[test]
fn bytes_that_are_no_item_are_refused() {
    assert!(matches!(Item::decode(&vec![0; MAX_ITEM + 1]), Err(DecodeError::TooLong { .. })));
    assert!(matches!(Item::decode(&[]), Err(DecodeError::Unknown)));
    assert!(matches!(Item::decode(&[0xff; 9]), Err(DecodeError::Malformed(_))));
}

#[test]
fn the_largest_entry_fits_in_an_item() {
    let mut largest = entry(&[b'p'; 4095], Kind::Symlink);
    largest.link_target = vec![b't'; 4095];
    largest.hard_link_of = vec![b'h'; 4095];
    largest.xattrs = vec![Xattr { name: vec![b'n'; 255], value: vec![0; 256] }; (512 << 10) / 511];
    assert!(Item::Entry(largest).encode().len() <= MAX_ITEM);
    assert!(data(u64::MAX, &vec![0; MAX_DATA]).encode().len() <= MAX_ITEM);
}

fn any_path() -> impl Strategy<Value = Vec<u8>> {
    let component = prop_oneof![
        6 => prop::sample::select(vec!["a", "b", "c", "l"]).prop_map(|name| name.as_bytes().to_vec()),
        1 => prop::sample::select(vec!["..", ".", "", "outside", "secret"]).prop_map(|name| name.as_bytes().to_vec()),
        1 => prop::collection::vec(any::<u8>(), 0..4),
    ];
    prop::collection::vec(component, 1..4).prop_map(|parts| parts.join(&b'/'))
}

fn any_item() -> impl Strategy<Value = Item> {
    let entry = (any_path(), 0..9_i32, any_path(), any_path(), 0..20_u64, any::<bool>()).prop_map(
        |(path, kind, link_target, hard_link_of, size, odd)| {
            let kind = Kind::try_from(kind).unwrap();
            let mut entry = entry(&path, kind);
            if kind == Kind::Symlink || odd {
                entry.link_target = if odd { b"../outside".to_vec() } else { link_target };
            }
            if kind == Kind::HardLink {
                entry.hard_link_of = hard_link_of;
            }
            if kind == Kind::File {
                entry.size = size;
                entry.kept = size % 3 == 0;
                entry.held = (size % 3 == 1).then_some(u32::from(odd));
                if odd {
                    entry.link_target.clear();
                }
            }
            Item::Entry(entry)
        },
    );
    prop_oneof![
        8 => entry,
        2 => (0..20_u64, prop::collection::vec(any::<u8>(), 0..9)).prop_map(|(offset, bytes)| data(offset, &bytes)),
        2 => any_path().prop_map(|path| remove(&path)),
        2 => (any_path(), 0..3_u32).prop_map(|(path, number)| hold(&path, number)),
        1 => (0..20_u64, 0..9_u64).prop_map(|(offset, length)| hole(offset, length)),
        1 => (0..3_u64, 0..3_u64).prop_map(|(entries, bytes)| end(entries, bytes)),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 300, ..ProptestConfig::default() })]

    #[test]
    fn random_items_never_reach_outside(items in prop::collection::vec(any_item(), 1..30)) {
        let target = Target::new();
        let mut receiver = target.receiver();
        for item in items {
            // What is refused is passed over, to get further than a strict receiver would.
            let _ = receiver.apply(item);
        }
        let _ = receiver.finish();
        target.assert_outside_untouched();
    }

    #[test]
    fn random_bytes_decode_or_are_refused(bytes in prop::collection::vec(any::<u8>(), 0..300)) {
        let _ = Item::decode(&bytes);
    }

    #[test]
    fn an_item_with_flipped_bytes_never_reaches_outside(
        items in prop::collection::vec(any_item(), 1..10),
        flips in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..4),
    ) {
        let target = Target::new();
        let mut receiver = target.receiver();
        for item in items {
            let mut bytes = item.encode();
            for (place, value) in &flips {
                let at = place.index(bytes.len());
                bytes[at] ^= value;
            }
            if let Ok(item) = Item::decode(&bytes) {
                let _ = receiver.apply(item);
            }
        }
        target.assert_outside_untouched();
    }
}

#[test]
fn devices_that_no_container_is_given_are_refused_by_path() {
    let node = |kind: Kind, major, minor| {
        let entry = Entry { rdev_major: major, rdev_minor: minor, ..entry(b"node", kind) };
        Target::new().apply(vec![Item::Entry(entry), end(1, 0)])
    };
    // A whiteout, and what every container has.
    for minor in [0, 3] {
        node(Kind::CharacterDevice, minor.min(1), minor).unwrap();
    }
    for (kind, major, minor) in
        [(Kind::CharacterDevice, 1, 1), (Kind::BlockDevice, 1, 3), (Kind::BlockDevice, 8, 0)]
    {
        let error = node(kind, major, minor).unwrap_err().to_string();
        assert!(error.contains("node is refused: it is a device that no container is given"), "{error}");
    }
}
