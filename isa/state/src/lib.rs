//! The state that a captured program leaves in a file, for whoever reads or writes one: `godwit-state`, and what
//! rewrites checkpoints for another instruction set. The runtime writes the same format
//! (`isa/runtime/include/gw/state.h`). Little endian, all numbers unsigned:
//!
//! ```text
//! header, 64 bytes    0  "GWSTATE\0"                section    0  u32 type: 1 bytes, 2 mapping, 3 thread,
//!                                                             4 mapping behind the end of its file,
//!                                                             5 open descriptor, 6 process, 7 lock
//!                     8  u32 version: 2                        4  u32 value: PROT_* of a mapping, slot of a thread,
//!                                                             number of a descriptor
//!                    12  u32 number of sections                8  u64 address
//!                    16  u8[32] identity of the build         16  u64 length
//!                    48  u64 length of the file               24  of types 1, 5 to 7: the bytes, and zeros up to
//!                    56  u32 CRC-32C of what follows              a multiple of 8
//!                    60  u32 CRC-32C of bytes 0 to 59
//! ```
//!
//! Every byte is taken as hostile: a [`StateFile`] exists only after all of [`FormatError`] has been ruled out, and
//! nothing of a file is given to anyone before. What only the executable can tell (does the build fit, are the
//! continuation frames whole) is asked of a [`Program`].

mod arguments;
mod check;
mod descriptor;
mod error;
mod file;
mod frames;
mod identity;
mod lock;
mod memory;
mod program;
mod section;
mod signal_table;
mod signals;
mod thread;

pub use descriptor::{Descriptor, Kind, Process};
pub use error::{FormatError, Mismatch, ProgramError, ReadError};
pub use file::{HEADER, MAGIC, SECTION_HEADER, StateFile, VERSION};
pub use frames::Frame;
pub use godwit_isa_plan::{self as plan, Set};
pub use identity::BuildIdentity;
pub use lock::{Lock, LockKind};
pub use memory::{Memory, Usage};
pub use program::{Program, Site};
pub use section::Section;
pub use thread::Thread;

/// The exit status of a process that has left a state (`GW_EXIT_CAPTURED`).
pub const EXIT_CAPTURED: i32 = 86;
/// The exit status of a process whose runtime could not go on (`GW_EXIT_FAILED`), and of `godwit-state` itself.
pub const EXIT_FAILED: i32 = 125;
