//! Network namespaces kept alive by a mount, as `ip netns` does it.

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::thread;

use nix::errno::Errno;
use nix::mount::{MntFlags, MsFlags, mount, umount2};
use nix::sched::{CloneFlags, setns, unshare};
use nix::sys::statfs::{NSFS_MAGIC, statfs};

use crate::NetworkError;

/// What is at the place of a namespace.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Found {
    Nothing,
    /// A mounted namespace.
    Namespace,
    /// An empty file: a mount that was not made, or that is gone.
    EmptyFile,
    /// Anything else: not ours.
    Other,
}

/// Finds what is at the place of a namespace.
pub(crate) fn inspect(path: &Path) -> Result<Found, NetworkError> {
    let failed = |e: io::Error| NetworkError::system(format!("examine {}", path.display()))(e);
    let metadata = match path.symlink_metadata() {
        Ok(metadata) => metadata,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Found::Nothing),
        Err(error) => return Err(failed(error)),
    };
    let kind = metadata.file_type();
    if kind.is_dir() || kind.is_symlink() || kind.is_fifo() || kind.is_socket() || kind.is_block_device() {
        return Ok(Found::Other);
    }
    let filesystem = match statfs(path) {
        Ok(found) => found.filesystem_type(),
        // It was removed since.
        Err(Errno::ENOENT) => return Ok(Found::Nothing),
        Err(errno) => return Err(failed(errno.into())),
    };
    Ok(match filesystem {
        NSFS_MAGIC => Found::Namespace,
        _ if kind.is_file() && metadata.len() == 0 => Found::EmptyFile,
        _ => Found::Other,
    })
}

/// Makes a network namespace and mounts it at `path`. Interfaces made in it have no IPv6 (its
/// loopback has), so that no router advertisement and no address detection disturbs a move.
pub(crate) async fn create(path: &Path) -> Result<(), NetworkError> {
    if let Some(directory) = path.parent() {
        std::fs::create_dir_all(directory)
            .map_err(NetworkError::system(format!("make the directory {}", directory.display())))?;
    }
    File::create(path).map_err(NetworkError::system(format!("make the file {}", path.display())))?;
    let target = path.to_owned();
    let made = on_thread("godwit-netns", move || -> Result<(), NetworkError> {
        unshare(CloneFlags::CLONE_NEWNET)
            .map_err(|errno| NetworkError::system("make a network namespace")(errno.into()))?;
        set_sysctl("ipv6/conf/default/disable_ipv6", "1")?;
        mount(Some("/proc/thread-self/ns/net"), &target, None::<&str>, MsFlags::MS_BIND, None::<&str>)
            .map_err(|errno| {
                NetworkError::system(format!("mount a network namespace at {}", target.display()))(
                    errno.into(),
                )
            })
    });
    let result = made.await.and_then(|inner| inner);
    if result.is_err() {
        // The file is of no use without its mount; the error above tells what happened.
        let _ = std::fs::remove_file(path);
    }
    result
}

/// Mounts the network namespace of a process at `path`, in place of what is there, and says so; nothing happens where it is that. Interfaces
/// made in it from here on have no IPv6, as in one that godwit makes.
///
/// # Errors
/// When the process is gone, has this node's own namespace, or something else lies there.
pub async fn join(path: &Path, pid: u32) -> Result<bool, NetworkError> {
    // The process may end meanwhile, and its PID be another's.
    let opened = File::open(format!("/proc/{pid}/ns/net"));
    let opened =
        opened.map_err(NetworkError::system(format!("open the network namespace of process {pid}")))?;
    let own = PathBuf::from(format!("/proc/self/fd/{}", opened.as_raw_fd()));
    let identity = |path: &Path| {
        let metadata = std::fs::metadata(path);
        metadata
            .map(|m| (m.dev(), m.ino()))
            .map_err(NetworkError::system(format!("examine {}", path.display())))
    };
    if inspect(path)? == Found::Namespace && identity(path)? == identity(&own)? {
        return Ok(false);
    }
    if identity(Path::new("/proc/self/ns/net"))? == identity(&own)? {
        let failed = NetworkError::system(format!("use the network namespace of process {pid}"));
        return Err(failed(io::Error::other("it is the node's own")));
    }
    remove(path)?;
    if let Some(directory) = path.parent() {
        std::fs::create_dir_all(directory)
            .map_err(NetworkError::system(format!("make the directory {}", directory.display())))?;
    }
    File::create(path).map_err(NetworkError::system(format!("make the file {}", path.display())))?;
    let mounted = mount(Some(&own), path, None::<&str>, MsFlags::MS_BIND, None::<&str>);
    if let Err(errno) = mounted {
        // The file is of no use without its mount.
        let _ = std::fs::remove_file(path);
        let failed = NetworkError::system(format!("mount the network namespace of process {pid}"));
        return Err(failed(errno.into()));
    }
    enter(path, || set_sysctl("ipv6/conf/default/disable_ipv6", "1")).await??;
    Ok(true)
}

/// Unmounts a namespace and removes its file; no error when it is gone already. The namespace
/// itself ends with its last process.
pub(crate) fn remove(path: &Path) -> Result<(), NetworkError> {
    // More than one mount can lie there if a daemon was killed at the wrong moment.
    while inspect(path)? == Found::Namespace {
        umount2(path, MntFlags::MNT_DETACH).map_err(|errno| {
            NetworkError::system(format!("unmount the network namespace {}", path.display()))(errno.into())
        })?;
    }
    if inspect(path)? == Found::EmptyFile {
        std::fs::remove_file(path).map_err(NetworkError::system(format!("remove {}", path.display())))?;
    }
    Ok(())
}

/// Runs `f` on a thread that has entered the network namespace at `netns`, and returns what it
/// returns. The thread ends with it.
///
/// # Errors
/// When the namespace cannot be opened or entered.
pub async fn enter<T, F>(netns: &Path, f: F) -> Result<T, NetworkError>
where
    T: Send + 'static,
    F: FnOnce() -> T + Send + 'static,
{
    let netns = netns.to_owned();
    on_thread("godwit-enter", move || join_namespace(&netns).map(|()| f())).await.and_then(|inner| inner)
}

/// As [`enter`], for callers without a runtime: blocks until `f` is done.
///
/// # Errors
/// As [`enter`].
///
/// # Panics
/// When `f` panics.
pub fn enter_blocking<T, F>(netns: &Path, f: F) -> Result<T, NetworkError>
where
    T: Send,
    F: FnOnce() -> T + Send,
{
    thread::scope(|scope| {
        let worker = scope.spawn(|| join_namespace(netns).map(|()| f()));
        worker.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
    })
}

fn join_namespace(netns: &Path) -> Result<(), NetworkError> {
    let name = || format!("enter the network namespace {}", netns.display());
    let file = File::open(netns).map_err(|error| NetworkError::system(name())(error))?;
    setns(file, CloneFlags::CLONE_NEWNET).map_err(|errno| NetworkError::system(name())(errno.into()))
}

/// Runs `f` on a thread that nobody else uses, as it may leave it in another namespace.
pub(crate) async fn on_thread<T: Send + 'static>(
    name: &str,
    f: impl FnOnce() -> T + Send + 'static,
) -> Result<T, NetworkError> {
    let (sender, receiver) = tokio::sync::oneshot::channel();
    thread::Builder::new()
        .name(name.to_owned())
        .spawn(move || {
            // The receiver is only gone when the caller no longer wants the answer.
            let _ = sender.send(f());
        })
        .map_err(NetworkError::system("start a thread"))?;
    receiver.await.map_err(|_| {
        NetworkError::system("work in a network namespace")(io::Error::other("the thread there panicked"))
    })
}

/// Writes a setting below `/proc/sys/net` of the calling thread's network namespace, unless it has
/// the value already. A setting of a protocol that the kernel lacks is left alone.
pub(crate) fn set_sysctl(name: &str, value: &str) -> Result<(), NetworkError> {
    let path = PathBuf::from("/proc/sys/net").join(name);
    match std::fs::read_to_string(&path) {
        Ok(current) if current.trim() == value => return Ok(()),
        Ok(_) => {}
        Err(error) if error.kind() == io::ErrorKind::NotFound && name.starts_with("ipv6/") => return Ok(()),
        Err(error) => return Err(NetworkError::system(format!("read {}", path.display()))(error)),
    }
    std::fs::write(&path, value).map_err(NetworkError::system(format!("set {} to {value}", path.display())))
}
