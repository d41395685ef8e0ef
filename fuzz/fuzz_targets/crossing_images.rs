//! CRIU's images from another node that are rewritten for an executable of either set, and executables: those of a real
//! service with bytes that are changed, and records of any bytes. Nothing executable comes of them, no page of code, of
//! private data or of a native stack, and what was rewritten can be rewritten back.
#![no_main]

use std::collections::BTreeMap;

use arbitrary::Arbitrary;
use godwit_criu::images::{AddressSpace, Pagemap, ProcessImages};
use godwit_crossing::{Executable, Fate, Node, Program, Records, Rewritten, Set, Target, rewrite, staying};
use godwit_isa_plan::MAP;
use libfuzzer_sys::fuzz_target;

#[path = "../../crates/crossing/tests/fixtures/mod.rs"]
mod fixtures;
use fixtures::{MACHINES, MODE, PATH, PID, executable, record};

const PAGE: u64 = 4096;

#[derive(Debug, Arbitrary)]
struct Input<'a> {
    /// Image, place, byte.
    changes: Vec<(u8, u16, u8)>,
    /// Bytes of the executable's head.
    of_executable: Vec<(u8, u8)>,
    /// Of an image, records in place of its own, under right lengths.
    replaced: Vec<(u8, Vec<&'a [u8]>)>,
    record: Vec<(u8, u8)>,
    /// Numbers of files with contents of pages, and how long they are.
    pages: Vec<(u8, u32)>,
    to_arm64: bool,
    small_addresses: bool,
}

fn check(rewritten: &Rewritten, executable: &Executable) {
    let all = ProcessImages::new(rewritten.changed.images.clone(), BTreeMap::new());
    for process in &rewritten.processes {
        let space = all.record(&format!("mm-{}.img", process.pid)).expect("it was written");
        let space = AddressSpace::decode(space).expect("it was written here");
        let areas = space.areas(PAGE).expect("they are in order");
        for area in &areas {
            let part = executable
                .parts()
                .iter()
                .find(|part| part.pages().start <= area.range.start && area.range.end <= part.pages().end);
            assert_eq!(area.is_executable(), part.is_some_and(|part| part.executable));
            let stays = staying(&area.range, executable);
            assert!(stays.iter().all(|range| Fate::of(range.start, executable) == Fate::Stays));
        }
        let pagemap = all.image(&format!("pagemap-{}.img", process.pid)).expect("it was written");
        let pagemap = Pagemap::decode(pagemap).expect("it was written here");
        // The first stack is above all that the plan has; nothing else that grows down goes along.
        let is_stack = |page: u64| {
            page >= MAP.end && areas.iter().any(|area| area.grows_down() && area.range.contains(&page))
        };
        for run in &pagemap.runs {
            for page in [run.addresses.start, run.addresses.end - PAGE] {
                assert!(Fate::of(page, executable) == Fate::Stays || is_stack(page), "{page:#x}");
            }
        }
        let kept: u64 = pagemap
            .runs
            .iter()
            .filter(|run| run.present)
            .map(|run| run.addresses.end - run.addresses.start)
            .sum();
        assert_eq!(kept, process.kept_pages * PAGE);
    }
}

fuzz_target!(|input: Input<'_>| {
    let mut images = fixtures::images();
    let names: Vec<_> = images.keys().cloned().collect();
    let name = |number: u8| &names[usize::from(number) % names.len()];
    for (image, records) in &input.replaced {
        let image = images.get_mut(name(*image)).expect("one of them");
        image.truncate(8);
        for record in records {
            image.extend(u32::try_from(record.len()).expect("a short input").to_le_bytes());
            image.extend_from_slice(record);
        }
    }
    for (image, at, byte) in &input.changes {
        let image = images.get_mut(name(*image)).expect("one of them");
        let at = usize::from(*at) % image.len();
        image[at] = *byte;
    }
    let [x86, arm] = MACHINES;
    let (set, machine) = if input.to_arm64 { (Set::Aarch64, arm) } else { (Set::X86_64, x86) };
    let mut file = executable(machine);
    for (at, byte) in &input.of_executable {
        file[usize::from(*at)] = *byte;
    }
    let Ok(program) = Program::decode(&file, MODE) else { return };
    let address_end = if input.small_addresses { 1 << 39 } else { 1 << 47 };
    let node = Node { set, page_bytes: PAGE, address_end };
    let target =
        Target { node, programs: BTreeMap::from([(PATH.to_vec(), program.clone())]), knows_filters: false };
    let mut record = record();
    for (at, byte) in &input.record {
        let at = usize::from(*at) % record.len();
        record[at] = *byte;
    }
    let records = Records::from([(PID, record)]);
    let mut pages = fixtures::pages();
    for (number, bytes) in &input.pages {
        pages.insert(u32::from(number % 4), u64::from(*bytes));
    }
    let images = ProcessImages::new(images, pages.clone());
    let Ok(rewritten) = rewrite(&images, &records, &target) else { return };
    check(&rewritten, &program.executable);

    // What came of it is sound, and stays as it is where it is rewritten once more.
    let kept = rewritten.processes.iter().map(|process| process.kept_pages * PAGE);
    let mut all: BTreeMap<_, _> =
        images.names().map(|name| (name.to_owned(), images.image(name).expect("one").to_vec())).collect();
    all.extend(rewritten.changed.images.clone());
    pages.extend(rewritten.changed.pages.keys().copied().zip(kept));
    let again = rewrite(&ProcessImages::new(all, pages), &records, &target).expect("it was just made");
    assert_eq!(again.changed.images, rewritten.changed.images);
});
