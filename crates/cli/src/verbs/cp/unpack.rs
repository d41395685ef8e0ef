//! An archive into files of this machine.
//!
//! The destination may be a directory that a service can write to: a bind mount, or a volume. Nothing of it is reached by
//! a path, but from the open directory that the user has named, and by no link. A file appears whole, or not at all.

use std::{
    fs::File,
    io::{self, Read, Write},
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    path::{Component, Path, PathBuf},
    process,
};

use anyhow::{Context as _, bail};
use rustix::{
    fs::{self, AtFlags, Gid, Mode, OFlags, ResolveFlags, Timespec, Timestamps, Uid},
    io::Errno,
};

use super::pieces::Incoming;

/// The permission bits that are given without --archive, less those that the user's umask(2) withholds.
const PERMISSIONS: u32 = 0o777;

/// Passes an archive on to standard output.
pub(super) fn write_out(mut archive: Incoming) -> anyhow::Result<()> {
    let mut out = io::stdout().lock();
    io::copy(&mut archive, &mut out)?;
    Ok(out.flush()?)
}

/// Writes what an archive has to a path: into the directory that is there; else the only name at the archive's top becomes
/// the path's. With `contents` the path is a directory, which is made where it is not there.
pub(crate) fn unpack(archive: impl Read, to: &Path, contents: bool, keep_owners: bool) -> anyhow::Result<()> {
    let mut archive = tar::Archive::new(archive);
    let mut destination: Option<Destination> = None;
    for entry in archive.entries()? {
        let mut entry = entry.context("the archive is damaged")?;
        if destination.is_none() {
            // Nothing is made where nothing comes.
            destination = Some(Destination::open(to, contents, keep_owners)?);
        }
        if let Some(destination) = &mut destination {
            destination.take(&mut entry)?;
        }
    }
    match destination {
        Some(mut destination) => destination.leave(Path::new("")),
        None if contents => Destination::open(to, contents, keep_owners).map(drop),
        None => bail!("there is nothing to copy"),
    }
}

/// A directory that was made, and what it gets when everything is in it.
struct Open {
    path: PathBuf,
    directory: OwnedFd,
    mode: u32,
    times: Timestamps,
}

struct Destination {
    /// The directory.
    within: OwnedFd,
    /// What the archive's only top is called.
    rename: Option<PathBuf>,
    /// For messages.
    shown: PathBuf,
    keep_owners: bool,
    umask: u32,
    /// Directories that were made and that the archive has not left.
    open: Vec<Open>,
}

impl Destination {
    fn open(to: &Path, contents: bool, keep_owners: bool) -> anyhow::Result<Self> {
        if contents && !to.exists() {
            std::fs::create_dir(to).with_context(|| format!("cannot make the directory {}", to.display()))?;
        }
        let into = to.is_dir();
        if !into && (contents || to.to_string_lossy().ends_with('/')) {
            bail!("{} is not a directory", to.display());
        }
        // A device or a FIFO is not to be replaced, nor a link to one, as /dev/stdout is.
        if std::fs::metadata(to).is_ok_and(|found| !found.is_dir() && !found.is_file()) {
            bail!("{} is neither a file nor a directory; `-` is standard output", to.display());
        }
        let (directory, rename) = match (into, to.file_name(), to.parent()) {
            (true, ..) => (to, None),
            (false, Some(name), Some(parent)) => (parent, Some(PathBuf::from(name))),
            _ => bail!("{} names no file", to.display()),
        };
        let directory = if directory.as_os_str().is_empty() { Path::new(".") } else { directory };
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let within = fs::open(directory, flags, Mode::empty());
        let within = within.with_context(|| format!("there is no directory {}", directory.display()))?;
        let umask = process_umask();
        Ok(Self { within, rename, shown: directory.to_owned(), keep_owners, umask, open: Vec::new() })
    }

    /// Where a member goes: its path within the directory.
    fn place(&self, member: &Path) -> anyhow::Result<PathBuf> {
        let mut place = PathBuf::new();
        for part in member.components() {
            match part {
                Component::Normal(_) if place.as_os_str().is_empty() && self.rename.is_some() => {
                    place.extend(&self.rename);
                }
                Component::Normal(part) => place.push(part),
                Component::CurDir => {}
                _ => bail!("the archive has {}, which leads out of it", member.display()),
            }
        }
        if place.as_os_str().is_empty() {
            bail!("the archive has a member without a name");
        }
        Ok(place)
    }

    fn parent(&self, place: &Path) -> anyhow::Result<OwnedFd> {
        let parent = place.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."));
        let resolve = ResolveFlags::BENEATH | ResolveFlags::NO_SYMLINKS;
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
        match fs::openat2(&self.within, parent, flags, Mode::empty(), resolve) {
            Ok(parent) => Ok(parent),
            Err(Errno::LOOP | Errno::XDEV) => {
                bail!("{} is reached by a link, which is not followed", self.shown.join(place).display())
            }
            Err(errno) => {
                let shown = self.shown.join(parent);
                Err(errno).with_context(|| format!("there is no directory {}", shown.display()))
            }
        }
    }

    fn take<R: Read>(&mut self, entry: &mut tar::Entry<'_, R>) -> anyhow::Result<()> {
        let place = self.place(&entry.path()?)?;
        self.leave(&place)?;
        let parent = self.parent(&place)?;
        let Some(name) = place.file_name() else { bail!("the archive has a member without a name") };
        let shown = self.shown.join(&place);
        let failed = || format!("cannot write {}", shown.display());
        let header = entry.header();
        let mtime = Timespec { tv_sec: i64::try_from(header.mtime()?).unwrap_or(0), tv_nsec: 0 };
        let times = Timestamps { last_access: mtime, last_modification: mtime };
        let mode = match self.keep_owners {
            true => header.mode()? & 0o7777,
            false => header.mode()? & PERMISSIONS & !self.umask,
        };
        let kind = header.entry_type();
        if kind.is_dir() {
            match fs::mkdirat(&parent, name, Mode::RWXU) {
                Ok(()) => {}
                Err(Errno::EXIST) => {
                    // One that is there stays as it is.
                    return open_directory(parent.as_fd(), Path::new(name)).map(drop).with_context(failed);
                }
                Err(errno) => return Err(errno).with_context(failed),
            }
            let directory = open_directory(parent.as_fd(), Path::new(name)).with_context(failed)?;
            self.own(directory.as_fd(), entry).with_context(failed)?;
            self.open.push(Open { path: place, directory, mode, times });
        } else if kind.is_file() {
            let temporary = Temporary::new(parent.as_fd());
            let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::CLOEXEC;
            let file = fs::openat(&parent, &temporary.name, flags, Mode::RUSR | Mode::WUSR);
            let mut file = File::from(file.with_context(failed)?);
            let size = entry.size();
            let copied = io::copy(entry, &mut file).with_context(failed)?;
            if copied != size {
                bail!("the archive ends in {}", shown.display());
            }
            self.own(file.as_fd(), entry).with_context(failed)?;
            fs::fchmod(&file, Mode::from_raw_mode(mode)).with_context(failed)?;
            fs::futimens(&file, &times).with_context(failed)?;
            temporary.rename(Path::new(name)).with_context(failed)?;
        } else if kind.is_symlink() {
            let target = entry.link_name()?.context("the archive has a link to nothing")?;
            let temporary = Temporary::new(parent.as_fd());
            fs::symlinkat(&*target, &parent, &temporary.name).with_context(failed)?;
            temporary.rename(Path::new(name)).with_context(failed)?;
        }
        Ok(())
    }

    /// Gives what was made the owner that the archive has, if owners are kept.
    fn own<R: Read>(&self, made: BorrowedFd<'_>, entry: &tar::Entry<'_, R>) -> io::Result<()> {
        if !self.keep_owners {
            return Ok(());
        }
        let id = |id: u64| u32::try_from(id).ok().filter(|id| *id != u32::MAX).ok_or(Errno::OVERFLOW);
        let (uid, gid) = (id(entry.header().uid()?)?, id(entry.header().gid()?)?);
        Ok(fs::fchown(made, Some(Uid::from_raw(uid)), Some(Gid::from_raw(gid)))?)
    }

    /// Gives directories their modes and times that the archive has left when it comes to this path; all, for the empty one.
    fn leave(&mut self, path: &Path) -> anyhow::Result<()> {
        while let Some(open) = self.open.pop_if(|open| !path.starts_with(&open.path)) {
            let failed = || format!("cannot write {}", self.shown.join(&open.path).display());
            fs::fchmod(&open.directory, Mode::from_raw_mode(open.mode)).with_context(failed)?;
            fs::futimens(&open.directory, &open.times).with_context(failed)?;
        }
        Ok(())
    }
}

fn open_directory(parent: BorrowedFd<'_>, name: &Path) -> io::Result<OwnedFd> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    Ok(fs::openat(parent, name, flags, Mode::empty())?)
}

/// The mask of file modes, which can only be read by setting it.
fn process_umask() -> u32 {
    let mask = rustix::process::umask(Mode::from_raw_mode(0o077));
    rustix::process::umask(mask);
    mask.as_raw_mode()
}

/// What is made under another name, which goes unless it is renamed.
struct Temporary<'a> {
    parent: BorrowedFd<'a>,
    name: PathBuf,
}

impl<'a> Temporary<'a> {
    fn new(parent: BorrowedFd<'a>) -> Self {
        use std::sync::atomic::{AtomicU64, Ordering};
        static NUMBER: AtomicU64 = AtomicU64::new(0);
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        Self { parent, name: format!(".godwit-{}-{number}", process::id()).into() }
    }

    fn rename(self, name: &Path) -> io::Result<()> {
        Ok(fs::renameat(self.parent, &self.name, self.parent, name)?)
    }
}

impl Drop for Temporary<'_> {
    fn drop(&mut self) {
        // Where it was renamed there is nothing; the error that brings another here is the one to tell.
        let _ = fs::unlinkat(self.parent, &self.name, AtFlags::empty());
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests;
