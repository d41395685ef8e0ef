//! What the tests of the drivers share: the tool chain's home, and running what was built.

use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::sync::OnceLock;

/// The driver under test.
pub(crate) const CC: &str = env!("CARGO_BIN_EXE_godwit-cc");

/// The instruction sets, and how a program of each is run here.
pub(crate) const SETS: [(&str, &[&str]); 2] = [("x86_64", &[]), ("aarch64", &["qemu-aarch64-static"])];

/// The directory `isa` of the source tree.
pub(crate) fn isa() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..")
}

/// Builds what the driver needs, once, at the place where it looks for it.
pub(crate) fn home() -> &'static Path {
    static HOME: OnceLock<PathBuf> = OnceLock::new();
    HOME.get_or_init(|| {
        let home = Path::new(CC).with_file_name("../isa");
        succeed(Command::new(isa().join("build")).arg(&home));
        home
    })
}

/// The driver, in a directory of the test's own.
pub(crate) fn cc(directory: &Path) -> Command {
    home();
    let mut command = Command::new(CC);
    command.current_dir(directory);
    command
}

/// Runs a command that must succeed, and gives its output.
pub(crate) fn succeed(command: &mut Command) -> String {
    let output = run(command);
    assert!(
        output.status.success(),
        "{command:?} failed with {}:\n{}{}",
        output.status,
        text(&output.stdout),
        text(&output.stderr)
    );
    text(&output.stdout)
}

/// Runs a command that must fail, and gives what it said on standard error.
pub(crate) fn refuse(command: &mut Command) -> String {
    let output = run(command);
    assert!(!output.status.success(), "{command:?} succeeded:\n{}", text(&output.stdout));
    text(&output.stderr)
}

fn run(command: &mut Command) -> Output {
    command.output().unwrap_or_else(|error| panic!("{command:?} does not start: {error}"))
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

/// The executable `PROGRAM.SET`, ready to be run on this machine.
pub(crate) fn executable(program: &Path, set: &str, runner: &[&str]) -> Command {
    let mut name = program.as_os_str().to_owned();
    name.push(".");
    name.push(set);
    let words: Vec<&OsStr> = runner.iter().map(OsStr::new).chain([name.as_os_str()]).collect();
    let mut command = Command::new(words[0]);
    command.args(&words[1..]);
    command
}

/// Writes a file of a test.
pub(crate) fn write(directory: &Path, name: &str, contents: &str) -> PathBuf {
    let path = directory.join(name);
    std::fs::write(&path, contents).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    path
}

/// A directory that goes away with the test.
pub(crate) fn scratch() -> tempfile::TempDir {
    tempfile::Builder::new()
        .prefix("isa-libc-")
        .tempdir()
        .unwrap_or_else(|error| panic!("no scratch directory: {error}"))
}
