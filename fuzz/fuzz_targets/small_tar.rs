//! The archive of a small tmpfs, from another node: it is unpacked below its place or refused, and nothing outside is
//! touched.
#![no_main]

use std::cell::RefCell;
use std::fs;
use std::io::Write;

use arbitrary::Arbitrary;
use flate2::Compression;
use flate2::write::GzEncoder;
use godwit_engine::small_tar;
use godwit_fuzz::{Scratch, tar};
use libfuzzer_sys::fuzz_target;

#[derive(Debug, Arbitrary)]
struct Input<'a> {
    members: Vec<tar::Member<'a>>,
    /// Bytes of the stream that are replaced in the end.
    edits: Vec<(u16, u8)>,
    cut: Option<u16>,
    packed: bool,
}

thread_local! {
    static SCRATCH: RefCell<Option<Scratch>> = const { RefCell::new(None) };
}

fuzz_target!(|input: Input<'_>| {
    SCRATCH.with_borrow_mut(|kept| {
        let scratch = kept.get_or_insert_with(Scratch::new);
        let mut stream = tar::spoilt(&input.members, &input.edits, input.cut);
        if input.packed {
            let mut encoder = GzEncoder::new(Vec::new(), Compression::fast());
            encoder.write_all(&stream).expect("memory takes everything");
            stream = encoder.finish().expect("memory takes everything");
        }
        let place = scratch.inside().join("place");
        fs::create_dir(&place).expect("a place");
        // Refused or not, it may have made a part.
        let _ = small_tar::extract(&mut &stream[..], &place);
        fs::remove_dir_all(&place).expect("that it can be removed");
        assert_eq!(
            fs::read_dir(scratch.inside()).expect("the scratch").count(),
            0,
            "something came beside it"
        );
        scratch.assert_outside_untouched();
    });
});
