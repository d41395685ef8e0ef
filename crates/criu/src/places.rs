//! Where the files of a service are on its node: its root directory, and the directories of its volumes, which are mounted
//! into it and are elsewhere.

use std::path::{Path, PathBuf};

/// The places of its files that move with it.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Places {
    root: PathBuf,
    /// Where each volume is inside, relative to the root, and its directory.
    volumes: Vec<(PathBuf, PathBuf)>,
}

impl Places {
    /// Those of a service with these volumes: the path inside of each, and its directory.
    #[must_use]
    pub fn new(root: &Path, volumes: &[(PathBuf, PathBuf)]) -> Self {
        let volume = |(inside, directory): &(PathBuf, PathBuf)| {
            (inside.strip_prefix("/").unwrap_or(inside).to_owned(), directory.clone())
        };
        Self { root: root.to_owned(), volumes: volumes.iter().map(volume).collect() }
    }

    /// Each, with its path inside, relative to the root.
    pub(crate) fn all(&self) -> impl Iterator<Item = (&Path, &Path)> {
        let volumes = self.volumes.iter().map(|(inside, directory)| (inside.as_path(), directory.as_path()));
        std::iter::once((Path::new(""), self.root.as_path())).chain(volumes)
    }

    /// The one in which a path inside is, which is relative to the root, and the path in it.
    pub(crate) fn of<'a>(&self, path: &'a Path) -> (&Path, &'a Path) {
        let found = self.all().filter_map(|(inside, directory)| {
            Some((inside.components().count(), directory, path.strip_prefix(inside).ok()?))
        });
        let deepest = found.max_by_key(|(depth, ..)| *depth);
        deepest.map_or((&self.root, path), |(_, directory, path)| (directory, path))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_path_is_in_the_deepest_volume_above_it() {
        let volume = |inside: &str, directory: &str| (inside.into(), directory.into());
        let places =
            Places::new(Path::new("/root"), &[volume("/data", "/v/1"), volume("/data/deep", "/v/2")]);
        for (path, directory, rest) in [
            ("data/file", "/v/1", "file"),
            ("data/deep/a/b", "/v/2", "a/b"),
            ("data/deeper", "/v/1", "deeper"),
            ("database", "/root", "database"),
            ("", "/root", ""),
        ] {
            assert_eq!(places.of(Path::new(path)), (Path::new(directory), Path::new(rest)), "{path}");
        }
    }
}
