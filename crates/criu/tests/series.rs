//! The list of CRIU's patches, `packaging/criu/series`, and the patches beside it; needs root, as the script does.

#![allow(clippy::unwrap_used)]

use std::fs;
use std::path::Path;
use std::process::Command;

/// A copy of the scripts and of the series, to change.
fn copy() -> tempfile::TempDir {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let copy = tempfile::tempdir().unwrap();
    for directory in ["scripts", "packaging"] {
        let done = Command::new("cp").arg("-a").arg(root.join(directory)).arg(copy.path()).status();
        assert!(done.unwrap().success());
    }
    copy
}

/// Whether the script of this copy ends well, and what it writes to either output.
fn setup_criu(copy: &Path, arguments: &[&str]) -> (bool, String) {
    let output = Command::new(copy.join("scripts/setup-criu")).args(arguments).output().unwrap();
    let text = [output.stdout, output.stderr].concat();
    (output.status.success(), String::from_utf8(text).unwrap())
}

/// A patch that the list does not name would be in nobody's CRIU: the script refuses to go on.
#[test]
fn a_patch_that_is_not_in_the_series_is_refused() {
    let copy = copy();
    let check = || setup_criu(copy.path(), &["--check-series"]);
    assert_eq!(check(), (true, String::new()));

    let patches = copy.path().join("packaging/criu");
    fs::write(patches.join("forgotten.patch"), "").unwrap();
    let (good, message) = check();
    assert!(!good && message.contains("Only one of the two has: forgotten."), "{message}");

    fs::remove_file(patches.join("forgotten.patch")).unwrap();
    fs::remove_file(patches.join("inherited-areas.patch")).unwrap();
    let (good, message) = check();
    assert!(!good && message.contains("Only one of the two has: inherited-areas."), "{message}");
}

/// What is built is what the series names.
#[test]
fn another_source_than_that_of_the_series_is_refused() {
    let copy = copy();
    let patches = copy.path().join("packaging/criu");
    let is_archive = |path: &std::path::PathBuf| path.to_string_lossy().ends_with(".orig.tar.xz");
    let paths = fs::read_dir(&patches).unwrap().map(|entry| entry.unwrap().path());
    fs::write(paths.into_iter().find(is_archive).unwrap(), "another").unwrap();
    let source = copy.path().join("source");
    for arguments in [&["--check-series"][..], &["--source", source.to_str().unwrap()]] {
        let (good, message) = setup_criu(copy.path(), arguments);
        assert!(!good && message.contains("is not the archive whose sum"), "{arguments:?}: {message}");
    }
    assert!(!source.exists());
}

/// Of patches that do not all fit exactly none is applied, and the version tells it: the number of the series is
/// that of all of them.
#[test]
fn patches_are_applied_exactly_and_all_or_none() {
    let copy = copy();
    let patches = copy.path().join("packaging/criu");
    for entry in fs::read_dir(&patches).unwrap() {
        let path = entry.unwrap().path();
        if path.extension().is_some_and(|extension| extension == "patch") {
            fs::remove_file(path).unwrap();
        }
    }
    let sum = "0".repeat(64);
    let series = format!("number 7\nrelease 4.2.1\nsha256 {sum}\n\nfirst\nsecond\n");
    fs::write(patches.join("series"), series).unwrap();
    let change = |file: &str, before: &str| {
        format!("--- a/{file}\n+++ b/{file}\n@@ -1,2 +1,2 @@\n {before}\n-b\n+B\n")
    };
    fs::write(patches.join("first.patch"), change("one", "a")).unwrap();
    fs::write(patches.join("second.patch"), change("two", "near a")).unwrap();

    let tree = copy.path().join("tree");
    let numbers = "CRIU_VERSION_MAJOR := 4\nCRIU_VERSION_MINOR := 2\nCRIU_VERSION_SUBLEVEL := 1\n";
    let fill = |two: &str| {
        fs::create_dir_all(&tree).unwrap();
        fs::write(tree.join("Makefile.versions"), numbers).unwrap();
        fs::write(tree.join("one"), "a\nb\n").unwrap();
        fs::write(tree.join("two"), two).unwrap();
    };
    let patch = || setup_criu(copy.path(), &["--patch", tree.to_str().unwrap()]);

    // One line of what is around the change is another: patch(1) would take it for near enough.
    fill("a\nb\n");
    let (good, message) = patch();
    assert!(!good && message.contains("the patch second was made for"), "{message}");
    assert_eq!(fs::read_to_string(tree.join("one")).unwrap(), "a\nb\n", "none was applied");

    fill("near a\nb\n");
    assert_eq!(patch(), (true, "4.2.1+godwit.7\n".to_owned()));
    assert_eq!(fs::read_to_string(tree.join("one")).unwrap(), "a\nB\n");
    assert_eq!(fs::read_to_string(tree.join("two")).unwrap(), "near a\nB\n");
}
