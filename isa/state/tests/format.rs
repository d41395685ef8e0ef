//! The file format: what is written is read as it was, and every kind of damage is refused with its own error.

mod support;

use godwit_isa_state::plan::{self, PAGE, Quarter, Slot};
use std::ffi::OsString;
use std::os::unix::ffi::OsStringExt as _;

use godwit_isa_state::{
    Descriptor, FormatError, HEADER, Kind, Lock, LockKind, Memory, Process, ReadError, Section, StateFile,
    Usage,
};
use proptest::collection::vec;
use proptest::prelude::*;

use support::{
    BUILD, BYTES, DESCRIPTOR, MAPPING, PAST_END, PROCESS, THREAD, borders, file, memory, raw, seal,
    seal_header, thread,
};

fn encode(state: &StateFile) -> Vec<u8> {
    let mut bytes = Vec::new();
    state.write(&mut bytes).expect("memory takes all");
    bytes
}

fn decode(file: &[u8]) -> Result<StateFile, FormatError> {
    StateFile::decode(file.to_vec().into())
}

fn refusal(file: &[u8]) -> FormatError {
    decode(file).expect_err("it is not sound")
}

fn process() -> Process {
    Process { umask: 0o27, directory: "/of the program".into() }
}

fn descriptor(number: u32) -> Descriptor {
    Descriptor {
        number,
        kind: Kind::Regular,
        inherited: number < 3,
        deleted: false,
        flags: 0o2_000_001,
        shares: 1,
        offset: 7,
        size: 1 << 40,
        inode: u64::MAX,
        device: 8 << 32 | 1,
        special: 0,
        path: OsString::from_vec(b"/a path/\xff".to_vec()),
    }
}

/// A section's header and what follows it, as the runtime writes it.
fn section_of(section: Section) -> Vec<u8> {
    let [main, block] = thread(Slot::MAIN);
    let whole = encode(&StateFile::new(BUILD, vec![main, block, section]).expect("it is sound"));
    let borders = borders(&whole);
    whole[borders[2]..].to_vec()
}

/// A state with something of everything.
fn example() -> StateFile {
    let [main, main_block] = thread(Slot::MAIN);
    let [other, other_block] = thread(Slot::new(3).expect("of the plan"));
    let stack = Slot::MAIN.quarter(Quarter::DataStack);
    let sections = vec![
        memory(plan::DATA.start + 40, b"variables"),
        Section::Mapping { address: plan::HEAP.start, length: 4 * PAGE, protection: 3 },
        memory(plan::HEAP.start + PAGE, b"on the heap"),
        Section::Mapping { address: plan::MAP.start, length: PAGE, protection: 1 },
        memory(plan::MAP.start + 8, b"a file"),
        Section::PastEnd { address: plan::MAP.start + PAGE, length: 2 * PAGE, protection: 3 },
        main,
        main_block,
        memory(stack.end - 16, &[9; 16]),
        other,
        other_block,
        Section::Process(process()),
        Section::Descriptor(descriptor(1)),
        Section::Descriptor(descriptor(2)),
        Section::Descriptor(descriptor(300)),
    ];
    StateFile::new(BUILD, sections).expect("it is sound")
}

/// A file of raw sections and a sound main thread behind them.
fn with_thread(sections: &[Vec<u8>]) -> Vec<u8> {
    let [_, block] = thread(Slot::MAIN);
    let Section::Bytes { address, bytes } = block else { unreachable!("a control block is memory") };
    let mut all = sections.to_vec();
    all.push(raw(THREAD, 0, 0, 0, &[]));
    all.push(raw(BYTES, 0, address, bytes.len() as u64, &bytes));
    file(BUILD.0, &all)
}

/// As [`with_thread`], of one section; the refusal must be about it.
fn refused(kind: u32, value: u32, address: u64, length: u64, contents: &[u8]) -> FormatError {
    refusal(&with_thread(&[raw(kind, value, address, length, contents)]))
}

const FIRST: u64 = HEADER as u64;

#[test]
fn a_state_is_read_as_it_was_written() {
    let state = example();
    let file = encode(&state);
    assert_eq!(decode(&file).expect("our own"), state);
    assert_eq!(state.build(), BUILD);
    assert_eq!(state.threads().iter().map(|thread| thread.slot.number()).collect::<Vec<_>>(), [0, 3]);
    let usage = Usage::of(state.sections());
    assert_eq!((usage.data, usage.heap, usage.heap_mapped), (9, 11, 4 * PAGE));
    assert_eq!((usage.mappings, usage.mapped, usage.data_stacks), (6, 3 * PAGE, 16));
}

#[test]
fn locks_are_read_as_they_were_written() {
    for (kind, writes, length) in [
        (LockKind::Process, true, 7),
        (LockKind::Description, false, 0),
        (LockKind::Whole, true, 0),
        (LockKind::Other, false, 0),
    ] {
        let lock =
            Lock { number: 3, kind, writes, begin: 5, length, inode: 9, device: 8, path: "/a/b".into() };
        let section = section_of(Section::Lock(lock.clone()));
        let state = decode(&with_thread(&[section])).expect("sound");
        assert_eq!(state.locks().collect::<Vec<_>>(), [&lock]);
    }
}

#[test]
fn descriptors_are_read_as_they_were_written() {
    let state = decode(&encode(&example())).expect("sound");
    assert_eq!(
        state.descriptors().cloned().collect::<Vec<_>>(),
        [descriptor(1), descriptor(2), descriptor(300)]
    );
    assert_eq!(state.process(), Some(&process()));
    let kinds = [Kind::Regular, Kind::Directory, Kind::Character, Kind::Pipe, Kind::Socket, Kind::Other];
    for (kind, opens) in kinds.into_iter().zip([true, true, true, false, false, false]) {
        let open = Descriptor { kind, shares: 300, ..descriptor(300) };
        assert_eq!(open.opens_again().is_ok(), opens, "{kind:?}");
        assert!(Descriptor { deleted: true, ..open.clone() }.opens_again().is_err());
        // The other number has it, or whoever starts the process.
        assert_eq!(Descriptor { shares: 4, ..open.clone() }.opens_again(), Ok(()));
        assert_eq!(Descriptor { inherited: true, ..open.clone() }.opens_again(), Ok(()));
        let section = section_of(Section::Descriptor(open.clone()));
        assert_eq!(decode(&with_thread(&[section])).expect("sound").descriptors().next(), Some(&open));
    }
    let terminal = Descriptor { kind: Kind::Character, special: 5 << 32 | 2, shares: 300, ..descriptor(300) };
    assert!(terminal.opens_again().is_err());
}

#[test]
fn descriptors_that_cannot_be_are_refused() {
    let sound = section_of(Section::Descriptor(descriptor(5)));
    let change = |at: usize, value: u32| {
        let mut section = sound.clone();
        section[at..at + 4].copy_from_slice(&value.to_le_bytes());
        section
    };
    // Offsets in the section's header, then in the record behind it.
    for (at, value, why) in [
        (4, 1 << 31, "has an impossible number"),
        (24, 0, "is of an unknown kind"),
        (24, 7, "is of an unknown kind"),
        (28, 4, "has unknown flags"),
        (36, 1 << 31, "shares with an impossible number"),
        (24 + 56, 0, "has a zero in its path"),
    ] {
        let refusal = refusal(&with_thread(&[change(at, value)]));
        let FormatError::Descriptor { index: 0, offset: FIRST, why: found, .. } = refusal else {
            panic!("{why}: {refusal}")
        };
        assert_eq!(found, why);
    }
    let twice = refusal(&with_thread(&[sound.clone(), sound.clone()]));
    assert!(matches!(twice, FormatError::Descriptor { index: 1, number: 5, .. }), "{twice}");
    let addressed = refusal(&with_thread(&[change(8, 1)]));
    assert!(matches!(addressed, FormatError::UnusedField { field: "address", .. }), "{addressed}");
    for (length, why) in
        [(55, "is cut off"), (56, "has no path"), (56 + 4096, "has a path that is longer than any")]
    {
        let record: Vec<u8> = sound[24..].iter().copied().chain([b'x'; 5000]).take(length).collect();
        let mut padded = record.clone();
        padded.resize(length.next_multiple_of(8), 0);
        let found = refused(DESCRIPTOR, 5, 0, length as u64, &padded);
        // The padding of the one that is cut off lies in the path.
        assert!(
            matches!(found, FormatError::Descriptor { why: found, .. } if found == why),
            "{length}: {found}"
        );
    }
}

#[test]
fn a_process_that_cannot_be_is_refused() {
    let sound = section_of(Section::Process(process()));
    let twice = refusal(&with_thread(&[sound.clone(), sound.clone()]));
    assert!(matches!(twice, FormatError::Process { index: 1, why: "is a second one", .. }), "{twice}");
    let mut reserved = sound.clone();
    reserved[24 + 4] = 1;
    let refusal = refusal(&with_thread(&[reserved]));
    assert!(matches!(refusal, FormatError::Process { index: 0, .. }), "{refusal}");
    for length in [0, 7, 8] {
        let mut contents = sound[24..24 + length].to_vec();
        contents.resize(length.next_multiple_of(8), 0);
        let found = refused(PROCESS, 0, 0, length as u64, &contents);
        assert!(matches!(found, FormatError::Process { .. }), "{length}: {found}");
    }
}

#[test]
fn memory_is_what_the_sections_give_and_zero_elsewhere() {
    let state = example();
    let memory: Memory<'_> = state.memory();
    let mut bytes = [1; 13];
    memory.read(plan::HEAP.start + PAGE - 1, &mut bytes);
    assert_eq!(&bytes, b"\0on the heap\0");
    memory.read(plan::HEAP.start + PAGE + 3, &mut bytes[..3]);
    assert_eq!(&bytes[..3], b"the");
    assert_eq!(memory.u64(plan::MAP.start), 0);
    assert_eq!(memory.u64(Slot::MAIN.control_block()), Slot::MAIN.control_block());
    memory.read(u64::MAX, &mut bytes);
    assert_eq!(bytes, [0; 13]);
}

#[test]
fn every_field_of_the_header_is_looked_at() {
    let sound = encode(&example());
    let altered = |at: usize, sum: bool| {
        let mut file = sound.clone();
        file[at] ^= 1;
        if sum {
            seal_header(&mut file);
        }
        refusal(&file)
    };
    assert_eq!(altered(0, true), FormatError::Magic);
    assert_eq!(altered(8, true), FormatError::Version { found: 3 });
    for at in [12, 16, 47, 48, 56, 60] {
        assert!(matches!(altered(at, false), FormatError::HeaderSum { .. }), "offset {at}");
    }
    let length = sound.len() as u64;
    // The number of sections, one less and then far more than there are.
    assert!(matches!(altered(12, true), FormatError::Trailing { .. }));
    assert!(matches!(altered(15, true), FormatError::SectionMissing { index: 15, .. }));
    assert_eq!(altered(55, true), FormatError::Truncated { stated: length ^ 1 << 56, found: length });
    assert!(matches!(altered(56, true), FormatError::BodySum { .. }));
    // The build is the executable's to compare.
    let mut other = sound.clone();
    other[16] ^= 1;
    seal_header(&mut other);
    assert_ne!(decode(&other).expect("sound").build(), BUILD);
}

#[test]
fn a_file_that_is_shorter_or_longer_is_refused_wherever_it_ends() {
    let sound = encode(&example());
    for length in 0..HEADER {
        assert_eq!(refusal(&sound[..length]), FormatError::TooShort { length: length as u64 });
    }
    let stated = sound.len() as u64;
    for length in HEADER..sound.len() {
        assert_eq!(refusal(&sound[..length]), FormatError::Truncated { stated, found: length as u64 });
    }
    let longer = [sound.as_slice(), &[0]].concat();
    assert_eq!(refusal(&longer), FormatError::Appended { stated, found: stated + 1 });
}

#[test]
fn a_file_cut_at_a_section_with_right_sums_is_refused() {
    let sound = encode(&example());
    let borders = borders(&sound);
    assert_eq!(borders.len(), 16);
    for (index, at) in borders[..15].iter().enumerate() {
        for cut in [*at, at + 8] {
            let mut file = sound[..cut].to_vec();
            seal(&mut file);
            let left = (cut - at) as u64;
            let index = u32::try_from(index).expect("few");
            let expected = FormatError::SectionMissing { index, sections: 15, offset: *at as u64, left };
            assert_eq!(refusal(&file), expected);
        }
    }
}

#[test]
fn what_a_section_says_of_itself_is_checked() {
    let (data, heap) = (plan::DATA.start, plan::HEAP.start);
    let offset = FIRST;
    let index = 0;
    assert_eq!(refused(0, 0, 0, 0, &[]), FormatError::SectionType { index, offset, found: 0 });
    assert_eq!(refused(8, 0, 0, 0, &[]), FormatError::SectionType { index, offset, found: 8 });
    assert_eq!(refused(PAST_END, 3, heap, 0, &[]), FormatError::Empty { index, offset });
    let (address, length) = (heap + 8, PAGE);
    assert_eq!(
        refused(PAST_END, 3, address, length, &[]),
        FormatError::Unaligned { index, offset, address, length }
    );
    assert_eq!(refused(BYTES, 0, data, 0, &[]), FormatError::Empty { index, offset });
    assert_eq!(refused(MAPPING, 3, heap, 0, &[]), FormatError::Empty { index, offset });
    let unused = |field, found| FormatError::UnusedField { index, offset, field, found };
    assert_eq!(refused(BYTES, 2, data, 8, &[1; 8]), unused("value", 2));
    assert_eq!(refused(THREAD, 1, 5, 0, &[]), unused("address", 5));
    assert_eq!(refused(THREAD, 1, 0, 6, &[]), unused("length", 6));
    let padding = FormatError::Padding { index, offset: offset + 24 + 5 };
    assert_eq!(refused(BYTES, 0, data, 5, &[1; 8]), padding);
    for length in [u64::MAX, u64::MAX - 7, 1 << 40] {
        let left = 8 + 24 + 24 + 48;
        let expected = FormatError::SectionLength { index, offset, length, left };
        assert_eq!(refused(BYTES, 0, data, length, &[1; 8]), expected);
    }
}

#[test]
fn addresses_outside_the_program_are_refused() {
    let (index, offset) = (0, FIRST);
    let native = Slot::MAIN.quarter(Quarter::NativeStack).start;
    let continuation = Slot::MAIN.quarter(Quarter::Continuation);
    for address in [
        0,
        0x0040_0000,
        plan::DATA.start - 1,
        plan::DATA.end - 1,
        0x7000_0000,
        plan::HEAP.start - 8,
        native,
        continuation.start - 4,
        continuation.end - 4,
        plan::MAP.end - 4,
        0x7fff_ffff_f000,
    ] {
        let expected = FormatError::OutsidePlan { index, offset, address, length: 8 };
        assert_eq!(refused(BYTES, 0, address, 8, &[1; 8]), expected, "{address:#x}");
    }
    let address = u64::MAX - 3;
    let expected = FormatError::Overflow { index, offset, address, length: 8 };
    assert_eq!(refused(BYTES, 0, address, 8, &[1; 8]), expected);
    let expected = FormatError::Overflow { index, offset, address: PAGE, length: u64::MAX };
    assert_eq!(refused(MAPPING, 3, PAGE, u64::MAX, &[]), expected);
    // What the executable and each thread bring is not mapped.
    for address in [plan::DATA.start, continuation.start, plan::HEAP.end, plan::MAP.end] {
        let expected = FormatError::OutsidePlan { index, offset, address, length: PAGE };
        assert_eq!(refused(MAPPING, 3, address, PAGE, &[]), expected, "{address:#x}");
    }
}

#[test]
fn mappings_are_whole_pages_that_are_read_and_written() {
    let (index, offset, heap) = (0, FIRST, plan::HEAP.start);
    for (address, length) in [(heap + 8, PAGE), (heap, PAGE + 8), (heap, 1)] {
        let expected = FormatError::Unaligned { index, offset, address, length };
        assert_eq!(refused(MAPPING, 3, address, length, &[]), expected);
    }
    for found in [4, 7, u32::MAX] {
        assert_eq!(
            refused(MAPPING, found, heap, PAGE, &[]),
            FormatError::Protection { index, offset, found }
        );
    }
}

#[test]
fn sections_that_share_memory_are_refused() {
    let heap = plan::HEAP.start;
    let overlap = |first: Vec<u8>, second: Vec<u8>| {
        let offset = FIRST + first.len() as u64;
        match refusal(&with_thread(&[first, second])) {
            FormatError::Overlap { index: 1, offset: at, address, other: 0, other_offset: FIRST } => {
                assert_eq!(at, offset);
                address
            }
            error => panic!("{error}"),
        }
    };
    let data = |address| raw(BYTES, 0, address, 16, &[1; 16]);
    let begin = plan::DATA.start + 0x100;
    assert_eq!(overlap(data(begin), data(begin)), begin);
    assert_eq!(overlap(data(begin), data(begin + 15)), begin + 15);
    assert_eq!(overlap(data(begin), data(begin - 15)), begin);
    let map = |address, pages| raw(MAPPING, 3, address, pages * PAGE, &[]);
    assert_eq!(overlap(map(heap + PAGE, 1), map(heap, 9)), heap + PAGE);
    assert_eq!(overlap(map(heap, 9), map(heap + PAGE, 1)), heap + PAGE);
    assert!(decode(&with_thread(&[data(begin), data(begin + 16), data(begin - 16)])).is_ok());
}

#[test]
fn bytes_need_a_mapping_or_a_thread_to_be_in() {
    let heap = plan::HEAP.start;
    let bytes = |address: u64| raw(BYTES, 0, address, 8, &[1; 8]);
    let unmapped = |address| FormatError::Unmapped { index: 1, offset: FIRST + 24, address };
    let map = || raw(MAPPING, 3, heap + PAGE, PAGE, &[]);
    for address in [heap, heap + PAGE - 4, heap + 2 * PAGE - 4, heap + 2 * PAGE, plan::MAP.start] {
        assert_eq!(refusal(&with_thread(&[map(), bytes(address)])), unmapped(address), "{address:#x}");
    }
    assert!(decode(&with_thread(&[map(), bytes(heap + PAGE), bytes(heap + 2 * PAGE - 8)])).is_ok());
    let address = Slot::new(5).expect("of the plan").control_block();
    let expected = FormatError::NoSuchThread { index: 0, offset: FIRST, slot: 5 };
    assert_eq!(refusal(&with_thread(&[bytes(address)])), expected);
}

#[test]
fn threads_are_counted_and_their_control_blocks_looked_at() {
    let one = |slot| raw(THREAD, slot, 0, 0, &[]);
    let offset = FIRST;
    assert_eq!(refusal(&file(BUILD.0, &[])), FormatError::NoThread { sections: 0 });
    let expected = FormatError::SlotNumber { index: 0, offset, slot: plan::SLOTS };
    assert_eq!(refusal(&with_thread(&[one(plan::SLOTS)])), expected);
    let expected = FormatError::SlotTwice { index: 1, offset: FIRST + 24, slot: 0 };
    assert_eq!(refusal(&with_thread(&[one(0)])), expected);

    // Every field of the control block that says where the thread's memory ends.
    let sound = with_thread(&[]);
    let block = HEADER + 24 + 24;
    for (at, field) in [
        (0, "own address"),
        (12, "state"),
        (23, "data stack pointer"),
        (31, "continuation pointer"),
        (44, "slot"),
    ] {
        let mut file = sound.clone();
        file[block + at] ^= 1;
        seal(&mut file);
        match refusal(&file) {
            FormatError::ControlBlock { offset: FIRST, slot: 0, field: told, .. } => assert_eq!(told, field),
            error => panic!("{field}: {error}"),
        }
    }
    // A thread whose control block is all zeros, and so not in the file.
    let expected = FormatError::ControlBlock { offset, slot: 0, field: "own address", found: 0 };
    assert_eq!(refusal(&file(BUILD.0, &[one(0)])), expected);
}

/// A thread's sections, with one word of its control block changed.
fn changed(slot: Slot, at: usize, value: u32) -> [Section; 2] {
    let [section, block] = thread(slot);
    let Section::Bytes { address, bytes } = block else { unreachable!("a control block is memory") };
    let mut bytes = bytes.to_vec();
    bytes[at..at + 4].copy_from_slice(&value.to_le_bytes());
    [section, memory(address, &bytes)]
}

#[test]
fn slots_without_a_thread_are_told_from_those_with_one() {
    const STATE: usize = 12;
    const CONTINUATION: usize = 24;
    let (ended, third) = (3, Slot::new(3).expect("of the plan"));
    let sound = |sections: [[Section; 2]; 2]| StateFile::new(BUILD, sections.concat());

    let state = sound([changed(Slot::MAIN, STATE, ended), thread(third)]).expect("one of them goes on");
    assert_eq!(state.threads().iter().map(|thread| thread.parked).collect::<Vec<_>>(), [false, true]);
    assert_eq!(decode(&encode(&state)), Ok(state));

    let refused = sound([changed(Slot::MAIN, STATE, ended), changed(third, STATE, ended)]);
    assert_eq!(refused, Err(FormatError::NobodyParked { slots: 2 }));
    // The main thread's slot has the arguments of the program.
    assert_eq!(StateFile::new(BUILD, thread(third).into()), Err(FormatError::NoThread { sections: 2 }));

    // Frames that nobody would take off.
    let begin = third.quarter(Quarter::Continuation).start;
    let [section, block] = changed(third, STATE, ended);
    let Section::Bytes { address, bytes } = block else { unreachable!("a control block is memory") };
    let mut bytes = bytes.to_vec();
    bytes[CONTINUATION..CONTINUATION + 8].copy_from_slice(&(begin + 16).to_le_bytes());
    let refused = sound([thread(Slot::MAIN), [section, memory(address, &bytes)]]);
    match refused.expect_err("it has frames") {
        FormatError::ControlBlock { slot: 3, field: "continuation pointer", found, .. } => {
            assert_eq!(found, begin + 16);
        }
        error => panic!("{error}"),
    }
}

#[test]
fn a_refusal_names_the_file_and_what_to_do() {
    let directory = tempfile::tempdir().expect("a directory");
    let path = directory.path().join("a.state");
    let sound = encode(&example());
    std::fs::write(&path, &sound).expect("it is ours");
    assert_eq!(StateFile::open(&path).expect("sound"), example());

    std::fs::write(&path, &sound[..100]).expect("it is ours");
    let error = StateFile::open(&path).expect_err("it is cut");
    assert!(error.to_string().contains("a.state"), "{error}");
    let ReadError::Format { source, .. } = error else { panic!("{error}") };
    let expected =
        format!("it ends at offset 100, but had {} bytes when it was written; copy it again", sound.len());
    assert_eq!(source.to_string(), expected);

    // A file with holes that is far larger than memory: its header tells before it is read.
    let holes = std::fs::File::create(&path).expect("it is ours");
    holes.set_len(1 << 42).expect("holes take no room");
    assert!(matches!(StateFile::open(&path), Err(ReadError::Format { source: FormatError::Magic, .. })));
    let missing = directory.path().join("missing");
    assert!(matches!(StateFile::open(&missing), Err(ReadError::File { .. })));
}

/// Sections that are sound together: pieces of the heap and of the data, apart from one another.
fn sound_sections() -> impl Strategy<Value = Vec<Section>> {
    let pieces = vec((vec(any::<u8>(), 1..200), 0..100u64), 0..20);
    (pieces, vec(1..plan::SLOTS, 0..5), any::<bool>()).prop_map(|(pieces, slots, threads_first)| {
        let mut sections =
            vec![Section::Mapping { address: plan::HEAP.start, length: 8 * PAGE, protection: 3 }];
        let mut at = [plan::DATA.start, plan::HEAP.start];
        for (index, (bytes, gap)) in pieces.into_iter().enumerate() {
            let next = &mut at[index % 2];
            sections.push(memory(*next + gap, &bytes));
            *next += gap + bytes.len() as u64;
        }
        let mut slots: Vec<u32> = slots;
        slots.push(0);
        slots.sort_unstable();
        slots.dedup();
        let threads = slots.into_iter().filter_map(Slot::new).flat_map(thread);
        if threads_first {
            threads.chain(sections).collect()
        } else {
            sections.into_iter().chain(threads).collect()
        }
    })
}

proptest! {
    #[test]
    fn any_sound_state_is_read_as_it_was_written(sections in sound_sections(), build: [u8; 32]) {
        let state = StateFile::new(godwit_isa_state::BuildIdentity(build), sections).expect("sound");
        let file = encode(&state);
        let read = decode(&file).expect("our own");
        prop_assert_eq!(&read, &state);
        prop_assert_eq!(encode(&read), file);
    }

    #[test]
    fn any_altered_byte_is_refused(sections in sound_sections(), at: prop::sample::Index, mask in 1..=u8::MAX) {
        let mut file = encode(&StateFile::new(BUILD, sections).expect("sound"));
        let at = at.index(file.len());
        file[at] ^= mask;
        prop_assert!(decode(&file).is_err());
    }

    /// What comes out of a file whose sums are right, whatever it says, could be written again, and is within bounds.
    #[test]
    fn an_altered_file_with_right_sums_is_sound_or_refused(
        sections in sound_sections(),
        changes in vec((any::<prop::sample::Index>(), any::<u8>()), 1..6),
        wild in vec((any::<prop::sample::Index>(), 0..24usize, any::<u64>()), 0..3),
    ) {
        let mut file = encode(&StateFile::new(BUILD, sections).expect("sound"));
        let borders = borders(&file);
        for (at, byte) in changes {
            let at = HEADER + at.index(file.len() - HEADER);
            file[at] = byte;
        }
        for (section, field, value) in wild {
            let at = borders[section.index(borders.len() - 1)] + field;
            let bytes = value.to_le_bytes();
            let end = (at + 8).min(file.len());
            file[at..end].copy_from_slice(&bytes[..end - at]);
        }
        seal(&mut file);
        if let Ok(state) = decode(&file) {
            prop_assert_eq!(encode(&state), file);
            for section in state.sections() {
                if let Section::Bytes { address, bytes } = section {
                    let range = *address..*address + bytes.len() as u64;
                    prop_assert!(plan::region_of(&range).is_some());
                }
            }
            let _ = state.arguments();
        }
    }

    #[test]
    fn any_bytes_behind_a_sound_header_are_sound_or_refused(body in vec(any::<u8>(), 0..400), count in 0..20u32) {
        let mut bytes = file(BUILD.0, &[]);
        bytes[12..16].copy_from_slice(&count.to_le_bytes());
        bytes.extend_from_slice(&body);
        seal(&mut bytes);
        if let Ok(state) = decode(&bytes) {
            prop_assert_eq!(encode(&state), bytes);
        }
    }
}
