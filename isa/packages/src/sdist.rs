//! A source archive of the Python package index, for what the distribution's source packages leave out.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, Result, bail, ensure};

use crate::tools::{cache, run};

/// One archive, which can be no other.
#[derive(Debug, Clone, Copy)]
pub struct Sdist {
    /// The project's name.
    pub name: &'static str,
    /// Its release.
    pub version: &'static str,
    /// The archive's SHA-256, in hexadecimal.
    pub sha256: &'static str,
}

impl Sdist {
    /// Where the archive is; fetched by pip at the first call, and kept.
    ///
    /// # Errors
    /// When it cannot be fetched, or is not the one that is meant.
    pub fn fetched(self) -> Result<PathBuf> {
        let Self { name, version, sha256 } = self;
        let sources = cache().join("sources");
        let place = sources.join(format!("{name}-{version}"));
        if let Some(archive) = only_file(&place)? {
            return Ok(archive);
        }
        std::fs::create_dir_all(&sources).with_context(|| format!("cannot make {}", sources.display()))?;
        let part = tempfile::Builder::new().prefix(".part-").tempdir_in(&sources)?;
        let wanted = part.path().join("wanted");
        std::fs::write(&wanted, format!("{name}=={version} --hash=sha256:{sha256}\n"))?;
        let kept = part.path().join("kept");
        run(Command::new("python3")
            .args(["-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"])
            .args(["--no-binary", name, "--require-hashes", "-r"])
            .arg(&wanted)
            .arg("-d")
            .arg(&kept))?;
        ensure!(only_file(&kept)?.is_some(), "pip brought no archive of {name} {version}");
        // Another process may have been faster: its archive has the same sum.
        if let Err(error) = std::fs::rename(&kept, &place)
            && !place.exists()
        {
            bail!("cannot put {} in its place: {error}", place.display());
        }
        only_file(&place)?.with_context(|| format!("{} is empty", place.display()))
    }
}

fn only_file(directory: &Path) -> Result<Option<PathBuf>> {
    match std::fs::read_dir(directory) {
        Ok(mut entries) => entries.next().map(|entry| Ok(entry?.path())).transpose(),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error).with_context(|| format!("cannot read {}", directory.display())),
    }
}
