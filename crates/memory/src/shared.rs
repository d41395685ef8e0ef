//! Shared memory of a service as files: shared anonymous mappings, memory files (`memfd_create(2)`) that processes map
//! or have open, and files in its tmpfs.
//!
//! ```text
//! source                                              destination
//! process ──/proc/PID/{map_files,fd}──▶ Segment ──pages──▶ Replica ──its descriptor──▶ CRIU, which maps or opens it
//! tmpfs ──a file──────────────────────▶ Segment ──pages──▶ Replica, which gets its names there in the end
//! ```
//!
//! Page tables do not tell all that was written to shared memory. A process that wrote and then ended, executed another
//! program or unmapped the memory has taken them with it, and mremap(2) makes second mappings that are gone before anybody
//! looks. So who sends a segment compares its contents; a [`Segment`] says where there are any. Where none of that has
//! happened, [`Tracker::shared`](crate::tracker::Tracker::shared) says which pages it needs to compare.

mod filler;
mod handle;

use std::collections::BTreeMap;
use std::fs::File;
use std::io;
use std::num::NonZeroUsize;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt};
use std::path::Path;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError, RwLock};

use libc::{F_SEAL_SEAL, c_void};
use nix::errno::Errno;
use nix::fcntl::{FallocateFlags, FcntlArg, fallocate, fcntl};
use nix::sys::memfd::{MFdFlags, memfd_create};
use nix::sys::mman::{MapFlags, MmapAdvise, ProtFlags, madvise, mmap, mmap_anonymous, munmap};
use nix::unistd::{Whence, ftruncate, lseek};
use rustix::fs::{Timespec, Timestamps, UTIME_OMIT, futimens};

use self::filler::Filling;
pub use self::filler::{Filler, WORD as FILLER, run as fill};
use self::handle::Handle;
use crate::process::{Process, ProcessError};
use crate::{PAGE_SIZE, Range, Space};

/// The spaces of segments begin here, above all PIDs: their addresses are offsets in the segment.
pub const FIRST_SPACE: Space = 1 << 31;

/// The largest segment that is followed or held, bytes.
pub const LARGEST: u64 = 1 << 40;

/// A file of a tmpfs that is larger is followed only if half of it has content: a process that is charged for it maps all.
const SPARSE: u64 = 16 << 30;

/// What the kernel calls memory that was mapped with `MAP_SHARED | MAP_ANONYMOUS`.
const ANONYMOUS: &str = "/dev/zero";

/// What it puts before the name of a memory file.
const MEMFD: &str = "/memfd:";

/// What it puts behind it, as it does with all files that have no name any more.
const DELETED: &str = " (deleted)";

/// The longest name of a memory file: `NAME_MAX` without what the kernel puts before it.
const LONGEST_NAME: usize = 249;

/// A mapping of memory that may be a segment.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Mapping {
    pub(crate) range: Range,
    /// Where in the memory it begins, bytes.
    pub(crate) offset: u64,
    pub(crate) inode: u64,
    /// Of a memory file; none of anonymous memory.
    name: Option<String>,
    /// Whether all who map it share what they write, and nobody executes it.
    plain: bool,
}

/// Shared memory of processes that run.
#[derive(Debug)]
pub struct Segment {
    inode: u64,
    kind: Kind,
    size: u64,
    content: Content,
    /// Made at the first read, where that is safe.
    mapped: OnceLock<Option<Mapped>>,
}

/// How a segment is reached.
#[derive(Debug)]
enum Content {
    Open(File),
    Closed(Handle),
}

/// A segment that is open.
enum Opened<'a> {
    Before(&'a File),
    Now(File),
}

impl std::ops::Deref for Opened<'_> {
    type Target = File;

    fn deref(&self) -> &File {
        match self {
            Self::Before(file) => file,
            Self::Now(file) => file,
        }
    }
}

/// Whether an error says that a file of a tmpfs has gone.
#[must_use]
pub fn has_gone(error: &io::Error) -> bool {
    error.raw_os_error() == Some(libc::ESTALE)
}

/// How a segment was made.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Kind {
    /// By mmap(2).
    Anonymous,
    /// By memfd_create(2).
    Memfd {
        /// Its name.
        name: String,
        /// Whether seals can be added to it.
        sealable: bool,
    },
    /// As a file of a tmpfs.
    Tmpfs {
        /// Which of the service's.
        number: u32,
    },
}

impl Kind {
    /// The number of the tmpfs that it is in, if it is in one.
    #[must_use]
    pub fn tmpfs(&self) -> Option<u32> {
        match self {
            Self::Tmpfs { number } => Some(*number),
            Self::Anonymous | Self::Memfd { .. } => None,
        }
    }
}

/// All segments that these processes map or have open, by their inode. Those that only CRIU can move are left out: memory
/// of huge TLB pages, of System V, executable memory, memory files that are mapped privately.
///
/// # Errors
/// A process that lives cannot be examined.
pub fn find(pids: &[i32]) -> Result<BTreeMap<u64, Segment>, ProcessError> {
    // None of those that are left to CRIU.
    let mut found: BTreeMap<u64, Option<Segment>> = BTreeMap::new();
    let mut processes = Vec::new();
    for &pid in pids {
        let living = Process::open(pid).and_then(|process| {
            let text = process.text("maps")?;
            Ok((process, text))
        });
        let (process, text) = match living {
            Err(ProcessError::Gone { .. }) => continue,
            living => living?,
        };
        for mapping in mappings(&text) {
            match found.get(&mapping.inode) {
                Some(Some(_)) if mapping.plain => {}
                // It is known, or left to CRIU because of another mapping.
                Some(_) => drop(found.insert(mapping.inode, None)),
                None => {
                    // One that cannot be opened has gone meanwhile.
                    let segment = mapping.plain.then(|| Segment::mapped(&process, &mapping).ok().flatten());
                    drop(found.insert(mapping.inode, segment.flatten()));
                }
            }
        }
        processes.push(process);
    }
    // Then those that nobody maps.
    for process in &processes {
        process.each_open_file(MEMFD, |path, target, metadata| {
            if Some(metadata.dev()) == device() {
                let open = || Segment::opened(path, target, metadata.ino()).ok().flatten();
                found.entry(metadata.ino()).or_insert_with(open);
            }
        })?;
    }
    Ok(found.into_iter().filter_map(|(inode, segment)| Some((inode, segment?))).collect())
}

/// Bytes that these processes need where each has its own of what they share since a fork, and all that is shared by
/// mapping once. Their cgroup may have been charged less: another process has filled what came from another node.
///
/// # Errors
/// As [`find`].
pub fn needed(pids: &[i32]) -> Result<u64, ProcessError> {
    let mut needed = 0_u64;
    for &pid in pids {
        match Process::open(pid).and_then(|process| process.status()) {
            Ok(status) => needed = needed.saturating_add(status.anonymous_kib.saturating_mul(1024)),
            Err(ProcessError::Gone { .. }) => {}
            Err(error) => return Err(error),
        }
    }
    // What cannot be asked has just gone.
    let shared = find(pids)?.into_values().filter_map(|segment| segment.allocated().ok());
    Ok(shared.fold(needed, u64::saturating_add))
}

impl Segment {
    fn mapped(process: &Process, mapping: &Mapping) -> io::Result<Option<Self>> {
        let Range { start, end } = mapping.range;
        Self::of(process.open_mapped(start, end)?, mapping.inode, mapping.name.as_deref())
    }

    /// One that a process has open at this path, which is a link to that target.
    fn opened(path: &Path, target: &Path, inode: u64) -> io::Result<Option<Self>> {
        let name = target.to_str().and_then(|target| target.strip_prefix(MEMFD)?.strip_suffix(DELETED));
        match name.filter(|name| can_be_told(name)) {
            // Waiting for nobody, whatever it is by now.
            Some(name) => {
                let file = File::options().read(true).custom_flags(libc::O_NONBLOCK).open(path)?;
                Self::of(file, inode, Some(name))
            }
            None => Ok(None),
        }
    }

    /// None if it is no segment, or not the one with this inode.
    fn of(file: File, inode: u64, name: Option<&str>) -> io::Result<Option<Self>> {
        let metadata = file.metadata()?;
        // Another file may be there by now.
        let same = Some(metadata.dev()) == device() && metadata.ino() == inode;
        // CRIU knows it by 32 bits.
        if !same || u32::try_from(inode).is_err() || metadata.len() == 0 || metadata.len() > LARGEST {
            return Ok(None);
        }
        let kind = match name {
            None => Kind::Anonymous,
            Some(name) => {
                let seals = fcntl(&file, FcntlArg::F_GET_SEALS)?;
                Kind::Memfd { name: name.to_owned(), sealable: seals != F_SEAL_SEAL }
            }
        };
        let (size, content) = (metadata.len(), Content::Open(file));
        Ok(Some(Self { inode, kind, size, content, mapped: OnceLock::new() }))
    }

    /// A regular file of the service's tmpfs of this number, which may be open as a path only; none if it has no content
    /// to send, or a size that would take too much of an address space. `root` is a directory of the tmpfs. The file is not
    /// held open: what is asked of it may fail as it [has gone](has_gone).
    ///
    /// # Errors
    /// The kernel does not tell.
    pub fn of_tmpfs(number: u32, root: &Arc<OwnedFd>, file: &impl AsFd) -> io::Result<Option<Self>> {
        let found = rustix::fs::fstat(file)?;
        let is_file = rustix::fs::FileType::from_raw_mode(found.st_mode).is_file();
        let size = u64::try_from(found.st_size).unwrap_or(0);
        let allocated = u64::try_from(found.st_blocks).unwrap_or(0).saturating_mul(512);
        let largest = SPARSE.max(allocated.saturating_mul(2)).min(LARGEST);
        if !is_file || size == 0 || size > largest {
            return Ok(None);
        }
        let handle = Handle::of(root, file)?;
        // Who may not open it by that, is told so here.
        match handle.open() {
            Err(error) if has_gone(&error) => return Ok(None),
            opened => drop(opened?),
        }
        let (inode, kind, content) = (found.st_ino, Kind::Tmpfs { number }, Content::Closed(handle));
        Ok(Some(Self { inode, kind, size, content, mapped: OnceLock::new() }))
    }

    fn file(&self) -> io::Result<Opened<'_>> {
        match &self.content {
            Content::Open(file) => Ok(Opened::Before(file)),
            Content::Closed(handle) => handle.open().map(Opened::Now),
        }
    }

    /// Its inode: of what is in no tmpfs, CRIU knows it by this.
    #[must_use]
    pub fn inode(&self) -> u64 {
        self.inode
    }

    /// How it was made.
    #[must_use]
    pub fn kind(&self) -> &Kind {
        &self.kind
    }

    /// Its bytes when it was found.
    #[must_use]
    pub fn size(&self) -> u64 {
        self.size
    }

    /// Whether it still has as many.
    ///
    /// # Errors
    /// The kernel does not tell.
    pub fn has_its_size(&self) -> io::Result<bool> {
        Ok(self.file()?.metadata()?.len() == self.size)
    }

    /// Whether it has a name, and its size: a file that was renamed while its directory was read is not found there.
    #[must_use]
    pub fn is_as_it_was(&self) -> bool {
        let metadata = self.file().and_then(|file| file.metadata());
        metadata.is_ok_and(|metadata| metadata.nlink() > 0 && metadata.len() == self.size)
    }

    /// What it takes of the machine's memory now, bytes.
    ///
    /// # Errors
    /// The kernel does not tell.
    pub fn allocated(&self) -> io::Result<u64> {
        Ok(self.file()?.metadata()?.blocks() * 512)
    }

    /// Where there are pages; everything else reads as zero. Whole pages, in ascending order, of the size that it had when it
    /// was found: whoever has a file open can make it grow.
    ///
    /// # Errors
    /// The kernel does not tell.
    pub fn populated(&self) -> io::Result<Vec<Range>> {
        let mut populated = Vec::new();
        let (file, size) = (self.file()?, self.size.next_multiple_of(PAGE_SIZE));
        let mut at = 0;
        while at < size
            && let Some(start) = seek(&file, at, Whence::SeekData)?.filter(|start| *start < size)
        {
            // Behind the last data there is always a hole, at the latest at the end.
            let end = seek(&file, start, Whence::SeekHole)?.unwrap_or(start + PAGE_SIZE);
            let range = start / PAGE_SIZE * PAGE_SIZE..end.next_multiple_of(PAGE_SIZE).min(size);
            at = range.end;
            populated.push(range);
        }
        Ok(populated)
    }

    /// Reads whole pages from this offset on. What lies behind its end, as the rest of the last page does, is zero.
    /// They should be [populated](Self::populated): reading others may fill the holes with pages.
    ///
    /// # Errors
    /// The kernel cannot read it.
    pub fn read(&self, offset: u64, buffer: &mut [u8]) -> io::Result<()> {
        let file = self.file()?;
        // A file may be cut short by whoever gets hold of it: reading a mapping of it would end this process.
        // Nobody can do that to anonymous memory.
        let mapped = match self.kind {
            Kind::Anonymous => self.mapped.get_or_init(|| Mapped::new(&file, self.size)),
            Kind::Memfd { .. } | Kind::Tmpfs { .. } => &None,
        };
        if mapped.as_ref().is_some_and(|mapped| mapped.read(offset, buffer)) {
            return Ok(());
        }
        let mut done = 0;
        while done < buffer.len() {
            match file.read_at(&mut buffer[done..], offset + done as u64) {
                Ok(0) => break,
                Ok(read) => done += read,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        buffer[done..].fill(0);
        Ok(())
    }
}

fn seek(file: &File, from: u64, whence: Whence) -> io::Result<Option<u64>> {
    let from = i64::try_from(from).map_err(io::Error::other)?;
    match lseek(file, from, whence) {
        Ok(at) => Ok(u64::try_from(at).ok()),
        Err(Errno::ENXIO) => Ok(None),
        Err(errno) => Err(errno.into()),
    }
}

/// A mapping to read from: twice as fast as read(2), which looks for each page anew.
#[derive(Debug)]
struct Mapped {
    start: NonNull<c_void>,
    length: NonZeroUsize,
}

// SAFETY: the mapping is read only, through raw pointers, and lives as long as the value.
unsafe impl Send for Mapped {}
// SAFETY: as above.
unsafe impl Sync for Mapped {}

impl Mapped {
    /// None where the kernel has no room.
    fn new(file: &File, size: u64) -> Option<Self> {
        let length = NonZeroUsize::new(usize::try_from(size).ok()?.checked_next_multiple_of(4096)?)?;
        // SAFETY: a new mapping at an address of the kernel's choice touches nothing that exists.
        let start = unsafe { mmap(None, length, ProtFlags::PROT_READ, MapFlags::MAP_SHARED, file, 0) };
        let mapped = Self { start: start.ok()?, length };
        // SAFETY: the range is the mapping just made; it changes nothing but what a core dump has.
        let _ = unsafe { madvise(mapped.start, length.get(), MmapAdvise::MADV_DONTDUMP) };
        Some(mapped)
    }

    /// Whether all of it could be read.
    fn read(&self, offset: u64, buffer: &mut [u8]) -> bool {
        let Ok(offset) = usize::try_from(offset) else { return false };
        let within = offset.checked_add(buffer.len()).is_some_and(|end| end <= self.length.get());
        if !within || offset % 4096 != 0 {
            return false;
        }
        // SAFETY: the range is within the mapping, as checked.
        let from = unsafe { self.start.byte_add(offset) };
        // What cannot be read, as from a broken swap disk, is told here, where a look at it would end this process.
        // SAFETY: populating changes no contents, and the range is within the mapping.
        if unsafe { madvise(from, buffer.len(), MmapAdvise::MADV_POPULATE_READ) }.is_err() {
            return false;
        }
        // SAFETY: the range is within the mapping, and the buffer is another. Processes may write meanwhile: what is
        // torn then differs from what was sent, or is compared once more when they are frozen.
        unsafe { std::ptr::copy_nonoverlapping(from.as_ptr().cast(), buffer.as_mut_ptr(), buffer.len()) };
        true
    }
}

impl Drop for Mapped {
    fn drop(&mut self) {
        // SAFETY: the mapping was made with this length, and nothing refers to it.
        let _ = unsafe { munmap(self.start, self.length.get()) };
    }
}

/// A segment on its way into processes that do not exist yet.
#[derive(Debug)]
pub struct Replica {
    file: File,
    size: AtomicU64,
    /// When it was last modified at the source, seconds since 1970 and nanoseconds, where that is to be kept.
    modified: Mutex<Option<(i64, u32)>>,
    /// Where it is written, if another process is charged for it.
    filling: RwLock<Option<Filling>>,
}

impl Replica {
    /// Makes an empty one, in the way in which the segment was made: one of a tmpfs in this directory of its filesystem,
    /// without a name.
    ///
    /// # Errors
    /// The kernel refuses, or the size or name is none that a segment can have.
    pub fn new(kind: &Kind, size: u64, tmpfs: Option<&Path>) -> io::Result<Self> {
        let length = is_size(size)?;
        let file = match kind {
            Kind::Anonymous => anonymous(size)?,
            Kind::Memfd { name, sealable } => {
                if name.len() > LONGEST_NAME {
                    return Err(io::Error::other("the name of a memory file is too long"));
                }
                let mut flags = MFdFlags::MFD_CLOEXEC;
                flags.set(MFdFlags::MFD_ALLOW_SEALING, *sealable);
                let file = File::from(memfd_create(name.as_str(), flags)?);
                ftruncate(&file, length)?;
                file
            }
            Kind::Tmpfs { .. } => {
                let directory =
                    tmpfs.ok_or_else(|| io::Error::other("a file of a tmpfs that is not there"))?;
                let mut how = File::options();
                let file =
                    how.read(true).write(true).mode(0o000).custom_flags(libc::O_TMPFILE).open(directory)?;
                ftruncate(&file, length)?;
                file
            }
        };
        Ok(Self { file, size: size.into(), modified: Mutex::new(None), filling: RwLock::new(None) })
    }

    /// Gives one of a tmpfs another size. Nothing may be written to it meanwhile.
    ///
    /// # Errors
    /// The kernel refuses, or it is none that a segment can have.
    pub fn resize(&self, size: u64) -> io::Result<()> {
        ftruncate(&self.file, is_size(size)?)?;
        self.size.store(size, Ordering::Relaxed);
        let mut filling = self.filling.write().unwrap_or_else(PoisonError::into_inner);
        if let Some(before) = filling.take() {
            *filling = Some(before.filler().map(self)?);
        }
        drop(filling);
        self.set_modified()
    }

    /// Its bytes.
    #[must_use]
    pub fn size(&self) -> u64 {
        self.size.load(Ordering::Relaxed)
    }

    /// From now on it was last modified at this time, whatever is still written to it.
    ///
    /// # Errors
    /// The kernel does not set it.
    pub fn keep_modified(&self, time: (i64, u32)) -> io::Result<()> {
        *self.modified.lock().unwrap_or_else(PoisonError::into_inner) = Some(time);
        self.set_modified()
    }

    fn set_modified(&self) -> io::Result<()> {
        let modified = *self.modified.lock().unwrap_or_else(PoisonError::into_inner);
        let Some((seconds, nanoseconds)) = modified else { return Ok(()) };
        let times = Timestamps {
            last_access: Timespec { tv_sec: 0, tv_nsec: UTIME_OMIT },
            last_modification: Timespec { tv_sec: seconds, tv_nsec: nanoseconds.into() },
        };
        Ok(futimens(&self.file, &times)?)
    }

    /// Charges what is written from now on to this filler, or to this process again.
    ///
    /// # Errors
    /// The filler cannot map it.
    pub fn charge_to(&self, filler: Option<&Arc<Filler>>) -> io::Result<()> {
        let filling = filler.map(|filler| filler.map(self)).transpose()?;
        let mut now = self.filling.write().unwrap_or_else(PoisonError::into_inner);
        let before = std::mem::replace(&mut *now, filling);
        // Writers need not wait until it is unmapped.
        drop((now, before));
        Ok(())
    }

    /// Writes pages from this offset on.
    ///
    /// # Errors
    /// They are not within it, or there is no memory.
    pub fn write(&self, offset: u64, pages: &[u8]) -> io::Result<()> {
        let range = self.within(&(offset..offset.saturating_add(pages.len() as u64)))?;
        // What the last page has behind the end is no part of it, and would make it larger.
        let length = usize::try_from(range.end - range.start).map_err(io::Error::other)?;
        match &*self.filling.read().unwrap_or_else(PoisonError::into_inner) {
            Some(filling) => filling.write(offset, &pages[..length]),
            None => self.file.write_all_at(&pages[..length], offset),
        }?;
        self.set_modified()
    }

    /// These pages read as zero from now on, and take no memory.
    ///
    /// # Errors
    /// They are not within it.
    pub fn clear(&self, range: &Range) -> io::Result<()> {
        let Range { start, .. } = self.within(range)?;
        let number = |number: u64| i64::try_from(number).map_err(io::Error::other);
        let mode = FallocateFlags::FALLOC_FL_PUNCH_HOLE | FallocateFlags::FALLOC_FL_KEEP_SIZE;
        fallocate(&self.file, mode, number(start)?, number(range.end - start)?)?;
        self.set_modified()
    }

    /// The part of whole pages that is within it.
    fn within(&self, range: &Range) -> io::Result<Range> {
        let size = self.size();
        if range.start >= range.end || range.end > size.next_multiple_of(PAGE_SIZE) {
            return Err(io::Error::other(format!(
                "pages at {range:x?} are not within shared memory of {size} bytes"
            )));
        }
        Ok(range.start..range.end.min(size))
    }

    /// What it takes of the machine's memory, bytes.
    ///
    /// # Errors
    /// The kernel does not tell.
    pub fn allocated(&self) -> io::Result<u64> {
        Ok(self.file.metadata()?.blocks() * 512)
    }

    /// Where other processes of root find it, as long as it is held here.
    #[must_use]
    pub fn path(&self) -> String {
        format!("/proc/{}/fd/{}", std::process::id(), self.file.as_raw_fd())
    }
}

/// A size that a segment can have, as the kernel takes it.
fn is_size(size: u64) -> io::Result<i64> {
    if size == 0 || size > LARGEST {
        return Err(io::Error::other(format!("shared memory of {size} bytes is not taken")));
    }
    i64::try_from(size).map_err(io::Error::other)
}

/// Shared anonymous memory as a file, which is nowhere mapped.
fn anonymous(size: u64) -> io::Result<File> {
    let length = usize::try_from(size).ok().and_then(NonZeroUsize::new).ok_or(Errno::EINVAL)?;
    let (access, flags) =
        (ProtFlags::PROT_READ | ProtFlags::PROT_WRITE, MapFlags::MAP_SHARED | MapFlags::MAP_NORESERVE);
    // SAFETY: a new mapping at an address of the kernel's choice touches nothing that exists.
    let mapped = unsafe { mmap_anonymous(None, length, access, flags)? };
    let start = mapped.as_ptr().addr() as u64;
    let end = start + size.next_multiple_of(PAGE_SIZE);
    let path = format!("/proc/self/map_files/{start:x}-{end:x}");
    let file = File::options().read(true).write(true).open(path);
    // SAFETY: the mapping was made above with this length, and nothing refers to it.
    unsafe { munmap(mapped, length.get()) }?;
    file
}

/// The device of all shared memory without a name; none where the kernel does not tell.
fn device() -> Option<u64> {
    static DEVICE: OnceLock<Option<u64>> = OnceLock::new();
    *DEVICE.get_or_init(|| {
        let file = memfd_create("godwit", MFdFlags::MFD_CLOEXEC).map(File::from).ok()?;
        Some(file.metadata().ok()?.dev())
    })
}

/// Whether a memory file's name can be told to the destination. In `maps` the kernel writes some characters as numbers, and
/// what is no UTF-8 was replaced when the text was read.
fn can_be_told(name: &str) -> bool {
    !name.contains(['\\', '\u{fffd}']) && name.len() <= LONGEST_NAME
}

/// The mappings of memory that may be a segment, from the text of `maps`.
pub(crate) fn mappings(text: &str) -> Vec<Mapping> {
    let Some(device) = device() else { return Vec::new() };
    let device = format!("{:02x}:{:02x}", libc::major(device), libc::minor(device));
    text.lines().filter_map(|line| mapping(line, &device)).collect()
}

/// One line, as `7f0c000-7f0d000 rw-s 00000000 00:01 4711    /dev/zero (deleted)`.
fn mapping(line: &str, shared: &str) -> Option<Mapping> {
    let mut words = line.splitn(6, ' ');
    let (start, end) = words.next()?.split_once('-')?;
    let range = u64::from_str_radix(start, 16).ok()?..u64::from_str_radix(end, 16).ok()?;
    let &[_, _, execute, sharing] = words.next()?.as_bytes() else { return None };
    let offset = u64::from_str_radix(words.next()?, 16).ok()?;
    let (device, inode) = (words.next()?, words.next()?.parse::<u64>().ok()?);
    let path = words.next()?.trim_start().strip_suffix(DELETED)?;
    // CRIU knows it by 32 bits.
    if device != shared || u32::try_from(inode).is_err() {
        return None;
    }
    let name = match path.strip_prefix(MEMFD) {
        Some(name) => Some(name.to_owned()),
        None if path == ANONYMOUS => None,
        None => return None,
    };
    let told = name.as_deref().is_none_or(can_be_told);
    Some(Mapping { range, offset, inode, name, plain: sharing == b's' && execute != b'x' && told })
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn memory_that_only_criu_can_move_is_no_segment() {
        let text = "\
7f2000000000-7f2000001000 rw-s 00000000 00:01 5                          /dev/zero (deleted)
7f2000001000-7f2000002000 r--s 00001000 00:01 6                          /memfd:two words (deleted)
7f2000002000-7f2000003000 rw-p 00000000 00:01 7                          /memfd:x (deleted)
7f2000003000-7f2000004000 rwxs 00000000 00:01 8                          /dev/zero (deleted)
7f2000004000-7f2000005000 rw-s 00000000 00:01 9                          /SYSV00000000 (deleted)
7f2000005000-7f2000006000 rw-s 00000000 00:1b 10                         /dev/zero (deleted)
7f2000006000-7f2000007000 rw-s 00000000 00:01 11                         /memfd:a\\012b (deleted)
7f2000007000-7f2000008000 rw-s 00000000 00:01 4294967296                 /dev/zero (deleted)
7f2000008000-7f2000009000 rw-p 00000000 00:00 0                          [heap]
7f2000009000-7f200000a000 rw-p 00000000 00:00 0 
";
        let found: Vec<_> = text.lines().filter_map(|line| mapping(line, "00:01")).collect();
        let plain: Vec<_> = found.iter().map(|mapping| (mapping.inode, mapping.plain)).collect();
        assert_eq!(plain, [(5, true), (6, true), (7, false), (8, false), (11, false)]);
        assert_eq!((&found[0].name, found[1].name.as_deref()), (&None, Some("two words")));
        assert_eq!((&found[1].range, found[1].offset), (&(0x7f20_0000_1000..0x7f20_0000_2000), 0x1000));
    }

    #[test]
    fn pages_arrive_in_a_replica_and_no_byte_lies_behind_its_end() {
        let memfd = Kind::Memfd { name: "name".into(), sealable: true };
        for (kind, size) in [(Kind::Anonymous, 4 * PAGE_SIZE), (memfd, 3 * PAGE_SIZE + 100)] {
            let replica = Replica::new(&kind, size, None).unwrap();
            replica.write(PAGE_SIZE, &[7; 8192]).unwrap();
            replica.write(3 * PAGE_SIZE, &[8; 4096]).unwrap();
            replica.clear(&(2 * PAGE_SIZE..3 * PAGE_SIZE)).unwrap();
            let bytes = std::fs::read(replica.path()).unwrap();
            assert_eq!(bytes.len() as u64, size, "{kind:?}");
            let page = |number: usize| {
                bytes[number * 4096..].iter().take(4096).collect::<std::collections::BTreeSet<_>>()
            };
            assert_eq!([0, 1, 2, 3].map(page), [[&0], [&7], [&0], [&8]].map(Into::into), "{kind:?}");
            for beyond in [4 * PAGE_SIZE, u64::MAX - 10, LARGEST] {
                assert!(replica.write(beyond, &[1; 4096]).is_err());
                assert!(replica.clear(&(beyond..beyond.saturating_add(PAGE_SIZE))).is_err());
            }
            let link = std::fs::read_link(replica.path()).unwrap();
            let name = if kind == Kind::Anonymous { "/dev/zero (deleted)" } else { "/memfd:name (deleted)" };
            assert_eq!(link.to_str(), Some(name));
        }
        assert!(
            Replica::new(&Kind::Anonymous, LARGEST + 1, None).is_err()
                && Replica::new(&Kind::Anonymous, 0, None).is_err()
                && Replica::new(&Kind::Tmpfs { number: 0 }, 1, None).is_err()
        );
    }

    #[test]
    fn a_file_of_a_tmpfs_has_no_name_another_size_and_the_time_of_its_original() {
        let shm = tempfile::tempdir_in("/dev/shm").unwrap();
        let replica = Replica::new(&Kind::Tmpfs { number: 0 }, 2 * PAGE_SIZE, Some(shm.path())).unwrap();
        assert_eq!(std::fs::read_dir(shm.path()).unwrap().count(), 0);
        replica.write(0, &[7; 8192]).unwrap();
        replica.keep_modified((1_000_000_000, 7)).unwrap();
        for (size, zeros) in [(3 * PAGE_SIZE, 4096), (PAGE_SIZE + 1, 0), (2 * PAGE_SIZE, 4095)] {
            replica.resize(size).unwrap();
            let bytes = std::fs::read(replica.path()).unwrap();
            assert_eq!((bytes.len() as u64, replica.size()), (size, size));
            assert_eq!(bytes.iter().filter(|byte| **byte == 0).count(), zeros, "{size}");
            assert!(replica.write(size.next_multiple_of(PAGE_SIZE), &[1; 4096]).is_err());
            assert_eq!(replica.file.metadata().unwrap().mtime(), 1_000_000_000);
        }
        replica.clear(&(0..PAGE_SIZE)).unwrap();
        replica.write(PAGE_SIZE, &[8; 4096]).unwrap();
        let metadata = replica.file.metadata().unwrap();
        assert_eq!((metadata.mtime(), metadata.mtime_nsec(), metadata.nlink()), (1_000_000_000, 7, 0));
    }

    #[test]
    fn only_a_file_with_content_is_a_segment_of_a_tmpfs() {
        let shm = tempfile::tempdir_in("/dev/shm").unwrap();
        let root = Arc::new(OwnedFd::from(File::open(shm.path()).unwrap()));
        let open = |name: &str| {
            let path = shm.path().join(name);
            let file = File::options().read(true).custom_flags(libc::O_PATH).open(path).unwrap();
            Segment::of_tmpfs(3, &root, &file).unwrap()
        };
        File::create(shm.path().join("sparse")).unwrap().set_len(SPARSE + 1).unwrap();
        std::fs::write(shm.path().join("empty"), b"").unwrap();
        std::fs::write(shm.path().join("some"), [9; 5000]).unwrap();
        assert!(open("empty").is_none() && open(".").is_none() && open("sparse").is_none());
        let segment = open("some").unwrap();
        assert_eq!((segment.kind(), segment.size()), (&Kind::Tmpfs { number: 3 }, 5000));
        assert_eq!(segment.populated().unwrap(), vec![0..2 * PAGE_SIZE]);
        let mut page = [1; 4096];
        segment.read(PAGE_SIZE, &mut page).unwrap();
        assert_eq!((page[903], page[904]), (9, 0));
        // Its handle stays, whatever its name is, and nothing else of it does.
        std::fs::rename(shm.path().join("some"), shm.path().join("other")).unwrap();
        File::options().write(true).open(shm.path().join("other")).unwrap().set_len(6000).unwrap();
        assert!(!segment.is_as_it_was());
        segment.read(0, &mut page).unwrap();
        File::options().write(true).open(shm.path().join("other")).unwrap().set_len(5000).unwrap();
        assert!(segment.is_as_it_was());
        std::fs::remove_file(shm.path().join("other")).unwrap();
        assert!(!segment.is_as_it_was());
        assert!(has_gone(&segment.read(0, &mut page).unwrap_err()));
        assert!(has_gone(&segment.populated().unwrap_err()));
    }
}
