//! Brings to the disk what a round has written.

use std::fs::File;
use std::io;
use std::path::PathBuf;

use rustix::fs::{FileType, Mode, OFlags};

use super::TreeError;
use crate::beneath::{self, Root};

/// What a round has brought: it is in the page cache, and [`Written::sync`] brings it to the disk.
#[derive(Debug)]
pub struct Written {
    pub(super) path: PathBuf,
    pub(super) root: Root,
    pub(super) files: Vec<Vec<u8>>,
    pub(super) directories: Vec<Vec<u8>>,
}

/// Of more files and directories all of the filesystem is written: each one that is written alone costs a commit
/// of its journal.
const MOST_ALONE: usize = 500;

impl Written {
    /// Writes what came to the disk, and nothing else: other services' data may take the disk seconds, and a frozen
    /// service does not wait for them. A service that has been told by fsync(2) that its data are safe must find them
    /// after a crash of the node it was moved to: call this before the move is committed.
    pub fn sync(&self) -> Result<(), TreeError> {
        if self.files.len() + self.directories.len() > MOST_ALONE {
            return super::sync(&self.path);
        }
        // All are on their way before the first is waited for.
        let mut open = Vec::new();
        for path in &self.files {
            if let Some(file) = self.open(path, FileType::RegularFile)? {
                super::writeback::start(&file).map_err(|error| self.fault(path, error))?;
                open.push((path, file));
            }
        }
        for path in &self.directories {
            open.extend(self.open(path, FileType::Directory)?.map(|directory| (path, directory)));
        }
        open.iter().try_for_each(|(path, file)| file.sync_all().map_err(|error| self.fault(path, error)))
    }

    /// Nothing where a later item has put something else in its place, which is written with its directory.
    fn open(&self, path: &[u8], file_type: FileType) -> Result<Option<File>, TreeError> {
        let open = || {
            let Some(node) = self.root.node_if_any(path)? else { return Ok(None) };
            if FileType::from_raw_mode(node.statx()?.stx_mode.into()) != file_type {
                return Ok(None);
            }
            let flags = OFlags::RDONLY | OFlags::NOATIME | OFlags::CLOEXEC;
            Ok(Some(File::from(rustix::fs::openat(rustix::fs::CWD, node.magic(), flags, Mode::empty())?)))
        };
        open().map_err(|error: io::Error| self.fault(path, error))
    }

    fn fault(&self, path: &[u8], source: io::Error) -> TreeError {
        TreeError::Io {
            root: self.path.clone(),
            action: "write to disk".into(),
            path: beneath::display(path),
            source,
        }
    }
}
