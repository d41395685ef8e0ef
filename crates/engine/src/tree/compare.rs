//! Whether two trees are the same, as far as a tree is carried.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::fmt;
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::Path;

use rustix::fs::{CWD, FileType, Mode, OFlags};

use super::TreeError;
use super::content::next_data;
use super::snapshot::{Record, Snapshot};
use crate::beneath::{self, Links, Root};

/// Bytes of two files that are compared at a time.
const CHUNK: usize = 1 << 20;

/// One way in which two trees differ.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Difference {
    /// Path within both trees.
    pub path: Vec<u8>,
    /// What differs, e.g. `mode`, `content`, `only in the first`.
    pub what: String,
}

impl fmt::Display for Difference {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "{}: {}", beneath::display(&self.path), self.what)
    }
}

/// All that differs between the trees below `first` and `second`: names, kinds, owners, modes,
/// modification times, extended attributes, device numbers, link targets, sizes, contents, and
/// which names are links to one inode. Empty when they are the same.
pub fn compare(first: &Path, second: &Path) -> Result<Vec<Difference>, TreeError> {
    let (one, two) = (Side::open(first)?, Side::open(second)?);
    let mut differences = Vec::new();
    let mut tell = |path: &[u8], what: String| differences.push(Difference { path: path.to_vec(), what });
    let (one_groups, two_groups) = (groups(one.snapshot.records()), groups(two.snapshot.records()));
    for (path, record) in one.snapshot.records() {
        let Some(other) = two.snapshot.records().get(path) else {
            tell(path, "only in the first".into());
            continue;
        };
        if record.file_type != other.file_type {
            tell(path, format!("kind: {:?} and {:?}", record.file_type, other.file_type));
            continue;
        }
        if record.mode != other.mode {
            tell(path, format!("mode: {:o} and {:o}", record.mode, other.mode));
        }
        if (record.uid, record.gid) != (other.uid, other.gid) {
            tell(path, format!("owner: {}:{} and {}:{}", record.uid, record.gid, other.uid, other.gid));
        }
        if record.mtime != other.mtime {
            tell(path, format!("time: {} and {} ns", record.mtime, other.mtime));
        }
        if record.rdev != other.rdev {
            tell(path, format!("device: {:?} and {:?}", record.rdev, other.rdev));
        }
        if one_groups.get(path) != two_groups.get(path) {
            tell(path, "hard links".into());
        }
        if one.xattrs(path)? != two.xattrs(path)? {
            tell(path, "extended attributes".into());
        }
        match record.file_type {
            FileType::Symlink if one.link(path)? != two.link(path)? => tell(path, "link target".into()),
            FileType::RegularFile if record.size != other.size => {
                tell(path, format!("size: {} and {}", record.size, other.size));
            }
            FileType::RegularFile if !same_content(&one, &two, path)? => tell(path, "content".into()),
            _ => {}
        }
    }
    for path in two.snapshot.records().keys() {
        if !one.snapshot.records().contains_key(path) {
            tell(path, "only in the second".into());
        }
    }
    Ok(differences)
}

/// For each path whose inode has several names: those names within the tree.
fn groups(records: &BTreeMap<Vec<u8>, Record>) -> BTreeMap<Vec<u8>, BTreeSet<Vec<u8>>> {
    let mut inodes: HashMap<u64, BTreeSet<Vec<u8>>> = HashMap::new();
    for (path, record) in records.iter().filter(|(_, record)| record.has_names()) {
        inodes.entry(record.inode).or_default().insert(path.clone());
    }
    let several = inodes.into_values().filter(|names| names.len() > 1);
    several.flat_map(|names| names.clone().into_iter().map(move |name| (name, names.clone()))).collect()
}

fn same_content(one: &Side, two: &Side, path: &[u8]) -> Result<bool, TreeError> {
    let (first, second) = (one.file(path)?, two.file(path)?);
    let size = first.metadata().map_err(|error| one.fault("look at", path, error))?.len();
    let (mut left, mut right) = (vec![0; CHUNK], vec![0; CHUNK]);
    let mut position = 0;
    while position < size {
        // Where both have holes both have zeros.
        let next = |side: &Side, file: &File| {
            let data = next_data(file, position, size);
            Ok(data
                .map_err(|error| side.fault("find data in", path, error))?
                .map_or(size, |(start, _)| start))
        };
        position = next(one, &first)?.min(next(two, &second)?);
        let wanted = usize::try_from(size - position).unwrap_or(CHUNK).min(CHUNK);
        let read = read_both(&first, &second, &mut left[..wanted], &mut right[..wanted], position);
        match read {
            Ok(()) if left[..wanted] == right[..wanted] => position += wanted as u64,
            Ok(()) => return Ok(false),
            Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => return Ok(false),
            Err(error) => return Err(one.fault("read", path, error)),
        }
    }
    Ok(true)
}

fn read_both(
    first: &File,
    second: &File,
    left: &mut [u8],
    right: &mut [u8],
    position: u64,
) -> io::Result<()> {
    first.read_exact_at(left, position)?;
    second.read_exact_at(right, position)
}

struct Side {
    snapshot: Snapshot,
    root: Root,
}

impl Side {
    fn open(path: &Path) -> Result<Self, TreeError> {
        let snapshot = Snapshot::scan_frozen(path)?;
        let root = Root::open(path, Links::Refused).map_err(|source| TreeError::Io {
            root: path.to_path_buf(),
            action: "open the directory".into(),
            path: "/".into(),
            source,
        })?;
        Ok(Self { snapshot, root })
    }

    fn xattrs(&self, path: &[u8]) -> Result<Vec<beneath::XattrPair>, TreeError> {
        self.root
            .node(path)
            .and_then(|node| node.xattrs())
            .map_err(|error| self.fault("look at", path, error))
    }

    fn link(&self, path: &[u8]) -> Result<Vec<u8>, TreeError> {
        self.root
            .node(path)
            .and_then(|node| node.link_target())
            .map_err(|error| self.fault("look at", path, error))
    }

    fn file(&self, path: &[u8]) -> Result<File, TreeError> {
        let open = || -> io::Result<File> {
            let flags = OFlags::RDONLY | OFlags::NOATIME | OFlags::CLOEXEC;
            Ok(rustix::fs::openat(CWD, self.root.node(path)?.magic(), flags, Mode::empty())?.into())
        };
        open().map_err(|error| self.fault("open", path, error))
    }

    fn fault(&self, action: &str, path: &[u8], source: io::Error) -> TreeError {
        TreeError::Io {
            root: self.snapshot.root().to_path_buf(),
            action: action.to_owned(),
            path: beneath::display(path),
            source,
        }
    }
}
