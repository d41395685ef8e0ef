//! Archives whole, cut off, changed and hostile.
#![allow(clippy::unwrap_used)]

use proptest::prelude::*;

use super::super::pack::{Compression, Packer};
use super::*;

fn archive(compression: Compression) -> Vec<u8> {
    let mut packer = Packer::new(Vec::new(), compression).unwrap();
    for (name, content) in [
        (OWN, &b"{}"[..]),
        (CONFIG, b"{\"id\":\"c\"}"),
        (SPEC, b"{\"ociVersion\":\"1\"}"),
        ("checkpoint/inventory.img", b"inventory"),
        ("checkpoint/pages-1.img", &[7; 5000]),
        ("volumes/data.tar", b"volume"),
    ] {
        packer.content(name, content).unwrap();
    }
    packer.finish().unwrap()
}

fn unpacked(bytes: &[u8]) -> Result<(Unpacked, tempfile::TempDir), ArchiveError> {
    let directory = tempfile::tempdir().unwrap();
    let unpacked = unpack(io::Cursor::new(bytes.to_vec()), directory.path())?;
    Ok((unpacked, directory))
}

/// A plain archive of these members, as Podman's are: with what one needs.
fn plain(more: impl FnOnce(&mut tar::Builder<Vec<u8>>)) -> Vec<u8> {
    let mut archive = tar::Builder::new(Vec::new());
    for name in [CONFIG, SPEC, "checkpoint/inventory.img"] {
        add(&mut archive, name, tar::EntryType::Regular, b"{}");
    }
    more(&mut archive);
    archive.into_inner().unwrap()
}

fn add(archive: &mut tar::Builder<Vec<u8>>, name: &str, kind: tar::EntryType, content: &[u8]) {
    let mut header = tar::Header::new_gnu();
    header.set_size(content.len() as u64);
    header.set_entry_type(kind);
    // The library refuses what a hostile one has.
    header.as_old_mut().name[..name.len()].copy_from_slice(name.as_bytes());
    header.set_cksum();
    archive.append(&header, content).unwrap();
}

#[test]
fn what_was_packed_is_unpacked_whatever_it_is_compressed_with() {
    for compression in [Compression::Zstd, Compression::Gzip, Compression::None] {
        let (unpacked, _directory) = unpacked(&archive(compression)).unwrap();
        assert!(unpacked.is_own());
        assert_eq!(unpacked.document(CONFIG).unwrap(), b"{\"id\":\"c\"}");
        assert_eq!(std::fs::read(unpacked.images().join("pages-1.img")).unwrap(), [7; 5000]);
        assert_eq!(std::fs::read(unpacked.path("volumes/data.tar")).unwrap(), b"volume");
    }
}

#[test]
fn sha256sum_can_check_it() {
    let directory = tempfile::tempdir().unwrap();
    tar::Archive::new(&archive(Compression::None)[..]).unpack(directory.path()).unwrap();
    let checked = std::process::Command::new("sha256sum")
        .args(["--check", "--strict", SUMS])
        .current_dir(directory.path())
        .output()
        .unwrap();
    assert!(checked.status.success(), "{}", String::from_utf8_lossy(&checked.stdout));
}

#[test]
fn one_that_is_cut_off_is_found_out_wherever_that_is() {
    for compression in [Compression::Zstd, Compression::Gzip, Compression::None] {
        let whole = archive(compression);
        // Behind the digests of an archive that is not compressed there are zeros alone.
        let end = if compression == Compression::None { whole.len() - 1024 } else { whole.len() };
        for length in (0..end).step_by(97).chain([end - 1]) {
            assert!(unpacked(&whole[..length]).is_err(), "{compression:?}, {length} of {}", whole.len());
        }
    }
}

#[test]
fn one_of_podmans_that_is_cut_off_between_members_is_found_out() {
    let whole = plain(|archive| add(archive, DELETED, tar::EntryType::Regular, b"[]"));
    unpacked(&whole).unwrap();
    let error = unpacked(&whole[..whole.len() - 1024 - 1024]).unwrap_err().to_string();
    assert!(error.contains("cut off"), "{error}");
}

/// What becomes of a member of this name and content.
type Change<'a> = &'a dyn Fn(&str, Vec<u8>) -> Option<Vec<u8>>;

#[test]
fn a_member_that_was_changed_added_or_removed_is_named() {
    let repacked = |change: Change<'_>, added: Option<&str>| {
        let mut copy = tar::Builder::new(Vec::new());
        let whole = archive(Compression::None);
        for entry in tar::Archive::new(&whole[..]).entries().unwrap() {
            let mut entry = entry.unwrap();
            let name = entry.path().unwrap().to_str().unwrap().to_owned();
            let mut content = Vec::new();
            entry.read_to_end(&mut content).unwrap();
            if let Some(content) = change(&name, content) {
                add(&mut copy, &name, tar::EntryType::Regular, &content);
            }
        }
        if let Some(name) = added {
            add(&mut copy, name, tar::EntryType::Regular, b"x");
        }
        unpacked(&copy.into_inner().unwrap()).map(drop)
    };
    let same = |_: &str, content| Some(content);
    repacked(&same, None).unwrap();
    let pages = "checkpoint/pages-1.img";
    let flipped = |name: &str, mut content: Vec<u8>| {
        if name == pages {
            content[4000] ^= 1;
        }
        Some(content)
    };
    let error = repacked(&flipped, None).unwrap_err().to_string();
    assert!(error.contains("the checksum of checkpoint/pages-1.img is wrong"), "{error}");
    let without = |name: &str, content| (name != pages).then_some(content);
    let error = repacked(&without, None).unwrap_err().to_string();
    assert!(error.contains("checkpoint/pages-1.img is missing"), "{error}");
    let error = repacked(&same, Some(DELETED)).unwrap_err().to_string();
    assert!(error.contains("deleted.files has no checksum"), "{error}");
    let unsigned = |name: &str, content| (name != SUMS).then_some(content);
    let error = repacked(&unsigned, None).unwrap_err().to_string();
    assert!(error.contains("it has no godwit.sha256"), "{error}");
}

#[test]
fn what_leads_elsewhere_or_is_no_file_is_refused() {
    use tar::EntryType::{Block, Char, Fifo, Link, Regular, Symlink};
    for (name, kind) in [
        ("../x", Regular),
        ("checkpoint/../../x", Regular),
        ("/etc/cron.d/x", Regular),
        ("checkpoint/x", Symlink),
        ("checkpoint/x", Link),
        ("checkpoint/x", Char),
        ("volumes/x.tar", Block),
        ("x", Fifo),
        ("checkpoint/inventory.img", Regular),
    ] {
        let error = unpacked(&plain(|archive| add(archive, name, kind, b""))).unwrap_err();
        assert!(matches!(error, ArchiveError::Refused(_)), "{name} {kind:?}: {error}");
    }
}

#[test]
fn members_that_are_not_known_are_passed_over() {
    let bytes = plain(|archive| {
        for name in ["ctr.log", "checkpoint/a/b", "volumes/x", "checkpoint/.x", "other/x", "artifacts/x"] {
            add(archive, name, tar::EntryType::Regular, b"x");
        }
    });
    let (unpacked, directory) = unpacked(&bytes).unwrap();
    assert!(!unpacked.is_own());
    let files = |path: &str| std::fs::read_dir(directory.path().join(path)).unwrap().count();
    assert_eq!((files(""), files(IMAGES), files(VOLUMES)), (4, 1, 0));
}

#[test]
fn a_size_that_no_disk_has_is_refused_at_once() {
    for name in ["deleted.files", "ctr.log"] {
        let bytes = plain(|archive| {
            let mut header = tar::Header::new_gnu();
            header.set_size(1 << 40);
            header.set_entry_type(tar::EntryType::Regular);
            header.as_old_mut().name[..name.len()].copy_from_slice(name.as_bytes());
            header.set_cksum();
            archive.append(&header, io::empty()).unwrap();
        });
        let error = unpacked(&bytes).unwrap_err().to_string();
        assert!(error.contains(&format!("{name} in it has 1099511627776 bytes")), "{error}");
    }
}

#[test]
fn names_that_fill_the_memory_are_refused() {
    /// Members of long names, without an end.
    struct Endless {
        seen: usize,
        block: io::Cursor<Vec<u8>>,
    }
    impl Read for Endless {
        fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
            if self.block.position() == self.block.get_ref().len() as u64 {
                self.seen += 1;
                let mut archive = tar::Builder::new(Vec::new());
                let mut header = tar::Header::new_gnu();
                header.set_entry_type(tar::EntryType::Regular);
                header.set_size(0);
                let name = format!("{:09}{}", self.seen, ["/", &"x".repeat(200)].concat().repeat(5));
                archive.append_data(&mut header, name, io::empty()).unwrap();
                let mut bytes = archive.into_inner().unwrap();
                // Without the end that it has.
                bytes.truncate(bytes.len() - 1024);
                self.block = io::Cursor::new(bytes);
            }
            self.block.read(buffer)
        }
    }
    let directory = tempfile::tempdir().unwrap();
    let endless = Endless { seen: 0, block: io::Cursor::new(Vec::new()) };
    let error = unpack(endless, directory.path()).unwrap_err().to_string();
    assert!(error.contains("names of more than"), "{error}");
}

proptest! {
    #[test]
    fn bytes_that_are_changed_never_pass_and_never_write_elsewhere(
        at in 0..10_000_usize, with in 1..=255_u8, which in 0..3_usize,
    ) {
        let compression = [Compression::Zstd, Compression::Gzip, Compression::None][which];
        let mut bytes = archive(compression);
        let at = at % bytes.len();
        bytes[at] ^= with;
        let directory = tempfile::tempdir().unwrap();
        let into = directory.path().join("into");
        std::fs::create_dir(&into).unwrap();
        if let Ok(unpacked) = unpack(io::Cursor::new(bytes), &into) {
            // A byte of a header that says nothing of name or content: its mode, a time.
            prop_assert_eq!(unpacked.document(CONFIG).unwrap(), b"{\"id\":\"c\"}");
            prop_assert_eq!(std::fs::read(unpacked.images().join("pages-1.img")).unwrap(), [7; 5000]);
        }
        prop_assert_eq!(std::fs::read_dir(directory.path()).unwrap().count(), 1);
    }

    #[test]
    fn any_bytes_are_read_to_an_end(bytes in proptest::collection::vec(any::<u8>(), 0..2000)) {
        prop_assert!(unpacked(&bytes).is_err());
    }
}
