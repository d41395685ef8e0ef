//! What is copied out of a service (`godwit cp NAME:PATH DIRECTORY`), as the user's program takes it: it is unpacked below the
//! directory or refused, and nothing outside is touched, whatever links are there.
#![no_main]

use std::cell::RefCell;
use std::ffi::OsStr;
use std::fs;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::symlink;

use arbitrary::Arbitrary;
use godwit_fuzz::{Scratch, tar, way_out};
use libfuzzer_sys::fuzz_target;

/// What the user has named: a directory that is there, one that is not, and a file.
const NAMED: [&str; 4] = [".", "dir", "new", "file"];

#[derive(Debug, Arbitrary)]
struct Input<'a> {
    named: u8,
    contents: bool,
    keep_owners: bool,
    /// Of a link that a service has laid in a directory which it shares.
    way_out: u8,
    members: Vec<tar::Member<'a>>,
    /// Bytes of the stream that are replaced in the end.
    edits: Vec<(u16, u8)>,
    cut: Option<u16>,
}

thread_local! {
    static SCRATCH: RefCell<Option<Scratch>> = const { RefCell::new(None) };
}

fuzz_target!(|input: Input<'_>| {
    SCRATCH.with_borrow_mut(|kept| {
        let scratch = kept.get_or_insert_with(Scratch::new);
        let stream = tar::spoilt(&input.members, &input.edits, input.cut);
        let directory = scratch.inside().join("directory");
        fs::create_dir_all(directory.join("dir")).expect("a directory");
        fs::write(directory.join("file"), "").expect("a file");
        symlink(OsStr::from_bytes(way_out(input.way_out)), directory.join("link")).expect("a link");
        let named = directory.join(NAMED[usize::from(input.named) % NAMED.len()]);
        // Refused or not, it may have made a part.
        let _ = godwit_cli::unpack(&stream, &named, input.contents, input.keep_owners);
        fs::remove_dir_all(&directory).expect("that it can be removed");
        let left = fs::read_dir(scratch.inside()).expect("the scratch").count();
        assert_eq!(left, 0, "something came beside it");
        scratch.assert_outside_untouched();
    });
});
