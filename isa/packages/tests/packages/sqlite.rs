//! SQLite: its `speedtest1` under captures, and a data base whose first half is written on one set and whose second half
//! is written on the other.

use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Result, ensure};
use godwit_isa_packages::base::SQLITE;
use godwit_isa_packages::package::built;
use godwit_isa_packages::tools::run;
use godwit_isa_packages::travel::{Every, SETS, changes, hopping, through_files, turning, whole};

use crate::support::{output, seed};

fn speedtest() -> Result<PathBuf> {
    Ok(built(SQLITE)?.join("speedtest1"))
}

/// What a run with `--verify` says of what it read, without the times that it took.
fn verified(output: &std::process::Output, what: &str) -> Result<String> {
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let hash = text.lines().find(|line| line.contains("Verification Hash"));
    ensure!(
        output.status.success() && hash.is_some(),
        "{what}: {}: {text}{}",
        output.status,
        String::from_utf8_lossy(&output.stderr)
    );
    Ok(hash.unwrap_or_default().to_owned())
}

/// Everything that the machine's own SQLite finds in a data base.
fn dumped(directory: &Path, name: &str) -> Result<String> {
    let sqlite = |what: &str| run(Command::new("sqlite3").arg(directory.join(name)).arg(what));
    let sound = sqlite("pragma integrity_check")?;
    ensure!(sound.trim() == "ok", "{name} is damaged: {sound}");
    sqlite(".dump")
}

#[test]
#[ignore = "builds a package: make test-isa-full"]
fn speedtest_finds_the_same_under_captures_and_on_journeys() -> Result<()> {
    let program = speedtest()?;
    let place = tempfile::tempdir()?;
    let seed = seed();
    let mut random = fastrand::Rng::with_seed(seed);
    let arguments = ["--size", "5", "--verify"];
    let expected = verified(&output(whole(&program, SETS[0])?.args(arguments), place.path())?, "whole")?;
    let other = output(whole(&program, SETS[1])?.args(arguments), place.path())?;
    ensure!(verified(&other, SETS[1])? == expected, "{} finds something else", SETS[1]);
    for most in [200, 5_000, 100_000] {
        let polls = random.u64(most / 2..=most);
        let what = format!("captured every {polls} polls");
        let found = output(turning(&program, SETS[0], polls)?.args(arguments), place.path())?;
        ensure!(verified(&found, &what)? == expected, "{what}: it finds something else");
    }
    let mut found = output(hopping(&program, Every::Time("10ms"), seed)?.args(arguments), place.path())?;
    let moved = changes(&mut found)?;
    ensure!(verified(&found, "on a journey")? == expected, "it finds something else after {moved} moves");
    ensure!(moved >= 3, "it moved {moved} times only");
    Ok(())
}

#[test]
#[ignore = "builds a package: make test-isa-full"]
fn a_data_base_is_written_half_on_one_set_and_half_on_the_other() -> Result<()> {
    let program = speedtest()?;
    let place = tempfile::tempdir()?;
    let seed = seed();
    let mut random = fastrand::Rng::with_seed(seed);
    let arguments = |name: &'static str| ["--size", "2", "--verify", name];
    let words = |name| arguments(name).map(OsStr::new);
    let expected = output(whole(&program, SETS[0])?.args(arguments("whole.db")), place.path())?;
    let hash = verified(&expected, "whole")?;
    let dump = dumped(place.path(), "whole.db")?;
    ensure!(dump.len() > 10_000, "there is little in it: {} bytes", dump.len());

    // By way of files: each process opens the data base and its journal again.
    let polls = || random.u64(400_000..=1_500_000);
    let (found, legs) = through_files(&program, &words("files.db"), place.path(), polls)?;
    ensure!(legs >= 2, "it was left {legs} times only");
    ensure!(verified(&found, "through files")? == hash, "it finds something else after {legs} files");
    ensure!(dumped(place.path(), "files.db")? == dump, "the data base is another after {legs} files");

    // In one process, which keeps its locks too.
    let mut found =
        output(hopping(&program, Every::Polls(2_000_000), seed)?.args(arguments("kept.db")), place.path())?;
    let moved = changes(&mut found)?;
    ensure!(moved >= 2, "it moved {moved} times only");
    ensure!(verified(&found, "on a journey")? == hash, "it finds something else after {moved} moves");
    ensure!(dumped(place.path(), "kept.db")? == dump, "the data base is another after {moved} moves");
    Ok(())
}
