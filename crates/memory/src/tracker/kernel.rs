//! The two interfaces of the kernel on which tracking is built, as thin calls: `PAGEMAP_SCAN`
//! (Documentation/admin-guide/mm/pagemap.rst) and the write protection of userfaultfd
//! (Documentation/admin-guide/mm/userfaultfd.rst).

use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd};

use nix::errno::Errno;

use crate::{PAGE_SIZE, Range};

const PAGE: usize = 4096;

const UFFD_API: u64 = 0xAA;
/// The kernel alone notes writes, and no thread waits for us (Linux 6.7). It brings
/// `UFFD_FEATURE_WP_UNPOPULATED` with it, whether asked for or not.
const UFFD_FEATURE_WP_ASYNC: u64 = 1 << 15;
const UFFDIO_REGISTER_MODE_WP: u64 = 2;

const PM_SCAN_WP_MATCHING: u64 = 1;
const PM_SCAN_CHECK_WPASYNC: u64 = 2;
const PAGE_IS_WRITTEN: u64 = 1 << 1;
const PAGE_IS_FILE: u64 = 1 << 2;
const PAGE_IS_PRESENT: u64 = 1 << 3;
const PAGE_IS_SWAPPED: u64 = 1 << 4;
const PAGE_IS_PFNZERO: u64 = 1 << 5;
/// Linux 6.15; before it guard pages look like swapped ones, and reading them tells.
const PAGE_IS_GUARD: u64 = 1 << 8;

/// Regions a scan can return at once; more cost one more call. 64 KiB of pages written here and
/// there per MiB of it.
const REGIONS: usize = 16 * 1024;

/// The same of what has few.
const FEW_REGIONS: usize = 256;

#[repr(C)]
#[derive(Debug, Default)]
struct UffdioApi {
    api: u64,
    features: u64,
    ioctls: u64,
}

#[repr(C)]
#[derive(Debug, Default)]
struct UffdioRegister {
    start: u64,
    len: u64,
    mode: u64,
    ioctls: u64,
}

#[repr(C)]
#[derive(Debug, Default)]
struct UffdioWriteprotect {
    start: u64,
    len: u64,
    mode: u64,
}

/// `struct pm_scan_arg`.
#[repr(C)]
#[derive(Debug, Default)]
struct ScanArguments {
    size: u64,
    flags: u64,
    start: u64,
    end: u64,
    walk_end: u64,
    vec: u64,
    vec_len: u64,
    max_pages: u64,
    category_inverted: u64,
    category_mask: u64,
    category_anyof_mask: u64,
    return_mask: u64,
}

/// `struct page_region`.
#[repr(C)]
#[derive(Debug, Default, Clone, Copy)]
struct Region {
    start: u64,
    end: u64,
    categories: u64,
}

mod calls {
    use super::{ScanArguments, UffdioApi, UffdioRegister, UffdioWriteprotect};
    nix::ioctl_readwrite!(uffdio_api, 0xAA, 0x3F, UffdioApi);
    nix::ioctl_readwrite!(uffdio_register, 0xAA, 0x00, UffdioRegister);
    nix::ioctl_readwrite!(uffdio_writeprotect, 0xAA, 0x06, UffdioWriteprotect);
    nix::ioctl_readwrite!(pagemap_scan, b'f', 16, ScanArguments);
}

/// A userfaultfd of another process's address space, in which writes are only noted.
///
/// A protected page has a mark, which the first write takes away. The kernel can end the watch over an area and leave
/// the marks in it: when mremap(2) brings a page beside the area, so that both become one (seen in 6.18), and up to
/// Linux 6.12 on the pages that are moved themselves. Writes leave such a mark alone, so that the page would count as
/// not written for ever once the area is watched again. So marks that are in an area are removed before it is watched
/// ([`Scanner::marked`], [`Userfault::unmark`]).
#[derive(Debug)]
pub(super) struct Userfault(OwnedFd);

impl Userfault {
    /// Makes a fresh userfaultfd note writes.
    pub(super) fn new(fd: OwnedFd) -> Result<Self, Errno> {
        let mut api = UffdioApi { api: UFFD_API, features: UFFD_FEATURE_WP_ASYNC, ioctls: 0 };
        // SAFETY: the argument is the structure that the call reads and writes.
        unsafe { calls::uffdio_api(fd.as_raw_fd(), &raw mut api) }?;
        Ok(Self(fd))
    }

    /// Notes writes from now on in an area of a process that does not run.
    pub(super) fn watch(&self, area: &Range) -> Result<(), Errno> {
        let (start, len) = (area.start, area.end - area.start);
        let mut register = UffdioRegister { start, len, mode: UFFDIO_REGISTER_MODE_WP, ioctls: 0 };
        // SAFETY: as above. Registering for asynchronous write protection changes nothing that the
        // process can notice.
        unsafe { calls::uffdio_register(self.0.as_raw_fd(), &raw mut register) }?;
        Ok(())
    }

    /// Takes the marks away from pages of a process that does not run: they count as written. Those that are not
    /// watched any more are passed over.
    pub(super) fn unmark(&self, pages: &Range) -> Result<(), Errno> {
        if self.unprotect(pages.start, pages.end - pages.start).is_ok() {
            return Ok(());
        }
        for page in (pages.start..pages.end).step_by(PAGE) {
            match self.unprotect(page, PAGE_SIZE) {
                Ok(()) | Err(Errno::ENOENT) => {}
                Err(errno) => return Err(errno),
            }
        }
        Ok(())
    }

    fn unprotect(&self, start: u64, len: u64) -> Result<(), Errno> {
        let mut unprotect = UffdioWriteprotect { start, len, mode: 0 };
        // SAFETY: as above.
        unsafe { calls::uffdio_writeprotect(self.0.as_raw_fd(), &raw mut unprotect) }.map(drop)
    }
}

/// What a call does beside listing pages.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Protect {
    /// Nothing.
    No,
    /// Nothing, but the whole call fails with EPERM where writes are not noted.
    Watched,
    /// Write-protects the pages it returns, in one step with listing them; the whole call fails with EPERM where writes
    /// are not noted.
    Yes,
}

/// Which pages a scan gives: those with all of `all` and, if there are any, one of `any`, where those of `inverted` are
/// the pages that lack it.
#[derive(Debug, Clone, Copy)]
struct Wanted {
    all: u64,
    any: u64,
    inverted: u64,
}

impl Wanted {
    /// All that have no mark in page tables that exist. No page table entry has none either: the kernel takes entries
    /// away without removing marks, but never an entry with a mark without leaving one.
    const UNMARKED: Self = Self { all: PAGE_IS_WRITTEN, any: 0, inverted: 0 };
    /// Those that have no entry.
    const NO_ENTRY: Self =
        Self { all: PAGE_IS_PRESENT | PAGE_IS_SWAPPED, any: 0, inverted: PAGE_IS_PRESENT | PAGE_IS_SWAPPED };

    /// Pages that there are, without those of these categories.
    fn populated(absent: u64) -> Self {
        Self { all: absent, any: PAGE_IS_PRESENT | PAGE_IS_SWAPPED, inverted: absent }
    }
}

/// `PAGEMAP_SCAN` with its buffer.
#[derive(Debug)]
pub(crate) struct Scanner {
    regions: Vec<Region>,
    /// Categories that this kernel knows and that make a page none.
    absent: u64,
}

impl Scanner {
    pub(super) fn new() -> Self {
        Self::with(REGIONS, PAGE_IS_PFNZERO | PAGE_IS_GUARD)
    }

    fn with(regions: usize, absent: u64) -> Self {
        Self { regions: vec![Region::default(); regions], absent }
    }

    /// One for memory of few pages, to which the zero page is a page as any other.
    pub(crate) fn small() -> Self {
        Self::with(FEW_REGIONS, PAGE_IS_GUARD)
    }

    /// One to which the zero page is a page as any other.
    pub(crate) fn of_all() -> Self {
        Self::with(REGIONS, PAGE_IS_GUARD)
    }

    /// Gives the pages of a private mapping of a file that are no pages of the file.
    pub(crate) fn copied(
        &mut self,
        pagemap: BorrowedFd<'_>,
        range: &Range,
        mut each: impl FnMut(Range),
    ) -> Result<(), Errno> {
        self.walk(pagemap, range, 0, Wanted::populated(self.absent | PAGE_IS_FILE), |pages, _| each(pages))
    }

    /// Gives the populated pages of a range in ascending order, each with whether it was written
    /// since it was protected. Pages of the zero page and guard pages count as not there. After an
    /// error some pages may have been protected that were not given.
    pub(crate) fn scan(
        &mut self,
        pagemap: BorrowedFd<'_>,
        range: &Range,
        protect: Protect,
        each: impl FnMut(Range, bool),
    ) -> Result<(), Errno> {
        let flags = match protect {
            Protect::No => 0,
            Protect::Watched => PM_SCAN_CHECK_WPASYNC,
            Protect::Yes => PM_SCAN_WP_MATCHING | PM_SCAN_CHECK_WPASYNC,
        };
        self.walk(pagemap, range, flags, Wanted::populated(self.absent), each)
    }

    /// Gives the pages of a watched range of shared memory that may have been written through this mapping since they
    /// were protected, whatever the kernel did to the page tables since then; some more than once. It fails with EPERM
    /// where writes are not noted; what is not mapped is passed over.
    ///
    /// A page counts as not written if it has a mark, in its entry or in place of one. Shared memory loses entries when
    /// it is reclaimed, or given back by madvise(2); what was not written then leaves a mark behind.
    pub(super) fn unmarked(
        &mut self,
        pagemap: BorrowedFd<'_>,
        range: &Range,
        protect: Protect,
        mut each: impl FnMut(Range),
    ) -> Result<(), Errno> {
        let flags = match protect {
            Protect::No | Protect::Watched => PM_SCAN_CHECK_WPASYNC,
            Protect::Yes => PM_SCAN_WP_MATCHING | PM_SCAN_CHECK_WPASYNC,
        };
        // In this order: what loses its entry between both has been given by the first, or left a mark.
        self.walk(pagemap, range, flags, Wanted::UNMARKED, |pages, _| each(pages))?;
        // The first passes over page tables that do not exist.
        self.walk(pagemap, range, flags, Wanted::NO_ENTRY, |pages, _| each(pages))
    }

    /// The pages of a range that have a mark.
    pub(super) fn marked(&mut self, pagemap: BorrowedFd<'_>, range: &Range) -> Result<Vec<Range>, Errno> {
        let mut marked = Vec::new();
        let wanted = Wanted::populated(self.absent | PAGE_IS_WRITTEN);
        self.walk(pagemap, range, 0, wanted, |pages, _| marked.push(pages))?;
        Ok(marked)
    }

    /// Whether an area is watched, which is so of all of it or of nothing.
    pub(super) fn is_watched(&mut self, pagemap: BorrowedFd<'_>, area: &Range) -> Result<bool, Errno> {
        let first = area.start..area.start + PAGE_SIZE;
        let wanted = Wanted::populated(self.absent);
        match self.walk(pagemap, &first, PM_SCAN_CHECK_WPASYNC, wanted, |_, _| ()) {
            Err(Errno::EPERM) => Ok(false),
            result => result.map(|()| true),
        }
    }

    fn walk(
        &mut self,
        pagemap: BorrowedFd<'_>,
        range: &Range,
        flags: u64,
        mut wanted: Wanted,
        mut each: impl FnMut(Range, bool),
    ) -> Result<(), Errno> {
        let mut start = range.start;
        while start < range.end {
            let mut arguments = ScanArguments {
                size: size_of::<ScanArguments>() as u64,
                flags,
                start,
                end: range.end,
                vec: self.regions.as_mut_ptr() as u64,
                vec_len: self.regions.len() as u64,
                category_inverted: wanted.inverted,
                category_mask: wanted.all,
                category_anyof_mask: wanted.any,
                return_mask: PAGE_IS_WRITTEN,
                ..ScanArguments::default()
            };
            // SAFETY: the argument is the structure that the call reads and writes, and it names a
            // vector that is borrowed exclusively for the call, with its length.
            let count = unsafe { calls::pagemap_scan(pagemap.as_raw_fd(), &raw mut arguments) };
            let count = match count {
                Ok(count) => usize::try_from(count).unwrap_or(0),
                Err(Errno::EINVAL) if wanted.all & PAGE_IS_GUARD != 0 => {
                    self.absent &= !PAGE_IS_GUARD;
                    wanted.all &= !PAGE_IS_GUARD;
                    wanted.inverted &= !PAGE_IS_GUARD;
                    continue;
                }
                Err(Errno::EINTR) if flags & PM_SCAN_WP_MATCHING == 0 => continue,
                Err(errno) => return Err(errno),
            };
            let mut reached = start;
            for region in &self.regions[..count] {
                if region.start < reached || region.end <= region.start {
                    return Err(Errno::EIO);
                }
                each(region.start..region.end, region.categories & PAGE_IS_WRITTEN != 0);
                reached = region.end;
            }
            // Linux gathers 512 regions at a time and leaves the place where it did so last in `walk_end`
            // when it has come to the end (seen in 6.18). What lies behind that place was given and
            // protected all the same. Given twice, a page that was written in between would be lost by code
            // that expects pages in ascending order.
            reached = reached.max(arguments.walk_end);
            if reached <= start {
                return Err(Errno::EIO);
            }
            start = reached;
        }
        Ok(())
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::fs::File;
    use std::os::fd::{AsFd, FromRawFd};

    use super::*;
    use crate::PAGE_SIZE;
    use crate::tracker::inject::UFFD_USER_MODE_ONLY;

    /// Pages of this process, each with content.
    struct Memory {
        start: *mut u8,
        pages: u64,
    }

    impl Memory {
        fn new(pages: u64) -> Self {
            let (access, flags) =
                (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
            let length = usize::try_from(pages * PAGE_SIZE).unwrap();
            // SAFETY: a new mapping, which no reference points to.
            let start = unsafe { libc::mmap(std::ptr::null_mut(), length, access, flags, -1, 0) };
            assert_ne!(start, libc::MAP_FAILED, "{}", std::io::Error::last_os_error());
            let memory = Self { start: start.cast(), pages };
            (0..pages).for_each(|page| memory.write(page));
            memory
        }

        fn write(&self, page: u64) {
            assert!(page < self.pages);
            // SAFETY: within the mapping, to which there are no references.
            unsafe { self.start.add(usize::try_from(page * PAGE_SIZE).unwrap()).write_volatile(1) };
        }

        fn range(&self) -> Range {
            let start = self.start.addr() as u64;
            start..start + self.pages * PAGE_SIZE
        }
    }

    impl Drop for Memory {
        fn drop(&mut self) {
            let length = usize::try_from(self.pages * PAGE_SIZE).unwrap();
            // SAFETY: the mapping is this one's and nothing points to it any more.
            unsafe { libc::munmap(self.start.cast(), length) };
        }
    }

    /// A userfaultfd of this process that notes writes; none where the kernel does not.
    fn userfault() -> Option<Userfault> {
        let flags = libc::O_CLOEXEC | libc::O_NONBLOCK | UFFD_USER_MODE_ONLY;
        // SAFETY: userfaultfd takes an integer and touches no memory of ours.
        let fd = unsafe { libc::syscall(libc::SYS_userfaultfd, flags) };
        let fd = i32::try_from(fd).ok().filter(|fd| *fd >= 0)?;
        // SAFETY: the kernel has just returned this descriptor; nobody else owns it.
        Userfault::new(unsafe { OwnedFd::from_raw_fd(fd) }).ok()
    }

    /// The kernel gathers 512 regions at a time: more of them than that, and an end of the memory that it
    /// comes to with some of them gathered.
    #[test]
    fn a_page_that_is_written_while_its_scan_is_under_way_is_found_by_this_or_the_next_one() {
        let Some(userfault) = userfault() else {
            return assert_ne!(crate::tracker::detect().backend, crate::tracker::Backend::Uffd);
        };
        let memory = Memory::new(700);
        let range = memory.range();
        userfault.watch(&range).unwrap();
        let pagemap = File::open("/proc/self/pagemap").unwrap();
        let mut scanner = Scanner::new();
        // What is given, as pages from the start, and whether it was written.
        let mut scan = |each: &mut dyn FnMut(u64, bool)| {
            let page = |address: u64| (address - range.start) / PAGE_SIZE;
            let each = |found: Range, written| {
                (page(found.start)..page(found.end)).for_each(|page| each(page, written));
            };
            scanner.scan(pagemap.as_fd(), &range, Protect::Yes, each).unwrap();
        };
        scan(&mut |_, written| assert!(written));
        (0..memory.pages).step_by(2).for_each(|page| memory.write(page));
        let (mut given, mut written) = (Vec::new(), Vec::new());
        scan(&mut |page, is_written| {
            given.push(page);
            written.extend(is_written.then_some(page));
            // All pages up to the last are protected when it is given.
            if page + 1 == memory.pages {
                memory.write(601);
            }
        });
        assert_eq!(given, (0..memory.pages).collect::<Vec<_>>(), "each page is given once, in order");
        assert_eq!(written, (0..memory.pages).step_by(2).collect::<Vec<_>>());
        let mut later = Vec::new();
        scan(&mut |page, is_written| later.extend(is_written.then_some(page)));
        assert_eq!(later, [601]);
    }

    #[test]
    fn marks_are_found_and_taken_away_where_an_area_is_watched() {
        let Some(userfault) = userfault() else { return };
        let memory = Memory::new(64);
        let range = memory.range();
        let pages = |from: u64, to: u64| range.start + from * PAGE_SIZE..range.start + to * PAGE_SIZE;
        let file = File::open("/proc/self/pagemap").unwrap();
        let (pagemap, mut scanner) = (file.as_fd(), Scanner::new());
        assert!(!scanner.is_watched(pagemap, &range).unwrap());
        userfault.watch(&range).unwrap();
        assert!(scanner.is_watched(pagemap, &range).unwrap());
        assert_eq!(scanner.marked(pagemap, &range).unwrap(), []);
        scanner.scan(pagemap, &pages(8, 24), Protect::Yes, |_, _| ()).unwrap();
        memory.write(10);
        assert_eq!(scanner.marked(pagemap, &range).unwrap(), [pages(8, 10), pages(11, 24)]);
        userfault.unmark(&pages(12, 24)).unwrap();
        assert_eq!(scanner.marked(pagemap, &range).unwrap(), [pages(8, 10), pages(11, 12)]);
        // What is beside the memory is not watched, and may not even be mapped.
        userfault.unmark(&pages(9, 80)).unwrap();
        assert_eq!(scanner.marked(pagemap, &range).unwrap(), [pages(8, 9)]);
    }
}
