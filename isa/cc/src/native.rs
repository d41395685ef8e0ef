//! Plain executables: for one or all sets, of the same neutral bitcode, but with nothing that a move
//! needs. Probes are made this way, and `--plain` programs to measure the others against.

use crate::Error;
use crate::home::{Home, LLC, LLD, LLVM_LINK, OPT, PLUGIN};
use crate::tools::{self, ToolError};
use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::Command;

/// The instruction sets, by the names that `uname -m` has for them.
pub const SETS: [&str; 2] = ["x86_64", "aarch64"];

/// How much is done for speed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Effort {
    /// For programs that run once, for a moment.
    Probe,
    /// For programs that are measured.
    Full,
}

/// The machine's own set, if it is one that neutral programs are made for.
#[must_use]
pub fn own_set() -> Option<&'static str> {
    SETS.into_iter().find(|set| *set == std::env::consts::ARCH)
}

/// Joins bitcode files into one.
///
/// # Errors
/// When they do not fit together; llvm-link has said why.
pub fn join(bitcode: &[PathBuf], output: &Path) -> Result<(), ToolError> {
    let mut command = Command::new(LLVM_LINK);
    command.arg("-o").arg(output);
    // Files of more debug information than the others, or of another compiler's version, are no error.
    command.args(["-suppress-warnings"]).args(bitcode);
    tools::check(&mut command, "joining the objects")
}

/// Makes the executables `outputs` (set, file) of the bitcode files.
///
/// # Errors
/// When a tool fails.
pub fn plain(
    home: &Home,
    bitcode: &[PathBuf],
    outputs: &[(&str, PathBuf)],
    effort: Effort,
    scratch: &Path,
) -> Result<(), Error> {
    let joined = scratch.join("joined.bc");
    join(bitcode, &joined)?;
    let ready = scratch.join("ready.bc");
    let (passes, level) = match effort {
        Effort::Probe => {
            ("gw-before,gw-constructors,gw-thread-local,gw-exceptions-plain,gw-globals,globaldce", "-O0")
        }
        Effort::Full => (
            "gw-before,default<O2>,gw-constructors,gw-thread-local,gw-exceptions-plain,gw-globals,globaldce",
            "-O2",
        ),
    };
    let mut command = Command::new(OPT);
    let mut plugin = OsString::from("-load-pass-plugin=");
    plugin.push(home.part(PLUGIN)?);
    command.arg(plugin).arg(format!("-passes={passes}")).arg(&joined).arg("-o").arg(&ready);
    // Its passes count what they do; that is for the report of a whole build.
    tools::check_quietly(&mut command, "preparing the program", |line| line.starts_with("gw-stat "))?;
    for (set, output) in outputs {
        let object = scratch.join(format!("{set}.o"));
        let mut command = Command::new(LLC);
        command
            .arg(format!("-mtriple={set}-linux-musl"))
            // Atomic operations on 16 bytes, which every arm64 has; as in programs that can move.
            .args(if *set == "x86_64" { &["-mattr=+cx16"][..] } else { &[] })
            .args([
                level,
                "-filetype=obj",
                "-relocation-model=static",
                "-function-sections",
                "-data-sections",
            ])
            .arg(&ready)
            .arg("-o")
            .arg(&object);
        tools::check(&mut command, &format!("making code for {set}"))?;
        let mut command = Command::new(LLD);
        command.args(["-static", "--gc-sections", "-o"]).arg(output).arg(&object);
        for library in ["plain.a", "libmath.a", "libgcc.a"] {
            command.arg(home.part(Path::new(set).join(library))?);
        }
        tools::check(&mut command, &format!("linking the executable for {set}"))?;
    }
    Ok(())
}
