//! Named network namespaces, as `ip netns` keeps them: a bind mount below /run/netns.

use std::{
    fs::{self, File},
    io,
    os::{fd::AsFd, unix::fs::MetadataExt},
    path::Path,
    thread,
};

use nix::{
    mount::{MntFlags, MsFlags, mount, umount2},
    sched::{CloneFlags, setns, unshare},
};

use crate::{
    config::NETNS_ROOT,
    error::{Context, LabError},
    mounts,
};

/// Makes the directory of named namespaces as `ip netns` does: a shared mount on itself, so that a
/// namespace that is unmounted in one mount namespace goes away in the others too.
pub(crate) fn prepare_root() -> Result<(), LabError> {
    fs::create_dir_all(NETNS_ROOT).context("creating", NETNS_ROOT)?;
    let lock = File::open(NETNS_ROOT).context("opening", NETNS_ROOT)?;
    rustix::fs::flock(&lock, rustix::fs::FlockOperation::LockExclusive).context("locking", NETNS_ROOT)?;
    if !mounts::list()?.iter().any(|mount| mount == Path::new(NETNS_ROOT)) {
        let flags = MsFlags::MS_BIND | MsFlags::MS_REC;
        mount(Some(NETNS_ROOT), NETNS_ROOT, None::<&str>, flags, None::<&str>)
            .context("mounting", NETNS_ROOT)?;
    }
    let flags = MsFlags::MS_SHARED | MsFlags::MS_REC;
    mount(None::<&str>, NETNS_ROOT, None::<&str>, flags, None::<&str>).context("sharing mount", NETNS_ROOT)
}

/// Makes a network namespace and mounts it at `path`, which must not exist.
pub(crate) fn create(path: &Path) -> Result<(), LabError> {
    File::create_new(path).context("creating", path.display())?;
    let made = on_thread(|| {
        unshare(CloneFlags::CLONE_NEWNET)?;
        mount(Some("/proc/thread-self/ns/net"), path, None::<&str>, MsFlags::MS_BIND, None::<&str>)?;
        Ok(())
    });
    if made.is_err() {
        // The half-made name; the error that matters is the one above.
        let _ = fs::remove_file(path);
    }
    made.and_then(|inner: io::Result<()>| inner).context("making network namespace", path.display())
}

/// Unmounts and removes a named namespace; also one whose mount is missing.
pub(crate) fn remove(path: &Path) -> Result<(), LabError> {
    loop {
        match umount2(path, MntFlags::MNT_DETACH) {
            Ok(()) => {}
            Err(nix::errno::Errno::EINVAL | nix::errno::Errno::ENOENT) => break,
            Err(error) => return Err(error).context("unmounting", path.display()),
        }
    }
    match fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => {
            Err(error).context("removing", path.display())
        }
        _ => Ok(()),
    }
}

/// Names of all named namespaces.
pub(crate) fn names() -> Vec<String> {
    let Ok(entries) = fs::read_dir(NETNS_ROOT) else { return Vec::new() };
    entries.flatten().filter_map(|entry| entry.file_name().into_string().ok()).collect()
}

/// What tells namespaces apart: device and inode. None when `path` is no namespace file.
pub(crate) fn identity(path: &Path) -> Option<(u64, u64)> {
    let root = fs::metadata("/proc/self/ns/net").ok()?;
    let found = fs::metadata(path).ok()?;
    (found.dev() == root.dev()).then(|| (found.dev(), found.ino()))
}

/// Runs `work` on a thread of its own inside the network namespace at `path`, and waits for it.
///
/// Sockets that `work` makes stay in that namespace wherever they are used.
///
/// # Errors
/// The namespace cannot be entered.
pub fn inside<T: Send>(path: &Path, work: impl FnOnce() -> T + Send) -> Result<T, LabError> {
    let namespace = File::open(path).context("opening network namespace", path.display())?;
    on_thread(move || {
        setns(namespace.as_fd(), CloneFlags::CLONE_NEWNET)?;
        Ok(work())
    })
    .and_then(|inner: io::Result<T>| inner)
    .context("entering network namespace", path.display())
}

pub(crate) fn on_thread<T: Send>(work: impl FnOnce() -> T + Send) -> io::Result<T> {
    thread::scope(|scope| {
        let thread = thread::Builder::new().name("in-netns".to_owned()).spawn_scoped(scope, work)?;
        match thread.join() {
            Ok(value) => Ok(value),
            Err(panic) => std::panic::resume_unwind(panic),
        }
    })
}
