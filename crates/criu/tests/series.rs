//! The list of CRIU's patches, `packaging/criu/series`, and the patches beside it.

#![allow(clippy::unwrap_used)]

use std::path::Path;
use std::process::Command;

/// A patch that the list does not name would be in nobody's CRIU: the script refuses to go on.
#[test]
fn a_patch_that_is_not_in_the_series_is_refused() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let copy = tempfile::tempdir().unwrap();
    for directory in ["scripts", "packaging"] {
        let done = Command::new("cp").arg("-a").arg(root.join(directory)).arg(copy.path()).status();
        assert!(done.unwrap().success());
    }
    let check = || {
        let output = Command::new(copy.path().join("scripts/setup-criu")).arg("--check-series").output();
        let output = output.unwrap();
        (output.status.success(), String::from_utf8(output.stderr).unwrap())
    };
    assert_eq!(check(), (true, String::new()));

    let patches = copy.path().join("packaging/criu");
    std::fs::write(patches.join("forgotten.patch"), "").unwrap();
    let (good, message) = check();
    assert!(!good && message.contains("Only one of the two has: forgotten."), "{message}");

    std::fs::remove_file(patches.join("forgotten.patch")).unwrap();
    std::fs::remove_file(patches.join("inherited-areas.patch")).unwrap();
    let (good, message) = check();
    assert!(!good && message.contains("Only one of the two has: inherited-areas."), "{message}");
}
