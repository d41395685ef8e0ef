//! Later rounds: whatever happens to a tree between and during rounds, the copy follows.

use std::os::fd::AsRawFd;
use std::sync::atomic::{AtomicBool, Ordering};

use proptest::prelude::*;

use super::*;

/// Files whole, and by their blocks.
const WAYS: [fn(&Pair) -> TreeSender; 2] = [|pair| TreeSender::new(&pair.source), blocks::sender];

/// A change to a tree below the path.
type Change = dyn Fn(&Path);

#[test]
fn a_round_after_no_change_sends_nothing_and_one_after_a_write_only_that_file() {
    let pair = Pair::new();
    fill(&pair.source);
    let mut sender = TreeSender::new(&pair.source);
    pair.settle(&mut sender);
    pair.assert_same();
    let quiet = pair.round(&mut sender, true);
    assert_eq!(quiet, Sent::default());
    File::options()
        .write(true)
        .open(pair.source.join("large"))
        .unwrap()
        .write_all_at(b"new", 70_000)
        .unwrap();
    let one = pair.round(&mut sender, true);
    pair.assert_same();
    assert_eq!((one.entries, one.removed, one.bytes), (1, 0, 3 * MAX_DATA as u64 + 17));
}

#[test]
fn each_kind_of_change_reaches_the_copy() {
    for sender in WAYS {
        let changes: &[(&str, &Change)] = &[
            ("append", &|root| {
                File::options().append(true).open(root.join("plain")).unwrap().write_all(b"more").unwrap()
            }),
            ("truncate", &|root| {
                File::options().write(true).open(root.join("large")).unwrap().set_len(9).unwrap()
            }),
            ("punch a hole", &|root| fs::write(root.join("sparse"), b"full").unwrap()),
            ("add a file", &|root| fs::write(root.join("directory/new"), b"new").unwrap()),
            ("add a directory", &|root| fs::create_dir_all(root.join("x/y/z")).unwrap()),
            ("delete a file", &|root| fs::remove_file(root.join("empty")).unwrap()),
            ("delete a tree", &|root| fs::remove_dir_all(root.join("x")).unwrap()),
            ("rename a file", &|root| fs::rename(root.join("large"), root.join("directory/large")).unwrap()),
            ("rename a directory", &|root| fs::rename(root.join("directory"), root.join("renamed")).unwrap()),
            ("rename over", &|root| fs::rename(root.join("sparse"), root.join("renamed/new")).unwrap()),
            ("change a mode", &|root| {
                fs::set_permissions(root.join("renamed"), fs::Permissions::from_mode(0o2700)).unwrap();
            }),
            ("change an owner", &|root| {
                std::os::unix::fs::chown(root.join("renamed/large"), Some(9), None).unwrap()
            }),
            ("set an attribute", &|root| set_xattr(&root.join("renamed"), "user.new", b"")),
            ("remove an attribute", &|root| {
                rustix::fs::removexattr(root.join("renamed"), "trusted.overlay.opaque").unwrap();
            }),
            ("remove an access list", &|root| {
                rustix::fs::removexattr(root.join("renamed/inner"), "system.posix_acl_default").unwrap();
            }),
            ("set a time only", &|root| set_mtime(&root.join("renamed/large"), 3, 4)),
            ("make a hard link", &|root| {
                fs::hard_link(root.join("renamed/large"), root.join("linked")).unwrap()
            }),
            ("write through one name", &|root| {
                File::options().append(true).open(root.join("linked")).unwrap().write_all(b"!").unwrap();
            }),
            ("unmake a hard link", &|root| {
                fs::copy(root.join("linked"), root.join("unlinked")).unwrap();
                fs::rename(root.join("unlinked"), root.join("linked")).unwrap();
            }),
            ("drop the first name", &|root| fs::remove_file(root.join("a-first-name")).unwrap()),
            ("swap two links' inodes", &|root| {
                fs::rename(root.join("link-again"), root.join("t")).unwrap();
                fs::rename(root.join("plain"), root.join("link-again")).unwrap();
                fs::rename(root.join("t"), root.join("plain")).unwrap();
            }),
            ("a file becomes a directory", &|root| {
                fs::remove_file(root.join("linked")).unwrap();
                fs::create_dir(root.join("linked")).unwrap();
                fs::write(root.join("linked/in"), b"in").unwrap();
            }),
            ("a directory becomes a link", &|root| {
                fs::remove_dir_all(root.join("linked")).unwrap();
                symlink("renamed", root.join("linked")).unwrap();
            }),
            ("a link becomes a directory", &|root| {
                fs::remove_file(root.join("linked")).unwrap();
                fs::create_dir(root.join("linked")).unwrap();
            }),
            ("a directory becomes a whiteout", &|root| {
                fs::remove_dir(root.join("linked")).unwrap();
                node(&root.join("linked"), FileType::CharacterDevice, (0, 0));
            }),
            ("a whiteout becomes a fifo", &|root| {
                fs::remove_file(root.join("linked")).unwrap();
                node(&root.join("linked"), FileType::Fifo, (0, 0));
            }),
            ("a directory is replaced by another", &|root| {
                fs::rename(root.join("renamed/inner"), root.join("aside")).unwrap();
                fs::create_dir(root.join("renamed/inner")).unwrap();
                fs::write(root.join("renamed/inner/other"), b"other").unwrap();
            }),
            ("the root changes", &|root| {
                fs::set_permissions(root, fs::Permissions::from_mode(0o750)).unwrap()
            }),
            ("nothing is left", &|root| {
                for entry in fs::read_dir(root).unwrap() {
                    let path = entry.unwrap().path();
                    if path.symlink_metadata().unwrap().is_dir() {
                        fs::remove_dir_all(path).unwrap();
                    } else {
                        fs::remove_file(path).unwrap();
                    }
                }
            }),
        ];
        let pair = Pair::new();
        fill(&pair.source);
        let mut sender = sender(&pair);
        pair.round(&mut sender, false);
        for (name, change) in changes {
            change(&pair.source);
            pair.round(&mut sender, false);
            let differences = compare(&pair.source, &pair.copy).unwrap();
            assert!(differences.is_empty(), "after {name}: {differences:?}");
        }
    }
}

/// Sends a round and calls `meddle` right before the item of `path` is handed on.
fn round_with(pair: &Pair, sender: &mut TreeSender, path: &[u8], meddle: &Change) -> Sent {
    let round = sender.next_round(false).unwrap();
    let mut receiver = Receiver::new(&pair.copy, ROOMY).unwrap();
    let sent = sender.send(round, &mut |item: Item| {
        if matches!(&item, Item::Entry(entry) if entry.path == path) {
            meddle(&pair.source);
        }
        receiver.apply(item)
    });
    receiver.finish().unwrap();
    sent.unwrap()
}

#[test]
fn a_file_that_changes_shrinks_or_vanishes_while_it_is_sent_is_repaired_by_the_next_round() {
    for sender in WAYS {
        let meddlers: &[(&str, &Change)] = &[
            ("grows", &|root| {
                File::options().append(true).open(root.join("b")).unwrap().write_all(&[1; 99]).unwrap()
            }),
            ("shrinks", &|root| {
                File::options().write(true).open(root.join("b")).unwrap().set_len(1).unwrap()
            }),
            ("vanishes", &|root| fs::remove_file(root.join("b")).unwrap()),
            ("is another", &|root| {
                fs::remove_file(root.join("b")).unwrap();
                fs::write(root.join("b"), b"another").unwrap();
            }),
            ("a later one vanishes", &|root| fs::remove_file(root.join("c/d")).unwrap()),
            ("a later directory vanishes", &|root| fs::remove_dir_all(root.join("c")).unwrap()),
            ("a later directory becomes a file", &|root| {
                fs::remove_dir_all(root.join("c")).unwrap();
                fs::write(root.join("c"), b"file").unwrap();
            }),
            ("a later file becomes a directory", &|root| {
                fs::remove_file(root.join("c/d")).unwrap();
                fs::create_dir_all(root.join("c/d/e")).unwrap();
            }),
            ("a later directory becomes a link", &|root| {
                fs::rename(root.join("c"), root.join("c2")).unwrap();
                symlink("c2", root.join("c")).unwrap();
            }),
            ("the second name of it goes", &|root| {
                fs::hard_link(root.join("b"), root.join("c/b")).unwrap();
                fs::remove_file(root.join("b")).unwrap();
            }),
        ];
        for (name, meddler) in meddlers {
            let pair = Pair::new();
            fs::write(pair.source.join("a"), b"a").unwrap();
            fs::write(pair.source.join("b"), vec![3; 2 * MAX_DATA]).unwrap();
            fs::create_dir(pair.source.join("c")).unwrap();
            fs::write(pair.source.join("c/d"), b"d").unwrap();
            let mut sender = sender(&pair);
            round_with(&pair, &mut sender, b"b", meddler);
            pair.round(&mut sender, true);
            let differences = compare(&pair.source, &pair.copy).unwrap();
            assert!(differences.is_empty(), "when it {name}: {differences:?}");
        }
    }
}

#[test]
fn a_directory_renamed_away_and_back_while_it_is_sent_arrives() {
    for sender in WAYS {
        let pair = Pair::new();
        fs::write(pair.source.join("a"), b"a").unwrap();
        fs::create_dir(pair.source.join("d")).unwrap();
        fs::write(pair.source.join("d/file"), b"right").unwrap();
        fs::write(pair.source.join("d/second"), b"right").unwrap();
        fs::hard_link(pair.source.join("d/second"), pair.source.join("other-name")).unwrap();
        // Let the clock pass, so that times alone do not tell of the files again.
        let settled = || Snapshot::scan(&pair.source).unwrap();
        while !settled().changes_since(&settled()).is_empty() {}
        let mut sender = sender(&pair);
        let sent = round_with(&pair, &mut sender, b"a", &|root| {
            fs::rename(root.join("d"), root.join("aside")).unwrap();
            fs::create_dir(root.join("d")).unwrap();
            fs::write(root.join("d/file"), b"wrong").unwrap();
        });
        assert!(
            sent.unsettled.contains(&b"d/file".to_vec()) && sent.unsettled.contains(&b"d/second".to_vec())
        );
        fs::remove_dir_all(pair.source.join("d")).unwrap();
        fs::rename(pair.source.join("aside"), pair.source.join("d")).unwrap();
        pair.round(&mut sender, true);
        pair.assert_same();
    }
}

#[test]
fn a_write_through_a_shared_mapping_after_a_round_is_seen_by_the_next() {
    for sender in WAYS {
        let pair = Pair::new();
        fs::write(pair.source.join("mapped"), vec![0; 8192]).unwrap();
        let file = File::options().read(true).write(true).open(pair.source.join("mapped")).unwrap();
        // SAFETY: a new shared mapping of two pages of a file of that size; unmapped below.
        let memory = unsafe {
            let protection = libc::PROT_READ | libc::PROT_WRITE;
            libc::mmap(std::ptr::null_mut(), 8192, protection, libc::MAP_SHARED, file.as_raw_fd(), 0)
        };
        assert_ne!(memory, libc::MAP_FAILED);
        let write = |value: u8| {
            // SAFETY: within the mapping above, which is writable and not shared with other threads.
            unsafe { memory.cast::<u8>().add(5000).write_volatile(value) }
        };
        let mut sender = sender(&pair);
        for value in 1..=20 {
            write(value);
            pair.settle(&mut sender);
            write(value + 100);
            pair.round(&mut sender, true);
            pair.assert_same();
        }
        // SAFETY: the mapping made above, which nothing uses any more.
        assert_eq!(unsafe { libc::munmap(memory, 8192) }, 0);
    }
}

#[test]
fn a_tree_that_is_written_all_the_time_arrives_whole_once_it_is_frozen() {
    for sender in WAYS {
        let pair = Pair::new();
        fill(&pair.source);
        let stop = AtomicBool::new(false);
        let mut sender = sender(&pair);
        std::thread::scope(|scope| {
            let writer = scope.spawn(|| {
                let mut steps = 0_u32;
                while !stop.load(Ordering::Relaxed) {
                    churn(&pair.source, steps);
                    steps += 1;
                }
                steps
            });
            for _ in 0..6 {
                pair.round(&mut sender, false);
            }
            stop.store(true, Ordering::Relaxed);
            assert!(writer.join().unwrap() > 6, "the writer did not get to write");
        });
        pair.round(&mut sender, true);
        pair.assert_same();
    }
}

/// One step of a busy program; what it wants may not be there.
fn churn(root: &Path, step: u32) {
    let name = |number: u32| root.join(format!("busy-{}", number % 7));
    let ignore = |_: std::io::Result<()>| ();
    match step % 11 {
        0 => ignore(fs::create_dir(name(step))),
        1 => ignore(fs::write(name(step), vec![1; (step as usize * 97) % 300_000])),
        2 => ignore(fs::rename(name(step), name(step + 3))),
        3 => ignore(fs::remove_file(name(step))),
        4 => ignore(fs::write(name(step).join("inner"), b"inner")),
        5 => ignore(fs::hard_link(name(step), name(step + 1))),
        6 => ignore(fs::remove_dir_all(name(step))),
        7 => ignore(symlink("nowhere", name(step))),
        8 => ignore(fs::rename(root.join("directory"), root.join("elsewhere"))),
        9 => ignore(fs::rename(root.join("elsewhere"), root.join("directory"))),
        _ => ignore(File::options().write(true).open(root.join("large")).and_then(|file| {
            file.set_len(u64::from(step % 5) * 100_000)?;
            file.write_all_at(&[2; 5000], 50_000)
        })),
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 40, ..ProptestConfig::default() })]

    #[test]
    fn random_changes_between_rounds_reach_the_copy(rounds in prop::collection::vec(prop::collection::vec(any::<u32>(), 1..25), 1..4)) {
for sender in WAYS {
        let pair = Pair::new();
        fill(&pair.source);
        let mut sender = sender(&pair);
        for steps in &rounds {
            steps.iter().for_each(|step| churn(&pair.source, *step % 1_000_000));
            pair.round(&mut sender, true);
            pair.assert_same();
        }
}
    }
}

#[test]
fn a_container_filesystem_looks_the_same_over_a_carried_upper_directory() {
    let pair = Pair::new();
    let scratch = scratch();
    let path = |name: &str| scratch.path().join(name);
    for part in ["layer/kept", "layer/gone/inner", "layer/replaced"] {
        fs::create_dir_all(path(part)).unwrap();
    }
    fs::write(path("layer/kept/file"), b"below").unwrap();
    fs::write(path("layer/gone/inner/file"), b"below").unwrap();
    fs::write(path("layer/replaced/file"), b"below").unwrap();
    let overlay = |upper: &Path, name: &str| crate::rootfs::Overlay {
        lower: vec![path("layer")],
        upper: upper.to_path_buf(),
        work: upper.with_extension("work"),
        target: path(name),
    };
    let source = overlay(&pair.source, "at-source");
    source.mount().unwrap();
    let mut sender = TreeSender::new(&pair.source);
    pair.round(&mut sender, false);
    fs::remove_dir_all(path("at-source/gone")).unwrap();
    fs::remove_dir_all(path("at-source/replaced")).unwrap();
    fs::create_dir(path("at-source/replaced")).unwrap();
    fs::write(path("at-source/replaced/other"), b"above").unwrap();
    fs::write(path("at-source/kept/file"), b"above").unwrap();
    fs::set_permissions(path("at-source/kept"), fs::Permissions::from_mode(0o700)).unwrap();
    pair.round(&mut sender, true);
    pair.assert_same();
    let destination = overlay(&pair.copy, "at-destination");
    destination.mount().unwrap();
    let differences = compare(&path("at-source"), &path("at-destination"));
    let names = fs::read_dir(path("at-destination/replaced")).unwrap().count();
    let gone = path("at-destination/gone").exists();
    source.unmount().unwrap();
    destination.unmount().unwrap();
    assert_eq!(differences.unwrap(), []);
    assert_eq!((names, gone), (1, false));
}

/// The number of cachestat(2), the same on all architectures.
const SYS_CACHESTAT: libc::c_long = 451;

/// How many pages of a file its disk does not have yet (cachestat(2)).
fn dirty_pages(path: &Path) -> u64 {
    let file = File::open(path).unwrap();
    let (range, mut answer) = ([0_u64, 0], [0_u64; 5]);
    // SAFETY: a range that the kernel reads, and five counters that it writes.
    let result = unsafe {
        libc::syscall(
            SYS_CACHESTAT,
            std::os::fd::AsRawFd::as_raw_fd(&file),
            range.as_ptr(),
            answer.as_mut_ptr(),
            0,
        )
    };
    assert_eq!(result, 0, "{}", std::io::Error::last_os_error());
    let [_, dirty, under_way, _, _] = answer;
    dirty + under_way
}

#[test]
fn a_round_is_brought_to_the_disk_without_what_others_have_written() {
    let pair = Pair::new();
    let others = pair.copy.with_file_name("others");
    // Others, who sync their filesystem at that moment, may do it for us.
    let alone = (0..20).any(|number: u32| {
        fs::create_dir_all(pair.source.join("deep/er")).unwrap();
        fs::write(pair.source.join("deep/er/file"), format!("{number}").repeat(1 << 16)).unwrap();
        let mut sender = TreeSender::new(&pair.source);
        let round = sender.next_round(true).unwrap();
        let mut receiver = Receiver::new(&pair.copy, ROOMY).unwrap();
        sender.send(round, &mut |item: Item| receiver.apply(item)).unwrap();
        fs::write(&others, format!("{number}").repeat(1 << 16)).unwrap();
        receiver.finish().unwrap().sync().unwrap();
        assert_eq!(dirty_pages(&pair.copy.join("deep/er/file")), 0);
        dirty_pages(&others) > 0
    });
    assert!(alone, "what others wrote was written each time, too");
}

#[test]
fn what_took_the_place_of_a_file_in_the_same_round_is_not_opened() {
    let pair = Pair::new();
    let mut receiver = Receiver::new(&pair.copy, ROOMY).unwrap();
    let entry =
        |kind: Kind| Entry { path: b"name".to_vec(), kind: kind.into(), mode: 0o600, ..Entry::default() };
    for kind in [Kind::File, Kind::Fifo] {
        receiver.apply(Item::Entry(entry(kind))).unwrap();
    }
    receiver.apply(Item::End(End { entries: 2, bytes: 0 })).unwrap();
    // To open the FIFO would wait for a writer.
    receiver.finish().unwrap().sync().unwrap();
}
