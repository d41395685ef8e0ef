//! What objects define and want, and the refusal of those that are not bitcode.

use crate::archive::{self, DamagedArchive, Member};
use crate::home::LLVM_NM;
use crate::tools::{self, ToolError};
use std::path::{Path, PathBuf};
use std::process::Command;

/// Bitcode, and bitcode in a wrapper.
const BITCODE: [&[u8]; 2] = [b"BC\xC0\xDE", b"\xDE\xC0\x17\x0B"];

/// A file cannot be linked.
#[derive(Debug, thiserror::Error)]
pub enum SymbolsError {
    /// It cannot be read.
    #[error("cannot read {}: {source}", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// Why.
        source: std::io::Error,
    },
    /// It is something else.
    #[error("{what}: {kind}, not an object made by godwit-cc; compile its source with CC=godwit-cc")]
    Foreign {
        /// The file, or the member of an archive.
        what: String,
        /// What it looks like.
        kind: &'static str,
    },
    /// An archive of file names.
    #[error("{}: a thin archive; make it with godwit-ar rc", path.display())]
    Thin {
        /// The archive.
        path: PathBuf,
    },
    /// An archive that is not whole.
    #[error("{}: {source}", path.display())]
    Damaged {
        /// The archive.
        path: PathBuf,
        /// Where.
        source: DamagedArchive,
    },
    /// llvm-nm answered otherwise than expected.
    #[error("{}: the list of its symbols has {found} parts where the file has {expected}", path.display())]
    Count {
        /// The file.
        path: PathBuf,
        /// How many there are.
        expected: usize,
        /// How many llvm-nm told of.
        found: usize,
    },
    /// llvm-nm could not be run.
    #[error(transparent)]
    Tool(#[from] ToolError),
}

/// What one object has to do with a name.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Role {
    /// It must be defined elsewhere.
    Wanted,
    /// It may be defined elsewhere.
    WeaklyWanted,
    /// Defined, as the only one.
    Defined,
    /// Defined unless another one does, or shared with others that are the same.
    WeaklyDefined,
}

/// The names of one object.
pub type Names = Vec<(String, Role)>;

/// An object, or an archive of objects.
#[derive(Debug)]
pub struct Unit {
    /// The file.
    pub path: PathBuf,
    /// The source of a file that the user does not know, since it was made on the way to a program.
    pub source: Option<PathBuf>,
    /// Its parts: one without a name, or the members.
    pub parts: Vec<Part>,
    /// Whether the parts are taken only where they are wanted.
    pub is_archive: bool,
}

/// An object that can be linked.
#[derive(Debug)]
pub struct Part {
    /// A member's name and place.
    pub member: Option<Member>,
    /// What it defines and wants.
    pub names: Names,
}

impl Unit {
    /// How messages call a part: `libx.a(y.o)`.
    #[must_use]
    pub fn label(&self, part: usize) -> String {
        match self.parts.get(part).and_then(|part| part.member.as_ref()) {
            Some(member) => format!("{}({})", self.path.display(), member.name),
            None => self.source.as_ref().unwrap_or(&self.path).display().to_string(),
        }
    }
}

/// Reads objects and archives. The tables of archives that have a list beside them (`libc.a.symbols`,
/// from isa/libc/build) are not made again.
///
/// # Errors
/// When one is not of bitcode.
pub fn read(paths: &[PathBuf]) -> Result<Vec<Unit>, SymbolsError> {
    let mut units = Vec::new();
    let mut asked = Vec::new();
    for path in paths {
        let unit = shape(path)?;
        let list = path.with_extension("a.symbols");
        if unit.is_archive && list.exists() {
            let text =
                std::fs::read_to_string(&list).map_err(|source| SymbolsError::Read { path: list, source })?;
            units.push(with_names(unit, &text)?);
        } else {
            asked.push(units.len());
            units.push(unit);
        }
    }
    if asked.is_empty() {
        return Ok(units);
    }
    // One process for all: it takes longer to start than to list.
    let mut command = Command::new(LLVM_NM);
    command.args(["--format=posix", "--no-sort", "--quiet"]);
    command.args(asked.iter().map(|index| &units[*index].path));
    let text = tools::output(&mut command, "listing the symbols of the objects")?;
    let text = String::from_utf8_lossy(&text);
    let mut lines = text.lines().peekable();
    // A single object has no heading.
    let headings = asked.len() > 1 || asked.iter().any(|index| units[*index].is_archive);
    let mut parts: Vec<&mut Part> = Vec::new();
    let mut labels = Vec::new();
    for (index, unit) in units.iter_mut().enumerate() {
        if asked.contains(&index) {
            let path = unit.path.display().to_string();
            for part in &mut unit.parts {
                labels.push(part.member.as_ref().map_or_else(|| path.clone(), |member| member.name.clone()));
                parts.push(part);
            }
        }
    }
    fill(&mut lines, &labels, &mut parts, headings).map_err(|found| SymbolsError::Count {
        path: paths.first().cloned().unwrap_or_default(),
        expected: labels.len(),
        found,
    })?;
    Ok(units)
}

/// What kind of file it is, and its members.
fn shape(path: &Path) -> Result<Unit, SymbolsError> {
    let bytes = std::fs::read(path).map_err(|source| SymbolsError::Read { path: path.to_owned(), source })?;
    if bytes.starts_with(archive::THIN_MAGIC) {
        return Err(SymbolsError::Thin { path: path.to_owned() });
    }
    let is_archive = bytes.starts_with(archive::MAGIC);
    let mut unit = Unit { path: path.to_owned(), source: None, parts: Vec::new(), is_archive };
    if is_archive {
        let members = archive::members(&bytes)
            .map_err(|source| SymbolsError::Damaged { path: path.to_owned(), source })?;
        for member in members {
            check_bitcode(&bytes[member.range.clone()], || format!("{}({})", path.display(), member.name))?;
            unit.parts.push(Part { member: Some(member), names: Names::new() });
        }
    } else {
        check_bitcode(&bytes, || path.display().to_string())?;
        unit.parts.push(Part { member: None, names: Names::new() });
    }
    Ok(unit)
}

fn check_bitcode(bytes: &[u8], what: impl FnOnce() -> String) -> Result<(), SymbolsError> {
    if BITCODE.iter().any(|magic| bytes.starts_with(magic)) {
        return Ok(());
    }
    let kind = match bytes {
        [0x7f, b'E', b'L', b'F', ..] if bytes.get(16) == Some(&3) => {
            "a shared library of one instruction set"
        }
        [0x7f, b'E', b'L', b'F', ..] => "native code of one instruction set",
        [] => "an empty file",
        _ => "a file of an unknown kind",
    };
    Err(SymbolsError::Foreign { what: what(), kind })
}

fn with_names(mut unit: Unit, list: &str) -> Result<Unit, SymbolsError> {
    let labels: Vec<String> =
        unit.parts.iter().filter_map(|part| part.member.as_ref().map(|member| member.name.clone())).collect();
    let mut parts: Vec<&mut Part> = unit.parts.iter_mut().collect();
    match fill(&mut list.lines().peekable(), &labels, &mut parts, true) {
        Ok(()) => Ok(unit),
        Err(found) => Err(SymbolsError::Count { path: unit.path.clone(), expected: labels.len(), found }),
    }
}

/// Hands the lines to the parts: each part's begin with an empty line and `LABEL:`. The error is how
/// many parts the lines are of.
fn fill<'text>(
    lines: &mut std::iter::Peekable<impl Iterator<Item = &'text str>>,
    labels: &[String],
    parts: &mut [&mut Part],
    headings: bool,
) -> Result<(), usize> {
    for (number, (label, part)) in labels.iter().zip(parts).enumerate() {
        if headings {
            let heading = (lines.next(), lines.next());
            if heading.0 != Some("")
                || heading.1.and_then(|line| line.strip_suffix(':')) != Some(label.as_str())
            {
                return Err(number);
            }
        }
        while let Some(line) = lines.next_if(|line| !line.is_empty()) {
            part.names.extend(name(line));
        }
    }
    if lines.next().is_some() { Err(labels.len() + 1) } else { Ok(()) }
}

/// `NAME LETTER VALUE SIZE`; names that stay inside the object are none of ours.
fn name(line: &str) -> Option<(String, Role)> {
    let mut fields = line.split(' ');
    let name = fields.next()?;
    let role = match fields.next()? {
        "U" => Role::Wanted,
        "w" | "v" => Role::WeaklyWanted,
        "W" | "V" | "C" | "u" => Role::WeaklyDefined,
        letter if letter.starts_with(|letter: char| letter.is_ascii_uppercase()) => Role::Defined,
        _ => return None,
    };
    Some((name.to_owned(), role))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn empty_parts(count: usize) -> Vec<Part> {
        (0..count).map(|_| Part { member: None, names: Names::new() }).collect()
    }

    #[test]
    fn each_member_gets_its_own_names_also_when_two_are_called_the_same() {
        let text = "\na.o:\nf T ---------------- 0\nstatic t ---------------- 0\n\nempty.o:\n\na.o:\ng U 0 0\nh w 0 0\ni W - 0\n";
        let labels = ["a.o", "empty.o", "a.o"].map(str::to_owned);
        let mut parts = empty_parts(3);
        let mut borrowed: Vec<&mut Part> = parts.iter_mut().collect();
        assert_eq!(fill(&mut text.lines().peekable(), &labels, &mut borrowed, true), Ok(()));
        assert_eq!(parts[0].names, [("f".to_owned(), Role::Defined)]);
        assert_eq!(parts[1].names, []);
        let roles: Vec<Role> = parts[2].names.iter().map(|(_, role)| *role).collect();
        assert_eq!(roles, [Role::Wanted, Role::WeaklyWanted, Role::WeaklyDefined]);
    }

    #[test]
    fn a_list_of_another_archive_is_noticed() {
        let labels = ["a.o".to_owned(), "b.o".to_owned()];
        for text in ["\na.o:\n", "\na.o:\n\nc.o:\n", "\na.o:\n\nb.o:\n\nc.o:\n"] {
            let mut parts = empty_parts(2);
            let mut borrowed: Vec<&mut Part> = parts.iter_mut().collect();
            assert!(fill(&mut text.lines().peekable(), &labels, &mut borrowed, true).is_err(), "{text:?}");
        }
    }

    #[test]
    fn native_code_and_other_files_are_refused_by_their_kind() {
        let mut shared = b"\x7fELF".to_vec();
        shared.resize(16, 0);
        shared.push(3);
        for (bytes, word) in [
            (b"\x7fELF\x02".to_vec(), "native code"),
            (shared, "shared library"),
            (vec![], "empty"),
            (b"text".to_vec(), "unknown"),
        ] {
            let error = check_bitcode(&bytes, || "x.o".to_owned())
                .err()
                .map(|error| error.to_string())
                .unwrap_or_default();
            assert!(error.contains(word) && error.starts_with("x.o: "), "{error}");
        }
        assert!(check_bitcode(b"BC\xC0\xDE...", String::new).is_ok());
    }
}
