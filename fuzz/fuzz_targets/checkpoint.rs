//! The archive of a checkpoint: it is unpacked below its place or refused, its digests are right or it is refused, what it says
//! of a container reaches nothing of this node, and nothing outside is touched.
#![no_main]

use std::cell::RefCell;
use std::fs;
use std::io::{Cursor, Write};

use arbitrary::Arbitrary;
use flate2::Compression;
use flate2::write::GzEncoder;
use godwit_engine::MountKind;
use godwit_engine::checkpoint::unpack::unpack;
use godwit_engine::checkpoint::{changes, pack, theirs};
use godwit_fuzz::{Scratch, tar};
use libfuzzer_sys::fuzz_target;

#[derive(Debug, Arbitrary)]
struct Input<'a> {
    /// What is in one of Podman's, or in the part of one with changed files.
    members: Vec<tar::Member<'a>>,
    documents: [&'a [u8]; 2],
    deleted: Vec<&'a str>,
    /// Bytes of the stream that are replaced in the end.
    edits: Vec<(u16, u8)>,
    cut: Option<u16>,
    how: u8,
}

thread_local! {
    static SCRATCH: RefCell<Option<Scratch>> = const { RefCell::new(None) };
}

fuzz_target!(|input: Input<'_>| {
    SCRATCH.with_borrow_mut(|kept| {
        let scratch = kept.get_or_insert_with(Scratch::new);
        let mut stream = if input.how & 1 == 0 { tar::stream(&input.members) } else { whole(&input) };
        for (at, byte) in &input.edits {
            let at = usize::from(*at) % stream.len().max(1);
            if let Some(place) = stream.get_mut(at) {
                *place = *byte;
            }
        }
        stream.truncate(input.cut.map_or(stream.len(), usize::from));
        if input.how & 2 != 0 {
            let mut encoder = GzEncoder::new(Vec::new(), Compression::fast());
            encoder.write_all(&stream).expect("memory takes everything");
            stream = encoder.finish().expect("memory takes everything");
        }
        let place = scratch.inside().join("place");
        fs::create_dir(&place).expect("a place");
        if let Ok(unpacked) = unpack(Cursor::new(stream), &place) {
            if input.edits.is_empty() && input.cut.is_none() && unpacked.is_own() && input.how & 1 != 0 {
                assert_eq!(unpacked.document("spec.dump").expect("it is there"), input.documents[1]);
            }
            if let Ok(theirs) = theirs::read(&unpacked) {
                assert!(theirs.mounts.iter().all(|mount| !matches!(mount.kind, MountKind::Bind { .. })));
                assert!(theirs.workdir.is_absolute() && !theirs.command.is_empty());
            }
            let root = scratch.inside().join("root");
            fs::create_dir(&root).expect("a root");
            // Refused or not, it may have made a part.
            let _ = changes::apply(unpacked.directory(), &root);
            fs::remove_dir_all(&root).expect("that it can be removed");
        }
        fs::remove_dir_all(&place).expect("that it can be removed");
        assert_eq!(
            fs::read_dir(scratch.inside()).expect("the scratch").count(),
            0,
            "something came beside it"
        );
        scratch.assert_outside_untouched();
    });
});

/// One of godwit's, with digests that are right.
fn whole(input: &Input<'_>) -> Vec<u8> {
    let mut packer = pack::Packer::new(Vec::new(), pack::Compression::None).expect("memory takes everything");
    let deleted = serde_json::to_vec(&input.deleted).expect("a list of texts is JSON");
    for (name, content) in [
        ("godwit.json", &b"{}"[..]),
        ("config.dump", input.documents[0]),
        ("spec.dump", input.documents[1]),
        ("checkpoint/inventory.img", b"i"),
        ("rootfs-diff.tar", &tar::stream(&input.members)),
        ("deleted.files", &deleted),
    ] {
        packer.content(name, content).expect("memory takes everything");
    }
    packer.finish().expect("memory takes everything")
}
