//! Which backend works on this node, found out by tracking a throw-away child.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};

use nix::errno::Errno;

use super::kernel::{Protect, Scanner};
use super::{Backend, Tracker};
use crate::{PAGE_SIZE, Range};

/// What works on this node.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Detected {
    /// The best backend that works.
    pub backend: Backend,
    /// Why better ones do not, a sentence for each.
    pub reasons: Vec<String>,
}

/// Finds out what works on this node, by tracking a throw-away child: some milliseconds.
pub fn detect() -> Detected {
    let mut reasons = Vec::new();
    let page_size = nix::unistd::sysconf(nix::unistd::SysconfVar::PAGE_SIZE);
    if !matches!(page_size, Ok(Some(4096))) {
        reasons.push(format!(
            "pages of this kernel have {} bytes, and godwit moves pages of {PAGE_SIZE}",
            page_size.ok().flatten().unwrap_or(0)
        ));
        return Detected { backend: Backend::None, reasons };
    }
    for (backend, name) in [(Backend::Uffd, "userfaultfd"), (Backend::SoftDirty, "soft-dirty bits")] {
        match works(backend) {
            Ok(()) => return Detected { backend, reasons },
            Err(reason) => reasons.push(format!("writes cannot be tracked by {name}: {reason}")),
        }
    }
    Detected { backend: Backend::None, reasons }
}

/// Whether this kernel has `PAGEMAP_SCAN` and lets this process use it.
///
/// # Errors
/// What the kernel says when not.
pub fn pagemap_scan() -> io::Result<()> {
    let pagemap = File::open("/proc/self/pagemap")?;
    // Any page will do, whether it is mapped or not.
    let page = PAGE_SIZE..2 * PAGE_SIZE;
    Ok(Scanner::new().scan(pagemap.as_fd(), &page, Protect::No, |_, _| ())?)
}

/// Whether a write to one page of a child is noticed, and none other; the reason when not.
fn works(backend: Backend) -> Result<(), String> {
    let failed = |error: io::Error| format!("cannot make a process to test it on: {error}");
    let child = Child::start().map_err(failed)?;
    let mut tracker = Tracker::new(backend);
    let mut scan = || {
        let round = tracker.round(&[child.pid], false).map_err(|error| error.to_string())?;
        let space = round.spaces.into_iter().next().ok_or("the process that it was tested on has ended")?;
        match space.unwatched {
            Some(reason) => Err(reason),
            None => Ok(space.written),
        }
    };
    let covers = |written: &[Range], page: u64| {
        let address = child.pages + page * PAGE_SIZE;
        written.iter().any(|range| range.contains(&address))
    };
    let first = scan()?;
    if !(0..PAGES).all(|page| covers(&first, page)) {
        return Err("its first scan does not find all pages".to_owned());
    }
    let quiet = scan()?;
    child.write().map_err(failed)?;
    let second = scan()?;
    if !covers(&second, 1) {
        return Err("it does not notice a write".to_owned());
    }
    if covers(&quiet, 1) || covers(&second, 0) || covers(&second, 2) {
        return Err("it counts pages as written that were not".to_owned());
    }
    Ok(())
}

const PAGES: u64 = 3;

/// A child with three pages that writes the middle one when it is told.
struct Child {
    pid: i32,
    /// Where its pages are.
    pages: u64,
    commands: OwnedFd,
    answers: OwnedFd,
}

impl Child {
    fn start() -> io::Result<Self> {
        let (child_commands, commands) = nix::unistd::pipe2(nix::fcntl::OFlag::O_CLOEXEC)?;
        let (answers, child_answers) = nix::unistd::pipe2(nix::fcntl::OFlag::O_CLOEXEC)?;
        let length = usize::try_from(PAGES * PAGE_SIZE).map_err(io::Error::other)?;
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
        // Mapped here, so that the child need not tell where; it gets its own copy.
        // SAFETY: a new mapping, which no reference points to.
        let pages = unsafe {
            libc::mmap(std::ptr::null_mut(), length, libc::PROT_READ | libc::PROT_WRITE, flags, -1, 0)
        };
        if pages == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        let bytes = pages.cast::<u8>();
        // SAFETY: fork in a process with other threads; the child makes nothing but system calls and
        // writes to the mapping.
        let pid = unsafe { libc::fork() };
        if pid == 0 {
            // The other ends stay open here, or the child would not notice the end of the parent.
            // SAFETY: as above; the mapping has three pages, and `byte` is a variable of ours.
            unsafe {
                libc::close(commands.as_raw_fd());
                let mut byte = 0_u8;
                for page in 0..3 {
                    bytes.add(page * 4096).write_volatile(1);
                }
                while libc::write(child_answers.as_raw_fd(), (&raw const byte).cast(), 1) == 1
                    && libc::read(child_commands.as_raw_fd(), (&raw mut byte).cast(), 1) == 1
                {
                    bytes.add(4096).write_volatile(2);
                }
                libc::_exit(0)
            }
        }
        // SAFETY: the mapping was made above and nothing here uses it.
        unsafe { libc::munmap(pages, length) };
        Errno::result(pid)?;
        let child = Self { pid, pages: pages.addr() as u64, commands, answers };
        child.answered()?;
        Ok(child)
    }

    fn answered(&self) -> io::Result<()> {
        match nix::unistd::read(&self.answers, &mut [0])? {
            1 => Ok(()),
            _ => Err(io::ErrorKind::UnexpectedEof.into()),
        }
    }

    fn write(&self) -> io::Result<()> {
        nix::unistd::write(&self.commands, &[1])?;
        self.answered()
    }
}

impl Drop for Child {
    fn drop(&mut self) {
        // SAFETY: the child is ours and not reaped, so the PID is its own; no status is asked for.
        unsafe {
            libc::kill(self.pid, libc::SIGKILL);
            libc::waitpid(self.pid, std::ptr::null_mut(), 0);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_best_backend_is_the_one_that_works() {
        let detected = detect();
        println!("{detected:?}");
        assert_eq!(works(detected.backend).is_ok(), detected.backend != Backend::None);
        assert_eq!(detected.reasons.is_empty(), detected.backend == Backend::Uffd);
        assert!(works(Backend::None).is_err(), "a backend that notices nothing does not pass");
    }
}
