//! What of a process's memory goes along, as ranges of addresses rather than page by page: a process may have a million.

use std::ops::Range;

use godwit_isa_plan::{DATA, HEAP, MAP, MAP_TABLE, PRIVATE_DATA, PRIVATE_TEXT, Quarter, Slot};

use crate::executable::Executable;
use crate::memory::Fate;

/// The parts of a range that go along as they are ([`Fate::Stays`]), in order.
#[must_use]
pub fn staying(range: &Range<u64>, target: &Executable) -> Vec<Range<u64>> {
    let mut found: Vec<Range<u64>> = Vec::new();
    let mut address = range.start;
    while address < range.end {
        let end = next_border(address, target).min(range.end);
        if Fate::of(address, target) == Fate::Stays {
            match found.last_mut() {
                Some(last) if last.end == address => last.end = end,
                _ => found.push(address..end),
            }
        }
        address = end;
    }
    found
}

/// The first address behind this one that may have another fate.
fn next_border(address: u64, target: &Executable) -> u64 {
    let regions = [PRIVATE_TEXT, DATA, PRIVATE_DATA, HEAP, MAP_TABLE, MAP];
    let parts = target.parts().iter().map(|part| part.pages());
    let quarters = Slot::at(address)
        .into_iter()
        .flat_map(|slot| Quarter::ALL.into_iter().map(move |quarter| slot.quarter(quarter)));
    let borders = regions.into_iter().chain(parts).chain(quarters).flat_map(|range| [range.start, range.end]);
    borders.filter(|border| *border > address).min().unwrap_or(u64::MAX)
}

/// The parts of a range that are in others, which are in order and do not overlap.
pub(crate) fn within<'a>(
    range: &'a Range<u64>,
    others: &'a [Range<u64>],
) -> impl Iterator<Item = Range<u64>> + 'a {
    let first = others.partition_point(|other| other.end <= range.start);
    let touched = others[first..].iter().take_while(|other| other.start < range.end);
    touched.map(|other| range.start.max(other.start)..range.end.min(other.end))
}

#[cfg(test)]
mod tests {
    use godwit_isa_plan::PAGE;
    use proptest::prelude::*;

    use super::*;
    use crate::executable::tests::file;

    #[test]
    fn native_stacks_and_guards_are_left_out() {
        let target = Executable::decode(&file()).expect("it is whole");
        let slot = Slot::new(7).expect("of the plan");
        let quarter = |quarter| slot.quarter(quarter);
        let native = quarter(Quarter::NativeStack);
        let whole = native.start..quarter(Quarter::Control).end;
        let others = [Quarter::Continuation, Quarter::DataStack, Quarter::Control].map(quarter);
        assert_eq!(staying(&whole, &target), others);
        let ends = MAP_TABLE.end - PAGE..MAP.start + PAGE;
        assert_eq!(staying(&ends, &target), std::slice::from_ref(&ends));
        assert_eq!(staying(&(0..DATA.end), &target), std::slice::from_ref(&(0x801_0000..0x801_3000)));
    }

    #[test]
    fn parts_of_a_range_are_cut_out() {
        let others = [10..20, 20..25, 30..40];
        let of = |range: Range<u64>| within(&range, &others).collect::<Vec<_>>();
        assert_eq!(of(0..50), others);
        assert_eq!(of(15..32), [15..20, 20..25, 30..32]);
        assert_eq!(of(25..30), Vec::<Range<u64>>::new());
    }

    proptest! {
        #[test]
        fn ranges_say_what_each_page_does(
            near in prop_oneof![
                Just(PRIVATE_TEXT.start), Just(DATA.start), Just(0x801_0000), Just(PRIVATE_DATA.start), Just(PRIVATE_DATA.end),
                Just(HEAP.start), Just(HEAP.end), Just(MAP_TABLE.start), Just(MAP.start), Just(MAP.end),
                (0u32..2045, 0usize..4).prop_map(|(slot, quarter)| {
                    Slot::new(slot).expect("of the plan").quarter(Quarter::ALL[quarter]).start
                }),
            ],
            before in 0u64..40,
            pages in 1u64..80,
        ) {
            let target = Executable::decode(&file()).expect("it is whole");
            let begin = near - before * PAGE;
            let range = begin..begin + pages * PAGE;
            let found = staying(&range, &target);
            for page in (range.start..range.end).step_by(4096) {
                let stays = found.iter().any(|part| part.contains(&page));
                prop_assert_eq!(stays, Fate::of(page, &target) == Fate::Stays, "{:#x}", page);
            }
            prop_assert!(found.windows(2).all(|pair| pair[0].end < pair[1].start));
        }
    }
}
