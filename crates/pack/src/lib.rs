//! An OCI image of programs that `godwit-cc` has built, for all its instruction sets: what `godwit image pack` writes, and
//! what nodes of each set run.
//!
//! ```text
//! oci-layout, index.json ──> index ─┬─> manifest of amd64 ──> configuration, [files,] programs of x86_64
//!                (its name)  (mark) ├─> manifest of arm64 ──> configuration, [files,] programs of aarch64
//!                                    └─> manifest of no platform ──> the programs' neutral modules
//! ```
//!
//! The modules are there if they are asked for. Of an image that has them a node makes the executables of a further set, and
//! [`add_platform`] the image with it: the same one to the byte that would have been packed at once.
//!
//! The mark says that the programs of both are the same ones: a node keeps the layers of the other set, too, so that a service
//! can go on there. The files of a directory are one layer that both have. The archive is a function of the name, the programs
//! and the files alone: times are 0, owners root, names sorted.

mod archive;
mod documents;
mod growth;
mod layer;
mod program;

use std::io;
use std::path::{Path, PathBuf};

pub use documents::Run;
pub use godwit_crossing::{ExecutableError, Set};
pub use godwit_isa_plan::image;
pub use growth::{Documents, Grown, GrowthError, add_platform};
pub use layer::Blob;
pub use program::{Module, Twins};

/// What becomes an image.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Recipe {
    /// Its name in the archive: `org.opencontainers.image.ref.name`.
    pub name: String,
    /// The programs, one at least.
    pub programs: Vec<Twins>,
    /// The sets that it is for; none: all.
    pub sets: Vec<Set>,
    /// It has the programs' neutral modules, too.
    pub modules: bool,
    /// A directory with files that are the same on each set.
    pub files: Option<PathBuf>,
    /// How it wants to be run.
    pub run: Run,
}

/// An image that was packed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Packed {
    /// The digest of its index.
    pub digest: String,
    /// Length of the archive, in bytes.
    pub bytes: u64,
}

/// Why no image was made.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs)]
pub enum PackError {
    #[error(
        "{0:?} cannot be an image's name; write letters and digits, and . _ - : @ + / between them, 255 at most"
    )]
    Name(String),
    #[error("an image needs a program: name one that godwit-cc has built")]
    NoProgram,
    #[error(
        "{0} is not there, or {1} does not say what it is bound by; build the program anew with `godwit-cc --save-module`"
    )]
    NoModule(PathBuf, PathBuf),
    #[error(
        "{0} is not the module that the executables were made from: its identity is another; build the program anew"
    )]
    OtherModule(PathBuf),
    #[error("{0:?} cannot be a program's path in an image; write an absolute path without `.` and `..`")]
    Path(String),
    #[error("{0} has no file name that its path in the image could end in; give the path: {0}=/bin/NAME")]
    Nameless(PathBuf),
    #[error("two programs cannot be at {0} and at {1} in the image")]
    SamePath(String, String),
    #[error(
        "{0} is not there; godwit-cc writes it beside the one of the other instruction set: build the program anew"
    )]
    Missing(PathBuf),
    #[error("{path} is not packed")]
    Program { path: PathBuf, source: ExecutableError },
    #[error("{path} is a program for {found}, and its name says {named}")]
    OtherSet { path: PathBuf, found: &'static str, named: &'static str },
    #[error(
        "{0} and {1} are not one program: their build identities differ; build it anew, for both in one run of godwit-cc"
    )]
    NoTwins(PathBuf, PathBuf),
    #[error("{path} has {bytes} bytes; it may have {most} at most")]
    TooLarge { path: PathBuf, bytes: u64, most: u64 },
    #[error("{0} is neither a file, nor a directory, nor a symbolic link; an image's files are these alone")]
    Kind(PathBuf),
    #[error("{0} means in an image that a file is removed; give it another name")]
    Whiteout(PathBuf),
    #[error("{0} changed while it was read; pack again")]
    Changed(PathBuf),
    #[error("{0} cannot be read")]
    Read(PathBuf, #[source] io::Error),
    #[error("cannot write {0}")]
    Write(PathBuf, #[source] io::Error),
}

impl Recipe {
    /// Writes the archive to a file, which appears whole or not at all.
    ///
    /// # Errors
    /// The recipe, a program or a file is not what can be packed, or something cannot be read or written.
    pub fn write(&self, output: &Path) -> Result<Packed, PackError> {
        if !is_name(&self.name) {
            return Err(PackError::Name(self.name.clone()));
        }
        let sets: Vec<_> = match &self.sets[..] {
            [] => Set::ALL.to_vec(),
            some => Set::ALL.into_iter().filter(|set| some.contains(set)).collect(),
        };
        let programs = program::read(&self.programs, &sets, self.modules)?;
        archive::write(self, &programs, &sets, output)
    }
}

/// OCI's grammar of the annotation (image-spec, annotations.md), with a limit.
fn is_name(name: &str) -> bool {
    let is_inner = |byte: u8| byte.is_ascii_alphanumeric() || b"-._:@+".contains(&byte);
    let is_outer = |byte: Option<&u8>| byte.is_some_and(u8::is_ascii_alphanumeric);
    let is_part = |part: &str| {
        let bytes = part.as_bytes();
        is_outer(bytes.first()) && is_outer(bytes.last()) && bytes.iter().all(|byte| is_inner(*byte))
    };
    name.len() <= 255 && name.split('/').all(is_part)
}
