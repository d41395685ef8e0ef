//! A program's table of actions, timers and signals that wait (`isa/runtime/include/gw/signals.h`). The program's own runtime
//! looks at the same when it is handed a state; that a handler is a function of the program only the executable can tell.

use std::collections::BTreeSet;

use crate::plan;
use crate::signals::{NEVER_BLOCKED, RESERVED, SIGNALS, is_handled};
use crate::{Memory, Mismatch, Thread};

// Offsets and sizes.
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

/// Looks at the table at `address`; `functions` are where the program's functions begin.
pub(crate) fn check(
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
