//! `godwit-cc --from-module`: the executable of one instruction set, from the neutral module that `--save-module` has kept.
//!
//! ```text
//!  prog.module ─┬─ llc x86_64  ─┬─ layout ─ lld ─ the executable of --set
//!               └─ llc aarch64 ─┘
//! ```
//! A node runs it on modules of images, which come from elsewhere: so nothing is asked of the module but that it is bitcode of
//! a bounded length, and what comes out has the identity that this tool chain finds, whatever the module's owner says.

use crate::home::{Home, PLUGIN};
use crate::{Error, link};
use godwit_isa_link::{Module, Set, Toolchain};
use std::ffi::{OsStr, OsString};
use std::fs::File;
use std::io::{self, Read, Write as _};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

/// Longest module, in bytes; images have no longer ones either (`crates/pack`).
pub const MOST_BYTES: u64 = godwit_isa_plan::image::MOST_MODULE;
/// What bitcode begins with.
const MAGIC: [u8; 4] = *b"BC\xc0\xde";
/// The first option of such a command line.
const FROM: &str = "--from-module";

/// No executable can be made.
#[derive(Debug, thiserror::Error)]
pub enum ModuleError {
    /// Another command line.
    #[error(
        "--from-module wants a module, --set SET and -o FILE, and nothing else: godwit-cc --from-module prog.module --set aarch64 -o prog.aarch64"
    )]
    Usage,
    /// Another set.
    #[error("--set {0}: programs are made for x86_64 and aarch64")]
    Set(String),
    /// A file.
    #[error("cannot {action} {}: {source}", path.display())]
    File {
        /// What was to be done with it.
        action: &'static str,
        /// The file; `-` is standard input or output.
        path: PathBuf,
        /// Why not.
        source: io::Error,
    },
    /// Something else.
    #[error("{} is no neutral module: it is not LLVM's bitcode; --save-module writes one", .0.display())]
    Kind(PathBuf),
    /// It is too long.
    #[error("{} has more than {MOST_BYTES} bytes, the most that a module may have", .0.display())]
    Large(PathBuf),
}

/// Does a command line ask for this?
#[must_use]
pub fn is_meant(arguments: &[OsString]) -> bool {
    arguments.iter().any(|argument| argument == FROM)
}

/// Does what such a command line says.
///
/// # Errors
/// When it is not understood, the module is none, or a tool fails.
pub fn as_back_end(arguments: &[OsString]) -> Result<ExitCode, Error> {
    let asked = Asked::parse(arguments)?;
    let home = Home::find()?;
    let failed = |action, path: &Path| {
        let path = path.to_owned();
        move |source| ModuleError::File { action, path, source }
    };
    let temporary = std::env::temp_dir();
    let scratch = tempfile::tempdir().map_err(failed("make a directory in", &temporary))?;
    let file = scratch.path().join("neutral.bc");
    take(&asked.module, &file)?;
    let (is_pipe, made) = (asked.output == Path::new("-"), scratch.path().join("executable"));
    let output = if is_pipe { made.clone() } else { asked.output.clone() };
    let toolchain = Toolchain::debian(home.part(PLUGIN)?);
    let module = Module { file, set: asked.set, natives: link::natives(&home)?, output, toolchain };
    godwit_isa_link::link_module(&module).map_err(link::LinkError::from)?;
    if is_pipe {
        let mut executable = File::open(&made).map_err(failed("read", &made))?;
        let mut out = io::stdout().lock();
        io::copy(&mut executable, &mut out)
            .and_then(|_| out.flush())
            .map_err(failed("write", &asked.output))?;
    }
    Ok(ExitCode::SUCCESS)
}

#[derive(Debug, PartialEq, Eq)]
struct Asked {
    module: PathBuf,
    set: Set,
    output: PathBuf,
}

impl Asked {
    fn parse(arguments: &[OsString]) -> Result<Self, ModuleError> {
        let (mut module, mut set, mut output) = (None, None, None);
        let (pairs, rest) = arguments.as_chunks::<2>();
        if !rest.is_empty() {
            return Err(ModuleError::Usage);
        }
        for [option, value] in pairs {
            let place = match option.to_str() {
                Some(FROM) => &mut module,
                Some("--set") => &mut set,
                Some("-o") => &mut output,
                _ => return Err(ModuleError::Usage),
            };
            if place.replace(value.clone()).is_some() {
                return Err(ModuleError::Usage);
            }
        }
        let (Some(module), Some(set), Some(output)) = (module, set, output) else {
            return Err(ModuleError::Usage);
        };
        let known = Set::ALL.into_iter().find(|known| OsStr::new(known.name()) == set);
        let set = known.ok_or_else(|| ModuleError::Set(set.to_string_lossy().into_owned()))?;
        Ok(Self { module: module.into(), set, output: output.into() })
    }
}

/// Copies a module, if it is one.
fn take(from: &Path, to: &Path) -> Result<(), ModuleError> {
    let failed = |action, path: &Path| {
        let path = path.to_owned();
        move |source| ModuleError::File { action, path, source }
    };
    let mut input: Box<dyn Read> = if from == Path::new("-") {
        Box::new(io::stdin().lock())
    } else {
        Box::new(File::open(from).map_err(failed("read", from))?)
    };
    let mut begins = Vec::new();
    input.by_ref().take(MAGIC.len() as u64).read_to_end(&mut begins).map_err(failed("read", from))?;
    if begins != MAGIC {
        return Err(ModuleError::Kind(from.to_owned()));
    }
    let mut copy = File::create(to).map_err(failed("write", to))?;
    copy.write_all(&begins).map_err(failed("write", to))?;
    let rest = MOST_BYTES - MAGIC.len() as u64;
    let copied = io::copy(&mut input.by_ref().take(rest), &mut copy).map_err(failed("read", from))?;
    if copied == rest && input.read(&mut [0]).map_err(failed("read", from))? > 0 {
        return Err(ModuleError::Large(from.to_owned()));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(line: &str) -> Result<Asked, String> {
        let arguments: Vec<OsString> = line.split(' ').map(OsString::from).collect();
        assert!(is_meant(&arguments), "{line}");
        Asked::parse(&arguments).map_err(|error| error.to_string())
    }

    #[test]
    fn a_module_a_set_and_an_output_make_a_command_line_and_nothing_else() {
        let asked = Asked { module: "p.module".into(), set: Set::Aarch64, output: "-".into() };
        assert_eq!(parse("--from-module p.module --set aarch64 -o -").as_ref(), Ok(&asked));
        assert_eq!(parse("-o - --set aarch64 --from-module p.module").as_ref(), Ok(&asked));
        for wrong in [
            "--from-module p.module",
            "--from-module p.module --set aarch64",
            "--from-module p.module --set aarch64 -o",
            "--from-module p.module --set aarch64 -o x -O2 y",
            "--from-module p.module --set aarch64 -o x --set x86_64",
        ] {
            assert!(parse(wrong).is_err_and(|said| said.contains("and nothing else")), "{wrong}");
        }
        let other = parse("--from-module p.module --set riscv64 -o x");
        assert!(other.is_err_and(|said| said.contains("--set riscv64")));
    }

    #[test]
    fn what_is_no_bitcode_is_not_taken() {
        let scratch = tempfile::tempdir().unwrap_or_else(|error| panic!("{error}"));
        let (from, to) = (scratch.path().join("from"), scratch.path().join("to"));
        for (bytes, is_taken) in [(&b"BC\xc0\xdeand more"[..], true), (b"\x7fELF", false), (b"BC", false)] {
            std::fs::write(&from, bytes).unwrap_or_else(|error| panic!("{error}"));
            assert_eq!(take(&from, &to).is_ok(), is_taken);
            let copied = std::fs::read(&to).ok().filter(|_| is_taken);
            assert_eq!(copied.as_deref(), is_taken.then_some(bytes));
        }
        assert!(take(&scratch.path().join("none"), &to).is_err());
    }
}
