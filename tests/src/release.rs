//! The last release, from which a cluster is upgraded to the programs that are tested here.

use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
};

use crate::programs;

/// The directory of the last release's programs, beside those that are tested. They are built from the release's commit
/// where they are not there, which takes minutes.
pub fn last() -> PathBuf {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let releases = fs::read_to_string(root.join("packaging/releases")).unwrap();
    let version = releases.lines().rfind(|line| !line.starts_with('#') && !line.is_empty());
    let version = version.and_then(|line| line.split_whitespace().next()).unwrap();
    let directory = programs().with_file_name("releases").join(version);
    let built =
        Command::new(root.join("scripts/build-release")).arg(version).arg(&directory).output().unwrap();
    assert!(built.status.success(), "building release {version}: {}", String::from_utf8_lossy(&built.stderr));
    directory
}
