//! Items of a tree in any order, in two rounds, some with content that came in another way: nothing outside the directory
//! comes, goes or changes, and no more is written than was agreed.
#![no_main]

use std::ffi::OsStr;
use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt, symlink};
use std::sync::Arc;

use arbitrary::Arbitrary;
use godwit_engine::tree::{Contents, Data, End, Entry, Hold, Hole, Item, Limits, Receiver, Remove, Xattr};
use godwit_fuzz::{Scratch, path, way_out};
use libfuzzer_sys::fuzz_target;

/// Names of attributes: of every namespace, and what an attacker would like to set.
const XATTRS: [&[u8]; 8] = [
    b"user.a",
    b"trusted.overlay.opaque",
    b"trusted.overlay.redirect",
    b"security.capability",
    b"system.posix_acl_access",
    b"system.other",
    b"user.",
    b"",
];

#[derive(Debug, Arbitrary)]
enum Piece<'a> {
    Entry {
        path: [u8; 3],
        kind: u8,
        mode: u16,
        /// Owner and time, when they are not the harmless ones.
        owner: Option<(u32, u32)>,
        time: Option<(i64, u32)>,
        xattrs: Vec<(u8, &'a [u8])>,
        link: [u8; 3],
        size: Result<u16, u64>,
        /// By which content that came in another way is known.
        content: Option<u8>,
        /// With what its content begins.
        begins: Option<Result<u8, ()>>,
        /// Given also where the kind has none.
        stray: bool,
    },
    Data(Result<u16, u64>, &'a [u8]),
    Hole(Result<u16, u64>, u16),
    Hold([u8; 3], u8),
    Remove([u8; 3]),
    End(Option<(u64, u64)>),
    Raw(&'a [u8]),
}

impl Piece<'_> {
    fn item(&self, entries: u64, bytes: u64) -> Option<Item> {
        Some(match self {
            Self::Entry { path: at, kind, mode, owner, time, xattrs, link, size, content, begins, stray } => {
                let (kind, only) =
                    (
                        i32::from(kind % 10),
                        |wanted: &[u8; 3], yes: bool| {
                            if yes || *stray { path(wanted) } else { Vec::new() }
                        },
                    );
                let (uid, gid) = owner.unwrap_or((0, 0));
                let (mtime_seconds, mtime_nanoseconds) =
                    time.map_or((7, 0), |(seconds, nanoseconds)| (seconds, nanoseconds % 1_000_000_001));
                let xattr = |(name, value): &(u8, &[u8])| Xattr {
                    name: XATTRS[usize::from(*name) % XATTRS.len()].to_vec(),
                    value: value.to_vec(),
                };
                Item::Entry(Entry {
                    path: path(at),
                    kind,
                    mode: u32::from(*mode) & if *stray { 0xffff } else { 0o7777 },
                    uid,
                    gid,
                    mtime_seconds,
                    mtime_nanoseconds,
                    xattrs: xattrs.iter().map(xattr).collect(),
                    link_target: only(link, kind == 3),
                    hard_link_of: only(link, kind == 8),
                    size: if kind == 1 || *stray { size.map_or_else(|far| far, u64::from) } else { 0 },
                    content: content.map(u32::from).filter(|_| kind == 1 || *stray),
                    kept: *begins == Some(Err(())),
                    held: begins.and_then(Result::ok).map(u32::from),
                    ..Entry::default()
                })
            }
            Self::Data(offset, bytes) => {
                Item::Data(Data { offset: offset.map_or_else(|far| far, u64::from), bytes: bytes.to_vec() })
            }
            Self::Hole(offset, length) => Item::Hole(Hole {
                offset: offset.map_or_else(|far| far, u64::from),
                length: u64::from(*length),
            }),
            Self::Hold(at, number) => Item::Hold(Hold { path: path(at), number: u32::from(*number) }),
            Self::Remove(at) => Item::Remove(Remove { path: path(at) }),
            Self::End(counts) => {
                let (entries, bytes) = counts.unwrap_or((entries, bytes));
                Item::End(End { entries, bytes })
            }
            Self::Raw(bytes) => Item::decode(bytes).ok()?,
        })
    }
}

/// One empty file without a name has come, as number 1.
#[derive(Debug, Clone)]
struct Nameless(Arc<File>);

impl Contents for Nameless {
    fn find(&self, number: u32, size: u64) -> Option<String> {
        (number == 1 && size == 0).then(|| format!("/proc/self/fd/{}", self.0.as_raw_fd()))
    }

    fn named(&self, number: u32, _: (i64, u32)) -> io::Result<()> {
        assert_eq!(number, 1, "a name for what has not come");
        Ok(())
    }
}

fuzz_target!(|input: (u8, [Vec<Piece<'_>>; 2])| {
    let (number, rounds) = input;
    let scratch = Scratch::new();
    let target = OsStr::from_bytes(way_out(number));
    symlink(target, scratch.inside().join("link")).expect("a link that an earlier round brought");
    let mut how = File::options();
    let nameless = how.write(true).custom_flags(libc::O_TMPFILE).open(scratch.inside());
    let nameless = Nameless(Arc::new(nameless.expect("a file without a name")));
    let limits = Limits { entries: 64, bytes: 1 << 16, devices: number & 1 == 0 };
    for round in &rounds {
        let receiver = Receiver::new(&scratch.inside(), limits).expect("a directory");
        let mut receiver = receiver.with(Box::new(nameless.clone()));
        let (mut entries, mut bytes) = (0, 0);
        let mut failed = false;
        for piece in round {
            let Some(item) = piece.item(entries, bytes) else { continue };
            match &item {
                Item::Entry(_) => entries += 1,
                Item::Data(data) => bytes += data.bytes.len() as u64,
                _ => {}
            }
            failed = receiver.apply(Item::decode(&item.encode()).expect("its own bytes")).is_err();
            if failed {
                break;
            }
            assert!(entries <= limits.entries && bytes <= limits.bytes, "more than was agreed");
        }
        let _ = receiver.finish();
        scratch.assert_outside_untouched();
        if failed {
            return;
        }
    }
    let used = std::fs::metadata(scratch.inside()).expect("the directory");
    assert!(used.is_dir() && used.nlink() >= 2);
});
