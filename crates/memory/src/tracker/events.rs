//! Counts what processes do that their page tables do not tell: tracepoints of the kernel as perf events
//! (perf_event_open(2)), which cost a process nothing but in these calls.
//!
//! A counter belongs to a thread. The kernel gives a copy to each thread and process that the thread makes, and adds
//! what the copies count.

use std::ffi::CString;
use std::fs::File;
use std::io::{self, Read};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::path::Path;

use nix::errno::Errno;

/// Where the kernel describes its tracepoints.
const TRACEPOINTS: &str = "/sys/kernel/tracing/events";

/// Exists where the kernel has io_uring.
const IO_URING: &str = "/proc/sys/kernel/io_uring_disabled";

/// A tracepoint, and which of its events count.
type Tracepoint = (&'static str, &'static str);

/// What leaves no trace in page tables, of a process that has shared memory and no descriptor of it:
///
/// - a child with page tables of its own: it can write, and end. Threads and children of vfork(2) share theirs;
/// - a second mapping, by mremap(2) of no bytes or with `MREMAP_DONTUNMAP`: it can be written, and unmapped;
/// - `MADV_REMOVE`: a page is another one then, with the mark of the first.
///
/// The tracepoints of single system calls pass over those of other instruction sets, which a process can make on x86-64.
/// The tracepoint of all calls does not: it has their numbers, and counts more than it must where a number is that
/// of another call, too.
const TRACEPOINT_LIST: &[Tracepoint] = &[
    // CLONE_VM
    ("task/task_newtask", "!(clone_flags & 0x100)"),
    // MREMAP_DONTUNMAP
    ("syscalls/sys_enter_mremap", "old_len == 0 || flags & 4"),
    ("syscalls/sys_enter_madvise", "behavior == 9"),
    ("raw_syscalls/sys_enter", OTHER_CALLS),
];

/// process_madvise(2), and mremap(2), madvise(2) and process_madvise(2) of i386 and x32.
#[cfg(target_arch = "x86_64")]
const OTHER_CALLS: &str =
    "id == 440 || id == 163 || id == 219 || id == 1073741849 || id == 1073741852 || id == 1073742264";
/// process_madvise(2). A 64-bit process of arm64 makes no 32-bit calls, and a 32-bit
/// process is not watched.
#[cfg(not(target_arch = "x86_64"))]
const OTHER_CALLS: &str = "id == 440";

/// madvise(2) by io_uring.
const BY_IO_URING: Tracepoint = ("io_uring/io_uring_submit_req", "opcode == 25");

/// The events of this kernel.
#[derive(Debug)]
pub(super) struct Events {
    tracepoints: Vec<(u64, CString)>,
    /// The first counter of a tracepoint and the end of the last one change the kernel's code, which takes its time: no
    /// process is to be stopped meanwhile, and nobody is to wait. So these begin first, and end last.
    first: Option<Counters>,
}

impl Drop for Events {
    fn drop(&mut self) {
        let first = self.first.take();
        // Where there is no thread to be had, it ends at once.
        let _ = std::thread::Builder::new().name("end-counters".into()).spawn(move || drop(first));
    }
}

/// Whether page tables can tell which pages of shared anonymous memory were written
/// ([`Tracker::shared`](super::Tracker::shared)). Everything else that it takes comes with [`Backend::Uffd`](super::Backend).
///
/// # Errors
/// Why not.
pub fn shared_writes() -> io::Result<()> {
    Events::new().map(drop)
}

/// Counters of a process and of all that it makes.
#[derive(Debug)]
pub(super) struct Counters(Vec<File>);

impl Events {
    /// What this kernel offers.
    ///
    /// # Errors
    /// It has not all of them, or does not let this process use them.
    pub(super) fn new() -> io::Result<Self> {
        let by_io_uring = Path::new(IO_URING).exists().then_some(BY_IO_URING);
        let all = TRACEPOINT_LIST.iter().copied().chain(by_io_uring);
        let tracepoints = all
            .map(|(name, filter)| {
                let path = format!("{TRACEPOINTS}/{name}/id");
                let id = std::fs::read_to_string(&path)
                    .map_err(|error| io::Error::new(error.kind(), format!("{path}: {error}")))?;
                let id = id.trim().parse().map_err(io::Error::other)?;
                Ok((id, CString::new(filter)?))
            })
            .collect::<io::Result<Vec<_>>>()?;
        let first = Self::count_in(&tracepoints, &[0])
            .map_err(|error| io::Error::new(error.kind(), format!("perf_event_open: {error}")))?;
        Ok(Self { tracepoints, first: Some(first) })
    }

    /// How many counters a thread needs.
    pub(super) fn each(&self) -> usize {
        self.tracepoints.len()
    }

    /// Begins to count in these threads.
    ///
    /// # Errors
    /// The kernel refuses, or one of them has ended.
    pub(super) fn count(&self, tasks: &[i32]) -> io::Result<Counters> {
        Self::count_in(&self.tracepoints, tasks)
    }

    fn count_in(tracepoints: &[(u64, CString)], tasks: &[i32]) -> io::Result<Counters> {
        let mut counters = Vec::new();
        for &task in tasks {
            for (id, filter) in tracepoints {
                let counter = open(*id, task)?;
                // SAFETY: the filter is a string that the call only reads.
                unsafe { set_filter(counter.as_raw_fd(), filter.as_ptr()) }?;
                counters.push(File::from(counter));
            }
        }
        Ok(Counters(counters))
    }
}

impl Counters {
    /// How many there are.
    pub(super) fn len(&self) -> usize {
        self.0.len()
    }

    /// How often something happened.
    ///
    /// # Errors
    /// The kernel does not tell.
    pub(super) fn sum(&self) -> io::Result<u64> {
        self.0.iter().try_fold(0_u64, |sum, mut counter| {
            let mut count = [0; 8];
            counter.read_exact(&mut count)?;
            Ok(sum.wrapping_add(u64::from_ne_bytes(count)))
        })
    }
}

const PERF_TYPE_TRACEPOINT: u32 = 2;
const PERF_FLAG_FD_CLOEXEC: libc::c_ulong = 1 << 3;
/// `inherit` of the bits of `struct perf_event_attr`.
const INHERIT: u64 = 1 << 1;

/// `struct perf_event_attr` as it was first published.
#[repr(C)]
#[derive(Debug, Default)]
struct Attributes {
    kind: u32,
    size: u32,
    config: u64,
    sample_period: u64,
    sample_type: u64,
    read_format: u64,
    bits: u64,
    wakeup_events: u32,
    breakpoint_type: u32,
    breakpoint_address: u64,
}

/// Its size.
const ATTRIBUTES: u32 = 64;
const _: () = assert!(size_of::<Attributes>() == ATTRIBUTES as usize);

nix::ioctl_write_ptr!(set_filter_pointer, b'$', 6, *const libc::c_char);

/// `PERF_EVENT_IOC_SET_FILTER`, whose argument is the string itself.
unsafe fn set_filter(counter: i32, filter: *const libc::c_char) -> Result<(), Errno> {
    // SAFETY: as the caller promises.
    unsafe { set_filter_pointer(counter, filter.cast()) }.map(drop)
}

/// A counter of a tracepoint in a thread; 0 for this one.
fn open(tracepoint: u64, task: i32) -> io::Result<OwnedFd> {
    let attributes = Attributes {
        kind: PERF_TYPE_TRACEPOINT,
        size: ATTRIBUTES,
        config: tracepoint,
        bits: INHERIT,
        ..Attributes::default()
    };
    let (any_cpu, no_group) = (-1, -1);
    // SAFETY: the structure is read, and has the size that it says.
    let counter = unsafe {
        libc::syscall(
            libc::SYS_perf_event_open,
            &raw const attributes,
            task,
            any_cpu,
            no_group,
            PERF_FLAG_FD_CLOEXEC,
        )
    };
    let counter = i32::try_from(Errno::result(counter)?).map_err(io::Error::other)?;
    // SAFETY: the kernel has just returned this descriptor; nobody else owns it.
    Ok(unsafe { OwnedFd::from_raw_fd(counter) })
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    /// A thread counts what it does itself and what its children do.
    #[test]
    fn what_page_tables_do_not_tell_is_counted() {
        let Ok(events) = Events::new() else {
            return assert!(!Path::new(TRACEPOINTS).join("task/task_newtask/id").exists());
        };
        let counters = events.count(&[0]).unwrap();
        let happened = |what: &dyn Fn()| {
            let before = counters.sum().unwrap();
            what();
            counters.sum().unwrap() - before
        };
        let memory = || {
            // SAFETY: a new mapping, which no reference points to.
            let start = unsafe {
                libc::mmap(std::ptr::null_mut(), 8192, 3, libc::MAP_SHARED | libc::MAP_ANONYMOUS, -1, 0)
            };
            assert_ne!(start, libc::MAP_FAILED);
            start
        };
        let (one, two) = (memory(), memory());
        assert_eq!(happened(&|| std::thread::spawn(|| ()).join().unwrap()), 0);
        // SAFETY: the mappings are this test's, and no reference points to them.
        let mapped = happened(&|| unsafe {
            assert_eq!(libc::madvise(one, 8192, libc::MADV_DONTNEED), 0);
            assert_ne!(libc::mremap(one, 8192, 4096, 0), libc::MAP_FAILED);
        });
        assert_eq!(mapped, 0);
        // SAFETY: as above.
        let again = happened(&|| assert_ne!(unsafe { libc::mremap(two, 0, 8192, 1) }, libc::MAP_FAILED));
        assert_eq!(again, 1);
        // SAFETY: as above.
        let removed = happened(&|| assert_eq!(unsafe { libc::madvise(two, 4096, libc::MADV_REMOVE) }, 0));
        assert_eq!(removed, 1);
        // SAFETY: the children make system calls only.
        let forked = happened(&|| unsafe {
            let child = libc::fork();
            if child == 0 {
                let grandchild = libc::fork();
                if grandchild != 0 {
                    libc::waitpid(grandchild, std::ptr::null_mut(), 0);
                }
                libc::_exit(0);
            }
            libc::waitpid(child, std::ptr::null_mut(), 0);
        });
        assert_eq!(forked, 2);
    }
}
