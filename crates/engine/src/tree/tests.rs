//! Trees are carried whole, round after round, whatever is in them.
#![allow(clippy::unwrap_used)]

mod blocks;
mod broken;
mod elsewhere;
mod hostile;
mod listing;
mod parts;
mod rounds;

use std::ffi::OsStr;
use std::fs::{self, File};
use std::io::{Seek, SeekFrom, Write};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileExt, MetadataExt, PermissionsExt, symlink};
use std::path::Path;

use rustix::fs::{
    AtFlags, CWD, FileType, Mode, Timespec, Timestamps, XattrFlags, makedev, mknodat, utimensat,
};
use tempfile::TempDir;

use super::*;

const ROOMY: Limits = Limits { entries: 1 << 20, bytes: 1 << 32, devices: true };

/// Two empty directories: a source and a copy.
struct Pair {
    _scratch: TempDir,
    source: std::path::PathBuf,
    copy: std::path::PathBuf,
}

/// A directory on a disk: the rules for writes through mappings do not hold on a tmpfs.
fn scratch() -> TempDir {
    TempDir::new_in("/var/tmp").unwrap()
}

impl Pair {
    fn new() -> Self {
        let scratch = scratch();
        let (source, copy) = (scratch.path().join("source"), scratch.path().join("copy"));
        fs::create_dir(&source).unwrap();
        fs::create_dir(&copy).unwrap();
        Self { _scratch: scratch, source, copy }
    }

    /// Sends one round over the wire's form, and says what was sent.
    fn round(&self, sender: &mut TreeSender, frozen: bool) -> Sent {
        let round = sender.next_round(frozen).unwrap();
        let mut receiver = Receiver::new(&self.copy, ROOMY).unwrap();
        let sent = sender
            .send(round, &mut |item: Item| {
                let bytes = item.encode();
                assert!(bytes.len() <= MAX_ITEM);
                receiver.apply(Item::decode(&bytes).unwrap())
            })
            .unwrap();
        receiver.finish().unwrap();
        sent
    }

    /// Rounds until one sends nothing: until all changes are older than the clock's tick.
    fn settle(&self, sender: &mut TreeSender) {
        while self.round(sender, false) != Sent::default() {}
    }

    fn assert_same(&self) {
        let differences = compare(&self.source, &self.copy).unwrap();
        let differences: Vec<String> = differences.iter().map(ToString::to_string).collect();
        assert!(differences.is_empty(), "{differences:#?}");
    }
}

fn set_xattr(path: &Path, name: &str, value: &[u8]) {
    rustix::fs::lsetxattr(path, name, value, XattrFlags::empty()).unwrap();
}

fn set_mtime(path: &Path, seconds: i64, nanoseconds: i64) {
    let time = Timespec { tv_sec: seconds, tv_nsec: nanoseconds };
    let times = Timestamps { last_access: time, last_modification: time };
    utimensat(CWD, path, &times, AtFlags::SYMLINK_NOFOLLOW).unwrap();
}

fn node(path: &Path, file_type: FileType, device: (u32, u32)) {
    mknodat(CWD, path, file_type, Mode::from_raw_mode(0o640), makedev(device.0, device.1)).unwrap();
}

/// One of everything a tree can hold.
fn fill(root: &Path) {
    fs::write(root.join("plain"), b"hello").unwrap();
    fs::write(root.join("empty"), b"").unwrap();
    fs::write(root.join("large"), vec![7; 3 * MAX_DATA + 17]).unwrap();
    std::os::unix::fs::chown(root.join("plain"), Some(1234), Some(4_000_000_000)).unwrap();
    fs::set_permissions(root.join("plain"), fs::Permissions::from_mode(0o6751)).unwrap();
    set_mtime(&root.join("plain"), 1_000_000_000, 123_456_789);
    set_xattr(&root.join("plain"), "user.note", b"line\nline\0end");
    set_xattr(&root.join("plain"), "trusted.overlay.origin", &[0, 0xfb, 0x21, 0xff]);
    // cap_net_bind_service=ep, revision 2.
    let capability = [1, 0, 0, 2, 0, 4, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0];
    set_xattr(&root.join("large"), "security.capability", &capability);
    fs::create_dir_all(root.join("directory/inner/deep")).unwrap();
    fs::write(root.join("directory/inner/deep/file"), b"deep").unwrap();
    fs::set_permissions(root.join("directory"), fs::Permissions::from_mode(0o1777)).unwrap();
    set_xattr(&root.join("directory"), "trusted.overlay.opaque", b"y");
    // An access list: owner rwx, user 99 rw-, group r-x, mask rwx, others r--.
    let list = access_list(&[
        (1, 7, u32::MAX),
        (2, 6, 99),
        (4, 5, u32::MAX),
        (0x10, 7, u32::MAX),
        (0x20, 4, u32::MAX),
    ]);
    set_xattr(&root.join("empty"), "system.posix_acl_access", &list);
    set_xattr(&root.join("directory/inner"), "system.posix_acl_default", &list);
    fs::create_dir(root.join("directory/inner/inherits")).unwrap();
    rustix::fs::removexattr(root.join("directory/inner/inherits"), "system.posix_acl_default").unwrap();
    set_mtime(&root.join("directory/inner"), -5, 999_999_999);
    set_mtime(&root.join("directory"), 5, 1);
    fs::hard_link(root.join("plain"), root.join("directory/second-name")).unwrap();
    fs::hard_link(root.join("plain"), root.join("a-first-name")).unwrap();
    symlink("directory/../plain", root.join("link")).unwrap();
    symlink("/etc/passwd", root.join("absolute-link")).unwrap();
    symlink(OsStr::from_bytes(&[b'x'; 3000]), root.join("long-link")).unwrap();
    rustix::fs::linkat(CWD, root.join("link"), CWD, root.join("link-again"), AtFlags::empty()).unwrap();
    std::os::unix::fs::lchown(root.join("link"), Some(5), Some(6)).unwrap();
    set_mtime(&root.join("link"), 77, 88);
    set_xattr(&root.join("link"), "trusted.note", b"on a link");
    node(&root.join("whiteout"), FileType::CharacterDevice, (0, 0));
    node(&root.join("null"), FileType::CharacterDevice, (1, 3));
    node(&root.join("disk"), FileType::BlockDevice, (259, 70_000));
    node(&root.join("pipe"), FileType::Fifo, (0, 0));
    drop(std::os::unix::net::UnixListener::bind(root.join("socket")).unwrap());
    fs::write(root.join(OsStr::from_bytes(b"not \xff utf-8 \n")), b"odd name").unwrap();
    fs::write(root.join("n".repeat(255)), b"long name").unwrap();
    let mut sparse = File::create(root.join("sparse")).unwrap();
    sparse.seek(SeekFrom::Start(64 << 20)).unwrap();
    sparse.write_all(b"middle").unwrap();
    sparse.set_len(1 << 30).unwrap();
    fs::set_permissions(root, fs::Permissions::from_mode(0o711)).unwrap();
    set_xattr(root, "trusted.overlay.impure", b"y");
    set_mtime(root, 1_234_567, 7);
}

/// The binary form of an access list (include/uapi/linux/posix_acl_xattr.h).
fn access_list(entries: &[(u16, u16, u32)]) -> Vec<u8> {
    let mut bytes = 2_u32.to_le_bytes().to_vec();
    for (tag, permissions, id) in entries {
        bytes.extend(tag.to_le_bytes());
        bytes.extend(permissions.to_le_bytes());
        bytes.extend(id.to_le_bytes());
    }
    bytes
}

#[test]
fn a_tree_of_everything_arrives_as_it_was() {
    let pair = Pair::new();
    fill(&pair.source);
    let mut sender = TreeSender::new(&pair.source);
    let sent = pair.round(&mut sender, true);
    pair.assert_same();
    assert_eq!(sent.unsettled, Vec::<Vec<u8>>::new());
    let copy = fs::metadata(pair.copy.join("sparse")).unwrap();
    assert_eq!(copy.size(), 1 << 30);
    assert!(copy.blocks() * 512 < 1 << 20, "holes were filled: {} blocks", copy.blocks());
    assert_eq!(fs::metadata(pair.copy.join("plain")).unwrap().nlink(), 3);
    assert_eq!(fs::metadata(pair.copy.join("plain")).unwrap().mode() & 0o7777, 0o6751);
    assert!(sent.bytes < 2 << 20, "{} bytes were sent", sent.bytes);
}
