//! Single files of a node that have come with a container of an engine's.
//!
//! Engines bind files, and have volumes of directories. So a file that goes along is one in a volume of its own, of the engine
//! of each node; what that binds is the file, by its path there.

use std::fs::OpenOptions;
use std::io;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use super::{is_target, is_volume};
use crate::container::is_file_name;

/// A file in a volume of an engine's, as a container has it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct FileOfVolume {
    /// The volume, which has nothing else.
    pub(crate) volume: String,
    /// Its name there.
    pub(crate) file: String,
    /// Where it is in the container.
    pub(crate) target: String,
    /// Whether writes are refused.
    pub(crate) read_only: bool,
}

impl FileOfVolume {
    /// What speaks against one that another node has told.
    pub(crate) fn objection(&self) -> Option<String> {
        let Self { volume, file, target, .. } = self;
        let is_good = is_volume(volume) && is_file_name(file) && is_target(target);
        (!is_good).then(|| format!("it has the file {file:?} of a volume {volume:?} on {target:?}"))
    }

    /// Its path, where the engine has the volume there.
    pub(crate) fn path(&self, volume: &Path) -> PathBuf {
        volume.join(&self.file)
    }

    /// Puts an empty file into a volume that was just made: an engine binds nothing that is not there.
    pub(crate) fn make(&self, volume: &Path) -> io::Result<()> {
        let flags = libc::O_NOFOLLOW;
        let path = self.path(volume);
        OpenOptions::new().write(true).create_new(true).mode(0o600).custom_flags(flags).open(path).map(drop)
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn a_file_of_a_volume_is_in_the_volume() {
        let of = |volume: &str, file: &str, target: &str| FileOfVolume {
            volume: volume.into(),
            file: file.into(),
            target: target.into(),
            read_only: true,
        };
        assert_eq!(of("web-conf", ".conf", "/etc/.conf").objection(), None);
        for (volume, file, target) in [
            ("../web", "conf", "/etc/conf"),
            ("web", "../conf", "/etc/conf"),
            ("web", "..", "/etc/conf"),
            ("web", "", "/etc/conf"),
            ("web", "a/b", "/etc/conf"),
            ("web", "conf", "/etc/../conf"),
            ("web", "conf", "etc"),
        ] {
            assert!(of(volume, file, target).objection().is_some(), "{volume} {file} {target}");
        }
        let scratch = tempfile::tempdir().unwrap();
        let one = of("web", "conf", "/etc/conf");
        one.make(scratch.path()).unwrap();
        assert!(one.make(scratch.path()).is_err(), "what is there stays");
    }
}
