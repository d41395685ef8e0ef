//! Where the threads of a process at rest go on: all at the runtime's resume entry, each at the top of its empty native
//! stack, and nothing else is left in registers. The thread pointer says which slot of the address plan is a thread's.

use std::collections::BTreeSet;

use godwit_isa_plan::{Quarter, RESUME_ENTRY, Slot};

/// The registers that are not zero when a thread goes on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Start {
    /// Its slot.
    pub slot: Slot,
    /// The resume entry.
    pub program_counter: u64,
    /// The top of its native stack, a multiple of 16.
    pub stack_pointer: u64,
    /// As it was.
    pub thread_pointer: u64,
}

/// A thread is none that the runtime knows.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ThreadError {
    /// It does not run in a slot.
    #[error("the thread pointer {0:#x} is no control block of the address plan")]
    NoControlBlock(u64),
    /// Another one runs in its slot.
    #[error("two threads have the control block {0:#x}")]
    Twice(u64),
}

/// Where threads go on, by their thread pointers.
///
/// # Errors
/// When one is not in a slot, or not alone there.
pub fn starts(thread_pointers: &[u64]) -> Result<Vec<Start>, ThreadError> {
    let mut taken = BTreeSet::new();
    let start = |&thread_pointer: &u64| {
        let slot =
            Slot::of_control_block(thread_pointer).ok_or(ThreadError::NoControlBlock(thread_pointer))?;
        if !taken.insert(slot) {
            return Err(ThreadError::Twice(thread_pointer));
        }
        let stack_pointer = slot.quarter(Quarter::NativeStack).end;
        Ok(Start { slot, program_counter: RESUME_ENTRY, stack_pointer, thread_pointer })
    };
    thread_pointers.iter().map(start).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_thread_goes_on_at_the_top_of_its_own_stack() {
        let second = Slot::new(5).expect("of the plan");
        let found = starts(&[Slot::MAIN.control_block(), second.control_block()]).expect("both are slots");
        assert_eq!(found[0].stack_pointer, 0x10_0400_0000);
        assert_eq!(found[0].program_counter, 0x40_0000);
        assert_eq!((found[1].slot, found[1].thread_pointer), (second, second.control_block()));
        assert_eq!(found[1].stack_pointer, second.quarter(Quarter::NativeStack).end);
    }

    #[test]
    fn a_thread_that_is_in_no_slot_or_not_alone_is_refused() {
        let main = Slot::MAIN.control_block();
        assert_eq!(starts(&[main, main + 8]), Err(ThreadError::NoControlBlock(main + 8)));
        assert_eq!(starts(&[0]), Err(ThreadError::NoControlBlock(0)));
        assert_eq!(starts(&[main, main]), Err(ThreadError::Twice(main)));
    }
}
