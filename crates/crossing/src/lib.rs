//! A process that was built by `godwit-cc` and is at rest (`isa/ABI.md`, section 7) goes on under the executable of
//! another instruction set, or under the same one again. This crate says what that takes, and does none of it: all are
//! pure functions of what was read, and every byte is taken as hostile.
//!
//! ```text
//! record       what the process says about itself         Record
//! executable   what the target's file maps                Executable
//! memory       which of the process's pages go along      Fate
//! kept         the same of ranges of them                  staying
//! threads      where each thread goes on                  Start
//! open_flags   the flags of open files on another set
//! target       where it goes: a node and its executables   Target
//! refusal      why it cannot, in a sentence                Unfit
//! eligibility  can it?                                     eligibility
//! maps         what a running process has mapped          areas_of_maps
//! rewrite      CRIU's images for the target                rewrite
//! ```

mod eligibility;
mod executable;
mod kept;
mod maps;
mod memory;
mod open_flags;
mod record;
mod refusal;
mod rewrite;
mod target;
mod threads;

pub use godwit_isa_plan::{Binding, Set};

pub use eligibility::{Area, Owner, Process, eligibility};
pub use executable::{Contents, Executable, ExecutableError, Part};
pub use kept::staying;
pub use maps::areas_of_maps;
pub use memory::Fate;
pub use record::{Record, RecordError, Request, Rest};
pub use refusal::{Cause, Name, Unfit};
pub use rewrite::{Records, RewriteError, Rewritten, RewrittenProcess, rewrite};
pub use target::{Node, Program, Target};
pub use threads::{Start, ThreadError, starts};
