//! Builds the plugin, the runtime and test programs. What many tests need is built once in a run of the tests.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;

use anyhow::{Context as _, Result, ensure};
use godwit_isa_link::{Amount, Inputs, LinkError, Options, Report, Set, Toolchain};

/// The neutral front end of `isa/ABI.md`, section 1.
const NEUTRAL: [&str; 13] = [
    "--target=aarch64-linux-musl",
    "-O2",
    "-fno-pic",
    "-ffp-contract=off",
    "-fno-stack-protector",
    "-fno-common",
    "-fno-asynchronous-unwind-tables",
    "-fomit-frame-pointer",
    "-mno-outline-atomics",
    "-fno-math-errno",
    "-nostdlibinc",
    "-emit-llvm",
    "-c",
];

/// A program on both sets.
#[derive(Debug)]
pub struct Program {
    /// Holds the executables.
    pub directory: tempfile::TempDir,
    /// What the link said.
    pub report: Report,
}

impl Program {
    /// The executable of a set.
    ///
    /// # Panics
    /// Never: a linked program has one of each.
    #[must_use]
    pub fn executable(&self, set: Set) -> &Path {
        self.report.executables.get(&set).expect("the link makes an executable for each set")
    }
}

/// The directory `isa` of the source tree.
#[must_use]
pub fn isa() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..")
}

/// What all programs are linked with.
struct Parts {
    toolchain: Toolchain,
    neutral: Vec<PathBuf>,
    natives: BTreeMap<Set, Vec<PathBuf>>,
}

fn parts() -> Result<&'static Parts> {
    static PARTS: OnceLock<Result<Parts, String>> = OnceLock::new();
    PARTS
        .get_or_init(|| build_parts().map_err(|error| format!("{error:#}")))
        .as_ref()
        .map_err(|error| anyhow::anyhow!("{error}"))
}

fn build_parts() -> Result<Parts> {
    let target = isa().join("../target/isa");
    // The script holds a lock: other tests, and other tests' programs, build into the same directory.
    let built = Command::new(isa().join("build")).arg(&target).output().context("cannot run isa/build")?;
    ensure!(built.status.success(), "isa/build failed: {}", String::from_utf8_lossy(&built.stderr));
    let toolchain = Toolchain::debian(target.join("plugin/libgodwit-isa.so"));
    std::fs::create_dir_all(target.join("tests"))?;
    let mut neutral = vec![target.join("runtime/neutral.bc")];
    for name in ["library", "complex"] {
        let bitcode = target.join("tests").join(name).with_extension("bc");
        compile(&toolchain, &isa().join("tests/library").join(name).with_extension("c"), &bitcode, &[])?;
        neutral.push(bitcode);
    }
    let natives = Set::ALL
        .into_iter()
        .map(|set| (set, vec![target.join("runtime").join(set.name()).join("runtime.o"), libgcc(set)]))
        .collect();
    Ok(Parts { toolchain, neutral, natives })
}

/// Debian's libgcc of a set, for binary128 and 128-bit integers.
fn libgcc(set: Set) -> PathBuf {
    let directory = match set {
        Set::X86_64 => "/usr/lib/gcc/x86_64-linux-gnu",
        Set::Aarch64 => "/usr/lib/gcc-cross/aarch64-linux-gnu",
    };
    // Whatever version the distribution has.
    let newest = std::fs::read_dir(directory).ok().and_then(|entries| {
        entries.flatten().map(|entry| entry.path().join("libgcc.a")).filter(|path| path.exists()).max()
    });
    newest.unwrap_or_else(|| Path::new(directory).join("libgcc.a"))
}

fn compile(toolchain: &Toolchain, source: &Path, output: &Path, flags: &[&str]) -> Result<()> {
    let run = Command::new(toolchain.llvm.join("clang"))
        .args(NEUTRAL)
        .args(flags)
        .arg("-I")
        .arg(isa().join("tests/library"))
        .arg(source)
        .arg("-o")
        .arg(output)
        .output()
        .context("cannot run clang; install the packages with scripts/setup --isa")?;
    ensure!(
        run.status.success(),
        "clang refused {}: {}",
        source.display(),
        String::from_utf8_lossy(&run.stderr)
    );
    Ok(())
}

/// Compiles and links one source file with the tests' small C library.
///
/// # Errors
/// When the tool chain cannot be built, or the source does not compile.
///
/// # Panics
/// When the link is refused: see [`try_link`] for that.
pub fn program(source: &Path) -> Result<Program> {
    let (directory, result) = try_link(source, &[])?;
    let report = result.with_context(|| format!("cannot link {}", source.display()))?;
    Ok(Program { directory, report })
}

/// What passes of the plugin, by name, make of LLVM IR.
///
/// # Errors
/// When the tool chain cannot be built, or the passes refuse the text.
pub fn optimised(text: &str, passes: &str) -> Result<String> {
    let toolchain = &parts()?.toolchain;
    let directory = tempfile::Builder::new().prefix("godwit-isa-").tempdir()?;
    let input = directory.path().join("input.ll");
    std::fs::write(&input, text)?;
    let run = Command::new(toolchain.llvm.join("opt"))
        .arg("-load-pass-plugin")
        .arg(&toolchain.plugin)
        .arg(format!("-passes={passes}"))
        .args(["-S", "-o", "-"])
        .arg(&input)
        .output()
        .context("cannot run opt; install the packages with scripts/setup --isa")?;
    ensure!(run.status.success(), "opt failed: {}", String::from_utf8_lossy(&run.stderr));
    Ok(String::from_utf8(run.stdout)?)
}

/// As [`program`], with the link's refusal as a value.
///
/// # Errors
/// When the tool chain cannot be built, or the source does not compile.
pub fn try_link(source: &Path, flags: &[&str]) -> Result<(tempfile::TempDir, Result<Report, LinkError>)> {
    let parts = parts()?;
    let directory = tempfile::Builder::new().prefix("godwit-isa-").tempdir()?;
    let bitcode = directory.path().join("program.bc");
    compile(&parts.toolchain, source, &bitcode, flags)?;
    let mut inputs = Inputs {
        bitcode: vec![bitcode],
        natives: parts.natives.clone(),
        output: directory.path().join("program"),
        options: Options {
            keep: None,
            probe: false,
            amount: Amount::Everything,
            toolchain: parts.toolchain.clone(),
            module: None,
        },
    };
    inputs.bitcode.extend(parts.neutral.iter().cloned());
    if std::env::var_os("GODWIT_ISA_KEEP").is_some() {
        // Tests run at once, and several may build the same program.
        let mut name = source.file_stem().unwrap_or_default().to_owned();
        name.push(directory.path().file_name().unwrap_or_default());
        let keep = isa().join("../target/isa/keep").join(name);
        std::fs::create_dir_all(&keep)?;
        inputs.options.keep = Some(keep);
    }
    let result = godwit_isa_link::link(&inputs);
    Ok((directory, result))
}
