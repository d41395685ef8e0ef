//! What a state says of signals (`isa/runtime/include/gw/signals.h`): the page of each thread, and the program's table of
//! actions, timers and signals that wait. The program's own runtime looks at the same when it is handed a state; that a
//! handler is a function of the program only the executable can tell.

use std::collections::BTreeSet;

use crate::plan::{self, Quarter, Slot};
use crate::{Memory, Mismatch, Thread};

const SIGNALS: u32 = 64;
/// SIGKILL, SIGSTOP and the runtime's own.
const NEVER_BLOCKED: u64 = 1 << 8 | 1 << 18 | 1 << (RESERVED - 1);
const RESERVED: u32 = 58;

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

// The table: offsets and sizes.
const ACTION: u64 = 32;
const PENDING_COUNT: u64 = 2052;
const TIMERS: u64 = 2184;
const TIMER: u64 = 112;
const MOST_TIMERS: u64 = 128;
const PENDING: u64 = TIMERS + MOST_TIMERS * TIMER;
const PENDING_BYTES: u64 = 136;
const MOST_PENDING: u32 = 1024;
/// In a timer: the signal and how it is told of.
const TIMER_SIGNAL: u64 = 16 + 8;
const TIMER_NOTIFY: u64 = 16 + 12;
const MADE: u32 = 2;
/// `SIGEV_SIGNAL`, `SIGEV_NONE`, `SIGEV_THREAD_ID`.
const NOTIFY: [u32; 3] = [0, 1, 4];
const SIGEV_NONE: u32 = 1;

/// May a handler be for it?
fn is_handled(signal: u32) -> bool {
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

/// Looks at the table at `address`; `functions` are where the program's functions begin.
pub(crate) fn table(
    memory: &Memory<'_>,
    address: u64,
    threads: &[Thread],
    functions: &BTreeSet<u64>,
) -> Result<(), Mismatch> {
    let bad = |what, number: u32, found| Err(Mismatch::Signals { what, number, found });
    for signal in 1..=SIGNALS {
        let at = address + u64::from(signal - 1) * ACTION;
        let [handler, mask, known] = [0, 16, 24].map(|offset| memory.u64(at + offset));
        if known > 1 || (known == 1 && !is_handled(signal)) {
            return bad("mark of the action of signal", signal, known);
        }
        if known == 1 && mask & NEVER_BLOCKED != 0 {
            return bad("mask of the handler of signal", signal, mask);
        }
        if known == 1 && handler > 1 && !functions.contains(&handler) {
            return bad("handler of signal", signal, handler);
        }
    }
    for number in 0..MOST_TIMERS {
        let at = address + TIMERS + number * TIMER;
        let [used, signal, notify] = [0, TIMER_SIGNAL, TIMER_NOTIFY].map(|offset| memory.u32(at + offset));
        let number = u32::try_from(number).unwrap_or(u32::MAX);
        if used != 0 && used != MADE {
            return bad("mark of timer", number, used.into());
        }
        if used == MADE && !NOTIFY.contains(&notify) {
            return bad("way to tell of timer", number, notify.into());
        }
        let is_sent = (1..=SIGNALS).contains(&signal) && signal != RESERVED;
        if used == MADE && notify != SIGEV_NONE && !is_sent {
            return bad("signal of timer", number, signal.into());
        }
    }
    let pending = memory.u32(address + PENDING_COUNT);
    if pending > MOST_PENDING {
        return bad("count of signals that wait, of which there are at most", MOST_PENDING, pending.into());
    }
    for number in 0..pending {
        let at = address + PENDING + u64::from(number) * PENDING_BYTES;
        let (slot, signal) = (memory.u64(at), memory.u32(at + 8));
        let is_there = |thread: &&Thread| thread.parked && u64::from(thread.slot.number()) == slot;
        if slot != u64::from(plan::SLOTS) && threads.iter().find(is_there).is_none() {
            return bad("addressee of waiting signal", number, slot);
        }
        if !is_handled(signal) {
            return bad("number of waiting signal", number, signal.into());
        }
    }
    Ok(())
}
