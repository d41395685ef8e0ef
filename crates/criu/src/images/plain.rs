//! Makes the images of a lazy dump ordinary ones, for a restore where nothing can come later
//! (userfaultfd is forbidden).
//!
//! ```text
//! pages-N.img of CRIU ─┐
//!                      ├─▶ by address ─▶ pages-N.img, pagemap-PID.img
//! lazy pages ──────────┘
//! ```

use std::fs::{self, File};
use std::io::{self, BufWriter, Read, Write};
use std::ops::Range;
use std::path::{Path, PathBuf};

use super::ImageError;
use super::memory::{LazyAreas, PageRun, Pagemap, lazy_areas, page_size, pagemap, pagemap_path, without};

/// How much is read and written at once, in bytes.
const CHUNK: usize = 1 << 20;

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
            added += Conversion::begin(images, &areas, &pagemap)?.convert(&areas, &pagemap, pages)?;
        }
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
    to: BufWriter<File>,
    buffer: Vec<u8>,
    runs: Vec<PageRun>,
}

impl Conversion {
    fn begin(images: &Path, areas: &LazyAreas, pagemap: &Pagemap) -> Result<Self, ImageError> {
        let path = pagemap_path(images, areas.pid);
        if pagemap.runs.iter().any(|run| run.in_parent) {
            let reason = "it refers to the images of an earlier dump".to_owned();
            return Err(ImageError::Damaged { path, reason });
        }
        let old = images.join(format!("pages-{}.img", pagemap.pages_id));
        let new = images.join(format!("pages-{}.img.new", pagemap.pages_id));
        let from = File::open(&old).map_err(|source| ImageError::Read { path: old.clone(), source })?;
        let to = File::create(&new).map_err(|source| ImageError::Write { path: new.clone(), source })?;
        let to = BufWriter::with_capacity(CHUNK, to);
        Ok(Self {
            pid: areas.pid,
            pagemap: path,
            old,
            new,
            from,
            to,
            buffer: vec![0; CHUNK],
            runs: Vec::new(),
        })
    }

    fn convert(
        mut self,
        areas: &LazyAreas,
        pagemap: &Pagemap,
        pages: &mut impl LazyPages,
    ) -> Result<u64, ImageError> {
        let present: Vec<_> = pagemap.runs.iter().filter(|run| run.present).collect();
        let taken: Vec<_> = present.iter().map(|run| run.addresses.clone()).collect();
        let mut kept = present.into_iter().peekable();
        let mut added = 0;
        for gap in areas.ranges.iter().flat_map(|range| without(range, &taken)) {
            while let Some(run) = kept.next_if(|run| run.addresses.start < gap.start) {
                self.keep(run)?;
            }
            added += self.fill(gap, pages)?;
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

    /// Copies the next pages of the old file.
    fn keep(&mut self, run: &PageRun) -> Result<(), ImageError> {
        let mut left = run.addresses.end - run.addresses.start;
        while left > 0 {
            let piece = piece(&mut self.buffer, left);
            self.from
                .read_exact(piece)
                .map_err(|source| ImageError::Read { path: self.old.clone(), source })?;
            left -= length(piece);
            self.to
                .write_all(piece)
                .map_err(|source| ImageError::Write { path: self.new.clone(), source })?;
        }
        self.runs.push(run.clone());
        Ok(())
    }

    /// Writes the lazy pages in a part of memory of which the old file has none.
    fn fill(&mut self, mut gap: Range<u64>, pages: &mut impl LazyPages) -> Result<u64, ImageError> {
        let mut added = 0;
        let pid = self.pid;
        let failed = |address| move |source| ImageError::LazyPages { pid, address, source };
        while let Some(run) = pages.next(pid, gap.clone()).map_err(failed(gap.start))? {
            let is_whole = run.start.is_multiple_of(page_size()) && run.end.is_multiple_of(page_size());
            if run.start < gap.start || run.end > gap.end || run.is_empty() || !is_whole {
                let reason = format!("{run:#x?} was found where {gap:#x?} was asked for");
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
            // As CRIU marks them in a dump that is not lazy.
            self.runs.push(PageRun { addresses: run, present: true, lazy: true, in_parent: false });
        }
        Ok(added)
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
