//! What can be wrong with a state, with an executable, and between the two. Each says where in the file, and what to do.

use std::io;
use std::path::PathBuf;

use crate::BuildIdentity;

/// A state could not be taken from a file.
#[derive(Debug, thiserror::Error)]
pub enum ReadError {
    /// The file cannot be opened or read.
    #[error("cannot read the state file {}", path.display())]
    File {
        /// Which.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// It is larger than memory.
    #[error("the state file {} has {bytes} bytes, for which there is not enough memory", path.display())]
    TooLarge {
        /// Which.
        path: PathBuf,
        /// Its size.
        bytes: u64,
    },
    /// Its bytes are not a state.
    #[error("the state file {} is refused", path.display())]
    Format {
        /// Which.
        path: PathBuf,
        /// Why.
        source: FormatError,
    },
}

/// Bytes are not a state. Offsets are from the beginning of the file.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum FormatError {
    /// Not even a header.
    #[error("it ends at offset {length}, before its header does; copy it again from where it was written")]
    TooShort {
        /// Bytes there are.
        length: u64,
    },
    /// The first eight bytes.
    #[error("at offset 0: it does not begin as a state does; name a file that godwit-state has written")]
    Magic,
    /// A format of another time.
    #[error(
        "at offset 8: it is of version {found} of the format, and this godwit reads version 2; use the godwit \
             that wrote it"
    )]
    Version {
        /// What it says.
        found: u32,
    },
    /// The header's own sum.
    #[error(
        "at offset 60: the header was altered, since its checksum is {stated:#010x} and not {found:#010x}; copy \
             it again from where it was written"
    )]
    HeaderSum {
        /// What the file says.
        stated: u32,
        /// What its bytes give.
        found: u32,
    },
    /// The file is shorter than it was.
    #[error("it ends at offset {found}, but had {stated} bytes when it was written; copy it again")]
    Truncated {
        /// What the header says.
        stated: u64,
        /// Bytes there are.
        found: u64,
    },
    /// The file is longer than it was.
    #[error("at offset {stated}: {} bytes were appended to it; copy it again from where it was written", found - stated)]
    Appended {
        /// What the header says.
        stated: u64,
        /// Bytes there are.
        found: u64,
    },
    /// The sum over everything behind the header.
    #[error(
        "behind offset 64: it was altered, since its checksum is {stated:#010x} and not {found:#010x}; copy it \
             again from where it was written"
    )]
    BodySum {
        /// What the header says.
        stated: u32,
        /// What the bytes give.
        found: u32,
    },
    /// The header tells of more sections than there are.
    #[error(
        "at offset {offset}: section {index} of {sections} would begin here, but {left} bytes are left; capture \
             the program again"
    )]
    SectionMissing {
        /// Which, from 0.
        index: u32,
        /// How many the header tells of.
        sections: u32,
        /// Where it would be.
        offset: u64,
        /// Bytes up to the file's end.
        left: u64,
    },
    /// A section's bytes go past the end.
    #[error(
        "at offset {offset}: section {index} says that it has {length} bytes, but {left} are left in the file; \
             capture the program again"
    )]
    SectionLength {
        /// Which, from 0.
        index: u32,
        /// Where it begins.
        offset: u64,
        /// What it says.
        length: u64,
        /// What there is.
        left: u64,
    },
    /// A section of no known type.
    #[error(
        "at offset {offset}: section {index} is of type {found}, which is unknown; use the godwit that wrote it"
    )]
    SectionType {
        /// Which, from 0.
        index: u32,
        /// Where it begins.
        offset: u64,
        /// What it says.
        found: u32,
    },
    /// A field that the section's type does not use is not zero.
    #[error(
        "at offset {offset}: section {index} has {found:#x} as its {field}, which must be zero for its type; \
             capture the program again"
    )]
    UnusedField {
        /// Which section, from 0.
        index: u32,
        /// Where the section begins.
        offset: u64,
        /// Which field.
        field: &'static str,
        /// What it holds.
        found: u64,
    },
    /// What is said of an open descriptor cannot be.
    #[error(
        "at offset {offset}: section {index} says of descriptor {number} what cannot be: it {why}; capture the program again"
    )]
    Descriptor {
        /// Which section, from 0.
        index: u32,
        /// Where the section begins.
        offset: u64,
        /// Its number.
        number: u32,
        /// What is wrong with it.
        why: &'static str,
    },
    /// What is said of the process cannot be.
    #[error(
        "at offset {offset}: section {index} says of the process what cannot be: it {why}; capture the program again"
    )]
    Process {
        /// Which section, from 0.
        index: u32,
        /// Where the section begins.
        offset: u64,
        /// What is wrong with it.
        why: &'static str,
    },
    /// Bytes between two sections that are not zero.
    #[error("at offset {offset}: the padding behind section {index} is not zero; capture the program again")]
    Padding {
        /// Which section, from 0.
        index: u32,
        /// Where the padding begins.
        offset: u64,
    },
    /// Bytes that belong to no section.
    #[error("at offset {offset}: {left} bytes follow the last section; capture the program again")]
    Trailing {
        /// Where the last section ends.
        offset: u64,
        /// Bytes from there.
        left: u64,
    },
    /// A section of memory without memory.
    #[error("at offset {offset}: section {index} is empty; capture the program again")]
    Empty {
        /// Which, from 0.
        index: u32,
        /// Where it begins.
        offset: u64,
    },
    /// Address and length together leave 64 bits.
    #[error(
        "at offset {offset}: section {index} of {length:#x} bytes at {address:#x} goes past the last address; \
             capture the program again"
    )]
    Overflow {
        /// Which, from 0.
        index: u32,
        /// Where it begins.
        offset: u64,
        /// What it says.
        address: u64,
        /// What it says.
        length: u64,
    },
    /// Memory that is not a program's to have in a state.
    #[error(
        "at offset {offset}: section {index} of {length:#x} bytes at {address:#x} is outside the program's \
             memory; capture the program again"
    )]
    OutsidePlan {
        /// Which, from 0.
        index: u32,
        /// Where it begins.
        offset: u64,
        /// What it says.
        address: u64,
        /// What it says.
        length: u64,
    },
    /// A mapping that does not consist of pages.
    #[error(
        "at offset {offset}: section {index} maps {length:#x} bytes at {address:#x}, which are not whole pages; \
             capture the program again"
    )]
    Unaligned {
        /// Which, from 0.
        index: u32,
        /// Where it begins.
        offset: u64,
        /// What it says.
        address: u64,
        /// What it says.
        length: u64,
    },
    /// A mapping with a protection that programs cannot have.
    #[error(
        "at offset {offset}: section {index} maps memory with protection {found:#x}, where only reading (1) and \
             writing (2) are known; capture the program again"
    )]
    Protection {
        /// Which, from 0.
        index: u32,
        /// Where it begins.
        offset: u64,
        /// What it says.
        found: u32,
    },
    /// Bytes of the heap or of `mmap` that no mapping holds.
    #[error(
        "at offset {offset}: section {index} has bytes at {address:#x}, where the state maps no memory; capture \
             the program again"
    )]
    Unmapped {
        /// Which, from 0.
        index: u32,
        /// Where it begins.
        offset: u64,
        /// What it says.
        address: u64,
    },
    /// Bytes of a thread that is not in the state.
    #[error(
        "at offset {offset}: section {index} has bytes of the thread in slot {slot}, which the state does not \
             have; capture the program again"
    )]
    NoSuchThread {
        /// Which, from 0.
        index: u32,
        /// Where it begins.
        offset: u64,
        /// Whose memory it is.
        slot: u32,
    },
    /// Two sections give the same memory.
    #[error(
        "at offset {offset}: section {index} gives the memory at {address:#x} that section {other} at offset \
             {other_offset} gives too; capture the program again"
    )]
    Overlap {
        /// Which, from 0.
        index: u32,
        /// Where it begins.
        offset: u64,
        /// What it says.
        address: u64,
        /// The other.
        other: u32,
        /// Where that begins.
        other_offset: u64,
    },
    /// A thread in a slot that does not exist.
    #[error("at offset {offset}: section {index} has a thread in slot {slot}, and the last is {}; capture the program \
             again", crate::plan::SLOTS - 1)]
    SlotNumber {
        /// Which, from 0.
        index: u32,
        /// Where it begins.
        offset: u64,
        /// What it says.
        slot: u32,
    },
    /// Two threads in one slot.
    #[error(
        "at offset {offset}: section {index} has a second thread in slot {slot}; capture the program again"
    )]
    SlotTwice {
        /// Which, from 0.
        index: u32,
        /// Where it begins.
        offset: u64,
        /// What it says.
        slot: u32,
    },
    /// The slot of the main thread is missing.
    #[error(
        "at offset 12: none of its {sections} sections is the main thread's slot; capture the program again"
    )]
    NoThread {
        /// What the header says.
        sections: u32,
    },
    /// No slot has a thread that goes on.
    #[error("none of its {slots} slots has a thread that could continue; capture the program again")]
    NobodyParked {
        /// How many slots are in use.
        slots: usize,
    },
    /// A lock's record.
    #[error(
        "at offset {offset}: the lock in section {index}, on the file of descriptor {number}, {why}; capture the \
             program again"
    )]
    Lock {
        /// Which section, from 0.
        index: u32,
        /// Where it begins.
        offset: u64,
        /// The descriptor's number.
        number: u32,
        /// What is wrong.
        why: &'static str,
    },
    /// A thread's control block cannot be that of a parked thread.
    #[error(
        "at offset {offset}: the control block of the thread in slot {slot} has {found:#x} as its {field}; capture \
             the program again"
    )]
    ControlBlock {
        /// Where the thread's section begins.
        offset: u64,
        /// Whose.
        slot: u32,
        /// Which field.
        field: &'static str,
        /// What it holds.
        found: u64,
    },
    /// More sections than the format can count.
    #[error("at offset 12: a state cannot have {sections} sections; write fewer and larger ones")]
    TooManySections {
        /// How many.
        sections: usize,
    },
}

/// An executable could not be used.
#[derive(Debug, thiserror::Error)]
pub enum ProgramError {
    /// It cannot be opened or read.
    #[error("cannot read the executable {}", path.display())]
    File {
        /// Which.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// Not an executable at all.
    #[error("{} is not an executable: {reason}; name a program that godwit-cc has linked", path.display())]
    Elf {
        /// Which.
        path: PathBuf,
        /// Why.
        reason: String,
    },
    /// An executable for another machine than its name says.
    #[error("{} is not an executable for {expected}; build the program again with godwit-cc", path.display())]
    Machine {
        /// Which.
        path: PathBuf,
        /// The set that the name says.
        expected: &'static str,
    },
    /// Not one of ours.
    #[error("{} has no symbol {symbol}, so it was not linked by godwit-cc, or it was stripped; build the program \
             again with godwit-cc and do not strip it", path.display())]
    Symbol {
        /// Which.
        path: PathBuf,
        /// What is missing.
        symbol: &'static str,
    },
    /// A table that points out of the file.
    #[error("{} does not hold the {bytes} bytes at {address:#x} that {symbol} names; build the program again",
            path.display())]
    Contents {
        /// Which.
        path: PathBuf,
        /// Whose bytes.
        symbol: &'static str,
        /// Where they are in memory.
        address: u64,
        /// How many.
        bytes: u64,
    },
}

/// A sound state does not fit an executable.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Mismatch {
    /// Of another program, or of another build of it.
    #[error("the state is of build {}, but {} is of build {}; use the executables that the program was captured from",
            state.short(), program.display(), found.short())]
    Build {
        /// What the state says.
        state: BuildIdentity,
        /// The executable.
        program: PathBuf,
        /// What it says.
        found: BuildIdentity,
    },
    /// Bytes in the executable's constants.
    #[error("the state has bytes at {address:#x}, outside the variables of {}; capture the program again",
            program.display())]
    Data {
        /// Where they begin.
        address: u64,
        /// The executable.
        program: PathBuf,
    },
    /// A thread that would have nothing to do.
    #[error("the thread in slot {slot} has no continuation frames; capture the program again")]
    NoFrames {
        /// Whose.
        slot: u32,
    },
    /// A frame's trailer is not one.
    #[error(
        "the continuation frames of the thread in slot {slot} are damaged at {address:#x}; capture the program \
             again"
    )]
    Trailer {
        /// Whose.
        slot: u32,
        /// Where the trailer should be.
        address: u64,
    },
    /// A frame of no site.
    #[error("the continuation frame of the thread in slot {slot} at {address:#x} names site {site}, but {} has {sites}; \
             capture the program again", program.display())]
    Site {
        /// Whose.
        slot: u32,
        /// Where its trailer is.
        address: u64,
        /// What it says.
        site: u32,
        /// How many there are.
        sites: usize,
        /// The executable.
        program: PathBuf,
    },
    /// A frame that begins before the buffer does.
    #[error(
        "the continuation frame of the thread in slot {slot} at {address:#x} has {bytes} bytes, more than are left; \
             capture the program again"
    )]
    FrameLength {
        /// Whose.
        slot: u32,
        /// Where its trailer is.
        address: u64,
        /// What its site needs.
        bytes: u32,
    },
    /// The program's table of actions, timers and waiting signals.
    #[error("the {what} {number} is {found:#x} in the state, which cannot be; capture the program again")]
    Signals {
        /// What of it.
        what: &'static str,
        /// Of which signal, timer or waiting signal.
        number: u32,
        /// What the state has.
        found: u64,
    },
}
