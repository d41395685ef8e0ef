//! SQLite: its `speedtest1` and its shell under captures, and a database whose first half is written on one set and whose second half
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

/// Everything that the machine's own SQLite finds in a database.
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
fn a_database_is_written_half_on_one_set_and_half_on_the_other() -> Result<()> {
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

    // By way of files: each process opens the database and its journal again.
    let polls = || random.u64(400_000..=1_500_000);
    let (found, legs) = through_files(&program, &words("files.db"), place.path(), polls)?;
    ensure!(legs >= 2, "it was left {legs} times only");
    ensure!(verified(&found, "through files")? == hash, "it finds something else after {legs} files");
    ensure!(dumped(place.path(), "files.db")? == dump, "the database is another after {legs} files");

    // In one process, which keeps its locks too.
    let mut found =
        output(hopping(&program, Every::Polls(2_000_000), seed)?.args(arguments("kept.db")), place.path())?;
    let moved = changes(&mut found)?;
    ensure!(moved >= 2, "it moved {moved} times only");
    ensure!(verified(&found, "on a journey")? == hash, "it finds something else after {moved} moves");
    ensure!(dumped(place.path(), "kept.db")? == dump, "the database is another after {moved} moves");
    Ok(())
}

/// Statements for the shell: transactions, one of them taken back, text, numbers, an index, recursion, a join.
const STATEMENTS: &str = "
create table words(number integer primary key, text, value real);
begin;
with recursive n(i) as (values(1) union all select i + 1 from n where i < 3000)
insert into words select i, printf('%x of %d', i * 7919, i), i / 7.0 from n;
commit;
create index by_text on words(text);
begin; delete from words; rollback;
update words set value = value * 3 where number % 3 = 0;
select count(*), sum(number), round(sum(value), 6), min(text), max(text) from words;
.mode json
select a.number, b.text from words a join words b on b.number = a.number * 2 where a.number between 100 and 120;
.mode list
pragma integrity_check;
select group_concat(substr(text, 1, 2), '') from (select text from words order by text limit 500);
";

#[test]
#[ignore = "builds a package: make test-isa-full"]
fn the_shell_answers_the_same_under_captures_and_on_journeys() -> Result<()> {
    let program = built(SQLITE)?.join("sqlite3");
    let place = tempfile::tempdir()?;
    std::fs::write(place.path().join("statements"), STATEMENTS)?;
    let seed = seed();
    let mut random = fastrand::Rng::with_seed(seed);
    let run = |mut command: Command, name: &str| -> Result<std::process::Output> {
        let statements = std::fs::File::open(place.path().join("statements"))?;
        output(command.args(["-batch", name]).stdin(statements), place.path())
    };
    // What the machine's own shell says.
    let expected = run(Command::new("sqlite3"), "machine.db")?;
    let dump = dumped(place.path(), "machine.db")?;
    ensure!(expected.status.success() && expected.stdout.len() > 1_000, "{expected:?}");
    let same = |command: Command, name: &str| -> Result<std::process::Output> {
        let mut found = run(command, name)?;
        let said = std::mem::take(&mut found.stdout);
        ensure!(
            found.status.success() && said == expected.stdout,
            "{name}: {}: {}{}",
            found.status,
            String::from_utf8_lossy(&said),
            String::from_utf8_lossy(&found.stderr)
        );
        ensure!(dumped(place.path(), name)? == dump, "the database of {name} is another");
        Ok(found)
    };
    for set in SETS {
        same(whole(&program, set)?, &format!("{set}.db"))?;
    }
    for most in [200, 5_000, 100_000] {
        let polls = random.u64(most / 2..=most);
        same(turning(&program, SETS[0], polls)?, &format!("every-{polls}-polls.db"))?;
    }
    let moved = changes(&mut same(hopping(&program, Every::Polls(100_000), seed)?, "journey.db")?)?;
    ensure!(moved >= 3, "it moved {moved} times only");
    Ok(())
}
