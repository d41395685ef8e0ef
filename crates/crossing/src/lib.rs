//! A process that was built by `godwit-cc` and is at rest (`isa/ABI.md`, section 7) goes on under the executable of
//! another instruction set, or under the same one again. This crate says what that takes, and does none of it: all are
//! pure functions of what was read, and every byte is taken as hostile.
//!
//! ```text
//! record      what the process says about itself        Record
//! executable  what the target's file maps                Executable
//! memory      which of the process's pages go along      Fate
//! threads     where each thread goes on                  Start
//! ```

mod executable;
mod memory;
mod record;
mod threads;

pub use executable::{Contents, Executable, ExecutableError, Part};
pub use memory::Fate;
pub use record::{Record, RecordError, Request, Rest};
pub use threads::{Start, ThreadError, starts};
