//! Programs as `godwit-cc` writes them: an executable for each instruction set, of one identity.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::fs::File;
use std::io::{self, Read as _};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};

use godwit_crossing::{Program, Set};
use rustix::fs::{FileType, OFlags};

use crate::PackError;

/// Longest executable, in bytes: what a destination reads (`crates/migration/src/destination/cross.rs`).
const MOST_BYTES: u64 = 256 << 20;
/// Permissions of a program in the image.
pub(crate) const MODE: u32 = 0o755;

/// A program: its executables are the files `FILE.x86_64` and `FILE.aarch64`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Twins {
    file: PathBuf,
    /// In the image, without the slash at its beginning.
    path: String,
}

/// Programs by their paths in the image, each with its bytes for every set of [`Set::ALL`], in this order.
pub(crate) type Programs = BTreeMap<String, [Vec<u8>; 2]>;

impl Twins {
    /// The program `file`, which is at `path` in the image; without that in `/bin`.
    ///
    /// # Errors
    /// The path is not an absolute one in its shortest form, or is missing and cannot be made.
    pub fn new(file: &Path, path: Option<&str>) -> Result<Self, PackError> {
        let path = match path {
            Some(path) => path.to_owned(),
            None => {
                let name = file.file_name().and_then(|name| name.to_str());
                format!("/bin/{}", name.ok_or_else(|| PackError::Nameless(file.to_owned()))?)
            }
        };
        let is_part = |part: &str| {
            !matches!(part, "" | "." | "..") && !part.starts_with(".wh.") && !part.contains('\0')
        };
        match path.strip_prefix('/') {
            Some(below) if below.split('/').all(is_part) => {
                Ok(Self { file: file.to_owned(), path: below.to_owned() })
            }
            _ => Err(PackError::Path(path)),
        }
    }

    /// Where it is in the image.
    #[must_use]
    pub fn path(&self) -> String {
        format!("/{}", self.path)
    }
}

/// Reads programs, which must be what they are to be.
pub(crate) fn read(twins: &[Twins]) -> Result<Programs, PackError> {
    let mut programs = Programs::new();
    for program in twins {
        if programs.insert(program.path.clone(), pair(&program.file)?).is_some() {
            return Err(PackError::SamePath(program.path(), program.path()));
        }
    }
    for path in programs.keys() {
        let below = format!("{path}/");
        if let Some(inner) = programs.keys().find(|other| other.starts_with(&below)) {
            return Err(PackError::SamePath(format!("/{path}"), format!("/{inner}")));
        }
    }
    if programs.is_empty() { Err(PackError::NoProgram) } else { Ok(programs) }
}

/// The executables of a program.
fn pair(file: &Path) -> Result<[Vec<u8>; 2], PackError> {
    let [first, second] = Set::ALL.map(|set| {
        let mut path = OsString::from(file);
        path.push(".");
        path.push(set.name());
        (set, PathBuf::from(path))
    });
    let ((bytes, identity), (other_bytes, other_identity)) = (of_set(&first)?, of_set(&second)?);
    if identity != other_identity {
        return Err(PackError::NoTwins(first.1, second.1));
    }
    Ok([bytes, other_bytes])
}

/// The bytes and the identity of an executable, which must be one for this set.
fn of_set((set, path): &(Set, PathBuf)) -> Result<(Vec<u8>, [u8; 32]), PackError> {
    let bytes = bytes_of(path)?;
    let program = Program::decode(&bytes, FileType::RegularFile.as_raw_mode() | MODE)
        .map_err(|source| PackError::Program { path: path.clone(), source })?;
    let found = program.executable.set;
    if found != *set {
        return Err(PackError::OtherSet { path: path.clone(), found: found.name(), named: set.name() });
    }
    Ok((bytes, program.executable.identity))
}

fn bytes_of(path: &Path) -> Result<Vec<u8>, PackError> {
    let failed = |error| PackError::Read(path.to_owned(), error);
    // A FIFO would wait for a writer.
    let flags = i32::try_from(OFlags::NONBLOCK.bits()).unwrap_or(0);
    let file = match File::options().read(true).custom_flags(flags).open(path) {
        Ok(file) => file,
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            return Err(PackError::Missing(path.to_owned()));
        }
        Err(error) => return Err(failed(error)),
    };
    let metadata = file.metadata().map_err(failed)?;
    if !metadata.is_file() {
        return Err(failed(io::Error::other("it is not a regular file")));
    }
    let bytes = metadata.len();
    if bytes > MOST_BYTES {
        return Err(PackError::TooLarge { path: path.to_owned(), bytes, most: MOST_BYTES });
    }
    let mut content = Vec::with_capacity(usize::try_from(bytes).unwrap_or(0));
    file.take(MOST_BYTES).read_to_end(&mut content).map_err(failed)?;
    Ok(content)
}
