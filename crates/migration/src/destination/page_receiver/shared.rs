//! Shared memory of an arriving service: the streams' pages are written straight into what its processes will map, and
//! into the files of its tmpfs, which get their names in the end. Segments of System V are in an IPC namespace that its
//! processes will have. What processes have written in private mappings of files
//! is held in the same way, by address, until it is put into CRIU's images.
//!
//! Where the service has a memory limit, a process in its cgroup is charged for the pages ([`Filler`]): without a limit the
//! daemon is, which is quicker.
//!
//! It is held here until the restored processes have it, or nobody needs it. Ends this daemon before that, it is gone, and
//! with it the move.
//!
//! Of shared anonymous memory pages can come after the commit: then they have placeholders here, and the pager fills these.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use godwit_engine::tree;
use godwit_memory::batch::{Batch, Kind, Run};
use godwit_memory::shared::{ADDRESSES, Copies, FIRST_SPACE, Filler, IpcNamespace, Replica};
use godwit_memory::{Range, Space};

use super::PageReceiverError;
use crate::message::{Segments, SharedSegment};

/// Most segments that are held: each takes a descriptor.
const MOST: usize = 1024;

/// The segments of a service.
#[derive(Debug, Clone, Default)]
pub(crate) struct Shared(Arc<Mutex<Segmented>>);

#[derive(Debug, Default)]
struct Segmented {
    held: BTreeMap<Space, Arc<Held>>,
    /// Where those of System V are, once there was one.
    ipc: Option<IpcNamespace>,
    /// To which they are charged.
    filler: Option<Arc<Filler>>,
    /// Those that the pager fills.
    left: BTreeSet<Space>,
    /// Whether it fills all of which pages come: an earlier life of this daemon has made them.
    all_left: bool,
    /// Bytes that have placeholders.
    placeholders: u64,
}

/// One of them.
#[derive(Debug)]
struct Held {
    told: SharedSegment,
    place: Place,
    /// Bytes of memory that it took when it was last written to.
    allocated: AtomicU64,
}

/// Where its pages are.
#[derive(Debug, Clone)]
enum Place {
    Replica(Arc<Replica>),
    Copies(Arc<Copies>),
}

impl Place {
    fn new(told: &SharedSegment, tmpfs: &[PathBuf], ipc: &mut Option<IpcNamespace>) -> io::Result<Self> {
        if told.process.is_some() {
            return match told.size {
                ADDRESSES => Ok(Self::Copies(Arc::new(Copies::new()?))),
                size => Err(io::Error::other(format!("copies of pages in {size} bytes of addresses"))),
            };
        }
        if let Some(key) = told.key {
            if ipc.is_none() {
                *ipc = Some(IpcNamespace::new()?);
            }
            let Some(ipc) = ipc else { return Err(io::Error::other("no IPC namespace")) };
            let replica = Replica::of_system_v(ipc, told.inode, key, told.size)?;
            return Ok(Self::Replica(Arc::new(replica)));
        }
        let of = told.tmpfs.and_then(|number| tmpfs.get(usize::try_from(number).ok()?));
        Ok(Self::Replica(Arc::new(Replica::new(&told.kind(), told.size, of.map(PathBuf::as_path))?)))
    }

    /// What it takes of the machine's memory, bytes.
    fn bytes(&self) -> io::Result<u64> {
        match self {
            Self::Replica(replica) => replica.allocated(),
            Self::Copies(copies) => copies.allocated(),
        }
    }

    /// Copies are charged to the service when CRIU restores them.
    fn charge_to(&self, filler: Option<&Arc<Filler>>) -> io::Result<()> {
        match self {
            Self::Replica(replica) => replica.charge_to(filler),
            Self::Copies(_) => Ok(()),
        }
    }

    fn clear(&self, range: &Range) -> io::Result<()> {
        match self {
            Self::Replica(replica) => replica.clear(range),
            Self::Copies(copies) => copies.forget(range),
        }
    }

    fn write(&self, offset: u64, pages: &[u8]) -> io::Result<()> {
        match self {
            Self::Replica(replica) => replica.write(offset, pages),
            Self::Copies(copies) => copies.write(offset, pages),
        }
    }
}

/// Whether the pages of this space are shared memory.
pub(super) fn is_shared(space: Space) -> bool {
    space >= FIRST_SPACE
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, Segmented> {
        // It is changed in single steps.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Those that an earlier life of this daemon has made, whose pages the pager fills.
    pub(super) fn left_to_pager() -> Self {
        let shared = Self::default();
        shared.lock().all_left = true;
        shared
    }

    /// Whether the pager fills this one.
    pub(super) fn is_left(&self, space: Space) -> bool {
        let segmented = self.lock();
        segmented.all_left || segmented.left.contains(&space)
    }

    /// Makes placeholders for pages of this one, which the pager is to fill; at most so many bytes in all. Where it can open
    /// it, and its size, if it has not been told.
    pub(super) fn leave(
        &self,
        space: Space,
        ranges: &[Range],
        most: u64,
    ) -> Result<Option<(String, u64)>, PageReceiverError> {
        let mut segmented = self.lock();
        let Segmented { held, left, placeholders, .. } = &mut *segmented;
        let held = held.get(&space).filter(|held| held.may_be_left());
        let Some((held, Place::Replica(replica))) = held.map(|held| (held, &held.place)) else {
            return Err(PageReceiverError::Protocol(
                "pages that are to come of a segment for which that cannot be",
            ));
        };
        let replica = Arc::clone(replica);
        let size = held.told.size;
        let is_new = left.insert(space);
        // What came before would be counted no more.
        if is_new && held.allocated.load(Ordering::Relaxed) > 0 {
            return Err(PageReceiverError::Protocol("pages of a segment, and then that they are to come"));
        }
        for range in ranges {
            *placeholders = placeholders.saturating_add(range.end - range.start);
        }
        let placeholders = *placeholders;
        drop(segmented);
        let bytes = placeholders.saturating_add(self.bytes());
        if bytes > most {
            return Err(PageReceiverError::TooMuch { bytes, most });
        }
        // With gigabytes the kernel takes a while.
        ranges.iter().try_for_each(|range| replica.allocate(range)).map_err(PageReceiverError::Shared)?;
        Ok(is_new.then(|| (replica.path(), size)))
    }

    /// Whether a filler is charged for them.
    pub(crate) fn is_charged(&self) -> bool {
        self.lock().filler.is_some()
    }

    /// Charges this filler for all that is made from now on.
    pub(crate) fn charge_to(&self, filler: Arc<Filler>) {
        self.lock().filler = Some(filler);
    }

    /// Ends the filler, if there is one. Pages that come later and were not there before are charged to this process.
    pub(crate) fn end_filler(&self) -> Result<(), PageReceiverError> {
        let (held, filler) = {
            let mut segmented = self.lock();
            (segmented.held.values().cloned().collect::<Vec<_>>(), segmented.filler.take())
        };
        let Some(filler) = filler else { return Ok(()) };
        // The streams must not find that it has gone.
        let charged = held.iter().try_for_each(|held| held.place.charge_to(None));
        filler.end();
        charged.map_err(PageReceiverError::Shared)
    }

    /// Makes those that are named and not there, and gives up those that are not named. Each tmpfs of the service is
    /// mounted at its place in `tmpfs`.
    pub(crate) fn make(&self, segments: Segments, tmpfs: &[PathBuf]) -> Result<(), PageReceiverError> {
        if segments.all.len() > MOST {
            return Err(PageReceiverError::Protocol("more segments of shared memory than a service has"));
        }
        let mut segmented = self.lock();
        segmented.give_up_others(&segments)?;
        let Segmented { held, ipc, filler, .. } = &mut *segmented;
        let mut now = BTreeMap::new();
        for told in segments.all {
            if !is_shared(told.space) {
                return Err(PageReceiverError::Protocol(
                    "a segment of shared memory in the space of a process",
                ));
            }
            let kinds =
                [told.process.is_some(), told.tmpfs.is_some(), told.name.is_some(), told.key.is_some()];
            if kinds.into_iter().filter(|is| *is).count() > 1 {
                return Err(PageReceiverError::Protocol("a segment of two kinds"));
            }
            let segment = match held.remove(&told.space) {
                Some(before) if before.told == told => before,
                Some(before) if before.is_resized(&told) => {
                    let place = before.place.clone();
                    if let Place::Replica(replica) = &place {
                        replica.resize(told.size).map_err(PageReceiverError::Shared)?;
                    }
                    let allocated = place.bytes().map_err(PageReceiverError::Shared)?.into();
                    Arc::new(Held { told, place, allocated })
                }
                Some(_) => return Err(PageReceiverError::Protocol("a segment that has become another")),
                None => {
                    let place = Place::new(&told, tmpfs, ipc).map_err(PageReceiverError::Shared)?;
                    if filler.is_some() {
                        place.charge_to(filler.as_ref()).map_err(PageReceiverError::Shared)?;
                    }
                    Arc::new(Held { told, place, allocated: AtomicU64::new(0) })
                }
            };
            if now.insert(segment.told.space, segment).is_some() {
                return Err(PageReceiverError::Protocol("a segment of shared memory twice"));
            }
        }
        *held = now;
        Ok(())
    }

    /// Bytes of memory that they take.
    pub(super) fn bytes(&self) -> u64 {
        let segmented = self.lock();
        // The pager counts what it fills.
        let held = segmented.held.iter().filter(|(space, _)| !segmented.left.contains(space));
        held.map(|(_, held)| held.allocated.load(Ordering::Relaxed)).fold(0, u64::saturating_add)
    }

    /// The service runs: nothing of them is to come any more, and it alone has them. A file that is open for writing could
    /// neither be executed nor leased.
    pub(crate) fn let_go(&self) {
        let before = {
            let mut segmented = self.lock();
            (std::mem::take(&mut segmented.held), segmented.ipc.take())
        };
        drop(before);
    }

    /// The files of one tmpfs, for their names.
    pub(crate) fn files_of(&self, number: u32) -> Box<dyn tree::Contents> {
        Box::new(TmpfsFiles { shared: self.clone(), number })
    }

    /// What processes have written in private mappings of files, by their PID, which is not held any more.
    pub(crate) fn take_copied(&self) -> Result<BTreeMap<Space, Arc<Copies>>, PageReceiverError> {
        let mut copied = BTreeMap::new();
        let mut segmented = self.lock();
        for (space, held) in std::mem::take(&mut segmented.held) {
            let (Some(process), Place::Copies(copies)) = (held.told.process, &held.place) else {
                drop(segmented.held.insert(space, held));
                continue;
            };
            if copied.insert(process, Arc::clone(copies)).is_some() {
                return Err(PageReceiverError::Protocol("copies of files' pages of one process twice"));
            }
        }
        Ok(copied)
    }

    /// Makes those in no tmpfs known to CRIU in a directory that is not there yet.
    pub(crate) fn link_in(&self, directory: &Path) -> Result<(), PageReceiverError> {
        let link = || {
            std::fs::create_dir(directory)?;
            let segmented = self.lock();
            if let Some(ipc) = &segmented.ipc {
                symlink(ipc.path(), directory.join("ipc"))?;
            }
            let by_inode = segmented.held.values().filter(|held| {
                // Those have their names in a tmpfs and in the namespace.
                held.told.tmpfs.is_none() && held.told.key.is_none()
            });
            by_inode.into_iter().try_for_each(|held| match &held.place {
                Place::Replica(replica) => {
                    symlink(replica.path(), directory.join(held.told.inode.to_string()))
                }
                Place::Copies(_) => Ok(()),
            })
        };
        link().map_err(|source| PageReceiverError::Directory { directory: directory.to_owned(), source })
    }

    /// Puts pages into place; at most so many bytes of them in all segments.
    pub(super) fn store(&self, batch: Batch, most: u64) -> Result<(), PageReceiverError> {
        let Batch { space, runs } = batch;
        let held = self.lock().held.get(&space).cloned();
        let held = held.ok_or(PageReceiverError::Protocol("pages of a segment that it did not name"))?;
        for Run { range, kind, data } in runs {
            match kind {
                Kind::Zero => held.place.clear(&range),
                Kind::Data => held.place.write(range.start, &data),
                Kind::Retained | Kind::Delta => {
                    return Err(PageReceiverError::Protocol("pages of shared memory by their name"));
                }
            }
            .map_err(PageReceiverError::Shared)?;
        }
        let allocated = held.place.bytes().map_err(PageReceiverError::Shared)?;
        held.allocated.store(allocated, Ordering::Relaxed);
        let bytes = self.bytes();
        if bytes > most { Err(PageReceiverError::TooMuch { bytes, most }) } else { Ok(()) }
    }
}

impl Segmented {
    /// Gives up those that are not named. One of System V would be found by the service, and keeps its identifier.
    fn give_up_others(&mut self, named: &Segments) -> Result<(), PageReceiverError> {
        let named: BTreeSet<Space> = named.all.iter().map(|told| told.space).collect();
        let mut given_up = Vec::new();
        self.held.retain(|space, held| {
            let kept = named.contains(space);
            if !kept && held.told.key.is_some() {
                given_up.push(held.told.inode);
            }
            kept
        });
        if self.left.iter().any(|space| !named.contains(space)) {
            return Err(PageReceiverError::Protocol("no segment any more of which pages were to come"));
        }
        let Some(ipc) = &self.ipc else { return Ok(()) };
        given_up
            .into_iter()
            .try_for_each(|identifier| ipc.remove(identifier))
            .map_err(PageReceiverError::Shared)
    }
}

impl Held {
    /// Whether it may be that its processes can have it by mapping alone.
    fn may_be_left(&self) -> bool {
        self.told.kind().may_be_only_mapped()
    }

    /// Whether it is a file that has this size now, and is the same otherwise.
    fn is_resized(&self, now: &SharedSegment) -> bool {
        now.tmpfs.is_some() && self.told == (SharedSegment { size: self.told.size, ..now.clone() })
    }
}

/// The files of a tmpfs.
#[derive(Debug)]
struct TmpfsFiles {
    shared: Shared,
    number: u32,
}

impl TmpfsFiles {
    fn replica(&self, space: Space) -> Option<Arc<Replica>> {
        let held = self.shared.lock().held.get(&space).cloned()?;
        match &held.place {
            Place::Replica(replica) if held.told.tmpfs == Some(self.number) => Some(Arc::clone(replica)),
            _ => None,
        }
    }
}

impl tree::Contents for TmpfsFiles {
    fn find(&self, number: u32, size: u64) -> Option<String> {
        let replica = self.replica(number)?;
        (replica.size() == size).then(|| replica.path())
    }

    fn named(&self, number: u32, modified: (i64, u32)) -> io::Result<()> {
        match self.replica(number) {
            Some(replica) => replica.keep_modified(modified),
            None => Err(io::ErrorKind::NotFound.into()),
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::os::unix::fs::MetadataExt;

    use godwit_memory::PAGE_SIZE;

    use super::*;

    fn segment(space: Space, size: u64) -> SharedSegment {
        SharedSegment { space: FIRST_SPACE + space, inode: 7, size, ..SharedSegment::default() }
    }

    fn named(all: &[SharedSegment]) -> Segments {
        Segments { all: all.to_vec() }
    }

    fn batch(space: Space, page: u64, kind: Kind) -> Batch {
        let range = page * PAGE_SIZE..(page + 1) * PAGE_SIZE;
        let data = if kind == Kind::Data { vec![5; 4096] } else { Vec::new() };
        Batch { space: FIRST_SPACE + space, runs: vec![Run { range, kind, data: data.into() }] }
    }

    #[test]
    fn pages_come_into_the_segment_that_the_restore_is_told_of() {
        let shared = Shared::default();
        shared.make(named(&[segment(0, 8192)]), &[]).unwrap();
        shared.store(batch(0, 1, Kind::Data), 1 << 30).unwrap();
        // One that is named again stays as it is.
        shared.make(named(&[segment(0, 8192), SharedSegment { inode: 8, ..segment(1, 4096) }]), &[]).unwrap();
        assert_eq!(shared.bytes(), 4096);
        let work = tempfile::tempdir().unwrap();
        let (some, none) = (work.path().join("some"), work.path().join("none"));
        shared.link_in(&some).unwrap();
        assert_eq!(std::fs::read(some.join("7")).unwrap(), [[0; 4096], [5; 4096]].concat());
        shared.store(batch(0, 1, Kind::Zero), 1 << 30).unwrap();
        assert_eq!(std::fs::read(some.join("7")).unwrap(), [0; 8192]);
        shared.make(named(&[]), &[]).unwrap();
        shared.link_in(&none).unwrap();
        assert_eq!(std::fs::read_dir(none).unwrap().count(), 0);
    }

    #[test]
    fn what_no_source_sends_is_refused() {
        let shared = Shared::default();
        let a_process = SharedSegment { space: 1, ..segment(0, 4096) };
        let no_size = segment(0, 0);
        for bad in [vec![a_process], vec![no_size], vec![segment(0, 4096); 2], vec![segment(0, u64::MAX)]] {
            assert!(shared.make(named(&bad), &[]).is_err(), "{bad:?}");
        }
        shared.make(named(&[segment(0, 4096)]), &[]).unwrap();
        assert!(shared.make(named(&[segment(0, 8192)]), &[]).is_err());
        let shared = Shared::default();
        shared.make(named(&[segment(0, 8192)]), &[]).unwrap();
        for bad in [batch(1, 0, Kind::Data), batch(0, 2, Kind::Data), batch(0, 0, Kind::Retained)] {
            assert!(shared.store(bad, 1 << 30).is_err());
        }
        let error = shared.store(batch(0, 0, Kind::Data), 4095).unwrap_err();
        assert!(matches!(error, PageReceiverError::TooMuch { bytes: 4096, most: 4095 }), "{error}");
    }

    #[test]
    fn what_no_source_leaves_for_after_the_commit_is_refused_before_there_is_memory_for_it() {
        let shared = Shared::default();
        let named_file = SharedSegment { name: Some("x".into()), ..segment(1, 8192) };
        shared.make(named(&[segment(0, 8192), named_file, segment(2, 8192)]), &[]).unwrap();
        let pages = |from: u64, to: u64| from * PAGE_SIZE..to * PAGE_SIZE;
        let leave = |space: Space, range: Range, most| {
            shared.leave(FIRST_SPACE + space, std::slice::from_ref(&range), most)
        };
        for unknown in [1, 3] {
            assert!(leave(unknown, pages(0, 1), 1 << 30).is_err(), "{unknown}");
        }
        // Too much for what is reserved, however often and in however many pieces.
        for range in [pages(0, 2), 0..!(PAGE_SIZE - 1), 0..!(PAGE_SIZE - 1)] {
            let error = leave(0, range, 4096).unwrap_err();
            assert!(matches!(error, PageReceiverError::TooMuch { most: 4096, .. }), "{error}");
        }
        let shared = Shared::default();
        shared.make(named(&[segment(0, 8192), segment(2, 8192)]), &[]).unwrap();
        let leave = |space: Space, range: Range| {
            shared.leave(FIRST_SPACE + space, std::slice::from_ref(&range), 1 << 30)
        };
        assert!(leave(0, pages(1, 3)).is_err(), "behind its end");
        shared.store(batch(2, 0, Kind::Data), 1 << 30).unwrap();
        let late = leave(2, pages(1, 2)).unwrap_err();
        assert!(late.to_string().contains("and then that they are to come"), "{late}");
        // The pager learns of a segment once.
        assert_eq!(leave(0, pages(0, 1)).unwrap(), None);
        shared.make(named(&[segment(0, 8192), segment(2, 8192), segment(4, 4096)]), &[]).unwrap();
        let (path, size) = leave(4, pages(0, 1)).unwrap().unwrap();
        assert_eq!((std::fs::metadata(path).unwrap().blocks(), size), (8, 4096));
    }

    #[test]
    fn segments_of_system_v_are_in_one_namespace_under_the_identifiers_that_are_named() {
        let of =
            |space, identifier| SharedSegment { inode: identifier, key: Some(9), ..segment(space, 8192) };
        let shared = Shared::default();
        for bad in [
            SharedSegment { tmpfs: Some(0), ..of(0, 7) },
            SharedSegment { name: Some("x".into()), ..of(0, 7) },
            SharedSegment { process: Some(1), size: ADDRESSES, ..of(0, 7) },
            of(0, u32::MAX),
        ] {
            assert!(shared.make(named(std::slice::from_ref(&bad)), &["/dev/shm".into()]).is_err(), "{bad:?}");
        }
        shared.make(named(&[of(0, 7)]), &[]).unwrap();
        shared.store(batch(0, 1, Kind::Data), 1 << 30).unwrap();
        // Removed and made again by the service: the identifier, and the key, are free by then.
        shared.make(named(&[of(1, 7), segment(2, 4096)]), &[]).unwrap();
        shared.store(batch(1, 0, Kind::Data), 1 << 30).unwrap();
        let work = tempfile::tempdir().unwrap();
        let directory = work.path().join("shared");
        shared.link_in(&directory).unwrap();
        let names = std::fs::read_dir(&directory).unwrap().map(|entry| entry.unwrap().file_name());
        // The other is memory whose inode is the same number.
        assert_eq!(names.collect::<BTreeSet<_>>(), ["7", "ipc"].map(Into::into).into());
        let namespace = |file: &str| std::fs::metadata(file).unwrap().ino();
        let ipc = directory.join("ipc");
        assert_ne!(namespace(ipc.to_str().unwrap()), namespace("/proc/self/ns/ipc"));
        let other_key = SharedSegment { key: Some(10), ..of(3, 7) };
        assert!(shared.make(named(&[of(1, 7), other_key]), &[]).is_err(), "an identifier twice");
    }

    #[test]
    fn copies_of_files_pages_are_taken_by_process() {
        let of =
            |space, process| SharedSegment { process: Some(process), inode: 0, ..segment(space, ADDRESSES) };
        let shared = Shared::default();
        for bad in [
            SharedSegment { size: 4096, ..of(0, 9) },
            SharedSegment { tmpfs: Some(0), ..of(0, 9) },
            SharedSegment { name: Some("x".into()), ..of(0, 9) },
        ] {
            assert!(shared.make(named(std::slice::from_ref(&bad)), &["/dev/shm".into()]).is_err(), "{bad:?}");
        }
        shared.make(named(&[of(0, 9), of(1, 10)]), &[]).unwrap();
        shared.store(batch(0, 5, Kind::Data), 1 << 20).unwrap();
        // What is gone takes no memory, however much it is.
        let runs = vec![Run { range: 1 << 40..1 << 50, kind: Kind::Zero, data: Vec::new().into() }];
        shared.store(Batch { space: FIRST_SPACE, runs }, 1 << 20).unwrap();
        shared.store(batch(0, 6, Kind::Data), 1 << 20).unwrap();
        shared.store(batch(0, 6, Kind::Zero), 1 << 20).unwrap();
        assert!(matches!(
            shared.store(batch(1, 7, Kind::Data), 8192).unwrap_err(),
            PageReceiverError::TooMuch { most: 8192, .. }
        ));
        let work = tempfile::tempdir().unwrap();
        shared.link_in(&work.path().join("shared")).unwrap();
        assert_eq!(std::fs::read_dir(work.path().join("shared")).unwrap().count(), 0);
        let copied = shared.take_copied().unwrap();
        assert_eq!(copied.keys().copied().collect::<Vec<_>>(), [9, 10]);
        assert_eq!(copied[&9].next(&(0..ADDRESSES)), Some(5 * PAGE_SIZE..6 * PAGE_SIZE));
        assert_eq!(copied[&10].next(&(0..ADDRESSES)), Some(7 * PAGE_SIZE..8 * PAGE_SIZE));
        assert!(shared.store(batch(0, 5, Kind::Data), 1 << 20).is_err(), "they are held no more");
        shared.make(named(&[of(2, 9), of(3, 9)]), &[]).unwrap();
        assert!(shared.take_copied().is_err(), "two of one process");
    }

    #[test]
    fn a_file_of_a_tmpfs_gets_its_size_and_its_name_from_the_source_and_keeps_its_time() {
        let tmpfs = tempfile::tempdir_in("/dev/shm").unwrap();
        let places = [PathBuf::from("/nowhere"), tmpfs.path().to_owned()];
        let file = |space, size| SharedSegment { tmpfs: Some(1), inode: 0, ..segment(space, size) };
        let shared = Shared::default();
        shared.make(named(&[file(0, 4096)]), &places).unwrap();
        shared.store(batch(0, 0, Kind::Data), 1 << 30).unwrap();
        shared.make(named(&[file(0, 8000)]), &places).unwrap();
        shared.store(batch(0, 1, Kind::Data), 1 << 30).unwrap();
        assert_eq!(shared.bytes(), 8192);
        shared.make(named(&[file(0, 4000)]), &places).unwrap();
        assert_eq!(shared.bytes(), 4096, "what was cut off is not counted");
        shared.make(named(&[file(0, 8000)]), &places).unwrap();
        shared.store(batch(0, 1, Kind::Data), 1 << 30).unwrap();
        assert_eq!(std::fs::read_dir(tmpfs.path()).unwrap().count(), 0);

        let root = tree::Entry { kind: tree::Kind::Directory.into(), mode: 0o1777, ..Default::default() };
        let named = tree::Entry {
            path: b"name".to_vec(),
            kind: tree::Kind::File.into(),
            mode: 0o640,
            uid: 7,
            mtime_seconds: 1_000_000_000,
            size: 8000,
            content: Some(FIRST_SPACE),
            ..Default::default()
        };
        let other = tree::Entry {
            path: b"other".to_vec(),
            kind: tree::Kind::HardLink.into(),
            hard_link_of: b"name".to_vec(),
            ..Default::default()
        };
        let apply = |number, entries: &[tree::Entry]| {
            let limits = tree::Limits { entries: 9, bytes: 0, devices: false };
            let receiver = tree::Receiver::new(tmpfs.path(), limits).unwrap();
            let mut receiver = receiver.with(shared.files_of(number));
            for entry in entries {
                receiver.apply(tree::Item::Entry(entry.clone()))?;
            }
            receiver.apply(tree::Item::End(tree::End { entries: entries.len() as u64, bytes: 0 }))?;
            receiver.finish()
        };
        // Of another tmpfs, of another size, and one that did not come.
        assert!(apply(0, &[root.clone(), named.clone()]).is_err());
        assert!(apply(1, &[tree::Entry { size: 8001, ..named.clone() }]).is_err());
        assert!(apply(1, &[tree::Entry { content: Some(FIRST_SPACE + 1), ..named.clone() }]).is_err());
        apply(1, &[root, named, other]).unwrap();
        // The last page comes after the name.
        shared.store(batch(0, 0, Kind::Zero), 1 << 30).unwrap();
        let path = tmpfs.path().join("other");
        let found = std::fs::metadata(&path).unwrap();
        assert_eq!((found.nlink(), found.mode() & 0o7777, found.uid()), (2, 0o640, 7));
        assert_eq!((found.mtime(), found.len()), (1_000_000_000, 8000));
        assert_eq!(std::fs::read(path).unwrap(), [vec![0; 4096], vec![5; 3904]].concat());
        // The service runs.
        shared.let_go();
        assert!(shared.store(batch(0, 0, Kind::Data), 1 << 30).is_err());
        assert_eq!(shared.bytes(), 0);
        // CRIU maps it by its name.
        let work = tempfile::tempdir().unwrap();
        shared.link_in(&work.path().join("shared")).unwrap();
        assert_eq!(std::fs::read_dir(work.path().join("shared")).unwrap().count(), 0);
    }

    #[test]
    fn only_a_file_changes_its_size_and_none_its_tmpfs() {
        let tmpfs = tempfile::tempdir_in("/dev/shm").unwrap();
        let places = [tmpfs.path().to_owned(), tmpfs.path().to_owned()];
        let file = |number, size| SharedSegment { tmpfs: Some(number), ..segment(0, size) };
        let shared = Shared::default();
        shared.make(named(&[file(0, 4096)]), &places).unwrap();
        for bad in [file(1, 4096), file(0, 0), file(0, u64::MAX), segment(0, 4096)] {
            assert!(shared.make(named(std::slice::from_ref(&bad)), &places).is_err(), "{bad:?}");
            shared.make(named(&[]), &places).unwrap();
            shared.make(named(&[file(0, 4096)]), &places).unwrap();
        }
        assert!(Shared::default().make(named(&[file(2, 4096)]), &places).is_err());
    }
}
