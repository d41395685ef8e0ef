//! Covers files of a container's `/proc` that show the node.
//!
//! The engine runs this as a hook in the mount namespace of a container that is being made, when its `/proc`
//! is mounted and no program of its own has run. What it binds is gone with the namespace.

use std::ffi::OsString;
use std::path::Path;

use nix::errno::Errno;
use nix::fcntl::{OFlag, open};
use nix::mount::{MsFlags, mount};
use nix::sys::stat::{Mode, SFlag, fstat};
use nix::sys::statfs::{PROC_SUPER_MAGIC, fstatfs};

/// Binds the empty file read-only over each of these paths below the root; passes over those that this
/// kernel does not have.
pub(crate) fn cover(empty: &Path, root: &Path, paths: &[OsString]) -> Result<(), String> {
    for path in paths {
        let path = Path::new(path);
        let target = root.join(path.strip_prefix("/").unwrap_or(path));
        let failed = |what: &str, errno: Errno| {
            format!("cannot cover {}: {what} {}: {}", path.display(), target.display(), errno.desc())
        };
        let opened = match open(&target, OFlag::O_PATH | OFlag::O_NOFOLLOW | OFlag::O_CLOEXEC, Mode::empty())
        {
            Err(Errno::ENOENT) => continue,
            opened => opened.map_err(|errno| failed("opening", errno))?,
        };
        // Another file system is one that the user put there, with nothing of the node's in it.
        let is_proc = fstatfs(&opened).map_err(|errno| failed("looking at", errno))?.filesystem_type()
            == PROC_SUPER_MAGIC;
        let kind =
            SFlag::from_bits_truncate(fstat(&opened).map_err(|errno| failed("looking at", errno))?.st_mode);
        if !is_proc || kind & SFlag::S_IFMT != SFlag::S_IFREG {
            continue;
        }
        mount(Some(empty), &target, None::<&str>, MsFlags::MS_BIND, None::<&str>)
            .map_err(|errno| failed("mounting at", errno))?;
        let flags = MsFlags::MS_BIND
            | MsFlags::MS_REMOUNT
            | MsFlags::MS_RDONLY
            | MsFlags::MS_NOSUID
            | MsFlags::MS_NODEV
            | MsFlags::MS_NOEXEC;
        mount(None::<&str>, &target, None::<&str>, flags, None::<&str>)
            .map_err(|errno| failed("making read-only", errno))?;
    }
    Ok(())
}
