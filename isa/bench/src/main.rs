//! `godwit-isa-bench`: what it costs a program that it can change the instruction set. It builds programs with clang and
//! with godwit-cc, runs the builds as whole processes in turn, and writes medians, sizes and times of captures as JSON
//! and into the tables of a page.

mod capture;
mod compilers;
mod elf;
mod measure;
mod packages;
mod page;
mod touched;

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, Result, bail, ensure};
use clap::{Parser, ValueEnum};
use godwit_isa_programs::catalogue::{Kind, programs};

use crate::compilers::{Compilers, PARTS};
use crate::page::Results;
use crate::touched::Text;

/// Kernels whose text is looked at, in their small sizes.
const TEXT_OF: [&str; 4] = ["cg", "dhrystone", "kmeans", "word_count"];

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Part {
    /// Run time of the kernels, told by cause.
    Kernels,
    /// Run time of Lua's scripts.
    Lua,
    /// Compiling and running SQLite.
    Sqlite,
    /// Text, all and touched.
    Text,
    /// Captures and resumes.
    Capture,
}

#[derive(Parser)]
#[command(about = "What it costs a program that it can change the instruction set, beside plain builds")]
struct Arguments {
    /// godwit-cc; what it needs must have been built beside it.
    #[arg(long)]
    godwit: PathBuf,
    /// What to measure; everything otherwise.
    #[arg(long, value_enum, value_delimiter = ',')]
    part: Vec<Part>,
    /// Runs of each, of which the median counts; one more warms up.
    #[arg(long, default_value_t = 5)]
    runs: usize,
    /// Only kernels and scripts whose name contains this.
    #[arg(long)]
    only: Option<String>,
    /// Sizes for tests instead of those for benchmarks: shows that all works, measures nothing.
    #[arg(long)]
    small: bool,
    /// Where the results are kept as JSON; parts that are not measured stay as they are.
    #[arg(long)]
    results: PathBuf,
    /// The page whose tables are filled.
    #[arg(long)]
    page: Option<PathBuf>,
}

fn main() -> Result<()> {
    let arguments = Arguments::parse();
    ensure!(arguments.runs > 0, "no runs are asked for");
    let godwit = arguments.godwit.canonicalize().with_context(|| {
        format!("there is no godwit-cc {}; build it by make isa", arguments.godwit.display())
    })?;
    let compilers = Compilers::new(godwit.to_string_lossy().into_owned(), arguments.runs);
    let scratch = tempfile::tempdir().context("cannot make a directory for the programs")?;
    let wanted = |part| arguments.part.is_empty() || arguments.part.contains(&part);
    let mut results = read(&arguments.results)?;
    results.machine = machine()?;
    if wanted(Part::Kernels) {
        kernels(&compilers, &arguments, scratch.path(), |timed| {
            results.kernels.retain(|one| one.name != timed.name);
            results.kernels.push(timed);
            results.kernels.sort_by(|a, b| a.name.cmp(&b.name));
            // They take minutes: what was measured is kept if the rest is given up.
            keep(&arguments, &results)
        })?;
    }
    if wanted(Part::Lua) {
        let (timed, text) = packages::lua(&compilers, scratch.path(), arguments.only.as_deref())?;
        results.lua = timed;
        put_text(&mut results, text);
    }
    if wanted(Part::Text) {
        for text in texts(&compilers, scratch.path())? {
            put_text(&mut results, text);
        }
    }
    if wanted(Part::Capture) {
        results.depths = capture::depths(&compilers, arguments.runs, scratch.path())?;
        results.requests = Some(capture::requests(&compilers, scratch.path())?);
    }
    if wanted(Part::Sqlite) {
        let (compiled, timed, text) = packages::sqlite(&compilers, scratch.path())?;
        results.compiled = compiled;
        results.sqlite = vec![timed];
        put_text(&mut results, text);
    }
    keep(&arguments, &results)
}

/// Writes the results, and the page's tables.
fn keep(arguments: &Arguments, results: &Results) -> Result<()> {
    let json = serde_json::to_string_pretty(results)? + "\n";
    write(&arguments.results, &json)?;
    if let Some(path) = &arguments.page {
        let page =
            std::fs::read_to_string(path).with_context(|| format!("cannot read {}", path.display()))?;
        write(path, &page::fill(&page, results)?)?;
    }
    Ok(())
}

/// The results of earlier runs.
fn read(path: &Path) -> Result<Results> {
    match std::fs::read(path) {
        Ok(bytes) => serde_json::from_slice(&bytes)
            .with_context(|| format!("{} is not as it should be", path.display())),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(Results::default()),
        Err(error) => Err(error).with_context(|| format!("cannot read {}", path.display())),
    }
}

fn write(path: &Path, text: &str) -> Result<()> {
    std::fs::write(path, text).with_context(|| format!("cannot write {}", path.display()))
}

/// The processor and how many of them.
fn machine() -> Result<String> {
    let text = std::fs::read_to_string("/proc/cpuinfo").context("cannot read /proc/cpuinfo")?;
    let model = text.lines().find_map(|line| line.strip_prefix("model name")).unwrap_or(": unknown");
    let clang = Command::new("clang-19").arg("--version").output().context("cannot run clang-19")?;
    let clang = String::from_utf8_lossy(&clang.stdout).lines().next().unwrap_or_default().to_owned();
    Ok(format!(
        "{}, {} processors; {clang}",
        model.trim_start_matches([' ', '\t', ':']),
        std::thread::available_parallelism()?
    ))
}

fn put_text(results: &mut Results, text: Text) {
    results.text.retain(|one| one.name != text.name);
    results.text.push(text);
    results.text.sort_by(|a, b| a.name.cmp(&b.name));
}

fn kernels(
    compilers: &Compilers,
    arguments: &Arguments,
    scratch: &Path,
    mut done: impl FnMut(measure::Timed) -> Result<()>,
) -> Result<()> {
    let mut measured = 0;
    for kernel in programs(Kind::Kernels).context("cannot list the kernels")? {
        if arguments.only.as_ref().is_some_and(|part| !kernel.name.contains(part.as_str())) {
            continue;
        }
        let size = if arguments.small { None } else { kernel.large() };
        let mut variants = vec![compilers.plain()];
        variants.extend(compilers.parts(&PARTS.map(|(name, _)| name))?);
        variants.push(compilers.godwit()?);
        if page::is_apart(&kernel.name) {
            variants.extend(compilers.alignments());
        }
        let builds = measure::build(&variants, &kernel.sources, &[], scratch)?;
        let words: Vec<&str> = size.into_iter().collect();
        let timed = measure::time(&kernel.name, size.unwrap_or("small"), &builds, &words, verified)?;
        eprintln!("{}: ratio {:.3}", timed.name, timed.ratio("godwit").unwrap_or(f64::NAN));
        done(timed)?;
        measured += 1;
    }
    if measured == 0 {
        bail!("no kernel has a name that contains \"{}\"", arguments.only.as_deref().unwrap_or_default());
    }
    Ok(())
}

/// All of what a kernel prints, once it has verified its result.
fn verified(output: &[u8]) -> Option<&[u8]> {
    output.ends_with(b"verification: passed\n").then_some(output)
}

fn texts(compilers: &Compilers, scratch: &Path) -> Result<Vec<Text>> {
    let mut texts = Vec::new();
    for kernel in programs(Kind::Kernels).context("cannot list the kernels")? {
        if !TEXT_OF.contains(&kernel.name.as_str()) {
            continue;
        }
        let builds =
            measure::build(&[compilers.plain(), compilers.godwit()?], &kernel.sources, &[], scratch)?;
        texts.push(Text {
            name: kernel.name.clone(),
            plain: builds[0].text,
            godwit: builds[1].text,
            plain_touched: touched::bytes(&builds[0].executable, &[])?,
            godwit_touched: touched::bytes(&builds[1].executable, &[])?,
        });
    }
    Ok(texts)
}
