//! Images of a real service of two threads, and what others could make of them.

use std::collections::BTreeMap;

use godwit_criu::images::{
    AddressSpace, Architecture, ChangedImages, Core, ImageKind, MappedArea, PageRun, Pagemap, ProcessImages,
    ThreadImage, Treatment, decode,
};
use godwit_isa_plan::{DATA, HEAP, MAP, PRIVATE_DATA, Quarter, Slot};
use proptest::prelude::*;

use super::*;
use crate::executable::Executable;
use crate::target::Node;

#[path = "../../tests/fixtures/mod.rs"]
mod fixtures;
use fixtures::{MACHINES, MODE, PAGES, PATH, PID, SHARED, images};

fn of_images(images: BTreeMap<String, Vec<u8>>) -> ProcessImages {
    ProcessImages::new(images, fixtures::pages())
}

fn records() -> Records {
    Records::from([(PID, fixtures::record())])
}

fn target(set: Set) -> Target {
    let [x86, arm] = MACHINES;
    let file = fixtures::executable(if set == Set::X86_64 { x86 } else { arm });
    let program = Program::decode(&file, MODE).expect("it is whole");
    Target {
        node: Node { set, page_bytes: PAGE, address_end: 1 << 47 },
        programs: BTreeMap::from([(PATH.to_vec(), program)]),
        knows_filters: false,
    }
}

fn executable(target: &Target) -> &Executable {
    &target.programs.values().next().expect("one").executable
}

/// What is true of all that is rewritten, whatever the images were.
fn check(rewritten: &Rewritten, target: &Target) {
    let all = ProcessImages::new(rewritten.changed.images.clone(), BTreeMap::new());
    for RewrittenProcess { pid, .. } in &rewritten.processes {
        let record = all.record(&format!("mm-{pid}.img")).expect("it was written");
        let space = AddressSpace::decode(record).expect("it was written here");
        for area in space.areas(PAGE).expect("they are in order") {
            let inside = |range: &Range<u64>| range.start <= area.range.start && area.range.end <= range.end;
            let parts = executable(target).parts();
            let part = parts.iter().find(|part| inside(&part.pages()));
            assert_eq!(area.is_executable(), part.is_some_and(|part| part.executable), "{area:x?}");
            assert!(area.range.end <= target.node.address_end && !area.is_of_kernel());
        }
        let pagemap = all.image(&format!("pagemap-{pid}.img")).expect("it was written");
        let pagemap = Pagemap::decode(pagemap).expect("it was written here");
        for run in pagemap.runs {
            let code = PRIVATE_DATA.start..PRIVATE_DATA.end;
            assert!(run.addresses.end <= code.start || run.addresses.start >= code.end);
            assert!(run.addresses.start >= DATA.start);
        }
    }
    for (name, _) in rewritten.changed.images.iter().filter(|(name, _)| name.starts_with("core-")) {
        let record = all.record(name).expect("it was written");
        let core = ThreadImage::decode(record).expect("it was written here");
        assert_eq!(core.architecture(), Ok(Some(architecture(target.node.set))));
        if !core.has_ended().expect("it was read before") {
            let pointer = core.thread_pointer().expect("it was written here");
            assert!(Slot::of_control_block(pointer).is_some());
        }
    }
}

fn refused(change: impl FnOnce(&mut BTreeMap<String, Vec<u8>>, &mut Records, &mut Target)) -> String {
    let (mut images, mut records, mut target) = (images(), records(), target(Set::Aarch64));
    change(&mut images, &mut records, &mut target);
    rewrite(&of_images(images), &records, &target).expect_err("it does not fit").to_string()
}

#[test]
fn a_real_service_becomes_one_of_either_set() {
    for set in Set::ALL {
        let target = target(set);
        let rewritten = rewrite(&of_images(images()), &records(), &target).expect("it fits");
        assert_eq!(rewritten.from, Some(Set::X86_64));
        let [process] = &rewritten.processes[..] else { panic!("one: {rewritten:?}") };
        let RewrittenProcess { pid, threads, kept_pages, dropped_pages, .. } = *process;
        assert_eq!((pid, threads, kept_pages, dropped_pages), (PID, 2, 530, 9));
        let native = Slot::MAIN.quarter(Quarter::NativeStack);
        let is_in = |address| process.staying.iter().any(|range| range.contains(&address));
        assert!(is_in(HEAP.start) && is_in(Slot::MAIN.control_block()));
        assert!(!is_in(native.end - PAGE) && !is_in(PRIVATE_DATA.start + 0x2000));
        let kept: u64 = rewritten.changed.pages[&1].iter().map(|range| range.end - range.start).sum();
        assert_eq!(kept, 530 * PAGE);
        assert_eq!(rewritten.changed.removed, ["cpuinfo.img"]);
        check(&rewritten, &target);
    }
}

#[test]
fn an_arm64_process_comes_back_as_it_was() {
    let there = rewrite(&of_images(images()), &records(), &target(Set::Aarch64)).expect("it fits");
    let mut all = images();
    all.extend(there.changed.images);
    let pages = BTreeMap::from([(1, 530 * PAGE), (2, SHARED)]);
    let there = ProcessImages::new(all, pages);
    let core = ThreadImage::decode(there.record("core-43.img").expect("one")).expect("it is whole");
    assert_eq!(core.architecture(), Ok(Some(Architecture::Aarch64)));
    let back = rewrite(&there, &records(), &target(Set::X86_64)).expect("it fits");
    let straight = rewrite(&of_images(images()), &records(), &target(Set::X86_64)).expect("it fits");
    assert_eq!(back.from, Some(Set::Aarch64));
    assert_eq!(back.changed.images, straight.changed.images);
}

/// A dump that leaves pages to be fetched later has them in its pagemaps all the same.
#[test]
fn pages_that_come_later_are_those_that_go_along() {
    let (mut all, target) = (images(), target(Set::Aarch64));
    let mut pagemap = Pagemap::decode(&all["pagemap-42.img"]).expect("it is whole");
    for run in pagemap.runs.iter_mut().filter(|run| run.lazy) {
        run.present = false;
    }
    let bytes = |run: &PageRun| run.addresses.end - run.addresses.start;
    let there = pagemap.runs.iter().filter(|run| run.present).map(bytes).sum();
    all.insert("pagemap-42.img".to_owned(), pagemap.encode());
    let lazy = ProcessImages::new(all, BTreeMap::from([(1, there), (2, SHARED)]));
    let rewritten = rewrite(&lazy, &records(), &target).expect("it fits");
    check(&rewritten, &target);
    let new = Pagemap::decode(&rewritten.changed.images["pagemap-42.img"]).expect("it is whole");
    let later: u64 = new.runs.iter().filter(|run| run.lazy && !run.present).map(bytes).sum();
    let here: u64 = new.runs.iter().filter(|run| run.present).map(bytes).sum();
    assert_eq!(later + here, 530 * PAGE);
    assert_eq!(here, rewritten.processes[0].kept_pages * PAGE);
    let parent = PageRun { in_parent: true, ..pagemap.runs[0].clone() };
    let text = refused(|images, _, _| {
        let pagemap = Pagemap { pages_id: 1, runs: vec![parent] };
        images.insert("pagemap-42.img".to_owned(), pagemap.encode());
    });
    assert!(text.contains("it refers to the images of an earlier dump"), "{text}");
}

#[test]
fn a_process_that_cannot_go_on_is_named() {
    let begin = "process 42 (/srv/godwit-fixture/service) ";
    let says = |text: String, what: &str| assert!(text.starts_with(begin) && text.contains(what), "{text}");
    says(refused(|_, records, _| records.clear()), "was not at rest");
    says(refused(|_, records, _| records.get_mut(&PID).expect("one")[48] = 0), "was not at rest");
    says(
        refused(|_, records, _| records.get_mut(&PID).expect("one")[52] = 3),
        "has 2 threads in the images, and 3",
    );
    says(refused(|_, records, _| records.get_mut(&PID).expect("one")[0] = 7), "is of another build");
    says(
        refused(|_, records, _| records.get_mut(&PID).expect("one")[32] = 7),
        "was not built by godwit-cc for arm64",
    );
    says(refused(|_, _, target| target.programs.clear()), "has no executable for arm64");
    says(refused(|_, _, target| target.node.address_end = 1 << 39), "processes of the other node end at");
    let twice = refused(|images, _, _| {
        // Both threads have the thread pointer of one.
        let other = images["core-42.img"].clone();
        images.insert("core-43.img".to_owned(), other);
    });
    says(twice, "two threads have the control block");
    assert!(refused(|_, _, target| target.node.page_bytes = 65536).contains("those of the other node 65536"));
}

/// The images with one more area.
fn with_area(images: &mut BTreeMap<String, Vec<u8>>, area: &MappedArea<'_>) {
    let name = "mm-42.img";
    let all = of_images(images.clone());
    let mut space = AddressSpace::decode(all.record(name).expect("one")).expect("it is whole");
    let old = space.clone();
    let mut areas = old.areas(PAGE).expect("they are in order");
    areas.push(area.clone());
    areas.sort_by_key(|area| area.range.start);
    space.set_areas(&areas);
    let mut changed = ChangedImages::default();
    changed.insert(name, ImageKind::Memory, &[space.encode()]).expect("it is short");
    images.extend(changed.images);
}

/// A number as a message of Protocol Buffers has it.
fn varint(mut number: u64) -> Vec<u8> {
    let mut bytes = Vec::new();
    while number > 127 {
        bytes.push(u8::try_from(number & 127).expect("7 bits") | 128);
        number >>= 7;
    }
    bytes.push(u8::try_from(number).expect("7 bits"));
    bytes
}

/// Changes the record of the image of an address space.
fn change_space(images: &mut BTreeMap<String, Vec<u8>>, change: impl FnOnce(&mut Vec<u8>)) {
    let image = images.get_mut("mm-42.img").expect("one");
    let mut record = image.split_off(12);
    change(&mut record);
    let length = u32::try_from(record.len()).expect("it is short");
    image[8..].copy_from_slice(&length.to_le_bytes());
    image.extend(record);
}

/// Puts a number into one of the first fields, which are all numbers.
fn set_bound(images: &mut BTreeMap<String, Vec<u8>>, tag: u8, number: u64) {
    change_space(images, |record| {
        let ends = record.iter().enumerate().filter(|(_, byte)| **byte < 128).map(|(at, _)| at + 1);
        // Key, number, key, number.
        let ends: Vec<_> = std::iter::once(0).chain(ends).take(40).collect();
        let at = ends.chunks_exact(2).position(|pair| record[pair[0]] == tag << 3).expect("it is there");
        record.splice(ends[2 * at + 1]..ends[2 * at + 2], varint(number));
    });
}

#[test]
fn what_the_kernel_has_the_addresses_of_is_where_a_process_has_it() {
    let says = |changes: &[(u8, u64)], what: &str| {
        let mut all = images();
        for (tag, number) in changes {
            set_bound(&mut all, *tag, *number);
        }
        if changes.iter().any(|(tag, _)| *tag == 5) {
            // A program may have unmapped it. What grows down and is no first stack is refused before.
            change_areas(&mut all, |areas| areas.retain(|area| !area.grows_down()));
        }
        let rewritten = rewrite(&of_images(all), &records(), &target(Set::Aarch64));
        let text = rewritten.map_or_else(|error| error.to_string(), |_| String::new());
        assert!(text.contains(what) && text.is_empty() == what.is_empty(), "{changes:x?}: {text}");
    };
    let (stack, heap) = (0x7ffc_adb8_0b30, 0x9e98_f000);
    says(&[(5, stack), (6, heap), (7, heap)], "");
    says(&[(5, Slot::MAIN.quarter(Quarter::NativeStack).end - 8)], "");
    says(&[(5, 0x7000_0000)], "has its first stack at 0x70000000, where programs of godwit-cc have none");
    says(
        &[(5, 1 << 47)],
        "has memory at 0x800000000000, and processes of the other node end at 0x800000000000",
    );
    says(&[(5, u64::MAX)], "processes of the other node end at");
    says(&[(6, heap + 1)], "mm-42.img is damaged: its heap has no beginning, or ends before it");
    says(&[(6, 0), (7, 0)], "has its heap of the kernel's at 0x0, where");
    says(&[(7, HEAP.start + 1)], "has its heap of the kernel's at 0x9e98f000, where");
    // Where a program can have moved them to.
    says(&[(8, HEAP.start), (9, HEAP.start + 9), (10, DATA.start), (11, DATA.start)], "");
    let arguments = Slot::MAIN.quarter(Quarter::DataStack);
    let (begin, end) = (arguments.end - 64, arguments.end - 8);
    says(&[(8, begin), (9, end), (10, end), (11, end)], "");
    says(&[(8, end), (9, end), (10, end), (11, end)], "");
    says(&[(10, arguments.start - 8), (11, arguments.start - 8)], "has its environment at");
    says(&[(8, 0x7000_0000), (9, 0x7000_0010)], "has its list of arguments at 0x70000000, where");
    says(&[(8, 1 << 47), (9, (1 << 47) + 1)], "has memory at 0x800000000000");
    says(&[(10, 7)], "has its environment at 0x7, where");
    says(&[(11, u64::MAX)], "processes of the other node end at");
    says(&[(11, 7)], "mm-42.img is damaged: its environment has no beginning");
}

/// A peer says that the main thread's native stack is the one that the kernel has made, and that it grows down: what is in
/// it would be return addresses of the peer's choice.
#[test]
fn a_native_stack_does_not_go_along_as_the_first_stack() {
    let mut all = images();
    let native = Slot::MAIN.quarter(Quarter::NativeStack);
    set_bound(&mut all, 5, native.end - 8);
    change_areas(&mut all, |areas| {
        let first = areas.iter().position(MappedArea::grows_down).expect("it is there");
        let first = areas.remove(first);
        let its = areas.iter_mut().find(|area| area.range.contains(&(native.end - 8))).expect("it is there");
        *its = first.part(its.range.clone());
    });
    let rewritten = rewrite(&of_images(all), &records(), &target(Set::Aarch64)).expect("it fits");
    let staying = &rewritten.processes[0].staying;
    assert!(
        staying.iter().all(|range| range.end <= native.start || native.end <= range.start),
        "{staying:x?}"
    );
    check(&rewritten, &target(Set::Aarch64));
}

/// The areas with others in place of the one that begins there.
fn with_in_place(images: &mut BTreeMap<String, Vec<u8>>, start: u64, new: &[MappedArea<'static>]) {
    change_areas(images, |areas| {
        let at = areas.iter().position(|area| area.range.start == start).expect("it is there");
        areas.splice(at..=at, new.iter().cloned());
    });
}

fn change_areas(images: &mut BTreeMap<String, Vec<u8>>, change: impl FnOnce(&mut Vec<MappedArea<'_>>)) {
    change_space(images, |record| {
        let old = record.clone();
        let mut space = AddressSpace::decode(&old).expect("it is whole");
        let areas = AddressSpace::decode(&old).expect("it is whole");
        let mut areas = areas.areas(PAGE).expect("they are in order");
        change(&mut areas);
        space.set_areas(&areas);
        *record = space.encode();
    });
}

/// Start, end and treatment of the executable's areas under the target's.
fn treatments(images: BTreeMap<String, Vec<u8>>) -> Vec<(u64, u64, Treatment)> {
    let rewritten = rewrite(&of_images(images), &records(), &target(Set::Aarch64)).expect("it fits");
    let all = of_images(rewritten.changed.images);
    let space = AddressSpace::decode(all.record("mm-42.img").expect("one")).expect("it is whole");
    let areas = space.areas(PAGE).expect("they are in order");
    let areas = areas.iter().filter(|area| area.range.end <= PRIVATE_DATA.end);
    areas.map(|area| (area.range.start, area.range.end, area.treatment())).collect()
}

#[test]
fn locks_and_advice_go_along_with_variables() {
    let none = Treatment::default();
    let locked = Treatment { locked: true, advice: None };
    let advised = Treatment { locked: false, advice: Some(1 << 16) };
    let plain = treatments(images());
    assert!(plain.iter().all(|(_, _, treatment)| *treatment == none));

    // Pages of the file and of zeros, as the kernel has them once a part of each is locked or advised.
    let mut all = images();
    let mut file = MappedArea::of_file(0x801_0000..0x801_1000, 3, 1, 0x5_0000);
    file.set_treatment(locked);
    let zeros = MappedArea::of_zeros(0x801_1000..0x803_7000, 3);
    let mut pieces =
        [0x801_1000..0x801_2000, 0x801_2000..0x801_3000, 0x801_3000..0x803_7000].map(|part| zeros.part(part));
    pieces[0].set_treatment(locked);
    pieces[1].set_treatment(advised);
    with_in_place(&mut all, 0x801_0000, &[file]);
    with_in_place(&mut all, 0x801_1000, &pieces);
    let variables: Vec<_> =
        treatments(all).into_iter().filter(|area| (0x801_0000..DATA.end).contains(&area.0)).collect();
    let expected = [
        (0x801_0000, 0x801_1000, locked),
        (0x801_1000, 0x801_2000, locked),
        (0x801_2000, 0x801_3000, advised),
        (0x801_3000, 0x803_7000, none),
    ];
    assert_eq!(variables, expected);

    // mlockall(2) locks the text, too, and pieces that are alike are one area.
    let mut all = images();
    with_in_place(
        &mut all,
        0x801_1000,
        &[zeros.part(0x801_1000..0x801_2000), zeros.part(0x801_2000..0x803_7000)],
    );
    change_areas(&mut all, |areas| areas.iter_mut().for_each(|area| area.set_treatment(locked)));
    let every = |treatment| plain.iter().map(|(start, end, _)| (*start, *end, treatment)).collect::<Vec<_>>();
    assert_eq!(treatments(all), every(locked));
    // Some of the text is not all of it.
    let mut all = images();
    change_areas(&mut all, |areas| {
        let text = areas[0].clone();
        let (mut first, second) = (text.part(0x40_0000..0x40_1000), text.part(0x40_1000..0x41_5000));
        first.set_treatment(locked);
        areas.splice(0..1, [first, second]);
    });
    assert_eq!(treatments(all), plain);
}

#[test]
fn variables_that_are_mapped_in_another_way_are_refused() {
    let says = |start: u64, area: MappedArea<'static>| {
        let text = refused(|images, _, _| with_in_place(images, start, &[area]));
        let what = format!("has changed how its variables from {start:#x} to ");
        assert!(text.contains(&what), "{text}");
    };
    let (file, zeros) = (0x801_0000..0x801_1000, 0x801_1000..0x803_7000);
    says(0x801_1000, MappedArea::of_zeros(zeros.clone(), 1));
    says(0x801_1000, MappedArea::of_zeros(zeros.clone(), 7));
    says(0x801_0000, MappedArea::of_file(file, 3, 2, 0x5_0000));
    says(0x800_0000, MappedArea::of_zeros(0x800_0000..0x800_1000, 3));
    // The same file by another number is the executable, too.
    let mut all = images();
    with_file(&mut all, &of_file(99, &[5], &[0]));
    with_in_place(&mut all, 0x801_0000, &[MappedArea::of_file(0x801_0000..0x801_1000, 3, 99, 0x5_0000)]);
    assert_eq!(treatments(all), treatments(images()));
    let mut area = MappedArea::of_zeros(zeros, 3);
    area.set_file_flags(0);
    let mut all = images();
    with_in_place(&mut all, 0x801_1000, &[area]);
    assert_eq!(treatments(all), treatments(images()));
}

/// A guard of these pages (`MADV_GUARD_INSTALL`), behind the other areas.
fn with_guard(images: &mut BTreeMap<String, Vec<u8>>, range: &Range<u64>, protection: u64) {
    change_space(images, |record| {
        let numbers = [range.start, range.end, 0, 0, protection, 0x22, 1 | 1 << 16, 1];
        let fields = (1_u8..).zip(numbers).map(|(tag, number)| [vec![tag << 3], varint(number)].concat());
        let area = fields.collect::<Vec<_>>().concat();
        record.extend([&[0x72, u8::try_from(area.len()).expect("it is short")][..], &area].concat());
    });
}

#[test]
fn guards_in_variables_go_along() {
    let guard = 0x801_2000..0x801_3000;
    let mut all = images();
    with_guard(&mut all, &guard, 0);
    // That of a set's own variables is not the program's.
    with_guard(&mut all, &(0x7000_2000..0x7000_3000), 0);
    let rewritten = rewrite(&of_images(all), &records(), &target(Set::Aarch64)).expect("it fits");
    check(&rewritten, &target(Set::Aarch64));
    let all = of_images(rewritten.changed.images);
    let space = AddressSpace::decode(all.record("mm-42.img").expect("one")).expect("it is whole");
    let areas = space.areas(PAGE).expect("they are in order");
    let guards: Vec<_> = areas.iter().filter(|area| area.is_guard()).map(|area| area.range.clone()).collect();
    assert_eq!(guards, std::slice::from_ref(&guard));

    let text = refused(|images, _, _| with_guard(images, &guard, 4));
    assert!(text.contains("has memory from 0x8012000 to 0x8013000 that may be executed"), "{text}");
    let text = refused(|images, _, _| with_guard(images, &(0x7fff_f000..0x8000_1000), 0));
    assert!(text.contains("where programs of godwit-cc have none"), "{text}");
    let sets = (Set::X86_64, Set::X86_64);
    let target = target(Set::X86_64);
    let program = target.programs.values().next().expect("one");
    let mut all = images();
    with_guard(&mut all, &(DATA.end - PAGE..DATA.end + PAGE), 0);
    let all = of_images(all);
    let space = AddressSpace::decode(all.record("mm-42.img").expect("one")).expect("it is whole");
    let areas =
        space::areas(space.areas(PAGE).expect("they are in order"), program, (1, |file| file == 1), sets);
    assert_eq!(areas.map(|areas| areas.len()), Err(Cause::Variables(DATA.end - PAGE..DATA.end + PAGE)));
}

/// What processes share has an image of its own, by its number.
#[test]
fn shared_memory_goes_along_whole_or_not_at_all() {
    let run = |pages: Range<u64>| PageRun {
        addresses: pages.start * PAGE..pages.end * PAGE,
        present: true,
        lazy: false,
        in_parent: false,
    };
    let with = |shared: &[(u32, Vec<PageRun>)], bytes: u64| {
        let mut all = images();
        all.remove("pagemap-shmem-7.img");
        for (number, (pages_id, runs)) in (7..).zip(shared) {
            let pagemap = Pagemap { pages_id: *pages_id, runs: runs.clone() };
            all.insert(format!("pagemap-shmem-{number}.img"), pagemap.encode());
        }
        let all = ProcessImages::new(all, BTreeMap::from([(1, PAGES), (2, bytes)]));
        let rewritten =
            rewrite(&all, &records(), &target(Set::Aarch64)).map_err(|error| error.to_string())?;
        assert!(!rewritten.changed.pages.contains_key(&2));
        let image = |name: &str| Pagemap::decode(&rewritten.changed.images[name]);
        let names = (7..).zip(shared).map(|(number, _)| format!("pagemap-shmem-{number}.img"));
        names.map(|name| Ok(image(&name)?.runs)).collect::<Result<Vec<_>, String>>()
    };
    let runs = vec![run(0..2), run(5..6)];
    assert_eq!(with(&[(2, runs.clone())], 3 * PAGE), Ok(vec![runs.clone()]));
    // The memory came before, so that the images have none.
    assert_eq!(with(&[(3, Vec::new())], 0), Ok(vec![Vec::new()]));
    for (shared, what) in [
        (vec![(2, vec![run(0..4)])], "it tells of 16384 bytes of pages, and pages-2.img has 12288"),
        (
            vec![(2, vec![run(0..1 << 40)])],
            "it tells of 4503599627370496 bytes of pages, and pages-2.img has 12288",
        ),
        (vec![(2, vec![])], "it tells of 0 bytes of pages, and pages-2.img has 12288"),
        (
            vec![(2, runs.clone()), (2, runs.clone())],
            "pagemap-shmem-8.img is damaged: pages-2.img is of other memory",
        ),
        (
            vec![(1, vec![run(0..PAGES / PAGE)])],
            "pagemap-shmem-7.img is damaged: pages-1.img is of other memory",
        ),
        (
            vec![(2, vec![PageRun { in_parent: true, ..run(0..3) }])],
            "it has pages whose contents are not in the images",
        ),
        (
            vec![(2, vec![PageRun { present: false, ..run(0..3) }])],
            "it has pages whose contents are not in the images",
        ),
    ] {
        let text = with(&shared, 3 * PAGE).expect_err("it does not fit");
        assert!(text.contains(what), "{text}");
    }
}

#[test]
fn memory_that_others_have_put_there_is_refused() {
    let says = |area: MappedArea<'_>, what: &str| {
        let text = refused(|images, _, _| with_area(images, &area));
        assert!(text.contains(what), "{text}");
    };
    let (read, execute) = (1, 4);
    let at = MAP.start + 0x1000_0000..MAP.start + 0x1000_0000 + PAGE;
    says(
        MappedArea::of_file(at.clone(), read | execute, 1, 0),
        "may be executed and is not of its executable",
    );
    says(MappedArea::of_zeros(at.clone(), read | execute), "may be executed and is not of its executable");
    says(MappedArea::of_zeros(0x1_0000..0x1_1000, read), "where programs of godwit-cc have none");
    says(MappedArea::of_zeros(DATA.start + 0x100_0000..DATA.start + 0x100_1000, read), "have none");
    says(
        MappedArea::of_zeros(HEAP.start..HEAP.start + PAGE, read),
        "mm-42.img is damaged: the area from 0x100000000",
    );
    says(MappedArea::of_zeros(at, 0x100), "of a kind that cannot change its instruction set");
}

#[test]
fn code_where_the_target_has_its_own_is_not_taken() {
    let (mut all, target) = (images(), target(Set::X86_64));
    // Between the parts of private text and private data that the executable has.
    with_area(&mut all, &MappedArea::of_zeros(0x100_0000..0x100_1000, 7));
    let rewritten = rewrite(&of_images(all), &records(), &target).expect("it is left out");
    let straight = rewrite(&of_images(images()), &records(), &target).expect("it fits");
    assert_eq!(rewritten.changed, straight.changed);
}

/// What the peer has in a page would lie under the text.
#[test]
fn an_area_that_reaches_into_the_executable_is_refused() {
    let target = target(Set::X86_64);
    let program = target.programs.values().next().expect("one");
    let merged = |range| {
        let sets = (Set::X86_64, Set::X86_64);
        space::areas(vec![MappedArea::of_zeros(range, 3)], program, (1, |file| file == 1), sets)
            .map(|areas| areas.len())
    };
    let parts = merged(0x3f_e000..0x40_0000).expect("it ends where the text begins");
    assert_eq!(merged(0x3f_f000..0x40_1000), Err(Cause::Outside(0x3f_f000..0x40_1000)));
    assert_eq!(merged(HEAP.start..HEAP.start + PAGE), Ok(parts));
}

/// CRIU would map what the peer has put into the images, or has named.
#[test]
fn an_executable_that_is_found_by_another_name_is_refused() {
    let text = refused(|images, _, _| {
        let remap = [0x5456_4319_u32, 0x5913_3954, 6].map(u32::to_le_bytes).concat();
        images.insert("remap-fpath.img".to_owned(), [&remap[..], &[8, 1, 16, 9, 24, 1]].concat());
    });
    assert!(
        text.contains("mm-42.img is damaged: its executable, file 1, is not among the open files"),
        "{text}"
    );
}

/// The record of a regular file of this number with the path of the executable, which has that many bytes and mode.
fn of_file(number: u8, bytes: &[u8], mode: &[u8]) -> Vec<u8> {
    let length = u8::try_from(PATH.len()).expect("it is short");
    // Path in field 6, bytes in field 8, mode in field 10.
    let head = [&[8, number, 0x10, 0, 0x32, length][..], PATH].concat();
    let inner = [&head[..], &[0x40], bytes, &[0x50], mode].concat();
    let length = u8::try_from(inner.len()).expect("it is short");
    [&[8, 1, 16, number, 0x1a, length][..], &inner].concat()
}

/// The images with one more open file.
fn with_file(images: &mut BTreeMap<String, Vec<u8>>, record: &[u8]) {
    let files = images.get_mut("files.img").expect("one");
    files.extend(u32::try_from(record.len()).expect("it is short").to_le_bytes());
    files.extend_from_slice(record);
}

/// CRIU compares both with the file that it finds. A file that had the path of an executable is not the target's.
#[test]
fn executables_have_size_and_mode_of_the_targets() {
    let record = |bytes: &[u8], mode: &[u8]| of_file(99, bytes, mode);
    let before = record(&[5], &[0xc0, 0x83, 2]);
    let rewritten = |is_renamed: bool| {
        let mut all = images();
        with_file(&mut all, &before);
        if is_renamed {
            let remap = [0x5456_4319_u32, 0x5913_3954, 6].map(u32::to_le_bytes).concat();
            let remap = [&remap[..], &[8, 99, 16, 9, 24, 1]].concat();
            all.insert("remap-fpath.img".to_owned(), remap);
        }
        let rewritten = rewrite(&of_images(all), &records(), &target(Set::X86_64)).expect("it fits");
        rewritten.changed.images["files.img"].clone()
    };
    assert!(rewritten(true).ends_with(&before));
    // 0x5000 bytes, 0o10_0755.
    assert!(rewritten(false).ends_with(&record(&[0x80, 0xa0, 1], &[0xed, 0x83, 2])));
}

#[test]
fn an_executable_on_a_mount_of_its_own_is_refused() {
    let with = |places: &[&str]| {
        let mut image = [0x5456_4319_u32, 0x5556_3928].map(u32::to_le_bytes).concat();
        for place in places {
            let length = u8::try_from(place.len()).expect("it is short");
            image.extend(
                [&u32::from(length + 2).to_le_bytes(), &[0x3a, length][..], place.as_bytes()].concat(),
            );
        }
        let mut all = images();
        all.insert("mountpoints-12.img".to_owned(), image);
        rewrite(&of_images(all), &records(), &target(Set::Aarch64))
            .map(drop)
            .map_err(|error| error.to_string())
    };
    assert_eq!(with(&["/", "./proc", "/srv/godwit", "/srv/godwit-fixture/data"]), Ok(()));
    for places in [
        &[][..],
        &["/srv"],
        &["/", "/srv/godwit-fixture/service"],
        &["/proc"],
        &["/", "./srv/godwit-fixture"],
        &["/", "/"],
        &["/", "//srv/"],
        &["/", "/proc/../srv"],
    ] {
        let text = with(places).expect_err("it is not of the image");
        assert!(text.contains("has its executable in a volume or on another mount"), "{places:?}: {text}");
    }
    let text = refused(|images, _, _| {
        let other = images["mountpoints-12.img"].clone();
        images.insert("mountpoints-13.img".to_owned(), other);
    });
    assert_eq!(
        text,
        "process 42 (/srv/godwit-fixture/service) is of a service with several mount namespaces, of which each can \
         have other files; run it without those of its own"
    );
}

#[test]
fn rings_of_asynchronous_calls_are_refused() {
    let text = refused(|images, _, _| {
        let space = images.get_mut("mm-42.img").expect("one");
        // Field 16, empty, behind all others of the record.
        space.extend([0x82, 0x01, 0x00]);
        let length = u32::try_from(space.len() - 12).expect("it is short");
        space[8..12].copy_from_slice(&length.to_le_bytes());
    });
    assert!(text.contains("uses io_uring or asynchronous input and output"), "{text}");
}

/// A request that waits: for rest it is of the past, and to go on it says that the process is at rest no more.
#[test]
fn requests_that_wait_do_not_go_along() {
    let with = |request: Option<Request>| {
        let mut all = images();
        let core = all.get_mut("core-42.img").expect("one");
        // The fixture has SIGALRM in its queue.
        let alarm = [14_u32, 0, 0x80].map(u32::to_le_bytes).concat();
        let at = core.windows(12).position(|bytes| bytes == alarm).expect("it waits");
        if let Some(request) = request {
            let request_bytes =
                [Request::SIGNAL.cast_unsigned(), 0, Request::CODE.cast_unsigned()].map(u32::to_le_bytes);
            core[at..at + 12].copy_from_slice(&request_bytes.concat());
            core[at + 24..at + 28].copy_from_slice(&request.value().to_le_bytes());
        }
        let rewritten = rewrite(&of_images(all), &records(), &target(Set::X86_64));
        rewritten.map(|rewritten| rewritten.changed.images["core-42.img"].len())
    };
    let whole = with(None).expect("it fits");
    let without = with(Some(Request::Rest(1))).expect("it fits");
    assert!((whole - 140..whole - 128).contains(&without), "{whole}, {without}");
    let error = with(Some(Request::GoOn(1))).expect_err("it goes on").to_string();
    assert!(error.contains("was told to go on in place"), "{error}");
}

#[test]
fn images_that_are_missing_are_named() {
    let without = refused(|images, _, _| drop(images.remove("mountpoints-12.img")));
    assert!(without.contains("has its executable in a volume or on another mount"), "{without}");
    for name in images()
        .keys()
        .filter(|name| !["mountpoints-", "pagemap-shmem-"].iter().any(|part| name.starts_with(part)))
    {
        let text = refused(|images, _, _| drop(images.remove(name)));
        assert!(text.contains(&format!("image {name} is damaged: it is not among the images")), "{text}");
    }
}

/// Of a child that has ended only the set changes, and CRIU has put a number of no meaning where its thread's would be.
#[test]
fn a_process_that_has_ended_goes_along() {
    let child = |change: &dyn Fn(&mut Vec<u8>)| {
        let mut all = images();
        let tree = all.get_mut("pstree.img").expect("one");
        // The record of the child comes last, and its thread at its end.
        let mut record = tree.split_off(tree.len() - 10);
        change(&mut record);
        let length = tree.len() - 4;
        tree[length..].copy_from_slice(&u32::try_from(record.len()).expect("it is short").to_le_bytes());
        tree.extend(record);
        rewrite(&of_images(all), &records(), &target(Set::Aarch64))
    };
    let rewritten = child(&|_| {}).expect("it fits");
    assert_eq!(rewritten.processes.iter().map(|process| process.pid).collect::<Vec<_>>(), [PID]);
    let (name, before) = ("core-44.img", images());
    let changed = &rewritten.changed.images[name];
    // The machine is in the first field.
    assert_eq!((before[name][13], changed[13]), (1, 3));
    assert_eq!((&before[name][14..], &before[name][..13]), (&changed[14..], &changed[..13]));
    assert!(child(&|record| record[9] = 99).is_ok());
    assert!(child(&|record| record.truncate(8)).is_ok());
    for change in [
        // Two threads, and the number of a thread of its parent.
        &(|record: &mut Vec<u8>| record.extend([40, 44])) as &dyn Fn(&mut Vec<u8>),
        &|record| record[1] = 43,
    ] {
        let text = child(change).map(drop).expect_err("it cannot be").to_string();
        assert!(text.contains("pstree.img is damaged") || text.contains("core-43.img is damaged"), "{text}");
    }
}

#[test]
fn a_process_that_was_stopped_is_stopped() {
    let mut all = images();
    let core = all.get_mut("core-42.img").expect("one");
    // `task_state` and `exit_code`.
    let at = core.windows(4).position(|bytes| bytes == [8, 1, 16, 0]).expect("it is alive");
    core[at + 1] = 3;
    let rewritten = rewrite(&of_images(all), &records(), &target(Set::Aarch64)).expect("it fits");
    let core = &rewritten.changed.images["core-42.img"];
    let [core] = &decode::<Core>(core, ImageKind::Core).expect("it is whole")[..] else { panic!("one") };
    assert_eq!((core.mtype, core.task.as_ref().map(|task| task.task_state)), (3, Some(3)));
}

#[test]
fn processes_and_pages_are_there_once() {
    let text = refused(|images, _, _| {
        let tree = images.get_mut("pstree.img").expect("one");
        let again = tree[8..].to_vec();
        tree.extend(again);
    });
    assert!(text.contains("pstree.img is damaged: it has a thread of process 42 twice"), "{text}");
    let short = ProcessImages::new(images(), BTreeMap::from([(1, PAGES - PAGE)]));
    let error = rewrite(&short, &records(), &target(Set::X86_64)).expect_err("a page is missing").to_string();
    assert!(error.contains("it tells of 2207744 bytes of pages, and pages-1.img has 2203648"), "{error}");
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 2000, ..ProptestConfig::default() })]
    #[test]
    fn nothing_executable_comes_of_any_images(
        changes in prop::collection::vec((0usize..9, any::<prop::sample::Index>(), any::<u8>()), 1..4),
        to in 0usize..2,
    ) {
        let mut images = images();
        let names: Vec<_> = images.keys().cloned().collect();
        for (image, at, byte) in changes {
            let bytes = images.get_mut(&names[image]).expect("one of them");
            let at = at.index(bytes.len());
            bytes[at] = byte;
        }
        let target = target(Set::ALL[to]);
        if let Ok(rewritten) = rewrite(&of_images(images), &records(), &target) {
            check(&rewritten, &target);
        }
    }
}
