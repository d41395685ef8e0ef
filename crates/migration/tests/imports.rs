//! `scripts/check-imports` sees an import that must not be.

#![allow(clippy::unwrap_used)]

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

/// A crate with these files in `src`.
fn checked(files: &[(&str, &str)]) -> (bool, String) {
    let root = tempfile::tempdir().unwrap();
    for (name, text) in files {
        let path: PathBuf = root.path().join("crates/migration/src").join(name);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, text).unwrap();
    }
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../scripts/check-imports");
    let output = Command::new(script.canonicalize().unwrap()).current_dir(root.path()).output().unwrap();
    (output.status.success(), String::from_utf8(output.stderr).unwrap())
}

#[test]
fn a_circle_of_modules_is_refused() {
    let one = ("one.rs", "use crate::two::Two;\n");
    assert_eq!(checked(&[one, ("two.rs", "use std::fs;\n")]), (true, String::new()));
    for back in ["use crate::one::One;", "use crate::{io, one::{self, One}};", "fn f() { crate::one::f() }"] {
        let (good, message) = checked(&[one, ("two.rs", back)]);
        assert!(!good && message.contains("one -> two"), "{back}: {message}");
    }
    let (good, message) = checked(&[one, ("two/inner.rs", "use super::super::one::One;")]);
    assert!(!good && message.contains("two -> one"), "{message}");
}

#[test]
fn a_circle_by_way_of_the_root_is_refused_but_for_errors() {
    let root = ("lib.rs", "mod one;\nmod two;\npub use one::{One, OneError};\n");
    let one = ("one.rs", "use crate::two::Two;\n");
    let (good, message) = checked(&[root, one, ("two.rs", "use crate::One;\n")]);
    assert!(!good && message.contains("one -> two"), "{message}");
    assert_eq!(checked(&[root, one, ("two.rs", "use crate::OneError;\n")]), (true, String::new()));
}

#[test]
fn tests_and_comments_may_name_any_module() {
    let one = ("one.rs", "use crate::two::Two;\n");
    let inside = "#[cfg(test)]\nmod tests {\n    use crate::one::One;\n}\n";
    for back in ["// crate::one::f() calls it.", inside] {
        assert_eq!(checked(&[one, ("two.rs", back)]), (true, String::new()), "{back}");
    }
    let tests = ("two/tests.rs", "use crate::one::One;\n");
    assert_eq!(checked(&[one, ("two.rs", "#[cfg(test)]\nmod tests;\n"), tests]), (true, String::new()));
}

#[test]
fn a_destination_that_knows_the_source_is_refused() {
    let (good, message) =
        checked(&[("destination/take.rs", "use crate::source::Source;"), ("source.rs", "")]);
    assert!(!good && message.contains("destination must not know source"), "{message}");
}
