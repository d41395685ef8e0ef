//! The address plan that every program has (`isa/ABI.md`, section 3; `isa/runtime/include/gw/thread.h`): which
//! addresses a state may name, and which mean something to one set only; and what a program is known by.

mod binding;
pub mod image;
mod set;

use std::fmt;
use std::ops::Range;

pub use binding::Binding;
pub use set::Set;

/// Pages of the plan, on every set.
pub const PAGE: u64 = 4096;
/// Code of one set: its runtime, and what runs in captures only.
pub const PRIVATE_TEXT: Range<u64> = 0x0040_0000..0x0400_0000;
/// Where the threads of a process go on whose memory was restored: the first of the fixed entries.
pub const RESUME_ENTRY: u64 = PRIVATE_TEXT.start;
/// Where the kernel delivers the signal that asks for rest.
pub const REQUEST_ENTRY: u64 = RESUME_ENTRY + 0x10;
/// Where the kernel delivers all other signals that a program handles.
pub const SIGNAL_ENTRY: u64 = RESUME_ENTRY + 0x20;
/// Where a handler returns to.
pub const RETURN_ENTRY: u64 = RESUME_ENTRY + 0x30;
/// Variables and constants of one set.
pub const PRIVATE_DATA: Range<u64> = 0x7000_0000..0x7f00_0000;
/// What a process says about its build and about rest, to those who look from outside.
pub const RECORD: u64 = PRIVATE_DATA.start;
/// Functions that neutral memory may point at. No state has bytes there.
pub const TEXT: Range<u64> = 0x0400_0000..0x0800_0000;
/// Constants, variables, bss. A state holds the writable part, which only the executable knows the bounds of.
pub const DATA: Range<u64> = 0x0800_0000..0x7000_0000;
/// What `brk` moves.
pub const HEAP: Range<u64> = 0x1_0000_0000..0x10_0000_0000;
/// The table of what `mmap` gave out.
pub const MAP_TABLE: Range<u64> = 0x30_0000_0000..0x30_0400_0000;
/// What `mmap` gives out.
pub const MAP: Range<u64> = 0x30_0400_0000..0x70_0000_0000;
/// Slots of threads; the first is the main thread's.
pub const SLOTS: u32 = 2045;

const SLOTS_BEGIN: u64 = 0x10_0000_0000;
const MAIN_SLOT_BYTES: u64 = 256 << 20;
const SLOT_BYTES: u64 = 64 << 20;
/// At the beginning of each quarter, never mapped.
const GUARD: u64 = 64 << 10;

/// What a quarter of a thread's slot holds, from low addresses to high.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Quarter {
    /// The stack of the set's own code; empty in a state, and never part of one.
    NativeStack,
    /// The frames that functions left when they were captured; grows up.
    Continuation,
    /// Variables that have an address; grows down.
    DataStack,
    /// The control block and the thread's TLS block.
    Control,
}

impl Quarter {
    /// All of them.
    pub const ALL: [Self; 4] = [Self::NativeStack, Self::Continuation, Self::DataStack, Self::Control];
}

/// The number of a thread's slot, which is one of the plan's.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Slot(u32);

impl Slot {
    /// The main thread's.
    pub const MAIN: Self = Self(0);

    /// Slot `number`, if the plan has it.
    #[must_use]
    pub fn new(number: u32) -> Option<Self> {
        (number < SLOTS).then_some(Self(number))
    }

    /// Its number.
    #[must_use]
    pub fn number(self) -> u32 {
        self.0
    }

    /// Where the usable part of a quarter is: without its guard.
    #[must_use]
    pub fn quarter(self, quarter: Quarter) -> Range<u64> {
        let bytes = self.bytes() / 4;
        let begin = self.begin() + quarter as u64 * bytes;
        begin + GUARD..begin + bytes
    }

    /// Where the thread's control block is: what its thread pointer holds.
    #[must_use]
    pub fn control_block(self) -> u64 {
        self.quarter(Quarter::Control).start
    }

    /// The slot whose control block is at this address: of a thread pointer.
    #[must_use]
    pub fn of_control_block(address: u64) -> Option<Self> {
        Self::at(address).filter(|slot| slot.control_block() == address)
    }

    /// The slot that an address lies in, guards and all.
    #[must_use]
    pub fn at(address: u64) -> Option<Self> {
        let behind_main = SLOTS_BEGIN + MAIN_SLOT_BYTES;
        let number = match address {
            ..SLOTS_BEGIN => return None,
            _ if address < behind_main => 0,
            _ => (address - behind_main) / SLOT_BYTES + 1,
        };
        Self::new(u32::try_from(number).ok()?)
    }

    fn bytes(self) -> u64 {
        if self.0 == 0 { MAIN_SLOT_BYTES } else { SLOT_BYTES }
    }

    fn begin(self) -> u64 {
        match self.0 {
            0 => SLOTS_BEGIN,
            number => SLOTS_BEGIN + MAIN_SLOT_BYTES + u64::from(number - 1) * SLOT_BYTES,
        }
    }
}

impl fmt::Display for Slot {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// A part of the plan that a state may have bytes in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Region {
    /// Variables and bss.
    Data,
    /// The heap.
    Heap,
    /// The table of mappings.
    MapTable,
    /// What `mmap` gave out.
    Map,
    /// A quarter of a thread's slot, but not the native stack.
    Thread(Slot, Quarter),
}

/// The region that holds all of a range; none when it is empty, has parts outside, or is private to a set.
#[must_use]
pub fn region_of(range: &Range<u64>) -> Option<Region> {
    if range.is_empty() {
        return None;
    }
    let within = |outer: &Range<u64>| outer.start <= range.start && range.end <= outer.end;
    for (outer, region) in
        [(DATA, Region::Data), (HEAP, Region::Heap), (MAP_TABLE, Region::MapTable), (MAP, Region::Map)]
    {
        if within(&outer) {
            return Some(region);
        }
    }
    let slot = Slot::at(range.start)?;
    let quarter = Quarter::ALL.into_iter().find(|quarter| within(&slot.quarter(*quarter)))?;
    (quarter != Quarter::NativeStack).then_some(Region::Thread(slot, quarter))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slots_follow_one_another_up_to_the_mappings() {
        assert_eq!(Slot::MAIN.control_block(), 0x10_0c01_0000);
        let last = Slot::new(SLOTS - 1).expect("of the plan");
        assert_eq!(last.quarter(Quarter::Control).end, MAP_TABLE.start);
        assert_eq!(Slot::new(SLOTS), None);
        for number in [0, 1, 2, 77, SLOTS - 1] {
            let slot = Slot::new(number).expect("of the plan");
            for quarter in Quarter::ALL {
                let range = slot.quarter(quarter);
                assert_eq!(Slot::at(range.start), Some(slot));
                assert_eq!(Slot::at(range.end - 1), Some(slot));
                let of_control = Slot::of_control_block(range.start);
                assert_eq!(of_control, (quarter == Quarter::Control).then_some(slot));
                let expected = (quarter != Quarter::NativeStack).then_some(Region::Thread(slot, quarter));
                assert_eq!(region_of(&range), expected);
                assert_eq!(region_of(&(range.start - 1..range.end)), None, "the guard is no part of it");
            }
        }
    }

    #[test]
    fn what_is_private_to_a_set_is_in_no_region() {
        for range in [0..8, 0x0040_0000..0x0040_1000, 0x0400_0000..0x0400_0010, 0x7000_0000..0x7000_1000] {
            assert_eq!(region_of(&range), None, "{range:x?}");
        }
        assert_eq!(region_of(&(HEAP.end - 8..HEAP.end + 8)), None, "of two regions");
        assert_eq!(region_of(&(MAP.end - 8..MAP.end)), Some(Region::Map));
        assert_eq!(region_of(&(u64::MAX - 8..u64::MAX)), None);
    }
}
