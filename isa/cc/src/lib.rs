//! `godwit-cc`, `godwit-cxx`, `godwit-ld`, `godwit-ar` and `godwit-ranlib`: the drivers that build programs which can
//! change instruction set, in the place of `cc`, `c++`, `ld`, `ar` and `ranlib`.
//!
//! ```text
//!  a.c ──clang-19──▶ a.o (bitcode) ─┐
//!  b.c ──clang-19──▶ b.o (bitcode) ─┼─ resolve ─▶ link ─▶ prog            a script that lists and starts the others
//!  libx.a, libc.a (bitcode) ────────┘                     prog.x86_64     static executables
//!                                                         prog.aarch64
//! ```
//!
//! With `--save-module` the neutral module is kept as `prog.module`; `--from-module` makes an executable of it ([`module`]).
//!
//! What configure scripts and CMake build to see whether it builds is a *probe*: an ordinary executable
//! for this machine alone, without anything that a move needs ([`link::is_probe`]).

pub mod archive;
pub mod arguments;
pub mod compile;
pub mod home;
pub mod index;
pub mod link;
pub mod module;
pub mod native;
pub mod query;
pub mod report;
pub mod resolve;
pub mod symbols;
pub mod tools;

use std::ffi::OsString;
use std::process::ExitCode;

/// Which of the five programs this is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Tool {
    /// `godwit-cc`
    Compiler,
    /// `godwit-cxx`: the same, with C++ for every source and its library in every program.
    CxxCompiler,
    /// `godwit-ld`
    Linker,
    /// `godwit-ar`
    Archiver,
    /// `godwit-ranlib`
    Indexer,
}

impl Tool {
    /// The name it is called by.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Compiler => "godwit-cc",
            Self::CxxCompiler => "godwit-cxx",
            Self::Linker => "godwit-ld",
            Self::Archiver => "godwit-ar",
            Self::Indexer => "godwit-ranlib",
        }
    }
}

/// What can go wrong; each says on which object, and what to do where that is known.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The command line is not understood, or asks for what cannot be.
    #[error(transparent)]
    Arguments(#[from] arguments::ArgumentError),
    /// The tool chain's own files are not there.
    #[error(transparent)]
    Home(#[from] home::HomeError),
    /// A tool could not be run.
    #[error(transparent)]
    Tool(#[from] tools::ToolError),
    /// A file is not what it should be.
    #[error(transparent)]
    Symbols(#[from] symbols::SymbolsError),
    /// The inputs do not make a whole program.
    #[error(transparent)]
    Resolve(#[from] resolve::ResolveError),
    /// There is no report.
    #[error(transparent)]
    Report(#[from] report::ReportError),
    /// Executables could not be made.
    #[error(transparent)]
    Link(#[from] link::LinkError),
    /// No executable could be made from a module.
    #[error(transparent)]
    Module(#[from] module::ModuleError),
}

/// Runs a tool with the process's arguments.
#[must_use]
pub fn main(tool: Tool) -> ExitCode {
    let arguments: Vec<OsString> = std::env::args_os().skip(1).collect();
    match run(tool, arguments) {
        Ok(code) => code,
        Err(error) => {
            eprintln!("{}: error: {error}", tool.name());
            ExitCode::FAILURE
        }
    }
}

/// Runs a tool with these arguments (without the program's name).
///
/// # Errors
/// When the tool cannot do what it is asked to. What clang or another tool complained about has been
/// printed by it, and is no error but the returned exit code.
pub fn run(tool: Tool, arguments: Vec<OsString>) -> Result<ExitCode, Error> {
    let arguments = arguments::expand(arguments)?;
    match tool {
        Tool::Archiver => Ok(tools::pass_on(home::LLVM_AR, &arguments)?),
        Tool::Indexer => Ok(tools::pass_on(home::LLVM_RANLIB, &arguments)?),
        Tool::Linker => link::as_linker(&arguments),
        Tool::Compiler if module::is_meant(&arguments) => module::as_back_end(&arguments),
        Tool::Compiler | Tool::CxxCompiler => {
            if let Some(code) = query::answer(tool, &arguments)? {
                return Ok(code);
            }
            compile::as_compiler(&arguments, tool == Tool::CxxCompiler)
        }
    }
}
