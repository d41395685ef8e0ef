//! What a state says of the signals of each thread, in a page of its own (`isa/runtime/include/gw/signals.h`). The program's
//! own runtime looks at the same when it is handed a state.

use crate::Memory;
use crate::plan::{self, Quarter, Slot};

pub(crate) const SIGNALS: u32 = 64;
/// SIGKILL, SIGSTOP and the runtime's own.
pub(crate) const NEVER_BLOCKED: u64 = 1 << 8 | 1 << 18 | 1 << (RESERVED - 1);
pub(crate) const RESERVED: u32 = 58;

/// The page of a thread's signals is the last one of its control quarter.
const PAGE: u64 = 4096;
// Offsets in it.
const MASK: u64 = 0;
const AFTER: u64 = 8;
const HAS_AFTER: u64 = 16;
const INTERRUPTED: u64 = 20;
const HELD: u64 = 28;
const ALTERNATE_STACK: u64 = 32;
const ALTERNATE_SIZE: u64 = 40;
const ALTERNATE_FLAGS: u64 = 48;
const INFORMATION: u64 = 64;

/// Of `ss_flags`, all that is kept.
const SS_AUTODISARM: u64 = 1 << 31;
const LAST_INTERRUPTED: u32 = 2;

/// May a handler be for it?
pub(crate) fn is_handled(signal: u32) -> bool {
    (1..=SIGNALS).contains(&signal) && NEVER_BLOCKED >> (signal - 1) & 1 == 0
}

/// Whether a parked thread holds a signal; or which field of its page cannot be, and what it holds.
pub(crate) fn page(memory: &Memory<'_>, slot: Slot) -> Result<bool, (&'static str, u64)> {
    let at = slot.quarter(Quarter::Control).end - PAGE;
    let small = |field, offset, most: u32| match memory.u32(at + offset) {
        found if found > most => Err((field, u64::from(found))),
        found => Ok(found),
    };
    for (field, offset) in [("signal mask", MASK), ("signal mask behind a wait", AFTER)] {
        let found = memory.u64(at + offset);
        if found & NEVER_BLOCKED != 0 {
            return Err((field, found));
        }
    }
    small("mark of a mask behind a wait", HAS_AFTER, 1)?;
    small("mark of an interrupted call", INTERRUPTED, LAST_INTERRUPTED)?;
    let is_held = small("mark of a held signal", HELD, 1)? == 1;
    let signal = memory.u32(at + INFORMATION);
    if is_held && !is_handled(signal) {
        return Err(("held signal", signal.into()));
    }
    let flags = memory.u64(at + ALTERNATE_FLAGS);
    if flags & !SS_AUTODISARM != 0 {
        return Err(("alternate stack's flags", flags));
    }
    let (begin, size) = (memory.u64(at + ALTERNATE_STACK), memory.u64(at + ALTERNATE_SIZE));
    let is_planned = begin.checked_add(size).is_some_and(|end| {
        (plan::DATA.start <= begin && end <= plan::DATA.end)
            || (plan::HEAP.start <= begin && end <= plan::MAP.end)
    });
    if size != 0 && !is_planned {
        return Err(("alternate stack", begin));
    }
    Ok(is_held)
}
