//! The programs of LLVM that a link runs, and how each is called.

use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::{Amount, Set};

/// Where the compiler's programs are.
#[derive(Clone, Debug)]
pub struct Toolchain {
    /// The directory of `llvm-link`, `opt`, `llc` and `ld.lld`, all of one version.
    pub llvm: PathBuf,
    /// The pass plugin, built for that version.
    pub plugin: PathBuf,
}

/// A program of the tool chain did not do its work.
#[derive(Debug, thiserror::Error)]
pub enum ToolchainError {
    /// It could not be started.
    #[error("cannot run {program}: {source}; install the packages with scripts/setup --isa")]
    Start {
        /// Its path.
        program: PathBuf,
        /// Why.
        source: std::io::Error,
    },
    /// It said what is wrong with the input.
    #[error("{message}")]
    Refused {
        /// One line each: file, line, function, reason.
        message: String,
    },
    /// It failed.
    #[error("{program} failed with {status}:\n{message}")]
    Failed {
        /// Its name.
        program: String,
        /// The exit status, as a sentence.
        status: std::process::ExitStatus,
        /// Its standard error.
        message: String,
    },
    /// Programs for this machine cannot be built.
    #[error("this machine is of the set {0}, for which no programs are built")]
    ForeignMachine(&'static str),
}

/// Vectors of more than 128 bits or 16-byte atomics by library calls would be refused later, with less to say.
const X86_64_FEATURES: &str = "+cx16";

/// Each file has been optimised with the usual threshold of 225. What is inlined across files on top of that is copied
/// into a clone as well, and has sites of its own: with that threshold a program's text is a quarter larger.
const INLINE_THRESHOLD: u32 = 50;

impl Toolchain {
    /// Debian's LLVM 19 and a plugin.
    #[must_use]
    pub fn debian(plugin: PathBuf) -> Self {
        Self { llvm: PathBuf::from("/usr/lib/llvm-19/bin"), plugin }
    }

    pub(crate) fn link_bitcode(&self, bitcode: &[PathBuf], output: &Path) -> Result<(), ToolchainError> {
        let mut command = self.command("llvm-link");
        command.args(bitcode).arg("-o").arg(output);
        run(command).map(drop)
    }

    /// The whole program's passes; returns the figures that they report.
    pub(crate) fn run_passes(
        &self,
        amount: Amount,
        input: &Path,
        output: &Path,
    ) -> Result<BTreeMap<String, u64>, ToolchainError> {
        let after = match amount {
            Amount::DataStack => "gw-after-data-stack",
            Amount::Polls => "gw-after-polls",
            Amount::Checks => "gw-after-checks",
            Amount::Everything => "gw-after",
        };
        self.opt(&format!("gw-before,default<O2>,{after}"), input, output)
    }

    pub(crate) fn run_passes_unoptimised(
        &self,
        input: &Path,
        output: &Path,
    ) -> Result<BTreeMap<String, u64>, ToolchainError> {
        self.opt("gw-before,globaldce,gw-after", input, output)
    }

    fn opt(
        &self,
        passes: &str,
        input: &Path,
        output: &Path,
    ) -> Result<BTreeMap<String, u64>, ToolchainError> {
        let mut command = self.command("opt");
        command.arg("-load-pass-plugin").arg(&self.plugin).arg(format!("-passes={passes}"));
        command.arg(format!("-inline-threshold={INLINE_THRESHOLD}"));
        command.arg(input).arg("-o").arg(output);
        run(command).map(|said| figures(&said))
    }

    /// Generates a set's object from the neutral program.
    pub(crate) fn generate(&self, set: Set, neutral: &Path, object: &Path) -> Result<(), ToolchainError> {
        let mut command = self.command("llc");
        // The triple of glibc: only for it the x86-64 code generator reads the control block by %fs directly.
        command.arg(format!("-mtriple={}-unknown-linux-gnu", set.name()));
        match set {
            Set::X86_64 => command.arg(format!("-mattr={X86_64_FEATURES}")),
            // Each variable must have a section of its own.
            Set::Aarch64 => command.arg("-aarch64-enable-global-merge=false"),
        };
        command.args(["-O2", "-filetype=obj", "-relocation-model=static", "-code-model=small"]);
        // Blocks that capture go to sections of their own, so that what runs stays together.
        command.args(["-function-sections", "-data-sections", "-enable-split-machine-functions"]);
        command.arg(neutral).arg("-o").arg(object);
        run(command).map(drop)
    }

    pub(crate) fn link_executable(
        &self,
        set: Set,
        program: &Path,
        natives: &[PathBuf],
        script: &Path,
        output: &Path,
    ) -> Result<(), ToolchainError> {
        let mut command = self.command("ld.lld");
        command.arg("-m").arg(match set {
            Set::X86_64 => "elf_x86_64",
            Set::Aarch64 => "aarch64linux",
        });
        command.args(["-static", "--build-id=none", "--no-dependent-libraries", "--orphan-handling=error"]);
        command.args(["-z", "noexecstack", "-z", "norelro", "-z", "max-page-size=65536"]);
        command.arg("-T").arg(script).arg(program).args(natives).arg("-o").arg(output);
        run(command).map(drop)
    }

    fn command(&self, program: impl AsRef<OsStr>) -> Command {
        Command::new(self.llvm.join(program.as_ref()))
    }
}

/// Runs a program to its end; its standard error.
fn run(mut command: Command) -> Result<String, ToolchainError> {
    let program = PathBuf::from(command.get_program());
    let output =
        command.output().map_err(|source| ToolchainError::Start { program: program.clone(), source })?;
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    if output.status.success() {
        return Ok(said);
    }
    let refusals: Vec<&str> = said.lines().filter_map(|line| line.strip_prefix("error: ")).collect();
    if program.ends_with("opt") && output.status.code() == Some(1) && !refusals.is_empty() {
        return Err(ToolchainError::Refused { message: refusals.join("\n") });
    }
    let program = program.file_name().map_or_else(String::new, |name| name.to_string_lossy().into_owned());
    Err(ToolchainError::Failed { program, status: output.status, message: said })
}

/// Reads the lines `gw-stat PASS KEY=NUMBER …`.
fn figures(said: &str) -> BTreeMap<String, u64> {
    let mut figures = BTreeMap::new();
    for line in said.lines() {
        let mut words = line.split_whitespace();
        if words.next() != Some("gw-stat") {
            continue;
        }
        let Some(pass) = words.next() else { continue };
        for (key, value) in words.filter_map(|word| word.split_once('=')) {
            if let Ok(value) = value.parse() {
                figures.insert(format!("{pass}.{key}"), value);
            }
        }
    }
    figures
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn figures_are_read_from_the_lines_of_the_passes_only() {
        let said = "warning: x=1\ngw-stat polls entry=3 latch=17\ngw-stat verify functions=9\n";
        let figures = figures(said);
        assert_eq!(figures.len(), 3);
        assert_eq!(figures["polls.latch"], 17);
        assert_eq!(figures["verify.functions"], 9);
    }
}
