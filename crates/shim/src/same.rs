//! Compares what a container has of the node with what godwit has looked at.
//!
//! The engine runs this as a hook in the mount namespace of a container that is being made, when its mounts are there and no
//! program of its own has run. The runtime follows paths of the node for itself: where another program changes one meanwhile,
//! the container would have something else.

use std::ffi::{OsStr, OsString};
use std::fs::File;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use nix::fcntl::{OFlag, OpenHow, ResolveFlag, open, openat2};
use nix::sys::stat::Mode;

/// Fails where one of these places below the root, `DEVICE:INODE:PATH`, has another device or inode.
pub(crate) fn same(root: &Path, wanted: &[OsString]) -> Result<(), String> {
    let opened = open(root, OFlag::O_PATH | OFlag::O_DIRECTORY | OFlag::O_CLOEXEC, Mode::empty())
        .map_err(|errno| format!("cannot open {}: {}", root.display(), errno.desc()))?;
    for word in wanted {
        let Some((device, inode, target)) = parts(word) else {
            return Err(format!("{} is not DEVICE:INODE:PATH", word.display()));
        };
        // The image's links lead nowhere but into it.
        let how = OpenHow::new()
            .flags(OFlag::O_PATH | OFlag::O_CLOEXEC)
            .resolve(ResolveFlag::RESOLVE_IN_ROOT | ResolveFlag::RESOLVE_NO_MAGICLINKS);
        let found = openat2(&opened, target, how).map_err(std::io::Error::from);
        let found = found.and_then(|found| File::from(found).metadata());
        let found =
            found.map_err(|error| format!("cannot look at the mount at {}: {error}", target.display()))?;
        if (found.dev(), found.ino()) != (device, inode) {
            return Err(format!(
                "what is mounted at {} is not what godwit has looked at: its path on this node has changed meanwhile",
                target.display()
            ));
        }
    }
    Ok(())
}

fn parts(word: &OsStr) -> Option<(u64, u64, &Path)> {
    let mut parts = word.as_bytes().splitn(3, |byte| *byte == b':');
    let mut number = || std::str::from_utf8(parts.next()?).ok()?.parse().ok();
    let (device, inode) = (number()?, number()?);
    Some((device, inode, Path::new(OsStr::from_bytes(parts.next()?))))
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn what_is_another_file_than_that_which_was_looked_at_is_found() {
        let root = tempfile::tempdir().unwrap();
        for name in ["data", "other"] {
            std::fs::create_dir(root.path().join(name)).unwrap();
        }
        // A link of the image leads into the image.
        std::os::unix::fs::symlink("/data", root.path().join("link")).unwrap();
        let found = std::fs::metadata(root.path().join("data")).unwrap();
        let word = |target: &str| OsString::from(format!("{}:{}:{target}", found.dev(), found.ino()));
        same(root.path(), &[word("/data"), word("/link")]).unwrap();
        for (target, words) in [("/other", "its path on this node has changed"), ("/none", "cannot look at")]
        {
            let why = same(root.path(), &[word("/data"), word(target)]).unwrap_err();
            assert!(why.contains(words) && why.contains(target), "{why}");
        }
        assert!(same(root.path(), &["1:/data".into()]).unwrap_err().contains("is not DEVICE:INODE:PATH"));
    }
}
