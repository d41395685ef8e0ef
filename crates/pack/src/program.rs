//! Programs as `godwit-cc` writes them: an executable for each instruction set, of one identity, and the neutral module that
//! they were made from, where that was kept.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::fs::File;
use std::io::{self, Read as _};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};

use godwit_crossing::{Binding, Program, Set};
use godwit_isa_plan::image::{MOST_EXECUTABLE, MOST_MODULE};
use rustix::fs::{FileType, OFlags};
use sha2::{Digest as _, Sha256};

use crate::PackError;

/// Longest script that godwit-cc writes beside them, in bytes.
const MOST_SCRIPT: u64 = 1 << 20;
/// Permissions of a program in the image.
pub(crate) const MODE: u32 = 0o755;

/// A program: its executables are the files `FILE.x86_64` and `FILE.aarch64`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Twins {
    file: PathBuf,
    /// In the image, without the slash at its beginning.
    path: String,
}

/// What an image says of a neutral module.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Module {
    /// Of its program in the image, absolute.
    pub path: String,
    /// See [`godwit_crossing::Binding`].
    pub layout: [u8; 32],
    /// See [`godwit_crossing::Binding`].
    pub toolchain: [u8; 32],
}

/// What is packed of a program.
pub(crate) struct Packable {
    /// Its executables, by their sets.
    pub(crate) executables: BTreeMap<Set, Vec<u8>>,
    /// Its neutral module, and what the image says of that.
    pub(crate) module: Option<(Module, Vec<u8>)>,
}

/// Programs by their paths in the image.
pub(crate) type Programs = BTreeMap<String, Packable>;

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
pub(crate) fn read(twins: &[Twins], sets: &[Set], with_modules: bool) -> Result<Programs, PackError> {
    let mut programs = Programs::new();
    for program in twins {
        let (executables, identity) = executables(&program.file, sets)?;
        let module = with_modules.then(|| module(program, &identity)).transpose()?;
        if programs.insert(program.path.clone(), Packable { executables, module }).is_some() {
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

/// The file `FILE.SUFFIX`.
fn beside(file: &Path, suffix: &str) -> PathBuf {
    let mut path = OsString::from(file);
    path.push(".");
    path.push(suffix);
    path.into()
}

/// Executables of one program, and its identity.
type Identified = (BTreeMap<Set, Vec<u8>>, [u8; 32]);

/// The executables of a program, and its identity.
fn executables(file: &Path, sets: &[Set]) -> Result<Identified, PackError> {
    let mut executables = BTreeMap::new();
    let mut first: Option<([u8; 32], PathBuf)> = None;
    for set in sets {
        let path = beside(file, set.name());
        let (bytes, identity) = of_set(*set, &path)?;
        match &first {
            Some((known, other)) if *known != identity => {
                return Err(PackError::NoTwins(other.clone(), path));
            }
            Some(_) => {}
            None => first = Some((identity, path)),
        }
        executables.insert(*set, bytes);
    }
    Ok((executables, first.map(|(identity, _)| identity).unwrap_or_default()))
}

/// The neutral module of a program, which must be the one that its executables were made from.
fn module(program: &Twins, identity: &[u8; 32]) -> Result<(Module, Vec<u8>), PackError> {
    let path = beside(&program.file, "module");
    let absent = |_| PackError::NoModule(path.clone(), program.file.clone());
    let bytes = match bytes_of(&path, MOST_MODULE) {
        Err(PackError::Missing(path)) => return Err(absent(path)),
        bytes => bytes?,
    };
    let script = match bytes_of(&program.file, MOST_SCRIPT) {
        Err(PackError::Missing(path)) => return Err(absent(path)),
        script => script?,
    };
    let binding = binding_of(&script, &bytes).ok_or_else(|| absent(PathBuf::new()))?;
    if binding.identity() != *identity {
        return Err(PackError::OtherModule(path));
    }
    let module = Module { path: program.path(), layout: binding.layout, toolchain: binding.toolchain };
    Ok((module, bytes))
}

/// What a module is bound by, as the script says that godwit-cc has written beside it.
fn binding_of(script: &[u8], module: &[u8]) -> Option<Binding> {
    let said = |key: &str| {
        let begins = format!("# {key}: ");
        // They are at its beginning.
        let mut lines = script.split(|byte| *byte == b'\n').take_while(|line| line.starts_with(b"#"));
        let digits = lines.find_map(|line| line.strip_prefix(begins.as_bytes()))?;
        from_hex(std::str::from_utf8(digits).ok()?)
    };
    let module = Sha256::digest(module).into();
    Some(Binding { module, layout: said("layout")?, toolchain: said("toolchain")? })
}

/// 32 bytes of 64 hexadecimal digits in lower case.
pub(crate) fn from_hex(text: &str) -> Option<[u8; 32]> {
    let value = |digit: u8| match digit {
        b'0'..=b'9' => Some(digit - b'0'),
        b'a'..=b'f' => Some(digit - b'a' + 10),
        _ => None,
    };
    let (pairs, rest) = text.as_bytes().as_chunks::<2>();
    let mut bytes = [0; 32];
    if pairs.len() != bytes.len() || !rest.is_empty() {
        return None;
    }
    for (byte, [high, low]) in bytes.iter_mut().zip(pairs) {
        *byte = value(*high)? << 4 | value(*low)?;
    }
    Some(bytes)
}

/// The bytes and the identity of an executable, which must be one for this set.
fn of_set(set: Set, path: &Path) -> Result<(Vec<u8>, [u8; 32]), PackError> {
    let bytes = bytes_of(path, MOST_EXECUTABLE)?;
    let program = Program::decode(&bytes, FileType::RegularFile.as_raw_mode() | MODE)
        .map_err(|source| PackError::Program { path: path.to_owned(), source })?;
    let found = program.executable.set;
    if found != set {
        return Err(PackError::OtherSet { path: path.to_owned(), found: found.name(), named: set.name() });
    }
    Ok((bytes, program.executable.identity))
}

fn bytes_of(path: &Path, most: u64) -> Result<Vec<u8>, PackError> {
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
    if bytes > most {
        return Err(PackError::TooLarge { path: path.to_owned(), bytes, most });
    }
    let mut content = Vec::with_capacity(usize::try_from(bytes).unwrap_or(0));
    file.take(most).read_to_end(&mut content).map_err(failed)?;
    Ok(content)
}
