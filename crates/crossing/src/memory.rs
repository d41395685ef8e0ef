//! What becomes of a page of a process at rest under the target's executable.

use godwit_isa_plan::{DATA, HEAP, MAP, MAP_TABLE, PAGE, PRIVATE_DATA, PRIVATE_TEXT, Quarter, Slot};

use crate::executable::Executable;

/// What becomes of a page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fate {
    /// It goes along as it is: the program's memory, the same on every set.
    Stays,
    /// It is what the target's executable has there ([`Executable::contents`]).
    Replaced,
    /// It is zero: a thread's native stack, of which nothing is in use.
    Emptied,
    /// The program has no memory there: the kernel's own pages, or nothing that a process of the plan could have.
    Outside,
}

impl Fate {
    /// The fate of the page that holds an address.
    #[must_use]
    pub fn of(address: u64, target: &Executable) -> Self {
        let page = address & !(PAGE - 1);
        if (PRIVATE_TEXT.start..PRIVATE_DATA.end).contains(&page) {
            // Constants are the same bytes in every executable, so only variables have to go along.
            let is_variable = DATA.contains(&page) && target.is_writable(page);
            return if is_variable { Self::Stays } else { Self::Replaced };
        }
        if HEAP.contains(&page) || MAP_TABLE.contains(&page) || MAP.contains(&page) {
            // The slots of threads lie between the heap and the table.
            return Self::Stays;
        }
        let Some(slot) = Slot::at(page) else { return Self::Outside };
        let holds = |quarter: &Quarter| slot.quarter(*quarter).contains(&page);
        match Quarter::ALL.iter().find(|quarter| holds(quarter)) {
            Some(Quarter::NativeStack) => Self::Emptied,
            Some(_) => Self::Stays,
            None => Self::Outside,
        }
    }
}

#[cfg(test)]
mod tests {
    use godwit_isa_plan::TEXT;

    use super::*;
    use crate::executable::tests::file;

    #[test]
    fn each_part_of_the_plan_has_its_fate() {
        let target = Executable::decode(&file()).expect("it is whole");
        let slot = Slot::new(3).expect("of the plan");
        let begin = |quarter| slot.quarter(quarter).start;
        for (address, fate) in [
            (0, Fate::Outside),
            (PRIVATE_TEXT.start - 1, Fate::Outside),
            (PRIVATE_TEXT.start, Fate::Replaced),
            (TEXT.start, Fate::Replaced),
            (DATA.start, Fate::Replaced),
            (0x0801_0000, Fate::Stays),
            (0x0801_2fff, Fate::Stays),
            (0x0801_3000, Fate::Replaced),
            (PRIVATE_DATA.start, Fate::Replaced),
            (PRIVATE_DATA.end, Fate::Outside),
            (HEAP.start, Fate::Stays),
            (begin(Quarter::NativeStack) - 1, Fate::Outside),
            (begin(Quarter::NativeStack), Fate::Emptied),
            (begin(Quarter::Continuation), Fate::Stays),
            (begin(Quarter::DataStack), Fate::Stays),
            (begin(Quarter::Control) - 1, Fate::Outside),
            (begin(Quarter::Control), Fate::Stays),
            (MAP_TABLE.start, Fate::Stays),
            (MAP.end - 1, Fate::Stays),
            (MAP.end, Fate::Outside),
            (u64::MAX, Fate::Outside),
        ] {
            assert_eq!(Fate::of(address, &target), fate, "{address:#x}");
        }
    }
}
