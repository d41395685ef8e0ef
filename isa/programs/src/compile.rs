//! Building a program with a compiler that is given as a command.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;

use anyhow::{Context as _, Result, anyhow, ensure};

use crate::run::Executable;

/// What all builds of a source have in common: the same language, the same arithmetic, `char` as arm64 has it.
const COMMON: [&str; 4] = ["-std=gnu17", "-O2", "-ffp-contract=off", "-funsigned-char"];

/// The same in C++.
const COMMON_CXX: &str = "-std=gnu++20";

/// What a compiler of C is called where it compiles C++.
const CXX_NAMES: [(&str, &str); 3] =
    [("clang-19", "clang++-19"), ("gcc", "g++"), ("godwit-cc", "godwit-cxx")];

const MUSL: &str = "clang-19 -static -ffp-contract=off --target=x86_64-linux-musl -nostdinc -isystem \
                    /usr/include/x86_64-linux-musl -isystem /usr/lib/llvm-19/lib/clang/19/include -nostartfiles \
                    -L/usr/lib/x86_64-linux-musl /usr/lib/x86_64-linux-musl/crt1.o";

/// A compiler: a command, and how to run what it makes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Compiler {
    /// How reports call it.
    pub name: String,
    /// The command and its first arguments; `-o OUTPUT SOURCE… -lm -pthread` follows.
    pub command: Vec<String>,
    /// What is appended to OUTPUT for the name of the executable.
    pub suffix: String,
    /// What stands before the executable when it runs: an emulator, `env NAME=VALUE`.
    pub runner: Vec<String>,
}

impl Compiler {
    /// Reads `NAME|COMMAND|SUFFIX|RUNNER`, of which the last two may be left out.
    ///
    /// # Errors
    /// When name or command are empty, or there are more parts.
    pub fn parse(text: &str) -> Result<Self> {
        let parts: Vec<&str> = text.split('|').map(str::trim).collect();
        ensure!(
            (2..=4).contains(&parts.len()) && !parts[0].is_empty() && !parts[1].is_empty(),
            "the compiler \"{text}\" is not of the form NAME|COMMAND|SUFFIX|RUNNER, with the last two optional"
        );
        let words = |part: &str| part.split_whitespace().map(str::to_owned).collect();
        Ok(Self {
            name: parts[0].to_owned(),
            command: words(parts[1]),
            suffix: parts.get(2).copied().unwrap_or_default().to_owned(),
            runner: words(parts.get(3).copied().unwrap_or_default()),
        })
    }

    /// The plain compiler for x86-64: clang, static, with binary128 as `long double` in the program itself.
    #[must_use]
    pub fn plain_x86_64() -> Self {
        Self::plain("x86_64", &["clang-19", "--target=x86_64-linux-gnu", "-mlong-double-128"])
    }

    /// clang for x86-64 with this option, static, against musl as Debian builds it: what godwit-cc is compared with.
    #[must_use]
    pub fn plain_musl(name: &str, option: &str) -> Self {
        let command = MUSL.split_whitespace().chain([option]).map(str::to_owned).collect();
        Self { name: name.to_owned(), command, suffix: String::new(), runner: Vec::new() }
    }

    /// As [`Self::plain_x86_64`], but GCC, since `va_arg` of an `__int128` that was passed in memory reads the wrong
    /// bytes in a program made by clang 19 for x86-64.
    #[must_use]
    pub fn plain_gcc() -> Self {
        Self { runner: Vec::new(), ..Self::plain("gcc-x86_64", &["gcc", "-mlong-double-128"]) }
    }

    /// The plain compiler for arm64.
    #[must_use]
    pub fn plain_aarch64() -> Self {
        Self::plain("aarch64", &["clang-19", "--target=aarch64-linux-gnu", "-fuse-ld=lld-19"])
    }

    /// The same without optimisation.
    #[must_use]
    pub fn unoptimised(mut self) -> Self {
        // Of several the last one counts.
        self.command.push("-O0".to_owned());
        self
    }

    /// godwit-cc of this build tree, once what it needs is built beside it. Its executables for this machine.
    ///
    /// # Errors
    /// When godwit-cc is not there, or what it needs cannot be built.
    pub fn godwit() -> Result<Self> {
        static DRIVER: OnceLock<Result<PathBuf, String>> = OnceLock::new();
        let driver = DRIVER
            .get_or_init(|| build_tool_chain().map_err(|error| format!("{error:#}")))
            .as_ref()
            .map_err(|error| anyhow!("{error}"))?;
        let command = [driver.to_str().context("the build tree's path is not UTF-8")?];
        Ok(Self {
            name: "godwit".to_owned(),
            command: command.iter().chain(&COMMON).map(|&word| word.to_owned()).collect(),
            suffix: format!(".{}", std::env::consts::ARCH),
            runner: Vec::new(),
        })
    }

    fn plain(set: &str, front: &[&str]) -> Self {
        Self {
            name: format!("plain-{set}"),
            // Clang 19 of Debian 13 and Ubuntu 24.04 crashes when it computes a function of a binary128 constant.
            command: front
                .iter()
                .chain(&COMMON)
                .chain(&["-static", "-fno-builtin"])
                .map(|&word| word.to_owned())
                .collect(),
            suffix: String::new(),
            runner: if std::env::consts::ARCH == set {
                Vec::new()
            } else {
                vec![format!("qemu-{set}-static")]
            },
        }
    }

    /// The same for C++, where a source is in it.
    fn fit(&self, sources: &[PathBuf]) -> Vec<String> {
        let is_cxx =
            sources.iter().any(|source| source.extension().is_some_and(|extension| extension == "cc"));
        let mut words = self.command.clone();
        if is_cxx {
            for word in &mut words {
                if word == COMMON[0] {
                    COMMON_CXX.clone_into(word);
                }
            }
            let known = CXX_NAMES.iter().find_map(|(c, cxx)| Some((words.first()?.strip_suffix(c)?, cxx)));
            if let Some(program) = known.map(|(directory, cxx)| format!("{directory}{cxx}")) {
                words[0] = program;
            }
        }
        words
    }

    /// Builds `sources` as `output`, with `extra` arguments, and says how to run it.
    ///
    /// # Errors
    /// When the compiler cannot be started or complains, with what it said.
    pub fn build(&self, sources: &[PathBuf], output: &Path, extra: &[&str]) -> Result<Executable> {
        let command = self.fit(sources);
        let (program, arguments) = command.split_first().context("the compiler's command is empty")?;
        let built = Command::new(program)
            .args(arguments)
            .args(extra)
            .args(sources)
            .arg("-o")
            .arg(output)
            .args(["-lm", "-pthread"])
            .output()
            .with_context(|| format!("cannot run the compiler {program}"))?;
        ensure!(
            built.status.success(),
            "{} cannot build {}: {}",
            self.name,
            sources.iter().map(|source| source.display().to_string()).collect::<Vec<_>>().join(" "),
            String::from_utf8_lossy(&built.stderr)
        );
        let mut executable = output.as_os_str().to_owned();
        executable.push(&self.suffix);
        Ok(Executable { path: executable.into(), runner: self.runner.clone() })
    }
}

/// Builds the C library, the plugin and the runtime where godwit-cc looks for them.
fn build_tool_chain() -> Result<PathBuf> {
    let own = std::env::current_exe().context("cannot find this program")?;
    // A test lies in `deps`, a level below the programs.
    let driver = own.ancestors().skip(1).take(2).map(|directory| directory.join("godwit-cc"));
    let driver = driver.into_iter().find(|path| path.exists()).context(
        "godwit-cc is not built: cargo build -p godwit-cc --bins (or run the tests by make test-isa)",
    )?;
    let home = driver.with_file_name("../isa");
    let script = crate::catalogue::directory().join("../build");
    let built = Command::new(&script).arg(&home).output();
    let built = built.with_context(|| format!("cannot run {}", script.display()))?;
    let complaint = String::from_utf8_lossy(&built.stderr);
    ensure!(built.status.success(), "{} failed: {complaint}", script.display());
    Ok(driver)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_compiler_is_read_with_and_without_its_last_parts() {
        let whole =
            Compiler::parse("turn | godwit-cc -O2 | .x86_64 | env GODWIT_STATE_TURN=7").expect("it is right");
        assert_eq!(whole.name, "turn");
        assert_eq!(whole.command, ["godwit-cc", "-O2"]);
        assert_eq!(whole.suffix, ".x86_64");
        assert_eq!(whole.runner, ["env", "GODWIT_STATE_TURN=7"]);
        let short = Compiler::parse("o1|clang-19 -O1").expect("it is right");
        assert_eq!((short.suffix.as_str(), short.runner.len()), ("", 0));
    }

    #[test]
    fn a_compiler_without_command_or_with_too_much_is_refused() {
        for wrong in ["", "name", "name|", "|clang-19", "a|b|c|d|e"] {
            let error = Compiler::parse(wrong).expect_err("it is wrong").to_string();
            assert!(error.contains(&format!("\"{wrong}\"")), "{error}");
        }
    }
}
