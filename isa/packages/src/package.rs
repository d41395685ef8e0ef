//! A source package: fetched, unpacked and built in a directory of its own. The result is kept under the target
//! directory, by a sum of all that went in, since a link of a large program takes minutes.

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use anyhow::{Context as _, Result, bail};

use crate::tools::{self, isa, program, run};

/// How a package becomes a program.
#[derive(Debug, Clone, Copy)]
pub struct Recipe {
    /// The source package's name.
    pub package: &'static str,
    /// What tells this build of it from others.
    pub name: &'static str,
    /// Shell commands in its directory; CC, AR, LD, RANLIB, NM are set.
    pub commands: &'static str,
}

/// The directory of a built package, which is built at the first call.
///
/// # Errors
/// When it cannot be fetched or built.
pub fn built(recipe: Recipe) -> Result<PathBuf> {
    type Built = Arc<OnceLock<Result<PathBuf, String>>>;
    static ALL: OnceLock<Mutex<HashMap<String, Built>>> = OnceLock::new();
    let one = {
        let mut all = ALL.get_or_init(Mutex::default).lock().unwrap_or_else(PoisonError::into_inner);
        Arc::clone(all.entry(format!("{}-{}", recipe.package, recipe.name)).or_default())
    };
    // Only tests of the same package wait for one another.
    let path = one.get_or_init(|| make(recipe).map_err(|error| format!("{error:#}")));
    path.clone().map_err(anyhow::Error::msg)
}

/// The package's upstream archive, which is fetched at the first call, and kept.
///
/// # Errors
/// When it cannot be fetched.
pub fn archive(recipe: Recipe) -> Result<PathBuf> {
    let fetched =
        run(Command::new(isa().join("libc/fetch")).arg(tools::cache().join("sources")).arg(recipe.package))?;
    Ok(PathBuf::from(fetched.trim()))
}

fn make(recipe: Recipe) -> Result<PathBuf> {
    let archive = archive(recipe)?;
    let programs = tools::programs()?;
    let home = programs.with_file_name("isa");
    let mut inputs = vec![archive.clone(), program("godwit-cc")?];
    for part in [
        "plugin/libgodwit-isa.so",
        "runtime/neutral.bc",
        "runtime/x86_64/runtime.o",
        "runtime/aarch64/runtime.o",
        "sysroot/lib/libc.a",
        "cxx/lib/libc++.a",
    ] {
        inputs.push(home.join(part));
    }
    let key = tools::sum(&inputs, &[recipe.commands])?;
    let place = programs.with_file_name("packages");
    let name = format!("{}-{}-", recipe.package, recipe.name);
    let directory = place.join(format!("{name}{key}"));
    if directory.exists() {
        return Ok(directory);
    }
    std::fs::create_dir_all(&place).with_context(|| format!("cannot make {}", place.display()))?;
    forget(&place, &name)?;
    let part = tempfile::Builder::new().prefix(".part-").tempdir_in(&place)?;
    run(Command::new("tar").arg("-C").arg(part.path()).args(["--strip-components=1", "-xf"]).arg(&archive))?;
    run(&mut command(part.path(), recipe.commands)?)?;
    std::fs::rename(part.keep(), &directory)
        .with_context(|| format!("cannot put {} in its place", directory.display()))?;
    Ok(directory)
}

/// A shell command in a package's directory, with the drivers in the place of the machine's own.
///
/// # Errors
/// When the drivers cannot be built.
pub fn command(directory: &Path, script: &str) -> Result<Command> {
    let mut command = Command::new("bash");
    command
        .args(["-euo", "pipefail", "-c", script])
        .current_dir(directory)
        .env("CC", program("godwit-cc")?)
        .env("CXX", program("godwit-cxx")?)
        .env("AR", program("godwit-ar")?)
        .env("LD", program("godwit-ld")?)
        .env("RANLIB", program("godwit-ranlib")?)
        .env("NM", "llvm-nm-19")
        .env("LC_ALL", "C");
    Ok(command)
}

/// Removes builds of what is no longer there.
fn forget(place: &Path, name: &str) -> Result<()> {
    for entry in std::fs::read_dir(place)? {
        let entry = entry?;
        if entry.file_name().to_string_lossy().starts_with(name) {
            match std::fs::remove_dir_all(entry.path()) {
                Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
                    bail!("cannot remove {}: {error}", entry.path().display())
                }
                _ => {}
            }
        }
    }
    Ok(())
}
