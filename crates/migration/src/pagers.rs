//! The processes that hold the pages of arriving services, one for each. [`Pagers`] starts and ends them: on a node
//! [`PagerProgram`].

use std::path::{Path, PathBuf};
use std::sync::Arc;

use godwit_memory::pager::{self, PagerError};
use godwit_memory::shared::Filler;

/// What a node does for pagers.
pub trait Pagers: Send + Sync {
    /// Starts a pager in a directory, for at most so many bytes of pages. It outlives the daemon.
    fn start(&self, directory: &Path, bytes: u64) -> Result<(), PagerError>;
    /// Starts a process to which shared memory can be charged. It ends with the daemon.
    fn filler(&self) -> std::io::Result<Arc<Filler>>;
    /// Ends the one in a directory, even if it does not answer. No error when there is none.
    fn end(&self, directory: &Path) -> Result<(), PagerError>;
}

/// The `godwit-pager` binary, where it is.
#[derive(Debug, Clone)]
pub struct PagerProgram(pub PathBuf);

impl Pagers for PagerProgram {
    fn start(&self, directory: &Path, bytes: u64) -> Result<(), PagerError> {
        pager::spawn(&self.0, directory, bytes, &directory.join("log"))
    }

    fn filler(&self) -> std::io::Result<Arc<Filler>> {
        Filler::start(&self.0)
    }

    fn end(&self, directory: &Path) -> Result<(), PagerError> {
        pager::end(directory)
    }
}
