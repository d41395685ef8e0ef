//! What a process at rest and an executable say about themselves: bytes as they come, and an executable with any program
//! headers. What is taken is within the address plan, and no page of it is private to a set and goes along all the same.
#![no_main]

use arbitrary::Arbitrary;
use godwit_crossing::{Contents, Executable, Fate, Record, Request, starts};
use godwit_isa_plan::{PAGE, PRIVATE_DATA, PRIVATE_TEXT, RECORD};
use libfuzzer_sys::fuzz_target;

#[derive(Debug, Arbitrary)]
enum Input<'a> {
    Record([u8; Record::BYTES]),
    Threads(Vec<u64>),
    Raw(&'a [u8]),
    Parts { arm: bool, parts: Vec<Part>, pages: u8 },
}

#[derive(Debug, Arbitrary)]
struct Part {
    kind: u8,
    flags: u8,
    place: u8,
    offset: u16,
    page: u8,
    bytes: u64,
    more: u64,
    whole: bool,
}

/// Where parts of the link begin, and what is near it.
const PLACES: [u64; 8] =
    [0x40_0000, 0x400_0000, 0x800_0000, 0x801_0000, 0x7000_0000, 0x7001_0000, 0x6fff_f000, 0x7eff_f000];

fn file(arm: bool, parts: &[Part], pages: u8) -> Vec<u8> {
    let parts = &parts[..parts.len().min(70)];
    let mut file = vec![0; 0x2000 + usize::from(pages) * 0x1000];
    file[..16].copy_from_slice(b"\x7fELF\x02\x01\x01\0\0\0\0\0\0\0\0\0");
    let mut put = |at: usize, bytes: &[u8]| file[at..at + bytes.len()].copy_from_slice(bytes);
    put(16, &[2, 0, if arm { 183 } else { 62 }, 0, 1]);
    put(32, &64_u64.to_le_bytes());
    put(52, &64_u16.to_le_bytes());
    put(54, &56_u16.to_le_bytes());
    put(56, &u16::try_from(parts.len()).expect("few").to_le_bytes());
    for (at, part) in (64..).step_by(56).zip(parts) {
        let begin = PLACES[usize::from(part.place % 8)] + if part.whole { 0 } else { u64::from(part.offset) };
        let bytes = if part.whole { part.bytes % 0x2000 } else { part.bytes };
        let memory = if part.whole { bytes + part.more % 0x8000 } else { part.more };
        put(at, &u32::from(part.kind % 4).to_le_bytes());
        put(at + 4, &u32::from(part.flags % 8).to_le_bytes());
        for (field, value) in [(8, u64::from(part.page) * 0x1000), (16, begin), (32, bytes), (40, memory)] {
            put(at + field, &value.to_le_bytes());
        }
    }
    // In the last page.
    let end = file.len();
    file[end - 0x1000..end - 0xfe0].fill(9);
    file[end - 0xfe0..end - 0xfd4].copy_from_slice(b"GODWREST\x01\0\0\0");
    file
}

fn look(bytes: &[u8]) {
    let Ok(executable) = Executable::decode(bytes) else { return };
    assert!(matches!(executable.contents(RECORD, bytes), Contents::Bytes(_)), "it has a record");
    let mut last = 0;
    for part in executable.parts() {
        let pages = part.pages();
        assert!(PRIVATE_TEXT.start <= pages.start && pages.end <= PRIVATE_DATA.end && last <= pages.start);
        assert!(!(part.writable && part.executable));
        for page in [pages.start, pages.end - PAGE] {
            assert_ne!(executable.contents(page, bytes), Contents::Unmapped);
            let stays = Fate::of(page, &executable) == Fate::Stays;
            assert!(!stays || (part.writable && !PRIVATE_DATA.contains(&page)));
        }
        last = pages.end;
    }
}

fuzz_target!(|input: Input<'_>| {
    match input {
        Input::Record(bytes) => {
            let next = Record::decode(&bytes).ok().and_then(|record| record.next());
            assert!(next.is_none_or(|number| number > 0 && Request::Rest(number).value() >> 2 == number));
        }
        Input::Threads(pointers) => {
            if let Ok(found) = starts(&pointers) {
                assert_eq!(found.len(), pointers.len());
                assert!(found.iter().all(|start| start.stack_pointer % 16 == 0));
            }
        }
        Input::Raw(bytes) => look(bytes),
        Input::Parts { arm, parts, pages } => look(&file(arm, &parts, pages)),
    }
});
