//! States of programs that change the instruction set: files as they come, and sections with any fields behind right
//! checksums. What is taken can be written again, byte for byte, and is within the address plan.
#![no_main]

use arbitrary::Arbitrary;
use godwit_isa_state::plan::{self, Quarter, Slot};
use godwit_isa_state::{HEADER, MAGIC, Section, StateFile, Usage, VERSION};
use libfuzzer_sys::fuzz_target;

#[derive(Debug, Arbitrary)]
enum Input<'a> {
    Raw(Vec<u8>),
    Sealed(Vec<RawSection<'a>>),
}

#[derive(Debug, Arbitrary)]
enum RawSection<'a> {
    Any {
        kind: u8,
        value: u32,
        address: u64,
        length: Option<u64>,
        contents: &'a [u8],
    },
    /// Memory where a program may have some.
    Placed {
        region: u8,
        offset: u32,
        contents: &'a [u8],
    },
    Mapping {
        mmap: bool,
        page: u8,
        pages: u8,
        protection: u8,
    },
    /// A slot with a sound control block, but for what is added to its pointers, and for its state.
    Thread {
        slot: u8,
        state: u8,
        data_stack: u32,
        continuation: u32,
    },
    /// An open descriptor, as the runtime writes them.
    Descriptor {
        number: u8,
        kind: u8,
        bits: u8,
        shares: u8,
        offset: u64,
        path: &'a [u8],
    },
}

impl RawSection<'_> {
    fn write(&self, file: &mut Vec<u8>) -> u32 {
        match *self {
            Self::Any { kind, value, address, length, contents } => {
                let length = length.unwrap_or(contents.len() as u64);
                write(file, u32::from(kind % 8), value, address, length, contents);
                1
            }
            Self::Placed { region, offset, contents } => {
                let slot = Slot::new(u32::from(region >> 4)).expect("of the plan");
                let begin = match region & 7 {
                    0 => plan::DATA.start,
                    1 => plan::HEAP.start,
                    2 => plan::MAP.start,
                    3 => plan::MAP_TABLE.start,
                    4 => slot.quarter(Quarter::Continuation).start,
                    5 => slot.quarter(Quarter::DataStack).start,
                    6 => slot.quarter(Quarter::DataStack).end - u64::from(u32::MAX >> 16),
                    _ => slot.control_block(),
                };
                write(file, 1, 0, begin + u64::from(offset >> 8), contents.len() as u64, contents);
                1
            }
            Self::Mapping { mmap, page, pages, protection } => {
                let begin = if mmap { plan::MAP.start } else { plan::HEAP.start };
                let address = begin + u64::from(page) * plan::PAGE;
                write(file, 2, u32::from(protection % 5), address, u64::from(pages) * plan::PAGE, &[]);
                1
            }
            Self::Descriptor { number, kind, bits, shares, offset, path } => {
                let mut bytes = Vec::new();
                for field in [u32::from(kind % 8), u32::from(bits % 5), 0, u32::from(shares)] {
                    bytes.extend_from_slice(&field.to_le_bytes());
                }
                bytes.extend_from_slice(&offset.to_le_bytes());
                bytes.extend_from_slice(&[7; 32]);
                bytes.extend_from_slice(path);
                write(file, 5, u32::from(number), 0, bytes.len() as u64, &bytes);
                1
            }
            Self::Thread { slot, state, data_stack, continuation } => {
                let slot = Slot::new(u32::from(slot)).expect("of the plan");
                let block = slot.control_block();
                let mut bytes = block.to_le_bytes().to_vec();
                bytes.extend_from_slice(&[0; 4]);
                bytes.extend_from_slice(&u32::from(state % 5).to_le_bytes());
                let top = slot.quarter(Quarter::DataStack).end;
                bytes.extend_from_slice(&(top - u64::from(data_stack)).to_le_bytes());
                let bottom = slot.quarter(Quarter::Continuation).start;
                bytes.extend_from_slice(&(bottom + u64::from(continuation)).to_le_bytes());
                bytes.extend_from_slice(&[0; 12]);
                bytes.extend_from_slice(&slot.number().to_le_bytes());
                write(file, 3, slot.number(), 0, 0, &[]);
                write(file, 1, 0, block, bytes.len() as u64, &bytes);
                2
            }
        }
    }
}

fn write(file: &mut Vec<u8>, kind: u32, value: u32, address: u64, length: u64, contents: &[u8]) {
    file.extend_from_slice(&kind.to_le_bytes());
    file.extend_from_slice(&value.to_le_bytes());
    file.extend_from_slice(&address.to_le_bytes());
    file.extend_from_slice(&length.to_le_bytes());
    file.extend_from_slice(contents);
    file.resize(file.len().next_multiple_of(8), 0);
}

fn sealed(sections: &[RawSection<'_>]) -> Vec<u8> {
    let mut body = Vec::new();
    let count: u32 = sections.iter().map(|section| section.write(&mut body)).sum();
    let mut file = MAGIC.to_vec();
    file.extend_from_slice(&VERSION.to_le_bytes());
    file.extend_from_slice(&count.to_le_bytes());
    file.extend_from_slice(&[7; 32]);
    file.extend_from_slice(&((HEADER + body.len()) as u64).to_le_bytes());
    file.extend_from_slice(&crc32c::crc32c(&body).to_le_bytes());
    file.extend_from_slice(&crc32c::crc32c(&file).to_le_bytes());
    file.extend_from_slice(&body);
    file
}

fuzz_target!(|input: Input<'_>| {
    let file = match input {
        Input::Raw(bytes) => bytes,
        Input::Sealed(sections) => sealed(&sections),
    };
    let Ok(state) = StateFile::decode(file.clone().into()) else { return };
    let mut written = Vec::new();
    state.write(&mut written).expect("memory takes all");
    assert_eq!(written, file);
    let again = StateFile::new(state.build(), state.sections().to_vec()).expect("it was sound");
    assert_eq!(again, state);
    for section in state.sections() {
        if let Section::Bytes { address, bytes } = section {
            assert!(plan::region_of(&(*address..*address + bytes.len() as u64)).is_some());
        }
    }
    assert!(state.threads().iter().any(|thread| thread.parked));
    for thread in state.threads() {
        assert!(thread.parked || thread.continuation_bytes() == 0);
        assert!(thread.slot.quarter(Quarter::Continuation).end >= thread.continuation);
        assert!(thread.data_stack_bytes() <= 64 << 20);
    }
    let usage = Usage::of(state.sections());
    assert!(usage.data + usage.heap + usage.mappings <= file.len() as u64);
    let _ = state.arguments();
    let numbers: Vec<u32> = state.descriptors().map(|open| open.number).collect();
    assert!(numbers.is_sorted_by(|a, b| a < b));
    for open in state.descriptors() {
        assert!(!open.path.is_empty() && open.path.len() < 4096);
        let _ = open.opens_again();
    }
});
