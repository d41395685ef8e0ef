//! Lua 5.4: scripts of our own in `lua/` go through the language and its library, and what they print is compared with
//! what a build without capture prints.

use std::ffi::OsStr;
use std::path::PathBuf;

use anyhow::{Context as _, Result, ensure};
use godwit_isa_packages::base::LUA;
use godwit_isa_packages::package::built;
use godwit_isa_packages::travel::{Every, SETS, changes, hopping, through_files, turning, whole};

use crate::support::{output, same, seed};

/// Those that end by themselves and say what they found.
const SCRIPTS: [&str; 5] = ["language.lua", "coroutines.lua", "strings.lua", "tables.lua", "library.lua"];

struct Bench {
    lua: PathBuf,
    plain: PathBuf,
    /// Where scripts run, with copies of them.
    place: tempfile::TempDir,
}

fn bench() -> Result<Bench> {
    let directory = built(LUA)?;
    let place = tempfile::tempdir()?;
    let scripts = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("lua");
    for script in SCRIPTS.iter().chain(&["sorted.lua"]) {
        std::fs::copy(scripts.join(script), place.path().join(script))
            .with_context(|| (*script).to_owned())?;
    }
    // Messages begin with the name that it was called by.
    let bench = Bench { lua: directory.join("src/lua"), plain: directory.join("plain/lua"), place };
    Ok(bench)
}

impl Bench {
    fn expected(&self, arguments: &[&str]) -> Result<std::process::Output> {
        let expected = output(whole(&self.plain, SETS[0])?.args(arguments), self.place.path())?;
        ensure!(
            expected.status.success() && !expected.stdout.is_empty(),
            "{arguments:?} of the plain build: {}",
            String::from_utf8_lossy(&expected.stderr)
        );
        Ok(expected)
    }
}

#[test]
#[ignore = "builds a package: make test-isa-full"]
fn scripts_say_the_same_on_both_sets_and_when_they_are_captured_in_place() -> Result<()> {
    let bench = bench()?;
    let mut random = fastrand::Rng::with_seed(seed());
    for script in SCRIPTS {
        let expected = bench.expected(&[script])?;
        for set in SETS {
            let found = output(whole(&bench.lua, set)?.arg(script), bench.place.path())?;
            same(&found, &expected, &format!("{script} on {set}"))?;
        }
        for most in [3, 50, 1000, 20_000] {
            let polls = random.u64(most / 2 + 1..=most);
            let found = output(turning(&bench.lua, SETS[0], polls)?.arg(script), bench.place.path())?;
            same(&found, &expected, &format!("{script}, captured every {polls} polls"))?;
        }
        let polls = random.u64(2_000..=20_000);
        let found = output(turning(&bench.lua, SETS[1], polls)?.arg(script), bench.place.path())?;
        same(&found, &expected, &format!("{script}, captured every {polls} polls on {}", SETS[1]))?;
    }
    Ok(())
}

#[test]
#[ignore = "builds a package: make test-isa-full"]
fn scripts_say_the_same_on_journeys() -> Result<()> {
    let bench = bench()?;
    let seed = seed();
    for (script, polls) in SCRIPTS.into_iter().zip([400_000, 30_000, 150_000, 200_000, 10_000]) {
        let expected = bench.expected(&[script])?;
        let every = Every::Polls(polls);
        let mut found = output(hopping(&bench.lua, every, seed)?.arg(script), bench.place.path())?;
        let changes = changes(&mut found)?;
        same(&found, &expected, &format!("{script} on a journey of {changes} changes"))?;
        ensure!(changes >= 1, "{script} did not move");
    }
    Ok(())
}

#[test]
#[ignore = "builds a package: make test-isa-full"]
fn sorts_inside_coroutines_move_at_any_time() -> Result<()> {
    let bench = bench()?;
    let arguments = ["sorted.lua", "400"];
    let expected = bench.expected(&arguments)?;
    let seed = seed();
    let mut found =
        output(hopping(&bench.lua, Every::Time("20ms"), seed)?.args(arguments), bench.place.path())?;
    let moved = changes(&mut found)?;
    same(&found, &expected, &format!("sorted.lua on a journey of {moved} changes"))?;
    ensure!(moved >= 3, "it moved {moved} times only");
    let mut random = fastrand::Rng::with_seed(seed);
    let words: Vec<&OsStr> = arguments.iter().map(OsStr::new).collect();
    let (found, legs) =
        through_files(&bench.lua, &words, bench.place.path(), || random.u64(200_000..=2_000_000))?;
    same(&found, &expected, &format!("sorted.lua through {legs} files"))?;
    ensure!(legs >= 2, "it was left {legs} times only");
    Ok(())
}
