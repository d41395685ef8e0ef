//! The images of a dump that tell of its processes, whole and by name, for changes of many of them at once that need no
//! files: read, changed by whoever knows how, written.
//!
//! ```text
//! pstree, files, remap-fpath, mountpoints-N ─┐
//! core-TID, mm-PID, pagemap-PID             ─┴▶ ProcessImages ─▶ (pure functions) ─▶ ChangedImages ─▶ the same files
//! pages-N: their lengths only                                                        what of pages-N stays
//! ```

use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, File};
use std::io;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use prost::Message;

use super::{ImageError, ImageKind, Pagemap, ProcessTreeEntry, decode, read_image, split};

/// Most bytes of all of them: half of a GiB, a hundred times what ten thousand threads have.
const LIMIT: usize = 512 << 20;

/// Bytes of pages that are moved at a time: few calls, and a copy that stays in the caches of a core.
const PIECE: usize = 256 << 10;

/// What images of mounts are called; the rest is the number of the namespace.
const MOUNTS: &str = "mountpoints-";

/// Images by the names of their files, and how long the files with the contents of pages are.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ProcessImages {
    images: BTreeMap<String, Vec<u8>>,
    pages: BTreeMap<u32, u64>,
}

/// `remap_file_path_entry`, as far as it is read here.
#[derive(Clone, Copy, PartialEq, Eq, Message)]
struct Remap {
    #[prost(uint32, required, tag = "1")]
    file: u32,
}

/// `mnt_entry`, as far as it is read here.
#[derive(Clone, PartialEq, Eq, Message)]
struct Mount {
    #[prost(bytes = "vec", required, tag = "7")]
    place: Vec<u8>,
}

/// What becomes of images. Those that are not named stay as they are.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ChangedImages {
    /// New contents by the names of their files.
    pub images: BTreeMap<String, Vec<u8>>,
    /// Which bytes of the files with the contents of pages stay, in order, by the files' numbers.
    pub pages: BTreeMap<u32, Vec<Range<u64>>>,
    /// Those that are not wanted, if they are there.
    pub removed: Vec<String>,
}

impl ProcessImages {
    /// Images that are in memory already.
    #[must_use]
    pub fn new(images: BTreeMap<String, Vec<u8>>, pages: BTreeMap<u32, u64>) -> Self {
        Self { images, pages }
    }

    /// Reads them from the directory of a dump.
    ///
    /// # Errors
    /// A file cannot be read, or there is more than any dump has.
    pub fn read(directory: &Path) -> Result<Self, ImageError> {
        let failed = |source| ImageError::Read { path: directory.to_owned(), source };
        let mut found = Self::default();
        let mut total = 0;
        for entry in fs::read_dir(directory).map_err(failed)? {
            let entry = entry.map_err(failed)?;
            let Ok(name) = entry.file_name().into_string() else { continue };
            if let Some(number) = numbered(&name, "pages-") {
                found.pages.insert(number, entry.metadata().map_err(failed)?.len());
            }
            let Some(kind) = kind_of(&name) else { continue };
            let bytes = read_image(&entry.path(), kind)?;
            total += bytes.len();
            if total > LIMIT {
                let reason = format!("its images of processes have more than {LIMIT} bytes");
                return Err(ImageError::Damaged { path: directory.to_owned(), reason });
            }
            found.images.insert(name, bytes);
        }
        Ok(found)
    }

    /// The processes, parents first.
    ///
    /// # Errors
    /// The image is missing or damaged.
    pub fn tree(&self) -> Result<Vec<ProcessTreeEntry>, ImageError> {
        let name = "pstree.img";
        decode(self.image(name)?, ImageKind::ProcessTree).map_err(|reason| damaged(name, reason))
    }

    /// The records of an image.
    ///
    /// # Errors
    /// It is missing or damaged.
    pub fn records(&self, name: &str) -> Result<Vec<&[u8]>, ImageError> {
        let kind = kind_of(name).ok_or_else(|| damaged(name, "its kind is not known here".to_owned()))?;
        let (_, records) = split(self.image(name)?, kind).map_err(|reason| damaged(name, reason))?;
        Ok(records)
    }

    /// The record of an image that has one.
    ///
    /// # Errors
    /// It is missing or damaged.
    pub fn record(&self, name: &str) -> Result<&[u8], ImageError> {
        match self.records(name)?[..] {
            [record] => Ok(record),
            ref records => Err(damaged(name, format!("it has {} records, and must have one", records.len()))),
        }
    }

    /// The bytes of an image.
    ///
    /// # Errors
    /// It is missing.
    pub fn image(&self, name: &str) -> Result<&[u8], ImageError> {
        let image = self.images.get(name);
        image.map(Vec::as_slice).ok_or_else(|| damaged(name, "it is not among the images".to_owned()))
    }

    /// The numbers of the files that have lost the name by which they were opened, and are found by another one.
    ///
    /// # Errors
    /// The image is damaged.
    pub fn renamed(&self) -> Result<BTreeSet<u32>, ImageError> {
        let name = "remap-fpath.img";
        let Some(bytes) = self.images.get(name) else { return Ok(BTreeSet::new()) };
        let remaps: Vec<Remap> =
            decode(bytes, ImageKind::RemapPaths).map_err(|reason| damaged(name, reason))?;
        Ok(remaps.into_iter().map(|remap| remap.file).collect())
    }

    /// Where there are mounts, in each mount namespace that the images have.
    ///
    /// # Errors
    /// An image is damaged.
    pub fn mounts(&self) -> Result<Vec<Vec<Vec<u8>>>, ImageError> {
        let namespaces = self.images.iter().filter(|(name, _)| numbered(name, MOUNTS).is_some());
        let places = |(name, bytes): (&String, &Vec<u8>)| {
            let mounts: Vec<Mount> =
                decode(bytes, ImageKind::Mountpoints).map_err(|reason| damaged(name, reason))?;
            Ok(mounts.into_iter().map(|mount| mount.place).collect())
        };
        namespaces.map(places).collect()
    }

    /// The names of the images.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.images.keys().map(String::as_str)
    }

    /// Where the contents of a process's page are: the number of the file, and the place in it; none if it was not written.
    ///
    /// # Errors
    /// The process's pagemap is missing or damaged.
    pub fn place(&self, pid: u32, page: u64) -> Result<Option<(u32, u64)>, ImageError> {
        let name = format!("pagemap-{pid}.img");
        let pagemap = Pagemap::decode(self.image(&name)?).map_err(|reason| damaged(&name, reason))?;
        let mut offset = 0_u64;
        for run in pagemap.runs.iter().filter(|run| run.present) {
            if run.addresses.contains(&page) {
                let place = offset.checked_add(page - run.addresses.start);
                return Ok(place.map(|place| (pagemap.pages_id, place)));
            }
            offset = offset.saturating_add(run.addresses.end - run.addresses.start);
        }
        Ok(None)
    }

    /// Reads what a process has at the beginning of a page, from the directory that the images are of; whether it was
    /// written there.
    ///
    /// # Errors
    /// An image is missing or damaged, or the file cannot be read.
    pub fn contents(
        &self,
        directory: &Path,
        pid: u32,
        page: u64,
        contents: &mut [u8],
    ) -> Result<bool, ImageError> {
        let Some((number, offset)) = self.place(pid, page)? else { return Ok(false) };
        let path = directory.join(format!("pages-{number}.img"));
        let read = File::open(&path).and_then(|file| file.read_exact_at(contents, offset));
        read.map(|()| true).map_err(|source| ImageError::Read { path, source })
    }

    /// How many bytes of pages there are in the file of this number.
    #[must_use]
    pub fn pages(&self, number: u32) -> Option<u64> {
        self.pages.get(&number).copied()
    }
}

impl ChangedImages {
    /// Puts records into an image in place of those that it has.
    pub fn insert(&mut self, name: &str, kind: ImageKind, records: &[Vec<u8>]) -> Result<(), ImageError> {
        let mut bytes = kind.head_bytes();
        for record in records {
            let length =
                u32::try_from(record.len()).map_err(|_| damaged(name, "a record is too long".to_owned()))?;
            bytes.extend(length.to_le_bytes());
            bytes.extend_from_slice(record);
        }
        self.images.insert(name.to_owned(), bytes);
        Ok(())
    }

    /// Writes them to the directory that they were read from.
    ///
    /// # Errors
    /// A file cannot be read or written; then the images are of no use.
    pub fn write(&self, directory: &Path) -> Result<(), ImageError> {
        for (number, ranges) in &self.pages {
            let path = directory.join(format!("pages-{number}.img"));
            keep(&path, ranges).map_err(|source| ImageError::Write { path, source })?;
        }
        for (name, bytes) in &self.images {
            let path = directory.join(name);
            fs::write(&path, bytes).map_err(|source| ImageError::Write { path, source })?;
        }
        for name in &self.removed {
            let path = directory.join(name);
            match fs::remove_file(&path) {
                Err(source) if source.kind() != io::ErrorKind::NotFound => {
                    return Err(ImageError::Write { path, source });
                }
                _ => {}
            }
        }
        Ok(())
    }
}

/// An image that is not what it should be.
pub(super) fn damaged(name: &str, reason: String) -> ImageError {
    ImageError::Damaged { path: PathBuf::from(name), reason }
}

/// Leaves these parts of a file, which are in order. They are moved down in place: the service is frozen meanwhile, what
/// stays at the beginning is not touched, and no page takes memory twice. A file that this breaks off in is of no use.
fn keep(path: &Path, ranges: &[Range<u64>]) -> io::Result<()> {
    let file = File::options().read(true).write(true).open(path)?;
    let length = file.metadata()?.len();
    let mut last = 0;
    for range in ranges {
        if range.start < last || range.end < range.start {
            return Err(io::Error::new(io::ErrorKind::InvalidInput, "the parts that stay are out of order"));
        }
        last = range.end;
    }
    if last > length {
        return Err(io::ErrorKind::UnexpectedEof.into());
    }
    let mut buffer = Vec::new();
    let mut kept = 0;
    for range in ranges {
        if range.start != kept {
            buffer.resize(PIECE, 0);
            move_down(&file, range.clone(), kept, &mut buffer)?;
        }
        kept += range.end - range.start;
    }
    if kept == length { Ok(()) } else { file.set_len(kept) }
}

/// Moves a part of a file to an earlier place, piece by piece: each is read before one is written over it.
fn move_down(file: &File, mut range: Range<u64>, mut to: u64, buffer: &mut [u8]) -> io::Result<()> {
    while range.start < range.end {
        let left = usize::try_from(range.end - range.start).unwrap_or(usize::MAX);
        let (piece, _) = buffer.split_at_mut(left.min(buffer.len()));
        file.read_exact_at(piece, range.start)?;
        file.write_all_at(piece, to)?;
        range.start += piece.len() as u64;
        to += piece.len() as u64;
    }
    Ok(())
}

/// What kind an image is of; none: it is not about processes.
fn kind_of(name: &str) -> Option<ImageKind> {
    Some(match name {
        "pstree.img" => ImageKind::ProcessTree,
        "files.img" => ImageKind::Files,
        "remap-fpath.img" => ImageKind::RemapPaths,
        _ if numbered(name, "core-").is_some() => ImageKind::Core,
        _ if numbered(name, "mm-").is_some() => ImageKind::Memory,
        _ if numbered(name, MOUNTS).is_some() => ImageKind::Mountpoints,
        _ if numbered(name, "pagemap-").or_else(|| numbered(name, "pagemap-shmem-")).is_some() => {
            ImageKind::Pagemap
        }
        _ => return None,
    })
}

/// The number in a name of an image, as CRIU writes it: no other name is taken for that of the same image.
fn numbered(name: &str, prefix: &str) -> Option<u32> {
    let digits = name.strip_prefix(prefix)?.strip_suffix(".img")?;
    digits.parse().ok().filter(|number: &u32| number.to_string() == digits)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::os::unix::fs::MetadataExt;

    use super::super::tests::image;
    use super::*;

    #[test]
    fn the_contents_of_a_page_are_found_among_those_that_are_there() {
        let directory = tempfile::tempdir().unwrap();
        let page = super::super::page_size();
        let run = |start: u64, end: u64, present| super::super::PageRun {
            addresses: start * page..end * page,
            present,
            lazy: !present,
            in_parent: false,
        };
        let pagemap = Pagemap { pages_id: 8, runs: vec![run(1, 3, true), run(4, 6, false), run(7, 8, true)] };
        fs::write(directory.path().join("pagemap-2.img"), pagemap.encode()).unwrap();
        let pages: Vec<u8> = (1..=3).flat_map(|byte| vec![byte; usize::try_from(page).unwrap()]).collect();
        fs::write(directory.path().join("pages-8.img"), pages).unwrap();
        let images = ProcessImages::read(directory.path()).unwrap();
        let at = |number: u64| {
            let mut bytes = [0; 4];
            images.contents(directory.path(), 2, number * page, &mut bytes).unwrap().then_some(bytes)
        };
        assert_eq!([0, 2, 4, 7].map(at), [None, Some([2; 4]), None, Some([3; 4])]);
    }

    #[test]
    fn only_names_that_criu_writes_have_a_number() {
        assert_eq!(numbered("pages-3.img", "pages-"), Some(3));
        for name in ["pages-03.img", "pages-+3.img", "pages-.img", "pages-3", "pages-4294967296.img"] {
            assert_eq!(numbered(name, "pages-"), None, "{name}");
        }
    }

    #[test]
    fn images_are_read_changed_and_written() {
        let directory = tempfile::tempdir().unwrap();
        let write = |name: &str, bytes: &[u8]| fs::write(directory.path().join(name), bytes).unwrap();
        let process = ProcessTreeEntry { pid: 5, ..Default::default() };
        write("pstree.img", &image(ImageKind::ProcessTree, std::slice::from_ref(&process)));
        write("core-5.img", &image(ImageKind::Core, &[super::super::Core { mtype: 1, task: None }]));
        write("pages-3.img", &[1, 2, 3, 4, 5, 6]);
        write("pages-4.img", &[1, 2]);
        write("inventory.img", b"not looked at");
        let images = ProcessImages::read(directory.path()).unwrap();
        assert_eq!(images.names().collect::<Vec<_>>(), ["core-5.img", "pstree.img"]);
        assert_eq!(images.tree().unwrap(), [process]);
        assert_eq!((images.pages(3), images.pages(9)), (Some(6), None));
        assert_eq!(images.renamed().unwrap(), BTreeSet::new());
        write("remap-fpath.img", &image(ImageKind::RemapPaths, &[Remap { file: 7 }, Remap { file: 4 }]));
        let renamed = ProcessImages::read(directory.path()).unwrap().renamed().unwrap();
        assert_eq!(renamed.into_iter().collect::<Vec<_>>(), [4, 7]);
        let mount = |place: &str| Mount { place: place.into() };
        write("mountpoints-9.img", &image(ImageKind::Mountpoints, &[mount("/"), mount("./proc")]));
        let mounts = ProcessImages::read(directory.path()).unwrap().mounts().unwrap();
        assert_eq!(mounts, [[b"/".to_vec(), b"./proc".to_vec()]]);
        assert!(images.record("mm-5.img").unwrap_err().to_string().contains("not among the images"));
        assert!(images.records("inventory.img").unwrap_err().to_string().contains("not known"));

        let mut changed = ChangedImages::default();
        changed
            .insert("core-5.img", ImageKind::Core, &[images.record("core-5.img").unwrap().to_vec()])
            .unwrap();
        assert_eq!(changed.images["core-5.img"], images.image("core-5.img").unwrap());
        changed.pages.insert(3, vec![1..3, 5..6]);
        changed.pages.insert(4, std::iter::once(0..2).collect());
        changed.removed = vec!["inventory.img".to_owned(), "cpuinfo.img".to_owned()];
        changed.write(directory.path()).unwrap();
        assert!(!directory.path().join("inventory.img").exists());
        assert_eq!(fs::read(directory.path().join("pages-3.img")).unwrap(), [2, 3, 6]);
        assert_eq!(fs::read(directory.path().join("pages-4.img")).unwrap(), [1, 2]);
        changed.pages = BTreeMap::from([(4, std::iter::once(0..3).collect())]);
        assert!(changed.write(directory.path()).unwrap_err().to_string().contains("pages-4.img"));
    }

    #[test]
    fn pages_are_moved_down_in_the_file_that_they_are_in() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("pages-1.img");
        let unit = u64::try_from(PIECE).unwrap();
        let whole: Vec<u8> = (0..4 * PIECE + 5).map(|at| u8::try_from(at % 251).unwrap()).collect();
        let length = u64::try_from(whole.len()).unwrap();
        let of = |ranges: &[(u64, u64)]| ranges.iter().map(|(start, end)| *start..*end).collect::<Vec<_>>();
        let kept = |ranges: &[(u64, u64)]| {
            let ranges = of(ranges);
            fs::write(&path, &whole).unwrap();
            let before = fs::metadata(&path).unwrap().ino();
            keep(&path, &ranges).unwrap();
            assert_eq!(fs::metadata(&path).unwrap().ino(), before, "{ranges:?}");
            let at = |at: u64| usize::try_from(at).unwrap();
            let expected: Vec<_> =
                ranges.iter().flat_map(|range| &whole[at(range.start)..at(range.end)]).copied().collect();
            assert!(fs::read(&path).unwrap() == expected, "{ranges:?}");
        };
        for ranges in [
            &[][..],
            &[(0, length)],
            &[(0, 7)],
            // By less than a piece, by just one, and by more.
            &[(1, length)],
            &[(unit, length)],
            &[(0, 3), (4 * unit - 1, length)],
            &[(0, 2 * unit), (2 * unit, 3 * unit + 1), (3 * unit + 2, length - 1)],
            &[(5, 5), (6, length)],
        ] {
            kept(ranges);
        }
        fs::write(&path, &whole).unwrap();
        for ranges in [&[(1, length + 1)][..], &[(1, 3), (2, 4)], &[(4, 3)], &[(3, 4), (1, 2)]] {
            assert!(keep(&path, &of(ranges)).is_err(), "{ranges:?}");
            assert!(fs::read(&path).unwrap() == whole, "{ranges:?}");
        }
    }
}
