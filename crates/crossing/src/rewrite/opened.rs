//! What processes have open.

use std::cell::Cell;
use std::collections::{BTreeMap, BTreeSet};

use godwit_criu::images::{ChangedImages, ImageError, ImageKind, OpenedFile, ProcessImages};
use godwit_isa_plan::Set;

use super::{RewriteError, damaged};
use crate::open_flags::translated;
use crate::refusal::Unfit;
use crate::target::Target;

const NAME: &str = "files.img";
/// Longest path that the kernel tells, in bytes (`PATH_MAX`).
const MOST_PATH: usize = 4096;

/// All that is open, and the paths of regular files by their numbers.
pub(super) struct Files<'a> {
    all: Vec<OpenedFile<'a>>,
    paths: BTreeMap<u32, Vec<u8>>,
    /// Those that are found by another name, or whose contents are in the images.
    renamed: BTreeSet<u32>,
    mounts: Mounts,
}

/// Where there are mounts.
enum Mounts {
    /// On the root, in the only namespace, at these paths: names with slashes between them.
    Below(BTreeSet<Vec<u8>>),
    /// In several namespaces, and nothing says which a process is in.
    Several,
    /// Nothing says it.
    Unknown,
}

impl<'a> Files<'a> {
    pub(super) fn decode(images: &'a ProcessImages) -> Result<Self, ImageError> {
        let failed = |reason| damaged(NAME, reason);
        let (mut all, mut paths) = (Vec::new(), BTreeMap::new());
        for record in images.records(NAME)? {
            let file = OpenedFile::decode(record).map_err(failed)?;
            let path = file.path().map_err(failed)?;
            if path.is_some_and(|path| paths.insert(file.number, path).is_some()) {
                return Err(failed(format!("it has file {} twice", file.number)));
            }
            all.push(file);
        }
        Ok(Self { all, paths, renamed: images.renamed()?, mounts: Mounts::of(&images.mounts()?) })
    }

    /// The path of an executable; none if it is no regular file, or not the one that has this path.
    pub(super) fn executable(&self, number: u32) -> Option<&[u8]> {
        let path = self.paths.get(&number).map(Vec::as_slice);
        path.filter(|_| !self.renamed.contains(&number))
    }

    /// Has the service mount namespaces of its own?
    pub(super) fn has_namespaces(&self) -> bool {
        matches!(self.mounts, Mounts::Several)
    }

    /// Is a path, as the kernel tells it, one of the root filesystem, and not of what is mounted in it or over it? Only
    /// there executables come from the image of the service.
    pub(super) fn is_of_root(&self, path: &[u8]) -> bool {
        let Mounts::Below(places) = &self.mounts else { return false };
        let path = path.strip_prefix(b"/").filter(|path| path.len() < MOST_PATH);
        let Some(names) = path.and_then(names) else { return false };
        !(1..=names.len()).any(|above| places.contains(&names[..above].join(&b'/')))
    }

    /// Executables are the target's, and flags those of its set.
    pub(super) fn rewrite(
        mut self,
        from: Set,
        target: &Target,
        changed: &mut ChangedImages,
    ) -> Result<(), RewriteError> {
        let failed = |reason| damaged(NAME, reason);
        let mut records = Vec::with_capacity(self.all.len());
        for mut file in std::mem::take(&mut self.all) {
            let refused = Cell::new(None);
            let flags = file.change_flags(|flags| {
                translated(flags, from, target.node.set).ok_or_else(|| {
                    refused.set(Some(flags));
                    String::new()
                })
            });
            let path = self.paths.get(&file.number);
            if let Some(flags) = refused.get() {
                let what = match path {
                    Some(path) => format!("the file {}", String::from_utf8_lossy(path).escape_debug()),
                    None => format!("file {} of the images", file.number),
                };
                return Err(Unfit::Flags { what, flags }.into());
            }
            flags.map_err(failed)?;
            // What has the path of an executable elsewhere, or had it, is no executable of the image.
            let executable = self.executable(file.number).filter(|path| self.is_of_root(path));
            if let Some(program) = executable.and_then(|path| target.programs.get(path)) {
                file.set_contents(program.bytes, program.mode).map_err(failed)?;
            }
            records.push(file.encode());
        }
        Ok(changed.insert(NAME, ImageKind::Files, &records)?)
    }
}

impl Mounts {
    /// What the images say, with the places of each namespace.
    fn of(namespaces: &[Vec<Vec<u8>>]) -> Self {
        let places = match namespaces {
            [] => return Self::Unknown,
            [places] => places,
            _ => return Self::Several,
        };
        let mut below = BTreeSet::new();
        let mut roots = 0;
        for place in places {
            let Some(names) = names(place.strip_prefix(b".").unwrap_or(place)) else { return Self::Unknown };
            if names.is_empty() {
                roots += 1;
            } else {
                below.insert(names.join(&b'/'));
            }
        }
        // What is mounted over the root hides it.
        if roots == 1 { Self::Below(below) } else { Self::Unknown }
    }
}

/// The names that a path is made of; none where it does not say by itself where it leads.
fn names(path: &[u8]) -> Option<Vec<&[u8]>> {
    let names = path.split(|byte| *byte == b'/').filter(|name| !name.is_empty());
    names.map(|name| (!matches!(name, b"." | b"..")).then_some(name)).collect()
}
