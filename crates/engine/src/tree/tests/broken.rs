//! A round that breaks off, wherever it does, leaves nothing in a receiver that lasts which the next one does not put right.

use super::*;

/// Large enough to be sent by blocks.
const LARGE: usize = 200_000;

fn write(path: &Path, at: u64, bytes: &[u8]) {
    File::options().write(true).open(path).unwrap().write_all_at(bytes, at).unwrap();
}

fn begin(root: &Path) {
    for directory in ["deep/er", "away/inner", "gone/inner", "current"] {
        fs::create_dir_all(root.join(directory)).unwrap();
    }
    for (number, name) in ["large", "log", "other", "deep/er/file", "away/inner/kept"].iter().enumerate() {
        let byte = u8::try_from(number).unwrap() + 1;
        fs::write(root.join(name), vec![byte; LARGE]).unwrap();
    }
    for name in ["small", "gone/inner/file", "gone-with-it", "was a directory's", "current/file"] {
        fs::write(root.join(name), name).unwrap();
    }
    fs::hard_link(root.join("other"), root.join("deep/other")).unwrap();
}

/// What the round brings that breaks off.
fn change(root: &Path) {
    write(&root.join("large"), 70_000, b"changed");
    fs::rename(root.join("log"), root.join("log.1")).unwrap();
    fs::write(root.join("log"), vec![9; LARGE]).unwrap();
    fs::rename(root.join("away"), root.join("elsewhere")).unwrap();
    fs::remove_dir_all(root.join("gone")).unwrap();
    fs::remove_file(root.join("was a directory's")).unwrap();
    fs::create_dir(root.join("was a directory's")).unwrap();
    fs::remove_dir_all(root.join("current")).unwrap();
    std::os::unix::fs::symlink("deep", root.join("current")).unwrap();
    fs::write(root.join("new"), vec![7; LARGE]).unwrap();
    write(&root.join("other"), 3, b"both names");
    File::options().write(true).open(root.join("deep/er/file")).unwrap().set_len(90_000).unwrap();
}

/// What happens before the next one: much of it is as it was.
fn change_back(root: &Path) {
    fs::rename(root.join("elsewhere"), root.join("away")).unwrap();
    fs::rename(root.join("log.1"), root.join("log")).unwrap();
    fs::remove_file(root.join("new")).unwrap();
    fs::remove_dir(root.join("was a directory's")).unwrap();
    fs::create_dir_all(root.join("gone/inner")).unwrap();
}

#[test]
fn the_next_round_puts_right_what_one_left_that_broke_off() {
    let mut items = 0;
    loop {
        let pair = Pair::new();
        begin(&pair.source);
        let mut sender = blocks::sender(&pair).lasting(true);
        pair.settle(&mut sender);
        sender.settle();
        change(&pair.source);
        let round = sender.next_round(false).unwrap();
        let mut receiver = Receiver::new(&pair.copy, ROOMY).unwrap();
        let mut left = items;
        let sent = sender.send(round, &mut |item: Item| {
            left -= 1;
            match left {
                0.. => receiver.apply(item).map_err(|error| error.to_string()),
                _ => Err("cut".to_owned()),
            }
        });
        drop(receiver);
        // Also where all was sent, and only the answer is missing.
        let complete = sent.is_ok();
        let mut sender = sender.doubted().unwrap();
        if items % 2 == 0 {
            change_back(&pair.source);
        }
        let bytes = pair.round(&mut sender, true).bytes;
        pair.assert_same();
        let untouched = 2 * LARGE as u64;
        let all = fs::read_dir(&pair.source).unwrap().count() as u64 * LARGE as u64;
        assert!(bytes + untouched < all, "{items}: {bytes} of {all}");
        if complete {
            return;
        }
        items += 1;
    }
}

#[test]
fn a_first_round_that_broke_off_left_nothing_of_use() {
    let pair = Pair::new();
    begin(&pair.source);
    let mut sender = blocks::sender(&pair).lasting(true);
    let round = sender.next_round(false).unwrap();
    assert!(sender.send(round, &mut |_| Err("cut".to_owned())).is_err());
    assert!(sender.doubted().is_none());
}

#[test]
fn a_round_that_broke_off_with_a_held_file_leaves_the_root_its_time() {
    let pair = Pair::new();
    let beside = pair.source.join("beside");
    let own = pair.source.join("own");
    for root in [&own, &beside] {
        fs::create_dir_all(root.join("deep/er")).unwrap();
        fs::write(root.join("deep/er/log"), vec![3; LARGE]).unwrap();
    }
    fs::create_dir(own.join("volumes")).unwrap();
    let mut sender = TreeSender::new(&own).put("volumes/data", &beside);
    sender = sender.by_blocks(BlockHash::new(blocks::hash)).lasting(true);
    pair.settle(&mut sender);
    sender.settle();
    // Only a directory far below has changed, in the other part.
    fs::rename(beside.join("deep/er/log"), beside.join("deep/er/log.1")).unwrap();
    let round = sender.next_round(false).unwrap();
    let mut receiver = Receiver::new(&pair.copy, ROOMY).unwrap();
    let cut = sender.send(round, &mut |item: Item| match item {
        Item::Hold(_) => receiver.apply(item).map_err(|error| error.to_string()),
        _ => Err("cut".to_owned()),
    });
    assert!(cut.is_err());
    drop(receiver);
    let time = |root: &Path| fs::metadata(root).unwrap().modified().unwrap();
    assert_ne!(time(&own), time(&pair.copy), "what was held was in the root");
    pair.round(&mut sender.doubted().unwrap(), true);
    assert_eq!(time(&own), time(&pair.copy));
    assert!(compare(&beside, &pair.copy.join("volumes/data")).unwrap().is_empty());
}
