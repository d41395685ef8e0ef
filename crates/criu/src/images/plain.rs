//! Puts pages into images that a dump has left out: all lazy ones, for a restore where nothing can come later (userfaultfd
//! is forbidden), or those of private mappings of files ([`EXTERNAL_FILE_PAGES`](crate::EXTERNAL_FILE_PAGES)).
//!
//! ```text
//! pages-N.img of CRIU ─┐
//!                      ├─▶ by address ─▶ pages-N.img, pagemap-PID.img
//! pages left out ──────┘
//! ```

use std::fs::{self, File};
use std::io::{self, BufWriter, Read, Write};
use std::ops::Range;
use std::path::{Path, PathBuf};

use nix::errno::Errno;
use nix::fcntl::{FallocateFlags, fallocate};

use super::memory::{PageRun, Pagemap, lazy_areas, page_size, pagemap, pagemap_path, private_files, without};
use super::{ImageError, process_tree};

/// How much is read and written at once, in bytes: little of it is needed where few pages are put in.
const CHUNK: usize = 128 << 10;

/// Where the contents of lazy pages come from. PIDs are those inside the PID namespace.
pub trait LazyPages {
    /// The first addresses inside of `within` whose contents are here: whole pages in one run, as
    /// long as it likes. Pages that are passed over are zero.
    ///
    /// # Errors
    /// End the conversion.
    fn next(&mut self, pid: u32, within: Range<u64>) -> io::Result<Option<Range<u64>>>;

    /// Fills the buffer with the contents from an address on: whole pages of what
    /// [`next`](Self::next) gave. Each page is asked for once, in order, and can be dropped then.
    ///
    /// # Errors
    /// End the conversion.
    fn read(&mut self, pid: u32, address: u64, buffer: &mut [u8]) -> io::Result<()>;
}

/// Puts lazy pages into the images of a lazy dump, so that they can be restored like those of an
/// ordinary one. Returns how many pages were put in.
///
/// # Errors
/// The images are of no use then.
pub fn make_plain(images: &Path, pages: &mut impl LazyPages) -> Result<u64, ImageError> {
    let mut added = 0;
    for areas in lazy_areas(images)? {
        if let Some(pagemap) = pagemap(images, areas.pid)? {
            let conversion = Conversion::begin(images, areas.pid, &pagemap)?;
            added += conversion.convert(&areas.ranges, &pagemap, (true, pages))?;
        }
    }
    Ok(added)
}

/// Puts the pages of private mappings of files into the images that their pagemaps name and that the dump has left out.
/// Returns how many pages were put in.
///
/// # Errors
/// One of them is not among these; then the images are of no use.
pub fn bring(images: &Path, pages: &mut impl LazyPages) -> Result<u64, ImageError> {
    let mut added = 0;
    for process in process_tree(images)? {
        let Some(pagemap) = pagemap(images, process.pid)? else { continue };
        let is_left_out = |run: &&PageRun| run.lazy && !run.present && !run.in_parent;
        if !pagemap.runs.iter().any(|run| is_left_out(&run)) {
            continue;
        }
        let files = private_files(images, process.pid)?;
        let inside = |run: &PageRun| {
            let at = files.partition_point(|area| area.end <= run.addresses.start);
            files[at..].first().is_some_and(|area| area.start < run.addresses.end)
        };
        let wanted: Vec<_> = pagemap.runs.iter().filter(is_left_out).filter(|run| inside(run)).collect();
        if wanted.is_empty() {
            continue;
        }
        let wanted: Vec<_> = wanted.into_iter().map(|run| run.addresses.clone()).collect();
        let conversion = Conversion::begin(images, process.pid, &pagemap)?;
        let brought = conversion.convert(&wanted, &pagemap, (false, pages))?;
        let due: u64 = wanted.iter().map(|range| (range.end - range.start) / page_size()).sum();
        if brought != due {
            let reason = format!("{} of its pages in private mappings of files have not come", due - brought);
            return Err(ImageError::Damaged { path: pagemap_path(images, process.pid), reason });
        }
        added += brought;
    }
    Ok(added)
}

/// The conversion of one process.
struct Conversion {
    pid: u32,
    pagemap: PathBuf,
    old: PathBuf,
    new: PathBuf,
    from: File,
    /// Bytes of it that are moved.
    kept: u64,
    to: BufWriter<File>,
    buffer: Vec<u8>,
    runs: Vec<PageRun>,
}

impl Conversion {
    fn begin(images: &Path, pid: u32, pagemap: &Pagemap) -> Result<Self, ImageError> {
        let path = pagemap_path(images, pid);
        if pagemap.runs.iter().any(|run| run.in_parent) {
            let reason = "it refers to the images of an earlier dump".to_owned();
            return Err(ImageError::Damaged { path, reason });
        }
        let old = images.join(format!("pages-{}.img", pagemap.pages_id));
        let new = images.join(format!("pages-{}.img.new", pagemap.pages_id));
        let from = File::options().read(true).write(true).open(&old);
        let from = from.map_err(|source| ImageError::Read { path: old.clone(), source })?;
        let to = File::create(&new).map_err(|source| ImageError::Write { path: new.clone(), source })?;
        let to = BufWriter::with_capacity(CHUNK, to);
        let (buffer, runs) = (vec![0; CHUNK], Vec::new());
        Ok(Self { pid, pagemap: path, old, new, from, kept: 0, to, buffer, runs })
    }

    fn convert(
        mut self,
        ranges: &[Range<u64>],
        pagemap: &Pagemap,
        (lazy, pages): (bool, &mut impl LazyPages),
    ) -> Result<u64, ImageError> {
        let present: Vec<_> = pagemap.runs.iter().filter(|run| run.present).collect();
        let taken: Vec<_> = present.iter().map(|run| run.addresses.clone()).collect();
        let mut kept = present.into_iter().peekable();
        let mut added = 0;
        for gap in ranges.iter().flat_map(|range| without(range, &taken)) {
            while let Some(run) = kept.next_if(|run| run.addresses.start < gap.start) {
                self.keep(run)?;
            }
            added += self.fill(gap, (lazy, pages))?;
        }
        kept.try_for_each(|run| self.keep(run))?;

        let failed = |source| ImageError::Write { path: self.new.clone(), source };
        self.to.flush().map_err(failed)?;
        fs::rename(&self.new, &self.old).map_err(failed)?;
        let pagemap = Pagemap { pages_id: pagemap.pages_id, runs: self.runs };
        fs::write(&self.pagemap, pagemap.encode())
            .map_err(|source| ImageError::Write { path: self.pagemap, source })?;
        Ok(added)
    }

    /// Moves the next pages of the old file: they do not take memory twice.
    fn keep(&mut self, run: &PageRun) -> Result<(), ImageError> {
        let mut left = run.addresses.end - run.addresses.start;
        while left > 0 {
            let piece = piece(&mut self.buffer, left);
            self.from
                .read_exact(piece)
                .map_err(|source| ImageError::Read { path: self.old.clone(), source })?;
            left -= length(piece);
            punch(&self.from, self.kept, length(piece))
                .map_err(|source| ImageError::Write { path: self.old.clone(), source })?;
            self.kept += length(piece);
            self.to
                .write_all(piece)
                .map_err(|source| ImageError::Write { path: self.new.clone(), source })?;
        }
        self.runs.push(run.clone());
        Ok(())
    }

    /// Writes the pages in a part of memory of which the old file has none, and says whether they may come later: a lazy
    /// restore leaves such pages out.
    fn fill(
        &mut self,
        mut gap: Range<u64>,
        (lazy, pages): (bool, &mut impl LazyPages),
    ) -> Result<u64, ImageError> {
        let mut added = 0;
        let pid = self.pid;
        let failed = |address| move |source| ImageError::LazyPages { pid, address, source };
        while let Some(run) = pages.next(pid, gap.clone()).map_err(failed(gap.start))? {
            let is_whole = run.start.is_multiple_of(page_size()) && run.end.is_multiple_of(page_size());
            if run.start < gap.start || run.end > gap.end || run.is_empty() || !is_whole {
                let reason = format!("the pages {run:#x?} came where {gap:#x?} were asked for");
                return Err(failed(gap.start)(io::Error::other(reason)));
            }
            let mut address = run.start;
            while address < run.end {
                let piece = piece(&mut self.buffer, run.end - address);
                pages.read(pid, address, piece).map_err(failed(address))?;
                address += length(piece);
                self.to
                    .write_all(piece)
                    .map_err(|source| ImageError::Write { path: self.new.clone(), source })?;
            }
            added += (run.end - run.start) / page_size();
            gap.start = run.end;
            self.runs.push(PageRun { addresses: run, present: true, lazy, in_parent: false });
        }
        Ok(added)
    }
}

/// Gives back what a part of a file takes, where its filesystem can.
fn punch(file: &File, start: u64, length: u64) -> io::Result<()> {
    let number = |number: u64| i64::try_from(number).map_err(io::Error::other);
    let mode = FallocateFlags::FALLOC_FL_PUNCH_HOLE | FallocateFlags::FALLOC_FL_KEEP_SIZE;
    match fallocate(file, mode, number(start)?, number(length)?) {
        Ok(()) | Err(Errno::EOPNOTSUPP) => Ok(()),
        Err(errno) => Err(errno.into()),
    }
}

/// The part of a buffer for what is left, in bytes.
fn piece(buffer: &mut [u8], left: u64) -> &mut [u8] {
    let length = usize::try_from(left).unwrap_or(usize::MAX).min(buffer.len());
    buffer.split_at_mut(length).0
}

fn length(piece: &[u8]) -> u64 {
    u64::try_from(piece.len()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use std::collections::BTreeMap;

    use prost::Message;
    use tempfile::TempDir;

    use super::super::memory::{Area, encode_areas};
    use super::super::{ImageKind, ProcessTreeEntry};
    use super::*;

    const PID: u32 = 4;

    /// Pages by address, all of one byte.
    struct Store(BTreeMap<u64, u8>);

    impl LazyPages for Store {
        fn next(&mut self, _: u32, within: Range<u64>) -> io::Result<Option<Range<u64>>> {
            Ok(self.0.range(within).next().map(|(address, _)| *address..address + page_size()))
        }

        fn read(&mut self, _: u32, address: u64, buffer: &mut [u8]) -> io::Result<()> {
            buffer.fill(*self.0.get(&address).ok_or(io::ErrorKind::NotFound)?);
            Ok(())
        }
    }

    fn pages(numbers: Range<u64>) -> Range<u64> {
        numbers.start * page_size()..numbers.end * page_size()
    }

    fn run(numbers: Range<u64>, present: bool) -> PageRun {
        PageRun { addresses: pages(numbers), present, lazy: !present, in_parent: false }
    }

    /// A process with a lazy area of pages 10 to 20, another of 30 to 40, and one that is not lazy
    /// of 50 to 60. Of each present page, its number is in the pages file.
    fn images(runs: Vec<PageRun>) -> TempDir {
        let directory = tempfile::tempdir().unwrap();
        let write = |name: &str, bytes: &[u8]| std::fs::write(directory.path().join(name), bytes).unwrap();
        let process = ProcessTreeEntry { pid: PID, ppid: 0, pgid: PID, sid: PID, threads: vec![PID] };
        let tree = process.encode_to_vec();
        let length = u32::try_from(tree.len()).unwrap();
        let head = [0x5456_4319, ImageKind::ProcessTree as u32, length].map(u32::to_le_bytes).concat();
        write("pstree.img", &[head, tree].concat());
        let area = |numbers, flags| {
            let Range { start, end } = pages(numbers);
            Area { start, end, prot: 3, flags, status: 1, advice: None }
        };
        write("mm-4.img", &encode_areas(&[area(10..20, 0x22), area(30..40, 0x22), area(50..60, 0x2)]));
        let mut contents = Vec::new();
        for address in runs.iter().filter(|run| run.present).flat_map(|run| run.addresses.clone()) {
            contents.push(u8::try_from(address / page_size()).unwrap());
        }
        write("pages-9.img", &contents);
        write("pagemap-4.img", &Pagemap { pages_id: 9, runs }.encode());
        directory
    }

    /// The pages as a restore would read them: number and content.
    fn read(images: &Path) -> Vec<(u64, u8)> {
        let contents = std::fs::read(images.join("pages-9.img")).unwrap();
        let runs = pagemap(images, PID).unwrap().unwrap().runs;
        assert!(runs.iter().all(|run| run.present));
        let addresses: Vec<_> = runs.into_iter().flat_map(|run| run.addresses).collect();
        assert_eq!(addresses.len(), contents.len());
        let size = usize::try_from(page_size()).unwrap();
        let all = addresses.chunks(size).zip(contents.chunks(size));
        all.map(|(addresses, bytes)| {
            assert!(bytes.iter().all(|byte| *byte == bytes[0]));
            (addresses[0] / page_size(), bytes[0])
        })
        .collect()
    }

    fn store(pages: &[(u64, u8)]) -> Store {
        Store(pages.iter().map(|(number, byte)| (number * page_size(), *byte)).collect())
    }

    #[test]
    fn lazy_pages_are_put_between_those_that_are_there() {
        let runs = vec![run(2..3, true), run(12..14, true), run(15..18, false), run(50..52, true)];
        let directory = images(runs);
        // 13 is there already; 25 and 55 are in no lazy area.
        let mut store = store(&[(10, 110), (13, 113), (16, 116), (25, 125), (39, 139), (55, 155)]);
        assert_eq!(make_plain(directory.path(), &mut store).unwrap(), 3);
        let expected = [(2, 2), (10, 110), (12, 12), (13, 13), (16, 116), (39, 139), (50, 50), (51, 51)];
        assert_eq!(read(directory.path()), expected);
    }

    #[test]
    fn areas_that_children_have_empty_are_told_by_their_advice() {
        let directory = images(Vec::new());
        let area = |numbers: Range<u64>, advice| {
            let Range { start, end } = pages(numbers);
            Area { start, end, prot: 3, flags: 0x22, status: 1, advice }
        };
        let all = [area(10..20, None), area(20..30, Some(1 << 18 | 1 << 14)), area(30..40, Some(1 << 14))];
        std::fs::write(directory.path().join("mm-4.img"), encode_areas(&all)).unwrap();
        let wiped = super::super::wiped_areas(directory.path()).unwrap();
        assert_eq!(wiped, [super::super::RestoredPages { pid: PID, ranges: vec![pages(20..30)] }]);
    }

    #[test]
    fn what_a_lazy_restore_puts_in_place_itself_is_what_is_not_marked_as_lazy() {
        let held = PageRun { lazy: true, ..run(18..20, true) };
        let runs = vec![run(2..3, true), run(12..14, true), run(15..18, false), held, run(50..52, true)];
        let restored = super::super::restored_pages(images(runs).path()).unwrap();
        let ranges = vec![pages(2..3), pages(12..14), pages(50..52)];
        assert_eq!(restored, [super::super::RestoredPages { pid: PID, ranges }]);
    }

    #[test]
    fn pages_of_private_mappings_of_files_are_brought_where_the_dump_has_left_them_out() {
        let area = |numbers, status| {
            let Range { start, end } = pages(numbers);
            Area { start, end, prot: 3, flags: 0x2, status, advice: None }
        };
        // Of files 60 to 70 and 70 to 80; what is lazy elsewhere is the pager's.
        let areas = [area(10..20, 1), area(50..60, 1), area(60..70, 1 << 6 | 1), area(70..80, 1 << 6 | 1)];
        let directory = |runs| {
            let directory = images(runs);
            std::fs::write(directory.path().join("mm-4.img"), encode_areas(&areas)).unwrap();
            directory
        };
        let all = vec![
            run(2..3, true),
            run(15..16, false),
            run(52..53, true),
            run(61..63, false),
            run(66..67, true),
            run(69..71, false),
            run(75..76, true),
        ];
        let ours = [(15, 1), (61, 161), (62, 162), (64, 164), (69, 169), (70, 170)];
        let there = directory(all.clone());
        assert_eq!(bring(there.path(), &mut store(&ours)).unwrap(), 4);
        let expected = [(2, 2), (52, 52), (61, 161), (62, 162), (66, 66), (69, 169), (70, 170), (75, 75)];
        assert_eq!(read(there.path()), expected);
        assert!(pagemap(there.path(), PID).unwrap().unwrap().runs.iter().all(|run| !run.lazy));
        // Nothing is left out any more.
        assert_eq!(bring(there.path(), &mut store(&[])).unwrap(), 0);
        // One is missing, and there may be more than any memory has.
        let error = bring(directory(all).path(), &mut store(&ours[..5])).unwrap_err().to_string();
        assert!(error.contains("pagemap-4.img") && error.contains("1 of its pages"), "{error}");
        let endless = directory(vec![run(61..1 << 40, false)]);
        assert!(bring(endless.path(), &mut store(&ours)).is_err());
    }

    #[test]
    fn images_without_any_page_become_plain_too() {
        let directory = images(Vec::new());
        assert_eq!(make_plain(directory.path(), &mut store(&[(30, 130)])).unwrap(), 1);
        assert_eq!(read(directory.path()), [(30, 130)]);
    }

    #[test]
    fn images_that_lean_on_earlier_ones_are_refused() {
        let directory = images(vec![PageRun { in_parent: true, ..run(10..11, false) }]);
        let error = make_plain(directory.path(), &mut store(&[])).unwrap_err().to_string();
        assert!(error.contains("pagemap-4.img") && error.contains("earlier dump"), "{error}");
    }

    #[test]
    fn a_pages_file_that_is_too_short_is_told() {
        let directory = images(vec![run(10..12, true)]);
        std::fs::write(directory.path().join("pages-9.img"), [0; 100]).unwrap();
        let error = make_plain(directory.path(), &mut store(&[])).unwrap_err();
        assert!(matches!(error, ImageError::Read { .. }), "{error}");
    }

    #[test]
    fn a_store_that_answers_for_other_addresses_is_refused() {
        struct Wrong;
        impl LazyPages for Wrong {
            fn next(&mut self, _: u32, within: Range<u64>) -> io::Result<Option<Range<u64>>> {
                Ok(Some(within.start..within.end + page_size()))
            }
            fn read(&mut self, _: u32, _: u64, _: &mut [u8]) -> io::Result<()> {
                Ok(())
            }
        }
        let error = make_plain(images(Vec::new()).path(), &mut Wrong).unwrap_err();
        assert!(matches!(error, ImageError::LazyPages { pid: PID, .. }), "{error}");
    }
}
