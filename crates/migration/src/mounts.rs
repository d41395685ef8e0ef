//! What is mounted for services and for their moves: root filesystems, and bounded memory for CRIU's images.
//! [`Mounts`] does it: on a node [`SystemMounts`].

use std::io;
use std::path::Path;

use godwit_engine::rootfs::{Overlay, RootfsError};
use godwit_engine::{COMING_TMPFS_BYTES, DefinedTmpfs};
use nix::errno::Errno;
use nix::mount::{MntFlags, MsFlags, mount, umount2};

/// What a node mounts.
pub trait Mounts: Send + Sync {
    /// Mounts the root filesystem of a service.
    fn mount_root(&self, root: &Overlay) -> Result<(), RootfsError>;
    /// Unmounts it, if it is there.
    fn unmount_root(&self, root: &Overlay) -> Result<(), RootfsError>;
    /// Mounts a tmpfs of at most so many bytes.
    fn mount_memory(&self, path: &Path, bytes: u64) -> io::Result<()>;
    /// Mounts a tmpfs of a service that is on its way, as its engine expects it.
    fn mount_tmpfs(&self, path: &Path, defined: &DefinedTmpfs) -> io::Result<()>;
    /// Unmounts all that is mounted there.
    fn unmount_memory(&self, path: &Path) -> io::Result<()>;
}

/// The kernel's mounts.
#[derive(Debug, Clone, Copy)]
pub struct SystemMounts;

impl Mounts for SystemMounts {
    fn mount_root(&self, root: &Overlay) -> Result<(), RootfsError> {
        root.mount().map(drop)
    }

    fn unmount_root(&self, root: &Overlay) -> Result<(), RootfsError> {
        root.unmount().map(drop)
    }

    fn mount_memory(&self, path: &Path, bytes: u64) -> io::Result<()> {
        let options = format!("size={bytes},mode=0700");
        let flags = MsFlags::MS_NOSUID | MsFlags::MS_NODEV | MsFlags::MS_NOEXEC;
        Ok(mount(Some("godwit-images"), path, Some("tmpfs"), flags, Some(options.as_str()))?)
    }

    fn mount_tmpfs(&self, path: &Path, defined: &DefinedTmpfs) -> io::Result<()> {
        let limit = (defined.size_bytes != 0).then(|| format!("size={COMING_TMPFS_BYTES}"));
        let options: Vec<_> = limit.as_deref().into_iter().chain(defined.mode).collect();
        let options = options.join(",");
        // Binding it, CRIU gives it the flags that it had.
        let flags = MsFlags::MS_NOSUID | MsFlags::MS_NODEV;
        Ok(mount(Some(defined.source), path, Some("tmpfs"), flags, Some(options.as_str()))?)
    }

    fn unmount_memory(&self, path: &Path) -> io::Result<()> {
        loop {
            match umount2(path, MntFlags::MNT_DETACH) {
                Ok(()) => {}
                Err(Errno::EINVAL | Errno::ENOENT) => return Ok(()),
                Err(errno) => return Err(errno.into()),
            }
        }
    }
}
