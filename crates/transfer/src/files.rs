//! Small files that are either whole and on the disk, or not there at all.
//!
//! A file is written beside its place under a temporary name, with its mode from the start (a key
//! is never readable by others, not even for an instant), synced, moved into place, and the
//! directory is synced.

use std::fs::{self, DirBuilder, File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};

/// Readable and writable by the owner alone: private keys.
pub(crate) const PRIVATE: u32 = 0o600;
/// Readable by everybody: certificates.
pub(crate) const PUBLIC: u32 = 0o644;

/// Makes `dir` and its parents; what is made is for the owner alone.
pub(crate) fn make_private_dir(dir: &Path) -> io::Result<()> {
    DirBuilder::new().recursive(true).mode(0o700).create(dir)
}

/// Writes a file that must not exist yet; [`io::ErrorKind::AlreadyExists`] if it does.
pub(crate) fn write_new(path: &Path, contents: &[u8], mode: u32) -> io::Result<()> {
    write(path, contents, mode, rustix::fs::RenameFlags::NOREPLACE)
}

/// Writes a file in place of the one that may be there.
pub(crate) fn replace(path: &Path, contents: &[u8], mode: u32) -> io::Result<()> {
    write(path, contents, mode, rustix::fs::RenameFlags::empty())
}

fn write(path: &Path, contents: &[u8], mode: u32, flags: rustix::fs::RenameFlags) -> io::Result<()> {
    let (dir, temporary) = beside(path)?;
    let written = write_temporary(&temporary, contents, mode).and_then(|()| {
        let cwd = rustix::fs::CWD;
        rustix::fs::renameat_with(cwd, &temporary, cwd, path, flags).map_err(io::Error::from)
    });
    if let Err(error) = written {
        // The error that matters is the first one; the leftover is ours and has a name of its own.
        let _ = fs::remove_file(&temporary);
        return Err(error);
    }
    File::open(dir)?.sync_all()
}

fn write_temporary(path: &Path, contents: &[u8], mode: u32) -> io::Result<()> {
    let mut file = OpenOptions::new().write(true).create_new(true).mode(mode).open(path)?;
    file.set_permissions(fs::Permissions::from_mode(mode))?; // whatever the umask is
    file.write_all(contents)?;
    file.sync_all()
}

/// The directory of `path`, and a name in it that no other writer uses.
fn beside(path: &Path) -> io::Result<(&Path, PathBuf)> {
    let (Some(dir), Some(name)) = (path.parent(), path.file_name()) else {
        return Err(io::Error::from(io::ErrorKind::InvalidInput));
    };
    let mut random = [0; 8];
    crate::cryptography::fill_random(&mut random)?;
    let mut temporary = std::ffi::OsString::from(".");
    temporary.push(name);
    temporary.push(format!(".{:016x}", u64::from_be_bytes(random)));
    let dir = if dir.as_os_str().is_empty() { Path::new(".") } else { dir };
    Ok((dir, dir.join(temporary)))
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn a_new_file_never_replaces_one_and_leaves_no_leftover() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("file");
        write_new(&path, b"one", PRIVATE).unwrap();
        let error = write_new(&path, b"two", PRIVATE).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::AlreadyExists);
        assert_eq!(fs::read(&path).unwrap(), b"one");
        replace(&path, b"three", PUBLIC).unwrap();
        assert_eq!(fs::read(&path).unwrap(), b"three");
        assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o777, PUBLIC);
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 1);
    }
}
