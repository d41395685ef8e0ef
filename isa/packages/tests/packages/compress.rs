//! gzip, bzip2 and zlib: their own tests, while each of their processes is captured again and again, in place or on a
//! journey through both sets.

use std::path::Path;
use std::process::Command;

use anyhow::{Context as _, Result, ensure};
use godwit_isa_packages::base::GZIP;
use godwit_isa_packages::package::{Recipe, built, command};
use godwit_isa_packages::tools::{program, run};

use crate::support::seed;

const BZIP2: Recipe = Recipe {
    package: "bzip2",
    name: "bzip2",
    commands: "make bzip2 CC=\"$CC\" AR=\"$AR\" RANLIB=\"$RANLIB\"",
};

const ZLIB: Recipe = Recipe {
    package: "zlib",
    name: "example",
    commands: "
        compiler=$CC
        CC=\"$compiler --plain\" ./configure --static
        make -j2 libz.a example.o minigzip.o CC=\"$compiler\"
        make example minigzip CC=\"$compiler\"",
};

/// A copy of a built package, to run its tests in.
fn copy(recipe: Recipe) -> Result<tempfile::TempDir> {
    let directory = built(recipe)?;
    let copy = tempfile::tempdir()?;
    run(Command::new("cp").arg("-a").arg(directory.join(".")).arg(copy.path()))?;
    Ok(copy)
}

/// Puts a script in a program's place that runs it on a journey, under its own name, which it tells.
fn on_journeys(program_path: &Path, polls: u64, seed: u64) -> Result<()> {
    let place = program_path.with_file_name("kept");
    std::fs::create_dir_all(&place).with_context(|| format!("{}", place.display()))?;
    let kept = place.join(program_path.file_name().context("a program has a name")?);
    for suffix in ["x86_64", "aarch64"] {
        let name = |path: &Path| format!("{}.{suffix}", path.display());
        std::fs::rename(name(program_path), name(&kept)).with_context(|| name(program_path))?;
    }
    let script = format!(
        "#!/bin/sh\nexec {} hop --quiet --every-polls {polls} --seed {seed} {} -- \"$@\"\n",
        program("godwit-state")?.display(),
        kept.display()
    );
    std::fs::write(program_path, script).with_context(|| format!("{}", program_path.display()))
}

/// Runs a package's tests with a variable that captures every process of it in place.
fn turning(directory: &Path, tests: &str, polls: u64) -> Result<String> {
    run(command(directory, tests)?.env("GODWIT_STATE_TURN", polls.to_string()))
        .with_context(|| format!("captured every {polls} polls"))
}

fn passed(said: &str, what: &str) -> Result<()> {
    let good = said.contains("# FAIL:  0") && said.contains("# ERROR: 0") && !said.contains("# PASS:  0");
    ensure!(good, "{what}: {said}");
    Ok(())
}

/// All of gzip's tests but one, which compresses 4 GiB: captured every few polls, it would take hours. The directory is not
/// the one in which it was configured.
const GZIP_TESTS: &str = "
    tests=$(sed -n '/^TESTS = /,/[^\\]$/p' tests/Makefile | sed 's/^TESTS = //; s/\\\\$//' | grep -v list-big)
    make -C tests check CC=\"$CC\" TESTS=\"$(echo $tests)\" abs_srcdir=\"$PWD/tests\"";

#[test]
#[ignore = "builds a package: make test-isa-full"]
fn gzip_passes_its_own_tests_while_it_is_captured() -> Result<()> {
    let copy = copy(GZIP)?;
    let seed = seed();
    let mut random = fastrand::Rng::with_seed(seed);
    for most in [200, 10_000] {
        let polls = random.u64(most / 2..=most);
        let what = format!("captured every {polls} polls");
        passed(&turning(copy.path(), GZIP_TESTS, polls)?, &what)?;
    }
    on_journeys(&copy.path().join("gzip"), 100_000, seed)?;
    passed(&run(&mut command(copy.path(), GZIP_TESTS)?)?, "on journeys")
}

#[test]
#[ignore = "builds a package: make test-isa-full"]
fn bzip2_passes_its_own_tests_while_it_is_captured() -> Result<()> {
    let copy = copy(BZIP2)?;
    let seed = seed();
    let mut random = fastrand::Rng::with_seed(seed);
    // What its makefile's target `test` does, which would make the program again.
    let tests = "
        for n in 1 2 3; do
            ./bzip2 -$n <sample$n.ref >sample$n.rb2
            ./bzip2 -d$([ $n = 3 ] && echo s) <sample$n.bz2 >sample$n.tst
            cmp sample$n.bz2 sample$n.rb2
            cmp sample$n.tst sample$n.ref
        done
        echo all the same";
    for most in [20, 2_000, 100_000] {
        let polls = random.u64(most / 2..=most);
        ensure!(turning(copy.path(), tests, polls)?.contains("all the same"), "every {polls} polls");
    }
    on_journeys(&copy.path().join("bzip2"), 3_000_000, seed)?;
    ensure!(run(&mut command(copy.path(), tests)?)?.contains("all the same"), "on journeys");
    Ok(())
}

#[test]
#[ignore = "builds a package: make test-isa-full"]
fn zlib_passes_its_own_tests_while_it_is_captured() -> Result<()> {
    let copy = copy(ZLIB)?;
    let seed = seed();
    let mut random = fastrand::Rng::with_seed(seed);
    // What its makefile's target `teststatic` does.
    let tests = "
        echo hello world | ./minigzip | ./minigzip -d
        cat *.c | ./minigzip -9 >all.gz
        ./minigzip -d <all.gz | cmp - <(cat *.c)
        ./example foo.gz
        echo all the same";
    let expected = run(&mut command(copy.path(), tests)?)?;
    ensure!(
        expected.contains("inflate(): hello, hello!") && expected.ends_with("all the same\n"),
        "{expected}"
    );
    for most in [5, 500, 50_000] {
        let polls = random.u64(most / 2 + 1..=most);
        let found = turning(copy.path(), tests, polls)?;
        ensure!(found == expected, "every {polls} polls: {found}");
    }
    on_journeys(&copy.path().join("minigzip"), 300_000, seed)?;
    on_journeys(&copy.path().join("example"), 3_000, seed)?;
    let found = run(&mut command(copy.path(), tests)?)?;
    ensure!(found == expected, "on journeys: {found}");
    Ok(())
}
