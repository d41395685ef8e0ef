//! busybox: its own test suite says what it says of the same sources with the machine's own compiler and musl, in one piece
//! and while each process that a test starts is captured in place again and again.

use std::collections::BTreeMap;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context as _, Result, ensure};
use godwit_isa_packages::base::BUSYBOX;
use godwit_isa_packages::package::{Recipe, built};
use godwit_isa_packages::tools::run;
use tempfile::TempDir;

use crate::support::seed;

/// The same choices, by GCC with the C library that the machine has for it.
const NATIVE: Recipe = Recipe {
    package: "busybox",
    name: "native",
    commands: concat!(
        "here=/usr/include\nCC=\"musl-gcc -idirafter $here -idirafter $here/$(uname -m)-linux-gnu\" AR=ar LD=ld NM=nm\n",
        include_str!("../../../base/busybox/build")
    ),
};

/// Tests that are left out: those of `mount` mount file systems on the machine, those of `wget` ask servers of the internet.
const LEFT_OUT: [&str; 2] = ["mount", "wget"];

/// Left out as well where a script stands in the program's place: `mdev` is tested in a root of its own where that does not
/// run, `pidof` finds a process by its name, and `bc` counts to a million, which takes an hour with captures.
const LEFT_OUT_CAPTURED: [&str; 3] = ["bc", "mdev", "pidof"];

/// What is expected of the native build, so that a suite that ends early, or tests nothing, is seen.
const LEAST: usize = 700;

/// A copy of a build with this program in busybox's place, and without some tests.
fn suite(
    recipe: Recipe,
    left_out: &[&str],
    busybox: impl FnOnce(&Path) -> Result<PathBuf>,
) -> Result<TempDir> {
    let directory = built(recipe)?;
    let place = tempfile::tempdir()?;
    for name in ["testsuite", "scripts", ".config"] {
        run(Command::new("cp").arg("-a").arg(directory.join(name)).arg(place.path()))?;
    }
    for name in left_out {
        let tests = place.path().join("testsuite").join(name);
        run(Command::new("rm").arg("-rf").arg(tests.with_extension("tests")).arg(&tests))?;
    }
    let program = place.path().join("busybox");
    std::fs::copy(busybox(&directory)?, &program).context("the program cannot be copied")?;
    std::fs::set_permissions(&program, std::fs::Permissions::from_mode(0o755))?;
    Ok(place)
}

/// What the suite says of each of its tests; of several that have one name, how often it was said.
fn verdicts(place: &Path) -> Result<BTreeMap<String, usize>> {
    let output = Command::new("./runtest")
        .current_dir(place.join("testsuite"))
        .env_clear()
        .env("PATH", "/usr/sbin:/usr/bin:/sbin:/bin")
        .env("SHELL", "/bin/sh")
        .stdin(Stdio::null())
        .output()
        .context("cannot run the tests")?;
    let said = String::from_utf8_lossy(&output.stdout).into_owned();
    let mut verdicts = BTreeMap::new();
    for line in said.lines() {
        let is_verdict =
            ["PASS: ", "FAIL: ", "UNTESTED: ", "SKIPPED: "].iter().any(|word| line.starts_with(word));
        if is_verdict {
            *verdicts.entry(line.to_owned()).or_insert(0) += 1;
        }
    }
    Ok(verdicts)
}

fn passed(verdicts: &BTreeMap<String, usize>) -> usize {
    verdicts.iter().filter(|(line, _)| line.starts_with("PASS: ")).map(|(_, count)| count).sum()
}

fn agrees(place: &Path, expected: &BTreeMap<String, usize>, what: &str) -> Result<()> {
    let found = verdicts(place)?;
    let differs = |one: &BTreeMap<String, usize>, other: &BTreeMap<String, usize>| {
        let other = other.clone();
        let lines = one.iter().filter(move |(line, count)| other.get(*line) != Some(count));
        lines.map(|(line, _)| line.clone()).collect::<Vec<_>>()
    };
    ensure!(
        found == *expected,
        "{what}: {:?} instead of {:?}",
        differs(&found, expected),
        differs(expected, &found)
    );
    Ok(())
}

/// What the suite says of the native build, of which most has to be that a test passes.
fn expected(left_out: &[&str]) -> Result<BTreeMap<String, usize>> {
    let native = suite(NATIVE, left_out, |directory| Ok(directory.join("busybox_unstripped")))?;
    let expected = verdicts(native.path())?;
    let count = passed(&expected);
    ensure!(count >= LEAST, "{count} tests pass with the native build: {expected:?}");
    let others: Vec<_> = expected.keys().filter(|line| !line.starts_with("PASS: ")).collect();
    println!("{count} tests pass with the native build; others: {others:?}");
    Ok(expected)
}

fn executable(directory: &Path) -> PathBuf {
    directory.join(format!("busybox_unstripped.{}", std::env::consts::ARCH))
}

#[test]
#[ignore = "builds a package: make test-isa-full"]
fn its_own_tests_say_what_they_say_of_a_native_build() -> Result<()> {
    let whole = suite(BUSYBOX, &LEFT_OUT, |directory| Ok(executable(directory)))?;
    agrees(whole.path(), &expected(&LEFT_OUT)?, "in one piece")
}

#[test]
#[ignore = "builds a package: make test-isa-full"]
fn its_own_tests_say_the_same_while_applets_are_captured_in_place() -> Result<()> {
    let left_out = [&LEFT_OUT[..], &LEFT_OUT_CAPTURED[..]].concat();
    let polls = fastrand::Rng::with_seed(seed()).u64(20..=200);
    // Each process that is started by an applet's name, and what it forks.
    let script = tempfile::NamedTempFile::new()?;
    let program = executable(&built(BUSYBOX)?);
    let text = format!("GODWIT_ARGV0=$0 GODWIT_STATE_TURN={polls} exec {} \"$@\"", program.display());
    std::fs::write(&script, format!("#!/bin/sh\n{text}\n"))?;
    let turning = suite(BUSYBOX, &left_out, |_| Ok(script.path().to_owned()))?;
    agrees(turning.path(), &expected(&left_out)?, &format!("captured every {polls} polls"))
}
