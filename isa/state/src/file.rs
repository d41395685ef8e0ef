//! State files read and written. The drawing of the format is in the head of `lib.rs`.

use std::fs::File;
use std::io::{Read as _, Write};
use std::path::Path;

use bytes::Bytes;

use crate::check::{self, Placed};
use crate::descriptor::{self, Descriptor, Process};
use crate::lock::{self, Lock};
use crate::plan::Slot;
use crate::section::Section;
use crate::{BuildIdentity, FormatError, Memory, ReadError, Thread};

/// How a state begins.
pub const MAGIC: [u8; 8] = *b"GWSTATE\0";
/// The version of the format.
pub const VERSION: u32 = 2;
/// Bytes of the header.
pub const HEADER: usize = 64;
/// Bytes in front of a section's own.
pub const SECTION_HEADER: usize = 24;

const BYTES: u32 = 1;
const MAPPING: u32 = 2;
const THREAD: u32 = 3;
const PAST_END: u32 = 4;
const DESCRIPTOR: u32 = 5;
const PROCESS: u32 = 6;
const LOCK: u32 = 7;
/// Sections begin at multiples of this.
const ALIGNMENT: usize = 8;

/// A whole and sound state.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StateFile {
    build: BuildIdentity,
    sections: Vec<Section>,
    threads: Vec<Thread>,
}

impl StateFile {
    /// A state of these sections.
    ///
    /// # Errors
    /// When no file could have them: see [`FormatError`]. Offsets are those of the file that would be written.
    pub fn new(build: BuildIdentity, sections: Vec<Section>) -> Result<Self, FormatError> {
        if u32::try_from(sections.len()).is_err() {
            return Err(FormatError::TooManySections { sections: sections.len() });
        }
        let mut offset = HEADER as u64;
        let mut highest = None;
        let mut placed = Vec::with_capacity(sections.len());
        for (index, section) in (0..).zip(sections) {
            if let Section::Bytes { address, bytes } = &section {
                check::memory(index, offset, *address, bytes.len() as u64)?;
            }
            if let Section::Mapping { address, length, protection }
            | Section::PastEnd { address, length, protection } = section
            {
                check::mapping(index, offset, address, length, protection)?;
            }
            if let Section::Descriptor(descriptor) = &section {
                let number = descriptor.number;
                descriptor.check(highest.replace(number)).map_err(|why| FormatError::Descriptor {
                    index,
                    offset,
                    number,
                    why,
                })?;
            }
            if let Section::Process(process) = &section {
                process.check().map_err(|why| FormatError::Process { index, offset, why })?;
            }
            if let Section::Lock(lock) = &section {
                let number = lock.number;
                lock.check().map_err(|why| FormatError::Lock { index, offset, number, why })?;
            }
            let length = SECTION_HEADER as u64 + padded(&section);
            placed.push(Placed { index, offset, section });
            offset += length;
        }
        Self::assemble(build, placed)
    }

    /// Reads a file.
    ///
    /// # Errors
    /// When the file cannot be read, or is not a sound state.
    pub fn open(path: &Path) -> Result<Self, ReadError> {
        let unreadable = |source| ReadError::File { path: path.to_owned(), source };
        let refused = |source| ReadError::Format { path: path.to_owned(), source };
        let mut file = File::open(path).map_err(unreadable)?;
        let length = file.metadata().map_err(unreadable)?.len();
        // The header is looked at alone first, so that a wrong file is not read whole.
        let mut bytes = Vec::new();
        (&mut file).take(HEADER as u64).read_to_end(&mut bytes).map_err(unreadable)?;
        Header::decode(&bytes, length).map_err(refused)?;
        let too_large = || ReadError::TooLarge { path: path.to_owned(), bytes: length };
        let wanted = usize::try_from(length).map_err(|_| too_large())?;
        bytes.try_reserve_exact(wanted - bytes.len()).map_err(|_| too_large())?;
        file.read_to_end(&mut bytes).map_err(unreadable)?;
        Self::decode(bytes.into()).map_err(refused)
    }

    /// Takes a state from the bytes of a file. The sections share them.
    ///
    /// # Errors
    /// When the bytes are not a sound state.
    pub fn decode(file: Bytes) -> Result<Self, FormatError> {
        let header = Header::decode(&file, file.len() as u64)?;
        let found = crc32c::crc32c(&file[HEADER..]);
        if found != header.body_sum {
            return Err(FormatError::BodySum { stated: header.body_sum, found });
        }
        // A count that lies must not make this reserve memory: each section takes room in the file.
        let most = (file.len() - HEADER) / SECTION_HEADER;
        let mut placed = Vec::with_capacity(most.min(header.sections as usize));
        let mut at = HEADER;
        let mut highest = None;
        for index in 0..header.sections {
            let (section, end) = decode_section(&file, at, index, header.sections, highest)?;
            if let Section::Descriptor(descriptor) = &section {
                highest = Some(descriptor.number);
            }
            placed.push(Placed { index, offset: at as u64, section });
            at = end;
        }
        if at != file.len() {
            return Err(FormatError::Trailing { offset: at as u64, left: (file.len() - at) as u64 });
        }
        Self::assemble(header.build, placed)
    }

    fn assemble(build: BuildIdentity, placed: Vec<Placed>) -> Result<Self, FormatError> {
        let slots = check::sections(&placed)?;
        let sections = placed.into_iter().map(|placed| placed.section).collect();
        let mut state = Self { build, sections, threads: Vec::new() };
        let memory = state.memory();
        state.threads = slots
            .into_iter()
            .map(|(offset, slot)| Thread::read(&memory, slot, offset))
            .collect::<Result<_, _>>()?;
        if state.threads.iter().all(|thread| !thread.parked) {
            return Err(FormatError::NobodyParked { slots: state.threads.len() });
        }
        Ok(state)
    }

    /// Writes the state as a file's bytes.
    ///
    /// # Errors
    /// When the writer fails.
    pub fn write(&self, mut to: impl Write) -> std::io::Result<()> {
        let mut body_sum = 0;
        let mut length = HEADER as u64;
        for section in &self.sections {
            for part in parts(section) {
                body_sum = crc32c::crc32c_append(body_sum, part.as_ref());
                length += part.as_ref().len() as u64;
            }
        }
        let mut header = Vec::with_capacity(HEADER);
        header.extend_from_slice(&MAGIC);
        header.extend_from_slice(&VERSION.to_le_bytes());
        // `new` and `decode` have let no more sections pass.
        let sections = u32::try_from(self.sections.len()).unwrap_or(u32::MAX);
        header.extend_from_slice(&sections.to_le_bytes());
        header.extend_from_slice(&self.build.0);
        header.extend_from_slice(&length.to_le_bytes());
        header.extend_from_slice(&body_sum.to_le_bytes());
        header.extend_from_slice(&crc32c::crc32c(&header).to_le_bytes());
        to.write_all(&header)?;
        self.sections.iter().flat_map(parts).try_for_each(|part| to.write_all(part.as_ref()))?;
        to.flush()
    }

    /// The build that it fits.
    #[must_use]
    pub fn build(&self) -> BuildIdentity {
        self.build
    }

    /// Everything, in the order of the file.
    #[must_use]
    pub fn sections(&self) -> &[Section] {
        &self.sections
    }

    /// The threads, in the order of the file.
    #[must_use]
    pub fn threads(&self) -> &[Thread] {
        &self.threads
    }

    /// The open descriptors, in order of number.
    pub fn descriptors(&self) -> impl Iterator<Item = &Descriptor> {
        self.sections.iter().filter_map(|section| match section {
            Section::Descriptor(descriptor) => Some(descriptor),
            _ => None,
        })
    }

    /// Locks on files.
    pub fn locks(&self) -> impl Iterator<Item = &Lock> {
        self.sections.iter().filter_map(|section| match section {
            Section::Lock(lock) => Some(lock),
            _ => None,
        })
    }

    /// What the program has beside descriptors.
    #[must_use]
    pub fn process(&self) -> Option<&Process> {
        self.sections.iter().find_map(|section| match section {
            Section::Process(process) => Some(process),
            _ => None,
        })
    }

    /// The memory of the program.
    #[must_use]
    pub fn memory(&self) -> Memory<'_> {
        Memory::of(&self.sections)
    }
}

struct Header {
    sections: u32,
    build: BuildIdentity,
    body_sum: u32,
}

impl Header {
    /// Reads the header of a file that is `length` bytes long, of which `file` is the beginning.
    fn decode(file: &[u8], length: u64) -> Result<Self, FormatError> {
        let Some(header) = file.first_chunk::<HEADER>() else {
            return Err(FormatError::TooShort { length: file.len() as u64 });
        };
        if !header.starts_with(&MAGIC) {
            return Err(FormatError::Magic);
        }
        let version = u32_at(header, 8);
        if version != VERSION {
            return Err(FormatError::Version { found: version });
        }
        let stated = u32_at(header, 60);
        let found = crc32c::crc32c(&header[..60]);
        if stated != found {
            return Err(FormatError::HeaderSum { stated, found });
        }
        let stated = u64_at(header, 48);
        if length < stated {
            return Err(FormatError::Truncated { stated, found: length });
        }
        if length > stated {
            return Err(FormatError::Appended { stated, found: length });
        }
        let mut build = [0; 32];
        build.copy_from_slice(&header[16..48]);
        Ok(Self { sections: u32_at(header, 12), build: BuildIdentity(build), body_sum: u32_at(header, 56) })
    }
}

/// A section and where the next one begins.
fn decode_section(
    file: &Bytes,
    at: usize,
    index: u32,
    sections: u32,
    highest: Option<u32>,
) -> Result<(Section, usize), FormatError> {
    let offset = at as u64;
    let left = file.len() - at;
    let Some(header) = file[at..].first_chunk::<SECTION_HEADER>() else {
        return Err(FormatError::SectionMissing { index, sections, offset, left: left as u64 });
    };
    let (kind, value) = (u32_at(header, 0), u32_at(header, 4));
    let (address, length) = (u64_at(header, 8), u64_at(header, 16));
    let behind = at + SECTION_HEADER;
    let unused = |field, found| match found {
        0 => Ok(()),
        found => Err(FormatError::UnusedField { index, offset, field, found }),
    };
    // A section's own bytes, and where the next section begins.
    let contents = || {
        let left = file.len() - behind;
        let too_long = FormatError::SectionLength { index, offset, length, left: left as u64 };
        let whole =
            length.checked_next_multiple_of(ALIGNMENT as u64).and_then(|whole| usize::try_from(whole).ok());
        let Some(end) = whole.filter(|whole| *whole <= left).map(|whole| behind + whole) else {
            return Err(too_long);
        };
        let padding = behind + usize::try_from(length).map_err(|_| too_long)?;
        if file[padding..end].iter().any(|byte| *byte != 0) {
            return Err(FormatError::Padding { index, offset: padding as u64 });
        }
        Ok((file.slice(behind..padding), end))
    };
    match kind {
        BYTES => {
            unused("value", u64::from(value))?;
            let (bytes, end) = contents()?;
            check::memory(index, offset, address, length)?;
            Ok((Section::Bytes { address, bytes }, end))
        }
        DESCRIPTOR => {
            unused("address", address)?;
            let (bytes, end) = contents()?;
            let descriptor = Descriptor::decode(&bytes, value, highest, (index, offset))?;
            Ok((Section::Descriptor(descriptor), end))
        }
        PROCESS => {
            unused("value", u64::from(value))?;
            unused("address", address)?;
            let (bytes, end) = contents()?;
            Ok((Section::Process(Process::decode(&bytes, (index, offset))?), end))
        }
        LOCK => {
            unused("address", address)?;
            let (bytes, end) = contents()?;
            Ok((Section::Lock(Lock::decode(&bytes, value, (index, offset))?), end))
        }
        MAPPING => {
            check::mapping(index, offset, address, length, value)?;
            Ok((Section::Mapping { address, length, protection: value }, behind))
        }
        PAST_END => {
            check::mapping(index, offset, address, length, value)?;
            Ok((Section::PastEnd { address, length, protection: value }, behind))
        }
        THREAD => {
            unused("address", address)?;
            unused("length", length)?;
            let slot = Slot::new(value).ok_or(FormatError::SlotNumber { index, offset, slot: value })?;
            Ok((Section::Thread { slot }, behind))
        }
        found => Err(FormatError::SectionType { index, offset, found }),
    }
}

/// A piece of a section as it is written.
enum Part<'a> {
    Header([u8; SECTION_HEADER]),
    Contents(&'a [u8]),
    Record(Vec<u8>),
}

impl AsRef<[u8]> for Part<'_> {
    fn as_ref(&self) -> &[u8] {
        match self {
            Self::Header(bytes) => bytes,
            Self::Contents(bytes) => bytes,
            Self::Record(bytes) => bytes,
        }
    }
}

fn parts(section: &Section) -> [Part<'_>; 3] {
    let nothing = Part::Contents(&[]);
    let (kind, value, address, length, part) = match section {
        Section::Bytes { address, bytes } => (BYTES, 0, *address, bytes.len() as u64, Part::Contents(bytes)),
        Section::Mapping { address, length, protection } => {
            (MAPPING, *protection, *address, *length, nothing)
        }
        Section::PastEnd { address, length, protection } => {
            (PAST_END, *protection, *address, *length, nothing)
        }
        Section::Thread { slot } => (THREAD, slot.number(), 0, 0, nothing),
        Section::Descriptor(descriptor) => {
            let record = descriptor.encode();
            (DESCRIPTOR, descriptor.number, 0, record.len() as u64, Part::Record(record))
        }
        Section::Process(process) => {
            let record = process.encode();
            (PROCESS, 0, 0, record.len() as u64, Part::Record(record))
        }
        Section::Lock(lock) => {
            let record = lock.encode();
            (LOCK, lock.number, 0, record.len() as u64, Part::Record(record))
        }
    };
    let mut header = [0; SECTION_HEADER];
    header[0..4].copy_from_slice(&kind.to_le_bytes());
    header[4..8].copy_from_slice(&value.to_le_bytes());
    header[8..16].copy_from_slice(&address.to_le_bytes());
    header[16..24].copy_from_slice(&length.to_le_bytes());
    let length = part.as_ref().len();
    let padding: &[u8] = &[0; ALIGNMENT][..length.next_multiple_of(ALIGNMENT) - length];
    [Part::Header(header), part, Part::Contents(padding)]
}

/// Bytes behind a section's header.
fn padded(section: &Section) -> u64 {
    let length = match section {
        Section::Bytes { bytes, .. } => bytes.len(),
        Section::Descriptor(descriptor) => descriptor::DESCRIPTOR + descriptor.path.len(),
        Section::Process(process) => descriptor::PROCESS + process.directory.len(),
        Section::Lock(lock) => lock::LOCK + lock.path.len(),
        Section::Mapping { .. } | Section::PastEnd { .. } | Section::Thread { .. } => 0,
    };
    length.next_multiple_of(ALIGNMENT) as u64
}

/// The callers' arrays are long enough for the offsets they name.
fn u32_at(bytes: &[u8], at: usize) -> u32 {
    bytes[at..].first_chunk().map_or(0, |bytes| u32::from_le_bytes(*bytes))
}

fn u64_at(bytes: &[u8], at: usize) -> u64 {
    bytes[at..].first_chunk().map_or(0, |bytes| u64::from_le_bytes(*bytes))
}
