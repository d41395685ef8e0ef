//! What is mounted in a container, and its root directory: those of its mount namespace. `/proc/PID/root` and
//! `/proc/PID/mountinfo` show what is below the root of one process, which may be another by chroot(2).

use std::fs::File;
use std::io::{self, Read};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use nix::sched::{CloneFlags, setns, unshare};
use rustix::fs::{FileType, Mode, OFlags, ResolveFlags, fstat, open, openat, openat2};

/// The mount namespace of a process.
#[derive(Debug)]
pub struct MountNamespace {
    root: OwnedFd,
    mountinfo: String,
}

impl MountNamespace {
    /// That of the process with this PID.
    ///
    /// # Errors
    /// It has ended.
    pub fn of(pid: u32) -> io::Result<Self> {
        let namespace = File::open(format!("/proc/{pid}/ns/mnt"))?;
        // A thread of its own is in that namespace, and ends with it.
        let looking = std::thread::Builder::new().name("mounts".into()).spawn(move || {
            // The container's own /proc may be anything.
            let thread = open("/proc/thread-self", OFlags::PATH | OFlags::CLOEXEC, Mode::empty())?;
            unshare(CloneFlags::CLONE_FS)?;
            setns(namespace, CloneFlags::CLONE_NEWNS)?;
            let root = open("/", OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty())?;
            let mut mountinfo = Vec::new();
            File::from(openat(thread, "mountinfo", OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty())?)
                .read_to_end(&mut mountinfo)?;
            Ok(Self { root, mountinfo: String::from_utf8_lossy(&mountinfo).into_owned() })
        })?;
        looking.join().map_err(|_| io::Error::other("a thread has failed"))?
    }

    /// The mounts, in the format of `/proc/PID/mountinfo`.
    pub(crate) fn mountinfo(&self) -> &str {
        &self.mountinfo
    }

    /// Whether something other than a directory is at this path, which is absolute.
    pub(crate) fn has_file(&self, path: &str) -> bool {
        let how = ResolveFlags::IN_ROOT | ResolveFlags::NO_MAGICLINKS;
        let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let found = openat2(&self.root, path, flags, Mode::empty(), how).and_then(fstat);
        found.is_ok_and(|found| FileType::from_raw_mode(found.st_mode) != FileType::Directory)
    }

    /// The root directory.
    pub(crate) fn into_root(self) -> OwnedFd {
        self.root
    }
}

/// Its root directory.
impl AsFd for MountNamespace {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.root.as_fd()
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::fs;
    use std::os::unix::process::CommandExt;
    use std::process::{Command, Stdio};

    use nix::mount::{MsFlags, mount};

    use super::*;

    #[test]
    fn a_process_with_another_root_hides_nothing() {
        let scratch = tempfile::tempdir().unwrap();
        let (jail, mounted) = (scratch.path().join("jail"), scratch.path().join("mounted"));
        [&jail, &mounted].into_iter().for_each(|path| fs::create_dir(path).unwrap());
        let mut command = Command::new("perl");
        command.arg("-e").arg("chroot $ARGV[0] or die; print qq(x\\n); close STDOUT; <STDIN>").arg(&jail);
        command.stdin(Stdio::piped()).stdout(Stdio::piped());
        let place = mounted.clone();
        let own = move || {
            unshare(CloneFlags::CLONE_NEWNS)?;
            mount(None::<&str>, "/", None::<&str>, MsFlags::MS_REC | MsFlags::MS_PRIVATE, None::<&str>)?;
            Ok(mount(Some("none"), &place, Some("tmpfs"), MsFlags::empty(), None::<&str>)?)
        };
        // SAFETY: it allocates, in a process whose one thread is a copy of this one, which holds no lock.
        unsafe { command.pre_exec(own) };
        let mut process = command.spawn().unwrap();
        let mut said = String::new();
        process.stdout.take().unwrap().read_to_string(&mut said).unwrap();
        assert_eq!(said, "x\n");
        let found = MountNamespace::of(process.id());
        // What is mounted goes with the last process.
        let path = mounted.strip_prefix("/").unwrap();
        let there =
            found.as_ref().ok().map(|found| openat(found, path, OFlags::PATH, Mode::empty()).unwrap());
        let shown = fs::read_to_string(format!("/proc/{}/mountinfo", process.id())).unwrap();
        drop(process.stdin.take());
        process.wait().unwrap();
        let found = found.unwrap();
        let line = format!(" {} ", mounted.display());
        assert!(!shown.contains(&line) && found.mountinfo().contains(&line), "{shown}{found:?}");
        assert_ne!(fstat(there.unwrap()).unwrap().st_dev, rustix::fs::stat(&mounted).unwrap().st_dev);
        assert!(MountNamespace::of(process.id()).is_err(), "it has ended");
    }
}
