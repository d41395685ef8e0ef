//! The images of memory: each process's areas, and which of its pages are where.
//!
//! ```text
//! mm-PID.img       = one mm_entry: the areas (VMAs) of the process
//! pagemap-PID.img  = pagemap_head (number of the pages file), pagemap_entry*, by address
//! pages-NUMBER.img = the pages of all entries that are "present", in their order, nothing else
//! ```

use std::collections::BTreeSet;
use std::ops::Range;
use std::path::{Path, PathBuf};

use prost::Message;

use super::{ImageError, ImageKind, process_tree, read_image, single, split};

/// Linux's `mmap` flags, the same on x86-64, arm64 and riscv64.
const MAP_PRIVATE: u32 = 0x2;
const MAP_ANONYMOUS: u32 = 0x20;
const MAP_LOCKED: u32 = 0x2000;
const MAP_HUGETLB: u32 = 0x4_0000;

/// CRIU's kinds of area, `VMA_AREA_*` of its image.h.
pub(super) const AREA_VSYSCALL: u32 = 1 << 2;
pub(super) const AREA_VDSO: u32 = 1 << 3;
const AREA_FILE_PRIVATE: u32 = 1 << 6;
pub(super) const AREA_VVAR: u32 = 1 << 12;
pub(super) const AREA_AIO_RING: u32 = 1 << 13;
pub(super) const AREA_GUARD: u32 = 1 << 16;

/// Longest run of pages in one written entry, in pages: CRIU before 4.2 counts them in 32 bits, and
/// in places with a sign.
pub(super) const LONGEST_RUN: u64 = 1 << 30;

/// `vma_entry`: an area of a process's memory.
#[derive(Clone, Copy, PartialEq, Eq, Message)]
pub struct Area {
    /// First address.
    #[prost(uint64, required, tag = "1")]
    pub start: u64,
    /// Address after the last.
    #[prost(uint64, required, tag = "2")]
    pub end: u64,
    /// `PROT_*` of mmap(2).
    #[prost(uint32, required, tag = "5")]
    pub prot: u32,
    /// `MAP_*` of mmap(2).
    #[prost(uint32, required, tag = "6")]
    pub flags: u32,
    /// What kind of area CRIU found it to be: `VMA_*` of its image.h.
    #[prost(uint32, required, tag = "7")]
    pub status: u32,
    /// What madvise(2) was told of it, a bit for each advice.
    #[prost(uint64, optional, tag = "9")]
    pub advice: Option<u64>,
}

impl Area {
    /// Whether CRIU leaves its pages for later in a lazy dump and restore: CRIU's own
    /// `vma_entry_can_be_lazy`.
    pub fn can_be_lazy(&self) -> bool {
        let wanted = MAP_ANONYMOUS | MAP_PRIVATE;
        self.flags & (wanted | MAP_LOCKED | MAP_HUGETLB) == wanted
            && self.status & (AREA_VDSO | AREA_VVAR | AREA_VSYSCALL) == 0
    }

    /// Whether a dump can leave out what was written in it ([`EXTERNAL_FILE_PAGES`](crate::EXTERNAL_FILE_PAGES)).
    fn is_private_file(&self) -> bool {
        self.status & AREA_FILE_PRIVATE != 0 && self.status & AREA_GUARD == 0
    }

    /// Whether it is no area of its own, but pages in others that madvise(2) made inaccessible
    /// (`MADV_GUARD_INSTALL`) and that have no contents.
    fn is_guard(&self) -> bool {
        self.status & AREA_GUARD != 0
    }
}

/// `mm_entry`, of which only the areas are wanted.
#[derive(Clone, PartialEq, Eq, Message)]
struct Memory {
    #[prost(message, repeated, tag = "14")]
    areas: Vec<Area>,
}

/// `MADV_WIPEONFORK` of madvise(2).
const WIPE_ON_FORK: u64 = 1 << 18;

/// The memory of a process that a lazy dump leaves out. Parts of it may be closed to the process
/// itself (`PROT_NONE`): process_vm_readv(2) refuses these, and `/proc/PID/mem` does not. After a dump
/// by CRIU 4.1, which knows no guard pages, both refuse those.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LazyAreas {
    /// PID inside the PID namespace.
    pub pid: u32,
    /// Addresses, in order, whole pages. Of what is in them the images may have some pages all the
    /// same: see [`pagemap`].
    pub ranges: Vec<Range<u64>>,
}

/// The pages of a process that a lazy restore puts in place itself.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RestoredPages {
    /// PID inside the PID namespace.
    pub pid: u32,
    /// Addresses, in order, whole pages.
    pub ranges: Vec<Range<u64>>,
}

/// Where the contents of a run of pages are.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PageRun {
    /// Addresses, whole pages.
    pub addresses: Range<u64>,
    /// Whether the contents are in the pages file.
    pub present: bool,
    /// Whether they may come later.
    pub lazy: bool,
    /// Whether they are in the images of an earlier dump.
    pub in_parent: bool,
}

/// `pagemap-PID.img`: which pages of a process have contents, and where these are. What is not
/// named in it is zero, or as in the mapped file; after a dump with [`crate::MemoryWay::Untouched`]
/// also what came to no image.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Pagemap {
    /// Number of the pages file.
    pub pages_id: u32,
    /// By address, without overlaps.
    pub runs: Vec<PageRun>,
}

#[derive(Clone, Copy, PartialEq, Eq, Message)]
struct PagemapHead {
    #[prost(uint32, required, tag = "1")]
    pages_id: u32,
}

#[derive(Clone, Copy, PartialEq, Eq, Message)]
struct PagemapEntry {
    #[prost(uint64, required, tag = "1")]
    address: u64,
    /// The number of pages before CRIU 4.2; later ones write 0 here.
    #[prost(uint32, required, tag = "2")]
    short_pages: u32,
    #[prost(bool, optional, tag = "3")]
    in_parent: Option<bool>,
    #[prost(uint32, optional, tag = "4")]
    flags: Option<u32>,
    #[prost(uint64, optional, tag = "5")]
    pages: Option<u64>,
}

/// `PE_*` of CRIU's pagemap.h.
const IN_PARENT: u32 = 1;
const LAZY: u32 = 1 << 1;
const PRESENT: u32 = 1 << 2;

impl PagemapEntry {
    fn run(self) -> Option<PageRun> {
        let length = self.pages.unwrap_or(self.short_pages.into()).checked_mul(page_size())?;
        let addresses = self.address..self.address.checked_add(length)?;
        let is_whole = self.address.is_multiple_of(page_size()) && length > 0;
        // As CRIU takes the entries of its old versions.
        let flags = match (self.in_parent, self.flags) {
            (Some(true), flags) => flags.unwrap_or(0) | IN_PARENT,
            (_, flags) => flags.unwrap_or(PRESENT),
        };
        let has = |flag| flags & flag != 0;
        let is_known = flags & !(PRESENT | LAZY | IN_PARENT) == 0;
        (is_whole && is_known).then(|| PageRun {
            addresses,
            present: has(PRESENT),
            lazy: has(LAZY),
            in_parent: has(IN_PARENT),
        })
    }
}

impl Pagemap {
    /// The pagemap in the bytes of an image; the error says what is wrong with them.
    pub fn decode(bytes: &[u8]) -> Result<Self, String> {
        let (_, records) = split(bytes, ImageKind::Pagemap)?;
        let (head, entries) = records.split_first().ok_or("it does not name its pages file")?;
        let head = PagemapHead::decode(*head).map_err(|error| error.to_string())?;
        let mut runs = Vec::new();
        let mut end = 0;
        for entry in entries {
            let entry = PagemapEntry::decode(*entry).map_err(|error| error.to_string())?;
            let run = entry.run().filter(|run| run.addresses.start >= end).ok_or_else(|| {
                format!(
                    "an entry at {:#x} is empty, misaligned, out of order or of a kind that is not known here",
                    entry.address
                )
            })?;
            end = run.addresses.end;
            runs.push(run);
        }
        Ok(Self { pages_id: head.pages_id, runs })
    }

    /// The image, as all versions of CRIU read it.
    pub fn encode(&self) -> Vec<u8> {
        let mut bytes = Vec::new();
        for word in ImageKind::Pagemap.head().into_iter().chain([ImageKind::Pagemap as u32]) {
            bytes.extend(word.to_le_bytes());
        }
        append(&mut bytes, &PagemapHead { pages_id: self.pages_id });
        for run in &self.runs {
            let flag = |is_set, flag| if is_set { flag } else { 0 };
            let mut address = run.addresses.start;
            while address < run.addresses.end {
                let pages = ((run.addresses.end - address) / page_size()).min(LONGEST_RUN);
                let entry = PagemapEntry {
                    address,
                    // It fits, by the limit.
                    short_pages: u32::try_from(pages).unwrap_or(u32::MAX),
                    in_parent: run.in_parent.then_some(true),
                    flags: Some(
                        flag(run.present, PRESENT) | flag(run.lazy, LAZY) | flag(run.in_parent, IN_PARENT),
                    ),
                    pages: Some(pages),
                };
                append(&mut bytes, &entry);
                address += pages * page_size();
            }
        }
        bytes
    }
}

fn append(bytes: &mut Vec<u8>, message: &impl Message) {
    // Two messages of numbers: some tens of bytes.
    bytes.extend(u32::try_from(message.encoded_len()).unwrap_or(u32::MAX).to_le_bytes());
    bytes.extend(message.encode_to_vec());
}

/// The size of a page on this machine, in bytes.
pub fn page_size() -> u64 {
    use std::sync::LazyLock;
    static SIZE: LazyLock<u64> = LazyLock::new(|| {
        // SAFETY: a question without pointers.
        u64::try_from(unsafe { libc::sysconf(libc::_SC_PAGESIZE) }).unwrap_or(4096)
    });
    *SIZE
}

/// The areas of the process with this PID inside its PID namespace; none for a zombie.
pub fn areas(images: &Path, pid: u32) -> Result<Vec<Area>, ImageError> {
    let path = images.join(format!("mm-{pid}.img"));
    if is_missing(&path) {
        return Ok(Vec::new());
    }
    let memory: Memory = single(&path, ImageKind::Memory)?;
    let is_whole =
        |area: &Area| area.start.is_multiple_of(page_size()) && area.end.is_multiple_of(page_size());
    match memory.areas.iter().find(|area| area.start >= area.end || !is_whole(area)) {
        Some(area) => {
            let reason = format!("the area from {:#x} to {:#x} is not valid", area.start, area.end);
            Err(ImageError::Damaged { path, reason })
        }
        None => Ok(memory.areas),
    }
}

/// The memory that a lazy dump leaves out, process by process, as CRIU's restore sees it; without
/// pages that have no contents because they are guards.
pub fn lazy_areas(images: &Path) -> Result<Vec<LazyAreas>, ImageError> {
    let mut all = Vec::new();
    let mut pids = BTreeSet::new();
    for process in process_tree(images)? {
        let areas = areas(images, process.pid)?;
        let mut ranges: Vec<_> =
            areas.iter().filter(|area| area.can_be_lazy()).map(|area| area.start..area.end).collect();
        ranges.sort_by_key(|range| range.start);
        let overlap = ranges.windows(2).find_map(|pair| match pair {
            [first, second] if first.end > second.start => Some(second.start),
            _ => None,
        });
        let damage = match overlap {
            Some(address) => Some(format!("two areas have the address {address:#x}")),
            None => (!pids.insert(process.pid)).then(|| "its process is listed twice".to_owned()),
        };
        if let Some(reason) = damage {
            let path = images.join(format!("mm-{}.img", process.pid));
            return Err(ImageError::Damaged { path, reason });
        }
        let mut guards: Vec<_> =
            areas.iter().filter(|area| area.is_guard()).map(|area| area.start..area.end).collect();
        guards.sort_by_key(|range| range.start);
        let ranges: Vec<_> = ranges.iter().flat_map(|range| without(range, &guards)).collect();
        if !ranges.is_empty() {
            all.push(LazyAreas { pid: process.pid, ranges });
        }
    }
    Ok(all)
}

/// Where a process has mapped files privately, in order.
pub(super) fn private_files(images: &Path, pid: u32) -> Result<Vec<Range<u64>>, ImageError> {
    let mut ranges: Vec<_> = areas(images, pid)?
        .iter()
        .filter(|area| area.is_private_file())
        .map(|area| area.start..area.end)
        .collect();
    ranges.sort_by_key(|range| range.start);
    Ok(ranges)
}

/// The areas of each process that its children have empty (`MADV_WIPEONFORK`).
pub fn wiped_areas(images: &Path) -> Result<Vec<RestoredPages>, ImageError> {
    let mut all = Vec::new();
    for process in process_tree(images)? {
        let wiped = areas(images, process.pid)?.into_iter();
        let wiped = wiped.filter(|area| area.advice.is_some_and(|advice| advice & WIPE_ON_FORK != 0));
        let ranges: Vec<_> = wiped.map(|area| area.start..area.end).collect();
        if !ranges.is_empty() {
            all.push(RestoredPages { pid: process.pid, ranges });
        }
    }
    Ok(all)
}

/// The pages that a lazy restore puts in place itself, from the images, process by process.
pub fn restored_pages(images: &Path) -> Result<Vec<RestoredPages>, ImageError> {
    let mut all = Vec::new();
    for process in process_tree(images)? {
        let Some(pagemap) = pagemap(images, process.pid)? else { continue };
        // As CRIU does: what is marked as lazy is left out wherever it is.
        let runs = pagemap.runs.into_iter().filter(|run| !run.lazy && (run.present || run.in_parent));
        all.push(RestoredPages { pid: process.pid, ranges: runs.map(|run| run.addresses).collect() });
    }
    Ok(all)
}

/// What is left of a range without others, which are in order.
pub(super) fn without(range: &Range<u64>, others: &[Range<u64>]) -> Vec<Range<u64>> {
    let mut left = Vec::new();
    let mut start = range.start;
    let first = others.partition_point(|other| other.end <= range.start);
    for other in others.iter().skip(first).take_while(|other| other.start < range.end) {
        if other.start > start {
            left.push(start..other.start);
        }
        start = start.max(other.end);
    }
    if start < range.end {
        left.push(start..range.end);
    }
    left
}

/// Reads the pagemap of the process with this PID inside its PID namespace; none for a zombie.
pub fn pagemap(images: &Path, pid: u32) -> Result<Option<Pagemap>, ImageError> {
    let path = pagemap_path(images, pid);
    if is_missing(&path) {
        return Ok(None);
    }
    let bytes = read_image(&path, ImageKind::Pagemap)?;
    Pagemap::decode(&bytes).map(Some).map_err(|reason| ImageError::Damaged { path, reason })
}

pub(super) fn pagemap_path(images: &Path, pid: u32) -> PathBuf {
    images.join(format!("pagemap-{pid}.img"))
}

fn is_missing(path: &Path) -> bool {
    matches!(path.try_exists(), Ok(false))
}

/// An image of areas, for tests.
#[cfg(test)]
pub(super) fn encode_areas(areas: &[Area]) -> Vec<u8> {
    let mut bytes = Vec::new();
    for word in ImageKind::Memory.head().into_iter().chain([ImageKind::Memory as u32]) {
        bytes.extend(word.to_le_bytes());
    }
    append(&mut bytes, &Memory { areas: areas.to_vec() });
    bytes
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use proptest::prelude::*;

    use super::*;

    fn area(start: u64, end: u64, flags: u32, status: u32) -> Area {
        Area { start, end, prot: 3, flags, status, advice: None }
    }

    fn run(start: u64, end: u64) -> PageRun {
        PageRun { addresses: start..end, present: true, lazy: false, in_parent: false }
    }

    #[test]
    fn only_private_anonymous_memory_that_is_not_locked_can_be_lazy() {
        let private = MAP_PRIVATE | MAP_ANONYMOUS;
        let lazy = |flags, status| area(0, 4096, flags, status).can_be_lazy();
        assert!(lazy(private, 1 | (1 << 9)));
        // A stack grows down.
        assert!(lazy(private | 0x100, 1 | (1 << 1)));
        assert!(!lazy(private | MAP_LOCKED, 1));
        assert!(!lazy(private | MAP_HUGETLB, 1));
        assert!(!lazy(private, AREA_VDSO));
        assert!(!lazy(MAP_PRIVATE, 1 | (1 << 6)));
        assert!(!lazy(MAP_ANONYMOUS | 1, 1 | (1 << 8)));
    }

    #[test]
    fn guards_are_taken_out_of_the_lazy_areas() {
        let left = |guards: &[(u64, u64)]| {
            let guards: Vec<_> = guards.iter().map(|&(start, end)| start..end).collect();
            without(&(10..20), &guards).iter().map(|range| (range.start, range.end)).collect::<Vec<_>>()
        };
        assert_eq!(left(&[(0, 5), (5, 11), (13, 14), (18, 30), (40, 50)]), [(11, 13), (14, 18)]);
        assert_eq!(left(&[(20, 30)]), [(10, 20)]);
        assert_eq!(left(&[(0, 30)]), []);
    }

    #[test]
    fn entries_of_both_kinds_of_criu_are_read() {
        let page = page_size();
        let mut bytes = Pagemap { pages_id: 3, runs: Vec::new() }.encode();
        let old = PagemapEntry { address: page, short_pages: 2, in_parent: None, flags: None, pages: None };
        let new =
            PagemapEntry { address: 3 * page, short_pages: 0, flags: Some(LAZY), pages: Some(5), ..old };
        append(&mut bytes, &old);
        append(&mut bytes, &new);
        let late = PageRun { addresses: 3 * page..8 * page, present: false, lazy: true, in_parent: false };
        let expected = Pagemap { pages_id: 3, runs: vec![run(page, 3 * page), late] };
        assert_eq!(Pagemap::decode(&bytes).unwrap(), expected);
    }

    #[test]
    fn a_pagemap_out_of_order_or_past_the_end_of_memory_is_refused() {
        let page = page_size();
        let decode = |runs| Pagemap::decode(&Pagemap { pages_id: 1, runs }.encode());
        assert!(decode(vec![run(0, 2 * page), run(page, 3 * page)]).unwrap_err().contains("order"));
        let mut bytes = Pagemap { pages_id: 1, runs: Vec::new() }.encode();
        let far = PagemapEntry { address: 0, short_pages: 0, in_parent: None, flags: None, pages: None };
        append(&mut bytes, &PagemapEntry { address: page, pages: Some(u64::MAX / page), ..far });
        assert!(Pagemap::decode(&bytes).is_err());
    }

    #[test]
    fn a_very_long_run_is_written_in_pieces() {
        let length = (LONGEST_RUN + 5) * page_size();
        let pagemap = Pagemap { pages_id: 1, runs: vec![run(0, length)] };
        let read = Pagemap::decode(&pagemap.encode()).unwrap();
        let middle = LONGEST_RUN * page_size();
        assert_eq!(read.runs, [run(0, middle), run(middle, length)]);
    }

    proptest! {
        #[test]
        fn a_pagemap_comes_back_as_it_was(lengths in proptest::collection::vec((0u64..9, 1u64..9, 0u8..8), 0..40)) {
            let mut at = 0;
            let runs = lengths.iter().map(|(gap, pages, flags)| {
                let start = at + gap * page_size();
                at = start + pages * page_size();
                let has = |bit: u8| flags & bit != 0;
                PageRun { addresses: start..at, present: has(1), lazy: has(2), in_parent: has(4) }
            });
            let pagemap = Pagemap { pages_id: 7, runs: runs.collect() };
            prop_assert_eq!(Pagemap::decode(&pagemap.encode()).unwrap(), pagemap);
        }

        #[test]
        fn garbage_is_refused_without_panic(bytes in proptest::collection::vec(any::<u8>(), 0..256)) {
            let mut headed = Pagemap { pages_id: 1, runs: Vec::new() }.encode();
            headed.extend(bytes);
            let _ = Pagemap::decode(&headed);
        }
    }
}
