//! The address space of a process under another executable.

use std::ops::Range;

use godwit_criu::images::MappedArea;
use godwit_isa_plan::{PAGE, Set};

use crate::eligibility::{Area, IMAGE, Owner};
use crate::executable::Executable;
use crate::kept::staying;
use crate::open_flags::translated;
use crate::refusal::Cause;
use crate::target::Program;

const READ: u32 = 1;
const WRITE: u32 = 2;
const EXECUTE: u32 = 4;

/// What of the auxiliary vector is the same on each set (`include/uapi/linux/auxvec.h`): `AT_PAGESZ`, the four ids,
/// `AT_CLKTCK`, `AT_SECURE`, `AT_RANDOM`, `AT_EXECFN`.
const KEPT: [u64; 9] = [6, 11, 12, 13, 14, 17, 23, 25, 31];
const AT_ENTRY: u64 = 9;

/// What an area is, for the question whether its process may go on.
pub(super) fn facts(area: &MappedArea<'_>, stack: u64) -> Area {
    let owner = match area {
        _ if area.is_of_kernel() => Owner::Kernel,
        _ if is_first_stack(area, stack) => Owner::FirstStack,
        _ => Owner::Program,
    };
    Area { range: area.range.clone(), is_executable: area.is_executable(), owner }
}

/// Are all areas that stay of kinds that can be made again?
pub(super) fn all_known(areas: &[MappedArea<'_>]) -> Result<(), Cause> {
    let unknown = areas.iter().find(|area| stays(area) && !area.is_known());
    unknown.map_or(Ok(()), |area| Err(Cause::Kind(area.range.clone())))
}

/// The areas under an executable, in order: those of its parts in place of those of another one, and what the program has.
pub(super) fn areas<'a>(
    areas: Vec<MappedArea<'a>>,
    program: &Program,
    file: u32,
    (from, to): (Set, Set),
) -> Result<Vec<MappedArea<'a>>, Cause> {
    let mut new = of_executable(&program.executable, file);
    for mut area in areas.into_iter().filter(stays) {
        if let Some(flags) = area.file_flags {
            area.set_file_flags(translated(flags, from, to).ok_or_else(|| Cause::Kind(area.range.clone()))?);
        }
        new.push(area);
    }
    // Guards lie in other areas, and come last.
    new.sort_by_key(|area| (area.is_guard(), area.range.start));
    let mut pairs = new.iter().zip(new.iter().skip(1));
    let overlaps = |(one, next): &(&MappedArea<'_>, &MappedArea<'_>)| {
        one.is_guard() == next.is_guard() && one.range.end > next.range.start
    };
    if let Some((one, _)) = pairs.find(overlaps) {
        return Err(Cause::Outside(one.range.clone()));
    }
    Ok(new)
}

/// Which parts of the areas go along as they are, in order.
pub(super) fn staying_parts(
    areas: &[MappedArea<'_>],
    stack: u64,
    executable: &Executable,
) -> Vec<Range<u64>> {
    let mut parts = Vec::new();
    for area in areas.iter().filter(|area| !area.is_guard()) {
        if is_first_stack(area, stack) {
            parts.push(area.range.clone());
        } else {
            parts.extend(staying(&area.range, executable));
        }
    }
    parts
}

/// The auxiliary vector under an executable.
pub(super) fn auxiliary(vector: &[(u64, u64)], executable: &Executable) -> Vec<(u64, u64)> {
    let new = vector.iter().filter_map(|(kind, value)| match *kind {
        AT_ENTRY => Some((AT_ENTRY, executable.entry)),
        _ => KEPT.contains(kind).then_some((*kind, *value)),
    });
    new.collect()
}

/// Where code and data of an executable are, as the kernel counts them (`load_elf_binary` of `fs/binfmt_elf.c`).
pub(super) fn bounds(executable: &Executable) -> (Range<u64>, Range<u64>) {
    let parts = executable.parts();
    let end = |part: &crate::executable::Part| part.range.start + (part.file.end - part.file.start);
    let code = parts.iter().filter(|part| part.executable);
    let code_start = code.clone().map(|part| part.range.start).min().unwrap_or(0);
    let data_start = parts.iter().map(|part| part.range.start).max().unwrap_or(0);
    let data_end = parts.iter().map(end).max().unwrap_or(0);
    (code_start..code.map(end).max().unwrap_or(0), data_start..data_end)
}

/// Does an area go along, or is it the kernel's or an executable's?
fn stays(area: &MappedArea<'_>) -> bool {
    let is_of_executable = IMAGE.start <= area.range.start && area.range.end <= IMAGE.end;
    !area.is_of_kernel() && !is_of_executable
}

fn is_first_stack(area: &MappedArea<'_>, stack: u64) -> bool {
    area.grows_down() && area.range.contains(&stack)
}

fn of_executable<'a>(executable: &Executable, file: u32) -> Vec<MappedArea<'a>> {
    let mut areas = Vec::new();
    for part in executable.parts() {
        let flag = |is_set, flag| if is_set { flag } else { 0 };
        let protection = READ | flag(part.writable, WRITE) | flag(part.executable, EXECUTE);
        let pages = part.pages();
        let middle = (part.range.start + (part.file.end - part.file.start)).next_multiple_of(PAGE);
        if pages.start < middle {
            areas.push(MappedArea::of_file(pages.start..middle, protection, file, part.file.start));
        }
        if middle < pages.end {
            areas.push(MappedArea::of_zeros(middle..pages.end, protection));
        }
    }
    areas
}
