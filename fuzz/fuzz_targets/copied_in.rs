//! What a user has copied into a service (`godwit cp - NAME:PATH`): it is unpacked into the service's files or refused, and
//! nothing outside of them is touched, whatever links the service has laid.
#![no_main]

use std::cell::RefCell;
use std::ffi::OsStr;
use std::fs;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::symlink;

use arbitrary::Arbitrary;
use godwit_engine::copy::{CopyIn, Filesystem};
use godwit_fuzz::{Scratch, path, tar, way_out};
use libfuzzer_sys::fuzz_target;

#[derive(Debug, Arbitrary)]
struct Input<'a> {
    path: [u8; 3],
    contents: bool,
    keep_owners: bool,
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
        let root = scratch.inside().join("root");
        fs::create_dir_all(root.join("dir/mounted")).expect("a root");
        symlink(OsStr::from_bytes(way_out(input.way_out)), root.join("link")).expect("a link");
        let files = Filesystem::of_ended(&root, ["/dir/mounted".into()]).expect("that it can be opened");
        let how =
            CopyIn { path: path(&input.path), contents: input.contents, keep_owners: input.keep_owners };
        // Refused or not, it may have made a part.
        let _ = files.copy_in(&how, stream.as_slice());
        let mounted = fs::read_dir(root.join("dir/mounted"));
        assert_eq!(mounted.expect("the place of a mount").count(), 0, "something came below a mount");
        fs::remove_dir_all(&root).expect("that it can be removed");
        let left = fs::read_dir(scratch.inside()).expect("the scratch").count();
        assert_eq!(left, 0, "something came beside it");
        scratch.assert_outside_untouched();
    });
});
