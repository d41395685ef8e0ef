//! Shared memory of a service as files: shared anonymous mappings, memory files (`memfd_create(2)`) that processes map
//! or have open, attached segments of System V, and files in its tmpfs. And, in the same way, what a process has written in
//! private mappings of files.
//!
//! ```text
//! source                                              destination
//! process ──/proc/PID/{map_files,fd}──▶ Segment ──pages──▶ Replica ──its descriptor──▶ CRIU, which maps or opens it
//! attached by shmat(2) ───────────────▶ Segment ──pages──▶ Replica, which is in the IPC namespace that CRIU enters
//! tmpfs ──a file──────────────────────▶ Segment ──pages──▶ Replica, which gets its names there in the end
//! process ──its own pages of files────▶ Segment ──pages──▶ Copies ──by address──▶ CRIU's images
//! ```
//!
//! Page tables do not tell all that was written to shared memory. A process that wrote and then ended, executed another
//! program or unmapped the memory has taken them with it, and mremap(2) makes second mappings that are gone before anybody
//! looks. So who sends a segment compares its contents; a [`Segment`] says where there are any. Where none of that has
//! happened, [`Tracker::shared`](crate::tracker::Tracker::shared) says which pages it needs to compare.

mod copied;
mod copies;
mod filler;
mod handle;
mod replica;
mod system_v;

use std::collections::BTreeMap;
use std::fs::File;
use std::io;
use std::num::NonZeroUsize;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt};
use std::path::Path;
use std::ptr::NonNull;
use std::sync::{Arc, OnceLock};

use libc::{F_SEAL_SEAL, c_void};
use nix::errno::Errno;
use nix::fcntl::{FcntlArg, fcntl};
use nix::sys::mman::{MapFlags, MmapAdvise, ProtFlags, madvise, mmap, munmap};
use nix::unistd::{Whence, lseek};

use self::copied::Copied;
pub use self::copies::Copies;
pub use self::filler::{Filler, WORD as FILLER, run as fill};
use self::handle::Handle;
pub use self::replica::Replica;
pub use self::system_v::IpcNamespace;
use crate::process::nameless::{ANONYMOUS, DELETED, MEMFD, Mapping, Memory, can_be_told, device, mappings};
use crate::process::{Process, ProcessError};
use crate::{PAGE_SIZE, Range, Space};

/// The spaces of segments begin here, above all PIDs: their addresses are offsets in the segment.
pub const FIRST_SPACE: Space = 1 << 31;

/// The spaces of segments that are named by their inode begin here.
const FIRST_BY_INODE: Space = FIRST_SPACE | 1 << 30;

/// The largest segment that is followed or held, bytes.
pub const LARGEST: u64 = 1 << 40;

/// The size of a segment whose offsets are addresses: 56 bits, which no user space exceeds.
pub const ADDRESSES: u64 = 1 << 56;

/// A file of a tmpfs that is larger is followed only if half of it has content: a process that is charged for it maps all.
const SPARSE: u64 = 16 << 30;

/// Smaller segments of System V are left to CRIU: what names them costs more than their pages.
const LEAST_SYSTEM_V: u64 = 64 << 10;

/// Shared memory of processes that run.
#[derive(Debug)]
pub struct Segment {
    inode: u64,
    kind: Kind,
    size: u64,
    content: Content,
    /// Made at the first read, where that is safe.
    mapped: OnceLock<Option<Mapped>>,
    /// Whether a process has it open.
    is_open: bool,
}

/// How a segment is reached.
#[derive(Debug)]
enum Content {
    Open(File),
    Closed(Handle),
    Copied(Copied),
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
    /// By shmget(2).
    SystemV {
        /// Its key now, which shmctl(2) takes from it when it is to be removed.
        key: u32,
    },
    /// As a file of a tmpfs.
    Tmpfs {
        /// Which of the service's.
        number: u32,
    },
    /// By the kernel: copies of pages of files that a process has mapped privately and written. Offsets are addresses.
    Copied {
        /// Whose.
        process: Space,
    },
}

impl Kind {
    /// Whether it may be that processes can have it [by mapping alone](Segment::is_only_mapped).
    #[must_use]
    pub fn may_be_only_mapped(&self) -> bool {
        match self {
            Self::Anonymous => true,
            Self::Memfd { name, .. } => name == ANONYMOUS,
            Self::SystemV { .. } | Self::Tmpfs { .. } | Self::Copied { .. } => false,
        }
    }

    /// The number of the tmpfs that it is in, if it is in one.
    #[must_use]
    pub fn tmpfs(&self) -> Option<u32> {
        match self {
            Self::Tmpfs { number } => Some(*number),
            Self::Anonymous | Self::Memfd { .. } | Self::SystemV { .. } | Self::Copied { .. } => None,
        }
    }
}

/// The space of shared anonymous memory with this inode, where it has one: whoever looks for it finds it by that alone.
#[must_use]
pub fn space_by_inode(inode: u64) -> Option<Space> {
    Space::try_from(inode).ok().filter(|inode| *inode < 1 << 30).map(|inode| FIRST_BY_INODE | inode)
}

/// Whether one of these processes can have shared anonymous memory otherwise than by touching its pages: it can open what
/// others have mapped, or has locked memory, which is in place when it is mapped.
///
/// # Errors
/// A process that lives cannot be examined.
pub fn needs_in_place(pids: &[i32]) -> Result<bool, ProcessError> {
    for &pid in pids {
        match Process::open(pid).and_then(|process| process.status()) {
            Ok(status) if status.opens_mapped() || status.locked_kib > 0 => return Ok(true),
            Ok(_) | Err(ProcessError::Gone { .. }) => {}
            Err(error) => return Err(error),
        }
    }
    Ok(false)
}

/// All segments that these processes map or have open. Those that only CRIU can move are left out: memory of huge TLB pages,
/// small segments of System V and those that no process has attached, executable memory, memory files that are mapped
/// privately.
///
/// # Errors
/// A process that lives cannot be examined.
pub fn find(pids: &[i32]) -> Result<Vec<Segment>, ProcessError> {
    let (mut found, processes) = find_mapped(pids, |_| true)?;
    // Then those that are open, which perhaps nobody maps.
    for process in &processes {
        process.each_open_file(MEMFD, |path, target, metadata| {
            if Some(metadata.dev()) == device() {
                let open = || Segment::opened(path, target, metadata.ino()).ok().flatten();
                let segment = found.entry((false, metadata.ino())).or_insert_with(open);
                if let Some(segment) = segment {
                    segment.is_open = true;
                }
            }
        })?;
    }
    Ok(found.into_values().flatten().collect())
}

/// Memory of these processes that [can be had by mapping alone](Segment::is_only_mapped), or could be, by its inode.
///
/// # Errors
/// A process that lives cannot be examined, or what it maps cannot be opened.
pub fn only_mapped(pids: &[i32]) -> Result<BTreeMap<u64, Segment>, ProcessError> {
    let mut found = BTreeMap::new();
    for &pid in pids {
        let process = match Process::open(pid) {
            Err(ProcessError::Gone { .. }) => continue,
            process => process?,
        };
        for mapping in mappings(&process.text("maps")?) {
            let is_wanted = match &mapping.memory {
                Memory::Anonymous => true,
                Memory::File(name) => name == ANONYMOUS,
                Memory::SystemV => false,
            };
            if is_wanted && !found.contains_key(&mapping.inode) {
                let failed =
                    |source| ProcessError::Io { pid, action: "open its shared memory".into(), source };
                if let Some(segment) = Segment::mapped(&process, &mapping).map_err(failed)? {
                    found.insert(mapping.inode, segment);
                }
            }
        }
    }
    Ok(found)
}

/// Those of System V among them.
///
/// # Errors
/// As [`find`].
pub fn find_system_v(pids: &[i32]) -> Result<Vec<Segment>, ProcessError> {
    let (found, _) = find_mapped(pids, |mapping| mapping.memory == Memory::SystemV)?;
    Ok(found.into_values().flatten().collect())
}

/// By whether they are of System V, and inode or identifier; none where they are left to CRIU.
type Found = BTreeMap<(bool, u64), Option<Segment>>;

/// The segments that these processes map in mappings that are wanted, and those of the processes that live.
fn find_mapped(
    pids: &[i32],
    wanted: impl Fn(&Mapping) -> bool,
) -> Result<(Found, Vec<Process>), ProcessError> {
    let (mut found, mut processes) = (Found::new(), Vec::new());
    for &pid in pids {
        let living = Process::open(pid).and_then(|process| {
            let text = process.text("maps")?;
            Ok((process, text))
        });
        let (process, text) = match living {
            Err(ProcessError::Gone { .. }) => continue,
            living => living?,
        };
        for mapping in mappings(&text).into_iter().filter(&wanted) {
            let identity = (mapping.memory == Memory::SystemV, mapping.inode);
            match found.get(&identity) {
                Some(Some(_)) if mapping.plain => {}
                // It is known, or left to CRIU because of another mapping.
                Some(_) => drop(found.insert(identity, None)),
                None => {
                    // One that cannot be opened has gone meanwhile.
                    let segment = mapping.plain.then(|| Segment::mapped(&process, &mapping).ok().flatten());
                    drop(found.insert(identity, segment.flatten()));
                }
            }
        }
        processes.push(process);
    }
    forget_ambiguous(&mut found);
    Ok((found, processes))
}

/// Forgets segments of System V with the same key: it has passed from one to another while they were looked for.
fn forget_ambiguous(found: &mut Found) {
    let mut keys: BTreeMap<u32, usize> = BTreeMap::new();
    let key = |segment: &Option<Segment>| match segment.as_ref().map(Segment::kind) {
        Some(Kind::SystemV { key }) if *key != 0 => Some(*key),
        _ => None,
    };
    for key in found.values().filter_map(key) {
        *keys.entry(key).or_default() += 1;
    }
    found.retain(|_, segment| key(segment).is_none_or(|key| keys.get(&key) == Some(&1)));
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
    // What cannot be asked has just gone. Segments of System V need not be attached.
    let others = find(pids)?.into_iter().filter(|segment| !matches!(segment.kind(), Kind::SystemV { .. }));
    let shared = others.filter_map(|segment| segment.allocated().ok());
    let of_system_v = pids.iter().find_map(|pid| system_v::allocated(&Process::open(*pid).ok()?).ok());
    Ok(shared.chain(of_system_v).fold(needed, u64::saturating_add))
}

impl Segment {
    fn mapped(process: &Process, mapping: &Mapping) -> io::Result<Option<Self>> {
        let Range { start, end } = mapping.range;
        let file = process.open_mapped(start, end)?;
        match &mapping.memory {
            Memory::Anonymous => Self::of(file, mapping.inode, |_| Ok(Kind::Anonymous)),
            Memory::File(name) => Self::memory_file(file, mapping.inode, name),
            // The kernel is asked about large ones only.
            Memory::SystemV if file.metadata()?.len() < LEAST_SYSTEM_V => Ok(None),
            Memory::SystemV => {
                let Some(status) = system_v::status(process, mapping.inode)? else { return Ok(None) };
                let segment = Self::of(file, mapping.inode, |_| Ok(Kind::SystemV { key: status.key }))?;
                Ok(segment.filter(|segment| segment.size == status.size))
            }
        }
    }

    /// One that a process has open at this path, which is a link to that target.
    fn opened(path: &Path, target: &Path, inode: u64) -> io::Result<Option<Self>> {
        let name = target.to_str().and_then(|target| target.strip_prefix(MEMFD)?.strip_suffix(DELETED));
        match name.filter(|name| can_be_told(name)) {
            // Waiting for nobody, whatever it is by now.
            Some(name) => {
                let file = File::options().read(true).custom_flags(libc::O_NONBLOCK).open(path)?;
                Self::memory_file(file, inode, name)
            }
            None => Ok(None),
        }
    }

    fn memory_file(file: File, inode: u64, name: &str) -> io::Result<Option<Self>> {
        Self::of(file, inode, |file| {
            let seals = fcntl(file, FcntlArg::F_GET_SEALS)?;
            Ok(Kind::Memfd { name: name.to_owned(), sealable: seals != F_SEAL_SEAL })
        })
    }

    /// None if it is no segment, or not the one with this inode.
    fn of(file: File, inode: u64, kind: impl FnOnce(&File) -> io::Result<Kind>) -> io::Result<Option<Self>> {
        let metadata = file.metadata()?;
        // Another file may be there by now.
        let same = Some(metadata.dev()) == device() && metadata.ino() == inode;
        // CRIU knows it by 32 bits.
        if !same || u32::try_from(inode).is_err() || metadata.len() == 0 || metadata.len() > LARGEST {
            return Ok(None);
        }
        let (kind, size, content) = (kind(&file)?, metadata.len(), Content::Open(file));
        Ok(Some(Self { inode, kind, size, content, mapped: OnceLock::new(), is_open: false }))
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
        Ok(Some(Self { inode, kind, size, content, mapped: OnceLock::new(), is_open: false }))
    }

    /// What this process has written in private mappings of files.
    ///
    /// # Errors
    /// It has ended, or cannot be examined.
    pub fn copied(pid: i32) -> Result<Self, ProcessError> {
        let process = Process::open(pid)?;
        let kind = Kind::Copied { process: process.space() };
        let content = Content::Copied(Copied::of(process));
        Ok(Self { inode: 0, kind, size: ADDRESSES, content, mapped: OnceLock::new(), is_open: false })
    }

    /// When the process began that has written it, if one alone has it: with its PID that names the process.
    #[must_use]
    pub fn start_time(&self) -> Option<u64> {
        match &self.content {
            Content::Copied(copied) => Some(copied.start_time()),
            Content::Open(_) | Content::Closed(_) => None,
        }
    }

    /// The PID in the node's namespace of the process that has written it, if one alone has it and has not ended.
    #[must_use]
    pub fn writer(&self) -> Option<i32> {
        match &self.content {
            Content::Copied(copied) => copied.pid(),
            Content::Open(_) | Content::Closed(_) => None,
        }
    }

    /// What that process has locked, KiB.
    #[must_use]
    pub fn locked_kib(&self) -> u64 {
        match &self.content {
            Content::Copied(copied) => copied.locked_kib(),
            Content::Open(_) | Content::Closed(_) => 0,
        }
    }

    fn file(&self) -> io::Result<Opened<'_>> {
        match &self.content {
            Content::Open(file) => Ok(Opened::Before(file)),
            Content::Closed(handle) => handle.open().map(Opened::Now),
            Content::Copied(_) => Err(io::Error::other("memory of a process, which is no file")),
        }
    }

    /// Its inode; of one of System V its identifier. Of what is in no tmpfs and has one, CRIU knows it by this.
    #[must_use]
    pub fn inode(&self) -> u64 {
        self.inode
    }

    /// How it was made.
    #[must_use]
    pub fn kind(&self) -> &Kind {
        &self.kind
    }

    /// Whether processes can have it by mapping alone: it is shared anonymous memory, also as CRIU makes that in a restore
    /// from images (a memory file `/dev/zero`, which nobody has open).
    #[must_use]
    pub fn is_only_mapped(&self) -> bool {
        !self.is_open && self.kind.may_be_only_mapped()
    }

    /// Whether it is the same memory as this one, which was found with the same inode or identifier: the kernel, or the
    /// service, may have given the identifier to another. Of what cannot be told it is not.
    #[must_use]
    pub fn is(&self, other: &Self) -> bool {
        match (&self.content, &other.content) {
            (Content::Open(file), Content::Open(now)) => handle::is_same(file, now).unwrap_or(false),
            _ => false,
        }
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
        if matches!(self.content, Content::Copied(_)) {
            return Ok(true);
        }
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
        if let Content::Copied(copied) = &self.content {
            return copied.populated();
        }
        let mut populated = Vec::new();
        let (file, size) = (self.file()?, self.size.next_multiple_of(PAGE_SIZE));
        let mut at = 0;
        while at < size
            && let Some(start) = seek(&file, at, Whence::SeekData)?.filter(|start| *start < size)
        {
            // Behind the last data there is always a hole, at the latest at the end.
            let end = seek(&file, start, Whence::SeekHole)?.unwrap_or(start + PAGE_SIZE);
            let range = start / PAGE_SIZE * PAGE_SIZE..end.next_multiple_of(PAGE_SIZE).min(size);
            // Whoever gives the page up meanwhile leaves a hole at its start.
            at = range.end.max(range.start + PAGE_SIZE);
            if !range.is_empty() {
                populated.push(range);
            }
        }
        Ok(populated)
    }

    /// Reads whole pages from this offset on. What lies behind its end, as the rest of the last page does, is zero, but for
    /// the rest of the last page of one of System V, which processes have mapped.
    /// They should be [populated](Self::populated): reading others may fill the holes with pages.
    ///
    /// # Errors
    /// The kernel cannot read it.
    pub fn read(&self, offset: u64, buffer: &mut [u8]) -> io::Result<()> {
        if let Content::Copied(copied) = &self.content {
            return copied.read(offset, buffer);
        }
        let file = self.file()?;
        // A file may be cut short by whoever gets hold of it: reading a mapping of it would end this process.
        // Nobody can do that to anonymous memory, or to System V's.
        let mapped = match self.kind {
            Kind::Anonymous | Kind::SystemV { .. } => {
                self.mapped.get_or_init(|| Mapped::new(&file, self.size))
            }
            Kind::Memfd { .. } | Kind::Tmpfs { .. } | Kind::Copied { .. } => &None,
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

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

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
