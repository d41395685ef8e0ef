//! The address space of a process under another executable.

use std::ops::Range;

use godwit_criu::images::{KernelBounds, MappedArea, Treatment};
use godwit_isa_plan::{DATA, HEAP, PAGE, PRIVATE_DATA, PRIVATE_TEXT, Set, TEXT};

use crate::eligibility::{Area, IMAGE, Owner, is_of_first_stack, is_of_plan};
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

/// Is all that the kernel has the addresses of where a process of the plan has it, and the target can? It refuses others when
/// the process is restored (`prctl_set_mm_map` of `kernel/sys.c`).
pub(super) fn bounds_fit(stack: u64, bounds: &KernelBounds, address_end: u64) -> Result<(), Cause> {
    let KernelBounds { heap, arguments, environment } = bounds;
    // The runtime has them on the main thread's data stack; a program can have them elsewhere (`PR_SET_MM`).
    let goes_along = |range: &Range<u64>| {
        // Without a variable its environment is the place behind the arguments.
        let place = if range.is_empty() { range.start..range.start.saturating_add(1) } else { range.clone() };
        let is_variable = DATA.start <= place.start && place.end <= DATA.end;
        is_of_first_stack(&place) || is_variable || is_of_plan(&place)
    };
    // The kernel puts it behind the executable. Programs have a heap of the runtime's.
    let is_heap = |range: &Range<u64>| DATA.end <= range.start && range.end <= HEAP.start;
    let stack = stack..stack.saturating_add(1);
    for (what, range, has_place) in [
        ("first stack", &stack, is_of_first_stack(&stack) || is_of_plan(&stack)),
        ("list of arguments", arguments, goes_along(arguments)),
        ("environment", environment, goes_along(environment)),
        ("heap of the kernel's", heap, is_heap(heap)),
    ] {
        if range.end > address_end {
            return Err(Cause::TaskSize { address: range.start, end: address_end });
        }
        if !has_place {
            return Err(Cause::Bounds { what, address: range.start });
        }
    }
    Ok(())
}

/// The areas under an executable, in order: those of its parts in place of those of another one, and what the program has.
/// Areas of the other one can have other numbers for its file than the process has.
pub(super) fn areas<'a>(
    areas: Vec<MappedArea<'a>>,
    program: &Program,
    (file, is_its): (u32, impl Fn(u32) -> bool),
    (from, to): (Set, Set),
) -> Result<Vec<MappedArea<'a>>, Cause> {
    let (kept, mut replaced): (Vec<_>, Vec<_>) = areas.into_iter().partition(stays);
    let is_of_variables = |area: &MappedArea<'_>| area.range.start < DATA.end && DATA.start < area.range.end;
    if let Some(guard) = replaced.iter().find(|area| area.is_guard() && is_of_variables(area)) {
        return Err(Cause::Variables(guard.range.clone()));
    }
    replaced.retain(|area| !area.is_guard());
    let mut new = Vec::new();
    for area in of_executable(&program.executable, file) {
        in_place_of(&replaced, &area, &is_its, &mut new)?;
    }
    for mut area in kept {
        if area.is_guard() && area.is_executable() {
            return Err(Cause::Executable(area.range));
        }
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

/// Does an area go along, or is it the kernel's or an executable's? Guards lie in areas, and go along where contents do.
fn stays(area: &MappedArea<'_>) -> bool {
    let is_in = |range: &Range<u64>| range.start <= area.range.start && area.range.end <= range.end;
    let is_replaced = is_in(&IMAGE) && !(area.is_guard() && is_in(&DATA));
    !area.is_of_kernel() && !is_replaced
}

/// Adds an area of an executable, in pieces that the kernel treats as what was there. The neutral part is the same memory on
/// every set, page by page. Of what is private to a set only a lock on all of it goes along (mlockall(2)).
fn in_place_of<'a>(
    replaced: &[MappedArea<'_>],
    area: &MappedArea<'a>,
    is_its: impl Fn(u32) -> bool,
    new: &mut Vec<MappedArea<'a>>,
) -> Result<(), Cause> {
    let mut pieces = Vec::new();
    if let Some(own) = [PRIVATE_TEXT, TEXT, PRIVATE_DATA].iter().find(|own| own.contains(&area.range.start)) {
        let mut there = overlapping(replaced, own).peekable();
        let locked = there.peek().is_some() && there.all(|there| there.treatment().locked);
        pieces.push((area.range.start, Treatment { locked, advice: None }));
    } else {
        let mut begin = area.range.start;
        for there in overlapping(replaced, &area.range) {
            if there.protection != area.protection || !there.is_of_executable(&is_its) {
                return Err(Cause::Variables(there.range.clone()));
            }
            if begin < there.range.start {
                pieces.push((begin, Treatment::default()));
            }
            pieces.push((there.range.start.max(begin), there.treatment()));
            begin = there.range.end;
        }
        if begin < area.range.end {
            pieces.push((begin, Treatment::default()));
        }
    }
    pieces.dedup_by_key(|(_, treatment)| *treatment);
    let ends = pieces.iter().skip(1).map(|(begin, _)| *begin).chain([area.range.end]);
    for ((begin, treatment), end) in pieces.iter().zip(ends) {
        let mut piece = area.part(*begin..end);
        if *treatment != Treatment::default() {
            piece.set_treatment(*treatment);
        }
        new.push(piece);
    }
    Ok(())
}

/// Those of the areas, which are in order, that have a part of a range.
fn overlapping<'a, 'b>(
    areas: &'a [MappedArea<'b>],
    range: &'a Range<u64>,
) -> impl Iterator<Item = &'a MappedArea<'b>> {
    let first = areas.partition_point(|area| area.range.end <= range.start);
    areas[first..].iter().take_while(|area| area.range.start < range.end)
}

/// The one that the kernel has made. Of the main thread's native stack, which it takes for the stack once it was told so, no
/// page goes along.
fn is_first_stack(area: &MappedArea<'_>, stack: u64) -> bool {
    area.grows_down() && area.range.contains(&stack) && is_of_first_stack(&area.range)
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
