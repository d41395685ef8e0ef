//! An executable of a program, as far as it is mapped: the parts that make up a process's text, constants and
//! variables. Its build stands at the fixed address of the record, so no symbols are needed.

use std::ops::Range;

use godwit_isa_plan::{DATA, PAGE, PRIVATE_DATA, PRIVATE_TEXT, RECORD, Set, TEXT};
use object::elf::{PF_W, PF_X, PT_INTERP, PT_LOAD};
use object::read::elf::{FileHeader as _, ProgramHeader as _};
use object::{Endianness, elf};

use crate::record::{Record, RecordError};

/// More than any program of the link has.
const MOST_PARTS: usize = 64;

/// What one program header maps.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Part {
    /// Its addresses, not rounded to pages.
    pub range: Range<u64>,
    /// Where its bytes are in the file. What is behind them is zero.
    pub file: Range<u64>,
    /// It may be written.
    pub writable: bool,
    /// It is code.
    pub executable: bool,
}

impl Part {
    /// The pages that it has.
    #[must_use]
    pub fn pages(&self) -> Range<u64> {
        self.range.start & !(PAGE - 1)..self.range.end.next_multiple_of(PAGE)
    }
}

/// What an executable has in a page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Contents<'a> {
    /// These bytes, and zeros behind them up to the page's end.
    Bytes(&'a [u8]),
    /// Nothing is mapped there.
    Unmapped,
}

/// An executable.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Executable {
    /// The set whose code it has.
    pub set: Set,
    /// What it was built from: the same for every set.
    pub identity: [u8; 32],
    /// Where a new process begins.
    pub entry: u64,
    /// In the order of their addresses, none in a page of another.
    parts: Vec<Part>,
}

/// No process of `godwit-cc` runs by this file.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ExecutableError {
    /// It is not an executable at all.
    #[error("the file is no ELF executable for 64 bits, little endian: {0}")]
    Elf(String),
    /// Of another machine.
    #[error("the executable is for a machine that godwit-cc does not build for (ELF machine {0})")]
    Machine(u16),
    /// It needs a loader, as none of ours does.
    #[error("the executable was not built by godwit-cc: it is linked dynamically")]
    Dynamic,
    /// A part is not where the address plan has it, or not protected as there.
    #[error(
        "the executable was not built by godwit-cc, or is damaged: its part at {0:#x} does not fit the address plan"
    )]
    Part(u64),
    /// It has no record.
    #[error("the executable's record cannot be read: {0}")]
    Record(#[from] RecordError),
    /// It was made to ask the compiler something (`configure`), for one set only.
    #[error("the executable has no build identity: it was linked as a probe, for one instruction set only")]
    Probe,
}

impl Executable {
    /// Reads an executable.
    ///
    /// # Errors
    /// When it is none of `godwit-cc`'s.
    pub fn decode(file: &[u8]) -> Result<Self, ExecutableError> {
        let unusable = |error: object::Error| ExecutableError::Elf(error.to_string());
        let header = elf::FileHeader64::<Endianness>::parse(file).map_err(unusable)?;
        let endian = header.endian().map_err(unusable)?;
        let set = match header.e_machine(endian) {
            elf::EM_X86_64 if endian == Endianness::Little => Set::X86_64,
            elf::EM_AARCH64 if endian == Endianness::Little => Set::Aarch64,
            other => return Err(ExecutableError::Machine(other)),
        };
        let mut parts: Vec<Part> = Vec::new();
        for program in header.program_headers(endian, file).map_err(unusable)? {
            match program.p_type(endian) {
                PT_INTERP => return Err(ExecutableError::Dynamic),
                PT_LOAD if program.p_memsz(endian) != 0 => {}
                _ => continue,
            }
            let begin = program.p_vaddr(endian);
            let refused = ExecutableError::Part(begin);
            let flags = program.p_flags(endian);
            let end = |begin: u64, bytes: u64| begin.checked_add(bytes).ok_or_else(|| refused.clone());
            let offset = program.p_offset(endian);
            let part = Part {
                range: begin..end(begin, program.p_memsz(endian))?,
                file: offset..end(offset, program.p_filesz(endian))?,
                writable: flags & PF_W != 0,
                executable: flags & PF_X != 0,
            };
            let last = parts.last().map_or(0, |part| part.pages().end);
            if parts.len() == MOST_PARTS || !fits(&part, file) || part.pages().start < last {
                return Err(refused);
            }
            parts.push(part);
        }
        let mut executable = Self { set, identity: [0; 32], entry: header.e_entry(endian), parts };
        let mut record = [0; Record::BYTES];
        if let Contents::Bytes(bytes) = executable.contents(RECORD, file) {
            let there = bytes.len().min(Record::BYTES);
            record[..there].copy_from_slice(&bytes[..there]);
        }
        executable.identity = Record::decode(&record)?.identity;
        if executable.identity == [0; 32] {
            return Err(ExecutableError::Probe);
        }
        Ok(executable)
    }

    /// What it maps, in the order of addresses.
    #[must_use]
    pub fn parts(&self) -> &[Part] {
        &self.parts
    }

    /// What a new process has in a page, of the file that this was decoded from.
    #[must_use]
    pub fn contents<'a>(&self, page: u64, file: &'a [u8]) -> Contents<'a> {
        let Some(part) = self.part_at(page) else { return Contents::Unmapped };
        // Parts begin at pages, in memory and in the file.
        let begin = part.file.start + (page - part.range.start);
        let end = part.file.end.min(begin + PAGE);
        let bytes = usize::try_from(begin).ok().zip(usize::try_from(end).ok());
        Contents::Bytes(bytes.and_then(|(begin, end)| file.get(begin..end)).unwrap_or_default())
    }

    pub(crate) fn is_writable(&self, page: u64) -> bool {
        self.part_at(page).is_some_and(|part| part.writable)
    }

    fn part_at(&self, page: u64) -> Option<&Part> {
        self.parts.iter().find(|part| part.pages().contains(&page))
    }
}

/// Is a part where the plan has one of its kind, and in the file? The link begins each at a page, and pads the file with
/// zeros, so that the page that holds the end of variables can be mapped from the file as it is.
fn fits(part: &Part, file: &[u8]) -> bool {
    let within = |outer: &Range<u64>| outer.start <= part.range.start && part.range.end <= outer.end;
    let is_code = within(&PRIVATE_TEXT) || within(&TEXT);
    let is_data = within(&DATA) || within(&PRIVATE_DATA);
    let protection = if is_code { part.executable && !part.writable } else { is_data && !part.executable };
    let bytes = part.file.end - part.file.start;
    let at = |offset: u64| usize::try_from(offset).unwrap_or(usize::MAX);
    // What is not in the file has no end that could be rounded.
    let behind = file.get(at(part.file.end)..).unwrap_or_default();
    let tail = at(part.file.end.wrapping_neg() % PAGE).min(behind.len());
    protection
        && part.range.start.is_multiple_of(PAGE)
        && part.file.start.is_multiple_of(PAGE)
        && bytes <= part.range.end - part.range.start
        && part.file.end <= file.len() as u64
        && (!part.writable || behind[..tail].iter().all(|byte| *byte == 0))
}

#[cfg(test)]
pub(crate) mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Flags, address, offset, bytes in the file, bytes in memory.
    const PARTS: [(u32, u64, u64, u64, u64); 4] = [
        (5, 0x40_0000, 0x1000, 0x10, 0x10),
        (5, 0x400_0000, 0x2000, 0x10, 0x10),
        (6, 0x801_0000, 0x3000, 0x20, 0x2008),
        (6, 0x7000_0000, 0x4000, 0x50, 0x3000),
    ];

    /// A small executable.
    pub(crate) fn file() -> Vec<u8> {
        with(&PARTS)
    }

    fn with(parts: &[(u32, u64, u64, u64, u64)]) -> Vec<u8> {
        let mut file = vec![0; 0x5000];
        file[..16].copy_from_slice(b"\x7fELF\x02\x01\x01\0\0\0\0\0\0\0\0\0");
        let mut put = |at: usize, bytes: &[u8]| file[at..at + bytes.len()].copy_from_slice(bytes);
        put(16, &2_u16.to_le_bytes());
        put(18, &elf::EM_X86_64.to_le_bytes());
        put(20, &1_u32.to_le_bytes());
        put(24, &0x40_0000_u64.to_le_bytes());
        put(32, &64_u64.to_le_bytes());
        put(52, &64_u16.to_le_bytes());
        put(54, &56_u16.to_le_bytes());
        put(56, &u16::try_from(parts.len()).expect("few").to_le_bytes());
        for (at, (flags, address, offset, bytes, memory)) in (64..).step_by(56).zip(parts) {
            put(at, &PT_LOAD.to_le_bytes());
            put(at + 4, &flags.to_le_bytes());
            for (field, value) in [(8, offset), (16, address), (24, address), (32, bytes), (40, memory)] {
                put(at + field, &value.to_le_bytes());
            }
        }
        put(0x4000, &[9; 32]);
        put(0x4020, b"GODWREST\x01\0\0\0");
        put(0x3000, &[1; 0x20]);
        file
    }

    fn refused(change: impl Fn(&mut [(u32, u64, u64, u64, u64)])) -> ExecutableError {
        let mut parts = PARTS;
        change(&mut parts);
        Executable::decode(&with(&parts)).expect_err("it does not fit")
    }

    #[test]
    fn an_executable_says_what_it_maps() {
        let bytes = file();
        let executable = Executable::decode(&bytes).expect("it is whole");
        assert_eq!((executable.set, executable.identity), (Set::X86_64, [9; 32]));
        assert_eq!(executable.parts().len(), 4);
        assert_eq!(executable.contents(0x801_0000, &bytes), Contents::Bytes(&[1; 0x20]));
        assert_eq!(executable.contents(0x801_2000, &bytes), Contents::Bytes(&[]), "zeros only");
        assert_eq!(executable.contents(0x801_3000, &bytes), Contents::Unmapped);
    }

    #[test]
    fn a_part_that_is_not_of_the_plan_is_refused() {
        let text = ExecutableError::Part(0x40_0000);
        assert_eq!(refused(|parts| parts[0].0 = 7), text, "text that may be written");
        assert_eq!(refused(|parts| parts[0].2 = 0x1001), text, "not at a page of the file");
        assert_eq!(refused(|parts| parts[0].3 = 0x11), text, "more in the file than in memory");
        assert_eq!(refused(|parts| parts[0].3 = u64::MAX), text, "too long for any file");
        assert_eq!(refused(|parts| parts[0].2 = 0x10_0000), text, "behind the end of the file");
        let data = ExecutableError::Part(0x801_0000);
        assert_eq!(refused(|parts| parts[2].0 = 5), data, "code among the variables");
        assert_eq!(refused(|parts| parts[2].4 = 0x7000_0000), data, "into the private data");
        assert_eq!(refused(|parts| parts[2].3 = 0x8), data, "no zeros behind what is in the file");
        assert_eq!(
            refused(|parts| parts[3].1 = 0x801_2000),
            ExecutableError::Part(0x801_2000),
            "in a page of another"
        );
    }

    #[test]
    fn what_is_none_of_ours_is_refused_by_name() {
        let change = |at: usize, byte: u8| {
            let mut bytes = file();
            bytes[at] = byte;
            Executable::decode(&bytes).expect_err("it is none")
        };
        assert!(matches!(change(0, 0), ExecutableError::Elf(_)));
        assert_eq!(change(18, 3), ExecutableError::Machine(3));
        assert_eq!(change(64, 3), ExecutableError::Dynamic);
        assert_eq!(change(0x4020, 0), ExecutableError::Record(RecordError::Foreign));
        let mut bytes = file();
        bytes[0x4000..0x4020].fill(0);
        assert_eq!(Executable::decode(&bytes), Err(ExecutableError::Probe));
    }

    proptest! {
        #[test]
        fn no_bytes_make_it_panic(changes in prop::collection::vec((0usize..300, any::<u8>()), 1..8), page in any::<u64>()) {
            let mut bytes = file();
            for (at, byte) in changes {
                bytes[at] = byte;
            }
            if let Ok(executable) = Executable::decode(&bytes) {
                let page = page & !(PAGE - 1);
                let _ = executable.contents(page, &bytes);
                for part in executable.parts() {
                    prop_assert!(part.pages().end <= PRIVATE_DATA.end);
                }
            }
        }
    }
}
