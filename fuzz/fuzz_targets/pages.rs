//! Batches of pages from another node: as they come, and as a builder makes them.
#![no_main]

use arbitrary::Arbitrary;
use godwit_memory::batch::{Batch, Builder, Codec, Kind, MAX_PAGES, apply_deltas};
use libfuzzer_sys::fuzz_target;

const PAGE: usize = 4096;

#[derive(Debug, Arbitrary)]
enum Input<'a> {
    Raw(Vec<u8>),
    Deltas(&'a [u8], u8),
    /// Pages by number, filled with a byte; what each was before; how the batch is packed.
    Built(Vec<(u16, u8, Option<u8>)>, u8),
}

fuzz_target!(|input: Input<'_>| match input {
    Input::Raw(bytes) => {
        if let Ok(batch) = Batch::decode(bytes.into()) {
            let pages: u64 = batch
                .runs
                .iter()
                .filter(|run| run.kind != Kind::Zero)
                .map(|run| (run.range.end - run.range.start) / PAGE as u64)
                .sum();
            assert!(pages <= MAX_PAGES as u64);
        }
    }
    Input::Deltas(deltas, pages) => {
        let _ = apply_deltas(deltas, &mut vec![0; usize::from(pages % 65) * PAGE]);
    }
    Input::Built(pages, codec) => {
        let codec = [Codec::Raw, Codec::Lz4, Codec::Zstd][usize::from(codec % 3)];
        let mut builder = Builder::new(7);
        let mut wanted = Vec::new();
        for (number, byte, before) in pages.into_iter().take(MAX_PAGES) {
            let (address, content) = (u64::from(number) * PAGE as u64, [byte; PAGE]);
            let as_delta = before.is_some_and(|before| builder.delta(address, &[before; PAGE], &content));
            if !as_delta {
                builder.page(address, &content);
            }
            wanted.push((address, byte, before.filter(|_| as_delta)));
        }
        let batch = Batch::decode(builder.finish(codec)).expect("our own");
        let mut wanted = wanted.into_iter();
        for run in batch.runs {
            let count = usize::try_from((run.range.end - run.range.start) / PAGE as u64).expect("few");
            let asked: Vec<_> = wanted.by_ref().take(count).collect();
            assert_eq!(asked[0].0, run.range.start);
            let expected: Vec<u8> = asked.iter().flat_map(|(_, byte, _)| [*byte; PAGE]).collect();
            match run.kind {
                Kind::Data => assert_eq!(run.data, expected),
                Kind::Zero => assert!(expected.iter().all(|byte| *byte == 0)),
                Kind::Delta => {
                    let mut pages: Vec<u8> = asked
                        .iter()
                        .flat_map(|(_, _, before)| [before.expect("a difference"); PAGE])
                        .collect();
                    apply_deltas(&run.data, &mut pages).expect("our own");
                    assert_eq!(pages, expected);
                }
                Kind::Retained => unreachable!("none was named"),
            }
        }
    }
});
