//! The flags of a mapping: the kernel's bits, and the words for them in `smaps` (Documentation/filesystems/proc.rst).

use std::collections::BTreeMap;
use std::io;
use std::num::NonZeroUsize;
use std::os::fd::AsFd;
use std::ptr::NonNull;

use nix::libc::c_void;
use nix::sys::mman::{MapFlags, MmapAdvise, ProtFlags, madvise, mlock, mmap, mmap_anonymous, munmap};

use super::Mapping;
use super::iterator::Iterator;

/// Those that tell how a mapping was made, and what was asked for it.
const TELLING: &[(u32, &str)] = &[
    (5, "mw"),
    (8, "gd"),
    (10, "pf"),
    (13, "lo"),
    (14, "io"),
    (15, "sr"),
    (16, "rr"),
    (17, "dc"),
    (21, "nr"),
    (22, "ht"),
    (25, "wf"),
    (26, "dd"),
    (29, "hg"),
    (30, "nh"),
    (31, "mg"),
];

/// Those that `maps` tells, too, or that are the kernel's own affair. Bit 24 is another on each architecture.
const OTHERS: &[(u32, &str)] = &[
    (0, "rd"),
    (1, "wr"),
    (2, "ex"),
    (3, "sh"),
    (4, "mr"),
    (6, "me"),
    (7, "ms"),
    (9, "um"),
    (12, "uw"),
    (18, "de"),
    (19, "lf"),
    (20, "ac"),
    (23, "sf"),
    (24, "ar"),
    (27, "sd"),
    (28, "mm"),
];

/// The words of these flags; none if one is not known.
pub(super) fn words(flags: u64) -> Option<impl std::iter::Iterator<Item = &'static str>> {
    let all = || TELLING.iter().chain(OTHERS);
    let known = all().fold(0, |known, (bit, _)| known | 1_u64 << bit);
    let mut all: Vec<_> = all().filter(move |(bit, _)| flags & 1 << bit != 0).collect();
    all.sort_unstable();
    (flags & !known == 0).then(|| all.into_iter().map(|(_, word)| *word))
}

/// Fails unless the iterator tells of each mapping of this process what its `smaps` tells. Among them are some with each
/// flag that can be set here.
pub(super) fn check(iterator: &Iterator) -> io::Result<()> {
    let samples = Samples::new()?;
    let pid = i32::try_from(std::process::id()).map_err(io::Error::other)?;
    let told = iterator.of(pid)?;
    let smaps = std::fs::read_to_string("/proc/self/smaps")?;
    let smaps = of_smaps(&smaps);
    let own = told.iter().filter_map(|mapping| Some((mapping, smaps.get(&(mapping.start, mapping.end))?)));
    let mut seen = 0;
    for (mapping, words) in own {
        // A bit beside those says nothing about them.
        let told: Vec<_> =
            TELLING.iter().filter(|(bit, _)| mapping.flags & 1 << bit != 0).map(|(_, word)| *word).collect();
        let mut here: Vec<_> =
            TELLING.iter().map(|(_, word)| *word).filter(|word| words.contains(word)).collect();
        here.retain(|word| !told.contains(word));
        if !here.is_empty() || told.iter().any(|word| !words.contains(word)) {
            return Err(io::Error::other(format!(
                "of the mapping at {:x} with the flags {:x} smaps has {words:?}",
                mapping.start, mapping.flags
            )));
        }
        seen += usize::from(samples.hold(mapping));
    }
    match seen == samples.0.len() {
        true => Ok(()),
        false => Err(io::Error::other(format!("{seen} of {} mappings are told", samples.0.len()))),
    }
}

/// Range and words of each mapping.
fn of_smaps(text: &str) -> BTreeMap<(u64, u64), Vec<&str>> {
    let (mut all, mut range) = (BTreeMap::new(), None);
    for line in text.lines() {
        if let Some(words) = line.strip_prefix("VmFlags:") {
            all.extend(range.take().map(|range| (range, words.split_whitespace().collect())));
        } else if let Some((start, end)) = line.split(' ').next().and_then(|word| word.split_once('-')) {
            let address = |text| u64::from_str_radix(text, 16).ok();
            range = address(start).zip(address(end));
        }
    }
    all
}

/// Mappings of this process, each with another flag, with room between them so that none becomes part of another.
struct Samples(Vec<(NonNull<c_void>, NonZeroUsize)>);

impl Samples {
    fn new() -> io::Result<Self> {
        let mut samples = Self(Vec::new());
        let anonymous = |flags: MapFlags| Self::map(flags);
        samples.0.push(anonymous(MapFlags::empty())?);
        samples.0.push(anonymous(MapFlags::MAP_NORESERVE)?);
        samples.0.push(anonymous(MapFlags::MAP_GROWSDOWN)?);
        for advice in [
            MmapAdvise::MADV_SEQUENTIAL,
            MmapAdvise::MADV_RANDOM,
            MmapAdvise::MADV_DONTFORK,
            MmapAdvise::MADV_DONTDUMP,
            MmapAdvise::MADV_HUGEPAGE,
            MmapAdvise::MADV_NOHUGEPAGE,
            MmapAdvise::MADV_MERGEABLE,
        ] {
            let sample = anonymous(MapFlags::empty())?;
            samples.0.push(sample);
            // A kernel that knows no such advice never sets the flag.
            // SAFETY: the range is the mapping just made; none of these changes its contents.
            let _ = unsafe { madvise(sample.0, sample.1.get(), advice) };
        }
        let wiped = anonymous(MapFlags::empty())?;
        samples.0.push(wiped);
        // SAFETY: as above. (nix has no name for it.)
        unsafe { libc::madvise(wiped.0.as_ptr(), wiped.1.get(), libc::MADV_WIPEONFORK) };
        let locked = anonymous(MapFlags::empty())?;
        samples.0.push(locked);
        // Where a limit forbids it, another mapping of this process may show it.
        // SAFETY: the range is the mapping just made.
        let _ = unsafe { mlock(locked.0, locked.1.get()) };
        // A file that was opened for reading cannot become writable.
        let file = std::fs::File::open("/proc/self/exe")?;
        // SAFETY: a new mapping at an address of the kernel's choice touches nothing that exists.
        let read_only =
            unsafe { mmap(None, SIZE, ProtFlags::PROT_READ, MapFlags::MAP_SHARED, file.as_fd(), 0) }?;
        samples.0.push((read_only, SIZE));
        Ok(samples)
    }

    /// The middle one of three pages, the others gone.
    fn map(flags: MapFlags) -> io::Result<(NonNull<c_void>, NonZeroUsize)> {
        let three = SIZE.saturating_mul(NonZeroUsize::MIN.saturating_add(2));
        let access = ProtFlags::PROT_READ | ProtFlags::PROT_WRITE;
        // SAFETY: a new mapping at an address of the kernel's choice touches nothing that exists.
        let start = unsafe { mmap_anonymous(None, three, access, MapFlags::MAP_PRIVATE | flags) }?;
        // SAFETY: both pages are of the mapping just made, which nothing refers to.
        unsafe {
            let middle = start.byte_add(SIZE.get());
            munmap(start, SIZE.get())?;
            munmap(middle.byte_add(SIZE.get()), SIZE.get())?;
            Ok((middle, SIZE))
        }
    }

    fn hold(&self, mapping: &Mapping) -> bool {
        let range = |(start, size): &(NonNull<c_void>, NonZeroUsize)| {
            let start = start.addr().get();
            (start as u64, (start + size.get()) as u64)
        };
        self.0.iter().any(|sample| range(sample) == (mapping.start, mapping.end))
    }
}

/// A page.
const SIZE: NonZeroUsize = NonZeroUsize::MIN.saturating_add(4095);

impl Drop for Samples {
    fn drop(&mut self) {
        for (start, size) in &self.0 {
            // SAFETY: each was mapped above with this size, and nothing refers to it.
            let _ = unsafe { munmap(*start, size.get()) };
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn a_bit_that_is_not_known_is_told() {
        let told = |flags| words(flags).map(|words| words.collect::<Vec<_>>());
        assert_eq!(told(0x0400_0021), Some(vec!["rd", "mw", "dd"]));
        assert_eq!(told(0), Some(vec![]));
        for bit in 32..64 {
            assert_eq!(told(1 | 1 << bit), None, "{bit}");
        }
    }

    #[test]
    fn smaps_is_read_by_range() {
        let text = "1000-2000 rw-p 00000000 00:00 0 \nRss:  4 kB\nVmFlags: rd wr mr \n2000-3000 ---p 00000000 00:00 0\n";
        assert_eq!(of_smaps(text), BTreeMap::from([((0x1000, 0x2000), vec!["rd", "wr", "mr"])]));
    }
}
