//! Segments of System V. The source looks at them through the processes that have attached them. The destination makes them,
//! with the identifiers that they had, in an IPC namespace that CRIU's restore enters.
//!
//! What is done in an IPC namespace is done by a thread that enters it and ends.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd};
use std::ptr;

use nix::errno::Errno;
use nix::sched::{CloneFlags, setns, unshare};

use crate::PAGE_SIZE;
use crate::process::Process;

/// Where an identifier is told to the kernel that the next segment is to have.
const NEXT: &str = "/proc/sys/kernel/shm_next_id";

/// The command of shmctl(2) that asks for [`Info`], from <linux/shm.h>.
const SHM_INFO: libc::c_int = 14;

/// `struct shm_info` of the same header.
#[repr(C)]
#[derive(Default)]
struct Info {
    used: libc::c_int,
    total: libc::c_ulong,
    resident: libc::c_ulong,
    swapped: libc::c_ulong,
    attempts: libc::c_ulong,
    successes: libc::c_ulong,
}

/// What the kernel says of a segment.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Status {
    /// 0 where it has none.
    pub(super) key: u32,
    pub(super) size: u64,
}

/// Of the one that has this identifier for this process; none if there is none.
pub(super) fn status(process: &Process, identifier: u64) -> io::Result<Option<Status>> {
    let Ok(identifier) = i32::try_from(identifier) else { return Ok(None) };
    inside(&process.ipc_namespace()?, || {
        // SAFETY: the structure is one of integers, and the kernel fills it.
        let mut status: libc::shmid_ds = unsafe { std::mem::zeroed() };
        // SAFETY: the pointer is to a structure of this call.
        match Errno::result(unsafe { libc::shmctl(identifier, libc::IPC_STAT, &raw mut status) }) {
            Ok(_) => {
                Ok(Some(Status { key: status.shm_perm.__key.cast_unsigned(), size: status.shm_segsz as u64 }))
            }
            Err(Errno::EINVAL | Errno::EIDRM) => Ok(None),
            Err(errno) => Err(errno.into()),
        }
    })
}

/// What all segments of this process's namespace take of the machine's memory, bytes.
pub(super) fn allocated(process: &Process) -> io::Result<u64> {
    let pages = inside(&process.ipc_namespace()?, || {
        let mut info = Info::default();
        // SAFETY: with this command the kernel writes that structure, whatever shmctl(2) is declared with.
        Errno::result(unsafe { libc::shmctl(0, SHM_INFO, (&raw mut info).cast()) })?;
        Ok(info.resident.saturating_add(info.swapped))
    })?;
    Ok(pages.saturating_mul(PAGE_SIZE))
}

/// An IPC namespace for a service whose processes are still to come. Its segments end with it.
#[derive(Debug)]
pub struct IpcNamespace(File);

impl IpcNamespace {
    /// A new one.
    ///
    /// # Errors
    /// The kernel refuses.
    pub fn new() -> io::Result<Self> {
        let make = || {
            unshare(CloneFlags::CLONE_NEWIPC)?;
            File::open("/proc/thread-self/ns/ipc")
        };
        on_a_thread(make).map(Self)
    }

    /// Makes a segment, which only root can attach, and opens it for reading and writing.
    ///
    /// # Errors
    /// The kernel refuses.
    pub(super) fn create(&self, identifier: u32, key: u32, size: u64) -> io::Result<File> {
        let number = i32::try_from(identifier).map_err(io::Error::other)?;
        let length = usize::try_from(size).map_err(io::Error::other)?;
        inside(&self.0, || {
            std::fs::write(NEXT, number.to_string())?;
            let flags = libc::IPC_CREAT | libc::IPC_EXCL | 0o600;
            // SAFETY: shmget takes three integers.
            let made = Errno::result(unsafe { libc::shmget(key.cast_signed(), length, flags) })?;
            let opened = match made == number {
                true => open(made, size),
                false => Err(io::Error::other("the kernel has given it another identifier")),
            };
            if opened.is_err() {
                remove(made)?;
            }
            opened
        })
    }

    /// Removes a segment.
    ///
    /// # Errors
    /// The kernel refuses.
    pub fn remove(&self, identifier: u32) -> io::Result<()> {
        let number = i32::try_from(identifier).map_err(io::Error::other)?;
        inside(&self.0, || remove(number))
    }

    /// Where other processes of root find it, as long as it is held here.
    #[must_use]
    pub fn path(&self) -> String {
        format!("/proc/{}/fd/{}", std::process::id(), self.0.as_raw_fd())
    }
}

/// A segment as a file, which is attached nowhere.
fn open(number: i32, size: u64) -> io::Result<File> {
    // SAFETY: it is attached at an address of the kernel's choice, where nothing is.
    let attached = unsafe { libc::shmat(number, ptr::null(), 0) };
    if attached.addr() == usize::MAX {
        return Err(io::Error::last_os_error());
    }
    let start = attached.addr() as u64;
    let end = start + size.next_multiple_of(PAGE_SIZE);
    let path = format!("/proc/self/map_files/{start:x}-{end:x}");
    let file = File::options().read(true).write(true).open(path);
    // SAFETY: it was attached there above, and nothing refers to it.
    Errno::result(unsafe { libc::shmdt(attached) })?;
    file
}

fn remove(number: i32) -> io::Result<()> {
    // SAFETY: this command takes no structure.
    Errno::result(unsafe { libc::shmctl(number, libc::IPC_RMID, ptr::null_mut()) })?;
    Ok(())
}

fn inside<T: Send>(namespace: &File, work: impl FnOnce() -> io::Result<T> + Send) -> io::Result<T> {
    on_a_thread(|| {
        setns(namespace.as_fd(), CloneFlags::CLONE_NEWIPC)?;
        work()
    })
}

/// Does it on a thread that ends with it.
fn on_a_thread<T: Send>(work: impl FnOnce() -> io::Result<T> + Send) -> io::Result<T> {
    std::thread::scope(|scope| {
        let thread = std::thread::Builder::new().name("ipc".into()).spawn_scoped(scope, work)?;
        thread.join().unwrap_or_else(|_| Err(io::Error::other("a thread has panicked")))
    })
}
