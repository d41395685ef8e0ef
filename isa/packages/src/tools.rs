//! `godwit-cc`, `godwit-state` and what they need, of this source tree.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;

use anyhow::{Context as _, Result, bail, ensure};

/// The directory `isa` of the source tree.
#[must_use]
pub fn isa() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..")
}

/// The directory of the programs, all of which have been built when it is known.
///
/// # Errors
/// When something cannot be built.
pub fn programs() -> Result<&'static Path> {
    static PROGRAMS: OnceLock<Result<PathBuf, String>> = OnceLock::new();
    let built = PROGRAMS.get_or_init(|| build().map_err(|error| format!("{error:#}")));
    built.as_deref().map_err(|error| anyhow::anyhow!("{error}"))
}

fn build() -> Result<PathBuf> {
    let programs = directory()?;
    let target = programs.parent().context("the programs are not in a cargo target directory")?;
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let mut command = Command::new(cargo);
    command
        .args(["build", "--quiet", "-p", "godwit-cc", "-p", "godwit-isa-state", "--bins", "--target-dir"])
        .arg(target)
        .current_dir(isa());
    if programs.file_name().is_some_and(|profile| profile == "release") {
        command.arg("--release");
    }
    run(&mut command)?;
    run(Command::new(isa().join("build")).arg(target.join("isa")))?;
    Ok(programs)
}

/// The command `godwit` of this tree, which has been built with the program that asks.
///
/// # Errors
/// When it has not.
pub fn godwit() -> Result<PathBuf> {
    let godwit = directory()?.join("godwit");
    ensure!(godwit.exists(), "{} is not built: run 'make base-image'", godwit.display());
    Ok(godwit)
}

/// Where cargo puts programs.
fn directory() -> Result<PathBuf> {
    // A test is target/PROFILE/deps/NAME, and a program target/PROFILE/NAME, where others belong, too.
    let own = std::env::current_exe().context("cannot tell where this program is")?;
    let directory = own.parent().context("this program is in no directory")?;
    let is_test = directory.file_name().is_some_and(|name| name == "deps");
    let programs = if is_test { directory.parent() } else { Some(directory) };
    Ok(programs.context("this program is not in a cargo target directory")?.to_owned())
}

/// A program of this tree, by name.
///
/// # Errors
/// When it cannot be built.
pub fn program(name: &str) -> Result<PathBuf> {
    Ok(programs()?.join(name))
}

/// Where what was fetched is kept.
pub(crate) fn cache() -> PathBuf {
    std::env::var_os("GODWIT_CACHE").map_or_else(
        || PathBuf::from(std::env::var_os("HOME").unwrap_or_else(|| "/root".into())).join(".cache/godwit"),
        PathBuf::from,
    )
}

/// Runs a command that must succeed, and gives its standard output.
///
/// # Errors
/// When it does not start, or fails, with what it said.
pub fn run(command: &mut Command) -> Result<String> {
    let output = command.output().with_context(|| format!("cannot run {command:?}"))?;
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    if output.status.success() {
        return Ok(text);
    }
    // Builds say a lot before they fail.
    let tail = |text: &str| text.chars().skip(text.chars().count().saturating_sub(4000)).collect::<String>();
    bail!(
        "{command:?} failed with {}:\n{}\n{}",
        output.status,
        tail(&text),
        tail(&String::from_utf8_lossy(&output.stderr))
    )
}

/// The SHA-256 of files and words together, as text.
pub(crate) fn sum(files: &[PathBuf], words: &[&str]) -> Result<String> {
    let sums = run(Command::new("sha256sum").args(files))?;
    // Where they are does not matter, only what they are.
    let mut all: String = sums.lines().filter_map(|line| line.split(' ').next()).collect();
    all.extend(words.iter().copied());
    let mut child = Command::new("sha256sum")
        .stdin(std::process::Stdio::piped())
        .stdout(std::process::Stdio::piped())
        .spawn()
        .context("cannot run sha256sum")?;
    let mut stdin = child.stdin.take().context("sha256sum has no input")?;
    std::io::Write::write_all(&mut stdin, all.as_bytes()).context("cannot write to sha256sum")?;
    drop(stdin);
    let output = child.wait_with_output().context("cannot wait for sha256sum")?;
    ensure!(output.status.success() && output.stdout.len() > 32, "sha256sum failed");
    Ok(String::from_utf8_lossy(&output.stdout[..24]).into_owned())
}
