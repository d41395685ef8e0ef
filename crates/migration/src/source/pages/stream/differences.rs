//! What a stream sends, put together again as the destination does it: after any course of events the
//! pages there are those that were here.
#![allow(clippy::unwrap_used)]

use std::collections::BTreeMap;
use std::ops::ControlFlow;

use godwit_memory::batch::{Batch, Kind, apply_deltas};
use proptest::prelude::*;

use super::*;

/// What pages hold; content 0 is all zeros. They differ in little, so that differences pay.
fn content(number: u8) -> [u8; PAGE] {
    let mut page = [if number == 0 { 0 } else { 7 }; PAGE];
    page[100] = number;
    page
}

/// What can happen to one of some pages of two processes.
#[derive(Debug, Clone)]
enum Event {
    /// It was written with this.
    Written(u64, u8),
    /// It is gone, and reads as zero.
    Gone(u64),
    /// The process ended; another may have its number.
    Ended,
    /// What was collected goes out.
    Shipped,
}

fn event() -> impl Strategy<Value = (Space, Event)> {
    let event = prop_oneof![
        8 => (0..6_u64, 0..5_u8).prop_map(|(page, number)| Event::Written(page, number)),
        2 => (0..6_u64).prop_map(Event::Gone),
        1 => Just(Event::Ended),
        2 => Just(Event::Shipped),
    ];
    (1..3_u32, event)
}

/// The pages at the destination; what is not in it reads as zero.
type Contents = BTreeMap<(Space, u64), [u8; PAGE]>;

/// Puts a batch into the destination's memory. `retained` is what it has of an earlier visit.
fn receive(batch: Batch, retained: &Contents, memory: &mut Contents) {
    for run in batch.runs {
        let mut data = run.data;
        for address in run.range.clone().step_by(PAGE) {
            let place = (batch.space, address);
            let before = memory.get(&place).copied().unwrap_or([0; PAGE]);
            let now = match run.kind {
                Kind::Data => data.split_to(PAGE)[..].try_into().unwrap(),
                Kind::Zero => [0; PAGE],
                Kind::Retained => retained[&place],
                Kind::Delta => {
                    let mut pages = before;
                    let length = 10 + usize::from(u16::from_le_bytes([data[0], data[1]]));
                    apply_deltas(&data.split_to(length), &mut pages).expect("a difference to what is there");
                    pages
                }
            };
            memory.insert(place, now);
        }
    }
}

/// Sends what happens and gives what arrived, and what should have; and how many differences crossed.
fn play(events: &[(Space, Event)], retained: &Contents, cache: usize) -> (Contents, Contents, usize) {
    let (mut hashes, key) = (no_hashes(), PageKey::random());
    for ((space, address), page) in retained {
        hashes.set(*space, *address, key.hash(page));
    }
    let mut stream = Stream {
        known: no_hashes(),
        cache: LruCache::new(NonZeroUsize::new(cache).unwrap()),
        packer: Packer::new(Compress::Off),
        pool: Pool::default(),
    };
    let (sender, mut receiver) = mpsc::channel(10_000);
    let pacer = Pacer::new(None);
    let mut should: Contents = Contents::new();
    let mut sending = Sending {
        stream: &mut stream,
        index: 0,
        count: 1,
        sender: &sender,
        retained: &hashes,
        key: &key,
        pacer: &pacer,
        on_progress: &|_| ControlFlow::Continue(()),
        all: false,
        sent: Sent::default(),
    };
    let mut batches: BTreeMap<Space, Builder> = (1..3).map(|space| (space, Builder::new(space))).collect();
    for (space, event) in events {
        let batch = batches.get_mut(space).unwrap();
        match event {
            Event::Written(page, number) => {
                let (address, content) = (page * PAGE_SIZE, content(*number));
                sending.page(*space, address, &content, batch).unwrap();
                should.insert((*space, address), content);
            }
            Event::Gone(page) => {
                let range = page * PAGE_SIZE..(page + 1) * PAGE_SIZE;
                sending.forget(*space, &range);
                batch.zero(&range);
                should.remove(&(*space, range.start));
            }
            Event::Ended => {
                // What was collected went out before the look that found it ended.
                sending.ship(batch).unwrap();
                sending.end(&Ended { space: *space, owed: RangeSet::new(), lives: RangeSet::new() }).unwrap();
                should.retain(|(other, _), _| other != space);
            }
            Event::Shipped => sending.ship(batch).unwrap(),
        }
    }
    for batch in batches.values_mut() {
        sending.ship(batch).unwrap();
    }
    let (mut memory, mut differences) = (Contents::new(), 0);
    while let Ok(Message::Pages(bytes)) = receiver.try_recv() {
        let batch = Batch::decode(bytes).unwrap();
        differences += batch.runs.iter().filter(|run| run.kind == Kind::Delta).count();
        receive(batch, retained, &mut memory);
    }
    let zero = [0; PAGE];
    memory.retain(|_, page| *page != zero);
    should.retain(|_, page| *page != zero);
    (memory, should, differences)
}

proptest! {
    #[test]
    fn a_difference_is_always_to_what_the_destination_has(
        events in proptest::collection::vec(event(), 0..80),
        retained in proptest::collection::btree_map((1..3_u32, 0..6_u64), 1..5_u8, 0..6),
        cache in 1..8_usize,
    ) {
        let retained = retained.into_iter().map(|((space, page), n)| ((space, page * PAGE_SIZE), content(n))).collect();
        let (memory, should, _) = play(&events, &retained, cache);
        prop_assert!(memory == should, "pages differ after {events:?}");
    }
}

#[test]
fn what_was_sent_before_the_page_was_gone_or_anothers_is_no_base() {
    let written = |number| (1, Event::Written(0, number));
    let differences = |events: &[(Space, Event)]| {
        let (memory, should, differences) = play(events, &Contents::new(), 4);
        assert!(memory == should, "{events:?}");
        differences
    };
    let shipped = || (1, Event::Shipped);
    // The content is remembered from the second time on, and the third is a difference to it.
    let cached = [written(1), shipped(), written(2), shipped()];
    assert_eq!(differences(&[&cached[..], &[written(3)]].concat()), 1);
    for between in [(1, Event::Gone(0)), (1, Event::Ended), (1, Event::Written(0, 0))] {
        assert_eq!(
            differences(&[&cached[..], &[between.clone(), shipped(), written(3)]].concat()),
            0,
            "{between:?}"
        );
        // From there on it begins again.
        let again = [between, shipped(), written(3), shipped(), written(4), shipped(), written(1)];
        assert_eq!(differences(&[&cached[..], &again].concat()), 1);
    }
}
