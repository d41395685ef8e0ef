//! An executable of a program, as far as states are concerned: its build, its variables, and its sites, which are the
//! calls at which a function may be captured. All of it stands in the symbol table and in two read-only tables that
//! the link writes.

use std::collections::{BTreeSet, HashMap};
use std::ops::Range;
use std::path::{Path, PathBuf};

use object::read::elf::ElfFile64;
use object::{Architecture, Object as _, ObjectSegment as _, ObjectSymbol as _, SymbolKind};

use crate::plan::{self, Quarter};
use crate::signal_table;
use crate::{BuildIdentity, Mismatch, ProgramError, Section, Set, StateFile};

/// Symbols that the link and the runtime define.
const IDENTITY: &str = "__gw_build_identity";
const SITES: &str = "__gw_sites";
const SITE_COUNT: &str = "__gw_site_count";
const DATA_BEGIN: &str = "__gw_neutral_data_begin";
const DATA_END: &str = "__gw_neutral_data_end";
const SIGNAL_TABLE: &str = "__gw_signal_table";
/// What goes on from a function's sites is named after the function.
const RESUME_PREFIX: &str = "__gw_resume_";
/// Bytes of a site in the table: the address that goes on from it, the size of its frame.
const SITE_BYTES: usize = 8;

/// A call at which a function may be captured.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Site<'a> {
    /// The function.
    pub function: &'a str,
    /// Which of its sites, from 1.
    pub call: u32,
    /// How many sites it has.
    pub calls: u32,
    /// Bytes of a frame's values.
    pub bytes: u32,
}

#[derive(Debug)]
struct Entry {
    function: u32,
    call: u32,
    bytes: u32,
}

#[derive(Debug)]
struct Function {
    name: String,
    calls: u32,
}

/// An executable.
#[derive(Debug)]
pub struct Program {
    path: PathBuf,
    build: BuildIdentity,
    data: Range<u64>,
    sites: Vec<Entry>,
    functions: Vec<Function>,
    /// Where the table of signals is.
    signals: u64,
    /// Where functions begin that neutral memory may point at.
    entries: BTreeSet<u64>,
}

impl Program {
    /// The path of a program's executable for a set: the program's name is that of its index.
    #[must_use]
    pub fn executable(program: &Path, set: Set) -> PathBuf {
        let mut name = program.as_os_str().to_owned();
        name.push(".");
        name.push(set.name());
        PathBuf::from(name)
    }

    /// Reads an executable of a set.
    ///
    /// # Errors
    /// When it cannot be read, or was not made by godwit's link for this set.
    pub fn open(path: &Path, set: Set) -> Result<Self, ProgramError> {
        let bytes =
            std::fs::read(path).map_err(|source| ProgramError::File { path: path.to_owned(), source })?;
        Self::decode(&bytes, path, set)
    }

    /// Reads an executable's bytes; `path` is for messages.
    ///
    /// # Errors
    /// As [`Self::open`].
    pub fn decode(bytes: &[u8], path: &Path, set: Set) -> Result<Self, ProgramError> {
        let elf = Elf::parse(bytes, path, set)?;
        let mut build = [0; 32];
        build.copy_from_slice(elf.contents(IDENTITY, 32)?);
        let count = elf.contents(SITE_COUNT, 8)?;
        let count = count.first_chunk().map_or(0, |bytes| u64::from_le_bytes(*bytes));
        // What does not fit is not in the file either, and refused for that.
        let table = elf.contents(SITES, count.saturating_mul(SITE_BYTES as u64))?;
        let names = elf.resume_functions();

        let mut functions: Vec<Function> = Vec::new();
        let mut numbers: HashMap<u32, u32> = HashMap::new();
        let mut sites = Vec::with_capacity(table.len() / SITE_BYTES);
        for (address, bytes) in table.as_chunks::<SITE_BYTES>().0.iter().map(|site| {
            let [a, b, c, d, e, f, g, h] = *site;
            (u32::from_le_bytes([a, b, c, d]), u32::from_le_bytes([e, f, g, h]))
        }) {
            let next = u32::try_from(functions.len()).unwrap_or(u32::MAX);
            let function = *numbers.entry(address).or_insert(next);
            if function == next {
                let name = names.get(&u64::from(address)).map(|name| (*name).to_owned());
                functions.push(Function { name: name.unwrap_or_else(|| format!("{address:#x}")), calls: 0 });
            }
            let calls = &mut functions[function as usize].calls;
            *calls += 1;
            sites.push(Entry { function, call: *calls, bytes });
        }
        let data = elf.address(DATA_BEGIN)?..elf.address(DATA_END)?;
        Ok(Self {
            path: path.to_owned(),
            build: BuildIdentity(build),
            data,
            sites,
            functions,
            signals: elf.address(SIGNAL_TABLE)?,
            entries: elf.neutral_functions(),
        })
    }

    /// Where it is.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// What it was built from.
    #[must_use]
    pub fn build(&self) -> BuildIdentity {
        self.build
    }

    /// How many sites it has.
    #[must_use]
    pub fn sites(&self) -> usize {
        self.sites.len()
    }

    /// A site by its number.
    #[must_use]
    pub fn site(&self, number: u32) -> Option<Site<'_>> {
        let entry = self.sites.get(number as usize)?;
        let function = &self.functions[entry.function as usize];
        Some(Site { function: &function.name, call: entry.call, calls: function.calls, bytes: entry.bytes })
    }

    /// Looks whether this executable can go on from a state: the build, where the variables are, every frame.
    ///
    /// # Errors
    /// When it cannot.
    pub fn accepts(&self, state: &StateFile) -> Result<(), Mismatch> {
        self.is_of(state)?;
        for section in state.sections() {
            let Section::Bytes { address, bytes } = section else { continue };
            let end = *address + bytes.len() as u64;
            let is_data = plan::DATA.contains(address);
            if is_data && (*address < self.data.start || end > self.data.end) {
                return Err(Mismatch::Data { address: *address, program: self.path.clone() });
            }
        }
        let memory = state.memory();
        for thread in state.threads() {
            if thread.parked && thread.continuation == thread.slot.quarter(Quarter::Continuation).start {
                return Err(Mismatch::NoFrames { slot: thread.slot.number() });
            }
            self.frames(&memory, thread)?;
        }
        signal_table::check(&memory, self.signals, state.threads(), &self.entries)
    }

    /// Looks whether a state is of this executable's build.
    ///
    /// # Errors
    /// When it is not, with both builds.
    pub fn is_of(&self, state: &StateFile) -> Result<(), Mismatch> {
        if state.build() == self.build {
            return Ok(());
        }
        Err(Mismatch::Build { state: state.build(), program: self.path.clone(), found: self.build })
    }
}

struct Elf<'a> {
    path: &'a Path,
    file: ElfFile64<'a>,
}

impl<'a> Elf<'a> {
    fn parse(bytes: &'a [u8], path: &'a Path, set: Set) -> Result<Self, ProgramError> {
        let unusable =
            |reason: object::Error| ProgramError::Elf { path: path.to_owned(), reason: reason.to_string() };
        let file: ElfFile64<'a> = ElfFile64::parse(bytes).map_err(unusable)?;
        let architecture = match set {
            Set::X86_64 => Architecture::X86_64,
            Set::Aarch64 => Architecture::Aarch64,
        };
        if file.architecture() != architecture {
            return Err(ProgramError::Machine { path: path.to_owned(), expected: set.name() });
        }
        Ok(Self { path, file })
    }

    fn address(&self, symbol: &'static str) -> Result<u64, ProgramError> {
        self.file
            .symbols()
            .find(|candidate| candidate.name() == Ok(symbol) && !candidate.is_undefined())
            .map(|found| found.address())
            .ok_or_else(|| ProgramError::Symbol { path: self.path.to_owned(), symbol })
    }

    fn contents(&self, symbol: &'static str, bytes: u64) -> Result<&'a [u8], ProgramError> {
        let address = self.address(symbol)?;
        self.file
            .segments()
            .find_map(|segment| segment.data_range(address, bytes).ok().flatten())
            .ok_or_else(|| ProgramError::Contents { path: self.path.to_owned(), symbol, address, bytes })
    }

    fn neutral_functions(&self) -> BTreeSet<u64> {
        let functions = self.file.symbols().filter(|symbol| symbol.kind() == SymbolKind::Text);
        functions.map(|symbol| symbol.address()).filter(|address| plan::TEXT.contains(address)).collect()
    }

    /// What goes on from a function's sites, by address, with the function's name.
    fn resume_functions(&self) -> HashMap<u64, &'a str> {
        let named = |symbol: object::read::elf::ElfSymbol64<'a, '_>| {
            let name = symbol.name().ok()?.strip_prefix(RESUME_PREFIX)?;
            Some((symbol.address(), name))
        };
        self.file.symbols().filter_map(named).collect()
    }
}
