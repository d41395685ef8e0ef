//! CRIU's cache of what the kernel can do, made before it is needed.
//!
//! At each start CRIU probes the kernel: it makes a network namespace with a veth pair, maps vDSOs,
//! tries system calls. That takes 30 to 50 ms, which a dump and a restore both spend in frozen
//! time, unless `/run/criu.kdat` has the answers. CRIU writes that file itself, but only when
//! `/run` is a tmpfs, so that it goes with the kernel that it describes. Where `/run` is on a disk
//! (containers, some test machines) the file is made here, on a tmpfs that stands in for `/run` in
//! a mount namespace of its own, and is marked with the boot that it was made in.

use std::fs;
use std::io::{self, Read};
use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd};
use std::path::Path;
use std::process::Stdio;

use nix::mount::{MsFlags, mount};
use nix::sched::{CloneFlags, unshare};
use nix::sys::statfs::{TMPFS_MAGIC, statfs};
use rustix::fs::{CWD, Mode, OFlags, openat};
use rustix::mount::{
    FsMountFlags, FsOpenFlags, MountAttrFlags, MoveMountFlags, fsconfig_create, fsmount, fsopen, move_mount,
};
use tokio::process::Command;

use crate::{Criu, CriuError};

/// Where CRIU keeps the cache.
const RUN: &str = "/run";
const CACHE: &str = "criu.kdat";
/// The boot in which godwit made the cache.
const MARK: &str = "criu.kdat.boot";

impl Criu {
    /// Sees to it that CRIU finds its cache of the kernel's abilities. Called when the node
    /// starts; costs nothing when the cache is there.
    ///
    /// # Errors
    /// Without the cache everything works, but each dump and restore takes 30 to 50 ms longer.
    pub async fn warm_up(&self) -> Result<(), CriuError> {
        let run = Path::new(RUN);
        let failed = |action, path: &Path| {
            let path = path.to_owned();
            move |source: io::Error| CriuError::File { action, path, source }
        };
        let run_is_tmpfs = statfs(run).is_ok_and(|statistics| statistics.filesystem_type() == TMPFS_MAGIC);
        let cache = run.join(CACHE);
        if run_is_tmpfs {
            // CRIU removes a cache that another build of it made.
            return self.probe(None).await;
        }
        let mark = run.join(MARK);
        let boot = fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default();
        let is_current = !boot.is_empty() && fs::read_to_string(&mark).is_ok_and(|text| text == boot);
        if is_current && is_newer(&cache, self.path()) {
            return Ok(());
        }
        match fs::remove_file(&cache) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => {
                return Err(failed("remove", &cache)(error));
            }
            _ => {}
        }
        let stand_in = stand_in().map_err(failed("make a tmpfs for", run))?;
        self.probe(Some(&stand_in)).await?;
        // In one step: another CRIU may be reading.
        let new = run.join("criu.kdat.new");
        let made = read(&stand_in).map_err(failed("read what CRIU knows of the kernel for", &cache))?;
        fs::write(&new, made).map_err(failed("write", &new))?;
        fs::rename(&new, &cache).map_err(failed("replace", &cache))?;
        fs::write(&mark, boot).map_err(failed("write", &mark))
    }

    /// The same shortly before a restore: costs nothing where a cache is there that is not older than the
    /// binary. A restore of memory that is filled later needs it: with huge pages turned off in the process
    /// that becomes CRIU, a CRIU without our patch `lazy-without-huge-pages` restores right, but when it
    /// looks at the kernel anew it turns them on again (`kerndat_has_thp_disable`).
    ///
    /// # Errors
    /// As [`Criu::warm_up`].
    pub async fn stay_warm(&self) -> Result<(), CriuError> {
        match is_newer(&Path::new(RUN).join(CACHE), self.path()) {
            true => Ok(()),
            false => self.warm_up().await,
        }
    }

    /// Runs `criu check`, which fills the cache first of all; with a filesystem that it sees as
    /// `/run`. What the check finds is not asked here.
    async fn probe(&self, run: Option<&OwnedFd>) -> Result<(), CriuError> {
        let mut command = Command::new(self.path());
        command.arg("check").stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
        if let Some(run) = run {
            let run = run.as_raw_fd();
            let none: Option<&str> = None;
            // SAFETY: between fork and exec only system calls are made, on a descriptor that lives until the
            // program has ended.
            unsafe {
                command.pre_exec(move || {
                    unshare(CloneFlags::CLONE_NEWNS)?;
                    mount(none, "/", none, MsFlags::MS_REC | MsFlags::MS_PRIVATE, none)?;
                    let run = BorrowedFd::borrow_raw(run);
                    move_mount(run, c"", CWD, RUN, MoveMountFlags::MOVE_MOUNT_F_EMPTY_PATH)?;
                    Ok(())
                });
            }
        }
        let ended = command.status().await;
        ended.map(drop).map_err(|source| CriuError::Start { path: self.path().to_owned(), source })
    }
}

/// Whether the cache was made since the binary was put there: another build's is of no use, and CRIU
/// removes it.
fn is_newer(cache: &Path, binary: &Path) -> bool {
    let modified = |path| fs::metadata(path).and_then(|metadata| metadata.modified());
    matches!((modified(cache), modified(binary)), (Ok(cache), Ok(binary)) if cache >= binary)
}

/// A tmpfs that is mounted nowhere: nothing of it is left, however this process ends.
fn stand_in() -> io::Result<OwnedFd> {
    let filesystem = fsopen(c"tmpfs", FsOpenFlags::FSOPEN_CLOEXEC)?;
    fsconfig_create(&filesystem)?;
    let attributes = MountAttrFlags::MOUNT_ATTR_NOSUID
        | MountAttrFlags::MOUNT_ATTR_NODEV
        | MountAttrFlags::MOUNT_ATTR_NOEXEC;
    Ok(fsmount(&filesystem, FsMountFlags::FSMOUNT_CLOEXEC, attributes)?)
}

/// The cache that was made there.
fn read(stand_in: &OwnedFd) -> io::Result<Vec<u8>> {
    let flags = OFlags::RDONLY | OFlags::CLOEXEC | OFlags::NOFOLLOW;
    let mut made = Vec::new();
    fs::File::from(openat(stand_in, CACHE, flags, Mode::empty())?).read_to_end(&mut made)?;
    Ok(made)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn a_cache_from_before_the_binary_is_made_again() {
        let directory = tempfile::tempdir().unwrap();
        let [cache, binary] = ["criu.kdat", "criu"].map(|name| directory.path().join(name));
        fs::write(&binary, "").unwrap();
        assert!(!is_newer(&cache, &binary));
        let file = fs::File::create(&cache).unwrap();
        assert!(is_newer(&cache, &binary));
        file.set_modified(std::time::UNIX_EPOCH).unwrap();
        assert!(!is_newer(&cache, &binary));
    }
}
