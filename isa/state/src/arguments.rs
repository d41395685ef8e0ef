//! The command line that a captured program was started with. The runtime copies it to the top of the main thread's
//! data stack (`isa/runtime/private/arguments.c`):
//!
//! ```text
//! | … | argument 0 | argument 1 | … | variable 0 | … | envp[0], …, null | argv[0], argv[1], …, null | end of the data stack
//! ```

use std::ffi::OsString;
use std::os::unix::ffi::OsStringExt as _;

use crate::plan::{Quarter, Slot};
use crate::{Memory, StateFile};

/// Everything is reserved in multiples of this.
const ALIGNMENT: usize = 16;
/// In so many words at the end of the data stack the array is looked for; nothing but names are made of it.
const MOST: usize = 4096;
/// Linux takes no longer argument (`MAX_ARG_STRLEN`).
const LONGEST: u64 = 128 << 10;

impl StateFile {
    /// The arguments, of which the first is the program's name. None when the program has overwritten them, or its
    /// main thread is gone; for people, since a program may write there what it likes.
    #[must_use]
    pub fn arguments(&self) -> Option<Vec<OsString>> {
        self.threads().iter().find(|thread| thread.slot == Slot::MAIN)?;
        let memory = self.memory();
        let stack = Slot::MAIN.quarter(Quarter::DataStack);
        let mut top = vec![0; MOST * 8];
        memory.read(stack.end - top.len() as u64, &mut top);
        let top: Vec<u64> = top.as_chunks().0.iter().map(|word| u64::from_le_bytes(*word)).collect();
        (1..MOST - 2).find_map(|count| {
            let words = (count + 1).next_multiple_of(ALIGNMENT / 8);
            let array = stack.end - words as u64 * 8;
            let (last, arguments) = top[MOST - words..][..=count].split_last()?;
            if *last != 0 || arguments.iter().any(|pointer| !(stack.start..array).contains(pointer)) {
                return None;
            }
            // The end of the other array: else this is a part of a longer one.
            if top.get(MOST.checked_sub(words + 1)?) != Some(&0) {
                return None;
            }
            let strings: Option<Vec<_>> =
                arguments.iter().map(|pointer| string(&memory, *pointer, array)).collect();
            let strings = strings?;
            // They follow one another, and the name is the first. The others may have been put in another order since.
            let mut places: Vec<_> = arguments.iter().zip(&strings).collect();
            places.sort_by_key(|(pointer, _)| **pointer);
            let follow = |pair: &[(&u64, &Vec<u8>)]| *pair[0].0 + pair[0].1.len() as u64 + 1 == *pair[1].0;
            let is_whole = places[0].0 == &arguments[0] && places.windows(2).all(follow);
            is_whole.then(|| strings.into_iter().map(OsString::from_vec).collect())
        })
    }
}

/// The string at an address, which ends before `end`.
fn string(memory: &Memory<'_>, address: u64, end: u64) -> Option<Vec<u8>> {
    let mut bytes = vec![0; usize::try_from((end - address).min(LONGEST)).ok()?];
    memory.read(address, &mut bytes);
    let length = bytes.iter().position(|byte| *byte == 0)?;
    bytes.truncate(length);
    Some(bytes)
}
