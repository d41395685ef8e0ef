//! What must hold for sections alone, and between them, before memory is made of them.

use std::collections::{BTreeMap, BTreeSet};

use crate::FormatError;
use crate::plan::{self, PAGE, Region, Slot};
use crate::section::Section;

/// `PROT_READ` and `PROT_WRITE`: a program has no executable memory of its own.
const PROTECTION: u32 = 3;

/// A section and where it is in the file.
pub(crate) struct Placed {
    pub(crate) index: u32,
    pub(crate) offset: u64,
    pub(crate) section: Section,
}

/// Memory that a section names: within the plan, in one region of it.
pub(crate) fn memory(index: u32, offset: u64, address: u64, length: u64) -> Result<Region, FormatError> {
    if length == 0 {
        return Err(FormatError::Empty { index, offset });
    }
    let end = address.checked_add(length).ok_or(FormatError::Overflow { index, offset, address, length })?;
    plan::region_of(&(address..end)).ok_or(FormatError::OutsidePlan { index, offset, address, length })
}

/// What a mapping must be.
pub(crate) fn mapping(
    index: u32,
    offset: u64,
    address: u64,
    length: u64,
    protection: u32,
) -> Result<(), FormatError> {
    match memory(index, offset, address, length)? {
        Region::Heap | Region::MapTable | Region::Map => {}
        // Data is of the executable, slots are mapped for each thread.
        Region::Data | Region::Thread(..) => {
            return Err(FormatError::OutsidePlan { index, offset, address, length });
        }
    }
    if !address.is_multiple_of(PAGE) || !length.is_multiple_of(PAGE) {
        return Err(FormatError::Unaligned { index, offset, address, length });
    }
    if protection & !PROTECTION != 0 {
        return Err(FormatError::Protection { index, offset, found: protection });
    }
    Ok(())
}

/// What must hold between sections, each of which is sound; the threads, with the offsets of their sections.
pub(crate) fn sections(placed: &[Placed]) -> Result<Vec<(u64, Slot)>, FormatError> {
    let threads = threads(placed)?;
    if let Some(second) = placed.iter().filter(|placed| matches!(placed.section, Section::Process(_))).nth(1)
    {
        let (index, offset) = (second.index, second.offset);
        return Err(FormatError::Process { index, offset, why: "is a second one" });
    }
    let slots: BTreeSet<Slot> = threads.iter().map(|(_, slot)| *slot).collect();
    let mappings = without_overlap(placed, |section| matches!(section, Section::Mapping { .. }))?;
    without_overlap(placed, |section| matches!(section, Section::Bytes { .. }))?;
    let is_mapped = |section: &Section| matches!(section, Section::Mapping { .. } | Section::PastEnd { .. });
    without_overlap(placed, is_mapped)?;

    for Placed { index, offset, section } in placed {
        let (index, offset) = (*index, *offset);
        let (Section::Bytes { address, bytes }, Some(range)) = (section, section.range()) else { continue };
        match memory(index, offset, *address, bytes.len() as u64)? {
            Region::Data => {}
            Region::Heap | Region::MapTable | Region::Map => {
                let below = mappings.range(..=range.start).next_back();
                if below.is_none_or(|(_, mapping)| mapping.end < range.end) {
                    return Err(FormatError::Unmapped { index, offset, address: *address });
                }
            }
            Region::Thread(slot, _) => {
                if !slots.contains(&slot) {
                    return Err(FormatError::NoSuchThread { index, offset, slot: slot.number() });
                }
            }
        }
    }
    Ok(threads)
}

fn threads(placed: &[Placed]) -> Result<Vec<(u64, Slot)>, FormatError> {
    let mut threads = Vec::new();
    let mut seen = BTreeSet::new();
    for Placed { index, offset, section } in placed {
        let Section::Thread { slot } = section else { continue };
        if !seen.insert(*slot) {
            return Err(FormatError::SlotTwice { index: *index, offset: *offset, slot: slot.number() });
        }
        threads.push((*offset, *slot));
    }
    // It has the program's arguments, also when the main thread has ended.
    if !seen.contains(&Slot::MAIN) {
        return Err(FormatError::NoThread { sections: u32::try_from(placed.len()).unwrap_or(u32::MAX) });
    }
    Ok(threads)
}

struct Taken {
    end: u64,
    index: u32,
    offset: u64,
}

/// The ranges of some sections by their beginnings, none of which overlaps another.
fn without_overlap(
    placed: &[Placed],
    which: impl Fn(&Section) -> bool,
) -> Result<BTreeMap<u64, Taken>, FormatError> {
    let mut taken: BTreeMap<u64, Taken> = BTreeMap::new();
    for Placed { index, offset, section } in placed.iter().filter(|placed| which(&placed.section)) {
        let Some(range) = section.range() else { continue };
        // What begins last before this one's end is the only one that can reach into it, as none overlaps so far.
        if let Some((begin, other)) = taken.range(..range.end).next_back()
            && other.end > range.start
        {
            return Err(FormatError::Overlap {
                index: *index,
                offset: *offset,
                address: range.start.max(*begin),
                other: other.index,
                other_offset: other.offset,
            });
        }
        taken.insert(range.start, Taken { end: range.end, index: *index, offset: *offset });
    }
    Ok(taken)
}
