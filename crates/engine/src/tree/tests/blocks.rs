//! Files of which the receiver has some: only the blocks that differ cross.

use std::collections::hash_map::DefaultHasher;
use std::hash::Hasher;

use proptest::prelude::*;

use super::*;

const BLOCK: usize = 4096;
/// Large enough to be known by its blocks, in several pieces, with a last block that is not whole.
const SIZE: usize = 2 * MAX_DATA + 3 * BLOCK + 5;

/// What happens to a tree.
pub(super) type Change = dyn Fn(&Path);

pub(super) fn hash(block: &[u8]) -> u128 {
    let mut hasher = DefaultHasher::new();
    hasher.write(block);
    hasher.finish().into()
}

pub(super) fn sender(pair: &Pair) -> TreeSender {
    TreeSender::new(&pair.source).by_blocks(BlockHash::new(hash))
}

/// Bytes of which no two blocks are equal.
pub(super) fn content(seed: u64, size: usize) -> Vec<u8> {
    let mut state = 2 * seed + 1;
    let mut next = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        (state >> 56) as u8
    };
    (0..size).map(|_| next()).collect()
}

fn write_at(path: &Path, offset: usize, bytes: &[u8]) {
    File::options().write(true).open(path).unwrap().write_all_at(bytes, offset as u64).unwrap();
}

fn set_len(path: &Path, size: usize) {
    File::options().write(true).open(path).unwrap().set_len(size as u64).unwrap();
}

fn punch(path: &Path, offset: usize, length: usize) {
    let file = File::options().write(true).open(path).unwrap();
    let how = rustix::fs::FallocateFlags::PUNCH_HOLE | rustix::fs::FallocateFlags::KEEP_SIZE;
    rustix::fs::fallocate(&file, how, offset as u64, length as u64).unwrap();
}

#[test]
fn only_blocks_that_differ_cross() {
    let cases: &[(&str, &Change, usize)] = &[
        ("one byte", &|root| write_at(&root.join("f"), 70_000, b"new"), BLOCK),
        ("over the edge of a piece", &|root| write_at(&root.join("f"), MAX_DATA - 1, b"ab"), 2 * BLOCK),
        ("the last bytes", &|root| write_at(&root.join("f"), SIZE - 1, b"!"), 5),
        ("the same bytes", &|root| write_at(&root.join("f"), 0, &content(1, 9000)), 0),
        ("its time", &|root| set_mtime(&root.join("f"), 5, 6), 0),
        (
            "its mode",
            &|root| fs::set_permissions(root.join("f"), fs::Permissions::from_mode(0o4711)).unwrap(),
            0,
        ),
        ("a longer end", &|root| write_at(&root.join("f"), SIZE, &[7; 10_000]), 10_005),
        ("a longer end without data", &|root| set_len(&root.join("f"), SIZE + 9 * BLOCK), BLOCK),
        ("an end far away", &|root| write_at(&root.join("f"), 1 << 30, b"far"), BLOCK + 3),
        ("a shorter end", &|root| set_len(&root.join("f"), MAX_DATA + 100), 100),
        (
            "shorter, and as long again",
            &|root| {
                set_len(&root.join("f"), MAX_DATA);
                set_len(&root.join("f"), SIZE);
            },
            0,
        ),
        ("a hole", &|root| punch(&root.join("f"), 3 * BLOCK, 2 * BLOCK), 0),
        ("a hole of several pieces", &|root| punch(&root.join("f"), BLOCK, 2 * MAX_DATA), 0),
        ("zeros in part of a block", &|root| punch(&root.join("f"), 3 * BLOCK + 9, 100), BLOCK),
        ("another name", &|root| fs::rename(root.join("f"), root.join("a")).unwrap(), 0),
        (
            "another name in a new directory",
            &|root| {
                fs::create_dir(root.join("new")).unwrap();
                fs::rename(root.join("f"), root.join("new/f")).unwrap();
                write_at(&root.join("new/f"), 5, b"and a change");
            },
            BLOCK,
        ),
        (
            "two names that were changed for each other",
            &|root| {
                fs::rename(root.join("f"), root.join("t")).unwrap();
                fs::rename(root.join("g"), root.join("f")).unwrap();
                fs::rename(root.join("t"), root.join("g")).unwrap();
            },
            0,
        ),
        ("its directory's other name", &|root| fs::rename(root.join("d"), root.join("another")).unwrap(), 0),
        (
            "a file in its place, of almost the same content",
            &|root| {
                let mut other = content(1, SIZE);
                other[5] ^= 1;
                fs::write(root.join("t"), other).unwrap();
                fs::rename(root.join("t"), root.join("f")).unwrap();
            },
            BLOCK,
        ),
        (
            "a log that was rotated",
            &|root| {
                fs::rename(root.join("f"), root.join("g")).unwrap();
                fs::write(root.join("f"), content(4, 100_000)).unwrap();
            },
            100_000,
        ),
        (
            "a file instead of its directory",
            &|root| {
                fs::rename(root.join("d/h"), root.join("t")).unwrap();
                fs::remove_dir(root.join("d")).unwrap();
                fs::rename(root.join("t"), root.join("d")).unwrap();
            },
            0,
        ),
        ("a second name", &|root| fs::hard_link(root.join("f"), root.join("second")).unwrap(), 0),
        (
            "a write by a second name that is gone",
            &|root| {
                fs::hard_link(root.join("f"), root.join("second")).unwrap();
                write_at(&root.join("second"), 0, b"x");
                fs::remove_file(root.join("second")).unwrap();
            },
            BLOCK,
        ),
        (
            "another first name",
            &|root| {
                fs::hard_link(root.join("f"), root.join("a")).unwrap();
                write_at(&root.join("f"), 0, b"x");
            },
            BLOCK,
        ),
        (
            "names that go from one file to another",
            &|root| {
                fs::hard_link(root.join("f"), root.join("f2")).unwrap();
                fs::hard_link(root.join("g"), root.join("g2")).unwrap();
                fs::rename(root.join("f2"), root.join("t")).unwrap();
                fs::rename(root.join("g2"), root.join("f2")).unwrap();
                fs::rename(root.join("t"), root.join("g2")).unwrap();
            },
            0,
        ),
        ("no content", &|root| set_len(&root.join("f"), 0), 0),
    ];
    for (name, change, most) in cases {
        let pair = Pair::new();
        fs::create_dir(pair.source.join("d")).unwrap();
        for (path, seed) in [("f", 1), ("g", 2), ("d/h", 3)] {
            fs::write(pair.source.join(path), content(seed, SIZE)).unwrap();
        }
        let mut sender = sender(&pair);
        pair.settle(&mut sender);
        change(&pair.source);
        let sent = pair.round(&mut sender, true);
        let differences = compare(&pair.source, &pair.copy).unwrap();
        assert!(differences.is_empty(), "{name}: {differences:?}");
        assert_eq!(sent.bytes, *most as u64, "{name}");
    }
}

#[test]
fn a_hole_stays_a_hole_and_becomes_one() {
    let pair = Pair::new();
    fs::write(pair.source.join("f"), content(1, 1 << 20)).unwrap();
    let mut sender = sender(&pair);
    pair.settle(&mut sender);
    punch(&pair.source.join("f"), 0, 1 << 19);
    pair.round(&mut sender, true);
    pair.assert_same();
    let blocks = fs::metadata(pair.copy.join("f")).unwrap().blocks();
    assert!(blocks * 512 < 600 << 10, "{blocks} blocks are left");
}

#[test]
fn a_file_that_is_sent_in_part_is_written_in_place() {
    let pair = Pair::new();
    fs::write(pair.source.join("f"), content(1, SIZE)).unwrap();
    let mut sender = sender(&pair);
    pair.settle(&mut sender);
    let inode = || fs::metadata(pair.copy.join("f")).unwrap().ino();
    let before = inode();
    write_at(&pair.source.join("f"), 1, b"x");
    pair.round(&mut sender, true);
    assert_eq!(inode(), before);
}

#[test]
fn it_is_known_how_much_is_missing_before_it_is_sent() {
    let pair = Pair::new();
    for (path, seed) in [("f", 1), ("g", 2)] {
        fs::write(pair.source.join(path), content(seed, SIZE)).unwrap();
    }
    let mut sender = sender(&pair);
    assert_eq!(sender.next_round(false).unwrap().bytes, 2 * SIZE as u64);
    pair.settle(&mut sender);
    let mut expect = |what: &str, bytes: usize, change: &Change| {
        change(&pair.source);
        let found = sender.next_round(false).unwrap().bytes;
        assert_eq!(found, bytes as u64, "{what}");
        assert_eq!(pair.round(&mut sender, false).bytes, found, "{what}");
    };
    expect("touched for the first time", BLOCK, &|root| write_at(&root.join("f"), 0, b"x"));
    expect("written anew", SIZE, &|root| write_at(&root.join("f"), 0, &content(7, SIZE)));
    expect("another name and a longer end", BLOCK, &|root| {
        fs::rename(root.join("g"), root.join("h")).unwrap();
        write_at(&root.join("h"), SIZE, &[1; BLOCK - 5]);
    });
    expect("a new one", 100_000, &|root| fs::write(root.join("new"), content(8, 100_000)).unwrap());
}

#[test]
fn a_file_that_shrinks_while_it_is_sent_is_repaired() {
    for is_known in [false, true] {
        let pair = Pair::new();
        let mut sender = sender(&pair);
        fs::write(pair.source.join("f"), content(1, SIZE)).unwrap();
        if is_known {
            pair.settle(&mut sender);
            fs::write(pair.source.join("f"), content(2, SIZE)).unwrap();
        }
        let round = sender.next_round(false).unwrap();
        let mut receiver = Receiver::new(&pair.copy, ROOMY).unwrap();
        let mut pieces = 0;
        sender
            .send(round, &mut |item: Item| {
                if matches!(&item, Item::Data(_)) {
                    // After the first piece was read: of the others all is gone that was found there.
                    set_len(&pair.source.join("f"), BLOCK + 1);
                    pieces += 1;
                }
                receiver.apply(item)
            })
            .unwrap();
        receiver.finish().unwrap();
        assert_eq!(pieces, 1);
        set_len(&pair.source.join("f"), SIZE);
        pair.round(&mut sender, true);
        pair.assert_same();
    }
}

#[test]
fn a_large_file_has_large_blocks() {
    let pair = Pair::new();
    let file = pair.source.join("f");
    for place in 0..20 {
        fs::File::options().create(true).truncate(false).write(true).open(&file).unwrap();
        write_at(&file, place << 30, &content(place as u64, 10_000));
    }
    let mut sender = sender(&pair);
    pair.settle(&mut sender);
    // 19 GiB have no more than 256 Ki blocks: each has 128 KiB.
    write_at(&file, (3 << 30) + 5, b"x");
    write_at(&file, (7 << 30) + (100 << 10), b"y");
    let sent = pair.round(&mut sender, true);
    assert!((12_000..=(128 << 10)).contains(&sent.bytes), "{} bytes", sent.bytes);
    let mut bytes = [0; 10_000];
    File::open(pair.copy.join("f")).unwrap().read_exact_at(&mut bytes, 3 << 30).unwrap();
    assert!(bytes[5] == b'x' && bytes[6..] == content(3, 10_000)[6..]);
    let length = fs::metadata(&file).unwrap().len();
    assert_eq!(fs::metadata(pair.copy.join("f")).unwrap().len(), length);
    let blocks = fs::metadata(pair.copy.join("f")).unwrap().blocks();
    assert!(blocks * 512 < 1 << 20, "holes were filled: {blocks} blocks");
}

#[test]
fn of_a_file_that_is_held_and_has_no_name_in_the_end_nothing_is_left() {
    let pair = Pair::new();
    fs::write(pair.source.join("f"), content(1, SIZE)).unwrap();
    let mut sender = sender(&pair);
    pair.settle(&mut sender);
    fs::rename(pair.source.join("f"), pair.source.join("g")).unwrap();
    let round = sender.next_round(false).unwrap();
    let mut receiver = Receiver::new(&pair.copy, ROOMY).unwrap();
    sender
        .send(round, &mut |item: Item| {
            if matches!(&item, Item::Hold(_)) {
                fs::remove_file(pair.source.join("g")).unwrap();
            }
            receiver.apply(item)
        })
        .unwrap();
    receiver.finish().unwrap();
    assert_eq!(fs::read_dir(&pair.copy).unwrap().count(), 0);
    pair.round(&mut sender, true);
    pair.assert_same();
}

/// One change of one of a few files.
#[derive(Debug, Clone)]
enum Step {
    Write(u8, usize, usize),
    Resize(u8, usize),
    Punch(u8, usize, usize),
    Rename(u8, u8),
    Link(u8, u8),
    Remove(u8),
    /// The directory gets its other name.
    Turn,
    Round,
    /// Rounds until nothing is to be sent.
    Settle,
}

fn step() -> impl Strategy<Value = Step> {
    let (name, at) = (0..4_u8, 0..SIZE);
    prop_oneof![
        4 => (name.clone(), at.clone(), 1..20_000_usize).prop_map(|(n, at, length)| Step::Write(n, at, length)),
        2 => (name.clone(), 0..2 * SIZE).prop_map(|(n, size)| Step::Resize(n, size)),
        2 => (name.clone(), at, 1..SIZE).prop_map(|(n, at, length)| Step::Punch(n, at, length)),
        2 => (name.clone(), name.clone()).prop_map(|(from, to)| Step::Rename(from, to)),
        1 => (name.clone(), name.clone()).prop_map(|(from, to)| Step::Link(from, to)),
        1 => name.prop_map(Step::Remove),
        1 => Just(Step::Turn),
        3 => Just(Step::Round),
        1 => Just(Step::Settle),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 48, ..ProptestConfig::default() })]
    #[test]
    fn whatever_happens_to_files_the_copy_follows(steps in prop::collection::vec(step(), 1..24)) {
        let pair = Pair::new();
        let paths = ["a", "b", "d/c", "d/d"].map(|name| pair.source.join(name));
        let path = |number: &u8| &paths[usize::from(*number)];
        fs::create_dir(pair.source.join("d")).unwrap();
        fs::write(path(&0), content(9, SIZE)).unwrap();
        fs::write(path(&2), content(8, SIZE)).unwrap();
        let mut sender = sender(&pair);
        pair.round(&mut sender, false);
        for (number, step) in steps.iter().enumerate() {
            // What is not there stays away.
            match step {
                Step::Write(name, at, length) if path(name).parent().unwrap().exists() => {
                    let file = File::options().create(true).truncate(false).write(true).open(path(name)).unwrap();
                    file.write_all_at(&content(number as u64, *length), *at as u64).unwrap();
                }
                Step::Resize(name, size) if path(name).exists() => set_len(path(name), *size),
                Step::Punch(name, at, length) if path(name).exists() => punch(path(name), *at, *length),
                Step::Rename(from, to) if path(from).exists() && path(to).parent().unwrap().exists() => fs::rename(path(from), path(to)).unwrap(),
                Step::Link(from, to)
                    if path(from).exists() && !path(to).exists() && path(to).parent().unwrap().exists() =>
                {
                    fs::hard_link(path(from), path(to)).unwrap();
                }
                Step::Remove(name) if path(name).exists() => fs::remove_file(path(name)).unwrap(),
                Step::Turn => {
                    let names = [pair.source.join("d"), pair.source.join("e")];
                    let (from, to) = if names[0].exists() { (0, 1) } else { (1, 0) };
                    fs::rename(&names[from], &names[to]).unwrap();
                }
                Step::Round => drop(pair.round(&mut sender, false)),
                Step::Settle => pair.settle(&mut sender),
                _ => {}
            }
        }
        pair.round(&mut sender, true);
        let differences = compare(&pair.source, &pair.copy).unwrap();
        prop_assert!(differences.is_empty(), "{:?}", differences);
    }
}
