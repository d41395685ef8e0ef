//! Pieces of images from another node: no file outside the directory, none of another kind than a
//! regular one in it, no more bytes than were announced, and the end is believed only if it is true.
#![no_main]

use std::collections::BTreeMap;
use std::fs;

use arbitrary::Arbitrary;
use godwit_fuzz::{Scratch, path};
use godwit_migration::images::Receiver;
use godwit_migration::message::{ImageData, ImageFile};
use libfuzzer_sys::fuzz_target;

#[derive(Debug, Arbitrary)]
enum Name<'a> {
    Usual(u8),
    Path([u8; 3]),
    Text(&'a str),
}

impl Name<'_> {
    fn text(&self) -> String {
        match self {
            Self::Usual(number) => format!("pages-{}.img", number % 4),
            Self::Path(bytes) => String::from_utf8_lossy(&path(bytes)).into_owned(),
            Self::Text(text) => (*text).to_owned(),
        }
    }
}

#[derive(Debug, Arbitrary)]
struct Input<'a> {
    limit: u16,
    pieces: Vec<(Name<'a>, Result<u16, u64>, &'a [u8])>,
    /// Told at the end, in place of the truth.
    lie: Option<Vec<(Name<'a>, u64)>>,
}

fuzz_target!(|input: Input<'_>| {
    let scratch = Scratch::new();
    let mut receiver = Receiver::new(&scratch.inside(), input.limit.into());
    let mut expected: BTreeMap<String, Vec<u8>> = BTreeMap::new();
    for (name, offset, data) in &input.pieces {
        let offset = offset.map_or_else(|far| far, u64::from);
        let piece = ImageData { name: name.text(), offset, data: data.to_vec().into() };
        if receiver.apply(&piece).is_err() {
            // The migration has failed; its directory goes.
            scratch.assert_outside_untouched();
            return;
        }
        let content = expected.entry(piece.name).or_default();
        let at = usize::try_from(offset).expect("within the limit");
        if !data.is_empty() {
            content.resize(content.len().max(at + data.len()), 0);
            content[at..at + data.len()].copy_from_slice(data);
        }
    }
    scratch.assert_outside_untouched();
    for entry in fs::read_dir(scratch.inside()).expect("the directory") {
        let entry = entry.expect("an entry");
        assert!(entry.file_type().expect("its type").is_file());
        let name = entry.file_name().into_string().expect("a plain name");
        assert_eq!(fs::read(entry.path()).expect("its content"), expected[&name]);
    }
    let truth: BTreeMap<String, u64> =
        expected.iter().map(|(name, content)| (name.clone(), content.len() as u64)).collect();
    let told: Vec<ImageFile> = match &input.lie {
        None => truth.iter().map(|(name, bytes)| ImageFile { name: name.clone(), bytes: *bytes }).collect(),
        Some(lie) => lie.iter().map(|(name, bytes)| ImageFile { name: name.text(), bytes: *bytes }).collect(),
    };
    let is_true = told.len() == truth.len()
        && truth
            .iter()
            .all(|(name, bytes)| told.iter().any(|file| (&file.name, &file.bytes) == (name, bytes)));
    assert_eq!(receiver.finish(&told).is_ok(), is_true);
});
