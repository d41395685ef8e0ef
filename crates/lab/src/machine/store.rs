//! What is made once for all labs: the key for ssh, images of distributions, and snapshots of machines.
//!
//! ```text
//!   /var/cache/godwit/machines/key, key.pub
//!                              images/<digest>/     kernel, initrd, root.img, known_hosts
//!                              snapshots/<digest>/  disk.qcow2, memory, state
//! ```
//!
//! A digest is of all that goes in, so nothing there is ever changed; what was not used for a month is removed.

use std::{
    fs::{self, File},
    io,
    path::{Path, PathBuf},
    process::{Command, Stdio},
    time::{Duration, SystemTime},
};

use rustix::fs::FlockOperation;
use sha2::{Digest, Sha256};

use crate::{
    error::{Context, LabError},
    files, programs,
    spec::{Architecture, Machine},
};

const CACHE: &str = "/var/cache/godwit/machines";
const IMAGES: &str = "images";
const SNAPSHOTS: &str = "snapshots";
/// Makes an image.
const IMAGE_SCRIPT: &str = include_str!("image");
/// What a node has installed, of the packages in the directory that the user names.
const PACKAGES: [&str; 2] = ["godwit", "godwit-criu"];
const UNUSED: Duration = Duration::from_secs(30 * 24 * 3600);

/// The key that machines let root in with. Whoever can read it is root on this host.
pub(crate) fn private_key() -> PathBuf {
    Path::new(CACHE).join("key")
}

/// The image of a machine's distribution, made if it is not there.
pub(crate) fn image(machine: &Machine) -> Result<PathBuf, LabError> {
    let public_key = public_key()?;
    let key = fs::read_to_string(&public_key).context("reading", public_key.display())?;
    let architecture = machine.architecture.to_string();
    let digest = digest(&[IMAGE_SCRIPT, machine.suite(), &architecture, &key]);
    kept(IMAGES, &digest, |target| {
        say(&format!("making the image of {} machines, once: this takes minutes", machine.system()));
        let log = Path::new(CACHE).join(format!("image-{}-{architecture}.log", machine.suite()));
        let output = File::create(&log).context("creating", log.display())?;
        let errors = output.try_clone().context("opening", log.display())?;
        let mut command = Command::new("bash");
        command.args(["-c", IMAGE_SCRIPT, "image", machine.suite(), &architecture]);
        command.arg(&public_key).arg(target).stdin(Stdio::null()).stdout(output).stderr(errors);
        let status = command.status().context("running", "bash")?;
        if status.success() {
            return Ok(());
        }
        Err(LabError::MachineImage { system: machine.system(), output: programs::tail(&log), log })
    })
}

fn public_key() -> Result<PathBuf, LabError> {
    let (private, public) = (private_key(), Path::new(CACHE).join("key.pub"));
    let _lock = lock(CACHE.as_ref())?;
    if !public.exists() {
        let missing =
            |_| LabError::NoMachineProgram { name: "ssh-keygen".to_owned(), package: "openssh-client" };
        // One of which only half was written is made anew.
        let _ = fs::remove_file(&private);
        let output = Command::new("ssh-keygen")
            .args(["-q", "-t", "ed25519", "-N", "", "-C", "godwit lab", "-f"])
            .arg(&private)
            .stdin(Stdio::null())
            .output()
            .map_err(missing)?;
        if !output.status.success() {
            let said = String::from_utf8_lossy(&output.stderr).trim().to_owned();
            return Err(io::Error::other(said)).context("making", private.display());
        }
    }
    Ok(public)
}

/// A snapshot by what it is made from; `make` puts it into the directory that it is given.
pub(crate) fn snapshot(
    parts: &[&str],
    make: impl FnOnce(&Path) -> Result<(), LabError>,
) -> Result<PathBuf, LabError> {
    kept(SNAPSHOTS, &digest(parts), |target| {
        // It becomes what it is called only when it is whole.
        let making = target.with_extension("making");
        files::remove_tree(&making)?;
        fs::create_dir(&making).context("creating", making.display())?;
        make(&making)?;
        fs::rename(&making, target).context("renaming", making.display())
    })
}

/// The directory of a digest, made under a lock if it is not there.
fn kept(
    kind: &str,
    digest: &str,
    make: impl FnOnce(&Path) -> Result<(), LabError>,
) -> Result<PathBuf, LabError> {
    let all = Path::new(CACHE).join(kind);
    fs::create_dir_all(&all).context("creating", all.display())?;
    let target = all.join(digest);
    let lock_file = all.join(format!("{digest}.lock"));
    let file = File::options().create(true).append(true).open(&lock_file);
    let file = file.context("opening", lock_file.display())?;
    rustix::fs::flock(&file, FlockOperation::LockExclusive).context("locking", lock_file.display())?;
    if !target.exists() {
        make(&target)?;
        remove_unused(&all)?;
    }
    let directory = File::open(&target).context("opening", target.display())?;
    directory.set_modified(SystemTime::now()).context("marking as used", target.display())?;
    Ok(target)
}

fn lock(directory: &Path) -> Result<File, LabError> {
    fs::create_dir_all(directory).context("creating", directory.display())?;
    let file = File::open(directory).context("opening", directory.display())?;
    rustix::fs::flock(&file, FlockOperation::LockExclusive).context("locking", directory.display())?;
    Ok(file)
}

fn remove_unused(all: &Path) -> Result<(), LabError> {
    for entry in fs::read_dir(all).context("reading", all.display())?.flatten() {
        let metadata = entry.metadata();
        // The locks stay: somebody may wait at one.
        if !metadata.as_ref().is_ok_and(fs::Metadata::is_dir) {
            continue;
        }
        let used = metadata.and_then(|metadata| metadata.modified());
        if used.is_ok_and(|used| used.elapsed().is_ok_and(|ago| ago > UNUSED)) {
            files::remove_tree(&entry.path())?;
        }
    }
    Ok(())
}

/// The packages of a directory that a node of this architecture installs.
pub(crate) fn packages(directory: &Path, architecture: Architecture) -> Result<Vec<PathBuf>, LabError> {
    let entries = fs::read_dir(directory).context("reading the packages in", directory.display())?;
    let paths: Vec<_> = entries.flatten().map(|entry| entry.path()).collect();
    let wrong = |reason: String| LabError::MachinePackages { directory: directory.to_owned(), reason };
    let find = |package: &&str| {
        let (start, end) = (format!("{package}_"), format!("_{architecture}.deb"));
        let is_it = |path: &&PathBuf| {
            let name = path.file_name().unwrap_or_default().to_string_lossy();
            name.starts_with(&start) && name.ends_with(&end)
        };
        let mut found = paths.iter().filter(is_it);
        match (found.next(), found.next()) {
            (Some(one), None) => Ok(one.clone()),
            (None, _) => Err(wrong(format!("it has no {package}_…_{architecture}.deb"))),
            (Some(_), Some(_)) => {
                Err(wrong(format!("it has more than one {package}_…_{architecture}.deb; keep one")))
            }
        }
    };
    PACKAGES.iter().map(find).collect()
}

/// The digest of a file's content.
pub(crate) fn file_digest(path: &Path) -> Result<String, LabError> {
    let mut file = File::open(path).context("opening", path.display())?;
    let mut hash = Sha256::new();
    io::copy(&mut file, &mut hash).context("reading", path.display())?;
    Ok(hex(&hash.finalize()))
}

fn digest(parts: &[&str]) -> String {
    let mut hash = Sha256::new();
    for part in parts {
        hash.update(part.len().to_le_bytes());
        hash.update(part);
    }
    let mut text = hex(&hash.finalize());
    text.truncate(32);
    text
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Tells the user why it takes long.
pub(crate) fn say(what: &str) {
    eprintln!("{what}");
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn digests_tell_parts_apart() {
        assert_eq!(digest(&["a", "bc"]), digest(&["a", "bc"]));
        assert_ne!(digest(&["a", "bc"]), digest(&["ab", "c"]));
        assert_eq!(digest(&[]).len(), 32);
    }

    #[test]
    fn packages_of_the_architecture_are_found_and_must_be_the_only_ones() {
        let scratch = tempfile::tempdir().unwrap();
        let make = |name: &str| fs::write(scratch.path().join(name), "").unwrap();
        let find = || packages(scratch.path(), Architecture::Amd64);
        make("godwit_1.0_amd64.deb");
        make("godwit-lab_1.0_amd64.deb");
        make("godwit-criu_4.2_arm64.deb");
        assert!(find().unwrap_err().to_string().contains("no godwit-criu_…_amd64.deb"));
        make("godwit-criu_4.2_amd64.deb");
        let names: Vec<_> = find().unwrap().iter().map(|path| path.file_name().unwrap().to_owned()).collect();
        assert_eq!(names, ["godwit_1.0_amd64.deb", "godwit-criu_4.2_amd64.deb"]);
        make("godwit_1.1_amd64.deb");
        assert!(find().unwrap_err().to_string().contains("more than one godwit_"));
    }
}
