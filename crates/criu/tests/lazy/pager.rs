//! The least that can serve the faults of a lazy restore: one thread, one page at a time. The engine's
//! tests use it too.

use std::collections::BTreeMap;
use std::io::{self, Read};
use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::thread::JoinHandle;

use nix::poll::{PollFd, PollFlags, PollTimeout, poll};

const PAGE: usize = 4096;

/// Contents by PID, inside the PID namespace, and address; what is missing is zero.
pub(crate) type Pages = BTreeMap<(u32, u64), Vec<u8>>;

const UFFDIO_COPY: libc::c_ulong = 0xc028_aa03;
const UFFDIO_ZEROPAGE: libc::c_ulong = 0xc020_aa04;
const EVENT_PAGEFAULT: u8 = 0x12;
const EVENT_FORK: u8 = 0x13;
/// What CRIU says after the last process: no PID.
const FINISHED: u32 = 0x5253_5446;

pub(crate) struct Pager {
    stop: UnixStream,
    thread: JoinHandle<usize>,
}

impl Pager {
    /// Listens in CRIU's work directory.
    pub(crate) fn start(work: &Path, pages: Pages) -> Self {
        let listener = UnixListener::bind(work.join("lazy-pages.socket")).unwrap();
        let (stop, stopped) = UnixStream::pair().unwrap();
        Self { stop, thread: std::thread::spawn(move || serve(&listener, &stopped, &pages)) }
    }

    /// How many faults were served.
    pub(crate) fn stop(self) -> usize {
        drop(self.stop);
        self.thread.join().unwrap()
    }
}

fn serve(listener: &UnixListener, stopped: &UnixStream, pages: &Pages) -> usize {
    let mut socket: Option<UnixStream> = None;
    let mut processes: Vec<(u32, OwnedFd)> = Vec::new();
    let mut faults = 0;
    // Not to be filled before the event has been read that stands in the way.
    let mut waiting: Vec<(u32, RawFd, u64)> = Vec::new();
    loop {
        let mut sources = vec![stopped.as_fd(), socket.as_ref().map_or(listener.as_fd(), AsFd::as_fd)];
        sources.extend(processes.iter().map(|(_, fd)| fd.as_fd()));
        let mut polled: Vec<_> = sources.into_iter().map(|fd| PollFd::new(fd, PollFlags::POLLIN)).collect();
        let timeout = if waiting.is_empty() { PollTimeout::NONE } else { PollTimeout::ZERO };
        poll(&mut polled, timeout).unwrap();
        let ready: Vec<bool> = polled.iter().map(|fd| fd.any().unwrap()).collect();
        if ready[0] {
            return faults;
        }
        let mut forked = Vec::new();
        for ((pid, uffd), _) in processes.iter().zip(&ready[2..]).filter(|(_, ready)| **ready) {
            let mut message = [0_u8; 32];
            // SAFETY: the buffer has the length that is told.
            let length = unsafe { libc::read(uffd.as_raw_fd(), message.as_mut_ptr().cast(), 32) };
            if length != 32 {
                continue;
            }
            let word = |at: usize| u64::from_ne_bytes(message[at..at + 8].try_into().unwrap());
            match message[0] {
                EVENT_PAGEFAULT => {
                    faults += 1;
                    waiting.push((*pid, uffd.as_raw_fd(), word(16) & !(PAGE as u64 - 1)));
                }
                EVENT_FORK => {
                    let fd = i32::from_ne_bytes(message[8..12].try_into().unwrap());
                    // SAFETY: the kernel made it for the reader of the event.
                    forked.push((*pid, unsafe { OwnedFd::from_raw_fd(fd) }));
                }
                _ => {}
            }
        }
        processes.extend(forked);
        waiting.retain(|&(pid, uffd, address)| !fill(uffd, address, pages.get(&(pid, address))));
        match &mut socket {
            None if ready[1] => socket = Some(listener.accept().unwrap().0),
            Some(criu) if ready[1] => match receive(criu) {
                Some(process) => processes.push(process),
                None => {
                    // The listener takes its place and is not heard again.
                    socket = None;
                }
            },
            _ => {}
        }
    }
}

/// A process and its userfaultfd; none when CRIU has no more.
fn receive(criu: &mut UnixStream) -> Option<(u32, OwnedFd)> {
    loop {
        let mut word = [0; 4];
        criu.read_exact(&mut word).ok()?;
        let pid = i32::from_ne_bytes(word);
        if pid.cast_unsigned() == FINISHED {
            return None;
        }
        // A zombie has no memory.
        if pid < 0 {
            continue;
        }
        use nix::sys::socket::{ControlMessageOwned, MsgFlags, recvmsg};
        let mut byte = [0];
        let mut space = nix::cmsg_space!(RawFd);
        let mut parts = [io::IoSliceMut::new(&mut byte)];
        let message =
            recvmsg::<()>(criu.as_raw_fd(), &mut parts, Some(&mut space), MsgFlags::empty()).unwrap();
        let descriptors = message.cmsgs().unwrap().find_map(|part| match part {
            ControlMessageOwned::ScmRights(descriptors) => Some(descriptors),
            _ => None,
        });
        // SAFETY: it was just received and is nobody else's.
        return Some((pid.cast_unsigned(), unsafe { OwnedFd::from_raw_fd(descriptors.unwrap()[0]) }));
    }
}

/// Fills a page in; false when the process is just changing its areas and the event that tells of it
/// has not been read.
fn fill(uffd: RawFd, address: u64, contents: Option<&Vec<u8>>) -> bool {
    let page = PAGE as u64;
    // struct uffdio_copy: dst, src, len, mode, copy; struct uffdio_zeropage: start, len, mode, zeropage.
    let result = match contents {
        Some(bytes) => {
            let mut copy = [address, bytes.as_ptr() as u64, page, 0, 0];
            // SAFETY: the argument is the structure of this request, the source a whole page.
            unsafe { libc::ioctl(uffd, UFFDIO_COPY, copy.as_mut_ptr()) }
        }
        None => {
            let mut zero = [address, page, 0, 0];
            // SAFETY: as above.
            unsafe { libc::ioctl(uffd, UFFDIO_ZEROPAGE, zero.as_mut_ptr()) }
        }
    };
    let error = io::Error::last_os_error();
    match error.raw_os_error() {
        _ if result == 0 => true,
        Some(libc::EAGAIN) => false,
        // Two threads can miss one page; an area and a process can be gone.
        Some(libc::EEXIST | libc::ESRCH | libc::ENOENT) => true,
        _ => panic!("{address:#x}: {error}"),
    }
}
