//! Programs from the distribution's source packages: Lua with the scripts of this directory, and SQLite's amalgamation.

use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use serde::{Deserialize, Serialize};

use crate::compilers::Compilers;
use crate::measure::{self, Timed, Variant};
use crate::touched::{self, Text};

/// Rows of SQLite's `speedtest1`, in percent of what it does by default.
const SPEEDTEST_SIZE: &str = "10";

/// How long a compiler took, and the most memory that its processes had at once.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct Compiled {
    pub(crate) variant: String,
    pub(crate) seconds: f64,
    pub(crate) megabytes: u64,
}

fn isa() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..")
}

/// Unpacks a package's upstream archive, and gives its top directory.
fn unpack(package: &str, into: &Path) -> Result<PathBuf> {
    let cache = std::env::var_os("GODWIT_CACHE").map_or_else(
        || PathBuf::from(std::env::var_os("HOME").unwrap_or_else(|| "/root".into())).join(".cache/godwit"),
        PathBuf::from,
    );
    let archive = succeed(Command::new(isa().join("libc/fetch")).arg(cache.join("sources")).arg(package))?;
    let directory = into.join(package);
    std::fs::create_dir(&directory).with_context(|| format!("cannot make {}", directory.display()))?;
    succeed(
        Command::new("tar")
            .arg("-C")
            .arg(&directory)
            .args(["--strip-components=1", "-xf"])
            .arg(archive.trim()),
    )?;
    Ok(directory)
}

fn succeed(command: &mut Command) -> Result<String> {
    let output = command.output().with_context(|| format!("cannot run {command:?}"))?;
    ensure!(
        output.status.success(),
        "{command:?} fails with {}: {}{}",
        output.status,
        String::from_utf8_lossy(&output.stdout),
        String::from_utf8_lossy(&output.stderr)
    );
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

/// Lua's scripts in all builds, and its text.
///
/// # Errors
/// When Lua cannot be built, or a script fails or tells the builds apart.
pub(crate) fn lua(compilers: &Compilers, scratch: &Path, only: Option<&str>) -> Result<(Vec<Timed>, Text)> {
    let source = unpack("lua5.4", scratch)?.join("src");
    let sources: Vec<PathBuf> = files(&source, "c")?
        .into_iter()
        .filter(|path| path.file_name().is_some_and(|name| name != "luac.c"))
        .collect();
    let mut variants = vec![compilers.plain()];
    variants.extend(compilers.parts(&["one-program"])?);
    variants.push(compilers.godwit()?);
    let builds = measure::build(&variants, &sources, &["-DLUA_USE_POSIX"], scratch)?;
    let mut results = Vec::new();
    let mut text = None;
    for script in files(&Path::new(env!("CARGO_MANIFEST_DIR")).join("lua"), "lua")? {
        let name = script.file_stem().map_or_else(String::new, |name| name.to_string_lossy().into_owned());
        let argument = script.to_string_lossy();
        if name == "strings" {
            text = Some(Text {
                name: "lua (strings.lua)".to_owned(),
                plain: builds[0].text,
                godwit: builds[2].text,
                plain_touched: touched::bytes(&builds[0].executable, &[&argument])?,
                godwit_touched: touched::bytes(&builds[2].executable, &[&argument])?,
            });
        }
        if only.is_some_and(|part| !name.contains(part)) {
            continue;
        }
        let timed = measure::time(&name, "", &builds, &[&argument], |output| Some(output))?;
        eprintln!("lua {name}: ratio {:.3}", timed.ratio("godwit").unwrap_or(f64::NAN));
        results.push(timed);
    }
    Ok((results, text.context("there is no script strings.lua")?))
}

fn files(directory: &Path, extension: &str) -> Result<Vec<PathBuf>> {
    let mut files: Vec<PathBuf> = std::fs::read_dir(directory)
        .with_context(|| format!("cannot list {}", directory.display()))?
        .filter_map(|entry| entry.ok().map(|entry| entry.path()))
        .filter(|path| path.extension().is_some_and(|found| found == extension))
        .collect();
    files.sort();
    Ok(files)
}

/// What it takes to compile SQLite with its `speedtest1`, to all executables of either compiler; and that program.
///
/// # Errors
/// When SQLite cannot be built, or its builds tell different things.
pub(crate) fn sqlite(compilers: &Compilers, scratch: &Path) -> Result<(Vec<Compiled>, Timed, Text)> {
    let directory = unpack("sqlite3", scratch)?;
    succeed(
        Command::new("./configure")
            .args(["--disable-shared", "--disable-tcl", "--disable-readline"])
            .current_dir(&directory),
    )?;
    succeed(Command::new("make").args(["sqlite3.c"]).current_dir(&directory))?;
    let sources = [directory.join("sqlite3.c"), directory.join("test/speedtest1.c")];
    let include = format!("-I{}", directory.display());
    let flags = ["-DSQLITE_OMIT_LOAD_EXTENSION", "-DSQLITE_THREADSAFE=0", "-w", &include];
    let variants = [compilers.plain(), compilers.godwit()?];
    let mut compiled = Vec::new();
    for variant in &variants {
        let (time, bytes) = watch(variant, &sources, &flags, &scratch.join("watched"))?;
        eprintln!("sqlite with {}: {:.1} s, {} MB", variant.compiler.name, time.as_secs_f64(), bytes >> 20);
        compiled.push(Compiled {
            variant: variant.compiler.name.clone(),
            seconds: time.as_secs_f64(),
            megabytes: bytes >> 20,
        });
    }
    let builds = measure::build(&variants, &sources, &flags, scratch)?;
    let arguments = ["--size", SPEEDTEST_SIZE, "--memdb", "--verify"];
    let timed = measure::time("sqlite speedtest1", SPEEDTEST_SIZE, &builds, &arguments, hash)?;
    let small = ["--size", "1", "--memdb"];
    let text = Text {
        name: "sqlite speedtest1".to_owned(),
        plain: builds[0].text,
        godwit: builds[1].text,
        plain_touched: touched::bytes(&builds[0].executable, &small)?,
        godwit_touched: touched::bytes(&builds[1].executable, &small)?,
    };
    Ok((compiled, timed, text))
}

/// What speedtest1 prints from the hash of its results on; before it stands how long each part took.
fn hash(output: &[u8]) -> Option<&[u8]> {
    const WORDS: &[u8] = b"Verification Hash";
    let at = output.windows(WORDS.len()).position(|window| window == WORDS)?;
    let line = output[at..].split(|&byte| byte == b'\n').next()?;
    Some(line)
}

/// Runs a compiler, and looks at its processes' memory while it runs.
fn watch(variant: &Variant, sources: &[PathBuf], flags: &[&str], output: &Path) -> Result<(Duration, u64)> {
    /// A compiler's memory changes in seconds.
    const BETWEEN: Duration = Duration::from_millis(20);
    let (program, arguments) =
        variant.compiler.command.split_first().context("the compiler's command is empty")?;
    let mut command = Command::new(program);
    command.args(arguments).args(flags).args(sources).arg("-o").arg(output).arg("-lm");
    let start = Instant::now();
    // A group of its own, so that its processes are known.
    let mut child = command
        .process_group(0)
        .stdin(Stdio::null())
        .spawn()
        .with_context(|| format!("cannot run {program}"))?;
    let mut most = 0;
    let status = loop {
        if let Some(status) = child.try_wait().context("cannot wait for the compiler")? {
            break status;
        }
        most = most.max(group_memory(child.id()));
        std::thread::sleep(BETWEEN);
    };
    ensure!(status.success(), "{} fails with {status}", variant.compiler.name);
    Ok((start.elapsed(), most))
}

/// Resident bytes of all processes of a group; one that ends meanwhile has none.
fn group_memory(group: u32) -> u64 {
    const PAGE: u64 = 4096;
    let Ok(processes) = std::fs::read_dir("/proc") else { return 0 };
    let of = |path: PathBuf| -> Option<u64> {
        let stat = std::fs::read_to_string(path.join("stat")).ok()?;
        // After the name, which may hold anything: state, parent, group, …, and the pages as the 22nd of these.
        let fields: Vec<&str> = stat.rsplit_once(')')?.1.split_whitespace().collect();
        let own: u32 = fields.get(2)?.parse().ok()?;
        let pages: u64 = fields.get(21)?.parse().ok()?;
        (own == group).then_some(pages * PAGE)
    };
    processes.flatten().filter_map(|entry| of(entry.path())).sum()
}
