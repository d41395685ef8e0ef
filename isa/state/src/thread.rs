//! A thread's control block, as far as it says where the thread's frames and data stack end
//! (`isa/runtime/include/gw/thread.h`).

use crate::plan::{self, Quarter, Slot};
use crate::{FormatError, Memory, signals};

// Offsets in the control block.
const SELF: u64 = 0;
const STATE: u64 = 12;
const DATA_STACK: u64 = 16;
const CONTINUATION: u64 = 24;
const SLOT: u64 = 44;
const REQUEST: u64 = 8;
const JUMP_FRAME: u64 = 48;
const CHILD_WORD: u64 = 88;
const UNINTERRUPTED: u64 = 96;

/// The only request that a parked thread may have: a signal is held.
const REQUEST_SIGNAL: u32 = 4;

// In the page of the thread's signals (`isa/runtime/include/gw/signals.h`), the last one of the control quarter.
const SIGNALS: u64 = 4096;
const OWN_STACK: u64 = 56;

// States of a thread (`enum gw_thread_state`) that a file may have.
const PARKED: u32 = 0;
const IDLE: u32 = 3;

/// A slot that is in use.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Thread {
    /// Where its memory is.
    pub slot: Slot,
    /// Whether a thread goes on in it. None does in that of a thread that was not started yet, or has ended and was not
    /// joined, or is the main thread's and has ended.
    pub parked: bool,
    /// The lowest used byte of its data stack.
    pub data_stack: u64,
    /// The end of its continuation frames; they begin where the quarter does.
    pub continuation: u64,
}

impl Thread {
    /// Reads a control block; `offset` is where the file tells of the thread.
    pub(crate) fn read(memory: &Memory<'_>, slot: Slot, offset: u64) -> Result<Self, FormatError> {
        let block = slot.control_block();
        let bad = |field, found| FormatError::ControlBlock { offset, slot: slot.number(), field, found };
        let own_address = memory.u64(block + SELF);
        if own_address != block {
            return Err(bad("own address", own_address));
        }
        let number = memory.u32(block + SLOT);
        if number != slot.number() {
            return Err(bad("slot", u64::from(number)));
        }
        // It neither captures nor jumps.
        let state = memory.u32(block + STATE);
        if state != PARKED && state != IDLE {
            return Err(bad("state", u64::from(state)));
        }
        let within = |field, quarter, value| {
            let quarter = slot.quarter(quarter);
            if quarter.contains(&value) || value == quarter.end { Ok(value) } else { Err(bad(field, value)) }
        };
        // In the handler of a signal it may be in an alternate stack; where its own ends is told in another place then.
        let mut data_stack = memory.u64(block + DATA_STACK);
        let own_stack = slot.quarter(Quarter::DataStack);
        if !own_stack.contains(&data_stack) && data_stack != own_stack.end {
            data_stack = memory.u64(slot.quarter(Quarter::Control).end - SIGNALS + OWN_STACK);
        }
        let thread = Self {
            slot,
            parked: state == PARKED,
            data_stack: within("data stack pointer", Quarter::DataStack, data_stack)?,
            continuation: within(
                "continuation pointer",
                Quarter::Continuation,
                memory.u64(block + CONTINUATION),
            )?,
        };
        // Nobody would go on with its frames.
        if !thread.parked && thread.continuation_bytes() > 0 {
            return Err(bad("continuation pointer", thread.continuation));
        }
        if thread.parked {
            thread.is_at_rest(memory).map_err(|(field, found)| bad(field, found))?;
        }
        Ok(thread)
    }

    /// Looks at what a thread would go by when it goes on.
    fn is_at_rest(&self, memory: &Memory<'_>) -> Result<(), (&'static str, u64)> {
        let block = self.slot.control_block();
        let request = if signals::page(memory, self.slot)? { REQUEST_SIGNAL } else { 0 };
        let found = memory.u32(block + REQUEST);
        if found != request {
            return Err(("request", found.into()));
        }
        for (field, offset) in
            [("longjmp on its way", JUMP_FRAME), ("mark of a fault's handler", UNINTERRUPTED)]
        {
            let found = match offset {
                UNINTERRUPTED => memory.u32(block + offset).into(),
                _ => memory.u64(block + offset),
            };
            if found != 0 {
                return Err((field, found));
            }
        }
        let word = memory.u64(block + CHILD_WORD);
        // It is written to when the thread ends.
        let is_memory = word.checked_add(4).is_some_and(|end| plan::region_of(&(word..end)).is_some());
        if word != 0 && !(is_memory && word.is_multiple_of(4)) {
            return Err(("word to clear at its end", word));
        }
        Ok(())
    }

    /// Bytes of its continuation frames.
    #[must_use]
    pub fn continuation_bytes(&self) -> u64 {
        self.continuation - self.slot.quarter(Quarter::Continuation).start
    }

    /// Bytes of its data stack.
    #[must_use]
    pub fn data_stack_bytes(&self) -> u64 {
        self.slot.quarter(Quarter::DataStack).end - self.data_stack
    }
}
