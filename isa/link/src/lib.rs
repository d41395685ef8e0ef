//! Links bitcode into one static executable per instruction set, with every function and variable of the
//! program at the same address in all of them (`isa/ABI.md`).
//!
//! ```text
//! bitcode ─ llvm-link ─ opt: gw-before, O2, gw-after ─┬─ llc x86_64  ─┬─ layout ─┬─ lld ─ OUTPUT.x86_64
//!                                                     └─ llc aarch64 ─┘          └─ lld ─ OUTPUT.aarch64
//! ```
//!
//! The neutral module, from which both executables are made, can be kept (`Options::module`), and an executable of one set
//! be made of it later ([`link_module`]): the same one to the byte, by the same tool chain.

mod binding;
mod layout;
mod toolchain;
mod verify;

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::thread;

pub use godwit_isa_plan::{Binding, Set};
pub use layout::{Layout, LayoutError};
pub use toolchain::{Toolchain, ToolchainError};
pub use verify::VerifyError;

/// What a program is linked from.
#[derive(Clone, Debug)]
pub struct Inputs {
    /// The program's bitcode, with its libraries, the C library and the neutral runtime; no archives.
    pub bitcode: Vec<PathBuf>,
    /// Private objects and archives of each set, in the order in which lld gets them.
    pub natives: BTreeMap<Set, Vec<PathBuf>>,
    /// The executables are this path with `.x86_64` and `.aarch64` appended.
    pub output: PathBuf,
    /// How to link.
    pub options: Options,
}

/// How to link.
#[derive(Clone, Debug)]
pub struct Options {
    /// Keep every intermediate file in this directory, which must exist.
    pub keep: Option<PathBuf>,
    /// For `configure` and the like: this machine's set only, unoptimised, written to the output's path itself.
    /// Such a program cannot be moved.
    pub probe: bool,
    /// How much of what makes a program able to move it gets.
    pub amount: Amount,
    /// The compiler's programs.
    pub toolchain: Toolchain,
    /// Keep the neutral module in this file.
    pub module: Option<PathBuf>,
}

/// What an executable is made from again.
#[derive(Clone, Debug)]
pub struct Module {
    /// The neutral module that a link has kept.
    pub file: PathBuf,
    /// The set of the executable.
    pub set: Set,
    /// Private objects and archives of **all** sets, as the link had them: they are a part of the identity.
    pub natives: BTreeMap<Set, Vec<PathBuf>>,
    /// The executable.
    pub output: PathBuf,
    /// The compiler's programs.
    pub toolchain: Toolchain,
}

/// How much of what makes a program able to move it gets. Less than everything is for measuring what the parts cost;
/// such a program runs, but cannot move.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Amount {
    /// Locals with an address on the data stack, nothing more. No program that uses setjmp.
    DataStack,
    /// Polls as well.
    Polls,
    /// And the tests behind calls; what they branch to saves nothing.
    Checks,
    /// All.
    #[default]
    Everything,
}

impl Amount {
    /// Reads the name of a part.
    #[must_use]
    pub fn named(name: &str) -> Option<Self> {
        [Self::DataStack, Self::Polls, Self::Checks, Self::Everything]
            .into_iter()
            .find(|amount| amount.name() == name)
    }

    fn name(self) -> &'static str {
        match self {
            Self::DataStack => "data-stack",
            Self::Polls => "polls",
            Self::Checks => "checks",
            Self::Everything => "everything",
        }
    }
}

/// What the link made.
#[derive(Clone, Debug, Default)]
pub struct Report {
    /// The executables.
    pub executables: BTreeMap<Set, PathBuf>,
    /// Figures of the passes, `pass.key`: for example `capture.sites`, `polls.latch`.
    pub figures: BTreeMap<String, u64>,
    /// What the program is known by; a state fits executables with the same identity.
    pub binding: Binding,
}

/// A program could not be linked.
#[derive(Debug, thiserror::Error)]
pub enum LinkError {
    /// A program of the tool chain failed, or refused the input.
    #[error(transparent)]
    Toolchain(#[from] ToolchainError),
    /// The executables cannot be given the same layout.
    #[error(transparent)]
    Layout(#[from] LayoutError),
    /// The executables differ where they must not.
    #[error(transparent)]
    Verify(#[from] VerifyError),
    /// A file of the link could not be read or written.
    #[error("cannot access {path}: {source}")]
    File {
        /// Which.
        path: PathBuf,
        /// Why.
        source: std::io::Error,
    },
}

/// Links a program.
///
/// # Errors
/// When the program holds something that cannot move (with file, line and reason), when a symbol is missing, or
/// when a program of the tool chain cannot be run.
pub fn link(inputs: &Inputs) -> Result<Report, LinkError> {
    let scratch = tempfile::Builder::new()
        .prefix("godwit-link-")
        .tempdir()
        .map_err(|source| LinkError::File { path: std::env::temp_dir(), source })?;
    let directory = inputs.options.keep.as_deref().unwrap_or(scratch.path());
    if inputs.options.probe { link_probe(inputs, directory) } else { link_all(inputs, directory) }
}

fn link_all(inputs: &Inputs, directory: &Path) -> Result<Report, LinkError> {
    let tools = &inputs.options.toolchain;
    let linked = directory.join("linked.bc");
    tools.link_bitcode(&inputs.bitcode, &linked)?;
    let neutral = directory.join("neutral.bc");
    let figures = tools.run_passes(inputs.options.amount, &linked, &neutral)?;
    let objects = generate(tools, &neutral, directory)?;

    let layout = Layout::of(&objects)?;
    let binding = binding::binding(&neutral, &layout, &inputs.natives)?;
    let script = directory.join("layout.ld");
    write(&script, layout.script(&binding.identity()).as_bytes())?;

    let mut report = Report { figures, binding, ..Report::default() };
    for (set, object) in objects {
        let output = with_suffix(&inputs.output, set);
        let natives = inputs.natives.get(&set).map_or(&[][..], Vec::as_slice);
        tools.link_executable(set, &object, natives, &script, &output)?;
        report.executables.insert(set, output);
    }
    verify::same_addresses(&report.executables)?;
    if let Some(module) = &inputs.options.module {
        fs::copy(&neutral, module).map_err(|source| LinkError::File { path: module.clone(), source })?;
    }
    Ok(report)
}

/// Makes the executable of one set from a module that a link has kept. The other sets' objects are made, too, since the layout
/// is of all of them; so the identity is found anew, and not believed.
///
/// # Errors
/// When a program of the tool chain cannot be run or does not take the module, or the sets disagree in it.
pub fn link_module(module: &Module) -> Result<Report, LinkError> {
    let scratch = tempfile::Builder::new()
        .prefix("godwit-link-")
        .tempdir()
        .map_err(|source| LinkError::File { path: std::env::temp_dir(), source })?;
    let directory = scratch.path();
    let Module { file, set, natives, output, toolchain } = module;
    let objects = generate(toolchain, file, directory)?;
    let layout = Layout::of(&objects)?;
    let binding = binding::binding(file, &layout, natives)?;
    let script = directory.join("layout.ld");
    write(&script, layout.script(&binding.identity()).as_bytes())?;
    let own = natives.get(set).map_or(&[][..], Vec::as_slice);
    let object = object_path(directory, *set)?;
    toolchain.link_executable(*set, &object, own, &script, output)?;
    Ok(Report { binding, executables: BTreeMap::from([(*set, output.clone())]), ..Report::default() })
}

/// A probe runs the same passes, since only they make a whole program of the pieces, but no optimiser.
fn link_probe(inputs: &Inputs, directory: &Path) -> Result<Report, LinkError> {
    let tools = &inputs.options.toolchain;
    let set = Set::native().ok_or(ToolchainError::ForeignMachine(std::env::consts::ARCH))?;
    let linked = directory.join("linked.bc");
    tools.link_bitcode(&inputs.bitcode, &linked)?;
    let neutral = directory.join("neutral.bc");
    let figures = tools.run_passes_unoptimised(&linked, &neutral)?;
    let object = object_path(directory, set)?;
    tools.generate(set, &neutral, &object)?;
    let layout = Layout::of(&BTreeMap::from([(set, object.clone())]))?;
    let script = directory.join("layout.ld");
    write(&script, layout.script(&[0; 32]).as_bytes())?;
    let natives = inputs.natives.get(&set).map_or(&[][..], Vec::as_slice);
    tools.link_executable(set, &object, natives, &script, &inputs.output)?;
    let executables = BTreeMap::from([(set, inputs.output.clone())]);
    Ok(Report { figures, executables, ..Report::default() })
}

/// Runs the code generators, all at once.
fn generate(
    tools: &Toolchain,
    neutral: &Path,
    directory: &Path,
) -> Result<BTreeMap<Set, PathBuf>, LinkError> {
    let mut objects = BTreeMap::new();
    for set in Set::ALL {
        objects.insert(set, object_path(directory, set)?);
    }
    thread::scope(|scope| {
        let running: Vec<_> = objects
            .iter()
            .map(|(set, object)| scope.spawn(move || tools.generate(*set, neutral, object)))
            .collect();
        running.into_iter().try_for_each(|thread| match thread.join() {
            Ok(result) => result,
            Err(panic) => std::panic::resume_unwind(panic),
        })
    })?;
    Ok(objects)
}

/// The layout knows the program's own object by its file name.
fn object_path(directory: &Path, set: Set) -> Result<PathBuf, LinkError> {
    let directory = directory.join(set.name());
    fs::create_dir_all(&directory).map_err(|source| LinkError::File { path: directory.clone(), source })?;
    Ok(directory.join(layout::PROGRAM_OBJECT))
}

fn with_suffix(output: &Path, set: Set) -> PathBuf {
    let mut name = output.as_os_str().to_owned();
    name.push(".");
    name.push(set.name());
    PathBuf::from(name)
}

fn write(path: &Path, bytes: &[u8]) -> Result<(), LinkError> {
    fs::write(path, bytes).map_err(|source| LinkError::File { path: path.to_owned(), source })
}
