//! `mm-PID.img`: the address space of a process as something that can be changed, with the areas of an executable, its
//! bounds and the auxiliary vector; and where the kernel's heap, the arguments and the environment are. What is not changed stays byte for byte.

use std::ops::Range;

use super::memory::{AREA_AIO_RING, AREA_GUARD, AREA_VDSO, AREA_VSYSCALL, AREA_VVAR};
use super::wire::Fields;

/// Fields of `mm_entry`.
mod field {
    pub(super) const CODE: [u32; 2] = [1, 2];
    pub(super) const DATA: [u32; 2] = [3, 4];
    pub(super) const STACK: u32 = 5;
    pub(super) const HEAP: [u32; 2] = [6, 7];
    pub(super) const ARGUMENTS: [u32; 2] = [8, 9];
    pub(super) const ENVIRONMENT: [u32; 2] = [10, 11];
    pub(super) const EXECUTABLE: u32 = 12;
    pub(super) const AUXILIARY: u32 = 13;
    pub(super) const AREAS: u32 = 14;
    pub(super) const RINGS: u32 = 16;
}

/// Fields of `vma_entry`.
mod area {
    pub(super) const START: u32 = 1;
    pub(super) const END: u32 = 2;
    pub(super) const OFFSET: u32 = 3;
    pub(super) const OBJECT: u32 = 4;
    pub(super) const PROTECTION: u32 = 5;
    pub(super) const FLAGS: u32 = 6;
    pub(super) const KIND: u32 = 7;
    pub(super) const DESCRIPTOR: u32 = 8;
    pub(super) const ADVICE: u32 = 9;
    pub(super) const FILE_FLAGS: u32 = 10;
}

/// Most areas that a process can have with the kernel's largest setting that godwit sees (`vm.max_map_count`).
const MOST_AREAS: usize = 1 << 20;
/// Most fields: areas, auxiliary vector, bounds.
const MOST_FIELDS: usize = MOST_AREAS + 1024;
/// Most fields of an area: several times those that CRIU writes.
const MOST_OF_AREA: usize = 64;
/// -1 as `sint64`: CRIU's areas have no descriptor.
const NO_DESCRIPTOR: u64 = 1;
/// Of an area of a program: `VMA_AREA_REGULAR`.
const REGULAR: u32 = 1;
const FILE_PRIVATE: u32 = 1 << 6;
const FILE_SHARED: u32 = 1 << 7;
const ANONYMOUS_PRIVATE: u32 = 1 << 9;
const MAP_PRIVATE: u32 = 0x2;
const MAP_ANONYMOUS: u32 = 0x20;
const MAP_GROWSDOWN: u32 = 0x100;
const MAP_LOCKED: u32 = 0x2000;
const PROT_EXEC: u32 = 4;
/// Areas of programs: regular, stack, heap, files and anonymous memory, private and shared, System V, memfd, guards.
const KNOWN_KINDS: u32 = 0x1 | 0x2 | 0x20 | 0x40 | 0x80 | 0x100 | 0x200 | 0x400 | 0x4000 | AREA_GUARD;
/// Those that areas keep: shared, private, droppable, fixed, anonymous, growing down, locked, without reserve, huge. They
/// are the same on all instruction sets.
const KNOWN_FLAGS: u32 = 0x1 | 0x2 | 0x8 | 0x10 | 0x20 | 0x100 | 0x2000 | 0x4000 | 0x4_0000;

/// An area, as far as it is looked at; the rest of it is kept.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MappedArea<'a> {
    fields: Fields<'a>,
    /// Its addresses.
    pub range: Range<u64>,
    /// `PROT_*` of mmap(2).
    pub protection: u32,
    /// `MAP_*` of mmap(2).
    pub flags: u32,
    /// `VMA_*` of CRIU's image.h.
    pub kind: u32,
    /// The flags with which its file is opened, if it has one.
    pub file_flags: Option<u32>,
    object: u64,
    offset: u64,
    advice: Option<u64>,
}

/// How the kernel treats memory, whatever is in it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Treatment {
    /// It stays in memory (mlock(2)).
    pub locked: bool,
    /// What madvise(2) was told of it, a bit for each advice.
    pub advice: Option<u64>,
}

/// What of a process the kernel has the addresses of, beside areas and the executable.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KernelBounds {
    /// What brk(2) moves the end of.
    pub heap: Range<u64>,
    /// The arguments, as in `/proc/PID/cmdline`.
    pub arguments: Range<u64>,
    /// The environment at the start, as in `/proc/PID/environ`.
    pub environment: Range<u64>,
}

impl<'a> MappedArea<'a> {
    /// A part of a file that is mapped privately.
    #[must_use]
    pub fn of_file(range: Range<u64>, protection: u32, file: u32, offset: u64) -> Self {
        let kind = REGULAR | FILE_PRIVATE;
        Self::new(range, protection, MAP_PRIVATE, kind, (u64::from(file), offset), Some(0))
    }

    /// Private memory that begins as zeros.
    #[must_use]
    pub fn of_zeros(range: Range<u64>, protection: u32) -> Self {
        let kind = REGULAR | ANONYMOUS_PRIVATE;
        Self::new(range, protection, MAP_PRIVATE | MAP_ANONYMOUS, kind, (0, 0), None)
    }

    fn new(
        range: Range<u64>,
        protection: u32,
        flags: u32,
        kind: u32,
        (object, offset): (u64, u64),
        file_flags: Option<u32>,
    ) -> Self {
        let mut fields = Fields::default();
        let numbers = [
            (area::START, range.start),
            (area::END, range.end),
            (area::OFFSET, offset),
            (area::OBJECT, object),
            (area::PROTECTION, protection.into()),
            (area::FLAGS, flags.into()),
            (area::KIND, kind.into()),
            (area::DESCRIPTOR, NO_DESCRIPTOR),
        ];
        for (tag, number) in numbers {
            fields.set_number(tag, number);
        }
        if let Some(flags) = file_flags {
            fields.set_number(area::FILE_FLAGS, flags.into());
        }
        Self { fields, range, protection, flags, kind, file_flags, object, offset, advice: None }
    }

    fn decode(record: &'a [u8]) -> Result<Self, String> {
        let fields = Fields::decode_at_most(MOST_OF_AREA, record)?;
        let number = |tag| fields.number(tag)?.ok_or(format!("an area has no field {tag}"));
        let short = |tag| fields.number32(tag)?.ok_or(format!("an area has no field {tag}"));
        Ok(Self {
            range: number(area::START)?..number(area::END)?,
            protection: short(area::PROTECTION)?,
            flags: short(area::FLAGS)?,
            kind: short(area::KIND)?,
            file_flags: fields.number32(area::FILE_FLAGS)?,
            object: number(area::OBJECT)?,
            offset: number(area::OFFSET)?,
            advice: fields.number(area::ADVICE)?,
            fields,
        })
    }

    /// Is it one that the kernel has put there for its own (vDSO, vvar, vsyscall)?
    #[must_use]
    pub fn is_of_kernel(&self) -> bool {
        self.kind & (AREA_VSYSCALL | AREA_VDSO | AREA_VVAR) != 0
    }

    /// Is it a ring of asynchronous input and output (io_setup(2))?
    #[must_use]
    pub fn is_ring(&self) -> bool {
        self.kind & AREA_AIO_RING != 0
    }

    /// Is it no area of its own, but pages in others that madvise(2) made inaccessible (`MADV_GUARD_INSTALL`)?
    #[must_use]
    pub fn is_guard(&self) -> bool {
        self.kind & AREA_GUARD != 0
    }

    /// Can it be one of a program, and made again on any instruction set? All bits of its flags and kind are known.
    #[must_use]
    pub fn is_known(&self) -> bool {
        self.kind & !KNOWN_KINDS == 0 && self.flags & !KNOWN_FLAGS == 0 && self.protection & !7 == 0
    }

    /// Is it as the kernel maps parts of an executable: privately, of its file, which can have several numbers, or without
    /// one, and nothing else that flags or kind could say, but how it is treated?
    pub fn is_of_executable(&self, is_its: impl Fn(u32) -> bool) -> bool {
        let is_of_file = self.kind & (FILE_PRIVATE | FILE_SHARED) != 0;
        let kind = self.kind & !(FILE_PRIVATE | ANONYMOUS_PRIVATE);
        let flags = self.flags & !(MAP_ANONYMOUS | MAP_LOCKED);
        kind == REGULAR
            && flags == MAP_PRIVATE
            && (!is_of_file || u32::try_from(self.object).is_ok_and(is_its))
    }

    /// How it is treated.
    #[must_use]
    pub fn treatment(&self) -> Treatment {
        Treatment { locked: self.flags & MAP_LOCKED != 0, advice: self.advice }
    }

    /// Has it treated so.
    pub fn set_treatment(&mut self, treatment: Treatment) {
        self.flags = if treatment.locked { self.flags | MAP_LOCKED } else { self.flags & !MAP_LOCKED };
        self.fields.set_number(area::FLAGS, self.flags.into());
        self.advice = treatment.advice;
        self.fields.remove(area::ADVICE);
        if let Some(advice) = treatment.advice {
            self.fields.set_number(area::ADVICE, advice);
        }
    }

    /// A part of it, which has to lie in it.
    #[must_use]
    pub fn part(&self, range: Range<u64>) -> Self {
        let mut part = self.clone();
        part.fields.set_number(area::START, range.start);
        part.fields.set_number(area::END, range.end);
        if self.kind & (FILE_PRIVATE | FILE_SHARED) != 0 {
            part.offset = self.offset.saturating_add(range.start.saturating_sub(self.range.start));
            part.fields.set_number(area::OFFSET, part.offset);
        }
        part.range = range;
        part
    }

    /// Does it grow down, as the first stack does?
    #[must_use]
    pub fn grows_down(&self) -> bool {
        self.flags & MAP_GROWSDOWN != 0
    }

    /// May what is in it be executed?
    #[must_use]
    pub fn is_executable(&self) -> bool {
        self.protection & PROT_EXEC != 0
    }

    /// Opens its file with other flags.
    pub fn set_file_flags(&mut self, flags: u32) {
        if self.file_flags != Some(flags) {
            self.fields.set_number(area::FILE_FLAGS, flags.into());
            self.file_flags = Some(flags);
        }
    }
}

/// An address space, taken apart. Its errors say what is wrong with the image.
#[derive(Clone, Debug)]
pub struct AddressSpace<'a> {
    fields: Fields<'a>,
    /// The number of the executable among the open files.
    pub executable: u32,
    /// Where the first stack begins.
    pub stack: u64,
}

impl<'a> AddressSpace<'a> {
    /// Takes the record of an image apart.
    pub fn decode(record: &'a [u8]) -> Result<Self, String> {
        let fields = Fields::decode_at_most(MOST_FIELDS, record)?;
        let executable = fields.number32(field::EXECUTABLE)?.ok_or("it names no executable")?;
        let stack = fields.number(field::STACK)?.ok_or("it does not say where the stack begins")?;
        Ok(Self { fields, executable, stack })
    }

    /// The record.
    #[must_use]
    pub fn encode(&self) -> Vec<u8> {
        self.fields.encode()
    }

    /// The areas in the order of their addresses, none of which overlap, and whole pages of this many bytes. Guards, which
    /// lie in others, come last.
    pub fn areas(&self, page: u64) -> Result<Vec<MappedArea<'_>>, String> {
        let records = self.fields.all(field::AREAS)?;
        if records.len() > MOST_AREAS {
            return Err(format!("it has more than {MOST_AREAS} areas"));
        }
        let areas = records.into_iter().map(MappedArea::decode).collect::<Result<Vec<_>, _>>()?;
        let mut last = 0;
        let mut had_guard = false;
        for area in &areas {
            let range = &area.range;
            // The guards are in an order of their own.
            if area.is_guard() && !std::mem::replace(&mut had_guard, true) {
                last = 0;
            }
            let is_whole = range.start.is_multiple_of(page) && range.end.is_multiple_of(page);
            if range.is_empty() || !is_whole || range.start < last || had_guard != area.is_guard() {
                return Err(format!(
                    "the area from {:#x} to {:#x} is empty, misaligned or out of order",
                    range.start, range.end
                ));
            }
            last = range.end;
        }
        Ok(areas)
    }

    /// Puts these areas in place of those that it has.
    pub fn set_areas<'b>(&mut self, areas: impl IntoIterator<Item = &'b MappedArea<'b>>) {
        self.fields.set_all(field::AREAS, areas.into_iter().map(|area| area.fields.encode()));
    }

    /// What else the kernel has the addresses of.
    pub fn kernel_bounds(&self) -> Result<KernelBounds, String> {
        let range = |what: &str, [start, end]: [u32; 2]| {
            let (start, end) = (self.fields.number(start)?, self.fields.number(end)?);
            let range =
                start.zip(end).map(|(start, end)| start..end).filter(|range| range.start <= range.end);
            range.ok_or_else(|| format!("its {what} has no beginning, or ends before it"))
        };
        Ok(KernelBounds {
            heap: range("heap", field::HEAP)?,
            arguments: range("list of arguments", field::ARGUMENTS)?,
            environment: range("environment", field::ENVIRONMENT)?,
        })
    }

    /// Are there rings of asynchronous input and output?
    #[must_use]
    pub fn has_rings(&self) -> bool {
        self.fields.has(field::RINGS)
    }

    /// The auxiliary vector, without its end.
    pub fn auxiliary(&self) -> Result<Vec<(u64, u64)>, String> {
        let numbers = self.fields.numbers(field::AUXILIARY)?;
        let (pairs, _) = numbers.as_chunks::<2>();
        Ok(pairs.iter().map(|[kind, value]| (*kind, *value)).take_while(|(kind, _)| *kind != 0).collect())
    }

    /// Gives it another auxiliary vector.
    pub fn set_auxiliary(&mut self, vector: &[(u64, u64)]) {
        let numbers = vector.iter().chain([&(0, 0)]).flat_map(|(kind, value)| [*kind, *value]);
        self.fields.set_numbers(field::AUXILIARY, numbers);
    }

    /// Says where the executable's code and data are.
    pub fn set_bounds(&mut self, code: &Range<u64>, data: &Range<u64>) {
        for ([start, end], bounds) in [(field::CODE, code), (field::DATA, data)] {
            self.fields.set_number(start, bounds.start);
            self.fields.set_number(end, bounds.end);
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn space(areas: &[MappedArea<'_>]) -> Vec<u8> {
        let mut fields = Fields::default();
        fields.set_number(field::STACK, 0x7fff_0000);
        fields.set_number(field::EXECUTABLE, 5);
        fields.set_number(90, 7);
        let mut space = AddressSpace { fields, executable: 5, stack: 0 };
        space.set_areas(areas);
        space.encode()
    }

    #[test]
    fn what_is_changed_is_read_again_and_the_rest_stays() {
        let mut file = MappedArea::of_file(0x1000..0x3000, 5, 9, 0x2000);
        file.fields.set_number(60, 4);
        let zeros = MappedArea::of_zeros(0x3000..0x4000, 3);
        let before = space(&[file.clone(), zeros.clone()]);
        let mut space = AddressSpace::decode(&before).unwrap();
        assert_eq!((space.executable, space.stack), (5, 0x7fff_0000));
        let areas = space.areas(4096).unwrap();
        assert_eq!(areas, [file, zeros]);
        assert!(areas[0].is_executable() && !areas[0].is_of_kernel());
        assert!(space.kernel_bounds().unwrap_err().contains("heap"));
        let copy = before.clone();
        let mut areas = AddressSpace::decode(&copy).unwrap();
        let mut changed = areas.areas(4096).unwrap();
        changed[0].set_file_flags(0o100_000);
        let kept = changed.clone();
        space.set_areas(&kept);
        assert_eq!(space.areas(4096).unwrap(), kept);
        space.set_auxiliary(&[(6, 4096), (9, 0x40_0000)]);
        assert_eq!(space.auxiliary(), Ok(vec![(6, 4096), (9, 0x40_0000)]));
        space.set_bounds(&(1..2), &(3..4));
        assert!(space.encode().ends_with(&[0xd0, 5, 7]), "the field that is not known here");
        areas.fields.remove(field::STACK);
        assert!(AddressSpace::decode(&areas.encode()).is_err());
    }

    #[test]
    fn bounds_of_the_kernel_are_read_and_none_ends_before_it_begins() {
        let with = |numbers: [u64; 6]| {
            let mut fields = AddressSpace::decode(&space(&[])).unwrap().fields.encode();
            for (tag, number) in (6..).zip(numbers) {
                fields.extend([tag << 3, u8::try_from(number).unwrap()]);
            }
            AddressSpace::decode(&fields).unwrap().kernel_bounds()
        };
        let expected = KernelBounds { heap: 1..1, arguments: 3..4, environment: 4..9 };
        assert_eq!(with([1, 1, 3, 4, 4, 9]), Ok(expected));
        for (numbers, what) in [
            ([2, 1, 3, 4, 4, 9], "heap"),
            ([1, 1, 5, 4, 4, 9], "list of arguments"),
            ([1, 1, 3, 4, 9, 4], "environment"),
        ] {
            assert_eq!(with(numbers), Err(format!("its {what} has no beginning, or ends before it")));
        }
    }

    #[test]
    fn a_part_of_an_area_has_its_part_of_the_file_and_a_treatment_of_its_own() {
        let file = MappedArea::of_file(0x1000..0x5000, 3, 9, 0x7000);
        let mut part = file.part(0x2000..0x4000);
        assert_eq!(part, MappedArea::of_file(0x2000..0x4000, 3, 9, 0x8000));
        assert_eq!(part.treatment(), Treatment::default());
        let treatment = Treatment { locked: true, advice: Some(1 << 16) };
        part.set_treatment(treatment);
        let image = space(&[part.clone()]);
        let read = AddressSpace::decode(&image).unwrap();
        assert_eq!(read.areas(4096).unwrap(), [part.clone()]);
        assert_eq!(read.areas(4096).unwrap()[0].treatment(), treatment);
        part.set_treatment(Treatment::default());
        assert_eq!(part, file.part(0x2000..0x4000));
        let zeros = MappedArea::of_zeros(0x1000..0x3000, 3);
        assert_eq!(zeros.part(0x2000..0x3000), MappedArea::of_zeros(0x2000..0x3000, 3));
    }

    #[test]
    fn what_is_no_part_of_the_executable_is_told() {
        let is_of_9 = |change: &dyn Fn(&mut MappedArea<'_>)| {
            let mut area = MappedArea::of_file(0x1000..0x2000, 3, 9, 0);
            change(&mut area);
            area.is_of_executable(|file| file == 9)
        };
        assert!(is_of_9(&|_| {}));
        assert!(is_of_9(&|area| area.set_treatment(Treatment { locked: true, advice: None })));
        assert!(MappedArea::of_zeros(0x1000..0x2000, 3).is_of_executable(|_| false));
        assert!(!is_of_9(&|area| area.object = 8));
        assert!(!is_of_9(&|area| area.object = 9 | 1 << 32));
        assert!(!is_of_9(&|area| area.kind = REGULAR | FILE_SHARED));
        assert!(!is_of_9(&|area| area.kind |= AREA_GUARD));
        assert!(!is_of_9(&|area| area.flags = 1));
        assert!(!is_of_9(&|area| area.flags |= MAP_GROWSDOWN));
    }

    #[test]
    fn areas_that_cannot_be_are_refused() {
        let of = |ranges: &[(u64, u64)]| {
            let areas: Vec<_> =
                ranges.iter().map(|(start, end)| MappedArea::of_zeros(*start..*end, 3)).collect();
            AddressSpace::decode(&space(&areas)).unwrap().areas(4096).map(|areas| areas.len())
        };
        assert_eq!(of(&[(0x1000, 0x2000), (0x2000, 0x3000)]), Ok(2));
        let wrong = [(0x1000, 0x1000), (0x1000, 0x2001), (0x800, 0x1000), (0x3000, 0x1000)];
        for area in wrong {
            assert!(of(&[area]).is_err(), "{area:x?}");
        }
        assert!(of(&[(0x1000, 0x3000), (0x2000, 0x4000)]).is_err());
    }

    #[test]
    fn it_has_as_many_areas_as_a_process_and_each_few_fields() {
        let area = MappedArea::of_zeros(0x1000..0x2000, 3);
        let of = |fields: usize| {
            let mut area = area.clone();
            area.fields.set_numbers(60, std::iter::repeat_n(1, fields));
            AddressSpace::decode(&space(&[area])).unwrap().areas(4096).map(|areas| areas.len())
        };
        assert_eq!(of(MOST_OF_AREA - 8), Ok(1));
        assert_eq!(of(MOST_OF_AREA - 7), Err("it has more than 64 fields".to_owned()));
        let many = space(&vec![area; 5000]);
        assert!(AddressSpace::decode(&many).is_ok());
        let too_many = [&many[..], &[8, 1].repeat(MOST_FIELDS)].concat();
        assert!(AddressSpace::decode(&too_many).unwrap_err().contains("fields"));
    }

    #[test]
    fn guards_come_last_and_lie_in_other_areas() {
        let guard =
            |start: u64| MappedArea::new(start..start + 0x1000, 0, 0x22, 1 | AREA_GUARD, (0, 0), None);
        let of = |areas: &[MappedArea<'_>]| {
            AddressSpace::decode(&space(areas)).unwrap().areas(4096).map(|areas| areas.len())
        };
        let (low, high) = (MappedArea::of_zeros(0x1000..0x4000, 3), MappedArea::of_zeros(0x8000..0x9000, 3));
        assert_eq!(of(&[low.clone(), high.clone(), guard(0x1000), guard(0x3000)]), Ok(4));
        assert!(of(&[low.clone(), guard(0x1000), high.clone()]).is_err());
        assert!(of(&[low, high, guard(0x3000), guard(0x1000)]).is_err());
    }
}
