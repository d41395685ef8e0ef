//! Mounts in the images of a dump, which repairs look at and change.

use std::borrow::Cow;
use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

use prost::Message;

use crate::images::{ImageError, ImageKind, rewrite};

/// What images of mounts are called; the rest is the number of the namespace.
const PREFIX: &str = "mountpoints-";

/// `mnt_entry`, as far as it is looked at and changed. Fields that are appended to a record overrule those in it (Protocol
/// Buffers, encoding: the last one wins), so that all others stay as they are.
#[derive(Clone, PartialEq, Eq, Message)]
pub(super) struct Mount {
    #[prost(uint32, optional, tag = "1")]
    pub(super) fstype: Option<u32>,
    #[prost(uint32, optional, tag = "2")]
    pub(super) id: Option<u32>,
    #[prost(uint32, optional, tag = "3")]
    pub(super) device: Option<u32>,
    #[prost(uint32, optional, tag = "4")]
    pub(super) parent: Option<u32>,
    #[prost(uint32, optional, tag = "5")]
    pub(super) flags: Option<u32>,
    #[prost(string, optional, tag = "6")]
    pub(super) root: Option<String>,
    #[prost(string, optional, tag = "7")]
    pub(super) mountpoint: Option<String>,
    #[prost(string, optional, tag = "8")]
    pub(super) source: Option<String>,
    #[prost(string, optional, tag = "9")]
    pub(super) options: Option<String>,
    #[prost(uint32, optional, tag = "10")]
    pub(super) shared: Option<u32>,
    #[prost(uint32, optional, tag = "11")]
    pub(super) master: Option<u32>,
    #[prost(uint32, optional, tag = "17")]
    pub(super) filesystem_flags: Option<u32>,
    /// The key of a mount that is brought from outside.
    #[prost(string, optional, tag = "18")]
    pub(super) key: Option<String>,
}

impl Mount {
    /// Its place in the container: "/proc/keys".
    pub(super) fn place(&self) -> &str {
        // Some of CRIU's paths are relative to the root of the container.
        self.mountpoint.as_deref().unwrap_or_default().trim_start_matches('.')
    }
}

/// The images of mounts, one for each mount namespace.
pub(super) fn namespaces(images: &Path) -> Result<Vec<PathBuf>, ImageError> {
    let failed = |source| ImageError::Read { path: images.to_owned(), source };
    let mut found = Vec::new();
    for entry in fs::read_dir(images).map_err(failed)? {
        let path = entry.map_err(failed)?.path();
        if path.file_name().is_some_and(|name| name.to_string_lossy().starts_with(PREFIX)) {
            found.push(path);
        }
    }
    found.sort();
    Ok(found)
}

/// Writes an image anew with the records that `change` makes of the mounts in it; none: it stays as it is.
pub(super) fn change(
    image: &Path,
    change: impl for<'a> FnOnce(&[&'a [u8]], &[Mount]) -> Result<Option<Vec<Cow<'a, [u8]>>>, String>,
) -> Result<(), ImageError> {
    rewrite(image, ImageKind::Mountpoints, |records| {
        let mounts = records
            .iter()
            .map(|record| Mount::decode(*record).map_err(|error| error.to_string()))
            .collect::<Result<Vec<_>, _>>()?;
        change(records, &mounts)
    })
}

/// The numbers of these mounts and of all that are mounted within them.
pub(super) fn with_those_within(mounts: &[Mount], is_one: impl Fn(&Mount) -> bool) -> BTreeSet<u32> {
    let mut within: BTreeMap<u32, Vec<u32>> = BTreeMap::new();
    for mount in mounts {
        if let (Some(parent), Some(id)) = (mount.parent, mount.id) {
            within.entry(parent).or_default().push(id);
        }
    }
    let mut found = BTreeSet::new();
    let mut next: Vec<_> = mounts.iter().filter(|mount| is_one(mount)).filter_map(|mount| mount.id).collect();
    while let Some(id) = next.pop() {
        if found.insert(id) {
            next.extend(within.get(&id).into_iter().flatten());
        }
    }
    found
}
