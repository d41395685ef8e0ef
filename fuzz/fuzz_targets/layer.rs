//! A layer of an image: a tar stream, compressed or not. It is unpacked or refused; nothing outside
//! of the store is touched, and a refused layer leaves nothing behind.
#![no_main]

use std::cell::RefCell;
use std::fs;
use std::io::Write;

use arbitrary::Arbitrary;
use godwit_engine::image::{Digest, Store};
use godwit_fuzz::{Scratch, tar};
use libfuzzer_sys::fuzz_target;

#[derive(Debug, Arbitrary)]
enum Packing {
    Plain,
    Gzip,
    Zstd,
}

#[derive(Debug, Arbitrary)]
enum Input<'a> {
    Members {
        /// Of a link that is there before.
        way_out: u8,
        members: Vec<tar::Member<'a>>,
        packing: Packing,
        /// Bytes of the stream that are replaced in the end.
        edits: Vec<(u32, u8)>,
        cut: Option<u16>,
    },
    Raw(&'a [u8]),
}

impl Input<'_> {
    fn blob(&self) -> Vec<u8> {
        let Self::Members { way_out, members, packing, edits, cut } = self else {
            let Self::Raw(bytes) = self else { return Vec::new() };
            return bytes.to_vec();
        };
        let stream = [tar::link(godwit_fuzz::way_out(*way_out)), tar::stream(members)].concat();
        let mut blob = match packing {
            Packing::Plain => stream,
            Packing::Gzip => {
                let mut encoder = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
                encoder.write_all(&stream).expect("memory takes everything");
                encoder.finish().expect("memory takes everything")
            }
            Packing::Zstd => zstd::encode_all(&stream[..], 1).expect("memory takes everything"),
        };
        for (at, byte) in edits {
            let at = usize::try_from(*at).expect("32 bits") % blob.len();
            blob[at] = *byte;
        }
        blob.truncate(cut.map_or(blob.len(), usize::from));
        blob
    }
}

thread_local! {
    /// With its parts.
    static STORE: RefCell<Option<(Scratch, Store, usize)>> = const { RefCell::new(None) };
}

fuzz_target!(|input: Input<'_>| {
    STORE.with_borrow_mut(|kept| {
        let (scratch, store, parts) = kept.get_or_insert_with(|| {
            let scratch = Scratch::new();
            let store = Store::open(&scratch.inside()).expect("a store");
            let parts = fs::read_dir(scratch.inside()).expect("the store").count();
            (scratch, store, parts)
        });
        let blob = input.blob();
        let digest = Digest::of(&blob);
        let mut writer = store.blob_writer(&digest, blob.len() as u64).expect("a writer");
        writer.write_all(&blob).expect("memory takes everything");
        writer.finish().expect("a right digest");
        let unpacked = store.unpack(&digest).is_ok();
        assert_eq!(store.has_layer(&digest), unpacked);
        scratch.assert_outside_untouched();
        let mut collector = store.collector().expect("that nobody uses the store");
        for layer in store.layers().expect("the layers") {
            collector.remove(&layer.digest).expect("that a layer can be removed");
        }
        collector.delete().expect("that layers can be deleted");
        for part in ["tmp", "layers/sha256", "blobs/sha256", "diff_ids/sha256"] {
            let left = fs::read_dir(scratch.inside().join(part)).expect("the store").count();
            assert_eq!(left, 0, "something is left in {part}");
        }
        assert_eq!(
            fs::read_dir(scratch.inside()).expect("the store").count(),
            *parts,
            "something came into the store"
        );
    });
});
