//! May a process go on under the target's executables? Asked of running processes before a service is touched, and of
//! those in images before they are changed.

use std::ops::Range;

use godwit_isa_plan::{DATA, HEAP, MAP, MAP_TABLE, PAGE, PRIVATE_DATA, PRIVATE_TEXT, Quarter, Slot};

use crate::executable::Executable;
use crate::record::{Record, RecordError};
use crate::refusal::{Cause, Name, Unfit};
use crate::target::{Program, Target};

/// All that an executable maps.
pub(crate) const IMAGE: Range<u64> = PRIVATE_TEXT.start..PRIVATE_DATA.end;

/// What is known of a process.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Process {
    /// Which.
    pub name: Name,
    /// The path of its executable in the service.
    pub executable: Vec<u8>,
    /// That is in a volume or on another mount, and not in the root filesystem.
    pub is_on_mount: bool,
    /// What it says about itself.
    pub record: Result<Record, RecordError>,
    /// What it has mapped.
    pub areas: Vec<Area>,
    /// It has a seccomp filter that is not for the target's instruction set.
    pub has_filter: bool,
    /// It has rings of io_uring or of asynchronous input and output.
    pub has_rings: bool,
}

/// Mapped memory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Area {
    /// Its addresses.
    pub range: Range<u64>,
    /// It may be executed.
    pub is_executable: bool,
    /// Whose it is.
    pub owner: Owner,
}

/// Who has put memory where it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Owner {
    /// The kernel, for its own: vDSO, vvar, vsyscall.
    Kernel,
    /// The kernel, as the first stack, with arguments and environment; or what the kernel was told is that.
    FirstStack,
    /// The program.
    Program,
}

/// May a service with these processes go on at the target?
///
/// # Errors
/// All that stands in the way, with the processes in the order in which they are given.
pub fn eligibility(processes: &[Process], page_bytes: u64, target: &Target) -> Result<(), Vec<Unfit>> {
    let mut found = Vec::new();
    if [page_bytes, target.node.page_bytes] != [PAGE; 2] {
        found.push(Unfit::PageSize { here: page_bytes, there: target.node.page_bytes });
    }
    for process in processes {
        if let Err(cause) = program_of(process, target) {
            found.push(Unfit::Process { process: process.name.clone(), cause });
        }
    }
    if found.is_empty() { Ok(()) } else { Err(found) }
}

/// The program under which a process goes on.
pub(crate) fn program_of<'a>(process: &Process, target: &'a Target) -> Result<&'a Program, Cause> {
    let set = target.node.set;
    let record = match &process.record {
        Ok(record) => record,
        Err(RecordError::Foreign) => return Err(Cause::NotBuilt(set)),
        Err(error @ RecordError::Version(_)) => return Err(Cause::Record(*error)),
    };
    if process.is_on_mount {
        return Err(Cause::OnMount);
    }
    let program = target.programs.get(&process.executable).ok_or(Cause::NoTwin(set))?;
    if program.executable.set != set {
        return Err(Cause::OtherSet { there: program.executable.set, wanted: set });
    }
    if program.executable.identity != record.identity {
        return Err(Cause::OtherBuild(set));
    }
    if !record.ready {
        return Err(Cause::NotReady);
    }
    if process.has_filter {
        return Err(Cause::Filter);
    }
    if process.has_rings {
        return Err(Cause::Rings);
    }
    for area in &process.areas {
        fits(area, &program.executable, target.node.address_end)?;
    }
    Ok(program)
}

/// Is an area one that a program of the plan can have?
fn fits(area: &Area, target: &Executable, address_end: u64) -> Result<(), Cause> {
    let Area { range, is_executable, owner } = area;
    match owner {
        Owner::Kernel => return Ok(()),
        Owner::Program if IMAGE.start <= range.start && range.end <= IMAGE.end => {
            // Only what is neutral is there on both sets. All of it is replaced but variables, which must have a place.
            let is_data = range.start < DATA.end && range.end > DATA.start;
            let inside = |pages: Range<u64>| pages.start <= range.start && range.end <= pages.end;
            let has_place = target.parts().iter().any(|part| inside(part.pages()));
            return if is_data && !has_place { Err(Cause::Outside(range.clone())) } else { Ok(()) };
        }
        Owner::FirstStack | Owner::Program => {}
    }
    if *is_executable {
        return Err(Cause::Executable(range.clone()));
    }
    if range.end > address_end {
        return Err(Cause::TaskSize { address: range.start, end: address_end });
    }
    // A first stack stays as it is, so it must not reach into what the target's executable maps. A process that has given
    // it up has told the kernel that the main thread's native stack is its stack.
    let has_place = is_of_plan(range) || *owner == Owner::FirstStack && is_of_first_stack(range);
    if has_place { Ok(()) } else { Err(Cause::Outside(range.clone())) }
}

/// Does a range lie where the kernel puts the first stack: above all that the plan has?
pub(crate) fn is_of_first_stack(range: &Range<u64>) -> bool {
    range.start >= MAP.end
}

/// Does a range lie in the parts of the plan that programs have for themselves, and on no guard? The kernel makes one area
/// of neighbours that are alike, so it may be in several.
pub(crate) fn is_of_plan(range: &Range<u64>) -> bool {
    if range.is_empty() || range.start < HEAP.start || range.end > MAP.end {
        return false;
    }
    let mut address = range.start;
    while address < range.end {
        let part = [HEAP, MAP_TABLE, MAP].into_iter().find(|part| part.contains(&address));
        let in_slot = || {
            let slot = Slot::at(address)?;
            Quarter::ALL.into_iter().map(|quarter| slot.quarter(quarter)).find(|part| part.contains(&address))
        };
        let Some(part) = part.or_else(in_slot) else { return false };
        address = part.end;
    }
    true
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use godwit_isa_plan::Set;

    use super::*;
    use crate::executable::tests::file;
    use crate::target::Node;

    fn target() -> Target {
        let program = Program::decode(&file(), 0o10_0755).expect("it is whole");
        Target {
            node: Node { set: Set::X86_64, page_bytes: PAGE, address_end: 1 << 39 },
            programs: BTreeMap::from([(b"/bin/service".to_vec(), program)]),
            knows_filters: false,
        }
    }

    fn area(range: Range<u64>) -> Area {
        Area { range, is_executable: false, owner: Owner::Program }
    }

    fn process() -> Process {
        Process {
            name: Name { pid: 17, name: "/bin/service".into() },
            executable: b"/bin/service".to_vec(),
            is_on_mount: false,
            record: Ok(Record { identity: [9; 32], ready: true, rest: None, asked: 0, over: 0 }),
            areas: vec![
                Area { range: 0x40_0000..0x41_0000, is_executable: true, owner: Owner::Program },
                area(0x801_0000..0x801_3000),
                area(HEAP.start..HEAP.start + PAGE),
                area(MAP_TABLE.start..MAP.start + PAGE),
                Area {
                    range: 0x7f_0000_0000..0x7f_0001_0000,
                    is_executable: false,
                    owner: Owner::FirstStack,
                },
                Area { range: 0x7fff_f7fc_0000..0x7fff_f7fc_2000, is_executable: true, owner: Owner::Kernel },
            ],
            has_filter: false,
            has_rings: false,
        }
    }

    fn refused(change: impl Fn(&mut Process)) -> String {
        let mut process = process();
        change(&mut process);
        let found = eligibility(&[process], PAGE, &target()).expect_err("it does not fit");
        found.iter().map(ToString::to_string).collect::<Vec<_>>().join("; ")
    }

    #[test]
    fn a_process_of_the_plan_may_go() {
        assert_eq!(eligibility(&[process()], PAGE, &target()), Ok(()));
    }

    #[test]
    fn the_stack_is_the_kernels_or_the_main_threads_own() {
        let mut process = process();
        process.areas[4].range = Slot::MAIN.quarter(Quarter::NativeStack);
        assert_eq!(eligibility(&[process.clone()], PAGE, &target()), Ok(()));
        process.areas[4].range.start -= PAGE;
        assert!(eligibility(&[process], PAGE, &target()).is_err());
    }

    #[test]
    fn what_stands_in_the_way_is_named_with_process_and_cause() {
        assert_eq!(
            refused(|process| {
                process.name.name = "/bin/sh".into();
                process.record = Err(RecordError::Foreign);
            }),
            "process 17 (/bin/sh) was not built by godwit-cc for x86-64"
        );
        let text = |change: fn(&mut Process)| refused(change);
        assert!(
            text(|process| process.record = Err(RecordError::Version(2)))
                .contains("record of rest has version 2")
        );
        assert!(
            text(|process| process.executable = b"/other".to_vec()).contains("has no executable for x86-64")
        );
        let other = Record { identity: [8; 32], ready: true, rest: None, asked: 0, over: 0 };
        assert!(refused(|process| process.record = Ok(other)).contains("is of another build"));
        let early = Record { identity: [9; 32], ready: false, rest: None, asked: 0, over: 0 };
        assert!(refused(|process| process.record = Ok(early)).contains("not begun to listen"));
        assert!(text(|process| process.is_on_mount = true).contains("in a volume or on another mount"));
        assert!(text(|process| process.has_filter = true).contains("seccomp filter"));
        assert!(text(|process| process.has_rings = true).contains("io_uring"));
    }

    #[test]
    fn memory_that_no_program_of_the_plan_has_is_refused() {
        let slot = Slot::new(2).expect("of the plan");
        let stack = slot.quarter(Quarter::NativeStack);
        for range in [
            0x1000..0x2000,
            DATA.start + 0x100_0000..DATA.start + 0x100_1000,
            PRIVATE_DATA.end - PAGE..PRIVATE_DATA.end + PAGE,
            HEAP.start - PAGE..HEAP.start + PAGE,
            HEAP.end - PAGE..HEAP.end + PAGE,
            stack.start - PAGE..stack.end,
            stack.start..stack.end + PAGE,
            MAP.end - PAGE..MAP.end + PAGE,
        ] {
            let text = refused(|process| process.areas.push(area(range.clone())));
            assert!(text.contains("where programs of godwit-cc have none"), "{range:x?}: {text}");
        }
        for range in [0x3f_f000..0x40_1000, 0x40_0000..0x40_1000, MAP.end - PAGE..MAP.end + PAGE] {
            let text = refused(|process| process.areas[4].range = range.clone());
            assert!(text.contains("where programs of godwit-cc have none"), "{range:x?}: {text}");
        }
        let text = refused(|process| process.areas[2].is_executable = true);
        assert!(text.contains("may be executed"), "{text}");
        let text = refused(|process| process.areas[4].range = 0x7fff_0000_0000..0x7fff_0001_0000);
        assert!(text.contains("processes of the other node end at 0x8000000000"), "{text}");
    }

    #[test]
    fn both_page_sizes_are_told_and_all_processes() {
        let other = Process { has_filter: true, ..process() };
        let found = eligibility(&[other.clone(), process(), other], 16384, &target()).expect_err("three");
        assert_eq!(found.len(), 3);
        assert_eq!(found[0], Unfit::PageSize { here: 16384, there: 4096 });
        let mut target = target();
        target.node.set = Set::Aarch64;
        let found = eligibility(&[process()], PAGE, &target).expect_err("of the other set");
        assert!(found[0].to_string().contains("for x86-64 in the image where one for arm64 belongs"));
    }
}
